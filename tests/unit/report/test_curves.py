import math
import sys
from pathlib import Path

import pytest

from dsft.report.curves import figure, series, smoothed, write_curves


def records(steps: int) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        found.append(
            {
                "train/global_step": step,
                "train/loss": 5 / step,
                "train/grad_norm": math.inf if step == 7 else 20 / step,
                "train/learning_rate": 1e-3,
            }
        )
        if step % 5 == 0:
            found.append({"train/global_step": step, "eval/loss": 6 / step, "eval/a/loss": 7 / step})
    return found


@pytest.mark.parametrize("steps", [0, 1, 2, 100])
def test_a_picture_is_drawn_of_any_number_of_steps(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "curves.png"
    assert write_curves(path, "run $x$ _1", records(steps)) == f"curves: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_run_on_preference_pairs_has_its_rewards_in_the_picture(tmp_path: Path) -> None:
    """A row more of it."""
    plain, pairs = tmp_path / "plain.png", tmp_path / "pairs.png"
    write_curves(plain, "run", records(10))
    rewards = {"rewards/margins": 0.5, "rewards/accuracies": 0.75}
    more = [
        record | {f"{'eval' if 'eval/loss' in record else 'train'}/{name}": v for name, v in rewards.items()}
        for record in records(10)
    ]
    assert write_curves(pairs, "run", more) == f"curves: {pairs}"
    assert pairs.read_bytes() != plain.read_bytes()
    for names, titles in (
        (("rewards/margins", "kl"), ["rewards/margins", "kl"]),  # KTO
        (("rewards/margins",), ["rewards/margins"]),
    ):
        labeled = [record | {f"train/{name}": 0.5 for name in names} for record in records(10)]
        axes = figure("run", labeled).axes
        assert [axis.get_title(loc="left") for axis in axes if axis.get_title(loc="left") in titles] == titles


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    printed = write_curves(tmp_path / "no" / "curves.png", "run", records(3))
    assert printed.startswith("no curves.png: ") and "No such file" in printed


def test_values_that_are_not_finite_are_not_plotted() -> None:
    steps, values = series(records(8), "train/grad_norm")
    assert 7 not in steps and len(values) == 7


def test_smoothing_keeps_lines_and_ends() -> None:
    line = [3.0 + 2 * i for i in range(200)]
    assert smoothed(line) == pytest.approx(line)
    assert smoothed([0.0, 1.0] * 100)[100] == pytest.approx(0.5, abs=0.2)


def test_the_module_alone_imports_no_matplotlib() -> None:
    import subprocess

    code = "import sys, dsft.report.curves; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
