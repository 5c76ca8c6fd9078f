"""The blocks of a model that ``torch.compile`` compiles: everything between the attention layers.

Attention itself is not compiled. It has fused kernels, and the contents of a mask change with every batch, so
compiled code would serve one batch only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module


class CompiledBlock(nn.Module):
    """A module without masks, which :func:`compile_blocks` compiles for training.

    In evaluation mode it runs uncompiled: sizes change at every decoding step, and compiling for each size
    would take longer than it saves.
    """

    def __call__(self, *args: Any) -> Any:
        if self.training:
            return super().__call__(*args)
        return self._call_impl(*args)  # type: ignore[no-untyped-call]


class Projection(CompiledBlock, nn.Linear):
    """A linear layer between two attention layers. Compiling it makes the gradient of its bias faster."""

    def forward(self, x: Tensor) -> Tensor:
        # Not nn.Linear.forward: torch.compile limits how often it compiles one function, and other modules
        # compile that one.
        return F.linear(x, self.weight, self.bias)


def compile_blocks(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile every :class:`CompiledBlock` of a model. The arguments are those of ``torch.compile``."""
    kwargs = kwargs or {"options": _get_inductor_options()}
    for module in model.modules():
        if isinstance(module, CompiledBlock):
            module.compile(*args, **kwargs)


def _get_inductor_options() -> dict[str, Any]:
    """Use two kernels for the gradients of a layer norm: a single one takes twice as long on an H200."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def has_hooks(module: Any) -> bool:
    """Return whether calling the module does more than the ``forward`` of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or (module._compiled_call_impl is not None and not isinstance(module, CompiledBlock))
        or "forward" in module.__dict__
        or nn_module._global_forward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_backward_hooks
        or nn_module._global_backward_pre_hooks
    )
