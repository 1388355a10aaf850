"""Write the pictures of docs/pictures: what commands print, as SVG, and pages and curves of a run, as PNG.

python -m tests.pictures                       the SVGs, which tests/unit/test_pictures.py compares
python -m tests.pictures --run runs/quickstart the PNGs too, of a run of scripts/quickstart; needs chromium
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from dsft.data.read.builtin import builtin_rows
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.plan.build import build_plan
from dsft.plan.show import parts
from dsft.plan.tables import rendered
from dsft.preview.count import durations
from dsft.preview.terminal import as_text
from dsft.preview.view import collect, view
from dsft.spec.load import load_spec
from tests.launching import ROOT

LLAMA_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
FOLDER = ROOT / "docs" / "pictures"
WIDTH = 100  # columns
PAGE = (1200, 1400)  # pixels of a page's picture
THEME = SVG_EXPORT_THEME
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""rich's SVG without its fonts, which a viewer would fetch from the network."""


def svgs() -> Mapping[str, str]:
    """Return name -> SVG of what the commands print in a terminal of WIDTH columns."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_readme_spec(Path(folder))
        before = Path.cwd()
        os.chdir(folder)
        try:
            plan = build_plan(load_spec(path, check_files=False), None)
            taken = durations(None)(plan)
        finally:
            os.chdir(before)
        shown = rendered(parts(plan, taken, explain=False), terminal=True, width=WIDTH)
        quickstart = load_spec(ROOT / "specs/quickstart.yaml", [f"data.cache_dir={folder}"])
        rows = view(collect(quickstart), rows=2)
        preview = as_text(rows, "256", WIDTH, figures=False)
    return {
        "plan.svg": svg("dsft plan llama8b.yaml", shown),
        "preview.svg": svg("dsft preview specs/quickstart.yaml", preview),
    }


def write_readme_spec(folder: Path) -> Path:
    """Write README's spec and what it names: of the model its shape and a tokenizer of bytes; built-in
    rows."""
    spec = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert spec
    model = folder / "models" / "Llama-3.1-8B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    byte_level_tokenizer().save_pretrained(model)
    (folder / "data").mkdir()
    (folder / "data" / "conversations.json").write_text(json.dumps(builtin_rows("quickstart") * 40))
    path = folder / "llama8b.yaml"
    path.write_text(spec[1], encoding="utf-8")
    return path


def svg(command: str, printed: str) -> str:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {command}\n{printed.strip()}"), soft_wrap=False)
    return console.export_svg(title="", theme=THEME, code_format=FORMAT, unique_id="terminal")


def screenshots(run: Path) -> None:
    """Write the PNGs: the curves that the run drew, and its report and preview as chromium shows them."""
    shutil.copy(run / "curves.png", FOLDER / "curves.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "preview.html")
        dsft = [sys.executable, "-c", "from dsft.cli import main; main()"]
        subprocess.run([*dsft, "preview", ROOT / "specs/quickstart.yaml", "--html", page], check=True)
        subprocess.run([*dsft, "report", str(run), "--out", Path(folder, "report.html")], check=True)
        for name in ("preview", "report"):
            subprocess.run(
                [
                    "chromium", "--headless", "--no-sandbox", "--hide-scrollbars",
                    f"--user-data-dir={folder}",
                    f"--window-size={PAGE[0]},{PAGE[1]}", f"--screenshot={FOLDER / name}.png",
                    f"file://{folder}/{name}.html",
                ],
                check=True, capture_output=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, text in svgs().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    if options.run is not None:
        screenshots(options.run)


if __name__ == "__main__":
    main()
