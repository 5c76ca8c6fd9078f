"""Writing of modules to ONNX files, and running of these files.

PyTorch traces a model (``torch.export``) and writes its operations (``torch.onnx``). During the export, four
things are replaced by equivalents:

- attention is the plain formula softmax(score(Q, K)) V, instead of a kernel that depends on the sizes;
- recurrent layers are ONNX operators (:mod:`.recurrent`);
- checks of values, for example whether they are finite, are skipped;
- ``searchsorted``, which ONNX does not have, is a sequence of comparisons.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from jumok.attention import arguments, core, scores
from jumok.attention.arguments import AttentionCall
from jumok.attention.positions import PositionEmbedding
from jumok.data.readers.text_files import import_optional
from jumok.errors import InputError
from jumok.export.onnx import recurrent
from jumok.models import hierarchical, self_attentive, seq2seq

NamedTensors = dict[str, Tensor]
OPSET_VERSION = 23
QUIET_LOGGERS = ("torch.onnx", "onnx_ir")  # their messages do not concern the user
_PATCH_LOCK = threading.Lock()  # patches apply to the whole process
_RECORDED_WEIGHTS: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class OnnxGraph:
    """The content of one file: a function of named inputs that returns named outputs."""

    model: nn.Module
    compute: Callable[[NamedTensors], NamedTensors]
    inputs: NamedTensors  # example inputs, in which every dynamic axis has a size of at least 2
    dynamic_axes: Mapping[str, Sequence[str | None]]  # names of the axes; None: a fixed axis


class _TracedModel(nn.Module):
    """A module whose ``forward`` is a function of a model."""

    def __init__(self, model: nn.Module, compute: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs."""
        return self.compute(*inputs)


def write_graph(graph: OnnxGraph, path: Path) -> None:
    """Write a graph to a file."""
    require_packages("onnx", "onnxscript")
    axis_names = [
        {axis: name for axis, name in enumerate(graph.dynamic_axes[input_name]) if name is not None}
        for input_name in graph.inputs
    ]
    output_names: list[str] = []

    def compute(*inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = graph.compute(dict(zip(graph.inputs, inputs, strict=True)))
        output_names[:] = outputs
        return tuple(outputs.values())

    with (
        _PATCH_LOCK,
        torch.no_grad(),
        _patch_for_export(),
        recurrent.use_onnx_gate_order(graph.model),
        _silence_libraries(),
    ):
        program = torch.export.export(
            _TracedModel(graph.model, compute).eval(),
            tuple(graph.inputs.values()),
            dynamic_shapes=(tuple(dict.fromkeys(axes, Dim.DYNAMIC) for axes in axis_names),),
            strict=False,
        )
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET_VERSION,
            input_names=list(graph.inputs),
            output_names=output_names,
            dynamic_shapes=(tuple(axis_names),),
            verbose=False,
        )
    assert onnx_program is not None
    for node in onnx_program.model.graph.all_nodes():  # source locations
        node.metadata_props.clear()
    onnx_program.save(str(path))


def take_recorded_weights() -> list[Tensor]:
    """Return the weights ``(…, Q, K)`` of each attention since the last call, during an export."""
    recorded = list(_RECORDED_WEIGHTS)
    _RECORDED_WEIGHTS.clear()
    return recorded


# --------------------------------------------------------------------------------------- patches


@contextlib.contextmanager
def _patch_for_export() -> Iterator[None]:
    """Replace functions by equivalents that can be exported."""
    compute_weights = core._compute_weights

    def record_weights(call: AttentionCall) -> Tensor:
        _RECORDED_WEIGHTS.append(compute_weights(call))
        return _RECORDED_WEIGHTS[-1]

    def compute_output(call: AttentionCall) -> Tensor:
        return record_weights(call) @ call.repeat_kv(call.prepare_value())

    patches: list[tuple[Any, str, Any]] = [
        (core, "_compute_weights", record_weights),
        (core, "_compute_output", compute_output),
        (scores, "compute_additive_scores", _compute_additive_scores),
        (torch, "searchsorted", _search_sorted),
        (core, "is_known_finite", lambda x: True),
        (arguments, "is_known_finite", lambda x: True),
        (PositionEmbedding, "_check_positions", lambda self, positions: None),
        (hierarchical, "run_rnn_on_tokens", recurrent.run_rnn_on_tokens),
        (self_attentive, "run_rnn_on_tokens", recurrent.run_rnn_on_tokens),
        (seq2seq, "run_rnn_on_tokens", recurrent.run_rnn_on_tokens),
        (seq2seq, "run_rnn", recurrent.run_rnn),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    try:
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
        _RECORDED_WEIGHTS.clear()


def _compute_additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    return (query[..., None, :] + keys[..., None, :, :]).tanh() @ v  # (…, Q, K), from (…, Q, K, H)


def _search_sorted(sorted_sequence: Tensor, values: Tensor) -> Tensor:
    """Count the elements of ``(N,)`` that are less than each value, by a binary search over the bits."""
    size = sorted_sequence.shape[0]
    count = torch.zeros_like(values)
    for bit in reversed(range(size.bit_length())):
        candidate = count + (1 << bit)
        last = sorted_sequence[candidate.clamp(max=size) - 1]
        count = torch.where((candidate <= size) & (last < values), candidate, count)
    return count


@contextlib.contextmanager
def _silence_libraries() -> Iterator[None]:
    """Silence the messages and warnings of the libraries."""
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ------------------------------------------------------------------------------------------------ running


def create_session(path: Path, device: str = "auto") -> Any:
    """Open a file with ONNX Runtime: on the CPU with the number of threads of PyTorch, or on a GPU."""
    ort = import_optional("onnxruntime", "export")
    providers = ["CPUExecutionProvider"]
    if device not in ("auto", "cpu"):
        if not device.startswith("cuda") or "CUDAExecutionProvider" not in ort.get_available_providers():
            raise InputError(
                f"device {device!r}: this ONNX Runtime supports the CPU only; use --device cpu, or install "
                "onnxruntime-gpu for cuda"
            )
        providers.insert(0, "CUDAExecutionProvider")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leave idle cores to other processes
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=providers)


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> NamedTensors:
    """Run a session on named inputs. Returns its outputs by name."""
    arrays = {name: x.detach().cpu().numpy() for name, x in inputs.items()}
    names = [output.name for output in session.get_outputs()]
    return {name: torch.from_numpy(x) for name, x in zip(names, session.run(names, arrays), strict=True)}


def require_packages(*packages: str) -> None:
    """Raise an error if a package is not installed."""
    for package in packages:
        import_optional(package, "export")
