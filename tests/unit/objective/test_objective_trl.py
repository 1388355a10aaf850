"""Losses, gradients and metrics against those of TRL's trainers on random log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch
from dsft.objective.preference import METRICS, preference
from dsft.spec.schema import Dpo
from tests.make import make_micro_batch

pytest.importorskip("trl", reason="trl, an oracle of these tests alone, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

PAIRS, LENGTH, PROMPT = 6, 20, 4


def random_batch() -> tuple[Tensor, MicroBatch]:
    """Log-probabilities (12, 20) of padded rows, chosen, rejected, …; float64, as TRL would have them without
    its float32."""
    generator = torch.Generator().manual_seed(5)
    num_tokens = torch.randint(1, LENGTH - PROMPT, (PAIRS, 2), generator=generator)
    position = torch.arange(LENGTH)
    answers = (position >= PROMPT) & (position < PROMPT + num_tokens.flatten()[:, None])
    targets = torch.where(answers, 3, NO_TARGET)
    logps = -3 * torch.rand(2 * PAIRS, LENGTH, generator=generator, dtype=torch.float64) * answers
    sums = logps.sum(1).view(PAIRS, 2)
    reference = sums + 2 * torch.randn(PAIRS, 2, generator=generator, dtype=torch.float64)
    pairs = Answers(torch.arange(PAIRS), num_tokens, reference)
    return logps, make_micro_batch(targets, targets, targets, answers=pairs)


def by_halves(rows: Tensor) -> Tensor:
    """TRL has all chosen answers first."""
    return torch.cat((rows[::2], rows[1::2]))


def trl_dpo(loss_types: list[str], weights: list[float], dpo: Dpo) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Its loss, the gradient by the log-probabilities in our order, its metrics."""
    from trl import DPOTrainer

    logps, batch = random_batch()
    logps.requires_grad_()
    mask = torch.cat((torch.zeros(2 * PAIRS, 1), (batch.tokens.targets != NO_TARGET).double()), dim=1).long()
    halves, flat = by_halves(mask), torch.zeros(2 * PAIRS, LENGTH)
    inputs = {
        "input_ids": torch.zeros_like(halves),
        "attention_mask": torch.ones_like(halves),
        "completion_mask": halves,
        "ref_chosen_logps": batch.answers.reference[:, 0],
        "ref_rejected_logps": batch.answers.reference[:, 1],
    }
    outputs = SimpleNamespace(
        log_probs=by_halves(logps), entropy=flat, mean_logits=flat, is_top1=flat.bool(), aux_loss=None
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator(), beta=dpo.beta,
        loss_types=loss_types, loss_weights=weights, label_smoothing=dpo.label_smoothing,
        f_divergence_type="reverse_kl", precompute_ref_logps=True, aux_loss_enabled=False, ld_alpha=None,
        use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
    )  # fmt: skip
    trainer_class: Any = DPOTrainer
    loss = trainer_class._compute_loss(trainer, lambda **kwargs: outputs, inputs, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, logps)
    gradient *= batch.tokens.targets != NO_TARGET  # it sums what its head leaves 0
    metrics = {name: values[0] for name, values in trainer._metrics["eval"].items() if name in METRICS}
    return loss.detach(), gradient, metrics


def accelerator() -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"), gather=lambda value: value, gather_for_metrics=lambda value: value
    )


def ours(dpo: Dpo) -> tuple[Tensor, Tensor, dict[str, float]]:
    logps, batch = random_batch()
    logps.requires_grad_()
    objective = preference(dpo)
    counts = {"examples": PAIRS, "chosen_tokens": int(batch.answers.num_targets[:, 0].sum())}
    sums = torch.stack(objective.sums(logps, batch))
    loss = sums.dot(torch.tensor(objective.scales(counts), dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient, objective.metrics(sums.detach().tolist(), counts)


@pytest.mark.parametrize("dpo", [
    Dpo(), Dpo(beta=0.7, sft_weight=0.4), Dpo(loss_type="robust", label_smoothing=0.2),
    Dpo(loss_type="hinge", beta=0.3), Dpo(loss_type="ipo", beta=0.2), Dpo(loss_type="apo_zero", beta=0.5),
], ids=lambda dpo: dpo.loss_type + ("+sft" if dpo.sft_weight else ""))  # fmt: skip
def test_dpo_trainer(dpo: Dpo) -> None:
    types, weights = [dpo.loss_type], [1.0]
    if dpo.sft_weight:
        types, weights = [*types, "sft"], [*weights, dpo.sft_weight]
    loss, gradient, metrics = trl_dpo(types, weights, dpo)
    found, found_gradient, found_metrics = ours(dpo)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-10, atol=1e-15)
    assert set(metrics) == set(METRICS)
    assert {name: found_metrics[name] for name in METRICS} == pytest.approx(metrics, rel=1e-6)


def sums_of(batch: MicroBatch, logps: Tensor) -> Tensor:
    assert batch.answers is not None
    return logps.sum(1).view(PAIRS, 2)


def trl_cpo(dpo: Dpo, loss_type: str, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from trl.experimental.cpo import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0, loss_type=loss_type, simpo_gamma=dpo.simpo_gamma, beta=dpo.beta,
        label_smoothing=dpo.label_smoothing, accelerator=accelerator(),
    )  # fmt: skip
    trainer_class: Any = CPOTrainer
    losses, chosen, rejected = trainer_class.cpo_loss(trainer, *scores.unbind(1))
    return losses.mean(), chosen, rejected


def test_label_smoothing() -> None:
    """TRL's DPOTrainer leaves it out of the sigmoid loss; its CPOTrainer has it, of the same formula."""
    logps, batch = random_batch()
    assert batch.answers is not None and batch.answers.reference is not None
    dpo = Dpo(label_smoothing=0.15, beta=0.4)
    expected, _, _ = trl_cpo(dpo, "sigmoid", sums_of(batch, logps) - batch.answers.reference)
    torch.testing.assert_close(ours(dpo)[0], expected, rtol=1e-12, atol=0)


def test_simpo() -> None:
    logps, batch = random_batch()
    dpo = Dpo(loss_type="simpo", beta=2.0, simpo_gamma=0.8)
    averages = sums_of(batch, logps) / batch.answers.num_targets
    expected, chosen, rejected = trl_cpo(dpo, "simpo", averages)
    loss, _, metrics = ours(dpo)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert metrics["rewards/chosen"] == pytest.approx(float(chosen.mean()))
    assert metrics["rewards/accuracies"] == pytest.approx(float((chosen > rejected).double().mean()))
    assert metrics["logps/rejected"] == pytest.approx(float(averages[:, 1].mean()))


def test_orpo() -> None:
    """TRL's odds-ratio loss, in float32; its next-token loss is over the prompt too, ours over the answer."""
    from trl.experimental.orpo import ORPOTrainer

    logps, batch = random_batch()
    dpo = Dpo(loss_type="orpo", beta=0.25)
    averages = sums_of(batch, logps) / batch.answers.num_targets
    trainer_class: Any = ORPOTrainer
    trainer = SimpleNamespace(beta=dpo.beta, accelerator=accelerator())
    losses, chosen, rejected, _, _ = trainer_class.odds_ratio_loss(trainer, *averages.unbind(1))
    loss, _, metrics = ours(dpo)
    answer = -sums_of(batch, logps)[:, 0].sum() / batch.answers.num_targets[:, 0].sum()
    assert float(loss) == pytest.approx(float(answer - losses.mean()), rel=1e-6)
    assert metrics["rewards/margins"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-5)
