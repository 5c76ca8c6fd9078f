"""Loading of a Hugging Face model from a local folder: its class, its weights, its tokenizer.

No code from the folder is run, and pickled weights are not read.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError, JumokError, MissingExtra
from jumok.files import check_symlinks
from jumok.look.huggingface.folder import check_weights, has_tokenizer

UNUSED_WEIGHTS = re.compile(r"pooler|masked_spec_embed")  # no attention depends on them
MAX_ERROR_LENGTH = 300  # maximum number of characters of a transformers error message


def load_model(folder: Path, device: str, *, for_generation: bool) -> tuple[Any, Any]:
    """Return the model and the tokenizer; ``for_generation``: with the output layer that a decoder needs."""
    config = load_config(folder)
    model_class = select_model_class(folder, config)
    _check_reads_text(folder, model_class, config)
    if for_generation and not accepts_argument(model_class, "decoder_input_ids"):
        model_class = _select_causal_class(folder, config)
    check_has_tokenizer(folder)
    check_weights(folder)
    tokenizer = load_from_folder(folder, "AutoTokenizer")
    return load_weights(folder, model_class, device), tokenizer


def load_config(folder: Path) -> Any:
    """Return the configuration of a model, after checks of its folder."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{folder} is a Hugging Face folder, and transformers is not installed: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    check_symlinks(folder)
    return load_from_folder(folder, "AutoConfig")


def load_from_folder(folder: Path, auto_class: str) -> Any:
    """Load a configuration, a tokenizer, a feature extractor or a processor by the name of its class."""
    import transformers

    try:
        # Unless trust_remote_code is False, transformers asks on standard input whether to run the folder's code.
        return getattr(transformers, auto_class).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise InputError(f"{folder} cannot be loaded: {shorten_message(error)}") from error


def load_weights(folder: Path, model_class: Any, device: str) -> Any:
    """Return a model of this class with the weights of a folder."""
    check_weights(folder)
    target_device = resolve_device(device)
    try:
        with silence_transformers():  # missing weights are reported below, if they matter
            model, loading_info = model_class.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
    except Exception as error:
        raise InputError(f"{folder} cannot be loaded: {shorten_message(error)}") from error
    missing = sorted(name for name in loading_info["missing_keys"] if not UNUSED_WEIGHTS.search(name))
    if missing:
        listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        warnings.warn(f"{folder} lacks {len(missing)} weights, which are random: {listed}", stacklevel=4)
    return model.eval().to(target_device)


def select_model_class(folder: Path, config: Any) -> Any:
    """Return the class to load: without a task head if there is one, else the one that was saved."""
    import transformers

    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    mapping = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if is_encoder_decoder else transformers.MODEL_MAPPING
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if type(config) in mapping and not name.endswith("EncoderModel"):  # T5EncoderModel has no decoder
        model_class = mapping[type(config)]
        return model_class[0] if isinstance(model_class, tuple) else model_class
    saved_class = getattr(transformers, name, None)
    if not (isinstance(saved_class, type) and issubclass(saved_class, transformers.PreTrainedModel)):
        raise InputError(
            f"{folder} holds a model ({config.model_type}) whose class, {name or 'not named'} in "
            "config.json, is not part of transformers; load it in Python with its own code and use "
            "jumok.watch"
        )
    return saved_class


def _select_causal_class(folder: Path, config: Any) -> Any:
    """Return the class of a decoder with its output layer."""
    mapping = _find_causal_mapping(config)
    if mapping is None:
        raise InputError(
            f"{folder} holds a model ({config.model_type}) without a decoder, which cannot continue a text: leave "
            "--generate out, or give a causal language model or an encoder-decoder"
        )
    model_class = mapping[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def is_language_model(config: Any) -> bool:
    """Return whether a model is a decoder that predicts the next token of a text."""
    return _find_causal_mapping(config) is not None


def _find_causal_mapping(config: Any) -> Any:
    """Return the mapping of transformers from configurations to decoders with an output layer; None for encoders."""
    import transformers

    # Encoders such as BERT have a causal variant, too, which only a few checkpoints are.
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return None
    mappings = (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return next((mapping for mapping in mappings if type(config) in mapping), None)


def _check_reads_text(folder: Path, model_class: Any, config: Any) -> None:
    model = f"{folder} holds a model ({config.model_type})"
    if not accepts_argument(model_class, "input_ids"):
        # A recording needs no Python; other inputs do.
        advice = "Give a recording with --audio FILE. " if "audio" in list_modalities(model_class) else ""
        raise InputError(
            f"{model} that reads no text, and no other input was given. {advice}{describe_inputs(model_class)}"
        )
    if config.is_encoder_decoder and not accepts_argument(model_class, "decoder_input_ids"):
        raise InputError(
            f"{model} that does not output text; jumok look only supports encoder-decoders that do. "
            f"{describe_inputs(model_class)}"
        )


def check_has_tokenizer(folder: Path) -> None:
    """Check for tokenizer files. Without them, transformers builds tokenizers with an empty vocabulary."""
    if not has_tokenizer(folder):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json, vocab.txt or the like), and without it the model "
            "cannot read a text: save it there with tokenizer.save_pretrained(folder)"
        )


def resolve_device(device: str) -> torch.device:
    """Return a device of this machine; "auto" is a GPU if there is one."""
    resolved = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return torch.empty(0, device=resolved).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress all messages of transformers except errors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def shorten_message(error: Exception) -> str:
    """Return the beginning of an error message. Some messages of transformers list all existing models."""
    words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return words if len(words) <= MAX_ERROR_LENGTH else f"{words[:MAX_ERROR_LENGTH].rsplit(' ', 1)[0]} …"


# Non-text inputs, by transformers' name for the modality: the description, and how they are prepared.
NON_TEXT_INPUTS = {
    "image": ("an image", "AutoProcessor", "images=image"),
    "video": ("a video", "AutoProcessor", "videos=video"),
    "audio": ("audio", "AutoFeatureExtractor", "samples, sampling_rate=16000"),
    "time": ("a time series", None, ""),
}


def list_modalities(model_class: Any) -> list[str]:
    """Return what a model reads, by the names of transformers: "text", "image", "audio", …"""
    modalities = model_class.input_modalities
    return [modalities] if isinstance(modalities, str) else list(modalities)


def accepts_argument(model_class: Any, name: str) -> bool:
    """Return whether the model takes an argument of this name."""
    return name in inspect.signature(model_class.forward).parameters


def describe_inputs(model_class: Any) -> str:
    """Describe what a model needs beside or instead of text, and how to capture it in Python."""
    others = [NON_TEXT_INPUTS[name] for name in list_modalities(model_class) if name in NON_TEXT_INPUTS]
    option = ", which jumok look takes with --image" if "image" in list_modalities(model_class) else ""
    needs = f"It needs {' or '.join(name for name, *_ in others)}{option}. " if others else ""
    _, processor, arguments = others[0] if others else ("", None, "")
    # One processor prepares both.
    if accepts_argument(model_class, "input_ids") and "text" in list_modalities(model_class):
        processor, arguments = "AutoProcessor", ", ".join(filter(None, (arguments, "text=text")))
    prepare = f'inputs = {processor}.from_pretrained(folder)({arguments}, return_tensors="pt")\n    '
    call = "model.generate" if model_class.can_generate() else "model"
    return (
        f"{needs}In Python, use jumok.watch:\n"
        f"    {prepare if processor else ''}with jumok.watch(model) as captures: {call}(**inputs)"
    )


@contextmanager
def convert_errors(folder: Path, model: Any, *, input_name: str | None = None) -> Iterator[None]:
    """Convert exceptions of a model to an InputError that says what the model needs.

    ``input_name`` describes its input; None: a text.
    """
    try:
        yield
    except JumokError:
        raise
    except Exception as error:
        model_class, only_text = type(model), input_name is not None or list_modalities(model) == ["text"]
        raise InputError(
            f"the model in {folder} ({model.config.model_type}) cannot run on "
            f"{input_name or ('this text' if only_text else 'text alone')}: {shorten_message(error)}"
            + ("" if only_text else f". {describe_inputs(model_class)}")
        ) from error
