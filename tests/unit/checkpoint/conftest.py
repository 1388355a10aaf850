"""Groups of ranks without a process group, and checkpoints of a tiny Llama written by them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dsft.checkpoint.export import write_model_folder
from dsft.checkpoint.files import read_files
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.save import CheckpointState, save
from dsft.data.tokenizer.load import open_tokenizer
from dsft.engine.api import Fragment
from dsft.errors import DsftError
from dsft.model.build import build_model
from dsft.model.config import new_rows, resolve_config, token_facts
from dsft.model.files import digests, model_files
from dsft.spec.schema import Checkpoint, Model
from tests.launching import LATE
from tests.make import fragment_of

T = TypeVar("T")


@dataclass
class Meeting:
    """What threads share to agree as ranks do."""

    ranks: int
    values: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.values = [None] * self.ranks
        self.barrier = threading.Barrier(self.ranks, timeout=LATE)


@dataclass
class Rank:
    """One thread's `Group`."""

    rank: int
    meeting: Meeting

    def gather(self, mine: T) -> list[T]:
        self.meeting.values[self.rank] = mine
        self.meeting.barrier.wait()
        values = list(self.meeting.values)
        self.meeting.barrier.wait()
        return values

    def broadcast(self, mine: T) -> T:
        return self.gather(mine)[0]

    def first(self, work: Callable[[], T]) -> T:
        outcome: Any = (None, None)
        if self.rank == 0:
            try:
                outcome = (work(), None)
            except DsftError as error:
                outcome = (None, error)
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return result


def on_ranks(ranks: int, work: Callable[[Rank], T]) -> list[T | DsftError]:
    """`work` on each of the ranks at once: what it gives, or the DsftError that it raises."""
    meeting = Meeting(ranks)

    def one(rank: int) -> T | DsftError:
        try:
            return work(Rank(rank, meeting))
        except DsftError as error:
            return error
        except BaseException:
            meeting.barrier.abort()  # so that no other rank waits for this one
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def facts(step: int) -> CheckpointState:
    return CheckpointState(
        progress={"step": step, "applied_steps": step},
        spec={"train": {"precision": "fp32", "seed": 1}},
        batch={"global_batch_size": 8},
        data={},
        layout={},
        versions={},
    )


@dataclass(frozen=True)
class Maker:
    """Writes checkpoints of `tensors` as a number of ranks would, each owning a slice of every parameter."""

    run: Path
    model_folder: Path
    tensors: Mapping[str, Tensor]

    def fragments(self, rank: int, ranks: int) -> Iterator[Fragment]:
        for name, tensor in self.tensors.items():
            size = tensor.numel()
            start, stop = size * rank // ranks, size * (rank + 1) // ranks
            for kind, scale in (("value", 1.0), ("exp_avg", 2.0)):
                yield fragment_of(name, kind, start, scale * tensor.flatten()[start:stop])  # type: ignore[arg-type]

    def save(
        self,
        step: int,
        ranks: int = 2,
        keep_last: int | None = None,
        keep_best: int | None = None,
        loss: float | None = None,
        skipped: int = 0,
    ) -> list[str | DsftError]:
        """skipped: in a row before the save, as their gradients were not finite."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        progress = facts(step).progress | {"nonfinite_in_a_row": skipped}
        return on_ranks(
            ranks,
            lambda group: save(
                self.run, self.fragments(group.rank, ranks), shapes,
                replace(facts(step), progress=progress, held_out_loss=loss), group,
                model_files=read_files(self.model_folder),
                retention=Checkpoint(keep_last=keep_last, keep_best=keep_best),
            ),
        )  # fmt: skip

    def step(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step}"

    def names(self) -> set[str]:
        return {path.name for path in (self.run / "checkpoints").iterdir()}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 50)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1")), eos_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="session", params=[False, True], ids=["untied", "tied"])
def llama(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return make_llama(request.param)


def make_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied, eos_token_id=0, bos_token_id=0,
        )
    )  # fmt: skip


def make_maker(folder: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Maker:
    write_model_folder(folder / "run" / "model", llama.config, tokenizer)
    tensors = {name: parameter.detach().clone() for name, parameter in llama.named_parameters()}
    return Maker(folder / "run", folder / "run" / "model", tensors)


@pytest.fixture
def maker(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Maker:
    return make_maker(tmp_path, make_llama(tied=False), tokenizer)


@pytest.fixture
def maker_of(tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Maker:
    return make_maker(tmp_path, llama, tokenizer)


def make_checkpoint(model: Model, folder: Path) -> tuple[CheckpointReader, Any]:
    """Return the checkpoint of a model with a folder, as a run would write it, with adapters that do
    something; and the model that it is of."""
    tokenizer, added = open_tokenizer(model)
    facts_of_tokens = token_facts(tokenizer, added.first_id)
    policy = build_model(model, facts_of_tokens, 1, torch.float32)
    values = policy.named_trained()
    for value in values.values():
        value.data += 0.1 * torch.randn_like(value)
    config, rows = resolve_config(model, facts_of_tokens), new_rows(model, facts_of_tokens)
    assert model.name_or_path is not None
    write_model_folder(folder / "model", config, tokenizer, model.name_or_path)
    state = replace(
        facts(1),
        spec={"model": model.model_dump(mode="json"), "train": {"precision": "fp32", "seed": 1}},
        base=digests(model_files(model.name_or_path)),
        new_rows=None if rows is None else asdict(rows),
    )
    fragments = [fragment_of(n, "value", 0, value.detach().flatten()) for n, value in values.items()]
    shapes = {name: tuple(value.shape) for name, value in values.items()}

    def commit(rank: Rank) -> str:
        return save(
            folder, fragments, shapes, state, rank, model_files=read_files(folder / "model"),
            retention=Checkpoint(keep_last=None),
        )  # fmt: skip

    on_ranks(1, commit)
    return CheckpointReader.open(folder / "checkpoints" / "step-1"), policy.causal_lm.eval()
