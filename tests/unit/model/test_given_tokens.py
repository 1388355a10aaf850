"""Log-probabilities of several tokens of each target: of given ones and of the most probable ones, with the
rest of the vocabulary, against autograd over whole logits in float64."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsft.data.steps.batch import NO_TARGET
from dsft.model.given_tokens import GivenTokens, TopTokens, whole_values
from dsft.model.head import Head, Top
from dsft.model.softmax import Shaping

VOCABULARY, WIDTH, SHAPE = 50, 16, (2, 7)
CASES = [
    (count, temperature, smoothing, shaping, chunk)
    for (count, temperature), (smoothing, shaping), chunk in product(
        [(1, 1.0), (5, 2.5), (VOCABULARY, 1.0), (VOCABULARY, 0.7)],
        [(0.0, Shaping()), (0.1, Shaping(0.5, 3.0))],
        [None, 4_000],  # bytes: a few rows and a part of the vocabulary
    )
]


def expected(logits: Tensor, targets: Tensor, others: Tensor, temperature: float, smoothing: float) -> Tensor:
    plain, cooled = logits.log_softmax(-1), (logits / temperature).log_softmax(-1)
    first = (1 - smoothing) * plain.gather(1, targets[:, None]) + smoothing * plain.mean(1, keepdim=True)
    is_rest = torch.ones_like(logits, dtype=torch.bool).scatter(1, others, False)
    rest = torch.stack([row[kept].logsumexp(0) for row, kept in zip(cooled, is_rest, strict=True)])
    return torch.cat((first, cooled.gather(1, others), rest[:, None]), 1)


def made(dtype: torch.dtype, count: int, spread: float = 1.0) -> tuple[Head, Tensor, Tensor, Tensor]:
    """A head, hidden states (B, T, H), targets (B, T) of which one is none, other tokens (B, T, count)."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(WIDTH, VOCABULARY).to(dtype)
    layer.__class__ = Head
    with torch.no_grad():
        layer.weight.mul_(spread)
    targets = torch.randint(VOCABULARY, SHAPE)
    targets[0, 3] = NO_TARGET
    others = torch.stack([torch.randperm(VOCABULARY)[:count] for _ in range(targets.numel())])
    return layer, torch.randn(*SHAPE, WIDTH, dtype=dtype), targets, others.view(*SHAPE, count).int()


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("count, temperature, smoothing, shaping, chunk", CASES)
def test_values_and_gradients(
    count: int, temperature: float, smoothing: float, shaping: Shaping, chunk: Any, dtype: Any, bound: float
) -> None:
    head, hidden, targets, others = made(dtype, count, spread=10.0)
    head.shaping, head.label_smoothing, head.temperature, head.chunk_bytes = (
        shaping, smoothing, temperature, chunk,
    )  # fmt: skip
    inputs = [hidden, head.weight, head.bias]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    hidden.requires_grad_()
    found, is_target = head(hidden, targets, None, others), targets != NO_TARGET
    assert found.shape == (*SHAPE, count + 2) and not found[~is_target].any()

    logits = shaping(exact[0] @ exact[1].T + exact[2])[is_target]
    values = expected(logits, targets[is_target], others[is_target].long(), temperature, smoothing)
    values[:, -1].nan_to_num_(neginf=0.0)
    assert bool(found[is_target][:, -1].isneginf().all()) == (count == VOCABULARY)
    finite = found[is_target].nan_to_num(neginf=0.0)
    torch.testing.assert_close(finite.double(), values, rtol=bound, atol=10 * bound)

    upstream = torch.randn(values.shape, dtype=torch.float64)
    upstream[:, -1] *= count < VOCABULARY
    torch.autograd.backward(found[is_target], upstream.to(dtype))
    ours = [one.grad for one in inputs]
    for grad, theirs in zip(ours, torch.autograd.grad((values * upstream).sum(), exact), strict=True):
        assert grad is not None and (grad - theirs).abs().max() <= bound * theirs.abs().max()


def test_a_rest_of_little_probability_keeps_its_digits() -> None:
    """1 minus the sum over the tokens would be 0 in float32."""
    logits = torch.full((1, VOCABULARY), -20.0)
    logits[0, 7] = 20.0
    tokens = torch.tensor([[7, 7]])
    values, *_ = GivenTokens().values(logits.clone(), tokens, torch.float32, torch.empty(0, VOCABULARY))
    rest = math.log(VOCABULARY - 1) - 40.0
    assert values.tolist() == [[pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6), pytest.approx(rest)]]
    far = logits * 10  # whose exp is 0 in float32
    values, *_ = GivenTokens().values(far, tokens, torch.float32, torch.empty(0, VOCABULARY))
    assert values[0, 2].item() == pytest.approx(math.log(VOCABULARY - 1) - 400.0)


@pytest.mark.parametrize("count", [3, VOCABULARY])
@pytest.mark.parametrize("chunk", [None, 4_000])
def test_the_most_probable_tokens(count: int, chunk: int | None) -> None:
    head, hidden, targets, _ = made(torch.float32, 1, spread=5.0)
    head.top, head.temperature, head.chunk_bytes = Top(count, VOCABULARY), 1.5, chunk
    with torch.no_grad():
        found = head(hidden, targets)[targets != NO_TARGET]
        probabilities = (head(hidden)[targets != NO_TARGET] / 1.5).double().log_softmax(-1)
    top = probabilities.topk(count)
    assert torch.equal(found[:, :count].long(), top.indices)
    torch.testing.assert_close(found[:, count:-1].double(), top.values, rtol=1e-5, atol=1e-5)
    rest = 1 - top.values.exp().sum(1)
    torch.testing.assert_close(found[:, -1].exp().double(), rest.clamp(min=0), rtol=1e-4, atol=1e-6)
    assert bool(found[:, -1].isneginf().all()) == (count == VOCABULARY)


def test_tokens_that_the_student_lacks_belong_to_the_rest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 9.0]])
    values, *_ = TopTokens(top_k=2, candidates=3).values(
        logits.clone(), torch.zeros(1), torch.float32, torch.empty(0, 4)
    )
    probabilities = logits[0].log_softmax(0)
    rest = torch.logaddexp(probabilities[0], probabilities[3])
    torch.testing.assert_close(values[0], torch.tensor([1.0, 2.0, *probabilities[[1, 2]], rest]))


def test_whole_logits_give_the_same_values_and_gradients() -> None:
    """Of a model whose own output layer is used."""
    head, hidden, targets, others = made(torch.float32, 4, spread=5.0)
    found = head(hidden, targets, None, others)
    logits = head(hidden).detach().requires_grad_()
    chosen = torch.cat((targets.flatten()[:, None], others.flatten(0, 1).long()), 1)
    values = whole_values(logits.flatten(0, 1), chosen, GivenTokens())
    torch.testing.assert_close(values.view_as(found), found, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(found)
    (whole,) = torch.autograd.grad((values.view_as(found) * upstream).sum(), logits)
    (by_weight,) = torch.autograd.grad((found * upstream).sum(), head.weight)
    torch.testing.assert_close(whole.flatten(0, 1).T @ hidden.flatten(0, 1), by_weight, rtol=1e-4, atol=1e-4)
