"""Make specs for tests; imports no torch."""

from __future__ import annotations

from typing import Any

from dsft.spec.schema import Spec

QUICKSTART: dict[str, Any] = {"train": [{"path": "builtin:quickstart"}]}


def minimal_spec(task: str = "pretrain", *, name: str = "small", **sections: Any) -> Spec:
    """Return a valid spec of these `spec_values`."""
    return Spec.model_validate(spec_values(task, name=name, **sections))


def spec_values(task: str = "pretrain", *, name: str = "small", **sections: Any) -> dict[str, Any]:
    """Return the values of a valid spec with these sections: keys of `data`, `train` and `optim` are added to
    those that every spec needs, other sections are used as given."""
    train, optim = sections.pop("train", {}), sections.pop("optim", {})
    steps = {} if "global_batch_size" in train else {"accumulation_steps": 1}
    values = {"name": name, "task": task, "model": {"from_config": {"model_type": "llama"}}, **sections}
    values["data"] = QUICKSTART | sections.get("data", {})
    values["train"] = {"micro_batch_size": 1, **steps, **train}
    values["optim"] = {"learning_rate": 1e-3, **optim}
    return values


def dims(
    hidden: int, inner: int, layers: int, heads: int, key_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return keys of a model's config.json: hidden_size, intermediate_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads if given, and more."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    grouped = {} if key_heads is None else {"num_key_value_heads": key_heads}
    return dict(zip(names, (hidden, inner, layers, heads), strict=True)) | grouped | more


def llama(*given: int, **more: Any) -> dict[str, Any]:
    """Return the config.json of a Llama of these `dims`."""
    return {"model_type": "llama"} | dims(*given, **more)
