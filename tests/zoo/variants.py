"""The tiny recipes, and variants of them with what no recipe has: heads that are shared, decays, other comparisons."""

from typing import Any

import zoo
from zoo import recipes

__all__ = ["COMPARED", "GATED", "TINY", "VARIANTS", "build"]

GATED, COMPARED = "deltanet-tiny, gated", "deltaformer-tiny, compared"
VARIANTS = {  # with heads that are shared, too
    GATED: [
        "layers.1.mixer=gated_delta_net",
        "layers.2.mixer={name: gated_delta_net, num_heads: 4, head_dim: 32, num_kv_heads: 2, expand_v: 2}",
    ],
    COMPARED: [
        "layers.0.mixer={name: deltaformer, compare: qk, beta: 2sigmoid, num_heads: 4, num_kv_heads: 2}",
        "layers.1.mixer={name: deltaformer, compare: wk, alpha: sigmoid, conv_size: 4, num_heads: 4, num_kv_heads: 1}",
        "layers.2.mixer={name: deltaformer, kappa1: linear, num_heads: 4, head_dim: 48}",
    ],
}
TINY = [*(name for name in recipes.names() if name.endswith("-tiny")), *VARIANTS]


def build(recipe: str, **options: Any) -> zoo.LanguageModel:
    """A recipe's model, or a variant of it."""
    return zoo.build(recipe.partition(",")[0], VARIANTS.get(recipe, ()), **options)
