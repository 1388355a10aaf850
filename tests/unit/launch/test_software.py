"""What decides a run's numbers on this machine, as ranks compare it."""

from __future__ import annotations

from pathlib import Path

from dsft.launch.software import SWITCHES, code_digest, decisive_versions, switches


def test_the_code_is_its_python_files_and_not_what_editors_leave(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "one.py"
    file.write_text("a = 1\n")
    digest = code_digest(tmp_path)
    (tmp_path / "package" / ".#one.py").symlink_to("user@host.1:2")  # an editor's lock, which leads nowhere
    (tmp_path / "notes.txt").write_text("b")
    assert code_digest(tmp_path) == digest
    file.write_text("a = 2\n")
    assert code_digest(tmp_path) != digest


def test_versions_and_variables() -> None:
    assert decisive_versions()["dsft"] is not None and decisive_versions()["torch"] is not None
    assert switches({SWITCHES[0]: "1", "HOME": "/"}) == {SWITCHES[0]: "1"}
