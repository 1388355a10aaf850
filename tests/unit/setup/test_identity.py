"""Weight files are compared whole between ranks: each is read by one of the ranks that see it, and at later
starts by none while it is unchanged."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from dsft.dist.world import World
from dsft.errors import MissingInputError, WorldError
from dsft.model.files import samples
from dsft.setup.identity import file_digests
from dsft.spec.layout import Layout
from dsft.system import digest
from tests.specs import minimal_spec
from tests.unit.checkpoint.conftest import Meeting, Rank

T = TypeVar("T")
NAMES = ["model-1.safetensors", "model-2.safetensors"]
SIZE = 2**20
UNSEEN = 2**13
"""An offset between two samples of 4 KiB, of which a file of this size has one in every 16 KiB."""


@dataclass(frozen=True)
class Thread(World):
    """A rank in a thread; its collectives are those of `Rank`."""

    agreed: Any = None

    def gather(self, mine: T) -> list[T]:
        found: list[T] = Rank(self.rank, self.agreed).gather(mine)
        return found


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The model's folder on two hosts, each with two weight files that have not been changed lately."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "one"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes([number]) * SIZE)
        os.utime(folder / name, ns=(0, number))
    index = [f'"{number}": "{name}"' for number, name in enumerate(NAMES)]
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{", ".join(index)}}}}}')
    shutil.copytree(folder, tmp_path / "other")
    return [folder, tmp_path / "other"]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content was read."""
    found: list[Path] = []
    real = digest._hash

    def record(path: Path, read: Callable[[int], object]) -> str:
        found.append(path)
        return real(path, read)

    monkeypatch.setattr(digest, "_hash", record)
    return found


def start(*folders: Path) -> list[dict[str, dict[str, str]]]:
    """Return the error of each rank, one for each of the folders, after all have compared it."""
    meeting = Meeting(len(folders))

    def rank(number: int) -> dict[str, dict[str, str]]:
        layout, device = Layout(1, len(folders)), torch.device("cpu")
        world = Thread(number, len(folders), number % 2, layout, device, agreed=meeting)
        model = {"name_or_path": str(folders[number])}
        found = file_digests(minimal_spec("sft", model=model), world, lambda line: None)
        world.check_same(found)
        return found

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(rank, range(len(folders))))


def test_each_file_is_read_by_one_rank_of_its_host_and_later_by_none(
    hosts: list[Path], hashed: list[Path]
) -> None:
    ranks = [hosts[0], hosts[0], hosts[1], hosts[1]]
    expected = {"weights": {name: sha256(bytes([n]) * SIZE).hexdigest() for n, name in enumerate(NAMES)}}
    assert start(*ranks) == [expected] * 4
    assert sorted(hashed) == sorted(host / name for host in hosts for name in NAMES)
    assert start(*ranks) == [expected] * 4 and len(hashed) == 4
    assert start(hosts[1]) == [expected] and len(hashed) == 4


def test_a_byte_between_the_samples_is_seen_whatever_its_files_time(
    hosts: list[Path], hashed: list[Path]
) -> None:
    start(*hosts)
    path = hosts[1] / NAMES[1]
    before, sampled = path.stat(), samples(str(hosts[1]))
    with path.open("r+b") as file:
        file.seek(UNSEEN)
        file.write(b"?")
    os.utime(path, ns=(0, before.st_mtime_ns))
    assert samples(str(hosts[1])) == sampled
    hashed.clear()
    with pytest.raises(WorldError, match=rf"weights\.{NAMES[1]} is .* on rank 0, .* on rank 1"):
        start(*hosts)
    assert hashed == [path]


def test_a_cache_that_cannot_be_written_costs_time_alone(
    hosts: list[Path], hashed: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert start(*hosts) == start(*hosts)
    assert len(hashed) == 8


def test_a_file_that_cannot_be_read_is_named_on_all_ranks(hosts: list[Path]) -> None:
    (hosts[1] / NAMES[0]).unlink()
    (hosts[1] / NAMES[0]).mkdir()
    with pytest.raises(MissingInputError, match=f"{NAMES[0]} cannot be read .*give a folder with all files"):
        start(*hosts)
