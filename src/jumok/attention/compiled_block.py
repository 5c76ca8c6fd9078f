"""The parts of a model that ``torch.compile`` compiles: all that lies between the attentions.

Attention itself has fused kernels, and the numbers inside a mask, which differ with every batch, would make
compiled code of use for one batch only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CompiledBlock", "Projection", "compile_blocks"]


class CompiledBlock(nn.Module):
    """A part that knows no masks: what :func:`compile_blocks` compiles, for training.

    While decoding, sizes change all the time, and to compile for each would take longer than it saves.
    """

    def __call__(self, *args: Any) -> Any:
        if self.training:
            return super().__call__(*args)
        return self._call_impl(*args)  # type: ignore[no-untyped-call]


class Projection(CompiledBlock, nn.Linear):
    """A linear map on its own between two attentions. Compiled, the gradient of its bias is a faster sum."""

    def forward(self, x: Tensor) -> Tensor:
        # Not nn.Linear's: how often one function may be compiled is limited, and others compile that one.
        return F.linear(x, self.weight, self.bias)


def compile_blocks(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``torch.compile`` the regions of a model; the arguments are those of that function, if any."""
    kwargs = kwargs or {"options": _get_inductor_options()}
    for part in model.modules():
        if isinstance(part, CompiledBlock):
            part.compile(*args, **kwargs)


def _get_inductor_options() -> dict[str, Any]:
    """Two kernels for the gradients of a layer norm: as one, they take twice as long on an H200."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}
