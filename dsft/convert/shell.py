"""Read the options of a training command in a shell script. Nothing is run and no variable is filled in."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from dsft.convert.draft import mistake, refuse
from dsft.spec.aliases import VALUES
from dsft.spec.not_offered import feature_of_value
from dsft.spec.task import TASKS

_COMMAND = re.compile(
    r"\b(?:(?:trl|swift|llamafactory-cli)\s+(?P<name>\w+)|(?P<script>\w+)\.py)(?=\s+--\w)(?P<rest>.*)"
)
_WAY_OUT = "or put the options into a YAML file (--learning_rate 1e-4 becomes learning_rate: 1e-4)"


def options_of(path: Path, text: str) -> tuple[dict[str, Any], str | None]:
    """Return the options of the script's one training command, and its task (None: the options have it).
    Raise SpecError for a script that has none or several, or needs a shell."""
    lines = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " ")).splitlines()
    found = [match for line in lines if (match := _COMMAND.search(line))]
    if len(found) != 1:
        raise mistake(
            str(path), f"a shell script needs one training command, this one has {len(found)}; {_WAY_OUT}"
        )
    name = found[0]["name"] or found[0]["script"]
    if feature_of_value("task", name) is not None:
        raise refuse(str(path), name)
    try:
        words = shlex.split(re.split(r"\s(?:\d?>|[|&;<])", found[0]["rest"])[0])
    except ValueError as error:
        raise mistake(str(path), f"the command cannot be read ({error}); correct it, {_WAY_OUT}") from error
    values: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if re.search(r"[$`]", word):
            raise mistake(str(path), f"{word} is filled in by the shell; write its value, {_WAY_OUT}")
        if word.startswith("--"):
            key, _, word = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = []
        if word:
            values[key].append({"true": True, "false": False}.get(word.lower(), word))
    if "config" in values:
        raise mistake(str(path), "the options are in the file of --config; convert that file")
    given: dict[str, Any] = {key: each if len(each) > 1 else each[0] for key, each in values.items() if each}
    task = VALUES["task"].get(name, name)
    switches = [key for key, each in values.items() if not each]
    return given | {
        key.removeprefix("no_"): not key.startswith("no_") for key in switches
    }, task if task in TASKS else None
