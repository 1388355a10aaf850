"""Cutting as an index of pieces, against a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.sets.cut import CutOptions, CutRows, OnTooLong
from dsft.data.sets.dataset import Dataset
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.steps import TrainSteps
from dsft.spec.batch import BatchSizes
from tests.unit.data.token_rows import FakeRows, Given, cut_all

BOS, PAD = 1, 0


@st.composite
def a_row(draw: st.DrawFn, most: int = 30) -> Given:
    """Tokens that stand in no other place, or behind a first BOS; some are trained, one at least."""
    length = draw(st.integers(2, most))
    trained = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    trained[draw(st.integers(1, length - 1))] = True
    ids = list(range(100, 100 + length))
    if draw(st.booleans()):
        ids[0] = BOS
    return ids, [True] * length if draw(st.booleans()) else trained


rows_of_a_source = st.lists(a_row(), min_size=1, max_size=12)
NAIVE: tuple[OnTooLong, ...] = ("drop", "truncate", "split", "fill")
Piece = tuple[list[int], list[bool], int, tuple[int, ...] | None]


def naive(given: list[Given], size: int, how: OnTooLong) -> list[Piece]:
    """(tokens, targets, row, segments) of each example, one token after the other."""
    if how == "fill":
        return [piece for piece in naive_fill(given, size) if any(piece[1])]
    pieces: list[Piece] = []
    for row, (ids, trained) in enumerate(given):
        targets = [False, *map(bool, trained[1:])]
        if len(ids) <= size:
            pieces.append((list(ids), targets, row, None))
        elif how == "split":
            for start in range(0, len(ids) - 1, size - 1):
                stop = start + size
                pieces.append((list(ids[start:stop]), [False, *targets[start + 1 : stop]], row, None))
        elif how == "truncate":
            pieces.append(naive_window(ids, targets, size, row))
    return [piece for piece in pieces if any(piece[1])]


def naive_window(ids: Sequence[int], targets: list[bool], size: int, row: int) -> Piece:
    windows = [(ids[:size], targets[:size])]
    for start in range(1, len(ids)):
        if not has_context(targets, start, size - (ids[0] == BOS), low=int(ids[0] == BOS)):
            continue
        if ids[0] == BOS and len(ids[start:]) >= size - 1:
            body = slice(start, start + size - 1)
            windows.append(([ids[0], *ids[body]], [False, False, *targets[body][1:]]))
        elif ids[0] != BOS and len(ids[start:]) >= size:
            body = slice(start, start + size)
            windows.append((list(ids[body]), [False, *targets[body][1:]]))
    best = max(windows, key=lambda window: sum(window[1]))  # the first of equals
    return list(best[0]), list(best[1]), row, None


def has_context(targets: list[bool], start: int, size: int, low: int) -> bool:
    """Whether what is trained on next has before it all that stood there, or a quarter of the window."""
    if not any(targets[start:]) or (start > low and targets[start - 1] and targets[start]):
        return False
    following = targets.index(True, start)
    gap = next(i for i in range(following, -1, -1) if i == low or targets[i - 1])
    return following - start >= min(following - gap, max(1, size // 4))


def naive_fill(given: list[Given], size: int) -> list[Piece]:
    stream = [
        (token, bool(is_target) and place > 0, row)
        for row, (ids, trained) in enumerate(given)
        for place, (token, is_target) in enumerate(zip(ids, trained, strict=True))
    ]
    pieces: list[Piece] = []
    for start in range(0, len(stream), size):
        part = stream[start : start + size]
        targets = [is_target and place > 0 for place, (_, is_target, _) in enumerate(part)]
        borders = [0, *(i for i, (a, b) in enumerate(pairwise(part), 1) if a[2] != b[2]), len(part)]
        segments = tuple(stop - start for start, stop in pairwise(borders))
        pieces.append(([token for token, _, _ in part], targets, part[0][2], segments))
    return pieces


def cut_of(source: FakeRows, size: int, how: OnTooLong) -> CutRows:
    return cut_all(source, CutOptions(size, how, BOS))


def noted(made: CutRows, name: str) -> list[int]:
    return made.noted[name].tolist()


@pytest.mark.parametrize("how", NAIVE)
@given(given=rows_of_a_source, size=st.integers(2, 20))
@settings(max_examples=70, deadline=None)
def test_every_piece_is_that_of_a_loop_over_tokens(how: OnTooLong, given: list[Given], size: int) -> None:
    source = FakeRows(given)
    made = cut_of(source, size, how)
    data = Dataset((made.examples,))
    wanted = naive(given, size, how)
    found = [
        (example.input_ids.tolist(), example.trained.tolist(), int(data.source(i)[2:]), example.segments)
        for i, example in enumerate(data)
    ]
    assert found == wanted
    assert data.lengths.tolist() == [len(ids) for ids, *_ in wanted]
    assert data.target_counts.tolist() == [sum(targets) for _, targets, *_ in wanted]
    assert [data.source(i) for i in range(len(data))] == [f"a:{row}" for _, _, row, _ in wanted]


@pytest.mark.parametrize("how", NAIVE)
@given(given=rows_of_a_source, size=st.integers(2, 20))
@settings(max_examples=40, deadline=None)
def test_tokens_add_up(how: OnTooLong, given: list[Given], size: int) -> None:
    source = FakeRows(given)
    made = cut_of(source, size, how)
    rows, pieces = source.lengths, made.examples
    overlap = len(pieces.lengths) - len(given) if how == "split" else 0
    if how == "split":  # a piece without a target takes its overlap with it
        overlap = sum(max(0, -((1 - n) // (size - 1)) - 1) for n in rows.tolist())
    left_out, dropped = (rows[made.left_out.get(name, [])] for name in ("without_target", "dropped"))
    kept = int(pieces.lengths.sum()) + int(np.minimum(left_out, size).sum())
    assert rows.sum() + overlap == kept + dropped.sum() + made.truncated_tokens


@pytest.mark.parametrize("how", NAIVE)
@given(given=rows_of_a_source, size=st.integers(2, 20), ranks=st.integers(1, 3), is_packed=st.booleans())
@settings(max_examples=40, deadline=None)
def test_pieces_survive_packing_and_unpacking(
    how: OnTooLong, given: list[Given], size: int, ranks: int, is_packed: bool
) -> None:
    """Every token and every target of an epoch, taken apart again from the tensors of all ranks."""
    source = FakeRows(given)
    data = Dataset((cut_of(source, size, how).examples,))
    wanted = sorted(part for piece in naive(given, size, how) for part in parts_of(piece))
    sizes = BatchSizes(ranks, 1, 1, ranks, size + 3 if is_packed else None)
    found = []
    for rank in range(ranks):
        steps = TrainSteps(data, sizes, rank, 5, PAD)
        for index in range(steps.steps_per_epoch if len(data) else 0):
            for batch in steps.step(index).micro_batches:
                found += unpacked(batch)
    ids = [(tokens, targets) for tokens, targets in sorted(found) if tokens[0] != PAD]
    if is_packed:
        assert ids == wanted
    else:  # a padded row of several segments is attended as one, but its tokens and targets are the same
        whole = [joined(piece) for piece in naive(given, size, how)]
        assert ids == sorted(whole)


def parts_of(piece: Piece) -> list[tuple[list[int], list[int]]]:
    """(tokens, the target that each one predicts) of each segment."""
    tokens, targets, _, segments = piece
    parts, start = [], 0
    for length in segments or (len(tokens),):
        mine, is_target = tokens[start : start + length], targets[start + 1 : start + length]
        after = [t if wanted else NO_TARGET for t, wanted in zip(mine[1:], is_target, strict=True)]
        parts.append((mine, [*after, NO_TARGET]))
        start += length
    return parts


def joined(piece: Piece) -> tuple[list[int], list[int]]:
    parts = parts_of(piece)
    return [t for tokens, _ in parts for t in tokens], [t for _, targets in parts for t in targets]


def unpacked(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    if batch.segments is not None:
        rows = zip(
            batch.tokens.input_ids[0].split(batch.segments.lengths),
            batch.tokens.targets[0].split(batch.segments.lengths),
            strict=True,
        )
    else:
        rows = zip(batch.tokens.input_ids, batch.tokens.targets, strict=True)
    lengths = [(ids, targets, max(1, int((ids != PAD).sum()))) for ids, targets in rows]
    return [(ids[:n].tolist(), targets[:n].tolist()) for ids, targets, n in lengths]


def test_nothing_is_read_to_cut_rows_of_which_all_is_trained_on() -> None:
    source = FakeRows([(range(n), [True] * n) for n in (3, 50, 7, 12)])
    for how in NAIVE:
        made = cut_of(source, 6, how)
        assert len(made.examples.lengths)
    assert source.reads == []


def test_a_window_keeps_the_answer_and_the_beginning_of_text() -> None:
    """The question is cut off, not the answer."""
    question, answer = list(range(10, 20)), list(range(50, 54))
    row = ([BOS, *question, *answer], [False] * 11 + [True] * 4)
    made = cut_of(FakeRows([row]), 8, "truncate")
    example = Dataset((made.examples,))[0]
    assert example.input_ids.tolist() == [BOS, *question[-3:], *answer]
    assert example.trained.tolist() == [False] * 4 + [True] * 4
    assert noted(made, "truncated") == [0] and noted(made, "without_end") == [] and made.truncated_tokens == 7


@given(given=rows_of_a_source, size=st.integers(2, 20), unended=st.frozensets(st.integers(0, 11)))
@settings(max_examples=150, deadline=None)
def test_windows_that_end_inside_a_turn_are_counted(
    given: list[Given], size: int, unended: frozenset[int]
) -> None:
    given = [([0, *ids[1:]], trained) for ids, trained in given]  # no beginning of text
    wanted = []
    for row, (ids, trained) in enumerate(given):
        (tokens, _, _, _) = (
            naive([(ids, trained)], size, "truncate")[0] if len(ids) > size else (ids, [], 0, ())
        )
        last = ids.index(tokens[-1])
        is_cut = last + 1 < len(ids) and trained[last] and trained[last + 1] and last > 0
        wanted += [row] if is_cut or row in unended else []
    assert noted(cut_of(FakeRows(given, unended), size, "truncate"), "without_end") == wanted


@pytest.mark.parametrize(
    ("question", "answer", "begin", "targets"),
    [(500, 100, 88, 100), (100, 600, 0, 412), (400, 500, 272, 384), (50, 500, 0, 462), (600, 500, 472, 384)],
)
def test_no_answer_is_kept_without_its_question(question: int, answer: int, begin: int, targets: int) -> None:
    """Of 512 tokens, 128 are of the question, or all of a shorter one."""
    row = (list(range(100, 100 + question + answer)), [False] * question + [True] * answer)
    made = cut_of(FakeRows([row]), 512, "truncate").examples
    assert (int(made.start[0]), int(made.target_counts[0])) == (begin, targets)


def test_a_row_that_loses_its_end_of_turn_is_counted() -> None:
    ids = list(range(20))
    answered = [False] * 4 + [True] * 16
    two_turns = [False] * 4 + [True] * 2 + [False] * 3 + [True] * 2 + [False] * 9
    cut_between = [1 <= i < 4 or 10 <= i < 13 for i in range(20)]
    rows = [(ids, answered), (ids, two_turns), (ids[:5], answered[:5]), (ids, cut_between)]
    made = cut_of(FakeRows(rows, unended=frozenset({2})), 10, "truncate")
    assert noted(made, "without_end") == [0, 2]  # of the others a whole turn is kept, or both


def test_a_fingerprint_is_that_of_the_pieces_and_needs_no_token() -> None:
    rows = [(range(n), [True] * n) for n in (3, 9, 4)]
    prints = []
    tried: list[tuple[Any, Any, int]] = [
        (rows, "fill", 5),
        (rows, "fill", 4),
        (rows, "split", 5),
        (rows[::-1], "fill", 5),
    ]
    for rows_given, how, size in tried:
        source = FakeRows(rows_given)
        prints.append(Dataset((cut_of(source, size, how).examples,)).fingerprint)
        again = FakeRows(rows_given)
        assert Dataset((cut_of(again, size, how).examples,)).fingerprint == prints[-1]
        assert source.reads == []
    assert len(set(prints)) == len(prints)
    source = FakeRows(rows)  # no row is cut by either
    short = {Dataset((cut_of(source, 9, how).examples,)).fingerprint for how in NAIVE[:3]}
    assert len(short) == 1


@pytest.mark.parametrize("how", NAIVE)
def test_an_example_finds_what_its_row_is_labeled(how: OnTooLong) -> None:
    rows = [(range(n), [True] * n) for n in (3, 20, 4, 12)]
    source = FakeRows(rows, undesirable=frozenset({1, 2}))
    made = cut_of(source, 7, how).examples
    labels = source.values["label"][made.row_ids].tolist()
    assert labels == [made.source(index) not in ("a:1", "a:2") for index in range(len(made))]
    assert len(set(labels)) == 2


def turns(*lengths: int) -> list[bool]:
    """Masks of rows whose numbers of tokens are those of a question, an answer, a question, …"""
    return [number % 2 == 1 for number, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize(("how", "pinned"), [
    ("drop", "2580d92c3dcf1412a3b7ac520d06aeeb6fe82ea651241643a6d97c85dd10f56d"),
    ("truncate", "0b2ddec499816870704c1cc414993b97eba208cc8bc16fba65eb2228cb203e0a"),
    ("split", "5670d6f954c1fa08c07965ec312aa75002e27ea12b84c50b1db94795ec225dd8"),
    ("fill", "2c19fe20261c07a7b6afc2deb1e808aa8fc94b4cfa10cf79fe08965be5275d35"),
])  # fmt: skip
def test_digests_are_those_that_checkpoints_and_stored_references_have(how: OnTooLong, pinned: str) -> None:
    rows = [
        ([BOS, *range(2, 20)], turns(4, 3, 6, 6)),
        (list(range(2, 20)), turns(9, 9)),
        ([1, 2, 3], turns(1, 2)),
    ]
    made = cut_of(FakeRows(rows), 8, how).examples
    assert made.digest == pinned
    assert (made.spans is not None) == (how == "truncate")  # a row of them keeps its beginning of text
