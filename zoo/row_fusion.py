"""A compiler pass for steps of one row: a product with a matrix takes in what stands around it.

Of one row a product is as fast as its matrix can be read, and each kernel more costs as long as reading a megabyte. The
compiler joins elementwise kernels, but no norm with the product behind it, and no product with the one that follows.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from zoo.kernels.row_linear import missing_for_row_linear, row_linear

__all__ = ["compile_rows", "fuse_rows"]

_READERS = {F.linear, F.embedding, row_linear}


def compile_rows(
    module: fx.GraphModule, inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Any:
    """A backend for torch.compile: `fuse_rows`, then Inductor, whose ``mode`` and ``options`` it takes."""
    from torch._inductor import list_mode_options  # loads the compiler
    from torch._inductor.compile_fx import compile_fx

    fuse_rows(module, lambda x, norm: missing_for_row_linear(x, norm) is None)
    patches = (list_mode_options(mode) if mode else {}) | (options or {})
    return compile_fx(module, inputs, config_patches=patches)


def fuse_rows(module: fx.GraphModule, can: Callable[[Tensor, Tensor | None], bool]) -> None:
    """Make `row_linear` of each product of one row with a matrix that the graph is given, in place::

        linear(x, W)    linear(rms_norm(x), W)    linear(flatten(rms_norm(x)) * silu(gate), W)    residual + linear(...)

    Only what nothing else needs, and what stands right in front of or behind the product, is taken in, and only of one
    dtype: products that autocast casts for stay as they are, and so do those that gradients are wanted of.

    Args:
        module: whose graph TorchDynamo has traced.
        can: whether `row_linear` should compute with such a vector and norm.
    """
    graph = module.graph
    if any("functorch" in str(getattr(node.target, "__module__", "")) for node in graph.nodes):
        return  # gradients inside the graph
    first = True
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.linear and _fuse(graph, node, can, first=first):
            first = False
    module.recompile()


def _fuse(graph: fx.Graph, linear: fx.Node, can: Callable[[Tensor, Tensor | None], bool], *, first: bool) -> bool:
    """Whether the product was one to be taken."""
    x, weight, bias = _arguments(linear, "input", "weight", "bias")
    if bias is not None or not _is_matrix(weight) or not _is_row(x) or _value(linear).requires_grad:
        return False
    start, user, x, gate = _gated(linear, x)
    start, x, norm, eps = _normalized(start, user, x)
    values = [_value(part) for part in (linear, x, weight, norm, gate) if part is not None]
    plain = all(isinstance(value, FakeTensor) for value in values)
    if not plain or len({value.dtype for value in values}) > 1 or not can(values[1], norm and _value(norm)):
        return False
    place, residual = _added(linear)
    taken = [place]
    while taken[-1] is not start:
        taken.append(taken[-1].prev)
    # What wrote a parameter has finished before a graph's first kernel has, so that the next may read it early.
    constant = not first and isinstance(_value(weight), nn.Parameter) and {n.target for n in weight.users} <= _READERS
    with graph.inserting_before(place):
        options = {"norm_weight": norm, "eps": eps, "gate": gate, "residual": residual, "constant": constant}
        y = graph.call_function(row_linear, (x, weight), options)
        shaped = graph.call_method("view", (y, (*[1] * (_value(linear).ndim - 1), -1)))
    origin = {name: linear.meta[name] for name in ("nn_module_stack", "stack_trace") if name in linear.meta}
    y.meta |= origin  # which tells a profile whose kernel it is
    shaped.meta |= origin | {"example_value": _value(linear)}
    place.replace_all_uses_with(shaped)
    for node in taken:
        graph.erase_node(node)
    return True


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """Of a call by position or name; None where there is none."""
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given.get(name) for name in names]


def _is_tensor(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(_value(node), Tensor)


def _is_matrix(weight: Any) -> bool:
    if not _is_tensor(weight) or weight.op != "placeholder":
        return False
    return _value(weight).ndim == 2 and 0 not in _value(weight).shape


def _is_row(x: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not _is_tensor(x) or not _value(x).ndim:
        return False
    return all(statically_known_true(size == 1) for size in _value(x).shape[:-1])


def _taken(node: Any, targets: tuple[Any, ...], user: fx.Node, start: fx.Node) -> bool:
    """Whether a node calls one of these, one other alone needs it, and it stands right in front of what is taken in.

    Args:
        node: maybe.
        targets: what it may call.
        user: that needs it.
        start: the first node that is taken in so far; nothing can change in between.
    """
    return isinstance(node, fx.Node) and node.target in targets and list(node.users) == [user] and node.next is start


def _gated(linear: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node | None]:
    """The first node that is taken in, the one that needs x, and the factors of x * silu(gate) if x is that."""
    if _taken(x, (operator.mul,), linear, linear):
        factors = _arguments(x, "input", "other")
        for factor, other in (factors, factors[::-1]):
            if factor is not other and _is_tensor(other) and _taken(factor, (F.silu,), x, x):
                gate, inplace = _arguments(factor, "input", "inplace")
                if _value(factor).shape.numel() == _value(other).shape.numel() and not inplace:
                    return factor, x, other, gate
    return linear, linear, x, None


def _normalized(start: fx.Node, user: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """The first node that is taken in, what an RMSNorm of the last dimension is of, its weight and eps; or x."""
    norm, first = x, start
    if _taken(x, ("flatten",), user, start):
        norm, user, first = x.args[0], x, x
    if isinstance(norm, fx.Node) and _taken(norm, (torch.rms_norm, F.rms_norm), user, first):
        normalized, shape, weight, eps = _arguments(norm, "input", "normalized_shape", "weight", "eps")
        if len(shape) == 1 and weight is not None and eps is not None:
            return norm, normalized, weight, eps
    return start, x, None, 0.0


def _added(linear: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The node that adds something of the same shape and dtype to a product, and what; or the product itself."""
    user = linear.next
    if user.target is operator.add and _taken(linear, (F.linear,), user, user):
        residual: Any = next((arg for arg in user.args if arg is not linear), None)
        if _is_tensor(residual) and isinstance(_value(residual), FakeTensor):
            like, own = _value(residual), _value(linear)
            if like.shape == own.shape and like.dtype == own.dtype:
                return user, residual
    return linear, None
