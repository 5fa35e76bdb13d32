"""What a decoding state must be like, and lengths of rows; values are read only where that is free.

Shapes: B batch, T sequence length.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.kernels.packing import can_read_values
from zoo.mixers.contract import State

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["check_lengths", "check_state"]

_WANTED = "state: expected one from this model's init_state"


def check_state(
    state: "TensorDict", batch_size: int, layers: Callable[[int], list[State]], device: torch.device
) -> int:
    """Refuse a state that a model's call cannot update in place.

    Args:
        state: whatever is given as one.
        batch_size: B.
        layers: what each layer's state should be like, on any device, for so many tokens.
        device: of the model.

    Returns:
        The most tokens that each row has room for.

    Raises:
        ValueError: it is not of this form.
    """
    if not hasattr(state, "batch_size") or not {"positions", "room", "layers"} <= set(state.keys()):
        raise ValueError(f"{_WANTED}, got {type(state).__name__}")
    if tuple(state.batch_size) != (batch_size,):
        raise ValueError(f"state: expected batch size {batch_size}, got {list(state.batch_size)}")
    _check_tensor("positions", state["positions"], (batch_size,), torch.int64, device)
    room = state["room"].shape[1]
    wanted = layers(room)
    if len(state["layers"].keys()) != len(wanted):
        raise ValueError(f"{_WANTED}, of {len(wanted)} layers, got {len(state['layers'].keys())}")
    for index, expected in enumerate(wanted):
        given = dict(state["layers", str(index)].items())
        if given.keys() != expected.keys():
            raise ValueError(f"{_WANTED}, with {sorted(expected)} in layer {index}, got {sorted(given)}")
        for name, tensor in expected.items():
            _check_tensor(f"{name!r} of layer {index}", given[name], tuple(tensor.shape), tensor.dtype, device)
    return room


def _check_tensor(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != device:
        got = f"{list(x.shape)} {x.dtype} on {x.device}"
        raise ValueError(f"{_WANTED}, with {name} {list(shape)} {dtype} on {device}, got {got}")
    if not x.is_contiguous():
        strides = list(x.stride())
        raise ValueError(f"{_WANTED}, with {name} contiguous, got strides {strides}; state.contiguous() is")
    if not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"state: {name} was made in inference mode, and is updated only there; state.clone() is not")


def check_lengths(lengths: Tensor, tokens: Tensor, least: int = 0) -> None:
    """Refuse lengths that rows of tokens do not have.

    Args:
        lengths: [B] int64 from ``least`` to T.
        tokens: [B, T].
        least: tokens of a row.

    Raises:
        ValueError: they are not as above.
    """
    batch_size, longest = tokens.shape
    if not isinstance(lengths, Tensor):
        raise ValueError(f"lengths: expected a tensor [{batch_size}] int64, got {lengths!r}")
    if lengths.shape != (batch_size,) or lengths.dtype != torch.int64 or lengths.device != tokens.device:
        raise ValueError(
            f"lengths: expected [{batch_size}] int64 on {tokens.device}, "
            f"got {list(lengths.shape)} {lengths.dtype} on {lengths.device}"
        )
    if can_read_values(lengths) and not least <= int(lengths.min()) <= int(lengths.max()) <= longest:
        raise ValueError(f"lengths: expected from {least} to T = {longest}, got {lengths.tolist()}")
