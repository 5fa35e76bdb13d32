"""Models of other libraries, of the sizes of one of the zoo's, to be measured beside it.

Shapes: B batch, T sequence length, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from zoo import components
from zoo.config import ModelConfig

__all__ = ["PEERS", "Peer", "installed", "make", "resembles"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library.

    Attributes:
        package: its distribution.
        has: which of the zoo's architectures it has, in words.
        makers: for the mixer of all layers what makes the model.
    """

    package: str
    has: str
    makers: dict[str, Callable[[ModelConfig], nn.Module]]


def resembles(peer: str, config: ModelConfig) -> bool:
    """Whether the library has this architecture: one mixer in every layer, with default options but for its heads."""
    block: Any = config.layers[0].options
    mixer = getattr(block, "mixer", None)
    if mixer is None or mixer.name not in PEERS[peer].makers or set(config.layers) != {config.layers[0]}:
        return False
    plain = components.resolve("mixer", {"name": mixer.name, "num_heads": mixer.options.num_heads}, config.dim)
    return mixer == plain and (block.norm.name, block.mlp.name) == ("rms_norm", "swiglu")


def installed(peer: str) -> str | None:
    """The version of the library, or None."""
    try:
        return version(PEERS[peer].package)
    except PackageNotFoundError:
        return None


def make(peer: str, config: ModelConfig) -> "Wrapped":
    """The library's model of these sizes, with its own defaults elsewhere."""
    return Wrapped(PEERS[peer].makers[_block(config).mixer.name](config))


class Wrapped(nn.Module):
    """A model in the manner of Hugging Face transformers, called as the zoo's are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] int64, or the mean loss where there are labels.

        The libraries shift the labels themselves, so that they get the tokens, and learn one token a row less.
        """
        found = self.model(tokens, labels=None if labels is None else tokens, use_cache=False)
        return found.logits if labels is None else found.loss


def _block(config: ModelConfig) -> Any:
    return config.layers[0].options


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.dim,
        "intermediate_size": _block(config).mlp.options.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _fla(config: ModelConfig, name: str) -> nn.Module:
    models = import_module("fla.models")
    options = getattr(models, f"{name}Config")(num_heads=_block(config).mixer.options.num_heads, **_sizes(config))
    return getattr(models, f"{name}ForCausalLM")(options)


def _delta_net(config: ModelConfig) -> nn.Module:
    return _fla(config, "DeltaNet")


def _deltaformer(config: ModelConfig) -> nn.Module:
    inner: Any = import_module("fla.ops.deltaformer.parallel")
    if inner.flash_attn_func is None:  # it reads with flash-attn, and fails without
        inner.flash_attn_func = _causal_attention
    return _fla(config, "DeltaFormer")


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """[B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _llama(config: ModelConfig) -> nn.Module:
    transformers = import_module("transformers")
    options = _block(config).mixer.options
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_attention_heads=options.num_heads,
            num_key_value_heads=options.num_kv_heads,
            head_dim=options.head_dim,
            max_position_embeddings=1 << 20,
            attn_implementation="sdpa",
            **_sizes(config),
        )
    )


PEERS = {
    "fla": Peer(
        "flash-linear-attention", "deltanet-* and deltaformer-*", {"delta_net": _delta_net, "deltaformer": _deltaformer}
    ),
    "hf": Peer("transformers", "transformer-*", {"full_attention": _llama}),
}
