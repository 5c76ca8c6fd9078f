"""Look into a model in a local Hugging Face folder: an encoder, a decoder, or both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError, JumokError, MissingExtra
from jumok.files import check_symlinks
from jumok.look.capture.watch import watch
from jumok.look.viewer.comparison import Ablations, compare_with_ablation
from jumok.look.viewer.viewer_data import ViewerData

__all__ = ["capture_huggingface_model", "is_huggingface_folder"]

MAX_ERROR_LENGTH = 300  # characters of a message of transformers that are passed on


def is_huggingface_folder(path: Path) -> bool:
    """Whether this looks like a folder that ``save_pretrained`` wrote."""
    return (path / "config.json").is_file()


def capture_huggingface_model(
    folder: Path,
    text: str,
    target: str | None = None,
    *,
    ablations: Ablations | None = None,
    device: str = "auto",
) -> list[ViewerData]:
    """Where the model in ``folder`` attends while it reads ``text``; and once more ``ablations`` some of it.

    A model that makes one text of another also says ``target``, or, without one, what it would answer itself.
    Of a model that compares texts with images or audio, such as CLIP, the text model is run. Nothing is
    fetched, and no code from the folder is run.
    """
    model, tokenizer = _load_model(folder, device)
    reader = _get_text_model(model)
    encoded = _encode_text(folder, reader, tokenizer, text).to(model.device)
    _check_length(model, encoded["input_ids"].shape[1])
    title = text
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            with _convert_errors(folder, model):
                said = _build_decoder_input(model, tokenizer, encoded, target)
            encoded = {**encoded, "decoder_input_ids": said, "use_cache": False}
            title = f"{text}  →  {tokenizer.decode(said[0], skip_special_tokens=True)}"
        elif target is not None:
            raise InputError(f"{folder} holds a model of one text, and --target was given as a second one")

        def look() -> ViewerData:
            with watch(model, tokenizer) as seen, _convert_errors(folder, model):
                reader(**encoded)
            return ViewerData.from_captures(seen, title=title)

        return compare_with_ablation(model, ablations, look)


def _load_model(folder: Path, device: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{folder} is a Hugging Face folder, and transformers is not installed: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    check_symlinks(folder)
    place = _resolve_device(device)
    # Unless it is told not to trust the folder, transformers asks on standard input whether to run its code.
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **local)
        kind = _model_class(folder, config)
        _check_reads_text(folder, kind, config)
        _check_has_tokenizer(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        del local["trust_remote_code"]  # a class of transformers itself has no such option
        with _silence_transformers():  # what is missing is told of below, if it is of use
            model, told = kind.from_pretrained(folder, **local, output_loading_info=True)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{folder} cannot be looked into: {_shorten_message(error)}") from error
    missing = sorted(name for name in told["missing_keys"] if "pooler" not in name)  # of no attention
    if missing:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        warnings.warn(f"{folder} lacks {len(missing)} weights, which are random now: {some}", stacklevel=3)
    return model.eval().to(place), tokenizer


def _model_class(folder: Path, config: Any) -> Any:
    """The class of transformers to load: without a head if there is one, else the one that was saved."""
    import transformers

    both = bool(getattr(config, "is_encoder_decoder", False))
    mapping = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if both else transformers.MODEL_MAPPING
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if type(config) in mapping and not name.endswith("EncoderModel"):  # T5EncoderModel has no decoder
        kind = mapping[type(config)]
        return kind[0] if isinstance(kind, tuple) else kind
    saved = getattr(transformers, name, None)
    if not (isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)):
        raise InputError(
            f"{folder} holds a model ({config.model_type}) whose class, {name or 'not named'} in "
            "config.json, transformers does not have; in Python, load it with its own code, and "
            "jumok.watch shows where it attends"
        )
    return saved


# What models read beside text, by transformers' word for it: its name, and how it is prepared.
NON_TEXT_INPUTS = {
    "image": ("an image", "AutoProcessor", "images=image"),
    "video": ("a video", "AutoProcessor", "videos=video"),
    "audio": ("audio", "AutoFeatureExtractor", "samples, sampling_rate=16000"),
    "time": ("a time series", None, ""),
}


def _list_modalities(model_class: Any) -> list[str]:
    named = model_class.input_modalities
    return [named] if isinstance(named, str) else list(named)


def _check_reads_text(folder: Path, model_class: Any, config: Any) -> None:
    model = f"{folder} holds a model ({config.model_type})"
    if not _accepts_argument(model_class, "input_ids"):
        raise InputError(
            f"{model} that reads no text, and jumok look gives it one. {_describe_inputs(model_class)}"
        )
    if config.is_encoder_decoder and not _accepts_argument(model_class, "decoder_input_ids"):
        raise InputError(
            f"{model} that answers with something else than text, and of encoder-decoders, jumok look shows "
            f"only those that answer with text. {_describe_inputs(model_class)}"
        )


def _accepts_argument(model_class: Any, name: str) -> bool:
    """Whether the model has an argument of this name."""
    return name in inspect.signature(model_class.forward).parameters


def _describe_inputs(model_class: Any) -> str:
    """What a model needs beside text or instead of it, and how to look at it from Python."""
    others = [NON_TEXT_INPUTS[name] for name in _list_modalities(model_class) if name in NON_TEXT_INPUTS]
    needs = f"It needs {' or '.join(name for name, *_ in others)}. " if others else ""
    _, processor, given = others[0] if others else ("", None, "")
    if _accepts_argument(model_class, "input_ids") and "text" in _list_modalities(
        model_class
    ):  # then one processor prepares both
        processor, given = "AutoProcessor", ", ".join(filter(None, (given, "text=text")))
    prepare = f'inputs = {processor}.from_pretrained(folder)({given}, return_tensors="pt")\n    '
    call = "model.generate" if model_class.can_generate() else "model"
    return (
        f"{needs}In Python, jumok.watch shows where it attends:\n"
        f"    {prepare if processor else ''}with jumok.watch(model) as seen: {call}(**inputs)"
    )


TOKENIZER_FILE_PATTERNS = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken", "*.bpe")


def _check_has_tokenizer(folder: Path) -> None:
    """Without its files, transformers builds some tokenizers with an empty vocabulary."""
    if not any(path for pattern in TOKENIZER_FILE_PATTERNS for path in folder.glob(pattern)):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json, vocab.txt or the like), and without it the model "
            "cannot read a text: save it there with tokenizer.save_pretrained(folder)"
        )


def _get_text_model(model: Any) -> Any:
    """What reads the text: the model, or the part of one that compares texts with something else."""
    return model if _list_modalities(model) == ["text"] else getattr(model, "text_model", model)


def _encode_text(folder: Path, text_model: Any, tokenizer: Any, text: str) -> Any:
    """The tokens, as far as the model takes what the tokenizer gives."""
    try:
        encoded = tokenizer(text, return_tensors="pt")
    except Exception as error:
        kind = type(tokenizer).__name__
        raise InputError(
            f"the tokenizer in {folder} ({kind}) takes no plain text: {_shorten_message(error)}"
        ) from error
    for name in encoded.keys() - inspect.signature(text_model.forward).parameters.keys():
        del encoded[name]
    if "input_ids" not in encoded or not encoded["input_ids"].numel():
        raise InputError(f"the tokenizer in {folder} makes no tokens of this text: {text!r}")
    return encoded


@contextmanager
def _convert_errors(folder: Path, model: Any) -> Iterator[None]:
    """Turn what a model raises into an InputError that says what the model needs."""
    try:
        yield
    except JumokError:
        raise
    except Exception as error:
        kind, only_text = type(model), _list_modalities(model) == ["text"]
        raise InputError(
            f"the model in {folder} ({model.config.model_type}) cannot run on "
            f"{'this text' if only_text else 'text alone'}: {_shorten_message(error)}"
            + ("" if only_text else f". {_describe_inputs(kind)}")
        ) from error


def _shorten_message(error: Exception) -> str:
    """The beginning of an error message. Some messages of transformers list all models that exist."""
    words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return words if len(words) <= MAX_ERROR_LENGTH else f"{words[:MAX_ERROR_LENGTH].rsplit(' ', 1)[0]} …"


def _resolve_device(device: str) -> torch.device:
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """While it lasts, transformers says what is an error, and nothing else."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_length(model: Any, num_tokens: int) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and num_tokens > most:
        raise InputError(f"the text has {num_tokens} tokens, and this model takes {most} at most; shorten it")


def _build_decoder_input(model: Any, tokenizer: Any, encoded: Any, target: str | None) -> torch.Tensor:
    """What the decoder reads, ``(1, T)``: the beginning, and all it says but the end."""
    if target is None:
        said: torch.Tensor = model.generate(**encoded, do_sample=False, num_beams=1)
        return said[:, :-1] if said.shape[1] > 1 else said
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    start = model.generation_config.decoder_start_token_id
    if start is None:
        raise InputError(
            "config.json names no decoder_start_token_id, with which --target has to begin: set it"
        )
    begin = torch.full_like(labels[:, :1], start)
    return torch.cat([begin, labels[:, :-1]], dim=1)
