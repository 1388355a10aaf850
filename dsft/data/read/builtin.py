"""Generate the built-in rows, so that a run needs no data file.

They are chat rows, the same on every machine: questions and answers about invented facts of animals, in short
and regular English, some with a second question. The held-out rows ask for the facts of the training rows, in
combinations of words that these do not have. In the preference pairs, the rejected answer gives a wrong value
of the same fact.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

from dsft.spec.sources import BUILTIN, BUILTIN_PREFIX

NAMES = tuple(path.removeprefix(BUILTIN_PREFIX) for path in BUILTIN)
QUICKSTART, QUICKSTART_HELDOUT, PAIRS, PAIRS_HELDOUT = NAMES

_ANIMALS = ("ant", "bear", "cow", "duck", "eel", "fox", "goat", "hare", "lion", "mole", "owl", "pig")
_FACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    # attribute: its values, the ways to ask, the answer
    "color": (
        ("red", "blue", "green", "black", "white"),
        ("What color is the {a}?", "Color of the {a}?"),
        "It is {v}.",
    ),
    "food": (
        ("corn", "fish", "grass", "nuts"),
        ("What does the {a} eat?", "Food of the {a}?"),
        "It eats {v}.",
    ),
    "home": (
        ("barn", "cave", "lake"),
        ("Where does the {a} live?", "Home of the {a}?"),
        "It lives in a {v}.",
    ),
}
_HELD_OUT_EVERY = 21  # every 21st row of a fixed shuffle is held out


def builtin_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of `builtin:NAME`: about 1,100 for training, 50 held out. A row is {"messages": [...]},
    a pair {"prompt": [...], "chosen": [...], "rejected": [...]}.

    Raises KeyError for an unknown name.
    """
    if name not in NAMES:
        raise KeyError(name)
    held_out = name in (QUICKSTART_HELDOUT, PAIRS_HELDOUT)
    chosen = [_messages(c) for i, c in enumerate(_conversations()) if (i % _HELD_OUT_EVERY == 0) == held_out]
    if name in (QUICKSTART, QUICKSTART_HELDOUT):
        return [{"messages": messages} for messages in chosen]
    return [_pair(messages, number) for number, messages in enumerate(chosen)]


def _pair(messages: list[dict[str, str]], number: int) -> dict[str, Any]:
    """Return a pair of the last answer and a wrong one, which is chosen by the row's number."""
    *prompt, last = messages
    right = last["content"]
    of_facts = [[answer.format(v=value) for value in values] for values, _, answer in _FACTS.values()]
    wrong = [text for answers in of_facts if right in answers for text in answers if text != right]
    rejected = last | {"content": wrong[number % len(wrong)]}
    return {"prompt": prompt, "chosen": [last], "rejected": [rejected]}


def _turn(animal: int, attribute: str, way: int) -> tuple[str, str]:
    values, questions, answer = _FACTS[attribute]
    # 7 and the length of the attribute's name spread the values, so that they must be memorized
    value = values[(animal * 7 + animal // 3 + len(attribute)) % len(values)]
    return questions[way].format(a=_ANIMALS[animal]), answer.format(v=value)


def _double_questions() -> list[list[tuple[str, str]]]:
    """Return conversations with two questions: on two attributes of one animal, or one attribute of two."""
    one_animal = [
        [_turn(a, s, v), _turn(a, t, w)]
        for a, s, t, v, w in product(range(len(_ANIMALS)), _FACTS, _FACTS, range(2), range(2))
        if s != t
    ]
    two_animals = [
        [_turn(a, t, w), _turn((a + step) % len(_ANIMALS), t, w)]
        for a, t, w, step in product(range(len(_ANIMALS)), _FACTS, range(2), range(1, 12))
    ]
    return one_animal + two_animals


@functools.cache  # of rows that are read several times in each start
def _conversations() -> list[list[tuple[str, str]]]:
    """Return all conversations in a fixed order, by a stride that is coprime to their number (1,152)."""
    single = [[_turn(a, t, w)] for a, t, w in product(range(len(_ANIMALS)), _FACTS, range(2))]
    rows = single + _double_questions()
    return [rows[(i * 1009) % len(rows)] for i in range(len(rows))]


def _messages(conversation: list[tuple[str, str]]) -> list[dict[str, str]]:
    messages = []
    for question, answer in conversation:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
