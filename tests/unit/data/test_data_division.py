"""Which rows are trained on and which held out, and that the account of them adds up (rows 25 to 27 and 30 of
the fault matrix)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.checkpoint.compare import other_rows
from dsft.data.cache import build, store
from dsft.data.cache.store import IN_MEMORY, Cache, check_first_rows
from dsft.data.rows import Account, Records
from dsft.data.sets.cut import CutOptions, OnTooLong, cut_rows
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.ledger import Ledger, table, total
from dsft.data.sets.load import RunData, load_data
from dsft.data.sets.order import Order
from dsft.data.sets.selection import (
    SourceData,
    also_in,
    cut_with,
    divide,
    held_out_below,
    is_below,
    is_duplicate,
)
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.schema import Data, Source
from tests.unit.data.token_rows import FakeRows, spec_of

TOKENIZER = byte_level_tokenizer()
hashes = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 5), max_size=40)


def as_hashes(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


# --- by content -------------------------------------------------------------------------------------------


@given(hashes, hashes)
def test_duplicates_within_a_set_and_across_sets(one: list[int], other: list[int]) -> None:
    assert is_duplicate(as_hashes(one)).tolist() == [value in one[:i] for i, value in enumerate(one)]
    parts = [as_hashes(other[:3]), as_hashes(other[3:])]
    assert also_in(as_hashes(one), parts).tolist() == [value in other for value in one]


@given(hashes, st.floats(0.01, 0.99), st.integers(1, 50), st.randoms())
def test_a_row_is_held_out_by_what_it_says_alone(
    pool: list[int], fraction: float, count: int, random: Any
) -> None:
    border = held_out_below(as_hashes(pool), fraction, None)
    assert is_below(as_hashes(pool), border).tolist() == [value < fraction * 2**64 for value in pool]
    fewest = is_below(as_hashes(pool), held_out_below(as_hashes(pool), None, count))
    assert min(count, len(pool)) <= np.count_nonzero(fewest)
    assert len({value for value, held in zip(pool, fewest, strict=True) if held}) <= count
    shuffled = random.sample(pool, len(pool))
    again = is_below(as_hashes(shuffled), held_out_below(as_hashes(shuffled), None, count))
    assert sorted(zip(pool, fewest, strict=True)) == sorted(zip(shuffled, again, strict=True))


def test_all_of_the_hashes_can_be_held_out() -> None:
    ends = as_hashes([0, 2**64 - 1])
    assert is_below(ends, held_out_below(ends, None, 2)).all()
    assert not is_below(ends, held_out_below(as_hashes([]), None, 2)).any()


# --- the account ------------------------------------------------------------------------------------------


@st.composite
def a_source(draw: st.DrawFn) -> FakeRows:
    rows = []
    for _ in range(draw(st.integers(0, 15))):
        length = draw(st.integers(1, 25))
        kind = draw(st.sampled_from(["all", "none", "some"]))
        some = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        rows.append((range(length), {"all": [True] * length, "none": [False] * length, "some": some}[kind]))
    few = st.frozensets(st.integers(0, 14), max_size=4)
    shown = draw(
        st.lists(st.integers(0, 9) | st.integers(0, 2**64 - 1), min_size=len(rows), max_size=len(rows))
    )
    account = Account(blank_lines=draw(st.integers(0, 3)), bad_rows=draw(st.integers(0, 3)))
    return FakeRows(rows, draw(few), account, shown, draw(few))


@given(st.lists(a_source(), min_size=1, max_size=3), st.sampled_from(["drop", "truncate", "split", "fill"]))
@settings(max_examples=80, deadline=None)
def test_every_row_and_token_is_in_the_account(given: list[FakeRows], how: OnTooLong) -> None:
    sources = tuple(Source(path=f"{i}.jsonl", max_rows=10) for i in range(len(given)))
    data = Data(train=sources, eval_fraction=0.3)
    options, records = CutOptions(8, how, None), [Records(rows, 1) for rows in given]
    sets = [[cut_with(cut_rows, one, options) for one in some] for some in divide(data, records, [])]
    for some in sets:
        for one in some:
            ledger = one.ledger
            left_out = ledger.bad + ledger.empty + ledger.undesirable + ledger.held_out + ledger.dropped
            assert ledger.rows == ledger.used + left_out + ledger.without_target
            assert ledger.used >= ledger.split and ledger.used >= ledger.without_end
            places = {one.examples.source(i) for i in range(len(one.examples))}
            assert ledger.used == len(places) or how == "fill"
            check_tokens(one, how)
        check_examples(some)
    train, *others = (total([one.ledger for one in some]) for some in sets)
    assert train.rows == sum(min(10, len(rows.given)) + rows.account.bad_rows for rows in given)
    assert train.held_out == sum(one.rows for one in others)
    shown = [value for rows in given for value in (rows.hashes or [])[:10]]
    assert train.duplicate == len(shown) - len(set(shown))
    is_held = {shown for some in sets[1:] for one in some for shown in one.content.tolist()}
    is_trained = {shown for one in sets[0] for shown in one.content.tolist()}
    assert not is_held & is_trained


def check_tokens(one: SourceData, how: OnTooLong) -> None:
    """All tokens that were read stand in examples, or were lost, or are of rows that were left out whole."""
    ledger, lengths = one.ledger, one.records.lengths
    whole = int(lengths[one.ids].sum())
    by_cutting = np.intersect1d(one.of("without_target"), one.ids)
    unused = int(np.minimum(lengths[by_cutting], 8).sum())
    overlap = 0
    if how == "split":
        pieces = [max(1, -((1 - int(n)) // 7)) for n in lengths[one.ids]]
        overlap = sum(pieces) - len(pieces)
    assert whole + overlap == ledger.example_tokens + ledger.lost_tokens + unused
    assert ledger.trained_tokens + ledger.masked_tokens == ledger.example_tokens


def check_examples(some: list[SourceData]) -> None:
    data, sums = Dataset(tuple(one.examples for one in some)), total([one.ledger for one in some])
    examples = list(data)
    assert sums.examples == len(examples)
    assert sums.example_tokens == sum(len(example.input_ids) for example in examples)
    assert sums.trained_tokens == sum(example.target_count for example in examples)
    assert all(example.target_count for example in examples)  # never a loss over nothing


def test_the_table_has_the_columns_that_say_something() -> None:
    web = Ledger(rows=1200, examples=1100, example_tokens=50_000, trained_tokens=9000, dropped=100)
    small = Ledger(rows=5, examples=5, example_tokens=50, trained_tokens=40)
    assert table({"web": web, "small": small}) == [
        "        rows  examples  tokens  trained on  too long",
        "web    1,200     1,100  50,000       9,000       100",
        "small      5         5      50          40         0",
        "all    1,205     1,105  50,050       9,040       100",
    ]
    assert total([web, small]).rows == 1205


# --- through files ----------------------------------------------------------------------------------------


def text(*rows: str) -> str:
    return "".join(json.dumps({"text": row}) + "\n" for row in rows)


def answered(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


def loaded(
    files: dict[str, str],
    held_out: tuple[str, ...] = (),
    cache: Cache = IN_MEMORY,
    task: str = "sft",
    **keys: Any,
) -> RunData:
    """All files in the working folder that are not held out are trained on."""
    for name, content in files.items():
        Path(name).write_text(content)
    of_source = keys.pop("of_source", {})
    train = tuple(Source(path=name, **of_source.get(name, {})) for name in files if name not in held_out)
    held = tuple(Source(path=name) for name in held_out)
    return load_data(
        spec_of(task, Data(train=train, eval=held, **{"max_length": 64, **keys})), TOKENIZER, cache
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shown(data: Any) -> list[str]:
    return [TOKENIZER.decode(example.input_ids).removesuffix("<|im_end|>") for example in data]


ROWS = [f"row {i}" for i in range(40)]


def test_rows_that_are_added_move_none_to_the_other_side() -> None:
    before = loaded({"a.jsonl": text(*ROWS[:25])}, eval_fraction=0.3)
    after = loaded({"a.jsonl": text(*ROWS[::-1], *ROWS[5:9])}, eval_fraction=0.3)
    held, now = set(shown(before.held_out[0].data)), set(shown(after.held_out[0].data))
    assert held <= now and now - held <= set(ROWS[25:])
    assert not now & set(shown(after.train)) and now | set(shown(after.train)) == set(ROWS)
    assert 0.1 < len(now) / 40 < 0.5
    assert after.account["train"]["total"]["duplicate"] == 4


def test_a_count_is_that_many_rows() -> None:
    found = loaded({"a.jsonl": text(*ROWS)}, eval_count=7)
    assert len(found.held_out[0].data) == 7 and len(found.train) == 33
    assert [one.name for one in found.held_out] == [None]
    assert set(shown(loaded({"a.jsonl": text(*ROWS)}, eval_count=3).held_out[0].data)) < set(
        shown(found.held_out[0].data)
    )


def test_a_file_and_held_out_rows_are_evaluated_and_rows_shared_with_train_reported() -> None:
    files = {
        "a.jsonl": text(*ROWS[:20]),
        "b.jsonl": text(*ROWS[20:]),
        "test.jsonl": text(*ROWS[18:22], "new"),
    }
    found = loaded(files, ("test.jsonl",), eval_fraction=0.3, of_source={"a.jsonl": {"name": "web"}})
    assert [one.name for one in found.held_out] == ["test", "web", "held_out"]
    assert set(shown(found.held_out[1].data)) <= set(ROWS[:20])
    shared = set(shown(found.train)) & set(shown(found.held_out[0].data))
    assert found.account["held_out"]["test"]["also_in_train"] == len(shared) > 0
    logged = [line for line in found.lines if "are also in data.train" in line]
    assert len(logged) == 1 and logged[0].startswith(f"data.eval test: {len(shared)} of 5 rows")
    assert list(found.account["train"]["sources"]) == ["web", "b"]


def test_mixed_formats_bad_and_long_rows_of_all_files_are_one_error() -> None:
    files = {
        "a.jsonl": '{"text": 1}\n' + text("x"),
        "b.jsonl": "[\n" + text("y"),
        "c.jsonl": text("z") + "{\n",
    }
    with pytest.raises(DataError, match="3 of 5 rows cannot be used") as error:
        loaded(files, ("b.jsonl", "c.jsonl"))
    assert [problem.where for problem in error.value.problems] == ["a.jsonl:1", "b.jsonl:1", "c.jsonl:2"]
    long = {"a.jsonl": text("x" * 70, "y"), "b.jsonl": text("y", "z" * 80)}
    with pytest.raises(DataError, match="2 of 4 rows are longer than data.max_length 64") as error:
        loaded(long, ("b.jsonl",))
    assert list(map(str, error.value.problems)) == [
        "data.max_length: 81 fits all; raise it, or set data.on_too_long: drop or truncate",
        "a.jsonl:1: 71 tokens",
        "b.jsonl:2: 81 tokens",
    ]


def test_all_reasons_of_a_refusal_are_one_error() -> None:
    with pytest.raises(DataError) as error:
        loaded({"a.jsonl": text("x" * 70, "y") + "{\n", "b.jsonl": ""}, ("b.jsonl",))
    assert error.value.title == ("1 of 3 rows cannot be used, 1 of 2 rows is longer than data.max_length 64:")
    assert [problem.where for problem in error.value.problems] == [
        "a.jsonl:3", "data.max_length", "a.jsonl:1"
    ]  # fmt: skip
    empty = {"a.jsonl": text("x", "x"), "b.jsonl": "", "c.jsonl": text("", "")}
    with pytest.raises(DataError) as error:
        loaded(empty, ("b.jsonl", "c.jsonl"), max_duplicate_fraction=0.1)
    assert error.value.title == (
        "no rows to evaluate, no rows are left to evaluate, data.train is over the spec's limits:"
    )
    assert [problem.where for problem in error.value.problems] == [
        "b.jsonl", "data.eval c", "data.max_duplicate_fraction"
    ]  # fmt: skip


def test_what_would_be_refused_is_measured_without_the_rows_in_question() -> None:
    Path("a.jsonl").write_text(text("x" * 70, "y") + "{\n")
    wanted = spec_of("sft", Data(train=(Source(path="a.jsonl"),), max_length=64))
    found = load_data(wanted, TOKENIZER, refuse=False)
    assert shown(found.train) == ["y"] and found.refusal is not None and len(found.refusal.problems) == 3
    assert found.lines[-1] == (
        "data.train: 3 rows gave 1 example of 2 tokens, 1 of them trained on. 1 row was bad, so a run stops. "
        "1 row was longer than data.max_length, so a run stops."
    )
    sums = found.account["train"]["total"]
    assert (sums["rows"], sums["used"], sums["bad"], sums["dropped"]) == (3, 1, 1, 1)


def test_bad_rows_can_be_dropped_counted_and_listed() -> None:
    found = loaded({"a.jsonl": text("x") + "{\n" + text("y") + '{"text": 2}\n'}, on_bad_row="drop")
    assert shown(found.train) == ["x", "y"]
    assert found.account["train"]["total"]["bad"] == found.summary["data/bad"] == 2
    assert [row["source"] for row in found.account["train"]["sources"]["a"]["bad_rows"]] == [
        "a.jsonl:2",
        "a.jsonl:4",
    ]
    assert any(line.startswith("data.train: dropped a.jsonl:4: ") for line in found.lines)


def test_files_of_a_folder_that_are_read_alike_have_one_line() -> None:
    Path("rows").mkdir()
    for i in range(8):
        Path(f"rows/{i}.jsonl").write_text(text(f"x{i}") if i != 3 else answered("q", "a"))
    found = load_data(spec_of("sft", Data(train=(Source(path="rows"),), max_length=64)), TOKENIZER)
    assert [line for line in found.lines if "detected" in line] == [
        'data.train: rows/3.jsonl: detected messages: every row has "messages"',
        'data.train: rows/0.jsonl and 6 more files: detected text: every row has "text"',
    ]


def test_a_file_without_format_is_reported_by_its_first_rows() -> None:
    content = text("x") + "{\n" + text("y", "z") + "{\n" + text("w")
    of_source = {"a.jsonl": {"max_rows": 2}}
    found = loaded({"a.jsonl": content}, on_bad_row="drop", of_source=of_source)
    assert shown(found.train) == ["x", "y"]
    sums = found.account["train"]["total"]
    assert (sums["rows"], sums["bad"], sums["used"]) == (3, 1, 2)
    with pytest.raises(DataError) as error:
        loaded({"a.jsonl": content}, of_source=of_source)
    assert [problem.where for problem in error.value.problems] == ["a.jsonl:2"]


def test_a_file_of_other_rows_is_never_dropped() -> None:
    files = {"a.jsonl": text("x", "y"), "b.jsonl": '{"id": 1}\n{"id": 2}\n'}
    with pytest.raises(DataError, match="no format fits") as error:
        loaded(files, on_bad_row="drop")
    assert [problem.where for problem in error.value.problems] == ["b.jsonl:1"]


LOSSY = {"a.jsonl": text("x" * 70, "y", "", "y", "z") + "{\n"}


@pytest.mark.parametrize(
    ("keys", "logged"),
    [
        (
            {"max_dropped_fraction": 0.3, "on_too_long": "drop"},
            "data.max_dropped_fraction: 3 of 6 rows (0.5) are left out, the limit is 0.3; the first: "
            "a.jsonl:6, a.jsonl:1, a.jsonl:3",
        ),
        (
            {"max_truncated_fraction": 0.1, "on_too_long": "truncate"},
            "data.max_truncated_fraction: 1 of 6 rows (0.167) are truncated, the limit is 0.1; the first: "
            "a.jsonl:1",
        ),
        (
            {"max_duplicate_fraction": 0.0, "on_too_long": "drop"},
            "data.max_duplicate_fraction: 1 of 6 rows (0.167) are duplicates, the limit is 0; the first: "
            "a.jsonl:4",
        ),
    ],
)
def test_a_loss_over_its_limit_stops_the_run(keys: dict[str, Any], logged: str) -> None:
    with pytest.raises(DataError) as error:
        loaded(LOSSY, on_bad_row="drop", **keys)
    assert str(error.value) == f"data.train is over the spec's limits:\n  {logged}"
    limit = next(key for key in keys if key.startswith("max"))
    loaded(LOSSY, on_bad_row="drop", **{**keys, limit: 0.5})


def test_all_exceeded_limits_are_one_error() -> None:
    keys: dict[str, Any] = {
        "max_dropped_fraction": 0.0,
        "max_duplicate_fraction": 0.0,
        "max_truncated_fraction": 0.0,
    }
    with pytest.raises(DataError) as error:
        loaded(LOSSY, on_bad_row="drop", on_too_long="truncate", **keys)
    assert len(error.value.problems) == 3


# --- rows 25 and 26 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "held_out", "keys", "logged"),
    [
        ({"a.jsonl": ""}, (), {}, "no rows to train on:\n  a.jsonl: has no rows"),
        (
            {"a.jsonl": text("x"), "b.jsonl": ""},
            ("b.jsonl",),
            {},
            "no rows to evaluate:\n  b.jsonl: has no rows",
        ),
        (
            {"a.jsonl": text("", "x" * 70)},
            (),
            {"on_too_long": "drop"},
            "data.train: 2 rows were read. 1 row was empty and left out. 1 row was longer than "
            "data.max_length and dropped; change",
        ),
        (
            {"a.jsonl": answered("x", "")[:-1].replace("assistant", "user") + "\n"},
            (),
            {"on_bad_row": "drop"},
            "data.train: 1 row was read. 1 row was bad and dropped; change the keys that leave them out, "
            "or check the rows\n  a.jsonl:1: ",
        ),
        (
            {"a.jsonl": text("x", "y")},
            (),
            {"eval_count": 2},
            "data.train: 2 rows were read. 2 rows were held out;",
        ),
        (
            {"a.jsonl": text("x", "y")},
            (),
            {"eval_fraction": 1e-9},
            "no rows to evaluate:\n  data.eval_fraction: 1e-09 of 2 rows holds out none; raise it, or name",
        ),
    ],
)
def test_row_25_nothing_left_says_what_left_it_out(
    files: dict[str, str], held_out: tuple[str, ...], keys: dict[str, Any], logged: str
) -> None:
    with pytest.raises(DataError) as error:
        loaded(files, held_out, **keys)
    assert logged in str(error.value)
    assert error.value.exit_code == 65


def test_row_25_fewer_rows_than_a_global_batch_are_one_step() -> None:
    found = loaded({"a.jsonl": text("x", "y")})
    assert sorted(Order(found.train, 64, 0).step(5).ids.tolist()) == [0, 1]


@pytest.mark.parametrize(("how", "examples", "figures"), [
    ("drop", ["fits"], {"dropped": 2, "used": 1}),
    ("truncate", ["question too long", "answer too long", "fits"], {"truncated": 2, "without_end": 1}),
])  # fmt: skip
def test_row_26_long_rows_by_the_policy_that_is_asked_for(
    how: str, examples: list[str], figures: dict[str, int]
) -> None:
    rows = {
        "question too long": answered("q" * 200, "short"),
        "answer too long": answered("short", "a" * 200),
        "fits": answered("q", "a"),
    }
    found = loaded({"a.jsonl": "".join(rows.values())}, on_too_long=how)
    assert [list(rows)[int(found.train.source(i)[-1]) - 1] for i in range(len(found.train))] == examples
    sums = found.account["train"]["total"]
    assert {name: sums[name] for name in figures} == figures
    assert all(1 <= example.target_count and len(example.input_ids) <= 64 for example in found.train)
    if how == "truncate":
        assert found.train[0].target_count == len("short") + 1  # the whole answer, with its end


# --- rows 27 and 30 ---------------------------------------------------------------------------------------


def test_row_27_workers_make_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SMALL", 0)  # workers, however small the files are
    started = Mock(side_effect=build.ProcessPoolExecutor)
    monkeypatch.setattr(build, "ProcessPoolExecutor", started)
    Path("rows").mkdir()
    for name, rows in (("a", ROWS), ("b", [row * 3 for row in ROWS])):
        Path(f"rows/{name}.jsonl").write_text(text(*rows))
    sources = (Source(path="rows", weight=2.0), Source(path="rows/b.jsonl", weight=1.0))
    wanted = spec_of("sft", Data(train=sources, max_length=64, eval_fraction=0.2))
    caches = (Cache(Path("none"), 0), Cache(Path("two"), 2), IN_MEMORY)
    one, *others = [load_data(wanted, TOKENIZER, cache) for cache in caches]
    assert started.call_count == 1  # for the source of two blocks
    steps = [Order(one.train, 7, 3).step(i).ids.tolist() for i in range(20)]
    for other in others:
        assert one.identity == other.identity and one.train.fingerprint == other.train.fingerprint
        assert [Order(other.train, 7, 3).step(i).ids.tolist() for i in range(20)] == steps
        assert shown(one.train) == shown(other.train)


@pytest.mark.parametrize("changed", ["a.jsonl", "test.jsonl"])
def test_row_30_a_changed_file_is_known_by_its_source(changed: str) -> None:
    files = {"a.jsonl": text(*ROWS), "b.jsonl": text("x"), "test.jsonl": text("y")}
    then = loaded(files, ("test.jsonl",), of_source={"a.jsonl": {"name": "web"}}).identity
    again = loaded(files, ("test.jsonl",), of_source={"a.jsonl": {"name": "web"}}).identity
    assert list(other_rows(json.loads(json.dumps(then)), again)) == []
    files[changed] = files[changed].replace("row 7", "row 8").replace("y", "z")
    now = loaded(files, ("test.jsonl",), of_source={"a.jsonl": {"name": "web"}}).identity
    logged = {"a.jsonl": "data.train web had 40 rows of ", "test.jsonl": "data.eval had 1 rows of "}
    found = list(other_rows(json.loads(json.dumps(then)), now))
    assert len(found) == 1 and found[0].startswith(logged[changed])
    assert found[0].endswith("now the same number of different rows")


def test_the_error_says_which_max_length_keeps_how_many_rows() -> None:
    long = {"a.jsonl": text(*("x" * n for n in (10, 80, 90, 100, 150, 400)))}
    with pytest.raises(DataError) as error:
        loaded(long)
    assert [problem.message for problem in error.value.problems[:2]] == [
        "96 fits 3 of 6 rows, 128 fits 4 of 6 rows, 256 fits 5 of 6 rows, 401 fits all; raise it, or set "
        "data.on_too_long: drop or truncate",
        "81 tokens",
    ]
    assert len(error.value.problems) == 4


def test_placeholders_are_warned_about() -> None:
    found = loaded({"a.jsonl": text("I am {{name}}", "I am dsft", "by {{ author }}")})
    assert (
        "data.train: warning: a.jsonl: 2 of its first rows contain a placeholder such as {{name}} "
        "(line 1, 3), and are trained on as they are"
    ) in found.lines


def test_the_first_rows_are_checked_without_a_tokenizer() -> None:
    Path("a.jsonl").write_text(text("x") + '{"text": 2}\n' * 4)
    Path("b.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    sources = (Source(path="a.jsonl"), Source(path="b.jsonl"), Source(path="builtin:quickstart"))
    with pytest.raises(DataError) as error:
        check_first_rows(spec_of("sft", Data(train=sources, max_length=64)))
    first, second = map(str, error.value.problems)
    assert first == 'a.jsonl:2, a.jsonl:3, a.jsonl:4 and 1 more: "text" is a number; it must be a string'
    assert second.startswith('b.jsonl:1: no format fits the keys "question", "answer"')
    renamed = Source(path="a.jsonl", format="messages", columns={"tools": "tol"})
    (warning,) = check_first_rows(
        spec_of("sft", Data(train=(sources[2], renamed), max_length=64, on_bad_row="drop"))
    )
    absent = 'a.jsonl: columns names "tol", which its first rows, with "text", do not have'
    assert warning == f"{absent}; a run refuses what no row has"
    assert not check_first_rows(spec_of("sft", Data(train=sources[::2], max_length=64, on_bad_row="drop")))
