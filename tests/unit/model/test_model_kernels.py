"""Liger's kernels under Triton's interpreter against the model's own modules.

What needs it runs in a process of its own with TRITON_INTERPRET=1, where scripts/standin has installed
liger-kernel and triton.
"""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dsft.errors import SpecError
from dsft.model import kernels
from dsft.model.kernels import choose_kernels, fused_modules, plain_kernels, use_liger, use_own
from dsft.model.lora import inject
from dsft.spec.schema import Lora
from tests.launching import ROOT
from tests.specs import dims

SMALL = dims(32, 48, 1, 4, 2, vocab_size=61, head_dim=8)
CHANGED = {
    "llama": "1 MLPs, 3 norms, 1 rotary embeddings",
    "qwen2": "1 MLPs, 3 norms, 1 rotary embeddings",
    "qwen3": "1 MLPs, 5 norms, 1 rotary embeddings",
    "mistral": "1 MLPs, 3 norms, 1 rotary embeddings",
    "olmo2": "1 MLPs, 5 norms",  # its rotary embeddings turn in float32
    "gemma2": "5 norms, 1 rotary embeddings",  # its MLPs are GeGLU
    "phi3": "3 norms",  # one matrix for gate and up; a part of each head is turned
}
INSTALLED = os.environ.get("TRITON_INTERPRET") == "1" and all(
    map(importlib.util.find_spec, ("liger_kernel", "triton"))
)
installed = pytest.mark.skipif(not INSTALLED, reason="needs liger_kernel, triton and TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton's interpreter lacks: numbers come to a kernel as Python's floats, from the compiler as
    float32 scalars, and functions of libdevice give None."""
    if not INSTALLED:
        return
    from liger_kernel.ops import rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def with_floats(arg: Any) -> Any:
        if not isinstance(arg, float):
            return converted(arg)
        return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.math.rsqrt(x))  # the interpreter exchanges tl.math's


def model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **({"pad_token_id": 0} if kind == "phi3" else {}))
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, parameter in made.named_parameters():  # norms begin at 0 or 1, which hides an offset
        if "norm" in name:
            torch.nn.init.normal_(parameter.data, 0.5, 0.2)
    return made


def results(made: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits of two rows, and every parameter's gradient."""
    rows = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    made.zero_grad()
    logits = made(input_ids=rows, use_cache=False).logits.float()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).backward()
    return logits.detach(), {n: p.grad.float() for n, p in made.named_parameters() if p.grad is not None}


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@installed
@pytest.mark.parametrize(("kind", "dtype", "bound"), [
    *((kind, torch.float32, 3e-6) for kind in CHANGED),
    *((kind, torch.float16, 3e-3) for kind in ("llama", "gemma2")),  # the interpreter has no bfloat16
])  # fmt: skip
def test_kernels_equal_the_modules(kind: str, dtype: torch.dtype, bound: float) -> None:
    made = model(kind, dtype)
    names = list(made.state_dict())
    logits, gradients = results(made)
    use_liger(made)
    assert fused_modules(made) == CHANGED[kind]
    assert list(made.state_dict()) == names
    fused, found = results(made)
    assert apart(fused, logits) <= bound
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert apart(found[name], gradient) <= bound, name
    with plain_kernels(made):
        again, _ = results(made)
    assert torch.equal(again, logits)
    assert torch.equal(results(made)[0], fused)


@installed
def test_kernels_with_adapters_and_checkpointing_train_the_same() -> None:
    made = model("llama")
    inject(made, Lora(rank=2))
    for name, parameter in list(made.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            drawn = torch.randn(parameter.shape) / 10
            setattr(made.get_submodule(owner), last, torch.nn.Parameter(drawn))
    made.train()
    made.activation_checkpointing_enable({"use_reentrant": False})
    logits, gradients = results(made)
    use_liger(made)
    fused, found = results(made)
    assert apart(fused, logits) <= 3e-6 and found.keys() == gradients.keys()
    assert all("lora_" in name for name in found)
    assert max(apart(found[name], gradients[name]) for name in found) <= 1e-5


@installed
def test_auto_reports_the_kernels_it_takes() -> None:
    made = model("llama")
    assert choose_kernels(made, "auto") == f"kernels: Liger's for {CHANGED['llama']}"
    use_own(made)
    assert not fused_modules(made) and choose_kernels(made, "torch") == "" and not fused_modules(made)
    assert choose_kernels(made, "auto", compiled=True).startswith("kernels: torch.compile fuses")
    assert not fused_modules(made)


@installed
def test_model_without_replaceable_modules_is_refused() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=61, n_embd=32, n_layer=1, n_head=2)
    made = AutoModelForCausalLM.from_config(config)
    with pytest.raises(SpecError) as error:
        choose_kernels(made, "liger")
    (problem,) = error.value.problems
    assert problem.where == "model.kernels" and "of a gpt2 model" in problem.message
    assert "of a gpt2 model" in choose_kernels(made, "auto")


def test_missing_liger_is_refused_and_explained_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, a GPU, one that is new enough, and a compiler and a driver with which they run."""
    made = model("llama")

    def refused(reason: str) -> None:
        with pytest.raises(SpecError) as error:
            choose_kernels(made, "liger")
        (problem,) = error.value.problems
        assert reason in problem.message and problem.message.endswith("; set it to auto or torch")
        line = choose_kernels(made, "auto")
        assert not fused_modules(made)
        assert line == "" if "found" in reason else reason in line

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found")
    refused("need a GPU, and none was found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    refused("this GPU has compute capability 7.5, and they need 8.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def fails(device: torch.device) -> None:
        raise RuntimeError("the driver is too old\nand more")

    monkeypatch.setattr(kernels, "_try", fails)
    refused("they do not run here (RuntimeError: the driver is too old)")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("liger-kernel is not installed (pip install 'dsft[gpu]')")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert choose_kernels(made, "auto") == ""


def test_kernels_equal_the_modules_in_triton_interpreter() -> None:
    """The tests above that need it."""
    folder = ROOT / ".cache" / "standin" / "triton"
    if INSTALLED or not folder.is_dir():
        pytest.skip("it is what runs here" if INSTALLED else "scripts/standin installs Triton and Liger")
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "13 passed" in done.stdout, done.stdout[-5000:]
