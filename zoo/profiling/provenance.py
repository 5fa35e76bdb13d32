"""Marks in compiled code that say of which modules the kernel after them is."""

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

from zoo import loss
from zoo.profiling.places import MODEL, mark_name, part_of_model

__all__ = ["provenance", "replaced"]


@contextmanager
def provenance() -> Iterator[None]:
    """Let what is compiled inside tell a profile of which modules its kernels are::

        with provenance():
            compiled = torch.compile(model, fullgraph=True)
            compiled(tokens, labels=labels).backward()  # compiles
            profile_step(...)

    In front of each kernel's call Inductor's generated code gets an empty range, which names the modules of the
    operations that were fused into the kernel, and how many each of them has there. Without a profiler it takes a
    microsecond or two of the host. A cached graph would have none: Inductor's and AOTAutograd's caches of graphs are
    neither read nor written inside, so that profiled figures are those of a compilation of their own. What this process
    compiled before has none either, unless `torch.compiler.reset` lets it be compiled again. Where a version of torch
    has no such place to put marks, there are none, and kernels stay unattributed.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    settings: list[tuple[Any, dict[str, Any]]] = [
        (inductor, {"fx_graph_cache": False, "fx_graph_remote_cache": False}),
        (autograd, {"enable_autograd_cache": False, "enable_remote_autograd_cache": False}),
    ]
    with ExitStack() as stack:
        for config, values in settings:
            stack.enter_context(config.patch({name: value for name, value in values.items() if hasattr(config, name)}))
        for owner, name in _callers():
            stack.enter_context(replaced(owner, name, _marking(getattr(owner, name))))
        yield


@contextmanager
def replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A class with another method, for a while."""
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _callers() -> list[tuple[type, str]]:
    """What Inductor calls with scheduled nodes right before it writes the call of their kernel, in torch 2.11-2.13."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.scheduler import BaseScheduling, Scheduler

    schedulings: tuple[type, ...] = (TritonScheduling, CppScheduling, BaseScheduling)
    callers = [*((owner, "codegen_comment") for owner in schedulings), (Scheduler, "codegen_extern_call")]
    return [(owner, name) for owner, name in callers if name in vars(owner)]


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def mark_and_go_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = [*args, *kwargs.values()][0]
        _write_mark(scheduled if isinstance(scheduled, Iterable) else [scheduled])
        return original(self, *args, **kwargs)

    return mark_and_go_on


def _write_mark(scheduled: Iterable[Any]) -> None:
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:  # whose code is not Python
        return
    try:
        places = _places(_operations(scheduled))
    except AttributeError:  # of another version's nodes; a kernel without a mark would go to the one before it
        places = Counter[str]()
    V.graph.wrapper_code.writeline(f"with torch.profiler.record_function({mark_name(places)!r}): pass")


def _operations(scheduled: Iterable[Any]) -> list[fx.Node]:
    """The nodes of the graph that a kernel computes; a schedule also has markers, which are of none."""
    found: dict[fx.Node, None] = {}
    for group in scheduled:
        for single in group.get_nodes() if hasattr(group, "get_nodes") else ():
            if single.node is not None:
                found |= dict.fromkeys(_origins(single.node))
    return [node for node in found if not _is_view(node)] or list(found)


def _origins(buffer: Any) -> Iterable[fx.Node]:
    """The nodes that a buffer is made by; those of a call also name what its arguments come from."""
    from torch._inductor.ir import ExternKernel

    if not isinstance(buffer, ExternKernel):
        return buffer.origins
    if buffer.origin_node is not None:
        return [buffer.origin_node]
    return [node for node in buffer.origins if node.target is buffer.op_overload] or buffer.origins


def _is_view(node: fx.Node) -> bool:
    """Whether it computes nothing."""
    views = operator.getitem, torch.ops.aten._unsafe_view.default
    return node.target in views or (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view)


def _places(operations: list[fx.Node]) -> Counter[str]:
    """How many of them are at each place, as seen from the module that is compiled; what is not known counts not."""
    return Counter(place for node in operations if (place := _place(node)) is not None)


def _place(node: fx.Node) -> str | None:
    """Of the module whose forward has the operation, or the operation that it is a gradient of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    place = _path(list(stack.values())[-1][0]) if stack else MODEL
    if place != MODEL:
        return place
    if node.target is torch.ops.aten.copy_.default:  # at a graph's end, to what was given to it
        return _place(node.args[1]) if isinstance(node.args[1], fx.Node) else None
    trace = node.meta.get("stack_trace")
    if not trace or node.meta.get("is_gradient_acc"):  # made by a pass of the compiler; a sum of gradients
        return None
    if f'"{loss.__file__}"' in trace:  # of an autograd.Function, which loses its module
        return "cross_entropy"
    return part_of_model(str(node.meta.get("original_aten") or node.target)) or MODEL


def _path(source: str) -> str:
    """A module's path in the compiled one from where Dynamo found it: "L['self'].blocks.0.mixer"."""
    names = [name for name in re.findall(r"\w+", source)[2:] if name not in ("_modules", "_orig_mod")]
    if "blocks" in names:
        names = names[names.index("blocks") :]
    return ".".join(names) or MODEL
