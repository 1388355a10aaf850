"""The command on rows of a test's own, in this process."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.conftest import Dsft

SPEC = """\
name: small
task: {task}
model: {{from_config: {{model_type: llama}}}}
data: {{train: [{{path: rows.jsonl}}], {data}}}
train: {{{train}}}
optim: {{learning_rate: 1e-3}}
"""
Preview = Callable[..., tuple[int, str, str]]


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [talk("1+1?", answer) for answer in ("two", "a  b\tc", "2")]


@pytest.fixture
def preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsft: Dsft) -> Preview:
    """Exit code, standard output and standard error of `dsft preview` on rows."""
    monkeypatch.chdir(tmp_path)

    def run(
        *arguments: str,
        rows: Sequence[Any] | str = ROWS,
        data: str = "max_length: 64",
        task: str = "sft",
        train: str = "micro_batch_size: 2, accumulation_steps: 2",
    ) -> tuple[int, str, str]:
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        Path("rows.jsonl").write_text(text, encoding="utf-8")
        Path("spec.yaml").write_text(SPEC.format(task=task, data=data, train=train), encoding="utf-8")
        return dsft("preview", "spec.yaml", *arguments)

    return run
