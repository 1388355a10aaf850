"""The loss of KTO: by hand, and against TRL's trainer where one micro-batch is the whole step."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch
from dsft.objective.kto import kto
from dsft.spec.schema import Kto
from dsft.tasks.kto import divergence, with_kl
from tests.make import make_micro_batch

ROWS, LENGTH, PROMPT = 6, 12, 4
LABELS = torch.tensor([True, False, False, True, True, False])


def made(seed: int) -> tuple[Tensor, MicroBatch]:
    """Log-probabilities (6, 12) float64 of padded rows, and their micro-batch with a reference."""
    draw = torch.Generator().manual_seed(seed)
    num_tokens = torch.randint(1, LENGTH - PROMPT, (ROWS, 1), generator=draw)
    position = torch.arange(LENGTH)
    is_target = (position >= PROMPT) & (position < PROMPT + num_tokens)
    targets = torch.where(is_target, 3, NO_TARGET)
    logps = -3 * torch.rand(ROWS, LENGTH, generator=draw, dtype=torch.float64) * is_target
    apart = 2 * torch.randn(ROWS, 1, generator=draw, dtype=torch.float64) - seed
    reference = logps.sum(1, keepdim=True) + apart
    answers = Answers(torch.arange(ROWS), num_tokens, reference, values={"label": LABELS.long()})
    return logps, make_micro_batch(targets, targets, targets, answers=answers)


class Policy:
    """An engine that returns given log-probabilities."""

    def __init__(self, logps: Tensor) -> None:
        self.logps = logps

    def score(self, micro_batches: Any, output: Any) -> tuple[Tensor, ...]:
        return tuple(output(self.logps, batch) for batch in micro_batches)


def world(factor: float = 1.0, sequence_rank: int = 0) -> Any:
    """factor: how many ranks have the same answers."""
    return SimpleNamespace(
        device=torch.device("cpu"), sequence_rank=sequence_rank, sum=lambda mine: factor * mine
    )


def ours(own: Kto) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The loss, its gradient by the log-probabilities, and the metrics of a step of one micro-batch."""
    logps, batch = made(0)
    others, pairs = made(1)
    if own.has_baseline:
        batch = with_kl(batch, divergence([pairs], ROWS, Policy(others), world()))  # type: ignore[arg-type]
    logps.requires_grad_()
    objective, good = kto(own), int(LABELS.sum())
    counts = {"examples": ROWS, "desirable": good, "undesirable": ROWS - good}
    sums = torch.stack(objective.sums(logps, batch))
    loss = sums.dot(torch.tensor(objective.scales(counts), dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient, objective.metrics(sums.detach().tolist(), counts)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_values_by_hand(loss_type: Any) -> None:
    """β = 0.5, z = 0.4. A desirable answer with ρ = 1 and weight 2: 2 (1 - σ(0.5 × 0.6)), without z 2 (1 -
    σ(0.5)); an undesirable one with ρ = -0.6 and weight 3: 3 (1 - σ(0.5 × 1.0)), without z 3 σ(-0.3)."""
    own = Kto(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0, loss_type=loss_type)
    targets = torch.full((2, 1), 3)
    reference = torch.tensor([[-3.0], [-1.4]], dtype=torch.float64)
    kl = torch.tensor(0.4, dtype=torch.float64)
    answers = Answers(
        torch.arange(2), torch.ones(2, 1), reference, values={"label": torch.tensor([1, 0])}, kl=kl
    )
    objective = kto(own)
    batch = make_micro_batch(targets, targets, targets, answers=answers)
    sums = objective.sums(torch.tensor([[-2.0], [-2.0]], dtype=torch.float64), batch)
    x, y = (0.3, 0.5) if loss_type == "kto" else (0.5, 0.3)
    sigma = [1 / (1 + math.exp(-value)) for value in (x, y)]
    assert float(sums[0]) == pytest.approx(2 * (1 - sigma[0]) + 3 * (1 - sigma[1]), rel=1e-12)
    found = objective.metrics(
        [float(total) for total in sums], {"examples": 2, "desirable": 1, "undesirable": 1}
    )
    expected = {
        "rewards/chosen": 0.5, "rewards/rejected": -0.3, "rewards/margins": 0.8, "logps/chosen": -2.0,
        "logps/rejected": -2.0, **({"kl": 0.4} if loss_type == "kto" else {}),
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_class_without_answers_has_no_metrics() -> None:
    counts = {"examples": 2, "desirable": 2, "undesirable": 0}
    found = kto(Kto()).metrics([1.0, 3.0, 0.0, 3.0, 0.0, -8.0, 0.0, 0.2], counts)
    assert found == {"rewards/chosen": 1.5, "logps/chosen": -4.0, "kl": 0.1}


def test_divergence_is_a_mean_over_all_ranks_and_at_least_0() -> None:
    logps, batch = made(1)
    assert batch.answers is not None and batch.answers.reference is not None
    mean = float((logps.sum(1, keepdim=True) - batch.answers.reference).mean())
    assert mean > 0.1

    def found(logps: Tensor, batches: list[MicroBatch], count: int, at: Any) -> float:
        return float(divergence(batches, count, Policy(logps), at))  # type: ignore[arg-type]

    assert found(logps, [batch], ROWS, world()) == pytest.approx(mean, rel=1e-12)
    assert found(logps, [batch, batch], 4 * ROWS, world(2)) == pytest.approx(mean, rel=1e-12)
    assert found(logps, [batch], ROWS, world(sequence_rank=1)) == 0.0, "another rank of the group reports it"
    assert found(logps - 9, [batch], ROWS, world()) == 0.0


def test_values_that_are_missing_are_named() -> None:
    logps, batch = made(0)
    with pytest.raises(ValueError, match="kto needs"):
        kto(Kto()).sums(logps, batch)


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("own", [
    Kto(),
    Kto(beta=0.4, desirable_weight=1.3, undesirable_weight=0.6),
    Kto(loss_type="apo_zero_unpaired", beta=0.7, undesirable_weight=2.0),
], ids=["kto", "weights", "apo_zero_unpaired"])  # fmt: skip
def test_kto_trainer(own: Kto) -> None:
    loss, gradient, metrics = trl_kto(own)
    found, found_gradient, found_metrics = ours(own)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-15)
    assert found_metrics == pytest.approx({name: metrics[name] for name in found_metrics}, rel=1e-6)
    assert (metrics["kl"] > 0.1) == own.has_baseline


def trl_kto(own: Kto) -> tuple[Tensor, Tensor, dict[str, float]]:
    """What TRL's trainer makes of the same log-probabilities as one micro-batch."""
    trainer_class: Any = pytest.importorskip("trl", reason="trl, an oracle of these tests alone").KTOTrainer
    (logps, batch), (others, pairs) = made(0), made(1)
    assert batch.answers is not None and pairs.answers is not None
    logps.requires_grad_()
    inputs: dict[str, Any] = {"label": LABELS}
    for prefix, one in (("", batch), ("KL_", pairs)):
        mask = torch.cat((torch.zeros(ROWS, 1), (one.tokens.targets != NO_TARGET).double()), dim=1).long()
        inputs[f"{prefix}completion_mask"] = mask
        inputs[f"{prefix}input_ids"] = torch.full_like(mask, len(prefix))
        inputs[f"{prefix}attention_mask"] = torch.ones_like(mask)
        answers = one.answers
        inputs[f"ref_{prefix}logps"] = answers.reference[:, 0]
    flat = torch.zeros(ROWS, LENGTH)

    def model(input_ids: Tensor, **more: Any) -> Any:
        log_probs = others if bool(input_ids.any()) else logps
        return SimpleNamespace(log_probs=log_probs, entropy=flat, mean_logits=flat, aux_loss=None)

    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, calculate_KL=own.has_baseline,
        precompute_ref_logps=True, aux_loss_enabled=False, loss_type=own.loss_type, beta=own.beta,
        desirable_weight=own.desirable_weight, undesirable_weight=own.undesirable_weight,
        _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
    )  # fmt: skip
    trainer._compute_kl_logps = lambda *given: trainer_class._compute_kl_logps(trainer, *given)
    loss = trainer_class._compute_loss(trainer, model, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, logps)
    gradient *= batch.tokens.targets != NO_TARGET  # it sums what its head leaves 0
    return loss.detach(), gradient, {name: values[0] for name, values in trainer._metrics["eval"].items()}
