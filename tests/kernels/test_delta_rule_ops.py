"""The delta rule's torch.library ops, its graphs under torch.compile, and its error messages."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zoo.kernels import delta_rule, triton_support
from zoo.kernels.delta_rule import chunk_delta_rule, recurrent_delta_rule

OP, BACKWARD_OP = torch.ops.zoo.chunk_delta_rule_torch.default, torch.ops.zoo.chunk_delta_rule_torch_backward.default
each_gating = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda y: y,
    "transposed": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda y: torch.stack([y, y], -1)[..., 0],
    "expanded": lambda y: y[:, :1].expand_as(y),
}


def inputs(
    seq_len: int, *, groups: int = 2, pieces: tuple[int, ...] | None = None, state: bool = True, gated: bool = True
) -> list[Any]:
    """q, k, v, beta, g, initial_state, cu_seqlens; sizes that all differ, or the compiler ties them together."""
    batch, num_states = (3, 3) if pieces is None else (1, len(pieces))
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(batch, seq_len, 4, 6), (batch, seq_len, groups, 6), (batch, seq_len, groups, 10)]
    q, k, v, s = (torch.randn(y, generator=generator) for y in [*shapes, (num_states, groups, 6, 10)])
    beta, alpha = (torch.rand(batch, seq_len, groups, generator=generator) for _ in range(2))
    leaves = [y.requires_grad_() for y in (q, F.normalize(k, dim=-1), v, beta, -0.05 * alpha, s)]
    cu_seqlens = None if pieces is None else torch.tensor([0, *pieces]).cumsum(0).int()
    return [*leaves[:4], leaves[4] if gated else None, leaves[5] if state else None, cu_seqlens]


def detached(args: list[Any]) -> list[Any]:
    return [y if y is None else y.detach() for y in args]


def with_gradients(function: Callable[..., tuple[Tensor, Tensor]], args: list[Any]) -> tuple[Tensor, ...]:
    o, final_state = function(*args[:4], g=args[4], initial_state=args[5], cu_seqlens=args[6])
    leaves = [y for y in args[:6] if y is not None]
    return o, final_state, *torch.autograd.grad(o.square().sum() + final_state.square().sum(), leaves)


@pytest.mark.parametrize(
    ("layout", "groups", "pieces", "state"),
    [
        *((layout, 2, None, True) for layout in LAYOUTS),
        *((layout, 2, (5, 0, 65), True) for layout in LAYOUTS),
        ("contiguous", 1, None, False),
        ("contiguous", 4, (5, 0, 65), False),
    ],
)
@each_gating
def test_ops_are_sound(layout: str, groups: int, pieces: tuple[int, ...] | None, state: bool, gated: bool) -> None:
    args = inputs(70, groups=groups, pieces=pieces, state=state, gated=gated)
    args[:6] = [y if y is None else LAYOUTS[layout](y.detach()).requires_grad_() for y in args[:6]]
    torch.library.opcheck(OP, (*args, 0.3))
    o, final_state, *saved = OP(*args, 0.3)
    assert not any(y.requires_grad for y in saved)  # no gradient flows through what only the backward reads
    q, k, _, beta, g, _, cu_seqlens = args
    grad_final_state = LAYOUTS[layout](torch.ones_like(final_state)) if state else None
    plain = detached([q, k, beta, g, cu_seqlens, *saved])
    backward_args = LAYOUTS[layout](o.detach()), grad_final_state, *plain, 0.3
    torch.library.opcheck(BACKWARD_OP, backward_args)
    assert BACKWARD_OP(*backward_args)[4].shape == (g.shape if gated else (0,))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("seq_len", [1, 64, 70])
def test_outputs_are_contiguous_and_own_their_memory(seq_len: int, batch: int) -> None:
    for function in (chunk_delta_rule, recurrent_delta_rule):
        args = [y[:batch] for y in detached(inputs(seq_len, groups=1)[:6])]
        outputs = function(*args[:4], g=args[4], initial_state=args[5])
        assert all(y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes for y in outputs)
        places = {y.untyped_storage().data_ptr() for y in (*outputs, *args)}
        assert len(places) == len(outputs) + len(args)


@pytest.mark.parametrize(
    ("case", "backend"),
    [("dense", "aot_eager"), ("state", "aot_eager"), ("packed", "aot_eager"), ("state", "inductor")],
)
@each_gating
def test_one_graph_over_lengths(case: str, backend: str, gated: bool) -> None:
    compiled = torch.compile(chunk_delta_rule, fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seq_len in (61, 70, 128, 131, 200):
            pieces = (2, 0, 7, seq_len - 20, 11) if case == "packed" else None
            args = inputs(seq_len, pieces=pieces, state=case == "state", gated=gated)
            expected = with_gradients(chunk_delta_rule, args)
            torch.testing.assert_close(with_gradients(compiled, args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@each_gating
def test_one_token_decodes_in_one_graph(backend: str, gated: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(recurrent_delta_rule, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        q, k, v, beta, g, state, _ = detached(inputs(130, gated=gated))
        expected, last = chunk_delta_rule(q, k, v, beta, g=g, initial_state=state, qk_l2norm=True)
        outputs = []
        for t in range(130):
            q_t, k_t, v_t, beta_t = (y[:, t : t + 1] for y in (q, k, v, beta))
            g_t = g[:, t : t + 1] if gated else None
            o, state = compiled(q_t, k_t, v_t, beta_t, g=g_t, initial_state=state, qk_l2norm=True)
            outputs.append(o)
    torch.testing.assert_close((torch.cat(outputs, 1), state), (expected, last), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_without_values(kind: str) -> None:
    args = detached(inputs(70, pieces=(5, 0, 65)))
    with FakeTensorMode() if kind == "fake" else nullcontext() as mode:
        q, k, v, beta, g, state, cu_seqlens = (mode.from_tensor(y) if mode else y.to("meta") for y in args)
        o, final_state = chunk_delta_rule(q, k, v, beta, g=g, initial_state=state, cu_seqlens=cu_seqlens)
        assert (o.shape, final_state.shape) == ((1, 70, 4, 10), (3, 2, 6, 10))
        o, final_state = recurrent_delta_rule(q, k, v, beta, g=g, initial_state=state[:1])
        assert (o.shape, final_state.shape) == ((1, 70, 4, 10), (1, 2, 6, 10))


Q, K, V, BETA, G, STATE, _ = inputs(7)
PACKED = {name: y[:1] for name, y in {"q": Q, "k": K, "v": V, "beta": BETA}.items()}


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: expected \[B, T, H, d_k\] with B and T >= 1, got \[7, 4, 6\]"),
        ({"q": Q[:, :0]}, r"q: expected \[B, T, H, d_k\] with B and T >= 1, got \[3, 0, 4, 6\]"),
        ({"k": K[0]}, r"k: expected \[B, T, G, d_k\], got \[7, 2, 6\]"),
        ({"k": K[..., :5]}, r"k: expected \[B, T, G, d_k\] = \[3, 7, 2, 6\], got \[3, 7, 2, 5\]"),
        ({"q": Q[:, :, :3]}, r"k: expected a number of heads G that divides the H = 3 of q, got 2"),
        ({"k": K[:, :, :0]}, r"k: expected a number of heads G that divides the H = 4 of q, got 0"),
        ({"v": V[0]}, r"v: expected \[B, T, G, d_v\], got \[7, 2, 10\]"),
        ({"v": V[:, :6]}, r"v: expected \[B, T, G, d_v\] = \[3, 7, 2, 10\], got \[3, 6, 2, 10\]"),
        ({"beta": BETA[..., None]}, r"beta: expected \[B, T, G\] = \[3, 7, 2\], got \[3, 7, 2, 1\]"),
        ({"g": G[..., None]}, r"g: expected \[B, T, G\] = \[3, 7, 2\], got \[3, 7, 2, 1\]"),
        ({"g": G[:, :1]}, r"g: expected \[B, T, G\] = \[3, 7, 2\], got \[3, 1, 2\]"),
        (
            {"initial_state": STATE.mT},
            r"initial_state: expected \[N, G, d_k, d_v\] = \[3, 2, 6, 10\], got \[3, 2, 10, 6\]",
        ),
        ({"v": V.long()}, r"v: expected a floating-point dtype, got torch.int64"),
        ({"g": G.long()}, r"g: expected a floating-point dtype, got torch.int64"),
        ({"beta": BETA.to("meta")}, r"beta: expected the device of q, cpu, got meta"),
        ({"g": G.to("meta")}, r"g: expected the device of q, cpu, got meta"),
        ({"impl": "cuda"}, r"impl: expected one of 'auto', 'reference', 'torch', 'triton', got 'cuda'"),
        ({"impl": "triton"}, r"impl: 'triton' needs CUDA tensors, got cpu"),
        ({"cu_seqlens": torch.tensor([0, 7])}, r"cu_seqlens: .* B = 1, got B = 3"),
        (PACKED | {"cu_seqlens": torch.tensor([0])}, r"cu_seqlens: expected \[N \+ 1\] .*, got \[1\]"),
        (
            PACKED | {"cu_seqlens": torch.tensor([0.0, 7.0])},
            r"cu_seqlens: expected .*int32 or int64.*got.*torch.float32",
        ),
        (PACKED | {"cu_seqlens": torch.tensor([1, 7])}, r"cu_seqlens: expected .*T = 7, got \[1, 7\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 6])}, r"cu_seqlens: expected .*T = 7, got \[0, 6\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 5, 4, 7])}, r"cu_seqlens: expected .*T = 7, got \[0, 5, 4, 7\]"),
        (
            PACKED | {"cu_seqlens": torch.tensor([0, 3, 7]), "initial_state": STATE},
            r"initial_state: expected \[N, G, d_k, d_v\] = \[2, 2, 6, 10\], got \[3, 2, 6, 10\]",
        ),
    ],
)
def test_errors_name_the_argument(function: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**{"q": Q, "k": K, "v": V, "beta": BETA} | change)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
def test_segments_have_tokens(impl: str) -> None:
    with pytest.raises(ValueError, match=r"^segment_length: expected at least 1, or None, got 0$"):
        chunk_delta_rule(Q, K, V, BETA, segment_length=0, impl=impl)


@pytest.mark.parametrize("function", [chunk_delta_rule, recurrent_delta_rule])
def test_a_small_gpu_computes_in_pytorch(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(triton_support, "shared_memory", lambda _: 101_376)
    with FakeTensorMode():
        inputs = [torch.empty(y.shape, device="cuda") for y in (Q, K, V, BETA)]
        message = r"^impl: 'triton' needs a GPU .* 232448 bytes of shared memory for a program, got one with 101376$"
        with pytest.raises(ValueError, match=message):
            function(*inputs, impl="triton")
        assert delta_rule._choose("auto", inputs[2], Q.shape[-1]) == "torch"
