"""The delta rule (arXiv 2406.06484), gated or not (arXiv 2412.06464): the public functions. Validation, then dispatch.

Shapes: B batch, T tokens, H query heads, G key/value heads, N documents (N = B unless packed).
"""

from typing import Literal

import torch
from torch import Tensor

from zoo.kernels.checks import check_shape, check_tensors
from zoo.kernels.delta_rule import ops, triton_ops
from zoo.kernels.delta_rule.reference import delta_rule_reference
from zoo.kernels.normalize import l2_normalize
from zoo.kernels.packing import check_cu_seqlens
from zoo.kernels.precision import precise_dtype
from zoo.kernels.triton_support import missing_for_heads

__all__ = ["chunk_delta_rule", "recurrent_delta_rule", "step_delta_rule"]

_Form = Literal["reference", "torch", "triton"]
_IMPLS = ("auto", "reference", "torch", "triton")


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    segment_length: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The delta rule over whole sequences, by chunks: for training and prefill.

    Per head, with a state S [d_k, d_v] (DeltaNet, arXiv 2406.06484; with g, Gated DeltaNet, arXiv 2412.06464)::

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

    The layers of both papers L2-normalise q and k; here they are used as given unless `qk_l2norm`. In half precision
    beta_t |k_t|^2 must not exceed 2, beyond which the rule itself diverges. Differentiable in q, k, v, beta, g and
    initial_state, through both results. PyTorch computes half precision in float32; Triton multiplies in the dtype of
    v, and keeps sums and states in float32. q and k are cast to the dtype of v, beta, g and initial_state to the
    state's.

    Args:
        q: [B, T, H, d_k] with B and T >= 1, floating point, any strides, like all the tensors here.
        k: [B, T, G, d_k], G dividing H: query head h reads the state of key/value head h // (H // G).
        v: [B, T, G, d_v].
        beta: [B, T, G], usually in [0, 1], or [0, 2] for negative eigenvalues.
        g: [B, T, G], finite, the log of the decay, usually at most 0; no decay if None.
        initial_state: [N, G, d_k, d_v], N = B, or the number of documents when packed; zeros if None.
        cu_seqlens: [N + 1] int32 or int64 for packed sequences, with B = 1: document n is the tokens from cu_seqlens[n]
            to cu_seqlens[n + 1], so the first is 0, the last T, and none decreases; an empty document keeps its state.
            Values are checked in eager calls on the CPU alone. Each document takes whole chunks, of 64 tokens, or 32
            in Triton for float32.
        scale: of the read; d_k^-1/2 if None.
        qk_l2norm: whether q and k are divided by sqrt(|x|^2 + 1e-6) over d_k first.
        segment_length: tokens, rounded up to whole chunks, of the segments into which Triton cuts a document so that
            few heads fill a device. By default B, the heads, T and the device decide; a number makes what a row
            gives the same bit for bit whatever batch it stands in. The other forms cut nothing and ignore it.
        impl: "triton", CUDA kernels for half precision and float32 with d_k, d_v <= 256, on GPUs that give a program
            227 KiB of shared memory (H100, H200, B200); "torch", the same algorithm in PyTorch on any device;
            "reference", token by token; or "auto": Triton where it can, else PyTorch. An explicit choice never falls
            back.

    Returns:
        o [B, T, H, d_v] in the dtype of v, and the final state [N, G, d_k, d_v] in float32 (float64 for float64 v).

    Raises:
        ValueError: an argument is not as above; the message names it, what was expected and what came.
    """
    _check(q, k, v, beta, g, initial_state, cu_seqlens, impl)
    if segment_length is not None and segment_length < 1:
        raise ValueError(f"segment_length: expected at least 1, or None, got {segment_length}")
    form = _choose(impl, v, q.shape[-1])
    q, k, beta, g, initial_state, normalize = _settle(q, k, v, beta, g, initial_state, form, qk_l2norm)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = q, k, v, beta, g, initial_state, cu_seqlens
    if form == "reference":
        return delta_rule_reference(*tensors, scale)
    if form == "torch":
        o, final_state, *_ = ops.chunk_delta_rule(*tensors, scale)
    else:
        save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        o, final_state, *_ = triton_ops.chunk_delta_rule(*tensors, scale, normalize, segment_length, save)
    return o, final_state


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    g: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: for decoding, where T is 1 or a few; slow for long T.

    The equation, arguments, results, errors and gradients of `chunk_delta_rule`. With Triton one launch reads and
    writes each state once, whatever T. Elsewhere it is plain PyTorch, which fuses into a compiled decoding step, one
    graph per T; there the values of cu_seqlens are read on the host, so packed calls do not compile.

    Args:
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        v: [B, T, G, d_v].
        beta: [B, T, G].
        g: [B, T, G] or None.
        initial_state: [N, G, d_k, d_v] or None.
        cu_seqlens: [N + 1] or None.
        scale: of the read; d_k^-1/2 if None.
        qk_l2norm: whether q and k are divided by sqrt(|x|^2 + 1e-6) over d_k first.
        impl: as for `chunk_delta_rule`; "torch" and "reference" are one and the same here.

    Returns:
        o [B, T, H, d_v] in the dtype of v, and the final state [N, G, d_k, d_v] in float32 (float64 for float64 v).

    Raises:
        ValueError: as for `chunk_delta_rule`.
    """
    _check(q, k, v, beta, g, initial_state, cu_seqlens, impl)
    form = _choose(impl, v, q.shape[-1])
    q, k, beta, g, initial_state, normalize = _settle(q, k, v, beta, g, initial_state, form, qk_l2norm)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = q, k, v, beta, g, initial_state, cu_seqlens
    if form == "triton":
        return triton_ops.recurrent_delta_rule(*tensors, scale, normalize)
    return delta_rule_reference(*tensors, scale)


@torch.no_grad()
def step_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    g: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    impl: str = "auto",
) -> Tensor:
    """`recurrent_delta_rule` that updates the state in place: for decoding, without gradients.

    Args:
        q: [B, T, H, d_k].
        k: [B, T, G, d_k].
        v: [B, T, G, d_v].
        beta: [B, T, G].
        state: [B, G, d_k, d_v], contiguous, in float32 (float64 for float64 v). It becomes the final state.
        g: [B, T, G] or None.
        scale: of the read; d_k^-1/2 if None.
        qk_l2norm: whether q and k are divided by sqrt(|x|^2 + 1e-6) over d_k first.
        impl: as for `chunk_delta_rule`; "torch" and "reference" are one and the same here.

    Returns:
        o [B, T, H, d_v] in the dtype of v.

    Raises:
        ValueError: as for `chunk_delta_rule`, or the state is not as above.
    """
    _check(q, k, v, beta, g, state, None, impl, "state")
    dtype = precise_dtype(v.dtype)
    if state.dtype != dtype or not state.is_contiguous():
        raise ValueError(f"state: expected contiguous {dtype}, got {state.dtype} with strides {list(state.stride())}")
    form = _choose(impl, v, q.shape[-1])
    q, k, beta, g, _, normalize = _settle(q, k, v, beta, g, state, form, qk_l2norm)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if form == "triton":
        return triton_ops.step_delta_rule(q, k, v, beta, g, state, scale, normalize)
    o, final_state = delta_rule_reference(q, k, v, beta, g, state, None, scale)
    state.copy_(final_state)
    return o


def _choose(impl: str, v: Tensor, key_dim: int) -> _Form:
    """The form that computes a call.

    Raises:
        ValueError: Triton is asked for, and cannot.
    """
    if impl == "reference" or impl == "torch":
        return impl
    missing = missing_for_heads(v.device, v.dtype, d_k=key_dim, d_v=v.shape[-1])
    if missing is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f"impl: 'triton' needs {missing}")
    return "torch"


def _settle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    form: _Form,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool]:
    """q, k, beta, g and the state in the dtypes of the computation, and whether the kernels are to normalise q and k.

    Autocast hands over mixed dtypes. The kernels multiply rows by 1 / |k|, which float16 cannot hold for tiny keys.
    """
    inside = qk_l2norm and form == "triton" and v.dtype != torch.float16
    if qk_l2norm and not inside:
        q, k = l2_normalize(q), l2_normalize(k)
    dtype = precise_dtype(v.dtype)
    g, state = (None if x is None else x.to(dtype) for x in (g, initial_state))
    return q.to(v.dtype), k.to(v.dtype), beta.to(dtype), g, state, inside


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    impl: str,
    state_name: str = "initial_state",
) -> None:
    if impl not in _IMPLS:
        raise ValueError(f"impl: expected one of {', '.join(map(repr, _IMPLS))}, got {impl!r}")
    if q.ndim != 4 or q.shape[0] < 1 or q.shape[1] < 1:
        raise ValueError(f"q: expected [B, T, H, d_k] with B and T >= 1, got {list(q.shape)}")
    batch, seq_len, num_heads, key_dim = q.shape
    if k.ndim != 4:
        raise ValueError(f"k: expected [B, T, G, d_k], got {list(k.shape)}")
    groups = k.shape[2]
    check_shape("k", "[B, T, G, d_k]", k, (batch, seq_len, groups, key_dim))
    if groups < 1 or num_heads % groups:
        raise ValueError(f"k: expected a number of heads G that divides the H = {num_heads} of q, got {groups}")
    if v.ndim != 4:
        raise ValueError(f"v: expected [B, T, G, d_v], got {list(v.shape)}")
    value_dim = v.shape[3]
    check_shape("v", "[B, T, G, d_v]", v, (batch, seq_len, groups, value_dim))
    check_shape("beta", "[B, T, G]", beta, (batch, seq_len, groups))
    if g is not None:
        check_shape("g", "[B, T, G]", g, (batch, seq_len, groups))
    num_states = batch
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch_size=batch, length=seq_len, device=q.device)
        num_states = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        check_shape(state_name, "[N, G, d_k, d_v]", initial_state, (num_states, groups, key_dim, value_dim))
    floating = {"q": q, "k": k, "v": v, "beta": beta, "g": g, state_name: initial_state}
    check_tensors(floating, {"cu_seqlens": cu_seqlens})
