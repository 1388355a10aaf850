"""Which secrets are hidden in text and in what a process prints, and which ordinary words are not."""

import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from urllib.parse import quote, quote_plus

import pytest

from dsft.system.redact import RedactedStream, redact, redact_command, redact_tree
from tests.launching import allowed

SECRET = "canary 'a' \"b\" \\c+/d=é"
NAMES = (
    "HF_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY DB_PASSWORD PGPASSWORD MYSQL_PWD "
    "GITHUB_PAT SSH_PRIVATE_KEY PASSPHRASE SSH_PASSPHRASE OPENAI_KEY WANDB_KEY JWT AUTHORIZATION "
    "AZURE_CONNECTION_STRING GOOGLE_CREDENTIALS AZURE_STORAGE_ACCOUNT_KEY SECRET_KEY"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_hidden_in_every_form(name: str) -> None:
    quoted = (repr(SECRET), json.dumps(SECRET), json.dumps(SECRET, ensure_ascii=False), repr([SECRET]))
    encoded = (quote(SECRET), quote(SECRET, safe=""), quote_plus(SECRET))
    for form in (SECRET, *quoted, *encoded):
        output = redact(f"GET {form} failed", {name: SECRET})
        assert "canary" not in output and output.startswith("GET ") and output.endswith(" failed"), (
            form,
            output,
        )
    for form in (f"{name}={SECRET.split()[0]}-1", f"{name}: {SECRET}", f'"{name.lower()}": "canary-1"'):
        assert "canary" not in redact(f"{form}\nend", {}), form
        assert redact(f"{form}\nend", {}).endswith("end")


@pytest.mark.parametrize("name", ["SMTP_PASS", "REDIS_AUTH"])
def test_a_variable_with_a_shorter_name_is_hidden(name: str) -> None:
    assert redact("logged in with canary", {name: "canary"}) == "logged in with (hidden)"
    assert redact("GET /bypass?auth=1", {}) == "GET /bypass?auth=1"


def test_every_line_of_a_long_secret_is_hidden() -> None:
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----\n"
    assert redact("read MIIEvQIBADANBg\nkqhkiG9w0BAQEF", {"SSH_KEY": key}) == "read (hidden)\n(hidden)"


@pytest.mark.parametrize(("text", "hidden"), [
    ("Authorization: Bearer canary", "Authorization: (hidden)"),
    ("curl -H 'Authorization: Bearer canary' x", "curl -H 'Authorization: (hidden)' x"),
    ('{"api_key": "can\\"ary", "a": 1}', '{"api_key": "(hidden)", "a": 1}'),
    ("{'token': 'canary-1', 'a': 1}", "{'token': '(hidden)', 'a': 1}"),
    ('"{\\"api_key\\": \\"canary b\\", \\"a\\": 1}"', '"{\\"api_key\\": \\"(hidden)\\", \\"a\\": 1}"'),
    ("a secretKey: canary, accessKey=canary", "a secretKey: (hidden) accessKey=(hidden)"),
    ("AccountName=a;AccountKey=canary==;", "AccountName=a;AccountKey=(hidden)"),
    ("login(password='can ary')", "login(password='(hidden)')"),
    ("  - passphrase: can a ry", "  - passphrase: (hidden)"),
    ("https://user:can@ary@host/x", "https://(hidden)@host/x"),
])  # fmt: skip
def test_value_after_a_name_is_hidden(text: str, hidden: str) -> None:
    assert redact(text, {}) == hidden


@pytest.mark.parametrize(
    "kept",
    [
        "model.from_config.pad_token=<pad>", "data.max_tokens_per_micro_batch=4096", "https://host/path@v1",
        "tokenizer=x", "eos_token: <|im_end|>", "'mask_token': '[MASK]', 'image_token': '<image_0>'",
        "num_key_value_heads=8", "'key_value_heads': 12345678", "sort_key=text_length", "sort_key: length",
        "ms/token: 0.0123456", "time_per_token=0.0123456s", "token=None, password=None", "token: 123456789",
        "step 5/10  loss 2.3456  12,345 tokens/s", "expected token: identifier",
        "self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))", "PATH=/usr/bin", "compat=linux-12345",
        "error: wandb.api_key: no such key", "def f(token: str, api_key: str)",
    ],
)  # fmt: skip
def test_ordinary_values_are_kept(kept: str) -> None:
    assert redact(kept, {"KEYBOARD": "tokenizer", "SHORT_TOKEN": "x", "HF_HUB_NO_TOKEN": "1"}) == kept


def test_option_without_a_value() -> None:
    assert redact_command(["train.py", "--token"], {}) == ["train.py", "--token"]


def test_trees_keep_their_shape() -> None:
    tree = {"a": [1, {"password": "p", "pad_token": "<pad>"}], "b": ("hunter22", None), "token": 5}
    hidden = {"a": [1, {"password": "(hidden)", "pad_token": "<pad>"}], "b": ["(hidden)", None], "token": 5}
    assert redact_tree(tree, {"DB_PASSWORD": "hunter22"}) == hidden


def test_the_time_is_linear() -> None:
    """A quadratic expression would take minutes for one of these."""
    units = (
        "a", "a_", "a.", " ", "\n", "\\", "'", "token ", "token=", "token: ", "_key=", "api_key\\",
        'api_key="',
    )  # fmt: skip
    units += ("api_key='\\\\", "password:" + "\\" * 20, "key" + " " * 50, "://", "://a@", "- a: ", "bearer ")
    began = time.process_time()
    for unit in units:
        redact("api_key=" + unit * (200_000 // len(unit)), {"HF_TOKEN": SECRET})
    assert time.process_time() - began < allowed(10)


# --- streams ----------------------------------------------------------------------------------------------


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedactedStream]:
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    yield RedactedStream(io.BytesIO(), "utf-8", "strict", line_buffering=True)


def written(stream: RedactedStream) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode()


def test_output_of_libraries_is_redacted(stream: RedactedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    print("it is", "canary-token", file=stream)
    stream.write("it is can")
    stream.flush()
    stream.write("ary-token\n")
    logging.Logger("library").addHandler(handler := logging.StreamHandler())
    handler.emit(logging.makeLogRecord({"msg": "GET ?token=%s", "args": ("canary-token",)}))
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    thread = threading.Thread(target=lambda: int("canary-token"))
    thread.start()
    thread.join()
    output = written(stream)
    assert output.startswith("it is (hidden)\nit is (hidden)\nGET ?token=(hidden)")
    assert output.endswith("ValueError: invalid literal for int() with base 10: '(hidden)'\n")
    assert "canary" not in output


def test_progress_bars_and_unfinished_lines(stream: RedactedStream) -> None:
    for share in (10, 20):
        stream.write(f"\r{share}%")
        stream.flush()
        assert written(stream).endswith(f"\r{share}%"), "a bar's state is shown at once"
    stream.write("\n")
    thread = threading.Thread(target=stream.write, args=("of another thread\n",))
    stream.write("half a line")
    thread.start()
    thread.join()
    assert written(stream) == "\r10%\r20%\nof another thread\n", "an unfinished line waits"
    stream.write("x" * 2**17)
    assert written(stream).endswith("x"), "but not without limit"
    stream.write("the end")
    stream._write_held()  # called at the process's exit
    stream.flush()
    assert written(stream).endswith("the end")
