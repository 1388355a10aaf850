"""`dsft eval TARGET`: evaluate held-out rows with a run's checkpoint, or with the model that a spec or a
folder names, without training.

The ranks evaluate as in a training run, from a spec that is made here: the target's own, with other rows
where files are given. It is in the folder OUTPUT_DIR/NAME-eval, which gets the result too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsft.errors import CheckpointError, MissingInputError, Problem, SpecError, printable
from dsft.plan.tables import printed, table
from dsft.reference.start import SCRIPT, run_ranks
from dsft.remote import without_rank_variables
from dsft.spec.load import dump_spec, load_spec
from dsft.spec.schema import Spec
from dsft.system.files import write_error
from dsft.system.json_file import read_json
from dsft.system.run_folder import named_checkpoint

COUNTED = ("examples", "tokens")
ASKED, RESULT, SPEC = "asked.json", "eval.json", "spec-of-eval.yaml"
ADAPTER = "adapter_config.json"
LENGTH = 4096
"""Most tokens of a row where a model is named, not a run, unless it has fewer positions."""
_CHANGED = (
    "train.max_steps=1", "train.eval_every=null", "train.eval_on_start=false",
    "checkpoint.keep_best=null", "checkpoint.resume=never", "wandb.mode=disabled",
)  # fmt: skip
"""Overrides of a spec that is to be evaluated, as if for a run of one step."""


@dataclass(frozen=True)
class Target:
    """What is evaluated. document: the spec's, as YAML; checkpoint: the folder to read weights from, None for
    those of the model that the spec names."""

    document: str
    checkpoint: Path | None = None


def evaluate(
    name: str, overrides: Sequence[str], files: Sequence[str], processes: int | None, *, as_json: bool
) -> int:
    """Start the ranks, print their result and return the exit code. processes: by default one per GPU; where
    there is none, the fewest of which a group of the spec's layout consists. Raises DsftError."""
    target = found(name, files)
    spec, folder = _spec(name, target, overrides, files)
    ranks = processes or _ranks(spec)
    result = folder / RESULT
    checkpoint = target.checkpoint and str(target.checkpoint.absolute())
    asked = {"target": name, "checkpoint": checkpoint, "result": RESULT}
    try:
        result.unlink(missing_ok=True)
        (folder / ASKED).write_text(json.dumps(asked), encoding="utf-8")
        (folder / SPEC).write_text(dump_spec(spec), encoding="utf-8")
    except OSError as error:
        raise write_error(folder, error) from None
    argv = [
        sys.executable,
        str(SCRIPT),
        str(folder / SPEC),
        "--any_ranks",
        "--evaluate_only",
        str(folder / ASKED),
    ]
    environ = without_rank_variables(os.environ)
    code = _run(argv, environ, ranks, quiet=as_json)
    if code == 0:
        shown = read_json(result)
        print(json.dumps(shown, indent=1) if as_json else report(shown, result), flush=True)
    return code


def found(name: str, files: Sequence[str]) -> Target:
    """Return what a user names: a spec, a run or checkpoint, a folder of a model or adapter, or else a model
    on the hub. Raises MissingInputError or CheckpointError."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return Target(path.read_text(encoding="utf-8") if path.is_file() else _missing(path))
    if (path / ADAPTER).is_file() or (path / "config.json").is_file():
        return Target(_of_model(path, files))
    try:
        checkpoint = named_checkpoint(path)
    except CheckpointError:
        if name.count("/") != 1 or path.exists():
            raise
        return Target(_of_model(path, files))  # on the hub
    state = read_json(checkpoint / "state.json")
    return Target(yaml.safe_dump(state["spec"]), checkpoint)


def _missing(path: Path) -> str:
    raise MissingInputError(f"{path} does not exist.")


def _of_model(path: Path, files: Sequence[str]) -> str:
    """Return the spec of a model that no run of dsft is known of."""
    if not files:
        raise SpecError(
            "The command line cannot be used.",
            [Problem("--data", f"{path} is a model without held-out rows of its own; give --data FILE")],
        )
    import torch

    adapter = read_json(path / ADAPTER) if (path / ADAPTER).is_file() else {}
    base = adapter["base_model_name_or_path"] if adapter else str(path)
    model = {"name_or_path": base} | ({"lora": {"path": str(path)}} if adapter else {})
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    config = read_json(Path(base, "config.json")) if Path(base, "config.json").is_file() else {}
    positions = (config.get("text_config") or config).get("max_position_embeddings") or LENGTH
    classes = adapter.get("task_type") or " ".join(config.get("architectures") or ())
    has_scores = classes == "SEQ_CLS" or "ForSequenceClassification" in classes
    return yaml.safe_dump(
        {
            "name": path.name,
            "task": "reward" if has_scores else "sft",
            "model": model,
            "data": {"train": [{"path": file} for file in files], "max_length": min(positions, LENGTH)},
            "train": {"precision": precision, "micro_batch_size": 1, "accumulation_steps": 1},
            "optim": {"learning_rate": 1e-5},
        }
    )


def _spec(name: str, target: Target, overrides: Sequence[str], files: Sequence[str]) -> tuple[Spec, Path]:
    """Return the spec to be evaluated, and its folder. Raises SpecError with all problems."""
    rows = json.dumps([{"path": str(file)} for file in files])
    given = (f"data.train={rows}", f"data.eval={rows}", "data.eval_fraction=null", "data.eval_count=null")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(target.document)
        file.flush()
        words = [*_CHANGED, *(given if files else ()), *overrides]
        try:
            spec = load_spec(file.name, words)
        except SpecError as error:
            raise SpecError(f"{name} cannot be evaluated.", error.problems) from None
    if not (spec.data.eval or spec.data.eval_fraction or spec.data.eval_count):
        raise SpecError(
            "There is nothing to evaluate.",
            [
                Problem(
                    "data", "no rows are held out: give --data FILE, or set data.eval or data.eval_fraction"
                )
            ],
        )
    spec = spec.model_copy(update={"name": f"{spec.name}-eval"})
    folder = Path(spec.output_dir, spec.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from None
    return spec, folder


def _ranks(spec: Spec) -> int:
    import torch

    return torch.cuda.device_count() or spec.parallel.pipeline_stages * spec.parallel.sequence_parallel


def _run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, *, quiet: bool) -> int:
    if quiet:  # standard output is the JSON alone
        argv = [
            sys.executable,
            "-c",
            "import os, sys; os.dup2(2, 1); os.execv(sys.argv[1], sys.argv[1:])",
            *argv,
        ]
    if ranks > 1:
        return run_ranks(argv, environ, ranks, "nothing was written.")
    return subprocess.run(argv, env=environ, check=False).returncode


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
