"""Saving a model to a folder and loading it again: safetensors and the resolved YAML."""

from os import PathLike
from pathlib import Path
from shutil import copymode

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from zoo.config import resolve
from zoo.errors import ZooConfigError
from zoo.files import whole_folder
from zoo.model import LanguageModel

__all__ = ["load", "save"]

CONFIG, WEIGHTS = "config.yaml", "model.safetensors"


def save(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Write the model's configuration and weights, whole or not at all.

    Args:
        model: a `LanguageModel`, or what torch.compile made of one.
        folder: new, empty, or holding an earlier save, which is replaced.

    Raises:
        TypeError: ``model`` is no LanguageModel.
        ValueError: its parameters are on the meta device, or ``folder`` holds something else.
        OSError: the folder cannot be written.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected a LanguageModel, got {type(model).__name__}")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model: its parameters are on the meta device, so there are no weights to save")
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder: {target} is a file")
    foreign = _foreign(target) if target.exists() else []
    if foreign:
        raise ValueError(
            f"folder: {target} holds something other than a saved model ({foreign[0]}); nothing was written"
        )
    with whole_folder(target) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary / WEIGHTS)
        (temporary / CONFIG).write_text(model.config.to_yaml(), encoding="utf-8")
        copymode(temporary / CONFIG, temporary / WEIGHTS)  # safetensors lets nobody else read


def _foreign(folder: Path) -> list[str]:
    """What a folder holds besides a saved model."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (CONFIG, WEIGHTS) or not path.is_file())


def load(folder: str | PathLike[str], *, device: torch.device | str = "cpu", trust_code: bool = False) -> LanguageModel:
    """Build the model that a folder holds, with its weights. Nothing in the folder is executed.

    Args:
        folder: written by `save`.
        device: where the weights go.
        trust_code: whether class paths in its configuration may be imported.

    Raises:
        ZooConfigError: the configuration is missing or cannot be used, or needs ``trust_code``.
        ValueError: the weights are missing, damaged, or of another model.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ZooConfigError(f"no saved model: {name} is missing", source=str(folder))
    config = resolve(folder / CONFIG, trust_code=trust_code)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS}: damaged: {error}") from None
    with torch.device("meta"):
        model = LanguageModel(config)
    _check(folder / WEIGHTS, weights, model.state_dict())
    model.load_state_dict(weights, assign=True)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{folder / WEIGHTS}: {name} is missing: only persistent buffers are saved")
    return model.to(device)


def _check(path: Path, weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in sorted(weights.keys() ^ expected.keys()):
        raise ValueError(f"{path}: {name} is {'missing' if name in expected else 'not part of this model'}")
    if len(dtypes := {tensor.dtype for tensor in weights.values()}) > 1 or not all(x.is_floating_point for x in dtypes):
        raise ValueError(f"{path}: expected one floating-point dtype, got {', '.join(sorted(map(str, dtypes)))}")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(f"{path}: {name} has shape {list(weights[name].shape)}, expected {list(tensor.shape)}")
