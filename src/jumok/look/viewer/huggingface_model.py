"""Capture of the attention of a Hugging Face model: encoder, decoder, or both."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError, JumokError, MissingExtra
from jumok.files import check_symlinks
from jumok.look.capture.watch import watch
from jumok.look.viewer.comparison import Ablations, compare_with_ablation
from jumok.look.viewer.huggingface_folder import check_weights, find_model_folder, has_tokenizer
from jumok.look.viewer.viewer_data import ViewerData

MAX_TITLE_LENGTH = 160  # characters of a text in the title
MAX_ERROR_LENGTH = 300  # maximum number of characters of a transformers error message


def capture_huggingface_model(
    model_name: str | Path,
    text: str,
    target: str | None = None,
    *,
    generate: int | None = None,
    chat: bool = False,
    ablations: Ablations | None = None,
    device: str = "auto",
) -> list[ViewerData]:
    """Capture the attention of a model for ``text``; with ``ablations``, also a second time.

    The model is a local folder or a name on the Hugging Face hub. With ``generate``, it continues the text by at
    most so many tokens, by greedy search, and the attention of the text and its continuation is captured in one
    pass, so that the last token has a row too. With ``chat``, the text becomes the user's turn in the tokenizer's
    chat template.

    An encoder-decoder also gets ``target``, which defaults to its own output. Of a model that compares texts
    with images or audio, such as CLIP, the text model is run. No code from the folder is run, and pickled
    weights are not read.

    >>> (data,) = capture_huggingface_model("Qwen/Qwen3-0.6B", "The cat sat", generate=20)  # doctest: +SKIP
    >>> ViewerWidget(data)  # doctest: +SKIP
    """
    _check_arguments(text, target, generate)
    folder = find_model_folder(model_name)
    generator, tokenizer = _load_model(folder, device, for_generation=generate is not None)
    is_encoder_decoder = generator.config.is_encoder_decoder
    # The output layer of a long text would need more memory than its attention.
    model = generator.base_model if generate is not None and not is_encoder_decoder else generator
    text_model = _get_text_model(model)
    encoded = _encode_text(folder, text_model, tokenizer, text, chat=chat, add_reply=generate is not None)
    encoded = encoded.to(model.device)
    num_tokens = encoded["input_ids"].shape[1]
    _check_length(model, num_tokens, 0 if is_encoder_decoder else generate or 0)
    title, first_generated = _shorten_title(text), None
    with torch.inference_mode():
        if is_encoder_decoder:
            with _convert_errors(folder, model):
                decoder_ids = _build_decoder_input(model, tokenizer, encoded, target, generate)
            encoded = {**encoded, "decoder_input_ids": decoder_ids}
            title = f"{title}  →  {_shorten_title(tokenizer.decode(decoder_ids[0], skip_special_tokens=True))}"
            first_generated = None if target is not None else 1  # after the start token
        elif target is not None:
            raise InputError(f"{folder} holds a model of one text, and --target was given as a second one")
        elif generate is not None:
            with _convert_errors(folder, model):
                output_ids = _generate(generator, encoded, generate)
            encoded = {"input_ids": output_ids}
            title = (
                f"{title}  →  {_shorten_title(tokenizer.decode(output_ids[0, num_tokens:], skip_special_tokens=True))}"
            )
            first_generated = num_tokens

        no_cache = {"use_cache": False} if _accepts_argument(type(text_model), "use_cache") else {}

        def build_viewer_data() -> ViewerData:
            with watch(model, tokenizer) as captures, _convert_errors(folder, model):
                text_model(**encoded, **no_cache)
            data = ViewerData.from_captures(captures, title=title)
            return data if first_generated is None else _mark_generated(data, model, first_generated)

        return compare_with_ablation(model, ablations, build_viewer_data)


def _check_arguments(text: str, target: str | None, generate: int | None) -> None:
    if not text.strip():
        raise InputError("the text is empty; give a text, or a file that has one")
    if generate is not None and generate < 1:
        raise InputError(f"--generate {generate}: expected a number of tokens from 1 on")
    if generate is not None and target is not None:
        raise InputError("--generate and --target were given: either the model writes the output, or it is given")


def _load_model(folder: Path, device: str, *, for_generation: bool) -> tuple[Any, Any]:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"{folder} is a Hugging Face folder, and transformers is not installed: pip install transformers"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    check_symlinks(folder)
    target_device = _resolve_device(device)
    # Unless trust_remote_code is False, transformers asks on standard input whether to run the folder's code.
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **local)
        model_class = _select_model_class(folder, config)
        _check_reads_text(folder, model_class, config)
        if for_generation and not _accepts_argument(model_class, "decoder_input_ids"):
            model_class = _select_causal_class(folder, config)
        _check_has_tokenizer(folder)
        check_weights(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        del local["trust_remote_code"]  # classes of transformers do not take this option
        with _silence_transformers():  # missing weights are reported below, if they matter
            model, loading_info = model_class.from_pretrained(
                folder, **local, use_safetensors=True, output_loading_info=True
            )
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{folder} cannot be loaded: {_shorten_message(error)}") from error
    missing = sorted(name for name in loading_info["missing_keys"] if "pooler" not in name)  # no attention
    if missing:
        listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        warnings.warn(f"{folder} lacks {len(missing)} weights, which are random: {listed}", stacklevel=3)
    return model.eval().to(target_device), tokenizer


def _select_model_class(folder: Path, config: Any) -> Any:
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
    import transformers

    # Encoders such as BERT have a causal variant, too, which only a few checkpoints are.
    is_encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or is_encoder:
        raise InputError(
            f"{folder} holds a model ({config.model_type}) without a decoder, which cannot continue a text: leave "
            "--generate out, or give a causal language model or an encoder-decoder"
        )
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


# Non-text inputs, by transformers' name for the modality: the description, and how they are prepared.
NON_TEXT_INPUTS = {
    "image": ("an image", "AutoProcessor", "images=image"),
    "video": ("a video", "AutoProcessor", "videos=video"),
    "audio": ("audio", "AutoFeatureExtractor", "samples, sampling_rate=16000"),
    "time": ("a time series", None, ""),
}


def _list_modalities(model_class: Any) -> list[str]:
    modalities = model_class.input_modalities
    return [modalities] if isinstance(modalities, str) else list(modalities)


def _check_reads_text(folder: Path, model_class: Any, config: Any) -> None:
    model = f"{folder} holds a model ({config.model_type})"
    if not _accepts_argument(model_class, "input_ids"):
        raise InputError(
            f"{model} that reads no text, and jumok look only passes text. {_describe_inputs(model_class)}"
        )
    if config.is_encoder_decoder and not _accepts_argument(model_class, "decoder_input_ids"):
        raise InputError(
            f"{model} that does not output text; jumok look only supports encoder-decoders that do. "
            f"{_describe_inputs(model_class)}"
        )


def _accepts_argument(model_class: Any, name: str) -> bool:
    """Return whether the model takes an argument of this name."""
    return name in inspect.signature(model_class.forward).parameters


def _describe_inputs(model_class: Any) -> str:
    """Describe what a model needs beside or instead of text, and how to capture it in Python."""
    others = [NON_TEXT_INPUTS[name] for name in _list_modalities(model_class) if name in NON_TEXT_INPUTS]
    needs = f"It needs {' or '.join(name for name, *_ in others)}. " if others else ""
    _, processor, arguments = others[0] if others else ("", None, "")
    # One processor prepares both.
    if _accepts_argument(model_class, "input_ids") and "text" in _list_modalities(model_class):
        processor, arguments = "AutoProcessor", ", ".join(filter(None, (arguments, "text=text")))
    prepare = f'inputs = {processor}.from_pretrained(folder)({arguments}, return_tensors="pt")\n    '
    call = "model.generate" if model_class.can_generate() else "model"
    return (
        f"{needs}In Python, use jumok.watch:\n"
        f"    {prepare if processor else ''}with jumok.watch(model) as captures: {call}(**inputs)"
    )


def _check_has_tokenizer(folder: Path) -> None:
    """Check for tokenizer files. Without them, transformers builds tokenizers with an empty vocabulary."""
    if not has_tokenizer(folder):
        raise InputError(
            f"{folder} has no tokenizer (tokenizer.json, vocab.txt or the like), and without it the model "
            "cannot read a text: save it there with tokenizer.save_pretrained(folder)"
        )


def _get_text_model(model: Any) -> Any:
    """Return the model that reads the text: the model itself, or a part of a multimodal model."""
    return model if _list_modalities(model) == ["text"] else getattr(model, "text_model", model)


def _encode_text(
    folder: Path, text_model: Any, tokenizer: Any, text: str, *, chat: bool = False, add_reply: bool = False
) -> Any:
    """Tokenize the text. Returns the fields that the model accepts.

    With ``chat``, the text is the user's turn, and ``add_reply`` begins the model's turn.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer in {folder} has no chat template, which --chat needs: give a chat model, "
            "or leave --chat out"
        )
    try:
        if chat:
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=add_reply,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            encoded = tokenizer(text, return_tensors="pt")
    except Exception as error:
        raise InputError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) takes no {'chat' if chat else 'plain text'}: "
            f"{_shorten_message(error)}"
        ) from error
    for name in encoded.keys() - inspect.signature(text_model.forward).parameters.keys():
        del encoded[name]
    if "input_ids" not in encoded or not encoded["input_ids"].numel():
        raise InputError(f"the tokenizer in {folder} returns no tokens for this text: {text!r}")
    return encoded


@contextmanager
def _convert_errors(folder: Path, model: Any) -> Iterator[None]:
    """Convert exceptions of a model to an InputError that says what the model needs."""
    try:
        yield
    except JumokError:
        raise
    except Exception as error:
        model_class, only_text = type(model), _list_modalities(model) == ["text"]
        raise InputError(
            f"the model in {folder} ({model.config.model_type}) cannot run on "
            f"{'this text' if only_text else 'text alone'}: {_shorten_message(error)}"
            + ("" if only_text else f". {_describe_inputs(model_class)}")
        ) from error


def _shorten_message(error: Exception) -> str:
    """Return the beginning of an error message. Some messages of transformers list all existing models."""
    words = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return words if len(words) <= MAX_ERROR_LENGTH else f"{words[:MAX_ERROR_LENGTH].rsplit(' ', 1)[0]} …"


def _resolve_device(device: str) -> torch.device:
    resolved = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return torch.empty(0, device=resolved).device
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress all messages of transformers except errors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _check_length(model: Any, num_tokens: int, num_generated: int = 0) -> None:
    max_tokens = _get_max_tokens(model)
    if max_tokens is None or num_tokens + num_generated <= max_tokens:
        return
    if num_tokens >= max_tokens:
        raise InputError(f"the text has {num_tokens} tokens, and this model takes {max_tokens} at most; shorten it")
    raise InputError(
        f"the text has {num_tokens} tokens, --generate {num_generated} makes {num_tokens + num_generated}, and this "
        f"model takes {max_tokens} at most; shorten the text, or --generate {max_tokens - num_tokens}"
    )


def _get_max_tokens(model: Any) -> int | None:
    """Return the maximum number of tokens; None if there is none."""
    for name, module in model.named_modules():
        # The positions of RoBERTa begin after that of padding.
        is_table = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
        if is_table and module.padding_idx is not None:
            return int(module.num_embeddings - module.padding_idx - 1)
    max_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return max_tokens


def _generate(model: Any, encoded: Any, num_tokens: int | None) -> torch.Tensor:
    """Generate at most ``num_tokens`` tokens by greedy search ``(1, L)``; None: the model's own limit."""
    limit = {} if num_tokens is None else {"max_new_tokens": num_tokens}
    with _silence_transformers():  # settings of sampling, which greedy search ignores
        output_ids: torch.Tensor = model.generate(**encoded, do_sample=False, num_beams=1, **limit)
    return output_ids


def _build_decoder_input(
    model: Any, tokenizer: Any, encoded: Any, target: str | None, generate: int | None
) -> torch.Tensor:
    """Return the decoder input ``(1, T)``: the start token and the output without its last token."""
    if target is None:
        _check_length(model, 1, (generate or 1) - 1)
        output_ids = _generate(model, encoded, generate)
        return output_ids[:, :-1] if output_ids.shape[1] > 1 else output_ids
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    start = model.generation_config.decoder_start_token_id
    if start is None:
        raise InputError("config.json names no decoder_start_token_id, with which --target has to begin: add it")
    start_ids = torch.full_like(labels[:, :1], start)
    return torch.cat([start_ids, labels[:, :-1]], dim=1)


def _mark_generated(data: ViewerData, model: Any, first: int) -> ViewerData:
    """Mark the tokens from ``first`` on as generated, in the decoder if the model has an encoder too."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)
    return data.with_layers(
        [
            replace(layer, first_generated=(first, None if layer.kind == "cross" else first))
            if layer.name.startswith(prefix)
            else layer
            for layer in data.layers
        ]
    )


def _shorten_title(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE_LENGTH else f"{line[:MAX_TITLE_LENGTH].rstrip()} …"
