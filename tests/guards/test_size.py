"""The project stays small: limits on the lines of a file, of a function and of all of dsft/. What is over a
limit is named here, may not grow, and leaves the list when it is within."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted((ROOT / "dsft").rglob("*.py"))

ALL = 56_273
"""Lines of dsft/. Whoever adds more than that raises the number, and says in the commit what for."""

OF_A_FILE, LONG_FILES = (
    400,
    {
        "dsft/cli.py": 692,
        "dsft/spec/schema.py": 712,
    },
)
OF_A_FUNCTION, LONG_FUNCTIONS = (
    60,
    {
        "dsft/model/softmax_kernel.py softmax_kernel": 63,
    },
)


def lines_of_files() -> dict[str, int]:
    return {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in PATHS}


def lines_of_functions() -> dict[str, int]:
    """By file and name: the longest of those that share it."""
    found: dict[str, int] = {}
    for path in PATHS:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{path.relative_to(ROOT)} {node.name}"
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found[name] = max(lines, found.get(name, 0))
    return found


def over(lines: dict[str, int], limit: int, allowed: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in lines.items() if number > max(limit, allowed.get(name, 0))}


def test_no_file_is_longer_than_its_limit() -> None:
    assert over(lines_of_files(), OF_A_FILE, LONG_FILES) == {}


def test_no_function_is_longer_than_its_limit() -> None:
    assert over(lines_of_functions(), OF_A_FUNCTION, LONG_FUNCTIONS) == {}


def test_the_lists_name_only_what_is_over_a_limit() -> None:
    lines = lines_of_files() | lines_of_functions()
    limits = dict.fromkeys(LONG_FILES, OF_A_FILE) | dict.fromkeys(LONG_FUNCTIONS, OF_A_FUNCTION)
    assert [name for name, limit in limits.items() if lines.get(name, 0) <= limit] == []


def test_all_lines_together() -> None:
    found = sum(lines_of_files().values())
    assert 10_000 < found <= ALL
