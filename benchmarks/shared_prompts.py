"""What it gains that the two answers of a preference pair share their prompt's computation, by their lengths.

    python -m benchmarks.shared_prompts [--rounds 5] [--pairs 4] [--rows pairs.json --tokenizer FOLDER]

Forward and backward of a fresh Llama of 8 million parameters, fp32, on as many threads as OMP_NUM_THREADS
says, of one micro-batch of pairs in three layouts in turn: padded rows, packed rows, packed rows with each
prompt once. Random tokens, of so many in the prompt and in each answer; with --rows real pairs as well, cut
at --max-length, each round other ones. Prints a Markdown table: tokens computed, seconds (CPU seconds of one
process, so that other work on the machine counts less), and the ratios' median, least and most.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.paired import machine, machine_line, markdown, note
from benchmarks.sft import LLAMA
from dsft.data.sets.dataset import Dataset, Example
from dsft.data.sets.load import load_data
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.collate import collate_packed, collate_padded
from dsft.data.tokenizer.load import open_tokenizer
from dsft.engine.self_check import whole_rows
from dsft.model.attention import attend_per_segment, own_attention
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.spec.schema import Model, Spec

LENGTHS = ((8, 24), (16, 256), (64, 256), (256, 256), (512, 128), (1024, 256), (64, 768))
VOCABULARY = 6400
LAYOUTS = ("padded", "packed", "shared")
Taken = dict[str, list[tuple[int, float]]]  # of each layout: tokens and seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=4, help="in a micro-batch")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    given = parser.parse_args()
    policy = model(given.max_length)
    rows = []
    for prompt, answer in LENGTHS:
        batches = [random_pairs(seed, given.pairs, prompt, answer) for seed in range(given.rounds)]
        rows.append(row(f"{prompt} + 2 × {answer}", measure(policy, batches)))
        note(" | ".join(rows[-1]))
    if given.rows:
        dataset = real(given.rows, given.tokenizer, given.max_length)
        draw = np.random.default_rng(0)
        drawn = [draw.choice(len(dataset), given.pairs, replace=False) for _ in range(given.rounds)]
        rows.append(row("real pairs", measure(policy, [[dataset[int(i)] for i in ids] for ids in drawn])))
    print(f"{given.pairs} pairs a micro-batch, {given.rounds} rounds, {torch.get_num_threads()} thread(s).")
    print(f"{machine_line(machine(('torch', 'transformers')))}\n")
    header = ("prompt + answers", *(f"tokens {name}" for name in LAYOUTS), *(f"s {name}" for name in LAYOUTS))
    print(markdown((*header, "padded ÷ shared", "packed ÷ shared"), rows))


def row(name: str, taken: Taken) -> list[str]:
    tokens = [f"{statistics.mean(count for count, _ in taken[layout]):,.0f}" for layout in LAYOUTS]
    seconds = [f"{statistics.median(spent for _, spent in taken[layout]):.3f}" for layout in LAYOUTS]
    return [name, *tokens, *seconds, over_shared("padded", taken), over_shared("packed", taken)]


def over_shared(layout: str, taken: Taken) -> str:
    pairs = zip(taken[layout], taken["shared"], strict=True)
    ratios = [theirs / ours for (_, theirs), (_, ours) in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


# --- one micro-batch ----------------------------------------------------------------------------------------


def measure(policy: Policy, batches: Sequence[Sequence[Example]]) -> Taken:
    taken: Taken = {layout: [] for layout in LAYOUTS}
    for number, pairs in enumerate((batches[0], *batches)):
        laid = layouts(pairs)
        for layout in LAYOUTS[number % 3 :] + LAYOUTS[: number % 3]:
            with own_attention(policy.causal_lm) if layout == "padded" else nullcontext():
                spent = seconds(policy, laid[layout])
            if number:  # the first round wakes the kernels
                taken[layout].append((laid[layout].input_ids.numel(), spent))
    return taken


def layouts(pairs: Sequence[Example]) -> Mapping[str, MicroBatch]:
    ids, apart = np.arange(len(pairs)), [unshared(pair) for pair in pairs]
    return {
        "padded": collate_padded(apart, 0, pair_ids=ids),
        "packed": collate_packed(apart, 0, pair_ids=ids),
        "shared": collate_packed(pairs, 0, pair_ids=ids),
    }


def unshared(pair: Example) -> Example:
    rows = whole_rows(pair)
    ids, trained = (np.concatenate([getattr(one, name) for one in rows]) for name in ("input_ids", "trained"))
    return Example(ids, trained, tuple(len(one.input_ids) for one in rows))


def seconds(policy: Policy, batch: MicroBatch) -> float:
    """CPU seconds of a forward and a backward, with a gradient for each answer as preferences have."""
    batch = batch.to(torch.device("cpu"))
    policy.zero_grad()
    began = time.process_time()
    logps = policy(batch.tokens.input_ids, batch.tokens, batch.segments, batch.num_targets).logps
    answers = answer_logps(logps, batch)
    answers.backward(torch.arange(1.0, 1.0 + answers.numel()).view_as(answers).to(answers.dtype))
    return time.process_time() - began


# --- the model and the pairs --------------------------------------------------------------------------------


def model(max_length: int) -> Policy:
    facts = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    policy = build_model(Model(from_config=LLAMA), facts, 0, torch.float32)
    attend_per_segment(policy.causal_lm, "sdpa", max_length)
    return policy.train()


def random_pairs(seed: int, count: int, prompt: int, answer: int) -> list[Example]:
    """As dsft lays pairs that share their prompt."""
    draw = np.random.default_rng(seed)
    trained = np.arange(prompt + 2 * answer + 1) >= prompt
    trained[prompt + answer] = False  # the prompt's last token, once more
    found = []
    for _ in range(count):
        ids = draw.integers(3, VOCABULARY, prompt + 2 * answer).astype(np.int32)
        ids = np.insert(ids, prompt + answer, ids[prompt - 1])
        found.append(Example(ids, trained, (prompt + answer, 1 + answer), (0, prompt - 1)))
    return found


def real(rows: Path, tokenizer: Path, max_length: int) -> Dataset:
    with tempfile.TemporaryDirectory() as folder:
        keys: dict[str, Any] = {
            "name": "b",
            "task": "dpo",
            "model": {"from_config": LLAMA, "tokenizer": str(tokenizer)},
            "data": {
                "train": [{"path": str(rows)}],
                "max_length": max_length,
                "on_too_long": "truncate",
                "max_truncated_fraction": 1.0,
                "packing": True,
            },
            "dpo": {"share_prompts": True},
            "train": {"micro_batch_size": 1, "accumulation_steps": 1, "precision": "fp32"},
            "optim": {"learning_rate": 1e-6},
            "output_dir": folder,
        }
        spec = Spec.model_validate(keys)
        return load_data(spec, open_tokenizer(spec.model)[0]).train


if __name__ == "__main__":
    main()
