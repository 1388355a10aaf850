"""dsft.api: training from Python, with a callback that stops it, a resume, and a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsft.api import DsftError, Record, load_spec, plan, train
from dsft.report.jsonl import STEP, read_metrics
from tests.integration.runs import write_spec


def test_train_with_a_callback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = write_spec(tmp_path)
    metrics = tmp_path / "runs/small/metrics.jsonl"
    assert plan(spec, "train.micro_batch_size=6", processes=2)["batch"]["accumulation_steps"] == 1

    assert load_spec(spec, "train.seed=7").train.seed == 7
    for wrong in (0, -1, 2.5):
        with pytest.raises(DsftError, match="processes: .* is no integer from 1"):
            plan(spec, processes=wrong)  # type: ignore[arg-type]

    seen: list[Record] = []

    def stop_at_6(record: Record) -> None:
        seen.append(record)
        if record[STEP] == 6:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        train(spec, "train.max_steps=5000", processes=1, on_record=stop_at_6)  # stops some steps later
    assert [record[STEP] for record in seen] == [1, 2, 3, 4, 5, 5, 6]  # step 5 is evaluated too
    saved = read_metrics(metrics)
    assert saved[: len(seen)] == seen

    # Records after the checkpoint, as a kill leaves them: the resumed run replaces them.
    last = int(saved[-1][STEP])
    assert last < 5000
    with metrics.open("a", encoding="utf-8") as file:
        file.writelines(f'{{"{STEP}": {step}, "train/loss": 0.0}}\n' for step in range(last + 1, last + 9))
    resumed: list[Record] = []
    ends = f"train.max_steps={last + 4}"
    assert train(spec, ends, processes=1, on_record=resumed.append) == tmp_path / "runs/small"
    assert [*saved, *resumed] == read_metrics(metrics)
    assert resumed[-1][STEP] == last + 4 and (tmp_path / "runs/small/export/model.safetensors").exists()
    capfd.readouterr()

    too_long = r"(?s)rows are longer than data.max_length 20:\n  .*on_too_long"
    with pytest.raises(DsftError, match=too_long) as failed:
        train(spec, "name=other", "data.max_length=20", processes=1)
    assert failed.value.exit_code == 65
    assert "error: rank 0" in capfd.readouterr().out
