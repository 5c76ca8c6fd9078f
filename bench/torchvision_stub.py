"""Import of torchvision without its operators: wheels that were built for another torch do not load.

timm, diffusers and transformers only need its transforms.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def define_missing_operators() -> None:
    """Define the operators whose absence makes ``import torchvision`` fail, if its library cannot be loaded."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
            return
        except OSError:
            continue
    for name, schema in SCHEMAS.items():
        torch.library.define(f"torchvision::{name}", schema)
