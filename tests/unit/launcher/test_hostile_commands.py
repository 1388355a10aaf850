"""What an agent is to run arrives byte for byte: through its standard input, and through no shell."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsft.launcher.launch_plan import HostCommand
from tests.launching import LATE
from tests.unit.plan.hostile import argument, armed

QUICK = settings(
    max_examples=3, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
RECORD = 'printf "%s\\0" "$@" "$GREETING" > asked'


@QUICK
@given(st.lists(argument, min_size=200, max_size=200), argument)
def test_command_arrives_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], greeting: str
) -> None:
    folder = tmp_path_factory.mktemp("command")
    words, (value,) = armed(texts, folder), armed([greeting], folder)
    argv = ("bash", "-c", RECORD, "record", *words)
    command = HostCommand(
        "localhost", "job", argv, {"GREETING": value}, str(folder), str(folder / "logs"), (0,)
    )
    agent = subprocess.Popen(
        [sys.executable, "-m", "dsft.launcher.agent"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        for message in ({"environ": {}}, {"command": asdict(command)}):
            agent.stdin.write(b"dsft:" + json.dumps(message).encode() + b"\n")
        agent.stdin.flush()
        assert agent.wait(LATE) == 0  # its input stays open: an end of it would end what it runs
    finally:
        agent.kill()
        agent.communicate()
    asked = (folder / "asked").read_bytes().split(b"\0")[:-1]
    assert asked == [os.fsencode(word) for word in (*words, value)]
    assert not (folder / "canary").exists()
