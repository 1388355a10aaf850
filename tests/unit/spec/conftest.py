"""A small valid spec, written to a folder of its own that the test runs in."""

from collections.abc import Callable
from pathlib import Path

import pytest

GOOD = """\
name: small
task: sft
model: {from_config: {model_type: llama, num_hidden_layers: 4, max_position_embeddings: 1024}}
data:
  train: [{path: rows.jsonl}]
  max_length: 128
train: {micro_batch_size: 2, accumulation_steps: 4}
optim: {learning_rate: 1e-3}
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes `spec.yaml` (by default the valid one, with texts replaced) beside a file of rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n', encoding="utf-8")

    def write_spec(text: str = GOOD, **replaced: str) -> Path:
        """`replaced`: section -> its whole new line or lines; a section that GOOD lacks is added."""
        for section, new in replaced.items():
            lines = [line for line in text.splitlines() if line.split(":")[0] != section]
            text = "\n".join([*lines, f"{section}: {new}"]) + "\n"
        Path("spec.yaml").write_text(text, encoding="utf-8")
        return Path("spec.yaml")

    return write_spec
