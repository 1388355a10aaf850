import os
from pathlib import Path

import pytest

from dsft.errors import SpecError
from dsft.generate.hostfile import parse, read_hostfile, render


def test_hosts_come_back_in_their_order() -> None:
    hosts = {"node2": 8, "10.77.0.1": 4, "fe80::1": 1, "a-b.example.org": 2}
    assert list(parse(render(hosts), "hosts").items()) == list(hosts.items())
    assert parse("# two hosts\n\n  a slots=1  \nb\tslots=2\n", "hosts") == {"a": 1, "b": 2}


@pytest.mark.parametrize(("text", "problem"), [
    ("a slots=2 # fast\n", "hosts:1: 'a slots=2 # fast' is not `host slots=n`"),
    ("a slots=2\na slots=3\n", "hosts:2: a is on an earlier line too"),
    ("a\n", "hosts:1: 'a' is not `host slots=n`"),
    ("a slots=0\n", "hosts:1: a has 0 slots"),
    ("-a slots=1\n", "'-a' is neither a host name"),
    ("10.0.0.300 slots=1\n", "'10.0.0.300' is neither a host name"),
    ("a_b slots=1\n", "'a_b' is neither a host name"),
    ("# nothing\n", "no host in the file"),
])  # fmt: skip
def test_what_is_not_a_host_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(text, "hosts")
    assert problem in str(error.value)


def test_all_bad_lines_are_reported_together() -> None:
    with pytest.raises(SpecError) as error:
        parse("a slots=x\nb slots=1\nb slots=1\n", "hosts")
    assert [problem.where for problem in error.value.problems] == ["hosts:1", "hosts:3"]


def test_only_a_file_of_some_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**30)
    with pytest.raises(SpecError, match="large: it is larger than"):
        read_hostfile(tmp_path / "large")
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(OSError, match=f"it is {kind}"):
            read_hostfile(path)
