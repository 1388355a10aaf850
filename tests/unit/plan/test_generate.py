import json
from pathlib import Path

import pytest

from dsft.errors import StorageError
from dsft.generate.files import drift, files, generate_files, write
from dsft.plan.config_file import merge_config_file
from dsft.plan.ds_config import LARGEST_BUCKET, deepspeed_config
from dsft.plan.ds_keys import problems
from dsft.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted(ROOT.glob("specs/*.yaml"))
NAMES = "one_node quickstart two_nodes zero1 zero2 zero3 zero3_offload".split()


def test_the_shipped_specs_are_there() -> None:
    assert [path.stem for path in SHIPPED] == NAMES


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_repository_holds_what_its_specs_generate_byte_for_byte(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    texts = files(spec, path, ROOT)
    assert drift(texts, ROOT) == ""
    for name, text in texts.items():
        assert (ROOT / name).read_bytes() == text.encode()
    config = json.loads(texts[f"ds_configs/{spec.name}.json"])
    assert list(problems(config)) == [] and '"auto"' not in json.dumps(config)


def test_nothing_generated_is_left_over() -> None:
    expected = {name for path in SHIPPED for name in files(load_spec(path), path, ROOT)}
    found = {
        p.relative_to(ROOT).as_posix()
        for folder in ("ds_configs", "hostfiles")
        for p in (ROOT / folder).iterdir()
    }
    found |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "scripts" / "launch").iterdir()}
    assert found == expected


def test_check_finds_drift_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "specs" / "two_nodes.yaml"
    assert not generate_files(path, (), tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []
    assert generate_files(path, (), tmp_path, check=False)
    assert generate_files(path, (), tmp_path, check=True)
    capsys.readouterr()
    hostfile = tmp_path / "hostfiles" / "two_nodes"
    hostfile.write_text("node1 slots=4\n")
    assert not generate_files(path, (), tmp_path, check=True)
    assert "-node1 slots=4\n+node1 slots=8\n+node2 slots=8\n" in capsys.readouterr().out
    assert hostfile.read_text() == "node1 slots=4\n"


def test_only_generated_files_are_replaced(tmp_path: Path) -> None:
    path = ROOT / "specs" / "two_nodes.yaml"
    config, hostfile = tmp_path / "ds_configs/two_nodes.json", tmp_path / "hostfiles/two_nodes"
    script = tmp_path / "scripts/launch/two_nodes.torchrun.sh"
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for file in (config, hostfile):
        file.parent.mkdir()
        file.symlink_to(precious)
    with pytest.raises(StorageError) as refused:
        generate_files(path, (), tmp_path, check=False)
    assert f"{config}, {hostfile}: not written by dsft generate" in str(refused.value)
    assert precious.read_text() == "mine" and not script.exists()
    for file in (config, hostfile):
        file.unlink()
    assert generate_files(path, (), tmp_path, check=False)
    assert generate_files(path, ["parallel.zero_stage=3"], tmp_path, check=False), "a changed spec"
    script.write_text("#!/bin/sh\nmine\n")
    with pytest.raises(StorageError, match="torchrun.sh: not written by dsft generate"):
        generate_files(path, (), tmp_path, check=False)
    assert script.read_text() == "#!/bin/sh\nmine\n"


def test_scripts_are_executable_and_find_their_spec_from_another_folder(tmp_path: Path) -> None:
    spec_path = tmp_path / "a b.yaml"
    spec_path.write_text((ROOT / "specs" / "quickstart.yaml").read_text())
    texts = files(load_spec(spec_path), spec_path, tmp_path)
    write(texts, tmp_path)
    script = tmp_path / "scripts" / "launch" / "quickstart.deepspeed.sh"
    assert script.stat().st_mode & 0o111
    assert "'a b.yaml'" in script.read_text()


def test_overrides_reach_the_script_as_they_reach_the_json(tmp_path: Path) -> None:
    path, overrides = ROOT / "specs" / "zero1.yaml", ["parallel.zero_stage=3", "name=other"]
    assert generate_files(path, overrides, tmp_path, check=False)
    assert json.loads((tmp_path / "ds_configs/other.json").read_text())["zero_optimization"]["stage"] == 3
    script = (tmp_path / "scripts/launch/other.deepspeed.sh").read_text()
    assert script.endswith('zero1.yaml parallel.zero_stage=3 name=other "$@"\n')


def test_a_model_that_is_not_here_gets_the_largest_buckets_and_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dsft.plan.census.census", lambda *_: pytest.fail("asked for"))
    overrides = ["model={name_or_path: some/model}", "parallel.zero_stage=2"]
    assert generate_files(ROOT / "specs" / "quickstart.yaml", overrides, tmp_path, check=False)
    zero = json.loads((tmp_path / "ds_configs/quickstart.json").read_text())["zero_optimization"]
    assert zero["reduce_bucket_size"] == LARGEST_BUCKET
    assert "a run computes its own" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3_offload"])
def test_a_generated_file_laid_over_another_spec_gives_that_files_configuration(name: str) -> None:
    path = ROOT / "ds_configs" / f"{name}.json"
    spec, file = merge_config_file(load_spec(ROOT / "specs" / "quickstart.yaml"), None, path, strict=True)
    assert deepspeed_config(spec, None, file=file) == json.loads(path.read_text())
    assert not any("reduce_dtype" in note for note in file.notes)
    assert spec.parallel == load_spec(ROOT / "specs" / f"{name}.yaml").parallel
