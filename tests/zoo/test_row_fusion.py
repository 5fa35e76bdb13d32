"""The pass that joins products of one row with what stands around them: what it takes in, and that nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zoo
from zoo import recipes
from zoo.decoding import _logits
from zoo.kernels.row_linear import row_linear
from zoo.mixers.delta_net import DeltaNet
from zoo.row_fusion import compile_rows, fuse_rows

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TINY = [name for name in recipes.names() if name.endswith("-tiny")]


@torch.no_grad()
def fused(function: Callable[..., Any], *args: Any, dynamic: bool = False) -> tuple[Any, fx.Graph]:
    """What the function's graph returns after the pass, and the graph."""
    graphs = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        fuse_rows(module, lambda *_: True)
        module.graph.lint()
        graphs.append(module.graph)
        return module.forward

    result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (graph,) = graphs
    return result, graph


def products(graph: fx.Graph) -> list[set[str]]:
    """The options of each `row_linear` of the graph, without those that are not used."""
    found = [node.kwargs for node in graph.nodes if node.target is row_linear]
    return [{name for name in ("norm_weight", "gate", "residual") if options[name] is not None} for options in found]


def used(graph: fx.Graph, target: Any) -> int:
    return sum(node.target is target and bool(node.users) for node in graph.nodes)


@pytest.mark.parametrize("recipe", TINY)
def test_every_product_of_a_step_is_taken(recipe: str) -> None:
    model = zoo.build(recipe, seed=0).eval()
    states = [model.init_state(1, 64) for _ in range(2)]
    for token in torch.tensor([[3], [1], [4]]):  # with something in the states
        _logits(model, token, states[0])
        _logits(model, token, states[1])
    token = torch.tensor([5])
    logits, graph = fused(_logits, model, token, states[0])
    torch.testing.assert_close(logits, _logits(model, token, states[1]), rtol=1e-5, atol=1e-6)
    assert used(graph, F.linear) == 0
    found = products(graph)
    num_layers = len(model.blocks)
    assert len(found) == 4 * num_layers + 1
    assert found.count({"gate", "residual"}) == num_layers  # the MLP's second
    delta_nets = sum(isinstance(mixer, DeltaNet) for mixer in model.mixers())
    assert found.count({"norm_weight", "residual"}) == delta_nets  # out of the norm of each head
    assert found.count({"norm_weight"}) == 2 * num_layers + 1
    for one, other in zip(*(state.values(True, True) for state in states), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mixer", ["gated_delta_net", "{name: delta_net, output_gate: true, expand_v: 2}"])
def test_a_gate_is_taken_with_the_norm(mixer: str) -> None:
    model = zoo.build("deltanet-tiny", [f"layers.0.mixer={mixer}", "num_layers=1"], seed=0).eval()
    states = [model.init_state(1, 64) for _ in range(2)]
    logits, graph = fused(_logits, model, torch.tensor([3]), states[0])
    torch.testing.assert_close(logits, _logits(model, torch.tensor([3]), states[1]))
    assert products(graph).count({"norm_weight", "gate", "residual"}) == 1


def test_more_rows_stay() -> None:
    model = zoo.build("deltanet-tiny", seed=0).eval()
    _, graph = fused(_logits, model, torch.tensor([3, 4]), model.init_state(2, 64))
    assert products(graph) == []


X, W, V, B = torch.randn(1, 8), torch.randn(5, 8), torch.rand(8), torch.randn(1, 5)
ONLY = [set()]
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[Any], list[set[str]]]] = {
    "plain": (lambda x, w: F.linear(x, w), [X, W], ONLY),
    "another norm": (lambda x, w, v: F.linear(F.layer_norm(x, (8,), v), w), [X, W, V], ONLY),
    "norm without weight": (lambda x, w: F.linear(F.rms_norm(x, (8,), None, 1e-6), w), [X, W], ONLY),
    "norm by default": (lambda x, w, v: F.linear(F.rms_norm(x, (8,), v), w), [X, W, V], ONLY),
    "norm of two": (lambda x, w, v: F.linear(F.rms_norm(x.view(2, 4), (2, 4), v.view(2, 4), 1e-6).flatten(), w),
                    [X, W, V], ONLY),
    "norm used again": (lambda x, w, v: (y := F.rms_norm(x, (8,), v, 1e-6), F.linear(y, w)), [X, W, V], ONLY),
    "gate used again": (lambda x, w: (y := F.silu(x), F.linear(x * y, w)), [X, W], ONLY),
    "product of silus": (lambda x, w: F.linear(F.silu(x) * F.silu(x + 1), w), [X, W], [{"gate"}]),
    "square of silu": (lambda x, w: F.linear((y := F.silu(x)) * y, w), [X, W], ONLY),
    "silu in place": (lambda x, w: (y := x + 1, F.linear(x * F.silu(y, inplace=True), w), y), [X, W], [set()]),
    "by names": (lambda x, w, v: F.linear(weight=w, input=torch.rms_norm(x, normalized_shape=(8,), weight=v, eps=1e-6)),
                 [X, W, V], [{"norm_weight"}]),
    "norm by default, of torch": (lambda x, w, v: F.linear(torch.rms_norm(x, (8,), v), w), [X, W, V], ONLY),
    "gate by name": (lambda x, w: F.linear(x * F.silu(input=x + 1), w), [X, W], [{"gate"}]),
    "broadcast gate": (lambda x, w: F.linear(x * F.silu(x[:, :1]), w), [X, W], ONLY),
    "gated number": (lambda x, w, n: F.linear(F.silu(x) * n, w), [X, W, 3], ONLY),
    "a number": (lambda x, w: F.linear(x * 2, w), [X, W], ONLY),
    "residual first": (lambda x, w, b: b + F.linear(x, w), [X, W, B], [{"residual"}]),
    "residual last": (lambda x, w, b: F.linear(x, w) + b, [X, W, B], [{"residual"}]),
    "residual of another shape": (lambda x, w, b: F.linear(x, w) + b[0], [X, W, B], ONLY),
    "residual of another dtype": (lambda x, w, b: F.linear(x, w) + b, [X, W, B.double()], ONLY),
    "another sum": (lambda x, w, b: ((y := F.linear(x, w)), (b + b) * y), [X, W, B], ONLY),
    "sum beside it": (lambda x, w, b: (y := F.linear(x, w), s := b + b, s * y), [X, W, B], ONLY),
    "added number": (lambda x, w: F.linear(x, w) + 1, [X, W], ONLY),
    "twice itself": (lambda x, w: (y := F.linear(x, w)) + y, [X, W], ONLY),
    "product used again": (lambda x, w, b: (y := F.linear(x, w), b + y), [X, W, B], ONLY),
    "bias": (lambda x, w, b: F.linear(x, w, b[0]), [X, W, B], []),
    "computed matrix": (lambda x, w: F.linear(x, w * 2), [X, W], []),
    "flat matrix": (lambda x, w: F.linear(x, w[0]), [X, W], []),
    "half a row": (lambda x, w: F.linear(x.view(2, 4), w[:, :4]), [X, W], []),
}  # fmt: skip


@pytest.mark.parametrize(("function", "args", "expected"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("dynamic", [False, True])
def test_takes_what_nothing_else_needs(
    function: Callable[..., Any], args: list[Any], expected: list[set[str]], dynamic: bool
) -> None:
    results, graph = fused(function, *args, dynamic=dynamic)
    assert products(graph) == expected
    torch.testing.assert_close(results, function(*args), rtol=1e-5, atol=1e-5)


def _change_before_sum(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w)
    b.add_(1)
    return b + y


def _change_after_norm(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = F.rms_norm(x, (8,), v, 1e-6)
    x.add_(1)
    return F.linear(y, w) + b


def _change_after_gate(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = F.silu(x)
    x[0, 3] = 5
    return F.linear((x + 1) * y, w) + b


def _compute_late(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w)
    return y + torch.sin(b)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_change_before_sum, [set()]),
        (_change_after_norm, [{"residual"}]),
        (_change_after_gate, [{"residual"}]),
        (_compute_late, [set()]),
    ],
)
def test_what_happens_in_between_happens_there(function: Callable[..., Any], expected: list[set[str]]) -> None:
    args, again = ([x.clone() for x in (X, W, V, B)] for _ in range(2))
    result, graph = fused(function, *args)
    assert products(graph) == expected
    torch.testing.assert_close(result, function(*again))
    for one, other in zip(args, again, strict=True):
        assert torch.equal(one, other)


class Parallel(nn.Module):
    """A block whose mixer and MLP stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        mixed = self.mix(y)
        return x + mixed + self.down(F.silu(self.up(y)))


def test_a_sum_of_others_behind_a_product_is_left_alone() -> None:
    block = Parallel()
    result, graph = fused(block, X)
    torch.testing.assert_close(result, block(X).detach())
    assert len(products(graph)) == 3


def test_a_matrix_is_read_early_where_nothing_in_flight_writes_it() -> None:
    first, second, third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def function(x: Tensor, fast: Tensor) -> Tensor:
        x = third(F.linear(second(first(x)), fast))
        third.weight.mul_(2)
        return x

    _, graph = fused(function, X, torch.randn(8, 8))
    early = [node.kwargs["constant"] for node in graph.nodes if node.target is row_linear]
    assert early == [False, True, False, False]  # the first; no parameter; written in the graph


def test_gradients_are_those_of_the_separate_operations() -> None:
    plain, mixed = nn.Linear(8, 5, bias=False), nn.Linear(8, 5)

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        fuse_rows(module, lambda *_: True)
        assert products(module.graph) == []
        return module.forward

    call = torch.compile(lambda x: plain(x) * mixed(x), backend=backend, fullgraph=True)
    call(X).sum().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(plain.weight.grad, mixed(X).detach().T @ X)
    with torch.no_grad():
        jacobian = torch.compile(torch.func.jacrev(lambda x: F.linear(x, W).sum()), backend=backend, fullgraph=True)(X)
    torch.testing.assert_close(jacobian, W.sum(0, keepdim=True))


@pytest.mark.parametrize("how", [{"mode": "max-autotune-no-cudagraphs"}, {"options": {"shape_padding": False}}, {}])
def test_the_backend_takes_what_inductor_takes(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda module, _, config_patches: (
        seen.append(config_patches), module.forward)[1])  # fmt: skip
    with torch.no_grad():
        torch.compile(lambda x: x + 1, backend=compile_rows, **how)(X)
    mode = torch._inductor.list_mode_options(how["mode"]) if "mode" in how else {}
    assert seen == [mode | how.get("options", {})]


def test_autocast_keeps_its_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result, graph = fused(lambda x, w: F.linear(x, w), X, W)
    assert products(graph) == []
    assert result.dtype == torch.bfloat16


def test_only_what_the_kernel_can() -> None:
    asked = []

    def can(x: Tensor, norm: Tensor | None) -> bool:
        asked.append((tuple(x.shape), norm is not None))
        return False

    module = nn.Sequential(nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 5, bias=False))

    def backend(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        fuse_rows(graph_module, can)
        assert products(graph_module.graph) == []
        assert used(graph_module.graph, F.linear) == 1
        return graph_module.forward

    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(X)
    assert asked == [((1, 8), True)]
