"""List the data files of a folder, a pattern, or a data set saved by `datasets`, in the order of reading."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsft.spec.sources import READ, hub_data, is_pattern, kind_of
from dsft.system.json_file import read_json

_SAVED = ("dataset_dict.json", "state.json", "dataset_info.json", "dataset_infos.json")
"""Files that `datasets` writes beside the rows."""
_SHOWN = 5


class NoDataFileError(Exception):
    """The reason why a name gives no data file, and what to do. The handler prepends the name."""


def local_files(name: str) -> tuple[list[Path], list[str]] | None:
    """Return the data files (at least one) of a file, folder or pattern, and notes to print. None if nothing
    of this name exists. Raise NoDataFileError if it has no data files."""
    if "\0" in name:
        return None
    if os.path.isfile(name):
        if kind_of(name) is None:
            raise NoDataFileError(
                f"{Path(name).suffix or 'a file without an ending'} is not supported; supported are {READ}"
            )
        return [Path(name)], []
    if os.path.isdir(name):
        return _folder(name)
    if is_pattern(name):
        return _pattern(name)
    first = Path(name).parts[0]
    if hub_data(name) is not None and os.path.isdir(first):
        raise NoDataFileError(
            f"does not exist, and is no hub id, since {first} is a folder here; correct the path"
        )
    return None


def _folder(name: str) -> tuple[list[Path], list[str]]:
    """List the data files of a folder and its subfolders, sorted by name; of a saved data set, the files that
    its state.json lists."""
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json")) or ["train"]
        raise NoDataFileError(
            f"this saved data set has splits ({', '.join(splits)}); give one, such as {folder / splits[0]}"
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved(folder), [f"{name}: a data set saved by datasets"]
    return _data_files(name, _files_below(folder), "the folder")


def _pattern(name: str) -> tuple[list[Path], list[str]]:
    """List the data files that a pattern (*, ?, [], **) matches, sorted by name."""
    found = [Path(path) for path in glob.glob(name, recursive=True)]
    if not found:
        from_here = "" if os.path.isabs(name) else " (relative to the current folder)"
        raise NoDataFileError(f"the pattern matches no file{from_here}; correct it")
    return _data_files(name, (path for path in found if not path.is_dir()), "the pattern")


def _data_files(name: str, paths: Iterable[Path], what: str) -> tuple[list[Path], list[str]]:
    files: list[Path] = []
    others: list[Path] = []
    for path in sorted(paths, key=lambda path: path.parts):
        is_read = kind_of(path.name) is not None and path.name not in _SAVED and path.name[0] != "."
        (files if is_read else others).append(path)
    if not files:
        has = f", only {_names(others)}" if others else ""
        raise NoDataFileError(f"{what} has no data files{has}; supported are {READ}")
    notes = [f"{name}: {len(files)} {'file' if len(files) == 1 else 'files'}: {_names(files)}"]
    if others:
        notes.append(f"{name}: ignored, since these are not data files: {_names(others)}")
    return files, notes


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield every file, and every hidden folder without its content. Links to folders are followed, and each
    folder is visited once."""

    def refuse(error: OSError) -> None:
        raise NoDataFileError(f"{error.filename} cannot be listed ({error.strerror}); check its permissions")

    seen: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        place = os.path.realpath(root)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        hidden = [name for name in folders if name[0] == "."]
        yield from (Path(root, name) for name in (*files, *hidden))
        folders[:] = sorted(set(folders) - set(hidden))


def _saved(folder: Path) -> list[Path]:
    try:
        state = read_json(folder / "state.json")
        files = [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise NoDataFileError("its state.json has no list of the data files; save it again") from None
    missing = [file.name for file in files if kind_of(file.name) != "arrow" or not file.is_file()]
    if missing or not files:
        lacks = ", ".join(missing) or "all files"
        raise NoDataFileError(f"the saved data set lacks {lacks}; save it again")
    return files


def _names(paths: list[Path]) -> str:
    rest = len(paths) - _SHOWN
    return ", ".join(path.name for path in paths[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
