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
from jumok.export.export_folder import check_replaceable, create_export_folder
from jumok.files import check_symlinks
from jumok.training.weights import write_safetensors

__all__ = ["convert_to_safetensors"]

COPIED_PATTERNS = ("*.json", "*.txt", "*.model")  # the settings and the tokenizer; no code


def convert_to_safetensors(folder: str | Path, output_folder: str | Path) -> Path:
    """Write the folder anew to ``output_folder``, its weights in model.safetensors.

    >>> convert("old-bert", "bert")  # doctest: +SKIP
    """
    folder, output_folder = Path(folder), Path(output_folder)
    check_replaceable(output_folder)
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(f"{folder} has no pytorch_model.bin; there is nothing to convert")
    check_symlinks(folder)  # what they lead to would be copied
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_pickle(file)
    with create_export_folder(output_folder) as new:
        write_safetensors(tensors, new / "model.safetensors")
        for pattern in COPIED_PATTERNS:
            for path in folder.glob(pattern):
                if path.is_file() and not path.name.startswith("pytorch_model"):  # the index of several
                    shutil.copyfile(path, new / path.name)
    return output_folder


def _read_pickle(file: Path) -> dict[str, Tensor]:
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
