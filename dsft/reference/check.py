"""Check that a run has the right reference: that the policy equals it at step 0 (`check_start`), that it
gives the stored values (`check_rescored`), and that its files are still those of its key (`check_weights`).

At step 0 rewards β (log π - log π_ref) and margins are 0 in exact arithmetic, so the loss of DPO is ln 2. How
far rounding may move them is measured on the run's own rows: the engine scores them in batches and one by
one, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.collate import collate_padded
from dsft.dist.world import World
from dsft.engine.api import Engine, log_probabilities
from dsft.engine.self_check import Precision, rounding, whole_rows
from dsft.errors import CheckpointError, Problem, SpecError, WorldError
from dsft.model.attention import own_attention
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.plan.reference import reference_model
from dsft.reference.key import Key, differences, weights_of
from dsft.spec.schema import Spec

EXACT = 1e-5  # bound for rewards, margins and the loss in fp32, and the smallest bound for any type
FACTOR = 4.0  # the reference's layout may differ from the two in which rounding is measured
NUM_BATCHES = 2  # micro-batches of the first step to check
ALONE = 4  # examples whose answers are also scored alone
SHOWN = 3  # examples that an error names
OTHER_ROW = 10.0  # times the bound: the examples of other rows are farther off, those of other weights less

DIFFERENT_IN_TRAINING = "the policy's rewards in training mode are not those in evaluation mode"
RANDOM_LAYERS = (
    "dropout is on, or another layer that draws random numbers; switch it off in the model's config"
)
REWARDS = "rewards are not 0 before the first step"
NOT_FINITE = (
    "the policy's log-probabilities of these answers are not finite; look at its weights and at those rows, "
    "or set train.precision to fp32 or bf16"
)
WITHOUT_ADAPTER = (
    "the reference is the policy without its adapter, and the adapter that training starts from is not 0; "
    "give model.lora.path an adapter that was not trained, or the reference the same adapter"
)


@dataclass(frozen=True)
class StartCheck:
    """The input of `check_start`. beta: nats -> reward; micro_batches: this rank's of the first step, with
    answers.reference, as many on every rank; without_adapter: a context in which the policy runs without its
    adapter, None where it has none."""

    spec: Spec
    beta: float
    dataset: Dataset
    micro_batches: Sequence[MicroBatch]
    pad_id: int
    without_adapter: Callable[[], AbstractContextManager[object]] | None = None


@dataclass(frozen=True)
class AnswerScores:
    """Scores of the k answers of n examples. ids: (n,); policy, training, reference: log-probabilities (n, k)
    of the policy in evaluation mode, of the policy in training mode, and of the reference; num_tokens: (n,
    k); rounding: nats per unit of `spread`."""

    ids: Tensor
    num_tokens: Tensor
    policy: Tensor
    training: Tensor
    reference: Tensor
    rounding: float

    def bound(self, beta: float) -> Tensor:
        """Return the largest reward or margin of each example that rounding explains, (n,)."""
        nats = self.rounding * spread(self.num_tokens).amax(1)
        return (FACTOR * beta * nats).clamp(min=EXACT)

    def off(self, logps: Tensor, beta: float, policy: Tensor | None = None) -> Tensor:
        """Return the largest absolute value of each example's rewards and of the margins of its first answer,
        of the policy against `logps`, (n,)."""
        rewards = beta * ((self.policy if policy is None else policy) - logps)
        margins = rewards[:, :1] - rewards[:, 1:]
        return torch.cat((rewards, margins), dim=1).abs().amax(1)


def spread(num_tokens: Tensor) -> Tensor:
    """Return how the rounding error of a sum grows with its number of terms n: as √n, and for large n as n /
    10, since the errors are correlated by the shared weights."""
    n = num_tokens.double().clamp(min=1)
    return torch.maximum(n.sqrt(), n / 10)


def check_start(start: StartCheck, engine: Engine, policy: Policy, world: World) -> str:
    """Check that the policy equals its reference at step 0. Return a line that says how near they are. Raises
    SpecError on every rank where they differ, with the probable cause. A collective."""
    scores = _concatenated(world.gather(_scores(start, engine, policy, world)))
    bound, off = scores.bound(start.beta), scores.off(scores.reference, start.beta)
    off_in_training = scores.off(scores.training, start.beta)
    if not bool(torch.isfinite(scores.policy).all()):
        raise _error(start, REWARDS, _worst(start, scores, off, bound), NOT_FINITE)
    if not bool((off_in_training <= bound).all()):
        where = _worst(start, scores, off_in_training, bound)
        raise _error(start, DIFFERENT_IN_TRAINING, where, RANDOM_LAYERS)
    if not bool((off <= bound).all()):
        is_without = _is_without_adapter(start, engine, world, scores, bound)
        cause = WITHOUT_ADAPTER if is_without else _cause(start, off, bound)
        raise _error(start, REWARDS, _worst(start, scores, off, bound), cause)
    what = "rewards" if scores.policy.shape[1] == 1 else "rewards and margins"
    return (
        f"step 0: the policy equals its reference: on {len(off)} {start.spec.task_kind.unit}s {what} are at "
        f"most {float(off.max()):.1g} (allowed for rounding: {float(bound.max()):.1g})"
    )


def _scores(start: StartCheck, engine: Engine, policy: Policy, world: World) -> AnswerScores | None:
    """Score this rank's answers; None on a rank that has none, or not the last stage, or is not the first of
    its group."""
    batches, per_example = start.micro_batches, start.dataset.answers
    plain = engine.score(batches, answer_logps)
    training = engine.score(batches, answer_logps, training=True)
    numbers = [int(number) for batch in batches if batch.answers is not None for number in batch.answers.ids]
    rows = [answer for number in numbers[:ALONE] for answer in whole_rows(start.dataset[number])]
    filled = [collate_padded([row], start.pad_id) for row in rows]
    filled += [collate_padded([], start.pad_id)] * (per_example * ALONE - len(rows))
    with own_attention(policy.causal_lm):
        alone = engine.score(filled, log_probabilities)
    if not plain or not numbers or world.sequence_rank:
        return None
    answers = [batch.answers for batch in batches if batch.answers is not None]
    num_tokens = torch.cat([one.num_targets for one in answers]).cpu()
    references = [one.reference for one in answers if one.reference is not None]
    logps = torch.cat(plain).cpu()
    sums = [one.double().sum().cpu() for one in alone[: len(rows)]]
    alone_logps = torch.stack(sums).view(-1, per_example)
    first = slice(len(alone_logps))
    measured = (logps[first] - alone_logps).abs() / spread(num_tokens[first])
    # Any two layouts may differ by one rounding of each token's logits, in the coarsest type of a parameter,
    # even if the two that are compared here happen to agree.
    unit_roundoff = max(torch.finfo(p.dtype).eps for p in policy.parameters()) / 2
    expected = unit_roundoff * float((logps / num_tokens.clamp(min=1)).abs().mean())
    return AnswerScores(
        ids=torch.tensor(numbers),
        num_tokens=num_tokens,
        policy=logps,
        training=torch.cat(training).cpu(),
        reference=torch.cat(references).cpu(),
        rounding=max(float(measured.max()), expected),
    )


def _concatenated(ranks: Sequence[AnswerScores | None]) -> AnswerScores:
    scores = [one for one in ranks if one is not None]
    names = ("ids", "num_tokens", "policy", "training", "reference")
    columns = {name: torch.cat([getattr(one, name) for one in scores]) for name in names}
    return AnswerScores(**columns, rounding=max(one.rounding for one in scores))


def _is_without_adapter(
    start: StartCheck, engine: Engine, world: World, scores: AnswerScores, bound: Tensor
) -> bool:
    """Return whether the reference is the policy without its adapter. A collective."""
    if start.without_adapter is None:
        return False
    with start.without_adapter():
        bare = engine.score(start.micro_batches, answer_logps)
    mine = torch.cat(bare).cpu() if bare and world.sequence_rank == 0 else None
    ranks = [one for one in world.gather(mine) if one is not None]
    return bool((scores.off(scores.reference, start.beta, torch.cat(ranks)) <= bound).all())


def _cause(start: StartCheck, off: Tensor, bound: Tensor) -> str:
    """Return the probable cause, judged by which examples agree."""
    same, far = off <= bound, off > OTHER_ROW * bound
    count = f"{int(same.sum())} of {len(same)} {start.spec.task_kind.unit}s are the same in both"
    if bool(same.any() and (same | far).all()):
        return (
            f"{count} and the others differ by far more: the weights and the template are the same, but the "
            "others were scored from different rows; score the reference again on these data"
        )
    return (
        f"{count}: the reference has other weights than the policy starts from, or an adapter, or its rows "
        f"were rendered with another chat template or tokenizer; set {start.spec.own_key('reference_model')} "
        "if another reference is meant, or score the reference again"
    )


def _worst(start: StartCheck, scores: AnswerScores, off: Tensor, bound: Tensor) -> str:
    """Name the examples that are farthest off, with the bound."""
    order = torch.argsort(off / bound, descending=True)[:SHOWN]
    names = [
        f"{start.dataset.source(int(scores.ids[i]))} by {off[i]:.2g}" for i in order if not off[i] <= bound[i]
    ]
    return f"{', '.join(names)}; allowed for rounding: {float(bound.max()):.1g}"


def _error(start: StartCheck, what: str, where: str, cause: str) -> SpecError:
    title, key = "The policy does not start from its reference.", start.spec.own_key("reference")
    return SpecError(title, [Problem(key, f"{what} ({where}): {cause}")])


# --- stored values ----------------------------------------------------------------------------------------


def random_ids(total: int, count: int) -> NDArray[np.int64]:
    """Return `count` random numbers below `total`, ascending; all of them where there are fewer."""
    return np.sort(np.random.default_rng().permutation(total)[:count])


def check_rescored(
    folder: Path,
    dataset: Dataset,
    ids: NDArray[np.int64],
    stored: NDArray[Any],
    found: NDArray[Any],
    precision: Precision,
) -> None:
    """Compare log-probabilities in the store with new ones. Of the examples `ids` (n,), `stored` (n, k) is
    what the store `folder` has, `found` (n, k) what the reference gives now. Raises CheckpointError with the
    first answer that differs by more than rounding: another layout runs other kernels, just as a row scored
    alone does. Of a teacher both have the sum of the largest log-probabilities of each example's targets, (n,
    1)."""
    for example, *values in zip(ids.tolist(), stored, found, strict=True):
        tokens = [dataset[example].target_count]
        if dataset.whole:
            tokens = [row.target_count for row in whole_rows(dataset[example])]
        for number, (was, is_, count) in enumerate(zip(*values, tokens, strict=True), start=1):
            bound = allowed(precision, count)
            if not abs(was - is_) <= bound:
                what = "the sum of the largest log-probability of each target"
                if dataset.whole:
                    what = f"the log-probability of answer {number} of {len(tokens)}"
                raise CheckpointError(
                    f"{dataset.source(example)}: {what} "
                    f"under the reference is {was:.6g} in {folder}, and {is_:.6g} when scored again "
                    f"(rounding explains a difference of {bound:.2g}); look for what changed, such as the "
                    "version of transformers or torch, then remove the store, so that all its rows are "
                    "scored again."
                )


def allowed(precision: Precision, tokens: int) -> float:
    """Return how far rounding may move the log-probability of `tokens` tokens, in nats: their number times
    the bound of `engine.self_check` on their mean; for at least one token."""
    return rounding(max(1, tokens), precision) * max(1, tokens)


def check_weights(spec: Spec, key: Key) -> None:
    """Raise WorldError where the reference's files differ from those of the key: after the key was computed,
    they may have been replaced, or a hub id may resolve to other ones."""
    now = weights_of(spec, reference_model(spec))
    then = {name: key.components[name] for name in now}
    if now != then:
        raise WorldError(
            f"the reference changed while the run started: {'; '.join(differences(then, now))}; start again, "
            "and do not change its files while the run starts."
        )
