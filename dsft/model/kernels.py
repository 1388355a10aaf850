"""Use Liger's fused Triton kernels for a model's norms, MLPs and rotary embeddings. Parameters and names
stay.

A module is changed where its forward has the same code as a class that a kernel replaces: most architectures
of transformers have copies of the same few. All others compute as before. What the kernels do was read in
liger_kernel 0.8.5: ops/rms_norm.py, ops/swiglu.py and ops/rope.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from dsft.errors import Problem, SpecError
from dsft.model.recurrence import with_globals

Kernels = Literal["auto", "torch", "liger"]

PLAIN = "dsft_plain_class"
"""Attribute of a changed module's class: the class that it had."""

ROTATE = "apply_rotary_pos_emb"


KIND = "dsft_kind"
"""Attribute of a changed module's class: its kind in the plural, such as "norms", for the log."""

OLDEST = (8, 0)
"""Compute capability of the oldest GPUs (A100) whose tensor cores and Triton kernels have bf16."""


def choose_kernels(causal_lm: PreTrainedModel, kernels: Kernels, *, compiled: bool = False) -> str:
    """Use Liger's kernels where `kernels`, which is model.kernels, says so: change `causal_lm` in place.
    Return a line for the log; empty where there is nothing to say. compiled: model.compile.

    Raises SpecError for liger where they cannot be used; for auto the model's own modules stay.
    """
    if kernels == "torch" or kernels == "auto" and not on_gpu():
        return ""
    if kernels == "auto" and compiled:
        return "kernels: torch.compile fuses norms, MLPs and rotary embeddings"
    reason = _why_not()
    if not reason:
        use_liger(causal_lm)
        if found := fused_modules(causal_lm):
            return f"kernels: Liger's for {found}"
        reason = f"its kernels fit no norm, MLP or rotary embedding of a {causal_lm.config.model_type} model"
    if kernels == "auto":
        return f"kernels: the model's own modules, not Liger's: {reason}"
    problem = Problem("model.kernels", f"'liger', but {reason}; set it to auto or torch")
    raise SpecError("The kernels cannot be used.", [problem])


def on_gpu() -> bool:
    """Return whether this process trains on a GPU, or under Triton's interpreter."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return is_interpreted or torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def _why_not() -> str:
    """Return why Liger's kernels cannot be used in this process; empty where they can."""
    if not on_gpu():
        return "its Triton kernels need a GPU, and none was found"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed (pip install 'dsft[gpu]')"
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            return f"this GPU has compute capability {capability[0]}.{capability[1]}, and they need 8.0"
        try:
            _try(device)
        except Exception as error:  # what Triton, a C compiler and the driver raise
            line = (str(error).splitlines() or [""])[0]
            return f"they do not run here ({type(error).__name__}: {line[:200]})"
    return ""


def _try(device: torch.device) -> None:
    """Compile and run a kernel of each kind, forward and backward."""
    x, weight, q, k = (
        torch.ones(shape, device=device, requires_grad=True)
        for shape in ((2, 16), (16,), (1, 2, 2, 16), (1, 2, 2, 16))
    )
    outputs = [
        _ops().norm.apply(x, weight, 1e-6, 0.0, "llama", False, None),
        _ops().swiglu.apply(x, x.clone()),
        *_ops().rope.apply(q, k, x.detach()[None], x.detach()[None]),
    ]
    sum(output.sum() for output in outputs).backward()


def use_liger(causal_lm: PreTrainedModel) -> None:
    """Change the modules that a kernel replaces."""
    for module in list(causal_lm.modules()):
        if found := fused(module):
            cls = type(module)
            members = {"forward": found.forward(), PLAIN: cls, KIND: found.kind}
            module.__class__ = type(f"Liger{cls.__name__}", (cls,), members)


def use_own(causal_lm: PreTrainedModel) -> None:
    """Undo `use_liger`."""
    for module, cls in _changed(causal_lm):
        module.__class__ = getattr(cls, PLAIN)


def fused_modules(causal_lm: PreTrainedModel) -> str:
    """Return what is changed, such as "2 MLPs, 5 norms"; empty where nothing is."""
    kinds = Counter(
        getattr(type(module), KIND) for module in causal_lm.modules() if hasattr(type(module), KIND)
    )
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


@contextmanager
def plain_kernels(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Use transformers' own modules inside the block."""
    changed = _changed(causal_lm)
    use_own(causal_lm)
    try:
        yield
    finally:
        for module, cls in changed:
            module.__class__ = cls


def _changed(causal_lm: PreTrainedModel) -> list[tuple[nn.Module, type[nn.Module]]]:
    return [(module, type(module)) for module in causal_lm.modules() if hasattr(type(module), PLAIN)]


class Fused(NamedTuple):
    """What a kernel replaces: its kind in the plural, and a function that makes its forward."""

    kind: str
    forward: Callable[[], Callable[..., Any]]


def fused(module: nn.Module) -> Fused | None:
    """Return what replaces the forward of `module`; None for modules that stay. Needs no package."""
    own: Any = type(module).forward
    if _same(own, llama.LlamaRMSNorm.forward):
        return Fused("norms", partial(_norm, "llama", 0.0, "variance_epsilon"))
    if _same(own, Olmo2RMSNorm.forward):
        return Fused("norms", partial(_norm, "gemma", 0.0, "variance_epsilon"))
    if _same(own, GemmaRMSNorm.forward) and _same(getattr(module, "_norm", None), GemmaRMSNorm._norm):
        return Fused("norms", partial(_norm, "gemma", 1.0, "eps"))
    if _same(own, llama.LlamaMLP.forward) and isinstance(getattr(module, "act_fn", None), _SILU):
        return Fused("MLPs", lambda: _swiglu)
    names = getattr(getattr(own, "__code__", None), "co_names", ())
    rotate = own.__globals__.get(ROTATE) if ROTATE in names else None
    if (
        rotate is not None
        and _same(rotate, llama.apply_rotary_pos_emb)
        and _same(rotate.__globals__.get("rotate_half"), llama.rotate_half)
    ):
        return Fused("rotary embeddings", partial(_with_rope, own, rotate))
    return None


_SILU = (nn.SiLU, SiLUActivation)


def _same(one: Any, other: Any) -> bool:
    """Whether two functions have the same code, wherever it is defined."""
    mine, theirs = (getattr(function, "__code__", None) for function in (one, other))
    parts = ("co_code", "co_consts", "co_names", "co_varnames")
    return mine is not None and all(getattr(mine, part) == getattr(theirs, part) for part in parts)


class _Ops(NamedTuple):
    """Liger's operations: subclasses of torch.autograd.Function."""

    norm: Any
    swiglu: Any
    rope: Any


@cache
def _ops() -> _Ops:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return _Ops(LigerRMSNormFunction, LigerSiLUMulFunction, LigerRopeFunction)


def _norm(casting: str, offset: float, epsilon: str) -> Callable[..., Any]:
    """Return the forward of a norm. casting: llama (the product with the weight in the input's type) or gemma
    (in float32); the weight is offset + w. Not in place: the gradient that it would overwrite may be a
    residual's too."""
    norm = _ops().norm

    def forward(self: Any, hidden_states: Any) -> Any:
        eps = getattr(self, epsilon)
        return norm.apply(hidden_states, self.weight, eps, offset, casting, False, None)

    return forward


def _swiglu(self: Any, x: Any) -> Any:
    return self.down_proj(_ops().swiglu.apply(self.gate_proj(x), self.up_proj(x)))


def _with_rope(forward: FunctionType, plain: Callable[..., Any]) -> FunctionType:
    """Return a copy of an attention's forward that rotates queries and keys by the kernel."""
    rope = _ops().rope

    def rotate(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:
            return plain(q, k, cos, sin, unsqueeze_dim)
        return rope.apply(q, k, cos, sin)

    return with_globals(forward, {ROTATE: rotate})
