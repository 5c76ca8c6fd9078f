"""Capture of the attention of a Hugging Face model: encoder, decoder, or both."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import decode_ids
from jumok.look.capture.watch import watch
from jumok.look.huggingface.audio_capture import AudioRequest, capture_recording
from jumok.look.huggingface.chat_turns import find_chat_turns
from jumok.look.huggingface.folder import find_model_folder
from jumok.look.huggingface.loading import (
    accepts_argument,
    convert_errors,
    is_language_model,
    load_model,
    silence_transformers,
)
from jumok.look.huggingface.memory import check_memory
from jumok.look.huggingface.text_input import check_length, encode_text, get_text_model, shorten_title
from jumok.look.viewer.comparison import Ablations, compare_with_ablation
from jumok.look.viewer.token_marks import LabelledSpan
from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer


def capture_huggingface_model(
    model_name: str | Path,
    text: str | None = None,
    target: str | None = None,
    *,
    audio: str | Path | None = None,
    generate: int | None = None,
    chat: bool = False,
    layers: str | None = None,
    ablations: Ablations | None = None,
    device: str = "auto",
) -> list[ViewerData]:
    """Capture the attention of a model for ``text``; with ``ablations``, also a second time.

    The model is a local folder or a name on the Hugging Face hub. With ``generate``, it continues the text by at
    most so many tokens, by greedy search, and the attention of the text and its continuation is captured in one
    pass, so that the last token has a row too. With ``chat``, the text becomes the user's turn in the tokenizer's
    chat template.

    ``layers`` is a name in which * matches anything: only these layers are captured, which saves memory. A text that
    does not fit into memory is rejected before the model runs.

    With ``audio``, a WAV, FLAC or OGG file, the model hears a recording, and the text is the prompt of a language model
    (see :mod:`jumok.look.huggingface.audio_capture`).

    An encoder-decoder also gets ``target``, which defaults to its own output. Of a model that compares texts
    with images or audio, such as CLIP, the text model is run. No code from the folder is run, and pickled
    weights are not read.

    >>> (data,) = capture_huggingface_model("Qwen/Qwen3-0.6B", "The cat sat", generate=20)  # doctest: +SKIP
    >>> ViewerWidget(data)  # doctest: +SKIP
    """
    if audio is not None:
        folder = find_model_folder(model_name)
        request = AudioRequest(folder, Path(audio), text, target, generate, chat, layers)
        return capture_recording(request, ablations=ablations, device=device)
    text = text or ""
    _check_arguments(text, target, generate)
    folder = find_model_folder(model_name)
    generator, tokenizer = load_model(folder, device, for_generation=generate is not None)
    is_encoder_decoder = generator.config.is_encoder_decoder
    # The output layer of a long text would need more memory than its attention.
    model = generator.base_model if generate is not None and not is_encoder_decoder else generator
    text_model = get_text_model(model)
    encoded = encode_text(folder, text_model, tokenizer, text, chat=chat, add_reply=generate is not None)
    encoded = encoded.to(model.device)
    num_tokens = encoded["input_ids"].shape[1]
    check_length(model, num_tokens, 0 if is_encoder_decoder else generate or 0)
    check_memory(model, num_tokens + (0 if is_encoder_decoder else generate or 0), layers)
    title, first_generated = shorten_title(text), None
    outputs: list[str] | None = None
    turns = find_chat_turns(tokenizer, text, encoded["input_ids"], add_reply=generate is not None) if chat else []
    with torch.inference_mode():
        if is_encoder_decoder:
            with convert_errors(folder, model):
                decoder_ids, output_ids = build_decoder_input(model, tokenizer, encoded, target, generate)
            encoded = {**encoded, "decoder_input_ids": decoder_ids}
            title = f"{title}  →  {shorten_title(tokenizer.decode(output_ids[0], skip_special_tokens=True))}"
            first_generated = None if target is not None else 1  # after the start token
            outputs = decode_ids(tokenizer, output_ids[0].tolist())
        elif target is not None:
            raise InputError(f"{folder} holds a model of one text, and --target was given as a second one")
        elif generate is None:
            if is_language_model(model.config):
                outputs = decode_ids(tokenizer, encoded["input_ids"][0, 1:].tolist())
        else:
            with convert_errors(folder, model):
                output_ids = generate_tokens(generator, encoded, generate)
            encoded = {"input_ids": output_ids}
            title = (
                f"{title}  →  {shorten_title(tokenizer.decode(output_ids[0, num_tokens:], skip_special_tokens=True))}"
            )
            first_generated = num_tokens
            outputs = decode_ids(tokenizer, output_ids[0, 1:].tolist())

        no_cache = {"use_cache": False} if accepts_argument(type(text_model), "use_cache") else {}

        def build_viewer_data() -> ViewerData:
            with watch(model, tokenizer, layers) as captures, convert_errors(folder, model):
                text_model(**encoded, **no_cache)
            data = ViewerData.from_captures(captures, title=title)
            return mark_tokens(data, model, first_generated, outputs, turns)

        return compare_with_ablation(model, ablations, build_viewer_data)


def _check_arguments(text: str, target: str | None, generate: int | None) -> None:
    if not text.strip():
        raise InputError("the text is empty; give a text, or a file that has one")
    if generate is not None and generate < 1:
        raise InputError(f"--generate {generate}: expected a number of tokens from 1 on")
    if generate is not None and target is not None:
        raise InputError("--generate and --target were given: either the model writes the output, or it is given")


def generate_tokens(model: Any, encoded: Any, num_tokens: int | None) -> torch.Tensor:
    """Generate at most ``num_tokens`` tokens by greedy search ``(1, L)``; None: the model's own limit."""
    limit = {} if num_tokens is None else {"max_new_tokens": num_tokens}
    with silence_transformers(), warnings.catch_warnings():  # settings of sampling, which greedy search ignores
        warnings.filterwarnings("ignore", message="Using the model-agnostic default `max_length`")
        output_ids: torch.Tensor = model.generate(**encoded, do_sample=False, num_beams=1, **limit)
    return output_ids


def build_decoder_input(
    model: Any, tokenizer: Any, encoded: Any, target: str | None, generate: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoder input ``(1, T)``, which is the start token and the output without its last token, and the
    output ``(1, T)``.
    """
    if target is None:
        check_length(model, 1, (generate or 1) - 1)
        output_ids = generate_tokens(model, encoded, generate)
        return output_ids[:, :-1] if output_ids.shape[1] > 1 else output_ids, output_ids[:, 1:]
    labels = tokenizer(text_target=target, return_tensors="pt")["input_ids"].to(model.device)
    if not labels.numel():
        raise InputError(f"the tokenizer returns no tokens for --target {target!r}; give a text, or leave it out")
    start = model.generation_config.decoder_start_token_id
    if start is None:
        raise InputError("config.json names no decoder_start_token_id, with which --target has to begin: add it")
    start_ids = torch.full_like(labels[:, :1], start)
    return torch.cat([start_ids, labels[:, :-1]], dim=1), labels


def mark_tokens(
    data: ViewerData,
    model: Any,
    first: int | None,
    outputs: Sequence[str] | None = None,
    turns: Sequence[LabelledSpan] = (),
) -> ViewerData:
    """Mark the tokens from ``first`` on as generated, what each query of a decoder produced, and the turns of a chat.

    If the model has an encoder too, the first and the second are marked in the decoder, the turns in the encoder.
    """
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)

    def mark(layer: ViewerLayer) -> ViewerLayer:
        is_decoder, is_cross = layer.name.startswith(prefix), layer.kind == "cross"
        turns_of_keys = _fit_turns(turns, layer.shape[1]) if is_cross or not (is_decoder and prefix) else ()
        layer = replace(layer, spans=(() if is_cross else turns_of_keys, turns_of_keys))
        if not is_decoder:
            return layer
        if first is not None:
            # A row of cross-attention shows what it produced, if that is known.
            first_row = first if outputs is None else first - 1
            layer = replace(layer, first_generated=(first_row, None) if is_cross else (first, first))
        if outputs is not None and layer.kind in ("cross", "causal self"):
            # The last token of a text has no successor.
            layer = replace(layer, row_outputs=[*outputs, ""][: layer.shape[0]])
        return layer

    return data.with_layers([mark(layer) for layer in data.layers])


def _fit_turns(turns: Sequence[LabelledSpan], num_tokens: int) -> tuple[LabelledSpan, ...]:
    """Return the turns of a prompt and its continuation: the last one ends with it."""
    fitted = [*turns[:-1], turns[-1]._replace(stop=num_tokens)] if turns else []
    return tuple(turn for turn in fitted if turn.start < turn.stop)
