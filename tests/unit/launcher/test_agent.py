"""The agent of one host, in this process, with ranks that are a shell's commands."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from dsft.launcher.agent import HostProcesses
from dsft.launcher.launch_plan import HostCommand


class Sent:
    """Takes what the agent sends to the supervisor."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any], *, may_drop: bool = False) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_end_of_each_rank_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    """Also on Linux before 5.3 (Red Hat 8 has 4.18), which has no pidfd."""

    def none(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", none)
    argv = ("sh", "-c", 'exit "$RANK"')
    command = HostCommand("here", "job", argv, {}, str(tmp_path), str(tmp_path / "logs"), (3, 0, 4))
    sent: Any = Sent()

    async def run() -> None:
        processes = HostProcesses(command, tmp_path, sent, asyncio.Event())
        processes.start()
        while {"all_ended": True} not in sent.messages:
            await asyncio.sleep(0.01)
        await processes.end()
        processes._socket.close()  # an agent's own process ends here

    asyncio.run(asyncio.wait_for(run(), 60))
    died = [message for message in sent.messages if "died" in message]
    assert sorted((message["died"], message["code"]) for message in died) == [(0, 0), (3, 3), (4, 4)]
