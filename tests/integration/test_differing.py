"""Hosts whose disks hold other files: the run stops and names the ranks, where it would hang or learn from
other rows than it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import SPEC, shows_traceback
from tests.launching import ROOT, forked

DIFFERING = ROOT / "tests" / "integration" / "differing.py"
ROWS = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ((4, 7), "", "what is read from data.train and data.eval is not the same on rank(s) [1]"),
        ((4, 4), "seed: 7, ", "the spec or the DeepSpeed JSON is not the same on rank(s) [1]"),
    ],
    ids=["rows", "spec"],
)
def test_what_hosts_read_must_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int], changes: str, said: str
) -> None:
    for rank, count in enumerate(rows):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text(ROWS * count)
        spec = SPEC.replace("builtin:quickstart", "rows.jsonl", 1) + f"output_dir: {tmp_path / 'runs'}\n"
        (folder / "spec.yaml").write_text(spec.replace("train: {", "train: {" + changes * rank))
    monkeypatch.chdir(tmp_path / "host0")
    result = forked(DIFFERING, 2, [str(tmp_path / "host1"), "spec.yaml"], timeout=120)
    assert result.returncode != 0 and said in result.stderr
    assert not shows_traceback(result.stderr)
    assert not list(tmp_path.glob("runs/small/checkpoints/*")), "nothing may have been trained"
