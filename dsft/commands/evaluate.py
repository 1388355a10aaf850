"""`dsft eval TARGET`: evaluate held-out rows with a run's checkpoint, or with the model that a spec or a
folder names, without training.

The ranks evaluate as in a training run, from a spec that is made here: the target's own, with other rows
where files are given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dsft.checkpoint.export import ORIGIN, QUANTIZATION
from dsft.checkpoint.read import CheckpointReader
from dsft.commands.on_ranks import CHANGED, on_ranks, spec_of
from dsft.errors import CheckpointError, MissingInputError, Problem, SpecError, printable
from dsft.plan.tables import printed, table
from dsft.spec.document import quote
from dsft.spec.layout import fewest_ranks
from dsft.spec.load import given_source, load_spec
from dsft.spec.schema import Spec
from dsft.spec.task import task_of_export
from dsft.system.json_file import read_json
from dsft.system.run_folder import named_checkpoint

COUNTED = ("examples", "tokens")
ADAPTER = "adapter_config.json"
LENGTH = 4096
"""Most tokens of a row where a model is named, not a run, unless it has fewer positions."""


@dataclass(frozen=True)
class Target:
    """What is evaluated. spec: a file with a spec, or one as YAML; checkpoint: the folder to read weights
    from, None for those of the model that the spec names."""

    spec: Path | str
    checkpoint: Path | None = None


def evaluate(
    name: str, overrides: Sequence[str], files: Sequence[str], processes: int | None, *, as_json: bool
) -> int:
    """Start the ranks, print their result and return the exit code. processes: by default one per GPU; where
    there is none, the fewest of which a group of the spec's layout consists. Raises DsftError.

    The result is written to OUTPUT_DIR/NAME-eval.json."""
    target = found(name, files)
    spec = _spec(name, target, overrides, files)
    checkpoint = target.checkpoint and str(target.checkpoint.absolute())
    asked = {"action": "eval", "target": name, "checkpoint": checkpoint}
    result = Path(spec.output_dir, f"{spec.name}-eval.json")
    code, shown = on_ranks(asked, spec, processes or _ranks(spec), result, quiet=as_json)
    if code == 0:
        print(json.dumps(shown, indent=1) if as_json else report(shown, result), flush=True)
    return code


def found(name: str, files: Sequence[str]) -> Target:
    """Return what a user names: a spec, a run or checkpoint, a folder of a model or adapter, or else a model
    on the hub. Raises MissingInputError or CheckpointError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return Target(path)
    if (path / ADAPTER).is_file() or (path / "config.json").is_file():
        return Target(_of_model(path, files))
    try:
        checkpoint = named_checkpoint(path)
    except CheckpointError:
        if name.count("/") != 1 or path.exists():
            raise
        return Target(_of_model(path, files))  # on the hub
    return Target(yaml.safe_dump(dict(CheckpointReader.open(checkpoint).state["spec"])), checkpoint)


def _of_model(path: Path, files: Sequence[str]) -> str:
    """Return the spec of a model that no run of dsft is known of. Raises SpecError without rows, and
    MissingInputError where the folder's files do not say what it is."""
    if not files:
        raise _refused("--data", f"{path} is a model without held-out rows of its own; give --data FILE")
    import torch

    adapter = _mapping(path / ADAPTER)
    base = adapter.get("base_model_name_or_path") if adapter else str(path)
    if not isinstance(base, str) or not base:
        raise MissingInputError(
            f"{path / ADAPTER} has no base_model_name_or_path; add the base model's path."
        )
    if _mapping(path / ORIGIN).get(QUANTIZATION):
        raise _refused(
            "TARGET", f"{path} is an adapter of weights in 4 bits, of which its run knows how; name the run"
        )
    model: dict[str, Any] = {"name_or_path": base}
    if adapter:
        model["lora"] = {"path": str(path)}
        if (path / "tokenizer_config.json").is_file():
            model["tokenizer"] = str(path)
    config = _mapping(Path(base, "config.json"))
    text = config.get("text_config")
    positions = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    length = min(positions, LENGTH) if isinstance(positions, int) and positions > 0 else LENGTH
    task = task_of_export(adapter if adapter.get("task_type") else config)
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    folder = path.resolve()
    name = f"{folder.parent.name}-export" if folder.name == "export" else folder.name  # every run has one
    return yaml.safe_dump(
        {
            "name": re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:80] or "model",
            "task": task,
            **({"classify": {"labels": [*config["id2label"].values()]}} if task == "classify" else {}),
            "model": model,
            "data": {"train": _sources(files), "max_length": length},
            "train": {"precision": precision, "micro_batch_size": 1, "accumulation_steps": 1},
            "optim": {"learning_rate": 1e-5},
        }
    )


def _sources(files: Sequence[str]) -> list[dict[str, Any]]:
    return [given_source(file).model_dump(exclude_defaults=True) for file in files]


def _mapping(path: Path) -> dict[str, Any]:
    """Return a JSON file's mapping, {} where there is no file. Raises MissingInputError for another value."""
    value = read_json(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise MissingInputError(f"{path} is no JSON mapping, so {path.parent} cannot be read as a model.")
    return value


def _refused(where: str, message: str) -> SpecError:
    return SpecError("The command line cannot be used.", [Problem(where, message)])


def _spec(name: str, target: Target, overrides: Sequence[str], files: Sequence[str]) -> Spec:
    """Return the spec to be evaluated. Raises SpecError with all problems."""
    rows = json.dumps(_sources(files))
    given = [f"data.train={rows}", f"data.eval={rows}", "data.eval_fraction=null", "data.eval_count=null"]
    words = [*CHANGED, *(given if files else ()), *overrides]
    if isinstance(target.spec, Path):
        spec = load_spec(target.spec, words)
    else:
        title = f"{name} cannot be evaluated."
        try:
            spec = spec_of(target.spec, words, title)
        except SpecError as error:
            problems = [
                replace(one, where=one.where.replace(f"override {quote(given[1])}", "--data"))
                for one in error.problems
                if not one.where.startswith(f"override {quote(given[0])}")
            ]
            raise SpecError(title, problems) from None
    if not (spec.data.eval or spec.data.eval_fraction or spec.data.eval_count):
        raise _refused(
            "data", "no rows are held out: give --data FILE, or set data.eval or data.eval_fraction"
        )
    if files and spec.reference is not None and spec.reference.reference_store is not None:
        # It has the values of the run's own rows.
        section = spec.reference.model_copy(update={"reference_store": None})
        spec = spec.model_copy(update={str(spec.task_kind.section): section})
    return spec


def _ranks(spec: Spec) -> int:
    import torch

    return torch.cuda.device_count() or fewest_ranks(spec.parallel)


def report(result: Mapping[str, Any], path: Path) -> str:
    """Return the result as a table, with a column for each held-out set, and where it is."""
    metrics, sets = result["metrics"], result["rows"]
    named = {name for name in sets if f"eval/{name}/loss" in metrics}
    own = tuple(f"eval/{name}/" for name in named)
    shown = [key.removeprefix("eval/") for key in metrics if not key.startswith(own)]
    prefixes = [f"eval/{name}/" if name in named else "eval/" for name in sets]
    head, rows = ["", *sets], [[name, *(f"{one[name]:,}" for one in sets.values())] for name in COUNTED]
    if len(sets) > 1:
        head, prefixes = [*head, "all"], [*prefixes, "eval/"]
        rows = [[*row, f"{sum(one[row[0]] for one in sets.values()):,}"] for row in rows]
    for name in shown:
        values = (metrics.get(prefix + name) for prefix in prefixes)
        rows.append([name, *("" if value is None else f"{value:.6g}" for value in values)])
    weights = result["checkpoint"] or "the model that the spec names"
    return printable(f"weights of {weights}\n{printed([table(head, rows)])}result: {path}")
