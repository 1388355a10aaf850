"""A small preference run: takes a folder, writes rows and a model there, gives a spec of them."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.dist.world import World
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from tests.specs import dims, spec_values


class Alone(World):
    """One rank, without a process group."""

    def each(self, work: Any) -> Any:
        return work()

    def first(self, work: Any) -> Any:
        return work()

    def gather(self, mine: Any) -> list[Any]:
        return [mine]


ALONE = Alone(0, 1, 0, Layout(1, 1), torch.device("cpu"))

TINY = dims(16, 16, 1, 2, vocab_size=259)


def rows(path: Path, count: int, shown: str = "yes") -> None:
    messages = [
        {
            "prompt": [{"role": "user", "content": f"question {i}"}],
            "chosen": [{"role": "assistant", "content": f"{shown} {i}"}],
            "rejected": [{"role": "assistant", "content": "no" * (i + 1)}],
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in messages), encoding="utf-8")


def model(folder: Path, size: dict[str, Any] = TINY) -> None:
    """With the byte-level tokenizer, its template in a file of its own."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)


def spec(folder: Path, changed: dict[str, Any] | None = None) -> Spec:
    """changed: sections whose keys replace the ones below."""
    train, held_out = ([{"path": str(folder / name)}] for name in ("a.jsonl", "b.jsonl"))
    data = {"train": train, "eval": held_out, "max_length": 256}
    given = spec_values(
        "dpo", model={"name_or_path": str(folder / "model")}, data=data, dpo={},
        train={"micro_batch_size": 2, "max_steps": 1, "precision": "fp32"}, output_dir=str(folder / "runs"),
    )  # fmt: skip
    for section, keys in (changed or {}).items():
        given[section] = given[section] | keys
    return Spec.model_validate(given)
