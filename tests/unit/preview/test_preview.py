"""`dsft preview`: rows, marks, figures, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsft import cli

SPEC = """\
name: small
task: {task}
model: {{from_config: {{model_type: llama}}}}
data: {{train: [{{path: rows.jsonl}}], max_length: 64, {data}}}
train: {{micro_batch_size: 2, accumulation_steps: 2}}
optim: {{learning_rate: 1e-3}}
"""
ROWS = [
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": answer}]}
    for answer in ("two", "a  b\tc", "2")
]
Preview = Callable[..., tuple[int, str, str]]


@pytest.fixture
def preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Preview:
    """Runs the command on rows in this process: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)

    def run(
        *arguments: str, rows: Sequence[Any] | str = ROWS, data: str = "packing: false", task: str = "sft"
    ) -> tuple[int, str, str]:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        Path("rows.jsonl").write_text(text, encoding="utf-8")
        Path("spec.yaml").write_text(SPEC.format(task=task, data=data), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["dsft", "preview", "spec.yaml", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_json_says_where_each_row_is_from_and_what_is_trained(preview: Preview) -> None:
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
    assert "⟦t┊w┊o┊<|im_end|>⟧↵\n" in out and "⟦a┊␣┊␣┊b┊⇥┊c┊<|im_end|>⟧" in out
    assert "row 1, rows.jsonl:1, 28 tokens" in out and "row 3" not in out and "\x1b" not in out


@pytest.mark.parametrize("row", ["2", "rows.jsonl:2"])
def test_one_row_in_full(preview: Preview, row: str) -> None:
    code, out, _ = preview("--row", row)
    assert code == 0 and "row 2, rows.jsonl:2" in out and "row 1" not in out
    assert "      28     99  yes      c\n" in out


@pytest.mark.parametrize("row", ["0", "4", "rows.jsonl:9", "none"])
def test_a_row_that_is_not_there(preview: Preview, row: str) -> None:
    code, out, err = preview("--row", row)
    assert (code, out) == (2, "") and f"--row: '{row}' is none of the rows" in err


def test_no_torch() -> None:
    code = "import dsft.preview.command, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
