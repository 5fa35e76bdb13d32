"""Every error of the Deltaformer's public functions.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w or q, G key/value heads, H_u heads of u, D head dim,
D_v value dim, N documents, T_k keys.
"""

from typing import Any

import pytest
import torch

from zoo.kernels.deltaformer import deltaformer_read, deltaformer_write

SMOOTH = ("softmax", "linear", "relu", "exp")
W, K, V = (torch.zeros(3, 7, *size) for size in ((4, 6), (2, 6), (2, 10)))
ALPHA, BETA = torch.zeros(2, 3, 7, 4)
PREFIX_K, PREFIX_U = torch.zeros(3, 5, 2, 6), torch.zeros(3, 5, 4, 10)
X = {"w": W, "k": K, "v": V, "alpha": ALPHA, "beta": BETA}
PREFIX = {"prefix_k": PREFIX_K, "prefix_u": PREFIX_U}
PACKED = {name: x[:1] for name, x in X.items()}


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kappa1": "gelu"}, r"kappa1: expected one of 'softmax', 'linear', 'relu', 'exp', 'round', got 'gelu'"),
        ({"kappa1": "round", "round_decimals": -1}, r"round_decimals: expected a whole number from 0 to 6, got -1"),
        ({"kappa1": "round", "round_decimals": 7}, r"round_decimals: expected a whole number from 0 to 6, got 7"),
        ({"kappa1": "round", "round_decimals": "2"}, r"round_decimals: expected a whole number from 0 to 6, got '2'"),
        ({"scale": "a"}, r"scale: expected a number, got 'a'"),
        *(({"kappa1": kappa, "round_decimals": 1}, r"round_decimals: expected 0, .*, got 1") for kappa in SMOOTH),
        ({"w": W[0]}, r"w: expected \[B, T, H, D\], no size 0, got \[7, 4, 6\]"),
        ({"w": W[:0]}, r"w: expected \[B, T, H, D\], no size 0, got \[0, 7, 4, 6\]"),
        ({"w": W[:, :0]}, r"w: expected \[B, T, H, D\], no size 0, got \[3, 0, 4, 6\]"),
        ({"w": W[..., :0]}, r"w: expected \[B, T, H, D\], no size 0, got \[3, 7, 4, 0\]"),
        ({"k": K[0]}, r"k: expected \[B, T, G, D\], got \[7, 2, 6\]"),
        ({"k": K[:2]}, r"k: expected \[B, T, G, D\] = \[3, 7, 2, 6\], got \[2, 7, 2, 6\]"),
        ({"k": K[:, :6]}, r"k: expected \[B, T, G, D\] = \[3, 7, 2, 6\], got \[3, 6, 2, 6\]"),
        ({"k": K[..., :5]}, r"k: expected \[B, T, G, D\] = \[3, 7, 2, 6\], got \[3, 7, 2, 5\]"),
        ({"w": W[:, :, :3]}, r"k: expected a number of heads G that divides the H = 3 of w, got 2"),
        ({"k": K[:, :, :0]}, r"k: expected a number of heads G that divides the H = 4 of w, got 0"),
        ({"v": V[0]}, r"v: expected \[B, T, G, D_v\], got \[7, 2, 10\]"),
        ({"v": V[:, :6]}, r"v: expected \[B, T, G, D_v\] = \[3, 7, 2, 10\], got \[3, 6, 2, 10\]"),
        ({"v": V[:, :, :1]}, r"v: expected \[B, T, G, D_v\] = \[3, 7, 2, 10\], got \[3, 7, 1, 10\]"),
        ({"v": V[..., :0]}, r"v: expected \[B, T, G, D_v\], no size 0, got \[3, 7, 2, 0\]"),
        ({"alpha": ALPHA[:, :, :2]}, r"alpha: expected \[B, T, H\].* = \[3, 7, 4\], got \[3, 7, 2\]"),
        ({"alpha": ALPHA[:, :1]}, r"alpha: expected \[B, T, H\].* = \[3, 7, 4\], got \[3, 1, 4\]"),
        ({"alpha": 0.5}, r"alpha: expected a tensor \[B, T, H\].* = \[3, 7, 4\], got 0.5"),
        ({"beta": BETA[:, :, :2]}, r"beta: expected \[B, T, H\].* = \[3, 7, 4\], got \[3, 7, 2\]"),
        ({"beta": BETA[..., None]}, r"beta: expected \[B, T, H\].* = \[3, 7, 4\], got \[3, 7, 4, 1\]"),
        *(({name: X[name].long()}, f"{name}: expected a floating-point dtype, got torch.int64") for name in X),
        *(
            ({name: X[name].to("meta")}, f"{name}: expected the device of w, cpu, got meta")
            for name in ("k", "v", "alpha", "beta")
        ),
        ({"cu_seqlens": torch.tensor([0, 7])}, r"cu_seqlens: .* B = 1, got B = 3"),
        (PACKED | {"cu_seqlens": [0, 7]}, r"cu_seqlens: expected a tensor, got list"),
        (PACKED | {"cu_seqlens": torch.tensor([0] * 10 + [6])}, r"cu_seqlens: .* T = 7, got 0, \.\.\., 6"),
        (
            PACKED | {"cu_seqlens": torch.tensor([*range(5), 6, 5, 6, 6, 6, 7])},
            r"cu_seqlens: expected to rise from 0 to T = 7, got 0, ..., 6, 5, ..., 7",
        ),
        (PACKED | {"cu_seqlens": torch.tensor([0])}, r"cu_seqlens: expected \[N \+ 1\] .*, got \[1\]"),
        (PACKED | {"cu_seqlens": torch.tensor([[0, 7]])}, r"cu_seqlens: expected \[N \+ 1\] .*, got \[1, 2\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0.0, 7.0])}, r"cu_seqlens: expected .*int32 or int64.*torch.float32"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 7], device="meta")}, r"cu_seqlens: expected .*cpu, got meta"),
        (PACKED | {"cu_seqlens": torch.tensor([1, 7])}, r"cu_seqlens: expected .*T = 7, got \[1, 7\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 6])}, r"cu_seqlens: expected .*T = 7, got \[0, 6\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 5, 4, 7])}, r"cu_seqlens: expected .*T = 7, got \[0, 5, 4, 7\]"),
        (
            PACKED | {name: y[:1] for name, y in PREFIX.items()} | {"cu_seqlens": torch.tensor([0, 7])},
            r"cu_seqlens: expected no prefix with packed sequences",
        ),
        ({"prefix_k": PREFIX_K}, r"prefix_k, prefix_u: expected both or neither, got one"),
        ({"prefix_u": PREFIX_U}, r"prefix_k, prefix_u: expected both or neither, got one"),
        (PREFIX | {"prefix_k": PREFIX_K[0]}, r"prefix_k: expected \[B, S, G, D\], got \[5, 2, 6\]"),
        (
            PREFIX | {"prefix_k": PREFIX_K[:, :, :1]},
            r"prefix_k: expected \[B, S, G, D\] = \[3, 5, 2, 6\], got \[3, 5, 1, 6\]",
        ),
        (
            PREFIX | {"prefix_u": PREFIX_U[:, :4]},
            r"prefix_u: expected \[B, S, H, D_v\] = \[3, 5, 4, 10\], got \[3, 4, 4, 10\]",
        ),
        (
            PREFIX | {"prefix_u": PREFIX_U[:, :, :2]},
            r"prefix_u: expected \[B, S, H, D_v\] = \[3, 5, 4, 10\], got \[3, 5, 2, 10\]",
        ),
        (PREFIX | {"prefix_u": PREFIX_U[0]}, r"prefix_u: expected \[B, S, H, D_v\] = .*, got \[5, 4, 10\]"),
        *(
            (PREFIX | {name: y.long()}, f"{name}: expected a floating-point dtype, got torch.int64")
            for name, y in PREFIX.items()
        ),
        *(
            (PREFIX | {name: y.to("meta")}, f"{name}: expected the device of w, cpu, got meta")
            for name, y in PREFIX.items()
        ),
        ({"prefix_lengths": torch.tensor([1, 2, 3])}, r"prefix_lengths: expected only with prefix_k and prefix_u"),
        (
            PREFIX | {"prefix_lengths": torch.tensor([1, 2, 6])},
            r"prefix_lengths: expected from 0 to S = 5, got \[1, 2, 6\]",
        ),
        (
            PREFIX | {"prefix_lengths": torch.tensor([1, -1, 5])},
            r"prefix_lengths: expected from 0 to S = 5, got \[1, -1, 5\]",
        ),
        (
            PREFIX | {"prefix_lengths": torch.tensor([1.0, 2.0, 3.0])},
            r"prefix_lengths: expected int32 or int64, got torch.float32",
        ),
        (PREFIX | {"prefix_lengths": torch.tensor([1, 2])}, r"prefix_lengths: expected \[B\] = \[3\], got \[2\]"),
        (
            PREFIX | {"prefix_lengths": torch.tensor([1, 2, 3], device="meta")},
            r"prefix_lengths: expected the device of w, cpu, got meta",
        ),
    ],
)
def test_write_errors_name_the_argument(change: dict[str, Any], message: str, impl: str) -> None:
    arguments: dict[str, Any] = X | change
    with pytest.raises(ValueError, match=f"^{message}"):
        deltaformer_write(**arguments, impl=impl)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^impl: expected one of 'auto', 'reference', 'torch', 'triton', got 'cuda'$"):
        deltaformer_write(W, K, V, impl="cuda")


MASK = torch.ones(3, 1, 7, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kappa2": "gelu"}, r"kappa2: expected one of 'softmax', 'linear', 'relu', 'exp', 'round', got 'gelu'"),
        ({"kappa2": "round", "round_decimals": -1}, r"round_decimals: expected a whole number from 0 to 6, got -1"),
        *(({"kappa2": kappa, "round_decimals": 1}, r"round_decimals: expected 0, .*, got 1") for kappa in SMOOTH),
        ({"q": W[0]}, r"q: expected \[B, T, H, D\], got \[7, 4, 6\]"),
        ({"k": K[0]}, r"k: expected \[B, T_k, G, D\], got \[7, 2, 6\]"),
        ({"k": K[..., :5]}, r"k: expected \[B, T_k, G, D\] = \[3, 7, 2, 6\], got \[3, 7, 2, 5\]"),
        ({"k": K[:, :5]}, r"k: expected \[B, T_k, G, D\] = \[3, 7, 2, 6\], got \[3, 5, 2, 6\]"),
        ({"mask": MASK}, r"k: expected \[B, T_k, G, D\] = \[3, 5, 2, 6\], got \[3, 7, 2, 6\]"),
        ({"u": V[0]}, r"u: expected \[B, T_k, H_u, D_v\], got \[7, 2, 10\]"),
        ({"u": V[:, :5]}, r"u: expected \[B, T_k, H_u, D_v\] = \[3, 7, 2, 10\], got \[3, 5, 2, 10\]"),
        ({"u": V[:2]}, r"u: expected \[B, T_k, H_u, D_v\] = \[3, 7, 2, 10\], got \[2, 7, 2, 10\]"),
        ({"q": W[:, :, :3]}, r"k: expected a number of heads that divides the H = 3 of q, got 2"),
        ({"k": K[:, :, :0]}, r"k: expected a number of heads that divides the H = 4 of q, got 0"),
        ({"u": PREFIX_U.new_zeros(3, 7, 3, 10)}, r"u: expected a number of heads that divides the H = 4 of q, got 3"),
        ({"k": K[:, :5], "u": V[:, :5], "mask": MASK.float()}, r"mask: expected bool .*, got .* torch.float32"),
        (
            {"k": K[:, :5], "u": V[:, :5], "mask": MASK[:2]},
            r"mask: expected bool \[3, 1, 7, T_k\] .*, got \[2, 1, 7, 5\]",
        ),
        ({"k": K[:, :5], "u": V[:, :5], "mask": MASK[:, 0]}, r"mask: expected bool .*, got \[3, 7, 5\]"),
        *(({name: y.long()}, f"{name}: expected a floating-point dtype") for name, y in (("q", W), ("k", K), ("u", V))),
        *(({name: y.to("meta")}, f"{name}: expected the device of q") for name, y in (("k", K), ("u", V))),
        ({"k": K[:, :5], "u": V[:, :5], "mask": MASK.to("meta")}, r"mask: expected the device of q, cpu, got meta"),
        ({"mask": torch.tensor(True)}, r"mask: expected bool .*, got \[\]"),
    ],
)
def test_read_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"q": W, "k": K, "u": V, "kappa2": "softmax"} | change
    with pytest.raises(ValueError, match=f"^{message}"):
        deltaformer_read(**arguments)
