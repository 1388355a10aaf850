"""Pair prompts with the answers to other prompts, from which KTO estimates how far the policy is from its
reference. Does not import torch.

Each step of a run pairs its own prompts with its own answers: each prompt gets the answer of the example
before it, and the first one that of the last. So the pairs are a pure function of the data, the seed and the
global batch size. The examples of a held-out set are paired in a shuffled order, since rows that follow each
other in a file may have the same prompt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.sets.order import Order, epoch_order


@dataclass(frozen=True, eq=False, kw_only=True)
class Mismatched(Dataset):
    """Examples that are made of those of another dataset, m of them.

    of          the other dataset, whose examples are answers to prompts
    prompt      (m,) the example that each prompt is of
    answer      (m,) the example that each answer is of
    max_length  tokens of a prompt and an answer at most; the end of a longer answer is cut off
    name        what identifies the pairs beside `of` and their number
    """

    of: Dataset
    prompt: NDArray[np.int64]
    answer: NDArray[np.int64]
    max_length: int
    name: str

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, index: int) -> Example:
        prompt, answer = (int(which[index]) for which in (self.prompt, self.answer))
        first, second = self.of[prompt], self.of[answer]
        stop, start = self.of.prompts[prompt], self.of.prompts[answer]
        ids, trained = (
            np.concatenate([one[:stop], other[start:]])[: self.max_length]
            for one, other in ((first.input_ids, second.input_ids), (first.trained, second.trained))
        )
        return Example(ids, trained)

    def source(self, index: int) -> str:
        """Return the place of the prompt, "file:line", and that of the answer."""
        places = (self.of.source(int(which[index])) for which in (self.prompt, self.answer))
        return " with the answer of ".join(places)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        prompts = self.of.prompts
        whole = prompts[self.prompt] + self.of.lengths[self.answer] - prompts[self.answer]
        lengths: NDArray[np.int32] = np.minimum(whole, self.max_length).astype(np.int32)
        return lengths

    @property
    def widths(self) -> NDArray[np.int32]:
        return self.lengths

    @cached_property
    def fingerprint(self) -> str:
        """sha256 that identifies the pairs; the same for the first steps of a run as for all of them."""
        return hashlib.sha256(f"{self.of.fingerprint} {self.of.weights} {self.name}".encode()).hexdigest()


def of_steps(
    data: Dataset, global_batch_size: int, seed: int, total_steps: int, max_length: int
) -> Mismatched:
    """Return the pairs of all steps of a run, in the order of the steps: number i has the prompt of the i-th
    example of the run."""
    order = Order(data, global_batch_size, seed)
    steps = [order.step(index).ids for index in range(total_steps)]
    prompt, answer = (
        np.concatenate([np.zeros(0, np.int64), *ids]) for ids in (steps, [np.roll(ids, 1) for ids in steps])
    )
    name = f"seed {seed}, batch {global_batch_size}"
    return Mismatched(
        parts=(), whole=True, of=data, prompt=prompt, answer=answer, max_length=max_length, name=name
    )


def of_set(data: Dataset, max_length: int) -> Mismatched:
    """Return the pairs of a held-out set, in the order of its examples."""
    shuffled = epoch_order(len(data), seed=0, epoch=0).astype(np.int64)
    answer = np.empty_like(shuffled)
    answer[shuffled] = np.roll(shuffled, 1)
    prompt = np.arange(len(data))
    return Mismatched(
        parts=(), whole=True, of=data, prompt=prompt, answer=answer, max_length=max_length, name="one step"
    )
