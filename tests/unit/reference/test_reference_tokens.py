"""A reference from another checkpoint whose tokenizer is the policy's, another one, or none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsft.data.tokenizer.load import add_tokens, byte_level_tokenizer
from dsft.errors import SpecError
from dsft.reference.model import proven, same_tokens
from tests.architectures.wholes import small_whole
from tests.unit.reference.small import ALONE, spec

KEY = "dpo.reference_model"


def test_a_reference_with_the_same_tokens_is_reported(tmp_path: Path) -> None:
    policy = byte_level_tokenizer()
    assert "it has no tokenizer" in same_tokens(str(tmp_path), KEY, policy)
    policy.save_pretrained(tmp_path)
    assert (
        same_tokens(str(tmp_path), KEY, policy) == "tokens: all 259 tokens have the same ids as in the policy"
    )
    add_tokens(policy, ["<new>"])
    assert "except for 1 on which it was not trained ('<new>')" in same_tokens(str(tmp_path), KEY, policy)


@pytest.mark.parametrize(
    "first, shown", [(0, "256 of the policy's 259 tokens"), (254, "2 of the policy's 259")]
)
def test_a_reference_that_reads_other_tokens_is_refused(tmp_path: Path, first: int, shown: str) -> None:
    """As many tokens, and a model of the same shape: nothing else would show it."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    logged = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = logged["model"]["vocab"]
    logged["model"]["vocab"] = {t: first + 255 - i if i >= first else i for t, i in vocabulary.items()}
    path.write_text(json.dumps(logged), encoding="utf-8")
    with pytest.raises(SpecError, match=f"dpo.reference_model: .*{shown}") as raised:
        same_tokens(str(tmp_path), KEY, byte_level_tokenizer())
    assert "read" in str(raised.value)


def test_a_multimodal_reference_is_compared_with_its_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the policy is, of whose model it need not be."""
    small_whole("gemma3").save_pretrained(tmp_path)
    monkeypatch.setattr("dsft.reference.model.check_rows", lambda *_: iter(()))
    row = SimpleNamespace(input_ids=np.arange(40), segment_lengths=[40])
    inputs: Any = SimpleNamespace(tokenizer=byte_level_tokenizer(), train=[row], pad_id=0)
    opened: Any = SimpleNamespace(engine=None, policy=None)
    asked = spec(tmp_path, {"dpo": {"reference_model": str(tmp_path)}})
    _, line = proven(opened, asked, inputs, ALONE)
    assert line.startswith("self-check passed: a small gemma3 model and its text model agree")
    monkeypatch.setattr("dsft.model.whole_proof.apart", lambda *_: 1.0)
    with pytest.raises(SpecError, match="gemma3 model gives other logits on text alone"):
        list(proven(opened, asked, inputs, ALONE))
