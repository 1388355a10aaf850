"""Cut preference pairs to examples in which both answers stay comparable.

Each pair is two consecutive rows of its source, the chosen and the rejected one, which begin with the same
prompt tokens. Its example has two segments: the prompt with the chosen answer, and the prompt with the
rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Records, TokenRows
from dsft.data.sets.cut import CutOptions, CutRows, small, spans_of
from dsft.data.sets.dataset import Examples, Ids, digest_of
from dsft.data.sets.stream import Stream

CHOSEN, REJECTED = 0, 1
QUARTER = 4  # 1/4 of max_length is reserved for the prompt (less if it is shorter), however long the answers


def cut_pairs(records: Records, ids: Ids, options: CutOptions) -> CutRows:
    """Cut the pairs `ids` (k,), ascending, to examples of which neither row has more than `max_length`
    tokens. Both answers of each pair must have targets.

    A pair over `max_length` first loses the beginning of its prompt, until the longer answer fits or a
    QUARTER of max_length is left of the prompt; then both answers are cut to the same maximum length. So it
    keeps the last tokens of the prompt, the same in both rows, and the first tokens of each answer."""
    rows, size, dropped = records.rows, options.max_length, ids[:0]
    too_long = records.longest[ids] > size
    if options.how != "truncate":
        dropped, ids, too_long = ids[too_long], ids[~too_long], too_long[~too_long]
    row = np.stack([2 * ids, 2 * ids + 1], axis=1)
    stream = Stream(rows, row.reshape(-1))
    prompts = (stream.first_targets - stream.firsts)[::2]
    answers = stream.lengths.reshape(-1, 2) - prompts[:, None]
    kept = np.minimum(prompts, np.maximum(size - answers.max(axis=1), max(1, size // QUARTER)))
    short = np.minimum(answers, (size - kept)[:, None])
    headed = (kept < prompts) & (kept > 1)
    headed[headed] = rows.first_tokens(2 * ids[headed]) == options.bos
    stops = prompts[:, None] + short
    targets = stream.between(stream.firsts, stream.firsts + stops.reshape(-1)).reshape(-1, 2)
    is_cut = (short < answers).any(axis=1)
    same = is_cut & (short[:, CHOSEN] == short[:, REJECTED])
    for pair in np.flatnonzero(same).tolist():
        start, stop = int(prompts[pair]), int(stops[pair, CHOSEN])
        chosen, rejected = (rows.read_part(one, start, stop).input_ids for one in row[pair].tolist())
        same[pair] = np.array_equal(chosen, rejected)
    columns = (ids, small(prompts - kept + headed), small(kept), headed, small(short), small(targets))
    noted = {
        "truncated": too_long,
        "without_end": (is_cut | ~records.ended[ids]) & ~same,
        "prompt_cut": (kept < prompts) & ~same,
    }
    return CutRows(
        _examples(rows, [column[~same] for column in columns], options.share_prompts),
        {"dropped": dropped, "identical": ids[same]},
        {name: ids[mask] for name, mask in noted.items()},
        int((answers - short).sum() + 2 * (prompts - kept).sum()),
    )


def _examples(rows: TokenRows, columns: Sequence[NDArray[Any]], is_shared: bool) -> Examples:
    """Return m pairs as examples. columns: the numbers that identify them, (m,): the pair, the token of its
    rows at which the prompt starts, the tokens of the prompt, whether the rows' first token (bos) is put in
    front, as one of these; (m, 2): tokens and targets of both answers. is_shared: the second segment has only
    the last token of the prompt, and continues the others in the first."""
    ids, start, prompts, headed, answers, targets = columns
    digest = digest_of(rows, *columns)
    row, start, headed = (np.stack([column, column], axis=1) for column in (2 * ids, start, headed))
    row[:, REJECTED] += 1
    length, positions = prompts[:, None] + answers, None
    if is_shared:
        positions = np.stack([np.zeros_like(prompts), prompts - 1], axis=1)
        start[:, REJECTED] += prompts - 1 - headed[:, REJECTED]
        headed[:, REJECTED] = False
        length -= positions
    spans = spans_of(row.reshape(-1), start.reshape(-1), length.reshape(-1), headed.reshape(-1))
    return Examples(rows, *spans, targets, digest, positions=positions)
