"""What a run counts of its model: bucket sizes, planned memory, floating-point operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dsft.engine.world import World
from dsft.inputs import Inputs
from dsft.job.api import Job, Say
from dsft.model.census import take_census
from dsft.plan.census import Census, Elements, census_from
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import bucket_sizes, sized
from dsft.plan.flops import peak_tflops, work
from dsft.plan.memory.ranks import memory as memory_plan
from dsft.plan.memory.reference import with_reference
from dsft.report.memory import PHASES, Peaks, Phase


def counted_model(job: Job, inputs: Inputs, world: World, say: Say) -> Census:
    cuts = job.layout.pipeline_stages > 1
    counted = world.first(lambda: census_from(take_census(job.spec.model, inputs.facts, cuts=cuts)))
    for line in untrained_rows(job, inputs, counted):
        say(line)
    return counted


def untrained_rows(job: Job, inputs: Inputs, counted: Census) -> Iterator[str]:
    """A warning where embeddings with new rows are frozen: they stay the mean."""
    if inputs.rows is None:
        return
    size = inputs.config.get_text_config().vocab_size
    frozen = [p for p in counted.parameters if p.layer is None and p.shape[0] == size and not p.trained]
    modules = [n.rsplit(".", 2)[-2] for p in frozen for n in (p.name, *p.aliases)]
    if frozen:
        key = "model.lora.modules_to_save" if job.spec.model.lora else "model.trainable"
        named = modules if job.spec.model.lora else [p.name for p in frozen]
        yield (
            f"warning: the new rows of {' and '.join(p.name for p in frozen)} stay the mean, since these are "
            f"not trained; {key}: [{', '.join(named)}] trains them"
        )


def sized_job(job: Job, counted: Census, say: Say) -> Job:
    """With the model's cut and bucket sizes. Says the cut into stages, and each size that a DeepSpeed JSON
    decides otherwise."""
    elements = Elements(counted.numel, counted.trained)
    for key, size in bucket_sizes(elements):
        given = job.config["zero_optimization"].get(key)
        if key in job.kept and given != size:
            say(f"{key}: the DeepSpeed JSON's {given:,} is used; the model's size would give {size:,}")
    config = sized(job.config, elements, job.kept)
    cut = cut_of(job.spec.parallel, counted)
    if cut.stages > 1:
        say(f"pipeline cut: {', '.join(map(str, cut.counts))} layers")
    return replace(job, config=config, cut=cut)


def planned(job: Job, counted: Census, tokens: int, on_gpu: bool) -> dict[Phase, Peaks]:
    """The plan's bytes of the fullest rank, for micro-batches of so many tokens."""
    spec = job.spec
    alone = memory_plan(counted, spec, job.layout, {}, tokens)
    ranks = with_reference(alone, counted, spec, job.layout, {}, tokens)[0].stages
    figures: dict[Phase, Peaks] = {}
    for phase in PHASES:
        if on_gpu:
            figures[phase] = {
                "device_allocated": max(rank.phase(phase) for rank in ranks),
                "host_rss": max(rank.offloaded for rank in ranks),
            }
        else:
            figures[phase] = {
                "host_rss": max(rank.phase(phase) + rank.offloaded + rank.retained for rank in ranks)
            }
    return figures


def mfu_of(
    job: Job, inputs: Inputs, counted: Census, world: World
) -> Callable[[int, int, float], float] | None:
    """None on a CPU, in fp32 and on a GPU that is not in the table, unless the spec names the peak."""
    accelerator = job.spec.accelerator
    peak = accelerator.peak_tflops if accelerator else None
    if peak is None and world.device.type == "cuda" and job.spec.train.precision != "fp32":
        peak = peak_tflops(torch.cuda.get_device_name(world.device))
    if peak is None or world.device.type == "cpu":
        return None
    config: Any = inputs.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return partial(work(counted, width).mfu, peak_tflops=peak * world.world_size)
