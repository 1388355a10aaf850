"""Whether training begins where its reference is: takes an engine before its first step, and micro-batches
with what the reference says of them. Stops a run whose policy and reference would not be the same.

At step 0 both are one model: rewards β (log π - log π_ref) and margins are 0, and the loss of DPO is ln 2. In
exact numbers; what rounding makes of them is measured on the run's own rows, together and each alone, by the
engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.lay import collate
from dsft.engine.api import Engine, log_probabilities
from dsft.engine.world import World
from dsft.errors import Problem, SpecError
from dsft.model.attention import own_attention
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.spec.schema import Dpo

EXACT = 1e-5  # rewards, margins and the loss: what fp32 reaches, and the least that is asked of any type
FACTOR = 4.0  # the reference's layout may be another than the two that rounding is measured in
FEW, ALONE = 2, 4  # micro-batches of the first step to look at, and pairs of them that are scored alone too
SHOWN = 3  # pairs that an error names
CLEAR = 10.0  # times the bound: what a pair of another row is off by, where other weights move all a little

TRAINING = "in training the policy's rewards are other than in evaluation"
DROPOUT = "dropout is on, or another layer that draws random numbers; switch it off in the model's config"
REWARDS = "before the first step rewards are not 0"
NOT_FINITE = (
    "the policy gives answers log-probabilities that are not finite; look at its weights and at those rows, "
    "or set train.precision to fp32 or bf16"
)
BARE = (
    "the reference is the policy without its adapter, and the adapter that training starts from is not 0; "
    "let model.lora.path name no trained adapter, or the reference have the same one"
)


@dataclass(frozen=True)
class Start:
    """What is looked at. micro_batches: this rank's of the first step, with pairs.reference, as many on every
    rank; without_adapter: the policy without its adapter meanwhile, None where it has none."""

    dpo: Dpo
    dataset: Dataset
    micro_batches: Sequence[MicroBatch]
    pad_id: int
    without_adapter: Callable[[], AbstractContextManager[object]] | None = None


@dataclass(frozen=True)
class Found:
    """Of the n answers of this rank's pairs, two by two: log-probabilities (n / 2, 2) in evaluation, in
    training and by the reference; num_tokens; rounding: nats per unit of `spread`."""

    ids: Tensor
    num_tokens: Tensor
    policy: Tensor
    training: Tensor
    reference: Tensor
    rounding: float

    def bound(self, dpo: Dpo) -> Tensor:
        """(n / 2,): the largest reward or margin of each pair that rounding explains."""
        nats = self.rounding * spread(self.num_tokens).amax(1)
        return (FACTOR * dpo.beta * nats).clamp(min=EXACT)

    def off(self, logps: Tensor, dpo: Dpo, policy: Tensor | None = None) -> Tensor:
        """(n / 2,): the largest of both rewards and their margin, of the policy against `logps`."""
        rewards = dpo.beta * ((self.policy if policy is None else policy) - logps)
        margins = rewards[:, :1] - rewards[:, 1:]
        return torch.cat((rewards, margins), dim=1).abs().amax(1)


def spread(num_tokens: Tensor) -> Tensor:
    """How the rounding of a sum grows with its terms: as the root of their number, and when they are many,
    as a tenth of it, since they share the weights."""
    n = num_tokens.double().clamp(min=1)
    return torch.maximum(n.sqrt(), n / 10)


def check_start(start: Start, engine: Engine, policy: Policy, world: World) -> str:
    """A collective, at step 0, where the reference is the policy's start. Gives a line that says how near it
    is; raises SpecError on every rank where it is not, with the cause as far as it can be told."""
    pairs = _joined(world.gather(_look(start, engine, policy, world)))
    bound, off = pairs.bound(start.dpo), pairs.off(pairs.reference, start.dpo)
    drawn = pairs.off(pairs.training, start.dpo)
    if not bool(torch.isfinite(pairs.policy).all()):
        raise _error(REWARDS, _worst(start, pairs, off, bound), NOT_FINITE)
    if not bool((drawn <= bound).all()):
        raise _error(TRAINING, _worst(start, pairs, drawn, bound), DROPOUT)
    if not bool((off <= bound).all()):
        is_bare = _is_without_adapter(start, engine, world, pairs, bound)
        raise _error(REWARDS, _worst(start, pairs, off, bound), BARE if is_bare else _by_pairs(off, bound))
    rewards = start.dpo.beta * (pairs.policy - pairs.reference)
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()
    return (
        f"step 0: policy and reference are one: on {len(off)} pairs rewards and margins are 0 (at most "
        f"{float(off.max()):.1g}, {float(bound.max()):.1g} is rounding), the loss of DPO is {float(loss):.6f}"
    )


def _look(start: Start, engine: Engine, policy: Policy, world: World) -> Found | None:
    """None on a rank that has no pair, or not the last stage."""
    batches = start.micro_batches
    plain = engine.score(batches, answer_logps)
    training = engine.score(batches, answer_logps, training=True)
    numbers = [int(number) for batch in batches if batch.pairs is not None for number in batch.pairs.ids]
    rows = [answer for number in numbers[:ALONE] for answer in answers(start.dataset[number])]
    filled = [collate([row], start.pad_id) for row in rows]
    filled += [collate([], start.pad_id)] * (2 * ALONE - len(rows))
    with own_attention(policy.causal_lm):
        alone = engine.score(filled, log_probabilities)
    if not plain or not numbers:
        return None
    pairs = [batch.pairs for batch in batches if batch.pairs is not None]
    num_tokens = torch.cat([one.num_tokens for one in pairs]).cpu()
    references = [one.reference for one in pairs if one.reference is not None]
    logps = torch.cat(plain).cpu()
    again = torch.stack([one.double().sum().cpu() for one in alone[: len(rows)]]).view(-1, 2)
    apart = (logps[: len(again)] - again).abs() / spread(num_tokens[: len(again)])
    return Found(
        ids=torch.tensor(numbers),
        num_tokens=num_tokens,
        policy=logps,
        training=torch.cat(training).cpu(),
        reference=torch.cat(references).cpu(),
        rounding=max(
            float(apart.max()), _unit_roundoff(policy) * float((logps / num_tokens.clamp(min=1)).abs().mean())
        ),
    )


def _unit_roundoff(policy: Policy) -> float:
    """Of the coarsest type of its parameters. By one rounding of a token's logits layouts may always differ,
    however equal those two are that are compared."""
    return max(torch.finfo(p.dtype).eps for p in policy.parameters()) / 2


def answers(pair: Example) -> tuple[Example, Example]:
    """The chosen and the rejected answer, each behind the whole prompt."""
    border, start = pair.segment_lengths[0], (pair.starts or (0, 0))[1]
    at = np.arange(len(pair.input_ids))
    chosen, rejected = at[:border], np.concatenate((at[:start], at[border:]))
    return (
        Example(pair.input_ids[chosen], pair.trained[chosen], pair.source),
        Example(pair.input_ids[rejected], pair.trained[rejected], pair.source),
    )


def _joined(ranks: Sequence[Found | None]) -> Found:
    known = [one for one in ranks if one is not None]
    names = ("ids", "num_tokens", "policy", "training", "reference")
    columns = {name: torch.cat([getattr(one, name) for one in known]) for name in names}
    return Found(**columns, rounding=max(one.rounding for one in known))


def _is_without_adapter(start: Start, engine: Engine, world: World, pairs: Found, bound: Tensor) -> bool:
    """Whether the reference is the policy without its adapter; a collective."""
    if start.without_adapter is None:
        return False
    with start.without_adapter():
        bare = engine.score(start.micro_batches, answer_logps)
    ranks = [one for one in world.gather(torch.cat(bare).cpu() if bare else None) if one is not None]
    return bool((pairs.off(pairs.reference, start.dpo, torch.cat(ranks)) <= bound).all())


def _by_pairs(off: Tensor, bound: Tensor) -> str:
    """The cause, by which pairs are the same in policy and reference."""
    same, far = off <= bound, off > CLEAR * bound
    counted = f"{int(same.sum())} of {len(same)} pairs are the same in both"
    if bool(same.any() and (same | far).all()):
        return (
            f"{counted}, so weights and template are, and the others are of other rows; make the reference's "
            "log-probabilities anew from these data"
        )
    return (
        f"{counted}: the reference has other weights than the policy starts from, or an adapter on it, or "
        "its rows were made with another chat template or tokenizer; give dpo.reference_model where another "
        "reference is meant, or make its log-probabilities anew"
    )


def _worst(start: Start, pairs: Found, off: Tensor, bound: Tensor) -> str:
    """The pairs that are farthest off, and what would be allowed."""
    order = torch.argsort(off / bound, descending=True)[:SHOWN]
    names = [
        f"{start.dataset.source(int(pairs.ids[i]))} by {off[i]:.2g}" for i in order if not off[i] <= bound[i]
    ]
    return f"{', '.join(names)}; up to {float(bound.max()):.1g} is rounding"


def _error(what: str, where: str, cause: str) -> SpecError:
    title = "The policy does not start from its reference."
    return SpecError(title, [Problem("dpo.reference", f"{what} ({where}): {cause}")])
