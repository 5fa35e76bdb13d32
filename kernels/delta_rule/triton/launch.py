"""The chunked delta rule on CUDA: allocates, and launches the kernels, forward and backward.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from zoo.kernels.delta_rule.schedule import Blocks, Layout, configuration
from zoo.kernels.delta_rule.triton.chain import chain_kernel
from zoo.kernels.delta_rule.triton.cuts import cut
from zoo.kernels.delta_rule.triton.decays import decay_gradients_kernel, decays_kernel
from zoo.kernels.delta_rule.triton.gradients import gradients_kernel
from zoo.kernels.delta_rule.triton.prepare import prepare_kernel
from zoo.kernels.delta_rule.triton.scan import reverse_scan_kernel, scan_kernel
from zoo.kernels.normalize import EPS
from zoo.kernels.rows import rows

_CHAIN_ROWS, _CHAIN_STEP = 16, 64
_STATE_BLOCK = 1024  # numbers of a state that are read at once


class Saved(NamedTuple):
    """What the forward leaves for the backward: see `Layout.saved_shapes`."""

    inverse: Tensor
    scores: Tensor
    delta: Tensor
    states: Tensor
    scales: Tensor
    transitions: Tensor


class _Decays(NamedTuple):
    """Of chunks whose memory decays, else None.

    Attributes:
        matrices: [M, G, C, C] fp32, the decay from one token to another.
        crossing: [M, G, H / G + 1, C, C] fp32, what tokens read of earlier ones, times its gradient.
        terms: [M, G, 2, C] fp32, what tokens read of the state that enters, and leave in the next, likewise.
    """

    matrices: Tensor | None
    crossing: Tensor | None
    terms: Tensor | None


def chunk_forward(
    layout: Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Saved]:
    """The chunked forward.

    Args:
        layout: of the batch.
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        v: [B, T, G, d_v].
        beta: [B, T, G] fp32.
        g: [B, T, G] fp32, or None.
        initial_state: [N, G, d_k, d_v] fp32, or None.
        cu_seqlens: [N + 1], or None.
        scale: of the read.
        save: whether a backward follows: without it `delta` and `states` are of size 0.

    Returns:
        o [B, T, H, d_v] in the dtype of v, the final state [N, G, d_k, d_v] fp32, and what the backward needs.
    """
    v = rows(v)
    saved = Saved(*(v.new_empty(shape, dtype=dtype) for shape, dtype in layout.saved_shapes(save=save)))
    run = _Run(layout, q, k, beta, g, cu_seqlens, saved)
    o = v.new_empty(layout.batch, layout.seq_len, layout.heads, layout.value_dim)
    final_state = beta.new_empty(layout.num_states, layout.groups, layout.key_dim, layout.value_dim)
    run.prepare()
    starts = None
    if run.segmented:
        offsets = run.segment_states()
        run.scan(v, scale, initial=initial_state, offsets=offsets)
        starts = run.chain(initial_state, 1.0, offsets, reverse=False)
        initial_state = None
    delta, states = (saved.delta, saved.states) if save else (None, None)
    run.scan(v, scale, initial=initial_state, starts=starts, o=o, final=final_state, delta=delta, states=states)
    return o, final_state, saved


def chunk_backward(
    layout: Layout,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: Saved,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `chunk_forward`.

    Args:
        layout: of the batch.
        grad_o: [B, T, H, d_v].
        grad_final_state: [N, G, d_k, d_v] fp32, or None for zero.
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        beta: [B, T, G] fp32.
        g: [B, T, G] fp32, or None.
        cu_seqlens: [N + 1], or None.
        saved: by the forward.
        scale: of the read.

    Returns:
        The gradients of q, k, v, beta, g (of size 0 if that is None), and the initial state [N, G, d_k, d_v].
    """
    if scale == 0:  # gradients are held in units of scale
        scale, grad_o = 1.0, torch.zeros_like(grad_o)
    run = _Run(layout, q, k, beta, g, cu_seqlens, saved)
    grad_o = grad_o.contiguous()
    if grad_o.data_ptr() % 16:  # as the bulk copy engine needs
        grad_o = grad_o.clone()
    grad_v = torch.empty_like(saved.delta)
    grad_states = torch.empty_like(saved.states)
    grad_initial = beta.new_empty(layout.num_states, layout.groups, layout.key_dim, layout.value_dim)
    ends = None
    if run.segmented:
        offsets = run.segment_states()
        run.reverse(grad_o, scale, final=grad_final_state, offsets=offsets)
        ends = run.chain(grad_final_state, 1 / scale, offsets, reverse=True)
        grad_final_state = None
    run.reverse(grad_o, scale, final=grad_final_state, ends=ends, v=grad_v, states=grad_states, initial=grad_initial)
    grad_q, grad_k, grad_beta, grad_g = run.gradients(grad_o, grad_v, grad_states, scale)
    return grad_q, grad_k, grad_v, grad_beta, beta.new_empty(0) if grad_g is None else grad_g, grad_initial


class _Run:
    """The launches over one batch."""

    def __init__(
        self,
        layout: Layout,
        q: Tensor,
        k: Tensor,
        beta: Tensor,
        g: Tensor | None,
        cu_seqlens: Tensor | None,
        saved: Saved,
    ) -> None:
        self.layout = layout
        self.saved = saved
        self.scales = [x if x.numel() else None for x in saved.scales.split(layout.scale_sizes)]
        self.q, self.k = rows(q), rows(k)
        self.beta, self.g = beta.contiguous(), None if g is None else g.contiguous()
        self.strides = self.q.stride(1), self.k.stride(1)
        self.cuts = cut(layout, None if cu_seqlens is None else cu_seqlens.contiguous())
        self.segmented = self.cuts.num_segments > layout.num_states
        self.configuration = configuration(layout.key_dim, layout.value_dim, layout.dtype)
        self.sizes = {
            "GROUPS": layout.groups,
            "REPEAT": layout.heads // layout.groups,
            "Q_ROW": self.q.stride(0),
            "K_ROW": self.k.stride(0),
            "KEY_DIM": layout.key_dim,
            "BLOCK_K": self.configuration.block_k,
            "CHUNK": layout.chunk,
        }

    def prepare(self) -> None:
        prepare_kernel[self._each_chunk](
            self.q,
            self.k,
            self.beta,
            self.g,
            self.saved.inverse,
            self.saved.scores,
            *self.scales,
            self.cuts.chunks,
            self.layout.seq_len,
            *self.strides,
            **self.sizes,
            NORMALIZE=self.layout.normalize,
            EPS=EPS,
            LEVELS=self.layout.chunk.bit_length() - 1,
            num_warps=self.configuration.prepare_warps,
            maxnreg=self.configuration.prepare_registers,
        )

    def scan(
        self,
        v: Tensor,
        scale: float,
        *,
        initial: Tensor | None,
        starts: Tensor | None = None,
        o: Tensor | None = None,
        final: Tensor | None = None,
        delta: Tensor | None = None,
        states: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        blocks = self.configuration.scan if offsets is None else self.configuration.summary
        slices = triton.cdiv(self.layout.value_dim, blocks.block_v)
        if offsets is not None:
            slices += triton.cdiv(self.layout.key_dim, blocks.block_v)
        scan_kernel[self._grid(slices)](
            self.q,
            self.k,
            v,
            self.saved.inverse,
            self.saved.scores,
            *self.scales,
            None if initial is None else initial.contiguous(),
            starts,
            o,
            final,
            states,
            delta,
            offsets,
            None if offsets is None else self.saved.transitions,
            *self._scan_numbers(),
            scale,
            *self.strides,
            v.stride(1),
            **self._compiled(blocks),
            V_ROW=v.stride(0),
            FLIP=blocks.flip,
        )

    def reverse(
        self,
        grad_o: Tensor,
        scale: float,
        *,
        final: Tensor | None,
        ends: Tensor | None = None,
        v: Tensor | None = None,
        states: Tensor | None = None,
        initial: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        blocks = self.configuration.reverse
        reverse_scan_kernel[self._grid(triton.cdiv(self.layout.value_dim, blocks.block_v))](
            self.q,
            self.k,
            grad_o,
            self.saved.inverse,
            self.saved.scores,
            *self.scales,
            None if final is None else final.contiguous(),
            ends,
            v,
            initial,
            states,
            offsets,
            *self._scan_numbers(),
            scale,
            1 / scale,
            *self.strides,
            **self._compiled(blocks),
            FLIP=blocks.flip,
        )

    def segment_states(self) -> Tensor:
        """[S, G, d_v, d_k] fp32, one for each segment."""
        layout = self.layout
        return self.beta.new_empty(self.cuts.num_segments, layout.groups, layout.value_dim, layout.key_dim)

    def chain(self, boundary: Tensor | None, unit: float, offsets: Tensor, *, reverse: bool) -> Tensor:
        """The state that enters each segment [S, G, d_v, d_k], or reversed the gradient of the one that leaves it."""
        layout = self.layout
        joined = torch.empty_like(offsets)
        grid = (layout.num_states * layout.groups * triton.cdiv(layout.value_dim, _CHAIN_ROWS),)
        chain_kernel[grid](
            None if boundary is None else boundary.contiguous(),
            unit,
            offsets,
            self.saved.transitions,
            joined,
            self.cuts.first_segments,
            self.cuts.num_segments // layout.num_states,
            layout.groups,
            layout.key_dim,
            layout.value_dim,
            self.configuration.block_k,
            _CHAIN_ROWS,
            _CHAIN_STEP,
            reverse,
        )
        return joined

    def gradients(
        self, grad_o: Tensor, grad_v: Tensor, grad_states: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        layout, blocks = self.layout, self.configuration.gradients
        grad_q = self.q.new_empty(layout.batch, layout.seq_len, layout.heads, layout.key_dim)
        grad_k = self.k.new_empty(layout.batch, layout.seq_len, layout.groups, layout.key_dim)
        grad_beta = torch.empty_like(self.beta)
        tma = layout.key_dim == self.configuration.block_k and layout.value_dim % blocks.block_v == 0
        values, states = [grad_o, self.saved.delta, grad_v], [self.saved.states, grad_states]
        if tma:
            values = [_descriptor(x.flatten(0, 1).flatten(1), layout.chunk, blocks.block_v) for x in values]
            states = [_descriptor(x.flatten(0, 2), blocks.block_v, layout.key_dim) for x in states]
        decays = self._decays()
        gradients_kernel[self._each_chunk](
            self.q,
            self.k,
            self.beta,
            *self.scales[1:],
            *values,
            *states,
            grad_q,
            grad_k,
            grad_beta,
            *decays,
            self.cuts.chunks,
            layout.seq_len,
            scale,
            *self.strides,
            **self._compiled(blocks),
            TMA=tma,
        )
        return grad_q, grad_k, grad_beta, self._decay_gradients(grad_states, decays, scale)

    def _decays(self) -> _Decays:
        layout = self.layout
        if self.g is None:
            return _Decays(None, None, None)
        each, square = (layout.num_chunks, layout.groups), (layout.chunk, layout.chunk)
        decays = self.g.new_empty(*each, *square)
        decays_kernel[self._each_chunk](self.g, decays, self.cuts.chunks, layout.seq_len, layout.groups, layout.chunk)
        crossing = self.g.new_empty(*each, self.sizes["REPEAT"] + 1, *square)
        return _Decays(decays, crossing, self.g.new_empty(*each, 2, layout.chunk))

    def _decay_gradients(self, grad_states: Tensor, decays: _Decays, scale: float) -> Tensor | None:
        layout = self.layout
        if self.g is None:
            return None
        grad_g = torch.empty_like(self.g)
        decay_gradients_kernel[self._each_chunk](
            decays.crossing,
            decays.terms,
            self.scales[3],
            self.saved.states,
            grad_states,
            grad_g,
            self.cuts.chunks,
            layout.seq_len,
            scale,
            layout.groups,
            self.sizes["REPEAT"],
            layout.key_dim * layout.value_dim,
            layout.chunk,
            _STATE_BLOCK,
        )
        return grad_g

    @property
    def _each_chunk(self) -> tuple[int]:
        return (self.layout.num_chunks * self.layout.groups,)

    def _grid(self, slices: int) -> tuple[int]:
        return (self.cuts.num_segments * self.layout.groups * slices,)

    def _scan_numbers(self) -> tuple[Tensor | None, int, int]:
        return self.cuts.segments, self.layout.seq_len, self.cuts.segment_chunks

    def _compiled(self, blocks: Blocks) -> dict[str, Any]:
        return {
            **self.sizes,
            "VALUE_DIM": self.layout.value_dim,
            "BLOCK_V": blocks.block_v,
            "STAGES": blocks.stages,
            "num_warps": blocks.warps,
        }


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A contiguous matrix that the bulk copy engine reads by blocks of rows x columns."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
