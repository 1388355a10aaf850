"""A preview for programs. Takes a view; gives a mapping for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsft.preview.view import ShownRow, View


def as_mapping(view: View) -> dict[str, Any]:
    return {
        "name": view.name,
        "task": view.task,
        "examples": view.examples,
        "rows": [_row(row) for row in view.rows],
        "ledger": list(view.ledger),
        "notes": list(view.notes),
        "lengths": None if view.lengths is None else dataclasses.asdict(view.lengths),
        "trained_share": view.trained_share,
        "steps": None if view.steps is None else dataclasses.asdict(view.steps),
    }


def _row(row: ShownRow) -> dict[str, Any]:
    return {
        "source": row.source,
        "input_ids": [token.id for token in row.tokens],
        "tokens": [token.text for token in row.tokens],
        "trained": [token.trained for token in row.tokens],
    }
