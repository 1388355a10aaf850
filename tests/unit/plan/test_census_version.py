"""Cached answers of a census are valid while VERSION is: the answers for models of every kind, compared with
stored ones."""

import functools
import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from dsft.errors import SpecError
from dsft.model.census import take_census
from dsft.plan.census import VERSION
from dsft.spec.schema import Lora, Model
from tests.architectures.cases import ARCHITECTURES, REFUSED, SPLIT, keys_of
from tests.versions import check_version

GOLDEN = Path(__file__).parent / "golden" / "census.json"
LLAMA = {"model_type": "llama"} | keys_of("llama")
MODELS = {
    "tied": Model(from_config=LLAMA | {"tie_word_embeddings": True}),
    "larger vocabulary": Model(from_config=LLAMA | {"vocab_size": 300}),
    "smaller vocabulary": Model(from_config=LLAMA | {"vocab_size": 100}),
    "added tokens": Model(from_config=LLAMA, add_tokens=("<a>", "<b>")),
    "adapters": Model(
        from_config=LLAMA, lora=Lora(rank=2, target_modules=("q_proj", "up_proj"), use_dora=True)
    ),
    "some trained": Model(from_config=LLAMA, trainable=("*norm.weight",)),
    "an unknown key": Model(from_config=LLAMA | {"hiden_size": 1}),
}
KINDS = {kind: keys_of(kind) for kind in ARCHITECTURES} | {kind: keys for kind, (keys, _) in REFUSED.items()}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS |= {kind: Model(from_config={"model_type": kind} | IDS | keys) for kind, keys in KINDS.items()}


@functools.cache
def answers() -> dict[str, dict[str, Any] | None]:
    """The censuses; None for a model that is refused."""
    found: dict[str, dict[str, Any] | None] = {}
    for name, model in MODELS.items():
        found[name] = None
        with suppress(SpecError):
            found[name] = take_census(model)
    return found


def digest(answer: dict[str, Any] | None) -> str:
    """A refusal is not cached."""
    return "refused" if not answer else sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()[:16]


def test_models_whose_rows_cannot_be_split_are_named_with_the_reason() -> None:
    found = {kind: answer["unsplittable"] for kind in ARCHITECTURES if (answer := answers()[kind])}
    refused = {kind: reason for kind, reason in found.items() if reason}
    assert refused.keys() == SPLIT.keys() & found.keys() and len(found) > 80
    for kind, reason in refused.items():
        assert reason.startswith(f"rows of a {kind} model cannot be split: ") and SPLIT[kind] in reason


def test_other_answers_need_another_version() -> None:
    found = {name: digest(answer) for name, answer in answers().items()}
    check_version(GOLDEN, VERSION, "dsft/plan/census.py", found, ("transformers", "peft"))
