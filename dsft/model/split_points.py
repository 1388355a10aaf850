"""Find out where a model can be cut into pipeline stages, on a small model of its own class.

The small model has a few narrow layers, one of each kind that the config names. It runs once to see what is
called before, in and after the layers. Then two stages of it must give the log-probabilities and the
gradients of the whole.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.data.steps.batch import Tokens
from dsft.errors import Problem, SpecError
from dsft.model.config import from_config
from dsft.model.experts import choose_experts
from dsft.model.policy import Policy
from dsft.model.stage import SplitPoints, cut_to_stage
from dsft.plan.cut import Cut
from dsft.spec.architecture import pipeline_obstacle

VOCABULARY, WIDTH, WINDOW, MOST_LAYERS = 32, 32, 3, 6
BOUND = 1e-4
"""Largest difference, relative to the largest value compared; the same operations run in both, but ties add
up in another order."""
ROWS = (  # positions: two rows, and one of two segments
    ((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5, 6, 7)),
    ((0, 1, 2, 3, 4, 0, 1, 2),),
)


class _Unfit(Exception):
    """The reason why a model cannot be cut."""


def check_cut(config: PreTrainedConfig, cut: Cut) -> SplitPoints:
    """Return the split points of this model; raise SpecError where it cannot be cut like this."""
    found = find_split_points(config)
    if isinstance(found, str):
        raise _error(f"{found}; set it to 1")
    if cut.num_layers != config.num_hidden_layers:
        raise _error(f"a cut of {cut.num_layers} layers is not one of {config.num_hidden_layers}")
    return found


_CACHE: dict[str, SplitPoints | str] = {}  # by the text of a config


def find_split_points(config: PreTrainedConfig) -> SplitPoints | str:
    """Return the split points of a model, or the reason why it cannot be cut into stages."""
    text = config.to_json_string(use_diff=False)
    if text not in _CACHE:
        _CACHE[text] = _find(config)
    return _CACHE[text]


def _find(config: PreTrainedConfig) -> SplitPoints | str:
    reason = pipeline_obstacle(config.to_dict())
    if reason is not None or config.num_hidden_layers == 1:
        return reason or "a model of one layer cannot be cut into stages"
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("cpu"):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = small_model(config)
            split_points = _trace(model)
            _prove(model, split_points)
    except _Unfit as error:
        return f"a {config.model_type} model cannot be cut into stages, since {error}"
    except Exception as error:  # any error of a class that was not written to be cut
        text = str(error).strip().splitlines()[:1] or [type(error).__name__]
        return f"a {config.model_type} model cannot be cut into stages: a small one failed with {text[0]}"
    return split_points


# --- the small model ----------------------------------------------------------------------------------------


def shallow(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return the config of the same model with these layers alone."""
    found: Any = copy.deepcopy(config)
    for name, value in vars(config).items():
        if _is_per_layer(value, config.num_hidden_layers):
            setattr(found, name, [value[index] for index in layers])
    found.num_hidden_layers = len(layers)
    kept: PreTrainedConfig = found
    return kept


def one_of_each(config: PreTrainedConfig) -> list[int]:
    """Return, for every layer, the first layer of its kind, by what the config lists layer by layer."""
    number = config.num_hidden_layers
    lists = [value for value in vars(config).values() if _is_per_layer(value, number)]
    kinds = [repr([value[index] for value in lists]) for index in range(number)]
    return [kinds.index(kind) for kind in kinds]


def _is_per_layer(value: Any, num_layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == num_layers


def narrow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the small model: two heads of the same size, few layers with one of each kind, a
    small vocabulary, a window shorter than a row."""
    kinds = sorted(set(one_of_each(config)))[:MOST_LAYERS]
    if getattr(config, "num_kv_shared_layers", 0):  # a layer needs the one whose keys and values it uses
        kinds = list(range(config.num_hidden_layers))
    others = [index for index in range(config.num_hidden_layers) if index not in kinds]
    small = shallow(config, sorted(kinds + others[: max(0, 3 - len(kinds))]))
    heads, hidden = config.num_attention_heads, config.hidden_size
    width = 2 * (vars(config).get("head_dim") or hidden // heads)
    for name, value in vars(config).items():
        if type(value) is int and value == hidden:  # the embedding's own width, too
            setattr(small, name, width)
    for name in ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"):
        if getattr(config, name, None) is not None:
            setattr(small, name, 2 if getattr(config, name) == heads else 1)
    changed = {"hidden_size": width, "num_attention_heads": 2, "vocab_size": VOCABULARY, "pad_token_id": 0}
    changed |= {"intermediate_size": WIDTH, "ffn_hidden_size": WIDTH, "sliding_window": WINDOW}
    changed |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_num_heads": 2}
    changed |= {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
    changed |= {"vocab_size_per_layer_input": VOCABULARY}
    if getattr(config, "first_k_dense_replace", 0):
        changed |= {"first_k_dense_replace": 1}
    for name, new in changed.items():
        if getattr(config, name, None) is not None:
            setattr(small, name, new)
    return small


def small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the small model in float32 on the CPU; every parameter is perturbed, so that a zero or a one
    hides nothing."""
    model = from_config(narrow(config), dtype=torch.float32, attn_implementation="eager")
    choose_experts(model, "auto")  # one after the other, each adds its gradient to that of all experts
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


# --- order of the calls -------------------------------------------------------------------------------------


def _trace(model: PreTrainedModel) -> SplitPoints:
    """Find the split points in one forward pass. Raises _Unfit where something with parameters is used
    neither before nor after the layers alone."""
    name = layers_of(model)
    layers: Any = model.get_submodule(name)
    outside = dict(_outside(model, name))
    calls: list[tuple[str, Any]] = []
    watched = {**outside, **{str(index): layer for index, layer in enumerate(layers)}}
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, name=name: calls.append((name, output)))
        for name, module in watched.items()
    ]
    with torch.no_grad():
        model(**_inputs(ROWS[0][:1]), use_cache=False)  # one, or a model with scores needs a padding token
    for hook in hooks:
        hook.remove()
    order = [name for name, _ in calls]
    first, last = order.index("0"), len(order) - 1 - order[::-1].index(str(len(layers) - 1))
    before = tuple(name for name in outside if name in order[:first] and name not in order[first:])
    after = tuple(name for name in outside if name in order[last:] and name not in order[:last])
    odd = sorted(outside.keys() - {*before, *after})
    if odd:
        raise _Unfit(f"{' and '.join(odd)} is used within the layers too, or before and after them")
    return SplitPoints(name, before, after, isinstance(calls[first][1], tuple))


def layers_of(model: PreTrainedModel) -> str:
    """Return the name of the list that has as many modules as the config has layers."""
    number = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name
    raise _Unfit(f"it has no list of {number} layers")


def _outside(model: nn.Module, layers: str, above: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that have parameters and do not contain the layers."""
    if next(model.parameters(recurse=False), None) is not None:
        raise _Unfit(f"{above or 'the model'} has parameters that are in none of its submodules")
    for child_name, child in model.named_children():
        name = f"{above}.{child_name}" if above else child_name
        if name == layers:
            continue
        if layers.startswith(f"{name}."):
            yield from _outside(child, layers, name)
        elif next(child.parameters(), None) is not None:
            yield name, child


# --- the proof ----------------------------------------------------------------------------------------------


def _prove(model: PreTrainedModel, split_points: SplitPoints) -> None:
    """Raise _Unfit where two stages do not compute what the whole does."""
    number = len(model.get_submodule(split_points.layers))
    cut = Cut((1, number - 1))
    parts = [copy.deepcopy(model) for _ in range(cut.stages)]
    for stage, part in enumerate(parts):
        cut_to_stage(part, split_points, stage, cut)
    stages = [Policy(part, is_first=not n, is_last=n == 1) for n, part in enumerate(parts)]
    whole = Policy(model)
    for rows in ROWS:
        _compare([_scored([whole], rows)], [_scored(stages, rows)], "log-probabilities")
    named = [policy.named_trained() for policy in (whole, *stages)]
    gradients: list[dict[str, Tensor]] = [
        {name: p.grad for name, p in part.items() if p.grad is not None} for part in named
    ]
    expected, *found = gradients
    summed = {n: sum((part[n] for part in found if n in part), torch.zeros(())) for n in expected}
    if {name for part in found for name in part} != expected.keys():
        raise _Unfit("two stages of a small model do not train all of its parameters")
    _compare(expected.values(), summed.values(), "gradients")


def _scored(stages: list[Policy], rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the targets' log-probabilities; the gradients of a weighted sum of them are added to the
    parameters."""
    ids, positions = _inputs(rows).values()
    carried = ids
    for stage in stages:
        carried = stage(carried, Tokens(ids, positions, ids.roll(-1, 1)))
    (logps,) = carried
    weights = torch.linspace(1.0, 2.0, logps.numel()).view_as(logps)  # a plain sum could hide an exchange
    (logps * weights).sum().backward()
    return logps.detach()


def _inputs(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    positions = torch.tensor(rows)
    ids = torch.arange(positions.numel()).mul(7).remainder(VOCABULARY).view_as(positions)
    return {"input_ids": ids, "position_ids": positions}


def _compare(expected: Iterable[Tensor], found: Iterable[Tensor], what: str) -> None:
    for one, other in zip(expected, found, strict=True):
        largest = one.abs().max().clamp(min=1e-3)
        if not bool((one - other).abs().max() <= BOUND * largest):
            raise _Unfit(f"two stages of a small model give different {what} than the whole model")


def _error(message: str) -> SpecError:
    return SpecError("The model cannot be cut.", [Problem("parallel.pipeline_stages", message)])
