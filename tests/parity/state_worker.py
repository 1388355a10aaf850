"""What test_state.py launches: saves under some layouts, resumes from them under the same and others.

    torchrun … state_worker.py FOLDER CASE …

A case A trains 6 steps and saves at 0, 3 and 6; A is `STAGE-PRECISION[-offload][-pipe][-tied]` and
`-sgd` or `-momentum` where it is not AdamW, as `z2-bf16-offload`; `-8bit` has AdamW's moments in 8 bits;
`-muon` is Muon, `-lion` one that is no part of dsft;
`-hpz` has second copies of the parameters in groups of two ranks;
`-large` has sub-groups of more than 1 MiB, which `-nvme` keeps on the disk, `-params` the parameters
too; `-host` keeps these in memory. A case A:B:N goes on from A's step N under B to step 6. Engines are
made with deepspeed.initialize alone, so that nothing but state.py and the checkpoint is under test. Rank
0 writes FOLDER/results.jsonl: losses, and what differs after step 6 from no break.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.checkpoint.files import read_files
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.save import CheckpointState, save
from dsft.dist.world import World
from dsft.engine import state
from dsft.engine.adamw_8bit import AdamW8bit
from dsft.engine.join import join
from dsft.engine.muon import MATRICES, Muon
from dsft.engine.nvme import align_gradients
from dsft.engine.ops import load_op
from dsft.engine.optimizer import AdamW, CpuAdamW, Sgd
from dsft.engine.pipeline import find_ties, tie
from dsft.rank.environment import detect
from dsft.spec.layout import Layout
from dsft.spec.patterns import is_layers_matrix
from dsft.spec.schema import Checkpoint
from tests.lion import Lion
from tests.process_groups import own_groups

ROWS, LARGE_ROWS, LENGTH, SAVED_AT, STEPS = 24, 8, 12, (0, 3), 6
CONFIG: dict[str, Any] = dict(
    vocab_size=61, hidden_size=16, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
# Shares of the norms are no multiple of 512 bytes, so most gradients begin at unaligned offsets.
LARGE: dict[str, Any] = CONFIG | dict(
    vocab_size=512, hidden_size=192, intermediate_size=5600, num_hidden_layers=1
)  # fmt: skip


class First(nn.Module):
    """Embedding and the first two layers, of a whole model whose parameter names they keep."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed, self.layers, self.rotary = (
            model.model.embed_tokens,
            model.model.layers[:2],
            model.model.rotary_emb,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return through(self.layers, self.rotary, self.embed(tokens))


class Last(nn.Module):
    """The last layer, norm and head: log-probabilities of the next tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.layers, self.rotary = model.model.layers[2:], model.model.rotary_emb
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(through(self.layers, self.rotary, hidden)))


def through(layers: Any, rotary: Any, hidden: Tensor) -> Tensor:
    places = torch.arange(hidden.shape[1])[None]
    embeddings = rotary(hidden, places)
    for layer in layers:
        hidden = layer(hidden, position_ids=places, position_embeddings=embeddings, attention_mask=None)
    return hidden


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


class Case:
    """An engine under one layout, stepping through the same global batches as every other."""

    def __init__(self, name: str, seed: int, disk: Path) -> None:
        words = name.split("-")
        self.zero, self.bf16 = int(words[0][1:]), words[1] == "bf16"
        self.pipe, offload = "pipe" in words, "offload" in words
        ranks, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
        stages = 2 if self.pipe else 1
        layout = Layout(ranks, stages)
        self.world = World(rank, ranks, rank, layout, torch.device("cpu"))
        torch.manual_seed(seed)
        shapes, self.rows = (LARGE, LARGE_ROWS) if "large" in words else (CONFIG, ROWS)
        shapes = CONFIG | {"intermediate_size": 300} if "8bit" in words else shapes
        model = LlamaForCausalLM(LlamaConfig(**shapes, tie_word_embeddings="tied" in words))
        module: nn.Module = model
        if self.pipe:
            topology = PipeDataParallelTopology(stages, layout.data_parallel)
            module = PipelineModule([First(model), Last(model)], topology=topology, loss_fn=loss_of)
        mine = {id(p) for p in module.parameters()}
        self.named = {n: p for n, p in model.named_parameters() if id(p) in mine}
        ties = find_ties(self.named, self.world)
        self.engine = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), dist_init_required=False,
            optimizer=lambda parameters: optimizer(model, parameters, words),
            config=on_disk(
                config(self.zero, self.bf16, offload, self.rows, layout.data_parallel), words, disk
            ),
        )[0]  # fmt: skip
        if "nvme" in words:
            assert any(
                len(info.tensors)
                for info in self.engine.optimizer.optimizer_swapper.swap_params_info.values()
            )
        state.undo_first_step(self.engine)
        state.set_parts(self.engine, self.named)
        align_gradients(self.engine.optimizer)
        tie(self.engine, ties, self.world.shard_rank)

    def step(self, index: int) -> Tensor:
        """Return the mean loss of one global batch, this rank's share of it summed over data ranks."""
        generator = torch.Generator().manual_seed(1000 + index)
        rows = torch.randint(0, CONFIG["vocab_size"], (self.rows, LENGTH), generator=generator)
        size = self.rows // self.world.layout.data_parallel // 2
        rows = rows[self.world.data_rank :: self.world.layout.data_parallel]
        micro_batches = rows.split(size)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + index)
        if self.pipe:
            return self.engine.train_batch(iter([(part, part) for part in micro_batches]))
        total = torch.zeros(())
        for part in micro_batches:
            loss = loss_of(self.engine(input_ids=part, use_cache=False).logits, part)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / len(micro_batches)
        return self.world.sum(total) / self.world.world_size

    @torch.no_grad()
    def evaluate(self) -> None:
        self.engine.eval()
        self.engine(input_ids=torch.arange(LENGTH)[None], use_cache=False)
        self.engine.optimizer.empty_partition_cache()
        assert all(getattr(p, "ds_secondary_tensor", None) is not None for p in self.named.values())
        self.engine.train()

    def save(self, run: Path, step: int) -> None:
        shards = self.world.layout.shards
        fragments = state.owned_fragments(self.engine, self.named, self.world.shard_rank, shards)
        shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in self.named.items()}
        progress = {"step": step, "applied_steps": step}
        facts = CheckpointState(
            progress, {"train": {"precision": "fp32"}}, {"global_batch_size": 1}, {}, {}, {}
        )
        save(
            run,
            fragments,
            shapes,
            facts,
            self.world,
            model_files=read_files(run.parent / "model"),
            retention=Checkpoint(keep_last=None),
        )

    def load(self, checkpoint: CheckpointReader) -> None:
        state.load(self.engine, self.named, checkpoint.read, checkpoint.state["progress"]["applied_steps"])

    def close(self) -> None:
        self.engine.destroy()
        deepspeed.utils.groups.mpu = None


def optimizer(model: LlamaForCausalLM, parameters: Any, words: list[str]) -> torch.optim.Optimizer:
    ours = {id(p) for p in parameters}
    held = [p for p in model.parameters() if id(p) in ours]
    groups = [
        {"params": [p for p in held if len(getattr(p, "ds_shape", p.shape)) > 1], "weight_decay": 0.1},
        {"params": [p for p in held if len(getattr(p, "ds_shape", p.shape)) == 1], "weight_decay": 0.0},
    ]
    if "sgd" in words or "momentum" in words:
        return Sgd(groups, lr=0.0, momentum=0.9 if "momentum" in words else 0.0)
    if "muon" in words:
        adamw: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.999), "eps": 1e-4}
        named = {n: p for n, p in model.named_parameters() if id(p) in ours}
        names = [n for n, p in named.items() if is_layers_matrix(n, getattr(p, "ds_shape", p.shape))]
        chosen = [named[name] for name in names]
        rest = [p for n, p in named.items() if n not in names]
        split = [
            {"params": chosen, MATRICES: True, "weight_decay": 0.1},
            {"params": rest, MATRICES: False, "weight_decay": 0.0},
        ]
        return Muon(split, momentum=0.95, dtype=torch.float32, **adamw)
    if "lion" in words:
        return Lion(groups, 0.0, (0.9, 0.99))
    if "8bit" in words:
        return AdamW8bit(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-4)
    if "offload" in words or "nvme" in words:
        return CpuAdamW(groups, lr=0.0, eps=1e-4)
    return AdamW(groups, lr=0.0, eps=1e-4, fused=True)


def config(zero: int, bf16: bool, offload: bool, rows: int, data_parallel: int) -> dict[str, Any]:
    wide = not bf16 or zero > 0
    made: dict[str, Any] = {
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": rows // data_parallel // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32" if wide else "bf16"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": zero,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 3000,
        },
    }
    if offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return made


def on_disk(made: dict[str, Any], words: list[str], disk: Path) -> dict[str, Any]:
    """With its larger sub-groups, and where its parameters are, and what is on the disk."""
    if "hpz" in words:
        made["zero_optimization"]["zero_hpz_partition_size"] = 2
    if "host" in words:
        made["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if "large" in words:
        made["zero_optimization"]["sub_group_size"] = 400_000
    for section, word in (("offload_optimizer", "nvme"), ("offload_param", "params")):
        if word in words:
            folder = {"nvme_path": tempfile.mkdtemp(dir=disk), "pin_memory": False}
            made["zero_optimization"][section] = {"device": "nvme", **folder}
    if "params" in words:
        made["zero_optimization"]["offload_param"] |= {"buffer_size": 600_000, "max_in_cpu": 0}
        made["zero_optimization"] |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return made


def save_case(folder: Path, name: str) -> dict[str, Any]:
    case, run, losses = Case(name, 0, folder), folder / name, []
    for index in range(STEPS):
        if index in SAVED_AT:
            case.save(run, index)
        losses.append(float(case.step(index)))
    case.save(run, STEPS)
    case.close()
    return {"case": name, "losses": losses}


def load_case(folder: Path, words: str) -> dict[str, Any]:
    source, target, saved_at = words.split(":")
    start = CheckpointReader.open(folder / source / "checkpoints" / f"step-{saved_at}")
    case = Case(target, 1, folder)  # other weights: what is right afterwards was loaded
    if start.step == 0:
        case.step(0)  # an engine with moments, counts and gathered parameters of its own
    if "hpz" in target:  # and with second copies of the parameters
        case.evaluate()
    case.load(start)
    losses = [float(case.step(index)) for index in range(start.step, STEPS)]
    run = folder / f"{words.replace(':', '_')}_on_{case.world.world_size}"
    case.save(run, STEPS)
    result: dict[str, Any] = {"case": words, "ranks": case.world.world_size, "losses": losses}
    if case.world.rank == 0:
        old, new = (
            CheckpointReader.open(r / "checkpoints" / f"step-{STEPS}") for r in (folder / source, run)
        )
        assert old.state["kinds"] == new.state["kinds"]
        result["differences"] = {kind: difference(old, new, kind) for kind in old.state["kinds"]}
        result["moved"] = difference(start, old, "value")
        shutil.rmtree(run)
    case.close()
    return result


def difference(one: CheckpointReader, other: CheckpointReader, kind: Any) -> float:
    """Return the largest difference of any element, relative to its tensor's largest."""
    return max(distance(a, b) for a, b in tensors(one, other, kind))


def tensors(one: CheckpointReader, other: CheckpointReader, kind: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for name, shape in one.shapes.items():
        size = torch.Size(shape).numel()
        if kind in one.kinds_of(name):
            yield one.read(name, kind, 0, size), other.read(name, kind, 0, size)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))


def main(folder: Path, cases: list[str]) -> None:
    launched = detect(os.environ)
    join(launched, Layout(launched.world_size, 1))
    for builder in (
        CPUAdamBuilder,
        *((AsyncIOBuilder, PinMemoryBuilder) if "nvme" in "".join(cases) else ()),
    ):
        load_op(builder(), print)
    for words in cases:
        with own_groups():
            result = load_case(folder, words) if ":" in words else save_case(folder, words)
        if deepspeed.comm.get_rank() == 0:
            with (folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
