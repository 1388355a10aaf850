"""Convert the keys of a LoRA adapter and of the 4-bit weights under it."""

from __future__ import annotations

from dsft.convert.draft import Draft
from dsft.spec.task import TASKS

_BNB = "bnb_config_kwargs."  # Axolotl's section
_TYPE = f"bnb_4bit_quant_type quantization_type {_BNB}bnb_4bit_quant_type"
COMPUTED = f"bnb_4bit_compute_dtype {_BNB}bnb_4bit_compute_dtype"
_DOUBLE = f"""bnb_4bit_use_double_quant double_quantization use_bnb_nested_quant
    {_BNB}bnb_4bit_use_double_quant"""
_STORED = f"bnb_4bit_quant_storage {_BNB}bnb_4bit_quant_storage"


def lora(draft: Draft, name: str) -> None:
    """Convert the keys of a LoRA adapter. name: key that asks for one."""
    draft.comments["model.lora"] = draft.source(name)
    rank = draft.carry("model.lora.rank")
    if not draft.is_given("lora_alpha") and draft.get("lora_alpha") == "2 × rank":
        draft.put("model.lora.alpha", 2 * rank, "default of lora_alpha: twice the rank")
    else:
        draft.carry("model.lora.alpha")
    if TASKS[draft.values["task"]].training == "preference training" and draft.number("lora_dropout") > 0:
        draft.put("model.lora.dropout", 0.0, "lora_dropout, but dropout would change the policy alone")
        draft.leave("lora_dropout", "dropout would make the policy differ from its reference: 0 here")
    else:
        draft.carry("model.lora.dropout")
    if draft.switch("model.lora.target_modules", "all-linear"):
        names = "lora_target lora_target_modules target_modules"
        draft.leave(names, "lora_target_linear covers all linear modules")
    else:
        draft.carry("model.lora.target_modules")
    draft.carry_all("model.lora.use_rslora", "model.lora.use_dora", "model.lora.modules_to_save")
    draft.carry("model.lora.path")
    _quantize(draft, name)


def _quantize(draft: Draft, adapter: str) -> None:
    """Convert weights in 4 bits by bitsandbytes, under an adapter. Keys that ask for other quantized weights
    are left. adapter: key that asks for one."""
    methods, wanted = "quantization_method quant_method", {"load_in_4bit": "true", adapter: "qlora"}
    wanted |= {"quantization_bit": "4", "quant_bits": "4"}
    asked = [name for name, value in wanted.items() if str(draft.given.get(name)).lower() == value]
    if not asked or draft.get(methods) not in (None, "bnb", "bitsandbytes"):
        draft.read.difference_update(methods.split())
        return
    name, double = draft.entry(_DOUBLE)
    if double in (False, "false"):
        reason = "the scales are quantized too here, which saves 0.4 bits per weight"
        draft.leave(name, reason)
        asked += [] if draft.is_given(name) else [f"{draft.source(name)}: false there; {reason}"]
    draft.leave(_STORED, "the bytes are stored in the type that the model computes in; it changes no result")
    named = filter(draft.is_given, (*methods.split(), *_TYPE.split(), *(_DOUBLE.split() if double else ())))
    draft.read.update(asked)
    draft.put("model.quantize", draft.get(_TYPE) or "nf4", ", ".join(dict.fromkeys((*asked, *named))))
