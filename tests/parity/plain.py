"""The yardstick: a plain PyTorch loop over rows, one at a time, with no code of the project in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Row = tuple[list[int], list[bool]]  # token ids; whether each one is trained on
Step = list[list[list[Row]]]  # [micro-batch][data-parallel rank] -> rows


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Adapted(nn.Module):
    """A linear with a low-rank adapter, from the papers: W·x + s·B·A·x (https://arxiv.org/abs/2106.09685);
    with a magnitude m, each output of it times m ÷ ‖its row of W + s·B·A‖, which counts as a constant
    (https://arxiv.org/abs/2402.09353, 4.3)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, has_magnitude: bool) -> None:
        super().__init__()
        self.weight, self.scale = linear.weight, scale
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        self.lora_magnitude_vector = nn.Parameter(torch.ones(linear.out_features)) if has_magnitude else None

    def forward(self, x: Tensor) -> Tensor:
        product = self.lora_B.weight @ self.lora_A.weight
        weight = self.weight + self.scale * product
        if self.lora_magnitude_vector is not None:
            weight = weight * (self.lora_magnitude_vector / weight.detach().norm(dim=1))[:, None]
        return F.linear(x, weight)


def adapt(model: nn.Module, names: Iterable[str], rank: int, scale: float, has_magnitude: bool) -> None:
    """Adapters in the linears of these last names, and everything else frozen."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child, rank, scale, has_magnitude))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rows_of(step: Step) -> list[Row]:
    return [row for micro_batch in step for rank in micro_batch for row in rank]


def count(rows: Iterable[Row]) -> int:
    """Targets: a row's first token is predicted by nothing."""
    return sum(sum(trained[1:]) for _, trained in rows)


def summed_loss(model: nn.Module, row: Row, smoothing: float = 0.0) -> Tensor:
    ids, trained = row
    labels = torch.tensor([i if is_target else -100 for i, is_target in zip(ids, trained, strict=True)])
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum", label_smoothing=smoothing)


def train(
    model: nn.Module,
    steps: Sequence[Step],
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    skipped: Sequence[int] = (),
    smoothing: float = 0.0,
) -> Outcome:
    """`max_norm` 0: no clipping. The steps whose number is in `skipped` are not applied. `smoothing`: of the
    labels."""
    outcome, names = Outcome(), trained(model)
    for number, step in enumerate(steps):
        outcome.losses.append(backward(model, step, smoothing))
        outcome.norms.append(float(nn.utils.clip_grad_norm_(names.values(), max_norm or float("inf"))))
        if number not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: p.detach().clone() for name, p in names.items()}
    return outcome


def backward(model: nn.Module, step: Step, smoothing: float = 0.0) -> float:
    """The step's loss, and its gradient in `.grad`. As in any data-parallel loop the loss is multiplied by
    the number of ranks and the gradient divided by it: with three, float32 rounds otherwise by up to
    1.6e-6, which is also what it is off from float64 either way."""
    rows, ranks, total = rows_of(step), len(step[0]), 0.0
    for row in rows:
        loss = summed_loss(model, row, smoothing)
        (loss * (ranks / count(rows))).backward()
        total += loss.item()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= ranks
    return total / count(rows)


def gradient(
    model: nn.Module, weights: dict[str, Tensor], step: Step, smoothing: float = 0.0
) -> dict[str, Tensor]:
    """At `weights`, before any clipping."""
    model.load_state_dict(weights, strict=False)
    model.zero_grad()
    backward(model, step, smoothing)
    return {name: p.grad.clone() for name, p in trained(model).items() if p.grad is not None}


@torch.no_grad()
def evaluate(model: nn.Module, step: Step) -> float:
    return sum(summed_loss(model, row).item() for row in rows_of(step)) / count(rows_of(step))


def decayed_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    matrices = [p for p in trained(model).values() if p.ndim > 1]
    vectors = [p for p in trained(model).values() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def make_steps(seed: int, micro_batches: Sequence[int], ranks: int, vocabulary: int) -> list[Step]:
    """Rows of 3 to 20 tokens, 0 to 3 per micro-batch and rank, of which about 60 in 100 tokens are targets.
    In the first micro-batch of each step one rank has rows without a target, in the last one no row at
    all."""
    draw = random.Random(seed)

    def row(share: float) -> Row:
        length = draw.randint(3, 20)
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        return ids, [draw.random() < share for _ in ids]

    def rows(micro_batch: int, last: int, rank: int) -> list[Row]:
        if ranks > 1 and last and micro_batch == last and rank == ranks - 1:
            return []
        is_silent = rank == 0 and micro_batch == 0 and (ranks > 1 or last > 0)
        return [row(0.0 if is_silent else 0.6) for _ in range(draw.randint(2, 3))]

    return [
        [[rows(micro_batch, number - 1, rank) for rank in range(ranks)] for micro_batch in range(number)]
        for number in micro_batches
    ]
