"""Tasks and an optimizer that are no part of dsft: registered, trained over ZeRO 2 and a pipeline, equal to a
plain loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.runs import records, train, write_model
from tests.launching import ROOT

SCRIPT = Path(__file__).with_name("ranking.py")
STEPS, BATCH, RATE = 4, 6, 5e-3
TEXTS = [f"{'fox ' * (1 + 7 * number % 5)}{number} jumps" for number in range(3 * BATCH)]
WEIGHTS = [0.25 * (number % 7) for number in range(len(TEXTS))]
EXAMPLES = {"ranking": BATCH, "weighted": len(TEXTS)}
DECAY, BETAS = 0.1, (0.8, 0.95)
OPTIM = {
    "ranking": f"name: sgd, learning_rate: {RATE}",
    "weighted": f"name: lion, learning_rate: {RATE}, weight_decay: {DECAY}, betas: [{BETAS[0]}, {BETAS[1]}]",
}


def test_the_page_has_this_task() -> None:
    page = (ROOT / "docs" / "internals" / "objectives.md").read_text(encoding="utf-8")
    assert f"```python\n{SCRIPT.read_text(encoding='utf-8')}```" in page


def plain(model: Path, task: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """All examples in each step, row by row, in float64: the losses, and the final weights."""
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] for text in TEXTS]
    optimizer, losses = torch.optim.SGD(causal_lm.parameters(), RATE), []
    named = list(causal_lm.named_parameters())
    momenta = [torch.zeros_like(parameter) for _, parameter in named]

    def log_probability(ids: list[int]) -> torch.Tensor:
        logits = causal_lm(input_ids=torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].sum()

    for _ in range(STEPS):
        logps = torch.stack([log_probability(ids) for ids in rows])
        if task == "ranking":
            loss = -logps.view(-1, 3).log_softmax(1)[:, 0].mean()
        else:
            weights = torch.tensor(WEIGHTS) * (1 - sum(losses) / max(1, len(losses)) / 100)
            loss = -(logps * weights).sum() / sum(len(ids) - 1 for ids in rows)
        optimizer.zero_grad()
        loss.backward()
        if task == "weighted":
            lion(named, momenta)
        else:
            optimizer.step()
        losses.append(loss.item())
    return losses, causal_lm.state_dict()


@torch.no_grad()
def lion(named: list[tuple[str, torch.nn.Parameter]], momenta: list[torch.Tensor]) -> None:
    (beta1, beta2), smooth = BETAS, 1e-3
    for (name, parameter), momentum in zip(named, momenta, strict=True):
        assert parameter.grad is not None
        mean = beta1 * momentum + (1 - beta1) * parameter.grad
        decay = 0.0 if "norm" in name else DECAY
        parameter -= RATE * (mean / (mean.abs() + smooth) + decay * parameter)
        momentum.copy_(beta2 * momentum + (1 - beta2) * parameter.grad)


@pytest.mark.parametrize(
    ("name", "parallel", "packing"),
    [("sharded", "zero_stage=2", "false"), ("stages", "pipeline_stages=2", "true")],
)
@pytest.mark.parametrize("task", EXAMPLES)
def test_third_task_equals_plain_loop(
    tmp_path: Path, task: str, name: str, parallel: str, packing: str
) -> None:
    model = write_model(tmp_path / "model")
    rows = [{"text": text, "weight": weight} for text, weight in zip(TEXTS, WEIGHTS, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"""
name: {name}
task: {task}
model: {{name_or_path: {model}}}
data:
  train: [{{path: {tmp_path}/rows.jsonl}}]
  eval: [{{path: {tmp_path}/rows.jsonl}}]
  max_length: 64
  packing: {packing}
parallel: {{zero_stage: 0}}
train:
  {{micro_batch_size: 1, max_steps: {STEPS}, precision: fp32, max_grad_norm: 0,
    global_batch_size: {EXAMPLES[task]}}}
optim: {{{OPTIM[task]}, lr_scheduler_type: constant}}
output_dir: {tmp_path}/runs
"""
    )
    result = train(spec, f"parallel.{parallel}", script=SCRIPT.with_name(f"{task}.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    losses, weights = plain(model, task)
    folder = tmp_path / "runs" / name
    assert list(records(folder, "train/loss").values()) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0] - 0.01
    assert set(records(folder, "eval/loss")) == {STEPS} and not records(folder, "eval/perplexity")
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    for key, value in weights.items():
        apart, moved = after[key].double() - value, value - before[key].double()
        assert apart.abs().max() <= 1e-6 * value.abs().max() and apart.norm() < 0.02 * moved.norm(), key
