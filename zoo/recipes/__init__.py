"""The recipes that come with the zoo: one YAML file each, at the sizes tiny, 340m and 1.3b."""

from pathlib import Path

__all__ = ["SIZES", "names", "path", "summary"]

SIZES = ("tiny", "340m", "1.3b")
_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every recipe, small sizes first."""
    found = [file.stem for file in _FOLDER.glob("*.yaml")]
    return sorted(found, key=lambda name: ([name.endswith(f"-{size}") for size in reversed(SIZES)], name))


def path(name: str) -> Path:
    """The file of a recipe, which exists if ``name`` is one of `names`."""
    return _FOLDER / f"{name}.yaml"


def summary(name: str) -> str:
    """What the recipe's file says of itself in its first line."""
    return path(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
