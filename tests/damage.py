"""Damage files as a fault, an editor or an attacker might, in a way that depends on a `Random` alone."""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

DEEP = "@deep@"
"""A value that is written as lists nested 50,000 deep, which `json.dumps` cannot write."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, -1e308, float("nan"),
    float("inf"), "", "x", "a\nb", "\x00", "\x1b[2J", "\ud800", "é" * 300, "x" * 100_000, "1e5", "null",
    "__import__", "../..", "/dev/zero", "/", "a/b", "{{ x }}", "{% break %}", "%s%n", "<|im_end|>",
    [], {}, [None], [[]], [1, "a"], {"": None}, {"a": {"a": 1}}, ["x"] * 1_000, DEEP,
)  # fmt: skip
KEYS = ("", "x", "\ud800", "__class__", "model_type", "path")
WORDS = tuple(
    word.encode(errors="surrogatepass")
    for word in (
        "\x00", "\ufeff", "\r", "\n", "\t", '"', "'", "{", "}", "[", "]", ":", ",", "-", "#", "&a ", "*a ",
        "!!x ", "|\n", "<<: ", "? ", "---\n", "9" * 400, "9" * 5_000, "1e999", "-Infinity", "NaN", "\ud800",
        "\\ud800", "{{", "}}", "{%", "%}", "\u2028", "[" * 3_000, "(" * 3_000, "{{ (((", "&a [*a, *a]",
        "\x1b[31m", "{% break %}", "{% for x in y %}", "ÿþ",
    )
)  # fmt: skip


def damage(random: Random, path: Path) -> None:
    """Damage one file: the values of JSON, the bytes of any file, or what it is."""
    how = random.random()
    if how < 0.1:
        replace(random, path)
        return
    content = path.read_bytes()
    if how < 0.8 and path.suffix == ".json":
        with suppress(ValueError, RecursionError):  # it is damaged already
            value = damaged_value(random, json.loads(content))
            path.write_bytes(json_bytes(random, value))
            return
    path.write_bytes(damaged_bytes(random, content))


def damaged_value(random: Random, value: Any) -> Any:
    """Return a copy of JSON data in which one entry or a few are replaced, removed, renamed or copied."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        containers = [one for one in _all(value) if isinstance(one, dict | list) and one]
        if not containers or random.random() < 0.03:
            return copy.deepcopy(random.choice(VALUES))
        container, other = random.choice(containers), random.choice(containers)
        key: Any = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
        how = random.randrange(8)
        if how == 0:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[random.choice((*KEYS, f"{key} ", str(key).upper()))] = container.pop(key)
        elif how == 2:
            container[key] = copy.deepcopy(random.choice(list(_entries(other))))
        else:
            container[key] = copy.deepcopy(random.choice(VALUES))
    return value


def _all(value: Any) -> Iterator[Any]:
    yield value
    for entry in _entries(value):
        yield from _all(entry)


def _entries(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def json_bytes(random: Random, value: Any) -> bytes:
    """Return the value as JSON; texts are escaped or not, and a lone surrogate is not UTF-8 if not."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.7)
    return text.replace(f'"{DEEP}"', "[" * 50_000 + "]" * 50_000).encode(errors="surrogatepass")


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """Return the bytes with some flipped, removed, repeated or inserted, or cut off."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 3)):
        place, size = random.randrange(len(changed) + 1), random.choice((1, 1, 2, 8, 50))
        how = random.randrange(6)
        if how == 0:
            changed[place : place + 1] = bytes([random.randrange(256)])
        elif how == 1:
            del changed[place : place + size]
        elif how == 2:
            changed[place:place] = changed[place : place + size] * random.choice((1, 2, 1_000))
        elif how == 3:
            del changed[place:]
        else:
            changed[place:place] = random.choice(WORDS)
    return bytes(changed)


def replace(random: Random, path: Path) -> None:
    """Put something else in the place of a file."""
    size = path.stat().st_size
    path.unlink()

    def sparse() -> None:
        path.touch()
        os.truncate(path, 2**30)

    ways: Mapping[str, Callable[[], object]] = {
        "nothing": lambda: None, "an empty file": path.touch, "a folder": path.mkdir,
        "a named pipe": lambda: os.mkfifo(path), "a device": lambda: path.symlink_to("/dev/zero"),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("nowhere"),
        "zeros": lambda: path.write_bytes(bytes(size)), "a GiB of zeros": sparse,
    }  # fmt: skip
    ways[random.choice(list(ways))]()


def fresh(source: Path, target: Path) -> Path:
    """Copy an undamaged folder."""
    shutil.copytree(source, target, symlinks=True)
    return target
