"""Write the spec of `dsft init`.

It is valid and runs unchanged on one CPU core: a small model with fresh weights, and builtin or generated
rows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from dsft.errors import Problem, SpecError, StorageError
from dsft.spec.document import quote, read_document
from dsft.spec.schema import NAME_PATTERN, Spec
from dsft.spec.task import TASKS

SCHEMA_FILE = "dsft.schema.json"

_SFT_DATA = """\
  train: [{path: "builtin:quickstart"}]          # e.g. [{path: data/train.jsonl}]; docs/formats.md
  eval: [{path: "builtin:quickstart-heldout"}]   # held-out rows; [] for none
  max_length: 256                    # tokens
  on_too_long: error                 # error | drop | truncate
  packing: true                      # several examples in one row, without padding; same loss
"""

_PRETRAIN_DATA = """\
  train: [{{path: {text_file}}}]     # or .txt files, or rows of {{"text": ...}}
  max_length: 256                    # tokens
  packing: true                      # rows of exactly max_length; false: a row per document
"""

_DPO_DATA = """\
  train: [{path: "builtin:quickstart-pairs"}]          # rows with prompt, chosen, rejected; docs/formats.md
  eval: [{path: "builtin:quickstart-pairs-heldout"}]   # held-out pairs; [] for none
  max_length: 256                    # tokens of a prompt and one answer
  on_too_long: error                 # error | drop | truncate
  packing: true                      # several pairs in one row, without padding; same loss

dpo:                                 # docs/dpo.md
  beta: 0.1                          # strength of the pull towards the reference
  loss_type: sigmoid                 # sigmoid | robust | ipo | hinge | apo_zero | simpo | orpo
  reference: precomputed             # precomputed | live | adapter (with model.lora)
"""

_TEMPLATE = """\
# yaml-language-server: $schema={schema}
# dsft validate {path}    checks it; append overrides here and in training: train.max_steps=10
# dsft preview {path}     shows the rows as the model will see them
name: {name}
task: {task}

model:
  # A newly initialized model; for a pretrained one write instead: name_or_path: {pretrained}
  from_config: {{model_type: llama, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4,
                num_attention_heads: 4, num_key_value_heads: 4, max_position_embeddings: 1024,
                tie_word_embeddings: false}}
  gradient_checkpointing: false      # true recomputes activations and saves memory
  # lora: {{rank: 16, alpha: 32}}      # adapters instead of all weights, for a pretrained model

data:
{data}
parallel:
  zero_stage: 2                      # shards 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too
  pipeline_stages: 1                 # more than 1 with zero_stage 0 or 1
  offload_optimizer: {{device: none}}  # none | cpu, with zero_stage 1 to 3 | nvme, with 3: docs/offload.md

train:                               # give two of the three batch keys; the third follows
  micro_batch_size: 8                # {examples} per forward pass of a rank
  accumulation_steps: 1              # micro-batches per optimizer step
  # global_batch_size: 64            # {examples} per optimizer step, over all ranks
  num_train_epochs: 1
  max_steps: 100                     # optimizer steps; null for num_train_epochs
  log_every: 1                       # optimizer steps
  precision: bf16                    # bf16 | fp32 | fp16
  max_grad_norm: 1.0                 # 0 switches clipping off
  seed: 42

optim:
  learning_rate: 1e-3                # for a pretrained model: about {small_rate}
  weight_decay: 0.0
  lr_scheduler_type: cosine          # linear | cosine | constant | constant_with_warmup | ...
  warmup_ratio: 0.1                  # fraction of all steps

checkpoint: {{every: 50, keep_last: 2, resume: auto}}

# cluster: {{hosts: {{node1: 8, node2: 8}}, interface: eth0}}   # with other hosts the run stops

wandb: {{project: dsft, mode: auto}}   # auto | online | offline | disabled
output_dir: runs
"""

_ROW_EXAMPLES = {"pretrained": "meta-llama/Llama-3.1-8B", "examples": "examples", "small_rate": "1e-5"}
_PAIR_EXAMPLES = {"pretrained": "runs/SFT/export", "examples": "pairs", "small_rate": "5e-7"}

_TEXTS = (
    "The tide pools of the north shore fill twice a day. Crabs hide under the weed until the water is back.",
    "A lathe turns the work against a fixed tool. The first cut is rough, the last one takes off a hair.",
    "Bread needs flour, water, salt and time. Most of the work is waiting.",
    "The ferry leaves at six. In winter it carries the mail, the doctor and the schoolbooks.",
)


def schema_text() -> str:
    """Return the JSON Schema (draft 2020-12) of a spec, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    text = json.dumps(schema, indent=1, ensure_ascii=False)
    return (
        text.replace("\\n", " ") + "\n"
    )  # an editor would show the line breaks of a description as paragraphs


def write_template(name: str, task: str, path: Path) -> tuple[Path, ...]:
    """Write the spec, for pretraining some rows, and the schema beside the spec. Return the written files in
    this order.

    Raise SpecError if the task or the name is not possible or a file (other than the schema) would be
    overwritten, StorageError if writing fails.
    """
    if task not in TASKS:
        raise _refuse("--task", f"{quote(task)} is not a task; use sft, pretrain or dpo")
    if re.fullmatch(NAME_PATTERN, name) is None:
        rule = "use at most 100 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        raise _refuse("NAME", f"{quote(name)} cannot be the name of a run; {rule}")
    files = {path: _spec_text(name, task, path)}
    if not TASKS[task].answers:
        files[_text_file(path)] = "".join(json.dumps({"text": text}) + "\n" for text in _TEXTS)
    for file in files:
        if file.exists() or file.is_symlink():
            raise _refuse("--out", f"{quote(str(file))} already exists and is kept; choose another name")
    files[path.with_name(SCHEMA_FILE)] = schema_text()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{quote(str(path))} cannot be written ({error.strerror}); choose another place"
        ) from error
    return tuple(files)


def _spec_text(name: str, task: str, path: Path) -> str:
    data = {
        "sft": _SFT_DATA,
        "pretrain": _PRETRAIN_DATA.format(text_file=json.dumps(str(_text_file(path)))),
        "dpo": _DPO_DATA,
    }
    words = _PAIR_EXAMPLES if TASKS[task].unit == "pair" else _ROW_EXAMPLES
    quoted = name if read_document(name).data == name else json.dumps(name)  # such as 123 and null
    return _TEMPLATE.format(name=quoted, task=task, data=data[task], path=path, schema=SCHEMA_FILE, **words)


def _text_file(path: Path) -> Path:
    return path.with_suffix(".text.jsonl")


def _refuse(where: str, message: str) -> SpecError:
    return SpecError("dsft init: 1 problem", [Problem(where, message)])
