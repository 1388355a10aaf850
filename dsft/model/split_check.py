"""Find out, without weights, whether the rows of a model can be split over ranks: its config is asked what
packed rows need, and a pass through the model on the meta device what its layers ask of their attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.model.attention import packing_obstacle
from dsft.model.attention_loop import KEYWORD, WINDOW_NOT_GIVEN, unsupported
from dsft.model.config import on_meta
from dsft.model.experts import expert_layers
from dsft.model.recurrence import recurrent_layers
from dsft.spec.architecture import heads_not_divided

TRIAL = "dsft_trial"
"""Name under which transformers registers the attention of the trial."""

TOKENS = 4


class _Unfit(Exception):
    """The reason why rows cannot be split."""


def check_can_split(
    config: PreTrainedConfig, size: int, max_length: int, reference: str | None = None
) -> None:
    """Raise SpecError where rows of a model with this config cannot be split over `size` ranks. max_length:
    tokens of the longest row; reference: the key and the name of a reference, where it is that."""
    found = query_heads(on_meta(config), max_length)
    if isinstance(found, str):
        message = f"{found}; set it to 1"
    elif odd := [heads for heads in found if heads % size]:
        message = f"{size} {heads_not_divided(odd[0], size)}"
    else:
        return
    message += f" (the model is {reference})" if reference else ""
    raise SpecError("Rows of the model cannot be split.", [Problem("parallel.sequence_parallel", message)])


def query_heads(causal_lm: PreTrainedModel, max_length: int) -> tuple[int, ...] | str:
    """Return the different numbers of heads that the queries of a model's layers have, or the reason why its
    rows cannot be split. `causal_lm` is on the meta device."""
    config = causal_lm.config
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    mixing = recurrent_layers(type(causal_lm)).intersection(layers)
    obstacle = packing_obstacle(config, max_length)
    if mixing:
        reason = f"its layers of type {' and '.join(sorted(mixing))} mix tokens outside of the attention"
    elif obstacle is not None:
        reason = f"split rows are computed as packed ones are, and it {obstacle}"
    else:
        try:
            return _tried(causal_lm)
        except _Unfit as unfit:
            reason = str(unfit)
    return f"rows of a {config.model_type} model cannot be split: {reason}"


def _tried(causal_lm: PreTrainedModel) -> tuple[int, ...]:
    """Return the numbers of heads of one pass. Raises _Unfit where a layer asks for what dsft's attention
    does not compute."""
    found = set[int]()

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        has_segments = arguments.pop(KEYWORD, None) is not None
        window = arguments.pop("sliding_window", WINDOW_NOT_GIVEN)
        arguments.pop("softcap", None)
        reason = unsupported(module, attention_mask, has_segments, window, arguments)
        if reason:
            raise _Unfit(f"{type(module).__name__} {reason}")
        found.add(query.shape[1])
        return query.new_empty(1, TOKENS, query.shape[1], value.shape[3]), None

    config: Any = causal_lm.config
    kept = config._attn_implementation, config._experts_implementation, config.pad_token_id
    AttentionInterface.register(TRIAL, attend)
    causal_lm.set_attn_implementation(TRIAL)
    if is_mixture := bool(expert_layers(causal_lm)):
        causal_lm.set_experts_implementation("batched_mm")  # which the meta device has in every type
    config.pad_token_id = None  # else GPT-2 looks for it among the tokens
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    given = {"input_ids": ids, "position_ids": ids, "use_cache": False, KEYWORD: ((TOKENS, 0),)}
    try:
        with torch.no_grad():
            causal_lm.base_model(**given)
    except _Unfit:
        raise
    except Exception:  # of a model that looks at values: the check at the start of a run shows the rest
        return tuple(sorted(found))
    finally:
        causal_lm.set_attn_implementation(kept[0])
        if is_mixture:
            causal_lm.set_experts_implementation(kept[1])
        config.pad_token_id = kept[2]
    return tuple(sorted(found))
