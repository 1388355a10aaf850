import json
from pathlib import Path

import pytest

from dsft.errors import MissingInputError, SpecError
from dsft.spec.aliases import ALIASES, keys, suggestion
from dsft.spec.load import MAX_BYTES, dump_spec, given_source, load_spec
from dsft.spec.schema import Source
from tests.selected import tiered
from tests.unit.spec.conftest import GOOD, Write


def messages(path: Path, *overrides: str, check_files: bool = True) -> list[str]:
    with pytest.raises(SpecError) as raised:
        load_spec(path, overrides, check_files=check_files)
    return [str(problem) for problem in raised.value.problems]


def test_a_spec_is_read(write: Write) -> None:
    spec = load_spec(write(), ["train.seed=7", "cluster.hosts.10.0.0.1=2"])
    assert (spec.train.micro_batch_size, spec.train.seed, spec.optim.learning_rate) == (2, 7, 1e-3)
    assert spec.cluster is not None and spec.cluster.hosts == {"10.0.0.1": 2}


def test_a_dumped_spec_is_the_same_spec(write: Write) -> None:
    spec = load_spec(
        write(), ["name='1e5'", "optim.learning_rate=5e-7", "cluster={hosts: {'::1': 1}, env: {A: 'on'}}"]
    )
    Path("dumped.yaml").write_text(dump_spec(spec), encoding="utf-8")
    assert load_spec("dumped.yaml") == spec


def test_a_byte_order_mark_is_no_mistake(write: Write) -> None:
    path = write()
    path.write_text("\ufeff" + GOOD, encoding="utf-8")
    assert load_spec(path).name == "small"


def test_a_file_that_is_not_there(write: Write) -> None:
    write()
    with pytest.raises(MissingInputError, match="'no.yaml' does not exist"):
        load_spec("no.yaml")
    with pytest.raises(MissingInputError, match="cannot be read"):
        load_spec(".")
    with pytest.raises(MissingInputError, match="cannot be read"):
        load_spec("a\0b")


@pytest.mark.parametrize(("content", "message"), [
    (b"name: x\ntask: \xff\n", "line 2, file: this is not UTF-8; save the file as UTF-8"),
    (b"#" * (MAX_BYTES + 1),
     f"file: it has more than {MAX_BYTES} bytes, which is too long for a spec; give another file"),
], ids=["no text", "too large"])  # fmt: skip
def test_a_file_that_is_no_spec(write: Write, content: bytes, message: str) -> None:
    path = write()
    path.write_bytes(content)
    assert messages(path) == [message]


def test_a_wrong_key_silences_only_what_follows_from_it(write: Write) -> None:
    found = messages(write(), "train.micro_batch_size=x", "train.eval_every=3", "cluster.hosts.a_b=1")
    assert [text.partition(": ")[2].partition(": ")[0] for text in found if "override" in text] == [
        "train.micro_batch_size",
        "train.eval_every",
        "cluster.hosts.a_b",
    ]
    assert len(found) == 3  # and not a word about the batch sizes


def test_the_models_own_config_is_read(write: Write) -> None:
    config = {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
        "num_kv_shared_layers": 1,
    }
    Path("model").mkdir()
    path = write(model="{name_or_path: model}", parallel="{pipeline_stages: 2, pipeline_cut: [2, 1]}")
    Path("model/config.json").write_text(json.dumps(config), encoding="utf-8")
    found = "\n".join(messages(path))
    assert "128 tokens are more than the model's 64 positions" in found
    assert "2 stages are more than the model's 1 layers" in found
    assert "[2, 1] adds up to 3 layers, but the model has 1" in found
    assert "share keys and values" in found
    assert load_spec(path, check_files=False).parallel.pipeline_stages == 2


@pytest.mark.parametrize("content", ["{", "[1]", "\udcff"])
def test_a_models_config_that_cannot_be_read(write: Write, content: str) -> None:
    path = write(model="{name_or_path: model}")
    Path("model").mkdir()
    Path("model/config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    (message,) = messages(path)
    assert "repair the model's folder" in message


def test_builtin_rows_need_no_file_and_have_a_kind(write: Write) -> None:
    path, rows = write(), "data.train.0.path=builtin:quickstart"
    assert load_spec(path, [rows, "data.eval=[{path: 'builtin:quickstart-heldout'}]"])
    assert load_spec(path, [f"{rows}-pairs"])
    assert load_spec(path, [f"{rows}-pairs", "task=dpo"])
    (message,) = messages(path, rows, "task=pretrain")
    assert "has messages rows, but task pretrain takes text; give a file of such rows" in message
    (message,) = messages(path, rows, "task=dpo")
    assert "has messages rows, but task dpo takes preference; use builtin:quickstart-pairs" in message


def test_an_alias_names_a_key_that_exists() -> None:
    texts = {}
    for theirs in ALIASES:
        section, _, name = theirs.rpartition(".")
        texts[theirs] = suggestion(section, name)
    ours = [theirs for theirs in texts if theirs in keys()]
    assert ours == [], "each is a key of the spec itself, so nobody is asked what was meant"
    named = {theirs: {word.strip("?,:(){}") for word in text.split()} for theirs, text in texts.items()}
    assert [text for text in texts.values() if not text.startswith("did you mean ")] == []
    assert [texts[theirs] for theirs, words in named.items() if not words & set(keys())] == []


def test_every_key_is_found_from_the_top_level() -> None:
    """Where its last word is neither a key of the top level nor one of another tool."""
    names = {key.rpartition(".")[2] for key in keys() if "." in key} - {*keys(), *ALIASES}
    assert len(names) > 80
    assert [name for name in names if name not in suggestion("", name)] == []


def test_a_slip_of_the_finger_is_understood() -> None:
    """Two letters in the wrong order at the end of a key of six letters or more."""
    slips = []
    for key in keys():
        section, _, name = key.rpartition(".")
        if len(name) >= 6 and name[-1] != name[-2]:
            slips.append((section, name, name[:-2] + name[-1] + name[-2]))
    assert len(slips) > 80
    assert [slip for slip in slips if slip[1] not in suggestion(slip[0], slip[2])] == []


def test_a_tokenizers_folder_holds_one_of_its_files(write: Write) -> None:
    path = write()
    Path("tokens").mkdir()
    (message,) = messages(path, "model.tokenizer=./tokens")
    assert "without tokenizer_config.json or tokenizer.json or tokenizer.model" in message
    Path("tokens/tokenizer.model").touch()
    assert load_spec(path, ["model.tokenizer=./tokens"]).model.tokenizer == "./tokens"
    Path("a.model").write_bytes(b"")  # its content is checked by its reader
    assert load_spec(path, ["model.tokenizer=a.model"]).model.tokenizer == "a.model"


ODD = ("null", "[]", "{a: {b: 1}}", "1e400", '"x\\0y"')
OF_THE_SAME_KINDS = ("", "{}", "[[]]", "-1", "true", "[{path: 1}, 2]", "9" * 39)


@pytest.mark.parametrize("value", tiered((*ODD, *OF_THE_SAME_KINDS), ODD))
def test_no_value_of_any_key_ends_in_anything_but_a_spec_or_its_problems(write: Write, value: str) -> None:
    path = write(cluster="{hosts: {a: 1}, accelerator: {name: cpu}}", dpo="{}")
    for key in keys():
        key = key.replace("data.train.", "data.train.0.").replace("data.eval.", "data.eval.0.")
        try:
            load_spec(path, [f"{key.replace('groups.', 'groups.0.')}={value}"])
        except SpecError as error:
            assert all(problem.message and problem.message.isprintable() for problem in error.problems)


def test_rows_may_fill_all_positions_of_the_model(write: Write) -> None:
    assert load_spec(write(), ["data.max_length=1024"]).data.max_length == 1024
    assert len(messages(write(), "data.max_length=1025")) == 1


@pytest.mark.parametrize("value", ['a"b', "$HOME", "`id`", "a\\b", "100%", "a\nb"])
def test_values_that_the_launcher_would_change_are_refused(write: Write, value: str) -> None:
    cluster = json.dumps({"hosts": {"a": 1}, "env": {"X": value}})
    (message,) = messages(write(), f"cluster={cluster}")
    assert "cluster.env.X" in message and ("launcher" in message or "launch script" in message)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_what_a_launcher_sets_is_refused(write: Write, name: str) -> None:
    (message,) = messages(write(), f"cluster={{hosts: {{a: 1}}, env: {{{name}: '3'}}}}")
    assert f"{name} is set by the launcher" in message


@pytest.mark.parametrize("text", ["inf", "nan", "1_000", ".inf", "true"])
def test_a_text_that_is_no_number_without_quotes_either(write: Write, text: str) -> None:
    (message,) = messages(write(), f"optim.learning_rate='{text}'")
    assert f"'{text}' is a string, but a number is needed; write one, such as 0.1" in message


def test_keys_of_adamw_that_sgd_does_not_read(write: Write) -> None:
    found = messages(write(), "optim.name=sgd", "optim.betas=[0.8, 0.9]", "optim.eps=1e-3")
    assert ["has no effect with sgd" in message for message in found] == [True, True]
    assert load_spec(write(), ["optim.name=sgd", "optim.momentum=0.9", "optim.eps=1e-8"])


def test_rows_of_the_command_line_are_a_path_or_a_source() -> None:
    assert given_source("a.csv") == Source(path="a.csv")
    assert given_source("{path: a.csv, columns: {text: review}}") == Source(
        path="a.csv", columns={"text": "review"}
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{path: a.csv, column: {text: review}}", "--data: column: there is no such key"),
        (
            "{path: a.csv, split: train}",
            "--data: split: there is no such key in data.train; the keys here are col",
        ),
        ("{columns: {text: review}}", "--data: path: "),
        ("{path: a.csv, max_rows: many}", "--data: max_rows: 'many' is a string"),
        ("{path: a.csv", "--data: "),
    ],
)
def test_a_source_of_the_command_line_with_a_mistake(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as raised:
        given_source(text)
    assert [str(one).startswith(problem) for one in raised.value.problems] == [True], str(raised.value)
