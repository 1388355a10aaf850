"""`dsft score EXPORT --data FILE --out FILE`: write the rewards that a reward model gives the rows of a file,
or the label and the probabilities that a classifier gives them, one line of JSON for each row, in their
order.

A row with a chosen and a rejected answer gets a reward for each; other rows are conversations, prompts with
an answer, or texts, as task sft takes them, or what `dsft answer` writes. A classifier takes the rows of task
classify, which here may lack a label. The scores are those of transformers' own class.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging

from dsft.commands.chat import ADAPTER_CONFIG, load_model
from dsft.data.cache.store import tokenized_rows
from dsft.data.render.renderer import Renderer
from dsft.data.rows import Records, TokenRows, data_error
from dsft.data.tokenizer.load import load_tokenizer
from dsft.errors import MissingInputError, Problem
from dsft.spec.load import given_source
from dsft.spec.schema import Source
from dsft.spec.task import TASKS
from dsft.system.files import atomic_write, write_error
from dsft.system.run_folder import named_export

READINGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("reward", {}), ("sft", {}), ("sft", {"completion": "answer"}),
)  # fmt: skip
"""Task and columns by which rows are read: the first that fit. The last is for the file of `dsft answer`."""
Scores = NDArray[np.float64]
NAMES = {1: ("reward",), 2: ("chosen", "rejected")}


def score(folder: Path, data: str, out: Path, batch_size: int) -> str:
    """Score the rows and write `out`; an answer of more tokens than the model has positions gets null. Return
    a line for the user. Raises DataError for rows that cannot be used, MissingInputError where the folder has
    no model that gives scores, StorageError where `out` cannot be written."""
    folder = named_export(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise MissingInputError(
            f"{folder} is an adapter; write the whole model with dsft export CHECKPOINT OUT --merged."
        )
    logging.disable_progress_bar()
    model, tokenizer = load_model(str(folder), scores=True), load_tokenizer(folder)
    if model.config.pad_token_id is None:
        raise MissingInputError(
            f"{folder}: config.json has no pad_token_id, by which transformers finds the last token; add "
            "that of the tokenizer."
        )
    labels = tuple(model.config.id2label.values()) if model.config.num_labels > 1 else ()
    rows = given_source(data)
    records, without = _labeled(rows, tokenizer, labels) if labels else (_records(rows, tokenizer), "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = scores_of(model.to(device).eval(), records.rows, batch_size)
    names = labels or NAMES[records.each]
    scores = torch.from_numpy(scores).softmax(1).numpy() if labels else scores.reshape(-1, records.each)
    try:
        with atomic_write(out) as file:
            for number, row in enumerate(scores.tolist()):
                found = dict(zip(names, [None if math.isnan(one) else one for one in row], strict=True))
                line = {"source": records.source(number)} | (_classified(found) if labels else found)
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise write_error(out, error, "name another file with --out") from None
    is_scored, text = ~np.isnan(scores).any(axis=1), ""
    scored = scores[is_scored]
    if len(scored):
        means = (f"{name} {mean:.4g}" for name, mean in zip(names, scored.mean(0), strict=True))
        text = f", mean {', '.join(means)}"
    if len(scored) and labels:
        text = without or quality(scored.argmax(1), records.values("label")[is_scored], len(labels))
    if left := len(scores) - len(scored):
        text += f"; null for answers of {left:,} {records.unit}s, longer than the model's positions"
    return f"{out}: {len(scored):,} of {len(scores):,} {records.unit}s scored{text}"


def _classified(found: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the label of the highest probability, and the probabilities; null where they are not known."""
    is_known = None not in found.values()
    label = max(found, key=lambda name: found[name] or 0.0) if is_known else None
    return {"label": label, "probabilities": found if is_known else None}


def quality(found: NDArray[np.int64], labels: NDArray[np.int32], count: int) -> str:
    """Return how many of the rows get their label, and the mean of the F1 of the labels, in words. found,
    labels: (n,), which of the `count` labels each row gets and has. A label that no row gets or has does not
    count."""
    right = np.bincount(labels[found == labels], minlength=count)
    either = np.bincount(found, minlength=count) + np.bincount(labels, minlength=count)
    f1 = 2 * right[either > 0] / either[either > 0]
    return f", accuracy {right.sum() / len(labels):.4g}, macro-F1 {f1.mean():.4g}"


def scores_of(model: Any, rows: TokenRows, batch_size: int) -> Scores:
    """Return the scores of each row, (n, N), as transformers computes them for padded rows of about one
    length; NaN for a row that is longer than the model's positions."""
    lengths, found = rows.lengths, np.full((len(rows.lengths), model.config.num_labels), np.nan)
    longest = getattr(model.config, "max_position_embeddings", None) or max(lengths)
    order = [row for row in np.argsort(-lengths, kind="stable").tolist() if lengths[row] <= longest]
    for first in range(0, len(order), batch_size):
        ids = order[first : first + batch_size]
        tokens = [torch.from_numpy(rows.read(row).input_ids.astype(np.int64)) for row in ids]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, True, model.config.pad_token_id)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in tokens])[:, None]
        given = {"input_ids": padded.to(model.device), "attention_mask": mask.long().to(model.device)}
        with torch.inference_mode():
            found[ids] = model(**given).logits.double().cpu().numpy()
    return found


def _labeled(data: Source, tokenizer: Any, labels: tuple[str, ...]) -> tuple[Records, str]:
    """Read the rows for a classifier, and return why their labels are not compared; "" if they are. Raises
    DataError for those that cannot be scored."""
    read = partial(tokenized_rows, data, Renderer(tokenizer, train_on="all"), task="classify")
    rows, without = read(labels=labels), ""
    if rows.account.bad:
        place, reason = rows.account.bad[0]
        rows, without = read(), f", and not compared with labels ({place}: {reason})"
    return _checked(data.path, rows, "classify"), without


def _records(data: Source, tokenizer: Any) -> Records:
    """Read the rows for a reward model. Raises DataError for those that cannot be scored."""
    renderer = Renderer(tokenizer)
    for task, columns in READINGS:
        named = data.model_copy(update={"columns": columns | data.columns})
        rows = tokenized_rows(named, renderer, task=task)
        if not rows.account.unread:
            break
    else:
        rows = tokenized_rows(data, renderer, task=task)  # whose message fits any file
    return _checked(data.path, rows, task)


def _checked(data: str, rows: TokenRows, task: str) -> Records:
    """Return the rows as records. Raises DataError where there are none, or some that cannot be scored."""
    if rows.account.bad:
        count = rows.account.bad_rows
        problems = [Problem(*place) for place in rows.account.bad]
        raise data_error(problems, f"{count:,} row{'s' * (count > 1)} cannot be scored:", count)
    if not len(rows.lengths):
        raise data_error([Problem(data, "has no rows; name a file with rows")], "no rows to score:", 1)
    return Records(rows, TASKS[task].rows, TASKS[task].unit)
