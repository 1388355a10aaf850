"""Run `dsft` commands one after the other in this process, in the working folder, and write the outcomes.

python commands_worker.py COMMANDS.json RESULTS.json      [[word, …], …] -> [[exit code, output], …]
"""

from __future__ import annotations

import io
import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from dsft import cli


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
    found = [result(words) for words in json.loads(Path(commands).read_text())]
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
