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
from dsft.model.experts import expert_layers, stacks
from dsft.model.head import output_layer
from dsft.model.init import module_seed
from dsft.model.lora_sum import sum_in_product
from dsft.model.lora_targets import Names, adapted_modules, condensed, saved_modules
from dsft.model.names import ADAPTER, is_adapter, plain_name
from dsft.model.quantize import QuantizedLinear, load_bitsandbytes
from dsft.model.stacked import StackedExperts, from_peft, peft_name, peft_shape, stack
from dsft.model.vocabulary import vocabulary_names
from dsft.model.weights import Sharding, StorageOf, Weights, check_finite
from dsft.spec.schema import Lora

PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file: peft's wrappers around the model."""

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


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
    targets, stacked, more = adapted_modules(causal_lm, lora, modules, names)
    _refuse([*problems, *more])
    _check_ties(causal_lm, modules)
    config = _config(causal_lm, lora, targets)
    causal_lm.requires_grad_(False)
    with warnings.catch_warnings(), own_names():
        warnings.simplefilter("ignore")  # warnings about tied heads, which get no adapter
        if targets:
            inject_adapter_in_model(config, causal_lm, ADAPTER, low_cpu_mem_usage=True)
    for name, weights in stacked.items():
        stack(causal_lm.get_submodule(name)).adapt(weights, lora.rank, scale(lora))
    if stacked:
        config.target_parameters = _target_parameters(causal_lm, stacked, names)
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
    for name, parameter in list(causal_lm.named_parameters()):
        if isinstance(experts := causal_lm.get_submodule(name.rpartition(".")[0]), StackedExperts):
            if is_adapter(name):
                seeded = plain_name(name).removesuffix(".weight")
                fresh = _fresh(parameter.shape, module_seed(seed, seeded)).to(dtype)
                value = fresh if name.endswith("A") else torch.zeros_like(fresh)
                setattr(experts, name.rpartition(".")[2], nn.Parameter(value))
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
    for _, _, layer in places:
        for name, parameter in layer.named_parameters():
            if is_adapter(f".{name}"):
                sharding.take(parameter, None)


def _adapted(causal_lm: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield (name of the adapted module in files, peft's layer)."""
    from peft.tuners.lora import LoraLayer

    for name, module in causal_lm.named_modules():
        if isinstance(module, LoraLayer):
            yield plain_name(name), module


def _fresh(shape: torch.Size, seed: int) -> Tensor:
    """Return A, (rank, in) or (experts, rank, in), float32."""
    bound = 1 / math.sqrt(shape[-1])
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def _row_norms(linear: nn.Module) -> Tensor:
    """Return (out,) in the weight's type, computed as peft does at each step: their ratio is then exactly
    1."""
    weight = linear.dequantize() if isinstance(linear, QuantizedLinear) else linear.weight
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
    extra = sorted(set(file.keys()) - names_in_file(causal_lm, ours, names).keys())
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
    trained = names_in_file(causal_lm, [n for n, p in causal_lm.named_parameters() if p.requires_grad], names)
    where = f"model.lora.path {str(folder)!r}"
    file = _open(folder)
    in_file = set(file.keys())
    embeddings = names_in_file(causal_lm, vocabulary_names(causal_lm), names)
    frozen = {name: n for name, n in embeddings.items() if name in in_file and name not in trained}
    for name, ours in (trained | frozen).items():
        if name not in in_file:
            raise MissingInputError(f"{where}: {WEIGHTS} has no {name}; name an adapter of this model.")
        whole = tuple(causal_lm.get_parameter(ours).shape)
        found, shape = file.get_slice(name).get_shape(), [*peft_shape(name, whole)]
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
            parameter.data.copy_(from_peft(found[0], file.get_tensor(found[0]), tuple(parameter.shape)))
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
    wanted = set(config.target_parameters or ())
    is_same = set(read.target_modules) == set(config.target_modules)
    return not is_same or set(read.target_parameters or ()) != wanted


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
        fan_in_fan_out=bool(targets) and isinstance(modules[targets[0]], Conv1D),
    )


def _target_parameters(
    causal_lm: PreTrainedModel, stacked: Mapping[str, Sequence[str]], names: Names
) -> list[str]:
    """Return peft's names of the adapted weights of experts: the last two parts where all that have them are
    adapted, and the model is not inside another."""
    full = {f"{name}.{own}" for name, weights in stacked.items() for own in weights}
    short = {".".join(name.split(".")[-2:]) for name in full}
    experts = [layer.experts for layer in expert_layers(causal_lm)]
    every = {f"{name}.{own}" for name in experts for own in stacks(causal_lm.get_submodule(name))}
    meant = {name for name in every if name.endswith(tuple(f".{one}" for one in short))}
    return sorted(short if names is str and meant == full else map(names, full))


def names_in_file(causal_lm: nn.Module, parameters: Iterable[str], names: Names) -> dict[str, str]:
    """Return the name of each parameter in an adapter's file -> in `causal_lm`. names: see `Names`."""
    named = {plain_name(name): name for name in parameters}
    shapes = {plain: tuple(causal_lm.get_parameter(name).shape) for plain, name in named.items()}
    return {PREFIX + names(peft_name(plain, shapes)): name for plain, name in named.items()}


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


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise SpecError("The model cannot get these adapters.", problems)
