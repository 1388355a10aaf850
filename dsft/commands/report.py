"""`dsft report RUN [RUN …]`: write one HTML page on a run, or on several side by side, that needs no network:
curves, results, memory beside the plan, what became of the rows, answers before and after, spec and versions.

Sources: metrics.jsonl, memory.json, data.json, spec.yaml and versions.json of the run's folder. A run that is
not finished, or that failed, is reported as far as it got.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsft.errors import DsftError, MissingInputError, printable
from dsft.report.curves import compared, figure, series, svg
from dsft.report.jsonl import read_metrics
from dsft.spec.differences import flatten
from dsft.spec.document import read_document
from dsft.system.files import check_page, page_begin, write_page
from dsft.system.json_file import parse_json, read_text, reason_of
from dsft.system.redact import one_line
from dsft.system.run_folder import named_run

PAGE = "report.html"
_ANSWER_TOKENS = 200
LARGEST = 2**20
"""Maximum size in bytes of a run's JSON and YAML files; usual ones have some thousand."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2024; background: #fff; color-scheme: light;
  max-width: 70rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #d5d9de; }
svg { max-width: 100%; height: auto; } .wide { overflow-x: auto; } table { border-collapse: collapse; }
pre { font: 14px/1.5 ui-monospace, monospace; white-space: pre-wrap; } summary { cursor: pointer; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid #d5d9de;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .text td { text-align: left; vertical-align: top; }
"""
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
    unreadable: Sequence[str] = ()

    @property
    def export(self) -> Path:
        return self.folder / "export"

    @property
    def base(self) -> str | None:
        """The pretrained model that was trained; None for fresh weights."""
        name = _mapping(self.spec.get("model")).get("name_or_path")
        return name if isinstance(name, str) else None


def write_report(names: Sequence[str], prompts: Sequence[str], out: Path | None) -> Path:
    """Write the page and return its path, by default report.html in the folder of the first run. Raises
    MissingInputError if a run does not exist, StorageError if the page cannot be written."""
    folders = list({folder.resolve(): folder for folder in map(named_run, names)}.values())
    last = [folder.resolve().name for folder in folders]
    runs = [
        _read(folder, name if last.count(name) == 1 else str(folder))
        for folder, name in zip(folders, last, strict=True)
    ]
    path = out or runs[0].folder / PAGE
    check_page(path, "--out", "dsft report")
    text = page(runs, [_answers(run, prompts) for run in runs] if prompts else [])
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
    memory, data, spec, versions = (_mapping_in(folder / name, unreadable) for name in names)
    return RunFolder(folder, name, records, memory, data, spec, versions, unreadable)


def _mapping_in(path: Path, unreadable: list[str]) -> dict[str, Any]:
    """Return the content of a JSON or YAML file, {} if it is absent or, with a clause in `unreadable`,
    damaged."""
    try:
        text = read_text(path, LARGEST)
        return _mapping(parse_json(text) if path.suffix == ".json" else read_document(text).data)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        unreadable.append(f"{path.name} {reason_of(error)}")
    return {}


def _mapping(found: Any) -> dict[str, Any]:
    """Return {} instead of anything else: a file may be damaged, or edited."""
    return found if isinstance(found, dict) else {}


# --- the page ---------------------------------------------------------------------------------------------


def page(runs: Sequence[RunFolder], answers: Sequence[Table]) -> str:
    """Return the HTML of the page. answers: a table of each run, or none."""
    title = " and ".join(run.name for run in runs)
    body = [f"<h1>{_text(title)}</h1>", _section("Results", _table(results(runs)))]
    if len(runs) > 1:
        body.append(_section("Curves together", _curves(compared, {run.name: run.records for run in runs})))
        body.append(_section("What differs in the specs", _table(differing(runs), "text")))
    for run in runs:
        of = f": {run.name}" if len(runs) > 1 else ""
        body.append(_section(f"Not shown{of}", _text("; ".join(run.unreadable))))
        body.append(_section(f"Curves{of}", _curves(figure, run.name, run.records)))
        body.append(_section(f"Memory{of}", _table(memory(run))))
        body.append(_section(f"Rows{of}", _table(ledger(run))))
    body += [
        _section(f"Answers: {run.name}", _table(rows, "text"))
        for run, rows in zip(runs, answers, strict=False)
    ]
    for run in runs:
        files = {"spec.yaml": run.spec, "versions.json": run.versions}
        body += [
            _folded(f"{name} of {run.name}", _dumped(content)) for name, content in files.items() if content
        ]
    head = [
        page_begin("dsft report"),
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
    ]
    return "\n".join([*head, *filter(None, body), "</body></html>\n"])


def results(runs: Sequence[RunFolder]) -> Table:
    """Return a table with a column for each run."""
    figures: dict[str, Callable[[RunFolder], str]] = {
        "steps": lambda run: f"{int(run.records[-1]['train/global_step']):,}",
        "training loss, first step": lambda run: _number(_values(run, "train/loss")[:1]),
        "training loss, last step": lambda run: _number(_values(run, "train/loss")[-1:]),
        "held-out loss, last": lambda run: _number(_values(run, "eval/loss")[-1:]),
        "held-out loss, lowest": lambda run: _lowest(run, "eval/loss"),
        "reward accuracy, last": lambda run: _number(_values(run, "train/rewards/accuracies")[-1:]),
        "reward margin, last": lambda run: _number(_values(run, "train/rewards/margins")[-1:]),
        "tokens per second, median": lambda run: _median(run, "perf/tokens_per_second", ",.0f"),
        "seconds per step, median": lambda run: _median(run, "perf/step_time", ".3g"),
        "skipped steps": lambda run: str(_skipped(run) or ""),
    }
    rows = [[name, *(of(run) for run in runs)] for name, of in figures.items()]
    return [["", *(run.name for run in runs)], *(row for row in rows if any(row[1:]))]


def differing(runs: Sequence[RunFolder]) -> Table:
    """Return the keys of the specs whose values differ, a column for each run."""
    leaves = [dict(flatten(run.spec)) for run in runs]
    keys = sorted({key for found in leaves for key in found})
    rows = [[key, *(str(found.get(key, "")) for found in leaves)] for key in keys]
    return [["key", *(run.name for run in runs)], *(row for row in rows if len(set(row[1:])) > 1)]


def memory(run: RunFolder) -> Table:
    """Return measured and planned bytes of each phase, the largest over all ranks."""
    rows = []
    for phase, kinds in _mapping(run.memory.get("phases")).items():
        for kind, found in _mapping(kinds).items():
            if "measured" in _mapping(found):
                above, planned = found.get("above_start"), found.get("planned")
                rows.append([f"{phase}, {kind}", *map(_gib, (found["measured"], above, planned))])
    return [["phase", "measured", "above the start", "planned"], *rows] if rows else []


def ledger(run: RunFolder) -> Table:
    """Return what became of the rows, a column for each data set, without counts that are 0 everywhere."""
    totals = {
        name: {count: value for count, value in part["total"].items() if isinstance(value, int)}
        for name, part in run.data.items()
        if _mapping(_mapping(part).get("total"))
    }
    names = [
        name for name in next(iter(totals.values()), {}) if any(total.get(name) for total in totals.values())
    ]
    rows = [
        [name.replace("_", " "), *(f"{total.get(name, 0):,}" for total in totals.values())] for name in names
    ]
    return [["", *totals], *rows] if rows else []


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


def _curves(draw: Callable[..., Any], *given: Any) -> str:
    try:
        return svg(draw(*given))
    except Exception as error:  # noqa: B902  values so large that matplotlib cannot place them
        return f"<p>They cannot be drawn: {_text(one_line(error))}</p>"


def _values(run: RunFolder, key: str) -> list[float]:
    return series(run.records, key)[1]


def _number(values: Sequence[float]) -> str:
    return f"{values[0]:.4f}" if values else ""


def _lowest(run: RunFolder, key: str) -> str:
    steps, values = series(run.records, key)
    best = min(values, default=None)
    return "" if best is None else f"{best:.4f} at step {steps[values.index(best)]:,}"


def _median(run: RunFolder, key: str, spec: str) -> str:
    values = _values(run, key)
    return format(statistics.median(values), spec) if values else ""


def _skipped(run: RunFolder) -> int:
    return sum(not math.isfinite(record.get("train/grad_norm", 0.0)) for record in run.records)


def _gib(size: object) -> str:
    return f"{size / 2**30:.2f} GiB" if isinstance(size, int) else ""


def _dumped(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _section(title: str, content: str) -> str:
    return f"<h2>{_text(title)}</h2>\n{content}" if content else ""


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>"


def _table(rows: Table, kind: str = "") -> str:
    if len(rows) < 2:
        return ""
    cells = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    cells[0] = cells[0].replace("td>", "th>")
    return (
        f'<div class="wide"><table class="{kind}">{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'
    )


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
