"""The Deltaformer's torch.library ops, its graphs under torch.compile, and what Triton needs of a call.

Shapes: B batch, T tokens, S tokens of a prefix, H heads of w or q, G key/value heads, H_u heads of u, D head dim,
D_v value dim, N documents, T_k keys.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.kernels import deltaformer, triton_support
from zoo.kernels.deltaformer import deltaformer_read, deltaformer_write, triton_ops
from zoo.kernels.packing import num_blocks

OP, BACKWARD_OP = (
    torch.ops.zoo.deltaformer_write_torch.default,
    torch.ops.zoo.deltaformer_write_torch_backward.default,
)
TRITON_OP, TRITON_BACKWARD_OP = (
    torch.ops.zoo.deltaformer_write_triton.default,
    torch.ops.zoo.deltaformer_write_triton_backward.default,
)
LEAVES: tuple[str, ...] = ("w", "k", "v", "alpha", "beta", "prefix_k", "prefix_u")
SMOOTH = ("softmax", "linear", "relu", "exp")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y,
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, y], -1)[..., 0],
    "expanded": lambda y: y[:, :1].expand_as(y),
}


def inputs(
    seq_len: int,
    *,
    batch: int = 3,
    heads: tuple[int, int] = (4, 2),
    prefix: int | None = None,
    lengths: tuple[int, ...] | None = None,
    pieces: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Arguments of the write; sizes that all differ, or the compiler ties them together."""
    generator = torch.Generator().manual_seed(seq_len)
    batch, (num_heads, groups) = batch if pieces is None else 1, heads
    shapes = {
        "w": (seq_len, num_heads, 6),
        "k": (seq_len, groups, 6),
        "v": (seq_len, groups, 10),
        "alpha": (seq_len, num_heads),
        "beta": (seq_len, num_heads),
    }
    if prefix is not None:
        shapes |= {"prefix_k": (prefix, groups, 6), "prefix_u": (prefix, num_heads, 10)}
    x: dict[str, Any] = {
        name: torch.rand(batch, *shape, generator=generator).sub_(0.4).requires_grad_()
        for name, shape in shapes.items()
    }
    if lengths is not None:
        x["prefix_lengths"] = torch.tensor(lengths)
    if pieces is not None:
        x["cu_seqlens"] = torch.tensor([0, *pieces]).cumsum(0).int()
    return x


def detached(x: dict[str, Any]) -> dict[str, Any]:
    return {name: y.detach() for name, y in x.items()}


def op_arguments(x: dict[str, Any], kappa: str) -> list[Any]:
    """What the public function hands to the op."""
    if "prefix_k" in x:
        k, prefix_u = torch.cat([x["prefix_k"], x["k"]], 1).detach().requires_grad_(), x["prefix_u"]
    else:
        k, prefix_u = x["k"], x["w"].new_empty(x["w"].shape[0], 0, x["w"].shape[2], 10)
    plain = x.get("prefix_lengths"), x.get("cu_seqlens")
    return [x["w"], k, x["v"], x["alpha"], x["beta"], prefix_u, *plain, kappa, 2, 0.3]


def with_gradients(function: Callable[..., Tensor], x: dict[str, Any], **options: Any) -> tuple[Tensor, ...]:
    y = function(**x, **options)
    return y, *torch.autograd.grad(y.square().sum(), [z for z in x.values() if z.requires_grad])


BEFORE: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"pieces": (5, 0, 65)},
    "prefix": {"prefix": 11},
    "lengths": {"prefix": 11, "lengths": (0, 7, 11)},
}


@pytest.mark.parametrize(
    ("layout", "before", "heads", "kappa"),
    [
        *((layout, before, (4, 2), "softmax") for layout in LAYOUTS for before in BEFORE),
        *(("contiguous", "lengths", heads, "linear") for heads in ((4, 4), (4, 1), (1, 1))),
        *(("contiguous", "dense", (4, 2), kappa) for kappa in ("relu", "exp", "round")),
    ],
)
@pytest.mark.parametrize("seq_len", [70, 1])
def test_ops_are_sound(seq_len: int, layout: str, before: str, heads: tuple[int, int], kappa: str) -> None:
    more: dict[str, Any] = {"pieces": (0, 1)} if before == "packed" and seq_len == 1 else BEFORE[before]
    x = inputs(seq_len, heads=heads, **more)
    x |= {name: LAYOUTS[layout](x[name].detach()).requires_grad_() for name in LEAVES if name in x}
    args = op_arguments(x, kappa)
    torch.library.opcheck(OP, tuple(args))
    u, lse = OP(*args)
    assert not lse.requires_grad  # no gradient flows through what only the backward reads
    plain = [y.detach() if isinstance(y, Tensor) else y for y in args]
    grad_u = LAYOUTS[layout](u.detach())
    torch.library.opcheck(BACKWARD_OP, (grad_u, *plain[:8], u.detach(), lse, *plain[8:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_ops_are_sound_in_other_dtypes(dtype: torch.dtype) -> None:
    """alpha and beta come in float32 with half precision, as the public function hands them over."""
    x = {name: y.detach() for name, y in inputs(70, prefix=11).items()}
    precise = torch.promote_types(dtype, torch.float32)
    x = {name: y.to(precise if name in ("alpha", "beta") else dtype) for name, y in x.items()}
    args = op_arguments({name: y.requires_grad_() for name, y in x.items()}, "softmax")
    torch.library.opcheck(OP, tuple(args))
    plain = [y.detach() if isinstance(y, Tensor) else y for y in args]
    u, lse = OP(*plain)
    torch.library.opcheck(BACKWARD_OP, (u, *plain[:8], u, lse, *plain[8:]))


@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
@pytest.mark.parametrize("seq_len", [1, 64, 70])
def test_outputs_are_contiguous_and_own_their_memory(seq_len: int, heads: tuple[int, int], batch: int) -> None:
    """A view of a longer buffer would keep all of it alive, a whole prefix for each token that decoding adds."""
    x = inputs(seq_len, batch=batch, heads=heads, prefix=11)
    args = [y.detach() if isinstance(y, Tensor) else y for y in op_arguments(x, "softmax")]
    outputs = OP(*args)
    grads = BACKWARD_OP(outputs[0], *args[:8], *outputs, *args[8:])
    for y in (*outputs, *grads):
        assert y.is_contiguous()
        assert y.untyped_storage().nbytes() == y.nbytes
    places = [y.untyped_storage().data_ptr() for y in (*outputs, *grads, *args[:6])]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_result_is_contiguous_and_no_input(impl: str) -> None:
    for x in (inputs(1), inputs(70), inputs(70, pieces=(5, 0, 65))):
        u = deltaformer_write(**detached(x), impl=impl)
        assert u.is_contiguous()
        assert u.untyped_storage().data_ptr() not in {y.untyped_storage().data_ptr() for y in x.values()}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("before", BEFORE)
def test_one_graph_over_lengths(before: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(deltaformer_write, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seq_len in (61, 97, 128, 131, 200):
            more: dict[str, Any] = dict(BEFORE[before])
            if "prefix" in more:
                more["prefix"] = seq_len // 3 + 11
            if "pieces" in more:
                more["pieces"] = (2, 0, 7, seq_len - 20, 11)
            x = inputs(seq_len, **more)
            expected = with_gradients(deltaformer_write, x)
            torch.testing.assert_close(with_gradients(compiled, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kappa", ["linear", "relu", "exp", "round"])
def test_every_kernel_compiles(kappa: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(deltaformer_write, fullgraph=True, dynamic=True, backend="aot_eager")
    x = {name: y for name, y in inputs(61).items() if name not in ("alpha", "beta")}
    options: dict[str, Any] = {"kappa1": kappa, "round_decimals": int(kappa == "round"), "scale": 0.3}
    expected = with_gradients(deltaformer_write, x, **options)
    torch.testing.assert_close(with_gradients(compiled, x, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kappa", ["softmax", "round"])
def test_read_is_one_graph_over_lengths(kappa: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(deltaformer_read, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seq_len in (61, 97, 128):
            x = inputs(seq_len)
            x = {"q": x["w"], "k": x["k"], "u": x["v"]}
            expected = with_gradients(deltaformer_read, x, kappa2=kappa, scale=3.0)
            torch.testing.assert_close(with_gradients(compiled, x, kappa2=kappa, scale=3.0), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_token_decodes_in_one_graph(backend: str) -> None:
    """Into buffers of one size, which prefix_lengths says how far are filled; each row starts at its own length."""
    torch._dynamo.reset()
    compiled = torch.compile(deltaformer_write, fullgraph=True, backend=backend)
    x, lengths = detached(inputs(47)), torch.tensor([0, 5, 13])
    keys, values = torch.full((3, 60, 2, 6), 7.0), torch.full((3, 60, 4, 10), 7.0)
    before = inputs(13, prefix=13)
    keys[:, :13], values[:, :13] = before["prefix_k"].detach(), before["prefix_u"].detach()
    x |= {"prefix_k": keys[:, :13].clone(), "prefix_u": values[:, :13].clone(), "prefix_lengths": lengths}
    expected, rows, outputs = deltaformer_write(**x), torch.arange(3), []
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for t in range(47):
            token = {name: x[name][:, t : t + 1] for name in LEAVES[:5]}
            u = compiled(**token, prefix_k=keys, prefix_u=values, prefix_lengths=lengths + t)
            keys[rows, lengths + t], values[rows, lengths + t] = token["k"][:, 0], u[:, 0]
            outputs.append(u)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shapes_without_values(dtype: torch.dtype, before: str, kind: str) -> None:
    x = inputs(70, **BEFORE[before])
    x = {name: y.detach().to(dtype) if name in LEAVES else y for name, y in x.items()}
    with FakeTensorMode() if kind == "fake" else nullcontext() as mode:
        y: dict[str, Any] = {name: mode.from_tensor(y) if mode else y.to("meta") for name, y in x.items()}
        leaves = [y[name].requires_grad_() for name in LEAVES if name in y]
        u = deltaformer_write(**y)
        assert (u.shape, u.dtype) == ((len(x["w"]), 70, 4, 10), dtype)
        for leaf, grad in zip(leaves, torch.autograd.grad(u.sum(), leaves), strict=True):
            assert (grad.shape, grad.dtype) == (leaf.shape, dtype)
        o = deltaformer_read(y["w"], y["k"], y["v"], kappa2="softmax")
        assert (o.shape, o.dtype) == ((len(x["w"]), 70, 4, 10), dtype)


X = detached(inputs(7, prefix=5))
W, K, V = (X[name] for name in LEAVES[:3])
PREFIX = {name: X[name] for name in LEAVES[5:]}


def on_fake_gpu(x: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same arguments on a CUDA device that need not exist, within `FakeTensorMode`."""
    return {
        name: torch.empty(y.shape, dtype=dtype if y.is_floating_point() else y.dtype, device="cuda")
        for name, y in x.items()
    }


WIDE = {name: torch.empty(3, 7, y.shape[2], 257) for name, y in (("w", W), ("k", K), ("v", V))}


@pytest.mark.parametrize(
    ("change", "dtype", "shared", "needs"),
    [
        (PREFIX, torch.float32, 232_448, r"a call without a prefix"),
        (PREFIX, torch.float64, 232_448, r"a call without a prefix"),
        ({}, torch.float64, 232_448, r"v in bfloat16, float16 or float32, got torch.float64"),
        ({"v": WIDE["v"]}, torch.float32, 232_448, r"D and D_v of at most 256, got 6 and 257"),
        ({"w": WIDE["w"], "k": WIDE["k"]}, torch.float32, 232_448, r"D and D_v of at most 256, got 257 and 10"),
        ({}, torch.float32, 101_376, r"a GPU with 232448 bytes of shared memory for a program, got one with 101376"),
    ],
)
def test_what_triton_needs(
    change: dict[str, Tensor], dtype: torch.dtype, shared: int, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_support, "shared_memory", lambda _: shared)
    with FakeTensorMode():
        x = on_fake_gpu({"w": W, "k": K, "v": V} | change, dtype)
        with pytest.raises(ValueError, match=rf"^impl: 'triton' needs {needs}$"):
            deltaformer_write(**x, impl="triton")
        assert deltaformer._choose("auto", x["v"], x["w"].shape[3], x.get("prefix_k")) == "torch"
        assert deltaformer_write(**x).shape == (3, 7, 4, x["v"].shape[3])


def test_auto_is_triton_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^impl: 'triton' needs CUDA tensors, got cpu$"):
        deltaformer_write(W, K, V, impl="triton")
    assert deltaformer._choose("auto", V, 6, None) == "torch"
    monkeypatch.setattr(triton_support, "shared_memory", lambda _: 232_448)
    with FakeTensorMode():
        assert deltaformer._choose("auto", torch.empty(V.shape, device="cuda"), 6, None) == "triton"


@pytest.mark.parametrize("pieces", [None, (5, 0, 65)], ids=["dense", "packed"])
@pytest.mark.parametrize(("dtype", "block"), [(torch.float32, 32), (torch.bfloat16, 64)])
def test_shapes_of_triton_without_values(dtype: torch.dtype, block: int, pieces: tuple[int, ...] | None) -> None:
    """What the kernels return on a device is compared with it there."""
    with FakeTensorMode():
        x = on_fake_gpu(inputs(70, pieces=pieces), dtype)
        batch = len(x["w"])
        u = deltaformer_write(**x, impl="triton")
        assert (u.shape, u.dtype, u.device.type) == ((batch, 70, 4, 10), dtype, "cuda")
        leaves = [x[name].float() if name in ("alpha", "beta") else x[name] for name in LEAVES[:5]]
        hidden, options = x.get("cu_seqlens"), ("softmax", 0, 0.3)
        assert TRITON_OP(*leaves, hidden, *options, True, False)[2].numel() == 0
        u, lse, inverse, rest = TRITON_OP(*leaves, hidden, *options, True, True)
        assert (lse.numel(), lse.dtype) == (batch * 70 * 4, torch.float32)
        count = num_blocks(70, hidden, block)
        assert (inverse.numel(), inverse.dtype) == (batch * 4 * count * block**2, dtype)
        assert (rest.shape, rest.dtype) == (u.shape, dtype)
        grads = TRITON_BACKWARD_OP(u, *leaves, hidden, u, lse, inverse, rest, *options)
        for leaf, grad in zip(leaves, grads, strict=True):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize(("strength", "expected"), [({}, False), ({"bounded": True}, True), ({"beta": None}, True)])
def test_triton_is_told_of_bounds(strength: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(triton_ops, "deltaformer_write", lambda *args: given.extend(args) or (args[2],))
    with FakeTensorMode():
        deltaformer_write(**on_fake_gpu(inputs(70)) | strength, impl="triton")
    assert given[-2] is expected
