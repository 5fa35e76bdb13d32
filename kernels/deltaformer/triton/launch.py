"""The write on CUDA: allocates, and launches the kernels, forward and backward.

Shapes: B batch, T tokens, H heads of w, G key/value heads, D and D_v their sizes, N documents, C rows of a block, M
blocks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.deltaformer.schedule import Configuration, configuration, saved_shapes
from zoo.kernels.deltaformer.triton.gradients import key_gradients_kernel, row_gradients_kernel
from zoo.kernels.deltaformer.triton.solve import solve_kernel
from zoo.kernels.deltaformer.triton.write import write_kernel
from zoo.kernels.rows import rows
from zoo.kernels.tiling import Tiles
from zoo.kernels.triton.documents import cut

_CACHE_BYTES = 32 << 20  # of the L2 cache, that keys and u may take
_FEWEST_LANES, _FEWEST_BLOCKS = 6, 1024  # worked on at a time: with fewer, programs wait for each other


def write_forward(
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    kappa1: str,
    round_decimals: int,
    scale: float,
    *,
    bounded: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The write.

    Args:
        w: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
        alpha: [B, T, H] fp32.
        beta: [B, T, H] fp32.
        cu_seqlens: [N + 1], or None.
        kappa1: one of `KAPPAS`.
        round_decimals: that "round" keeps.
        scale: of the logits.
        bounded: whether no |beta| exceeds 1.
        save: whether a backward follows: without it all but u are of size 0.

    Returns:
        u [B, T, H, D_v] in the dtype of v, and for the backward what `saved_shapes` lists: the log-sum-exp of softmax's
        rows to the base 2, (I + diag(beta) A_i)^-1 - I of the diagonal blocks, and what rounding took from u or, in
        float32, alpha v - u.
    """
    run = _Run(w, k, v, alpha, beta, cu_seqlens, kappa1, round_decimals, scale)
    u = v.new_empty(*w.shape[:3], v.shape[3])
    saved = [v.new_empty(shape, dtype=dtype) for shape, dtype in saved_shapes(w, v, cu_seqlens, kappa1, save=save)]
    run.write(u, *(x if x.numel() else None for x in saved), bounded=bounded)
    lse, inverse, rest = saved
    return u, lse, inverse, rest


def write_backward(
    grad_u: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    u: Tensor,
    lse: Tensor,
    inverse: Tensor,
    rest: Tensor,
    kappa1: str,
    round_decimals: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `write_forward`.

    Args:
        grad_u: [B, T, H, D_v].
        w: [B, T, H, D].
        k: [B, T, G, D].
        v: [B, T, G, D_v].
        alpha: [B, T, H] fp32.
        beta: [B, T, H] fp32.
        cu_seqlens: [N + 1], or None.
        u: from the forward, like the next three.
        lse: see `saved_shapes`.
        inverse: likewise.
        rest: likewise.
        kappa1: one of `KAPPAS`.
        round_decimals: that "round" keeps.
        scale: of the logits.

    Returns:
        The gradients of w, k, v, alpha, and beta.
    """
    run = _Run(w, k, v, alpha, beta, cu_seqlens, kappa1, round_decimals, scale)
    grad_r, grad_v, grad_alpha, totals = run.solve(grad_u.contiguous(), u, lse, inverse, rest)
    grad_w, grad_beta = run.row_gradients(u, lse, grad_r, totals)
    grad_k = run.key_gradients(u, lse, grad_r, totals)
    repeat = w.shape[2] // k.shape[2]
    if repeat > 1:
        grad_v = grad_v.unflatten(2, (-1, repeat)).sum(3, dtype=torch.float32).to(v.dtype)
    return grad_w, grad_k, grad_v, grad_alpha, grad_beta


class _Run:
    """The launches over one batch."""

    def __init__(
        self,
        w: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None,
        kappa1: str,
        round_decimals: int,
        scale: float,
    ) -> None:
        self.batch, self.seq_len, self.heads, self.key_dim = w.shape
        self.groups, self.value_dim = v.shape[2:]
        self.w, self.k, self.v = rows(w), rows(k), rows(v)
        self.alpha, self.beta = alpha.contiguous(), beta.transpose(1, 2).contiguous()
        self.cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
        self.cuts: dict[int, tuple[Tensor | None, int]] = {}
        self.scale = scale
        self.configuration: Configuration = configuration(self.key_dim, self.value_dim, v.dtype)
        self.sizes: dict[str, Any] = {
            "HEADS": self.heads,
            "REPEAT": self.heads // self.groups,
            "W_ROW": self.w.stride(0),
            "K_ROW": self.k.stride(0),
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "BLOCK_K": self.configuration.block_k,
            "KAPPA": kappa1,
            "UNIT": float(10**round_decimals),
        }

    def write(
        self, u: Tensor, lse: Tensor | None, inverse: Tensor | None, rest: Tensor | None, *, bounded: bool
    ) -> None:
        blocks, numbers, progress = self._lanes()
        write_kernel[numbers[0] * numbers[1],](
            self.w,
            self.k,
            self.v,
            self.alpha,
            self.beta,
            blocks,
            u,
            rest,
            lse,
            inverse,
            progress,
            self.seq_len,
            *numbers,
            self.scale,
            self.w.stride(1),
            self.k.stride(1),
            self.v.stride(1),
            **self._solving(),
            LEVELS=self.configuration.block.bit_length() - 1,
            # Where no |beta| exceeds 1, no entry of softmax's inverses does.
            RANGE=tl.float16 if bounded else tl.float32,
        )

    def solve(
        self, grad_u: Tensor, u: Tensor, lse: Tensor, inverse: Tensor, rest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of R = diag(alpha) V, V (for each head of w), alpha, and softmax's totals (see `solve`)."""
        blocks, numbers, progress = self._lanes()
        grad_r, grad_v = torch.empty_like(u), torch.empty_like(u)
        slices = numbers[1] // (self.batch * self.heads)
        partial = (slices,) if slices > 1 else ()
        grad_alpha, totals = (self.beta.new_empty(*partial, *x.shape) for x in (self.alpha, self.beta))
        solve_kernel[numbers[0] * numbers[1],](
            self.w,
            self.k,
            self.v,
            self.alpha,
            self.beta,
            blocks,
            u,
            rest,
            lse,
            inverse,
            grad_u,
            grad_r,
            grad_v,
            grad_alpha,
            totals,
            progress,
            self.seq_len,
            *numbers,
            self.scale,
            self.w.stride(1),
            self.k.stride(1),
            self.v.stride(1),
            **self._solving(),
        )
        if slices > 1:
            grad_alpha, totals = grad_alpha.sum(0), totals.sum(0)
        return grad_r, grad_v, grad_alpha, totals

    def row_gradients(self, u: Tensor, lse: Tensor, grad_r: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """Of w and beta."""
        tiles = self.configuration.rows
        grad_w = u.new_empty(self.batch, self.seq_len, self.heads, self.key_dim)
        grad_beta = torch.empty_like(self.alpha)
        blocks, count = self._cut(tiles.rows)
        row_gradients_kernel[self.batch * self.heads * count,](
            self.w,
            self.k,
            self.beta,
            blocks,
            u,
            lse,
            grad_r,
            totals,
            grad_w,
            grad_beta,
            self.seq_len,
            count,
            self.scale,
            self.w.stride(1),
            self.k.stride(1),
            **self._tiled(tiles),
        )
        return grad_w, grad_beta

    def key_gradients(self, u: Tensor, lse: Tensor, grad_r: Tensor, totals: Tensor) -> Tensor:
        """Of k."""
        tiles = self.configuration.keys
        grad_k = u.new_empty(self.batch, self.seq_len, self.groups, self.key_dim)
        blocks, count = self._cut(tiles.keys)
        key_gradients_kernel[self.batch * self.groups * count,](
            self.w,
            self.k,
            self.beta,
            blocks,
            u,
            lse,
            grad_r,
            totals,
            grad_k,
            self.seq_len,
            count,
            self.scale,
            self.w.stride(1),
            self.k.stride(1),
            **self._tiled(tiles),
        )
        return grad_k

    def together(self, lanes: int, blocks: int) -> int:
        """Of so many lanes, how many are worked on at a time: what the L2 cache holds, if that is enough."""
        # Of the same length, for all that is known here.
        documents = 1 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        num_bytes = triton.cdiv(self.seq_len, documents) * (self.key_dim + self.value_dim) * self.w.element_size()
        return min(lanes, max(_FEWEST_LANES, _FEWEST_BLOCKS * documents // blocks, _CACHE_BYTES // num_bytes))

    def _lanes(self) -> tuple[Tensor | None, tuple[int, int, int, int], Tensor]:
        """Of a solve: its blocks; the numbers of blocks, lanes, counters of a lane, lanes together; its progress."""
        blocks, count = self._cut(self.configuration.block)
        lanes = self.batch * self.heads * triton.cdiv(self.value_dim, self.configuration.solve.block_v)
        counters = 1 if blocks is None else count
        progress = torch.zeros(1 + lanes * counters, dtype=torch.int32, device=self.w.device)
        return blocks, (count, lanes, counters, self.together(lanes, count)), progress

    def _cut(self, size: int) -> tuple[Tensor | None, int]:
        """`cut`, once for each size."""
        if size not in self.cuts:
            self.cuts[size] = cut(self.seq_len, self.cu_seqlens, size)
        return self.cuts[size]

    def _solving(self) -> dict[str, Any]:
        configuration, solve = self.configuration, self.configuration.solve
        return {
            **self.sizes,
            "V_ROW": self.v.stride(0),
            "BLOCK_V": solve.block_v,
            "BLOCK": configuration.block,
            "AHEAD": configuration.ahead,
            "AT_ONCE": configuration.at_once,
            "STAGES": solve.stages,
            "maxnreg": solve.registers,
            "num_warps": solve.warps,
        }

    def _tiled(self, tiles: Tiles) -> dict[str, Any]:
        return {
            **self.sizes,
            "BLOCK_V": self.configuration.block_v,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }
