"""Weights of a model as tensors by name, and as a safetensors file.

A tensor with two names (tied embeddings) is stored once, under the first of them. The model itself restores
the second, because the weights are copied into its tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from jumok.errors import InputError
from jumok.files import atomic_write


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by name, each tensor once, without copying them."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach()
    return tensors


@torch.no_grad()
def set_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str = "these weights") -> None:
    """Copy ``tensors`` into the model. If they do not fit, raise an error and change nothing."""
    model_tensors = get_weights(model)
    problems = [f"{name} is missing" for name in model_tensors if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in model_tensors]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in model_tensors.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{source} belong to another model: {'; '.join(problems[:5])}{more}")
    for name, tensor in model_tensors.items():
        value = tensors[name].to(tensor.device)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the weights to a safetensors file, atomically."""
    write_safetensors(get_weights(model), path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read what :func:`save_weights` wrote into a model of the same shape, on whatever device it is."""
    set_weights(model, read_safetensors(path), f"the weights in {path}")


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, atomically."""
    with atomic_write(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, temporary, metadata={"format": "pt"})
        except SafetensorError as error:  # for example a full disk, which is only reported as text
            match = re.search(r"os error (\d+)", str(error))
            if match is None:
                raise
            code = int(match[1])
            raise OSError(code, os.strerror(code)) from error
        temporary.chmod(mode)  # the permissions follow the user's umask


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except SafetensorError as error:
        raise InputError(f"{path} is not a complete safetensors file ({error})") from error


def is_complete(path: Path) -> bool:
    """Whether a safetensors file exists and is not truncated. Only its header is read."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def average_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """Average the tensors of several files in float64. Integer tensors are those of the last file."""
    sums = {name: tensor.double() for name, tensor in read_safetensors(paths[0]).items()}
    for path in paths[1:]:
        for name, tensor in read_safetensors(path).items():
            sums[name] += tensor
    return {
        name: (sums[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in read_safetensors(paths[-1]).items()
    }
