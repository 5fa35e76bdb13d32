"""A compiler pass for steps of one row: a product with a matrix takes in what stands around it.

Of one row a product is as fast as its matrix can be read, and each kernel more costs as long as reading a megabyte. The
compiler joins elementwise kernels, but no norm with the product behind it, and no product with the one that follows.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zoo.kernels.row_linear import missing_for_row_linear, row_linear

__all__ = ["compile_rows", "fuse_rows"]


def compile_rows(module: fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend for torch.compile: `fuse_rows`, then Inductor."""
    from torch._inductor.compile_fx import compile_fx  # loads the compiler

    fuse_rows(module, lambda x, norm: missing_for_row_linear(x, norm) is None)
    return compile_fx(module, inputs)


def fuse_rows(module: fx.GraphModule, can: Callable[[Tensor, Tensor | None], bool]) -> None:
    """Make `row_linear` of each product of one row with a matrix that the graph is given, in place::

        linear(x, W)    linear(rms_norm(x), W)    linear(flatten(rms_norm(x)) * silu(gate), W)    residual + linear(...)

    Only what nothing else needs, and what stands right in front of or behind the product, is taken in, and only of one
    dtype: products that autocast casts for stay as they are.

    Args:
        module: whose graph TorchDynamo has traced, without gradients.
        can: whether `row_linear` should compute with such a vector and norm.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is F.linear:
            _fuse(graph, node, can)
    module.recompile()


def _fuse(graph: fx.Graph, linear: fx.Node, can: Callable[[Tensor, Tensor | None], bool]) -> None:
    x, weight, *_ = _arguments(linear)
    bias = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or bias is not None or weight.op != "placeholder":
        return
    if _value(x).numel() != _value(x).shape[-1]:
        return
    first, x, gate = _gated(linear, x)
    first, x, norm, eps = _normalized(first, x)
    parts = [part for part in (linear, x, weight, norm, gate) if part is not None]
    if len({_value(part).dtype for part in parts}) > 1 or not can(_value(x), None if norm is None else _value(norm)):
        return
    place, residual = _added(linear)
    taken = [place]
    while taken[-1] is not first:
        taken.append(taken[-1].prev)
    with graph.inserting_before(place):
        options = {"norm_weight": norm, "eps": eps, "gate": gate, "residual": residual, "constant": True}
        y = graph.call_function(row_linear, (x, weight), options)
        shaped = graph.call_method("view", (y, tuple(_value(linear).shape)))
    shaped.meta["example_value"] = _value(linear)
    place.replace_all_uses_with(shaped)
    for node in taken:
        graph.erase_node(node)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _leads_to(user: fx.Node, node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these right in front of the node that alone needs it: nothing changes in between."""
    return isinstance(node, fx.Node) and node.target in targets and len(node.users) == 1 and node.next is user


def _gated(linear: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """The first node that is taken in, and the factors of x * silu(gate) if x is that."""
    factors = _arguments(x)
    if _leads_to(linear, x, operator.mul) and all(isinstance(factor, fx.Node) for factor in factors):
        for factor, other in (factors, factors[::-1]):
            if _leads_to(x, factor, F.silu) and _value(factor).numel() == _value(other).numel():
                return factor, other, _arguments(factor)[0]
    return linear, x, None


def _normalized(first: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """The first node that is taken in, what an RMSNorm of the last dimension is of, its weight and eps; or x."""
    user, norm = (x, _arguments(x)[0]) if _leads_to(first, x, "flatten") else (first, x)
    if not _leads_to(user, norm, torch.rms_norm, F.rms_norm):
        return first, x, None, 0.0
    normalized, shape, weight, eps = _arguments(norm)
    if len(shape) != 1 or weight is None or eps is None:
        return first, x, None, 0.0
    return norm, normalized, weight, eps


def _added(linear: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The node that adds something of the same shape and dtype to a product, and what; or the product itself."""
    user = linear.next
    if _leads_to(user, linear, F.linear) and user.target is operator.add:
        residual = next((arg for arg in user.args if arg is not linear), None)
        if isinstance(residual, fx.Node) and isinstance(residual.meta.get("example_value"), Tensor):
            like, own = _value(residual), _value(linear)
            if like.shape == own.shape and like.dtype == own.dtype:
                return user, residual
    return linear, None
