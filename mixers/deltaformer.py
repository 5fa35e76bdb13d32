"""Deltaformer: attention over values from which each token has taken what the memory already holds (arXiv 2505.19488).

Shapes: B batch, T sequence length, D model width, H query heads, G key/value heads, H_u heads of u, d_h head dim.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, nn

from zoo.kernels.attention import attention
from zoo.kernels.deltaformer import CHUNK, Kappa, default_scale, deltaformer_read, deltaformer_write
from zoo.kernels.ring import write
from zoo.mixers.context import AttentionMask, Context, canonical
from zoo.mixers.contract import Mixer, State
from zoo.mixers.deltaformer_step import Kernel, step
from zoo.mixers.feature_maps import HeadNorm, ShortConvolution, Strength, StrengthKind, convolve, head_norm
from zoo.mixers.norms import StaticFloat
from zoo.mixers.options import Between, OptionError
from zoo.mixers.projection import project
from zoo.mixers.rotary import RotaryOptions, rotate

__all__ = ["Deltaformer", "DeltaformerOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaformerOptions(RotaryOptions):
    """Options of `Deltaformer`.

    Attributes:
        kappa1: kernel of the write. All but softmax are not normalised: u grows without bound with long keys, and over
            thousands of tokens also with "round" and rope, or "exp" and beta near 1. Give "round" `rope: false`.
        kappa2: kernel of the read; all but softmax hold the weights of every pair of tokens.
        round_decimals: that a "round" keeps.
        compare: what the write compares with the keys: the token's own key, its query, or a projection of its own.
            With fewer key/value heads than heads, "kk" and "wk" write once for each of them, "qk" for each query head.
        alpha: strength of the token's value: learned, in (0, 1) or (0, 2), or a fixed number.
        beta: strength of what is taken off it, likewise.
        qk_norm: norm of queries, keys and what else is compared, per head: "rms" is learned; "l2" gives cosines, whose
            logits a softmax scales by d_h^1/2; "none". If None, "rms" where kappa1 is softmax, "l2" elsewhere.
        conv_size: taps of the short convolution on queries, keys, values and what is compared; 0 for none.
        conv_bias: whether it has a bias.
    """

    kappa1: Kappa = "softmax"
    kappa2: Kappa = "softmax"
    round_decimals: Literal[0, 2] = 0
    compare: Literal["kk", "qk", "wk"] = "kk"
    alpha: StrengthKind = 1.0
    beta: StrengthKind = "sigmoid"
    qk_norm: HeadNorm | None = None
    conv_size: Annotated[int, Between(0, 64)] = 0
    conv_bias: bool = False

    def validate(self) -> None:
        """A bias needs a convolution, decimals a kernel that rounds."""
        if self.conv_bias and not self.conv_size:
            raise OptionError("conv_bias", self.conv_bias, "false where conv_size is 0")
        if self.round_decimals and "round" not in (self.kappa1, self.kappa2):
            raise OptionError("round_decimals", self.round_decimals, "0 where neither kappa1 nor kappa2 is round")

    def resolve(self, dim: int) -> Self:
        """Fill in the heads and the norm."""
        resolved = super(DeltaformerOptions, self).resolve(dim)  # slots=True makes a new class, unknown to super()
        return replace(resolved, qk_norm=self.qk_norm or ("rms" if self.kappa1 == "softmax" else "l2"))

    @property
    def write_heads(self) -> int:
        """H_u."""
        return self.heads[0] if self.compare == "qk" else self.heads[1]

    @property
    def compared(self) -> tuple[int, int, int, int]:
        """Widths of queries, keys, values and the projection that "wk" compares."""
        H, G, d_h = self.heads
        return H * d_h, G * d_h, G * d_h, G * d_h * (self.compare == "wk")

    @property
    def projected(self) -> tuple[int, int, int]:
        """Widths of all these, of alpha and of beta in the fused projection."""
        alpha, beta = (self.write_heads * isinstance(strength, str) for strength in (self.alpha, self.beta))
        return sum(self.compared), alpha, beta

    def decimals(self, kappa: Kappa) -> int:
        """What the kernel keeps, if it rounds."""
        return self.round_decimals if kappa == "round" else 0

    def logit_scale(self, kappa: Kappa) -> StaticFloat:
        """The kernel's default, but of cosines softmax wants larger logits."""
        head_dim = self.heads[2]
        return (head_dim**0.5 if kappa == "softmax" and self.qk_norm == "l2" else default_scale(kappa, head_dim),)

    def num_params(self, dim: int) -> int:
        """Projections, convolution, and the norms of what is compared."""
        H, _, d_h = self.heads
        taps = sum(self.compared) * (self.conv_size + self.conv_bias)
        norms = d_h * (2 + (self.compare == "wk")) if self.qk_norm == "rms" else 0
        return dim * (sum(self.projected) + H * d_h) + taps + norms

    def flops_per_token(self, dim: int, length: int) -> float:
        """Projections, convolution, and the chunked form's count for a head (arXiv 2505.19488).

        The write takes 2 T^2 d_h for what is before the chunk, 4 T C d_h inside it and 0.7 T C^2 for its inverse; the
        read 2 T^2 d_h.
        """
        H, _, d_h = self.heads
        chunk = min(CHUNK, length)
        projections = 2 * dim * (sum(self.projected) + H * d_h) + 2 * self.conv_size * sum(self.compared)
        write = 2 * length * d_h + 4 * chunk * d_h + 0.7 * chunk**2
        return projections + self.write_heads * write + H * 2 * length * d_h

    def state_bytes(self, dim: int, length: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Keys and u of every token, and the convolution's taps."""
        del dim
        _, G, d_h = self.heads
        past = length * (G + self.write_heads) * d_h
        return (past + self.conv_size * sum(self.compared)) * dtype.itemsize


class Deltaformer(Mixer):
    """Write u_t = alpha_t v_t - beta_t sum_{i<t} kappa1(w_t, k_i) u_i, read o_t = sum_{i<=t} kappa2(q_t, k_i) u_i; W_o.

    Args:
        options: resolved options.
        dim: D.
    """

    Config = DeltaformerOptions

    def __init__(self, options: DeltaformerOptions, dim: int) -> None:
        super().__init__()
        assert options.qk_norm is not None, "resolve(dim) comes first"
        self.options = options
        self.num_heads, self.num_kv_heads, self.head_dim = options.heads
        self.write_heads = options.write_heads
        self.widths, self.compared_widths = list(options.projected), list(options.compared)
        self.writing, self.reading = (
            Kernel(kappa, options.decimals(kappa), options.logit_scale(kappa))
            for kappa in (options.kappa1, options.kappa2)
        )
        # Only softmax is attention, whose backends know what is visible by themselves.
        self.mask = canonical(AttentionMask(None, self.head_dim, "auto" if options.kappa2 == "softmax" else "sdpa"))
        self.rotary = canonical(options.rotary_table)
        self.shared = (self.mask,) if self.rotary is None else (self.mask, self.rotary)
        self.in_proj = nn.Linear(dim, sum(self.widths), bias=False)
        self.conv = (
            ShortConvolution(self.widths[0], options.conv_size, bias=options.conv_bias) if options.conv_size else None
        )
        self.alpha, self.beta = (Strength(kind, self.write_heads) for kind in (options.alpha, options.beta))
        self.q_norm = head_norm(options.qk_norm, self.head_dim)
        self.k_norm = head_norm(options.qk_norm, self.head_dim)
        self.w_norm = head_norm(options.qk_norm, self.head_dim) if options.compare == "wk" else None
        self.out_proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> tuple[Tensor, State | None]:
        """See `Mixer.forward`."""
        compared, strengths = project(self.in_proj, x, [self.widths[0], sum(self.widths[1:])])
        alpha, beta = strengths.split(self.widths[1:], -1)
        parts = convolve(self.conv, compared, self.compared_widths, context, state)
        q, k, v, w = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q = rotate(self.q_norm(q), context, self.rotary)
        k = rotate(self.k_norm(k), context, self.rotary)
        if self.w_norm is not None:
            w = rotate(self.w_norm(w), context, self.rotary)
        else:  # without a projection of its own w has no heads so far
            w = q if self.options.compare == "qk" else k
        o = self._write_and_read(w, q, k, v, self.alpha(alpha), self.beta(beta), context, state)
        return self.out_proj(o.flatten(-2)), state

    def _write_and_read(
        self,
        w: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        alpha: Tensor,
        beta: Tensor,
        context: Context,
        state: State | None,
    ) -> Tensor:
        """The write and the read; keys and u are put into the state."""
        past, start = None if state is None or context.fresh else (state["keys"], state["u"]), context.start
        if past is None or start is None:
            u = self._write(w, k, v, alpha, beta, cu_seqlens=context.cu_seqlens)
            o = self._read(q, k, u, context)
        elif context.steps:
            o, u = step(w, q, k, v, alpha, beta, past, start, self.writing, self.reading)
        else:
            before = {"prefix_k": past[0], "prefix_u": past[1], "prefix_lengths": start}
            u = self._write(w, k, v, alpha, beta, **before)
            keys, values = (torch.cat([old.to(new.dtype), new], 1) for old, new in zip(past, (k, u), strict=True))
            o = self._read(q, keys, values, context)
        if state is not None and start is not None:
            write(state["keys"], k, start, context.lengths)
            write(state["u"], u, start, context.lengths)
        return o

    def _write(self, w: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, **before: Any) -> Tensor:
        return deltaformer_write(
            w,
            k,
            v,
            alpha,
            beta,
            kappa1=self.writing.kappa,
            round_decimals=self.writing.round_decimals,
            scale=self.writing.scale[0],
            bounded=self.beta.bounded,
            **before,
        )

    def _read(self, q: Tensor, k: Tensor, u: Tensor, context: Context) -> Tensor:
        kappa2, decimals, scale = self.reading.kappa, self.reading.round_decimals, self.reading.scale[0]
        if kappa2 != "softmax":
            mask = context.tables[self.mask]
            return deltaformer_read(q, k, u, kappa2=kappa2, round_decimals=decimals, scale=scale, mask=mask)
        if self.write_heads != self.num_kv_heads:  # "qk": each query head has a u of its own
            k = k.repeat_interleave(self.write_heads // self.num_kv_heads, 2)
        return attention(q, k, u, scale=scale, **self.mask.arguments(context))

    def earliest(self, seen: int) -> int:
        """The first, unless a convolution remembers the last tokens alone."""
        return 0 if self.conv is None else seen

    def init_state(self, batch_size: int, max_length: int, device: torch.device, dtype: torch.dtype) -> State:
        """``keys`` [B, max_length, G, d_h], ``u`` [B, max_length, H_u, d_h], and the convolution's ``taps`` if any."""
        heads = {"keys": self.num_kv_heads, "u": self.write_heads}
        shapes = {name: (batch_size, max_length, count, self.head_dim) for name, count in heads.items()}
        state = {name: torch.zeros(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        if self.conv is not None:
            state["taps"] = self.conv.new_taps(batch_size, device, dtype)
        return state
