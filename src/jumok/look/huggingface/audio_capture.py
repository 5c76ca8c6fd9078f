"""Capture of what an audio model hears: of an encoder, an encoder-decoder, or a language model with audio tokens.

The layers of the viewer data show the recording alone, without the padding of the model. The rows of attention to the
recording are the words said: row n is the query from which token n was predicted. (The other layers of a decoder keep
the tokens that were read.) The last layer is a mean: of the alignment heads that ``generation_config.json`` names, as
Whisper's does, or else of all heads in the last half of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError
from jumok.look.capture.axis_tokens import TokenLookup, decode_tokens
from jumok.look.capture.watch import watch
from jumok.look.huggingface.audio_frames import FrameTracer
from jumok.look.huggingface.audio_input import (
    Recording,
    extract_features,
    load_feature_extractor,
    load_recording,
    select_audio_class,
    select_model_inputs,
)
from jumok.look.huggingface.loading import (
    accepts_argument,
    check_has_tokenizer,
    convert_errors,
    load_config,
    load_from_folder,
    load_weights,
    shorten_message,
    silence_transformers,
)
from jumok.look.huggingface.text_input import shorten_title
from jumok.look.viewer.attended_audio import AttendedAudio, AudioFrames
from jumok.look.viewer.comparison import Ablations, compare_with_ablation
from jumok.look.viewer.derived_layers import PatchGrid, average_layers, average_patches, select_part
from jumok.look.viewer.viewer_data import Opening, ViewerData, ViewerLayer


@dataclass(frozen=True, eq=False)
class SpokenTokens:
    """The tokens that a decoder says, by the query that predicts each of them."""

    labels: list[str]
    first_row: int = 0  # the query that predicts the first of them
    num_given: int | None = None  # how many of them were given; the others were generated. None: all were given

    @property
    def first_generated(self) -> tuple[int | None, None]:
        """The first row that predicts a generated token."""
        return self.num_given, None


@dataclass(frozen=True, eq=False)
class AudioRun:
    """What a forward pass takes and how its result is shown."""

    inputs: dict[str, Any]
    title: str
    spoken: SpokenTokens | None = None
    audio_tokens: range | None = None  # of a language model: the positions that are frames
    num_given: int | None = None  # tokens that a decoder reads and did not generate; None: all


@dataclass(frozen=True, eq=False)
class AudioRequest:
    """What to capture: the model, the recording and the options of ``jumok look``."""

    folder: Path
    path: Path
    text: str | None = None  # the prompt of a language model
    target: str | None = None  # what an encoder-decoder says; None: its own output
    generate: int | None = None  # the maximum number of tokens of that output
    chat: bool = False
    layers: str | None = None  # the name of the layers to capture, in which * matches anything


def capture_recording(
    request: AudioRequest, *, ablations: Ablations | None = None, device: str = "auto"
) -> list[ViewerData]:
    """Capture the attention of an audio model for a recording; with ``ablations``, also a second time."""
    folder, path = request.folder, request.path
    config = load_config(folder)
    model_class = select_audio_class(folder, config)
    is_encoder_decoder = accepts_argument(model_class, "decoder_input_ids")
    is_language_model = not is_encoder_decoder and accepts_argument(model_class, "input_ids")
    _check_options(request, config.model_type, is_encoder_decoder, is_language_model)
    processor = tokenizer = None
    if is_language_model:
        processor = load_from_folder(folder, "AutoProcessor")
        extractor = getattr(processor, "feature_extractor", None) or load_feature_extractor(folder)
    else:
        extractor = load_feature_extractor(folder)
    if is_encoder_decoder or is_language_model:
        check_has_tokenizer(folder)
        tokenizer = load_from_folder(folder, "AutoTokenizer")
    recording = load_recording(folder, path, extractor)
    model = load_weights(folder, model_class, device)
    with torch.inference_mode(), convert_errors(folder, model, input_name="this recording"):
        if is_language_model:
            run = _prepare_language_model(request, model, processor, tokenizer, recording)
        else:
            features = extract_features(folder, extractor, recording.waveform)
            recording.check_is_complete(features[extractor.model_input_names[0]], folder)
            inputs = select_model_inputs(model, features)
            run = AudioRun(inputs, path.name)
            if is_encoder_decoder:
                run = _prepare_encoder_decoder(request, model, tokenizer, inputs)
        features = next(value for name, value in run.inputs.items() if name in ("input_features", "input_values"))

        def build_viewer_data() -> ViewerData:
            tracer = recording.build_tracer(features)
            no_cache = {"use_cache": False} if accepts_argument(type(model), "use_cache") else {}
            with watch(model, tokenizer, request.layers) as captures, tracer.trace(model):
                model(**run.inputs, **no_cache)
            return _AudioViewBuilder(model, recording, tracer, run).build(ViewerData.from_captures(captures))

        return compare_with_ablation(model, ablations, build_viewer_data)


def _check_options(request: AudioRequest, model_type: str, is_encoder_decoder: bool, is_language_model: bool) -> None:
    model = f"{request.folder} holds a model ({model_type})"
    if request.generate is not None and request.generate < 1:
        raise InputError(f"--generate {request.generate}: expected a number of tokens from 1 on")
    if request.generate is not None and request.target is not None:
        raise InputError("--generate and --target were given: either the model writes the output, or it is given")
    if request.text is not None and not is_language_model:
        advice = "give what it says with --target" if is_encoder_decoder else "leave it out"
        raise InputError(
            f"{model} that hears a recording and reads no text, and the text {request.text[:40]!r} was given; {advice}"
        )
    if request.target is not None and not is_encoder_decoder:
        raise InputError(f"{model} without a decoder of its own, and --target was given; leave it out")
    if request.generate is not None and not (is_encoder_decoder or is_language_model):
        raise InputError(f"{model} that only encodes a recording and writes no text; leave --generate out")
    if request.chat and not is_language_model:
        raise InputError(f"{model} that is no chat model; leave --chat out")


# ------------------------------------------------------------------------------------------------ encoder-decoders


def _prepare_encoder_decoder(request: AudioRequest, model: Any, tokenizer: Any, inputs: dict[str, Any]) -> AudioRun:
    prompt_ids = _generate(model, inputs, 1)[:, :-1]  # the start token; Whisper's also name language and task
    if request.target is None:
        output_ids = _generate(model, inputs, request.generate)
    else:
        labels = tokenizer(text_target=request.target, add_special_tokens=False)["input_ids"]
        if not labels:
            raise InputError(f"the tokenizer in {request.folder} returns no tokens for this text: {request.target!r}")
        end = tokenizer.eos_token_id
        target_ids = torch.tensor([labels if end is None else [*labels, end]], device=prompt_ids.device)
        output_ids = torch.cat([prompt_ids, target_ids], dim=1)
    num_prompt = prompt_ids.shape[1] if request.target is None else None
    return AudioRun(
        {**inputs, "decoder_input_ids": output_ids[:, :-1]},
        _build_title(request, tokenizer, output_ids[0]),
        SpokenTokens(
            _decode_tokens(tokenizer, output_ids[:, 1:]), num_given=None if num_prompt is None else num_prompt - 1
        ),
        num_given=num_prompt,
    )


def _generate(model: Any, inputs: dict[str, Any], num_tokens: int | None) -> torch.Tensor:
    """Generate at most ``num_tokens`` tokens by greedy search, after those that every output begins with ``(1, L)``."""
    limit = {} if num_tokens is None else {"max_new_tokens": num_tokens}
    with silence_transformers():  # settings of sampling, which greedy search ignores
        # Without return_dict_in_generate, Whisper leaves the first tokens out.
        output = model.generate(**inputs, do_sample=False, num_beams=1, return_dict_in_generate=True, **limit)
    sequences: torch.Tensor = output["sequences"]
    return sequences


# ------------------------------------------------------------------------------------------------- language models


def _prepare_language_model(
    request: AudioRequest, model: Any, processor: Any, tokenizer: Any, recording: Recording
) -> AudioRun:
    prompt = _build_prompt(request, processor)
    try:
        encoded = processor(
            text=[prompt], audio=[recording.waveform], sampling_rate=recording.sample_rate, return_tensors="pt"
        )
    except Exception as error:
        raise InputError(
            f"the processor in {request.folder} ({type(processor).__name__}) cannot read the recording: "
            f"{shorten_message(error)}"
        ) from error
    inputs = select_model_inputs(model, encoded)
    recording.check_is_complete(inputs["input_features"], request.folder)
    ids = inputs["input_ids"]
    audio_tokens = _find_audio_tokens(request.folder, model, ids[0])
    num_prompt = ids.shape[1] if request.generate is not None else None
    if request.generate is not None:
        ids = _generate(model, inputs, request.generate)
        inputs = {**inputs, "input_ids": ids}
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(ids)
    end = audio_tokens.stop
    if end == ids.shape[1]:
        raise InputError(
            'no text follows the recording; give a prompt, as in `jumok look MODEL "What is said?" --audio FILE`, or '
            "--generate N"
        )
    spoken = SpokenTokens(
        _decode_tokens(tokenizer, ids[:, end:]), end - 1, None if num_prompt is None else num_prompt - end
    )
    return AudioRun(inputs, _build_title(request, tokenizer, ids[0, end:]), spoken, audio_tokens, num_prompt)


def _build_prompt(request: AudioRequest, processor: Any) -> str:
    """Return the text of a prompt, with a placeholder for the recording before it."""
    token = getattr(processor, "audio_token", None)
    if not token:
        raise InputError(
            f"the processor in {request.folder} ({type(processor).__name__}) names no audio_token, the placeholder of "
            "a recording in a prompt; use jumok.watch in Python"
        )
    if not request.chat:
        marks = [getattr(processor, f"audio_{name}_token", None) or "" for name in ("bos", "eos")]
        return f"{marks[0]}{token}{marks[1]}{request.text or ''}"
    content = [{"type": "audio", "audio": request.path.name}]
    if request.text:
        content.append({"type": "text", "text": request.text})
    try:
        prompt: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=request.generate is not None, tokenize=False
        )
    except Exception as error:
        raise InputError(
            f"the processor in {request.folder} has no chat template for recordings, which --chat needs: "
            f"{shorten_message(error)}"
        ) from error
    if prompt.count(token) != 1:
        raise InputError(f"the chat template in {request.folder} leaves the recording out; leave --chat out")
    return prompt


def _find_audio_tokens(folder: Path, model: Any, ids: torch.Tensor) -> range:
    """Return the positions of the audio tokens among token ids ``(L,)``."""
    token_id = getattr(model.config, "audio_token_id", None)
    if token_id is None:
        token_id = getattr(model.config, "audio_token_index", None)
    positions = [] if token_id is None else (ids == token_id).nonzero()[:, 0].tolist()
    if not positions or positions[-1] - positions[0] + 1 != len(positions):
        raise InputError(
            f"the prompt of {folder} has {len(positions)} audio tokens (config.audio_token_id={token_id}) that are not "
            "next to each other; expected one run of them; use jumok.watch in Python"
        )
    return range(positions[0], positions[-1] + 1)


# ----------------------------------------------------------------------------------------------------- viewer data


@dataclass(eq=False)
class _AudioViewBuilder:
    """Builds viewer data: layers on the recording, with the seconds of their frames."""

    model: Any
    recording: Recording
    tracer: FrameTracer
    run: AudioRun
    key_frames: dict[str, AudioFrames] = field(default_factory=dict)
    query_frames: dict[str, AudioFrames] = field(default_factory=dict)

    def build(self, data: ViewerData) -> ViewerData:
        decoder_prefix = self._find_decoder_prefix()
        layers: list[ViewerLayer] = []
        listening: list[ViewerLayer] = []
        for layer in data.layers:
            if decoder_prefix is None or not layer.name.startswith(decoder_prefix):
                layers.append(self._place_encoder_layer(layer))
                if (derived := self._average_patches(layer)) is not None:
                    layers += derived
                    listening.append(derived[1])
            elif layer.kind == "cross":
                layers.append(self._place_cross_layer(layer))
                listening += layers[-1:] if layers[-1].name in self.key_frames else []
            else:
                layers.append(self._label_decoder_layer(layer))
                if (part := self._select_recording(layer)) is not None:
                    layers.append(part)
                    listening.append(part)
        if listening:
            mean = self._average(listening)
            self.key_frames[mean.name] = self.key_frames[listening[-1].name]
            layers.append(mean)
        if not self.key_frames:
            raise InputError(
                "no captured layer has frames of the recording as its keys, so there is nothing to show over time; use "
                "jumok.watch in Python"
            )
        audio = AttendedAudio.from_waveform(
            self.recording.waveform, self.recording.sample_rate, self.key_frames, self.query_frames
        )
        opening = Opening(len(layers) - 1, None) if listening else None
        return replace(data, layers=tuple(layers), title=self.run.title, audio=audio, opening=opening)

    def _find_decoder_prefix(self) -> str | None:
        """Return the beginning of the names of a decoder's layers; None if there is no decoder."""
        if self.run.spoken is None:
            return None
        decoder = self.model.get_decoder()
        return next(f"{name}." if name else "" for name, module in self.model.named_modules() if module is decoder)

    def _place_encoder_layer(self, layer: ViewerLayer) -> ViewerLayer:
        frames = self.recording.place_frames(self.tracer, layer.shape[1])
        if frames is None or layer.shape[0] != layer.shape[1] or layer.kind == "channel":
            return layer
        self.key_frames[layer.name] = self.query_frames[layer.name] = frames
        span, times = slice(0, frames.num_frames), frames.format_times()
        return select_part(layer, span, span, row_labels=times, col_labels=times)

    def _average_patches(self, layer: ViewerLayer) -> tuple[ViewerLayer, ViewerLayer] | None:
        """Return the layer over time if its positions are patches of a spectrogram, as in AST; else None."""
        if self.tracer.patches is None or layer.name in self.key_frames or layer.shape[0] != layer.shape[1]:
            return None
        num_bands, num_times, frame_grid = self.tracer.patches
        prefix_names = [
            name.rpartition(".")[2] for name, _ in self.model.named_parameters() if name.endswith("_token")
        ]  # in the order in which they precede the patches
        grid = PatchGrid(len(prefix_names), num_bands, num_times)
        if layer.shape[1] != grid.num_positions or not prefix_names:
            return None
        recording = self.recording
        frames = recording.convert_grid(frame_grid, num_times)
        prefix, times = average_patches(layer, grid, frames.num_frames)
        labels = frames.format_times()
        self.key_frames[prefix.name] = self.key_frames[times.name] = self.query_frames[times.name] = frames
        return (
            replace(times, row_labels=labels, col_labels=labels),
            replace(
                prefix,
                kind="cross",
                row_labels=[f"[{name.removesuffix('_token')}]" for name in prefix_names],
                col_labels=labels,
            ),
        )

    def _place_cross_layer(self, layer: ViewerLayer) -> ViewerLayer:
        frames, spoken = self.recording.place_frames(self.tracer, layer.shape[1]), self.run.spoken
        if frames is None or spoken is None or len(spoken.labels) != layer.shape[0]:
            return layer
        self.key_frames[layer.name] = frames
        part = select_part(
            layer,
            slice(0, layer.shape[0]),
            slice(0, frames.num_frames),
            row_labels=spoken.labels,
            col_labels=frames.format_times(),
        )
        return replace(part, first_generated=spoken.first_generated)

    def _label_decoder_layer(self, layer: ViewerLayer) -> ViewerLayer:
        """Mark generated tokens, and label audio tokens with their times."""
        labels, tokens = layer.row_labels, self.run.audio_tokens
        if tokens is not None and labels is not None and layer.shape[0] == layer.shape[1] == len(labels):
            times = [f"<{time}>" for time in self._place_audio_tokens(tokens).format_times()]
            shown = range(tokens.start, tokens.start + len(times))
            labels = [*labels[: shown.start], *times, *labels[shown.stop :]]
            layer = replace(layer, row_labels=labels, col_labels=labels)
        return replace(layer, first_generated=(self.run.num_given, self.run.num_given))

    def _select_recording(self, layer: ViewerLayer) -> ViewerLayer | None:
        """Return the part of a language model's layer in which the words said attend to the recording."""
        tokens, spoken = self.run.audio_tokens, self.run.spoken
        if tokens is None or spoken is None or layer.shape != (self.run.inputs["input_ids"].shape[1],) * 2:
            return None
        frames, name = self._place_audio_tokens(tokens), f"{layer.name} (recording)"
        self.key_frames[name] = frames
        part = select_part(
            layer,
            slice(spoken.first_row, spoken.first_row + len(spoken.labels)),
            slice(tokens.start, tokens.start + frames.num_frames),
            name=name,
            kind="cross",
            row_labels=spoken.labels,
            col_labels=frames.format_times(),
        )
        return replace(part, first_generated=spoken.first_generated)

    def _place_audio_tokens(self, tokens: range) -> AudioFrames:
        """Return the frames of audio tokens: those of the last pooling, or, if that has others, equal parts."""
        recording, grid = self.recording, self.tracer.last
        if abs(len(tokens) * grid.step - len(recording.waveform)) > 2 * grid.step:
            return AudioFrames(len(tokens), 0.0, recording.duration / len(tokens))
        return recording.convert_grid(grid, len(tokens))

    def _average(self, layers: Sequence[ViewerLayer]) -> ViewerLayer:
        heads = getattr(getattr(self.model, "generation_config", None), "alignment_heads", None)
        by_layer: dict[int, list[int]] = {}
        for number, head in heads or ():
            if 0 <= number < len(layers) and head in layers[number].heads:
                by_layer.setdefault(number, []).append(head)
        if by_layer:
            return average_layers(
                [(layers[number], by_layer[number]) for number in sorted(by_layer)], "mean of the alignment heads"
            )
        count = -(-len(layers) // 2)
        return average_layers(
            [(layer, layer.heads) for layer in layers[-count:]], f"mean of the last {count} of {len(layers)} layers"
        )


def _decode_tokens(tokenizer: Any, ids: torch.Tensor) -> list[str]:
    """Return the texts of token ids ``(1, L)``."""
    return decode_tokens(tokenizer, TokenLookup("", "", ids), 1)[0]


def _build_title(request: AudioRequest, tokenizer: Any, ids: torch.Tensor) -> str:
    text = shorten_title(tokenizer.decode(ids, skip_special_tokens=True))
    return f"{request.path.name}  →  {text}" if text else request.path.name
