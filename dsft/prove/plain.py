"""The loop that `dsft prove` compares a run with: transformers' own class in float32, row after row, without
padding, packing, micro-batches and ranks. It imports nothing of dsft (`lint-imports` checks that).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class Example:
    """rows: one row, or the chosen and the rejected answer of a pair, each with the prompt; value: the row's
    label, or the pair's margin; other: for KTO, the row's prompt with another row's answer."""

    rows: Sequence[Row]
    value: float = 0.0
    other: Row | None = None


@dataclass(frozen=True)
class Recipe:
    """What is minimized and how. loss: the task, of DPO and KTO its loss_type; keys: those of the task's
    section; optim, experts: those of a spec's `optim` and `model.experts`; rates: of each step; trainable:
    patterns of names."""

    loss: str
    keys: Mapping[str, Any]
    label_smoothing: float
    optim: Mapping[str, Any]
    experts: Mapping[str, Any]
    max_norm: float
    rates: Sequence[float]
    trainable: Sequence[str]

    def trains(self, name: str) -> bool:
        is_frozen = self.experts["freeze_router"] and re.search(r"\.(gate|router)\.", name)
        is_meant = any(fnmatchcase(name, pattern) for pattern in (*self.trainable, "score.weight"))
        return is_meant and not is_frozen


@dataclass
class Outcome:
    """losses, norms: of each step, the norm before clipping; held_out: the loss of the held-out rows after
    all steps; start, weights: the trained values before and after all steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: float | None = None
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def load(
    folder: Path, adapter: Path | None, scores: bool, device: str, form: str | None, whole: Sequence[str]
) -> nn.Module:
    """Return the model of a folder in float32, with a trainable adapter of peft if there is one. form: of 4
    bits, in which the weights are stored that no pattern of `whole` matches."""
    auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    model.config.pad_token_id = None  # without one, the last token is scored
    if form is not None:
        _round_to_4_bits(model, form, whole)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    evaluated: nn.Module = model.eval().to(device)
    return evaluated


@torch.no_grad()
def _round_to_4_bits(model: Any, form: str, whole: Sequence[str]) -> None:
    """Replace the weights of linear layers but the last one, and of experts, by their values in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    last = model.get_output_embeddings() or getattr(model, "score", None)
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(name, recurse=False):
            is_linear = type(module) is nn.Linear and weight.ndim == 2 and module is not last
            is_stored = is_linear or (weight.ndim == 3 and ".experts." in own)
            if is_stored and not any(fnmatchcase(own, pattern) for pattern in whole):
                for one in weight if weight.ndim == 3 else [weight]:
                    packed = quantize_4bit(one.data, blocksize=64, compress_statistics=True, quant_type=form)
                    one.copy_(dequantize_4bit(*packed))


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without peft's wrappers."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        name = re.sub(r"(lora_magnitude_vector)\.default\.weight$", r"\1", name)
        wrapper, factor, rest = name.partition(".lora_")
        own = getattr(model.get_submodule(wrapper), "parameter_name", None) if factor else None
        name = f"{wrapper}.{own}{factor}{rest}" if own else name  # adapters of experts, one for each weight
        plain = re.sub(r"^base_model\.model\.|\.(base_layer|default|modules_to_save)(?=\.|$)", "", name)
        found |= {} if ".original_module." in name else {plain: parameter}
    return found


def train(
    model: nn.Module,
    reference: nn.Module | None,
    steps: Sequence[Sequence[Example]],
    held_out: Sequence[Example],
    recipe: Recipe,
) -> Outcome:
    """Train the steps: all parameters that are not frozen. Then compute the loss of held-out examples.
    reference: by default the model as it is."""
    outcome = Outcome()
    reference = (copy.deepcopy(model) if reference is None else reference).requires_grad_(False)
    named = parameters(model)
    for name, one in named.items():
        one.requires_grad_(one.requires_grad and recipe.trains(name))
    trained = {name: one for name, one in named.items() if one.requires_grad}
    optimizers = list(_optimizers(trained, recipe.optim))
    balance = Balance(model, recipe.experts)
    outcome.start = {name: one.detach().cpu().clone() for name, one in trained.items()}
    for step, rate in zip(steps, recipe.rates, strict=True):
        total = 0.0
        balance.begin(step)
        for loss in losses(model, reference, step, recipe, recipe.label_smoothing):
            total += float(loss.detach())
            torch.autograd.backward(loss + balance.loss())
        grads = [one.grad for one in trained.values() if one.grad is not None]
        norm = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
        if recipe.max_norm and norm > recipe.max_norm:
            for grad in grads:
                grad.mul_(recipe.max_norm / norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["times"]
            optimizer.step()
            optimizer.zero_grad()
        outcome.losses.append(total)
        outcome.norms.append(norm)
    if held_out:
        with torch.no_grad():
            outcome.held_out = sum(map(float, losses(model, reference, held_out, recipe, 0.0)))
    outcome.weights = {name: one.detach().cpu() for name, one in trained.items()}
    return outcome


# --- the optimizers ---------------------------------------------------------------------------------------


def _optimizers(
    trained: Mapping[str, nn.Parameter], optim: Mapping[str, Any]
) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer, and with Muon that of the layers' matrices too. Weight decay is for matrices and
    embeddings, not for biases, norms and vectors."""
    groups: list[list[dict[str, Any]]] = [[], []]
    for name, one in trained.items():
        module, _, last = name.rpartition(".")
        is_matrix = one.ndim > 1 and not last.endswith("bias") and not module.endswith("norm")
        own: Any = next((own for own in optim["groups"] if fnmatchcase(name, own["parameters"])), {})
        decay = optim["weight_decay"] if is_matrix else 0.0
        decay, rate = (
            given if own.get(key) is None else own[key]
            for key, given in (("weight_decay", decay), ("learning_rate", optim["learning_rate"]))
        )
        is_muons = optim["name"] == "muon" and is_matrix and re.search(r"\.\d+\.", name)
        times = rate / optim["learning_rate"]
        groups[bool(is_muons)].append({"params": [one], "weight_decay": decay, "times": times})
    adam = {"lr": 0.0, "betas": tuple(optim["betas"]), "eps": optim["eps"]}
    if groups[True]:
        yield Muon(groups[True], {"lr": 0.0, "momentum": optim["muon_momentum"]})
    if optim["name"] == "sgd":
        yield torch.optim.SGD(groups[False], lr=0.0, momentum=optim["momentum"])
    elif optim["name"] == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        yield AdamW8bit(groups[False], **adam)  # type: ignore[no-untyped-call]
    else:
        yield torch.optim.AdamW(groups[False], **adam)


class Muon(torch.optim.Optimizer):
    """https://kellerjordan.github.io/posts/muon, with the step of arXiv 2502.16982, 2.2."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (whole,), momentum = group["params"], group["momentum"]
            mean = self.state[whole].setdefault("mean", torch.zeros_like(whole))
            mean.mul_(momentum).add_(whole.grad, alpha=1 - momentum)
            ahead = (1 - momentum) * whole.grad + momentum * mean
            x = ahead / ahead.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
            whole.mul_(1 - group["lr"] * group["weight_decay"])
            whole.sub_(0.2 * max(whole.shape[-2:]) ** 0.5 * group["lr"] * x)


# --- the losses -------------------------------------------------------------------------------------------


class Balance:
    """The balance loss of a mixture of experts, of which the reported loss has no part. experts: the keys of
    a spec's `model.experts`."""

    def __init__(self, model: nn.Module, experts: Mapping[str, Any]) -> None:
        self.model, self.kind, self.weight = model, experts["balance"], experts["balance_weight"]
        self.passes: list[tuple[nn.Module, Tensor, Tensor, Tensor]] = []
        self.routed: dict[nn.Module, Tensor] = {}
        for name, module in model.named_modules():
            if self.kind != "none" and name.endswith((".gate", ".router")):
                module.register_forward_hook(self._seen)

    def _seen(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):
            self.passes.append((module, *output))

    def begin(self, step: Sequence[Example]) -> None:
        """Count the tokens of the whole step that each expert gets."""
        if self.kind == "none":
            return
        rows = [row for example in step for row in example.rows]
        self.sequences, self.routed = len(rows), {}
        self.tokens = sum(len(ids) for ids, _ in rows)
        self.passes.clear()
        with torch.no_grad():
            for ids, _ in rows:
                self.model(input_ids=torch.tensor([ids], device=next(self.model.parameters()).device))
        for module, logits, _, chosen in self.passes:
            counts = chosen.flatten().bincount(minlength=logits.shape[1])
            self.routed[module] = self.routed.get(module, 0) + counts
        self.passes.clear()

    def loss(self) -> Tensor | float:
        """Return that of the passes since the last call that have gradients, times the weight."""
        passes = [one for one in self.passes if one[1].requires_grad]
        self.passes.clear()
        return sum((self.weight * self._of_layer(*one) for one in passes), 0.0)

    def _of_layer(self, module: nn.Module, logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        experts, top_k, scores = logits.shape[1], chosen.shape[1], logits.double().softmax(-1)
        own, its = (one / one.sum(1, keepdim=True) for one in (scores.gather(1, chosen), weights.double()))
        if not torch.allclose(own, its, rtol=1e-3):  # the router's are not those of a softmax
            scores = logits.double().sigmoid()
            scores = scores / scores.sum(1, keepdim=True)
        if self.kind == "global_batch":  # https://arxiv.org/abs/2501.11873, N_E Σ f_i p_i, ÷ top_k
            frequency = self.routed[module] / self.tokens
            return experts / top_k * (frequency * scores.sum(0)).sum() / self.tokens
        # https://arxiv.org/abs/2412.19437, 17 to 20
        in_top = torch.zeros_like(scores).scatter(1, scores.topk(top_k, 1).indices, 1.0)
        return experts / top_k * (in_top.mean(0) * scores.mean(0)).sum() / self.sequences


def targets_of(row: Row) -> int:
    return sum(row[1][1:])


def _logits(model: nn.Module, row: Row) -> tuple[Tensor, Tensor]:
    """Return the logits (n, V) that predict the row's n targets, and the targets (n,)."""
    ids = torch.tensor(row[0], device=next(model.parameters()).device)
    places = torch.tensor(row[1][1:], device=ids.device).nonzero()[:, 0]
    logits: Tensor = model(input_ids=ids[None], use_cache=False, logits_to_keep=places).logits[0]
    return logits if len(logits) == len(places) else logits[places], ids[1:][places]


def _logp(model: nn.Module, row: Row) -> Tensor:
    logits, targets = _logits(model, row)
    return -F.cross_entropy(logits, targets, reduction="none").double().sum()


def losses(
    model: nn.Module, reference: nn.Module, step: Sequence[Example], recipe: Recipe, smoothing: float
) -> Iterator[Tensor]:
    """Yield what each example adds to a step's loss, a mean over the step's targets or its examples."""
    kind, keys, device = recipe.loss, recipe.keys, next(model.parameters()).device
    targets, kl = sum(targets_of(one.rows[0]) for one in step), torch.zeros((), device=device)
    if kind == "kto":
        with torch.no_grad():
            others = [one.other for one in step if one.other is not None]
            ratios = [_logp(model, other) - _logp(reference, other) for other in others]
            kl = torch.stack(ratios).mean().clamp(min=0)
    for one in step:
        if kind in ("sft", "pretrain", "distill"):
            logits, ids = _logits(model, one.rows[0])
            loss = F.cross_entropy(logits, ids, reduction="none", label_smoothing=smoothing).double().sum()
            if kind == "distill":
                with torch.no_grad():
                    teacher, _ = _logits(reference, one.rows[0])
                loss = (1 - keys["weight"]) * loss + keys["weight"] * _divergence(teacher, logits, keys)
            yield loss / targets
        elif kind in ("reward", "classify"):
            rows = [torch.tensor([ids], device=device) for ids, _ in one.rows]
            scores = torch.stack([model(input_ids=ids).logits[0].double() for ids in rows])
            label = -scores[0].log_softmax(0)[int(one.value)] if kind == "classify" else None
            yield (_of_rewards(scores, one.value, keys) if label is None else label) / len(step)
        else:
            policy = torch.stack([_logp(model, row) for row in one.rows])
            against = torch.zeros_like(policy)
            if kind not in ("simpo", "orpo"):
                with torch.no_grad():
                    against = torch.stack([_logp(reference, row) for row in one.rows])
            if kind in ("kto", "apo_zero_unpaired"):
                yield _of_answer((policy - against)[0] - kl, one.value, keys) / len(step)
                continue
            lengths = torch.tensor([targets_of(row) for row in one.rows], device=device)
            chosen, rejected = policy - against
            loss = DPO[kind](chosen, rejected, lengths, keys["beta"], keys) / len(step)
            weight = 1.0 if kind == "orpo" else keys["sft_weight"]
            yield loss - weight * policy[0] / targets


def _divergence(teacher: Tensor, student: Tensor, keys: Mapping[str, Any]) -> Tensor:
    """Return the divergence of two distributions, summed over targets, from logits (n, V): over the teacher's
    most probable tokens, and all others as one. arXiv 2306.13649, 1 and 2."""
    p, q = ((logits / keys["temperature"]).log_softmax(-1).double() for logits in (teacher, student))
    top = p[:, : q.shape[1]].topk(keys["top_k"], -1).indices

    def outcomes(logs: Tensor) -> Tensor:
        if keys["top_k"] == logs.shape[1]:
            return logs.gather(1, top)
        rest = logs.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
        return torch.cat([logs.gather(1, top), rest], 1)

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum()

    p, q = outcomes(p), outcomes(q)
    beta: float = keys["beta"]
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    if keys["loss_type"] == "jsd":
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    return kl(p, q) if keys["loss_type"] == "forward_kl" else kl(q, p)


def _of_rewards(scores: Tensor, margin: float, keys: Mapping[str, Any]) -> Tensor:
    chosen, rejected = scores[:, 0]
    centered: Tensor = keys["center_rewards_coefficient"] * (chosen + rejected).square()
    return _logistic(chosen - rejected - margin, keys["label_smoothing"]) + centered


def _of_answer(ratio: Tensor, label: float, keys: Mapping[str, Any]) -> Tensor:
    """arXiv 2402.01306, 7. ratio: log π - log π_ref - the divergence."""
    weight: float = keys["desirable_weight" if label else "undesirable_weight"]
    return weight * (1 - torch.sigmoid(keys["beta"] * (ratio if label else -ratio)))


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
