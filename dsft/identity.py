"""List everything that decides the numbers of a run.

`process_identity` and `input_identity` are compared between all ranks at every start
(`dsft.engine.world`): ranks that differ would train several models and average them. `build_identity` and
`software_identity` go into every checkpoint and are compared when a run resumes from it
(`dsft.checkpoint.compare`), as are the spec, the rows and, where parameters are frozen, the weight files.

All values are JSON, under names that a message can show.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dsft.data.render.renderer import tokenizer_text
from dsft.inputs import Inputs
from dsft.model.config import resolve_config
from dsft.model.files import fingerprint, sample_of
from dsft.model.lora import WEIGHTS
from dsft.plan.reference import dpo_of, needs_reference, reference_model
from dsft.rank.software import decisive_versions, switches
from dsft.spec.schema import Spec

_NOT_DECISIVE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

Identity = dict[str, Any]


def process_identity(spec: Spec, config: Mapping[str, Any]) -> Identity:
    """Return the part of the list that a rank knows before it joins the others. `config` is the DeepSpeed
    JSON. Values of cluster.env may be secret, so they are replaced by digests."""
    values = spec.model_dump(mode="json")
    if spec.cluster is not None:
        values["cluster"]["env"] = {name: _digest(value)[:12] for name, value in spec.cluster.env.items()}
    return {"spec": values, "DeepSpeed JSON": dict(config), **software_identity()}


def software_identity() -> Identity:
    """Return the versions of the packages, with a digest of dsft's own files, and the environment variables
    that select other kernels. `dsft.engine.world.join` adds the kind of device."""
    return {"versions": decisive_versions(), "environment": switches(os.environ)}


def input_identity(spec: Spec, inputs: Inputs, built: Identity) -> Identity:
    """Return the identity of the files that a rank has read from its host's disks. built: from
    `build_identity`. Raises MissingInputError for files that cannot be read."""
    datasets = (inputs.train, *(held_out.data for held_out in inputs.held_out))
    lora = spec.model.lora
    identity: Identity = {
        **built,
        "attention": inputs.config._attn_implementation,
        "weights": inputs.files,
        "rows of data.train and data.eval": [data.fingerprint for data in datasets],
    }
    if lora is not None and lora.path is not None:
        identity["adapter"] = sample_of(Path(lora.path, WEIGHTS))
    if needs_reference(spec) and (name := dpo_of(spec).reference_model) is not None:
        config = resolve_config(reference_model(spec), inputs.facts)
        identity["reference"] = {"config.json": config_keys(config), "weights": fingerprint(name)}
    return identity


def build_identity(inputs: Inputs) -> Identity:
    """Return what the model and its rows are built from besides the spec, the data and the weights."""
    return {
        "config.json": config_keys(inputs.config),
        "tokenizer": tokenizer_digest(inputs.tokenizer),
        "chat template": inputs.tokenizer.chat_template,
    }


def config_keys(config: PreTrainedConfig) -> Identity:
    """Return the keys of a config that transformers writes into config.json."""
    keys = json.loads(config.to_json_string(use_diff=True))
    return {key: value for key, value in keys.items() if key not in _NOT_DECISIVE}


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256, as hex, of all of a tokenizer except its chat template."""
    return _digest([tokenizer_text(tokenizer), tokenizer.special_tokens_map])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
