"""Cut a micro-batch into parts of equally many tokens, for the ranks that share its rows."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch, Segments


def part_of(batch: MicroBatch, number: int, parts: int) -> MicroBatch:
    """Return part `number` of `parts` of a micro-batch that `to` has copied to a device: ceil(B × T ÷
    parts) consecutive tokens of a packed row, with the segments of the whole row.

    Padded rows become segments of the whole row, with their padding; the row is padded to a multiple of
    `parts` by a segment of its own. Answers and a teacher's values are left out: log-probabilities are
    compared when all parts are together again. Does not wait for the device.
    """
    tokens, before = batch.tokens, batch.targets_before
    rows, length = batch.shape
    total, device = rows * length, tokens.input_ids.device
    added = -total % parts
    segments = batch.segments or Segments((length,) * rows)
    if added:
        segments = Segments((*segments.lengths, added), segments.starts and (*segments.starts, 0))
    size = (total + added) // parts
    begin = number * size

    def cut(tensor: Tensor, fill: float = 0) -> Tensor:
        flat = tensor.flatten(0, 1)
        added_rows = (0, 0) * (flat.ndim - 1) + (0, added)
        return F.pad(flat, added_rows, value=fill).narrow(0, begin, size).unsqueeze(0)

    is_padding = tokens.is_padding
    if is_padding is None and added:
        is_padding = torch.zeros(rows, length, dtype=torch.bool, device=device)
    assert before is not None, "set by MicroBatch.to"
    here = before[np.minimum(np.arange(begin, begin + size + 1), total)]
    part = tokens.map(cut)._replace(
        targets=cut(tokens.targets, NO_TARGET),
        is_padding=None if is_padding is None else cut(is_padding, True),
    )
    return MicroBatch(part, segments.to(device), targets_before=here - here[0])
