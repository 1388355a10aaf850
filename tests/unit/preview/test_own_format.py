"""A format of a user's own: an entry of FORMATS, a converter, and its name in a task that takes it."""

import json
from dataclasses import replace

import pytest

from dsft.data.formats.convert import CONVERT
from dsft.data.formats.message import alternating_turn, conversation
from dsft.data.rows import Row
from dsft.data.sets.load import load_data
from dsft.data.steps.steps import TrainSteps
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.batch import batch_sizes
from dsft.spec.formats import FORMATS, FormatFacts
from dsft.spec.load import load_spec
from dsft.spec.task import TASKS
from tests.unit.preview.conftest import Preview, talk

OWN = [{"dialog": ["a?", "b"], "text": "not of format text"}, {"dialog": ["c?", "dd"]}]
CASES = (OWN, ()), (OWN, ("data.train.0.format=dialog",)), ([talk("a?", "b"), talk("c?", "dd")], ())


def test_rows_of_an_own_format(preview: Preview, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(fields, found):
        turns = [alternating_turn(i, text, "dialog") for i, text in enumerate(fields.get("dialog"))]
        return Row((conversation(turns),))

    monkeypatch.setitem(CONVERT, "dialog", convert)
    facts, own, found = TASKS["sft"], FormatFacts((("dialog",),), excludes={("text",): ("text",)}), []
    monkeypatch.setitem(FORMATS, "dialog", own)
    monkeypatch.setitem(TASKS, "sft", replace(facts, formats=(*facts.formats, "dialog")))
    for rows, options in CASES:
        shown = json.loads(preview("--json", *options, rows=rows)[1])["rows"]
        spec = load_spec("spec.yaml", options)
        steps = batch_sizes(spec.train, 1, spec.data, "sft"), 0, 1
        train = load_data(spec, byte_level_tokenizer()).train
        tokens = TrainSteps(train, *steps, pad_id=0).step(0).micro_batches[0].tokens
        found.append((shown, tokens.input_ids.tolist(), tokens.targets.tolist()))
    assert found[0] == found[1] == found[2] and len(found[0][0]) == 2
