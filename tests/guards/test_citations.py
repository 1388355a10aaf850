"""What scripts/citations finds: that every line of DeepSpeed that the code cites has the symbol it names."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "citations"))
MOVED = "lines 2 have it in runtime/zero/stage3.py"


def test_every_citation_of_deepspeed_fits_the_installed_version(capsys: Any) -> None:
    assert SCRIPT["main"]() == 0, capsys.readouterr().out
    count = int(capsys.readouterr().out.split()[0])
    assert count >= 80, "the citations were not found, so the script looks for them in the wrong place"


@pytest.mark.parametrize(("text", "line", "message"), [
    ("see stage3.py:2 defragment", 1, None),
    ("see\n    (zero/stage3.py:2\n    # defragment)", 2, None),
    ("torch/nn/modules/module.py:1 forward", 1, "not looked up"),
    ("stage3.py:1 defragment", 1, "stage3.py:1 has no defragment; " + MOVED),
    ("stage3.py:9 defragment", 1, "stage3.py:9 has no defragment; " + MOVED),
    ("stage3.py:2 fragment", 1, "stage3.py:2 has no fragment; no line has it in runtime/zero/stage3.py"),
    ("stage3.py:2)", 1, "stage3.py:2 names no symbol"),
    ("stage4.py:2 defragment", 1, "DeepSpeed has no file stage4.py"),
])  # fmt: skip
def test_a_citation(tmp_path: Path, text: str, line: int, message: str | None) -> None:
    cited = tmp_path / "runtime" / "zero" / "stage3.py"
    cited.parent.mkdir(parents=True)
    cited.write_text("import torch\nflat = defragment(parts)\n")
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "stage3.py").write_text("")
    found = list(SCRIPT["citations"](text, tmp_path))
    assert found == ([] if message == "not looked up" else [(line, message)])
