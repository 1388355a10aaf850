"""What `dsft plan` says of a run's steps, tokens and hours: counted, from the cache, or from a sample,
compared with what loading all rows gives."""

import gzip
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dsft.data.cache.store import IN_MEMORY, Cache, cache_folder
from dsft.data.sets.load import load_data
from dsft.data.tokenizer.load import open_tokenizer
from dsft.errors import MissingInputError
from dsft.plan.build import Plan, build_plan
from dsft.plan.cost import StepSize, cost, full_step
from dsft.plan.duration import Duration, Measured, Rows, duration, duration_lines
from dsft.plan.show import as_mapping
from dsft.preview import count
from dsft.preview.count import count_rows
from dsft.report.speed import measured_speed
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.schema import Spec
from tests.specs import llama, minimal_spec

WORDS = ("ant", "bear", "cat", "dog")
FEW, SAMPLE = 1 << 14, 1 << 16


def texts(number: int) -> list[dict[str, str]]:
    """Rows whose lengths grow from the first to the last, so that the first ones are not typical."""
    random.seed(number)
    return [
        {"text": " ".join(random.choices(WORDS, k=random.randint(1, 20 + i // 20)))} for i in range(number)
    ]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix in (".parquet", ".arrow"):
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=300)
        else:
            with pyarrow.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table, max_chunksize=300)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".csv":
        path.write_text("text\n" + "".join(row["text"] + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1) if path.suffix == ".json" else text)


def spec_of(tmp_path: Path, *names: str, data: Any = None, **sections: Any) -> Spec:
    sources = [{"path": str(tmp_path / name)} for name in names]
    data = {"train": sources, "max_length": 4096, **(data or {})}
    return minimal_spec(output_dir=str(tmp_path / "runs"), data=data, **sections)


def counted(spec: Spec) -> Rows:
    found = count_rows(spec, batch_on(spec, layout_of(spec.parallel, 1)))
    assert isinstance(found, Rows), found
    return found


def loaded(spec: Spec, cache: Cache = IN_MEMORY) -> Any:
    return load_data(spec, open_tokenizer(spec.model)[0], cache, refuse=False).train


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count, "FEW_BYTES", FEW)
    monkeypatch.setattr(count, "SAMPLE_BYTES", SAMPLE)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz", "a.parquet", "a.arrow", "folder"]
)
def test_a_sample_is_spread_over_the_rows(name: str, tmp_path: Path) -> None:
    rows = texts(4000)
    if name == "folder":
        (tmp_path / name).mkdir()
        for part in range(40):
            write(tmp_path / name / f"{part:02}.jsonl", rows[100 * part : 100 * part + 100])
    else:
        write(tmp_path / name, rows)
    spec = spec_of(tmp_path, name)
    whole, found = loaded(spec), counted(spec)
    assert found.sampled is not None and found.sampled < 1000
    assert found.examples == pytest.approx(len(whole), rel=0.12)
    assert found.examples * found.tokens == pytest.approx(int(whole.lengths.sum()), rel=0.15)
    assert found.length == pytest.approx(whole.squares.sum() / whole.lengths.sum(), rel=0.15)


@pytest.mark.parametrize("cached", [True, False])
def test_few_rows_and_cached_ones_are_counted(cached: bool, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", texts(1000 if cached else 100))
    spec = spec_of(tmp_path, "a.jsonl", data={"eval_count": 20})
    if cached:
        os.utime(tmp_path / "a.jsonl", (0, 0))
        os.utime(tmp_path / "a.jsonl")  # its digest is kept only where it is older than two seconds
        cache = Cache(cache_folder(spec))
        monkey = pytest.MonkeyPatch()
        monkey.setattr("dsft.system.digest._RACY_NS", -1)
        whole = loaded(spec, cache)
        monkey.undo()
    else:
        whole = loaded(spec)
    found = counted(spec)
    assert (found.examples, found.sampled) == (len(whole), None)
    assert found.tokens == pytest.approx(whole.lengths.mean())
    assert cached or not cache_folder(spec).exists()


def test_held_out_rows_limits_and_weights_of_a_sample(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / name, texts(3000))
    write(tmp_path / "b.jsonl", [{"text": "x" * 1000}] * 1000)
    fraction = counted(spec_of(tmp_path, "a.jsonl", data={"eval_fraction": 0.5}))
    assert fraction.examples == pytest.approx(1500, rel=0.12)
    assert counted(spec_of(tmp_path, "a.jsonl", data={"eval_count": 2000})).examples == pytest.approx(
        1000, abs=350
    )
    few = {"train": [{"path": str(tmp_path / "a.jsonl"), "max_rows": 700}]}
    assert counted(spec_of(tmp_path, data=few)).examples == 700
    weighted = [{"path": str(tmp_path / f"{n}.jsonl"), "weight": w} for n, w in (("a", 1e-6), ("b", 1.0))]
    assert counted(spec_of(tmp_path, data={"train": weighted})).tokens == pytest.approx(1001, abs=2)


def test_packed_pretraining_fills_its_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", texts(4000))
    spec = spec_of(tmp_path, "a.jsonl", data={"packing": True, "max_length": 128})
    found = counted(spec)
    assert found.sampled and found.examples == pytest.approx(len(loaded(spec)), rel=0.15)
    assert found.tokens == pytest.approx(128, rel=0.1)


@pytest.mark.parametrize(("data", "model", "says"), [
    ("absent.jsonl", {}, "no such file"),
    ("owner/rows", {}, "owner/rows is a data set of the hub"),
    ("a.jsonl", {"tokenizer": "owner/model"}, "the tokenizer owner/model is not on this machine"),
    ("broken.jsonl", {}, "no row is left"),
    ("huge.csv", {}, "too large"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(
    data: str, model: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("dsft.data.read.sample.MOST_READ", 1000)
    write(tmp_path / "a.jsonl", texts(10))
    write(tmp_path / "huge.csv", texts(3000))
    (tmp_path / "broken.jsonl").write_text("{\n")
    spec = minimal_spec(
        data={"train": [{"path": data}]},
        model={"from_config": {"model_type": "llama"}, **model},
        train={"max_steps": 7},
    )
    found = count_rows(spec, batch_on(spec, layout_of(spec.parallel, 1)))
    assert isinstance(found, str) and says in found
    assert "HF_HUB_OFFLINE" not in os.environ  # what a notebook does afterwards may ask the hub


# --- steps and hours --------------------------------------------------------------------------------------

ROWS = Rows(examples=1000, tokens=300.0, length=400.0, positions=1.25)


def plan_of(ranks: int = 4, **train: Any) -> Plan:
    """Of a model that is large enough that launches do not decide."""
    spec = minimal_spec(
        model={"from_config": llama(4096, 16384, 16, 32)},
        data={"max_length": 512},
        cluster={"hosts": {"a": ranks}, "accelerator": {"name": "A100"}},
        train={"micro_batch_size": 8, "global_batch_size": 64, "precision": "bf16", **train},
    )
    return build_plan(spec)


def test_steps_tokens_and_hours() -> None:
    plan = plan_of(num_train_epochs=2.5)
    found = duration(plan, ROWS)
    assert (found.steps, found.step_tokens, found.tokens) == (40, 300 * 1000 / 16, 300 * 2500)
    assert found.seconds_per_step is not None and found.seconds is not None
    mapping = as_mapping(plan, found)["run"]
    assert mapping["device_hours"] == pytest.approx(4 * mapping["hours"]) == 4 * found.seconds / 3600
    text = "\n".join(duration_lines(plan, found))
    assert "40 steps, 2.5 epochs of 1,000 examples of 300 tokens" in text and "an estimate: 55%" in text
    assert duration(plan_of(max_steps=7), ROWS).steps == 7


def test_a_step_takes_longer_with_more_tokens_and_as_long_as_in_a_comparison_if_it_is_full() -> None:
    plan = plan_of(max_steps=7)
    full = Rows(64, 512.0, 512.0, 1.0)
    seconds = cost(plan.census, plan.spec, plan.batch, plan.traffic, plan.hosts).seconds
    assert duration(plan, full).seconds_per_step == pytest.approx(seconds)
    assert duration(plan, "unread").seconds_per_step == pytest.approx(seconds)
    assert full_step(plan.spec, plan.batch).tokens == duration(plan, full).step_tokens == 64 * 512
    # half of the tokens in as many micro-batches of 8 rows: 512 more tokens' time for each (`HALF_TOKENS`)
    half = duration(plan, Rows(64, 256.0, 512.0, 1.0)).seconds_per_step
    parts = [
        cost(plan.census, plan.spec, plan.batch, (), plan.hosts, StepSize(64 * n, 512, 2)) for n in (512, 256)
    ]
    assert parts[0].computing / parts[1].computing == pytest.approx((4096 + 512) / (2048 + 512))
    padded = duration(plan, Rows(64, 256.0, 512.0, 2.0)).seconds_per_step
    assert half is not None and half < seconds and padded == pytest.approx(seconds)


def test_without_rows_a_step_is_full_and_their_number_unknown() -> None:
    plan = plan_of(num_train_epochs=3)
    found = duration(plan, "data x: there is no such file")
    assert (found.steps, found.tokens, found.seconds, found.step_tokens) == (None, None, None, 64 * 512)
    text = "\n".join(duration_lines(plan, found))
    assert "unknown until the rows are read" in text and "no such file" in text and "32,768 tokens:" in text


def test_hours_of_a_small_model_are_not_estimated() -> None:
    plan = build_plan(minimal_spec(model={"from_config": llama(64, 128, 2, 4)}, train={"max_steps": 5}))
    found: Duration = duration(plan, ROWS)
    assert found.seconds_per_step is None and found.as_mapping()["hours"] is None
    assert "not estimated" in "\n".join(duration_lines(plan, found))
    assert duration(plan, ROWS, Measured("runs/a", 100.0, 1)).seconds == 5 * 300.0 / 100.0


# --- like a run -------------------------------------------------------------------------------------------


def finished(tmp_path: Path, spec: Spec) -> Path:
    """A run on two devices whose first step took longer: then 1,000 tokens in 2 seconds, and 3,000 in 2."""
    run = tmp_path / "done"
    run.mkdir(parents=True)
    (run / "spec.yaml").write_text(json.dumps(spec.model_dump(mode="json")))
    records = [(1, 100.0, 10.0), (2, 500.0, 2.0), (3, 1500.0, 2.0)]
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({
                "train/global_step": step, "train/loss": 1.0, "perf/step_time": seconds,
                "perf/tokens_per_second": speed, "perf/tokens_per_second_per_gpu": speed / 2,
            }) + "\n"
            for step, speed, seconds in records
        )
    )  # fmt: skip
    return run


def test_the_speed_of_a_run(tmp_path: Path) -> None:
    plan = plan_of(2, max_steps=10)
    run = finished(tmp_path, plan.spec)
    measured = measured_speed(str(run), plan.spec)
    assert measured == Measured(str(run), 1000.0, 2)
    found = duration(plan, ROWS, measured)
    assert found.seconds == pytest.approx(10 * found.step_tokens / 1000)
    text = "\n".join(duration_lines(plan, found))
    assert f"1,000 tokens/s that {run} measured on 2" in text and "scaled" not in text
    assert "differs" not in text

    # what it measured before it was resumed on fewer devices does not count
    with (run / "metrics.jsonl").open("a") as file:
        json.dump(
            {"train/global_step": 4, "train/loss": 1.0, "perf/step_time": 3.0}
            | dict.fromkeys(("perf/tokens_per_second", "perf/tokens_per_second_per_gpu"), 700.0),
            file,
        )
        file.write("\n")
    other = plan_of(4, max_steps=10, precision="fp32")
    assert measured_speed(str(run), other.spec).tokens_per_second == pytest.approx(700.0)
    run = finished(tmp_path / "again", plan.spec)
    measured = measured_speed(str(run), other.spec)
    assert measured.differs == ("parallel.zero_stage", "train.precision")
    found = duration(other, ROWS, measured)
    assert found.seconds == pytest.approx(10 * found.step_tokens / 2000)
    text = "\n".join(duration_lines(other, found))
    assert "scaled to 4" in text and "differs in parallel.zero_stage, train.precision" in text


def test_a_run_whose_files_are_damaged_or_without_a_speed(tmp_path: Path) -> None:
    spec = plan_of(2).spec
    run = finished(tmp_path, spec)
    (run / "spec.yaml").write_text("{")
    assert measured_speed(str(run), spec).differs == ("spec.yaml, which cannot be read",)
    for text in (
        "",
        '{"train/global_step": 1, "perf/step_time": 1}',
        '{"train/global_step": 1, "perf/step_time": "NaN"}',
    ):
        (run / "metrics.jsonl").write_text(text)
        with pytest.raises(MissingInputError, match="has no speed yet"):
            measured_speed(str(run), spec)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(MissingInputError, match="it has the run's speed"):
        measured_speed(str(run), spec)


def test_micro_batches_are_as_many_as_the_packed_tokens_need() -> None:
    """At ZeRO 3, gathering the parameters for each of 8 micro-batches decides; 1/8 of the tokens need one."""
    spec = minimal_spec(
        model={"from_config": llama(4096, 16384, 16, 32)},
        data={"max_length": 512, "packing": True},
        cluster={"hosts": {"a": 1, "b": 1}, "accelerator": {"name": "A100"}},
        parallel={"zero_stage": 3},
        train={"micro_batch_size": 4, "accumulation_steps": 8, "max_steps": 1, "precision": "bf16"},
    )
    plan = build_plan(spec)
    assert math.prod((plan.batch.global_batch_size, 512)) == 2 * 8 * 4 * 512
    whole = duration(plan, Rows(64, 512.0, 512.0, 1.0)).seconds_per_step
    eighth = duration(plan, Rows(64, 64.0, 512.0, 1.0)).seconds_per_step
    assert whole is not None and eighth is not None and whole / eighth > 6
