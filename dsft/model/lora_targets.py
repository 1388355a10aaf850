"""Find what the names of model.lora mean: the layers and experts that get adapters, and the modules that are
trained in full beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dsft.errors import Problem
from dsft.model.config import has_scores
from dsft.model.experts import JOINED, computed_alike, expert_layers, of_experts, routers, stacks
from dsft.model.head import output_layer
from dsft.spec.patterns import no_match
from dsft.spec.schema import Lora

Names = Callable[[str], str]
"""From a name in the causal language model to that in the model that an adapter's file is for."""

ALL_LINEAR = "all-linear"


def adapted_modules(
    causal_lm: PreTrainedModel, lora: Lora, saved: Collection[nn.Module], names: Names
) -> tuple[list[str], dict[str, list[str]], list[Problem]]:
    """Return the full names of the linear layers that get an adapter, the modules of experts with the names
    of their weights that get some, and what is wrong with the spec's names. all-linear: every linear layer
    but the output head, `modules_to_save` and the routers of experts. Other names mean linear layers, and
    experts where no other module has them."""
    head = output_layer(causal_lm)
    modules = {name: module for name, module in causal_lm.named_modules() if name}
    if lora.target_modules == ALL_LINEAR:
        left_out = routers(causal_lm)
        linears = (name for name, module in modules.items() if isinstance(module, (nn.Linear, Conv1D)))
        kept = [one for one in linears if modules[one] is not head and modules[one] not in saved]
        return [name for name in kept if name not in left_out], {}, []
    experts = [layer.experts for layer in expert_layers(causal_lm)]
    weights = [(name, own) for name in experts for own in stacks(modules[name])]
    targets: list[str] = []
    stacked: dict[str, dict[str, None]] = {}  # in order, each once
    problems: list[Problem] = []
    for index, wanted in enumerate(lora.target_modules):
        where = f"model.lora.target_modules.{index}"
        found = [name for name in modules if name not in experts and _named(name, wanted, names)]
        for name in found:
            if reason := _unfit(modules[name], head, saved):
                problems.append(Problem(where, f"{wanted!r} names {name}, which {reason}"))
                break
        targets += found
        if found:
            continue
        meant = [w for w in weights if any(_named(n, wanted, names) for n in (w[0], ".".join(w)))]
        for name, own in meant:
            if reason := _unfit_experts(modules[name], lora):
                problems.append(Problem(where, f"{wanted!r} names {name}, {reason}"))
                break
            stacked.setdefault(name, {})[own] = None
        if not meant:
            fit = [name for name, module in modules.items() if _unfit(module, head, saved) is None]
            is_joined = of_experts(causal_lm, wanted)
            problem = f"{wanted!r} {JOINED}" if is_joined else no_match(wanted, _last_parts(fit))
            problems.append(Problem(where, problem))
    return list(dict.fromkeys(targets)), {name: list(own) for name, own in stacked.items()}, problems


def _unfit_experts(experts: nn.Module, lora: Lora) -> str | None:
    """Return the reason why routed experts can have no such adapter; None where they can."""
    if not computed_alike(experts):
        return f"of class {type(experts).__name__}, for which adapters are not supported; leave it out"
    for key, value in (("use_dora", lora.use_dora), ("dropout", lora.dropout)):
        if value:
            return f"and adapters of experts cannot have {key}; leave out one of the two"
    return None


def _unfit(module: nn.Module, head: nn.Module | None, saved: Collection[nn.Module]) -> str | None:
    """Return the reason why a module can have no adapter; None where it can."""
    if module is head:
        return "is the output head, which gets no adapter; name it in modules_to_save to train it in full"
    if not isinstance(module, (nn.Linear, Conv1D)):
        return (
            f"is of class {type(module).__name__} and no linear layer; name linear layers, or set all-linear"
        )
    if module in saved:
        return "is in modules_to_save too; leave it out of one of the two"
    return None


def saved_names(causal_lm: PreTrainedModel, lora: Lora) -> list[str]:
    """Return what is trained in full by the spec's names, always with the layer of a score."""
    score = ["score"] if has_scores(causal_lm.config) and "score" not in lora.modules_to_save else []
    return [*lora.modules_to_save, *score]


def saved_modules(
    causal_lm: PreTrainedModel, lora: Lora, names: Names = str
) -> tuple[list[tuple[str, nn.Module]], list[Problem]]:
    """Return name and module of what is trained in full, and what is wrong with the spec's names."""
    modules = {name: module for name, module in causal_lm.named_modules() if name}
    problems: list[Problem] = []
    saved: dict[str, nn.Module] = {}
    for index, wanted in enumerate(saved_names(causal_lm, lora)):
        found = {name: module for name, module in modules.items() if _named(name, wanted, names)}
        where = f"model.lora.modules_to_save.{index}"
        if not found:
            problems.append(Problem(where, no_match(wanted, _last_parts(modules))))
        if any(of_experts(causal_lm, wanted, name) for name in found):
            message = (
                f"{wanted!r} names the routed experts, which are not trained beside adapters; train them "
            )
            problems.append(Problem(where, f"{message}with model.trainable and without model.lora"))
        saved |= found
    return list(saved.items()), problems


def _last_parts(names: Iterable[str]) -> set[str]:
    """Return the names that people write for modules: last parts that are no layer's number."""
    return {last for name in names if not (last := name.rpartition(".")[2]).isdigit()}


def condensed(targets: Sequence[str], modules: Mapping[str, nn.Module]) -> Collection[str]:
    """Return the last parts of the names where these mean the same modules, else the names: last parts are
    what people write and other versions of a model understand."""
    last_parts = {name.rsplit(".", 1)[-1] for name in targets}
    meant = [name for name in modules if name.rsplit(".", 1)[-1] in last_parts]
    return last_parts if len(meant) == len(targets) else targets


def _named(name: str, wanted: str, names: Names) -> bool:
    """Whether a module's name, or that which `names` gives it, matches by peft's rule: the whole name, or its
    last parts. An adapter's file for a multimodal model has the names of that model."""
    return any(f".{one}".endswith(f".{wanted}") for one in (name, names(name)))
