"""A model's weights as names and tensors, and as a safetensors file.

A tensor that a model uses under two names (tied embeddings) is kept once, under the first of them. Reading
goes through the model, whose own tying restores the second.
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

__all__ = [
    "average_weights",
    "get_weights",
    "is_complete",
    "load_weights",
    "read_safetensors",
    "save_weights",
    "set_weights",
    "write_safetensors",
]


def get_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each tensor once; the model's own, not copies."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


@torch.no_grad()
def set_weights(model: nn.Module, tensors: Mapping[str, Tensor], source: str = "these weights") -> None:
    """Write ``tensors`` into the model, all of them or, if they do not fit, none. Shards take their share."""
    own = get_weights(model)
    wrong = [f"{name} is missing" for name in own if name not in tensors]
    wrong += [f"{name} is of no use here" for name in tensors if name not in own]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)}, {tuple(tensor.shape)} is expected"
        for name, tensor in own.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InputError(f"{source} are of another model: {'; '.join(wrong[:5])}{more}")
    for name, tensor in own.items():
        new = tensors[name].to(tensor.device)
        if isinstance(tensor, DTensor):
            new = distribute_tensor(new, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(new)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a safetensors file; whoever reads ``path`` meanwhile finds the old one or the new one, whole."""
    write_safetensors(get_weights(model), path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read what :func:`save_weights` wrote into a model of the same shape, on whatever device it is."""
    set_weights(model, read_safetensors(path), f"the weights in {path}")


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Tensors to a safetensors file."""
    with atomic_write(path) as part:
        part.touch()
        mode = part.stat().st_mode
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(plain, part, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, for example, which it reports only in words
            match = re.search(r"os error (\d+)", str(error))
            if match is None:
                raise
            code = int(match[1])
            raise OSError(code, os.strerror(code)) from error
        part.chmod(mode)  # who may read it is for the user's umask to say, not for safetensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """What :func:`write_safetensors` wrote."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(f"{path} is not there") from None
    except SafetensorError as error:
        raise InputError(f"{path} is not a whole safetensors file ({error})") from error


def is_complete(path: Path) -> bool:
    """Whether :func:`read_safetensors` will find a file that is not cut short; it is not read for that."""
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def average_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of several files' tensors, computed in float64; of whole numbers, those of the last file."""
    sums = {name: tensor.double() for name, tensor in read_safetensors(paths[0]).items()}
    for path in paths[1:]:
        for name, tensor in read_safetensors(path).items():
            sums[name] += tensor
    return {
        name: (sums[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in read_safetensors(paths[-1]).items()
    }
