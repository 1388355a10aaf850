"""Preference losses: by hand, against TRL's trainers, and against the published formulas of each paper."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers
from dsft.objective.answers import answer_logps
from dsft.objective.preference import LOSSES, METRICS, preference, rewards
from dsft.spec.schema import Dpo
from tests.make import make_micro_batch

LN2 = math.log(2)
CPU = torch.device("cpu")


def pairs_of(num_tokens: list[list[int]], reference: list[list[float]] | None = None) -> Answers:
    known = None if reference is None else torch.tensor(reference, dtype=torch.float64).view(-1, 2)
    return Answers(torch.arange(len(num_tokens)), torch.tensor(num_tokens).view(-1, 2), known)


def found(dpo: Dpo, logps: list[list[float]], pairs: Answers) -> dict[str, float]:
    """loss, nll_loss and metrics of a micro-batch that is a whole step."""
    objective = preference(dpo)
    assert objective.of_answers is not None
    sums = objective.of_answers(torch.tensor(logps, dtype=torch.float64), pairs)
    assert all(total.dtype == torch.float64 for total in sums)
    counts = {"examples": len(logps), "chosen_tokens": int(pairs.num_targets[:, 0].sum())}
    values = [float(total) for total in sums]
    loss = math.fsum(s * value for s, value in zip(objective.scales(counts), values, strict=True))
    return {"loss": loss} | objective.metrics(values, counts)


# One pair. log π(c) = -10, log π(r) = -12, the reference's -11 and -11.5; 4 and 5 tokens. So ρ(c) = 1,
# ρ(r) = -0.5, and with β = 0.5 the rewards are 0.5 and -0.25, the margin h = 0.75.
ONE, NUMBERS = [[-10.0, -12.0]], pairs_of([[4, 5]], [[-11.0, -11.5]])
E75 = math.exp(-0.75)  # 0.47237
WORKED = {
    "sigmoid": (Dpo(beta=0.5), 0.386871),  # log(1 + e^-0.75)
    "cdpo": (Dpo(beta=0.5, label_smoothing=0.1), 0.461871),  # 0.9 × 0.386871 + 0.1 × (0.386871 + 0.75)
    "robust": (Dpo(beta=0.5, loss_type="robust", label_smoothing=0.1), 0.293121),
    # (0.9 × 0.386871 - 0.1 × 1.136871) ÷ 0.8
    "hinge": (Dpo(beta=0.5, loss_type="hinge"), 0.25),
    "apo_zero": (Dpo(beta=0.5, loss_type="apo_zero"), 0.815364),  # σ(-0.5) + σ(-0.25) = 0.377541 + 0.437823
    "ipo": (Dpo(beta=0.5, loss_type="ipo"), 0.4225),  # (1 ÷ 4 + 0.5 ÷ 5 - 1)² = 0.65²
    "simpo": (Dpo(beta=2.0, loss_type="simpo", simpo_gamma=0.5), 1.103186),
    # log(1 + e^-(2 × (-2.5 + 2.4) - 0.5)) = log(1 + e^0.7)
}


@pytest.mark.parametrize("name", WORKED)
def test_values_by_hand(name: str) -> None:
    dpo, expected = WORKED[name]
    assert found(dpo, ONE, NUMBERS)["loss"] == pytest.approx(expected, abs=1e-6)


def test_orpo_by_hand() -> None:
    """p(c) = e^-0.5 = 0.606531, p(r) = e^-1 = 0.367879: odds 1.541494 and 0.581977, their ratio 2.648724,
    -log σ(log 2.648724) = log(1 + 1 ÷ 2.648724) = 0.320300; β = 0.2.
    The chosen answer has 4 tokens of -0.5."""
    figures = found(Dpo(loss_type="orpo", beta=0.2), [[-2.0, -3.0]], pairs_of([[4, 3]]))
    assert figures["loss"] == pytest.approx(0.5 + 0.2 * 0.320300, abs=1e-6)
    assert figures["nll_loss"] == 0.5
    assert figures["rewards/chosen"] == pytest.approx(0.2 * -0.5)


def test_the_sft_term_by_hand() -> None:
    """Two pairs, with chosen answers of 4 and 6 tokens: the mean is over the 10 tokens, not the pairs."""
    pairs = pairs_of([[4, 5], [6, 2]], [[-11.0, -11.5], [-20.0, -9.0]])
    logps = [[-10.0, -12.0], [-20.0, -9.0]]
    figures = found(Dpo(beta=0.5, sft_weight=0.3), logps, pairs)
    assert figures["nll_loss"] == 3.0
    assert figures["loss"] == pytest.approx((0.386871 + LN2) / 2 + 0.3 * 3.0, abs=1e-6)
    assert "nll_loss" not in found(Dpo(beta=0.5), logps, pairs)


def test_the_metrics_by_hand() -> None:
    pairs = pairs_of([[4, 5], [6, 2]], [[-11.0, -11.5], [-20.0, -9.0]])
    figures = found(Dpo(beta=0.5), [[-10.0, -12.0], [-21.0, -9.0]], pairs)
    assert {name: figures[name] for name in METRICS} == {
        "rewards/chosen": (0.5 - 0.5) / 2, "rewards/rejected": -0.25 / 2, "rewards/margins": (0.75 - 0.5) / 2,
        "rewards/accuracies": 0.5, "logps/chosen": -15.5, "logps/rejected": -10.5,
    }  # fmt: skip


@pytest.mark.parametrize("loss_type", LOSSES)
def test_margin_within_rounding_is_a_tie(loss_type: Any) -> None:
    """Of answers of 100 and 80 tokens, one float32 rounding of the sums apart from the reference, or for the
    losses without one from each other; then ten."""
    pairs = pairs_of([[100, 80]], [[-800.0, -640.0]])
    one = 2.0**-23 * 800
    for apart, won in ((one, 0.0), (-one, 0.0), (10 * one, 1.0), (-10 * one, 0.0)):
        assert found(Dpo(loss_type=loss_type), [[-800.0 + apart, -640.0]], pairs)["rewards/accuracies"] == won


def test_rounding_grows_with_tokens() -> None:
    pairs = pairs_of([[1000, 1000]], [[-0.01, -0.02]])
    for apart, won in ((1e-4, 0.0), (1e-3, 1.0)):
        assert found(Dpo(), [[-0.01 + apart, -0.02]], pairs)["rewards/accuracies"] == won


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "hinge", "apo_zero", "ipo"])
def test_equal_policy_and_reference(loss_type: Any) -> None:
    expected = {"sigmoid": LN2, "robust": LN2, "hinge": 1.0, "apo_zero": 1.0, "ipo": 25.0}
    logps = [[-4321.125, -3999.75], [-1.5, -2.5]]
    figures = found(Dpo(loss_type=loss_type), logps, pairs_of([[900, 800], [3, 4]], logps))
    assert figures["loss"] == pytest.approx(expected[loss_type], rel=1e-12)
    assert figures["rewards/margins"] == figures["rewards/chosen"] == figures["rewards/accuracies"] == 0.0


EXTREME = [[-1e5, -1e-7], [-1e-7, -1e5], [0.0, 0.0], [-0.0, -3.0], [-3.0, 0.0]]


@pytest.mark.parametrize("loss_type", LOSSES)
def test_extreme_values_keep_loss_and_gradient_finite(loss_type: Any) -> None:
    """Answers as good as certain, and as good as impossible."""
    dpo = Dpo(loss_type=loss_type, beta=1.0, sft_weight=0.0 if loss_type == "orpo" else 0.5)
    logps = torch.tensor(EXTREME, dtype=torch.float64, requires_grad=True)
    objective = preference(dpo)
    assert objective.of_answers is not None
    sums = objective.of_answers(logps, pairs_of([[1, 1]] * len(EXTREME), [[0.0, 0.0]] * len(EXTREME)))
    (gradient,) = torch.autograd.grad(sums[0] + sums[1], logps)
    assert torch.stack(sums).isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_micro_batch_without_pairs_keeps_the_graph(loss_type: Any) -> None:
    empty = torch.full((1, 2), NO_TARGET)
    for lengths in ((2,), None):
        logps = torch.full((1, 2), -1.0, requires_grad=True)
        batch = make_micro_batch(empty, empty, empty, lengths, answers=pairs_of([], [])).to(CPU)
        sums = torch.stack(preference(Dpo(loss_type=loss_type)).sums(logps, batch))
        (gradient,) = torch.autograd.grad(sums.sum(), logps)
        assert not sums.any() and not gradient.any()


def test_packed_and_padded_answers_are_equal() -> None:
    torch.manual_seed(0)
    lengths = (5, 3, 4, 6)
    targets = [torch.full((n,), 7) for n in lengths]
    for one in targets:
        one[0] = one[-1] = NO_TARGET
    logps = [torch.randn(n) for n in lengths]
    expected = torch.stack([one[1:-1].double().sum() for one in logps]).view(2, 2)

    pairs = pairs_of([[3, 1], [2, 4]])
    row, marked = torch.cat(logps)[None], torch.cat(targets)[None]
    packed = make_micro_batch(marked, marked, marked, lengths, answers=pairs).to(CPU)
    assert torch.equal(answer_logps(row, packed), expected)

    padded_logps = torch.nn.utils.rnn.pad_sequence(logps, batch_first=True, padding_value=-9.0)
    padded_targets = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)
    padded = make_micro_batch(padded_targets, padded_targets, padded_targets, answers=pairs)
    torch.testing.assert_close(answer_logps(padded_logps, padded), expected, rtol=0, atol=1e-15)

    cut = make_micro_batch(marked[:, :10], marked[:, :10], marked[:, :10], (5, 3, 2), answers=pairs).to(CPU)
    assert torch.equal(answer_logps(row[:, :10], cut), expected[:1])


def test_kernels_do_not_depend_on_the_number_of_answers() -> None:
    """Each answer's sum and gradient depend on its own values alone, whatever is beside it in the row."""
    torch.manual_seed(0)
    taken = []
    for number in (2, 40):
        lengths = tuple(torch.randint(1, 200, (number,)).tolist())
        targets = torch.full((1, sum(lengths)), 7)
        values = torch.randn(targets.shape)
        values[0, : lengths[0]] = math.nan
        logps = values.requires_grad_()
        pairs = pairs_of([[1, 1]] * (number // 2))
        batch = make_micro_batch(targets, targets, targets, lengths, answers=pairs).to(CPU)
        with torch.profiler.profile(acc_events=True) as profiled:  # else torch 2.11 warns of lost cycles
            answers = answer_logps(logps, batch)
            weights = torch.arange(1.0, 1.0 + number, dtype=torch.float64)
            (gradient,) = torch.autograd.grad(answers.flatten() @ weights, logps)
        taken.append(Counter(event.name for event in profiled.events() if event.name.startswith("aten::")))
        parts = [part.double() for part in torch.split(logps.detach()[0], lengths)]
        expected = torch.stack([part.sum() for part in parts]).view(-1, 2)
        torch.testing.assert_close(answers.detach(), expected, rtol=1e-14, atol=1e-14, equal_nan=True)
        assert answers.isnan().sum() == 1
        by_hand = torch.cat([weight.float().expand(n) for weight, n in zip(weights, lengths, strict=True)])
        assert torch.equal(gradient[0], by_hand)
    assert taken[0] == taken[1]


def test_missing_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the reference"):
        found(Dpo(), ONE, pairs_of([[4, 5]]))


# Against others.

CASES: Mapping[str, Dpo] = {
    **{name: dpo for name, (dpo, _) in WORKED.items()},
    "orpo": Dpo(loss_type="orpo", beta=0.3),
    "default": Dpo(),
}


def random_pairs() -> tuple[Tensor, Answers]:
    """Twelve pairs of 1 to 40 tokens at about -1.5 nats each, and a reference that is near."""
    generator = torch.Generator().manual_seed(3)
    num_tokens = torch.randint(1, 41, (12, 2), generator=generator)
    logps = -num_tokens * (0.5 + 2 * torch.rand(12, 2, generator=generator, dtype=torch.float64))
    reference = logps + torch.randn(12, 2, generator=generator, dtype=torch.float64) * 3
    return logps, Answers(torch.arange(12), num_tokens, reference.clamp(max=-0.01))


def published(dpo: Dpo, logps: Tensor, pairs: Answers) -> Tensor:
    """Return the mean preference loss as the reference implementations write it: eric-mitchell's
    `preference_loss` (sigmoid, cDPO, IPO on averages), princeton-nlp's simpo_loss, xfactlab's
    odds_ratio_loss, the APO and rDPO papers' equations."""
    assert pairs.reference is not None
    average = (
        1 / pairs.num_targets.double() if dpo.loss_type in ("ipo", "simpo", "orpo") else torch.ones(12, 2)
    )
    (pc, pr), (rc, rr) = (logps * average).unbind(1), (pairs.reference * average).unbind(1)
    beta, smoothing = dpo.beta, dpo.label_smoothing
    logits = (pc - pr) - (rc - rr)
    if dpo.loss_type == "sigmoid":
        losses = -F.logsigmoid(beta * logits) * (1 - smoothing) - F.logsigmoid(-beta * logits) * smoothing
    elif dpo.loss_type == "robust":
        clean, flipped = -F.logsigmoid(beta * logits), -F.logsigmoid(-beta * logits)
        losses = ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)
    elif dpo.loss_type == "ipo":
        losses = (logits - 1 / (2 * beta)) ** 2
    elif dpo.loss_type == "hinge":
        losses = torch.relu(1 - beta * logits)
    elif dpo.loss_type == "apo_zero":
        losses = 1 - torch.sigmoid(beta * (pc - rc)) + torch.sigmoid(beta * (pr - rr))
    elif dpo.loss_type == "simpo":
        losses = -F.logsigmoid(beta * (pc - pr - dpo.simpo_gamma / beta))
    else:
        log_odds = (pc - pr) - (torch.log1p(-torch.exp(pc)) - torch.log1p(-torch.exp(pr)))
        losses = -beta * F.logsigmoid(log_odds)
    return losses.mean()


@pytest.mark.parametrize("name", CASES)
def test_loss_equals_the_published_formula(name: str) -> None:
    """In value and in gradient."""
    logps, pairs = random_pairs()
    mine, theirs = (logps.clone().requires_grad_() for _ in range(2))
    of_answers = preference(CASES[name]).of_answers
    assert of_answers is not None
    loss, expected = of_answers(mine, pairs)[0] / 12, published(CASES[name], theirs, pairs)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(loss, mine)[0], torch.autograd.grad(expected, theirs)[0], rtol=1e-11, atol=0
    )


def test_rewards_of_each_pair_are_what_the_metrics_sum() -> None:
    logps, pairs = random_pairs()
    for dpo in CASES.values():
        of_answers = preference(dpo).of_answers
        assert of_answers is not None
        sums = of_answers(logps, pairs)[-len(METRICS) :]
        of_each = rewards(logps, pairs, dpo)
        torch.testing.assert_close(torch.stack(sums[:2]), of_each.sum(0))
        assert int(sums[3]) == int((of_each[:, 0] > of_each[:, 1]).sum())
