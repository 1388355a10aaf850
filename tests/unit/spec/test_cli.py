import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from dsft import __version__, cli
from dsft.errors import MissingInputError
from dsft.spec.load import load_spec
from dsft.spec.summary import summary
from tests.unit.conftest import Dsft
from tests.unit.spec.conftest import Write

REPOSITORY = Path(__file__).parents[3]


def test_help_and_version(dsft: Dsft) -> None:
    assert dsft("--version") == (0, f"dsft {__version__}\n", "")
    code, out, _ = dsft("--help")
    assert code == 0 and "validate" in out and "init" in out
    assert "validate" in "".join(dsft()[1:])


def test_an_error_holds_no_secret_and_nothing_that_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that nobody expected has a traceback, and no secret either."""
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    text = "canary-token \x1b]0;x\x07 wandb.api_key: no such key"

    def fails(error: Exception) -> None:
        raise error

    for error, code in ((MissingInputError(text), 66), (OSError(text), 1), (RuntimeError(text), 1)):
        monkeypatch.setattr(cli, "app", lambda prog_name, error=error: fails(error))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr().err
        assert ended.value.code == code and "canary" not in printed and "(hidden)" in printed
        assert ("Traceback" in printed) is (code == 1)
        if code == 66:
            assert printed == "error: (hidden) \\x1b]0;x\\x07 wandb.api_key: no such key\n"


def test_validate(dsft: Dsft, write: Write) -> None:
    code, out, err = dsft("validate", str(write()))
    assert (code, err) == (0, "")
    assert out.startswith("valid: spec.yaml\n") and "ZeRO 2" in out
    assert "rows of at most" in out
    _, out, _ = dsft("validate", str(write()), "task=dpo", "data.eval_count=5", "--no-files")
    assert "5 held-out pairs; a prompt and an answer of at most" in out
    assert "; evaluated on 1 held-out row; " in dsft("validate", str(write()), "data.eval_count=1")[1]


def test_validate_prints_warnings_and_the_batch_of_a_cluster(dsft: Dsft, write: Write) -> None:
    code, out, err = dsft("validate", str(write()), "parallel.zero_stage=0", "cluster={hosts: {a: 2, b: 1}}")
    assert code == 0
    assert err.startswith("warning: train.precision: 'bf16' with parallel.zero_stage 0")
    assert "global_batch_size 24 = micro_batch_size 2 × accumulation_steps 4 × data-parallel ranks 3" in out


def test_validate_warns_of_an_absent_package(
    dsft: Dsft, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsft.report.packages.find_spec", lambda name: None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert dsft("validate", str(write()), "--no-files")[2] == ""
    code, _, err = dsft("validate", str(write()), "wandb.mode=offline", "--no-files")
    assert code == 0 and err.startswith("warning: wandb is set in the spec, but the package wandb is not")


def test_validate_prints_mistakes_on_standard_error(dsft: Dsft, write: Write) -> None:
    code, out, err = dsft("validate", str(write()), "train.sede=1", "train.seed=x")
    assert (code, out) == (2, "")
    assert err.startswith("error: spec.yaml: 2 problems\n") and "did you mean train.seed?" in err


def test_a_batch_that_the_cluster_cannot_hold(dsft, write: Write) -> None:  # noqa: ANN001
    path = write(train="{global_batch_size: 10, micro_batch_size: 2}", cluster="{hosts: {a: 3}}")
    code, _, err = dsft("validate", str(path))
    assert code == 2 and "global_batch_size 10 = micro_batch_size 2" in err and "12" in err


def test_exit_codes_and_words_for_wrong_command_lines(dsft: Dsft, write: Write) -> None:
    assert dsft("validate", "none.yaml")[0] == 66
    assert "validate" in dsft("validat")[2]
    for arguments in (["validate"], ["validate", str(write()), "--no-file"], ["init"]):
        code, _, err = dsft(*arguments)
        assert code == 2 and "Error" in err


def test_no_files(dsft: Dsft, write: Write) -> None:
    path = str(write())
    Path("rows.jsonl").unlink()
    assert dsft("validate", path)[0] == 2
    assert dsft("validate", path, "--no-files")[0] == 0


@pytest.mark.parametrize("task", ["sft", "pretrain", "dpo", "kto", "classify", "distill"])
def test_what_init_writes_is_valid_and_has_its_schema_beside_it(dsft: Dsft, write: Write, task: str) -> None:
    write()
    code, out, _ = dsft("init", "fresh", "--task", task)
    assert code == 0 and "wrote specs/fresh.yaml" in out
    text = Path("specs/fresh.yaml").read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=dsft.schema.json"
    assert "$defs" in json.loads(Path("specs/dsft.schema.json").read_text(encoding="utf-8"))
    assert dsft("validate", "specs/fresh.yaml")[0] == 0
    spec = load_spec("specs/fresh.yaml")
    assert (spec.task, spec.data.on_too_long) == (task, "error" if task == "pretrain" else "drop")
    assert max(map(len, text.splitlines())) <= 110


def test_init_keeps_a_schema_that_is_not_its_own(dsft: Dsft, write: Write) -> None:
    write()
    Path("specs").mkdir()
    Path("specs/dsft.schema.json").symlink_to(Path("rows.jsonl").absolute())
    rows = Path("rows.jsonl").read_text()
    code, _, err = dsft("init", "fresh")
    assert code == 2 and "dsft.schema.json' is not dsft's and is kept" in err
    assert Path("rows.jsonl").read_text() == rows and not Path("specs/fresh.yaml").exists()
    Path("specs/dsft.schema.json").unlink()
    assert [dsft("init", name)[0] for name in ("fresh", "second")] == [0, 0]


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        (["--task", "sft"], 1e-5), (["--task", "sft", "--lora"], 1e-4), (["--task", "pretrain"], 1e-5),
        (["--task", "dpo"], 5e-7), (["--task", "dpo", "--lora"], 5e-6), (["--task", "kto"], 5e-7),
        (["--task", "classify"], 1e-5), (["--task", "distill"], 1e-5),
    ],
)  # fmt: skip
def test_init_for_the_users_own_model_and_data(
    dsft: Dsft, write: Write, words: list[str], rate: float
) -> None:
    write()
    task, name = words[1], "my, mödel: 1"
    Path(name).mkdir()
    config = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 1024, "hidden_size": 64}
    Path(name, "config.json").write_text(json.dumps(config), encoding="utf-8")
    Path(name, "tokenizer.json").write_text("{}", encoding="utf-8")
    code, out, err = dsft(
        "init", "mine", *words, "--model", name, "--data", "rows.jsonl", "--data", "owner/name"
    )
    assert code == 0 and "wrote specs/mine.yaml" in out, err
    text = Path("specs/mine.yaml").read_text(encoding="utf-8")
    spec = load_spec("specs/mine.yaml")
    assert (spec.task, spec.model.name_or_path, spec.optim.learning_rate) == (task, name, rate)
    assert [source.path for source in spec.data.train] == ["rows.jsonl", "owner/name"]
    assert spec.model.gradient_checkpointing and spec.data.max_length == 1024
    assert (spec.model.lora is not None) is ("--lora" in words)
    assert "from_config" not in text and "builtin" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_init_writes_nothing_that_is_not_valid(dsft: Dsft, write: Write) -> None:
    write()
    code, _, err = dsft("init", "mine", "--model", "owner/name", "--data", "no.jsonl")
    assert code == 2 and "data.train.0.path: 'no.jsonl' does not exist" in err and "line" not in err
    assert not Path("specs/mine.yaml").exists()


@pytest.mark.parametrize("name", ["123", "null", "1e5", "true", "0x1F"])
def test_init_writes_a_name_that_yaml_would_take_for_something_else(
    dsft: Dsft, write: Write, name: str
) -> None:
    write()
    assert dsft("init", name)[0] == 0
    assert load_spec(f"specs/{name}.yaml").name == name


def test_init_overwrites_nothing(dsft: Dsft, write: Write) -> None:
    write()
    assert dsft("init", "fresh")[0] == 0
    Path("specs/fresh.yaml").write_text("mine", encoding="utf-8")
    code, _, err = dsft("init", "fresh")
    assert code == 2 and "already exists" in err
    assert Path("specs/fresh.yaml").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("arguments", [
    ["../x"],
    ["a/b"],
    ["x", "--task", "chat"],
    [""],
    ["x", "--model", "m"],
    ["x", "--data", "rows.jsonl"],
    ["x", "--lora"],
])  # fmt: skip
def test_init_refuses(dsft: Dsft, write: Write, arguments: Sequence[str]) -> None:
    write()
    before = set(Path().rglob("*"))
    code, _, err = dsft("init", *arguments)
    assert code == 2 and err.startswith("error: dsft init: 1 problem\n")
    assert set(Path().rglob("*")) == before


def test_init_where_nothing_can_be_written(dsft: Dsft, write: Write) -> None:
    write()
    code, _, err = dsft("init", "x", "--out", "rows.jsonl/x.yaml")
    assert code == 74 and "cannot be written" in err


def test_the_schema_of_editors_agrees_with_the_models(dsft: Dsft) -> None:
    code, out, _ = dsft("schema")
    schema = json.loads(out)
    assert code == 0 and schema["additionalProperties"] is False
    train = schema["$defs"]["Train"]["properties"]
    assert train["micro_batch_size"]["description"].startswith("Examples per forward pass of one data-par")
    assert "\\n" not in out and len(train["max_consecutive_nonfinite"]["description"]) > 100  # in one line


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "specs/quickstart.yaml"]])
def test_quick_and_without_torch(arguments: Sequence[str]) -> None:
    """Half a second of processor time is the promise, on warm files; the best of three runs is held to it."""
    program = (
        "import sys\nfrom dsft.cli import main\nsys.argv = ['dsft', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n"
        "    print('HEAVY', [m for m in ('torch', 'transformers', 'deepspeed', 'numpy') if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("HEAVY []\n")
    assert min(seconds) < 0.5


def test_output_that_the_terminal_cannot_show(write: Write) -> None:
    path = write()
    command = [
        sys.executable, "-c", "from dsft.cli import main; main()", "validate", str(path),
        "cluster={hosts: {a: 1}}",
    ]  # fmt: skip
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "\\xd7" in done.stdout


def test_shipped_specs_are_valid() -> None:
    found = sorted((REPOSITORY / "specs").glob("*.yaml"))
    assert found
    for path in found:
        assert load_spec(path).name == yaml.safe_load(path.read_text(encoding="utf-8"))["name"]


def test_the_summary_counts_the_processes_of_stages_and_groups() -> None:
    split = ["parallel.sequence_parallel=2", "parallel.pipeline_stages=2"]
    sizes = ["train.global_batch_size=24", "train.accumulation_steps=1"]  # of 8 in a micro-batch
    path = REPOSITORY / "specs" / "quickstart.yaml"
    where = "2 pipeline stages, each row split over 2 ranks"
    assert f"{where}; 12 processes, by" in summary(load_spec(path, [*split, *sizes]))
    assert f"{where}; any multiple of 4 processes\n" in summary(load_spec(path, split))
    copied = ["parallel.zero_stage=3", "parallel.zero_hpz_partition_size=2"]
    assert "; any multiple of 2 processes, at least 4\n" in summary(load_spec(path, copied))


def test_output_to_a_full_disk_is_an_error() -> None:
    code = "from dsft.cli import main; main()"
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        74,
        "error: the output cannot be written (no space left on device); free some space\n",
    )


def test_what_validate_finds_without_reading_everything(dsft: Dsft, write: Write) -> None:
    path = str(write())
    Path("empty.jsonl").write_text("\n")
    code, _, err = dsft("validate", path, "data.train=[{path: rows.jsonl}, {path: empty.jsonl}]")
    assert code == 65 and "empty.jsonl: has no rows; name a file with rows" in err
    code, _, err = dsft("validate", path, "data.train=[{path: /dev/null}]")
    assert code == 2 and "'/dev/null' is a device, not a file; give a file or a folder" in err
    os.mkfifo("pipe.model")
    code, _, err = dsft("validate", path, "model.tokenizer=pipe.model", "data.chat_template=/dev/zero")
    assert code == 2 and "pipe.model is a named pipe, not a file; give a" in err
    assert "data.chat_template: '/dev/zero' is a device, not a file; give a file" in err
    Path("lines.txt").write_text("a line\n")
    code, out, err = dsft("validate", path, "data.train=[{path: lines.txt}]")
    assert code == 0 and "'lines.txt' is plain text, so all tokens are trained on" in err
    assert "not seen  later rows (dsft preview), the model's class and memory (dsft plan)\n" in out
    code, out, err = dsft("validate", path, "task=pretrain", "data.train=[{path: lines.txt}]")
    assert (code, err) == (0, "")
    assert "(dsft plan), the hosts (dsft doctor)\n" in dsft("validate", path, "cluster={hosts: {a: 1}}")[1]
    code, _, err = dsft("validate", path, "cluster={hosts: {a: 10000000000000}}")
    assert code == 2 and "10000000000000" in err


def test_folders_that_a_run_cannot_write(dsft: Dsft, write: Write) -> None:
    nvme = "parallel={zero_stage: 3, offload_optimizer: {device: nvme, nvme_path: rows.jsonl/nvme}}"
    code, _, err = dsft("validate", str(write()), "output_dir=rows.jsonl/runs", nvme)
    assert code == 2 and err.count("/rows.jsonl, which is a file, but a folder is needed") == 2
    nvme = "parallel={zero_stage: 3, offload_optimizer: {device: nvme, nvme_path: /proc/nvme}}"
    code, _, err = dsft("validate", str(write()), "output_dir=/proc/runs", nvme)  # not even by root
    assert code == 2 and err.count("cannot be written (/proc: ") == 2
    assert dsft("validate", str(write()), "output_dir=/proc/runs", "cluster={hosts: {a: 1}}")[0] == 0
    before = set(Path().iterdir())
    assert dsft("validate", str(write()), "output_dir=runs/a/b")[0] == 0
    assert set(Path().iterdir()) == before, "validate leaves nothing behind"


def test_argument_that_the_shell_divided(dsft: Dsft, write: Write) -> None:
    _, _, err = dsft("validate", str(write()), "model.lora={rank:", "8}")
    assert "quote the argument for the shell: 'model.lora=…'" in err
