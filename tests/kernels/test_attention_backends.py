"""Backends of attention: which one computes a call, what it needs, what it is told of what is visible.

Shapes: B batch, T sequence length, H heads, G key/value heads, D and D_v their sizes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from zoo.kernels.attention import BACKENDS, attention, attention_mask, backends, document_ids, visible, xformers_ops
from zoo.kernels.attention.backends import Call, choose, mask_kind
from zoo.kernels.attention.flex import Blocks, find_blocks, flexible_attention
from zoo.kernels.attention.layout import aligned, whole_heads, with_contiguous_gradient

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CALL = Call(CUDA, torch.bfloat16, 64, 64, windowed=True, packed=False)
SIZE = 128
PACKINGS = ((5, 1, 294), (100, 200), (300,), (1, 0, 299), (60,) * 5)


def inputs(seq_len: int, groups: int = 2, batch: int = 1, device: str = "cpu", **options: Any) -> dict[str, Any]:
    shapes = {"q": (batch, seq_len, 4, 16), "k": (batch, seq_len, groups, 16), "v": (batch, seq_len, groups, 16)}
    return {name: torch.randn(shape, device=device, **options).requires_grad_() for name, shape in shapes.items()}


def ends(pieces: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *pieces]).cumsum(0).int()


@pytest.fixture
def with_xformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "missing_xformers", lambda: None)


@pytest.mark.usefixtures("with_xformers")
@pytest.mark.parametrize("impl", [*BACKENDS, "reference"])
def test_an_explicit_backend_is_the_one(impl: str) -> None:
    assert choose(impl, CALL) == impl


@pytest.mark.parametrize("window", [2**31, 2**70])
@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_a_window_beyond_all_integers(impl: str, window: int) -> None:
    x = inputs(9)
    torch.testing.assert_close(attention(**x, window=window, impl=impl), attention(**x, impl=impl))


@pytest.mark.usefixtures("with_xformers")
@pytest.mark.parametrize(
    ("names", "changes", "needs"),
    [
        (("flash", "flex", "xformers", "triton"), {"device": CPU}, "CUDA tensors, got cpu"),
        (("flash", "xformers"), {"dtype": torch.float32}, "v in bfloat16 or float16, got torch.float32"),
        (("flex", "triton"), {"dtype": torch.float64}, "v in bfloat16, float16 or float32, got torch.float64"),
        (("flash", "xformers"), {"value_dim": 32}, "D = D_v, a multiple of 8 up to 256, got 64 and 32"),
        (("flash", "xformers"), {"key_dim": 100, "value_dim": 100}, "D = D_v, .*, got 100 and 100"),
        (("flash", "xformers"), {"key_dim": 264, "value_dim": 264}, "D = D_v, .*, got 264 and 264"),
        (("flex",), {"value_dim": 8}, "D and D_v from 16 to 256, got 64 and 8"),
        (("flex",), {"key_dim": 264}, "D and D_v from 16 to 256, got 264 and 64"),
        (("triton",), {"key_dim": 264}, "D and D_v of at most 256, got 264 and 64"),
        (
            ("sdpa", "flash", "flex", "xformers"),
            {"numel": 2**31},
            r"at most 2\^31 - 1 numbers in .* on CUDA, got 2147483648 with all heads",
        ),
    ],
)
def test_what_a_backend_needs(names: tuple[str, ...], changes: dict[str, Any], needs: str) -> None:
    for name in names:
        with pytest.raises(ValueError, match=f"^impl: '{name}' needs {needs}$"):
            choose(name, CALL._replace(**changes))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xformers_ops, "find_spec", lambda _: None)
    monkeypatch.setattr(xformers_ops, "_missing", xformers_ops._missing.__wrapped__)
    message = r"^impl: 'xformers' needs the package xformers, .*: pip install 'mixer-zoo\[xformers\]'$"
    with pytest.raises(ValueError, match=message):
        attention(**inputs(5), impl="xformers")


@pytest.mark.parametrize("impl", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("pieces", [None, (3, 0, 14)])
@pytest.mark.parametrize("window", [None, 5])
def test_a_mask_made_beforehand(window: int | None, pieces: tuple[int, ...] | None, impl: str) -> None:
    x, cu_seqlens = inputs(17), None if pieces is None else ends(pieces)
    given: dict[str, Any] = {"window": window, "cu_seqlens": cu_seqlens}
    mask = attention_mask(17, **given, head_dims=(16, 16), device=CPU, dtype=torch.float32, impl=impl)
    needless = impl != "reference" and window is None and pieces is None
    assert (mask is None) == needless
    assert torch.equal(attention(**x, mask=mask, impl=impl), attention(**x, **given, impl=impl))


@pytest.mark.parametrize("packed", [False, True])
def test_kinds_of_masks(packed: bool) -> None:
    call = CALL._replace(packed=packed)
    assert {impl: mask_kind(impl, call) for impl in BACKENDS} == {
        "sdpa": "pairs",
        "flash": None,
        "flex": "blocks",
        "xformers": None,
        "triton": None,
    }
    assert mask_kind("auto", call) == mask_kind(choose("auto", call), call)
    plain = CALL._replace(windowed=False)
    assert [mask_kind(impl, plain) for impl in ("sdpa", "flex", "reference")] == [None, "blocks", "pairs"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"impl": "fast"}, r"^impl: expected one of auto, sdpa, .*, got 'fast'$"),
        ({"window": 0}, r"^window: expected a whole number of at least 1, got 0$"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"^cu_seqlens: expected to rise from 0 to T = 9, got \[0, 4\]$"),
    ],
)
def test_a_mask_of_what_does_not_exist(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        attention_mask(9, head_dims=(16, 16), device=CPU, dtype=torch.float32, **options)


def listed(table: tuple[Tensor, Tensor]) -> Tensor:
    """bool [M, M] of a table of blocks."""
    (counts,), (order,) = (x[0] for x in table)
    chosen = torch.zeros(order.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        chosen[row, order[row, :count].long()] = True
    return chosen


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 300, 1024])
@pytest.mark.parametrize("window", [None, 1, 50, 128, 129, 300, 2000])
def test_blocks_of_flex_attention(window: int | None, seq_len: int) -> None:
    """A block is listed as whole if all its pairs are visible, as partly visible if some are, else not at all."""
    for pieces in (None, (seq_len,), (1, 0, seq_len - 1), (*(7,) * (seq_len // 7), seq_len % 7)):
        cu_seqlens, order = None if pieces is None else ends(pieces), torch.arange(seq_len)
        documents = None if cu_seqlens is None else document_ids(cu_seqlens, seq_len)
        count = -(-seq_len // SIZE)
        pairs = torch.zeros(2, count * SIZE, count * SIZE, dtype=torch.bool)
        pairs[1] = True  # beyond the end anything may be seen
        pairs[:, :seq_len, :seq_len] = visible(order, order, window=window, documents=documents)
        by_block = pairs.view(2, count, SIZE, count, SIZE).transpose(2, 3).flatten(3)
        some, whole = by_block[0].any(-1), by_block[1].all(-1) & by_block[0].any(-1)
        blocks = find_blocks(seq_len, window, cu_seqlens, CPU)
        partly, wholly = listed(blocks.partly), listed(blocks.wholly)
        assert torch.equal(partly | wholly, some)
        assert not (wholly & ~whole).any()
        assert not (partly & wholly).any()
        assert torch.equal(wholly[:-1, :-1], whole[:-1, :-1])  # of the last ones, which end early, not all are found
        assert torch.equal(listed(blocks.partly_seen), partly.mT)
        assert torch.equal(listed(blocks.wholly_seen), wholly.mT)
        assert all(x.is_contiguous() for table in blocks[1:5] for x in table)  # FlexAttention asks for no strides


def compiled(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("window", [None, 50])
def test_flex_attention_in_one_graph_over_packings(window: int | None) -> None:
    def attend(x: dict[str, Tensor], cu_seqlens: Tensor) -> Tensor:
        blocks = find_blocks(x["q"].shape[1], window, cu_seqlens, CPU)
        return flexible_attention(x["q"], x["k"], x["v"], blocks, 0.3)

    call = compiled(attend)
    for index, pieces in enumerate(PACKINGS):
        x, cu_seqlens = {name: y.detach() for name, y in inputs(sum(pieces)).items()}, ends(pieces)
        with torch._dynamo.config.patch(error_on_recompile=index > 1):  # the number of documents becomes dynamic
            actual = call(x, cu_seqlens)
        expected = attention(**x, window=window, cu_seqlens=cu_seqlens, scale=0.3)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]


@pytest.mark.parametrize("groups", [1, 4])
def test_whole_heads(groups: int) -> None:
    x = inputs(9, groups, batch=2)
    q, k, v = whole_heads(**x)
    assert q is x["q"]
    for given, y in (("k", k), ("v", v)):
        assert torch.equal(y, x[given].repeat_interleave(4 // groups, 2))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda y: y[..., ::2],
    "transposed": lambda y: y.mT,
    "rows of 17": lambda y: torch.nn.functional.pad(y, (0, 1))[..., :16],
    "shifted": lambda y: y.flatten()[1:129].view(1, 2, 4, 16),
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_not_aligned_is_copied(view: str) -> None:
    x = VIEWS[view](torch.randn(2, 9, 4, 16))
    y = aligned(x)
    assert torch.equal(y, x)
    assert (y.is_contiguous(), y.storage_offset()) == (True, 0)


def test_what_no_copy_would_align_is_not_copied() -> None:
    x = torch.randn(2, 9, 4, 17)[..., 1:8]
    assert aligned(x) is x


def test_gradients_by_functional_transforms() -> None:
    x = torch.randn(3, 1, 9, 4, 16)

    def norm(y: Tensor) -> Tensor:
        return with_contiguous_gradient(y * y).square().sum()

    torch.testing.assert_close(torch.func.vmap(torch.func.grad(norm))(x), 4 * x**3)


def test_what_is_aligned_is_not_copied() -> None:
    parts = torch.randn(2, 9, 3 * 64).split(64, -1)
    assert all(aligned(x) is x for x in (y.unflatten(-1, (4, 16)) for y in parts))


@pytest.mark.usefixtures("fresh_compiler")
def test_alignment_in_a_graph() -> None:
    call = torch.compile(lambda x: aligned(x.split(64, -1)[1]) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 12):
        x = torch.randn(2, length, 3 * 64)
        assert torch.equal(call(x), x.split(64, -1)[1] + 1)


UPSTREAM = VIEWS | {"expanded": lambda y: y[:, :, :1].expand(-1, -1, 4, -1)}


@pytest.mark.parametrize("view", ["transposed", "shifted", "expanded"])
def test_gradients_become_contiguous(view: str) -> None:
    seen: list[Tensor] = []
    grad = UPSTREAM[view](torch.randn(1, 9, 4, 16))
    x = torch.randn(grad.shape, requires_grad=True)
    y = x.clone()
    y.register_hook(seen.append)
    with_contiguous_gradient(y).backward(grad)
    (found,) = seen
    assert (found.is_contiguous(), found.storage_offset()) == (True, 0)
    assert torch.equal(found, grad)


@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_become_contiguous_in_a_graph() -> None:
    """Whose backward would otherwise go on with a transposed one."""
    backend = AotEagerAndRecordGraphs()
    x, weights = torch.randn(2, 9, 4, 16, requires_grad=True), torch.randn(2, 9, 16, 4)
    call = torch.compile(lambda x: weights * with_contiguous_gradient(x.exp()).mT, backend=backend)
    call(x).sum().backward()
    torch.testing.assert_close(x.grad, weights.mT * x.detach().exp())
    (graph,) = backend.bw_graphs
    assert [node.kwargs for node in graph.graph.nodes if node.target is torch.ops.aten.clone.default] == [
        {"memory_format": torch.contiguous_format}
    ]


def test_symbolic_sizes() -> None:
    """A graph for any sizes has outputs as large as those of the kernels."""
    x = {name: y.detach() for name, y in inputs(70, 2).items()}
    op = torch.ops.zoo.attention_triton

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return op(q, k, v, cu_seqlens, 8, 0.3, True)

    graph = make_fx(call, tracing_mode="symbolic")(*x.values(), ends((5, 65)))
    (node,) = (node for node in graph.graph.nodes if node.target is op.default)
    o, lse = node.meta["val"]
    assert o.shape == x["q"].shape
    assert lse.shape == (1, 4, 32 * ((70 + 31 * 2) // 32))


@pytest.mark.usefixtures("with_xformers")
@pytest.mark.parametrize("impl", ["flash", "xformers"])
@pytest.mark.parametrize("packed", [False, True])
def test_shapes_without_values(impl: str, packed: bool) -> None:
    """What they return on a device is compared with it there."""
    with FakeTensorMode():
        x = inputs(37, 4, batch=1 if packed else 3, device="cuda", dtype=torch.bfloat16)
        x = {name: y.detach() for name, y in x.items()}
        cu_seqlens = torch.empty(3, dtype=torch.int64, device="cuda") if packed else None
        o = attention(**x, window=8, cu_seqlens=cu_seqlens, impl=impl)
        assert (o.shape, o.dtype, o.device.type) == (x["q"].shape, torch.bfloat16, "cuda")
        o, lse = torch.ops.zoo.attention_xformers(*x.values(), cu_seqlens, 8, 0.3)
        assert (lse.shape, lse.dtype) == ((o.shape[0], 4, 37), torch.float32)
        grads = torch.ops.zoo.attention_xformers_backward(o, *x.values(), cu_seqlens, o, lse, 8, 0.3)
        assert [(y.shape, y.dtype) for y in grads] == [(y.shape, y.dtype) for y in x.values()]


def test_blocks_are_not_a_mask_of_pairs() -> None:
    x = inputs(9)
    blocks = find_blocks(9, None, None, CPU)
    assert isinstance(blocks, Blocks)
    with pytest.raises(ValueError, match=r"^mask: 'reference' cannot read blocks, expected impl auto, flex$"):
        attention(**x, mask=blocks, impl="reference")
