"""Generation: a prompt, and then a loop whose every step stays on the device.

Shapes: B batch, T longest prompt, N new tokens, M slots of the state, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from zoo.decoding import Replayed, compiled
from zoo.sampling import Sampling, greedy, make_sampling, sample
from zoo.state import check_lengths

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["OnToken", "generate"]

OnToken = Callable[[Tensor], object]

_SMALLEST_ROOM = 64
_STEPS_BETWEEN_LOOKS = 16


class _Run(NamedTuple):
    """All that a step reads and writes, in place; sizes depend on B and M alone."""

    state: "TensorDict"
    tokens: Tensor  # [B] int64, the newest
    written: Tensor  # [1] int64, how many there are
    new: Tensor  # [B, M] int64, all of them
    done: Tensor  # [B] bool, whether the row has stopped
    stop: Tensor  # [1] int64, -1 for none
    uniforms: Tensor | None  # [M, B] fp32
    how: Sampling | None


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_token: int | None = None,
    seed: int | None = None,
    on_token: OnToken | None = None,
    compile: bool | None = None,
) -> Tensor:
    """Go on from prompts, in eval mode and without gradients.

    The prompts' pass is eager: it runs once, in large kernels, and no length compiles anything. A compiled step is
    kept as long as the model, for each B, kind of drawing, and size of the state: T + N, rounded up to a power of
    two from 64, so that few lengths compile anything. On CUDA the step, compiled or not, is replayed as a CUDA
    graph.

    Args:
        model: a `LanguageModel`, whose method this is.
        tokens: [B, T] int64, prompts, padded on the right with any tokens.
        max_new_tokens: N.
        lengths: [B] int64 from 1 to T, how many tokens of each row are its prompt; None for all.
        temperature: what logits are divided by before a token is drawn; 0 takes the most likely one.
        top_k: draw from that many of the most likely tokens.
        top_p: draw from the fewest most likely tokens, of these, whose probability reaches it together.
        stop_token: a row that has emitted it emits nothing else; the loop ends when every row has.
        seed: of the drawing: the same one, the same tokens, up to rounding of the logits on another device or
            compiled. None draws from torch's generator of the CPU.
        on_token: called with each new token of all rows, [B] int64 on the CPU, while the device goes on.
        compile: whether to compile the step; None: on CUDA, not on a CPU.

    Returns:
        [B, T + N] int64: each row's prompt, and right after it its new tokens. What is left, where the prompt is
        shorter than T and after a stop, is ``stop_token``, or 0 without one.

    Raises:
        ValueError: an argument is not as above, or a mixer cannot decode. ``lengths`` are read only on the CPU.
    """
    _check(tokens, max_new_tokens, stop_token, seed, model.get_parameter("embedding.weight"))
    if lengths is not None:
        check_lengths(lengths, tokens, least=1)
    how = make_sampling(temperature, top_k, top_p, tokens.device)
    room = tokens.shape[1] + max_new_tokens
    if compile is None:
        compile = tokens.device.type == "cuda"
    if compile:  # one graph for many lengths
        room = max(_SMALLEST_ROOM, 1 << (room - 1).bit_length())
    with _evaluating(model):
        logits, state = model(tokens, max_length=room, lengths=lengths, last=True)
        run = _start(state, room, max_new_tokens, stop_token, seed, how)
        _take(run, logits[:, 0])
        # The kinds of sampling are graphs of their own; settings and max_new_tokens are values.
        kind = None if how is None else how.top_k is None
        step = compiled(_step, model, tokens.shape[0], room, kind) if compile else _step
        _follow(Replayed(partial(step, model, run), tokens.device), run, max_new_tokens, stop_token, on_token)
    return _join(tokens, lengths, run.new[:, :max_new_tokens], 0 if stop_token is None else stop_token)


def _start(
    state: "TensorDict", room: int, count: int, stop_token: int | None, seed: int | None, how: Sampling | None
) -> _Run:
    """Before the first new token."""
    device, (batch_size,) = state["positions"].device, state.batch_size
    uniforms = None
    if how is not None:
        # On the CPU, so that every device draws the same; all of it now, so that nothing else comes between.
        generator = None if seed is None else torch.Generator("cpu").manual_seed(seed)
        noise = torch.rand(count, batch_size, generator=generator, dtype=torch.float32, device="cpu")
        uniforms = torch.zeros(room, batch_size, dtype=torch.float32, device=device)
        uniforms[:count] = noise.to(device)
    return _Run(
        state=state,
        tokens=torch.zeros(batch_size, dtype=torch.int64, device=device),
        written=torch.zeros(1, dtype=torch.int64, device=device),
        new=torch.full((batch_size, room), stop_token or 0, dtype=torch.int64, device=device),
        done=torch.zeros(batch_size, dtype=torch.bool, device=device),
        stop=torch.tensor([-1 if stop_token is None else stop_token], dtype=torch.int64, device=device),
        uniforms=uniforms,
        how=how,
    )


def _step(model: nn.Module, run: _Run) -> None:
    """One more token of each row."""
    logits, _ = model(run.tokens[:, None], state=run.state)  # the state's tensors are updated in place
    _take(run, logits[:, 0])


def _take(run: _Run, logits: Tensor) -> None:
    """Choose each row's token from its logits [B, V], and write it down."""
    if run.how is None or run.uniforms is None:
        chosen = greedy(logits)
    else:
        chosen = sample(logits, run.uniforms.index_select(0, run.written)[0], run.how)
    chosen = torch.where(run.done, run.stop, chosen)
    run.done.logical_or_(chosen == run.stop)
    run.new.index_copy_(1, run.written, chosen[:, None])
    run.tokens.copy_(chosen)
    run.written.add_(1)


class _Look:
    """What a step left, on its way to the host: the device goes on meanwhile."""

    def __init__(self, run: _Run) -> None:
        self.tokens, self.over = self._send(run.tokens), self._send(run.done.all())
        self.arrival = None
        if run.tokens.is_cuda:
            self.arrival = torch.cuda.Event()
            self.arrival.record(torch.cuda.current_stream(run.tokens.device))

    @staticmethod
    def _send(x: Tensor) -> Tensor:
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return copy.copy_(x, non_blocking=True)

    def finish(self, on_token: OnToken | None) -> bool:
        """Hand the tokens on; whether every row has stopped."""
        if self.arrival is not None:
            self.arrival.synchronize()
        if on_token is not None:
            on_token(self.tokens)
        return bool(self.over)


def _follow(step: Callable[[], None], run: _Run, count: int, stop_token: int | None, on_token: OnToken | None) -> None:
    """Take the steps after the first token, until all are taken or every row has stopped.

    On CUDA the host looks at what a step left only when the next one that it will look at is under way: the device
    always has work. Without a callback it looks at every 16th, and so runs at most 32 steps past the end; without a
    stop token it never looks.
    """
    every = 1 if on_token is not None else _STEPS_BETWEEN_LOOKS
    late: _Look | None = None
    for index in range(count):
        if index:
            step()
        if index % every == 0 and (on_token is not None or stop_token is not None):
            look = _Look(run)
            if run.tokens.is_cuda:
                late, look = look, late
            if look is not None and look.finish(on_token):
                return
    if on_token is not None and late is not None:
        late.finish(on_token)


def _join(tokens: Tensor, lengths: Tensor | None, new: Tensor, filler: int) -> Tensor:
    """Each row's prompt, its new tokens, and the filler: [B, T], [B], [B, N] -> [B, T + N]."""
    if lengths is None:
        return torch.cat([tokens, new], 1)
    order = torch.arange(tokens.shape[1] + new.shape[1], device=tokens.device)
    starts = lengths[:, None]
    prompt = torch.where(order[: tokens.shape[1]] < starts, tokens, filler)
    ids = torch.cat([prompt, torch.full_like(new, filler)], 1)
    return ids.scatter_(1, starts + order[: new.shape[1]], new)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; then every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check(tokens: Tensor, max_new_tokens: int, stop_token: int | None, seed: int | None, weight: Tensor) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype != torch.int64:
        raise ValueError(f"tokens: expected [B, T] int64, not empty, got {list(tokens.shape)} {tokens.dtype}")
    if tokens.device != weight.device:
        raise ValueError(f"tokens: expected the model's device, {weight.device}, got {tokens.device}")
    most = 2**31 - tokens.shape[1]
    if not isinstance(max_new_tokens, int) or not 1 <= max_new_tokens < most:
        raise ValueError(f"max_new_tokens: expected a whole number from 1 to {most - 1}, got {max_new_tokens}")
    if stop_token is not None and (not isinstance(stop_token, int) or not 0 <= stop_token < weight.shape[0]):
        raise ValueError(f"stop_token: expected an id from 0 to {weight.shape[0] - 1}, got {stop_token}")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise ValueError(f"seed: expected a whole number from 0 to 2**64 - 1, got {seed}")
