"""Compiled layers against the same layers as they are: log-probabilities and gradients, for several lengths.

Traced and differentiated as torch.compile does, run by torch's own kernels (aot_eager): what a C++ compiler
or a GPU adds is torch's part, and takes minutes here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET
from dsft.errors import SpecError
from dsft.model import build
from dsft.model.attention import SHAPES, attend_per_segment, check_can_compile, use
from dsft.model.attention_choice import VARLEN
from dsft.model.attention_shapes import SegmentShapes
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.spec.schema import Model
from tests import varlen_on_cpu
from tests.make import forward, logps_of, make_micro_batch
from tests.specs import llama

LLAMA = llama(16, 48, 2, 2, 1, max_position_embeddings=4096)
FACTS = TokenFacts(96, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def trained(compile: bool, checkpointing: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = Model(from_config=LLAMA, compile=compile, gradient_checkpointing=checkpointing)
    policy = build_model(model, FACTS, 3, torch.float32).train()
    found = []
    for rows, length in ((2, 9), (3, 17), (1, 30), (2, 12)):
        ids = torch.arange(rows * length).view(rows, length) % 96
        targets = ids.roll(-1, dims=1)
        targets[:, -1] = NO_TARGET
        found.append(logps_of(policy, ids, torch.arange(length).repeat(rows, 1), targets))
        found[-1].sum().backward()
    gradients = {name: p.grad for name, p in policy.named_trained().items() if p.grad is not None}
    return [logps.detach() for logps in found], gradients


@pytest.mark.long  # half a minute each; packed rows, whose attention breaks a graph sooner, are always tried
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_equal_eager_layers(monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    import torch._dynamo

    monkeypatch.setattr(build, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, found = trained(False, checkpointing), trained(True, checkpointing)
    for one, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert expected[1].keys() == found[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-6, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 4, "two layers and four lengths share their graphs"
    assert not torch._dynamo.utils.counters["graph_break"]


UNEQUAL = (9, 3, 17), (30,), (2, 5, 1, 8, 4), (200, 1), (300, 20), (600,)
EQUAL = (256, 256), (512, 512, 512), (256, 256, 256)  # through the kernel for rows of one length


def packed(compile: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Rows of different numbers and bounds of segments, attended in one call."""
    model = Model(from_config=LLAMA, compile=compile, gradient_checkpointing=True)
    policy = build_model(model, FACTS, 3, torch.float32).train()
    attend_per_segment(policy.causal_lm, "auto", 4096)
    use(policy.causal_lm, VARLEN)
    setattr(policy.causal_lm, SHAPES, SegmentShapes(4096, with_cudnn=True))
    found = []
    for lengths in (*UNEQUAL, *EQUAL):
        tokens = sum(lengths)
        ids = torch.arange(tokens)[None] % 96
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        batch = make_micro_batch(ids, positions, ids.roll(-1, dims=1), lengths).to(torch.device("cpu"))
        found.append(forward(policy, batch).logps)
        found[-1].sum().backward()
    gradients = {name: p.grad for name, p in policy.named_trained().items() if p.grad is not None}
    return [logps.detach() for logps in found], gradients


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_equal_eager_layers_on_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    monkeypatch.setattr(build, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = packed(False)
    before = len(varlen_on_cpu.calls)
    found = packed(True)
    calls = varlen_on_cpu.calls[before:]
    assert set(calls) == {1, 2, 3, 5}
    assert len(calls) == len(UNEQUAL) * LLAMA["num_hidden_layers"] * 2, "each layer twice, by checkpointing"
    for one, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert expected[1].keys() == found[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-6, atol=1e-5)
    print(torch._dynamo.utils.counters)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
def test_compile_is_refused_with_the_segment_loop() -> None:
    policy = build_model(Model(from_config=LLAMA, compile=True), FACTS, 3, torch.bfloat16)
    line = attend_per_segment(policy.causal_lm, "auto", 32)
    with pytest.raises(SpecError, match="compiled again for each row .*as FlashAttention needs a GPU"):
        check_can_compile(policy.causal_lm, line)
