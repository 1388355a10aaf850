"""`dsft answer EXPORT --data FILE --out FILE`: generate an answer to each row of a file, in batches.

A row's prompt is its messages without the last answer, which is written beside the generated one. The answers
of a batch are appended to OUT.part-N, so that the same command continues after a stop. Batches have prompts
of about one length, and each draws from its own seed: an answer depends on the batch size, not on a stop or
on the number of processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dsft.commands.chat import ChatModel, Sampling, load
from dsft.data.formats.convert import file_rows, with_answer
from dsft.data.read.files import data_files, file_digest
from dsft.data.render.template import prepare_messages, template_of
from dsft.data.rows import BadRowError, Conversation, Message, Row, data_error
from dsft.errors import MissingInputError, Problem, StorageError
from dsft.rank.start import run_ranks
from dsft.remote import without_rank_variables
from dsft.spec.load import given_source, load_spec
from dsft.spec.schema import Source
from dsft.system.files import atomic_write, write_error
from dsft.system.run_folder import ANSWERS, named_export, named_run

TASKS = ("sft", "dpo", "kto")
"""Tasks by which rows are read: the first that takes their format."""
SHARE = "DSFT_ANSWER_SHARE"
"""Variable of the processes that `answer` starts, which answer a share of the rows."""


@dataclass(frozen=True)
class Prompt:
    """A row's prompt. place: file:line; reference: the row's own answer, None where it has none."""

    place: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    reference: str | None


def defaults(name: Path, data: str | None, out: Path | None) -> tuple[Source, Path]:
    """Return the rows of `data`, and `out`: by default the first of data.eval in a run's spec, and
    answers.jsonl of its folder, where `dsft report` finds it. Raises MissingInputError where there is no run
    or no data.eval."""
    if data is not None and out is not None:
        return given_source(data), out
    try:
        run = named_run(str(name))
    except MissingInputError:
        raise MissingInputError(f"{name} is no run, so give --data FILE and --out FILE.") from None
    held_out = () if data else load_spec(run / "spec.yaml", check_files=False).data.eval
    if not data and not held_out:
        raise MissingInputError(f"the spec of {run} has no data.eval to answer; give --data FILE.")
    return given_source(data) if data else held_out[0], out or run / ANSWERS


def answer(
    folder: Path, data: Source, out: Path, sampling: Sampling, system: str | None, batch: int, processes: int
) -> str:
    """Generate and write the answers, and return a line for the user. Raises DataError for rows without a
    prompt, MissingInputError where the folder has no model, StorageError where `out` cannot be written."""
    folder = named_export(folder)
    prompts, digest = read_prompts(data, system)
    if out.exists():
        raise StorageError(f"{out} exists; remove it, or name another file with --out.")
    weights = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.safetensors"))]
    of_rows = {"data": digest, "system": system, **data.model_dump(exclude_defaults=True)}
    own = {"export": str(folder.absolute()), "weights": weights, **of_rows}
    settings = {**own, "batch": batch, **asdict(sampling)}
    if os.environ.get(SHARE):
        number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if torch.cuda.is_available():
            torch.cuda.set_device(number % torch.cuda.device_count())
        generate(folder, prompts, _part(out, number), settings, sampling, (number, count))
        return ""
    if processes > 1:
        argv = [sys.executable, "-c", "from dsft.cli import main; main()", *sys.argv[1:]]
        environ = without_rank_variables(os.environ) | {SHARE: "1"}
        code = run_ranks(argv, environ, processes, "the same command continues.")
        if code:
            raise SystemExit(code)
    else:
        generate(folder, prompts, _part(out, 0), settings, sampling, (0, 1))
    parts = [_part(out, number) for number in range(processes)]
    answers = {number: text for part in parts for number, text in answered(part, settings).items()}
    try:
        with atomic_write(out) as file:
            for number, prompt in enumerate(prompts):
                asked = {"source": prompt.place, "prompt": list(prompt.messages)}
                line = {**asked, "answer": answers[number], "reference": prompt.reference}
                file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        for part in out.parent.glob(f"{out.name}.part-*"):
            part.unlink()
    except OSError as error:
        raise write_error(out, error, "name another file with --out") from None
    return f"{out}: answers to {len(prompts):,} rows"


def _part(out: Path, number: int) -> Path:
    return out.with_name(f"{out.name}.part-{number}")


def read_prompts(data: Source, system: str | None) -> tuple[list[Prompt], str]:
    """Return the prompts of all rows, or of `max_rows`, and a digest of the files. Raises DataError with the
    rows that have none, MissingInputError for files that are not there."""
    prompts: list[Prompt] = []
    bad: list[Problem] = []
    files = data_files(data.path)
    rows = (row for file in files for row in file_rows(file, data, TASKS, with_answer))
    for place, row, mistake in islice(rows, data.max_rows):
        try:
            if row is None:
                raise BadRowError(mistake)
            prompts.append(_prompt(row, system, place))
        except BadRowError as error:
            bad.append(Problem(place, str(error)))
    if bad:
        raise data_error(bad, f"{len(bad):,} row{'s' * (len(bad) > 1)} cannot be answered:", len(bad))
    if not prompts:
        raise data_error([Problem(data.path, "has no rows; name a file with rows")], "no rows to answer:", 1)
    return prompts, " ".join(file_digest(file) for file in files)


def _prompt(row: Row, system: str | None, place: str) -> Prompt:
    sample = row.samples[0]
    if not isinstance(sample, Conversation):
        way_out = "give messages, an instruction, or a prompt alone"
        raise BadRowError(f"it is plain text, which is trained on without the chat template; {way_out}")
    messages, reference = list(sample.messages), None
    if messages[-1]["role"] == "assistant":
        reference = messages.pop().get("content")
    if not messages:
        raise BadRowError("it has an answer but no prompt")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Prompt(place, messages, sample.tools, reference or None)


def answered(part: Path, settings: Mapping[str, Any]) -> dict[int, str]:
    """Return the answers by row that an interrupted start has written. A torn last line is ignored. Raises
    StorageError where they were made with other settings."""
    if not part.exists():
        return {}
    try:
        first, *lines = map(json.loads, _whole_lines(part) or ["null"])
        found = {row: text for line in lines for row, text in line}
    except (ValueError, TypeError):
        raise StorageError(f"{part} is damaged; remove it, or name another file with --out.") from None
    if first is not None and first != json.loads(json.dumps(settings)):
        raise StorageError(
            f"{part} has answers that were made with other rows or settings; remove it, or name another "
            "file with --out."
        )
    return found


def _whole_lines(part: Path) -> list[str]:
    return part.read_text(encoding="utf-8").split("\n")[:-1]


def generate(
    folder: Path,
    prompts: Sequence[Prompt],
    part: Path,
    settings: Mapping[str, Any],
    sampling: Sampling,
    share: tuple[int, int],
) -> None:
    """Answer one of `share` = (number, count) equal shares of the batches, each appended to `part`, unless it
    is there already."""
    known = answered(part, settings)
    model = load(folder, sampling)
    model.tokenizer.padding_side = "left"
    if model.tokenizer.pad_token is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token
    texts = [_text(model, prompt) for prompt in prompts]
    _check_lengths(model, prompts, texts)
    todo = [batch for batch in batches(texts, settings["batch"], share) if not known.keys() >= set(batch)]
    try:
        lines = _whole_lines(part) if known else [json.dumps(settings)]
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with part.open("a", encoding="utf-8") as out:
            for done, rows in enumerate(todo, 1):
                torch.manual_seed((sampling.seed or 0) + min(rows))
                found = model.answers([texts[row] for row in rows])
                out.write(json.dumps(list(zip(rows, found, strict=True))) + "\n")
                out.flush()
                print(f"{done} of {len(todo)} batches", file=sys.stderr, flush=True)
    except OSError as error:
        raise write_error(part, error, "name another file with --out") from None


def _check_lengths(model: ChatModel, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """Raise DataError for the prompts that leave no room for an answer."""
    positions = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None:
        return
    lengths = [len(ids) for ids in model.tokenizer(list(texts), add_special_tokens=False).input_ids]
    long = [
        Problem(prompt.place, f"its prompt has {length:,} tokens, and the model {positions:,} positions")
        for prompt, length in zip(prompts, lengths, strict=True)
        if length >= positions
    ]
    if long:
        raise data_error(long, f"{len(long):,} row{'s' * (len(long) > 1)} cannot be answered:", len(long))


def batches(texts: Sequence[str], size: int, share: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Yield this share of the batches, each of rows whose prompts have about one length."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    number, count = share
    for first in range(number * size, len(order), count * size):
        yield tuple(order[first : first + size])


def _text(model: ChatModel, prompt: Prompt) -> str:
    try:
        messages = prepare_messages(prompt.messages)
        return template_of(model.tokenizer).render(messages, prompt.tools, prompt=True)[0]
    except BadRowError as error:
        raise data_error([Problem(prompt.place, str(error))], "a prompt cannot be rendered:", 1) from None
