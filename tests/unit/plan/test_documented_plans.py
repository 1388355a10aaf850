"""The figures that README and docs/ print of plans of Llama 3.1 8B are those of `dsft plan`. Of the model the
test has the numbers of its published config.json that decide its size; its weights are not needed."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.data.read.builtin import builtin_rows
from dsft.model.census import take_census
from dsft.plan.census import Census, census_from
from dsft.spec.schema import Model
from tests.pictures import LLAMA_8B, write_readme_spec

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONG_ROWS = ("parallel.zero_stage=3", "train.global_batch_size=8", "train.micro_batch_size=1")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """README's spec, in a folder with what it names."""
    write_readme_spec(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # so that no line is wrapped
    monkeypatch.setattr("dsft.plan.build.census", _census)
    monkeypatch.setenv("COLUMNS", "160")  # which pytest-xdist sets to another width
    return "llama8b.yaml"


def _census(model: Model, *_: Any) -> Census:
    """Count in this process, once for each shape."""
    return _counted(model.model_dump_json(), Path(model.name_or_path or "", "config.json").read_text())


@cache
def _counted(model: str, _config: str) -> Census:
    return census_from(take_census(Model.model_validate_json(model)))


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def words(line: str) -> str:
    return " ".join(line.split())


def with_more_positions() -> None:
    """And with few rows, whose number is not in what these pages show."""
    Path("data/conversations.json").write_text(json.dumps(builtin_rows("quickstart")[:8]))
    path = Path("models/Llama-3.1-8B/config.json")
    path.write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 2**22}))


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table after `heading` in a page of docs/."""
    after = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(heading)[2]
    lines = re.search(r"^\|.*?\n\n", after, re.DOTALL | re.MULTILINE)
    assert lines
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:-1]]


def test_readme_shows_what_the_plan_prints(spec: str) -> None:
    block = re.search(r"what `dsft plan` prints.*?```\n(.*?)```", README, re.DOTALL)
    assert block
    printed = [words(line) for line in plan(spec).splitlines()]
    shown = [words(line) for line in block[1].splitlines()]
    missing = [line for line in shown if not any(found.startswith(line) for found in printed)]
    assert len(shown) > 12 and missing == []


def test_docs_show_the_longest_rows(spec: str) -> None:
    with_more_positions()
    found = json.loads(plan(spec, "--compare", "--json", *LONG_ROWS, "cluster.accelerator.memory_gib=79"))
    printed = [
        [
            str(row["sequence_parallel"]),
            str(row["batch"]["data_parallel"]),
            f"{row['batch']['micro_batch_size']} × {row['batch']['accumulation_steps']}",
            f"{row['tokens']:,}",
        ]
        for row in found["longest_rows"]
    ]
    assert rows("plan.md", "## The longest row") == printed


def test_docs_show_what_split_rows_take(spec: str) -> None:
    with_more_positions()
    for split, activations, total, *exchanges in rows(
        "long-context.md", "An example, computed by `dsft plan`"
    ):
        options = ("data.max_length=262144", f"parallel.sequence_parallel={split}")
        text = words(plan(spec, *LONG_ROWS, *options))
        total, _, verdict = total.partition(": ")
        shown = f"activations, about {activations} .* total {total} "
        if any(exchanges):
            each, step = (f"{float(size):.1f} {unit}" for size, unit in map(str.split, exchanges))
            shown += f".* all-to-alls of attention \\d+ {each} {step}"
        assert re.search(shown, text) and ("is less than" in text) == (verdict == "does not fit"), text
