"""`dsft preview`: rows, marks, figures, problems, exit codes."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dsft.data.sets import load
from tests.unit.preview.conftest import ROWS, Preview, talk

DOCS = Path(__file__).parents[3] / "docs" / "preview.md"

MIXED = [talk("a?", "one"), "no row", talk("a?", "one"), talk("b?", "x" * 60), talk("c?", "y" * 90)]
PAIRS = [{"prompt": "Say hi.", "chosen": f"Hi {i}", "rejected": f"Hit {'no ' * i}"} for i in range(1, 4)]

# --- rows -------------------------------------------------------------------------------------------------


def test_json_has_the_place_of_each_row_and_its_targets(preview: Preview) -> None:
    code, out, err = preview("--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["source"] for row in rows] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    assert all(row.keys() == {"source", "input_ids", "tokens", "trained"} for row in rows)
    for row, given in zip(rows, ROWS, strict=True):
        assert len(row["input_ids"]) == len(row["tokens"]) == len(row["trained"])
        trained = "".join(text for text, on in zip(row["tokens"], row["trained"], strict=True) if on)
        assert trained == given["messages"][1]["content"] + "<|im_end|>"


def test_marks_without_a_terminal(preview: Preview) -> None:
    _, out, _ = preview("--rows", "2")
    assert "⟦two<|im_end|>⟧↵\n" in out and "⟦a␣␣b⇥c<|im_end|>⟧" in out
    assert "row 1, rows.jsonl:1, 28 tokens, 4 trained on" in out and "row 3" not in out and "\x1b" not in out


@pytest.mark.parametrize("row", ["2", "rows.jsonl:2"])
def test_one_row_in_full(preview: Preview, row: str) -> None:
    code, out, _ = preview("--row", row)
    assert code == 0 and "row 2, rows.jsonl:2" in out and "row 1" not in out
    assert "⟦a┊␣┊␣┊b┊⇥┊c┊<|im_end|>⟧" in out
    assert "      28       99  yes      c\n" in out and "      30       10  no       ↵\n" in out


@pytest.mark.parametrize("row", ["0", "4", "rows.jsonl:9", "none"])
def test_a_row_that_is_not_there(preview: Preview, row: str) -> None:
    code, out, err = preview("--row", row)
    assert (code, out) == (2, "") and f"--row: '{row}' is not one of the rows" in err


def test_a_row_that_is_left_out(preview: Preview) -> None:
    Path("other.jsonl").write_text(json.dumps(talk("?", "!")), encoding="utf-8")
    code, out, err = preview("--row", "rows.jsonl:4", rows=MIXED)
    assert (
        code == 65
        and "rows.jsonl:4, 83 tokens, 61 trained on, left out, longer than data.max_length, so a run stops\n"
        in out
    )
    labelled = [{"prompt": "a?", "completion": "b", "label": label} for label in (True, False)]
    _, out, _ = preview(
        "--row", "rows.jsonl:2", "data.train=[{path: rows.jsonl, format: kto}]", rows=labelled
    )
    assert "trained on, labeled undesirable, left out\n" in out
    _, out, _ = preview(
        "--row", "rows.jsonl:1", "data.train=[{path: other.jsonl}]", "data.eval=[{path: rows.jsonl}]"
    )
    assert "trained on, held out\n" in out
    code, out, err = preview("--row", "rows.jsonl:2", rows=MIXED)
    assert (code, out) == (2, "")
    assert "'rows.jsonl:2' is not one of the rows that are used; it cannot be" in err


def test_a_truncated_row_shows_what_is_kept(preview: Preview) -> None:
    _, out, _ = preview(
        "--row", "1", rows=[talk("a?", "x" * 90)], data="max_length: 64, on_too_long: truncate"
    )
    assert "row 1, rows.jsonl:1, 64 tokens, " in out and "64 of 113 tokens kept, from token " in out


def test_packed_text_has_its_pieces(preview: Preview) -> None:
    rows = [{"text": "ab"}, {"text": "cdefgh"}]
    _, out, _ = preview(rows=rows, task="pretrain", data="max_length: 5, packing: true")
    assert "row 1, rows.jsonl:1, 5 tokens, 3 trained on, 2 pieces\n── piece 1, tokens 0 to 2\n" in out
    assert "a⟦b<|im_end|>⟧\n── piece 2, tokens 3 to 4\nc⟦d⟧" in out
    assert "begins at token 2 of rows.jsonl:2" in out


def test_labels(preview: Preview) -> None:
    rows = [{"prompt": "a?", "completion": "b", "label": label} for label in (True, False)]
    _, out, _ = preview("--rows", "2", rows=rows, task="kto")
    titles = [line for line in out.splitlines() if line.startswith("row ")]
    assert [title.rpartition(", ")[2] for title in titles[:2]] == ["desirable", "undesirable"]
    assert "1 undesirable, 1 desirable" in out
    _, out, _ = preview("--rows", "1", rows=[PAIRS[0] | {"margin": 0.5}], task="reward")
    assert " trained on, margin 0.5, two answers after " in out


def test_pairs(preview: Preview) -> None:
    code, out, _ = preview("--rows", "1", rows=PAIRS, task="dpo")
    assert code == 0 and "small: dpo, 3 pairs" in out and "row 2" not in out.split("first micro-batch")[0]
    title = "27 tokens, 13 trained on, two answers after a prompt of 7 tokens\n"
    assert f"row 1, rows.jsonl:1, {title}── the prompt and the chosen answer, tokens 0 to 11\n" in out
    assert "── the rejected answer after the prompt, tokens 12 to 26\n" in out
    assert "padded: 4 rows of" in out and ", rejected, " in out
    one = {
        "task": "dpo",
        "data": "max_length: 22, packing: true",
        "train": "micro_batch_size: 1, accumulation_steps: 1",
    }
    _, out, _ = preview(rows=PAIRS, **one)
    assert "two answers after a prompt of 7 tokens, computed once\n" in out
    assert "packed: 1 pair in one row of" in out and ", rejected, from position " in out
    code, out, _ = preview(rows=ROWS, task="dpo")
    assert code == 65 and out.startswith("small: dpo, 0 pairs\n")
    _, out, _ = preview("--problems", rows=[*PAIRS, PAIRS[0]], task="dpo", data="max_length: 20")
    assert " 1 pair repeats an earlier pair." in out
    assert "1 pair longer than data.max_length, so a run stops\n  rows.jsonl:3: 21 tokens" in out
    assert "1 pair repeating an earlier one\n  rows.jsonl:4: repeats rows.jsonl:1\n" in out


def test_first_micro_batch_packed_and_padded(preview: Preview) -> None:
    packed, padded = (preview(data=f"max_length: 64, packing: {way}")[1] for way in ("true", "false"))
    assert "packed: 3 examples in one row of 85 tokens" in packed and "positions 0 to 30" in packed
    assert "padded: 2 rows of 31 positions" in padded and "positions of padding" in padded


# --- figures ----------------------------------------------------------------------------------------------


def test_lengths_steps_and_padding(preview: Preview) -> None:
    rows = [talk("q", "x" * n) for n in range(1, 9)]
    found = json.loads(preview("--json", rows=rows, train="micro_batch_size: 2, accumulation_steps: 1")[1])
    base = found["lengths"]["longest"] - 8
    assert found["lengths"]["p50"] == base + 4 and found["lengths"]["p95"] == base + 8
    assert sum(count for *_, count in found["lengths"]["bins"]) == found["examples"] == 8
    assert (found["steps"]["per_epoch"], found["steps"]["total"]) == (4, 4)
    assert 0 < found["steps"]["padding"]["padded"] < 0.3 and found["steps"]["padding"]["packed"] == 0
    tokens = sum(base + n for n in range(1, 9))
    assert found["steps"]["mean_tokens"] == tokens / 4
    assert found["trained_share"] == pytest.approx(sum(n + 1 for n in range(1, 9)) / tokens)


def test_batch_sizes_that_need_several_ranks(preview: Preview) -> None:
    sizes = "global_batch_size: 12, micro_batch_size: 2, accumulation_steps: 2"
    assert "data-parallel ranks 3" in preview(train=sizes)[1]


# --- problems ---------------------------------------------------------------------------------------------


def test_problems_where_a_run_would_stop(preview: Preview) -> None:
    code, out, err = preview("--problems", rows=MIXED)
    assert code == 65 and "row 1," not in out
    assert "1 row cannot be read\n  rows.jsonl:2: " in out
    assert "1 row repeating an earlier one\n  rows.jsonl:3: repeats rows.jsonl:1\n" in out
    assert "2 rows longer than data.max_length, so a run stops\n  rows.jsonl:4: 83 tokens, data" in out
    assert err.startswith(
        "error: 1 of 5 rows cannot be used, 2 of 4 rows are longer than data.max_length 64:\n  rows.jsonl:2: "
    )
    assert "\n  data.max_length: 96 fits 3 of 4 rows, 113 fits all; raise it, or set data.on_too_long" in err
    assert "2 rows were longer than data.max_length, so a run stops." in out and "dropped" not in out


def test_problems_that_stop_no_run(preview: Preview) -> None:
    data = "max_length: 64, on_bad_row: drop, on_too_long: truncate"
    code, out, err = preview("--problems", rows=MIXED, data=data)
    assert (code, err) == (0, "")
    assert "2 rows truncated\n  rows.jsonl:4: 64 of 83 tokens kept, from token " in out
    assert preview("--problems")[1].endswith("\nno problems\n")


def test_duplicates_of_rows_in_another_file(preview: Preview) -> None:
    preview()
    Path("other.jsonl").write_text(
        json.dumps(ROWS[2]) + "\n" + json.dumps(talk("?", "!")) + "\n", encoding="utf-8"
    )
    both = "data.train=[{path: rows.jsonl}, {path: other.jsonl}]"
    _, out, _ = preview("--problems", both)
    assert out.endswith("1 row repeating an earlier one\n  other.jsonl:1: repeats rows.jsonl:3\n")
    assert json.loads(preview("--json", both)[1])["ledger"].keys() == {"rows", "other"}


def test_rows_that_are_held_out_have_their_window_too(preview: Preview) -> None:
    rows = [talk(f"{i}?", "x" * 90) for i in range(9)]
    data = "max_length: 64, on_too_long: truncate, eval_count: 4"
    _, out, _ = preview("--problems", rows=rows, data=data)
    assert "5 examples" in out and "9 rows truncated" in out and out.count(": 64 of 113 tokens kept") == 9
    _, out, _ = preview("--problems", "data.train=[{path: rows.jsonl, max_rows: 6}]", rows=rows, data=data)
    assert "2 examples" in out and "6 rows truncated" in out


def test_nothing_left(preview: Preview) -> None:
    code, out, err = preview(rows=["no row"])
    assert code == 65 and "0 examples" in out and "rows.jsonl:1" in err
    assert preview("--row", "1", rows=["no row"])[0] == 2
    code, out, _ = preview("--problems", data="max_length: 9")
    assert code == 65
    assert "3 rows longer than data.max_length, so a run stops\n  rows.jsonl:1: 28 tokens" in out
    code, out, _ = preview("--rows", "1", "data.eval=[{path: bad.jsonl}]")
    assert code == 66
    Path("bad.jsonl").write_text("1\n", encoding="utf-8")
    code, out, err = preview("--rows", "1", "data.eval=[{path: bad.jsonl}]")
    assert code == 65 and "3 examples" in out and "row 1, rows.jsonl:1" in out and "bad.jsonl:1" in err


@pytest.mark.parametrize("rows", [ROWS, MIXED, ["no row"]])
def test_the_data_is_loaded_once(preview: Preview, rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=load.tokenized_rows)
    monkeypatch.setattr(load, "tokenized_rows", read)
    preview("data.train=[{path: rows.jsonl}]", "data.eval=[{path: rows.jsonl}]", rows=rows)
    assert read.call_count == 2  # of each source


def test_rows_left_out_of_an_empty_set_are_counted(preview: Preview) -> None:
    code, out, err = preview("--problems", "data.eval_count=3")
    assert code == 65
    assert "3 rows gave 0 examples of 0 tokens, 0 of them trained on. 3 rows were held out." in out
    assert err.startswith(
        "error: no rows are left to train on:\n  data.train: 3 rows were read. 3 rows were held out;"
    )


def test_worst_rows(preview: Preview) -> None:
    rows = [talk("a?", "one"), talk("a?", "one"), talk("b?", "x" * 60), talk("why? " * 5, "y")]
    found = json.loads(preview("--worst", "--json", rows=rows, data="max_length: 99")[1])["worst"]
    assert found["longest"][0]["source"] == "rows.jsonl:3"
    assert found["smallest share of trained tokens"][0]["source"] == "rows.jsonl:4"
    assert [row["why"] for row in found["repeated most often"]] == ["2 rows have this content"]
    assert "most tokens cut off" not in found


# --- what it needs ----------------------------------------------------------------------------------------


def test_what_is_not_there(preview: Preview) -> None:
    assert preview("data.train=[{path: none.jsonl}]")[0] == 66
    code, _, err = preview("--html", "none/page.html")
    way_out = "create it, or name another file with --html"
    assert (code, err) == (74, f"error: none/page.html: the folder none does not exist; {way_out}\n")
    assert preview("--html", ".")[0] == 74 and not Path("page.html").exists()


def test_a_file_that_is_not_a_page_is_not_overwritten(preview: Preview) -> None:
    kept = {"precious.jsonl": '{"text": "a"}\n', "other.html": "<!doctype html>\n<p>mine", "link.html": ""}
    Path("link.html").symlink_to("other.html")
    for name in kept:
        if not Path(name).is_symlink():
            Path(name).write_text(kept[name])
    for name in kept:
        code, _, err = preview("--html", name)
        assert code == 74
        assert f"{name}: this file is not a page of dsft preview, and is not overwritten" in err
    assert {name: Path(name).read_text() for name in kept} == kept | {"link.html": kept["other.html"]}
    Path("page.html").touch()
    for _ in range(2):  # over an empty file, and over its own page
        assert preview("--html", "page.html")[0] == 0


# --- docs -------------------------------------------------------------------------------------------------


def lines_in_order(wanted: str, printed: str) -> bool:
    found = iter(printed.splitlines())
    return all(line in found for line in wanted.splitlines() if line != "…")


def test_what_the_docs_show_is_printed(preview: Preview) -> None:
    quickstart, problems = re.findall(
        r"```\n\$ dsft .*?\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL
    )
    bird = talk("Name a bird that cannot fly, please.", "The ostrich.")
    rows = [talk("1 + 1?", "2"), talk("1 + 1?", "2"), bird, {"message": "?"}]
    kept = "max_length: 48, on_too_long: truncate, on_bad_row: drop"
    printed = preview("--problems", rows=rows, data=kept)[1]
    assert lines_in_order(problems, printed.replace("rows.jsonl", "hand.jsonl").replace("small:", "hand:"))
    arguments = ("name=quickstart", "data.train=[{path: builtin:quickstart}]", "train.max_steps=200")
    sizes = "global_batch_size: 8, micro_batch_size: 8"
    printed = preview("--rows", "1", *arguments, data="max_length: 512, packing: true", train=sizes)[1]
    assert lines_in_order(quickstart, printed)
