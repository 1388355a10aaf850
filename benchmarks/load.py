"""Loading a model folder on several ranks: memory over all ranks, and seconds.

    python -m benchmarks.load [--rounds 5] [--ranks 2] [--variants …] [--out FILE]

Makes a Llama of 277.9 million parameters in bf16, in four files, and loads it, in a fresh launch per sample:

zero3                      dsft, ZeRO 3: each rank reads its share of every tensor
zero3_offload              the same, with parameters that stay in the host's memory
pipeline                   dsft, one stage per rank: each reads the tensors of its stage
zero0                      dsft, ZeRO 0 to 2: each rank reads everything
from_pretrained            transformers: the files stay mapped, and shared, until a weight is written
from_pretrained, written   and every weight is then written once, as training or flattening does

Counted on each rank, from after the imports and a tiny model that is loaded the same way: `held`, anonymous
memory (RssAnon) after the load; `peak`, the high-water mark of all resident memory (VmHWM), mapped pages of
files included, above what was resident before. Both are summed over the ranks and divided by the bytes of the
model. Seconds are those of the slowest rank, with the files in the page cache.

    torchrun … -m benchmarks.load --rank VARIANT TINY_FOLDER FOLDER [--limit 0.75]

is one sample, a line of JSON. --limit: of the folder's bytes, what a rank may allocate beside what it has
before (RLIMIT_DATA: heap and private writable maps, Linux 4.7 and later).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import paired
from dsft.system.process import end

LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}
TINY = LARGE | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
SHARD = "150MB"
VARIANTS = ("zero3", "zero3_offload", "pipeline", "zero0", "from_pretrained", "from_pretrained, written")


def make_folder(folder: Path, keys: dict[str, Any], shard: str = SHARD) -> None:
    """A model with random bf16 weights, as transformers saves it: a Llama where `keys` has no model_type."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.for_model(**{"model_type": "llama"} | keys)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size=shard)


def model_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# --- one rank -----------------------------------------------------------------------------------------------


def rank(variant: str, tiny: Path, folder: Path, limit: float | None) -> None:
    """Rank 0 prints the sample."""
    from dsft.engine.join import join
    from dsft.rank.environment import detect
    from dsft.spec.layout import Layout

    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    load = loader(variant, world)
    load(tiny)
    gc.collect()
    size = model_bytes(folder)
    if limit is not None:
        allow(int(limit * size))
        assert not can_allocate(size), "the limit leaves room for the whole model"
    world.gather(None)
    paired.forget_peak()
    held, resident, began = paired.status_bytes("RssAnon"), paired.resident_bytes(), time.perf_counter()
    model = load(folder)
    seconds = time.perf_counter() - began
    mine = (paired.status_bytes("RssAnon") - held, paired.peak_bytes() - resident, seconds)
    ranks = world.gather(mine)
    if world.rank == 0:
        sample = {
            "held": sum(r[0] for r in ranks) / size,
            "peak": sum(r[1] for r in ranks) / size,
            "largest_rank": max(r[1] for r in ranks) / size,
            "seconds": max(r[2] for r in ranks),
        }
        print(json.dumps(sample), flush=True)
    del model
    world.close()


def loader(variant: str, world: Any) -> Callable[[Path], object]:
    import torch
    from transformers import AutoModelForCausalLM

    from dsft.engine.partition import sharding_for
    from dsft.model.build import Part, build_model
    from dsft.model.config import TokenFacts
    from dsft.plan.cut import balanced
    from dsft.spec.schema import Model

    def transformers_loads(folder: Path) -> object:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if variant.endswith("written"):
            for parameter in model.parameters():
                parameter.data.mul_(1)
        return model

    def dsft_loads(folder: Path) -> object:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3 if variant.startswith("zero3") else 0},
            "bf16": {"enabled": True},
        }
        if variant == "zero3_offload":
            config["zero_optimization"] |= {"offload_param": {"device": "cpu", "pin_memory": False}}
        stage, stages = (world.rank, world.world_size) if variant == "pipeline" else (0, 1)
        layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
        model, facts = Model(name_or_path=str(folder)), TokenFacts(TINY["vocab_size"], None, None, None)
        cut, keep = balanced([1] * layers, stages), sharding_for(config, world)
        return build_model(model, facts, 0, torch.bfloat16, Part(stage, cut, keep))

    return transformers_loads if variant.startswith("from_pretrained") else dsft_loads


def allow(more: int) -> None:
    """Bytes that this process may allocate beside those that it has."""
    limit = paired.status_bytes("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def can_allocate(size: int) -> bool:
    import torch

    try:
        torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


# --- all samples --------------------------------------------------------------------------------------------


def launch(variant: str, ranks: int, tiny: Path, folder: Path) -> list[str]:
    words = [
        "--standalone",
        "--nproc_per_node",
        str(ranks),
        "-m",
        "benchmarks.load",
        "--rank",
        variant,
        str(tiny),
    ]
    return [sys.executable, "-m", "torch.distributed.run", *words, str(folder)]


def table(samples: paired.Samples) -> str:
    rows = [
        [
            name,
            paired.spread(paired.column(found, "held")),
            paired.spread(paired.column(found, "peak")),
            paired.spread(paired.column(found, "seconds")),
        ]
        for name, found in samples.items()
    ]
    header = ["how", "held by all ranks ÷ model", "peak of all ranks ÷ model", "seconds (min / median / max)"]
    return paired.markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and seconds of loading a model on several ranks.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=paired.new_file, help="where the table goes as well")
    parser.add_argument("--rank", nargs=3, metavar=("VARIANT", "TINY_FOLDER", "FOLDER"), help="one sample")
    parser.add_argument("--limit", type=float, help="of the folder's bytes, what a rank may allocate")
    options = parser.parse_args()
    if options.rank:
        variant, tiny, folder = options.rank
        rank(variant, Path(tiny), Path(folder), options.limit)
        return
    with tempfile.TemporaryDirectory() as made:
        tiny, folder = Path(made, "tiny"), Path(made, "large")
        make_folder(tiny, TINY)
        make_folder(folder, LARGE)
        variants = {
            f"{variant}, {ranks} {'rank' if ranks == 1 else 'ranks'}": launch(variant, ranks, tiny, folder)
            for variant in options.variants
            for ranks in options.ranks
        }
        samples = paired.measure(variants, options.rounds)
        size = model_bytes(folder)
    head = f"{size / 1e6:.0f} MB, {options.rounds} rounds. {paired.machine_line(paired.machine())}"
    text = "\n".join([head, "", table(samples), *slower(samples)])
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def slower(samples: paired.Samples) -> list[str]:
    """Lines that compare the seconds, where both were measured."""
    under, over = "zero3, 2 ranks", "from_pretrained, written, 2 ranks"
    if not samples.keys() >= {under, over}:
        return []
    found = paired.ratio(samples, "seconds", over, under)
    return ["", f"Seconds of from_pretrained, written, to those of zero3 on two ranks: {found}"]


if __name__ == "__main__":
    main()
    end(0)
