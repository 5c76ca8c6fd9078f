"""``model.generate(…)``: which forwards belong together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.adapters.patches import Function, attribute
from jumok.look.adapters.site import LISTENERS, GenerateResult

INPUTS = ("input", "pixel", "attention")  # how the names of the arguments begin that have one row a prompt


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """While it lasts, listeners know when a generation begins and ends."""
    with ExitStack() as stack:
        kinds = {type(module) for module in model.modules()}
        # On the class: a copy of the model that is made meanwhile has nothing of it. On each class that has
        # its own: what Whisper's ``generate`` returns is only a part of what the search inside it returned.
        for owner in {base for kind in kinds for base in kind.__mro__}:
            if callable(vars(owner).get("generate")):
                stack.enter_context(attribute(owner, "generate", _generate))
        for kind in kinds:
            if callable(getattr(kind, "get_compiled_call", None)):
                stack.enter_context(attribute(kind, "get_compiled_call", _refused))
        caches = sys.modules.get("transformers.cache_utils")
        if caches is not None:
            for kind in (caches.Cache, caches.EncoderDecoderCache):
                stack.enter_context(attribute(kind, "reorder_cache", _reorder))
        yield


def _generate(generate: Function) -> Function:
    includes_prompt = generate.__module__ == "transformers.generation.utils"

    def watched_generate(self: Any, *args: Any, **options: Any) -> Any:
        listeners = [one for one in LISTENERS.get() if id(self) in one.trail.names]
        outermost = [one for one in listeners if not one.generates]
        for one in outermost:
            one.generates, one.searches_once = True, includes_prompt
            one.generation_begins()
        finished = False
        try:
            output = generate(self, *args, **options)
            for one in listeners:
                one.generation_returns(GenerateResult(output, _batch(*args, **options), includes_prompt))
                if includes_prompt and not one.searches_once:  # Whisper's, for each segment of long audio
                    one.generation_ends(True)
                    one.generation_begins()
            finished = True
        finally:
            for one in outermost:
                one.generates = False
                one.generation_ends(finished)
        return output

    return watched_generate


def _reorder(reorder_cache: Function) -> Function:
    """Beam search moves the rows of a cache: where no keys are there to compare, this tells how."""

    def watched_reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        for one in LISTENERS.get():
            if one.generates:
                one.rows_moved(beam_idx.detach().cpu())
        return reorder_cache(self, beam_idx)

    return watched_reorder_cache


def _batch(*args: Any, **options: Any) -> int:
    """The number of prompts; 1 if there is none to begin with."""
    given = [*args, *(value for name, value in options.items() if name.startswith(INPUTS))]
    return next((len(x) for x in given if isinstance(x, Tensor) and x.dim() > 0), 1)


def _refused(get_compiled_call: Function) -> Function:
    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        if not any(id(self) in one.trail.names for one in LISTENERS.get()):
            return get_compiled_call(self, *args, **options)
        raise InputError(
            "generate compiles the model for this cache, and compiled code runs without Python: nothing in "
            "it can be seen. Pass disable_compile=True to generate"
        )

    return refuse
