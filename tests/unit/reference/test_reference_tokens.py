"""A reference from another checkpoint whose tokenizer is the policy's, another one, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsft.data.tokenizer.load import add_tokens, byte_level_tokenizer
from dsft.errors import SpecError
from dsft.reference.model import same_tokens


def test_a_reference_that_reads_the_same_tokens_is_told(tmp_path: Path) -> None:
    policy = byte_level_tokenizer()
    assert "it has no tokenizer" in same_tokens(str(tmp_path), policy)
    policy.save_pretrained(tmp_path)
    assert same_tokens(str(tmp_path), policy) == "tokens: all 259 tokens have the same ids as in the policy"
    add_tokens(policy, ["<new>"])
    assert "except for 1 on which it was not trained ('<new>')" in same_tokens(str(tmp_path), policy)


@pytest.mark.parametrize(
    "first, said", [(0, "256 of the policy's 259 tokens"), (254, "2 of the policy's 259")]
)
def test_a_reference_that_reads_other_tokens_is_refused(tmp_path: Path, first: int, said: str) -> None:
    """As many tokens, and a model of the same shape: nothing else would show it."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = told["model"]["vocab"]
    told["model"]["vocab"] = {t: first + 255 - i if i >= first else i for t, i in vocabulary.items()}
    path.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(SpecError, match=f"dpo.reference_model: .*{said}") as raised:
        same_tokens(str(tmp_path), byte_level_tokenizer())
    assert "read" in str(raised.value)
