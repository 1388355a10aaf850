"""Extend a pretrained model's embeddings by rows for new tokens, each the mean of the old rows.

This covers input and output embedding, tied or not, and the output's bias. Only the rows that a rank keeps
are computed, and the old ones are read piece by piece, always the same pieces: the mean is the same to the
last bit on any rank, whatever it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dsft.model.weights import Shape, TensorReader

PIECE = 2**20
"""Number of elements that are read at a time."""


@dataclass(frozen=True)
class NewRows:
    """The new rows of the embeddings, `first` to `stop`. The files have `held` rows: where that is more than
    `first`, the rest are spare."""

    first: int
    stop: int
    held: int

    def __bool__(self) -> bool:
        return self.first < self.stop

    @property
    def is_resized(self) -> bool:
        return self.stop > self.held

    def __str__(self) -> str:
        number = self.stop - self.first
        new = f"{number:,} new row{'s start' if number > 1 else ' starts'}"
        rows = f"{new} from the mean of the first {self.first:,}"
        if self.is_resized:
            return f"embeddings resized from {self.held:,} to {self.stop:,} tokens: {rows}"
        return f"embeddings stay at {self.held:,} rows, of which some were spare: {rows}"


class ExtendedReader:
    """`values`, extended by the new rows."""

    def __init__(self, model: PreTrainedModel, values: TensorReader, rows: NewRows) -> None:
        """Wrap the values. `model`: on the meta device, with the new rows."""
        self.where, self.unexpected = values.where, values.unexpected
        self._values = values
        self._rows = rows
        self._held = {
            name: values.shapes[name]
            for name in vocabulary_names(model)
            if name in values.shapes and values.shapes[name][0] == rows.held
        }
        size = max(rows.held, rows.stop)
        self.shapes: Mapping[str, Shape] = {
            name: (size, *shape[1:]) if name in self._held else shape for name, shape in values.shapes.items()
        }
        self._means: dict[str, Tensor] = {}
        self.origin = values.origin

    def read(self, name: str, start: int, out: Tensor) -> None:
        """See `TensorReader.read`."""
        width = math.prod(self._held.get(name, ())[1:])
        first, stop = (self._rows.first * width, self._rows.stop * width) if name in self._held else (0, 0)
        if first == stop:
            self._values.read(name, start, out)
            return
        end = start + len(out)
        if start < first:
            self._values.read(name, start, out[: first - start])
        if end > stop:
            self._values.read(name, max(start, stop), out[max(stop - start, 0) :])
        if start < stop and end > first:
            mean = self._mean(name, width)
            for row in range(max(start, first) // width, -(-min(end, stop) // width)):
                begin, after = max(row * width, start), min((row + 1) * width, end)
                out[begin - start : after - start] = mean[begin - row * width : after - row * width]

    def _mean(self, name: str, width: int) -> Tensor:
        """Return the mean of the old rows, (width,) float32, added up in float64."""
        if name not in self._means:
            total = torch.zeros(width, dtype=torch.float64)
            first, step = self._rows.first, max(PIECE // width, 1)
            for row in range(0, first, step):
                piece = torch.empty((min(row + step, first) - row) * width)
                self._values.read(name, row * width, piece)
                total += piece.view(-1, width).sum(0, dtype=torch.float64)
            self._means[name] = (total / first).float()
        return self._means[name]


def vocabulary_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors that have a row for each token, all names of a tied one."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = [getattr(embedding, "weight", None), getattr(head, "weight", None), getattr(head, "bias", None)]
    ids = {id(tensor) for tensor in found if tensor is not None}
    return [name for name, tensor in model.named_parameters(remove_duplicate=False) if id(tensor) in ids]
