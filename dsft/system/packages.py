"""Check that the packages that dsft imports are installed. Imports none of them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from dsft.errors import MissingInputError

IMPORTED = (
    "torch", "deepspeed", "transformers", "tokenizers", "huggingface_hub", "jinja2", "numpy", "safetensors",
    "packaging", "pydantic", "yaml", "rich", "filelock", "psutil",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def check_packages() -> None:
    """End the process with exit code 66 and a sentence if one is not installed, as where the environment is
    not activated."""
    missing = [name for name in IMPORTED if find_spec(name) is None]
    if not missing:
        return
    environment, script = ROOT / ".venv" / "bin" / "activate", ROOT / "scripts" / "install"
    way = ", or install dsft there with what it depends on (docs/install.md)"
    if script.exists():  # of a checkout
        way = f": {'' if environment.exists() else f'{script}, then '}. {environment}"
    print(
        f"error: this Python, {sys.executable}, has no {', '.join(missing)}, which dsft needs; activate the "
        f"environment in which dsft is installed{way}",
        file=sys.stderr,
    )
    sys.exit(MissingInputError.exit_code)
