"""From the events of a Chrome trace to the time that each place of a model takes."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zoo.profiling.places import MARK, MODEL, MODULE, OPTIMIZER, Shares, marked_shares, part_of_model

__all__ = ["STEP", "spent"]

STEP = "step"
"""The range around each profiled step."""

_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BACKWARD = "autograd::engine::evaluate_function: "
_COMPILED = "## Call CompiledFxGraph"

Event = Mapping[str, Any]


def spent(events: Iterable[Event], *, on_device: bool) -> tuple[float, Counter[str]]:
    """The time of all steps, and of each place in them; the rest is not known.

    Args:
        events: of the trace, "traceEvents".
        on_device: whether that is the time of kernels and copies on a device, added up, or else that of the host's
            thread from the begin of a step to its end.

    Returns:
        Microseconds.
    """
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    kernels: list[Event] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _HOST:
            threads[event["tid"]].append(event)
        elif event.get("ph") == "X" and event.get("cat") in _DEVICE:
            kernels.append(event)
    stepping = [thread for thread in threads.values() if any(event["name"] == STEP for event in thread)]
    walk = _Walk()
    for thread in stepping:
        walk.follow(thread)
    if not on_device:
        return sum(event["dur"] for thread in stepping for event in thread if event["name"] == STEP), walk.on_host
    for thread in threads.values():
        if thread not in stepping:  # of autograd, which has one for each device
            walk.follow(thread)
    on_kernels: Counter[str] = Counter()
    for kernel in kernels:
        _add(on_kernels, walk.launched.get(kernel["args"].get("correlation"), {}), kernel["dur"])
    return sum(kernel["dur"] for kernel in kernels), on_kernels


def _add(times: Counter[str], shares: Shares, duration: float) -> None:
    for place, share in shares.items():
        times[place] += share * duration  # pyright: ignore[reportArgumentType]


@dataclass(slots=True)
class _Frame:
    """An event that has begun and not ended.

    Attributes:
        name: of the event.
        end: when it will.
        module: the place of the innermost module that was called.
        shares: the places of what runs now.
        backward: whether it is a part of a backward pass.
    """

    name: str
    end: float
    module: str | None
    shares: Shares
    backward: bool


_OUTSIDE = _Frame("", math.inf, None, {}, False)


class _Walk:
    """A walk over the host's threads, the one of the forward pass first.

    Attributes:
        on_host: time of each place.
        launched: by its correlation, what a kernel on the device was launched for.
    """

    def __init__(self) -> None:
        self.on_host: Counter[str] = Counter()
        self.launched: dict[Any, Shares] = {}
        self.forward: dict[int, _Frame] = {}  # by the number of the backward's node that an operation made
        self.stack: list[_Frame] = []
        self.now = 0.0

    def follow(self, thread: list[Event]) -> None:
        """Walk over the events of one thread."""
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            self._go_to(event["ts"])
            parent = self.stack[-1] if self.stack else _OUTSIDE
            frame = self._frame(event, parent)
            if frame.name.startswith(MARK) and parent.name.startswith(_COMPILED):
                parent.shares = frame.shares
            if "correlation" in event.get("args", {}):
                self.launched[event["args"]["correlation"]] = frame.shares
            self.stack.append(frame)
        self._go_to(math.inf)

    def _go_to(self, time: float) -> None:
        while self.stack and self.stack[-1].end <= time:
            self._spend(self.stack[-1].end)
            self.stack.pop()
        self._spend(time)

    def _spend(self, until: float) -> None:
        if self.stack:
            _add(self.on_host, self.stack[-1].shares, max(until - self.now, 0.0))
        self.now = until

    def _frame(self, event: Event, parent: _Frame) -> _Frame:
        name, end, number = event["name"], event["ts"] + event["dur"], event.get("args", {}).get("Sequence number")
        if name.startswith(MODULE):
            place = name.removeprefix(MODULE)
            return _Frame(name, end, place, {place: 1.0}, parent.backward)
        if name.startswith(MARK):
            return _Frame(name, end, parent.module, marked_shares(name, parent.module), parent.backward)
        if name.startswith("Optimizer."):
            return _Frame(name, end, None, {OPTIMIZER: 1.0}, parent.backward)
        if name.startswith(_BACKWARD):
            made = self.forward.get(number, _OUTSIDE) if number is not None else _OUTSIDE
            return _Frame(name, end, made.module, made.shares, True)
        if name.startswith(_COMPILED):  # of whose kernels its marks tell
            return _Frame(name, end, parent.module, marked_shares(MARK + "?", parent.module), parent.backward)
        part = part_of_model(name) if parent.shares == {MODEL: 1.0} else None
        frame = _Frame(name, end, parent.module, {part: 1.0} if part else parent.shares, parent.backward)
        if number is not None and not frame.backward:
            self.forward[number] = frame  # of several operations with a number, the last has made the node
        return frame
