"""Write the HTML page of a command: from a Jinja template, of which every value is escaped text, with the one
style sheet of `pages/`. A page has no script, and its content security policy lets the browser run none and
load nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsft.errors import StorageError, printable
from dsft.system.files import is_own

FOLDER = Path(__file__).parent / "pages"


def rendered(
    command: str,
    template: str,
    shown: Callable[[str], str] = printable,
    filters: dict[str, Callable[..., Any]] | None = None,
    **values: Any,
) -> str:
    """Return the page of a command. shown: makes any text safe to show, before it is escaped; filters: those
    of the template; values: its variables, of which only a `markupsafe.Markup` is HTML."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return shown(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    loader = FileSystemLoader(FOLDER)
    made = Environment(
        autoescape=True, finalize=finalize, loader=loader, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= filters or {}
    return made.get_template(template).render(begin=Markup(_begin(command)), **values) + "\n"


def _begin(command: str) -> str:
    """Return what every page of a command begins with, by which it knows its own pages."""
    generator = f'<meta name="generator" content="{command}">'
    return f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{generator}'


def check_page(path: Path, option: str, command: str) -> None:
    """Check that a page of a command can be written, before the work for it begins. option: that chooses its
    path. Raises StorageError."""
    wrong = None
    if path.is_dir():
        wrong = f"this is a folder; name a file, such as {path / 'page.html'}, with {option}"
    elif not path.parent.is_dir():
        wrong = f"the folder {path.parent} does not exist; create it, or name another file with {option}"
    elif not is_own(path, _begin(command).encode()):
        wrong = (
            f"this file is not a page of {command}, and is not overwritten; name another file with {option}"
        )
    if wrong is not None:
        raise StorageError(f"{path}: {wrong}")


def write_page(path: Path, text: str, option: str) -> None:
    """Write a page. Raises StorageError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written ({error.strerror}); free some space, or name another file with "
            f"{option}"
        ) from error
