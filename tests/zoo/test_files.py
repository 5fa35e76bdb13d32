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


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with whole_folder(tmp_path / "link") as temporary:
        (temporary / "weights").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "weights").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("old")
    rename = Path.rename

    def refuse(self: Path, other: Path) -> Path:
        if other == target and not self.name.endswith(".old"):
            raise OSError("busy")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)

    def replace() -> None:
        with whole_folder(target) as temporary:
            (temporary / "weights").write_text("new")

    with pytest.raises(OSError, match="busy"):
        replace()
    assert (target / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
