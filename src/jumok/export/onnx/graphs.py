"""From a module to an ONNX file, and from the file to something that runs.

A model is exported as it is: PyTorch goes through it once and writes down what it computes (``torch.export``,
then ``torch.onnx``). Four things are put in other words meanwhile, none of which changes what is computed:

- attention is the plain formula, softmax(score(Q, K)) V, rather than one of many kernels by the sizes;
- recurrent layers are nodes of ONNX's own (:mod:`.recurrent`);
- no number is looked at on the way, to check it or to see whether it is finite;
- a search in sorted numbers, which ONNX does not have, is made of comparisons.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from jumok.attention import arguments, core, scores
from jumok.attention.arguments import AttentionCall
from jumok.attention.positions import PositionEmbedding
from jumok.errors import InputError, MissingExtra
from jumok.export.onnx import recurrent
from jumok.models import hierarchical, self_attentive, seq2seq

__all__ = [
    "NamedTensors",
    "OnnxGraph",
    "create_session",
    "require_packages",
    "run_session",
    "take_recorded_weights",
    "write_graph",
]

NamedTensors = dict[str, Tensor]
OPSET_VERSION = 23
QUIET_LOGGERS = ("torch.onnx", "onnx_ir")  # loggers that tell what only their makers can mend
_PATCH_LOCK = threading.Lock()  # what is put in other words, is so for the whole process
_RECORDED_WEIGHTS: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class OnnxGraph:
    """What goes into one file: what a model says of inputs, both by name."""

    model: nn.Module
    compute: Callable[[NamedTensors], NamedTensors]
    inputs: NamedTensors  # an example: each of its sizes that may differ is 2 or more, …
    dynamic_axes: Mapping[str, Sequence[str | None]]  # … and has a name here; None: it is as it is


class _TracedModel(nn.Module):
    """A model as PyTorch goes through it."""

    def __init__(self, model: nn.Module, compute: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.compute(*inputs)


def write_graph(graph: OnnxGraph, path: Path) -> None:
    """Write a graph to a file."""
    require_packages("onnx", "onnxscript")
    names = [
        {axis: name for axis, name in enumerate(graph.dynamic_axes[one]) if name is not None}
        for one in graph.inputs
    ]
    outputs: list[str] = []

    def say(*given: Tensor) -> tuple[Tensor, ...]:
        said = graph.compute(dict(zip(graph.inputs, given, strict=True)))
        outputs[:] = said
        return tuple(said.values())

    with (
        _PATCH_LOCK,
        torch.no_grad(),
        _patch_for_export(),
        recurrent.use_onnx_gate_order(graph.model),
        _silence_libraries(),
    ):
        program = torch.export.export(
            _TracedModel(graph.model, say).eval(),
            tuple(graph.inputs.values()),
            dynamic_shapes=(tuple(dict.fromkeys(one, Dim.DYNAMIC) for one in names),),
            strict=False,
        )
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET_VERSION,
            input_names=list(graph.inputs),
            output_names=outputs,
            dynamic_shapes=(tuple(names),),
            verbose=False,
        )
    assert made is not None
    for node in made.model.graph.all_nodes():  # which line of which file it is from
        node.metadata_props.clear()
    made.save(str(path))


def take_recorded_weights() -> list[Tensor]:
    """Where the model looked, ``(…, Q, K)`` for each attention since the last time; while it is written."""
    found = list(_RECORDED_WEIGHTS)
    _RECORDED_WEIGHTS.clear()
    return found


# --------------------------------------------------------------------------------------- in other words


@contextlib.contextmanager
def _patch_for_export() -> Iterator[None]:
    weighed = core._compute_weights

    def recorded(call: AttentionCall) -> Tensor:
        _RECORDED_WEIGHTS.append(weighed(call))
        return _RECORDED_WEIGHTS[-1]

    def attended(call: AttentionCall) -> Tensor:
        return recorded(call) @ call.repeat_kv(call.prepare_value())

    places: list[tuple[Any, str, Any]] = [
        (core, "_weighed", recorded),
        (core, "_attended", attended),
        (scores, "tanh_scores", _compute_additive_scores),
        (torch, "searchsorted", _search_sorted),
        *((module, "known_finite", lambda x: True) for module in (core, arguments)),
        (PositionEmbedding, "_check_numbers", lambda self, positions: None),
        *(
            (module, "read", recurrent.run_rnn_on_tokens)
            for module in (hierarchical, self_attentive, seq2seq)
        ),
        (seq2seq, "run", recurrent.run_rnn),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, new in places:
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name, _), old in zip(places, before, strict=True):
            setattr(owner, name, old)
        _RECORDED_WEIGHTS.clear()


def _compute_additive_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    return (query[..., None, :] + keys[..., None, :, :]).tanh() @ v  # (…, Q, K), from (…, Q, K, H)


def _search_sorted(sorted_sequence: Tensor, values: Tensor) -> Tensor:
    """How many of the numbers ``(N,)`` are below each value: as many as there are, bit by bit."""
    most = sorted_sequence.shape[0]
    below = torch.zeros_like(values)
    for bit in reversed(range(most.bit_length())):
        more = below + (1 << bit)
        last = sorted_sequence[more.clamp(max=most) - 1]
        below = torch.where((more <= most) & (last < values), more, below)
    return below


@contextlib.contextmanager
def _silence_libraries() -> Iterator[None]:
    """What the libraries tell one another."""
    loggers = [logging.getLogger(name) for name in QUIET_LOGGERS]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


# ------------------------------------------------------------------------------------------------ at work


def create_session(path: Path, device: str = "auto") -> Any:
    """What runs a file: on the CPU, with as many threads as PyTorch would have; or on a GPU, if asked."""
    require_packages("onnxruntime")
    ort = importlib.import_module("onnxruntime")
    providers = ["CPUExecutionProvider"]
    if device not in ("auto", "cpu"):
        if not device.startswith("cuda") or "CUDAExecutionProvider" not in ort.get_available_providers():
            raise InputError(
                f"device {device!r}: this ONNX Runtime computes on the CPU; take --device cpu, or install "
                "onnxruntime-gpu for cuda"
            )
        providers.insert(0, "CUDAExecutionProvider")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads are for others
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=providers)


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> NamedTensors:
    """The outputs by name, of inputs by name."""
    given = {name: x.detach().cpu().numpy() for name, x in inputs.items()}
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(x) for name, x in zip(names, session.run(names, given), strict=True)}


def require_packages(*packages: str) -> None:
    """Raise if one of them is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f'ONNX needs {" and ".join(missing)}: pip install "jumok[export]"')
