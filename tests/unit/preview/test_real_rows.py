"""The preview of third-party rows that lie beside the checkout, against what their files say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.preview.conftest import Preview

SHARED = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="../shared/data is not beside this checkout")
END = "<|im_end|>"


def shown(preview: Preview, file: str, task: str, *arguments: str) -> dict[str, Any]:
    given = (
        "--rows", "25", f"data.train=[{{path: {SHARED / file}}}]", f"model.tokenizer={SHARED / 'tokenizer'}",
        *arguments,
    )  # fmt: skip
    code, out, err = preview("--json", *given, data="max_length: 16384", task=task)
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def trained(row: dict[str, Any]) -> str:
    return "".join(text for text, on in zip(row["tokens"], row["trained"], strict=True) if on)


def test_of_alpaca_rows_the_output_is_trained(preview: Preview) -> None:
    found = shown(preview, "alpaca_en_demo.json", "sft", "data.max_length=1024")
    given = json.loads((SHARED / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    assert found["examples"] == len(given) == 999 and found["problems"]["counts"] == {"duplicate": 14}
    for row, alpaca in zip(found["rows"], given, strict=False):
        assert trained(row) == alpaca["output"] + END
        assert f"user\n{alpaca['instruction']}" in "".join(row["tokens"])


def test_of_texts_all_but_the_first_token_is_trained(preview: Preview) -> None:
    found = shown(preview, "c4_demo.jsonl", "pretrain")
    lines = (SHARED / "c4_demo.jsonl").read_text(encoding="utf-8").splitlines()
    assert found["examples"] == len(lines) == 300 and not found["problems"]["counts"]
    for row, line in zip(found["rows"], lines, strict=False):
        assert "".join(row["tokens"]) == json.loads(line)["text"] + END
        assert row["trained"] == [False] + [True] * (len(row["input_ids"]) - 1)


def test_of_pairs_both_answers_are_trained_after_one_prompt(preview: Preview) -> None:
    found = shown(preview, "dpo_en_demo.json", "dpo")
    given = json.loads((SHARED / "dpo_en_demo.json").read_text(encoding="utf-8"))
    assert found["examples"] == len(given) == 300 and found["problems"]["counts"] == {"duplicate": 5}
    for row, pair in zip(found["rows"], given, strict=False):
        assert trained(row) == "".join(pair[answer]["value"] + END for answer in ("chosen", "rejected"))
        (border, _), prompt = row["segments"], row["prompt"]
        assert row["tokens"][:prompt] == row["tokens"][border : border + prompt]
        assert not any(row["trained"][:prompt] + row["trained"][border : border + prompt])
