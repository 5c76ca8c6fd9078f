"""Tests of capturing what audio models hear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from audio_models import SAMPLE_RATE, generate_noise, save_audio_model, save_qwen_audio
from typer.testing import CliRunner

from jumok import InputError
from jumok.cli.app import app
from jumok.look.huggingface.audio_frames import FrameGrid, measure_features
from jumok.look.huggingface.audio_input import load_recording
from jumok.look.huggingface.capture import capture_huggingface_model

pytestmark = pytest.mark.long

SECONDS = 1.5
SaveModel = Callable[..., Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SaveModel:
    """Return the folder of a model, which is built once."""
    folders: dict[str, Path] = {}

    def save(name: str, **generation: Any) -> Path:
        key = f"{name} {generation}"
        if key not in folders:
            path = tmp_path_factory.mktemp("audio") / name
            folders[key] = save_qwen_audio(path) if name == "qwen_audio" else save_audio_model(name, path, **generation)
        return folders[key]

    return save


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    path = tmp_path / "noise.wav"
    soundfile.write(path, generate_noise(SECONDS), SAMPLE_RATE, subtype="FLOAT")
    return path


# --------------------------------------------------------------------------------------------- places in time


@pytest.mark.parametrize(
    ("extractor", "options", "axis", "centre", "step"),
    [
        ("Whisper", {"chunk_length": 2}, 1, 0, 160),  # windows are centred at multiples of 160 samples
        ("Wav2Vec2", {}, 0, 0, 1),  # samples
        ("Speech2Text", {}, 0, 200, 160),  # the first window of 400 samples begins at 0
        ("AST", {"max_length": 128, "num_mel_bins": 64}, 0, 200, 160),
        ("SeamlessM4T", {}, 0, 280, 320),  # pairs of such windows
        ("Parakeet", {}, 0, 0, 160),
    ],
)
def test_frames_of_feature_extractors_are_measured(
    extractor: str, options: dict[str, Any], axis: int, centre: int, step: int
) -> None:
    extract = getattr(transformers, f"{extractor}FeatureExtractor")(**options)

    def compute(waveform: np.ndarray) -> np.ndarray:
        features = extract(waveform, sampling_rate=SAMPLE_RATE, return_tensors="np")
        return np.asarray(features[extract.model_input_names[0]])[0]

    layout = measure_features(compute, SAMPLE_RATE)
    assert layout is not None
    assert (layout.axis, layout.grid) == (axis, FrameGrid(centre, step))


def test_features_without_time_are_not_placed() -> None:
    assert measure_features(lambda waveform: np.array([waveform.mean(), waveform.std()]), SAMPLE_RATE) is None


def _find_first_attention(model: Any) -> Any:
    """Return the module whose input is what the first attention of an encoder gets."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else getattr(model, "encoder", model)
    return encoder.layers[0]


STEPS = {"whisper": 0.02, "speech_to_text": 0.04, "moonshine": 0.024, "wav2vec2": 0.02, "hubert": 0.02, "wavlm": 0.02,
         "sew": 0.04, "ast": 0.1}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_click_changes_the_frames_that_are_placed_there(name: str, saved: SaveModel, noise: Path) -> None:
    folder = saved(name)
    (data,) = capture_huggingface_model(folder, audio=noise, device="cpu", **_get_options(name))
    assert data.audio is not None
    is_patched = name == "ast"
    layer = next(layer for layer in data.layers if layer.name in data.audio.query_frames)
    frames = data.audio.key_frames[layer.name]
    assert frames.step == pytest.approx(STEPS[name])
    assert 0 <= SECONDS - frames.end + frames.step < 2 * frames.step + 0.025  # up to the end, and no padding
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    model_class = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    model = model_class.from_pretrained(folder).eval()
    states: list[torch.Tensor] = []
    handle = _find_first_attention(model).register_forward_pre_hook(lambda _, args: states.append(args[0][0].clone()))

    def encode(waveform: np.ndarray) -> np.ndarray:
        inputs = extractor(waveform, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        start = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
        with torch.inference_mode():
            model(**inputs, **start)
        state = states.pop()
        if is_patched:  # 2 tokens, then the patches of each band
            num_times = (256 - 16) // 10 + 1
            state = state[2:].reshape(-1, num_times, state.shape[-1]).transpose(0, 1).flatten(1)
        return np.asarray(state)

    waveform = generate_noise(SECONDS)
    before, errors = encode(waveform), []
    clicks = np.linspace(0.45, 1.1, 14)
    for second in clicks:
        clicked = waveform.copy()
        clicked[round(second * SAMPLE_RATE)] += 0.2
        change = np.abs(encode(clicked) - before).max(1)
        # Moonshine normalizes over time, so that all frames change a little.
        changed = np.flatnonzero(change > (0.2 * change.max() if name == "moonshine" else 1e-5))
        assert len(changed) == changed[-1] - changed[0] + 1 < 8
        middle = frames.start + ((changed[0] + changed[-1]) / 2 + 0.5) * frames.step
        errors.append(second - middle)
        assert int((second - frames.start) / frames.step) in changed
    handle.remove()
    assert np.abs(errors).max() < 0.51 * frames.step + 0.005
    assert abs(np.mean(errors)) < 0.2 * frames.step


def _get_options(name: str) -> dict[str, Any]:
    return {"target": "the dog runs"} if name in ("whisper", "speech_to_text", "moonshine") else {}


# ------------------------------------------------------------------------------------------------------- weights


def test_words_said_are_the_rows_over_the_recording(saved: SaveModel, noise: Path) -> None:
    """The weights are those of transformers, and a row is that of the query that predicts the word."""
    folder = saved("whisper")
    (data,) = capture_huggingface_model(folder, audio=noise, target="the dog runs", device="cpu")
    names = {layer.name: layer for layer in data.layers}
    layer = names["model.decoder.layers.1.encoder_attn"]
    assert layer.row_labels == ["▁the", "▁dog", "▁run", "s", "</s>"]
    assert names["model.decoder.layers.1.self_attn"].row_labels == ["<s>", "▁the", "▁dog", "▁run", "s"]
    assert layer.shape == (5, 76)  # 1.5 s of 20 ms, and a half: the first frame is centred at 0
    assert data.title == "noise.wav  →  the dog runs"
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    inputs = extractor(generate_noise(SECONDS), sampling_rate=SAMPLE_RATE, return_tensors="pt")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[2, *tokenizer("the dog runs", add_special_tokens=False)["input_ids"]]])
    with torch.inference_mode():
        output = model(**inputs, decoder_input_ids=ids, output_attentions=True)
    for number in range(3):
        cross = names[f"model.decoder.layers.{number}.encoder_attn"]
        ours = np.stack([cross.compute_weights(head) for head in cross.heads])
        np.testing.assert_allclose(ours, output.cross_attentions[number][0, ..., :76], atol=1e-5)
    # The rest of the weight is on the padding.
    assert (ours.sum(-1) < 1).all()
    # Without alignment heads, the last layer is the mean of the last half of the layers.
    mean = data.layers[-1]
    assert mean.name == "mean of the last 2 of 3 layers"
    expected = torch.stack(output.cross_attentions[1:])[:, 0].mean((0, 1))[:, :76]
    np.testing.assert_allclose(mean.compute_weights(0), expected, atol=1e-5)
    np.testing.assert_allclose(mean.source.received_weight(0, slice(0, 5))[:76], expected.sum(0), atol=1e-5)


def test_alignment_heads_are_averaged(saved: SaveModel, noise: Path) -> None:
    folder = saved("whisper", alignment_heads=[[2, 0], [0, 1]])
    (data,) = capture_huggingface_model(folder, audio=noise, target="the dog", device="cpu")
    mean, names = data.layers[-1], {layer.name: layer for layer in data.layers}
    assert mean.name == "mean of the alignment heads"
    first, last = (names[f"model.decoder.layers.{number}.encoder_attn"] for number in (0, 2))
    expected = (last.compute_weights(0) + first.compute_weights(1)) / 2
    np.testing.assert_allclose(mean.compute_weights(0), expected, atol=1e-6)


def test_selected_layers_are_captured(saved: SaveModel, noise: Path) -> None:
    (data,) = capture_huggingface_model(saved("whisper"), audio=noise, layers="*encoder_attn", device="cpu")
    assert {layer.kind for layer in data.layers} == {"cross"}


def test_output_is_generated_and_marked(saved: SaveModel, noise: Path) -> None:
    for name in ("whisper", "speech_to_text", "moonshine"):
        (data,) = capture_huggingface_model(saved(name), audio=noise, generate=4, device="cpu")
        mean = data.layers[-1]
        assert 1 <= mean.shape[0] <= 4
        assert mean.first_generated == (0, None)
        assert {layer.first_generated for layer in data.layers if "causal" in layer.kind} == {(1, 1)}


def test_language_model_attends_to_audio_tokens(saved: SaveModel, noise: Path) -> None:
    (data,) = capture_huggingface_model(saved("qwen_audio"), "the dog", audio=noise, generate=3, device="cpu")
    names = {layer.name: layer for layer in data.layers}
    whole = names["model.language_model.layers.2.self_attn"]
    part = names["model.language_model.layers.2.self_attn (recording)"]
    assert data.audio is not None
    frames = data.audio.key_frames[part.name]
    # Pairs of 20 ms. The last of 37.5 pairs is not complete.
    assert (frames.num_frames, frames.step, frames.start) == (37, pytest.approx(0.04), pytest.approx(-0.01))
    assert whole.row_labels is not None
    assert whole.row_labels[:3] == ["<|audio_bos|>", "<0.01 s>", "<0.05 s>"]
    assert whole.row_labels[38:41] == ["<|audio_eos|>", "▁the", "▁dog"]
    assert part.row_labels == whole.row_labels[38:]
    assert (whole.first_generated, part.first_generated) == ((41, 41), (3, None))
    np.testing.assert_allclose(part.compute_weights(1), whole.compute_weights(1)[37:43, 1:38], atol=1e-6)
    expected = part.compute_weights(3).sum(0)
    np.testing.assert_allclose(part.source.received_weight(3, slice(0, 6))[:37], expected, atol=1e-5)
    assert data.layers[-1].name == "mean of the last 2 of 4 layers"


def test_patches_of_a_spectrogram_are_summed_over_bands(saved: SaveModel, noise: Path) -> None:
    (data,) = capture_huggingface_model(saved("ast"), audio=noise, device="cpu")
    names = {layer.name: layer for layer in data.layers}
    raw, times, first = (names[f"layers.1.attention{suffix}"] for suffix in ("", " (over time)", " (first tokens)"))
    bands, all_times = 2, 25  # (32 - 16) // 10 + 1, (256 - 16) // 10 + 1
    assert raw.shape == (2 + bands * all_times,) * 2
    assert first.row_labels == ["[cls]", "[distillation]"]
    weights = raw.compute_weights(1)
    num_times = times.shape[0]
    on_times = sum(weights[:, 2 + band * all_times : 2 + (band + 1) * all_times] for band in range(bands))
    np.testing.assert_allclose(first.compute_weights(1), on_times[:2, :num_times], atol=1e-6)
    mean = sum(on_times[2 + band * all_times :][:num_times, :num_times] for band in range(bands)) / bands
    np.testing.assert_allclose(times.compute_weights(1), mean, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- recordings


@pytest.mark.parametrize(("suffix", "rate", "channels"), [(".flac", 44100, 2), (".ogg", 8000, 1), (".wav", 22050, 2)])
def test_recordings_of_any_format_and_rate(
    suffix: str, rate: int, channels: int, saved: SaveModel, tmp_path: Path
) -> None:
    time = np.arange(round(SECONDS * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(tmp_path / f"tone{suffix}", np.stack([tone] * channels, 1), rate)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(saved("wav2vec2"))
    recording = load_recording(saved("wav2vec2"), tmp_path / f"tone{suffix}", extractor)
    assert recording.duration == pytest.approx(SECONDS, abs=0.001)
    spectrum = np.abs(np.fft.rfft(recording.waveform))
    assert spectrum.argmax() / SECONDS == pytest.approx(440, abs=2)


@pytest.mark.parametrize(
    ("name", "file", "options", "reason"),
    [
        ("whisper", "noise.wav", {"text": "the dog"}, "reads no text.*--target"),
        ("whisper", "noise.wav", {"generate": 2, "target": "the"}, "--generate and --target"),
        ("whisper", "long.wav", {}, r"takes 7\.0 s.*hears 5\.0 s at most: cut it.*-t 5 "),
        ("ast", "long.wav", {}, r"takes 7\.0 s.*hears 2\.6 s at most"),
        ("qwen_audio", "long.wav", {"text": "the"}, r"takes 7\.0 s.*hears 5\.0 s at most"),
        ("wav2vec2", "noise.wav", {"target": "the"}, "--target was given; leave it out"),
        ("wav2vec2", "noise.wav", {"generate": 2}, "writes no text; leave --generate out"),
        ("wav2vec2", "silence.wav", {}, "a silent recording"),
        ("wav2vec2", "denormal.wav", {}, "a silent recording"),
        ("wav2vec2", "short.wav", {}, "cannot run on this recording"),
        ("wav2vec2", "text.wav", {}, "not a recording in WAV, FLAC or OGG"),
        ("wav2vec2", "missing.wav", {}, "cannot be read"),
    ],
)
def test_invalid_input_is_rejected(
    name: str, file: str, options: dict[str, Any], reason: str, saved: SaveModel, noise: Path
) -> None:
    signals = {"long.wav": generate_noise(7), "silence.wav": np.zeros(8000), "short.wav": generate_noise(0.01),
               "denormal.wav": np.full(8000, 1e-40)}  # fmt: skip
    if file in signals:
        soundfile.write(noise.with_name(file), signals[file], SAMPLE_RATE, subtype="FLOAT")
    if file == "text.wav":
        noise.with_name(file).write_text("no recording")
    with pytest.raises(InputError, match=reason):
        capture_huggingface_model(saved(name), audio=noise.with_name(file), device="cpu", **options)


def test_models_of_text_hear_nothing(bert: Path, saved: SaveModel, noise: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(bert\) that hears no audio; it reads text\. Leave --audio out"):
        capture_huggingface_model(bert, audio=noise, device="cpu")
    for arguments, reason in (
        ([str(saved("wav2vec2"))], "no input was given.*--audio FILE"),
        ([str(saved("wav2vec2")), "hello"], "reads no text.*--audio FILE"),
        ([str(saved("wav2vec2")), str(noise)], f"--audio {noise}"),
    ):
        result = CliRunner().invoke(app, ["look", *arguments, "--out", str(tmp_path / "map.html")])
        assert isinstance(result.exception, InputError)
        with pytest.raises(InputError, match=reason):
            raise result.exception
    (saved("hubert") / "preprocessor_config.json").rename(tmp_path / "moved.json")
    with pytest.raises(InputError, match="has no feature extractor"):
        capture_huggingface_model(saved("hubert"), audio=noise, device="cpu")
    (tmp_path / "moved.json").rename(saved("hubert") / "preprocessor_config.json")


def test_command_writes_files_that_carry_the_sound(saved: SaveModel, noise: Path, tmp_path: Path) -> None:
    arguments = ["look", str(saved("whisper")), "--audio", str(noise), "--target", "the dog runs", "--whole-words"]
    for name in ("map.html", "map.png", "map.svg"):
        result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / name), "--device", "cpu"])
        assert result.exit_code == 0, result.exception
    page = (tmp_path / "map.html").read_text()
    assert '"wav":"UklGR' in page  # RIFF
    assert '"▁runs"' not in page
    assert '"runs"' in page
    assert len(page) < 12 << 20
    arguments = ["look", str(saved("wav2vec2")), "--audio", str(noise), "--out", str(tmp_path / "self.png")]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_ablation_of_a_head_is_compared(saved: SaveModel, noise: Path) -> None:
    ablations: Any = {"model.decoder.layers.2.encoder_attn": [0]}
    before, after = capture_huggingface_model(
        saved("whisper"), audio=noise, target="the dog", ablations=ablations, device="cpu"
    )
    assert before.audio is not None
    assert after.audio is not None
    assert before.title == after.title
