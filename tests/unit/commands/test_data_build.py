"""`dsft data build`: what it prints, what it leaves, and how it fails."""

import json
from pathlib import Path

import pytest

from dsft.commands.data_build import build
from dsft.errors import DataError, SpecError

SPEC = """\
name: small
task: pretrain
model: {from_config: {model_type: llama, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}}
data: {train: [{path: a.jsonl}], eval: [{path: b.jsonl}], max_length: 64}
train: {micro_batch_size: 1, accumulation_steps: 1, max_steps: 1}
optim: {learning_rate: 1.0e-3}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SPEC, encoding="utf-8")
    for name in ("a", "b"):
        rows = (json.dumps({"text": f"{name} {i}"}) for i in range(9))
        Path(f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return Path("small.yaml")


def test_new_and_cached_tokens_are_reported(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(spec, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a.jsonl: 9 rows, 0.0 MB of tokens, tokenized 1 of 1 blocks in ")
    assert lines[1].startswith("b.jsonl: 9 rows, ")
    assert any(line.startswith("data.train: 9 rows gave 9 examples") for line in lines)
    assert lines[-2].startswith("runs/.cache/data has 0.0 MB of tokens for this spec; this took ")
    assert lines[-1] == "next: dsft launch small.yaml"
    assert len(list(Path("runs/.cache/data").glob("*/block-00000"))) == 2
    build(spec, ["data.max_length=32", "data.num_workers=0"])
    out = capsys.readouterr().out
    assert "a.jsonl: 9 rows, 0.0 MB of tokens, already in the cache" in out
    assert out.endswith("small.yaml data.max_length=32 data.num_workers=0\n")


def test_another_folder(spec: Path) -> None:
    build(spec, ["data.cache_dir=elsewhere"])
    assert list(Path("elsewhere").glob("*/block-00000"))
    assert not Path("runs").exists()


def test_it_fails_as_a_run_would(spec: Path) -> None:
    with Path("a.jsonl").open("a", encoding="utf-8") as out:
        out.write('\n{"text": 3}\n')
    with pytest.raises(DataError, match="a.jsonl:10"):
        build(spec, [])
    with pytest.raises(SpecError):
        build(spec, ["data.num_workers=-1"])
