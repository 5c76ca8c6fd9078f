"""``model.generate(…)``: which forwards belong together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.adapters.call_site import OBSERVERS, GenerateResult
from jumok.look.capture.adapters.patching import Function, patch_attribute

PROMPT_ARGUMENT_PREFIXES = (
    "input",
    "pixel",
    "attention",
)  # how the names of the arguments begin that have one row a prompt


@contextmanager
def install_patches(model: nn.Module) -> Iterator[None]:
    """While it lasts, listeners know when a generation begins and ends."""
    with ExitStack() as stack:
        kinds = {type(module) for module in model.modules()}
        # On the class: a copy of the model that is made meanwhile has nothing of it. On each class that has
        # its own: what Whisper's ``generate`` returns is only a part of what the search inside it returned.
        for owner in {base for kind in kinds for base in kind.__mro__}:
            if callable(vars(owner).get("generate")):
                stack.enter_context(patch_attribute(owner, "generate", _wrap_generate))
        for kind in kinds:
            if callable(getattr(kind, "get_compiled_call", None)):
                stack.enter_context(patch_attribute(kind, "get_compiled_call", _wrap_get_compiled_call))
        caches = sys.modules.get("transformers.cache_utils")
        if caches is not None:
            for kind in (caches.Cache, caches.EncoderDecoderCache):
                stack.enter_context(patch_attribute(kind, "reorder_cache", _wrap_reorder_cache))
        yield


def _wrap_generate(generate: Function) -> Function:
    includes_prompt = generate.__module__ == "transformers.generation.utils"

    def watched_generate(self: Any, *args: Any, **options: Any) -> Any:
        listeners = [one for one in OBSERVERS.get() if id(self) in one.module_stack.names]
        outermost = [one for one in listeners if not one.is_generating]
        for one in outermost:
            one.is_generating, one.is_single_search = True, includes_prompt
            one.on_generation_start()
        finished = False
        try:
            output = generate(self, *args, **options)
            for one in listeners:
                one.on_generate_return(
                    GenerateResult(output, _count_prompts(*args, **options), includes_prompt)
                )
                if includes_prompt and not one.is_single_search:  # Whisper's, for each segment of long audio
                    one.on_generation_end(True)
                    one.on_generation_start()
            finished = True
        finally:
            for one in outermost:
                one.is_generating = False
                one.on_generation_end(finished)
        return output

    return watched_generate


def _wrap_reorder_cache(reorder_cache: Function) -> Function:
    """Beam search moves the rows of a cache: where no keys are there to compare, this tells how."""

    def watched_reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        for one in OBSERVERS.get():
            if one.is_generating:
                one.on_cache_reorder(beam_idx.detach().cpu())
        return reorder_cache(self, beam_idx)

    return watched_reorder_cache


def _count_prompts(*args: Any, **options: Any) -> int:
    """The number of prompts; 1 if there is none to begin with."""
    given = [*args, *(value for name, value in options.items() if name.startswith(PROMPT_ARGUMENT_PREFIXES))]
    return next((len(x) for x in given if isinstance(x, Tensor) and x.dim() > 0), 1)


def _wrap_get_compiled_call(get_compiled_call: Function) -> Function:
    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        if not any(id(self) in one.module_stack.names for one in OBSERVERS.get()):
            return get_compiled_call(self, *args, **options)
        raise InputError(
            "generate compiles the model for this cache, and compiled code runs without Python: nothing in "
            "it can be seen. Pass disable_compile=True to generate"
        )

    return refuse
