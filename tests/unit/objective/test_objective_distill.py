"""The loss of distillation: against TRL's on whole vocabularies, by hand, and with fewer tokens."""

import math

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.model.given_tokens import GivenTokens, TopTokens, whole_values
from dsft.objective.distill import distillation
from dsft.reference.teacher import with_teacher
from dsft.spec.schema import Distill
from tests.make import make_micro_batch

ROWS, LENGTH, VOCABULARY = 2, 6, 40
KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
IS_TARGET = torch.arange(LENGTH).repeat(ROWS, 1) % 3 > 0


def logits_of(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(ROWS, LENGTH, VOCABULARY, generator=draw)


def own(kind: str, top_k: int, temperature: float = 1.0, weight: float = 1.0) -> Distill:
    beta = KINDS[kind] if kind == "jsd" else 0.5
    return Distill(loss_type=kind, top_k=top_k, temperature=temperature, weight=weight, beta=beta)  # type: ignore[arg-type]


def losses(asked: Distill, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """The mean divergence and the mean negative log-likelihood of logits (B, T, V)."""
    targets = torch.where(IS_TARGET, torch.arange(LENGTH), NO_TARGET)
    batch = make_micro_batch(targets, targets, targets)
    top = TopTokens(temperature=asked.temperature, top_k=asked.top_k)
    rows, *_ = top.values(
        teacher[IS_TARGET].clone(), torch.zeros(int(IS_TARGET.sum())), torch.float32, torch.empty(0, 0)
    )
    batch = with_teacher(batch, rows)
    chosen = torch.cat((targets.flatten()[:, None], batch.tokens.others.flatten(0, 1).long()), 1)
    softmax = GivenTokens(temperature=asked.temperature)
    values = whole_values(student.flatten(0, 1), chosen, softmax).view(ROWS, LENGTH, -1)
    divergence, likelihood = distillation(asked).sums(values, batch)
    count = IS_TARGET.sum()
    return divergence / count, likelihood / count


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_whole_vocabulary_equals_trl(kind: str, temperature: float) -> None:
    pytest.importorskip("trl", reason="trl, an oracle of these tests alone, is not installed")
    from trl.experimental.gkd import GKDTrainer

    teacher, student = logits_of(1), logits_of(2).requires_grad_()
    found, _ = losses(own(kind, VOCABULARY, temperature), teacher, student)
    labels = torch.where(IS_TARGET, 0, NO_TARGET)
    exact = student.detach().double().requires_grad_()
    expected = GKDTrainer.generalized_jsd_loss(exact, teacher.double(), labels, KINDS[kind], temperature)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(one, by) for one, by in ((found, student), (expected, exact)))
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()  # of float32 log-probabilities


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_give_at_most_the_divergence_and_reach_it(kind: str) -> None:
    """Tokens that are merged into the rest never raise it; of one token and the rest it is that of a coin."""
    teacher, student = logits_of(1), logits_of(2)
    found = [float(losses(own(kind, k), teacher, student)[0]) for k in (1, 2, 5, 20, VOCABULARY)]
    assert all(0 < fewer < more for fewer, more in zip(found, found[1:], strict=False)), found
    p, q = (one.double().softmax(-1)[IS_TARGET] for one in (teacher, student))
    most = p.argmax(-1, keepdim=True)
    coins = [torch.cat((one.gather(1, most), 1 - one.gather(1, most)), 1) for one in (p, q)]
    if kind == "reverse_kl":
        coins.reverse()
    first, second = coins
    if kind == "jsd":
        m = 0.3 * first + 0.7 * second
        expected = 0.3 * (first * (first / m).log()).sum(1) + 0.7 * (second * (second / m).log()).sum(1)
    else:
        expected = (first * (first / second).log()).sum(1)
    assert found[0] == pytest.approx(float(expected.mean()), rel=1e-6)


def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient() -> None:
    for kind in KINDS:
        for top_k in (3, VOCABULARY):
            student = logits_of(1).requires_grad_()
            found, _ = losses(own(kind, top_k), logits_of(1), student)
            assert abs(float(found.detach())) < 1e-6
            (gradient,) = torch.autograd.grad(found, student)
            assert bool(gradient.isfinite().all()) and gradient.abs().max() < 1e-6


def test_terms_are_weighted_and_counted() -> None:
    teacher, student = logits_of(1), logits_of(2)
    objective = distillation(own("forward_kl", 5, weight=0.25))
    assert objective.scales({"tokens": 10}) == (0.025, 0.075) and not objective.uniform
    divergence, likelihood = losses(own("forward_kl", 5, 2.0), teacher, student)
    metrics = objective.metrics([float(divergence) * 8, float(likelihood) * 8], {"tokens": 8})
    assert metrics == {
        "kd_loss": pytest.approx(float(divergence)),
        "nll_loss": pytest.approx(float(likelihood)),
    }
    plain = student.log_softmax(-1)[IS_TARGET]
    targets = torch.arange(LENGTH).repeat(ROWS, 1)[IS_TARGET]
    expected = -plain.gather(1, targets[:, None]).mean()
    assert float(likelihood) == pytest.approx(float(expected), rel=1e-6), "at temperature 1"


def test_values_of_no_teacher_are_refused() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    batch: MicroBatch = make_micro_batch(ids, ids, ids)
    with pytest.raises(ValueError, match="needs the teacher's"):
        distillation(Distill()).sums(torch.zeros(1, 3), batch)


def test_a_token_that_the_student_finds_impossible_is_not_hidden() -> None:
    """The forward divergence is then infinite, which the run reports."""
    teacher, student = logits_of(1), logits_of(2)
    student[..., 5] = -math.inf
    assert losses(own("forward_kl", VOCABULARY), teacher, student)[0].isinf()
