"""Muon beside torch's own, and the settings that it refuses. tests/parity has it against a plain loop."""

from typing import Any

import pytest
import torch
from torch import nn

from dsft.engine.base_optimizer import StateShard
from dsft.engine.muon import Muon, orthogonal
from dsft.engine.optimizer import build_optimizer
from dsft.spec.combinations import combinations
from tests.specs import minimal_spec

SHAPES = {
    "model.embed_tokens.weight": (50, 8), "model.layers.0.q_proj.weight": (16, 8),
    "model.layers.1.experts.down_proj": (3, 8, 24), "model.layers.1.conv1d.weight": (8, 1, 4),
    "model.layers.1.norm.weight": (8,), "lm_head.weight": (50, 8),
}  # fmt: skip
MATRICES = ["model.layers.0.q_proj.weight", "model.layers.1.experts.down_proj"]


def spec(**optim: Any) -> Any:
    given = {"name": "muon", "learning_rate": 1e-2, "weight_decay": 0.1} | optim
    return minimal_spec(optim=given, train={"precision": "bf16"})


def test_matrices_of_layers_are_torchs_muon_and_the_rest_its_adamw() -> None:
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    ours = build_optimizer(named, spec(), offloaded=False)
    assert isinstance(ours, Muon)
    homes = [named[name] for name in MATRICES]
    ours.set_parts({n: StateShard(0, p.numel(), p, 0, SHAPES[n]) for n, p in named.items()}, homes, None)
    assert [*ours.matrices] == homes
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    copies = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    matrices = [copies[MATRICES[0]], *(nn.Parameter(one.clone()) for one in start[MATRICES[1]])]
    rest = [copies[name] for name in SHAPES if name not in MATRICES]
    groups = [
        {"params": [p for p in rest if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(3):
        for name, parameter in named.items():
            parameter.grad = torch.randn_like(parameter)
            copies[name].grad = parameter.grad.clone()
        for one, gradient in zip(matrices[1:], named[MATRICES[1]].grad, strict=True):  # type: ignore[arg-type]
            one.grad = gradient.clone()
        ours.step()
        muon.step()
        adamw.step()
    theirs = {**copies, MATRICES[1]: torch.stack([one.detach() for one in matrices[1:]])}
    for name, parameter in named.items():
        change, expected = parameter.detach() - start[name], theirs[name].detach() - start[name]
        bound = 5e-2 if name in MATRICES else 1e-6  # torch's products in bf16 are in another order
        assert (change - expected).norm() <= bound * expected.norm(), name
        kinds = {"momentum_buffer"} if name in MATRICES else {"exp_avg", "exp_avg_sq", "step"}
        assert set(ours.state[parameter]) == kinds


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (3, 8, 40)])
def test_singular_values_are_near_1_and_vectors_unchanged(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    found = orthogonal(matrix, torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = u.mT @ found @ v.mT
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3
    assert (values - torch.diag_embed(diagonal)).abs().max() < 1e-9


@pytest.mark.parametrize(("sections", "message"), [
    ({"model": {"name_or_path": "a/b", "lora": {"rank": 4}}}, "is for whole matrices"),
    ({"parallel": {"zero_stage": 2, "offload_optimizer": {"device": "cpu"}}}, "is not supported with"),
    ({"optim": {"momentum": 0.9}}, "has no effect with muon; use muon_momentum"),
    ({"optim": {"name": "adamw", "muon_momentum": 0.9}}, "has no effect with adamw; set name to muon"),
])  # fmt: skip
def test_settings_that_cannot_be(sections: dict[str, Any], message: str) -> None:
    optim = {"name": "muon", "learning_rate": 1e-2} | sections.pop("optim", {})
    found = combinations(minimal_spec(optim=optim, **sections))
    assert message in " ".join(finding.message for finding in found)
