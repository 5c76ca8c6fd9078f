"""``jumok look``."""

from __future__ import annotations

import mimetypes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jumok.cli.options import (
    DeviceOption,
    StyleAudioOption,
    StyleWeightsOption,
    io_option,
    language_model_option,
    network_option,
    view_option,
)
from jumok.errors import InputError
from jumok.files import check_not_input

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData


def look(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Run folder, Hugging Face folder, or name on the Hugging Face hub (owner/name)."
        ),
    ],
    text: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT", help="Input text, a text file, or an image. Optional with --image and --audio."
        ),
    ] = None,
    target: Annotated[str | None, io_option(help="Target text. Defaults to the model's own prediction.")] = None,
    out: Annotated[
        Path | None, io_option(help="Write an .html file or a figure instead of starting the viewer.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        language_model_option(
            metavar="FILE",
            help="Image for a Hugging Face model (PNG, JPEG or WebP). May be repeated.",
        ),
    ] = None,
    generate: Annotated[
        int | None,
        language_model_option(min=1, metavar="N", help="Continue the text by at most N tokens, with greedy search."),
    ] = None,
    chat: Annotated[
        bool, language_model_option("--chat", help="Apply the chat template: the text is the user's turn.")
    ] = False,
    layers: Annotated[
        str | None,
        language_model_option(
            metavar="PATTERN", help="Capture only these layers, which saves memory. * matches any characters."
        ),
    ] = None,
    audio: Annotated[
        Path | None,
        language_model_option(metavar="FILE", help="Recording that a speech model hears: WAV, FLAC or OGG."),
    ] = None,
    layer: Annotated[
        str | None,
        view_option(
            help="With --out: name of the layer. * matches any characters; mean is the mean over all layers and heads."
        ),
    ] = None,
    head: Annotated[int | None, view_option(min=0, help="With --out: attention head, counted from 0.")] = None,
    knock_out: Annotated[
        list[str] | None,
        view_option(
            help="Compare with the model without a head (LAYER:1) or an edge (LAYER:8-2, LAYER:1:8-2). May be repeated."
        ),
    ] = None,
    without_sinks: Annotated[
        bool,
        view_option(
            "--without-sinks",
            help="Leave out attention sinks, which are special tokens and the first token, and renormalise the rest.",
        ),
    ] = False,
    whole_words: Annotated[bool, view_option("--whole-words", help="Merge subword tokens into words.")] = False,
    style_audio: StyleAudioOption = None,
    style_weights: StyleWeightsOption = None,
    port: Annotated[int, network_option(help="Port to listen on.")] = 8765,
    browser: Annotated[bool, network_option(help="Open the viewer in a browser.")] = True,
    device: DeviceOption = "auto",
) -> None:
    """Show a model's attention.

    Opens a viewer in the browser, or writes an HTML file or a figure.
    """
    from jumok.look.viewer import page, view_writer
    from jumok.look.viewer.comparison import parse_ablations
    from jumok.look.viewer.word_merging import merge_into_words

    images = image or []
    if out is not None:
        inputs = [name for name in (text, audio, style_audio, *images) if name is not None]
        check_not_input(out, [*inputs, *Path(model).glob("*")])
    if out is None and (layer is not None or head is not None):
        raise InputError("--layer and --head need --out; in the viewer, select the layer and the head there")
    views = _capture_views(
        model,
        text,
        images,
        target,
        parse_ablations(knock_out or ()),
        {"style_audio": style_audio, "style_weights": style_weights},
        {"generate": generate, "chat": chat, "layers": layers, "audio": audio},
        device,
    )
    if whole_words:
        views = [merge_into_words(view) for view in views]
    if without_sinks:
        if not any(layer.sinks for view in views for layer in view.layers):
            raise InputError("--without-sinks: no layer has special tokens or causal attention; leave the option out")
        views = [replace(view, hides_sinks=True) for view in views]
    if out is not None:
        print(f"written to {view_writer.save_view(views, out, layer, head)}")
    else:
        page.serve(views, port=port, open_browser=browser)


def _capture_views(
    model: str,
    text: str | None,
    images: Sequence[Path],
    target: str | None,
    ablations: Ablations,
    style: Mapping[str, str | None],
    generation: Mapping[str, Any],
    device: str,
) -> list[ViewerData]:
    """Run a model and capture its attention: one view, or two if heads or edges are knocked out."""
    from jumok.look.huggingface.capture import capture_huggingface_model
    from jumok.look.huggingface.folder import find_model_folder, is_huggingface_folder
    from jumok.run import Run
    from jumok.tasks import build_task, load_predictor

    folder = find_model_folder(model)
    if is_huggingface_folder(folder):
        if any(option is not None for option in style.values()):
            raise InputError(
                f"--style-audio and --style-weights need a run of the task speak; {model} is a Hugging Face model"
            )
        if text is not None:
            text = _read_text(text, model)
        if images:
            return _capture_images(folder, images, text, target, generation, ablations, device)
        if text is None and generation["audio"] is None:
            raise InputError(
                f"no input was given for {model}; give a text, images with --image FILE, or for a speech model a "
                "recording with --audio FILE"
            )
        return capture_huggingface_model(folder, text, target, **generation, ablations=ablations, device=device)
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected the folder of a model, for example {folder.parent}")
    if not folder.exists() and folder.is_absolute():
        raise InputError(f"there is no folder {folder}; correct the path of the model")
    if folder.is_dir() and not (folder / "recipe.yaml").is_file():
        raise InputError(
            f"{folder} has neither a recipe.yaml, as a run of `jumok train` has, nor a config.json, as a "
            "folder written by save_pretrained has; give one of these"
        )
    run = Run.open(folder)
    if images:
        raise InputError(
            f"--image needs a Hugging Face model, and {folder} is a run: give the image of a captioner as its input, "
            "without --image"
        )
    if any(generation.values()):
        raise InputError(
            f"--generate, --chat, --layers and --audio need a Hugging Face model, and {folder} is a run; a run shows "
            "its own prediction without them"
        )
    if text is None:
        raise InputError(f"{folder} is a run, which needs an input; give a text, a text file or an image")
    task = build_task(run)
    options, text = task.options_type.from_command_line(**style), task.read_text(text)
    return load_predictor(run, device).build_viewer_data(text, target, options=options, ablations=ablations)


def _capture_images(
    folder: Path,
    images: Sequence[Path],
    text: str | None,
    target: str | None,
    generation: Mapping[str, Any],
    ablations: Ablations,
    device: str,
) -> list[ViewerData]:
    """Capture the attention of a Hugging Face model to images."""
    from jumok.look.huggingface.image_capture import capture_image_model

    options = {name: value for name, value in generation.items() if name != "audio"}
    if generation["audio"] is not None:
        raise InputError("--image and --audio were given; jumok look shows the attention to one of them at a time")
    return capture_image_model(folder, images, text, target, **options, ablations=ablations, device=device)


def _read_text(text: str, model: str) -> str:
    """Return the text, or the content of the text file with this name."""
    from jumok.inference import line_io

    kind = (mimetypes.guess_type(text)[0] or "").partition("/")[0]
    if line_io.is_file(Path(text)):
        if kind in ("image", "audio"):
            raise InputError(
                f"{text} is a file of type {kind}, and the input of {model} is a text or a text file; give it with "
                f"--{kind} {text}"
            )
        if kind == "video":
            raise InputError(
                f"{text} is a file of type video, which jumok look does not read; give a text or a text file"
            )
    elif kind in ("image", "audio", "video") and not any(map(str.isspace, text)):
        raise InputError(f"there is no file {text}; correct its name, or give a text or a text file")
    elif Path(text).is_absolute() and line_io.is_folder(Path(text)):
        raise InputError(f"{text} is a folder; give a text or a text file")
    return line_io.read_text(text)
