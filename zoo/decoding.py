"""Steps of decoding: compiled once for each size, and on CUDA replayed as a graph.

Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from zoo.row_fusion import compile_rows

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["Decoder", "Replayed", "compiled"]

Result = TypeVar("Result")

_PLAIN_CALLS = 2
_COMPILED: WeakKeyDictionary[nn.Module, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()  # no part of the model:
# it must be picklable, and a copy of it compiles for itself


def compiled(function: Callable[..., Result], model: nn.Module, *sizes: Any) -> Callable[..., Result]:
    """The function, compiled as one graph that knows all its sizes; kept for as long as the model is.

    torch.compile stops after eight graphs of one code object. Every entry here has a code object of its own, so that
    any number of models and sizes have a graph each.

    Args:
        function: of plain tensors and of the model, which is one of its arguments: in a closure, it would never die.
        model: whose entry this is.
        sizes: what the graph depends on; the same ones give the same graph.
    """
    known = _COMPILED.setdefault(model, {})
    key = (function, *sizes)
    if key not in known:
        assert isinstance(function, FunctionType)
        own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        known[key] = torch.compile(own, fullgraph=True, dynamic=False, backend=compile_rows)
    return known[key]


class Replayed(Generic[Result]):
    """A call without arguments that works in place on tensors of its own; on CUDA, recorded and then replayed.

    The first calls run as they are, on a stream of their own: they are the warm-up, so no state has to be copied for
    one. The next call is captured, which runs nothing, and it and all later calls are replays: one launch each.

    Args:
        call: must not wait for the device, and must find and leave its results in the same tensors each time.
        device: where its work runs; on a CPU every call is a plain one.
    """

    def __init__(self, call: Callable[[], Result], device: torch.device) -> None:
        self.call = call
        self.plain_calls = _PLAIN_CALLS
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.recorded: tuple[torch.cuda.CUDAGraph, Result] | None = None

    def __call__(self) -> Result:
        """What the call returns: of a replay, the same tensors as of the one before, with new values."""
        if self.stream is None:
            return self.call()
        if self.plain_calls:
            self.plain_calls -= 1
            return self._run_aside(self.stream)
        if self.recorded is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                result = self._call()
            self.recorded = graph, result
        graph, result = self.recorded
        graph.replay()
        return result

    def _run_aside(self, stream: torch.cuda.Stream) -> Result:
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            result = self._call()
        current.wait_stream(stream)
        return result

    def _call(self) -> Result:
        """Under autocast without its copies of weights, which end with it: a replay would read them."""
        with torch.autocast("cuda", torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda"), False):
            return self.call()


class Decoder:
    """A model's decoding, one token of each row at a time, as fast as it goes::

        logits, state = model(prompt, max_length=1024, last=True)
        decoder = Decoder(model, state)
        logits = decoder(logits[:, -1].argmax(-1))  # [B, V], and so on

    Args:
        model: a `LanguageModel`.
        state: of the tokens before, which are counted now, on the host. It is updated in place, by this decoder alone
            as long as that is used.
        compile: whether the step is compiled: one graph for each B and ``max_length``. None: on CUDA, not on a CPU.
    """

    def __init__(self, model: nn.Module, state: "TensorDict", *, compile: bool | None = None) -> None:
        self.positions, self.room = state["positions"], state["room"].shape[1]
        self.left = self.room - int(self.positions.max())
        device = self.positions.device
        self.tokens = torch.zeros(state.batch_size, dtype=torch.int64, device=device)
        wanted = device.type == "cuda" if compile is None else compile
        step = compiled(_logits, model, *self.tokens.shape, self.room) if wanted else _logits
        self.step = Replayed(partial(step, model, self.tokens, state), device)

    def pretend(self, seen: int) -> None:
        """Let each row have seen so many tokens, whatever it keeps of them: to measure a step at a length."""
        self.positions.fill_(seen)
        self.left = self.room - seen

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits after one more token of each row: [B] int64 -> [B, V], a tensor that later calls leave alone.

        Raises:
            ValueError: the tokens are others, or the state has no room for them.
        """
        if tokens.shape != self.tokens.shape or tokens.dtype != torch.int64:
            wanted = list(self.tokens.shape)
            raise ValueError(f"tokens: expected {wanted} int64, got {list(tokens.shape)} {tokens.dtype}")
        if self.left < 1:
            raise ValueError("state: all that it has room for is there; give a larger max_length")
        self.tokens.copy_(tokens)
        logits = self.step().clone()
        self.left -= 1
        return logits


def _logits(model: nn.Module, tokens: Tensor, state: "TensorDict") -> Tensor:
    return model(tokens[:, None], state=state)[0][:, 0]
