"""Files and folders are written whole or not at all."""

from pathlib import Path

import pytest

from zoo.files import whole_folder, write_whole


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    write_whole(target, lambda path: path.write_text("old"))

    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(target, fails)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_folder_leaves_the_old_one_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_folder(target) as temporary:
        (temporary / "weights").write_text("old")

    def fails() -> None:
        with whole_folder(target) as temporary:
            (temporary / "weights").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    for content in ("old", "new"):
        with whole_folder(target) as temporary:
            (temporary / content).write_text(content)
    assert [file.name for file in target.iterdir()] == ["new"]
    assert list(target.parent.iterdir()) == [target]
