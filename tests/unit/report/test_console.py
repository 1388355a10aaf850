"""What rank 0 prints on a terminal and in a log."""

import io
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as Terminal

from dsft.data.cache.store import TokenizeProgress
from dsft.report import console as console_module
from dsft.report.console import Console, task_progress, with_bar
from dsft.report.sinks import Report
from dsft.spec.schema import Wandb

STEP = "train/global_step"


def reported(mode: Any) -> Any:
    """What a report reads of a spec."""
    return SimpleNamespace(wandb=Wandb(mode=mode), tensorboard=False, swanlab=None)


TRAINING = {"train/loss": 2.34567, "train/learning_rate": 5e-5, "perf/tokens_per_second": 12345.6}


def printed_lines(is_terminal: bool, log: io.StringIO | None = None) -> str:
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=is_terminal, width=100)
    console = Console(total_steps=10, first_step=2, log=log, terminal=terminal)
    console.line("batch 64 = 2 × 4 × 8 [per rank] :smile:")
    console.metrics({STEP: 6} | TRAINING)
    console.metrics({STEP: 6, "eval/loss": 2.0, "eval/perplexity": 7.389})
    console.line("a line in between")
    console.metrics({STEP: 10} | TRAINING)
    console.close()
    return out.getvalue()


def test_plain_lines_in_a_log() -> None:
    text = printed_lines(is_terminal=False)
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert lines[0] == "batch 64 = 2 × 4 × 8 [per rank] :smile:"
    assert lines[1].startswith("step 6/10  loss 2.3457  lr 5e-05  12,346 tokens/s")
    assert re.search(r"\d+:\d\d:\d\d left$", lines[1])
    assert lines[2] == "step 6/10  held-out loss 2.0000  held-out perplexity 7.389"
    assert lines[4] == "step 10/10  loss 2.3457  lr 5e-05  12,346 tokens/s"


def test_every_tenth_step_is_printed_and_every_step_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a resumed run too, where a record is every third step, and every step with -v."""

    def printed(steps: range, first: int, total: int) -> tuple[list[int], int]:
        out, log = io.StringIO(), tmp_path / "log"
        with log.open("w", encoding="utf-8") as file:
            console = Console(total, first, file, Terminal(file=out, width=100))
            for step in steps:
                console.metrics({STEP: step} | TRAINING)
            console.close()
        lines = [line for line in out.getvalue().splitlines() if line.startswith("step ")]
        return [int(line.split()[1].split("/")[0]) for line in lines], len(log.read_text().splitlines())

    monkeypatch.delenv("DSFT_VERBOSE", raising=False)
    assert printed(range(1, 34), 0, 33) == ([1, 10, 20, 30, 33], 33)
    assert printed(range(105, 131), 104, 130) == ([105, 110, 120, 130], 26)
    assert printed(range(3, 34, 3), 0, 34) == ([3, 12, 21, 30], 11)
    monkeypatch.setattr("dsft.report.console.STEP_SECONDS", 0.0)  # every step takes longer
    assert printed(range(1, 4), 0, 33)[0] == [1, 2, 3]
    monkeypatch.undo()
    monkeypatch.setenv("DSFT_VERBOSE", "1")
    assert printed(range(1, 4), 0, 33)[0] == [1, 2, 3]


def test_preference_pairs_show_accuracy_and_margin() -> None:
    out = io.StringIO()
    console = Console(total_steps=10, first_step=2, terminal=Terminal(file=out, width=100))
    figures = {"loss": 0.5, "rewards/accuracies": 0.625, "rewards/margins": 0.03125}
    console.metrics({STEP: 10} | {f"train/{name}": value for name, value in figures.items()})
    console.metrics({STEP: 10} | {f"eval/{name}": value for name, value in figures.items()})
    assert out.getvalue().splitlines() == [
        "step 10/10  loss 0.5000  accuracy 0.625  margin 0.0312",
        "step 10/10  held-out loss 0.5000  held-out accuracy 0.625  held-out margin 0.0312",
    ]


def test_a_bar_on_a_terminal() -> None:
    text = printed_lines(is_terminal=True)
    assert "\x1b[" in text and "━" in text  # it is drawn in place
    assert "10/10" in text and "loss 2.3457" in text and "12,346 tokens/s" in text
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    for whole in ("batch 64 = 2 × 4 × 8 [per rank] :smile:", "a line in between"):
        assert any(line.strip() == whole for line in lines)


def test_a_narrow_terminal_shows_step_loss_and_remaining_time() -> None:
    """The learning rate goes first, then the gradient norm, then the bar; nothing is cut."""
    line = "step 26/480  loss 7.2782  grad norm 0.635  lr 0.003  7,509 tokens/s  0:01:32 left"
    bar = "━" + "─" * 19
    assert {columns: with_bar(line, 26, 480, columns) for columns in (140, 100, 80, 62, 40)} == {
        140: f"{bar}  {line}",
        100: f"{bar}  step 26/480  loss 7.2782  grad norm 0.635  7,509 tokens/s  0:01:32 left",
        80: f"{bar}  step 26/480  loss 7.2782  7,509 tokens/s  0:01:32 left",
        62: "step 26/480  loss 7.2782  7,509 tokens/s  0:01:32 left",
        40: "step 26/480  loss 7.2782  0:01:32 left",
    }
    out = io.StringIO()
    console = Console(10, 2, terminal=Terminal(file=out, force_terminal=True, width=62))
    console.metrics({STEP: 6, "train/grad_norm": 0.5} | TRAINING)
    console.close()
    shown = re.search(r"step 6/10  loss 2.3457  12,346 tokens/s  0:00:\d\d left", out.getvalue())
    assert shown and "…" not in out.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_log_file_has_plain_lines_in_either_case(is_terminal: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    printed_lines(is_terminal, path.open("w", encoding="utf-8"))  # type: ignore[arg-type]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5 and "\x1b" not in path.read_text(encoding="utf-8")
    assert lines[1] == "step 6/10  loss 2.3457  lr 5e-05  12,346 tokens/s"


def test_other_ranks_print_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report.open(tmp_path / "run", 10, 0, reported("offline"), {}, enabled=False)
    report.line("a line")
    report.metrics({STEP: 1} | TRAINING)
    report.close({})
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_rank_0_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report.open(tmp_path / "run", 10, 0, reported("disabled"), {}, enabled=True)
    report.line("a line")
    report.metrics({STEP: 1} | TRAINING)
    report.close({})
    assert capsys.readouterr().out.splitlines()[0] == "a line"
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["run/logs/train.log", "run/metrics.jsonl"]


def test_lines_of_several_threads_stay_whole() -> None:
    """A stream that lets other threads in within a line, as a pipe's buffer may."""

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.002)
            return super().write(text)

    out = Slow()
    console = Console(total_steps=10, first_step=0, terminal=Terminal(file=out))
    threads = [threading.Thread(target=console.line, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    console.metrics({STEP: 1, "train/loss": 1.0})
    for thread in threads:
        thread.join()
    printed = sorted(re.sub(r"  .*", "", line) for line in out.getvalue().splitlines())
    assert printed == ["step 1/10", "thread 0", "thread 1", "thread 2", "thread 3"]


# --- progress of a task -----------------------------------------------------------------------------------


def progress_of(is_terminal: bool, *, first: bool = True) -> tuple[list[str], str]:
    """Return the lines of the log and the output on the terminal, for two sources."""
    lines: list[str] = []
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=is_terminal, width=100)
    with task_progress(lines.append, terminal, first=first) as progress:
        for name in ("a.jsonl", "b.jsonl"):
            for done in range(4):
                progress(TokenizeProgress(name, done, 3, 1000 * done))
    return lines, out.getvalue()


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100, 1000, 4))
    monkeypatch.setattr(
        console_module.time, "monotonic", lambda: float(next(now))
    )  # a pace every four seconds
    lines, out = progress_of(False)
    assert lines == [
        "a.jsonl: tokenized 3,000 rows (250 rows/s), 3 of 3 blocks",
        "b.jsonl: tokenized 3,000 rows (250 rows/s), 3 of 3 blocks",
    ]
    assert out == ""


def test_a_bar_on_a_terminal_of_the_first_rank() -> None:
    lines, out = progress_of(True)
    assert lines == []
    assert "3/3" in out and "b.jsonl: tokenized 3,000 rows" in out
    assert "\x1b[?25h" in out  # the cursor is back
    assert progress_of(True, first=False)[1] == ""
