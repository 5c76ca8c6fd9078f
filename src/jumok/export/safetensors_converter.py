"""Conversion of a Hugging Face folder with pickled weights to safetensors.

A pickle can execute code when it is loaded. This conversion uses PyTorch's restricted loader
(``weights_only``), which accepts tensors only. The converted folder is then safe to load.
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

COPIED_PATTERNS = ("*.json", "*.txt", "*.model")  # config and tokenizer, but no code


def convert_to_safetensors(folder: str | Path, output_folder: str | Path) -> Path:
    """Write a copy of the folder to ``output_folder``, with its weights in model.safetensors.

    >>> convert_to_safetensors("old-bert", "bert")  # doctest: +SKIP
    """
    folder, output_folder = Path(folder), Path(output_folder)
    check_replaceable(output_folder)
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise InputError(f"{folder} has no pytorch_model.bin; there is nothing to convert")
    check_symlinks(folder)  # their targets would be copied
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_pickle(file)
    with create_export_folder(output_folder) as new:
        write_safetensors(tensors, new / "model.safetensors")
        for pattern in COPIED_PATTERNS:
            for path in folder.glob(pattern):
                if path.is_file() and not path.name.startswith("pytorch_model"):  # an index of several files
                    shutil.copyfile(path, new / path.name)
    return output_folder


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):  # their messages suggest to run the code in the file
        raise InputError(
            f"{file} contains something other than tensors, which could run code, or is incomplete; it is not loaded: "
            "get the model as safetensors"
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(x, Tensor) for x in tensors.values()):
        raise InputError(f"{file} is not a dictionary of tensors by name")
    # Copies, so that tied tensors are written twice. They are recognized when the folder is loaded.
    return {name: x.detach().clone().contiguous() for name, x in tensors.items()}
