"""An old Hugging Face folder, whose weights are a pickle, as one with safetensors.

A pickle may run any code when it is read. Here it is read by PyTorch's reader that knows tensors and nothing
else (``weights_only``), and once only: what is written needs no such care any more.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.exchange.folders import check_replaceable, exported
from jumok.files import check_links
from jumok.training.weights import write

__all__ = ["convert"]

KEPT = ("*.json", "*.txt", "*.model")  # the settings and the tokenizer; no code


def convert(folder: str | Path, out: str | Path) -> Path:
    """Write the folder anew to ``out``, its weights in model.safetensors.

    >>> convert("old-bert", "bert")  # doctest: +SKIP
    """
    folder, out = Path(folder), Path(out)
    check_replaceable(out)
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(f"{folder} has no pytorch_model.bin; there is nothing to convert")
    check_links(folder)  # what they lead to would be copied
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read(file)
    with exported(out) as new:
        write(tensors, new / "model.safetensors")
        for pattern in KEPT:
            for path in folder.glob(pattern):
                if path.is_file() and not path.name.startswith("pytorch_model"):  # the index of several
                    shutil.copyfile(path, new / path.name)
    return out


def _read(file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(
            f"{file} holds something other than tensors, or is not whole; it was not read "
            f"({str(error).splitlines()[0]})"
        ) from None
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise InputError(f"{file} is not a model's tensors by name, and cannot be converted")
    # Each its own memory: what was tied there is written twice, and recognised when it is read.
    return {name: x.detach().clone().contiguous() for name, x in found.items()}
