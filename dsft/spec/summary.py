"""Summarize a valid spec in six lines, so that the user can check how it was understood."""

from __future__ import annotations

import math

from dsft.spec.layout import fewest_ranks
from dsft.spec.schema import Data, Model, Source, Spec


def summary(spec: Spec) -> str:
    """Return the lines: task and model, data, layout, length with optimizer, output folder, and what only
    other commands look at."""
    model, parallel, train, optim, cluster = spec.model, spec.parallel, spec.train, spec.optim, spec.cluster
    initialized = f"a new {(model.from_config or {}).get('model_type')}"
    unit = spec.task_kind.unit
    limited = "a prompt and an answer" if spec.task_kind.of_prompts else "rows"
    packed = ", packed" if spec.data.packing else ""
    rows = f"{limited} of at most {spec.data.max_length} tokens{packed}"
    stages = f", {parallel.pipeline_stages} pipeline stages" if parallel.pipeline_stages > 1 else ""
    size, split = parallel.pipeline_stages * parallel.sequence_parallel, ""
    if parallel.sequence_parallel > 1:
        split = f", each row split over {parallel.sequence_parallel} ranks"
    if parallel.zero_hpz_partition_size > 1:
        split += f", a copy of the parameters on each {parallel.zero_hpz_partition_size} ranks"
    offloads = (("optimizer", parallel.offload_optimizer), ("parameters", parallel.offload_parameters))
    offload = "".join(f", {what} on {one.device}" for what, one in offloads if one.device != "none")
    step, least = math.lcm(size, parallel.zero_hpz_partition_size), fewest_ranks(parallel)
    world = "any number of processes" if step == 1 else f"any multiple of {step} processes"
    world += f", at least {least}" * (least > step)
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    if cluster is not None:
        hosts = len(cluster.hosts)
        world = f"{sum(cluster.hosts.values())} processes on {hosts} host{'' if hosts == 1 else 's'}"
    elif total and micro and steps:
        world = f"{total // (micro * steps) * size} processes, by the batch sizes"
    epochs = f"{train.num_train_epochs:g} epoch{'' if train.num_train_epochs == 1 else 's'}"
    length = f"{train.max_steps} steps" if train.max_steps else epochs
    unseen = ", the hosts (dsft doctor)" if cluster is not None else ""
    rate = f"learning rate {optim.learning_rate:g} {optim.lr_scheduler_type}"
    lines = (
        ("task", f"{spec.task} of {model.name_or_path or initialized}, {train.precision}{_trained(model)}"),
        ("data", f"{_paths(spec.data.train)}{_evaluation(spec.data, unit)}; {rows}"),
        ("layout", f"ZeRO {parallel.zero_stage}{stages}{split}{offload}; {world}"),
        ("length", f"{length}, {optim.name}, {rate}"),
        ("output", f"{spec.output_dir}/{spec.name}"),
        ("not seen", f"later rows (dsft preview), the model's class and memory (dsft plan){unseen}"),
    )
    return "\n".join(f"  {name:<10}{text}" for name, text in lines)


def _trained(model: Model) -> str:
    """Return which part of the model is trained; nothing for all of it."""
    if model.lora is not None:
        targets = model.lora.target_modules
        names = targets if isinstance(targets, str) else ", ".join(targets)
        return f", adapters of rank {model.lora.rank} on {names}"
    return f", training only {', '.join(model.trainable)}" if model.trainable is not None else ""


def _evaluation(data: Data, unit: str) -> str:
    sets = [_paths(data.eval)] if data.eval else []
    if data.eval_fraction:
        sets.append(f"a held-out fraction of {data.eval_fraction:g} of the {unit}s")
    elif data.eval_count:
        sets.append(f"{data.eval_count:,} held-out {unit}{'' if data.eval_count == 1 else 's'}")
    return f"; evaluated on {' and '.join(sets)}" if sets else ""


def _paths(sources: tuple[Source, ...]) -> str:
    return ", ".join(source.path for source in sources)
