"""Identify what reference log-probabilities depend on, as a Key of named components.

How the log-probabilities are computed is not part of the key (ranks, ZeRO stage, packing, micro-batches):
that changes only their rounding, so values written under one layout are valid under any other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsft.checkpoint.compare import NOW, WAS, changed_files, other_rows
from dsft.model.config import new_rows, resolve_config
from dsft.model.files import digests, model_files
from dsft.model.lora import CONFIG, WEIGHTS
from dsft.plan.reference import other_model
from dsft.setup.identity import config_keys, tokenizer_digest
from dsft.setup.inputs import Inputs
from dsft.spec.differences import first_difference, json_differences
from dsft.spec.schema import Model, Spec

FORMAT = 1
"""Version to increment when the same components would give other log-probabilities."""

Components = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """The identity of reference log-probabilities: components, JSON values by name, which `differences`
    compares.

    weights     {file: sha256}, or of a fresh model {from_config, seed}
    config      the keys of the model's configuration that differ from its class's defaults
    adapter     {file: sha256}, None without one
    new_rows    the new rows of the embeddings, as NewRows has them; added: the tokens of model.add_tokens
    tokenizer   sha256 of all of it except its chat template
    template    the chat template's text
    truncation  data.max_length and data.on_too_long
    data        sources: {one of data.train or data.eval: {rows, tokens, fingerprint}}, as in checkpoints;
                examples: the fingerprint of each dataset
    precision   train.precision
    quantize    the form of weights in 4 bits, and model.quantize_skip; only where weights are quantized
    also        the fingerprint of each of `Inputs.also_scored`; only where there are any
    scored      `Reference.teacher_keys`, and how many tokens the policy has; only of a teacher

    quantize: the spec's key that decides the form of the reference's weights.
    """

    components: Components
    quantize: str = "model.quantize"

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.components, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return the key as stores and checkpoints have it."""
        return {"digest": self.digest, "components": self.components}


def key_of(spec: Spec, model: Model, inputs: Inputs) -> Key:
    """Compute the key. `model`: the reference's. Raises MissingInputError where its files cannot be read,
    DataError where one changes while it is read."""
    rows = new_rows(model, inputs.facts)
    data = inputs.loaded
    datasets = (data.train, *(one.data for one in data.held_out))
    asked = spec.reference and spec.reference.teacher_keys
    vocabulary = inputs.config.get_text_config().vocab_size
    return Key(
        {
            "format": FORMAT,
            "config": config_keys(resolve_config(model, inputs.facts)),
            **weights_of(spec, model),
            "new_rows": None if rows is None else asdict(rows) | {"added": list(model.add_tokens)},
            "tokenizer": tokenizer_digest(inputs.tokenizer),
            "template": inputs.tokenizer.chat_template,
            "truncation": {"max_length": spec.data.max_length, "on_too_long": spec.data.on_too_long},
            "data": {
                "sources": {name: dict(one) for name, one in data.identity.items()},
                "examples": [dataset.fingerprint for dataset in datasets],
            },
            "precision": spec.train.precision,
            **({"quantize": [model.quantize, *model.quantize_skip]} if model.quantize else {}),
            **({"also": [one.fingerprint for one in inputs.also_scored]} if inputs.also_scored else {}),
            **({"scored": asked | {"vocab_size": vocabulary}} if asked else {}),
        },
        spec.own_key("reference_quantize") if other_model(spec) else "model.quantize",
    )


def weights_of(spec: Spec, model: Model) -> Components:
    """Return the components `weights` and `adapter`, from the current contents of the files. Raises as
    `key_of`."""
    files, adapter = paths_of(model)
    fresh = {"from_config": model.from_config, "seed": spec.train.seed}
    return {
        "weights": digests(files) if model.name_or_path is not None else fresh,
        "adapter": digests(adapter) if adapter else None,
    }


def paths_of(model: Model) -> tuple[list[Path], list[Path]]:
    """Return the files of the weights, none for a fresh model, and of the adapter. Raises as `key_of`."""
    lora, name = model.lora, model.name_or_path
    adapter = [Path(lora.path, file) for file in (CONFIG, WEIGHTS)] if lora and lora.path else []
    return [] if name is None else model_files(name), adapter


# --- what differs -----------------------------------------------------------------------------------------


def differences(then: Components, now: Components, quantize: str = "model.quantize") -> list[str]:
    """Return a clause for each component that differs, in terms of the spec: the old value, then the new
    one. quantize: as in `Key`."""

    def named(one: Components) -> Components:
        form, *skip = one.get("quantize") or [None]
        return {**one, "quantize": {quantize: form, "model.quantize_skip": skip}}

    then, now = named(then), named(now)
    clauses = [
        clause
        for name, describe in _CLAUSES.items()
        if then.get(name) != now.get(name)
        for clause in describe(then.get(name), now.get(name))
    ]
    return clauses + [f"another dsft wrote its {name!r}" for name in sorted(then.keys() - _CLAUSES.keys())]


def _other_weights(then: Any, now: Any) -> Iterator[str]:
    was, is_ = ("from_config" in (one or {}) for one in (then, now))
    if was != is_:
        origin = {True: "fresh ones of model.from_config", False: "read from files"}
        yield f"the weights were {origin[was]}, now {origin[is_]}"
    elif was:
        yield from _values("the fresh model's ", then, now)
    else:
        yield from changed_files("weight file", then or {}, now or {})


def _values(of: str, then: Any, now: Any) -> Iterator[str]:
    for one in json_differences(then, now):
        yield of + one.clause(WAS, NOW)


def _other_template(then: Any, now: Any) -> Iterator[str]:
    where = ""
    if isinstance(then, str) and isinstance(now, str):
        at = first_difference(then, now)
        was, is_ = (repr(text[max(0, at - 10) : at + 10]) for text in (then, now))
        where = f" at its character {at + 1}: it was {was}, now {is_}"
    yield f"the chat template has changed{where}"


def _other_data(then: Any, now: Any) -> Iterator[str]:
    then, now = then or {}, now or {}
    others = list(other_rows(then.get("sources"), now.get("sources", {}), "pairs"))
    yield from others or ["the sources of data.train or data.eval are in another order"]


_CLAUSES: Mapping[str, Any] = {
    "format": lambda then, now: [f"dsft's way of scoring was version {then}, now {now}"],
    "weights": _other_weights,
    "config": lambda then, now: _values("the model's config: ", then, now),
    "adapter": lambda then, now: changed_files("adapter's file", then or {}, now or {}),
    "new_rows": lambda then, now: ["the new rows of the embeddings (model.add_tokens) have changed"],
    "tokenizer": lambda then, now: ["the tokenizer has changed"],
    "template": _other_template,
    "truncation": lambda then, now: _values("data.", then, now),
    "data": _other_data,
    "precision": lambda then, now: [f"train.precision was {then}, now {now}"],
    "quantize": lambda then, now: _values("", then, now),
    "scored": lambda then, now: _values("of the teacher's tokens ", then, now),
    "also": lambda then, now: [
        "the steps (train.seed, the global batch size) pair prompts and answers otherwise"
    ],
}
