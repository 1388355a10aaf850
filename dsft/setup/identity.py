"""List everything that decides the numbers of a run.

`process_identity` and `input_identity` are compared between all ranks at every start
(`dsft.dist.world`): ranks that differ would train several models and average them. `build_identity` and
`software_identity` go into every checkpoint and are compared when a run resumes from it
(`dsft.checkpoint.compare`), as are the spec, the rows and, where parameters are frozen, the weight files.

All values are JSON, under names that a message can show.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dsft.data.render.renderer import tokenizer_text
from dsft.dist.world import World
from dsft.model.config import resolve_config
from dsft.model.files import digest_folder, model_files, readable
from dsft.model.lora import WEIGHTS
from dsft.plan.reference import other_model, reference_model
from dsft.report.console import task_progress
from dsft.setup.inputs import Inputs
from dsft.spec.schema import Spec
from dsft.system.digest import THREADS, FileState, HashProgress, content_digests, keep_digest, known_digest
from dsft.system.software import decisive_versions, switches

_NOT_DECISIVE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

Identity = dict[str, Any]


def process_identity(spec: Spec, file: Mapping[str, Any]) -> Identity:
    """Return the part of the list that a rank knows before it joins the others. file: the values of the
    user's DeepSpeed JSON. Values of cluster.env may be secret, so they are replaced by digests."""
    values = spec.model_dump(mode="json")
    if spec.cluster is not None:
        values["cluster"]["env"] = {name: _digest(value)[:12] for name, value in spec.cluster.env.items()}
    return {"spec": values, "--deepspeed_config": dict(file), **software_identity()}


def software_identity() -> Identity:
    """Return the versions of the packages, with a digest of dsft's own files, and the environment variables
    that select other kernels. `dsft.dist.world.join_group` adds the kind of device."""
    return {"versions": decisive_versions(), "environment": switches(os.environ)}


def file_digests(spec: Spec, world: World, log: Callable[[str], None]) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of every weight file that the run reads, by name, as this rank's host has it:
    `weights` of model.name_or_path, `adapter` of model.lora.path, `reference` of a reference's own, as far
    as the spec names them. A collective.

    A file that several ranks see, by its `FileState`, is read by one of them, and every host keeps what was
    found. Raises MissingInputError for files that cannot be read.
    """

    def hashed(files: list[Path], report: Callable[[HashProgress], object]) -> list[str]:
        with readable():
            return content_digests(files, folder, max(1, THREADS // world.world_size), report)

    def mine() -> tuple[dict[str, list[Path]], dict[Path, FileState]]:
        paths = _weight_paths(spec)
        with readable():
            return paths, {path: FileState.of(path) for of in paths.values() for path in of}

    seen, folder = time.time_ns(), digest_folder()
    paths, states = world.each(mine)
    own = {state: path for path, state in states.items()}
    kept = {state: digest for state in own if (digest := known_digest(state, folder)) is not None}
    known = {state: digest for of_rank in world.gather(kept) for state, digest in of_rank.items()}
    readers: dict[FileState, list[int]] = {}
    for rank, missing in enumerate(world.gather(own.keys() - known.keys())):
        for state in missing:
            readers.setdefault(state, []).append(rank)
    # Each file by one of the ranks that see it, by turns.
    turns = ((state, ranks[n % len(ranks)]) for n, (state, ranks) in enumerate(sorted(readers.items())))
    files = {own[state]: state for state, rank in turns if rank == world.rank}
    with task_progress(log, first=world.rank == 0) as report:
        found = world.each(lambda: hashed(list(files), report))
    for of_others in world.gather(dict(zip(files.values(), found, strict=True))):
        known |= of_others
    if world.local_rank == 0:
        for state in own.keys() - kept.keys():
            keep_digest(state, known[state], folder, seen)
    return {what: {path.name: known[states[path]] for path in of} for what, of in paths.items()}


def _weight_paths(spec: Spec) -> dict[str, list[Path]]:
    lora, paths = spec.model.lora, {}
    if spec.model.name_or_path is not None:
        paths["weights"] = model_files(spec.model.name_or_path)
    if lora is not None and lora.path is not None:
        paths["adapter"] = [Path(lora.path, WEIGHTS)]
    if (name := other_model(spec)) is not None:
        paths["reference"] = model_files(name)
    return paths


def input_identity(
    spec: Spec, inputs: Inputs, built: Identity, files: Mapping[str, Mapping[str, str]]
) -> Identity:
    """Return the identity of the files that a rank has read from its host's disks. built: from
    `build_identity`; files: from `file_digests`."""
    datasets = (inputs.train, *(held_out.data for held_out in inputs.held_out))
    identity: Identity = {
        **built,
        **files,
        "attention": inputs.config._attn_implementation,
        "rows of data.train and data.eval": [data.fingerprint for data in datasets],
    }
    if "reference" in files:
        config = resolve_config(reference_model(spec), inputs.facts)
        identity["reference"] = {"config.json": config_keys(config), "weights": files["reference"]}
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
