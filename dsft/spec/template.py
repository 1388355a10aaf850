"""Write the spec of `dsft init`: for the user's own model and data, or one that runs unchanged on one CPU
core, with a small model with fresh weights and builtin or generated rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from dsft.errors import Problem, SpecError, StorageError
from dsft.spec.document import quote, read_document
from dsft.spec.load import load_spec
from dsft.spec.losses import LossType
from dsft.spec.schema import NAME_PATTERN, Distill, Spec
from dsft.spec.task import TASKS, TaskFacts, Training, task_names
from dsft.system.files import is_own
from dsft.system.json_file import read_json

SCHEMA_FILE = "dsft.schema.json"
_SCHEMA_BEGIN = b'{\n "$schema": "https://json-schema.org/draft/2020-12/schema"'

_TINY_MODEL = """\
  # A newly initialized model; `dsft init --model PATH --data PATH` writes a spec for a pretrained one.
  from_config: {model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4,
                num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 1024,
                tie_word_embeddings: false}
  gradient_checkpointing: false      # true recomputes activations and saves memory
"""

_OWN_MODEL = """\
  name_or_path: {model}
  gradient_checkpointing: true       # recomputes activations; false is faster and needs more memory
  {lora}lora: {{rank: 16, alpha: 32}}{space}# train adapters; learning_rate: about {rate}
"""

_SFT_DATA = """\
  train: [{path: "builtin:quickstart"}]          # e.g. [{path: data/train.jsonl}]; docs/formats.md
  eval: [{path: "builtin:quickstart-heldout"}]   # held-out rows; [] for none
  max_length: 256                    # tokens
  on_too_long: drop                  # leave longer rows out (dsft preview counts them) | truncate | error
  packing: true                      # several examples in one row, without padding; same loss
"""

_PRETRAIN_DATA = """\
  train: [{{path: {text_file}}}]     # or .txt files, or rows of {{"text": ...}}
  max_length: 256                    # tokens
  packing: true                      # rows of exactly max_length; false: a row per document
"""

_LABELED_DATA = """\
  train: [{{path: {text_file}}}]     # rows of {{"text": ..., "label": ...}}; docs/formats.md
  max_length: 256                    # tokens
  on_too_long: drop                  # leave longer rows out (dsft preview counts them) | truncate | error
  packing: true                      # several rows in one, without padding; same loss
"""

_ANSWERS_DATA = """\
  train: [{{path: "builtin:quickstart-pairs"}}]          # {rows}; docs/formats.md
  eval: [{{path: "builtin:quickstart-pairs-heldout"}}]   # held-out pairs; [] for none
  max_length: 256                    # tokens of a prompt and one answer
  on_too_long: drop                  # leave longer rows out (dsft preview counts them) | truncate | error
  packing: true                      # several {packed} in one row, without padding; same loss
"""

_OWN_DATA = """\
  train:
{sources}
  # eval_fraction: 0.02              # hold out this part of the rows; or eval: [{{path: data/eval.jsonl}}]
  max_length: {max_length:<4}                   # tokens{of}
{too_long}  packing: true                      # {packing}
"""

_TOO_LONG = """\
  on_too_long: drop                  # leave longer rows out (dsft preview counts them) | truncate | error
"""

_SECTIONS = {
    "dpo": f"""\

dpo:                                 # docs/dpo.md
  beta: 0.1                          # strength of the pull towards the reference
  loss_type: sigmoid                 # {" | ".join(get_args(LossType))}
  reference: precomputed             # precomputed | live | adapter (with model.lora)
""",
    "classify": """\

classify:                            # docs/classify.md
  labels: [outdoors, indoors]        # put the labels of your rows here, in the order of the model's scores
""",
    "distill": f"""\

distill:                             # docs/distill.md
  reference_model: {{teacher}}  # a larger model with the same tokenizer: the teacher
  top_k: 64                          # its most probable tokens of each target that are compared one by one
  loss_type: forward_kl              # {" | ".join(get_args(Distill.model_fields["loss_type"].annotation))}
  temperature: 1.0
  weight: 0.5                        # of the teacher; 1 - weight is that of the rows
  reference: precomputed             # precomputed | live
""",
    "kto": """\

kto:                                 # docs/kto.md
  beta: 0.1                          # strength of the pull towards the reference
  loss_type: kto                     # kto | apo_zero_unpaired
  desirable_weight: 1.0              # with unequal numbers: see docs/kto.md
  undesirable_weight: 1.0
  reference: precomputed             # precomputed | live | adapter (with model.lora)
""",
    "reward": """\

reward:                              # docs/reward.md
  center_rewards_coefficient: 0.01   # keeps rewards near 0
  label_smoothing: 0.0               # share of pairs that may be the wrong way round
""",
}
"""Sections of tasks, by name."""

_TEMPLATE = """\
# yaml-language-server: $schema={schema}
# dsft validate {path}    checks it; append overrides here and in training: train.max_steps=10
# dsft preview {path}     shows the rows as the model will see them
name: {name}
task: {task}

model:
{model}
data:
{data}
parallel:
  zero_stage: 2                      # shards 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too
  pipeline_stages: 1                 # more than 1 with zero_stage 0 or 1
  offload_optimizer: {{device: none}}  # none | cpu, with zero_stage 1 to 3 | nvme, with 3: docs/offload.md

train:                               # give two of the three batch keys; the third follows
{batch}
  log_every: 1                       # optimizer steps per record of metrics.jsonl
  precision: bf16                    # bf16 | fp32 | fp16
  max_grad_norm: 1.0                 # 0 switches clipping off
  seed: 42

optim:
  learning_rate: {rate}                # {about_rate}
  weight_decay: 0.0
  lr_scheduler_type: cosine          # linear | cosine | constant | constant_with_warmup | ...
  warmup_ratio: {warmup}                 # fraction of all steps

checkpoint: {{every: {every}, keep_last: 2, resume: auto}}

# cluster: {{hosts: {{node1: 8, node2: 8}}, interface: eth0}}   # with other hosts the run stops

# wandb: {{project: dsft}}             # also records the run with Weights & Biases
output_dir: runs
"""

_TINY_BATCH = """\
  micro_batch_size: 8                # {examples} per forward pass of a rank
  accumulation_steps: 1              # micro-batches per optimizer step
  # global_batch_size: 64            # {examples} per optimizer step, over all ranks
  num_train_epochs: 1
  max_steps: 100                     # optimizer steps; null for num_train_epochs"""

_OWN_BATCH = """\
  global_batch_size: 32              # {examples} per optimizer step, over all ranks
  micro_batch_size: 1                # {examples} per forward pass of a rank; more is faster, if memory allows
  # accumulation_steps: 4            # micro-batches per optimizer step
  num_train_epochs: {epochs}
  # max_steps: 1000                  # optimizer steps, instead of num_train_epochs"""

_RATES: dict[Training, tuple[str, str]] = {
    "fine-tuning": ("1e-5", "1e-4"),
    "pretraining": ("1e-5", "1e-4"),
    "preference training": ("5e-7", "5e-6"),
}
"""Usual learning rates of a pretrained model: of all weights, and of adapters."""

_TEXTS = (
    "The tide pools of the north shore fill twice a day. Crabs hide under the weed until the water is back.",
    "A lathe turns the work against a fixed tool. The first cut is rough, the last one takes off a hair.",
    "Bread needs flour, water, salt and time. Most of the work is waiting.",
    "The ferry leaves at six. In winter it carries the mail, the doctor and the schoolbooks.",
)
_LABELS = ("outdoors", "indoors", "indoors", "outdoors")


def schema_text() -> str:
    """Return the JSON Schema (draft 2020-12) of a spec, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    text = json.dumps(schema, indent=1, ensure_ascii=False)
    # an editor would show the line breaks of a description as paragraphs
    return text.replace("\\n", " ") + "\n"


def write_template(
    name: str,
    task: str,
    path: Path,
    model: str | None = None,
    data: Sequence[str] = (),
    *,
    lora: bool = False,
) -> tuple[Path, ...]:
    """Write the spec, for pretraining without `data` some rows, and the schema beside the spec. Return the
    written files in this order. model, data: the user's own, both or neither; lora: train adapters of it.

    Raise SpecError if the task, the name, the model or the data is not possible or a file (other than an
    earlier schema) would be overwritten, StorageError if writing fails.
    """
    if task not in TASKS:
        raise _refuse("--task", f"{quote(task)} is not a task; use {task_names()}")
    if re.fullmatch(NAME_PATTERN, name) is None:
        rule = "use at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        raise _refuse("NAME", f"{quote(name)} cannot be the name of a run; {rule}")
    if bool(model) != bool(data):
        missing, given = ("--data", "--model") if model else ("--model", "--data")
        raise _refuse(
            missing, f"it is missing beside {given}; give both, or neither for a tiny model on builtin rows"
        )
    if lora and not model:
        raise _refuse("--lora", "adapters need a pretrained model; give --model and --data too")
    files = {path: _own_spec(name, task, path, str(model), data, lora) if model else _tiny(name, task, path)}
    if not model and (rows := _rows(TASKS[task])):
        files[_text_file(path)] = "".join(json.dumps(row) + "\n" for row in rows)
    for file in files:
        if file.exists() or file.is_symlink():
            raise _refuse("--out", f"{quote(str(file))} already exists and is kept; choose another name")
    schema = path.with_name(SCHEMA_FILE)
    if not is_own(schema, _SCHEMA_BEGIN):
        raise _refuse("--out", f"{quote(str(schema))} is not dsft's and is kept; choose another folder")
    files[schema] = schema_text()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{quote(str(path))} cannot be written ({error.strerror}); choose another place"
        ) from error
    if model:
        _check(path)
    return tuple(files)


def _check(path: Path) -> None:
    """Remove the spec and raise its SpecError where it is not valid, such as for a file that is not there."""
    try:
        load_spec(path)
    except SpecError as error:
        path.unlink()
        problems = [Problem(problem.where, problem.message) for problem in error.problems]
        raise SpecError(
            "dsft init has written nothing, because the spec would not be valid:", problems
        ) from None


def _tiny(name: str, task: str, path: Path) -> str:
    """Return the spec of a tiny model."""
    kind = TASKS[task]
    data = _SFT_DATA
    if kind.of_prompts:
        rows = (
            "rows with labels, or pairs" if kind.label == "answer" else "rows with prompt, chosen, rejected"
        )
        data = _ANSWERS_DATA.format(rows=rows, packed=_packed(kind))
    if _rows(kind):
        data = _PRETRAIN_DATA if kind.training == "pretraining" else _LABELED_DATA
        data = data.format(text_file=json.dumps(str(_text_file(path))))
    return _filled(
        name, task, path, _TINY_MODEL, data, _TINY_BATCH.format(examples=kind.examples), rate="1e-3",
        about_rate=f"for a pretrained model: about {_RATES[kind.training][0]}", warmup="0.1 ", every="50",
        teacher="runs/teacher/export",
    )  # fmt: skip


def _own_spec(name: str, task: str, path: Path, model: str, data: Sequence[str], lora: bool) -> str:
    """Return the spec of the user's own model and data."""
    kind = TASKS[task]
    full, adapters = _RATES[kind.training]
    own_model = _OWN_MODEL.format(
        model=_quoted(model), lora="" if lora else "# ", space=" " * (8 if lora else 6), rate=adapters
    )
    own_data = _OWN_DATA.format(
        sources="\n".join(f"    - {{path: {_quoted(source)}}}" for source in data),
        max_length=_max_length(model),
        of=" of a prompt and one answer" if kind.of_prompts else "",
        too_long=_TOO_LONG if kind.answers else "",
        packing=f"several {_packed(kind)} in one row, without padding; same loss"
        if kind.answers
        else "rows of exactly max_length; false: a row per document",
    )
    return _filled(
        name, task, path, own_model, own_data,
        _OWN_BATCH.format(examples=kind.examples, epochs=3 if kind.training == "fine-tuning" else 1),
        rate=adapters if lora else full,
        about_rate=f"{'all weights' if lora else 'adapters (lora)'}: about {full if lora else adapters}",
        warmup="0.03", every="200", teacher=_quoted(model),
    )  # fmt: skip


def _packed(kind: TaskFacts) -> str:
    return "answers" if kind.label == "answer" else kind.examples


def _filled(
    name: str, task: str, path: Path, model: str, data: str, batch: str, teacher: str, **words: str
) -> str:
    quoted = name if read_document(name).data == name else json.dumps(name)  # such as 123 and null
    section = _SECTIONS.get(str(TASKS[task].section), "").format(teacher=teacher)
    return _TEMPLATE.format(
        name=quoted, task=task, path=path, schema=SCHEMA_FILE, model=model, data=data + section, batch=batch,
        examples=TASKS[task].examples, **words,
    )  # fmt: skip


def _max_length(model: str) -> int:
    """Return 2048, or the model's number of positions where it is a folder with fewer."""
    try:
        positions = read_json(Path(model, "config.json"))["max_position_embeddings"]
        return min(2048, int(positions))
    except (OSError, ValueError, KeyError, TypeError):  # of the hub, or of another form
        return 2048


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rows(kind: TaskFacts) -> list[dict[str, str]]:
    """Return the rows for a tiny model that are written beside the spec; none if dsft has some of its own."""
    if kind.label == "class":
        return [{"text": text, "label": label} for text, label in zip(_TEXTS, _LABELS, strict=True)]
    return [] if kind.answers else [{"text": text} for text in _TEXTS]


def _text_file(path: Path) -> Path:
    return path.with_suffix(".text.jsonl")


def _refuse(where: str, message: str) -> SpecError:
    return SpecError("dsft init: 1 problem", [Problem(where, message)])
