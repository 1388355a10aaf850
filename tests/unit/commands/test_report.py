"""`dsft report`: what the files of a run say is on the page, for one run and for several; nothing of them is
HTML; what is absent is left out."""

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.commands import report
from dsft.errors import DsftError, MissingInputError, StorageError
from dsft.report import curves


def run(name: str, losses: list[Any], *, spec: str = "", **files: Any) -> Path:
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    records = [
        {"train/global_step": step, "train/loss": loss, "train/grad_norm": 1.0, "train/learning_rate": 1e-3,
         "perf/tokens_per_second": 1000.0 * step, "perf/step_time": 0.5}
        for step, loss in enumerate(losses, 1)
    ]  # fmt: skip
    records.append({"train/global_step": len(losses), "eval/loss": float(losses[-1]) + 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "spec.yaml").write_text(spec or f"name: {name}\noptim: {{learning_rate: 0.001}}\n")
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cells(text: str) -> list[list[str]]:
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]


def test_one_run() -> None:
    gib = 2**30
    run(
        "one", [3.0, 2.0, 1.5],
        memory={"phases": {"steady": {"gpu": {"measured": 3 * gib, "above_start": 2 * gib, "planned": gib}}}},
        data={"train": {"total": {"rows": 1200, "bad": 0, "truncated": 7}}, "eval": {"total": {"rows": 3}}},
        versions={"torch": "2.13.0"},
    )  # fmt: skip
    done = CliRunner().invoke(app, ["report", "one"])
    assert (done.exit_code, done.output) == (0, "wrote runs/one/report.html\n")
    text = Path("runs/one/report.html").read_text()
    found = cells(text)
    assert ["training loss, first step", "3.0000"] in found
    assert ["training loss, last step", "1.5000"] in found
    assert ["held-out loss, lowest", "2.5000 at step 3"] in found
    assert ["tokens per second, median", "2,000"] in found
    assert ["steady, gpu", "3.00 GiB", "2.00 GiB", "1.00 GiB"] in found
    assert ["rows", "1,200", "3"] in found and ["truncated", "7", "0"] in found
    assert not any(row[0] == "bad" for row in found)
    assert text.count("<svg") == 1 and "torch: 2.13.0" in text and "learning_rate: 0.001" in text
    assert not re.search(r"(src|href)=\"(?!#)", text)  # nothing is loaded


def test_head_of_a_run() -> None:
    """When it was started, how long it took, on what, and what was typed."""
    spec = (
        "task: dpo\nmodel: {name_or_path: a/b, lora: {rank: 8}}\ndata: {train: [{path: x.json}, {path: y}]}\n"
    )
    ranks = [{"rank": rank, "host": "gpu1", "device": "NVIDIA H100"} for rank in range(2)]
    folder = run("one", [1.0], spec=spec, ranks=ranks)
    starts = (
        "2026-11-25T10:00:00  dsft/train.py one.yaml",
        "2026-11-25T11:00:00+00:00  dsft/train.py two.yaml",
    )
    (folder / "command.txt").write_text("".join(f"{start}\n" for start in starts))
    end = datetime(2026, 11, 26, 12, 30, 1, tzinfo=UTC).timestamp()
    os.utime(folder / "metrics.jsonl", (end, end))
    found = cells(report.write_report(["one"], [], None).read_text())
    assert found[1:8] == [
        ["state", "stopped"],
        ["time", "2026-11-25 10:00 to 2026-11-26 12:30 UTC (1 day, 2:30:01, started 2 times)"],
        ["task", "dpo"],
        ["model", "a/b, adapters of rank 8"],
        ["data", "x.json, y"],
        ["devices", "2 × NVIDIA H100"],
        ["command", "dsft/train.py two.yaml"],
    ]


def test_answers_of_a_file() -> None:
    run("one", [1.0])
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "<b>2 + 2?</b>"}]
    row = {"source": "x.jsonl:1", "prompt": chat, "answer": "4", "reference": "Four."}
    lines = [row, *({**row, "source": f"x.jsonl:{n}", "reference": None} for n in range(2, 100))]
    Path("answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(app, ["report", "one", "--answers", "answers.jsonl"])
    assert done.exit_code == 0
    text = Path("runs/one/report.html").read_text()
    assert "system: Be short.\nuser: &lt;b&gt;2 + 2?&lt;/b&gt;</td><td>4</td><td>Four.</td>" in text
    assert "Answers: answers.jsonl" in text and text.count("<td>x.jsonl:") == 50
    assert "Answers" not in report.write_report(["one"], [], None).read_text()
    Path("answers.jsonl").rename("runs/one/answers.jsonl")  # where dsft answer writes it by default
    text = report.write_report(["one"], [], None).read_text()
    assert "Answers: one" in text and text.count("<td>x.jsonl:") == 50
    Path("runs/one/answers.jsonl").write_text("")
    text = report.write_report(["one"], [], None).read_text()
    assert "answers.jsonl is no file that dsft answer wrote" in text and "<svg" in text
    for content in ("", "[1]", '{"prompt": "a"}', "not JSON", "\udc80"):
        Path("other.jsonl").write_text(content, errors="surrogateescape")
        with pytest.raises(MissingInputError, match=r"other\.jsonl is no file that dsft answer wrote"):
            report.write_report(["one"], [], None, Path("other.jsonl"))
    with pytest.raises(MissingInputError, match="absent cannot be read"):
        report.write_report(["one"], [], None, Path("absent"))


def test_several_runs_are_side_by_side() -> None:
    run("one", [3.0, 2.0])
    run("two", [3.0, 1.0, 0.5], spec="name: two\noptim: {learning_rate: 0.01}\ntrain: {seed: 1}\n")
    path = report.write_report(["one", "runs/two"], [], Path("both.html"))
    found = cells(path.read_text())
    assert ["training loss, last step", "2.0000", "0.5000"] in found and ["steps", "2", "3"] in found
    assert ["optim.learning_rate", "0.001", "0.01"] in found and ["train.seed", "", "1"] in found
    assert path.read_text().count("<svg") == 3


def test_what_files_hold_is_text() -> None:
    name = "<script>alert(1)</script>"
    run("x", [1.0], spec=f"name: '{name}'\n", data={"train": {"total": {f"{name}\x1b": 1}}})
    text = report.write_report(["x"], [], None).read_text()
    assert "<script" not in text and "\x1b" not in text and "&lt;script&gt;" in text


def test_names_are_not_formulas_and_stay_distinct() -> None:
    run("a$\\frac{$b", [1.0])
    run("other/same", [2.0])
    run("same", [3.0])
    page = report.write_report(["a$\\frac{$b", "same", "runs/other/same", "runs/same"], [], None).read_text()
    assert ["training loss, last step", "1.0000", "3.0000", "2.0000"] in cells(page)
    assert ["", "a$\\frac{$b", "runs/same", "runs/other/same"] in cells(page)


@pytest.mark.parametrize(
    "content", [3, [1], {"phases": [1]}, {"phases": {"x": 1}}, {"train": {"total": {"a": "x"}}}]
)
def test_a_damaged_file_counts_as_absent(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "svg", lambda drawn: "")  # which takes half a second
    folder = run("x", [1.0], spec="model: 3\n", memory=content, data=content)
    text = report.write_report(["x"], [], None).read_text()
    assert "<h2>Results" in text and "<h2>Memory" not in text
    (folder / "spec.yaml").write_text("a: " + "[" * 5000)
    assert "spec.yaml of x" not in report.write_report(["x"], [], None).read_text()


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))


@pytest.mark.parametrize("spec", [BOMB, "a: &a {b: *a}\n", "\ud800: '\\uD800'", Path("/dev/zero")])
def test_a_spec_without_end_is_left_out(spec: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "svg", lambda drawn: "")
    run("one", [1.0])
    path = run("two", [1.0]) / "spec.yaml"
    if isinstance(spec, Path):
        path.unlink()
        path.symlink_to(spec)
    else:
        path.write_text(spec, errors="surrogatepass")
    text = report.write_report(["one", "two"], [], None).read_text()
    assert "spec.yaml of one" in text and "spec.yaml of two" not in text


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "svg", lambda drawn: "")
    folder = run("x", [1.0], versions={"torch": "\ud800"})
    steady = f'{{"phases": {{"steady": {{"gpu": {{"measured": {10**400}}}}}}}}}'
    (folder / "memory.json").write_text(steady)
    os.mkfifo(folder / "data.json")
    text = report.write_report(["x"], [], None).read_text()
    assert "memory.json holds an integer of more than 300 digits" in text
    assert "data.json cannot be read (it is a named pipe, not a file)" in text
    assert r"torch: &#34;\uD800&#34;" in text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, inside matplotlib
def test_records_of_any_size_are_shown_or_left_out() -> None:
    folder = run("x", [1.7e308, -1.7e308] * 40)
    lines = [
        f'{{"train/global_step": 81, "train/loss": {10**400}}}',
        f'{{"train/global_step": {10**400}, "train/loss": 1.0}}',
        f'{{"train/global_step": {10**299}, "eval/\\ud800/loss": 1.0}}',
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    text = report.write_report(["x"], [], None).read_text()
    assert "<h2>Curves</h2>" in text and f"{10**299:,}" in text
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    with pytest.raises(MissingInputError, match="it is a device, not a file"):
        report.write_report(["x"], [], None)


def test_a_name_that_is_not_utf_8_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "figure", lambda name, records: drawn.append(name))
    drawn: list[str] = []
    run(os.fsdecode(b"caf\xe9"), [1.0], spec="task: sft\n")
    text = report.write_report([os.fsdecode(b"caf\xe9")], [], None).read_text()
    assert r"<title>caf\udce9</title>" in text
    curves.figure(os.fsdecode(b"caf\xe9"), [{"train/global_step": 1}])


def test_a_run_without_files_is_reported_as_far_as_it_got() -> None:
    folder = run("bare", ["NaN"])
    for name in ("memory.json", "spec.yaml"):
        (folder / name).write_text("[")
    text = report.write_report(["bare"], [], None).read_text()
    assert "Memory" not in text and "<h2>Results" in text


def test_only_a_page_of_its_own_is_replaced() -> None:
    folder = run("one", [1.0])
    record = (folder / "metrics.jsonl").read_bytes()
    Path("link.html").symlink_to(folder / "metrics.jsonl")
    for name in ("runs/one/metrics.jsonl", "link.html"):
        done = CliRunner().invoke(app, ["report", "one", "--out", name])
        assert isinstance(done.exception, StorageError)
        assert str(done.exception).startswith(
            f"{name}: this file is not a page of dsft report, and is not over"
        )
    assert (folder / "metrics.jsonl").read_bytes() == record
    page = report.write_report(["one"], [], None)
    page.write_text(page.read_text() + "edited")
    assert not report.write_report(["one"], [], None).read_text().endswith("edited")
    page.write_text("<!doctype html>\nmine")
    with pytest.raises(StorageError, match="name another file with --out"):
        report.write_report(["one"], ["What?"], None)  # before any question is asked


def test_misuse() -> None:
    run("one", [1.0])
    Path("runs/empty/logs").mkdir(parents=True)
    with pytest.raises(MissingInputError, match="neither the folder of a run nor the name"):
        report.write_report(["none"], [], None)
    with pytest.raises(MissingInputError, match=r"no step in metrics\.jsonl yet"):
        report.write_report(["empty"], [], None)
    with pytest.raises(StorageError, match="name another file with --out"):
        report.write_report(["one"], [], Path("no/such/folder.html"))
    with pytest.raises(DsftError, match="has no export"):
        report.write_report(["one"], ["What?"], None)
