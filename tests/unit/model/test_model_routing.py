"""The balance losses of mixtures of experts and what is counted of their routers, in one process."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.split import part_of
from dsft.engine.initialize import TrainingEngine
from dsft.errors import SpecError
from dsft.model.attention import attend_per_segment
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.model.routing import Routing, StepLoss, affinity_of, sequences_of
from dsft.spec.schema import Experts, Model
from tests.in_threads import Threads
from tests.make import forward, make_micro_batch, packed, padded
from tests.parity import plain
from tests.specs import dims

FACTS = TokenFacts(64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
SMALL = dims(16, 24, 2, 2, 2, num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3)
GROUPS = {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 8},
    "deepseek_v3": {
        "n_routed_experts": 8, "moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, **GROUPS,
    },
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 8, **GROUPS},
}  # fmt: skip
SIGMOID = ("deepseek_v3", "glm4_moe")
LOSSES = ("sequence", "global_batch")
TOP_K = SMALL["num_experts_per_tok"]
WEIGHT = 0.3
PROMPT, ENDS = [5, 9, 11, 30], ([12, 13], [40, 41, 42])
ANSWERS = [PROMPT + end for end in ENDS]
SHARED = make_micro_batch(
    torch.tensor([PROMPT + ENDS[0] + ENDS[1]]), torch.tensor([[*range(6), *range(4, 7)]]),
    torch.full((1, 9), -100), (6, 3), starts=(0, 4),
)  # fmt: skip
"""Two answers to a prompt, by themselves and as one row; without targets."""


def model_of(kind: str, checkpointing: bool = False, **experts: Any) -> Model:
    config = {"model_type": kind, **SMALL, **SHAPES[kind]}
    model = {"from_config": config, "gradient_checkpointing": checkpointing, "experts": experts}
    return Model.model_validate(model)


@functools.cache
def policy_of(kind: str, checkpointing: bool = False) -> Policy:
    """In float64, with a bias of the choice where there is one."""
    policy = build_model(model_of(kind, checkpointing), FACTS, 3, torch.float32)
    policy.causal_lm.double().set_experts_implementation("eager")  # the others have no float64
    for name, buffer in policy.causal_lm.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    policy.eval()
    return policy


def step_of(number: int = 5) -> list[plain.Row]:
    draw = torch.Generator().manual_seed(5)
    lengths = torch.randint(3, 12, (number,), generator=draw).tolist()
    return [(torch.randint(3, 64, (n,), generator=draw).tolist(), [True] * n) for n in lengths]


def answers() -> list[MicroBatch]:
    """Without targets."""
    batches = [padded([(ids, [True] * len(ids))]) for ids in ANSWERS]
    return [replace(b, tokens=b.tokens._replace(targets=b.tokens.targets * 0 - 100)) for b in batches]


def trained(
    policy: Policy,
    batches: Sequence[MicroBatch],
    loss: str,
    sequences: int,
    tokens: int,
    total: Callable[[Tensor], Tensor] = torch.clone,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of the next-token loss with the balance loss, and what is counted. total: adds
    up over ranks."""
    routing = policy.routing
    cpu = torch.device("cpu")
    batches = [batch.to(cpu) for batch in batches]
    frequencies = None
    if loss == "global_batch":
        with torch.no_grad(), routing.counting():
            for batch in batches:
                forward(policy, batch)
        frequencies = total(routing.pop(cpu))
    policy.zero_grad()
    with routing.training(StepLoss(loss, WEIGHT, sequences, frequencies)):  # type: ignore[arg-type]
        for batch in batches:
            scored = forward(policy, batch)
            (-scored.logps.double().sum() / tokens).backward()
    return gradients(policy.causal_lm), routing.pop(cpu)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).abs().max() / e.abs().max()) for n, e in expected.items())


def by_hand(
    kind: str, loss: str, rows: list[plain.Row], weight: float = WEIGHT
) -> tuple[dict[str, Tensor], float]:
    """Of the plain loop, one row at a time."""
    model = policy_of(kind).causal_lm
    losses = plain.Balanced(plain.next_token(), loss, weight, TOP_K, kind in SIGMOID)
    model.zero_grad()
    plain.backward(model, losses, [[rows]])
    return gradients(model), losses.found


ALWAYS = ("qwen3_moe-sequence", "mixtral-global_batch", "olmoe-sequence", "deepseek_v3-global_batch")
EACH = [
    pytest.param(kind, loss, id=f"{kind}-{loss}", marks=[pytest.mark.long] * (f"{kind}-{loss}" not in ALWAYS))
    for kind in SHAPES
    for loss in LOSSES
]


@pytest.mark.parametrize(("kind", "loss"), EACH)
def test_balance_gradient_equals_the_paper_for_any_split_of_the_step(kind: str, loss: str) -> None:
    rows, policy = step_of(), policy_of(kind)
    tokens = plain.count(rows)
    expected, balance = by_hand(kind, loss, rows)
    without, _ = by_hand(kind, loss, rows, weight=0.0)
    assert apart(without, expected) > 0.05, "the balance loss has a part in the gradient"
    bound = 1e-6 if kind in SIGMOID else 1e-12  # those compute their scores in float32
    cuts: dict[str, list[MicroBatch]] = {
        "one": [padded(rows)],
        "two, and one without rows": [padded(rows[:2]), padded(rows[2:]), padded([])],
        "each row": [padded([row]) for row in rows],
    }
    for name, batches in cuts.items():
        found, counted = trained(policy, batches, loss, len(rows), tokens)
        assert apart(found, expected) < bound, name
        assert float(counted[:, -1].sum()) == pytest.approx(balance, rel=1e-6), name
        routed = sum(len(ids) for ids, _ in rows) * TOP_K
        assert (counted[:, :-1].sum(1) == routed).all(), name


@pytest.mark.parametrize("loss", LOSSES)
def test_packed_rows_have_the_gradient_of_padded_ones(loss: str) -> None:
    rows, policy = step_of(), build_model(model_of("mixtral"), FACTS, 3, torch.float32)
    tokens = plain.count(rows)
    expected, balance = trained(policy, [padded(rows)], loss, len(rows), tokens)
    attend_per_segment(policy.causal_lm, "auto", 64, torch.device("cpu"))
    found, counted = trained(policy, [packed(rows[:3]), packed(rows[3:])], loss, len(rows), tokens)
    assert apart(found, expected) < 2e-6
    assert counted.flatten().tolist() == pytest.approx(balance.flatten().tolist(), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_shared_prompt_counts_for_both_answers(loss: str) -> None:
    policy = build_model(model_of("mixtral"), FACTS, 3, torch.float32)
    expected, balance = trained(policy, answers(), loss, 2, 1)
    attend_per_segment(policy.causal_lm, "auto", 64, torch.device("cpu"))
    found, counted = trained(policy, [SHARED], loss, 2, 1)
    assert apart(found, expected) < 2e-6
    assert counted.flatten().tolist() == pytest.approx(balance.flatten().tolist(), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_split_rows_have_gradients_and_counts_of_whole_rows(
    kind: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of padded, packed and preference rows in one step; layers are computed again in the backward pass."""
    rows, ranks = step_of(), Threads(2, monkeypatch)
    tokens, cpu = plain.count(rows), torch.device("cpu")
    batches = [batch.to(cpu) for batch in (padded(rows[:2]), packed(rows[2:]), SHARED, padded([]))]
    policy = build_model(model_of(kind), FACTS, 3, torch.float32)
    expected, balance = trained(policy, [padded(rows), *answers()], loss, 7, tokens)

    parts = [build_model(model_of(kind, checkpointing=True), FACTS, 3, torch.float32) for _ in range(2)]

    def part(number: int) -> tuple[dict[str, Tensor], Tensor]:
        policy = parts[number].train()
        attend_per_segment(policy.causal_lm, "auto", 64, cpu, ranks)
        policy.routing.exchange = ranks
        mine = [part_of(batch, number, ranks.size) for batch in batches]
        return trained(policy, mine, loss, 7, tokens, ranks.sum)

    found = ranks.run(part)
    assert apart({n: sum(g[n] for g, _ in found) for n in expected}, expected) < 4e-6  # type: ignore[misc]
    counted = torch.stack([counts for _, counts in found]).sum(0)
    assert counted.flatten().tolist() == pytest.approx(balance.flatten().tolist(), rel=1e-6)
    assert not torch.equal(found[0][1], found[1][1]), "each rank counts its own tokens"


@pytest.mark.parametrize("loss", LOSSES)
def test_balance_gradient_equals_finite_differences(loss: str) -> None:
    rows, policy, step = step_of(), policy_of("qwen3_moe"), 2e-4
    alone = 10**15  # tokens, so that the next-token loss is 0
    found, _ = trained(policy, [padded(rows)], loss, len(rows), alone)
    named = dict(policy.causal_lm.named_parameters())
    draw = torch.Generator().manual_seed(1)
    way = {n: 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in named.items()}
    values, chosen = [], []
    for sign in (1, -2):
        with torch.no_grad():
            for name, parameter in named.items():
                parameter += sign * step * way[name]
        _, counted = trained(policy, [padded(rows)], loss, len(rows), alone)
        values.append(WEIGHT * float(counted[:, -1].sum()))
        chosen.append(counted[:, :-1])
    with torch.no_grad():
        for name, parameter in named.items():
            parameter += step * way[name]
    assert (chosen[0] == chosen[1]).all(), "no token goes to another expert within the step"
    slope = sum(float((found[name] * way[name]).sum()) for name in found)
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("loss", LOSSES)
def test_checkpointed_layers_count_once_and_use_their_own_micro_batch(loss: str) -> None:
    """Two micro-batches are on their way at once, as in a pipeline."""
    rows, found = step_of(), []
    batches = [padded(rows[:3]), padded(rows[3:])]
    for checkpointing in (False, True):
        policy = policy_of("deepseek_v3", checkpointing)
        policy.train()
        frequencies = None
        if loss == "global_batch":
            _, counted = trained(policy, batches, "sequence", len(rows), 1)
            frequencies = counted
        policy.zero_grad()
        with policy.routing.training(StepLoss(loss, WEIGHT, len(rows), frequencies)):  # type: ignore[arg-type]
            scored = [forward(policy, batch).logps for batch in batches]
            for logps in scored:
                (-logps.double().sum()).backward()
        found.append((gradients(policy.causal_lm), policy.routing.pop(torch.device("cpu"))))
    (expected, balance), (again, counted) = found
    assert (counted == balance).all() and apart(again, expected) < 1e-12


def test_rows_without_padding_are_counted_where_the_routers_are() -> None:
    """As on a GPU, where nothing else of such a micro-batch says which device that is."""
    found = sequences_of(torch.Size((2, 3)), None, None, torch.device("meta"))
    assert {found.number.device.type, found.weights.device.type} == {"meta"}


def test_nothing_is_counted_outside_of_a_step() -> None:
    policy, batch = policy_of("mixtral"), padded(step_of())
    policy.zero_grad()
    (-forward(policy, batch).logps.double().sum()).backward()
    expected = gradients(policy.causal_lm)
    assert not policy.routing.pop(torch.device("cpu")).any()
    policy.zero_grad()
    with policy.routing.training(None):
        (-forward(policy, batch).logps.double().sum()).backward()
    assert apart(gradients(policy.causal_lm), expected) == 0.0, "watching changes no bit"
    assert policy.routing.pop(torch.device("cpu"))[:, :-1].sum() > 0


def test_frozen_router_passes_the_balance_gradient_on() -> None:
    policy = build_model(model_of("mixtral", freeze_router=True), FACTS, 3, torch.float32)
    frozen = [name for name, p in policy.causal_lm.named_parameters() if not p.requires_grad]
    assert frozen == [f"model.layers.{n}.mlp.gate.weight" for n in range(2)]
    found, _ = trained(policy, [padded(step_of())], "sequence", 5, 1)
    assert not set(frozen) & set(found) and found["model.embed_tokens.weight"].any()


def test_expert_options_are_refused_for_a_dense_model() -> None:
    llama = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for experts, message in (
        ({"freeze_router": True}, "model.experts.freeze_router: a llama model has no experts"),
        (
            {"balance": "sequence", "balance_weight": 1.0},
            "model.experts.balance: a llama model has no experts",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            model = Model.model_validate({"from_config": llama, "experts": experts})
            build_model(model, FACTS, 3, torch.float32)


class Odd(nn.Module):
    """A router whose weights are the roots of a softmax."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 16))

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits = hidden @ self.weight.T
        weights, chosen = logits.softmax(-1).sqrt().topk(2, dim=-1)
        return logits, weights, chosen


def test_router_affinities_are_probed() -> None:
    assert affinity_of(Odd().to("meta"), 16) is None
    assert affinity_of(nn.Linear(16, 4, device="meta"), 16) is None


def test_the_gradient_has_the_scale_of_the_engine_s_loss() -> None:
    """The weight, times the ranks that DeepSpeed divides by and the loss scale of fp16; 0 in a probe."""
    routing = policy_of("mixtral").routing
    engine: Any = SimpleNamespace(
        _routing=Routing(routing.layers, {}, Experts(balance="sequence", balance_weight=0.25)),
        _shards=3,
        _world=SimpleNamespace(device=torch.device("cpu")),
        _deepspeed=SimpleNamespace(scaler=SimpleNamespace(loss_scale=1024.0)),
    )
    for sequences, scale in ((5, 0.25 * 3 * 1024), (0, 0.0)):
        with TrainingEngine._routed(engine, [], {"sequences": sequences}):
            assert engine._routing._loss == StepLoss("sequence", scale, sequences)
    assert engine._routing._loss is None
