"""Places in a model, and the names of the ranges by which a trace tells them.

A place is the path of a module, such as "blocks.3.mixer_norm", or `MODEL`, or `OPTIMIZER`.
"""

import re
from collections.abc import Mapping

__all__ = [
    "KINDS",
    "MARK",
    "MODEL",
    "MODULE",
    "OPTIMIZER",
    "Shares",
    "kind_of",
    "layer_of",
    "mark_name",
    "marked_shares",
    "part_of_model",
]

KINDS: tuple[str, ...] = ("mixer", "mlp", "norm", "head", "embedding", "optimizer", "other")
MODEL = "model"
"""What stands in the model's own forward, outside its parts."""
OPTIMIZER = "optimizer"
MODULE = "module "
"""In front of a place: a range around a module's call."""
MARK = "kernel of "
"""In front of `marked_shares`: a moment in compiled code, from which on kernels are of these places."""

Shares = dict[str, float]
"""Places, and how much of something each has; they add up to 1, or there are none where nothing is known."""

_OF_HEAD = re.compile(r"\b(mm|addmm|bmm|matmul|linear|row_linear\w*|\w*CrossEntropy)\b")


def kind_of(place: str) -> str:
    """One of `KINDS`; what a model has beside its embedding, blocks and norm is its head and the loss."""
    path = place.split(".")
    in_block = path[0] == "blocks"
    part = path[2] if in_block and len(path) > 2 else "" if in_block else path[0]
    if part in KINDS:
        return part
    if "norm" in part:
        return "norm"
    return "other" if in_block or place == MODEL else "head"


def layer_of(place: str) -> int | None:
    """The block's index, or None outside the blocks."""
    block = re.match(r"blocks\.(\d+)", place)
    return int(block[1]) if block else None


def part_of_model(operation: str) -> str | None:
    """The part that an operation in the model's own forward is of, which is no module's call: embedding or head."""
    if "embedding" in operation:
        return "embedding"
    return "head" if _OF_HEAD.search(operation) else None


def mark_name(counts: Mapping[str, int]) -> str:
    """The name of a mark from the number of a kernel's operations at each place."""
    return MARK + (", ".join(f"{count} {place}" for place, count in counts.items()) or "?")


def marked_shares(name: str, base: str | None) -> Shares:
    """What a mark says.

    Args:
        name: of the mark.
        base: the place of the module that was compiled, of which the mark knows nothing; None for the whole model.
    """
    counts = [part.split(" ") for part in name.removeprefix(MARK).split(", ") if part != "?"]
    if not counts:
        return {} if base in (None, MODEL) else {base: 1.0}
    total = sum(int(count) for count, _ in counts)
    shares: Shares = {}
    for count, place in counts:
        whole = _whole(place, base)
        shares[whole] = shares.get(whole, 0.0) + int(count) / total
    return shares


def _whole(place: str, base: str | None) -> str:
    if base in (None, MODEL) or place.startswith("blocks."):
        return place
    return base if place == MODEL else f"{base}.{place}"
