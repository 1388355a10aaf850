"""Cut a micro-batch into parts of equally many tokens, for the ranks that share its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, MicroBatch, borders_of
from dsft.data.steps.copies import to_device


def part_of(batch: MicroBatch, number: int, parts: int) -> MicroBatch:
    """Return part `number` of `parts` of a micro-batch that `to` has copied to a device: ceil(B × T ÷
    parts) consecutive tokens of a packed row, with the `lengths`, `starts` and `borders` of the whole row.

    Padded rows become segments of the whole row, with their padding; the row is padded to a multiple of
    `parts` by a segment of its own. Pairs are left out: log-probabilities are compared when all parts are
    together again. Does not wait for the device.
    """
    rows, length = batch.input_ids.shape
    total, device = rows * length, batch.input_ids.device
    added = -total % parts
    lengths, starts = batch.lengths or (length,) * rows, batch.starts
    if added:
        lengths, starts = (*lengths, added), starts and (*starts, 0)
    size = (total + added) // parts
    begin = number * size

    def cut(tensor: Tensor, fill: float = 0) -> Tensor:
        return F.pad(tensor.flatten(), (0, added), value=fill).narrow(0, begin, size).unsqueeze(0)

    borders, is_padding, before = batch.borders, batch.is_padding, batch.targets_before
    if borders is None or lengths != batch.lengths:
        borders = tuple(to_device(border, device) for border in borders_of(lengths, starts))
    if is_padding is None and added:
        is_padding = torch.zeros(total, dtype=torch.bool, device=device)
    assert before is not None, "set by MicroBatch.to"
    here = before[np.minimum(np.arange(begin, begin + size + 1), total)]
    return replace(
        batch,
        input_ids=cut(batch.input_ids),
        position_ids=cut(batch.position_ids),
        targets=cut(batch.targets, NO_TARGET),
        lengths=lengths,
        noise_scale=None if batch.noise_scale is None else cut(batch.noise_scale),
        targets_before=here - here[0],
        starts=starts,
        pairs=None,
        borders=borders,
        is_padding=None if is_padding is None else cut(is_padding, True),
    )
