"""Cached tokens are valid while VERSION is: rows of every format and kind of file, by every template and
mask, compared with stored ones. Truncation and packing come after the cache."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import sentencepiece.sentencepiece_model_pb2 as spm_proto

from dsft.data.cache.block import VERSION, open_block
from dsft.data.cache.store import Cache, tokenized_rows
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import named_template
from dsft.data.tokenizer.load import add_tokens, byte_level_tokenizer, load_tokenizer
from dsft.spec.files import CHAT_TEMPLATES
from dsft.spec.schema import Source
from tests.versions import check_version

GOLDEN = Path(__file__).parent / "golden" / "tokens.json"
WORDS = "Zwölf <|im_end|> \U0001f44d\n\n x = 1\t"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": [1.5, None]}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM = {"role": "system", "content": "be brief"}
TALK = [user("a"), answer(WORDS), user("b "), answer(" c")]
MESSAGES: list[Any] = [
    {"messages": TALK},
    {"messages": [SYSTEM, *TALK]},
    {"messages": [user(WORDS), answer("", tool_calls=[CALL]), {"role": "tool", "content": "2"}, answer("d")]}
    | {"tools": [TOOL]},
    {"messages": [*TALK[:-1], answer(" c", reasoning_content="so")]},
    {"messages": [user("a"), answer("b", train=False), *TALK]},
    {"messages": [{**user("a"), "content": [{"type": "text", "text": "part"}]}, answer("b")]},
    {
        "messages": [
            user("a"),
            {**answer("b"), "content": [{"type": "text", "value": "v"}], "loss_weight": 1.0},
        ]
    },
    {"messages": [user("a"), answer("b"), user("c")]},  # ends with a question
    {"messages": [user("a"), {"role": "assistant"}]},
    {"messages": "none"},
]
PAIRS: list[Any] = [
    {"prompt": "a", "chosen": WORDS, "rejected": "c"},
    {"prompt": [SYSTEM, user("a")], "chosen": [answer("b")], "rejected": [answer("c" * 50)]},
    {"chosen": TALK, "rejected": [*TALK[:-1], answer("other")]},
    {"messages": TALK, "rejected_response": "other"},
    {"prompt": "a", "chosen": "b", "rejected": "b"},
]
FORMATS: dict[str, tuple[str, list[Any]]] = {
    "messages": ("sft", MESSAGES),
    "alpaca": (
        "sft",
        [
            {"instruction": "a", "input": "b", "output": WORDS},
            {"instruction": "a", "output": "b", "system": "s", "history": [["q", "r"]]},
            {"instruction": "a"},
        ],
    ),
    "text": ("pretrain", [{"text": WORDS}, {"text": ""}, {"text": 3}]),
    "sharegpt": (
        "sft",
        [
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": WORDS}],
                "system": "s",
            }
        ],
    ),
    "prompt_completion": (
        "sft",
        [{"prompt": "a ", "completion": WORDS}, {"prompt": [user("a")], "completion": [answer("b")]}],
    ),
    "preference": ("dpo", PAIRS),
    "preference of sft": ("sft", PAIRS),
    "classify": (
        "classify",
        [
            {"text": WORDS, "label": "odd"},
            {"messages": TALK[:3], "label": 1, "tools": [TOOL]},
            {"conversations": [{"from": "human", "value": "a"}], "label": "0"},
            {"prompt": "a", "label": "calm"},
            {"prompt": TALK, "label": 0},
            {"prompt": "a", "completion": WORDS, "label": 0},
            {"prompt": [user("a")], "completion": [answer("b")], "label": 0},
            {"text": "a", "label": 2},
            {"text": "a"},
        ],
    ),
    "kto": ("sft", [{"prompt": "a", "completion": "b", "label": n % 2 == 0} for n in range(4)]),
}
LINES = [
    '{"text": "a"}', "", '{"text": NaN}', '{"text": "b", "text": "c"}', "[1]", '{"text": "d"',
    '{"text": "e"}',
]  # fmt: skip
PLAIN = pyarrow.table({"text": ["a", WORDS, "c"], "n": [1, 2, 3]})


def files(folder: Path) -> None:
    """One of every kind."""
    text = "\n".join(LINES)
    (folder / "a.jsonl").write_text(text, encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "c.json").write_text(f"[{', '.join(LINES[i] for i in (0, 2, 3, 4, 6))}]", encoding="utf-8")
    (folder / "d.txt").write_text("\ufeffone\r\n\n two", encoding="utf-8")
    (folder / "e.csv").write_text('text,n\n"a\nb",1\nc\nd,2\n', encoding="utf-8")
    (folder / "f.tsv").write_text("text\tn\na\t1\n", encoding="utf-8")
    pyarrow.parquet.write_table(PLAIN, folder / "g.parquet")
    with pyarrow.ipc.new_stream(str(folder / "h.arrow"), PLAIN.schema) as writer:
        writer.write_table(PLAIN)


def sentencepiece(path: Path, *, byte_fallback: bool, model_type: int) -> None:
    """A small model, written without training one."""
    model: Any = spm_proto.ModelProto()  # type: ignore[attr-defined]
    model.trainer_spec.model_type = model_type
    model.trainer_spec.byte_fallback = byte_fallback
    model.normalizer_spec.remove_extra_whitespaces = False
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256) if byte_fallback)]
    kinds = [2, 3, 3, *[6] * 256]
    for name, kind in zip(names, kinds, strict=False):
        model.pieces.add(piece=name, score=0.0, type=kind)
    for n, name in enumerate(["\u2581", "a", "b", "ab", "\u2581a", "x", "="]):
        model.pieces.add(piece=name, score=-float(n), type=1)
    path.write_bytes(model.SerializeToString())


def digest_of(source: Source, renderer: Renderer, task: str) -> str:
    """A digest of all that a block holds of the source's rows, and of the places of bad ones. Their reasons
    are words, of which older ones do no harm."""
    rows = tokenized_rows(source, renderer, task=task, labels=("calm", "odd"))
    folder = str(Path(source.path).parent)
    count = range(len(rows.lengths))
    columns = [[rows.read(i).input_ids.tolist(), rows.spans(np.array([i]))[1].tolist()] for i in count]
    columns += [getattr(rows, name).tolist() for name in ("trained", "ended", "content")]
    columns.append((rows.values["label"] if task == "classify" else rows.values["label"] != 0).tolist())
    read = rows.account
    places = [*(rows.source(i) for i in count), *(place for place, _ in read.bad)]
    text = json.dumps([columns, places, read.blank_lines, read.bad_rows])
    return hashlib.sha256(re.sub(re.escape(folder), "", text).encode()).hexdigest()[:16]


def test_other_tokens_need_another_version(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    found = {}
    for name, (task, rows) in FORMATS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        for train_on in ("assistant", "last", "all"):
            renderer = Renderer(tokenizer, train_on=train_on)  # type: ignore[arg-type]
            found[f"{name}, {train_on}"] = digest_of(
                Source.model_validate({"path": str(path), "format": name.split()[0]}), renderer, task
            )
    for name in CHAT_TEMPLATES:
        path = tmp_path / "messages.jsonl"
        spelled = tuple(dict.fromkeys(re.findall(r"<[^<>\s'\"{}]+>|\[/?\w+\]", named_template(name))))
        own = byte_level_tokenizer()
        own.bos_token = own.pad_token
        add_tokens(own, spelled)
        found[f"template {name}"] = digest_of(
            Source(path=str(path)), Renderer(own, named_template(name)), "sft"
        )
    (tmp_path / "kinds").mkdir()
    files(tmp_path / "kinds")
    for path in sorted((tmp_path / "kinds").iterdir()):
        found[path.name[2:]] = digest_of(
            Source(path=str(path), format="text"), Renderer(tokenizer), "pretrain"
        )
    for name in ("quickstart", "quickstart-pairs"):
        task = "sft" if name == "quickstart" else "dpo"
        found[f"builtin {name}"] = digest_of(Source(path=f"builtin:{name}"), Renderer(tokenizer), task)
    for name, kind in (("unigram", 1), ("bpe", 2)):
        sentencepiece(tmp_path / f"{name}.model", byte_fallback=True, model_type=kind)
        renderer = Renderer(load_tokenizer(tmp_path / f"{name}.model"))
        found[f"sentencepiece {name}"] = digest_of(
            Source(path=str(tmp_path / "kinds" / "a.jsonl")), renderer, "pretrain"
        )
    found["a block's file"] = layout(tmp_path)
    check_version(GOLDEN, VERSION, "dsft/data/cache/block.py", found)


def layout(folder: Path) -> str:
    """Names and types of a block's arrays."""
    tokenized_rows(
        Source(path=str(folder / "kinds" / "a.jsonl")),
        Renderer(byte_level_tokenizer()),
        task="pretrain",
        cache=Cache(folder / "cache"),
    )
    block = open_block(next(folder.glob("cache/*/block-*")))
    return ", ".join(f"{name} {values.dtype}" for name, values in sorted(block.arrays.items()))
