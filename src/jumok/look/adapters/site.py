"""Where adapters and those who look meet: an adapter tells what it saw, and does not know who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.attention.memo import capturing, tracing
from jumok.errors import InputError
from jumok.look.adapters.candidates import Candidate
from jumok.look.adapters.follow import other_modes
from jumok.look.adapters.maps import Softmax, concluded
from jumok.look.adapters.trail import Frame, Trail
from jumok.look.kept import Kept


class Found(NamedTuple):
    """One attention call, as an adapter saw it."""

    kept: Kept
    kind: str | None = None  # "self", "cross" or "channel", where the call says so
    sink: Tensor | None = None  # (H,) a score in every row's softmax that belongs to no key
    uses: tuple[Tensor, ...] = ()  # what ``kept.score`` reads beside queries and keys
    in_order: bool = True  # if scores were changed: their axes are indeed (B, H, Q, K)


class GenerateResult(NamedTuple):
    """What ``generate`` returned."""

    output: Any  # the sequences, or an object that has them
    batch: int  # the number of prompts
    includes_prompt: bool  # whether sequences are known to begin with the tokens of the first forward


class Fused(NamedTuple):
    """What can be changed of a layer that is one fused operation."""

    blocked: Tensor | None  # bool, broadcasts to (B, H, Q, K)
    merge: Tensor  # (width, H · D): the weight of the output projection


class Listener:
    """Somebody who looks at a model, or changes what it attends to. This one does neither."""

    def __init__(self, model: nn.Module) -> None:
        self.trail = Trail(model)
        self.generates = False  # whether the model is in ``generate``
        self.searches_once = True  # whether that is one search, not a function of the model that runs several

    def generation_begins(self) -> None:
        """The forwards that follow are steps of one generation."""

    def generation_returns(self, result: GenerateResult) -> None:
        """A ``generate`` returned: the outermost one, or one that it called."""

    def generation_ends(self, finished: bool) -> None:
        """The outermost ``generate`` returned, or raised an exception."""

    def rows_moved(self, rows: Tensor) -> None:
        """In a generation, row ``i`` of the next forward goes on from row ``rows[i]`` of the last."""

    def enter(self, module: nn.Module, name: str, args: Any) -> None:
        """A module begins, with these arguments."""

    def leave(self, frame: Frame) -> None:
        """A module has ended."""
        for name, found in concluded(frame, self.trail.frame):
            if isinstance(found, str):
                frame.reported = True
                self.miss(name, found)
            else:
                frame.saw = True
                self.see(name, Found(found.kept, found.kind, in_order=found.in_order))

    def see(self, name: str, found: Found) -> None:
        """There was an attention."""

    def miss(self, name: str, reason: str) -> None:
        """There was one that cannot be seen."""

    def without(self, name: str, kept: Kept) -> Kept:
        """The attention after what this listener changes about it."""
        return kept

    def output(self, name: str, kept: Kept, value: Tensor | None, out: Tensor) -> Tensor:
        """Likewise its output ``(B, H, Q, Dv)``, of values ``(B, G, K, Dv)``; None: of weights alone."""
        return out

    def changes(self, name: str) -> bool:
        """Whether it changes something about the attention of this name."""
        return False

    def scores(self, name: str, scores: Tensor) -> Tensor:
        """Likewise scores ``(B, H, Q, K)`` on their way to a softmax."""
        return scores

    def weights(self, name: str, weights: Tensor) -> Tensor:
        """Likewise the weights ``(B, H, Q, K)`` that come out of it."""
        return weights

    def fused(self, name: str, layer: Fused, kept: Kept) -> Fused:
        """Likewise what goes into a fused layer."""
        return layer


# Those of this thread, or task: whoever else runs the same model meanwhile is not looked at.
LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("jumok.look.listeners", default=())
# Whether an adapter further out tells of what goes on. True: of all of it; False: but changes are made here.
_TOLD: ContextVar[bool | None] = ContextVar("jumok.look.told", default=None)
# What an adapter further out knows: the keys before they were repeated for grouped queries, and the kind.
_KEYS: ContextVar[Tensor | None] = ContextVar("jumok.look.keys", default=None)
_KIND: ContextVar[str | None] = ContextVar("jumok.look.kind", default=None)


class Site:
    """An attention call of a model that is looked at."""

    def __init__(self, listeners: list[Listener], module: nn.Module | None) -> None:
        self.listeners = [(one, one.trail.name(module)) for one in listeners]
        self.frames = [one.trail.frames[-1] for one in listeners]

    @property
    def module(self) -> nn.Module:
        """The module that is running."""
        return self.frames[0].module

    @property
    def changes(self) -> bool:
        """Whether anybody changes something about it."""
        return any(one.changes(name) for one, name in self.listeners)

    @property
    def owner(self) -> nn.Module:
        """The module that the call is named after; mostly the same."""
        one, name = self.listeners[0]
        return one.trail.named(name)

    @property
    def is_in_mode(self) -> bool:
        """Whether the model itself has entered a dispatch mode."""
        return any(other_modes() > one.trail.frames[0].modes for one, _ in self.listeners)

    def made(self, make: Callable[[], Kept]) -> Kept | None:
        """What is made, or None: of a call in a form that was not thought of, nothing worse shall come."""
        try:
            return make()
        except (InputError, RuntimeError, IndexError) as error:
            self.cannot(f"it is called in an unusual form ({error})")
            return None

    def saw(
        self, kept: Kept, kind: str | None = None, sink: Tensor | None = None, uses: tuple[Tensor, ...] = ()
    ) -> None:
        """Tell of an attention."""
        if _TOLD.get() is not None:
            return
        keys = _KEYS.get()
        if keys is not None and keys.shape[1] < kept.key.shape[1]:
            kept = replace(kept, key=keys[:, :, : kept.key.shape[2]])
        found = Found(self.left(kept), kind or _KIND.get(), sink, uses)
        for frame, (one, name) in zip(self.frames, self.listeners, strict=True):
            frame.saw = True
            one.see(name, found)

    def weighed(self, found: Found, weights: Tensor) -> None:
        """Tell of weights that were computed: the attention, if they are used as they are."""
        if _TOLD.get() is None:
            found = found._replace(kept=self.left(found.kept))
            for frame, (_, name) in zip(self.frames, self.listeners, strict=True):
                frame.saw = True
                frame.weighed.append((name, found, weights))

    def mixed(self, weights: Tensor) -> bool:
        """Something is mixed by these weights: whether they are the last that were computed, as they were."""
        same = False
        for frame, (one, _) in zip(self.frames, self.listeners, strict=True):
            if frame.weighed:
                name, found, computed = frame.weighed.pop()
                same = computed.data_ptr() == weights.data_ptr() and computed.numel() == weights.numel()
                if same:  # in another shape, perhaps
                    one.see(name, found)
        return same

    def left(self, kept: Kept) -> Kept:
        """The attention after all changes to it."""
        for one, name in self.listeners:
            kept = one.without(name, kept)
        return kept

    def cannot(self, reason: str) -> None:
        """Tell of one that cannot be seen."""
        if _TOLD.get() is None:
            for frame, (one, name) in zip(self.frames, self.listeners, strict=True):
                frame.reported = True
                one.miss(name, reason)

    def may_attend(self, candidate: Candidate, is_product: bool) -> None:
        """Tell of a softmax that may be one: that shows when its weights are used."""
        for frame, (_, name) in zip(self.frames, self.listeners, strict=True):
            frame.parts.append(Softmax(candidate, name, is_product, self.left, [frame]))

    def output(self, kept: Kept, value: Tensor | None, out: Tensor) -> Tensor:
        for one, name in self.listeners:
            out = one.output(name, kept, value, out)
        return out

    def scores(self, scores: Tensor) -> Tensor:
        for one, name in self.listeners:
            scores = one.scores(name, scores)
        return scores

    def weights(self, weights: Tensor) -> Tensor:
        for one, name in self.listeners:
            weights = one.weights(name, weights)
        return weights

    def fused(self, layer: Fused, kept: Kept) -> Fused:
        for one, name in self.listeners:
            layer = one.fused(name, layer, kept)
        return layer


def here(module: nn.Module | None = None) -> Site | None:
    """The site of a call that happens now; None: nobody looks. ``module`` is the one that calls, if known."""
    if torch.compiler.is_compiling():  # first, so that dynamo reads no further
        return None
    listeners = [one for one in LISTENERS.get() if one.trail.frames]
    recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in the backward pass
    if not listeners or _TOLD.get() or recomputed or tracing():
        return None
    site = Site(listeners, module)
    if capturing():
        site.cannot("it was captured into a CUDA graph, which runs without Python: run it without the graph")
        return None
    if torch._C._are_functorch_transforms_active():
        site.cannot("it ran inside a transform of torch.func (vmap, grad, …): run the model by itself")
        return None
    return site


def is_told() -> bool:
    """Whether an adapter further out tells of what goes on."""
    return _TOLD.get() is not None


@contextmanager
def told(entirely: bool) -> Iterator[None]:
    """What is called here is told of already: entirely, or but for changes that are to be made to it."""
    token = _TOLD.set(entirely)
    try:
        yield
    finally:
        _TOLD.reset(token)


@contextmanager
def known(keys: Tensor | None = None, kind: str | None = None) -> Iterator[None]:
    """Of what is called here it is known: the keys before they are repeated for all heads, and the kind."""
    tokens = _KEYS.set(keys), _KIND.set(kind)
    try:
        yield
    finally:
        _KEYS.reset(tokens[0])
        _KIND.reset(tokens[1])
