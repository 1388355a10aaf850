"""`dsft` as it is typed: typed.py [--fork] COMMAND [word …]; with --fork its ranks are forks of it."""

import sys
from types import SimpleNamespace

from dsft.cli import main
from dsft.rank import start
from tests.integration.commands_worker import ForkedRank

if __name__ == "__main__":
    if sys.argv[1] == "--fork":
        del sys.argv[1]
        start.subprocess = SimpleNamespace(Popen=ForkedRank)  # type: ignore[assignment]
    main()
