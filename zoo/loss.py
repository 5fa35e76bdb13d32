"""Next-token cross-entropy that never holds the logits of more than an eighth of the tokens.

Shapes: N tokens, D model width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["IGNORED", "NUM_CHUNKS", "ChunkGradients", "linear_cross_entropy"]

IGNORED = -100
NUM_CHUNKS = 8  # fixed, so that one compiled graph serves every number of tokens


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, gradients: "ChunkGradients | None" = None
) -> Tensor:
    """Mean over labels != -100 of -log softmax(hidden W^T)[label]; 0, with zero gradients, if there are none.

    Args:
        hidden: [N, D].
        weight: [V, D], the head.
        labels: [N] int64 in [0, V), or -100.
        gradients: what makes a chunk's, where that is compiled alone; not in a graph.

    Returns:
        The mean, an fp32 scalar.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        alone = () if gradients is None else (gradients,)
        return _LinearCrossEntropy.apply(hidden, weight, labels, *alone)  # pyright: ignore[reportReturnType]
    total = hidden.new_zeros((), dtype=torch.float32)
    for hidden_chunk, labels_chunk in _chunks(hidden, labels):
        total = total + _losses(hidden_chunk, weight, labels_chunk)[0]
    return total / _count(labels)


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum().clamp_min(1)


def _chunks(hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """NUM_CHUNKS equal pieces, the last ones padded with ignored tokens."""
    size = (labels.shape[0] + NUM_CHUNKS - 1) // NUM_CHUNKS
    missing = NUM_CHUNKS * size - labels.shape[0]
    hidden = F.pad(hidden, (0, 0, 0, missing)).view(NUM_CHUNKS, size, -1)
    labels = F.pad(labels, (0, missing), value=IGNORED).view(NUM_CHUNKS, size)
    return list(zip(hidden.unbind(), labels.unbind(), strict=True))


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, log-probabilities [n, V] fp32, each token's target index [n, 1], and whether it counts [n, 1]."""
    log_probs = (hidden @ weight.t()).float().log_softmax(-1)
    counts = (labels != IGNORED)[:, None]
    target = torch.where(counts, labels[:, None], 0)  # any other label outside the vocabulary still fails in gather
    total = -log_probs.gather(1, target).masked_fill(~counts, 0).sum()
    return total, log_probs, target, counts


def _gradients(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk's summed loss and its gradients; its logits die here, before the next chunk's are made."""
    loss, log_probs, target, counts = _losses(hidden, weight, labels)
    one_hot = torch.zeros_like(log_probs).scatter(1, target, 1.0)
    grad_logits = (log_probs.exp() - one_hot).masked_fill(~counts, 0).to(hidden.dtype)
    return loss, grad_logits @ weight, grad_logits.t() @ hidden


_compiled_once = torch.compiler.nested_compile_region(_gradients)
"""Compiled once for all chunks, for the CPU, where eight C++ kernels take long to build. Not on CUDA: with it, steps
took longer and more memory (torch 2.11), in one run each way."""


class ChunkGradients(nn.Module):
    """One chunk's summed loss and its gradients, as a part of a model that can be compiled alone."""

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of hidden [n, D], weight [V, D], labels [n] int64: the sum, [n, D], [V, D]."""
        return _gradients(hidden, weight, labels)


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes the gradients together with the loss, chunk by chunk, so that no logits are kept or computed again.

    They are those of the sum: the mean's are too small for fp16 until a loss scale has multiplied them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, alone: ChunkGradients | None = None
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_hidden = []
        gradients = alone or (_compiled_once if hidden.device.type == "cpu" else _gradients)
        for hidden_chunk, labels_chunk in _chunks(hidden, labels):
            chunk = hidden_chunk, weight, labels_chunk
            loss, grad_hidden_chunk, grad_weight_chunk = gradients(*chunk)  # pyright: ignore[reportCallIssue]
            total = total + loss
            grad_hidden.append(grad_hidden_chunk)
            grad_weight = grad_weight + grad_weight_chunk
        count = _count(labels)
        ctx.save_for_backward(torch.cat(grad_hidden)[: hidden.shape[0]], grad_weight, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # an untyped decorator
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad_outputs[0] / count
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (grad_hidden * scale).to(hidden_dtype),
            (grad_weight * scale).to(weight_dtype),
            *(None for _ in ctx.needs_input_grad[2:]),
        )
