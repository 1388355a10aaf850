"""The yardstick: a plain PyTorch loop over rows, one at a time, with no code of the project in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Row = tuple[list[int], list[bool]]  # token ids; whether each one is trained on
Pair = tuple[Row, Row]  # of one prompt: the chosen answer, the rejected one
T = TypeVar("T")  # Row or Pair
Step = list[list[list[T]]]  # [micro-batch][data-parallel rank] -> rows
Losses = Callable[[nn.Module, Step[T]], Iterator[Tensor]]  # of row after row; their sum is the step's


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    """The first step's gradient before clipping."""


class Adapted(nn.Module):
    """A linear with a low-rank adapter, from the papers: W·x + s·B·A·x (https://arxiv.org/abs/2106.09685);
    with a magnitude m, each output of it times m ÷ ‖its row of W + s·B·A‖, which counts as a constant
    (https://arxiv.org/abs/2402.09353, 4.3)."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, has_magnitude: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = linear.weight, linear.bias, scale
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        self.lora_magnitude_vector = nn.Parameter(torch.ones(linear.out_features)) if has_magnitude else None

    def forward(self, x: Tensor) -> Tensor:
        product = self.lora_B.weight @ self.lora_A.weight
        weight = self.weight + self.scale * product
        if self.lora_magnitude_vector is not None:
            weight = weight * (self.lora_magnitude_vector / weight.detach().norm(dim=1))[:, None]
        return F.linear(x, weight, self.bias)


def adapt(model: nn.Module, names: Iterable[str], rank: int, scale: float, has_magnitude: bool) -> None:
    """Adapters in the linears of these last names, and everything else frozen."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, Adapted(child, rank, scale, has_magnitude))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def rows_of(step: Step[T]) -> list[T]:
    return [row for micro_batch in step for rank in micro_batch for row in rank]


def count(rows: Iterable[Row]) -> int:
    """Targets: a row's first token is predicted by nothing."""
    return sum(sum(trained[1:]) for _, trained in rows)


def summed_loss(model: nn.Module, row: Row, smoothing: float = 0.0) -> Tensor:
    ids, trained = row
    labels = torch.tensor([i if is_target else -100 for i, is_target in zip(ids, trained, strict=True)])
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum", label_smoothing=smoothing)


def next_token(smoothing: float = 0.0) -> Losses[Row]:
    """Summed loss ÷ number of targets. `smoothing`: of the labels."""

    def losses(model: nn.Module, step: Step[Row]) -> Iterator[Tensor]:
        for row in rows_of(step):
            yield summed_loss(model, row, smoothing).double() / count(rows_of(step))

    return losses


class Balanced(Generic[T]):
    """Another loss, with the gradient of a balance loss of mixtures of experts beside its own. `losses` sends
    each sequence through the model on its own, in order. `top_k`: experts per token; `is_sigmoid`: how
    routers score. `found`: the balance loss of the last step, without the weight."""

    def __init__(
        self, losses: Losses[T], kind: str, weight: float, top_k: int, is_sigmoid: bool, sequences: int = 1
    ) -> None:
        """`sequences`: of each row; two of a pair."""
        self.losses, self.kind, self.weight, self.sequences = losses, kind, weight, sequences
        self.top_k, self.is_sigmoid, self.found = top_k, is_sigmoid, 0.0

    def __call__(self, model: nn.Module, step: Step[T]) -> Iterator[Tensor]:
        passes: list[tuple[int, Tensor, Tensor]] = []  # layer, logits and chosen experts of a sequence
        routers = [m for name, m in model.named_modules() if name.endswith((".gate", ".router"))]
        hooks = [
            m.register_forward_hook(lambda m, i, out, n=n: passes.append((n, out[0], out[2])))
            for n, m in enumerate(routers)
        ]
        try:
            frequency = [torch.zeros(()) for _ in routers]
            if self.kind == "global_batch":
                with torch.no_grad():
                    list(self.losses(model, step))
                for n in range(len(routers)):
                    chosen = torch.cat([c for layer, _, c in passes if layer == n])
                    counted = chosen.flatten().bincount(minlength=passes[0][1].shape[1])
                    frequency[n] = counted.double() / len(chosen)  # of being chosen; their sum is top_k
                self.tokens = len(chosen)
                passes.clear()
            self.found = 0.0
            for loss in self.losses(model, step):
                balance = sum(self.part(frequency[n], logits, step) for n, logits, _ in passes)
                passes.clear()
                self.found += float(balance.detach())
                yield loss + self.weight * (balance - balance.detach())
        finally:
            for hook in hooks:
                hook.remove()

    def part(self, frequency: Tensor, logits: Tensor, step: Step[T]) -> Tensor:
        """Of one layer and one sequence."""
        experts, scores = logits.shape[1], logits.double()
        scores = scores.sigmoid() if self.is_sigmoid else scores.softmax(-1)
        scores = scores / scores.sum(-1, keepdim=True)
        if self.kind == "global_batch":  # https://arxiv.org/abs/2501.11873, N_E Σ f_i p_i, ÷ top_k
            return experts / self.top_k * (frequency * scores.sum(0)).sum() / self.tokens
        # https://arxiv.org/abs/2412.19437, 17 to 20
        in_top = torch.zeros_like(scores).scatter(1, scores.topk(self.top_k, -1).indices, 1.0)
        f = experts / (self.top_k * len(scores)) * in_top.sum(0)
        return (f * scores.mean(0)).sum() / (self.sequences * len(rows_of(step)))


def summed_logps(model: nn.Module, row: Row) -> Tensor:
    """Return log p of the row's targets given the tokens before each, in float32, summed in float64."""
    ids, trained = row
    logps = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logps.gather(1, torch.tensor(ids[1:])[:, None])[torch.tensor(trained[1:]), 0].double().sum()


class Preference:
    """Direct preference optimisation, from the papers. `reference`: frozen. `answers`: of each pair of the
    last step (policy, reference, number of targets) × (chosen, rejected)."""

    def __init__(self, reference: nn.Module, kind: str, beta: float, sft_weight: float) -> None:
        self.reference, self.kind, self.beta, self.sft_weight = reference, kind, beta, sft_weight
        self.answers: list[Tensor] = []

    def __call__(self, model: nn.Module, step: Step[Pair]) -> Iterator[Tensor]:
        pairs = rows_of(step)
        chosen_tokens, self.answers = count(chosen for chosen, _ in pairs), []
        for pair in pairs:
            with torch.no_grad():
                reference = torch.stack([summed_logps(self.reference, row) for row in pair])
            policy = torch.stack([summed_logps(model, row) for row in pair])
            lengths = torch.tensor([count([row]) for row in pair])
            self.answers.append(torch.stack([policy.detach(), reference, lengths]))
            added = -self.sft_weight * policy[0] / chosen_tokens
            yield self.loss(policy, reference, lengths) / len(pairs) + added

    def loss(self, policy: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """All (2,): of the chosen and the rejected answer."""
        if self.kind == "ipo":  # https://arxiv.org/abs/2310.12036, 17, with averages over the tokens
            chosen, rejected = (policy - reference) / lengths
            return (chosen - rejected - 1 / (2 * self.beta)) ** 2
        if self.kind == "orpo":  # https://arxiv.org/abs/2403.07691, 7, beside the added next-token loss
            p = (policy / lengths).exp()
            chosen, rejected = (p / (1 - p)).log()
            return -self.beta * F.logsigmoid(chosen - rejected)
        chosen, rejected = self.beta * (policy - reference)  # https://arxiv.org/abs/2305.18290, 7
        return -F.logsigmoid(chosen - rejected)

    def least_margin(self) -> float:
        rewards = self.rewards()
        return float((rewards[:, 0] - rewards[:, 1]).abs().min())

    def rewards(self) -> Tensor:
        policy, reference, lengths = torch.stack(self.answers, 1)
        return self.beta * (policy / lengths if self.kind == "orpo" else policy - reference)

    def metrics(self) -> dict[str, float]:
        """Of the last step, by TRL's names; of ORPO per token."""
        (logps, _, lengths), rewards = torch.stack(self.answers, 1), self.rewards()
        margins, loss = rewards[:, 0] - rewards[:, 1], float(-logps[:, 0].sum() / lengths[:, 0].sum())
        policy = logps / lengths if self.kind == "orpo" else logps
        return ({"nll_loss": loss} if self.sft_weight else {}) | {
            "rewards/chosen": float(rewards[:, 0].mean()),
            "rewards/rejected": float(rewards[:, 1].mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((margins > 0).double().mean()),
            "logps/chosen": float(policy[:, 0].mean()),
            "logps/rejected": float(policy[:, 1].mean()),
        }


def margin_of(pair: Sequence[Row]) -> float:
    """The margin of a pair: by its first token."""
    return pair[0][0][0] % 5 / 4 - 0.5


class Reward:
    """A reward model: a score of each answer's last token. `scores`: of each pair of the last step."""

    def __init__(self, smoothing: float, centering: float) -> None:
        self.smoothing, self.centering = smoothing, centering
        self.scores: list[Tensor] = []

    def __call__(self, model: nn.Module, step: Step[Pair]) -> Iterator[Tensor]:
        pairs, self.scores = rows_of(step), []
        for pair in pairs:
            # without a padding token, a model of transformers scores the last token
            both = [model(input_ids=torch.tensor([ids])).logits[0, 0] for ids, _ in pair]
            scores = torch.stack(both).double()
            self.scores.append(scores.detach())
            p = torch.sigmoid(scores[0] - scores[1] - margin_of(pair))  # https://arxiv.org/abs/2307.09288, 2
            loss = -(1 - self.smoothing) * p.log() - self.smoothing * (1 - p).log()
            yield (loss + self.centering * scores.sum() ** 2) / len(pairs)

    def least_margin(self) -> float:
        return min(float((one[0] - one[1]).abs()) for one in self.scores)

    def metrics(self) -> dict[str, float]:
        chosen, rejected = torch.stack(self.scores, 1)
        return {
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": float((chosen > rejected).double().mean()),
            "mean_reward": float(torch.cat([chosen, rejected]).mean()),
        }


def label_of(row: Row, labels: int) -> int:
    """The label of a row: by its first token."""
    return row[0][0] % labels


class Classes:
    """A classifier: the cross entropy of each row's label, by the scores of its last token. `right`: of each
    row of the last step, whether its label has the highest score."""

    def __init__(self, labels: int) -> None:
        self.labels = labels
        self.right: list[bool] = []

    def __call__(self, model: nn.Module, step: Step[Row]) -> Iterator[Tensor]:
        rows, self.right = rows_of(step), []
        for row in rows:
            scores, label = model(input_ids=torch.tensor([row[0]])).logits[0], label_of(row, self.labels)
            self.right.append(int(scores.argmax()) == label)
            yield -scores.double().log_softmax(-1)[label] / len(rows)

    def metrics(self) -> dict[str, float]:
        return {"accuracy": sum(self.right) / len(self.right)}


class Kto:
    """https://arxiv.org/abs/2402.01306, 7, with a given divergence. `answers`: of each row of the last step
    (policy, reference, label)."""

    def __init__(self, reference: nn.Module, beta: float, weights: tuple[float, float], kl: float) -> None:
        """weights: of undesirable and of desirable answers."""
        self.reference, self.beta, self.weights, self.kl = reference, beta, weights, kl
        self.answers: list[tuple[float, float, int]] = []

    def __call__(self, model: nn.Module, step: Step[Row]) -> Iterator[Tensor]:
        rows, self.answers = rows_of(step), []
        for row in rows:
            with torch.no_grad():
                reference = summed_logps(self.reference, row)
            policy, label = summed_logps(model, row), label_of(row, 2)
            self.answers.append((policy.item(), reference.item(), label))
            above = self.beta * (policy - reference - self.kl)
            yield self.weights[label] * (1 - torch.sigmoid(above if label else -above)) / len(rows)

    def metrics(self) -> dict[str, float]:
        """Without those of a label that no row has."""
        found = {"kl": self.kl}
        for label, name in enumerate(("rejected", "chosen")):
            own = [
                (policy, self.beta * (policy - ref)) for policy, ref, mine in self.answers if mine == label
            ]
            for number, key in enumerate(("logps", "rewards") if own else ()):
                found[f"{key}/{name}"] = sum(one[number] for one in own) / len(own)
        if found.keys() >= {"rewards/chosen", "rewards/rejected"}:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found


class Distillation:
    """A teacher's probabilities beside the rows, over the whole vocabulary. `parts`: of the last step, the
    mean divergence and the mean negative log-likelihood."""

    def __init__(
        self, teacher: nn.Module, kind: str, beta: float, temperature: float, weight: float, smoothing: float
    ) -> None:
        self.teacher, self.kind, self.beta, self.smoothing = teacher, kind, beta, smoothing
        self.temperature, self.weight, self.parts = temperature, weight, [0.0, 0.0]

    def __call__(self, model: nn.Module, step: Step[Row]) -> Iterator[Tensor]:
        rows, self.parts = rows_of(step), [0.0, 0.0]
        targets = count(rows)
        for row in rows:
            p, logits = self.known(row), self.logits(model, row)
            divergence = self.divergence(p, (logits / self.temperature).log_softmax(-1)).double().sum()
            chosen = torch.tensor(row[0][1:])[torch.tensor(row[1][1:])]
            likelihood = F.cross_entropy(
                logits, chosen, reduction="sum", label_smoothing=self.smoothing
            ).double()
            for number, part in enumerate((divergence, likelihood)):
                self.parts[number] += part.item() / targets
            yield (self.weight * divergence + (1 - self.weight) * likelihood) / targets

    def logits(self, model: nn.Module, row: Row) -> Tensor:
        """Those that predict the row's targets."""
        ids, trained = row
        logits: Tensor = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits[torch.tensor(trained[1:], dtype=torch.bool)]

    @torch.no_grad()
    def known(self, row: Row) -> Tensor:
        """The teacher's log-probabilities."""
        return (self.logits(self.teacher, row) / self.temperature).log_softmax(-1)

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Of log-probabilities (n, V). https://arxiv.org/abs/2306.13649, 1 and 2"""
        if self.kind == "forward_kl":
            return (p.exp() * (p - q)).sum(-1)
        if self.kind == "reverse_kl":
            return (q.exp() * (q - p)).sum(-1)
        m = (self.beta * p.exp() + (1 - self.beta) * q.exp()).log()
        one, other = (p.exp() * (p - m)).sum(-1), (q.exp() * (q - m)).sum(-1)
        return self.beta * one + (1 - self.beta) * other

    def metrics(self) -> dict[str, float]:
        return dict(zip(("kd_loss", "nll_loss"), self.parts, strict=True))


def train(
    model: nn.Module,
    losses: Losses[T],
    steps: Sequence[Step[T]],
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    skipped: Sequence[int] = (),
) -> Outcome:
    """`max_norm` 0: no clipping. The steps whose number is in `skipped` are not applied."""
    outcome, names = Outcome(), trained(model)
    for number, step in enumerate(steps):
        outcome.losses.append(backward(model, losses, step))
        outcome.first = outcome.first or gradients(model)
        outcome.norms.append(float(nn.utils.clip_grad_norm_(names.values(), max_norm or float("inf"))))
        if number not in skipped:
            optimizer.step()
        optimizer.zero_grad()
    outcome.weights = {name: p.detach().clone() for name, p in names.items()}
    return outcome


def backward(model: nn.Module, losses: Losses[T], step: Step[T]) -> float:
    """The step's loss, and its gradient in `.grad`. As in any data-parallel loop the loss is multiplied by
    the number of ranks and the gradient divided by it: with three, float32 rounds otherwise by up to
    1.6e-6, which is also what it is off from float64 either way."""
    ranks, total = len(step[0]), 0.0
    for loss in losses(model, step):
        (loss * ranks).backward()
        total += loss.item()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= ranks
    return total


def gradient(
    model: nn.Module, losses: Losses[T], weights: dict[str, Tensor], step: Step[T]
) -> dict[str, Tensor]:
    """At `weights`, before any clipping."""
    model.load_state_dict(weights, strict=False)
    model.zero_grad()
    backward(model, losses, step)
    return gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trained(model).items() if p.grad is not None}


@torch.no_grad()
def evaluate(model: nn.Module, losses: Losses[T], step: Step[T]) -> float:
    return sum(loss.item() for loss in losses(model, step))


def decayed_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    named = trained(model)
    matrices = [p for name, p in named.items() if p.ndim > 1 and not name.endswith("bias")]
    vectors = [p for name, p in named.items() if p.ndim <= 1 or name.endswith("bias")]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


class Muon(torch.optim.AdamW):
    """Muon of the layers' matrices, AdamW of the rest. dtype: of the iterations."""

    def __init__(self, model: nn.Module, rate: float, decay: float, eps: float, dtype: torch.dtype) -> None:
        named = trained(model)
        chosen = {name for name, p in named.items() if ".layers." in name and p.ndim > 1}
        self.matrices = [named[name] for name in named if name in chosen]
        self.rate, self.decay, self.dtype = rate, decay, dtype
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        rest = [(name, p) for name, p in named.items() if name not in chosen]
        matrices, vectors = ([p for _, p in rest if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        super().__init__(groups, rate, eps=eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for whole, momenta in zip(self.matrices, self.momenta, strict=True):
            assert whole.grad is not None
            momenta.mul_(0.95).add_(whole.grad, alpha=0.05)
            ahead = 0.05 * whole.grad + 0.95 * momenta
            for matrix, direction in zip(
                whole if whole.ndim == 3 else whole[None],
                ahead if whole.ndim == 3 else ahead[None],
                strict=True,
            ):
                x = (direction / direction.norm().clamp(min=1e-7)).to(self.dtype)
                for _ in range(5):
                    x = 3.4445 * x - 4.7750 * (x @ x.T @ x) + 2.0315 * (x @ x.T @ x @ x.T @ x)
                matrix *= 1 - self.rate * self.decay
                matrix -= self.rate * 0.2 * max(matrix.shape) ** 0.5 * x
            whole.grad = None


def make_steps(
    seed: int, micro_batches: Sequence[int], ranks: int, vocabulary: int, short: bool = False
) -> list[Step[Row]]:
    """Rows of 3 to 20 tokens, 0 to 3 per micro-batch and rank, about 60 in 100 of them targets; or `short`
    ones, all of them targets: one of 3 or 5 tokens per micro-batch and rank, and after some of them one of 1
    or 2. In the first micro-batch of each step one rank has rows without a target, in the last one no row at
    all."""
    draw = random.Random(seed)

    def row(share: float, number: int) -> Row:
        length = draw.choice(((3, 5), (1, 2))[number]) if short else draw.randint(3, 20)
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        return ids, [draw.random() < share for _ in ids]

    def rows(micro_batch: int, last: int, rank: int) -> list[Row]:
        if ranks > 1 and last and micro_batch == last and rank == ranks - 1:
            return []
        is_silent = rank == 0 and micro_batch == 0 and (ranks > 1 or last > 0)
        number = draw.randint(1, 2) if short else draw.randint(2, 3)
        return [row(0.0 if is_silent else 1.0 if short else 0.6, which) for which in range(number)]

    return [
        [[rows(micro_batch, number - 1, rank) for rank in range(ranks)] for micro_batch in range(number)]
        for number in micro_batches
    ]


def make_pairs(seed: int, micro_batches: Sequence[int], ranks: int, vocabulary: int) -> list[Step[Pair]]:
    """One or two pairs per micro-batch and rank; in the last micro-batch of a step of several one rank has
    none. Prompts of 1 to 40 tokens, every fourth of one; answers of 1 to 12, of which some have tokens of
    another turn, not trained on, inside."""
    draw = random.Random(seed)

    def answer() -> tuple[list[int], list[bool]]:
        ids = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 12))]
        other = range(draw.randint(1, len(ids)), draw.randint(1, len(ids)))  # half of these are empty
        return ids, [t not in other for t in range(len(ids))]

    def pair() -> Pair:
        prompt = [draw.randrange(vocabulary) for _ in range(draw.choice((1, 5, 12, 40)))]
        (chosen, trained), (rejected, trained_too) = answer(), answer()
        unseen = [False] * len(prompt)
        return (prompt + chosen, unseen + trained), (prompt + rejected, unseen + trained_too)

    def pairs(micro_batch: int, last: int, rank: int) -> list[Pair]:
        if ranks > 1 and last and micro_batch == last and rank == ranks - 1:
            return []
        return [pair() for _ in range(draw.randint(1, 2))]

    return [
        [[pairs(micro_batch, number - 1, rank) for rank in range(ranks)] for micro_batch in range(number)]
        for number in micro_batches
    ]
