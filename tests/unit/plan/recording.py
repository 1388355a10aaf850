"""Launch scripts run by a real bash, with programs on the PATH that write down what they are asked and do
nothing else. Takes a folder, puts scripts and programs there."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SYSTEM = "/usr/local/bin:/usr/bin:/bin"


@dataclass
class Stage:
    """A root with `scripts/launch`, `dsft/train.py` and `bin`. `answers`: program -> shell lines that it runs
    once it has written down its arguments."""

    root: Path
    answers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bin", "scripts/launch", "dsft", "asked"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "dsft/train.py").write_text("")
        for name in ("deepspeed", "torchrun", "srun", "scontrol", "hostname", "getent"):
            asked = shlex.quote(str(self.root / "asked" / name))
            lines = ["#!/bin/bash", f'printf "%s\\0" "$@" > {asked}', self.answers.get(name, "")]
            path = self.root / "bin" / name
            path.write_text("\n".join(lines) + "\n")
            path.chmod(0o755)

    def run(
        self, name: str, script: str, arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `bash scripts/launch/NAME`, from another folder; with what it asked of programs in `asked`."""
        path = self.root / "scripts/launch" / name
        path.write_bytes(os.fsencode(script))
        for old in (self.root / "asked").iterdir():
            old.unlink()
        given = {"PATH": f"{self.root / 'bin'}:{SYSTEM}", "SLURM_SUBMIT_DIR": str(self.root)}
        return subprocess.run(
            ["bash", str(path), *arguments], cwd="/", env=given | dict(environ or {}),
            capture_output=True, text=True,
        )  # fmt: skip

    def asked(self, program: str) -> list[bytes] | None:
        """The arguments that the program got last; None where it was not started."""
        path = self.root / "asked" / program
        if not path.exists():
            return None
        return path.read_bytes().split(b"\0")[:-1]
