"""The whole road, from a file in any format over the cache into the packed tensors of all ranks, and back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.cache.store import Cache
from dsft.data.sets.load import load_data
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Data, Source
from tests.unit.data.test_data_formats import alpaca, forms, talks
from tests.unit.data.token_rows import spec_of

TOKENIZER = byte_level_tokenizer()
PAD = TOKENIZER.pad_token_id
FORMS = (*forms([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]), "alpaca")
OF_PROMPT = ("prompt_completion", "preference", "kto")  # of these formats the last answer is trained on


def row_of(messages: list[dict[str, Any]], form: str) -> tuple[str, dict[str, Any]]:
    return ("alpaca", alpaca(messages)) if form == "alpaca" else forms(messages)[form]


def segments(batch: MicroBatch) -> Iterator[tuple[str, str]]:
    """(text, what is trained on of it) of each example of a packed micro-batch."""
    parts = zip(
        batch.tokens.input_ids[0].split(batch.segments.lengths),
        batch.tokens.targets[0].split(batch.segments.lengths),
        strict=True,
    )
    for ids, targets in parts:
        if int(ids[0]) != PAD:
            yield TOKENIZER.decode(ids), TOKENIZER.decode(targets[targets != NO_TARGET])


@given(st.lists(talks(plain=True), min_size=1, max_size=4), st.sampled_from(FORMS), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_any_talks_survive_the_whole_road(given: list[list[dict[str, Any]]], form: str, ranks: int) -> None:
    """Every example has the tokenizer's own text, and trains the assistant's words with their ends."""
    wanted = []
    name = row_of(given[0], form)[0]
    for messages in given:
        answers = [f"{m['content']}{TOKENIZER.eos_token}" for m in messages if m["role"] == "assistant"]
        trained = answers[-1:] if name in OF_PROMPT else answers
        wanted.append((TOKENIZER.apply_chat_template(messages, tokenize=False), "".join(trained)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        path.write_text("".join(json.dumps(row_of(messages, form)[1]) + "\n" for messages in given))
        source = Source.model_validate({"path": str(path), "format": name})
        for _ in ("made", "read"):
            data = Data(train=(source,), max_length=4096)
            loaded = load_data(spec_of("sft", data), TOKENIZER, Cache(Path(folder, "cache"), 0))
            sizes = BatchSizes(2 * ranks, 2, 1, ranks, 4096)
            plans = [TrainSteps(loaded.train, sizes, rank, 3, PAD) for rank in range(ranks)]
            found = [
                segment
                for plan in plans
                for index in range(plan.steps_per_epoch)
                for batch in plan.step(index).micro_batches
                for segment in segments(batch)
            ]
            assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize("how", ["truncate", "drop"])
def test_long_talks_stay_within_bounds_through_packing(how: Any, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "q" * 300}, {"role": "assistant", "content": "the answer"}]
    short = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (talk, short)))
    data = Data(train=(Source(path=str(path)),), max_length=64, on_too_long=how)
    loaded = load_data(spec_of("sft", data), TOKENIZER, Cache(tmp_path / "cache", 0))
    step = TrainSteps(loaded.train, BatchSizes(2, 2, 1, 1, 128), 0, 3, PAD).step(0)
    trained = sorted(answer for batch in step.micro_batches for _, answer in segments(batch))
    kept = ["the answer<|im_end|>"] if how == "truncate" else []
    assert trained == ["a<|im_end|>", *kept]
