"""Hosts, and starts of one run, whose disks hold other files: the run stops and names what differs, where it
would hang or train another model than it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsft.model.files import samples
from tests.integration.runs import SPEC, edit_json, shows_traceback, trained, write_model, write_spec
from tests.launching import ROOT, alone, forked

pytestmark = pytest.mark.filterwarnings("ignore")

DIFFERING = ROOT / "tests" / "integration" / "differing.py"
TRAIN = ROOT / "dsft" / "train.py"
ROWS = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n'


def other_rows(host: Path) -> None:
    (host / "rows.jsonl").write_text(ROWS * 7)


def other_seed(host: Path) -> None:
    path = host / "spec.yaml"
    path.write_text(path.read_text().replace("train: {", "train: {seed: 7, "))


def other_config(host: Path) -> None:
    edit_json(host / "model" / "config.json", rms_norm_eps=0.5)


def other_template(host: Path) -> None:
    path = host / "model" / "chat_template.jinja"
    path.write_text(path.read_text() + "{# edited #}")


def other_weights(host: Path) -> None:
    path = host / "model" / "pytorch_model.bin"
    values = torch.load(path, weights_only=True)
    values["model.layers.0.self_attn.q_proj.weight"] += 0.5
    torch.save(values, path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (other_rows, "rows of data.train and data.eval.0 is "),
        (other_seed, "spec.train.seed is 42 on rank 0, 7 on rank 1"),
        (other_config, "config.json.rms_norm_eps is 1e-06 on rank 0, 0.5 on rank 1"),
        (other_template, "chat template is "),
        (other_weights, "weights.pytorch_model.bin is "),
    ],
    ids=["rows", "spec", "config", "template", "weights"],
)
def test_hosts_must_read_the_same_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[Path], None], message: str
) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    hosts[0].mkdir()
    write_model(hosts[0] / "model", pickled=edit is other_weights)
    (hosts[0] / "rows.jsonl").write_text(ROWS * 4)
    spec = SPEC.replace("builtin:quickstart", "rows.jsonl", 1) + f"output_dir: {tmp_path / 'runs'}\n"
    (hosts[0] / "spec.yaml").write_text(spec)
    shutil.copytree(hosts[0], hosts[1])
    edit(hosts[1])
    monkeypatch.chdir(hosts[0])
    result = forked(DIFFERING, 2, [str(hosts[1]), "spec.yaml", "model={name_or_path: model}"])
    assert result.returncode != 0 and message in result.stderr, result.stderr
    assert "on rank 1" in result.stderr and not shows_traceback(result.stderr)
    assert not list(tmp_path.glob("runs/small/checkpoints/*")), "nothing may have been trained"


def test_ranks_with_other_code_and_variables_are_refused(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    other = tmp_path / "checkout"
    shutil.copytree(ROOT / "dsft", other / "dsft", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", other / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    schedule = other / "dsft" / "plan" / "schedule.py"
    schedule.write_text(schedule.read_text() + "# as of another commit\n")
    result = forked(ROOT / "tests" / "integration" / "other_code.py", 2, [str(other), str(spec)])
    assert result.returncode != 0 and "versions.dsft is '" in result.stderr, result.stderr
    assert "environment.NVIDIA_TF32_OVERRIDE is (not set) on rank 0, '0' on rank 1" in result.stderr
    assert not (tmp_path / "runs").exists(), "the run's folder is not taken"


def test_run_resumes_only_with_its_first_model(tmp_path: Path) -> None:
    model, spec = write_model(tmp_path / "model"), write_spec(tmp_path)
    words = [f"model={{name_or_path: {model}}}", "parallel.zero_stage=0", "optim.learning_rate=1e-5"]
    output = trained(spec, *words, "train.max_steps=2", nproc=1)
    assert "warning" not in output
    shutil.copytree(model, tmp_path / "kept")
    for edit, reason in (
        (other_config, "config.json.rms_norm_eps was 1e-06, now 0.5"),
        (other_template, "chat template was "),
    ):
        edit(tmp_path)
        refused = alone(TRAIN, [str(spec), *words, "train.max_steps=3"])
        assert refused.returncode == 76 and reason in refused.stderr, refused.stderr
        assert not shows_traceback(refused.stderr)
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "kept", model)
    edit_json(model / "generation_config.json", max_new_tokens=7)
    output = trained(spec, *words, "train.max_steps=3", nproc=1)
    assert "going on from step 2" in output
    assert "warning: generation_config.json: max_new_tokens was (not set), now 7" in output


def test_adapter_run_resumes_only_over_its_first_pickled_base(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", pickled=True, intermediate_size=2048)
    spec = write_spec(tmp_path)
    words = [f"model={{name_or_path: {model}}}", "model.lora={rank: 4, alpha: 8}", "parallel.zero_stage=0"]
    trained(spec, *words, "train.max_steps=2", nproc=1)
    sampled = samples(str(model))
    other_weights(tmp_path)
    assert samples(str(model)) == sampled, "the change is to be where no sample is"
    refused = alone(TRAIN, [str(spec), *words, "train.max_steps=3"])
    assert refused.returncode == 76 and "file pytorch_model.bin has changed" in refused.stderr, refused.stderr
