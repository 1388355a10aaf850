"""Run `dsft` commands one after the other in this process, in the working folder, and write the outcomes.

python commands_worker.py COMMANDS.json RESULTS.json      [[word, …], …] -> [[exit code, output], …]

The ranks that a command starts are forks of this process. tests/unit/reference/test_reference_misuse.py
starts ranks that are processes of their own, and tests/integration/test_api.py a command whose rank is one.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

from dsft import cli
from dsft.rank import start
from tests import forked

TYPED = Path(__file__).with_name("typed.py")


class ForkedRank:
    """What `run_ranks` needs of subprocess.Popen, for `python SCRIPT WORD …` and, as typed.py, for
    `python -c COMMAND WORD …`."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: int | None, preexec_fn: Callable[[], None]
    ) -> None:
        def work() -> int:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            if stdout is not None:
                os.dup2(stdout, 1)
            os.environ.clear()
            assert argv[1] != "-c" or argv[2] == "from dsft.cli import main; main()"  # as typed.py
            script, *words = (str(TYPED), *argv[3:]) if argv[1] == "-c" else argv[1:]
            return forked.run({"script": script, "args": words}, env)

        self._pid, self._code = forked.child(work), None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._pid, 9)

    def wait(self) -> None:
        if self.poll() is None:
            os.waitpid(self._pid, 0)


def result(words: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    sys.argv = ["dsft", *words]
    with redirect_stdout(output), redirect_stderr(output):
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: B902  as the interpreter would
            traceback.print_exc()
            code = 1
    return code, output.getvalue()


def main(commands: str, results: str) -> None:
    sys.modules.pop("matplotlib", None)  # hidden from forked ranks, needed by dsft report
    start.subprocess = SimpleNamespace(Popen=ForkedRank)  # type: ignore[assignment]
    found = [result(words) for words in json.loads(Path(commands).read_text())]
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
