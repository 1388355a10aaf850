"""Look up model types and names of modules in the sources of the installed transformers, whose import takes
longer than all other checks of a spec."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsft.spec.architecture import text_part
from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding
from dsft.spec.schema import Spec

_ENTRY = re.compile(r'"([\w.-]+)"\s*[:,]\s*"(\w+)"')
"""An entry of transformers' tables: model type and config class, or model type and folder of its module."""
_MODULE = re.compile(r"\bself\.(\w+) = (?:nn\.Linear|Conv1D)\(")
SHOWN = 4


def model_type_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings for a model type that transformers does not know, and for names of adapters' modules
    that do not occur in its source. config: from_config, or the content of config.json."""
    kind, known = config.get("model_type"), model_types()
    if not known or not isinstance(kind, str):  # no transformers here; no type, which is refused elsewhere
        return
    if kind not in known:
        near = get_close_matches(kind, known, n=1)
        meant = f"did you mean {near[0]}?" if near else "docs/models.md lists the types that are tested"
        key = "model.name_or_path" if spec.model.from_config is None else "model.from_config.model_type"
        yield finding(key, f"{quote(kind)} is not a model type of transformers; {meant}")
        return
    text = text_part(config).get("model_type")
    source = source_of(text if text in known else kind)
    for key, names in _adapted(spec).items():
        for name in names if source else ():
            last = name.rpartition(".")[2]
            if not last.isdigit() and not re.search(rf"\b{re.escape(last)}\b", source):
                there = list(dict.fromkeys(_MODULE.findall(source)))
                some = get_close_matches(last, there, n=SHOWN, cutoff=0.5) or there[:SHOWN]
                message = f"{quote(name)} is not a module of a {kind} model; write one that is, such as "
                yield finding(key, f"{message}{', '.join(some)}")


def _adapted(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Return key -> names of modules that it takes."""
    lora = spec.model.lora
    if lora is None:
        return {}
    targets = () if isinstance(lora.target_modules, str) else lora.target_modules
    scores = {"score"} if spec.model.head == "score" else set()  # of a class without a layer of that name
    saved = tuple(name for name in lora.modules_to_save if name not in scores)
    return {"model.lora.target_modules": targets, "model.lora.modules_to_save": saved}


def model_types() -> list[str]:
    """Return the model types of transformers; none where it is not installed."""
    return [kind for kind, value in _table() if value.endswith("Config") and kind != "CONFIG_MAPPING"]


@cache
def source_of(kind: str) -> str:
    """Return the source of a model type's modules; "" where they are another type's."""
    folders = {kind: value for kind, value in _table() if value.islower()}
    folder = _models() / folders.get(kind, kind.replace("-", "_"))
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("modeling_*.py")))


@cache
def _table() -> list[tuple[str, str]]:
    """Return pairs of a model type and its config class, of one and the folder of its module where that has
    another name, and of one and other classes."""
    paths = (_models() / "auto" / name for name in ("auto_mappings.py", "configuration_auto.py"))
    return [
        entry
        for path in paths
        if path.is_file()
        for entry in _ENTRY.findall(path.read_text(encoding="utf-8"))
    ]


def _models() -> Path:
    package = find_spec("transformers")
    return Path(package.origin).parent / "models" if package and package.origin else Path("transformers")
