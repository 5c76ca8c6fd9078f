"""Inputs that a model of transformers accepts, from its signature, its documentation and its error messages."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tiny_exceptions
import torch
from tiny_configs import IMAGE_SIZE, PATCH_SIZE, VOCAB_SIZE, WIDTH, is_config
from torch import Tensor, nn

LENGTH, TARGET_LENGTH = 7, 5  # of texts
MAX_REPAIRS = 10
Inputs = dict[str, Any]

# Sizes of the dimensions that the documentation of transformers names, unless the configuration has them.
DIMENSIONS: list[tuple[str, int]] = [
    (r"^batch", 2),
    (r"target|decoder", TARGET_LENGTH),
    (r"^num_(images|videos|audios|chunks)|^max_num_images", 2),
    (r"frames$|frame_length", 8),
    (r"height|width|image_size", IMAGE_SIZE),
    (r"channels", 3),
    (r"seq|length|tokens|num_", LENGTH),
]
MEDIA_TOKENS = {"image": ("image", "img"), "video": ("video",), "audio": ("audio", "speech", "sound")}


class InputBuilder:
    """Inputs that a model may accept, guessed from its signature, its documentation and its configuration."""

    def __init__(self, model: nn.Module, model_type: str = "", deadline: float = math.inf) -> None:
        self.config: Any = model.config
        self.model_type = model_type
        self.deadline = deadline  # of time.monotonic(), after which no further inputs are tried
        self.parameters = inspect.signature(model.forward).parameters
        self.required = [
            name
            for name, x in self.parameters.items()
            if x.default is x.empty and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
        ]
        self.docs = find_documented_shapes(model.forward.__doc__ or "")
        self.generator = torch.Generator().manual_seed(1)
        self.vocab_size = min(self.find_setting("vocab_size") or 100, VOCAB_SIZE)
        self.image_size = self.find_setting("image_size", "img_size", "input_size") or IMAGE_SIZE
        self.num_channels = self.find_setting("num_channels", "in_channels", "in_chans") or 3

    # ---------------------------------------------------------------------------------------------- search

    def find_inputs(self, call: Callable[[Inputs], Any], errors: list[str], is_partial: bool) -> Inputs | None:
        """Return the first inputs that the model accepts, or None after the errors of all.

        ``is_partial`` allows inputs without the images, videos or sounds that the model has parameters for.
        """
        for inputs in self.list_partial_inputs() if is_partial else self.list_inputs():
            for _ in range(MAX_REPAIRS):
                if time.monotonic() > self.deadline:
                    return None
                try:
                    call(inputs)
                    return inputs
                except Exception as error:
                    errors.append(f"{describe_inputs(inputs)}: {type(error).__name__}: {str(error).strip()}"[:300])
                    repaired = self.repair_inputs(inputs, error)
                if repaired is None:
                    break
                inputs = repaired
        return None

    def list_inputs(self) -> Iterator[Inputs]:
        """List keyword arguments with all that the model takes, such as images and texts."""
        yield from tiny_exceptions.list_inputs(self.model_type, self)
        text, target = self._build_text(), self._select(decoder_input_ids=self.draw_ids(TARGET_LENGTH))
        required = {name: self.build_value(name) for name in self.required}
        images, sounds = list(self._list_images()), list(self._list_audio())
        if text and images and sounds:
            for image, sound in itertools.product(images[:4], sounds[:2]):
                yield {**required, **text, **image, **sound}
        for media in images + sounds:
            if text:
                yield {**text, **media}
            yield {**media, **target}
        if not images and not sounds:
            yield from self._list_texts(text)
        if required:
            yield required

    def list_partial_inputs(self) -> Iterator[Inputs]:
        """List further keyword arguments: without a part of what the model takes, or of forms that are rare."""
        text = self._build_text()
        yield from self._list_texts(text)
        if "inputs_embeds" in self.parameters:
            yield {"inputs_embeds": self.draw(2, LENGTH, self.find_setting("hidden_size", "d_model") or WIDTH)}
        yield from self._list_other()

    def _list_texts(self, text: Inputs) -> Iterator[Inputs]:
        if text:
            yield {**{name: self.build_value(name) for name in self.required}, **text}
            yield {name: value for name, value in text.items() if name != "attention_mask"}

    def _list_other(self) -> Iterator[Inputs]:
        if "past_values" in self.parameters:
            length = getattr(self.config, "context_length", 16) or 16
            yield {"past_values": self.draw(2, length, getattr(self.config, "num_input_channels", 1) or 1)}
            yield {"past_values": self.draw(2, length)}
        if "inputs" in self.parameters:
            yield {"inputs": self.draw_ids(LENGTH)}
        first = next(iter(self.parameters))
        yield {first: self.draw(2, LENGTH, WIDTH)}
        yield {first: self.draw(2, self.num_channels, self.image_size, self.image_size)}
        yield {first: self.draw(2, LENGTH, WIDTH), **self._select(attention_mask=None)}
        yield {first: self.draw_ids(LENGTH)}

    # ---------------------------------------------------------------------------------------------- values

    def find_setting(self, *names: str, config: Any = None, depth: int = 0) -> int | None:
        """Return a number of the configuration, or of one within it."""
        config = self.config if config is None else config
        for name in names:
            value = getattr(config, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if type(value) is int:
                return value
        inner = [x for x in vars(config).values() if is_config(x)] if depth < 3 else []
        values = (self.find_setting(*names, config=x, depth=depth + 1) for x in inner)
        return next((value for value in values if value is not None), None)

    def find_token(self, medium: str) -> int | None:
        """Return the id of the token that stands for a part of an image, video or audio."""
        names = [
            f"{x}{end}" for x in MEDIA_TOKENS[medium] for end in ("_token_id", "_token_index", "_context_token_id")
        ]
        return self.find_setting(*names)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def draw_ids(self, length: int, *more: int) -> Tensor:
        return torch.randint(5, max(6, self.vocab_size - 60), (2, length, *more), generator=self.generator)

    def build_value(self, name: str, inputs: Mapping[str, Any] | None = None) -> Any:
        """Return a value for a parameter, by its name and its documented shape."""
        if (value := self._build_named_value(name, inputs or {})) is not None:
            return value
        type_name, dimensions = self.docs.get(name, ("", None))
        if dimensions is None:
            dimensions = ["batch_size", "sequence_length"] + ([] if _is_discrete(name, type_name) else ["hidden_size"])
        shape = [self.find_dimension(x) for x in dimensions]
        if "mask" in name or "padding" in name:
            return torch.ones(shape, dtype=torch.bool if "Bool" in type_name else torch.long)
        if _is_discrete(name, type_name):
            return torch.ones(shape, dtype=torch.long) if "type" in name or not shape else torch.zeros(shape).long()
        return self.draw(*shape)

    def find_dimension(self, name: str) -> int:
        """Return the size of a dimension that the documentation names."""
        name = name.strip().removeprefix("config.").strip("`")
        if name.isdigit():
            return int(name)
        size = next((size for pattern, size in DIMENSIONS[:2] if re.search(pattern, name)), None)
        size = size or self.find_setting(name) or next((n for x, n in DIMENSIONS if re.search(x, name)), None)
        if size is None and re.search(r"dim|size|feature|mel", name):
            size = self.find_setting("hidden_size", "d_model")
        return size or 2

    def _build_named_value(self, name: str, inputs: Mapping[str, Any]) -> Any:
        """Return a value for a parameter whose meaning is known, or None."""
        ids, size = inputs.get("input_ids"), self.image_size
        length = ids.shape[1] if isinstance(ids, Tensor) else LENGTH
        features = next((x for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
        if name.endswith("grid_thw"):
            return torch.tensor([[1, 4, 4], [1, 4, 4]])
        if name.endswith("input_ids"):
            return self.draw_ids(LENGTH)
        if name == "bbox":
            return torch.randint(0, 90, (2, length, 4), generator=self.generator).sort(-1).values
        if name in ("mm_token_type_ids", "token_type_ids") and isinstance(ids, Tensor):
            return self._build_media_types(ids)
        if name in ("image_sizes", "original_sizes", "target_sizes"):
            return torch.tensor([[size, size], [size, size]])
        if name in ("position_ids", "pixel_position_ids") and len(self.docs.get(name, ("", []))[1] or []) <= 2:
            return torch.arange(length).expand(2, -1).clone()
        if re.search(r"mask|padding", name) and features is not None and not re.search(r"decoder|encoder", name):
            if re.search(r"pixel|image", name) and features.dim() >= 4:
                return torch.ones(*features.shape[:-3], *features.shape[-2:], dtype=torch.long)
            if features.dim() >= 2 and re.search(r"feature|audio|input|mel|padding|^mask", name):
                return torch.ones(2, self._find_length(features), dtype=torch.long)
        if re.search(r"(audio|feature|mel|input|wav)_?(lens|lengths?)$|^feature_lens|sample_lengths$", name):
            return torch.full((2,), 16 if features is None else self._find_length(features))
        return None

    def _find_length(self, features: Tensor) -> int:
        """Return the number of frames of audio features."""
        mel = self._find_num_mels()
        sizes = [x for x in features.shape[1:] if x != mel]
        return max(sizes or [features.shape[-1]])

    def _find_num_mels(self) -> int:
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "num_mels", "n_mels", "input_feat_size")
        return self.find_setting(*names, "mel_bins", "mel_dim", "input_channels") or 80

    def _build_media_types(self, ids: Tensor) -> Tensor:
        types = torch.zeros_like(ids)
        for number, medium in enumerate(MEDIA_TOKENS, 1):
            token = self.find_token(medium)
            if token is not None:
                types[ids == token] = number
        return types

    def _select(self, **values: Any) -> Inputs:
        """Return the values that the model has parameters for."""
        return {name: value for name, value in values.items() if name in self.parameters}

    # ------------------------------------------------------------------------------------- kinds of inputs

    def _build_text(self) -> Inputs:
        if "input_ids" not in self.parameters:
            return {}
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[1, LENGTH - 2 :] = 0
        return self._select(
            input_ids=self.draw_ids(LENGTH),
            attention_mask=mask,
            bbox=self.build_value("bbox"),
            decoder_input_ids=self.draw_ids(TARGET_LENGTH),
        )

    def _list_images(self) -> Iterator[Inputs]:
        num_frames = self.find_setting("num_frames", "frames_per_clip") or 2
        more = {name: self.build_value(name) for name in self.required if name == "image_sizes"}
        yield from self._list_patches()
        image_name = next((x for x in ("pixel_values", "image", "images") if x in self.parameters), "pixel_values")
        for size in dict.fromkeys((min(self.image_size, 64), self.image_size, 224)):
            image = self.draw(2, self.num_channels, size, size)
            video = self.draw(2, num_frames, self.num_channels, size, size)
            if image_name in self.parameters:
                yield {image_name: image, **more}
                yield {image_name: video}
            if "pixel_values_videos" in self.parameters:
                yield {"pixel_values_videos": video}
            if {"pixel_values", "image_sizes"} <= set(self.parameters):
                yield {"pixel_values": image[:, None], "image_sizes": torch.full((2, 2), size)}
        if "pixel_values" in self.parameters:
            yield {"pixel_values": self.draw(2, 1, self.num_channels, self.image_size, self.image_size)}
        if "visual_feats" in self.parameters:
            features = self.find_setting("visual_feat_dim") or WIDTH
            boxes = torch.rand(2, 3, self.find_setting("visual_pos_dim") or 4, generator=self.generator)
            yield {"visual_feats": self.draw(2, 3, features), "visual_pos": boxes}
        if "flattened_patches" in self.parameters:
            width = (self.find_setting("patch_embed_hidden_size") or 768) + 2
            yield {"flattened_patches": torch.cat([torch.ones(2, 6, 2), self.draw(2, 6, width - 2)], -1)}

    def _list_patches(self) -> Iterator[Inputs]:
        """List flattened patches of images, and the grids that they come from."""
        patch = self.find_setting("patch_size") or PATCH_SIZE
        channels = self.find_setting("in_channels", "in_chans", "num_channels") or 3
        frames = self.find_setting("temporal_patch_size") or 1
        for prefix, name in (("pixel_values", "image"), ("pixel_values_videos", "video")):
            grid_name = next((x for x in (f"{name}_grid_thw", f"{name}_grid_hws") if x in self.parameters), None)
            if grid_name is None or prefix not in self.parameters:
                continue
            grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
            yield {prefix: self.draw(32, channels * frames * patch * patch), grid_name: grid}
            yield {prefix: self.draw(32, channels, patch, patch), grid_name: grid}
            yield {prefix: self.draw(1, 32, channels, patch, patch), grid_name: grid}
        first = next(iter(self.parameters))
        if "grid_thw" in self.parameters:
            grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
            num_patches = int(grid.prod(-1).sum())
            more = self._select(merge_sizes=torch.tensor([1, 1]))
            for shape in (
                (channels * frames * patch * patch,),
                (channels, patch, patch),
                (channels, frames, patch, patch),
            ):
                yield {first: self.draw(num_patches, *shape), "grid_thw": grid, **more}
            yield {first: self.draw(1, num_patches, channels, patch, patch), "grid_thw": grid, **more}
        if "spatial_shapes" in self.parameters and "pixel_values" in self.parameters:
            num_patches = 16
            yield {
                "pixel_values": self.draw(2, num_patches, channels * patch * patch),
                "pixel_attention_mask": torch.ones(2, num_patches, dtype=torch.long),
                "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
            }
        positions = next((x for x in self.parameters if x.endswith("position_ids") and x != "position_ids"), None)
        if positions and "pixel_values" in self.parameters:
            grid = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(2, -1, -1).clone()
            yield {"pixel_values": self.draw(2, 36, channels * patch * patch), positions: grid}

    def _list_audio(self) -> Iterator[Inputs]:
        mel = self._find_num_mels()
        max_source = self.find_setting("max_source_positions") or 50
        names = ("input_features", "audio_features", "audio_mel", "audio_input_features", "input_audio_embeds")
        for name in (x for x in names if x in self.parameters):
            shapes = ((2, mel, 2 * max_source), (2, 64, mel), (2, 1, 64, mel), (2, mel, 64), (2, 3000, mel))
            for shape in (*shapes, (2, mel, 3000), (2, 1, 1024, mel)):
                yield {name: self.draw(*shape)}
        for name in (x for x in ("input_values", "audio_values") if x in self.parameters):
            shapes = ((2, 3200), (2, 16000), (2, 1, 3200), (2, 1024, 128), (2, 128, 128), (2, 80, 64), (2, 64, 80))
            for shape in (*shapes, (2, 1, 15360)):
                yield {name: self.draw(*shape)}

    # --------------------------------------------------------------------------------------------- repairs

    def repair_inputs(self, inputs: Inputs, error: Exception) -> Inputs | None:
        """Return inputs without the error that a model raised, or None."""
        message = str(error)
        for pattern, repair in (
            (r"missing \d+ required positional arguments?: (.*)", self._add_required),
            (r"(\w*)[^\n]*tokens:? (\d+),?\s+features:? (\d+)", self._add_media_tokens),
            (r"doesn't match model \((\d+)\*(\d+)\)", self._resize_images),
            (r"to have (\d+) channels, but got (\d+) channels", self._change_channels),
            (r"cannot be multiplied \(\d+x(\d+) and (\d+)x", self._change_width),
            (r"input with shape \[\*, (\d+)\], but got input of size\[(.*)\]", self._change_normalized_width),
            (r"not a multiple of (\d+)", self._round_length),
            (r"dtype to be bool", self._make_masks_boolean),
        ):
            if (match := re.search(pattern, message)) and (repaired := repair(inputs, *match.groups())) is not None:
                return repaired
        return self._add_mentioned(inputs, error)

    def _add_required(self, inputs: Inputs, names: str) -> Inputs | None:
        missing = [x for x in re.findall(r"'(\w+)'", names) if x in self.parameters and x not in inputs]
        return {**inputs, **{name: self.build_value(name, inputs) for name in missing}} if missing else None

    def _add_media_tokens(self, inputs: Inputs, medium: str, tokens: str, features: str) -> Inputs | None:
        medium = next((x for x in MEDIA_TOKENS if x in medium.lower()), "")
        media = [medium] if medium else [x for x in MEDIA_TOKENS if self.find_token(x) is not None]
        token, ids = (self.find_token(media[0]) if media else None), inputs.get("input_ids")
        num_features = int(features)
        if tokens == features:  # some models name the number of values instead
            num_features //= max(1, self.find_setting("hidden_size", "d_model") or 1)
        if token is None or ids is None or not 0 < num_features < 2000 or int(tokens) == num_features:
            return None
        ids = ids.clone()
        ids[ids == token] = 5
        ids = ids[:, :LENGTH] if tokens == features else ids
        count = -(-num_features // 2)
        start, end = ids[:, :3], ids[:, 3:]
        block = torch.full((2, count), token)
        block[1, num_features - count :] = 6
        new = torch.cat([start, block, end], 1)
        mask = torch.ones_like(new)
        mask[1, -2:] = 0
        repaired = {**inputs, "input_ids": new, **self._select(attention_mask=mask)}
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self.parameters:
                repaired[name] = self._build_media_types(new)
        return repaired

    def _resize_images(self, inputs: Inputs, height: str, width: str) -> Inputs | None:
        size = (int(height), int(width))
        images = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() >= 4}
        if not images or all(x.shape[-2:] == size for x in images.values()) or max(size) > 1024:
            return None
        return {**inputs, **{name: self.draw(*x.shape[:-2], *size) for name, x in images.items()}}

    def _change_channels(self, inputs: Inputs, expected: str, given: str) -> Inputs | None:
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[-3] == int(given):
                return {**inputs, name: self.draw(*x.shape[:-3], int(expected), *x.shape[-2:])}
        return None

    def _change_width(self, inputs: Inputs, given: str, expected: str) -> Inputs | None:
        for name, x in inputs.items():
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1] != int(given):
                continue
            patch = math.isqrt(int(expected) // self.num_channels)
            if x.dim() >= 4 and self.num_channels * patch**2 == int(expected):  # flattened patches of an image
                num_patches = max(1, x.shape[-2] // patch) * max(1, x.shape[-1] // patch)
                return {**inputs, name: self.draw(*x.shape[:-3], num_patches, int(expected))}
            if x.dim() < 4 and given != expected:
                return {**inputs, name: self.draw(*x.shape[:-1], int(expected))}
        return None

    def _change_normalized_width(self, inputs: Inputs, expected: str, shape: str) -> Inputs | None:
        return self._change_width(inputs, shape.split(",")[-1], expected)

    def _round_length(self, inputs: Inputs, factor: str) -> Inputs | None:
        for name, x in inputs.items():
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] % int(factor):
                return {**inputs, name: self.draw(*x.shape[:-1], -(-x.shape[-1] // int(factor)) * int(factor))}
        return None

    def _make_masks_boolean(self, inputs: Inputs) -> Inputs | None:
        masks = {name: x.bool() for name, x in inputs.items() if "mask" in name and x.dtype != torch.bool}
        return {**inputs, **masks} if masks else None

    def _add_mentioned(self, inputs: Inputs, error: Exception) -> Inputs | None:
        """Add a parameter that the error message or the line that failed mentions."""
        lines = [str(frame.line) for frame in traceback.extract_tb(error.__traceback__)[:0:-1]]
        for line in (str(error), *lines):
            for name in re.findall(r"\w+", line):
                is_new = name in self.parameters and inputs.get(name) is None
                if is_new and not re.search(
                    r"past_key|cache|inputs_embeds|labels|kwargs|output_|return_|_outputs$", name
                ):
                    return {**inputs, name: self.build_value(name, inputs)}
        return None


def describe_inputs(inputs: Mapping[str, Any]) -> str:
    """Return the names and shapes of inputs."""
    shapes = {name: "x".join(map(str, x.shape)) if isinstance(x, Tensor) else "" for name, x in inputs.items()}
    return ", ".join(f"{name} {shape}".rstrip() for name, shape in shapes.items())


def find_documented_shapes(doc: str) -> dict[str, tuple[str, list[str] | None]]:
    """Return the type and the names of the dimensions of each parameter, as the documentation gives them."""
    shapes: dict[str, tuple[str, list[str] | None]] = {}
    for match in re.finditer(r"^ {4,}(\w+) \((.*)\):? *$", doc, re.MULTILINE):
        name, description = match.groups()
        shape = re.search(r"of shape\s+`*[(\[](.*?)[)\]]`", description)
        dimensions = [x for x in shape[1].split(",") if x.strip()] if shape else None
        shapes[name] = (description.split("of shape")[0], dimensions)
    return shapes


def _is_discrete(name: str, type_name: str) -> bool:
    return bool(re.search(r"Long|Int|Bool|int", type_name) or re.search(r"_ids?$|mask|index|_idx$|labels", name))
