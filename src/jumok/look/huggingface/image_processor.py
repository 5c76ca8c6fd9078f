"""The processor of an image model: from images and a text to the inputs of the model."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jumok.data.images import Pixels
from jumok.errors import InputError
from jumok.look.huggingface.folder import has_tokenizer
from jumok.look.huggingface.image_files import to_pillow
from jumok.look.huggingface.loading import (
    load_from_folder,
    shorten_message,
    silence_transformers,
)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Processors that put the images before the text themselves.
PLACES_IMAGES_ITSELF = frozenset({"blip-2", "florence2", "fuyu", "instructblip", "kosmos-2", "kosmos-2.5"})


@dataclass(frozen=True, eq=False)
class ImageProcessor:
    """A processor of transformers, or only an image processor if the model reads no text."""

    folder: Path
    processor: Any
    config: Any

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; None if the model reads no text."""
        return getattr(self.processor, "tokenizer", None)

    @property
    def image_token(self) -> str | None:
        """The text that stands for an image in a prompt; None if the processor expects none."""
        if self.config.model_type in PLACES_IMAGES_ITSELF or self.tokenizer is None:
            return None
        token = getattr(self.processor, "image_token", None)
        return None if token is None else str(token)

    def build_prompt(self, text: str | None, num_images: int, *, chat: bool, add_reply: bool) -> str | None:
        """Return the text with a place for each image; with ``chat``, as the user's turn of the chat template."""
        if num_images > 1 and self.image_token is None:
            raise InputError(
                f"{num_images} images were given, and the model in {self.folder} ({self.config.model_type}) takes one"
            )
        if self.tokenizer is None:
            if chat:
                raise InputError(f"{self.folder} holds a model that reads no text; leave --chat out")
            if text is not None:
                raise InputError(f"{self.folder} holds a model that reads images and no text; leave the text out")
            return None
        token = self.image_token
        if chat:
            return self._build_chat(text, num_images, token, add_reply)
        if token is None:
            return text
        prompt = text or ""
        num_places = prompt.count(token)
        if num_places not in (0, num_images):
            raise InputError(
                f"the text has {token}, which stands for an image, {num_places} times, and --image was given "
                f"{num_images} times; write it once for each image, or leave it out: then the images come first"
            )
        if num_places:
            return prompt
        return "".join([self._wrap(token)] * num_images) + prompt

    def _wrap(self, token: str) -> str:
        """Return the token of an image between those that the model expects around it, if any."""
        edges = [getattr(self.config, f"vision_{edge}_token_id", None) for edge in ("start", "end")]
        if None in edges:
            return token
        start, end = self.tokenizer.convert_ids_to_tokens(edges)
        return f"{start}{token}{end}" if isinstance(start, str) and isinstance(end, str) else token

    def _build_chat(self, text: str | None, num_images: int, token: str | None, add_reply: bool) -> str:
        template = getattr(self.processor, "chat_template", None) or getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise InputError(
                f"the processor in {self.folder} has no chat template, which --chat needs: give a chat model, or "
                "leave --chat out"
            )
        content: list[dict[str, str]] = [{"type": "image"}] * num_images
        if text is not None:
            content.append({"type": "text", "text": text})
        try:
            prompt = self.processor.apply_chat_template(
                [{"role": "user", "content": content}],
                chat_template=template,
                add_generation_prompt=add_reply,
                tokenize=False,
            )
        except Exception as error:
            raise InputError(f"the chat template in {self.folder} takes no images: {shorten_message(error)}") from error
        if token is not None and prompt.count(token) != num_images:
            raise InputError(
                f"the chat template in {self.folder} writes {token} {prompt.count(token)} times for {num_images} "
                "images; leave --chat out"
            )
        return str(prompt)

    def process(self, images: Sequence[Pixels], prompt: str | None) -> Any:
        """Return the inputs of the model, as tensors."""
        pictures = [to_pillow(pixels) for pixels in images]
        options: dict[str, Any] = {"images": pictures, "return_tensors": "pt"}
        if self.tokenizer is not None and prompt is not None:
            options["text"] = prompt
            bos_token = getattr(self.tokenizer, "bos_token", None)
            if bos_token and prompt.startswith(bos_token):  # of a chat template
                options["add_special_tokens"] = False
        processor = self.processor
        if "text" not in options and self.tokenizer is not None and self.image_token is None:
            processor = getattr(processor, "image_processor", processor)  # no text for a model such as CLIP
        try:
            with silence_transformers(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, caused within transformers
                return processor(**options)
        except Exception as error:
            shapes = ", ".join(f"{pixels.shape[1]} × {pixels.shape[0]}" for pixels in images)
            raise InputError(
                f"the processor in {self.folder} ({type(self.processor).__name__}) does not take "
                f"{len(images)} {'image' if len(images) == 1 else 'images'} ({shapes} pixels): {shorten_message(error)}"
            ) from error

    def process_pixels(self, images: Sequence[Pixels], prompt: str | None) -> NDArray[np.float64]:
        """Return the pixel values alone."""
        values: NDArray[np.float64] = get_pixel_values(self.process(images, prompt), self.folder).double().numpy()
        return values


def load_processor(folder: Path, config: Any) -> ImageProcessor:
    """Load the processor in a folder. It reads images with Pillow if torchvision is not installed."""
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise InputError(
            f"{folder} has neither a {' nor a '.join(PROCESSOR_FILES)}, which say how the model reads images: save "
            "them there with processor.save_pretrained(folder)"
        )
    with silence_transformers():
        return ImageProcessor(folder, _load(folder, config), config)


def get_pixel_values(inputs: Any, folder: Path) -> Any:
    """Return the pixel values among the inputs of a model."""
    values = inputs.get("pixel_values")
    if values is None or not hasattr(values, "double"):
        raise InputError(
            f"the processor in {folder} returns {', '.join(inputs)}, and jumok look needs pixel_values; use "
            "jumok.watch in Python"
        )
    return values


def _load(folder: Path, config: Any) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    if type(config) not in PROCESSOR_MAPPING or not has_tokenizer(folder):
        return load_from_folder(folder, "AutoImageProcessor")
    processor_class: Any = PROCESSOR_MAPPING[type(config)]
    if "video_processor" in processor_class.get_attributes() and importlib.util.find_spec("torchvision") is None:
        return _load_without_videos(folder, processor_class)
    return load_from_folder(folder, "AutoProcessor")


def _load_without_videos(folder: Path, processor_class: Any) -> Any:
    """Load a processor of images and videos for images alone: its part for videos needs torchvision."""

    class ProcessorWithoutVideos(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    parts = {
        "image_processor": load_from_folder(folder, "AutoImageProcessor"),
        "tokenizer": load_from_folder(folder, "AutoTokenizer"),
        "video_processor": None,
    }
    try:
        processor_dict, _ = processor_class.get_processor_dict(folder, local_files_only=True)
        arguments = [parts[name] for name in processor_class.get_attributes()]
        return ProcessorWithoutVideos.from_args_and_dict(arguments, processor_dict)
    except Exception as error:
        raise InputError(f"{folder} cannot be loaded: {shorten_message(error)}") from error
