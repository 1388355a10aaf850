"""Complete a spec with the settings of the saved adapter in `model.lora.path`.

Keys that the spec leaves out are taken from adapter_config.json; each key on which the two disagree is a
finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding
from dsft.spec.schema import Lora, Spec
from dsft.system.json_file import read_json

FILE = "adapter_config.json"

PEFT_KEYS = {
    "rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules",
    "use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "modules_to_save",
}  # fmt: skip
"""Key of model.lora -> peft's key. dropout may differ, since it only affects training."""

SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
}
"""peft's keys that dsft does not support -> the values with which an adapter is one that dsft supports."""


def with_saved_adapter(spec: Spec) -> tuple[Spec, list[Finding]]:
    """Return the spec completed with the saved adapter's settings, and the findings. The spec is unchanged if
    it names no adapter, or one that does not exist, which `files` reports."""
    lora = spec.model.lora
    if lora is None or lora.path is None:
        return spec, []
    file = Path(lora.path) / FILE
    try:
        config = read_json(file)
        saved = _saved(config)
    except (FileNotFoundError, NotADirectoryError):
        return spec, []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"{quote(str(file))} is not the config of a saved adapter ({quote(str(error))})"
        return spec, [finding("model.lora.path", f"{message}; give another folder")]
    findings = []
    for key, supported in SUPPORTED.items():
        if key in config and config[key] not in supported:
            message = f"{FILE} has {key} {quote(config[key])}, but dsft can only continue plain LoRA"
            findings.append(finding("model.lora.path", f"{message}; give another adapter"))
    for key, theirs in saved.items():
        ours = getattr(lora, key)
        if key in lora.model_fields_set and key != "dropout" and not _same(ours, theirs):
            message = f"{_written(ours)} differs from the saved adapter's {_written(theirs)} "
            message += f"({PEFT_KEYS[key]} in its {FILE}); leave the key out to use the adapter's value"
            findings.append(finding(f"model.lora.{key}", message))
    missing = {key: value for key, value in saved.items() if key not in lora.model_fields_set}
    model = spec.model.model_copy(update={"lora": lora.model_copy(update=missing)})
    return spec.model_copy(update={"model": model}), findings


def _saved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter's settings by the keys of model.lora, validated by the schema."""
    given = {ours: config[theirs] for ours, theirs in PEFT_KEYS.items() if config.get(theirs) is not None}
    experts, linear = config.get("target_parameters") or [], given.get("target_modules", [])
    if isinstance(linear, list) and (linear or experts):
        given["target_modules"] = sorted({*linear, *experts})
    elif experts:
        raise ValueError("target_parameters beside target_modules that are no list")
    if "alpha" in given:
        given["alpha"] = float(given["alpha"])
    lora = Lora.model_validate(given)
    return {key: getattr(lora, key) for key in PEFT_KEYS}


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values agree. The order of names does not matter, and the adapter may have longer
    names than the spec. Which modules names and all-linear mean is compared when the model is built."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        # The parent's name is meant too: experts for experts.down_proj.
        full = {name: (f".{name}", f".{name.rpartition('.')[0]}") for name in theirs}
        found = {
            name: {one for one in ours if any(n.endswith(f".{one}") for n in full[name])} for name in theirs
        }
        return all(found.values()) and set().union(*found.values()) == set(ours)
    return bool(ours == theirs) or (ours == "all-linear" and isinstance(theirs, tuple))


def _written(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else quote(value)
