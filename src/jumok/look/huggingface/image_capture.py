"""Capture of the attention of a Hugging Face model to images."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError
from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch
from jumok.look.huggingface.capture import build_decoder_input, generate_tokens, mark_tokens
from jumok.look.huggingface.folder import find_model_folder
from jumok.look.huggingface.image_files import encode_for_viewer, load_images
from jumok.look.huggingface.image_layers import ImageSession, LayerPlacer
from jumok.look.huggingface.image_processor import ImageProcessor, load_processor
from jumok.look.huggingface.loading import (
    accepts_argument,
    convert_errors,
    list_modalities,
    load_config,
    load_from_folder,
    load_weights,
    select_model_class,
)
from jumok.look.huggingface.memory import check_memory
from jumok.look.huggingface.pixel_trace import PixelTrace, trace_pixels
from jumok.look.huggingface.text_input import check_length, shorten_title
from jumok.look.viewer.attended_image import AttendedImages
from jumok.look.viewer.comparison import Ablations, compare_with_ablation
from jumok.look.viewer.image_placement import ImagePlacement
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer

GIVEN = "these images and this text"  # for error messages


def capture_image_model(
    model_name: str | Path,
    images: Sequence[str | Path],
    text: str | None = None,
    target: str | None = None,
    *,
    generate: int | None = None,
    chat: bool = False,
    layers: str | None = None,
    ablations: Ablations | None = None,
    device: str = "auto",
) -> list[ViewerData]:
    """Capture the attention of a model for images and a text; with ``ablations``, also a second time.

    ``images`` are PNG, JPEG or WebP files. A model that reads images alone takes no text. The text of a model with
    images in its prompt may have the model's own token where each of them belongs; otherwise they come first.
    The other arguments are those of :func:`jumok.look.huggingface.capture.capture_huggingface_model`.

    >>> (data,) = capture_image_model("Qwen/Qwen3-VL-2B-Instruct", ["cat.jpg"], "What is this?",
    ...                               chat=True, generate=20)  # doctest: +SKIP
    """
    _check_arguments(images, text, target, generate)
    folder = find_model_folder(model_name)
    pixels = load_images(images)
    model_class, config = _select_class(folder)
    processor = load_processor(folder, config)
    prompt = processor.build_prompt(text, len(pixels), chat=chat, add_reply=generate is not None)
    inputs = processor.process(pixels, prompt)
    trace = trace_pixels(
        lambda pictures: processor.process_pixels(pictures, prompt), [image.shape[:2] for image in pixels]
    )
    generator = load_weights(folder, model_class, device)
    with torch.inference_mode():
        session = _build_inputs(folder, generator, processor, dict(inputs), text, target, generate)
        if not session.title.strip():
            session = replace(session, title=shorten_title(", ".join(Path(path).name for path in images)))
        if session.input_ids:
            check_memory(session.model, len(session.input_ids), layers)
        files = tuple(encode_for_viewer(image) for image in pixels)

        def build_viewer_data() -> ViewerData:
            with (
                watch(session.model, session.tokenizer, layers=layers) as captures,
                convert_errors(folder, session.model, input_name=GIVEN),
            ):
                session.runner(**session.inputs)
            return _build_viewer_data(session, captures, trace, files)

        return compare_with_ablation(session.model, ablations, build_viewer_data)


def _check_arguments(images: Sequence[str | Path], text: str | None, target: str | None, generate: int | None) -> None:
    if not images:
        raise InputError("no images were given; expected at least one")
    if text is not None and not text.strip():
        raise InputError("the text is empty; give a text, or leave it out")
    if generate is not None and generate < 1:
        raise InputError(f"--generate {generate}: expected a number of tokens from 1 on")
    if generate is not None and target is not None:
        raise InputError("--generate and --target were given: either the model writes the output, or it is given")


def _select_class(folder: Path) -> tuple[Any, Any]:
    """Return the class of a model that reads images, and its configuration."""
    config = load_config(folder)
    import transformers

    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        model_class: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    else:
        model_class = select_model_class(folder, config)
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    if "image" not in list_modalities(model_class):
        raise InputError(
            f"{folder} holds a model ({config.model_type}) that reads {' and '.join(list_modalities(model_class))} and "
            "no images; leave --image out, or give a vision or vision-language model"
        )
    return model_class, config


def _build_inputs(
    folder: Path,
    generator: Any,
    processor: ImageProcessor,
    inputs: dict[str, Any],
    text: str | None,
    target: str | None,
    generate: int | None,
) -> ImageSession:
    """Generate the output, if there shall be one, and return the inputs of the pass that is captured."""
    is_encoder_decoder = bool(generator.config.is_encoder_decoder)
    if not generator.can_generate() and generate is not None:
        raise InputError(
            f"{folder} holds a model ({generator.config.model_type}) that writes no text: leave --generate out"
        )
    if target is not None and not is_encoder_decoder:
        raise InputError(f"{folder} holds a model without an encoder-decoder, and --target needs one: leave it out")
    inputs = {name: value.to(generator.device) if hasattr(value, "to") else value for name, value in inputs.items()}
    inputs = {name: value for name, value in inputs.items() if _accepts(generator, name)}
    tokenizer, title, first_generated = processor.tokenizer, shorten_title(text or ""), None
    model = generator if is_encoder_decoder else generator.base_model
    if "input_ids" in inputs:
        check_length(generator, inputs["input_ids"].shape[1], 0 if is_encoder_decoder else generate or 0)
    if is_encoder_decoder:
        tokenizer = tokenizer or load_from_folder(folder, "AutoTokenizer")
        with convert_errors(folder, generator, input_name=GIVEN):
            decoder_ids, _ = build_decoder_input(generator, tokenizer, inputs, target, generate)
        output = tokenizer.decode(decoder_ids[0], skip_special_tokens=True)
        inputs["decoder_input_ids"] = decoder_ids
        first_generated = None if target is not None else 1  # after the start token
        title = f"{title}  →  {shorten_title(output)}"
    elif generate is not None:
        with convert_errors(folder, generator, input_name=GIVEN):
            output_ids = generate_tokens(generator, inputs, generate)
        first_generated = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
        output = tokenizer.decode(output_ids[0, first_generated:], skip_special_tokens=True)
        inputs = extend_inputs(inputs, output_ids, generator.config.model_type)
        title = f"{title}  →  {shorten_title(output)}"
    runner = model
    if "input_ids" not in inputs and "decoder_input_ids" not in inputs and accepts_argument(type(model), "input_ids"):
        runner = getattr(model, "vision_model", model)  # of a model such as CLIP, without a text
    if accepts_argument(type(runner), "use_cache"):
        inputs["use_cache"] = False
    inputs = {name: value for name, value in inputs.items() if _accepts(runner, name)}
    return ImageSession(folder, model, runner, inputs, tokenizer, title.removeprefix("  →  "), first_generated)


def extend_inputs(inputs: dict[str, Any], output_ids: torch.Tensor, model_type: str) -> dict[str, Any]:
    """Return the inputs of a text and its continuation ``output_ids (1, L)``, of those of the text."""
    extended = {**inputs, "input_ids": output_ids}
    length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    num_new = output_ids.shape[1] - length
    for name, value in inputs.items():
        if name == "input_ids" or not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
            continue
        if name == "attention_mask":
            new = value.new_ones(1, num_new)
        elif name == "token_type_ids" and model_type == "paligemma":
            new = value.new_ones(1, num_new)  # what was generated is causal
        elif name in ("token_type_ids", "mm_token_type_ids"):
            new = value.new_zeros(1, num_new)
        elif name == "cross_attention_mask":
            new = value[:, -1:].expand(-1, num_new, *value.shape[2:])
        else:
            continue
        extended[name] = torch.cat([value, new], 1)
    return extended


def _accepts(model: Any, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


# ---------------------------------------------------------------- layers and placements


def _build_viewer_data(
    session: ImageSession, captures: Captures, trace: PixelTrace, files: tuple[bytes, ...]
) -> ViewerData:
    placer = LayerPlacer(session, trace, len(files))
    layers: list[ViewerLayer] = []
    placements: dict[str, ImagePlacement] = {}
    for captured in captures:
        for layer, placement in placer.place(captured):
            name = _find_free_name(layer.name, placements.keys() | {item.name for item in layers})
            layers.append(replace(layer, name=name))
            if placement is not None:
                placements[name] = placement
    if not placements:
        raise InputError(placer.explain_missing())
    if placer.left_out:
        warnings.warn(
            f"{len(placer.left_out)} layers are left out, as {placer.left_out[0]}: what they attend to cannot be "
            "placed on the image",
            stacklevel=3,
        )
    data = ViewerData(tuple(layers), session.title, image=AttendedImages(files, placements))
    if session.first_generated is None:
        return data
    if session.model.config.is_encoder_decoder:
        return mark_tokens(data, session.model, session.first_generated)
    first = session.first_generated
    return data.with_layers(
        [
            replace(layer, first_generated=(first, None if layer.kind == "cross" else first))
            if layer.shape[0] == len(session.input_ids)
            else layer
            for layer in data.layers
        ]
    )


def _find_free_name(name: str, names: Any) -> str:
    if name not in names:
        return name
    number = 2
    while f"{name} [{number}]" in names:
        number += 1
    return f"{name} [{number}]"
