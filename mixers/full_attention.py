"""Full causal softmax attention (arXiv 1706.03762), the Transformer's mixer."""

from zoo.mixers.softmax_attention import AttentionOptions, SoftmaxAttention

__all__ = ["FullAttention"]


class FullAttention(SoftmaxAttention):
    """Every token sees all before it and itself."""

    Config = AttentionOptions
