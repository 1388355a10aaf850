"""`dsft push` to a server on this machine that answers as the hub does: what arrives, who may read it, where
the token goes, and what is refused. Nothing leaves this machine."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from dsft.checkpoint.export import export_checkpoint
from dsft.commands.push import _card, push
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DsftError, MissingInputError, StorageError
from dsft.spec.schema import Model
from dsft.system.hub import hub_obstacle
from dsft.system.run_folder import named_export
from tests.selected import tiered
from tests.unit.checkpoint.conftest import make_checkpoint, make_llama, make_maker, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of huggingface_hub's LFS
TOKEN = "hf_canaryCanaryCanaryCanary"
MAIN = "main"
REFUSED = {
    "expired": (401, "Invalid credentials in Authorization header"),
    "stranger": (403, "You don't have the rights to create a model under the namespace stranger"),
    "broken": (507, "out of order"),
}
"""Owner of a repository -> status and words of the server."""


class Hub(BaseHTTPRequestHandler):
    """Speaks the parts of the hub's protocol that huggingface_hub uses to create a repository and commit."""

    repos: dict[str, dict[str, Any]]
    stored: dict[str, bytes]  # by SHA-256
    asked: list[tuple[str, str | None]]  # path and Authorization of each request
    commits: list[str]
    large: int  # bytes from which a file goes to the LFS storage

    def log_message(self, format: str, *words: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def body(self) -> bytes:
        self.asked.append((self.path, self.headers.get("Authorization")))
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def do_HEAD(self) -> None:
        self.answer(None)

    def do_GET(self) -> None:
        self.body()
        found = re.fullmatch(r"/api/models/(\w+/[\w.-]+)(?:/(tree|revision)/(\w+)(?:\?.*)?)?", self.path)
        if found is None or found[1] not in self.repos:
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        name, kind, revision = found.groups()
        repo = self.repos[name]
        if kind != "tree":
            return self.answer({"id": name, "private": repo["private"], "sha": "0" * 40, "siblings": []})
        files = repo["branches"][revision]
        self.answer([{"type": "file", "path": p, "oid": "0" * 40, "size": len(f)} for p, f in files.items()])

    def do_PUT(self) -> None:
        content = self.body()
        self.stored[hashlib.sha256(content).hexdigest()] = content
        self.answer(None)

    def do_POST(self) -> None:
        content = self.body()
        if self.path == "/api/repos/create":
            return self.create(json.loads(content))
        if self.path == "/api/validate-yaml":
            return self.answer({"warnings": [], "errors": []})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            for one in objects:
                href = f"http://{self.headers['Host']}/storage/{one['oid']}"
                one["actions"] = {"upload": {"href": href}} if one["oid"] not in self.stored else None
            return self.answer({"objects": [{k: v for k, v in one.items() if v} for one in objects]})
        name, kind, revision = re.fullmatch(r"/api/models/(\w+/[\w.-]+)/(\w+)/(\w+)", self.path).groups()
        branches = self.repos[name]["branches"]
        if kind == "branch":
            is_new = revision not in branches
            branches.setdefault(revision, dict(branches[MAIN]))
            return self.answer({}, 200 if is_new else 409)
        if kind == "preupload":
            files = json.loads(content)["files"]
            listed = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= self.large else "regular",
                    "shouldIgnore": False,
                    "oid": oid(branches[revision].get(file["path"]), self.large),
                }
                for file in files
            ]
            return self.answer({"files": listed})
        for line in map(json.loads, content.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[revision][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                branches[revision][value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del branches[revision][value["path"]]
        self.commits.append(name)
        url = f"http://{self.headers['Host']}/{name}"
        self.answer({"commitUrl": f"{url}/commit/{'1' * 40}", "commitOid": "1" * 40})

    def create(self, wanted: dict[str, Any]) -> None:
        owner = wanted["organization"] or "me"
        name = f"{owner}/{wanted['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            owner = "expired"
        if owner in REFUSED:
            status, words = REFUSED[owner]
            return self.answer({"error": words}, status, X_Error_Message=words)
        is_new = name not in self.repos
        if is_new:
            self.repos[name] = {"private": wanted["visibility"] == "private", "branches": {MAIN: {}}}
        self.answer({"url": f"http://{self.headers['Host']}/{name}"}, 200 if is_new else 409)


def oid(content: bytes | None, large: int) -> str | None:
    """Return what the hub says of a file that it has: its SHA-256 in the LFS storage, else git's digest."""
    if content is None:
        return None
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return hashlib.sha256(content).hexdigest() if len(content) >= large else blob


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """Yield the server's class, with what arrived; this process takes it for the hub, and has a token."""
    served = type("Served", (Hub,), {"repos": {}, "stored": {}, "asked": [], "commits": [], "large": 2000})
    server = ThreadingHTTPServer(("127.0.0.1", 0), served)
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub_obstacle.cache_clear()
    yield served
    hub_obstacle.cache_clear()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a whole model."""
    folder = tmp_path_factory.mktemp("whole")
    maker = make_maker(folder, make_llama(tied=False), make_tokenizer())
    maker.save(4)
    export_checkpoint(maker.step(4), folder / "export")
    return folder / "export"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of an adapter, whose base is a folder."""
    folder = tmp_path_factory.mktemp("adapter")
    llama = make_llama(tied=False)
    llama.resize_token_embeddings(262, mean_resizing=False)
    llama.save_pretrained(folder / "base")
    byte_level_tokenizer().save_pretrained(folder / "base")
    model = Model.model_validate({"name_or_path": str(folder / "base"), "lora": {"rank": 2}})
    held, _ = make_checkpoint(model, folder / "run")
    export_checkpoint(held.path, folder / "export")
    return folder / "export"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# The other tests here have the token by HF_TOKEN, in this process.
@pytest.mark.parametrize("login", tiered(["variable", "file"], ["file"]))
def test_a_pushed_export_is_what_was_exported(
    whole: Path, hub: type[Hub], tmp_path: Path, login: str
) -> None:
    """As typed: the hub by HF_ENDPOINT, the token by HF_TOKEN or by the file of a login."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    if login == "variable":
        environ["HF_TOKEN"] = TOKEN
    else:
        (tmp_path / "token").write_text(f"{TOKEN}\n")
    words = [sys.executable, "-c", "from dsft.cli import main; main()", "push", str(whole), "me/small"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["me/small"]
    assert repo == {"private": True, "branches": {MAIN: contents(whole)}}
    assert hub.stored.keys() == {
        hashlib.sha256(content).hexdigest()
        for content in contents(whole).values()
        if len(content) >= hub.large
    }, "large files go to the LFS storage"
    assert re.fullmatch(
        rf"{constants.ENDPOINT}/me/small: {len(contents(whole))} files, .* KiB, private\n", done.stdout
    )
    assert TOKEN not in done.stdout + done.stderr
    for path, authorization in hub.asked:
        assert TOKEN not in path
        is_for_all = path.startswith(("/storage/", "/api/agent-harnesses"))  # the library's own question
        assert authorization == (None if is_for_all else f"Bearer {TOKEN}"), path


def test_a_second_push_replaces_the_first_and_a_branch_is_its_own(
    whole: Path, adapter: Path, hub: type[Hub], tmp_path: Path
) -> None:
    """Files of an earlier push that programs would read first are removed, others stay."""
    assert push(whole, "me/small", None, public=True).endswith(", public")
    branches = hub.repos["me/small"]["branches"]
    kept = {"onnx/model.safetensors": b"x", "LICENSE": b"x"}
    branches[MAIN] |= kept | {"model-00001-of-00002.safetensors": b"old"}
    printed = push(adapter, "me/small", "lora", public=True)
    own = contents(adapter)
    assert branches["lora"] == own | kept
    assert (
        "config.json of an earlier push removed; model-00001-of-00002.safetensors" in printed.splitlines()[0]
    )
    base = json.loads(own["adapter_config.json"])["base_model_name_or_path"]
    assert printed.splitlines()[1].startswith(
        f"its adapter_config.json names the base {base}, a folder of this"
    )
    assert branches[MAIN].keys() >= contents(whole).keys()
    for _ in range(2):  # the second has nothing new
        printed = push(whole, "me/small", "lora", public=True)
    assert branches["lora"] == contents(whole) | kept
    assert len(hub.commits) == 3 and printed.startswith(f"{constants.ENDPOINT}/me/small: ")


def test_small_files_with_the_newer_storage(
    whole: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.large = 10**9
    push(whole, "small", None, public=False)
    assert hub.repos["me/small"]["branches"][MAIN] == contents(whole) and not hub.stored


@pytest.mark.parametrize("form", ["whole", "adapter"])
def test_only_files_of_the_export_are_sent_and_a_missing_card_is_made(
    form: str, hub: type[Hub], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    export, folder = request.getfixturevalue(form), tmp_path / "export"
    folder.mkdir()
    for name, content in contents(export).items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("# edited by hand\n")
    (folder / "secret.txt").write_text("mine")
    push(folder, "me/small", None, public=False)
    files = hub.repos["me/small"]["branches"][MAIN]
    assert files == contents(export) | {"README.md": b"# edited by hand\n"}
    (folder / "README.md").unlink()
    push(folder, "me/other", None, public=False)
    card = hub.repos["me/other"]["branches"][MAIN]["README.md"].decode()
    assert f"library_name: {'peft' if form == 'adapter' else 'transformers'}\n" in card
    assert "# other\n" in card and "| steps |" in card and not (folder / "README.md").exists()
    if form == "adapter":
        assert str(tmp_path.parent) not in card, "a folder of this machine is named without its path"


def test_a_repository_keeps_who_may_read_it(whole: Path, hub: type[Hub]) -> None:
    push(whole, "me/open", None, public=True)
    push(whole, "me/closed", None, public=False)
    del hub.asked[:]
    with pytest.raises(MissingInputError, match="me/open exists and is public; add --public, change that"):
        push(whole, "me/open", None, public=False)
    with pytest.raises(MissingInputError, match="me/closed exists and is private; leave out --public"):
        push(whole, "me/closed", None, public=True)
    assert not any("commit" in path or "storage" in path for path, _ in hub.asked)


@pytest.mark.parametrize(("repo", "match"), [
    ("a/b/c", "REPO is OWNER/NAME, or NAME for your own: "),
    ("me/--no", "REPO is OWNER/NAME, or NAME for your own: "),
    ("stranger/small", r"stranger/small cannot be written \(403: You don't have the rights.*a token that"),
    ("expired/small", r"\(401: Invalid credentials in Authorization header\); log in again with"),
    ("broken/small", r"\(507: out of order\); the same command sends what is missing\."),
])  # fmt: skip
def test_what_the_hub_refuses_is_one_sentence(repo: str, match: str, whole: Path, hub: type[Hub]) -> None:
    with pytest.raises(DsftError, match=match) as raised:
        push(whole, repo, None, public=False)
    assert "\n" not in str(raised.value) and not hub.repos


def test_no_token_a_wrong_one_and_no_network(
    whole: Path, hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_otherOtherOther")
    with pytest.raises(StorageError, match=r"\(401: Invalid credentials") as raised:
        push(whole, "me/small", None, public=False)
    assert "hf_other" not in str(raised.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(MissingInputError, match="only with a token: log in with `hf auth login`, or set"):
        push(whole, "me/small", None, public=False)
    hub_obstacle.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MissingInputError, match="nothing can be pushed: HF_HUB_OFFLINE=1 is set"):
        push(whole, "me/small", None, public=False)
    hub_obstacle.cache_clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MissingInputError, match="nothing can be pushed: http://127.0.0.1:9 does not answer"):
        push(whole, "me/small", None, public=False)
    assert not hub.repos


def test_what_is_no_export_is_refused_before_the_hub_is_asked(
    whole: Path, hub: type[Hub], tmp_path: Path
) -> None:
    step = whole.parent / "run" / "checkpoints" / "step-4"
    with pytest.raises(MissingInputError, match="has neither config.json nor adapter_config.json; give"):
        push(named_export(step), "me/small", None, public=False)
    for folder in (step, step / "model"):  # the second has a config
        with pytest.raises(MissingInputError, match="may have optimizer states or private files"):
            push(folder, "me/small", None, public=False)
    trainers = tmp_path / "checkpoint-500"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(trainers)
    torch.save({}, trainers / "optimizer.pt")
    with pytest.raises(MissingInputError, match="only exports are pushed"):
        push(named_export(trainers), "me/small", None, public=False)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for name, content in contents(whole).items():
        (damaged / name).write_bytes(content[:-1] + b"\0" if name == "model.safetensors" else content)
    with pytest.raises(StorageError, match=r"model.safetensors has changed since it was written .*export"):
        push(damaged, "me/small", None, public=False)
    assert not hub.asked


def test_card_of_a_reward_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    card = _card(tmp_path, {"from": {"step": 7}}, "me/judge")
    assert "pipeline_tag: text-classification\n" in card and "# judge\n" in card and "7 steps" in card
    assert "of rewards on preference pairs" in card
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "calm", "1": "loud"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "cross entropy of each row's label" in _card(tmp_path, {"from": {"step": 7}}, "me/mood")
