"""Runs over the stand-in GPU: a layer's experts and its activations in host memory (numbers mode), and what
is printed on a GPU that is too old."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsft.data.steps.batch import Tokens
from dsft.dist.device import take_device
from dsft.errors import DsftError
from dsft.model.activations import _Copies
from dsft.model.build import build_model, layers_of
from dsft.model.config import TokenFacts
from dsft.model.experts import choose_experts, described
from dsft.model.kernels import choose_kernels
from dsft.spec.schema import Model
from tests.specs import llama
from tests.standin.gpu import folder
from tests.standin.inside import counted, in_fork, peak, report, waits

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYERS, TOKENS = 6, 1024
LLAMA = llama(64, 16, LAYERS, 2, 1, head_dim=16, vocab_size=64)
QWEN = {
    "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 64,
}  # fmt: skip


def mixture(choice: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **QWEN), dtype=dtype)
    choose_experts(model, choice)
    return model


def experts(choice: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a layer of 16 experts asks of the device, forward and backward, and the line of a run's
    start."""
    model = mixture(choice, dtype)
    layer, rows = model.model.layers[0].mlp.cuda(), torch.randn(1, 64, 64, dtype=dtype).cuda()
    with counted() as found:
        layer(rows.requires_grad_()).float().sum().backward()
    return {"line": next(described(model)), **found}


def offloaded(value: bool | int, offload: bool) -> dict[str, Any]:
    """Two steps: the loss and the gradients, what the second asks of the device, on which stream copies are,
    and the order in which layers are computed and copied."""
    model = Model(from_config=LLAMA, gradient_checkpointing=value, activation_offload=offload)
    policy = build_model(model, TokenFacts(64, 1, 2, None), 1, torch.float32).cuda().train()
    tokens, order, beside = torch.arange(TOKENS, device="cuda").view(1, -1), [], []
    for number, layer in enumerate(layers_of(policy.causal_lm)):
        layer.self_attn.register_forward_pre_hook(lambda *_, n=number: order.append(f"layer {n}"))

    def copied(self: Any, pairs: Any, plain: Any = _Copies._copied) -> Any:
        order.append("back" if pairs[0][0].is_cuda else "out")
        event = plain(self, pairs)
        beside.append(self._stream != torch.cuda.current_stream())
        return event

    plain, _Copies._copied = _Copies._copied, copied  # type: ignore[method-assign]
    for _ in range(2):
        order.clear()
        policy.zero_grad()
        with peak() as memory, waits(within="dsft/model/activations") as places, counted() as counts:
            rows = Tokens(tokens % 64, tokens, tokens.roll(-1, 1) % 64)
            logps = policy(rows.input_ids, rows, num_targets=TOKENS).logps
            logps.sum().backward()
    _Copies._copied = plain  # type: ignore[method-assign]
    gradients = {name: p.grad.double().cpu().flatten().tolist() for name, p in policy.named_parameters()}
    return {
        "counts": counts, "waits": places, "beside": all(beside), "order": order, "memory": memory,
        "numbers": [logps.tolist(), gradients],
    }  # fmt: skip


def pinned() -> bool:
    """Return whether a block of pinned memory is used again for a larger one."""
    place = torch.empty(70 << 20, dtype=torch.uint8, pin_memory=True).data_ptr()
    return torch.empty(120 << 20, dtype=torch.uint8, pin_memory=True).data_ptr() == place


def messages(call: Any) -> list[str]:
    """Return what a call returns, or the error that it ends with, in lines."""
    try:
        return str(call()).splitlines()
    except DsftError as error:
        return str(error).splitlines()


def old() -> dict[str, list[str]]:
    llama = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=64)
    )
    found = {
        "device": messages(lambda: take_device(0, None, os.environ)),
        "experts": messages(lambda: next(described(mixture("auto", torch.bfloat16)))),
        "auto, no package": messages(lambda: choose_kernels(llama, "auto")),
    }
    sys.path.append(str(folder().parent / "triton"))
    found["auto"] = messages(lambda: choose_kernels(llama, "auto"))
    found["liger"] = messages(lambda: choose_kernels(llama, "liger"))
    found["compile"] = messages(lambda: choose_kernels(llama, "auto", compiled=True))
    return found


if __name__ == "__main__":
    on_old = in_fork(
        old, STANDIN_CAPABILITY="7.5", STANDIN_SEGMENTS_REFUSED="1",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    cases = [(choice, name) for choice in ("auto", "eager") for name in TYPES]
    report(
        {"experts": {f"{choice} {name}": experts(choice, TYPES[name]) for choice, name in cases}}
        | {"kept": offloaded(True, False), "all": offloaded(True, True), "half": offloaded(2, True)}
        | {"pinned": pinned(), "input": 4 * TOKENS * int(LLAMA["hidden_size"]), "old": on_old}
    )
