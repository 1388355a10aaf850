"""Make examples of records with k answers to one prompt, cut so that the answers stay comparable.

Each record is k consecutive rows of its source, which begin with the tokens of the prompt; for preference
pairs they are the chosen and the rejected one. Its example has k segments: the prompt with each of the
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Records, TokenRows
from dsft.data.sets.cut import CutOptions, CutRows, small, spans_of, used_values
from dsft.data.sets.dataset import Examples, Ids, digest_of
from dsft.data.sets.stream import Stream

QUARTER = 4  # 1/4 of max_length is reserved for the prompt (less if it is shorter), however long the answers


def cut_answers(records: Records, ids: Ids, options: CutOptions) -> CutRows:
    """Cut the records `ids` (m,), ascending, to examples of which no row has more than `max_length` tokens.
    All of their answers must have targets.

    A record over `max_length` first loses the beginning of its prompt, until the longest answer fits or a
    QUARTER of max_length is left of the prompt; then all answers are cut to the same maximum length. So it
    keeps the last tokens of the prompt, the same in all rows, and the first tokens of each answer. Records
    whose answers are then all the same are left out."""
    rows, size, each, dropped = records.rows, options.max_length, records.each, ids[:0]
    too_long = records.longest[ids] > size
    if options.how != "truncate":
        dropped, ids, too_long = ids[too_long], ids[~too_long], too_long[~too_long]
    row: Ids = np.add(each * ids[:, None], np.arange(each), dtype=np.int32)
    stream = Stream(rows, row.reshape(-1))
    prompts = (stream.first_targets - stream.firsts)[::each]
    answers = stream.lengths.reshape(-1, each) - prompts[:, None]
    kept = np.minimum(prompts, np.maximum(size - answers.max(axis=1), max(1, size // QUARTER)))
    short = np.minimum(answers, (size - kept)[:, None])
    headed = (kept < prompts) & (kept > 1)
    headed[headed] = rows.first_tokens(each * ids[headed]) == options.bos
    stops = prompts[:, None] + short
    targets = stream.between(stream.firsts, stream.firsts + stops.reshape(-1)).reshape(-1, each)
    if options.pad_id is not None:
        targets = np.ones_like(targets)
    is_cut = (short < answers).any(axis=1)
    same = is_cut & (short == short[:, :1]).all(axis=1) & (each > 1)
    for record in np.flatnonzero(same).tolist():
        start, stop = int(prompts[record]), int(stops[record, 0])
        first, *others = (rows.read(one, start, stop).input_ids for one in row[record].tolist())
        same[record] = all(np.array_equal(first, other) for other in others)
    columns = [ids, small(prompts - kept + headed), small(kept), headed, small(short), small(targets)]
    columns += used_values(rows, each * ids, options)
    noted = {
        "truncated": too_long,
        "without_end": (is_cut | ~records.ended[ids]) & ~same,
        "prompt_cut": (kept < prompts) & ~same,
    }
    return CutRows(
        _examples(rows, [column[~same] for column in columns], options.share_prompts, options.pad_id),
        {"dropped": dropped, "identical": ids[same]},
        {name: ids[mask] for name, mask in noted.items()},
        int((answers - short).sum() + each * (prompts - kept).sum()),
    )


def _examples(
    rows: TokenRows, columns: Sequence[NDArray[Any]], is_shared: bool, pad_id: int | None
) -> Examples:
    """Return m records as examples. is_shared: segments after the first have only the last token of the
    prompt, and continue the first segment's other ones; pad_id: as in Examples.

    columns, of which the digest of the examples is made:
    ids      (m,) the record
    start    (m,) the token of its rows at which the prompt begins
    prompts  (m,) tokens of the prompt, with the one that `headed` puts in front
    headed   (m,) whether the rows' first token (bos) is put in front
    answers  (m, k) tokens of each answer
    targets  (m, k) targets of each answer
    …        (m,) the label, and each other field, of a task that uses them
    """
    ids, start, prompts, headed, answers, targets, *_ = columns
    scored = [] if pad_id is None else [np.array(pad_id)]
    digest, each, positions = digest_of(rows, *columns, *scored), answers.shape[1], None
    start, headed = (np.repeat(column[:, None], each, axis=1) for column in (start, headed))
    row: Ids = np.add(each * ids[:, None], np.arange(each), dtype=np.int32)
    length = prompts[:, None] + answers
    if is_shared:
        positions = np.repeat(prompts[:, None] - 1, each, axis=1)
        positions[:, 0] = 0
        start[:, 1:] += positions[:, 1:] - headed[:, 1:]
        headed[:, 1:] = False
        length -= positions
    spans = spans_of(row.reshape(-1), start.reshape(-1), length.reshape(-1), headed.reshape(-1))
    return Examples(rows, *spans, targets, digest, positions=positions, prompts=prompts, pad_id=pad_id)
