"""Compiled modules run without Python: they are refused, with the remedy."""

from __future__ import annotations

from torch import nn

from jumok.errors import InputError


def require_uncompiled(model: object, caller: str) -> nn.Module:
    """The model, if it is a module and no part of it is compiled."""
    import torch._dynamo

    if not isinstance(model, nn.Module):
        inner = isinstance(getattr(model, "model", None), nn.Module)
        mend = "; give its .model" if inner else ""
        raise InputError(f"{caller} takes an nn.Module, {type(model).__name__} came{mend}")
    for name, part in model.named_modules():
        mend = ""
        if isinstance(part, torch._dynamo.OptimizedModule):
            mend = f"{caller} and call the module that it was made from: compiled._orig_mod"
        elif part._compiled_call_impl is not None or hasattr(part.forward, "_torchdynamo_orig_callable"):
            if torch._dynamo.eval_frame._stance.stance == "force_eager":
                continue
            mend = (
                "run it uncompiled for once: "
                f'with torch.compiler.set_stance("force_eager"), jumok.{caller}(…): …'
            )
        if mend:
            raise InputError(
                f"{name or 'the model'} is compiled by torch.compile, and compiled code runs without Python: "
                f"nothing in it can be seen; {mend}"
            )
    return model
