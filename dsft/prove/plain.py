"""The loop that `dsft prove` compares a run with: transformers' own class in float32, row after row, without
padding, packing, micro-batches and ranks. It imports nothing of dsft (`lint-imports` checks that).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

Row = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is a target; the first never is one."""
Rows = Sequence[Row]
"""An example: one row, or the chosen and the rejected answer of a pair, each with the prompt."""


@dataclass(frozen=True)
class Recipe:
    """What is minimized and how. loss: "next_token", "reward" or a loss_type of DPO; keys: those of the
    task's section; optim: keys of a spec's `optim`; rates: of each step; trainable: patterns of names."""

    loss: str
    keys: Mapping[str, Any]
    label_smoothing: float
    optim: Mapping[str, Any]
    max_norm: float
    rates: Sequence[float]
    trainable: Sequence[str]


@dataclass
class Outcome:
    """losses, norms: of each step, the norm before clipping; start, weights: the trained values before and
    after all steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def load(folder: Path, adapter: Path | None, *, scores: bool, device: str) -> nn.Module:
    """Return the model of a folder in float32, with a trainable adapter of peft if there is one."""
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    model.config.pad_token_id = None  # without one, the last token is scored
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    evaluated: nn.Module = model.eval().to(device)
    return evaluated


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without peft's wrappers."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        name = re.sub(r"(lora_magnitude_vector)\.default\.weight$", r"\1", name)
        plain = re.sub(r"^base_model\.model\.|\.(base_layer|default|modules_to_save)(?=\.|$)", "", name)
        found |= {} if ".original_module." in name else {plain: parameter}
    return found


def train(
    model: nn.Module, steps: Sequence[Sequence[Rows]], recipe: Recipe, margins: Sequence[Sequence[float]]
) -> Outcome:
    """Train the steps, each a list of examples: all parameters that are not frozen. margins: of the examples
    of each step, for a reward model."""
    outcome, needs_reference = Outcome(), recipe.loss not in ("next_token", "reward", "simpo", "orpo")
    reference = copy.deepcopy(model).requires_grad_(False) if needs_reference else model
    named = parameters(model)
    for name, one in named.items():
        is_meant = any(fnmatchcase(name, pattern) for pattern in recipe.trainable)
        one.requires_grad_(one.requires_grad and is_meant)
    trained = {name: one for name, one in named.items() if one.requires_grad}
    optimizer = _optimizer(trained, recipe.optim)
    outcome.start = {name: one.detach().cpu().clone() for name, one in trained.items()}
    for step, of_step, rate in zip(steps, margins, recipe.rates, strict=True):
        total = 0.0
        for example, margin in zip(step, of_step, strict=True):
            loss = _loss(model, reference, example, step, recipe, margin)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        grads = [one.grad for one in trained.values() if one.grad is not None]
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        if recipe.max_norm and norm > recipe.max_norm:
            for grad in grads:
                grad.mul_(recipe.max_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(total)
        outcome.norms.append(norm)
    outcome.weights = {name: one.detach().cpu() for name, one in trained.items()}
    return outcome


def _optimizer(trained: Mapping[str, nn.Parameter], optim: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Weight decay is for matrices and embeddings, not for biases, norms and vectors."""
    groups: list[list[nn.Parameter]] = [[], []]
    for name, one in trained.items():
        module, _, own = name.rpartition(".")
        groups[one.ndim > 1 and not own.endswith("bias") and not module.endswith("norm")].append(one)
    given = [
        {"params": groups[1], "weight_decay": optim["weight_decay"]},
        {"params": groups[0], "weight_decay": 0.0},
    ]
    if optim["name"] == "sgd":
        return torch.optim.SGD(given, lr=0.0, momentum=optim["momentum"])
    return torch.optim.AdamW(given, lr=0.0, betas=tuple(optim["betas"]), eps=optim["eps"])


def targets_of(row: Row) -> int:
    return sum(row[1][1:])


def _logits(model: nn.Module, row: Row) -> tuple[Tensor, Tensor]:
    """Return the logits (n, V) that predict the row's n targets, and the targets (n,)."""
    ids = torch.tensor(row[0], device=next(model.parameters()).device)
    chosen = torch.tensor(row[1][1:], device=ids.device)
    return model(input_ids=ids[None], use_cache=False).logits[0, :-1][chosen], ids[1:][chosen]


def _logp(model: nn.Module, row: Row) -> Tensor:
    logits, targets = _logits(model, row)
    return -F.cross_entropy(logits, targets, reduction="none").double().sum()


def _loss(
    model: nn.Module,
    reference: nn.Module,
    example: Rows,
    step: Sequence[Rows],
    recipe: Recipe,
    margin: float,
) -> Tensor:
    """Return what an example adds to the step's loss, a mean over the step's targets or its pairs."""
    if recipe.loss == "next_token":
        (row,) = example
        logits, targets = _logits(model, row)
        loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=recipe.label_smoothing)
        return loss.double().sum() / sum(targets_of(row) for (row,) in step)
    keys = recipe.keys
    if recipe.loss == "reward":
        device = next(model.parameters()).device
        ids = [torch.tensor([ids], device=device) for ids, _ in example]
        chosen, rejected = (model(input_ids=one).logits[0, 0].double() for one in ids)
        centered: Tensor = keys["center_rewards_coefficient"] * (chosen + rejected).square()
        return (_logistic(chosen - rejected - margin, keys["label_smoothing"]) + centered) / len(step)
    policy = torch.stack([_logp(model, row) for row in example])
    lengths = torch.tensor([targets_of(row) for row in example], device=policy.device)
    against = torch.zeros_like(policy)
    if reference is not model:
        with torch.no_grad():
            against = torch.stack([_logp(reference, row) for row in example])
    chosen, rejected = policy - against
    loss = DPO[recipe.loss](chosen, rejected, lengths, keys["beta"], keys)
    weight = 1.0 if recipe.loss == "orpo" else keys["sft_weight"]
    return loss / len(step) - weight * policy[0] / sum(targets_of(pair[0]) for pair in step)


def _logistic(margin: Tensor, smoothing: float, sign: int = -1) -> Tensor:
    loss: Tensor = -(1 - smoothing) * F.logsigmoid(margin) + sign * smoothing * F.logsigmoid(-margin)
    return loss


def _odds(mean: Tensor) -> Tensor:
    return (mean.exp() / (1 - mean.exp())).log()


Loss = Callable[[Tensor, Tensor, Tensor, float, Mapping[str, Any]], Tensor]
DPO: Mapping[str, Loss] = {
    "sigmoid": lambda c, r, n, beta, keys: _logistic(beta * (c - r), keys["label_smoothing"]),
    "robust": lambda c, r, n, beta, keys: (
        _logistic(beta * (c - r), keys["label_smoothing"], 1) / (1 - 2 * keys["label_smoothing"])
    ),
    "hinge": lambda c, r, n, beta, keys: torch.relu(1 - beta * (c - r)),
    "ipo": lambda c, r, n, beta, keys: (c / n[0] - r / n[1] - 1 / (2 * beta)) ** 2,
    "apo_zero": lambda c, r, n, beta, keys: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
    "simpo": lambda c, r, n, beta, keys: -F.logsigmoid(beta * (c / n[0] - r / n[1]) - keys["simpo_gamma"]),
    "orpo": lambda c, r, n, beta, keys: -beta * F.logsigmoid(_odds(c / n[0]) - _odds(r / n[1])),
}
"""The loss of a pair by loss_type. c, r: of the chosen and the rejected answer, the log-ratio to the
reference, or the log-probability where there is none; n: their numbers of targets. Papers: docs/dpo.md."""
