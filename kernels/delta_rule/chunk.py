"""The (gated) delta rule by chunks of 64 tokens, in batched PyTorch on any device: forward and hand-written backward.

Token t writes beta_t k_t D_t^T, where D_t = v_t - S_{t-1}^T k_t is its prediction error, the delta. In a chunk with
incoming state S (arXiv 2406.06484), with Kb = diag(beta) K, all the errors are one triangular solve:

    D = Tinv (V - K S),  Tinv = (I + tril(K Kb^T, -1))^-1      O = scale * (Q S + tril(Q Kb^T) D)      S' = S + Kb^T D

(the paper's Tm is diag(beta) Tinv; in this form beta enters by Kb alone, and its gradient with it). Only the state
passes from chunk to chunk, by two products each; all else is batched over every chunk of every head.

With a log-decay g (arXiv 2412.06464) token t finds exp(g_t) S_{t-1}. Let c_t be the sum of g over the chunk up to t:

    D = Tinv (V - diag(exp(c_t)) K S),  Tinv = (I + tril(L * K Kb^T, -1))^-1,  L_ti = exp(c_t - c_i) for i <= t, else 0
    O = scale * (diag(exp(c_t)) Q S + (L * tril(Q Kb^T)) D)      S' = exp(c_C) S + (diag(exp(c_C - c_t)) Kb)^T D

The gradient of g_s is the sum, over all that passes from before token s to s or beyond, of what arrives times its
gradient. The sums of q dq + k dk - 2 beta dbeta are the same, but of them a strong decay would leave rounding alone.

Shapes: B batch, T tokens, H query heads, G key/value heads, R = H / G, N documents (N = B unless packed), C chunk,
M chunks in a row of the batch, P = M * B * G problems, chunk-major so that one step of the scan is contiguous. The R
query heads of a group are R * C rows of one problem: nothing is expanded.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.kernels.precision import precise_dtype
from zoo.kernels.triangular import unit_lower_inverse

CHUNK = 64


def num_chunks(seq_len: int, num_documents: int | None) -> int:
    """Chunks that hold `seq_len` tokens; packed, an upper bound that needs no document's length (None: not packed)."""
    rounding = CHUNK - 1 if num_documents is None else num_documents * (CHUNK - 1)
    return (seq_len + rounding) // CHUNK


class _Cut(NamedTuple):
    """Where a scan over chunks enters and leaves the documents."""

    entry: Tensor  # [M, 1, 1, 1] whether the chunk is the first of its document that the scan meets
    seeds: Tensor  # [M, G, d_k, d_v] the state that its document begins with
    exits: Tensor  # [N] the chunk at which the scan leaves each document
    empty: Tensor  # [N, 1, 1, 1] documents without a chunk


class _Documents:
    """Packed sequences: each document on whole chunks of its own, by index tensors of static shape (no host sync)."""

    def __init__(self, cu_seqlens: Tensor, seq_len: int, num_chunks: int) -> None:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        self.empty = starts == ends
        self.end = ((ends - starts + CHUNK - 1) // CHUNK).cumsum(0)  # [N] one past the last chunk of each document
        self.begin = F.pad(self.end[:-1], (1, 0))
        token = torch.arange(seq_len, device=cu_seqlens.device)
        document = torch.searchsorted(ends, token, right=True)
        self.slot = self.begin[document] * CHUNK + token - starts[document]  # [T] its place among the M * C
        self.chunk = torch.arange(num_chunks, device=cu_seqlens.device)
        # Chunks that no document needs are at the end, and count as the last document's.
        self.of_chunk = torch.searchsorted(self.end, self.chunk, right=True).clamp_max(len(starts) - 1)

    def cut(self, boundary: Tensor, reverse: bool) -> _Cut:
        """For a scan that begins each document with its own one of `boundary` [N, G, d_k, d_v]."""
        begin, last = self.begin.clamp_max(len(self.chunk) - 1), (self.end - 1).clamp_min(0)
        enter, leave = (last, begin) if reverse else (begin, last)
        entry = (self.chunk == enter[self.of_chunk])[:, None, None, None]
        return _Cut(entry, boundary.index_select(0, self.of_chunk), leave, self.empty[:, None, None, None])


class _Decay(NamedTuple):
    """What is left of a write or a state, as factors; None for no decay."""

    between: Tensor | None = None  # [P, C, C] at token t of what token i <= t wrote, else 0
    since: Tensor | None = None  # [P, C, 1] at token t of the state that enters the chunk
    until: Tensor | None = None  # [P, C, 1] at the chunk's end of what token t wrote
    whole: Tensor | None = None  # [P, 1, 1] at the chunk's end of the state that enters it


class _Layout:
    """Tokens [B, T, heads, d] to chunks [P, R * C, d] in the computing dtype, and back."""

    def __init__(self, k: Tensor, cu_seqlens: Tensor | None) -> None:
        self.batch, self.seq_len, self.groups, _ = k.shape
        self.dtype = precise_dtype(k.dtype)
        self.num_chunks = num_chunks(self.seq_len, None if cu_seqlens is None else len(cu_seqlens) - 1)
        self.documents = None if cu_seqlens is None else _Documents(cu_seqlens, self.seq_len, self.num_chunks)

    def to_chunks(self, x: Tensor) -> Tensor:
        length = self.num_chunks * CHUNK
        if self.documents is not None:
            x = x.new_zeros(1, length, *x.shape[2:]).index_copy_(1, self.documents.slot, x)
        elif length != self.seq_len:
            x = F.pad(x, (0, 0, 0, 0, 0, length - self.seq_len))
        x = x.unflatten(1, (self.num_chunks, CHUNK)).unflatten(3, (self.groups, -1))  # [B, M, C, G, R, d]
        x = x.permute(1, 0, 3, 4, 2, 5).to(self.dtype)
        return x.reshape(-1, x.shape[3] * CHUNK, x.shape[5]).contiguous()

    def to_tokens(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.view(self.num_chunks, self.batch, self.groups, -1, CHUNK, x.shape[-1])
        x = x.permute(1, 0, 4, 2, 3, 5).flatten(3, 4).flatten(1, 2)
        x = x[:, : self.seq_len] if self.documents is None else x.index_select(1, self.documents.slot)
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)  # a view would keep the padding alive

    def decay(self, g: Tensor | None) -> _Decay:
        """Of the log-decay [B, T, G] of each token."""
        if g is None:
            return _Decay()
        g = self.to_chunks(g[..., None])
        # Each c_t - c_i as a sum of its own: the difference would lose what small g add after a large one.
        between = g.expand(-1, -1, CHUNK).tril(-1).cumsum(1).exp_().tril_()
        since = g.cumsum(1).exp_()
        return _Decay(between, since, between[:, -1, :, None], since[:, -1:])

    def steps(self, x: Tensor) -> Tensor:
        """[P, ...] to [M, B * G, ...], whose first dimension a scan walks."""
        return x.unflatten(0, (self.num_chunks, -1))

    def new_states(self, boundary: Tensor) -> Tensor:
        """Zeros [M + 1, B * G, d_k, d_v]: a state before and after every chunk."""
        return boundary.new_zeros(self.num_chunks + 1, self.batch * self.groups, *boundary.shape[2:])


def chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The chunked forward.

    Args:
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        v: [B, T, G, d_v].
        beta: [B, T, G].
        g: [B, T, G] or None.
        initial_state: [N, G, d_k, d_v] or None.
        cu_seqlens: [N + 1] or None.
        scale: of the read.

    Returns:
        o [B, T, H, d_v], the final state [N, G, d_k, d_v], and what the backward needs: Tinv [P, C, C], the incoming
        states [P, d_k, d_v] and D [P, C, d_v]. At d = 64 each is as large as v in float32. They hold a solve and a
        sequential scan; the other products are of one chunk alone, cheaper to repeat than to keep.
    """
    layout = _Layout(k, cu_seqlens)
    if initial_state is None:
        initial_state = _zero_states(k, v, cu_seqlens)
    query, key, value = (layout.to_chunks(x) for x in (q, k, v))
    beta_key, decay = layout.to_chunks(beta[..., None]) * key, layout.decay(g)
    inverse = unit_lower_inverse(_times(torch.bmm(key, beta_key.mT).tril_(-1), decay.between))
    minus_w = torch.bmm(inverse, _times(key, decay.since)).neg_()
    delta = torch.bmm(inverse, value)  # of an empty state; the scan subtracts W S
    states = layout.new_states(initial_state)
    write = _times(beta_key, decay.until).mT
    before, final_state = _scan(layout, initial_state, states, delta, minus_w, write, decay.whole)
    scores = _times(_causal(torch.bmm(query, beta_key.mT)), decay.between)
    o = torch.bmm(_times(query, decay.since), before).baddbmm_(scores, delta, beta=scale, alpha=scale)
    return layout.to_tokens(o, v.dtype), final_state, inverse, before, delta


def chunk_backward(
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    before: Tensor,
    delta: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `chunk_forward`: a mirrored scan for the state's, then products batched over all chunks.

    Args:
        grad_o: [B, T, H, d_v].
        grad_final_state: [N, G, d_k, d_v] or None for zero.
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        beta: [B, T, G].
        g: [B, T, G] or None.
        cu_seqlens: [N + 1] or None.
        inverse: [P, C, C], from the forward, like the next two.
        before: [P, d_k, d_v].
        delta: [P, C, d_v].
        scale: of the read.

    Returns:
        The gradients of q, k, v (in the dtype of k), beta, g ([0] if there is none), and the initial state
        [N, G, d_k, d_v].
    """
    layout = _Layout(k, cu_seqlens)
    if grad_final_state is None:
        grad_final_state = _zero_states(k, grad_o, cu_seqlens)
    query, key, b = (layout.to_chunks(x) for x in (q, k, beta[..., None]))
    d_o = scale * layout.to_chunks(grad_o)
    beta_key, decay = b * key, layout.decay(g)
    minus_w = torch.bmm(inverse, _times(key, decay.since)).neg_()
    scores = _times(_causal(torch.bmm(query, beta_key.mT)), decay.between)

    d_delta = torch.bmm(scores.mT, d_o)  # from this chunk; the scan adds what later chunks read
    d_states = layout.new_states(grad_final_state)
    torch.bmm(_times(query, decay.since).mT, d_o, out=d_states[:-1].flatten(0, 1))
    write = _times(beta_key, decay.until)
    after, d_initial = _scan(layout, grad_final_state, d_states, d_delta, write, minus_w.mT, decay.whole, reverse=True)

    d_value = torch.bmm(inverse.mT, d_delta)  # and the negated gradient of K S
    d_overlap = torch.bmm(d_value, delta.mT).tril_(-1)  # negated
    d_scores = _causal(torch.bmm(d_o, delta.mT))
    d_query = _times(torch.bmm(d_o, before.mT), decay.since)  # from the state, like the next two
    d_beta_key = _times(torch.bmm(delta, after.mT), decay.until)
    d_key = _times(torch.bmm(d_value, before.mT), decay.since)  # negated
    d_g = beta.new_empty(0)
    if decay.whole is not None:
        overlap = _times(torch.bmm(key, beta_key.mT), decay.between)
        pairs = (d_scores * scores).unflatten(1, (-1, CHUNK)).sum(1).addcmul_(d_overlap, overlap, value=-1)
        reads = (d_query * query).sum(-1).unflatten(1, (-1, CHUNK)).sum(1) - (d_key * key).sum(-1)
        passes = (decay.whole * before * after).sum((1, 2))
        crossing = _crossing(pairs, reads, (d_beta_key * beta_key).sum(-1), passes)
        d_g = layout.to_tokens(crossing[..., None], beta.dtype).squeeze(-1)
    d_overlap, d_scores = _times(d_overlap, decay.between), _times(d_scores, decay.between)
    d_query.baddbmm_(d_scores, beta_key)
    d_beta_key.baddbmm_(d_scores.mT, query).baddbmm_(d_overlap.mT, key, alpha=-1)
    d_key.baddbmm_(d_overlap, beta_key, beta=-1, alpha=-1).addcmul_(b, d_beta_key)
    return (
        layout.to_tokens(d_query, q.dtype),
        layout.to_tokens(d_key, k.dtype),
        layout.to_tokens(d_value, k.dtype),
        layout.to_tokens(d_beta_key.mul_(key).sum(-1, keepdim=True), beta.dtype).squeeze(-1),
        d_g,
        d_initial,
    )


def _scan(
    layout: _Layout,
    boundary: Tensor,
    states: Tensor,
    values: Tensor,
    read: Tensor,
    write: Tensor,
    whole: Tensor | None,
    *,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Chunk after chunk, in place: values += read @ S, then the state that leaves += whole * S + write @ values.

    Returns the states [P, d_k, d_v] that entered the chunks and the one [N, G, d_k, d_v] that left each document.
    """
    boundary = boundary.contiguous()  # or torch.where would pass strides on to states, which the op promises contiguous
    chunks = range(layout.num_chunks)
    entering, leaving = states[:-1], states[1:]
    if reverse:
        chunks, entering, leaving = chunks[::-1], leaving, entering
    cut = None if layout.documents is None else layout.documents.cut(boundary, reverse)
    if cut is None:
        entering[chunks[0]] = boundary.flatten(0, 1)
    values, read, write = (layout.steps(x) for x in (values, read, write))
    whole = None if whole is None else layout.steps(whole)
    for c in chunks:
        state = entering[c] if cut is None else torch.where(cut.entry[c], cut.seeds[c], entering[c])
        values[c].baddbmm_(read[c], state)
        carried = state if whole is None else whole[c] * state
        leaving[c].add_(carried).baddbmm_(write[c], values[c])
    if cut is None:
        return entering.flatten(0, 1), leaving[chunks[-1]].view_as(boundary).clone()
    left = torch.where(cut.empty, boundary, leaving.index_select(0, cut.exits))
    return torch.where(cut.entry, cut.seeds, entering).flatten(0, 1), left


def _causal(scores: Tensor) -> Tensor:
    """Zero, in place, what lies after each query: [P, R * C, C], the triangle once a query head."""
    scores.unflatten(1, (-1, CHUNK)).tril_()
    return scores


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """x [P, R * C, n] times the factor [P, C, 1 or n] once a query head; x itself where there is none."""
    return x if factor is None else (x.unflatten(1, (-1, CHUNK)) * factor.unsqueeze(1)).flatten(1, 2)


def _crossing(pairs: Tensor, reads: Tensor, writes: Tensor, passes: Tensor) -> Tensor:
    """The sum, for each token, over what passes from before it to it or beyond: the gradient of g.

    Args:
        pairs: [P, C, C] from token i to token t, 0 for i > t.
        reads: [P, C] from the state that enters to token t.
        writes: [P, C] from token i to the state that leaves.
        passes: [P] from state to state.

    Returns:
        [P, C].
    """
    past_each = pairs.cumsum(2).tril_(-1).sum(1) + writes.cumsum(1)  # from it or before it to after it
    return F.pad(past_each[:, :-1], (1, 0)) + reads.flip(1).cumsum(1).flip(1) + passes[:, None]


def _zero_states(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    num_states = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    return k.new_zeros(num_states, k.shape[2], k.shape[3], v.shape[3], dtype=precise_dtype(k.dtype))
