"""Writing files whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["require_writable", "whole_folder", "write_whole"]


def require_writable(folder: Path) -> None:
    """Make the folder, and write to it once, so that a run does not find out at its end.

    Raises:
        OSError: it cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def require_file(path: Path) -> None:
    """`require_writable` for the folder of a file that will be written.

    Raises:
        OSError: that, or the path is a folder itself.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    require_writable(path.parent)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path``, then put it in its place in one step.

    Args:
        path: the file, replaced if it exists.
        write: gets a path with the same ending.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of ``folder`` when the block ends without an error.

    Between the two renames of a replacement the old content stands beside it, under a name that ends in ``.old``.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    temporary.chmod(0o777 & ~_umask())
    try:
        yield temporary
        if folder.exists():
            old = temporary.with_name(f"{temporary.name}.old")
            folder.rename(old)
            try:
                temporary.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
