"""What the public functions check of their tensors alike: shape, dtype, device."""

import torch
from torch import Tensor

__all__ = ["check_mask", "check_shape", "check_tensors"]


def check_shape(name: str, letters: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse what is no tensor, or has another shape.

    Args:
        name: of the argument.
        letters: the shape as its documentation writes it.
        x: its value.
        shape: expected.

    Raises:
        ValueError: as it says.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"{name}: expected a tensor {letters} = {list(shape)}, got {x!r}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected {letters} = {list(shape)}, got {list(x.shape)}")


def check_tensors(floating: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> None:
    """Refuse tensors on other devices than the first, and integers where floating-point numbers are expected.

    Args:
        floating: name and value of the floating-point arguments, the first not None.
        others: those of the others.

    Raises:
        ValueError: as it says.
    """
    for name, x in floating.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point dtype, got {x.dtype}")
    first_name, first = next(iter(floating.items()))
    assert first is not None
    for name, x in {**floating, **others}.items():
        if x is not None and x.device != first.device:
            raise ValueError(f"{name}: expected the device of {first_name}, {first.device}, got {x.device}")


def check_mask(mask: Tensor, batch_size: int, length: int) -> None:
    """Refuse what is no mask of ``length`` queries.

    Args:
        mask: expected to be bool [batch_size or 1, 1, length, T_k].
        batch_size: rows of the batch.
        length: queries in a row.

    Raises:
        ValueError: as it says.
    """
    shape = list(mask.shape)
    if mask.dtype != torch.bool or shape[:-1] not in ([1, 1, length], [batch_size, 1, length]):
        expected = f"[{batch_size}, 1, {length}, T_k]" + (f" or [1, 1, {length}, T_k]" if batch_size > 1 else "")
        raise ValueError(f"mask: expected bool {expected}, got {shape} {mask.dtype}")
