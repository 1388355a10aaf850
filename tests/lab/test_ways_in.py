"""One small run over two hosts, one process each, started in every way that dsft knows: the rank map, the
first rows and the losses to the last digit are those of two processes on one host. Under some of the ways it
has ZeRO 3, pipeline stages, split rows or preference pairs."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsft.generate.files import generate_files
from tests.integration.runs import records
from tests.lab.hosts import ROOT, Lab, two_hosts, why_not
from tests.lab.observed import Rank, install, ranks
from tests.lab.slurm import why_not as no_slurm
from tests.launching import LATE, WITHOUT, forked
from tests.selected import tiered
from tests.specs import dims
from tests.unit.reference.small import model, rows

TRAIN = "dsft/train.py"
METRICS = ("train/loss", "train/grad_norm", "eval/loss")
STEPS = 3

SPEC = """
name: small
task: sft
model:
  from_config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: false}}
data:
  train: [{{path: "builtin:quickstart"}}]
  eval: [{{path: "builtin:quickstart-heldout"}}]
  max_length: 256
  packing: true
parallel: {{zero_stage: 1}}
train: {{global_batch_size: 12, micro_batch_size: 3, max_steps: {steps}, eval_every: {steps},
  precision: fp32}}
optim: {{learning_rate: 3.0e-3, warmup_steps: 1, weight_decay: 0.01, eps: 1.0e-4}}
checkpoint: {{every: {steps}}}
wandb: {{mode: disabled}}
cluster: {{hosts: {hosts}}}
output_dir: {folder}/runs
"""
DPO = """
name: small
task: dpo
model: {{name_or_path: {folder}/model}}
data: {{train: [{{path: {folder}/pairs.jsonl}}], eval_fraction: 0.2, max_length: 256}}
train: {{global_batch_size: 8, micro_batch_size: 2, max_steps: {steps}, eval_every: {steps}, precision: fp32}}
optim: {{learning_rate: 1.0e-2, weight_decay: 0.0, eps: 1.0e-4}}
checkpoint: {{every: {steps}}}
wandb: {{mode: disabled}}
cluster: {{hosts: {hosts}}}
output_dir: {folder}/runs
"""
TWO = "{node1: 1, node2: 1}"


@dataclass(frozen=True)
class Place:
    """`seen`: where the ranks write what they are."""

    lab: Lab
    folder: Path
    seen: Path
    spec: Path
    hostfile: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("ways_in")
    seen = tmp_path_factory.mktemp("seen")
    install(seen)
    spec = folder / "small.yaml"
    spec.write_text(SPEC.format(hosts=TWO, folder=folder, steps=STEPS))
    hostfile = folder / "hostfile"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    with two_hosts(environ={"PYTHONPATH": f"{seen}:{WITHOUT}:{ROOT}"}) as lab:
        yield Place(lab, folder, seen, spec, hostfile)


@pytest.fixture(scope="module")
def on_one_host(place: Place) -> Callable[[str], Path]:
    """By variant, the folder of its run as two processes on one host."""

    @functools.cache
    def run(variant: str) -> Path:
        words = [*words_of(place, variant), f"name={variant}-one", "cluster.hosts={localhost: 2}"]
        _well(forked(place.seen / "observed.py", 2, words))
        return place.folder / "runs" / f"{variant}-one"

    return run


def words_of(place: Place, variant: str) -> list[str]:
    """The spec's path and overrides."""
    spec, pairs = place.spec, place.folder / "pairs.jsonl"
    if variant == "dpo":
        spec = place.folder / "dpo.yaml"
        spec.write_text(DPO.format(hosts=TWO, folder=place.folder, steps=STEPS))
        if not pairs.exists():
            model(place.folder / "model")
            rows(pairs, 40)
    return [str(spec), *VARIANTS[variant]]


def deepspeed(place: Place, words: list[str]) -> str:
    command = ["deepspeed", "--hostfile", str(place.hostfile), TRAIN, *words]
    return _well(place.lab.run("node1", command))


def openmpi(place: Place, words: list[str]) -> str:
    command = ["deepspeed", "--hostfile", str(place.hostfile), "--launcher", "openmpi", TRAIN]
    return _well(place.lab.run("node1", [*command, *words]))


def torchrun_script(place: Place, words: list[str]) -> str:
    """That `dsft generate` writes: each host finds its own place. node2 is started first."""
    spec, *overrides = words
    generate_files(Path(spec), overrides, place.seen / "generated", check=False)
    (script,) = place.seen.glob("generated/scripts/launch/*.torchrun.sh")
    return _on_both(place, [], lambda number: ["bash", str(script)], cwd="/", order=(1, 0))


def torchrun(place: Place, words: list[str]) -> str:
    def argv(number: int) -> list[str]:
        ends = ["--node_rank", str(number), "--master_addr", "node1", "--master_port", "29511"]
        return ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", *ends, TRAIN]

    return _on_both(place, words, argv)


def rendezvous(place: Place, words: list[str]) -> str:
    def argv(number: int) -> list[str]:
        meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node1:29512", "--rdzv_id", "lab"]
        return ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", *meet, TRAIN]

    return _on_both(place, words, argv)


def variables(place: Place, words: list[str]) -> str:
    def environ(number: int) -> dict[str, str]:
        world = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        return world | {"MASTER_ADDR": "node1", "MASTER_PORT": "29513"}

    return _on_both(place, words, lambda number: [sys.executable, TRAIN], environ)


def flags(place: Place, words: list[str]) -> str:
    def argv(number: int) -> list[str]:
        ends = ["--node_rank", str(number), "--master_addr", "node1", "--master_port", "29514"]
        return [sys.executable, TRAIN, "--num_nodes", "2", "--num_gpus", "1", *ends]

    return _on_both(place, words, argv)


def host_variables(place: Place, words: list[str]) -> str:
    def environ(number: int) -> dict[str, str]:
        world = {"NPROC_PER_NODE": "1", "NNODES": "2", "NODE_RANK": str(number)}
        return world | {"ADDR": "node1", "PORT": "29515"}

    return _on_both(place, words, lambda number: [sys.executable, TRAIN], environ)


def srun(place: Place, words: list[str]) -> str:
    _skip_without_slurm()
    with place.lab.slurm():
        command = ["srun", "-N2", "--ntasks-per-node=1", sys.executable, TRAIN]
        return _well(place.lab.run("node1", [*command, *words]))


def sbatch(place: Place, words: list[str]) -> str:
    """The script that `dsft generate` writes, from the folder that it was made in."""
    _skip_without_slurm()
    spec, *overrides = words
    generated = ["dsft", "generate", spec, "cluster.launcher=slurm"]
    _well(place.lab.run("node1", [*generated, "--out", str(place.folder)]))
    (script,) = place.folder.glob("**/*.slurm.sh")
    out = place.folder / "sbatch.out"
    with place.lab.slurm() as slurm:
        command = ["sbatch", "--parsable", "--output", str(out), str(script), *overrides]
        job = _well(place.lab.run("node1", command, cwd=place.folder)).strip()
        state = slurm.wait(job, LATE)["JobState"]
    assert state == "COMPLETED", out.read_text()
    return out.read_text()


def dsft_launch(place: Place, words: list[str]) -> str:
    return _well(place.lab.run("node1", ["dsft", "launch", *words]))


VARIANTS = {
    "sft": [],
    "dpo": ["parallel.zero_stage=3"],
    "zero3": ["parallel.zero_stage=3"],
    "stages": ["parallel.pipeline_stages=2"],
    "split": ["parallel.sequence_parallel=2", "parallel.sequence_parallel_across_hosts=true"],
}
WAYS = {
    "deepspeed": (deepspeed, "sft"),
    "torchrun_script": (torchrun_script, "dpo"),
    "srun": (srun, "stages"),
}
OTHER_WAYS = {
    "variables": (variables, "zero3"),  # as the ranks of srun, which have Slurm's
    # tests/lab/test_supervised_faults.py always trains with it, as one host does.
    "dsft_launch": (dsft_launch, "sft"),
    "openmpi": (openmpi, "zero3"),
    "torchrun": (torchrun, "dpo"),
    "rendezvous": (rendezvous, "sft"),
    "flags": (flags, "split"),
    "host_variables": (host_variables, "sft"),
    "sbatch": (sbatch, "sft"),
}


@pytest.mark.parametrize("name", tiered([*WAYS, *OTHER_WAYS], WAYS))
def test_every_launcher_trains_as_one_host_does(
    place: Place, on_one_host: Callable[[str], Path], name: str
) -> None:
    way, variant = (WAYS | OTHER_WAYS)[name]
    expected = on_one_host(variant)
    place.lab.reset()
    way(place, [*words_of(place, variant), f"name={name}"])
    found = ranks(place.seen, name)
    assert _map(found) == {0: ("node1", 0), 1: ("node2", 0)}
    if variant == "sft":
        alone = ranks(place.seen, "sft-one")
        for rank in (0, 1):
            assert (found[rank].examples, found[rank].rows) == (alone[rank].examples, alone[rank].rows)
    _equal(place.folder / "runs" / name, expected)
    for host in ("node1", "node2"):
        assert len(records(place.folder / "runs" / name, f"host/{host}/step_time")) == STEPS
    assert place.lab.processes() == [], "nothing outlives the run"


@pytest.mark.long  # tests/parity has them on one host
def test_copies_of_the_parameters_on_each_host(place: Place) -> None:
    """Preference training of all weights at ZeRO 3 on two hosts of two ranks each, with a live reference and
    evaluations, stopped after two steps and resumed: with second copies (hpZ) all numbers are those without
    to the last bit, and a host sends the other one less, although it starts once more."""
    words = wide_pairs(place, "cluster.hosts={node1: 2, node2: 2}")
    sent = {}
    for name, size, ends in (("plain", 1, [STEPS]), ("copied", 2, [2, STEPS])):
        place.lab.reset()
        before = _sent(place.lab)
        for end in ends:
            given = [f"name={name}", f"train.max_steps={end}", f"parallel.zero_hpz_partition_size={size}"]
            dsft_launch(place, [*words, *given])
        sent[name] = _sent(place.lab) - before
        hosts = [rank.host for _, rank in sorted(ranks(place.seen, name).items())]
        assert hosts == ["node1", "node1", "node2", "node2"]
    _equal(place.folder / "runs" / "copied", place.folder / "runs" / "plain")
    assert sent["copied"] < 0.8 * sent["plain"], sent  # 207 and 290 MB; the rest is mostly gradients
    assert place.lab.processes() == []


def wide_pairs(place: Place, hosts: str) -> list[str]:
    """A spec whose matrices are sharded at ZeRO 3, and its overrides."""
    words = words_of(place, "dpo")
    model(place.folder / "wide", dims(128, 512, 4, 4, vocab_size=259))
    return [
        *words, hosts, f"model.name_or_path={place.folder}/wide", "dpo.reference=live",
        "train.global_batch_size=16", "train.micro_batch_size=1", "train.eval_every=1",
        "checkpoint.every=1", "checkpoint.keep_best=1", "optim.lr_scheduler_type=constant",
    ]  # fmt: skip


def _sent(lab: Lab) -> int:
    """Return the bytes that node1 has sent to other hosts."""
    [link] = json.loads(_well(lab.run("node1", ["ip", "-json", "-stats", "link", "show", "e0"])))
    return int(link["stats64"]["tx"]["bytes"])


def _on_both(
    place: Place,
    words: list[str],
    argv: Callable[[int], list[str]],
    environ: Callable[[int], Mapping[str, str]] = lambda number: {},
    cwd: Path | str = ROOT,
    order: Sequence[int] = (0, 1),
) -> str:
    """The same command by hand on each host; rank 0's output."""
    started = {
        number: place.lab.start(
            f"node{number + 1}", [*argv(number), *words], env=environ(number), cwd=cwd,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in order
    }  # fmt: skip
    text = {number: process.communicate(timeout=LATE)[0] for number, process in started.items()}
    assert {process.returncode for process in started.values()} == {0}, text
    return text[0]


def _well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


def _map(found: Mapping[int, Rank]) -> dict[int, tuple[str, int]]:
    assert {rank.world_size for rank in found.values()} == {2}
    return {number: (rank.host, rank.local_rank) for number, rank in sorted(found.items())}


def _equal(run: Path, other: Path) -> None:
    """Losses and norms to the last digit, the exported weights bit for bit."""
    for key in METRICS:
        given, wanted = records(run, key), records(other, key)
        assert len(wanted) >= 1 and given == wanted, key
    assert len(records(run, "train/loss")) == STEPS
    weights, expected = (load_file(folder / "export" / "model.safetensors") for folder in (run, other))
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(weights[key], tensor), key


def _skip_without_slurm() -> None:
    if reason := no_slurm():
        pytest.skip(reason)
