"""Summarize a valid spec in five lines, so that the user can check how it was understood."""

from __future__ import annotations

from dsft.spec.schema import Lora, Model, Source, Spec


def summary(spec: Spec) -> str:
    """Return the lines: task and model, data, layout, length with optimizer, output folder."""
    model, parallel, train, optim = spec.model, spec.parallel, spec.train, spec.optim
    initialized = f"a new {(model.from_config or {}).get('model_type')}"
    stages = f", {parallel.pipeline_stages} pipeline stages" if parallel.pipeline_stages > 1 else ""
    offload = "".join(f", {what} on {device}" for what, device in _offloaded(spec))
    slots = sum(spec.cluster.hosts.values()) if spec.cluster else 0
    world = (
        f"{slots} processes on {len(spec.cluster.hosts)} host(s)"
        if spec.cluster
        else "any number of processes"
    )
    length = f"{train.max_steps} steps" if train.max_steps else f"{train.num_train_epochs:g} epoch(s)"
    data = spec.data
    unit = f"{spec.task_kind.unit}s"
    limited = "a prompt and an answer" if spec.task_kind.unit == "pair" else unit
    share = f"{data.eval_fraction:g} of the {unit}" if data.eval_fraction else None
    held_out = share or (f"{data.eval_count:,} {unit} held out" if data.eval_count else None)
    evaluated = [*([_names(data.eval)] if data.eval else []), *([held_out] if held_out else [])]
    evaluation = f"; evaluated on {' and '.join(evaluated)}" if evaluated else ""
    packed = ", packed" if spec.data.packing else ""
    lines = (
        ("task", f"{spec.task} of {model.name_or_path or initialized}, {train.precision}{_part(model)}"),
        (
            "data",
            f"{_names(spec.data.train)}{evaluation}; {limited} of at most {data.max_length} tokens{packed}",
        ),
        ("layout", f"ZeRO {parallel.zero_stage}{stages}{offload}; {world}"),
        (
            "length",
            f"{length}, {optim.name}, learning rate {optim.learning_rate:g} {optim.lr_scheduler_type}",
        ),
        ("output", f"{spec.output_dir}/{spec.name}"),
    )
    return "\n".join(f"  {name:<10}{text}" for name, text in lines)


def _part(model: Model) -> str:
    if model.lora is not None:
        return f", adapters of rank {model.lora.rank} on {_targets(model.lora)}"
    return f", training only {', '.join(model.trainable)}" if model.trainable is not None else ""


def _targets(lora: Lora) -> str:
    return lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)


def _offloaded(spec: Spec) -> list[tuple[str, str]]:
    parallel = spec.parallel
    offloads = (("optimizer", parallel.offload_optimizer), ("parameters", parallel.offload_parameters))
    return [(what, offload.device) for what, offload in offloads if offload.device != "none"]


def _names(sources: tuple[Source, ...]) -> str:
    return ", ".join(source.path for source in sources)
