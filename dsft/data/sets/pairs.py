"""The rows of preference pairs: a line gives two, the chosen answer's and behind it the rejected one's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import TokenRows


def rejected_answers(rows: TokenRows, count: int) -> NDArray[np.bool_]:
    """(count,) of the first `count` rows: it says what the row before it says, which stands on the same line.
    A row whose other answer could not be read is none."""
    content = rows.content[:count]
    found = np.zeros(count, np.bool_)
    for row in (np.flatnonzero(content[1:] == content[:-1]) + 1).tolist():
        found[row] = not found[row - 1] and rows.source(row) == rows.source(row - 1)
    return found
