"""What a rank does beside its work, from its first moment on: takes its place and its environment; its output
goes where it is to go, it is heard of, it hears signals, and it does not outlive its launcher."""

from __future__ import annotations

from collections.abc import Mapping

from dsft.launch.ancestors import watch
from dsft.launch.environment import Launched
from dsft.launch.pulse import LOGS, SOCKET, Pulse, keep_log
from dsft.launch.stopping import Stopping


def live(launched: Launched, environ: Mapping[str, str]) -> tuple[Pulse, Stopping]:
    """To be called once, in the main thread."""
    keep_log(environ.get(LOGS), launched.rank, launched.world_size)
    pulse = Pulse(launched.rank, launched.local_rank, environ.get(SOCKET))
    pulse.start()
    stopping = Stopping(pulse.end, speaks=launched.rank == 0)
    stopping.listen()
    watch(stopping)
    return pulse, stopping
