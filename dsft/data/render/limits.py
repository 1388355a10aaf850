"""Bounds on what a chat template may do with one row: the turns of its loops, the size of each value that it
makes, and its CPU time.

Takes transformers' sandbox for templates and bounds it in place; gives a `Limits` to be restarted for each
rendering. It needs no signal and no process of its own, so the bounds hold in every thread. Touches nothing.

How: every `for` loop and every call in a template counts (Environment.call, and a filter that is put around
what a loop goes through); `*`, `**` and `%` are intercepted, as jinja2's sandbox offers; filters and methods
whose result can be much larger than what they are given are asked for its size before they run; and the
results of all others are measured after, which is early enough, since these grow by a constant factor.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dsft.data.rows import EndlessTemplateError

FREE_SIZE = 200_000
TIMES_THE_ROW = 20
"""A rendered text, and any value that a template makes, may have FREE_SIZE characters or items, or
TIMES_THE_ROW times the characters of the row's strings."""
FREE_STEPS = 5_000_000
"""Turns of loops and calls in one rendering. The row's characters add TIMES_THE_ROW times their number."""
TIME_LIMIT = 60.0
"""Seconds of CPU time for one rendering."""

_PER_STEP = 32  # characters or items, made or copied, that count as one step: these bound the memory
_LOOK = 4096  # steps between two looks at the clock
_SHORT = 1000  # characters or items of a value that is not counted
_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0_^.\d]*?(\d{6,})|\{[^{}]*?(\d{6,})")
_GIVEN = re.compile(r"%[-+ #0.\d]*\*|\{[^{}]*\{")
_ITEMS, _MADE = " items", " made"  # names of filters that no template can write
_SIZED: tuple[type, ...] = (
    list,
    tuple,
    str,
    dict,
    range,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class Limits:
    """The bounds of one template. name: as an error calls it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.restart(())

    def restart(self, row: Any) -> None:
        """Begin with a rendering of this row."""
        self._row, self._characters = row, -1
        self._rest, self.left = FREE_STEPS, 0
        self._ends = 0.0  # the clock is read once steps are counted

    @property
    def largest(self) -> int:
        """Characters or items that a value may have."""
        if self._characters < 0:
            self._characters = characters(self._row)
            self._rest += TIMES_THE_ROW * self._characters
        return max(FREE_SIZE, TIMES_THE_ROW * self._characters)

    def count(self, steps: int) -> None:
        """Steps that are about to be made. `left` of them are free of any further look."""
        self.left -= steps
        if self.left < 0:
            self._look()

    def _look(self) -> None:
        self._rest += self.left
        if self._rest < 0:
            _ = self.largest  # the row's characters add to the rest, once
        if self._rest < 0:
            steps = FREE_STEPS + TIMES_THE_ROW * self._characters
            raise EndlessTemplateError(
                f"{self._name} goes through its loops more than {steps:,} times for one row, which is the "
                "limit for a row of this size; correct its loops"
            )
        now = time.thread_time()
        self._ends = self._ends or now + TIME_LIMIT
        if now > self._ends:
            raise EndlessTemplateError(
                f"{self._name} takes more than {TIME_LIMIT:g} seconds of CPU time to render one row; correct "
                "the template or shorten the row"
            )
        self.left = min(self._rest, _LOOK)
        self._rest -= self.left

    def check(self, size: int) -> None:
        """A value of this size is about to be made, or was."""
        if size < _SHORT:
            return
        if size > FREE_SIZE and size > self.largest:
            raise EndlessTemplateError(
                f"{self._name} makes a value of more than {self.largest:,} characters or items, which is the "
                "limit for a row of this size; correct the template"
            )
        self.count(size // _PER_STEP)

    def made(self, value: Any) -> Any:
        """The value, whose size is checked: its characters, or its items and theirs."""
        kind = type(value)
        if kind is str:
            self.check(len(value))
        elif kind in (list, tuple, dict):
            self.check(_unfolded(value))
        elif kind is int:
            self.check(value.bit_length() // 8)
        elif isinstance(value, str | bytes):
            self.check(len(value))
        return value

    def items(self, values: Iterable[Any], cost: int = 1) -> Iterable[Any]:
        """The values, each of which counts as so many steps."""
        if type(values) in _SIZED:
            steps = len(values) * cost  # type: ignore[arg-type]
            if steps < _LOOK:
                self.count(steps)
                return values
        return self._counted(values, cost)

    def _counted(self, values: Iterable[Any], cost: int) -> Iterator[Any]:
        for value in values:
            self.left -= cost
            if self.left < 0:
                self._look()
            yield value


def bound(environment: Any, name: str) -> Limits:
    """Bound what the templates of a sandbox do that are compiled from now on."""
    limits = Limits(name)

    @pass_context  # so that it is not run when a template is compiled
    def items(context: Context, values: Iterable[Any], cost: int) -> Iterable[Any]:
        return limits.items(values, cost)

    @pass_context
    def made(context: Context, value: Any) -> Any:
        return value if type(value) is str and len(value) < _SHORT else limits.made(value)

    environment.__class__ = _Bounded
    environment.limits = limits
    environment.finalize = partial(_written, limits)
    environment.globals.pop("lipsum", None)
    clock = environment.globals["strftime_now"]
    environment.globals["strftime_now"] = lambda format: clock(_narrow(limits, format))
    environment.filters = {key: _bounded(limits, key, each) for key, each in environment.filters.items()}
    environment.filters |= {_ITEMS: items, _MADE: made}
    return limits


class _Bounded(ImmutableSandboxedEnvironment):
    limits: Limits
    intercepted_binops = frozenset({"*", "**", "%"})

    def _generate(self, source: nodes.Template, *others: Any, **named: Any) -> str:
        return super()._generate(_Counting().visit(source), *others, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str | bytes):
                _narrow(self.limits, left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            self.limits.check(bits // 8)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
                    self.limits.check(max(_unfolded(value), 1) * times)
        return self.limits.made(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def formatted(*args: Any, **named: Any) -> str:
            _narrow(self.limits, value.__self__, args, named)
            return wrapped(*args, **named)

        return formatted

    def call(__self, __context: Context, __called: Any, *args: Any, **named: Any) -> Any:  # noqa: B902
        limits = __self.limits
        limits.count(1)
        if type(__called) is LoopContext:  # of a recursive loop
            args = (limits.items(*args[:1]), *args[1:])
        else:
            owner = getattr(__called, "__self__", None)
            if isinstance(owner, str | bytes | int):
                size = _METHODS.get(__called.__name__)
                if size is not None:
                    args = tuple(map(_held, args))
                    limits.check(_asked(size, owner, *args, **named))
        return limits.made(super().call(__context, __called, *args, **named))


class _Counting(NodeTransformer):
    """Puts a filter around what loops go through, and around what operations make."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        written = sum(len(one.data) for part in node.body for one in part.find_all(nodes.TemplateData))
        self.generic_visit(node)
        cost = nodes.Const(1 + written // _PER_STEP)
        node.iter = nodes.Filter(node.iter, _ITEMS, [cost], [], None, None, lineno=node.lineno)
        return node

    def _whole(self, node: nodes.Expr) -> nodes.Expr:
        if not any(isinstance(one, nodes.Expr) and not isinstance(one, nodes.Const) for one in _inside(node)):
            return node
        self.generic_visit(node)
        return nodes.Filter(node, _MADE, [], [], None, None, lineno=node.lineno)

    visit_List = visit_Dict = visit_Concat = _whole

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        if node.ctx == "load":
            return self._whole(node)
        self.generic_visit(node)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Expr:
        """One filter around `a + b + c`."""
        one = node
        while isinstance(one, nodes.Add):
            one.right = self.visit(one.right)
            if not isinstance(one.left, nodes.Add):
                one.left = self.visit(one.left)
                break
            one = one.left
        return nodes.Filter(node, _MADE, [], [], None, None, lineno=node.lineno)


def _inside(node: nodes.Node) -> Iterator[nodes.Node]:
    """What stands in it, and in the pairs of a dict."""
    for one in node.iter_child_nodes():
        if isinstance(one, nodes.Pair):
            yield from one.iter_child_nodes()
        else:
            yield one


def _bounded(limits: Limits, name: str, called: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is bounded. Some are given the context, the environment or the like as first argument."""
    first = 1 if hasattr(called, "jinja_pass_arg") else 0
    size = _FILTERS.get(name)

    @wraps(called)
    def filtered(*args: Any, **named: Any) -> Any:
        args = tuple(limits.items(one) if type(one) is GeneratorType else one for one in args)
        if size is not None:
            args = (*args[:first], *map(_held, args[first:]))
            limits.check(_asked(size, *args[first:], **named))
        elif name == "format":
            _narrow(limits, args[0], args[1:], named)
        return limits.made(called(*args, **named))

    return filtered


def _written(limits: Limits, value: Any) -> Any:
    """What an expression writes: a block that keeps its text holds all of them together."""
    limits.count(len(value) // _PER_STEP if type(value) is str else 1)
    return value


def _held(value: Any) -> Any:
    """A list of what a generator gives: it is measured, and then used."""
    return list(value) if isinstance(value, Iterator) else value


# --- sizes ------------------------------------------------------------------------------------------------


def _asked(size: Callable[..., int], *args: Any, **named: Any) -> int:
    """0 where the arguments are none that it can be called with."""
    try:
        return size(*args, **named)
    except (TypeError, ValueError, AttributeError, LookupError):
        return 0


def _unfolded(value: Any) -> int:
    """Characters or items of a value and of all in it, written out: what stands in it twice counts twice."""
    if isinstance(value, str | bytes):
        return len(value)
    sizes: dict[int, int] = {}

    def size(one: Any) -> int:
        known = sizes.get(id(one))
        if known is None:
            inner = one.values() if isinstance(one, dict) else one
            known = len(one)
            for each in inner:
                if type(each) is str:
                    known += len(each)
                elif isinstance(each, list | tuple | dict):
                    known += size(each)
            sizes[id(one)] = known
        return known

    return size(value) if isinstance(value, list | tuple | dict) else 0


def _joined(separator: Any, values: Any) -> int:
    return (len(separator) + 1) * len(values) + _unfolded(values if isinstance(values, list | tuple) else "")


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    said = str(text)
    return len(said) + said.count(str(old)) * len(str(new))


def _width(*args: Any, **named: Any) -> int:
    """The widest number among the arguments."""
    return max((one for one in (*args[1:], *named.values()) if isinstance(one, int)), default=0)


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    said = str(text)
    return len(said) + (said.count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))


def _product(text: Any, *args: Any, **named: Any) -> int:
    """Of the text and the longest text among the arguments, which may be written at each character."""
    others = [len(one) for one in (*args, *named.values()) if isinstance(one, str)]
    return len(str(text)) * (1 + max(others, default=0)) + _width(text, *args, **named)


def _as_json(value: Any, *args: Any, **named: Any) -> int:
    indents = [one for one in (*args, *named.values()) if isinstance(one, int | str)]
    return _unfolded(value) * max((one if isinstance(one, int) else len(one) for one in indents), default=1)


_METHODS: Mapping[str, Callable[..., int]] = {
    "join": _joined,
    "replace": _replaced,
    "translate": lambda text, table: len(text) * max(map(len, filter(_is_text, table.values())), default=1),
    "expandtabs": lambda text, size=8: text.count("\t") * size,
    **dict.fromkeys(("ljust", "rjust", "center", "zfill", "to_bytes"), _width),
}
_FILTERS: Mapping[str, Callable[..., int]] = {
    "join": lambda values, separator="", *_, **__: _joined(str(separator), values),
    "replace": _replaced,
    "indent": _indented,
    "tojson": _as_json,
    **dict.fromkeys(("center", "batch", "slice"), _width),
    **dict.fromkeys(("wordwrap", "urlize"), _product),
}
"""Sizes of results, of methods and filters where these can be much larger than what these are given."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _narrow(limits: Limits, text: Any, *values: Any) -> Any:
    """A format text, after a check of the widths that it names or takes from the values."""
    text = text if isinstance(text, str) else str(text)
    widths = [int(one or other) for one, other in _WIDE.findall(text)]
    if _GIVEN.search(text):
        widths += [abs(one) for one in _numbers(values)]
    for width in widths:
        limits.check(width)
    return text


def _numbers(values: Any) -> Iterator[int]:
    if isinstance(values, int):
        yield values
    elif isinstance(values, list | tuple | Mapping):
        for one in values.values() if isinstance(values, Mapping) else values:
            yield from _numbers(one)


def characters(value: Any) -> int:
    """Of all strings in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(characters(key) + characters(item) for key, item in value.items())
    if isinstance(value, Sequence):
        return sum(map(characters, value))
    return 0
