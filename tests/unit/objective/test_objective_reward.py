"""The loss of a reward model: worked numbers, the same in every division, and TRL's."""

from collections import defaultdict
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch, Tokens
from dsft.objective.reward import METRICS, reward
from dsft.spec.schema import Reward

SCORES = torch.tensor([[2.0, 0.5], [-1.0, 0.25], [0.75, 0.75]], dtype=torch.float64)
"""Of the chosen and the rejected answer of three pairs."""


def micro_batch(scores: Tensor, margins: Tensor | None = None) -> tuple[Tensor, MicroBatch]:
    """Padded rows of 4 tokens, of which the third has the score of an answer. Other positions have values
    that must not count."""
    rows = scores.numel()
    values, targets = torch.full((rows, 4), 99.0), torch.full((rows, 4), NO_TARGET)
    values[:, 2], targets[:, 2] = scores.flatten().float(), 5
    ids = torch.ones(rows, 4, dtype=torch.int64)
    margin = torch.zeros(len(scores)).double() if margins is None else margins
    of_row = {"margin": margin}
    answers = Answers(torch.arange(len(scores)), torch.ones(scores.shape, dtype=torch.int64), values=of_row)
    return values, MicroBatch(Tokens(ids, ids, targets), answers=answers)


def sums(own: Reward, scores: Tensor = SCORES) -> list[float]:
    return [float(one) for one in reward(own).sums(*micro_batch(scores))]


def test_worked_numbers() -> None:
    def pair(margin: float) -> float:
        return log(1 + exp(-margin))

    loss, *metrics = sums(Reward())
    assert loss == pytest.approx(pair(1.5) + pair(-1.25) + pair(0))
    assert dict(zip(METRICS, metrics, strict=True)) == pytest.approx(
        {
            "rewards/chosen": 1.75,
            "rewards/rejected": 1.5,
            "rewards/margins": 0.25,
            "rewards/accuracies": 1.0,  # a tie is not won
            "mean_reward": 1.625,
        }
    )
    centered = sums(Reward(center_rewards_coefficient=0.5))[0]
    assert centered == pytest.approx(loss + 0.5 * (2.5**2 + 0.75**2 + 1.5**2))
    smoothed = sums(Reward(label_smoothing=0.25))[0]
    turned = pair(-1.5) + pair(1.25) + pair(0)
    assert smoothed == pytest.approx(0.75 * loss + 0.25 * turned)


def test_parts_add_up_to_the_whole() -> None:
    own = Reward(center_rewards_coefficient=0.3, label_smoothing=0.1)
    parts = [sums(own, SCORES[:1]), sums(own, SCORES[1:]), sums(own, SCORES[:0])]
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(sums(own))


@pytest.mark.filterwarnings("ignore")  # TRL's own
@pytest.mark.parametrize(
    ("coefficient", "margins"), [(0.0, None), (0.2, None), (0.0, [0.5, -1.5, 2.0]), (0.2, [0.0, 3.0, 0.25])]
)
def test_reward_trainer(coefficient: float, margins: list[float] | None) -> None:
    """What TRL's trainer makes of the same scores as one micro-batch."""
    trainer_class: Any = pytest.importorskip(
        "trl", reason="trl, an oracle of these tests alone"
    ).RewardTrainer
    logits = SCORES.t().reshape(-1, 1).clone().requires_grad_()  # all chosen answers, then all rejected ones

    def model(**inputs: Any) -> Any:
        return SimpleNamespace(logits=logits)

    accelerator = SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=accelerator, _total_train_tokens=0,
        args=SimpleNamespace(center_rewards_coefficient=coefficient or None),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    given = {"attention_mask": torch.ones(6, 4)}
    of_pairs = None if margins is None else torch.tensor(margins).double()
    theirs = trainer_class.compute_loss(
        trainer, model, given if of_pairs is None else {**given, "margin": of_pairs}
    )
    (gradient,) = torch.autograd.grad(theirs, logits)
    values, batch = micro_batch(SCORES, of_pairs)
    values.requires_grad_()
    loss, *metrics = reward(Reward(center_rewards_coefficient=coefficient)).sums(values, batch)
    assert float(loss) / 3 == pytest.approx(theirs.item(), rel=1e-12)
    (ours,) = torch.autograd.grad(loss / 3, values)
    torch.testing.assert_close(ours[:, 2].view(3, 2).t().double(), gradient.view(2, 3), rtol=1e-6, atol=0)
    assert ours[:, [0, 1, 3]].abs().max() == 0
    found = {name: float(one) / 3 for name, one in zip(METRICS, metrics, strict=True)}
    of_trl = {name: float(values[0]) for name, values in trainer._metrics["eval"].items()}
    assert found["rewards/margins"] == pytest.approx(of_trl["margin"])
    assert found["rewards/accuracies"] == pytest.approx(of_trl["accuracy"])
    assert found["mean_reward"] == pytest.approx(of_trl["mean_reward"])
