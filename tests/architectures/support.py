"""Make the tables of docs/support.md: which tasks, models and options go together. Whether a combination is
refused comes from the validators, whether a test shows it from the cases of tests/parity and
tests/architectures.

A combination is a few keys of a spec. What it leaves open is tried: it works if any ZeRO stage accepts it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from dsft.errors import DsftError, SpecError
from dsft.model.attention import attend_per_segment
from dsft.model.build import check_trainable
from dsft.model.config import DECODERS, TokenFacts, on_meta, resolve_config
from dsft.model.policy import Policy
from dsft.model.split_check import check_can_split
from dsft.model.whole import text_config, whole_of
from dsft.spec.architecture import PIPELINE_PARTS
from dsft.spec.findings import Finding
from dsft.spec.load import refusals
from dsft.spec.schema import Model, Spec
from dsft.spec.task import TASKS
from tests.architectures import cases as architectures
from tests.architectures.test_architectures import MODES
from tests.architectures.wholes import WHOLES
from tests.integration import test_quantize
from tests.make import logps_of
from tests.parity.cases import SHAPES, Case, all_cases

WORKS, SHOWN, OTHER = "○", "✓", "·"
"""A cell: accepted; accepted and in a test; two values of one key."""
SPLIT = "rows split over ranks"
BASE: dict[str, Any] = {
    "name": "x",
    "task": "sft",
    "model": {"from_config": {"model_type": "llama", "num_hidden_layers": 4}},
    "data": {"train": [{"path": "data/train.jsonl"}], "max_length": 64},
    "train": {"micro_batch_size": 1, "accumulation_steps": 4, "num_train_epochs": 1},
    "optim": {"learning_rate": 1e-5},
    "cluster": {"hosts": {"localhost": 4}, "accelerator": {"name": "H100"}},
}
Keys = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Option:
    """What a row or column of a table sets. keys: dotted keys of the spec; several: each must be accepted."""

    title: str
    keys: tuple[Keys, ...]


def option(title: str, *keys: Keys) -> Option:
    return Option(title, keys)


def _offload(part: str, device: str) -> Keys:
    place = {"nvme_path": "/local"} if device == "nvme" else {}
    return {f"parallel.offload_{part}": {"device": device, **place}}


TASK_OPTIONS = tuple(
    option(", ".join(names), *({"task": name, **keys} for name in names))
    for names, keys in (
        ([name for name, task in TASKS.items() if task.section is None], {}),
        ([name for name, task in TASKS.items() if task.rows == 2 and task.head == "vocabulary"], {}),
        (["reward"], {}),
        (["distill"], {"distill.reference_model": "teacher"}),
        (["classify"], {"classify.labels": ["good", "bad"]}),
        (["kto"], {}),
    )
)
"""Tasks by their loss: of the next token, of pairs, of scores, with a teacher, and of labels. Engines see no
other difference."""
TRAINED = (option("all weights", {}), option("LoRA", {"model.lora": {}}))
IN_4_BITS = option(
    "LoRA on a base in 4 bits",
    {"model": {"name_or_path": "owner/base", "lora": {}}, "model.quantize": "nf4"},
)
OPTIONS = (
    *(option(f"ZeRO {stage}", {"parallel.zero_stage": stage}) for stage in range(4)),
    option("pipeline", {"parallel.pipeline_stages": 2}),
    option("optimizer in host memory", _offload("optimizer", "cpu")),
    option("parameters in host memory", _offload("parameters", "cpu")),
    option("optimizer on NVMe", _offload("optimizer", "nvme")),
    option("parameters on NVMe", _offload("parameters", "nvme")),
    option("packing", {"data.packing": True}),
    option("gradient checkpointing", {"model.gradient_checkpointing": True}),
    option(SPLIT, {"parallel.sequence_parallel": 2}),
    *(option(name, {"train.precision": name}) for name in ("fp32", "bf16", "fp16")),
)


# --- refused ---------------------------------------------------------------------------------------------


def refusal(*options: Option, model: Keys | None = None) -> str | None:
    """Return why the options cannot be set together, None if they can. model: model.from_config."""
    merged: list[dict[str, Any]] = [{}]
    for one in options:
        merged = [{**keys, **more} for keys in merged for more in one.keys]
    reasons = [_refusal(keys, model) for keys in merged]
    return next((reason for reason in reasons if reason is not None), None)


def _refusal(keys: Keys, model: Keys | None) -> str | None:
    """Return the reason at the ZeRO stage that has the fewest, if no stage accepts these keys."""
    stages = [keys.get("parallel.zero_stage", stage) for stage in (2, 3, 1, 0)]
    found = min((_findings({**keys, "parallel.zero_stage": s}, model) for s in stages), key=len)
    return f"`{'.'.join(map(str, found[0].path))}`: {_short(found[0].message)}" if found else None


def _findings(keys: Keys, model: Keys | None) -> list[Finding]:
    spec = {name: dict(value) if isinstance(value, dict) else value for name, value in BASE.items()}
    if model is not None:
        spec["model"]["from_config"] = model
    for key, value in keys.items():
        section, _, name = key.partition(".")
        if name:
            spec.setdefault(section, {})[name] = value
        else:
            spec[section] = value
    return refusals(Spec.model_validate(spec))


def _short(message: str) -> str:
    """Return what is wrong, without the values and the way out."""
    return re.sub(r"^\S+ with [^:]*: ", "", " ".join(message.partition("; ")[0].split()))


# --- shown -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shown:
    """A case of a test: its name, the model type, and the titles of the options that it runs with."""

    name: str
    kind: str
    titles: frozenset[str]


@cache
def shown() -> tuple[Shown, ...]:
    quantized = (*test_quantize.ALWAYS, *test_quantize.OTHERS, *test_quantize.ALONE)
    return (*map(_of_parity, all_cases()), *map(_of_quantize, quantized), *_of_architectures())


def _of_parity(case: Case) -> Shown:
    place = "on NVMe" if case.on_disk else "in host memory"
    kinds = (
        case.reference != "none",
        case.reward,
        case.teacher != "none",
        case.labels == "classify",
        case.labels == "kto",
    )
    titles = {
        TASK_OPTIONS[max((n for n, is_kind in enumerate(kinds, 1) if is_kind), default=0)].title: True,
        "all weights": case.trains in ("all", "groups"),
        "LoRA": case.trains.startswith("lora"),
        f"ZeRO {case.zero_stage}": True,
        "pipeline": case.stages > 1,
        f"optimizer {place}": "offload_optimizer" in case.offloads,
        f"parameters {place}": "offload_parameters" in case.offloads,
        "packing": case.packed,
        "gradient checkpointing": case.checkpointing,
        SPLIT: case.sequence_parallel > 1,
        case.precision: True,
    }
    return Shown(case.name, SHAPES[case.shape]["model_type"], _true(titles))


def _of_quantize(case: Mapping[str, Any]) -> Shown:
    """Of a case of tests/integration/test_quantize.py."""
    task = case.get("task", "pretrain")
    titles = {
        next(one.title for one in TASK_OPTIONS if task in one.title.split(", ")): True,
        IN_4_BITS.title: not case.get("dora"),
        f"ZeRO {case['zero']}": True,
        "pipeline": case.get("stages", 1) > 1,
        SPLIT: case.get("split", 1) > 1,
        "parameters in host memory": case.get("offload", False),
        "packing": case.get("packed", False),
        "gradient checkpointing": case.get("checkpointing", False),
        case.get("precision", "fp32"): True,
    }
    words = [f"{key} {value}" if value is not True else key for key, value in case.items()]
    return Shown(f"4 bits: {', '.join(words)}", case.get("of", "llama"), _true(titles))


def _of_architectures() -> Iterable[Shown]:
    """ZeRO 2 and 3 against the plain loop, and stages against the whole: tests/architectures."""
    always = {TASK_OPTIONS[0].title, "all weights", "fp32"}
    for kind in architectures.ARCHITECTURES:
        packed = {"packing"} if architectures.PACKED.get(kind) != "refused" else set()
        for mode, titles in ((mode, {f"ZeRO {mode.removeprefix('zero')}"}) for mode in MODES):
            checkpointing = {"gradient checkpointing"} if mode == "zero3" else set()
            yield Shown(f"{kind}-{mode}", kind, frozenset(always | titles | packed | checkpointing))
        stages = {"pipeline", "gradient checkpointing"}
        yield Shown(f"{kind}-stages", kind, frozenset(always | stages | packed))
        if kind not in architectures.SPLIT:
            yield Shown(f"{kind}-split", kind, frozenset(always | {SPLIT, "ZeRO 2"} | packed))


def _true(titles: Mapping[str, bool]) -> frozenset[str]:
    return frozenset(title for title, on in titles.items() if on)


def cases_of(titles: Iterable[str], kind: str | None = None) -> list[str]:
    """Return the names of the cases that run with all of these options."""
    wanted = frozenset(titles)
    return [one.name for one in shown() if wanted <= one.titles and kind in (None, one.kind)]


# --- tables ----------------------------------------------------------------------------------------------


class Reasons:
    """The reasons of refusals, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, reason: str) -> str:
        return str(self.numbers.setdefault(reason, len(self.numbers) + 1))

    def lines(self) -> list[str]:
        return [f"{number}. {reason}" for reason, number in self.numbers.items()]


def tasks_markdown() -> str:
    """Return a row for each task and kind of training, then what shows each cell, then the reasons."""
    rows = [(task, trained) for task in TASK_OPTIONS for trained in (*TRAINED, IN_4_BITS)]
    return _crossed(rows, lambda row: "; ".join(one.title for one in row))


def options_markdown() -> str:
    """Every option with every other."""
    return _crossed([(one,) for one in OPTIONS], lambda row: row[0].title)


def _crossed(rows: Sequence[tuple[Option, ...]], title: Callable[[tuple[Option, ...]], str]) -> str:
    reasons, names = Reasons(), list[str]()
    lines = [f"| | {' | '.join(one.title for one in OPTIONS)} |", "|---" * (len(OPTIONS) + 1) + "|"]
    named = set[frozenset[str]]()
    for row in rows:
        cells = []
        for column in OPTIONS:
            titles = [one.title for one in (*row, column)]
            cell = _cell(row, column, reasons, cases := cases_of(titles))
            cells.append(cell)
            if cell == SHOWN and frozenset(titles) not in named:
                named.add(frozenset(titles))
                more = " and others" if len(cases) > 1 else ""
                names.append(f"| {title(row)} | {column.title} | `{cases[0]}`{more} |")
        lines.append(f"| {title(row)} | {' | '.join(cells)} |")
    shown_by = ["", "<details><summary>Shown by</summary>", "", "| | with | case |", "|---|---|---|", *names]
    return "\n".join([*lines, "", *reasons.lines(), *shown_by, "", "</details>"])


def _cell(row: Sequence[Option], column: Option, reasons: Reasons, cases: Sequence[str]) -> str:
    taken = {key for one in row for keys in one.keys for key in keys}
    if taken & column.keys[0].keys():
        return OTHER
    reason = refusal(*row, column)
    if reason is not None:
        return reasons.number(reason)
    return SHOWN if cases else WORKS


def architectures_markdown() -> str:
    """Return a row for all architectures with the same cells; then those that are refused altogether."""
    reasons, rows, refused = Reasons(), dict[tuple[str, ...], list[str]](), dict[str, list[str]]()
    columns = (*TRAINED, TASK_OPTIONS[1], *OPTIONS)
    for kind in kinds():
        config = keys_of(kind)
        reason = model_refusal(kind, config)
        if reason is not None:
            refused.setdefault(reason, []).append(kind)
            continue
        cells = tuple(_of_kind(kind, config, column, reasons) for column in columns)
        rows.setdefault(cells, []).append(kind)
    lines = [f"| | {' | '.join(one.title for one in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {', '.join(kinds)} | {' | '.join(cells)} |" for cells, kinds in rows.items()]
    lines += ["", *reasons.lines(), "", "| refused | reason |", "|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(kinds)} | {reason} |" for reason, kinds in refused.items())])


def _of_kind(kind: str, config: Keys, column: Option, reasons: Reasons) -> str:
    reason = refusal(column, model=config)
    if reason is None and column.title == "packing":
        reason = packed_refusal(kind)
    if reason is None and column.title == SPLIT:
        reason = split_refusal(kind, config)
    if reason is not None:
        return reasons.number(_without(kind, reason))
    eager = " eager" if column.title == "packing" and architectures.PACKED.get(kind) == "eager" else ""
    return SHOWN + eager if cases_of([column.title], kind) else WORKS


def wholes_markdown() -> str:
    """Return the text models inside the multimodal models that tests/architectures/test_wholes.py trains."""
    lines = ["| multimodal model type | text model | |", "|---|---|---|"]
    for kind, keys in sorted(WHOLES.items()):
        whole = CONFIG_MAPPING[kind.split()[0]](**keys)
        text = text_config(whole)
        assert text is not None, f"{kind} has no text model inside"
        try:
            whole_of(whole, on_meta(text))
            cell = SHOWN
        except SpecError as error:
            cell = _short(error.problems[0].message)
        lines.append(f"| {kind} | {text.model_type} | {cell} |")
    return "\n".join(lines)


def packed_refusal(kind: str) -> str | None:
    """Return why a run stops at its first packed row, for a kind whose cases are not packed."""
    if architectures.PACKED.get(kind) != "refused":
        return None
    ids = torch.arange(8).view(1, 8)
    try:
        model = architectures.small_model(kind)
        attend_per_segment(model, "auto", BASE["data"]["max_length"])
        logps_of(Policy(model), ids, ids % 4, ids, (4, 4))
    except SpecError as error:
        return f"`{error.problems[0].where}`: {_short(error.problems[0].message)}"
    except DsftError as error:
        return f"`data.packing`: {_short(str(error))}"
    return "`data.packing`: packed rows are not exact, as the check at the start of a run finds"


def split_refusal(kind: str, config: Keys) -> str | None:
    """Return why rows of this type cannot be split over two ranks."""
    try:
        check_can_split(_resolved(kind, config), 2, BASE["data"]["max_length"])
    except SpecError as error:
        return f"`{error.problems[0].where}`: {_short(error.problems[0].message)}"
    return None


def kinds() -> list[str]:
    """Return the model types that transformers describes well enough to be tried, and the older ones."""
    found = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    described = {kind for kind in found if CONFIG_MAPPING[kind].base_model_pp_plan}
    described -= PIPELINE_PARTS  # which transformers lists once dsft has made their classes
    return sorted(described | set(DECODERS) | architectures.ARCHITECTURES.keys())


def keys_of(kind: str) -> dict[str, Any]:
    """Return model.from_config of a model that is small, or has few layers."""
    if kind in architectures.ARCHITECTURES:
        return {"model_type": kind, **architectures.keys_of(kind)}
    tables = [table for table in vars(architectures).values() if isinstance(table, dict) and kind in table]
    found = [table[kind][0] if isinstance(table[kind], tuple) else table[kind] for table in tables]
    given: dict[str, Any] = next((one for one in found if isinstance(one, dict)), {})
    names = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])}
    few = {"num_hidden_layers": 4} if "num_hidden_layers" in names else {}
    return {"model_type": kind, **few, **given}


def model_refusal(kind: str, config: Keys) -> str | None:
    """Return why a model of this type cannot be trained at all."""
    try:
        check_trainable(on_meta(_resolved(kind, config)))
    except SpecError as error:
        return _without(kind, _short(error.problems[0].message))
    return None


@cache
def _facts() -> TokenFacts:
    return TokenFacts(architectures.VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)


def _resolved(kind: str, config: Keys) -> Any:
    return resolve_config(Model.model_validate({"from_config": config}), _facts())


def _without(kind: str, reason: str) -> str:
    """Return the reason without what is the model type's own, so that equal ones are one."""
    reason = re.sub(r"\b[A-Z]\w*Attention\b", "an attention layer", reason)
    return re.sub(r" \(.*?\)", "", re.sub(rf"\b{re.escape(kind)}\b", "such", reason)).replace(
        "a such", "such a"
    )
