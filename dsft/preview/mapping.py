"""A preview for programs. Takes a view; gives a mapping for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsft.preview.view import ShownRow, View


def as_mapping(view: View) -> dict[str, Any]:
    """tokens: what each adds to the text, so that all of a row together are its text; segments: of a pair,
    the tokens of both answers, each with its `prompt`, or where that is `shared` with its last token."""
    batch = view.micro_batch
    return {
        "name": view.name,
        "task": view.task,
        "examples": view.examples,
        "rows": [_row(row) for row in view.rows],
        "micro_batch": None
        if batch is None
        else {"packed": batch.packed, "width": batch.width, "rows": [_placed(row) for row in batch.rows]},
        "worst": {kind.title: [_placed(row) | {"why": row.why} for row in kind.rows] for kind in view.worst},
        "ledger": dict(view.ledgers),
        "told": list(view.told),
        "lengths": None if view.lengths is None else dataclasses.asdict(view.lengths),
        "trained_share": view.trained_share,
        "batch": view.batch,
        "steps": None if view.steps is None else dataclasses.asdict(view.steps),
        "problems": {
            "counts": dict(view.problems.counts),
            "rows": [dataclasses.asdict(row) for row in view.problems.rows],
        },
        "refusal": None
        if view.refusal is None
        else {"title": view.refusal[0], "problems": [str(problem) for problem in view.refusal[1]]},
    }


def _row(row: ShownRow) -> dict[str, Any]:
    return {
        "source": row.source,
        "input_ids": [token.id for token in row.tokens],
        "tokens": [token.text for token in row.tokens],
        "trained": [token.trained for token in row.tokens],
    } | ({} if row.prompt is None else {"segments": row.segments, "prompt": row.prompt, "shared": row.shared})


def _placed(row: ShownRow) -> dict[str, Any]:
    """A row without its tokens."""
    return {
        "row": row.number,
        "source": row.source,
        "length": len(row.tokens),
        "trained": row.trained,
        "happened": row.happened,
    }
