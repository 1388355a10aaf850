"""`scripts/gpu` without a GPU: its table, its results, its page, and one case on the CPU by the driver."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import __main__ as driver
from benchmarks.gpu import carry, runs
from benchmarks.gpu.bodies import BODIES, differences, work_of
from benchmarks.gpu.cases import CASES, MODELS, STAGE_SECONDS, STAGES, Case, cases_of
from benchmarks.gpu.kernels import measure
from benchmarks.gpu.page import MEASURED, PAGE, compare, judge, page
from benchmarks.gpu.trace import by_kind, kernels_of, only_trace
from dsft.spec.load import load_spec
from tests.launching import LATE, ROOT

FIELDS = {"case", "argv", "commit", "versions", "gpu", "seconds", "pass", "reason", "stage", "date"}


def result(name: str, **figures: Any) -> dict[str, Any]:
    facts = {"argv": [], "commit": "abc", "versions": {"torch": "2"}, "gpu": "H200", "machine": "m"}
    case = next(case for case in CASES if case.name == name)
    made = {"case": name, "stage": case.stage, "date": "2026-01-02", "seconds": 1.0, "pass": True}
    return {**facts, **made, "reason": "", **figures}


# --- the table ----------------------------------------------------------------------------------------------


def test_every_gpu_case_is_valid() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.stage for case in CASES} == set(STAGES)
    for case in CASES:
        assert case.body in BODIES and set(case.beside) <= set(names)
        assert case.settings.get("model", "1b") in MODELS
        assert case.seconds <= STAGE_SECONDS / 2
        for name, _, _ in case.goals:
            assert not name.startswith("ratio ") or name.removeprefix("ratio ") in case.beside


def test_goals_are_pinned() -> None:
    goals = {case.name: {name: bound for name, _, bound in case.goals} for case in CASES}
    assert goals["documents-dsft"]["mfu"] == 0.50
    assert goals["documents-dsft"]["ratio documents-plain"] == 1.0
    assert goals["short-dsft"]["mfu"] == 0.42
    assert goals["full-dsft"]["mfu"] == 0.40
    assert goals["lora-dsft"]["tokens_per_s"] == 14_000
    assert goals["offload-host"]["ratio offload-none"] == 0.60
    assert {goals[name]["plan_error"] for name in ("documents-dsft", "lora-dsft", "full-dsft")} == {0.03}
    assert goals["whole-run"] == {"phase_error": 0.03, "device_error": 0.03}


@pytest.mark.parametrize("case", [case for case in CASES if "spec" in case.settings], ids=lambda c: c.name)
def test_every_key_of_a_case_is_one_of_the_spec(case: Case, tmp_path: Path) -> None:
    if case.key is not None and not runs.has_key(case.key):
        pytest.skip(f"no {case.key} in this version")
    kind = "pairs" if case.body == "references" else case.settings.get("rows", "short")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["small"]))
    (tmp_path / "tokenizer.json").touch()
    rows = tmp_path / "rows.jsonl"
    runs.write_rows(rows, kind, 4, 128)
    keys = runs.base_spec(tmp_path, rows, kind, 128)
    keys |= {"train.micro_batch_size": 1, "train.accumulation_steps": 1, **case.settings["spec"]}
    other = json.loads(json.dumps(case.settings.get("other", {})).replace("{folder}", str(tmp_path)))
    assert load_spec(runs.write_spec(tmp_path / "spec.yaml", keys | other)).name == "run"


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.345), ("3b", 3.213), ("8b", 8.030)])
def test_models_have_the_sizes_of_their_names(name: str, billions: float, tmp_path: Path) -> None:
    config = dict(MODELS[name])
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    assert model.num_parameters() == pytest.approx(billions * 1e9, rel=1e-3)
    (tmp_path / "config.json").write_text(json.dumps(made.to_dict()))
    embeddings = 0 if made.tie_word_embeddings else made.vocab_size * made.hidden_size
    multiplied = model.num_parameters() - embeddings
    assert work_of(tmp_path, None).per_token == pytest.approx(6 * multiplied, rel=1e-3)


def test_rows_have_the_requested_lengths(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    runs.write_rows(path, "short", 2000, 4096)
    lengths = [sum(map(len, json.loads(line).values())) for line in path.read_text().splitlines()]
    assert 180 < sum(lengths) / len(lengths) < 210  # the tokens of a turn's marks come to it
    runs.write_rows(path, "documents", 3, 4096)
    assert {len(json.loads(line)["text"]) for line in path.read_text().splitlines()} == {4095}


# --- results ------------------------------------------------------------------------------------------------


def test_missed_goal_is_reported() -> None:
    case = next(case for case in CASES if case.name == "documents-dsft")
    slow = judge(result(case.name, mfu=0.31, plan_error=0.01), case, False)
    assert not slow["pass"] and slow["reason"] == "mfu 0.31, goal >= 0.5"
    assert slow["goals"][1] == "plan_error 0.01, goal <= 0.03: reached"
    assert judge(result(case.name, mfu=0.51, plan_error=0.01), case, False)["pass"]
    assert not judge(result(case.name, mfu=0.51), case, False)["pass"]  # no plan beside it
    assert judge(result(case.name), case, True)["pass"]  # a rehearsal has no speed
    parity = next(case for case in CASES if case.body == "parity")
    assert not judge(result(parity.name, difference=0.1), parity, True)["pass"]  # but its numbers


def test_paired_cases_are_compared() -> None:
    figures = {"mfu": 0.5, "plan_error": 0.0, "losses": [2.0, 1.0]}
    plain = result("documents-plain", tokens_per_s=80.0, losses=[2.0, 1.001])
    ours = result("documents-dsft", tokens_per_s=100.0, **figures)
    found = {one["case"]: one for one in compare([plain, ours])}
    assert found["documents-dsft"]["ratios"] == {"documents-plain": 1.25}
    assert found["documents-dsft"]["pass"]
    other = compare([plain | {"losses": [2.0, 1.5]}, ours])[0]
    assert not other["pass"] and "not the same work" in other["reason"]
    short = [
        result("short-trl", tokens_per_s=50.0, losses=[9.0]),
        result("short-dsft", tokens_per_s=75.0, **figures),
    ]
    assert compare(short)[0]["pass"] and compare(short)[0]["ratios"] == {"short-trl": 1.5}


def test_losses_of_other_lengths_or_nan_are_unequal() -> None:
    assert differences([2.0, 1.0], [2.0, 1.1])["difference"] == pytest.approx(0.0909, abs=1e-4)
    for ours in ([1.0], [1.0, float("nan")]):
        with pytest.raises(RuntimeError):
            differences(ours, [1.0, 1.0])


def test_page_has_only_real_results() -> None:
    rehearsed = result("documents-dsft", tokens_per_s=1.0, losses=[1.0], rehearsed=True)
    assert page([rehearsed]) == page([]) and "2026-01-02: H200" not in page([])
    text = page([result("documents-dsft", tokens_per_s=50_000.0, mfu=0.41, losses=[1.0], plan_error=0.01)])
    assert "2026-01-02: H200" in text
    assert re.search(r"\| documents-dsft \| missed \| 50,000 \| 0.41 \|.*mfu 0.41, goal >= 0.5 \|", text)


def test_docs_have_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(json.loads(MEASURED.read_text(encoding="utf-8")))
    for stage in (*STAGES, "prepare", "page", "list", "all"):
        assert f"scripts/gpu {stage}" in text


# --- the driver ---------------------------------------------------------------------------------------------


def test_timed_out_case_is_killed_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(600)\n"
    )
    log = tmp_path / "log"
    began = time.monotonic()
    code, seen = driver.watch([sys.executable, "-c", script], dict(os.environ), 3.0, log)
    assert code is None and time.monotonic() - began < LATE
    assert seen["host_peak"] > 2**20
    pid = int(log.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_reasons_not_to_run_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    case, late = cases_of("speed")[0], time.monotonic() + 1000
    monkeypatch.setattr(driver, "AGAIN", 0.0)
    for gpus, reason in (([], "no GPU"), ([(130_000, 143_771)], "GiB of the GPU's memory are free")):
        monkeypatch.setattr(driver, "gpu_memory", lambda gpus=gpus: gpus)
        assert reason in driver.reason_not_to_run(case, late, False)
    monkeypatch.setattr(driver, "gpu_memory", lambda: [(0, 143_771)])
    assert driver.reason_not_to_run(case, late, False) == ""
    assert "time was over" in driver.reason_not_to_run(case, time.monotonic() + 1, False)
    assert "needs 2 GPUs" in driver.reason_not_to_run(cases_of("several")[0], late, False)
    assert "is not installed" in driver.reason_not_to_run(replace(case, needs="nothing"), late, False)
    assert "has no" in driver.reason_not_to_run(replace(case, key="model.nothing"), late, False)


@pytest.mark.long
def test_the_quickstart_runs_on_the_cpu_through_the_driver(tmp_path: Path) -> None:
    words = ["correct", "--rehearse", "--out", str(tmp_path / "out"), "--only", "quickstart"]
    done = subprocess.run(
        [ROOT / "scripts" / "gpu", *words], capture_output=True, text=True, timeout=LATE,
        env=os.environ | {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found.keys() >= FIELDS | {"losses", "reference_losses", "difference", "host_peak", "goals"}
    assert found["pass"] is True and found["difference"] == 0.0 and len(found["losses"]) == 4
    assert "quickstart" in (tmp_path / "out" / "results.md").read_text()
    assert "train/loss went from" in (tmp_path / "out" / "log.txt").read_text()


def test_speed_case_is_killed_at_once(tmp_path: Path) -> None:
    script = (
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: open('asked', 'w'))\ntime.sleep(600)\n"
    )
    for is_patient in (True, False):
        environ, log = dict(os.environ), tmp_path / "log"
        command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{script}"]
        driver.watch(command, environ, 2.0, log, is_patient)
        assert (tmp_path / "asked").exists() is is_patient
        (tmp_path / "asked").unlink(missing_ok=True)


def test_busy_gpu_is_checked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks = [[(130_000, 143_771)], [(0, 143_771)]]
    monkeypatch.setattr(driver, "AGAIN", 0.0)
    monkeypatch.setattr(driver, "gpu_memory", lambda: looks.pop(0) if looks else [])
    monkeypatch.setattr(
        driver, "watch", lambda *_: (tmp_path.joinpath("documents-dsft.log").write_text(""), {})
    )
    found = driver.run_case(cases_of("speed")[0], tmp_path, time.monotonic() + 1000, False)
    assert found["pass"] is False and not looks  # it was started, and has left no figures


def test_omitted_cases_of_a_stage_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installation is a part of its ten minutes."""
    monkeypatch.setenv("DSFT_GPU_BEGAN", str(time.time() - STAGE_SECONDS))
    monkeypatch.setattr(driver, "gpu_memory", lambda: [(0, 143_771)])
    monkeypatch.setattr(sys, "argv", ["scripts/gpu", "memory", "--out", str(tmp_path)])
    assert driver.main() == 0
    assert "scripts/gpu memory --only whole-run out-of-memory runs them" in capsys.readouterr().out


def test_a_trace_is_summed_by_kind_of_kernel(tmp_path: Path) -> None:
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "GEMM",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "GEMM",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob": "attention",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": "communication",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "_rms_norm_backward_kernel": "norms, rotary, SwiGLU (Liger)",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::vectorized_elementwise_kernel<4, ...>": "elementwise",
        "something": "other",
    }
    events = [
        {"cat": "kernel", "name": name, "ts": 2000.0 * number, "dur": 1000.0}
        for number, name in enumerate(names)
    ]
    events += [
        {"cat": "kernel", "name": "something", "ts": 500.0, "dur": 1000.0},
        {"cat": "cpu_op", "name": "x"},
    ]
    trace = tmp_path / "trace-step-4.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    kernels = kernels_of(only_trace(tmp_path))
    found = by_kind(kernels)
    assert found.pop("gaps") == pytest.approx(8.5)  # of 19 ms; the first two overlap for half of one
    assert found == {kind: float(sum(one == kind for one in [*names.values(), "other"])) for kind in found}
    assert set(found) == set(names.values())
    trace.write_text(json.dumps({"traceEvents": [{"cat": "cpu_op", "name": "x"}]}))
    assert by_kind(kernels_of(trace)) == {}


def test_every_line_of_kernels_ends_with_figures_or_an_error() -> None:
    found = measure(is_rehearsal=True)["kernels"]
    assert isinstance(found["2 layers, torch"], dict) and found["2 layers, torch"]["ms"] > 0
    assert isinstance(found["fused AdamW"], dict)
    assert any("Error" in str(value) for value in found.values())  # no CPU has cuDNN
    assert "| 2 layers, torch | ms " in page([result("kernels", kernels=found)])


# --- wheels for a machine without a network --------------------------------------------------------------


def test_wheels_can_be_prepared_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = carry.tracked_bytes()
    monkeypatch.setenv("PATH", str(tmp_path))
    carry.leave_out(tmp_path / ".gpu")
    assert carry.tracked_bytes() >= 0.99 * known > 2**20, "all but hidden files"
