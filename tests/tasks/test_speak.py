"""Speech synthesis from the recipe to the waveform: training, styles, outputs, scores and errors."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from speech_runs import QUIET, read_events, read_waveform, small_recipe, train_run, write_recordings
from typer.testing import CliRunner

import jumok
from jumok import InputError, recipe
from jumok.cli import app as cli_app
from jumok.data.audio import save_audio
from jumok.data.builtin.spoken_numbers import synthesize_text
from jumok.data.readers.speech import BuiltinUtterance, SpeechExample
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.run import Run
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.speak import forced_alignment, judges, metrics, task
from jumok.tasks.speak.prediction import SpeechPrediction, SpeechSegment, parse_style_weights
from jumok.tasks.speak.predictor import SpeechOptions, SpeechPredictor
from jumok.tasks.speak.task import SpeechTask
from jumok.tasks.speak.wav_writer import WavWriter

pytestmark = pytest.mark.long


pytest.importorskip("librosa")
pytest.importorskip("soundfile")
AUDIO = ["audio={sample_rate: 8000, n_fft: 512, hop_length: 100, win_length: 400, n_mels: 40}", "model.n_mels=40"]
LINEAR = ["audio.linear_spectrogram=true", "model.linear_bins=257"]
TABLE = [*AUDIO, "data.held_out_size=3"]


@pytest.fixture(scope="module", autouse=True)
def _shared_cache_and_short_alignment(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(forced_alignment, "FIRST_ITERATION_STEPS", 1)
        patch.setattr(forced_alignment, "STEPS_PER_ITERATION", 1)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with built-in voices that is hardly trained."""
    return train_run(tmp_path_factory.mktemp("voice") / "run", small_recipe("tacotron", "data.held_out_size=5"))


@pytest.fixture(scope="module")
def voice(run: Run) -> SpeechPredictor:
    loaded: SpeechPredictor = jumok.load(run.folder, "cpu")
    loaded.model.decoder.stop_projection.bias.data.fill_(-99.0)  # it speaks up to the length limit
    return loaded


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recordings(tmp_path_factory.mktemp("recordings"), 30)


@pytest.fixture
def batcher_arguments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each ``SpeechBatcher``."""
    calls: list[dict[str, Any]] = []

    class RecordedBatcher(task.SpeechBatcher):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append({"mels": args[1], **kwargs})
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(task, "SpeechBatcher", RecordedBatcher)
    return calls


def run_cli(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli_app.app, [*map(str, args), "--device", "cpu"])
    error = f"{result.stderr}{result.exception if isinstance(result.exception, InputError) else ''}"
    return result.exit_code, result.stdout, error


# ---------------------------------------------------------------------------------------------------- training


def test_validation_measures_attention_and_the_effect_of_styles(run: Run) -> None:
    [validation] = read_events(run, "validation")
    names = {"loss", "alignment/diagonality", "alignment/complete", "alignment/truncated", "style/spread"}
    assert names | {"style/effect"} <= validation.keys()
    alarms = [event["alarm"].partition(":")[0] for event in read_events(run, "alarm")]
    assert "style tokens have no effect" in alarms  # after three steps


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forced alignment is computed once, when the run starts."""
    settings = ["model.alignment_loss=0.1", "train.schedule=constant", "train.validate_every=2"]
    uninterrupted = train_run(tmp_path / "one", small_recipe("tacotron", *settings, "train.max_steps=4"))
    train_run(tmp_path / "two", small_recipe("tacotron", *settings, "train.max_steps=2"))
    monkeypatch.delattr(forced_alignment, "align_recordings")
    resumed = train_run(tmp_path / "two", small_recipe("tacotron", *settings, "train.max_steps=4"))
    expected, weights = (load_file(x.folder / "state/00000004/model.safetensors") for x in (uninterrupted, resumed))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    default_weights = weights["style_tokens.default_weights"]
    assert not torch.equal(default_weights, torch.full_like(default_weights, 1 / 8))
    assert all(event["alignment"] > 0 for event in read_events(resumed, "train"))
    assert all("alignment" not in event for event in read_events(resumed, "validation"))


def test_forced_alignments_of_mels_are_trained_with(
    tmp_path: Path, table: Path, batcher_arguments: list[dict[str, Any]]
) -> None:
    settings = small_recipe(
        "tacotron/fsdd", f"data.train={table}", "data.test=null", *TABLE, *LINEAR, "model.alignment_loss=0.1"
    )
    run = train_run(tmp_path / "run", settings)
    [arguments] = [x for x in batcher_arguments if x["frame_symbols"] is not None]  # of training, not of validation
    assert arguments["n_mels"] == 40
    alignments = arguments["frame_symbols"]
    assert [len(alignment) for alignment in alignments] == [len(mel) for mel in arguments["mels"]]
    assert {int(alignment[0]) for alignment in alignments} == {0}
    assert all(set(np.diff(alignment)) <= {0, 1} for alignment in alignments)
    path = run.folder / "data" / "forced_alignments.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(InputError, match="the data has changed since"):
        train_run(run.folder, settings)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=r"forced_alignments\.npy, which training needs, cannot be read"):
        train_run(run.folder, settings)


def test_recordings_with_texts(tmp_path: Path, table: Path) -> None:
    voice = jumok.load(
        train_run(
            tmp_path / "run", small_recipe("tacotron", *TABLE, f"data.train={table}", f"data.test={table}")
        ).folder,
        "cpu",
    )
    assert len(voice.load_split("test").examples) == 6
    assert len(voice.load_split("valid").examples) == 3
    speech = voice.speak("one two")
    assert speech.sample_rate == 8000
    # No training text has a space.
    assert [segment.symbols for segment in speech.segments] == [(*"one", "</s>"), (*"two", "</s>")]
    with pytest.raises(InputError, match=r"a recording that is too long .* and data\.max_seconds is 0\.1"):
        train_run(tmp_path / "long", small_recipe("tacotron", *TABLE, f"data.train={table}", "data.max_seconds=0.1"))


def test_damaged_recordings_stop_training_or_are_skipped(tmp_path: Path) -> None:
    folder = write_recordings(tmp_path / "damaged", 30, damaged=(7,))
    settings = [*TABLE, f"data.train={folder}", f"data.test={folder}"]
    with pytest.raises(InputError, match=r"metadata\.tsv:9 7\.wav: a damaged recording"):
        train_run(tmp_path / "stop", small_recipe("tacotron", *settings))
    run = train_run(tmp_path / "skip", small_recipe("tacotron", *settings, "data.on_error=skip"))
    assert "7.wav: a damaged recording" in (run.folder / "data" / "skipped.txt").read_text(encoding="utf-8")


def test_held_out_recordings_of_few_texts_and_of_many(tmp_path: Path, table: Path) -> None:
    few = SpeechTask(Run(tmp_path / "few", small_recipe("tacotron", *TABLE, f"data.train={table}")))
    few.write_held_out()
    assert len({x.text for x in few.train_split().examples}) == 2
    assert {x.text for x in few.train_split().examples} == {x.text for x in few.load_split("test").examples}
    lines = [f"{n % 30}.wav\ttext {n}" for n in range(60)]
    (table / "many.tsv").write_text("\n".join(["file\ttext", *lines]), encoding="utf-8")
    many = SpeechTask(Run(tmp_path / "many", small_recipe("tacotron", *TABLE, f"data.train={table / 'many.tsv'}")))
    many.write_held_out()
    assert not {x.text for x in many.train_split().examples} & {x.text for x in many.load_split("test").examples}


def test_style_references_of_the_same_speaker_and_emotion(
    tmp_path: Path, table: Path, batcher_arguments: list[dict[str, Any]]
) -> None:
    settings = [*TABLE, f"data.train={table}", "data.test=null"]
    train_run(tmp_path / "own", small_recipe("tacotron/fsdd", *settings, "data.style_reference=[]"))
    assert {call.pop("style_groups") for call in batcher_arguments} == {None}
    batcher_arguments.clear()
    train_run(tmp_path / "other", small_recipe("tacotron/fsdd", *settings, "data.style_reference=[speaker, emotion]"))
    [groups] = [x["style_groups"] for x in batcher_arguments if x["style_groups"]]  # validation uses the own style
    assert set(groups) == {f"speaker {n}\n{emotion}" for n in range(3) for emotion in ("sad", "merry")}
    text = (table / "metadata.tsv").read_text(encoding="utf-8")
    (table / "unnamed.tsv").write_text(text.replace("\tspeaker 1\t", "\t\t"), encoding="utf-8")
    with pytest.raises(InputError, match=r"unnamed.tsv:3 has no speaker.*data.speaker_column"):
        train_run(tmp_path / "run", small_recipe("tacotron/fsdd", *settings, f"data.train={table / 'unnamed.tsv'}"))


def test_a_voice_without_style_tokens_and_with_linear_spectrograms(tmp_path: Path) -> None:
    changes = ["model.style=null", "model.forward_attention=false", "model.attention=additive"]
    settings = small_recipe("tacotron", *AUDIO, *LINEAR, *changes, "model.postnet_layers=0", style=())
    voice = jumok.load(train_run(tmp_path / "run", settings).folder, "cpu")
    assert voice.speak("one").style_weights == ()
    [viewer_data] = voice.build_viewer_data("one")
    assert viewer_data.style is None
    with pytest.raises(InputError, match="this voice has no style tokens"):
        voice.speak("one", style_weights="1=1")


@pytest.mark.parametrize("name", ["fsdd", "arctic", "ravdess"])
def test_recipes_of_recordings(name: str, tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech" / name).symlink_to(table)
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    run = train_run(tmp_path / "run", small_recipe(f"tacotron/{name}", "data.held_out_size=3"))
    assert jumok.load(run.folder, "cpu").speak("two").sample_rate == run.recipe.audio.sample_rate


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_mels=40"], "both must be equal"),
        (["audio.linear_spectrogram=true"], "model.linear_bins=0, but audio has 80 mels and 513 frequencies"),
        (["audio.hop_length=2000"], "hop_length=2000, win_length"),
        (["audio.sample_ratte=1"], "did you mean audio.sample_rate"),
        (["text.number_language=fr"], "text.number_language"),
        (["evaluation.select_by=bleu"], "evaluation.select_by"),
        (["decode.pause_seconds=-1"], "0 or more"),
        (["model.n_mels=13", "audio.n_mels=13"], "more than 13 is expected"),
        (["data.builtin_size=0"], "1 or more is expected"),
    ],
)
def test_invalid_recipes(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe.load("tacotron", overrides)


# --------------------------------------------------------------------------------------------------- synthesis


def test_speech_of_a_text(voice: SpeechPredictor) -> None:
    speech = voice.speak("forty two")
    [segment] = speech.segments
    assert "".join(segment.symbols) == "forty two</s>"
    num_frames, n_mels = segment.mel.shape
    assert (speech.sample_rate, n_mels) == (16000, 80)
    assert segment.alignment.shape == (-(-num_frames // 4), 10)
    torch.testing.assert_close(segment.alignment.sum(1), torch.ones(len(segment.alignment)))
    assert len(speech.waveform) == (num_frames - 1) * 200
    assert sum(speech.style_weights) == pytest.approx(1.0, abs=1e-4)
    assert np.array_equal(voice.speak("FORTY   two").waveform, speech.waveform)
    assert voice.speak("42").segments[0].symbols == segment.symbols


def test_a_batch_of_texts_equals_single_texts(voice: SpeechPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechPredictor, "chunk_size", 3)
    texts = ["one", "seventy seven", "seven", "two"]
    batch = list(voice.predict(texts, SpeechOptions(), first_index=5))
    assert [(speech.index, speech.input) for speech in batch] == list(enumerate(texts, 5))
    for together, text in zip(batch, texts, strict=True):
        expected, segment = voice.speak(text).segments[0], together.segments[0]
        assert segment.mel.shape == expected.mel.shape
        # In a batch, the convolutions of the postnet see frames after the end.
        np.testing.assert_allclose(segment.mel[:-8], expected.mel[:-8], atol=2e-5)
        torch.testing.assert_close(segment.alignment, expected.alignment, atol=1e-5, rtol=0)


def test_long_texts_are_split_into_segments(voice: SpeechPredictor) -> None:
    text = "Forty two. Seven, eight and nine? " + "seventy " * 7
    with pytest.raises(InputError, match="the voice does not know a d, because no training text"):
        voice.split_segments(text, "line 1")
    with pytest.warns(UserWarning, match="leaves it out"):
        speech = voice.speak(text.replace(" and", ""))
    max_symbols = json.loads((voice.run.folder / "sizes.json").read_text())["max_symbols"]
    texts = ["".join(segment.symbols[:-1]) for segment in speech.segments]
    assert texts[:2] == ["forty two", "seven eight"]
    assert " ".join(texts) == "forty two seven eight nine " + " ".join(["seventy"] * 7)
    assert all(len(segment.symbols) <= max_symbols for segment in speech.segments)
    pauses = (len(speech.segments) - 1) * 4000
    assert len(speech.waveform) == sum(len(segment.waveform) for segment in speech.segments) + pauses
    segments = voice.split_segments("one " * 2_000 + "o" * 5000, "the text")
    assert max(map(len, segments)) < max_symbols
    assert "".join(segments).replace(" ", "") == "one" * 2_000 + "o" * 5000


def test_speech_that_does_not_stop_is_cut_off(voice: SpeechPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = voice.speak("one")
    assert not speech.finished
    assert len(speech.segments[0].mel) == voice.get_max_frames(4)
    assert voice.get_max_frames(1) * voice.audio.config.frame_seconds >= 2.0
    bias = voice.model.decoder.stop_projection.bias
    monkeypatch.setattr(bias, "data", torch.full_like(bias, 99.0))
    assert voice.speak("one").finished


def test_styles_of_recordings_of_tokens_and_the_default(voice: SpeechPredictor, tmp_path: Path) -> None:
    path = tmp_path / "reference.flac"
    save_audio(path, synthesize_text("nine", "bright").waveform, 16000)
    weights = voice.get_style_weights(SpeechOptions(style_audio=str(path)))
    assert weights is not None
    assert weights.shape == (1, 2, 8)
    torch.testing.assert_close(weights.sum(2), torch.ones(1, 2))
    mel = voice.audio.mel_spectrogram(voice.audio.read_waveform(path))
    expected = voice.model.encode_style(torch.from_numpy(mel)[None], [len(mel)])
    torch.testing.assert_close(voice.model.mix_style(weights), expected)
    mixed = voice.get_style_weights(SpeechOptions(style_weights="3=0.4,5=-0.3"))
    assert mixed is not None
    styles = voice.require_style_tokens().compute_token_styles()
    torch.testing.assert_close(voice.model.mix_style(mixed)[0], 0.4 * styles[2] - 0.3 * styles[4])
    speech = voice.speak("one", style_weights={3: 0.4, 5: -0.3})
    assert speech.style_weights == pytest.approx([0, 0, 0.4, 0, -0.3, 0, 0, 0])
    default_weights = voice.get_style_weights(SpeechOptions())
    assert default_weights is not None
    assert torch.equal(default_weights, voice.require_style_tokens().default_weights)


@pytest.mark.parametrize("text", ["0=1", "9=1", "x=1", "3=nan", "3=10.5", "", "3=1,3=1", "3=1,"])
def test_invalid_style_weights(text: str) -> None:
    assert parse_style_weights("3=", 4) == [0, 0, 1, 0]
    with pytest.raises(InputError, match="--style-weights"):
        parse_style_weights(text, 8)


def test_unknown_signs_are_replaced_or_left_out(voice: SpeechPredictor) -> None:
    symbols = SpeechSymbols((".", *voice.tokenizer.characters[:-1]), "en")
    other = SpeechPredictor(voice.task, voice.model, symbols)
    assert other.split_segments("One? Two!", "the text") == ["one.", "two."]
    with pytest.warns(UserWarning, match="does not know ;, and leaves it out"):
        assert other.split_segments("one; two", "the text") == ["one two"]  # the voice has no comma either
    with pytest.warns(UserWarning, match="leaves it out"):
        speech = other.speak("one; two? $")
    assert speech.unknown_characters == ("$",)
    fields = json.loads(next(speech.to_lines(as_json=True)))
    assert (fields["unknown_characters"], fields["segments"]) == (["$"], ["one two."])


@pytest.mark.parametrize(
    ("alignment", "warnings"),
    [
        (
            torch.eye(6)[[0] * 6],
            "4 of 5 symbols were skipped, so it is unintelligible; is the voice trained enough, and do its recordings "
            "have this style?",
        ),
        (torch.eye(6), None),
    ],
)
def test_skipped_symbols_are_warned_about(alignment: torch.Tensor, warnings: str | None) -> None:
    waveform, mel = np.zeros(9, np.float32), np.zeros((6, 40), np.float32)
    segment = SpeechSegment((*"seven", "</s>"), mel, alignment, False, lambda: waveform)
    assert SpeechPrediction(0, "seven", (segment,)).warnings == (() if warnings is None else (warnings,))


@pytest.mark.filterwarnings("ignore:the voice does not know")
def test_viewer_data_can_be_resynthesized(voice: SpeechPredictor) -> None:
    with pytest.warns(UserWarning, match="the text has 2 segments; the first one, 'forty two', is shown"):
        [data] = voice.build_viewer_data("forty two. one")
    [layer] = data.layers
    assert layer.name == "decoder.attention"
    assert list(layer.col_labels or ()) == [*"forty␣two", "</s>"]
    assert data.speech is not None
    assert data.style is not None
    assert data.resynthesize is not None
    assert layer.shape[0] == data.speech.num_steps
    assert data.style.names == tuple(f"token {n}" for n in range(1, 9))
    other = data.resynthesize([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert other.style is not None
    assert other.style.mean_weights.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    with pytest.raises(InputError, match="this model speaks"):
        voice.build_viewer_data("one", "two")


# ---------------------------------------------------------------------------------------------------- commands


def test_look_with_a_style(run: Run, tmp_path: Path) -> None:
    pages = {tmp_path / "default.html": [], tmp_path / "mixed.html": ["--style-weights", "3=2"]}
    for path, args in pages.items():
        code, _, error = run_cli("look", run.folder, "one", "--out", path, *args)
        assert code == 0, error
    first, second = (path.read_bytes() for path in pages)
    assert first != second
    assert "there is no such file" in run_cli("look", run.folder, "one", "--style-audio", "nowhere.wav")[2]


def test_files_in_a_folder_are_overwritten_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "0001.wav").write_bytes(b"old")
    with pytest.raises(InputError, match=r"already exists.* --overwrite"):
        WavWriter(tmp_path)
    speech = WavWriter(tmp_path, overwrite=True)(SpeechPrediction(0, "one", (), np.zeros(80, np.float32)))
    assert speech.file == tmp_path / "0001.wav"
    assert speech.file.read_bytes().startswith(b"RIFF")


def test_run_writes_files(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = run_cli("run", run.folder, "one")
    assert (code, out) == (0, "speech.wav\tone\n"), error
    assert run_cli("run", run.folder, "one")[1] == "speech-2.wav\tone\n"
    out = run_cli("run", run.folder, "two", "--out", "a/b.flac", "--style-weights", "2=0.5", "--json")[1]
    fields = json.loads(out)
    assert (fields["file"], fields["style_weights"][1], fields["sample_rate"]) == ("a/b.flac", 0.5, 16000)
    waveform, sample_rate = read_waveform(tmp_path / "a" / "b.flac")
    assert (len(waveform) / sample_rate, sample_rate) == (pytest.approx(fields["duration_seconds"], abs=1e-3), 16000)
    (tmp_path / "lines.txt").write_text("one\n\nthree\n", encoding="utf-8")
    _, out, error = run_cli("run", run.folder, "lines.txt", "--out", "many", "--on-error", "skip")
    assert out.splitlines() == ["many/0001.wav\tone", "", "many/0003.wav\tthree"]
    assert "line 2 has nothing to speak" in error
    code, _, error = run_cli("run", run.folder, "lines.txt", "--out", "many")
    assert code == 1
    assert "many/0001.wav already exists, and is not overwritten" in error
    (tmp_path / "two.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert "is one file, but there are more lines" in run_cli("run", run.folder, "two.txt", "--out", "a.wav")[2]
    code, _, error = run_cli("run", run.folder, "one", "--out", "c.wav", "--attention-map", "map.png")
    assert code == 0, error
    assert (tmp_path / "map.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["one", "--style-weights", "9=1"], "a token from 1 to 8"),
        (["one", "--style-weights", "1=1", "--style-audio", "x.wav"], "exclude each other"),
        (["one", "--style-audio", "gone.wav"], "--style-audio gone.wav: there is no such file"),
        (["one", "--style-audio", "text.wav"], "not a recording in WAV, FLAC or OGG"),
        (["ein Ü"], "the voice does not know ü, because no training text has it"),
        ([" "], "line 1 has nothing to speak"),
        (["one", "--out", "a.mp3"], "speech is written as .wav, .flac, .ogg"),
        (["one", "--out", "text"], "is a file, but no audio file"),
        (["one", "--beam-size", "3"], "--beam-size: this model speaks"),
        (["one", "--alignments"], "--alignments: only translations"),
    ],
)
def test_invalid_commands(
    args: list[str], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.wav", "text"):
        Path(name).write_text("this is a text", encoding="utf-8")
    code, _, error = run_cli("run", run.folder, *args)
    assert code == 1
    assert message in error


def test_other_tasks_have_no_style() -> None:
    with pytest.raises(InputError, match="--style-weights: this model does not generate"):
        NBestOptions.from_command_line(style_weights="1=1")


# -------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_of_built_in_voices(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "NUM_FIGURES", 1)
    output, voice = io.StringIO(), jumok.load(run.folder, "cpu")
    result = evaluate(voice, "test", SpeechOptions(), Console(file=output, width=200))
    content = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    lines = (run.folder / "eval" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert content["num_examples"] == len(rows) == len(voice.load_split("test").examples)
    assert content["mcd"] == pytest.approx(np.mean([row["mcd"] for row in rows]), abs=1e-3)
    assert content["alignment/diagonality"] == pytest.approx(np.mean([row["diagonality"] for row in rows]), abs=1e-3)
    assert {row["emotion"] for row in content["styles"]} == {row["emotion"] for row in rows}
    assert [row["token"] for row in content["style_tokens"]] == [str(n) for n in range(1, 9)]
    assert 0 <= content["style/pitch_concordance"] <= 1
    assert any(alarm.startswith("style tokens have no effect") for alarm in content["alarms"])
    assert "ALARM: style tokens have no effect" in output.getvalue()
    for name in ("test-tokens.png", "test-1.png"):
        assert (run.folder / "figures" / name).stat().st_size > 5000
    assert read_waveform(run.folder / "eval" / "sample-1.wav")[1] == 16000
    assert result.statistic is not None
    assert result.statistic(np.array([0, 0])) == pytest.approx(rows[0]["mcd"], abs=1e-3)


def test_comparison_by_the_distance_to_recordings(run: Run, tmp_path: Path) -> None:
    other = train_run(tmp_path / "other", small_recipe("tacotron", "data.held_out_size=5", "train.seed=2"))
    compare([run, other], "test", SpeechOptions(), tmp_path / "out", "cpu", QUIET)
    rows = json.loads((tmp_path / "out" / "test.json").read_text(encoding="utf-8"))
    assert [row["low"] <= row["value"] == row["mcd"] <= row["high"] for row in rows] == [True, True]


def test_judges_of_labelled_recordings(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "NUM_STEPS", 3)
    monkeypatch.setattr(judges, "BATCH_SIZE", 8)
    monkeypatch.setattr(metrics, "NUM_STYLE_TEXTS", 1)
    lines = (table / "metadata.tsv").read_text(encoding="utf-8").splitlines()
    lines = [line.replace("speaker 1", "new speaker") if line.endswith("test") else line for line in lines]
    path = table / "new.tsv"
    path.write_text("\n".join(lines), encoding="utf-8")
    run = train_run(tmp_path / "run", small_recipe("tacotron", *TABLE, f"data.train={path}", f"data.test={path}"))
    voice: SpeechPredictor = jumok.load(run.folder, "cpu")
    scores = voice.score_examples(voice.load_split("test").examples, detailed=True).metrics
    rows = {(row["label"], row["speakers"]): row for row in scores["judges"]}
    assert rows["emotion", "known"]["count"] + rows["emotion", "new"]["count"] == 6
    assert rows["text", "new"]["chance"] == 0.5
    assert ("speaker", "new") not in rows  # a judge cannot recognize a speaker that it does not know
    assert scores["judges/emotion_new"] == rows["emotion", "new"]["synthesized"]


def test_judge_learns_to_classify() -> None:
    rng = np.random.default_rng(1)
    labels = [n % 3 for n in range(60)]
    mels = [np.zeros((int(rng.integers(8, 30)), 20), np.float32) for _ in labels]
    for mel, label in zip(mels, labels, strict=True):
        mel[:, 6 * label : 6 * label + 5] = 0.6
    judge = judges.train_judge(mels, labels, seed=1, device=torch.device("cpu"), num_steps=20)
    probabilities = judges.predict_probabilities(judge, mels)
    assert probabilities.sum(1) == pytest.approx(np.ones(60))
    assert (probabilities.argmax(1) == labels).mean() > 0.9


def test_style_references_have_another_text() -> None:
    pairs = ("ax", "ax", "by", "bx", "cy")  # texts and speakers
    examples = [SpeechExample(BuiltinUtterance(1, 1), text, "", speaker) for text, speaker in pairs]
    assert judges.choose_style_references(examples) == [3, 3, 4, 0, 2]
    assert judges.choose_style_references(examples[:2]) == [0, 1]


def test_effects_of_tokens_do_not_depend_on_differences_between_texts() -> None:
    levels, rng = np.array([0.5, 1.0, 4.0, 2.0]), np.random.default_rng(1)
    noise = 0.01 * rng.standard_normal((3, 4))
    effects = metrics.estimate_effects(levels + np.array([[0.0], [0.3], [-0.3]]) + noise)
    assert [mean for mean, _ in effects] == pytest.approx([1.875, 2.175, 1.575], abs=0.02)
    assert all(margin < 0.02 for _, margin in effects)  # the texts differ by far more
    (mean, margin), (_, other_margin) = metrics.estimate_effects([[1.0, math.nan, 3.0], [2.0, 2.0, math.inf]])
    assert mean == pytest.approx(2.0, abs=0.3)
    assert math.isfinite(margin)
    assert math.isfinite(other_margin)
    assert all(math.isnan(x) for effect in metrics.estimate_effects([[math.nan] * 2] * 2) for x in effect)
