"""One colour and one marker for each architecture, the same in every picture."""

import re
from dataclasses import dataclass

from zoo.compare.report.rows import Results, owner, recipes

__all__ = ["KINDS", "LAYERS", "Style", "family", "styles"]

# (on white, on black) by family. Attention is blue, the delta rule warm, the Deltaformer green; neighbours differ in
# lightness too, so that they stay apart for the colour-blind.
_FAMILIES = {
    "transformer": ("#0072B2", "#4AA8E8"),
    "swa-full": ("#4FA9DC", "#A8DAF7"),
    "deltanet": ("#D55E00", "#FF8436"),
    "deltanet-swa": ("#E09B00", "#FFC84A"),
    "deltanet-global": ("#8C2A5B", "#E07BAE"),
    "deltaformer": ("#009E73", "#26BE94"),
    "deltaformer-swa": ("#004D40", "#B2EBD5"),
}
_OTHERS = (
    ("#4B3FA8", "#A99CFF"),
    ("#CC79A7", "#F2A9CF"),
    ("#7A7A00", "#D0C84E"),
    ("#00838F", "#4DD0E1"),
    ("#6D4C41", "#C8AFA4"),
    ("#B00020", "#FF8A93"),
)
_PEERS = (("#5F6368", "#B4B9C1"), ("#8A8F98", "#8F959E"), ("#3C4043", "#DADDE2"))
_MARKERS = "os^Dv<>pX"

KINDS = {  # of kernels, in a profile
    "mixer": ("#D55E00", "#FF8436"),
    "mlp": ("#0072B2", "#4AA8E8"),
    "norm": ("#E09B00", "#FFC84A"),
    "head": ("#009E73", "#26BE94"),
    "embedding": ("#CC79A7", "#F2A9CF"),
    "optimizer": ("#4B3FA8", "#A99CFF"),
    "other": ("#8A8F98", "#8F959E"),
}
LAYERS = (("#D55E00", "#FF8436"), ("#4FA9DC", "#A8DAF7"), ("#009E73", "#26BE94"), ("#4B3FA8", "#A99CFF"))  # of mixers


@dataclass(frozen=True, slots=True)
class Style:
    """How an architecture is drawn.

    Attributes:
        light: its colour on white.
        dark: its colour on black.
        marker: matplotlib's letter.
        peer: whether it is of another library: hollow markers, lines of dashes and dots.
    """

    light: str
    dark: str
    marker: str
    peer: bool


def family(recipe: str) -> str:
    """A recipe without its size and what was overridden: deltanet of "deltanet-340m num_layers=4"."""
    return re.sub(r"-(tiny|[\d.]+[mb])$", "", recipe.split(" ")[0])


def styles(results: Results) -> dict[str, Style]:
    """Of each recipe, in the order of `recipes`.

    The first of a known family has that family's colour, whatever it is compared with; further ones and unknown
    families take turns with the other colours. Peers are grey, with the marker of what they belong to.
    """
    owners = {row["recipe"]: owner(row) for row in results["rows"]}
    peers = {row["recipe"] for row in results["rows"] if row.get("peer")}
    order = list(dict.fromkeys(owners[recipe] for recipe in recipes(results)))
    colours, taken = dict[str, tuple[str, str]](), set[str]()
    for recipe in recipes(results):
        if recipe in peers:
            colours[recipe] = _PEERS[len(peers & colours.keys()) % len(_PEERS)]
        elif family(recipe) in _FAMILIES and family(recipe) not in taken:
            taken.add(family(recipe))
            colours[recipe] = _FAMILIES[family(recipe)]
        else:
            others = len(colours.keys() - peers) - len(taken)
            colours[recipe] = _OTHERS[others % len(_OTHERS)]
    return {
        recipe: Style(*colour, _MARKERS[order.index(owners[recipe]) % len(_MARKERS)], recipe in peers)
        for recipe, colour in colours.items()
    }
