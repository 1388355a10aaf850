"""Loading a model folder on several ranks: memory over all ranks, and seconds.

    python benchmarks/load.py [--rounds 5] [--ranks 2] [--out FILE]

Makes a Llama of 277.9 million parameters in bf16 in four files, then loads it, in a fresh launch per sample:

zero3              dsft, ZeRO 3: each rank reads and keeps its share
pipeline           dsft, one stage per rank
zero0              dsft, one copy per rank, as ZeRO 0 to 2 keep it
from_pretrained    transformers, on every rank; the files stay mapped, and shared, until a weight is written
from_pretrained, written   then every weight is written once, as training or flattening does

Counted on each rank from after the imports, a tiny model loaded the same way, to after the load: anonymous
memory (RssAnon, what the rank holds), and the rise of the high-water mark (VmHWM: the peak on the way, mapped
file pages included). Both are summed over the ranks and divided by the bytes of the model.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.paired import (  # noqa: E402
    Samples,
    column,
    forget_peak,
    machine,
    machine_line,
    markdown,
    measure,
    peak_bytes,
    ratio,
    resident_bytes,
    spread,
)

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
TINY = LARGE | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
SHARD = "150MB"
VARIANTS = ("zero3", "pipeline", "zero0", "from_pretrained", "from_pretrained, written")


def make_folder(folder: Path, keys: dict[str, Any]) -> None:
    """A model with random bf16 weights, as transformers saves it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**keys)).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size=SHARD)


# --- one rank ---------------------------------------------------------------------------------------------


def load_dsft(folder: Path, variant: str) -> object:
    import torch

    from dsft.engine.partition import keep_for
    from dsft.engine.world import join
    from dsft.launch.environment import detect
    from dsft.model.build import build_model
    from dsft.model.config import TokenFacts
    from dsft.plan.layout import Layout
    from dsft.spec.schema import Model

    launched = detect(os.environ)
    world = WORLD.setdefault("world", None) or join(launched, Layout(launched.world_size, 1, launched.world_size))
    WORLD["world"] = world
    config = {"zero_optimization": {"stage": 3 if variant == "zero3" else 0}, "bf16": {"enabled": True}}
    config |= {"train_micro_batch_size_per_gpu": 1}
    stage, stages = (world.rank, world.world_size) if variant == "pipeline" else (0, 1)
    facts = TokenFacts(64, None, None, None)
    model = Model(name_or_path=str(folder))
    return build_model(model, facts, 0, torch.bfloat16, stage, stages, keep_for(config, world))
