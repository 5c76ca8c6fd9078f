"""Layout of training batches: packed or padded, with a few fixed shapes or with any shape.

The layout depends on the machine that a run starts on. It is stored in the folder of the run, so that training
resumes with the same batches on any machine.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from jumok.attention.paths.varlen import has_fast_varlen_path
from jumok.errors import InputError
from jumok.files import read_json, write_json
from jumok.run import Run
from jumok.tasks.config import AutoBool
from jumok.training import DistributedRanks, TrainConfig, cuda_graphs
from jumok.training.precision import select_autocast_dtype


class AttentionSizes(Protocol):
    """The sizes of a model that determine whether packed attention is fast."""

    @property
    def width(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def attention_dropout(self) -> float: ...


class BatchLayout(NamedTuple):
    """How the sequences of a batch are laid out."""

    packed: bool  # concatenated, without padding
    fixed_shapes: bool  # shapes recur, so that CUDA graphs can be replayed


def resolve_packing(
    setting: AutoBool, model_config: AttentionSizes, max_tokens: int, train_config: TrainConfig, device: torch.device
) -> bool:
    """Whether to pack sequences of up to ``max_tokens`` tokens. ``auto`` means where that is fastest."""
    if setting != "auto":
        return setting
    uses_half_precision = select_autocast_dtype(train_config, device) is not None
    return uses_half_precision and has_fast_varlen_path(
        device, max_tokens, model_config.width // model_config.num_heads, model_config.attention_dropout
    )


def resolve_batch_layout(run: Run, ranks: DistributedRanks, *, packed: bool = False) -> BatchLayout:
    """The layout that is stored in a run which has a checkpoint; otherwise a new one, which is stored."""
    path = run.folder / "data" / "layout.json"
    if run.has_checkpoint and path.is_file():
        stored = read_json(path, dict)
        try:
            return BatchLayout(bool(stored["packed"]), bool(stored["fixed_shapes"]))
        except KeyError as error:
            raise InputError(f"{path} is damaged: {error} is missing") from None
    uses_cuda_graphs = cuda_graphs.should_use_cuda_graphs(run.recipe.train, ranks.device, ranks.world_size)
    layout = BatchLayout(packed, uses_cuda_graphs)
    if ranks.is_main and not run.has_checkpoint:
        write_json(path, layout._asdict())
    return layout
