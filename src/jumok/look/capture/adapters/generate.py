"""``model.generate(…)``: which forward passes belong to one generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.capture.observer import OBSERVERS, GenerateResult
from jumok.look.capture.patching import AttributePatch, Function

PROMPT_ARGUMENT_PREFIXES = ("input", "pixel", "attention")  # of arguments with one row for each prompt


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches that report the start and the end of generations."""
    classes = {type(module) for module in model.modules()}
    # Patch the class, so that copies of the model are not affected, and each class with its own method:
    # Whisper's ``generate`` returns only a part of what the search inside it returned.
    for owner in {base for cls in classes for base in cls.__mro__}:
        if callable(vars(owner).get("generate")):
            yield AttributePatch(owner, "generate", _wrap_generate)
    for cls in classes:
        if callable(getattr(cls, "get_compiled_call", None)):
            yield AttributePatch(cls, "get_compiled_call", _wrap_get_compiled_call)
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None:
        for cls in (caches.Cache, caches.EncoderDecoderCache):
            yield AttributePatch(cls, "reorder_cache", _wrap_reorder_cache)


def _wrap_generate(generate: Function) -> Function:
    includes_prompt = generate.__module__ == "transformers.generation.utils"

    def watched_generate(self: Any, *args: Any, **options: Any) -> Any:
        observers = [observer for observer in OBSERVERS.get() if id(self) in observer.module_stack.names]
        outermost = [observer for observer in observers if not observer.is_generating]
        for observer in outermost:
            observer.is_generating, observer.is_single_search = True, includes_prompt
            observer.on_generation_start(self)
        finished = False
        try:
            output = generate(self, *args, **options)
            for observer in observers:
                observer.on_generate_return(GenerateResult(output, _count_prompts(*args, **options), includes_prompt))
                if includes_prompt and not observer.is_single_search:  # one per segment of long audio in Whisper
                    observer.on_generation_end(True)
                    observer.on_generation_start(self)
            finished = True
        finally:
            for observer in outermost:
                observer.is_generating = False
                observer.on_generation_end(finished)
        return output

    return watched_generate


def _wrap_reorder_cache(reorder_cache: Function) -> Function:
    """Report how beam search reorders the rows of a cache, for steps where keys cannot be compared."""

    def watched_reorder_cache(self: Any, beam_idx: Tensor) -> Any:
        for observer in OBSERVERS.get():
            if observer.is_generating:
                observer.on_cache_reorder(beam_idx.detach().cpu())
        return reorder_cache(self, beam_idx)

    return watched_reorder_cache


def _count_prompts(*args: Any, **options: Any) -> int:
    """Return the number of prompts; 1 if there is none."""
    inputs = [value for name, value in options.items() if name.startswith(PROMPT_ARGUMENT_PREFIXES)]
    return next((len(x) for x in (*args, *inputs) if isinstance(x, Tensor) and x.dim() > 0), 1)


def _wrap_get_compiled_call(get_compiled_call: Function) -> Function:
    def refuse_compilation(self: Any, *args: Any, **options: Any) -> Any:
        if not any(id(self) in observer.module_stack.names for observer in OBSERVERS.get()):
            return get_compiled_call(self, *args, **options)
        raise InputError(
            "generate compiles the model for this cache, and compiled code runs without Python: it cannot be "
            "captured. Pass disable_compile=True to generate"
        )

    return refuse_compilation
