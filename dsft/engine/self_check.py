"""Prove on real rows, before the first step, that packing, the head and the kernels are exact, and stop a run
that would train something else than its spec says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.collate import collate_packed, collate_padded
from dsft.dist.world import World
from dsft.engine.api import Scorer
from dsft.errors import Problem, SpecError
from dsft.model.attention import own_attention
from dsft.model.attention_choice import ONE_CALL
from dsft.model.attention_split import SPLIT
from dsft.model.kernels import fused_modules, plain_kernels, use_own
from dsft.model.policy import Policy
from dsft.model.whole_proof import check_text
from dsft.spec.schema import Spec

Precision = Literal["fp32", "bf16", "fp16"]

# The same kernels run on the same shapes, so a neighbor's tokens change nothing unless a border is crossed.
NEIGHBOR = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}  # nats, of any one token
# Alone a row is computed by other kernels: this is how far their rounding may move one token's loss. The
# mean of n tokens differs less, by the square root of n, down to a tenth.
ALONE = {"fp32": 1e-3, "bf16": 0.3, "fp16": 0.1}  # nats
# The head and the model round the same product; where the model scales it in its own type, some ulps more.
HEAD = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the log-probabilities' spread
# Other kernels in each layer round differently; a wrong norm or rotation moves a token by half of the spread.
KERNELS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
ROUNDING = 1e-5  # nats
SHORT, LONG = 16, 1024  # tokens: the rows are the shortest of at least SHORT and one of at most LONG
WIDE = 256  # tokens of a row whose logits are computed whole
EXAMPLES_SEARCHED = 200  # examples from which the rows are chosen


def check_rows(
    engine: Scorer, policy: Policy, spec: Spec, dataset: Dataset, world: World, pad_id: int
) -> Iterator[str]:
    """Run the checks below that the spec needs, and yield a line for each. A collective."""
    if spec.model.kernels != "torch" and any(world.gather(bool(fused_modules(policy.causal_lm)))):
        is_auto = spec.model.kernels == "auto"
        yield check_kernels(engine, policy, dataset, world, pad_id, may_fall_back=is_auto)
    if spec.model.head == "vocabulary":
        yield check_head(engine, policy, dataset, world, pad_id)
    if world.layout.sequence_parallel > 1:
        yield check_split(engine, policy, dataset, world, spec.train.precision, pad_id)
    if spec.data.packing:
        yield check_packing(engine, policy, dataset, world, spec.train.precision, pad_id)


def check_around(around: PreTrainedConfig, dataset: Dataset) -> str:
    """Check on rows that a text model computes what the multimodal model around it, with this config, does,
    and return a line for the log. Raises SpecError."""
    apart = check_text(around, [row.input_ids.tolist() for row in real_rows(dataset)[:2]])
    return (
        f"self-check passed: a small {around.model_type} model and its text model agree to {apart:.1g} of "
        "the spread of their logits on text"
    )


def check_packing(
    engine: Scorer, policy: Policy, dataset: Dataset, world: World, precision: Precision, pad_id: int
) -> str:
    """Check that packing is exact, on a few of the dataset's rows. A collective.

    The packed rows are scored, then again with every second row changed: the losses of the others must stay.
    Each must also have the loss that it has alone, padded, under transformers' own attention. The same is
    checked for the answers of preference pairs that share their prompt, where the dataset has such.

    Returns a line for the log; raises SpecError on every rank where a check fails.
    """
    trials = list(_trials(dataset))
    packed = [
        engine.score([collate_packed(examples, pad_id) for examples in (trial.examples, *trial.changed)])
        for trial in trials
    ]
    with own_attention(policy.causal_lm):
        alone = [engine.score([collate_padded([row], pad_id) for row in trial.rows]) for trial in trials]
    one_call = policy.causal_lm.config._attn_implementation.removesuffix(SPLIT) in ONE_CALL
    way_out = "set it to false, or model.attention to sdpa" if one_call else "set it to false"
    apart = [
        world.each(partial(trial.compare, scored, expected, precision, way_out))
        for trial, scored, expected in zip(trials, packed, alone, strict=True)
    ]
    largest = max(max(each) for each in world.gather(apart))
    shared = ", also of answers that share their prompt" if len(trials) > 1 else ""
    return f"self-check passed: packed and unpacked losses agree to {largest:.1g} nats per token{shared}"


def check_split(
    engine: Scorer, policy: Policy, dataset: Dataset, world: World, precision: Precision, pad_id: int
) -> str:
    """Score a few of the dataset's rows, padded, split over the ranks of a group and whole on each rank under
    transformers' own attention. A collective. Returns a line for the log; raises SpecError on every rank
    where the losses of a row differ by more than rounding."""
    rows = real_rows(dataset)
    batch = collate_padded(rows, pad_id)
    found = engine.score([batch])
    with own_attention(policy.causal_lm):
        own = engine.score([batch])

    def compare() -> float:
        largest = 0.0
        for split, whole in zip(found, own, strict=True):
            sums = (split.double().flatten(1).sum(1) - whole.double().flatten(1).sum(1)).abs().tolist()
            for row, apart in zip(rows, sums, strict=True):
                apart /= row.target_count
                if not apart <= rounding(row.target_count, precision):
                    message = (
                        f"the loss of a split row is {apart:.2g} nats per token from that of a whole one"
                    )
                    raise SpecError(
                        "Split rows were tried on rows of data.train and are not exact.",
                        [Problem("parallel.sequence_parallel", f"{message}; set it to 1")],
                    )
                largest = max(largest, apart)
        return largest

    largest = max(world.gather(world.each(compare)))
    return f"self-check passed: split and whole rows agree to {largest:.1g} nats per token"


def check_head(engine: Scorer, policy: Policy, dataset: Dataset, world: World, pad_id: int) -> str:
    """Score two of the dataset's rows by the head and by the model's own logits. A collective. Where they
    differ, every rank computes the model's logits from then on. Returns a line that says which it is, and on
    a GPU what computes the head's softmax, whose gradients were compared when it was chosen."""
    if any(world.gather(policy.full_logits)):
        policy.full_logits = policy.is_last
        return "head: the model's output layer is not a plain linear one; its logits are computed whole"
    rows = [Example(e.input_ids[:WIDE], e.trained[:WIDE]) for e in real_rows(dataset)[:2]]
    batch = collate_padded(rows, pad_id)
    with own_attention(policy.causal_lm):
        found = engine.score([batch])
        policy.full_logits = policy.is_last
        own = engine.score([batch])
        policy.full_logits = False
    dtype = next(policy.parameters()).dtype
    apart, allowed = _largest_difference(found, own, [batch], HEAD[dtype], world)
    if apart <= allowed:
        softmax = sorted(set(world.gather(policy.softmax_description(world.device))) - {""})
        tried = f"self-check passed: dsft's loss and that of the model's own logits agree to {apart:.1g} nats"
        return "; ".join([tried, *softmax])
    policy.full_logits = policy.is_last
    return (
        f"head: its log-probabilities are up to {apart:.2g} nats from those of the model's own logits "
        f"({allowed:.2g} is rounding), so the logits are computed whole from here on"
    )


def check_kernels(
    engine: Scorer, policy: Policy, dataset: Dataset, world: World, pad_id: int, *, may_fall_back: bool
) -> str:
    """Score a few of the dataset's rows with the fused kernels and with the model's own modules. A
    collective. Returns a line for the log. Where a token's loss differs by more than rounding, the model's
    own modules stay, or SpecError is raised on every rank."""
    batches = [collate_padded([row], pad_id) for row in real_rows(dataset)]
    with own_attention(policy.causal_lm):
        found = engine.score(batches)
        with plain_kernels(policy.causal_lm):
            own = engine.score(batches)
    dtype = next(policy.parameters()).dtype
    apart, allowed = _largest_difference(found, own, batches, KERNELS[dtype], world)
    if not apart <= allowed:
        message = (
            f"a token's loss is {apart:.2g} nats from that of the model's own modules ({allowed:.2g} is "
            "rounding)"
        )
        if may_fall_back:
            use_own(policy.causal_lm)
            return f"kernels: the model's own modules, since with Liger's {message}"
        raise SpecError(
            "The kernels were tried on rows of data.train and are not exact.",
            [Problem("model.kernels", f"{message}; set it to torch")],
        )
    return (
        f"self-check passed: liger's kernels ({fused_modules(policy.causal_lm)}) and the model's own modules "
        f"agree to {apart:.1g} nats"
    )


def _largest_difference(
    found: Sequence[Tensor],
    own: Sequence[Tensor],
    batches: Sequence[MicroBatch],
    rounding: float,
    world: World,
) -> tuple[float, float]:
    """Return the largest difference between two scorings of `batches` on any rank, and what rounding
    explains of it: `rounding` times the spread of the log-probabilities, so that a wrong scale or soft-cap
    shows however small the logits of a fresh model are. A collective."""
    compared = []
    for one, other, batch in zip(found, own, batches, strict=bool(found)):
        is_target = (batch.tokens.targets != NO_TARGET).to(world.device)
        spread = float(other[is_target].max() - other[is_target].min())
        compared.append((float((one - other)[is_target].abs().max()), ROUNDING + rounding * spread))
    return max(
        (pair for rank in world.gather(compared) for pair in rank),
        key=lambda pair: pair[0] - pair[1] if math.isfinite(pair[0]) else math.inf,
    )


def real_rows(dataset: Dataset) -> list[Example]:
    """Return three short rows and a long one between them; every token but a row's first is a target."""
    pieces = [
        piece
        for example in islice(dataset, EXAMPLES_SEARCHED)
        for piece in np.split(example.input_ids, np.cumsum(example.segment_lengths)[:-1])
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    by_length = sorted(pieces, key=len)
    short = [piece for piece in by_length if len(piece) >= SHORT][:3] or by_length[-3:]
    chosen = [*short[:1], by_length[-1][:LONG], *short[1:]]
    return [Example(ids, np.arange(len(ids)) > 0) for ids in chosen]


def every_second_changed(rows: Sequence[Example]) -> list[Example]:
    """Return the rows, with every token of the first, third, … row replaced by another token of these
    rows."""
    return [
        row if number % 2 else replace(row, input_ids=_replaced(row.input_ids, rows))
        for number, row in enumerate(rows)
    ]


def _replaced(ids: NDArray[np.int32], examples: Sequence[Example]) -> NDArray[np.int32]:
    """Return each token's successor among all tokens of the examples."""
    tokens = np.unique(np.concatenate([example.input_ids for example in examples]))
    return tokens[(np.searchsorted(tokens, ids) + 1) % len(tokens)]


def shared_pairs(dataset: Dataset) -> list[Example]:
    """Return up to three preference pairs whose answers share their prompt, in the order in which they are
    packed: the shortest, the longest of at most LONG tokens, the second shortest. Empty where the dataset has
    none."""
    looked_at = [example for example in islice(dataset, EXAMPLES_SEARCHED) if any(example.starts or ())]
    by_length = sorted(looked_at, key=lambda example: len(example.input_ids))
    longer = [example for example in by_length[2:] if len(example.input_ids) <= LONG]
    return [*by_length[:1], *longer[-1:], *by_length[1:2]]


def whole_rows(example: Example) -> list[Example]:
    """Return each answer of an example as a row of its own, after the whole prompt."""
    ends, prompt, whole = np.cumsum(example.segment_lengths), 0, replace(example, segments=None, starts=None)
    rows = []
    for begin, end, start in zip((0, *ends), ends, example.segment_starts, strict=False):
        prompt = prompt if start else begin  # where the row begins whose first `start` tokens it continues
        at = np.concatenate((np.arange(prompt, prompt + start), np.arange(begin, end)))
        rows.append(replace(whole, input_ids=example.input_ids[at], trained=example.trained[at]))
    return rows


def answers_changed(pairs: Sequence[Example], answer: int) -> list[Example]:
    """Return the pairs, with every token of the chosen (0) or rejected (1) answer replaced by another token
    of these pairs."""
    changed = []
    for pair in pairs:
        border = pair.segment_lengths[0]  # the rejected answer's segment repeats the prompt's last token
        tokens = slice(border + 1, None) if answer else slice(pair.segment_starts[1] + 1, border)
        ids = pair.input_ids.copy()
        ids[tokens] = _replaced(ids[tokens], pairs)
        changed.append(replace(pair, input_ids=ids))
    return changed


def rounding(tokens: int, precision: Precision) -> float:
    """Return how far the rounding of other kernels may move the mean loss of `tokens` tokens, in nats."""
    return ALONE[precision] * max(tokens**-0.5, 0.1)


@dataclass(frozen=True)
class _Trial:
    """Examples on which packing is tried.

    examples  packed into one row
    changed   copies of `examples`: in the first the tokens of segments 1, 3, … are replaced, in the second,
              if there is one, those of segments 2, 4, …
    rows      each segment as a separate row
    key       the key of the spec that switches this kind of packing on
    words     for the error: names of what is tried, of a segment, and of its neighbor
    """

    examples: Sequence[Example]
    changed: Sequence[Sequence[Example]]
    rows: Sequence[Example]
    key: str
    words: tuple[str, str, str]

    def compare(
        self, packed: Sequence[Tensor], alone: Sequence[Tensor], precision: Precision, way_out: str
    ) -> float:
        """Return the largest difference per token between the losses packed and alone. Raise SpecError where
        the loss of a segment changes with the others, or differs from the loss that it has alone. Local;
        nothing to compare, and 0, on a rank without the last stage. packed: log-probabilities of `examples`
        and of each of `changed`; alone: of `rows`."""
        largest = 0.0
        if not packed:
            return largest
        what, segment, other = self.words
        title = f"{what} was tried on rows of data.train and is not exact."
        lengths = [length for example in self.examples for length in example.segment_lengths]
        before, *changed = (logps[0].split(lengths) for logps in packed)
        for number, after in enumerate(changed):
            for one, again in list(zip(before, after, strict=True))[1 - number :: 2]:
                apart = float((one - again).abs().max())
                if not apart <= NEIGHBOR[precision]:
                    found = (
                        f"the loss of {segment} changes with {other} (that of one token by {apart:.2g} nats)"
                    )
                    raise SpecError(title, [Problem(self.key, f"{found}; {way_out}")])
        for together, own, row in zip(before, alone, self.rows, strict=True):
            tokens = row.target_count
            apart = abs(float(together.double().sum() - own[0].double().sum())) / tokens
            if not apart <= rounding(tokens, precision):
                found = f"the loss of {segment} is {apart:.2g} nats per token from what it is when alone"
                raise SpecError(title, [Problem(self.key, f"{found}; {way_out}")])
            largest = max(largest, apart)
        return largest


def _trials(dataset: Dataset) -> Iterator[_Trial]:
    rows, pairs = real_rows(dataset), shared_pairs(dataset)
    words = "Packing", "a packed row", "another row of its pack"
    yield _Trial(rows, [every_second_changed(rows)], rows, "data.packing", words)
    if pairs:
        answers = [row for pair in pairs for row in whole_rows(pair)]
        words = "Sharing the prompt of two answers", "an answer that shares its prompt", "the other answer"
        changed = [answers_changed(pairs, answer) for answer in range(2)]
        yield _Trial(pairs, changed, answers, "share_prompts", words)
