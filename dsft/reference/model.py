"""Open the reference as a separate frozen engine, and check on real rows that its engine scores correctly.

Each rank reads and keeps only its own part of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from dsft.data.tokenizer.load import load_tokenizer
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.frozen import FrozenEngine, build_frozen_engine
from dsft.engine.partition import sharding_for
from dsft.engine.self_check import check_around, check_rows
from dsft.errors import MissingInputError, Problem, SpecError
from dsft.model.attention import attend
from dsft.model.build import Part, build_model, switch_off_dropout
from dsft.model.census import take_census
from dsft.model.config import TokenFacts, config_around
from dsft.model.policy import Policy
from dsft.model.weights import DTYPES, Weights
from dsft.plan.census import Census, census_from
from dsft.plan.cut import cut_of
from dsft.plan.reference import other_model, reference_config, reference_model, reference_parallel
from dsft.setup.inputs import Inputs
from dsft.spec.schema import Spec

SHOWN = 3  # tokens that a message names


def config_of(spec: Spec, facts: TokenFacts) -> dict[str, Any]:
    """Return the DeepSpeed configuration of the reference, which depends on its size. Raises as
    `take_census`."""
    return _census_and_config(spec, facts)[1]


def _census_and_config(spec: Spec, facts: TokenFacts) -> tuple[Census, dict[str, Any]]:
    cuts = reference_parallel(spec).pipeline_stages > 1
    census = census_from(take_census(reference_model(spec), facts, cuts=cuts))
    return census, reference_config(spec, census.elements)


@dataclass(frozen=True)
class OpenReference:
    """An open reference. policy: this rank's part of the module, for checks; engine: computes
    log-probabilities until it is closed."""

    policy: Policy
    engine: FrozenEngine


def open_reference(
    spec: Spec, facts: TokenFacts, world: World, source: Weights | None = None
) -> OpenReference:
    """Build the reference and its engine. A collective. `world`: the policy's while that trains, or that of a
    scoring pass, with the layout of `reference_layout`; source: as in `build_model`. Raises as that."""
    model = reference_model(spec)
    census, config = _census_and_config(spec, facts)
    cut = cut_of(reference_parallel(spec), census)
    mine = Part(world.stage, cut, sharding_for(config, world, frozen=True))
    exchange = exchange_of(world)

    def part() -> Policy:
        dtype = DTYPES[spec.train.precision]
        policy = build_model(model, facts, spec.train.seed, dtype, mine, source=source)
        switch_off_dropout(policy.causal_lm)  # as in the policy, so that both attend alike to packed rows
        attend(policy.causal_lm, model, spec.data, world.device, exchange)
        return policy

    policy = world.each(part)
    return OpenReference(policy, build_frozen_engine(policy, config, world))


def proven(reference: OpenReference, spec: Spec, inputs: Inputs, world: World) -> Iterator[str]:
    """Run the checks on real rows that a run does for its policy too, and yield a line for each. A
    collective."""
    other = other_model(spec)
    if other is not None:
        key = spec.own_key("reference_model")
        is_start = spec.reference is None or spec.reference.is_initial_policy
        yield world.each(lambda: same_tokens(other, key, inputs.tokenizer, required=not is_start))
        if (around := config_around(other)) is not None:
            yield world.first(lambda: check_around(around, inputs.train))
    yield from check_rows(reference.engine, reference.policy, spec, inputs.train, world, inputs.pad_id)


def same_tokens(name: str, key: str, policy: PreTrainedTokenizerBase, *, required: bool = False) -> str:
    """Check that the reference's own tokenizer agrees with the policy's, and return a line for the user.
    name: the reference's; key: the spec's key that has it; required: it must have a tokenizer, as a teacher.

    Raises SpecError where a token of the policy has another id there, or where the reference has none of the
    tokens. Single tokens that it lacks (model.add_tokens) are only reported: the reference has learned
    nothing about them.
    """
    try:
        theirs = load_tokenizer(name).get_vocab()
    except MissingInputError:
        if required:
            message = f"{name!r} has no tokenizer to compare with the policy's; put its files there"
            raise SpecError("The reference cannot be computed.", [Problem(key, message)]) from None
        return "tokens: it has no tokenizer, so the policy's tokens are used and cannot be compared"
    ours = policy.get_vocab()
    moved = [token for token, number in ours.items() if theirs.get(token, number) != number]
    lacking = [token for token in ours if token not in theirs]
    if moved or len(lacking) == len(ours):
        others, total = len(moved) + len(lacking), len(ours)
        named = "".join(f"; {t!r} is {ours[t]}, there {theirs[t]}" for t in moved[:SHOWN])
        message = (
            f"{name!r} has another tokenizer than the policy: {others:,} of the policy's {total:,} tokens "
            f"have another id or are missing there{named}; name a reference with the same tokens"
        )
        raise SpecError("The reference cannot be computed.", [Problem(key, message)])
    if lacking:
        return (
            f"tokens: the same as the policy's, except for {len(lacking):,} on which it was not trained "
            f"({', '.join(map(repr, lacking[:SHOWN]))}{', …' if len(lacking) > SHOWN else ''})"
        )
    return f"tokens: all {len(ours):,} tokens have the same ids as in the policy"
