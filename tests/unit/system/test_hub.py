"""A hub that does not answer is asked once, and not again for each file."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from dsft.data.tokenizer.load import load_tokenizer
from dsft.errors import MissingInputError
from dsft.model.config import read_config
from dsft.system import hub
from tests.launching import allowed


@pytest.fixture(autouse=True)
def closed_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.hub_obstacle.cache_clear()
    yield
    hub.hub_obstacle.cache_clear()


def test_hub_that_does_not_answer(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    output = r"127\.0\.0\.1:9 does not answer \(.*; HF_HUB_OFFLINE=1 would not ask it\); "
    with pytest.raises(
        MissingInputError, match=f"tokenizer some/where: .* not in the hub's cache, and .*{output}"
    ):
        load_tokenizer("some/where")
    with pytest.raises(
        MissingInputError, match=f"'some/where' cannot be read: it is not in the cache, and .*{output}"
    ):
        read_config("some/where")
    assert time.perf_counter() - began < allowed(10), "huggingface_hub alone takes 23 seconds for each file"
    assert "Retrying" not in "".join(capfd.readouterr())
    assert os.environ["HF_HUB_OFFLINE"] == "1", "for the processes that this one starts"


def test_a_hub_that_answers_and_one_that_is_not_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append(url)

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    assert hub.hub_obstacle() is None and hub.hub_obstacle() is None
    assert asked == ["http://127.0.0.1:9"]
    hub.hub_obstacle.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.hub_obstacle() == "HF_HUB_OFFLINE=1 is set" and len(asked) == 1
