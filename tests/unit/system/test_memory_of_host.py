"""What control groups leave of a host."""

from pathlib import Path

import psutil
import pytest

from dsft.system.host import host_memory

ALL = psutil.virtual_memory().total


@pytest.mark.parametrize(("groups", "files", "expected"), [
    ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": "max"}, ALL),
    ("0::/a/b\n", {"a/memory.max": "4096", "a/b/memory.max": "max"}, 4096),
    ("0::/a/b\n", {"a/memory.max": "4096", "a/b/memory.max": "1024"}, 1024),
    ("0::/\n", {"memory.max": "2048"}, 2048),
    ("4:memory:/a\n0::/\n",
     {"memory/a/memory.limit_in_bytes": "512", "memory/memory.limit_in_bytes": str(2**62)}, 512),
    ("4:cpu:/a\n", {"cpu/a/memory.limit_in_bytes": "512"}, ALL),
    ("", {}, ALL),
])  # fmt: skip
def test_the_least_limit_counts(tmp_path: Path, groups: str, files: dict[str, str], expected: int) -> None:
    own = tmp_path / "cgroup"
    own.write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert host_memory(own, tmp_path / "fs") == expected


def test_a_host_without_control_groups_has_all_of_its_memory(tmp_path: Path) -> None:
    assert host_memory(tmp_path / "none", tmp_path) == ALL
