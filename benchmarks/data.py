"""The data path: rows per second beside datasets.map, over cores, memory and waiting, padding.

    python -m benchmarks.data speed [--rounds 5] [--rows 6000]      tokens and masks per core; more processes
    python -m benchmarks.data large [--gigabytes 5] [--folder DIR]  memory; the start with all tokens there
    python -m benchmarks.data dealing FILE                          padding and imbalance, 128 rows, 2 ranks
    python -m benchmarks.data waiting                               the loader's share of the quickstart

`--tokenizer FOLDER` where the one of the tests (shared/data/tokenizer beside the repository) is not there.

speed: each sample is a fresh process on one core (two for `2 processes`, …) without threads of the tokenizers
library; seconds begin after the imports, with a tokenizer that has been used once.

own template        dsft: the file to blocks on the disk, masks by the tokenizer's own template
marked template     the same by a template with {% generation %} marks
map, plain          datasets.map, batched: the template's text, and its ids, no mask; to its Arrow file
map, with masks     datasets.map, batched: apply_chat_template(return_assistant_tokens_mask=True), marked
N processes         dsft, own template, by N workers, their start included; four blocks of 1 MB a worker

large: a generated file of texts, and a table of words in the place of a tokenizer, for speed. The memory of
all processes together and of the largest is looked at once a second (resident: shared pages are counted in
each; proportional: once).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import paired

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT.parent / "shared" / "data" / "tokenizer"
PACKAGES = ("tokenizers", "transformers", "datasets", "numpy")
MARKED = "chatml"
BLOCK_BYTES = 1 << 20
WORDS = 5000
SYLLABLES = "ba de ki lo mu ra se ti vo nu pa ge fi so lu ma re di ko tu".split()


# --- rows -------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: int | None = None, num_bytes: int = 0) -> int:
    """Alpaca rows of words of all lengths, the same for the same numbers; `rows` of them, or `num_bytes`."""
    draw, texts = random.Random(0), sentences()
    written = count = 0
    with path.open("w", encoding="utf-8", buffering=1 << 20) as out:
        while count < rows if rows is not None else written < num_bytes:
            row = {"instruction": f"{count}: {draw.choice(texts)}", "output": f"{draw.choice(texts)}."}
            written += out.write(json.dumps(row) + "\n")
            count += 1
    return count


def write_documents(path: Path, num_bytes: int) -> int:
    """Texts of some 3 kB, up to 30."""
    draw, texts = random.Random(0), sentences()
    written = count = 0
    with path.open("w", encoding="utf-8", buffering=1 << 20) as out:
        while written < num_bytes:
            parts = draw.choices(texts, k=round(draw.lognormvariate(1.5, 0.7)) + 1)
            written += out.write(json.dumps({"text": f"{count} {' '.join(parts)}"}) + "\n")
            count += 1
    return count


def sentences() -> list[str]:
    draw, words = random.Random(0), made_words()
    return [" ".join(draw.choices(words, k=round(draw.lognormvariate(4.2, 0.8)) + 1)) for _ in range(20_000)]


def made_words() -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(WORDS)]


class Words:
    """In the place of a tokenizer: each word's number, from a table."""

    eos_token_id = bos_token_id = None

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(dict.fromkeys(made_words()), start=1)}


class WordRenderer:
    """In the place of `dsft.data.render.renderer.Renderer`: each word a token, all of them trained."""

    digest = "words"
    tokenizer = Words()

    def __init__(self) -> None:
        self._ids = self.tokenizer.get_vocab()

    def render(self, samples: list[Any]) -> list[Any]:
        import numpy as np

        from dsft.data.rows import Rendered

        rendered = []
        for sample in samples:
            words = "".join(part for part, _ in sample.parts).split()
            ids = np.array([self._ids.get(word, 0) for word in words], dtype=np.int32)
            rendered.append(Rendered(ids, np.ones(len(ids), dtype=np.bool_)))
        return rendered


def load_tokenizer(folder: Path, template: str | None = None) -> Any:
    from transformers import PreTrainedTokenizerFast

    from dsft.data.render.template import choose_template

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    choose_template(tokenizer, template)
    tokenizer("a first text")
    return tokenizer


# --- one sample -------------------------------------------------------------------------------------------


def sample(variant: str, tokenizer: Path, path: Path) -> dict[str, float]:
    marked = variant in ("marked template", "map, with masks")
    loaded = load_tokenizer(tokenizer, MARKED if marked else None)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        work = map_rows if variant.startswith("map") else dsft_rows
        rows, tokens, seconds, cpu = work(variant, loaded, path, Path(made))
    return {"rows": rows, "tokens": tokens, "per_second": rows / seconds, "per_cpu_second": rows / cpu}


def dsft_rows(variant: str, tokenizer: Any, path: Path, folder: Path) -> tuple[int, int, float, float]:
    from dsft.data.cache.store import Cache, tokenized_rows
    from dsft.data.read import files
    from dsft.data.render.renderer import Renderer
    from dsft.spec.schema import Source

    workers = int(variant.split()[0]) if variant.endswith("processes") else 0
    files.block_starts = partial(files.block_starts, every=BLOCK_BYTES)
    began, before = time.perf_counter(), cpu_seconds()
    rows = tokenized_rows(
        Source(path=str(path)), Renderer(tokenizer), task="sft", cache=Cache(folder, workers)
    )
    seconds = time.perf_counter() - began, cpu_seconds() - before
    return len(rows.lengths), int(rows.lengths.sum()), *seconds


def map_rows(variant: str, tokenizer: Any, path: Path, folder: Path) -> tuple[int, int, float, float]:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("json", data_files=str(path), cache_dir=str(folder), split="train")

    def talks(batch: dict[str, list[str]]) -> list[list[dict[str, str]]]:
        pairs = zip(batch["instruction"], batch["output"], strict=True)
        return [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            for asked, answered in pairs
        ]

    def plain(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = tokenizer.apply_chat_template(talks(batch), tokenize=False)
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    def with_masks(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = tokenizer.apply_chat_template(
            talks(batch), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": found["input_ids"], "trained": found["assistant_masks"]}

    work = with_masks if variant == "map, with masks" else plain
    began, before = time.perf_counter(), cpu_seconds()
    made = data.map(
        work,
        batched=True,
        remove_columns=data.column_names,
        cache_file_name=str(folder / "made.arrow"),
        new_fingerprint="made",  # else it would hash the tokenizer, in its own time
    )
    seconds = time.perf_counter() - began, cpu_seconds() - before
    return len(made), sum(len(ids) for ids in made["input_ids"]), *seconds


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


# --- speed ------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    processes = sorted({2, cores} - {1}) if cores > 1 else []
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        small, large = Path(made, "small.jsonl"), Path(made, "large.jsonl")
        write_rows(small, options.rows)
        write_rows(large, num_bytes=BLOCK_BYTES * 4 * max(processes, default=1))
        variants = {name: (small, 1) for name in PER_CORE}
        variants |= {f"{n} processes": (large, n) for n in (1, *processes)}
        commands = {
            name: [
                *taskset(n), sys.executable, "-m", "benchmarks.data",
                "sample", name, str(path), "--tokenizer", str(options.tokenizer),
            ]
            for name, (path, n) in variants.items()
        }  # fmt: skip
        environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        found = paired.measure(commands, options.rounds, environment)
    keys = ("per_cpu_second", "per_second")
    rows = [[name, *(paired.spread(paired.column(found[name], key), 0) for key in keys)] for name in variants]
    header = ["how", "rows per second of CPU (min / median / max)", "rows per second"]
    pairs = [("own template", "map, plain"), ("marked template", "map, plain")]
    pairs += [("marked template", "map, with masks"), *((f"{n} processes", "1 processes") for n in processes)]
    ratios = [
        f"{over} ÷ {under}, {key}: {paired.ratio(found, key, over, under)}"
        for over, under in pairs
        for key in keys
    ]
    return [paired.markdown(header, rows), "", *ratios]


PER_CORE = ("own template", "marked template", "map, plain", "map, with masks")


def taskset(cores: int) -> list[str]:
    """One core of this process's, or some: so that a sample cannot take more than it says."""
    mine = sorted(os.sched_getaffinity(0))[:cores]
    return ["taskset", "--cpu-list", ",".join(map(str, mine))]


# --- large ------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """MB: of all processes, and of the largest one, at their peaks."""

    resident: float = 0.0
    proportional: float = 0.0
    largest: float = 0.0
    largest_own: float = 0.0


@contextmanager
def watched(process: psutil.Process) -> Iterator[Memory]:
    """Looked at once a second while the block runs."""
    memory, done = Memory(), threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            found = []
            for one in (process, *process.children(recursive=True)):
                try:
                    full = one.memory_full_info()
                except psutil.Error:
                    continue
                found.append((full.rss, full.pss, full.uss))
            if found:
                memory.resident = max(memory.resident, sum(rss for rss, _, _ in found) / 1e6)
                memory.proportional = max(memory.proportional, sum(pss for _, pss, _ in found) / 1e6)
                memory.largest = max(memory.largest, max(rss for rss, _, _ in found) / 1e6)
                memory.largest_own = max(memory.largest_own, max(uss for _, _, uss in found) / 1e6)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield memory
    finally:
        done.set()
        thread.join()


def large(options: argparse.Namespace) -> list[str]:
    """In turn, each in a fresh process: all is made, and twice all is there."""
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        path, folder = Path(made, "large.jsonl"), Path(made, "cache")
        rows = write_documents(path, int(options.gigabytes * 1e9))
        paired.note(f"{rows:,} rows, {path.stat().st_size / 1e9:.2f} GB")
        time.sleep(3)  # the digest of a file that was written just now is not remembered
        lines = [str(read_in_turn(path, folder, options.workers)) for _ in range(3)]
        kept = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return [f"{rows:,} rows, tokens {kept / 1e9:.2f} GB", *lines]


def read_in_turn(path: Path, folder: Path, workers: int) -> dict[str, float]:
    """What `read` gives in a fresh process, and the memory of it and of its workers in MB."""
    command = [sys.executable, "-m", "benchmarks.data", "read", str(path), "--folder", str(folder)]
    with subprocess.Popen(
        [*command, "--workers", str(workers)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        with watched(psutil.Process(process.pid)) as memory:
            stdout, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"exit code {process.returncode}")
    found: dict[str, float] = json.loads(stdout.strip().splitlines()[-1]) | asdict(memory)
    paired.note(json.dumps(found))
    return found


def read(options: argparse.Namespace) -> dict[str, float]:
    """The start of a run, and 20,000 of its rows in the order of a run."""
    from benchmarks.data import WordRenderer as Stand  # not of __main__, for the workers
    from dsft.data.cache.store import Cache
    from dsft.data.sets import load
    from dsft.data.sets.order import epoch_order
    from dsft.spec.schema import Data, Spec

    last = time.monotonic()

    def progress(pace: Any) -> None:
        nonlocal last
        if time.monotonic() - last > 30:
            last = time.monotonic()
            paired.note(f"{pace}")

    load.Renderer = lambda *_, **__: Stand()  # type: ignore[misc,assignment]
    data = Data(train=[{"path": options.file}], max_length=4096, on_too_long="split")  # type: ignore[list-item]
    spec = Spec.model_construct(task="pretrain", data=data)
    began = time.perf_counter()
    cache = Cache(options.folder, options.workers, paired.note, progress)
    loaded = load.load_data(spec, Stand.tokenizer, cache)
    start, after_start = time.perf_counter() - began, paired.resident_bytes()
    began = time.perf_counter()
    order = epoch_order(len(loaded.train), 0, 0)
    ordered = time.perf_counter() - began
    began = time.perf_counter()
    tokens = sum(len(loaded.train[int(i)].input_ids) for i in order[:20_000])
    seconds = time.perf_counter() - began
    return {
        "examples": len(loaded.train),
        "tokens": int(loaded.train.lengths.sum(dtype="int64")),
        "start_seconds": start,
        "order_seconds": ordered,
        "microseconds_a_row": seconds / 20_000 * 1e6,
        "read_tokens": tokens,
        "resident_after_start": after_start / 1e6,
        "resident_at_end": paired.resident_bytes() / 1e6,
    }


# --- dealing ----------------------------------------------------------------------------------------------


def dealing(options: argparse.Namespace) -> list[str]:
    """Of the tokens' places that 2 ranks compute in an epoch, the share that holds no token: padding, and the
    places for which one rank waits for the other, micro-batch by micro-batch."""
    from dsft.data.cache.store import tokenized_rows
    from dsft.data.render.renderer import Renderer
    from dsft.data.sets.order import Order
    from dsft.spec.schema import Source

    tokenizer = load_tokenizer(options.tokenizer)
    lengths = tokenized_rows(Source(path=str(options.file)), Renderer(tokenizer), task="sft").lengths
    order = Order(argparse.Namespace(sizes=(len(lengths),), weights=None), 128, 42)
    steps = [lengths[order.step(i).ids] for i in range(order.steps_per_epoch)]
    rows = []
    for micro in (1, 2, 4, 8):
        padded = lost(steps, micro, None)
        packed = lost(steps, micro, micro * options.max_length)
        rows.append([str(micro), *(f"{share:.2%}" for share in (*padded, *packed))])
    header = ["micro-batch", "padded: padding", "+ imbalance", "packed: padding", "+ imbalance"]
    return [paired.markdown(header, rows)]


def lost(steps: list[Any], micro: int, budget: int | None) -> tuple[float, float]:
    """Shares of padding, and of padding with imbalance."""
    import numpy as np

    from dsft.data.steps.collate import EMPTY_ROW_LENGTH
    from dsft.data.steps.pack import assign

    sizes = argparse.Namespace(micro_batch_size=micro, data_parallel=2, tokens_per_micro_batch=budget)
    tokens = places = computed = 0
    for step in steps:
        tokens += int(step.sum())
        rows, ids = argparse.Namespace(lengths=step, widths=step), np.arange(len(step))
        ranks = [[step[members] for members in assign(rows, ids, sizes, rank)] for rank in range(2)]
        for together in zip(*ranks, strict=True):
            found = [size_of(one, budget is not None) or EMPTY_ROW_LENGTH for one in together]
            places += sum(found)
            computed += 2 * max(found)
    return 1 - tokens / places, 1 - tokens / computed


def size_of(lengths: Any, is_packed: bool) -> int:
    if len(lengths) == 0:
        return 0
    return int(lengths.sum() if is_packed else len(lengths) * lengths.max())


# --- waiting ----------------------------------------------------------------------------------------------


def waiting(options: argparse.Namespace) -> list[str]:
    """perf/data_wait_fraction of the quickstart's steps, on two ranks."""
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "dsft/train.py"]
        spec = ["specs/quickstart.yaml", f"output_dir={made}", "wandb.mode=disabled"]
        subprocess.run([sys.executable, *words, *spec], cwd=ROOT, check=True, stdout=sys.stderr)
        text = Path(made, "quickstart", "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    shares = [record["perf/data_wait_fraction"] for record in records if "perf/data_wait_fraction" in record]
    return [f"{len(shares)} steps, min / median / max of the wait: {paired.spread(shares, 4)}"]


COMMANDS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "speed": speed, "large": large, "dealing": dealing, "waiting": waiting,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The data path: speed, memory, waiting, padding.")
    parser.add_argument("command", choices=(*COMMANDS, "sample", "read"))
    parser.add_argument("words", nargs="*", help="dealing FILE; sample VARIANT FILE; read FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="a disk with room for the files")
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    options = parser.parse_args()
    options.file = options.words[-1] if options.words else None
    if options.command == "sample":
        print(json.dumps(sample(options.words[0], options.tokenizer, Path(options.file))), flush=True)
    elif options.command == "read":
        print(json.dumps(read(options)), flush=True)
    else:
        print(
            "\n".join(
                [*COMMANDS[options.command](options), "", paired.machine_line(paired.machine(PACKAGES))]
            )
        )


if __name__ == "__main__":
    main()
