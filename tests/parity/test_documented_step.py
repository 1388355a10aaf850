"""The plain step of docs/internals/architecture.md equals the plain loop of the parity tests."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launching import ROOT
from tests.parity import plain

VOCABULARY, RATE = 32, 1e-3


def test_documented_step_is_a_step_of_the_plain_loop() -> None:
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(rows = .*?)^```$", page, re.M | re.S)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    first, other = deepcopy(model.state_dict()), deepcopy(model)
    [step] = plain.make_steps(1, [2, 1], 2, VOCABULARY)[:1]
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    names: dict[str, Any] = {"step": step, "model": model, "optimizer": optimizer, "torch": torch, "F": F}
    exec(program, names)  # noqa: S102
    expected = plain.train(
        other, plain.next_token(), [step], torch.optim.AdamW(other.parameters(), RATE), 1.0
    )
    torch.testing.assert_close(float(names["norm"]), expected.norms[0], rtol=1e-5, atol=0.0)
    for name, value in expected.weights.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, first[name]), name
