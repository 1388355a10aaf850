"""`dsft chat FOLDER`: hold a conversation with an exported model, read from a terminal or line by line from a
pipe, and stream the answers.

On a terminal Ctrl-C stops the answer, not the program. From a pipe each line is a turn and each answer is one
line, in which a line break is written as \\n.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    TextStreamer,
)
from transformers.utils import logging

from dsft.checkpoint.export import ORIGIN, QUANTIZATION
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import prepare_messages, template_of
from dsft.data.rows import BadRowError
from dsft.data.tokenizer.load import load_tokenizer, num_ids
from dsft.errors import DsftError, MissingInputError, brief, printable
from dsft.model.config import config_around, has_scores, read_config
from dsft.model.files import model_files
from dsft.model.lora import own_names
from dsft.model.quantize import load_bitsandbytes
from dsft.model.quantize_model import EXPERTS, quantize_loaded
from dsft.model.read import load_whole
from dsft.spec.schema import QuantizedForm
from dsft.system.json_file import read_json
from dsft.system.run_folder import named_export

Message = dict[str, str]
Write = Callable[[str], None]
HELP = "/reset forgets the conversation, /system TEXT sets the system prompt (and forgets), /exit ends"
ONLY_SCORES = "gives scores and generates no text; see dsft score"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # of an adapter; peft reads the first there is


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. temperature 0 takes the likeliest token; top_p in (0, 1]; with seed None each run
    samples differently."""

    temperature: float = 0.7
    top_p: float = 0.9
    max_new_tokens: int = 512
    seed: int | None = None


@dataclass(frozen=True)
class ChatModel:
    """A model that answers, with its tokenizer; made by `load`. turn_end: the token with which the chat
    template ends an answer; an adapter's base does not always stop at it."""

    model: Any
    tokenizer: Any
    sampling: Sampling
    turn_end: int | None = None

    def answer(self, messages: list[Message], write: Write) -> str:
        """Generate the answer to a conversation and return it; `write` gets it piece by piece. When
        interrupted, return the part that is there. Raises DsftError where the template rejects the
        conversation or it fills the model's positions."""
        inputs = self._encoded(messages)
        size = inputs["input_ids"].shape[1]
        streamer = _PrintableStreamer(self.tokenizer, write)
        try:
            with torch.inference_mode():
                self.model.generate(**inputs, generation_config=self._settings(size), streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        return streamer.text

    def answers(self, prompts: list[str]) -> list[str]:
        """Generate the answers to rendered prompts as one batch. Raises DsftError where one fills the model's
        positions."""
        inputs = self.tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
        size = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            found = self.model.generate(
                **inputs.to(self.model.device), generation_config=self._settings(size)
            )
        texts: list[str] = self.tokenizer.batch_decode(found[:, size:], skip_special_tokens=True)
        return texts

    def _encoded(self, messages: list[Message]) -> Any:
        try:
            text, _ = template_of(self.tokenizer).render(prepare_messages(messages), prompt=True)
        except BadRowError as error:
            raise DsftError(f"The conversation cannot be rendered: {error}.") from None
        try:
            inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            raise DsftError("The tokenizer cannot read this conversation; /reset forgets it.") from None
        return inputs.to(self.model.device)

    def _settings(self, size: int) -> GenerationConfig:
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = self.sampling.max_new_tokens if positions is None else positions - size
        if room < 1:
            raise DsftError(
                f"The conversation has {size} tokens and the model {positions} positions; /reset forgets it."
            )
        named = self.model.generation_config.eos_token_id
        stops = {*(named if isinstance(named, list) else [named]), self.tokenizer.eos_token_id, self.turn_end}
        settings: dict[str, Any] = {
            "max_new_tokens": min(room, self.sampling.max_new_tokens),
            "do_sample": self.sampling.temperature > 0,
            "eos_token_id": sorted(stop for stop in stops if stop is not None),
            "pad_token_id": self.tokenizer.pad_token_id or 0,
        }
        if self.sampling.temperature > 0:
            settings |= {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        return GenerationConfig(**settings)


class _PrintableStreamer(TextStreamer):
    """A streamer that passes whole words to `write`, without control characters that would affect a
    terminal."""

    def __init__(self, tokenizer: Any, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write, self.text = write, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        shown = "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
        self.text += shown
        self._write(shown)


def chat(folder: Path, sampling: Sampling, system: str | None) -> None:
    """Load the model, then talk until /exit or the end of the input (Ctrl-D)."""
    chat_model, is_terminal = load(folder, sampling), sys.stdin.isatty()
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    if is_terminal:
        print(f"{folder} on {chat_model.model.device}. {HELP}.")
    lines = _typed_lines() if is_terminal else (line.rstrip("\n") for line in sys.stdin)
    write = partial(print, end="", flush=True)
    converse(chat_model, lines, system, write, one_line=not is_terminal)


def load(folder: Path, sampling: Sampling) -> ChatModel:
    """Load the model and tokenizer of an export, or of an adapter with its base model. Raises
    MissingInputError where the folder has neither, or no chat template."""
    folder = named_export(folder)
    adapter = (folder / ADAPTER_CONFIG).is_file()
    logging.disable_progress_bar()
    try:
        tokenizer: Any = load_tokenizer(folder)
        if getattr(tokenizer, "chat_template", None) is None:
            raise MissingInputError(
                f"{folder}: the tokenizer has no chat template, so it cannot chat; put a "
                "chat_template.jinja into the folder, or train with data.chat_template."
            )
        model: Any = _load_with_adapter(folder, num_ids(tokenizer)) if adapter else load_model(str(folder))
        turn_end = Renderer(tokenizer).turn_end()
    except DsftError:
        raise
    except Exception as error:  # errors of the libraries for damaged files have no common class
        raise MissingInputError(
            f"{folder} cannot be loaded ({brief(error)}); export it again with dsft export."
        ) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ChatModel(model.to(device).eval(), tokenizer, sampling, turn_end)


def load_model(name: str, dtype: torch.dtype | str = "auto", *, scores: bool = False) -> Any:
    """Load a model that answers, or one that gives scores. Raises MissingInputError for one of the other
    kind, and as `load_whole` does."""
    model_files(name)  # raises for files outside of the folder, which transformers would read
    whole = config_around(name)
    if whole is None and has_scores(read_config(name)) is not scores:
        kind = "generates text and gives no scores; see dsft chat" if scores else ONLY_SCORES
        raise MissingInputError(f"{name} is a model that {kind}.")
    loader: Any = AutoModelForCausalLM if whole is None else AutoModelForMultimodalLM
    loader = AutoModelForSequenceClassification if scores else loader
    return load_whole(loader, name, whole or read_config(name), dtype, name)[0]


def _load_with_adapter(folder: Path, num_tokens: int) -> Any:
    """Load the base model that the adapter names, with the adapter merged in. Where the tokenizer has more
    tokens than the base, the embeddings are resized; the adapter contains all of their rows. A base that was
    in 4 bits in training is quantized again, and the adapter stays beside it."""
    config = read_json(folder / ADAPTER_CONFIG)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    if not base:
        raise MissingInputError(
            f"{folder / ADAPTER_CONFIG} has no base_model_name_or_path; add the path of the base model, "
            "or export with the adapter merged."
        )
    if config.get("task_type") == "SEQ_CLS":
        raise MissingInputError(f"{folder} is an adapter of a model that {ONLY_SCORES}.")
    load_bitsandbytes()
    from peft import PeftModel  # needed for adapters only

    is_ours = (folder / ORIGIN).exists()
    quantization = _quantization(folder / ORIGIN) if is_ours else None
    try:
        model = load_model(
            base, getattr(torch, quantization["bnb_4bit_compute_dtype"]) if quantization else "auto"
        )
    except MissingInputError as error:
        raise MissingInputError(
            f"{folder} is an adapter of {base}, which cannot be loaded: {error} Run this in a folder from "
            f"which that path is valid, or correct base_model_name_or_path in {ADAPTER_CONFIG}."
        ) from None
    if not any((folder / name).exists() for name in WEIGHTS):
        raise MissingInputError(f"{folder} has no {WEIGHTS[0]}; export it again with dsft export.")
    if model.get_input_embeddings().weight.shape[0] < num_tokens:
        model.resize_token_embeddings(num_tokens, mean_resizing=False)
    if quantization:
        quantize_loaded(model, quantization, whole=bool(config.get("target_parameters")))
    with warnings.catch_warnings(), own_names() if is_ours else nullcontext():
        warnings.simplefilter("ignore", FutureWarning)  # raised by transformers about a call of peft's
        adapted = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=not quantization)
        return adapted.get_base_model() if quantization else adapted.merge_and_unload()


def _quantization(path: Path) -> Any:
    """Return what an adapter's base is quantized with (`bitsandbytes_config`), None where it is not. Raises
    MissingInputError for anything that dsft does not write."""
    origin = read_json(path)
    found: Any = origin.get(QUANTIZATION) if isinstance(origin, dict) else []
    match found:
        case None:
            return None
        case {
            "bnb_4bit_quant_type": form,
            "bnb_4bit_compute_dtype": "float32" | "bfloat16",
            "llm_int8_skip_modules": list(),
        } if form in get_args(QuantizedForm) and isinstance(found.get(EXPERTS, []), list):
            return found
    raise MissingInputError(
        f"{path}: {QUANTIZATION} is not as dsft export writes it; export the adapter again with dsft export."
    )


def converse(
    chat_model: ChatModel, lines: Iterable[str], system: str | None, write: Write, *, one_line: bool
) -> None:
    """Answer line after line, as one conversation; lines that begin with / are commands. A line that cannot
    be answered is not kept."""
    messages: list[Message] = []
    for line in lines:
        command, _, text = line.strip().partition(" ")
        if command in ("/exit", "/quit"):
            return
        if command in ("/reset", "/system"):
            system = system if command == "/reset" else text.strip() or None
            messages = []
        elif command.startswith("/"):
            write(f"{command} is not a command; {HELP}\n")
        elif command:
            opening = [{"role": "system", "content": system}] if system else []
            asked = [*(messages or opening), {"role": "user", "content": line}]
            try:
                answer = chat_model.answer(
                    asked, lambda piece: write(piece.replace("\n", "\\n") if one_line else piece)
                )
                messages = [*asked, {"role": "assistant", "content": answer}]
            except DsftError as error:
                answer = printable(f"error: {error}")
                write(answer)
            if one_line or not answer.endswith("\n"):
                write("\n")


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401  gives input() a history and arrow keys

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
