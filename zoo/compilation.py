"""Compiling a model, as one graph or block by block, and keeping what was compiled for the next run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.fx.experimental._config as shapes_config

from zoo.files import require_file, write_whole
from zoo.model import LanguageModel

__all__ = ["SCOPES", "Scope", "compile", "compile_cache"]

Scope = Literal["model", "block"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


def compile(
    model: LanguageModel, scope: Scope = "model", *, dynamic: bool | None = None, fullgraph: bool = True
) -> Callable[..., Any]:
    """Compile a model by `torch.compile`::

        compiled = zoo.compile(model, dynamic=True)  # one graph, the fastest steps
        compiled = zoo.compile(model, scope="block", dynamic=True)  # the shortest compilation

    By block, blocks of one kind share a graph, so that compiling takes as long for 100 layers as for one; the norm in
    front of the head and a chunk of the cross-entropy are graphs of their own. Between the graphs nothing is fused.

    For the whole process it lets caches keep graphs with the cross-entropy in them, and for "block" it raises the
    number of graphs that Dynamo allows and tells sizes apart that happen to be equal.

    Args:
        model: to compile.
        scope: "model" or "block".
        dynamic: whether sizes (tokens, rows) are symbols from the start. None: from the second size on.
        fullgraph: whether a graph break is an error.

    Returns:
        What is called like the model: of "model" a wrapper of it, as of `torch.compile`; of "block" the model itself,
        whose parts are compiled in place: its parameters keep their names, a copy of it is not compiled.

    Raises:
        ValueError: there is no such scope.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope: got {scope!r}, allowed: {', '.join(SCOPES)}")
    # Dynamo traces the cross-entropy's backward into the graph, so that it is part of what a cached one is known by.
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    if scope == "model":
        return torch.compile(model, fullgraph=fullgraph, dynamic=dynamic)
    parts = [*model.blocks, model.norm, model.chunk_gradients]
    kinds = len(set(model.config.layers)) + 2
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, 8 * kinds)  # of all blocks
    shapes_config.use_duck_shape = False  # or a batch of 2 is the same size as a rotary table's 2, and as fixed
    for part in parts:
        part.compile(fullgraph=fullgraph, dynamic=dynamic)
    return model


@contextmanager
def compile_cache(path: str | Path) -> Iterator[None]:
    """Start from what an earlier run compiled, and leave what this one did::

        with zoo.compile_cache("run/compiled.bin"):
            train(zoo.compile(model))

    Inside, graphs that the file holds are not compiled again (Dynamo still traces them). It fits the machine, the
    versions and the model that it was made with; for others it is of no use, and of no harm. It is written whole or not
    at all when the block ends, in an error too.

    Args:
        path: of the file, which need not exist. Loading it runs the code in it: only a file of your own.

    Raises:
        OSError: it cannot be read, or there is no writing there.
    """
    file = Path(path)
    require_file(file)
    if file.exists():
        torch.compiler.load_cache_artifacts(file.read_bytes())
    try:
        yield
    finally:
        saved = torch.compiler.save_cache_artifacts()
        if saved is not None:
            write_whole(file, lambda temporary: temporary.write_bytes(saved[0]))
