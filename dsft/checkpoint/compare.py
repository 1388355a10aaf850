"""Check whether a run with a given spec may resume from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsft.checkpoint.read import MODEL, CheckpointReader
from dsft.data.rows import FIELDS
from dsft.errors import CheckpointError
from dsft.model.files import samples
from dsft.spec.batch import BatchSizes
from dsft.spec.differences import ABSENT, flatten, json_differences
from dsft.spec.schema import SECTIONS, Reference, Spec
from dsft.system.json_file import read_json

MAY_DIFFER = (
    "name",  # the folder may be moved
    "output_dir",
    "parallel",
    "cluster",
    "wandb",
    "tensorboard",
    "swanlab",
    "checkpoint",
    "model.gradient_checkpointing",
    "data.packing",  # where it makes other examples (pretraining), their fingerprint differs
    "data.max_tokens_per_micro_batch",
    "data.cache_dir",
    "data.num_workers",
    "data.max_dropped_fraction",  # the rows that remain are in the fingerprint
    "data.max_truncated_fraction",
    "data.max_duplicate_fraction",
    "train.global_batch_size",  # compared by its resulting value
    "train.micro_batch_size",
    "train.accumulation_steps",
    "train.max_steps",
    "train.num_train_epochs",
    "train.log_every",
    "train.eval_every",
    "train.compare_ranks_every",
    "train.eval_on_start",
    # the reference itself is compared by its key
    *(f"{name}.{key}" for name in SECTIONS for key in Reference.model_fields if key != "reference_model"),
    *(f"{name}.share_prompts" for name in SECTIONS),
)
"""Keys, with all below them, that change how a run is carried out or how long it is, not what it learns."""

WAS, NOW = "was {}", "now {}"
GENERATION = "generation_config.json"
_READERS = ("transformers", "tokenizers")
"""Packages that decide how a model's files are read and in what form they are written."""


def check_same_run(
    checkpoint: CheckpointReader,
    spec: Spec,
    batch: BatchSizes,
    data: Mapping[str, Mapping[str, Any]] | None,
    to: str = "resume",
) -> None:
    """Check that the spec, the batch size and the data are those of the checkpoint's run. `data`: what is
    trained and evaluated on, as in `CheckpointState`; None where it has not been read yet. to: what is
    refused, `resume` or `replay`.

    Raises CheckpointError naming every key that differs, with both values.
    """
    given = dict(flatten(spec.model_dump(mode="json", exclude_defaults=True)))
    without = tuple(f"{key}." for key, value in flatten(checkpoint.state["spec"]) if value is None)
    differing_keys = [
        one.clause(WAS, NOW)
        for one in json_differences(checkpoint.state["spec"], spec.model_dump(mode="json"))
        if not may_differ(one.key)
        and not one.is_of_empty_values
        # Ignore keys that the older dsft did not have, but not those of a section that was left out then.
        and not (one.old == ABSENT and one.key not in given and not one.key.startswith(without))
    ]
    ways = ["set the keys back"] if differing_keys else []
    examples = checkpoint.state["batch"]["global_batch_size"]
    if examples != batch.global_batch_size:
        differing_keys.append(f"train.global_batch_size was {examples}, now {batch.global_batch_size}")
        ways.append(_batch_back(spec, batch, examples))
    other = list(other_rows(checkpoint.state["data"], data, f"{spec.task_kind.unit}s")) if data else []
    ways += ["put the rows back as they were"] if other else []
    if differing_keys or other:
        otherwise = "; for a new run, choose another name" if to == "resume" else ""
        raise CheckpointError(
            f"cannot {to} from {checkpoint.path}, because this run differs: "
            f"{'; '.join([*differing_keys, *other])}. To {to}, {' and '.join(ways)}{otherwise}."
        )


def _batch_back(spec: Spec, batch: BatchSizes, examples: int) -> str:
    """Return what to set for a global batch of `examples`: the accumulation steps with which the
    micro-batches of these ranks give it, or itself."""
    steps, rest = divmod(examples, batch.micro_batch_size * batch.data_parallel)
    if spec.train.global_batch_size is not None or spec.train.micro_batch_size is None or rest:
        return f"set train.global_batch_size={examples}"
    kind = "rank" if batch.sequence_parallel == 1 else "group"
    ranks = f"{batch.data_parallel} data-parallel {kind}{'s' * (batch.data_parallel > 1)}"
    return f"set train.accumulation_steps={steps} (with {ranks}, micro_batch_size {batch.micro_batch_size})"


def check_same_rows(checkpoint: CheckpointReader, rows: Mapping[str, int] | None) -> None:
    """Check that the embeddings get the same new rows as then. `rows`: the new rows that the run would add
    now. Raises CheckpointError where they differ: the tokenizer or the pretrained model then had another
    number of tokens."""
    then = checkpoint.state.get("new_rows")
    if then != rows:
        raise CheckpointError(
            f"{checkpoint.path} is of a model whose embeddings had {_rows(then)}, and now they have "
            f"{_rows(rows)}: the tokenizer or the pretrained model has changed since; put it back, or choose "
            "another name for a new run."
        )


def check_same_model(
    checkpoint: CheckpointReader, built_from: Mapping[str, Any], software: Mapping[str, Any]
) -> None:
    """Compare what the model and its rows are built from now with what the checkpoint's were built from.

    `built_from` and `software` are what the functions of these names in `dsft.setup.identity` give. Another
    version of transformers or tokenizers may know other keys and write a tokenizer in another form, so keys
    that only one of the two has and the tokenizer's digest are then left to the comparison of rows. A
    checkpoint of an older dsft that does not have them is not compared. Raises CheckpointError naming every
    key that differs, with both values."""
    then = (checkpoint.state.get("software") or software)["versions"]
    is_same_library = all(then.get(name) == software["versions"].get(name) for name in _READERS)
    found = [
        one
        for one in json_differences(checkpoint.state.get("built_from") or built_from, built_from)
        if is_same_library or not (ABSENT in (one.old, one.new) or one.key == "tokenizer")
    ]
    if found:
        raise CheckpointError(
            f"{checkpoint.path} is of a model built from other files: "
            f"{'; '.join(one.clause(WAS, NOW) for one in found)}. Put the model's, the "
            f"tokenizer's and the template's files back as they were ({checkpoint.path / MODEL} has copies), "
            "or choose another name for a new run."
        )


def changed_since(checkpoint: CheckpointReader, software: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each version, variable or kind of device that is not as it was when the checkpoint
    was written: a run may go on with another one, but its numbers may then differ in rounding or more.

    `software` is what `dsft.setup.identity.software_identity` gives."""
    for one in json_differences(checkpoint.state.get("software") or software, software):
        yield f"warning: {one.clause(WAS, NOW)}, since {checkpoint.path.name} was saved"


def changed_generation(checkpoint: CheckpointReader, model_folder: Path) -> Iterator[str]:
    """Yield a warning for each key of generation_config.json that differs between the checkpoint and the
    run's model folder. It decides no loss, so the run goes on, and its exports have the new value."""
    then, now = (folder / GENERATION for folder in (checkpoint.path / MODEL, model_folder))
    if then.is_file() and now.is_file():
        for one in json_differences(read_json(then), read_json(now)):
            if one.key != "transformers_version":
                yield f"warning: {GENERATION}: {one.clause(WAS, NOW)}, which exports have from now on"


def _rows(rows: Mapping[str, int] | None) -> str:
    return "no new rows" if rows is None else f"new rows {rows['first']} to {rows['stop'] - 1}"


def check_same_base(checkpoint: CheckpointReader, name: str | None, files: Mapping[str, str]) -> None:
    """Check that parameters that are not trained come from the same files as then. name: model.name_or_path;
    files: the SHA-256 of each of its weight files. Of a checkpoint of an older dsft, which has digests of
    `samples`, these are compared.

    Raises CheckpointError where they differ, since what was trained would then be combined with another base.
    """
    then: Any = checkpoint.state.get("base")
    if not then:
        return
    now: Mapping[str, Any] = files
    if isinstance(then, list):
        then, now = {file: found for file, *found in then}, samples(name) if name else {}
    if changes := list(changed_files("weight file", then, now)):
        raise CheckpointError(
            f"{checkpoint.path} was trained on top of the weights in model.name_or_path {name!r}, and these "
            f"have changed since: {'; '.join(changes)}. Put them back, or choose another name for a new run."
        )


def changed_files(what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each file whose digest differs. then, now: digests by the files' names."""
    for name in sorted(then.keys() | now.keys()):
        if name not in now:
            yield f"the {what} {name} is missing now"
        elif name not in then:
            yield f"the {what} {name} is new"
        elif then[name] != now[name]:
            yield f"the {what} {name} has changed"


def other_rows(then: Any, now: Mapping[str, Mapping[str, Any]], unit: str = "rows") -> Iterator[str]:
    """Yield a clause for each source whose rows differ. `then` and `now`: as in `CheckpointState`."""
    if not isinstance(then, Mapping):
        yield "its rows were fingerprinted by an earlier dsft, and cannot be compared"
        return
    for name in sorted(then.keys() | now.keys()):
        if name not in then or name not in now:
            yield f"{name} {'is not there now' if name in then else 'was not there'}"
        elif then[name]["fingerprint"] != now[name]["fingerprint"]:
            was, is_ = (
                f"{one['rows']:,} {unit} of {one['tokens']:,} tokens" for one in (then[name], now[name])
            )
            yield f"{name} had {was}, now {is_ if was != is_ else f'the same number of different {unit}'}"


_OF_FIELDS = "|".join(name for name in FIELDS if name != "label")
_FIELD = re.compile(rf"data\.(train|eval)\.\d+\.columns\.({_OF_FIELDS})")
"""Where a field of rows is read from: the rows' fingerprint has its numbers, if any row has one."""


def may_differ(key: str) -> bool:
    return _FIELD.fullmatch(key) is not None or any(
        key == free or key.startswith(free + ".") for free in MAY_DIFFER
    )
