"""Load a tokenizer from a folder or the hub, or build one of the 256 bytes.

transformers is imported only when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.data.render.template import named_template
from dsft.errors import MissingInputError
from dsft.spec.files import NO_TOKENIZER, lacks_tokenizer, unfit_model
from dsft.spec.schema import Model
from dsft.system.hub import hub_obstacle, is_hub_id
from dsft.system.json_file import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL_FILE = "tokenizer.model"
OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
"""With one of these files beside it, a `tokenizer.model` is not bare: transformers can load the folder."""
PAD_TOKEN = "<|pad|>"
TURN_START_TOKEN = "<|im_start|>"
TURN_END_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN)
BYTE_LEVEL_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Size of the byte-level vocabulary: byte b is token b; the special tokens follow."""
MOST_IDS = 2**24
"""The largest vocabularies have 2^18 tokens; the tokenizers library allocates memory for each id."""


@dataclass(frozen=True)
class AddedTokens:
    """The outcome of model.add_tokens. first_id: the id of the first new token; the others follow it."""

    new: tuple[str, ...]
    present: tuple[str, ...]
    first_id: int | None

    def __str__(self) -> str:
        """Return a message; "" if model.add_tokens is empty."""
        parts = [f"added {', '.join(self.new)}"] if self.new else []
        if self.present:
            verb = "is" if len(self.present) == 1 else "are"
            parts.append(f"{', '.join(self.present)} {verb} already in the tokenizer")
        return "; ".join(parts)


def open_tokenizer(model: Model) -> tuple[PreTrainedTokenizerBase, AddedTokens]:
    """Return the tokenizer of a spec's `model` section (model.tokenizer, else the model's own, else the
    byte-level one) with model.add_tokens added, and what became of these."""
    name = model.tokenizer or model.name_or_path
    tokenizer = byte_level_tokenizer() if name is None else load_tokenizer(name)
    return tokenizer, add_tokens(tokenizer, model.add_tokens)


def notes(tokenizer: PreTrainedTokenizerBase, added: AddedTokens) -> Iterator[str]:
    """Yield messages about a run's tokenizer."""
    if str(added):
        yield f"model.add_tokens: {added}"
    if type(tokenizer).__name__ == "SentencePieceTokenizer":
        yield (
            "tokenizer: sentencepiece itself tokenizes, since a fast tokenizer converted from it would "
            "tokenize some texts differently; exports have the converted one"
        )


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> AddedTokens:
    """Add each token that the tokenizer does not have as a special token with the next id."""
    from tokenizers import AddedToken

    tokens = tuple(dict.fromkeys(tokens))
    vocabulary = tokenizer.get_vocab()
    new = tuple(token for token in tokens if token not in vocabulary)
    if new:
        tokenizer.add_tokens(
            [AddedToken(t, special=True, normalized=False) for t in new], special_tokens=True
        )
    ids: Any = tokenizer.convert_tokens_to_ids(list(new))
    present = tuple(token for token in tokens if token in vocabulary)
    return AddedTokens(new, present, min(ids, default=None))


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id plus one. Some tokenizers skip ids, so this may exceed their number of tokens."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local folder or hub id as AutoTokenizer does, or that of a bare sentencepiece
    model: a file, or a folder with nothing else. Code that comes with it is never run.

    Raises MissingInputError if there is none, or none that can be read.
    """
    if unfit := unfit_model(name_or_path):
        raise MissingInputError(f"tokenizer {name_or_path}: {unfit}; give a folder of a tokenizer's files")
    if (model := bare_model(name_or_path)) is not None:
        from dsft.data.tokenizer.spm import load_sentencepiece

        return load_sentencepiece(model)
    if lacks_tokenizer(str(name_or_path)):
        raise MissingInputError(f"tokenizer {name_or_path}: the folder {NO_TOKENIZER}")
    if is_hub_id(str(name_or_path)):
        hub_obstacle()
    try:
        import transformers

        tokenizer_class = getattr(transformers, _without_torch(Path(name_or_path)) or "AutoTokenizer")
        tokenizer: PreTrainedTokenizerBase = tokenizer_class.from_pretrained(
            str(name_or_path), trust_remote_code=False
        )
    except Exception as error:  # errors of the libraries for damaged files have no common class
        raise MissingInputError(_no_tokenizer(str(name_or_path), error)) from error
    if num_ids(tokenizer) > MOST_IDS:
        raise MissingInputError(
            f"tokenizer {name_or_path}: it has the token id {num_ids(tokenizer) - 1:,}, and a model has a "
            f"row for each id up to it; at most {MOST_IDS:,} are supported: repair its vocabulary"
        )
    return tokenizer


def bare_model(name: str | Path) -> Path | None:
    """Return the path of the bare sentencepiece model that `name` is, or that is in the folder `name` without
    any of OTHER_FILES; else None."""
    path = Path(name)
    if path.is_file() and path.suffix == ".model":
        return path
    if (path / MODEL_FILE).is_file() and not any((path / other).exists() for other in OTHER_FILES):
        return path / MODEL_FILE
    return None


CONFIG = "tokenizer_config.json"

PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that uses `tokenizer.json` unchanged. For some model types (qwen2, qwen3_5 and others)
AutoTokenizer (5.23) uses another class even if the folder names this one, and so makes other tokens."""

UNCHANGED = {"AutoTokenizer": ["no_code.UseTokenizerJson", None]}
"""A value of auto_map in tokenizer_config.json. With it AutoTokenizer uses the class that this file names for
each of these model types. There is no such code, so trust_remote_code=True is an error."""

AUTO_MAP = (
    'tokenizer_config.json has "auto_map", with which AutoTokenizer uses tokenizer.json as it is; load it '
    "without trust_remote_code=True"
)
"""What to tell users about UNCHANGED."""

OWN_CLASS = {
    "Qwen2Tokenizer": ("qwen2", "qwen3"),
    "GPT2Tokenizer": ("gpt2",),
    "GPTNeoXTokenizer": ("gpt_neox",),
    "GemmaTokenizer": ("gemma", "gemma2"),
    "CohereTokenizer": ("cohere", "cohere2"),
}
"""Classes that AutoTokenizer uses if the folder names them -> the model types that they belong to."""


def _without_torch(folder: Path) -> str | None:
    """Return the class for a folder, if that follows from the folder's files alone, else None: the one that
    AutoTokenizer would choose, or that of PLAIN where the folder names it. AutoTokenizer itself imports torch
    and every model's config."""
    try:
        config = read_json(folder / CONFIG)
        name = config["tokenizer_class"]
        model: dict[str, Any] = {"model_type": ""}
        if (folder / "config.json").exists():
            model = read_json(folder / "config.json")
        kind = str(model["model_type"])
        # AutoTokenizer chooses by model_name as well
        if "auto_map" in config or "model_name" in model or not (folder / "tokenizer.json").is_file():
            return None
        if (folder / "tekken.json").exists():
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if name in PLAIN:
        return PLAIN[0]
    own = str(name).removesuffix("Fast")
    return own if own in OWN_CLASS and kind in ("", *OWN_CLASS[own]) else None


def keep_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path, rows: Iterable[list[int]]) -> Iterator[str]:
    """Compare the tokenizer that AutoTokenizer reads from `folder` with `tokenizer`, which was saved there,
    on the texts of `rows`. If it makes other tokens, write UNCHANGED into the folder, and yield a line for
    the user."""
    texts = [str(tokenizer.decode(row)) for row in rows]
    differ = _num_different(tokenizer, folder, texts)
    if not differ:
        return
    path = folder / CONFIG
    before = read_json(path)
    path.write_text(json.dumps(before | {"auto_map": UNCHANGED}, indent=2), encoding="utf-8")
    found = f"export: AutoTokenizer would read other tokens from {differ} of {len(texts)} rows than this run"
    if _num_different(tokenizer, folder, texts):
        path.write_text(json.dumps(before, indent=2), encoding="utf-8")
        yield f"warning: {found}; use the tokenizer that this run was given"
    else:
        yield f"{found}; so {AUTO_MAP}"


def is_unchanged(folder: Path) -> bool:
    """Return whether UNCHANGED was written into the folder."""
    path = folder / CONFIG
    return path.is_file() and read_json(path).get("auto_map") == UNCHANGED


def _num_different(tokenizer: PreTrainedTokenizerBase, folder: Path, texts: list[str]) -> int:
    from transformers import AutoTokenizer

    try:
        read = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        pairs = zip(read(texts)["input_ids"], tokenizer(texts)["input_ids"], strict=True)
        return sum(theirs != ours for theirs, ours in pairs)
    except Exception:  # of the libraries, for a tokenizer that they cannot read
        return len(texts)


def _no_tokenizer(name: str, error: Exception) -> str:
    folder = Path(name)
    if folder.is_file():
        return f"tokenizer {name}: this is a file, but not a sentencepiece .model; give its folder"
    if folder.is_dir():
        reason = str(error).strip().split("\n")[0]
        file = folder / MODEL_FILE
        bare = f", or to {file}, which sentencepiece reads" if file.is_file() else ""
        return (
            f"tokenizer {name}: the folder has no tokenizer that transformers can read ({reason}); set "
            f"model.tokenizer to another{bare}"
        )
    if not is_hub_id(name):
        return f"tokenizer {name}: there is no such folder; correct model.tokenizer or model.name_or_path"
    obstacle = hub_obstacle()
    where = f"is not in the hub's cache, and {obstacle}" if obstacle else "cannot be loaded from the hub"
    return (
        f"tokenizer {name}: there is no such folder, and it {where}; correct the name, download it first "
        f"(hf download {name}), set HF_ENDPOINT to a mirror of the hub, or log in if it is gated"
    )


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> bytes | None:
    """Return the tokenizer.model of sentencepiece in the folder, or the repository of the hub, that the
    tokenizer was read from; None where it has none."""
    from transformers.utils import cached_file

    name = tokenizer.name_or_path
    if not name or (not Path(name).is_dir() and not is_hub_id(name)):
        return None
    if not Path(name).is_dir():
        hub_obstacle()  # after it, a hub that does not answer is not asked: the cache alone counts
    try:
        return Path(str(cached_file(name, MODEL_FILE))).read_bytes()
    except (OSError, ValueError):  # there is none
        return None


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token id for padding: the pad token, else eos, else 0. Padding is never a target and comes
    after all targets, so any token will do."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer of the 256 bytes and the special tokens, without any file.

    Encoding and decoding returns every text unchanged. `save_pretrained` writes a Hugging Face folder.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    untyped: Any = bytes_to_unicode
    characters = untyped()  # byte -> the printable character for it, as in GPT-2's vocabulary
    model: Any = models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[])
    backend: Any = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return chatml_tokenizer(backend)


def chatml_tokenizer(backend: Any, special: Sequence[str] = (), **more: str) -> PreTrainedTokenizerBase:
    """Return a transformers tokenizer with SPECIAL_TOKENS, `special` ones and a ChatML template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=TURN_END_TOKEN,
        additional_special_tokens=[TURN_START_TOKEN, *special],
        chat_template=named_template("chatml"),
        clean_up_tokenization_spaces=False,
        **more,
    )
