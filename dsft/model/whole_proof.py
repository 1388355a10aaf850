"""Compare the text model with the multimodal model that it is a part of, on text: a small model of both, of
the same classes, with random weights and few layers. What may differ is what the whole does around its text
model: positions in several dimensions, masks, scales, an output layer of its own.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from dsft.errors import Problem, SpecError
from dsft.model.split_points import VOCABULARY, narrow, small_model
from dsft.model.whole import Whole, text_config, text_key, whole_of

BOUND = 1e-4
"""Largest difference of logits, as a share of their spread; the same operations run in both."""

ROWS = (range(3, 31), range(9, 14))
"""Token ids to compare where no rows of the data are at hand."""

LONGEST = 64
"""Most tokens of a row that is compared."""


def check_text(config: PreTrainedConfig, rows: Sequence[Sequence[int]] = ROWS) -> float:
    """Return how far apart the two models are, as `apart` does. Raise SpecError where that is more than
    rounding."""
    try:
        found = apart(config, rows)
    except SpecError:
        raise
    except Exception as error:  # any error of a class that was not written to be so small
        text = str(error).strip().splitlines()[:1] or [type(error).__name__]
        reason = f"cannot be compared with its text model, since a small one failed with {text[0]}"
    else:
        if found <= BOUND:
            return found
        reason = "gives other logits on text alone than its text model, which would be trained"
        if math.isinf(found):
            reason = "computes no logits of text alone in a small model, to compare with its text model's"
    message = f"a {config.model_type} model {reason}; choose another model"
    raise SpecError("The text model was compared with the whole model.", [Problem("model", message)])


def apart(config: PreTrainedConfig, rows: Sequence[Sequence[int]]) -> float:
    """Return the largest difference between the logits of the two small models on the rows, as a share of the
    logits' spread; infinite where the whole needs more than text. config: of the whole; rows: token ids, of
    which the small vocabulary's remainder is used."""
    small, text = copy.deepcopy(config), text_config(config)
    assert text is not None, "the config has a text model"
    setattr(small, text_key(config), narrow(text))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device("cpu"):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        causal_lm = small_model(text)
        whole = whole_of(small, causal_lm)
        whole.model.set_attn_implementation("eager")
        whole.model.set_experts_implementation("eager")
        for part, there in whole.parts.items():
            ours, theirs = causal_lm.get_submodule(part), whole.model.get_submodule(there)
            whole.model.set_submodule(there, _rebuilt(theirs, ours))
        return max(_compared(whole, causal_lm, row[:LONGEST]) for row in rows)


def _rebuilt(there: nn.Module, part: nn.Module) -> nn.Module:
    """Return the whole's module, built again from its own config, with the values of the text model's."""
    if not isinstance(there, PreTrainedModel):
        return part
    built = type(there)(there.config)
    built.load_state_dict(part.state_dict())
    return built.eval()


def _compared(whole: Whole, causal_lm: PreTrainedModel, row: Sequence[int]) -> float:
    ids = torch.tensor(row)[None] % VOCABULARY
    zeros, ones = torch.zeros_like(ids), torch.ones_like(ids)
    takes = inspect.signature(whole.model.forward).parameters
    given = {name: zeros for name in ("token_type_ids", "mm_token_type_ids") if name in takes}
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        expected = causal_lm(input_ids=ids, position_ids=positions, use_cache=False).logits
        try:
            found: Tensor = whole.model.eval()(
                input_ids=ids, attention_mask=ones, use_cache=False, **given
            ).logits
        except Exception:  # whatever a model does that needs more than text, such as a tower without values
            return math.inf
    difference = float((found - expected).abs().max() / expected.std())
    return difference if math.isfinite(difference) else math.inf
