"""`dsft report RUN [RUN …]`: write one HTML page on a run, or on several side by side, that needs no network:
curves, results, memory beside the plan, what became of the rows, answers before and after, spec and versions.

Sources: metrics.jsonl, memory.json, data.json, spec.yaml, versions.json, ranks.json and command.txt of the
run's folder, and what `dsft status` reads. A run that is not finished, or that failed, is reported as far as
it got.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from markupsafe import Markup

from dsft.commands.status import status_of
from dsft.errors import DsftError, MissingInputError
from dsft.rank.places import RANKS
from dsft.report.curves import compared, figure, series, svg
from dsft.report.jsonl import read_metrics
from dsft.report.page import check_page, rendered, write_page
from dsft.spec.differences import flatten
from dsft.spec.document import read_document
from dsft.system.json_file import open_file, parse_json, read_text, reason_of
from dsft.system.redact import one_line
from dsft.system.run_folder import ANSWERS, named_run

PAGE = "report.html"
_ANSWER_TOKENS = 200
SHOWN_ANSWERS = 50  # rows of a file of `dsft answer`
LARGEST = 2**20
"""Maximum size in bytes of a run's JSON and YAML files; usual ones have some thousand."""
MEMORY = {"host_rss": "host", "device_allocated": "GPU, allocated", "device_reserved": "GPU, reserved"}
Table = list[list[str]]
"""Rows of cells; the first row is the head, the first column names the rows."""


@dataclass(frozen=True)
class RunFolder:
    """What the folder of a run holds: metrics, and the contents of its JSON and YAML files ({} if absent).
    unreadable: a clause for each of these files that is there and cannot be read."""

    folder: Path
    name: str
    records: Sequence[Mapping[str, float]]
    memory: Mapping[str, Any]
    data: Mapping[str, Any]
    spec: Mapping[str, Any]
    versions: Mapping[str, Any]
    devices: Sequence[str] = ()
    unreadable: Sequence[str] = ()

    @property
    def export(self) -> Path:
        return self.folder / "export"

    @property
    def base(self) -> str | None:
        """The pretrained model that was trained; None for fresh weights."""
        name = _mapping(self.spec.get("model")).get("name_or_path")
        return name if isinstance(name, str) else None


def write_report(
    names: Sequence[str], prompts: Sequence[str], out: Path | None, answers: Path | None = None
) -> Path:
    """Write the page and return its path, by default report.html in the folder of the first run. answers: a
    file of `dsft answer`, by default those in the runs' folders. Raises MissingInputError if a run or the
    file does not exist, StorageError if the page cannot be written."""
    folders = list({folder.resolve(): folder for folder in map(named_run, names)}.values())
    last = [folder.resolve().name for folder in folders]
    runs = [
        _read(folder, name if last.count(name) == 1 else str(folder))
        for folder, name in zip(folders, last, strict=True)
    ]
    path = out or runs[0].folder / PAGE
    check_page(path, "--out", "dsft report")
    found = [Section(f"Answers: {run.name}", _answers(run, prompts), "text") for run in runs if prompts]
    files = {answers.name: answers} if answers else {run.name: run.folder / ANSWERS for run in runs}
    for name, file in files.items():
        try:
            if answers or file.exists():
                found.append(Section(f"Answers: {name}", answers_in(file), "text"))
        except MissingInputError as error:
            if answers:
                raise
            found.append(Section(f"Answers: {name}", str(error)))
    text = page(runs, found)
    write_page(path, text, "--out")
    return path


def _read(folder: Path, name: str) -> RunFolder:
    path = folder / "metrics.jsonl"
    try:
        records = read_metrics(path)
    except OSError as error:
        raise MissingInputError(f"{path} {reason_of(error)}; it has the run's steps") from None
    if not records:
        raise MissingInputError(f"{folder} has no step in metrics.jsonl yet: there is nothing to report")
    names = ("memory.json", "data.json", "spec.yaml", "versions.json")
    unreadable: list[str] = []
    memory, data, spec, versions = (_mapping(_content(folder / name, unreadable)) for name in names)
    ranks = _content(folder / RANKS, unreadable)
    devices = [f"{_mapping(rank).get('device')}" for rank in ranks] if isinstance(ranks, list) else []
    return RunFolder(folder, name, records, memory, data, spec, versions, devices, unreadable)


def _content(path: Path, unreadable: list[str]) -> Any:
    """Return the content of a JSON or YAML file, None if it is absent or, with a clause in `unreadable`,
    damaged."""
    try:
        text = read_text(path, LARGEST)
        return parse_json(text) if path.suffix == ".json" else read_document(text).data
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        unreadable.append(f"{path.name} {reason_of(error)}")
    return None


def _mapping(found: Any) -> dict[str, Any]:
    """Return {} instead of anything else: a file may be damaged, or edited."""
    return found if isinstance(found, dict) else {}


# --- the page ---------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A heading and what is below it: rows of cells, text, or HTML; left out if empty. kind: text for a table
    of sentences."""

    title: str
    content: Table | str
    kind: str = ""


def page(runs: Sequence[RunFolder], answers: Sequence[Section]) -> str:
    """Return the HTML of the page."""
    sections = [Section("Runs" if len(runs) > 1 else "Run", overview(runs), "text")]
    sections.append(Section("Results", results(runs)))
    if len(runs) > 1:
        sections.append(
            Section("Curves together", _curves(compared, {run.name: run.records for run in runs}))
        )
        sections.append(Section("What differs in the specs", differing(runs), "text"))
    for run in runs:
        of = f": {run.name}" if len(runs) > 1 else ""
        sections += [
            Section(f"Not shown{of}", "; ".join(run.unreadable)),
            Section(f"Curves{of}", _curves(figure, run.name, run.records)),
            Section(f"Memory{of}", memory(run)),
            Section(f"Rows{of}", ledger(run)),
        ]
    sections += answers
    files = {
        f"{name} of {run.name}": yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)
        for run in runs
        for name, content in (("spec.yaml", run.spec), ("versions.json", run.versions))
        if content
    }
    title = " and ".join(run.name for run in runs)
    return rendered("dsft report", "report.html.jinja", title=title, sections=sections, files=files)


def overview(runs: Sequence[RunFolder]) -> Table:
    """Return what was run, when, on what and how it ended, a column for each run."""
    facts: dict[str, Callable[[RunFolder], str]] = {
        "state": lambda run: status_of(run.folder).state,
        "time": _times,
        "task": lambda run: str(run.spec.get("task", "")),
        "model": _model,
        "data": lambda run: ", ".join(
            str(_mapping(source).get("path")) for source in _mapping(run.spec.get("data")).get("train") or ()
        ),
        "devices": lambda run: ", ".join(
            f"{count} × {device}" for device, count in Counter(run.devices).items()
        ),
        "command": lambda run: (
            status_of(run.folder).command or "".join(command for _, command in _starts(run)[-1:])
        ),
    }
    return _table(["", *(run.name for run in runs)], [[name, *map(of, runs)] for name, of in facts.items()])


def results(runs: Sequence[RunFolder]) -> Table:
    """Return a table with a column for each run."""
    figures: dict[str, Callable[[RunFolder], str]] = {
        "steps": lambda run: f"{int(run.records[-1]['train/global_step']):,}",
        "training loss, first step": lambda run: _number(run, "train/loss", 0),
        "training loss, last step": lambda run: _number(run, "train/loss"),
        "held-out loss, last": lambda run: _number(run, "eval/loss"),
        "held-out loss, lowest": lambda run: _lowest(run, "eval/loss"),
        "reward accuracy, last": lambda run: _number(run, "train/rewards/accuracies"),
        "reward margin, last": lambda run: _number(run, "train/rewards/margins"),
        "tokens per second, median": lambda run: _median(run, "perf/tokens_per_second", ",.0f"),
        "seconds per step, median": lambda run: _median(run, "perf/step_time", ".3g"),
        "skipped steps": lambda run: str(
            sum(not math.isfinite(record.get("train/grad_norm", 0.0)) for record in run.records) or ""
        ),
    }
    return _table(["", *(run.name for run in runs)], [[name, *map(of, runs)] for name, of in figures.items()])


def differing(runs: Sequence[RunFolder]) -> Table:
    """Return the keys of the specs whose values differ, a column for each run."""
    leaves = [dict(flatten(run.spec)) for run in runs]
    keys = sorted({key for found in leaves for key in found})
    rows = [[key, *(str(found.get(key, "")) for found in leaves)] for key in keys]
    return _table(["key", *(run.name for run in runs)], [row for row in rows if len(set(row[1:])) > 1])


def memory(run: RunFolder) -> Table:
    """Return measured and planned bytes of each phase, the largest over all ranks."""
    rows = [
        [
            f"{phase.replace('_', ' ')}, {MEMORY.get(kind, kind)}",
            *(_gib(found.get(name)) for name in ("measured", "above_start", "planned")),
        ]
        for phase, kinds in _mapping(run.memory.get("phases")).items()
        for kind, found in _mapping(kinds).items()
        if isinstance(found, dict)
    ]
    return _table(["phase", "measured", "above the start", "planned"], rows)


def ledger(run: RunFolder) -> Table:
    """Return what became of the rows, a column for each data set, without counts that are 0 everywhere."""
    totals = {
        name: {count: value for count, value in part["total"].items() if isinstance(value, int)}
        for name, part in run.data.items()
        if _mapping(_mapping(part).get("total"))
    }
    names = [name for name in next(iter(totals.values()), {}) if any(t.get(name) for t in totals.values())]
    rows = [[name.replace("_", " "), *(f"{t.get(name, 0):,}" for t in totals.values())] for name in names]
    return _table(["", *totals], rows)


def answers_in(path: Path) -> Table:
    """Return the first rows of a file of `dsft answer`. Raises MissingInputError if it cannot be read or is
    another file."""
    wrong = f"{path} is no file that dsft answer wrote; give the one of its --out"
    try:
        with open_file(path) as file:
            rows = [_mapping(parse_json(line.decode())) for line in islice(file, SHOWN_ANSWERS)]
    except OSError as error:
        raise MissingInputError(f"{path} {reason_of(error)}") from None
    except ValueError:
        raise MissingInputError(wrong) from None
    if not rows or not all({"source", "prompt", "answer"} <= row.keys() for row in rows):
        raise MissingInputError(wrong)
    names = ("source", "prompt", "answer", "reference")
    return _table(names, [[_shown(row.get(name)) for name in names] for row in rows])


def _shown(value: Any) -> str:
    """Return a text, or the messages of a prompt, one below the other."""
    if isinstance(value, list):
        return "\n".join(f"{_mapping(one).get('role')}: {_mapping(one).get('content')}" for one in value)
    return "" if value is None else str(value)


def _answers(run: RunFolder, prompts: Sequence[str]) -> Table:
    """Return the answers of the base model (if it is in a folder) and of the export to the prompts."""
    from dsft.commands.chat import Sampling, load

    sampling = Sampling(temperature=0.0, max_new_tokens=_ANSWER_TOKENS)
    folders = {"before": run.base, "after": str(run.export)}
    there = {title: Path(name) for title, name in folders.items() if name and Path(name).exists()}
    models = {title: load(folder, sampling) for title, folder in there.items()}
    if "after" not in models:
        raise DsftError(f"{run.folder} has no export, whose answers --ask shows; leave --ask out")
    rows = [["prompt", *models]]
    for prompt in prompts:
        asked = [{"role": "user", "content": prompt}]
        rows.append([prompt, *(model.answer(asked, lambda piece: None) for model in models.values())])
    return rows


# --- parts ------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Table) -> Table:
    """Return a table without rows that say nothing, or [] if none is left."""
    said = [row for row in rows if any(row[1:])]
    return [list(head), *said] if said else []


def _curves(draw: Callable[..., Any], *given: Any) -> str:
    """Return a figure as HTML, or in words why there is none."""
    try:
        return Markup(svg(draw(*given)))
    except Exception as error:  # noqa: B902  values so large that matplotlib cannot place them
        return f"They cannot be drawn: {one_line(error)}"


def _starts(run: RunFolder) -> Sequence[tuple[datetime, str]]:
    """Return time and command of each start of the run."""
    found = []
    with suppress(OSError, ValueError):
        for line in read_text(run.folder / "command.txt", LARGEST).splitlines():
            time, _, command = line.partition("  ")
            found.append((datetime.fromisoformat(time).astimezone(UTC), command))
    return found


def _times(run: RunFolder) -> str:
    starts = _starts(run)
    if not starts:
        return ""
    end = datetime.fromtimestamp((run.folder / "metrics.jsonl").stat().st_mtime, UTC)
    first, again = starts[0][0], f", started {len(starts)} times" if len(starts) > 1 else ""
    took = timedelta(seconds=round((end - first).total_seconds()))
    return f"{first:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC ({took}{again})"


def _model(run: RunFolder) -> str:
    model = _mapping(run.spec.get("model"))
    fresh, lora = _mapping(model.get("from_config")), _mapping(model.get("lora"))
    name = run.base or (f"{fresh.get('model_type')}, fresh weights" if fresh else "")
    return f"{name}, adapters of rank {lora.get('rank')}" if lora else name


def _number(run: RunFolder, key: str, at: int = -1) -> str:
    values = series(run.records, key)[1]
    return f"{values[at]:.4f}" if values else ""


def _lowest(run: RunFolder, key: str) -> str:
    steps, values = series(run.records, key)
    best = min(values, default=None)
    return "" if best is None else f"{best:.4f} at step {steps[values.index(best)]:,}"


def _median(run: RunFolder, key: str, spec: str) -> str:
    values = series(run.records, key)[1]
    return format(statistics.median(values), spec) if values else ""


def _gib(size: object) -> str:
    return f"{size / 2**30:.2f} GiB" if isinstance(size, int) else ""
