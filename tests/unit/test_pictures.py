"""The pictures of docs/pictures show what the commands print now. The pages' pictures are not compared."""

from tests.pictures import FOLDER, svgs


def test_pictures_are_current() -> None:
    for name, picture in svgs().items():
        found = (FOLDER / name).read_text(encoding="utf-8")
        assert found == picture, f"{name} shows another output; python -m tests.pictures writes it again"
