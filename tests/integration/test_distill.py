"""Distillation: whole runs in several divisions of the same steps, equal to a plain loop over the global
batch whose teacher is in memory."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from dsft.data.sets.order import epoch_order
from dsft.reference.target_rows import mapped
from tests.integration.runs import prompt_rows, train, trained, write_model, write_small_task
from tests.integration.runs import series as series_of
from tests.integration.test_reference import interrupted
from tests.selected import tiered

ROWS, BATCH, STEPS, SEED = 10, 4, 4, 42
TRAINED = f"global_batch_size: {BATCH}, max_steps: {STEPS}, seed: {SEED}"
WEIGHT, BETA, TEMPERATURE, RATE = 0.7, 0.3, 1.5, 0.05
WORDS = "red fox jumps over a lazy dog and then it sleeps".split()
ANSWERS = [" ".join(WORDS[n % 5 : n % 5 + 1 + 3 * n % 7]) for n in range(ROWS)]
LINES = [
    {"prompt": " ".join(WORDS[: 1 + n % 4]), "completion": f" {answer}"} for n, answer in enumerate(ANSWERS)
]
NAMES = ("kd_loss", "nll_loss")
Row = tuple[list[int], list[int]]  # the tokens of a prompt and of an answer


# --- the plain loop, one sequence at a time, in float64 ---------------------------------------------------


def rows_of(model: Path) -> list[Row]:
    return prompt_rows(model, LINES)


def logits_of(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits


def divergence(teacher: Tensor, student: Tensor, kind: str) -> Tensor:
    """Of logits (n, V), over the whole vocabulary, as TRL's GKDTrainer computes it. (n,)"""
    p, q = (F.log_softmax(logits / TEMPERATURE, -1) for logits in (teacher, student))
    if kind == "jsd":
        mixture = torch.logsumexp(torch.stack([p + math.log(BETA), q + math.log(1 - BETA)]), 0)
        parts = [F.kl_div(mixture, one, reduction="none", log_target=True).sum(-1) for one in (p, q)]
        return BETA * parts[0] + (1 - BETA) * parts[1]
    target, other = (p, q) if kind == "forward_kl" else (q, p)
    return F.kl_div(other, target, reduction="none", log_target=True).sum(-1)


def figures(student: nn.Module, teacher: nn.Module, rows: list[Row], ids: list[int], kind: str) -> Any:
    """The loss of a global batch, and its metrics."""
    divergences, likelihoods = [], []
    for prompt, answer in (rows[n] for n in ids):
        logits = logits_of(student, prompt, answer)
        with torch.no_grad():
            known = logits_of(teacher, prompt, answer)
        divergences.append(divergence(known, logits, kind))
        likelihoods.append(F.cross_entropy(logits, torch.tensor(answer), reduction="none"))
    kd, nll = torch.cat(divergences).mean(), torch.cat(likelihoods).mean()
    return WEIGHT * kd + (1 - WEIGHT) * nll, dict(zip(NAMES, (kd.item(), nll.item()), strict=True))


def plain(student: Path, teacher: Path, kind: str) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """The loss and the metrics of each step, those of the held-out rows at the end, and the weights."""
    policy, known = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
        for path in (student, teacher)
    )
    optimizer, found, rows = torch.optim.SGD(policy.parameters(), RATE), [], rows_of(student)
    for step in range(STEPS):
        epoch, place = divmod(step, math.ceil(ROWS / BATCH))
        ids = epoch_order(ROWS, SEED, epoch)[place * BATCH : (place + 1) * BATCH].tolist()
        loss, metrics = figures(policy, known, rows, ids, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append({"loss": loss.item()} | metrics)
    loss, metrics = figures(policy, known, rows, list(range(ROWS)), kind)
    return found, {"loss": loss.item()} | metrics, policy.state_dict()


# --- the runs ---------------------------------------------------------------------------------------------


def write_teacher(folder: Path) -> Path:
    """Another model with the same tokenizer, whose probabilities are far from even."""
    write_model(folder, hidden_size=48, intermediate_size=48, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distill")
    return write_model(folder / "student"), write_teacher(folder / "teacher")


@pytest.fixture(scope="module")
def vocabulary(models: tuple[Path, Path]) -> int:
    return int(json.loads((models[0] / "config.json").read_text())["vocab_size"])


def write_spec(folder: Path, models: tuple[Path, Path], name: str, top_k: int, kind: str) -> Path:
    student, teacher = models
    rows, spec = folder / "rows.jsonl", folder / f"{name}.yaml"
    rows.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    beta = f", beta: {BETA}" if kind == "jsd" else ""
    section = f"reference_model: {teacher}, top_k: {top_k}, loss_type: {kind}{beta}"
    section += f", temperature: {TEMPERATURE}, weight: {WEIGHT}"
    return write_small_task(spec, "distill", student, rows, section, TRAINED, RATE)


def series(folder: Path, part: str = "train") -> list[dict[str, float]]:
    return series_of(folder, NAMES, part)


def check(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), number


LIVE = "distill.reference=live"
CASES = {
    "alone": (1, "forward_kl", ()),
    "micro": (2, "reverse_kl", ("train.micro_batch_size=2", "parallel.zero_stage=1", LIVE)),
    "packed": (2, "jsd", ("data.packing=true", "parallel.zero_stage=2")),
    "sharded": (2, "jsd", ("parallel.zero_stage=3", "train.micro_batch_size=2")),
    "live3": (2, "forward_kl", ("parallel.zero_stage=3", "data.packing=true", LIVE)),
    "stages": (2, "reverse_kl", ("parallel.pipeline_stages=2", "data.packing=true")),
    "livestages": (2, "forward_kl", ("parallel.pipeline_stages=2", LIVE)),
    "split": (2, "jsd", ("parallel.sequence_parallel=2", "data.packing=true", "parallel.zero_stage=1")),
    "splitlive": (2, "forward_kl", ("parallel.sequence_parallel=2", "parallel.zero_stage=3", LIVE)),
}


ALWAYS = ("alone", "stages", "livestages", "splitlive")
"""ZeRO 3 has a live teacher in splitlive, rows are packed in stages; tests/parity has ZeRO 2, 3 and jsd."""


@pytest.mark.parametrize("name", tiered(CASES, ALWAYS))
def test_every_division_equals_the_plain_loop_at_the_whole_vocabulary(
    name: str, models: tuple[Path, Path], vocabulary: int, tmp_path: Path
) -> None:
    ranks, kind, overrides = CASES[name]
    trained(write_spec(tmp_path, models, name, vocabulary, kind), *overrides, nproc=ranks)
    folder = tmp_path / "runs" / name
    steps, evaluated, weights = plain(*models, kind)
    check(series(folder), steps)
    check(series(folder, "eval"), [evaluated])
    before = AutoModelForCausalLM.from_pretrained(models[0]).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    for key, value in weights.items():
        apart, moved = after[key].double() - value, value - before[key].double()
        assert apart.abs().max() <= 1e-6 * value.abs().max() and apart.norm() < 0.01 * moved.norm(), key


def test_scoring_that_is_killed_goes_on(models: tuple[Path, Path], tmp_path: Path) -> None:
    spec = write_spec(tmp_path, models, "killed", 8, "forward_kl")
    interrupted("SIGKILL", "1", spec, "--reference_only")
    shown = trained(spec, "distill.recheck_rows=4", nproc=1)
    scored, stored = (
        int(re.findall(rf"([\d,]+) examples {what}", shown)[0]) for what in ("scored in", "already stored")
    )
    assert 0 < stored < ROWS and scored + stored == ROWS, shown  # the held-out rows are the same
    assert "4 of these scored again, with the same result" in shown
    at_once = write_spec(tmp_path, models, "atonce", 8, "forward_kl")
    trained(at_once, f"output_dir={tmp_path}/other", nproc=1)
    assert series(tmp_path / "runs" / "killed") == series(tmp_path / "other" / "atonce")


def test_a_run_goes_on_without_its_teacher_and_changes_no_bit(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Only the teacher's files are compared: they are never loaded again."""
    spec, folder = write_spec(tmp_path, models, "whole", 8, "jsd"), tmp_path / "runs" / "whole"
    adapter = "model.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}"
    options = (adapter, "data.packing=true")
    assert "examples scored in" in trained(spec, *options, nproc=2)
    whole, evaluated = series(folder), series(folder, "eval")
    assert whole[-1]["kd_loss"] < whole[0]["kd_loss"]
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    shutil.rmtree(folder / "export")
    shown = trained(spec, *options, nproc=2)
    assert "going on from step 2" in shown and "scored" not in shown and "tokens: all" not in shown
    assert series(folder) == whole and series(folder, "eval") == evaluated


def test_wrong_teachers_are_refused_by_name(
    models: tuple[Path, Path], vocabulary: int, tmp_path: Path
) -> None:
    teacher = models[1]
    spec = write_spec(tmp_path, models, "refused", 8, "forward_kl")

    def refused(*overrides: str) -> str:
        done = train(spec, *overrides, nproc=1)
        output = done.stdout + done.stderr
        assert done.returncode != 0 and "Traceback" not in output, output
        return output

    assert "distill.reference_model: null, but a teacher is needed" in refused("distill.reference_model=null")
    shown = refused(f"distill.top_k={vocabulary + 1}")
    assert f"distill.top_k: {vocabulary + 1}, but the teacher has {vocabulary} tokens" in shown
    other = shutil.copytree(teacher, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    tokens = json.loads(text)
    vocab = tokens["model"]["vocab"]
    first, second = (name for name, number in vocab.items() if number in (5, 6))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    shown = refused(f"distill.reference_model={other}")
    assert "distill.reference_model" in shown and "has another tokenizer than the policy" in shown
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink()
    assert "has no tokenizer to compare" in refused(f"distill.reference_model={other}")

    trained(spec, f"distill.reference_store={tmp_path}/store", "train.max_steps=2", nproc=1)
    shown = refused(f"distill.reference_store={tmp_path}/store", "distill.top_k=9", "name=fewer")
    assert "log-probabilities of another reference" in shown and "top_k" in shown
    shown = refused("distill.temperature=2")
    assert "temperature was 1.5, now 2.0" in shown, shown


@pytest.mark.filterwarnings("ignore")
def test_a_teacher_in_4_bits_is_scored_as_transformers_scores_it(
    models: tuple[Path, Path], vocabulary: int, tmp_path: Path
) -> None:
    """And its store is not taken for that of the teacher in 32 bits."""
    spec = write_spec(tmp_path, models, "small", vocabulary, "forward_kl")
    options = ("distill.reference_quantize=nf4", f"distill.reference_store={tmp_path}/store")
    trained(spec, *options, "--reference_only", nproc=1)
    form = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32, quantization_config=form)
    plain.train()  # in evaluation bitsandbytes packs weights again on some CPUs, which fails below 64
    whole = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32)
    rows, found, moved = rows_of(models[0]), dict[int, Tensor](), 0.0
    for _, ids, values in map(mapped, (tmp_path / "store").glob("shard-*")):
        parts = torch.from_numpy(values.copy()).split([len(rows[n][1]) for n in ids])
        found |= dict(zip(ids.tolist(), parts, strict=True))
    assert found.keys() == set(range(ROWS))
    for number, of_row in found.items():
        tokens, logps = of_row[:, :vocabulary].long(), of_row[:, vocabulary:-1]
        with torch.no_grad():
            theirs, others = (
                (logits_of(one, *rows[number]) / TEMPERATURE).log_softmax(-1).gather(1, tokens)
                for one in (plain, whole)
            )
        torch.testing.assert_close(logps, theirs, rtol=0, atol=1e-5)
        moved = max(moved, float((logps - others).abs().max()))
    assert moved > 0.01
    done = train(spec, options[1], nproc=1)
    assert "distill.reference_quantize was 'nf4', now null" in " ".join((done.stdout + done.stderr).split())


def test_precisions_layouts_and_offload_run(models: tuple[Path, Path], tmp_path: Path) -> None:
    """What the cases above leave out: 16 bits, a teacher in host memory, one sharded beside stages."""
    found = {}
    for name, *overrides in (
        ("fp32",),
        ("bf16", "train.precision=bf16", "parallel.zero_stage=2"),
        ("offload", "parallel.zero_stage=3", LIVE, "distill.reference_offload=cpu"),
        ("apart", "parallel.pipeline_stages=2", "distill.reference_zero_stage=3"),
    ):
        spec = write_spec(tmp_path, models, name, 8, "forward_kl")
        trained(spec, *overrides, nproc=2)
        found[name] = [step["loss"] for step in series(tmp_path / "runs" / name)]
    exact = found.pop("fp32")
    assert found["bf16"] == pytest.approx(exact, rel=0.02)
    assert found["offload"] == pytest.approx(exact, rel=1e-6)
    assert found["apart"] == pytest.approx(exact, rel=1e-6)
