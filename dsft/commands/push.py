"""`dsft push RUN REPO`: upload an export to a model repository of the Hugging Face hub, in one commit.

Only files that `dsft export` wrote are sent, after each was compared with its SHA-256; those of an earlier
push that this export lacks are removed. huggingface_hub finds the token: HF_TOKEN, or the file of a login.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from dsft.checkpoint.card import CARD, Form, model_card
from dsft.checkpoint.export import BY_HAND, ORIGIN
from dsft.checkpoint.files import FileDigest, damages
from dsft.errors import MissingInputError, StorageError, printable
from dsft.model.lora import CONFIG
from dsft.spec.task import task_of_export
from dsft.system.disk import size_text
from dsft.system.hub import hub_obstacle
from dsft.system.json_file import read_json
from dsft.system.redact import redact_values

_OLDER = re.compile(
    r"(adapter_)?(model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|config\.json)|generation_config\.json"
    r"|chat_template\.jinja|tokenizer\.model"
)
"""Files that programs would read in place of those of this export, where it has none of that name."""
_NO_RIGHT = "take a token that may write there, or a repository of yours"
_WRONG_NAME = "correct the name of the repository or of the revision"
_WAYS_OUT: dict[int | str, str] = {
    401: "log in again with `hf auth login`, or set HF_TOKEN to a valid token",
    **dict.fromkeys((403, 404), _NO_RIGHT),
    **dict.fromkeys((400, 409, 422), _WRONG_NAME),
}
"""By the status that the hub answers."""


def push(folder: Path, repo: str, revision: str | None, *, public: bool) -> str:
    """Upload the export in `folder`. Return lines for the user. Raises MissingInputError for a folder that is
    no export, a repository's name that the hub does not allow, or no token; StorageError where the export is
    damaged or the hub does not take it."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise MissingInputError(f"REPO is OWNER/NAME, or NAME for your own: {error}") from None
    origin = _origin(folder)
    files = [path for name in (*origin["files"], ORIGIN) if (path := folder / name).exists()]
    added = [CommitOperationAdd(path.name, path) for path in files]
    if not (folder / CARD).exists():
        added.append(CommitOperationAdd(CARD, _card(folder, origin, repo).encode()))
    if (obstacle := hub_obstacle()) is not None:
        way_out = "set HF_ENDPOINT to a mirror that takes uploads, or unset HF_HUB_OFFLINE if it is set"
        raise MissingInputError(f"nothing can be pushed: {obstacle}; {way_out}.")
    token = get_token()
    if token is None:
        raise MissingInputError(
            "the hub takes uploads only with a token: log in with `hf auth login`, or set the variable "
            "HF_TOKEN to one that may write."
        )
    api = HfApi(token=token, library_name="dsft")
    with _refusals(repo, token):
        repo = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        is_private = bool(api.repo_info(repo).private)
        if is_private is public:
            raise MissingInputError(
                f"{repo} exists and is {'private; leave out' if is_private else 'public; add'} --public, "
                "change that in its settings on the hub, or name another repository."
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo, revision=revision)
        gone = {name for name in there if _OLDER.fullmatch(name)} - {one.path_in_repo for one in added}
        removed = [CommitOperationDelete(name) for name in sorted(gone)]
        message = f"dsft push: step {origin['from']['step']}"
        url = api.create_commit(repo, [*removed, *added], commit_message=message, revision=revision).repo_url
    size = size_text(sum(path.stat().st_size for path in files))
    left = "".join(f"; {name} of an earlier push removed" for name in sorted(gone))
    title = f"{url}: {len(added)} files, {size}, {'private' if is_private else 'public'}"
    return title + left + _note(folder)


def _origin(folder: Path) -> dict[str, Any]:
    """Return the content of an export's dsft_export.json, after all files were compared with it. Raises
    MissingInputError, or StorageError where a file is damaged."""
    try:
        origin: dict[str, Any] = read_json(folder / ORIGIN)
        files = {name: FileDigest(**facts) for name, facts in origin["files"].items() if name not in BY_HAND}
        int(origin["from"]["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise MissingInputError(
            f"{folder} has no {ORIGIN} as dsft export writes it: only exports are pushed, since other "
            "folders may have optimizer states or private files; make one with dsft export, or use hf upload."
        ) from None
    if damaged := next(damages(folder, files), None):
        raise StorageError(f"{damaged}; export the checkpoint again with dsft export.")
    return origin


def _card(folder: Path, origin: dict[str, Any], repo: str) -> str:
    """Return a card for an export whose own was removed: what its files say."""
    is_adapter = (folder / CONFIG).exists()
    config = read_json(folder / (CONFIG if is_adapter else "config.json"))
    spec = {"name": repo.split("/")[-1], "model": {"name_or_path": config.get("base_model_name_or_path")}}
    if (task := task_of_export(config)) != "sft":
        spec["task"] = task
    form: Form = "adapter" if is_adapter else "model"
    return model_card({"spec": spec, "progress": {"step": origin["from"]["step"]}}, form)


def _note(folder: Path) -> str:
    """Return a line about an adapter whose base others do not have, "" for other exports."""
    base = read_json(folder / CONFIG).get("base_model_name_or_path") if (folder / CONFIG).exists() else None
    if base is None or not Path(base).is_dir():
        return ""
    return (
        f"\nits {CONFIG} names the base {base}, a folder of this machine: others give peft their own, or you "
        "push a whole model, written by dsft export with --merged"
    )


@contextmanager
def _refusals(repo: str, token: str) -> Iterator[None]:
    """Raise what the hub or the way to it refuses as a StorageError of one sentence, without the token."""
    try:
        yield
    except MissingInputError:
        raise
    except Exception as raised:  # of the HTTP library, of hf_xet, or a RuntimeError around them
        error: BaseException = raised
        while not isinstance(error, HfHubHTTPError) and error.__cause__ is not None:
            error = error.__cause__
        answer = error if isinstance(error, HfHubHTTPError) else None
        kind = type(error).__name__ if answer is None else answer.response.status_code
        words = redact_values((answer and answer.server_message) or str(error), {"HF_TOKEN": token})
        reason = " ".join(printable(words).split())[:200]
        way_out = _WAYS_OUT.get(kind, "the same command sends what is missing")
        raise StorageError(f"{repo} cannot be written ({kind}: {reason}); {way_out}.") from None
