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

from jumok.attention import call, core, scores
from jumok.attention.call import Call
from jumok.attention.positions import Position
from jumok.errors import InputError, MissingExtra
from jumok.exchange.onnx import recurrent
from jumok.models import hierarchical, selfattentive, seq2seq

__all__ = ["Graph", "Named", "looked", "needed", "run", "session", "write"]

Named = dict[str, Tensor]
OPSET = 23
QUIET = ("torch.onnx", "onnx_ir")  # loggers that tell what only their makers can mend
_LOCK = threading.Lock()  # what is put in other words, is so for the whole process
_LOOKED: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class Graph:
    """What goes into one file: what a model says of inputs, both by name."""

    model: nn.Module
    say: Callable[[Named], Named]
    inputs: Named  # an example: each of its sizes that may differ is 2 or more, …
    sizes: Mapping[str, Sequence[str | None]]  # … and has a name here; None: it is as it is


class _Traced(nn.Module):
    """A model as PyTorch goes through it."""

    def __init__(self, model: nn.Module, say: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model, self.say = model, say

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return self.say(*given)


def write(graph: Graph, path: Path) -> None:
    """Write a graph to a file."""
    needed("onnx", "onnxscript")
    names = [
        {axis: name for axis, name in enumerate(graph.sizes[one]) if name is not None} for one in graph.inputs
    ]
    outputs: list[str] = []

    def say(*given: Tensor) -> tuple[Tensor, ...]:
        said = graph.say(dict(zip(graph.inputs, given, strict=True)))
        outputs[:] = said
        return tuple(said.values())

    with _LOCK, torch.no_grad(), _in_other_words(), recurrent.laid_out(graph.model), _quiet():
        program = torch.export.export(
            _Traced(graph.model, say).eval(),
            tuple(graph.inputs.values()),
            dynamic_shapes=(tuple(dict.fromkeys(one, Dim.DYNAMIC) for one in names),),
            strict=False,
        )
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(graph.inputs),
            output_names=outputs,
            dynamic_shapes=(tuple(names),),
            verbose=False,
        )
    assert made is not None
    for node in made.model.graph.all_nodes():  # which line of which file it is from
        node.metadata_props.clear()
    made.save(str(path))


def looked() -> list[Tensor]:
    """Where the model looked, ``(…, Q, K)`` for each attention since the last time; while it is written."""
    found = list(_LOOKED)
    _LOOKED.clear()
    return found


# --------------------------------------------------------------------------------------- in other words


@contextlib.contextmanager
def _in_other_words() -> Iterator[None]:
    weighed = core._weighed

    def recorded(call: Call) -> Tensor:
        _LOOKED.append(weighed(call))
        return _LOOKED[-1]

    def attended(call: Call) -> Tensor:
        return recorded(call) @ call.per_head(call.clean_value())

    places: list[tuple[Any, str, Any]] = [
        (core, "_weighed", recorded),
        (core, "_attended", attended),
        (scores, "tanh_scores", _tanh_scores),
        (torch, "searchsorted", _searched),
        *((module, "known_finite", lambda x: True) for module in (core, call)),
        (Position, "_check_numbers", lambda self, positions: None),
        *((module, "read", recurrent.read) for module in (hierarchical, selfattentive, seq2seq)),
        (seq2seq, "run", recurrent.run),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, new in places:
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name, _), old in zip(places, before, strict=True):
            setattr(owner, name, old)
        _LOOKED.clear()


def _tanh_scores(query: Tensor, keys: Tensor, v: Tensor) -> Tensor:
    return (query[..., None, :] + keys[..., None, :, :]).tanh() @ v  # (…, Q, K), from (…, Q, K, H)


def _searched(rising: Tensor, values: Tensor) -> Tensor:
    """How many of the numbers ``(N,)`` are below each value: as many as there are, bit by bit."""
    most = rising.shape[0]
    below = torch.zeros_like(values)
    for bit in reversed(range(most.bit_length())):
        more = below + (1 << bit)
        last = rising[more.clamp(max=most) - 1]
        below = torch.where((more <= most) & (last < values), more, below)
    return below


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the libraries tell one another."""
    loggers = [logging.getLogger(name) for name in QUIET]
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


def session(path: Path, device: str = "auto") -> Any:
    """What runs a file: on the CPU, with as many threads as PyTorch would have; or on a GPU, if asked."""
    needed("onnxruntime")
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


def run(session: Any, inputs: Mapping[str, Tensor]) -> Named:
    """The outputs by name, of inputs by name."""
    given = {name: x.detach().cpu().numpy() for name, x in inputs.items()}
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(x) for name, x in zip(names, session.run(names, given), strict=True)}


def needed(*packages: str) -> None:
    """Raise if one of them is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingExtra(f'ONNX needs {" and ".join(missing)}: pip install "jumok[export]"')
