"""Put low-rank adapters into a model in place, through peft: freeze the rest, and give the adapters their
first values.

peft is imported only when a model gets adapters.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.model.config import has_scores
from dsft.model.experts import NO_ADAPTERS, of_experts, routers
from dsft.model.head import output_layer
from dsft.model.init import module_seed
from dsft.model.lora_sum import sum_in_product
from dsft.model.names import ADAPTER, is_adapter, plain_name
from dsft.model.quantize import load_bitsandbytes
from dsft.model.vocabulary import vocabulary_names
from dsft.model.weights import Sharding, StorageOf, Weights, check_finite
from dsft.spec.patterns import no_match
from dsft.spec.schema import Lora

Names = Callable[[str], str]
"""From a name in the causal language model to that in the model that an adapter's file is for."""

PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file: peft's wrappers around the model."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ALL_LINEAR = "all-linear"


def scale(lora: Lora) -> float:
    """Return the factor of B·A."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def inject(causal_lm: PreTrainedModel, lora: Lora, names: Names = str) -> Any:
    """Add adapters to every target, without memory or values yet, and freeze all parameters but theirs and
    those of `modules_to_save`. Returns peft's LoraConfig. names: that modules may have in `lora` too.

    Raises SpecError for a name that matches no module, or a module that can have no adapter.
    """
    load_bitsandbytes()
    from peft import inject_adapter_in_model

    saved, problems = saved_modules(causal_lm, lora, names)
    modules = [module for _, module in saved]
    targets, more = _targets(causal_lm, lora, modules, names)
    _refuse([*problems, *more])
    _check_ties(causal_lm, modules)
    config = _config(causal_lm, lora, targets)
    with warnings.catch_warnings(), own_names():
        warnings.simplefilter("ignore")  # warnings about tied heads, which get no adapter
        inject_adapter_in_model(config, causal_lm, ADAPTER, low_cpu_mem_usage=True)
    if not lora.use_dora:
        for _, layer in _adapted(causal_lm):
            sum_in_product(layer)
    for _, module in saved:
        module.requires_grad_(True)
    return config


def with_adapters(
    causal_lm: PreTrainedModel,
    lora: Lora,
    seed: int,
    dtype: torch.dtype,
    sharding: Sharding,
    names: Names = str,
) -> Sharding:
    """Give all adapters values in `dtype` on the CPU, before the weights that they adapt have any: those of
    the adapter at `lora.path`, else fresh ones. Values that depend on the adapted weights are set when those
    are filled: fill them with the returned `Sharding`.

    Fresh: A uniform within ±1/√in, as in peft, drawn from (seed, its name); B zero; a magnitude the 2-norm of
    each row of the weight, so that the adapted model equals the model. names: as the file at `path` has them.
    Raises MissingInputError for a `path` that cannot be read or has other tensors.
    """
    waiting = []  # layers whose magnitudes need the weights that they adapt
    for name, layer in _adapted(causal_lm):
        a_shape, b_shape = layer.lora_A[ADAPTER].weight.shape, layer.lora_B[ADAPTER].weight.shape
        layer.lora_A[ADAPTER].weight = nn.Parameter(
            _fresh(a_shape, module_seed(seed, f"{name}.lora_A")).to(dtype)
        )
        layer.lora_B[ADAPTER].weight = nn.Parameter(torch.zeros(b_shape, dtype=dtype))
        if lora.use_dora:
            waiting.append(layer)
    read = _reader(causal_lm, Path(lora.path), names) if lora.path is not None else None

    def take(parameter: nn.Parameter, part: Tensor | None) -> None:
        for layer in waiting:
            if layer.base_layer.weight is parameter:
                norms = _row_norms(layer.base_layer).to(dtype)
                layer.lora_magnitude_vector[ADAPTER].weight = nn.Parameter(norms)
                waiting.remove(layer)
                break
        if read is not None:
            read(parameter)
        sharding.take(parameter, part)

    # a norm needs whole rows, and the file replaces whole tensors
    return Sharding(take=take) if lora.use_dora or read is not None else Sharding(sharding.span, take)


def fill_adapted(weights: Weights, root: nn.Module, storage_of: StorageOf, sharding: Sharding) -> None:
    """Call `Weights.fill` on a model with adapters. They are taken out meanwhile, since some models
    initialize what is below a module by its name (GPT-2's attention). Then `sharding` takes them."""
    from peft.tuners.lora import LoraLayer

    places = [
        (parent, name, child)
        for parent in root.modules()
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer)
    ]
    for parent, name, layer in places:
        setattr(parent, name, layer.base_layer)
    try:
        weights.fill(root, storage_of, sharding)
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)
    for name, parameter in root.named_parameters():
        if is_adapter(name):
            sharding.take(parameter, None)


def _adapted(causal_lm: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield (name of the adapted module in files, peft's layer)."""
    from peft.tuners.lora import LoraLayer

    for name, module in causal_lm.named_modules():
        if isinstance(module, LoraLayer):
            yield plain_name(name), module


def _fresh(shape: torch.Size, seed: int) -> Tensor:
    """Return A, (rank, in) float32."""
    bound = 1 / math.sqrt(shape[1])
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _row_norms(linear: nn.Module) -> Tensor:
    """Return (out,) in the weight's type, computed as peft does at each step: their ratio is then exactly
    1."""
    weight = linear.weight
    assert isinstance(weight, Tensor), "a linear has a weight"
    return torch.linalg.norm(weight.T if isinstance(linear, Conv1D) else weight, dim=1).to(weight.dtype)


def check_saved(causal_lm: PreTrainedModel, lora: Lora, names: Names = str) -> None:
    """Raise MissingInputError where the adapter at `lora.path` has tensors for which the whole model, with
    its adapters, has no place: it is of a deeper model or of other modules, and only a part would be trained
    further."""
    if lora.path is None:
        return
    file = _open(Path(lora.path))
    named = causal_lm.named_parameters(remove_duplicate=False)
    ours = {n for n, p in named if p.requires_grad} | set(vocabulary_names(causal_lm))
    extra = sorted(set(file.keys()) - {PREFIX + names(plain_name(n)) for n in ours})
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise MissingInputError(
            f"model.lora.path {lora.path!r}: {WEIGHTS} has {extra[0]}{more}, which this model with its "
            "adapters does not have; name an adapter of this model."
        )


def _open(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS, framework="pt", backend="pread")
    except (OSError, SafetensorError) as error:
        raise MissingInputError(
            f"model.lora.path {str(folder)!r}: {WEIGHTS} cannot be read ({error}); name the folder of an "
            "adapter."
        ) from None


def _reader(causal_lm: PreTrainedModel, folder: Path, names: Names) -> Callable[[nn.Parameter], None]:
    """Return a function that reads each trained parameter's value from an adapter's file, which must have all
    of them. Embeddings that are in the file and not trained must have the file's values already."""
    trained = {PREFIX + names(plain_name(n)): n for n, p in causal_lm.named_parameters() if p.requires_grad}
    where = f"model.lora.path {str(folder)!r}"
    file = _open(folder)
    in_file = set(file.keys())
    embeddings = {PREFIX + names(plain_name(n)): n for n in vocabulary_names(causal_lm)}
    frozen = {name: n for name, n in embeddings.items() if name in in_file and name not in trained}
    for name, ours in (trained | frozen).items():
        if name not in in_file:
            raise MissingInputError(f"{where}: {WEIGHTS} has no {name}; name an adapter of this model.")
        found, shape = file.get_slice(name).get_shape(), list(causal_lm.get_parameter(ours).shape)
        if found != shape:
            raise MissingInputError(
                f"{where}: {name} has shape {found} where the model has {shape}; name an adapter of this "
                "model."
            )

    places = {
        name: (causal_lm.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2])
        for name, n in (trained | frozen).items()
    }

    def read(parameter: nn.Parameter) -> None:
        found = [n for n, (module, local) in places.items() if getattr(module, local) is parameter]
        if parameter.requires_grad:
            parameter.data.copy_(file.get_tensor(found[0]))
            check_finite(parameter.data.view(-1), f"{where}: {WEIGHTS}: {found[0]}", parameter.shape)
        elif found and not torch.equal(file.get_tensor(found[0]).to(parameter.dtype), parameter.data):
            raise MissingInputError(
                f"{where}: {found[0]} has other values than this run's model, where it is not trained; train "
                "it with model.lora.modules_to_save, or give the base that the adapter was made for."
            )
        for name in found:
            del places[name]

    return read


@contextmanager
def own_names() -> Iterator[None]:
    """Let peft read names of modules as they are inside the block. Otherwise it takes gate_proj, up_proj and
    down_proj of some mixtures for those of their experts in files of transformers 4, though the model has
    layers of these names (peft 0.21, utils/transformers_weight_conversion.py)."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # an older peft
        yield
        return
    changing = "convert_peft_config_for_transformers"
    original = getattr(conversion, changing)
    setattr(conversion, changing, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(conversion, changing, original)


def misread(causal_lm: PreTrainedModel, config: Any) -> bool:
    """Whether peft's own loader would take some of the adapters for others (`own_names`). config: peft's."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return False
    read = copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(read, model=causal_lm, conversions=None)
    except ValueError:  # some of gate_proj, up_proj and down_proj, not all
        return True
    return bool(set(read.target_modules) != set(config.target_modules))


def _config(causal_lm: PreTrainedModel, lora: Lora, targets: list[str]) -> Any:
    from peft import LoraConfig

    modules = dict(causal_lm.named_modules())
    return LoraConfig(
        task_type="SEQ_CLS" if has_scores(causal_lm.config) else "CAUSAL_LM",
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=sorted(condensed(targets, modules)),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        fan_in_fan_out=isinstance(modules[targets[0]], Conv1D),
    )


def _targets(
    causal_lm: PreTrainedModel, lora: Lora, saved: Collection[nn.Module], names: Names
) -> tuple[list[str], list[Problem]]:
    """Return the full names of the modules that get an adapter, and what is wrong with the spec's names.
    all-linear: every linear layer but the output head, `modules_to_save` and the routers of experts."""
    head = output_layer(causal_lm)
    modules = {name: module for name, module in causal_lm.named_modules() if name}
    if lora.target_modules == ALL_LINEAR:
        left_out = routers(causal_lm)
        return [
            name
            for name, module in modules.items()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head and module not in saved
            if name not in left_out
        ], []
    targets: list[str] = []
    problems: list[Problem] = []
    for index, wanted in enumerate(lora.target_modules):
        found = [name for name in modules if _named(name, wanted, names)]
        for name in found:
            in_experts = of_experts(causal_lm, wanted, name)
            if reason := (f"is {NO_ADAPTERS}" if in_experts else _unfit(modules[name], head, saved)):
                message = f"{wanted!r} names {name}, which {reason}"
                problems.append(Problem(f"model.lora.target_modules.{index}", message))
                break
        if not found:
            means_experts = of_experts(causal_lm, wanted)
            fit = [name for name, module in modules.items() if _unfit(module, head, saved) is None]
            problem = (
                f"{wanted!r} names {NO_ADAPTERS}" if means_experts else no_match(wanted, _last_parts(fit))
            )
            problems.append(Problem(f"model.lora.target_modules.{index}", problem))
        targets += found
    return list(dict.fromkeys(targets)), problems


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


def _check_ties(causal_lm: PreTrainedModel, saved: Collection[nn.Module]) -> None:
    """Raise SpecError where only one of a tied embedding and head is trained in full: they are one tensor,
    and peft's loader needs both named."""
    embedding, head = causal_lm.get_input_embeddings(), output_layer(causal_lm)
    if head is None or head.weight is not embedding.weight or (embedding in saved) == (head in saved):
        return
    names = {id(module): name.rsplit(".", 1)[-1] for name, module in causal_lm.named_modules()}
    both = f"[{names[id(embedding)]}, {names[id(head)]}]"
    message = f"the embedding and the head are one tensor in this model, so name both or neither: {both}"
    _refuse([Problem("model.lora.modules_to_save", message)])


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


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise SpecError("The model cannot get these adapters.", problems)
