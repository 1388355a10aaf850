"""Plants small faults in a copy of the sources, one at a time, and runs the subject's unit tests on each.

    python tests/mutants.py [--each 4] [--seed 0] [--only dsft/objective]

Prints a line per mutant: `caught`, `late` (the tests did not end within LIMIT seconds) or `SURVIVED`. A
survivor shows a missing test, or is a change that does not alter the results;
docs/internals/numerics.md has those that were looked at. pytest does not collect this file, and the checkout
itself is not changed.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
DATA, ENGINE = "tests/unit/data/test_data_", "tests/unit/engine/test_engine_"
MODEL, FOLDERS = "tests/unit/model/test_", "tests/architectures/test_folders.py"
SPLIT_ROWS = f"tests/architectures/test_wholes.py tests/unit/test_self_check.py {MODEL}model_routing.py"
SUBJECTS: dict[str, str] = {
    "dsft/objective/answers.py": "tests/unit/objective tests/unit/reference/test_reference_check.py",
    "dsft/objective/api.py": "tests/unit/objective", "dsft/objective/next_token.py": "tests/unit/objective",
    "dsft/objective/preference.py": "tests/unit/objective",
    "dsft/model/head.py": "tests/unit/model/test_model_head.py tests/unit/model/test_model_policy.py",
    "dsft/model/routing.py": f"{MODEL}model_routing.py",
    "dsft/model/experts.py": f"{MODEL}experts.py {MODEL}model_lora_experts.py",
    "dsft/model/attention_split.py": SPLIT_ROWS, "dsft/model/mlp_chunks.py": f"{MODEL}model_mlp_chunks.py",
    "dsft/model/whole.py": "tests/architectures/test_wholes.py",
    "dsft/model/conversion.py": f"{MODEL}conversion.py {MODEL}model_read.py {FOLDERS}",
    "dsft/model/recurrence.py": f"{MODEL}model_recurrence.py",
    "dsft/engine/replicas.py": f"{ENGINE}replicas.py",
    "dsft/dist/sequence.py": f"{SPLIT_ROWS} tests/unit/dist/test_dist_sequence.py",
    "dsft/data/steps/split.py": f"{SPLIT_ROWS} {DATA}steps.py",
    "dsft/data/render/thoughts.py": f"{DATA}thoughts.py",
    "dsft/engine/gradients.py": f"{ENGINE}clip.py {ENGINE}norm.py tests/unit/run/test_loss_scale.py",
    "dsft/engine/optimizer.py": f"{ENGINE}groups.py {ENGINE}clip.py",
    "dsft/engine/frozen.py": "tests/unit/reference", "dsft/reference/check.py": "tests/unit/reference",
    "dsft/reference/key.py": "tests/unit/reference", "dsft/reference/refer.py": "tests/unit/reference",
    "dsft/reference/precomputed.py": "tests/unit/reference",
    "dsft/reference/store.py": "tests/unit/reference",
    "dsft/data/render/masks.py": f"{DATA}masks.py {DATA}truth.py {DATA}render.py",
    "dsft/data/render/renderer.py": f"{DATA}masks.py {DATA}truth.py {DATA}render.py {DATA}pairs.py",
    "dsft/data/render/tokens.py": f"{DATA}tokens.py {DATA}masks.py {DATA}render.py",
    "dsft/data/steps/batch.py": f"{DATA}steps.py {DATA}pack.py {DATA}longest.py {DATA}pairs.py",
    "dsft/data/steps/collate.py": f"{DATA}steps.py {DATA}pack.py {DATA}pairs.py",
    "dsft/data/steps/pack.py": f"{DATA}pack.py {DATA}pairs.py {DATA}longest.py",
    "dsft/data/steps/steps.py": f"{DATA}steps.py {DATA}order.py {DATA}pairs.py {DATA}longest.py",
    "dsft/data/sets/dataset.py": f"{DATA}dataset.py {DATA}whole.py {DATA}pairs.py",
    "dsft/data/sets/order.py": f"{DATA}order.py {DATA}dataset.py",
    "dsft/data/sets/answers.py": f"{DATA}pairs.py {DATA}answers.py",
    "dsft/data/sets/cut.py": f"{DATA}pieces.py {DATA}whole.py",
    "dsft/data/sets/stream.py": f"{DATA}pieces.py {DATA}whole.py {DATA}pairs.py",
    "dsft/data/sets/selection.py": f"{DATA}dataset.py {DATA}division.py {DATA}whole.py",
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.Pow: ast.Mult,
}  # fmt: skip
Change = Callable[[], None]


def changes(node: ast.AST) -> Iterator[Change]:
    """What may be done to a node, one of them at a time."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield lambda: setattr(node, "ops", [COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in OPERATORS:
            yield lambda: setattr(node, "op", OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield lambda: setattr(node, "op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.Constant(value=bool() as value):
            yield lambda: setattr(node, "value", not value)
        case ast.Constant(value=int() | float() as number):
            yield lambda: setattr(node, "value", number + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield lambda: (setattr(node, "op", ast.UAdd()), setattr(node, "operand", operand))[0]


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Those that are computed: no annotations, decorators or messages."""
    children = ast.iter_child_nodes(tree)
    if isinstance(tree, ast.FunctionDef):
        children = iter([*tree.args.defaults, *filter(None, tree.args.kw_defaults), *tree.body])
    elif isinstance(tree, ast.ClassDef):
        children = iter(tree.body)
    for child in children:
        if isinstance(child, ast.arg | ast.JoinedStr | ast.Raise | ast.Assert | ast.alias):
            continue
        if isinstance(child, ast.AnnAssign):
            child = ast.Expr(child.value) if child.value else ast.Pass()
        yield child
        yield from nodes(child)


def mutants(source: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, the statement before and after, the whole text after."""
    count = sum(len(list(changes(node))) for node in nodes(ast.parse(source)))
    for number in range(count):
        tree = ast.parse(source)
        found = [(node, change) for node in nodes(tree) for change in changes(node)]
        node, change = found[number]
        before = ast.unparse(deepcopy(node))
        change()
        after = ast.unparse(ast.fix_missing_locations(node))
        yield node.lineno, before.splitlines()[0], after.splitlines()[0], ast.unparse(tree)  # type: ignore[attr-defined]


def run(copy: Path, tests: str) -> str:
    """In a process forked from this one, which has imported what takes seconds and is not changed."""
    pid = os.fork()
    if not pid:
        os.setsid()
        code = 1
        try:
            for number, name in enumerate((os.devnull, str(copy / "output"), str(copy / "output"))):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
            os.chdir(copy)
            os.environ |= {"PYTHONPATH": str(copy), "DS_ACCELERATOR": "cpu"}
            sys.path[0] = str(copy)
            code = int(pytest.main([*OPTIONS, *tests.split()]))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return "caught" if os.waitstatus_to_exitcode(status) else "SURVIVED"
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "late"


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=4, help="mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path begins so")
    asked = parser.parse_args(words)
    sys.dont_write_bytecode = True  # of two changes within a second the second may look like the first
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        ignored = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", "runs")
        shutil.copytree(ROOT, copy, ignore=ignored)
        sound: set[str] = set()
        for name, tests in SUBJECTS.items():
            if not name.startswith(asked.only):
                continue
            if tests not in sound and run(copy, tests) != "SURVIVED":
                sys.exit(f"{tests}: fails without a fault\n{(copy / 'output').read_text()}")
            sound.add(tests)
            source = (copy / name).read_text(encoding="utf-8")
            made = list(mutants(source))
            chosen = random.Random(f"{asked.seed} {name}").sample(made, min(asked.each, len(made)))
            for line, before, after, text in sorted(chosen):
                (copy / name).write_text(text, encoding="utf-8")
                print(f"{run(copy, tests):8} {name}:{line}  {before}  →  {after}", flush=True)
            (copy / name).write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
