"""The loss of a classifier: worked numbers, the same in every division and form, and transformers'."""

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch, Segments, Tokens
from dsft.objective.classify import classification

SCORES = torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0], [0.0, 0.0, 3.0], [2.0, 1.0, 0.0]])
LABELS = torch.tensor([0, 0, 2, 1])


def micro_batch(rows: slice = slice(None), *, packed: bool = False) -> tuple[Tensor, MicroBatch]:
    """Rows of 2, 3, 4 and 5 tokens, whose last one has the scores. Other positions have values that must not
    count."""
    scores, labels = SCORES[rows], LABELS[rows]
    lengths = list(range(2, 6))[rows]
    values, targets = torch.full((len(labels), 5, 3), 99.0), torch.full((len(labels), 5), NO_TARGET)
    for row, length in enumerate(lengths):
        values[row, length - 1], targets[row, length - 1] = scores[row], 7
    if not lengths:
        values, targets = torch.full((1, 2, 3), 99.0), torch.full((1, 2), NO_TARGET)
    elif packed:
        values, targets = (
            torch.cat([one[:length] for one, length in zip(each, lengths, strict=True)])[None]
            for each in (values, targets)
        )
    answers = Answers(torch.arange(len(labels)), torch.ones(len(labels), 1).long(), values={"label": labels})
    segments = Segments(tuple(lengths) or (2,)) if packed else None
    ids = torch.ones_like(targets)
    return values, MicroBatch(Tokens(ids, ids, targets), segments, answers).to(torch.device("cpu"))


def sums(*rows: slice, **how: Any) -> list[float]:
    parts = [classification().sums(*micro_batch(one, **how)) for one in rows or [slice(None)]]
    return [float(torch.stack(column).sum()) for column in zip(*parts, strict=True)]


def test_worked_numbers() -> None:
    loss, right = sums()
    expected = [
        log(1 + exp(-1) + exp(-2)), log(1 + exp(1.5) + exp(-0.5)), log(1 + 2 * exp(-3)),
        log(1 + exp(1) + exp(-1)),
    ]  # fmt: skip
    assert loss == pytest.approx(sum(expected), rel=1e-12)
    assert right == 2


@pytest.mark.parametrize("packed", [False, True])
def test_parts_add_up_to_the_whole(packed: bool) -> None:
    parts = slice(0, 1), slice(1, 4), slice(4, 4)
    assert sums(*parts, packed=packed) == pytest.approx(sums())


def test_a_shorter_packed_micro_batch_keeps_the_rows_that_have_their_last_token() -> None:
    values, whole = micro_batch(packed=True)
    cut = whole.first(11).to(torch.device("cpu"))  # of 2 + 3 + 4 + 5 tokens
    found = [float(one) for one in classification().sums(values[:, :11], cut)]
    assert found == pytest.approx(sums(slice(0, 3)))


def test_gradient_and_loss_of_transformers() -> None:
    values, batch = micro_batch()
    values.requires_grad_()
    loss = classification().sums(values, batch)[0] / len(LABELS)
    (ours,) = torch.autograd.grad(loss, values)
    logits = SCORES.clone().requires_grad_()
    config = LlamaConfig(num_labels=3, problem_type="single_label_classification")
    theirs = ForSequenceClassificationLoss(LABELS, logits, config)
    (gradient,) = torch.autograd.grad(theirs, logits)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    last = torch.arange(4), torch.arange(1, 5)
    torch.testing.assert_close(ours[last], gradient, rtol=1e-5, atol=1e-7)
    ours[last] = 0.0
    assert not ours.any()
