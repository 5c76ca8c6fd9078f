"""Voices from a recipe to a sound: built-in ones, recordings of others, styles, and what is refused."""

import doctest
import io
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file
from speech_runs import events, folder_of, samples, small_recipe, train_run
from typer.testing import CliRunner

import jumok
from jumok import InputError, recipe
from jumok.cli import app as cli_app
from jumok.data.readers.speech import BuiltinUtterance, SpeechExample
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.run import Run
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.speak import (
    forced_alignment,
)
from jumok.tasks.speak import (
    judges as speak_judges,
)
from jumok.tasks.speak import (
    metrics as speak_metrics,
)
from jumok.tasks.speak import (
    prediction as speak_prediction,
)
from jumok.tasks.speak import (
    predictor as speak_predictor,
)
from jumok.tasks.speak import (
    task as speak_task,
)
from jumok.tasks.speak.prediction import SpeechPrediction, SpeechSegment, parse_style_weights
from jumok.tasks.speak.predictor import SpeechOptions, SpeechPredictor
from jumok.tasks.speak.task import SpeechTask
from jumok.tasks.speak.wav_writer import WavWriter

pytest.importorskip("librosa")
pytest.importorskip("soundfile")
TABLE = [
    "audio={sample_rate: 8000, n_fft: 512, hop_length: 100, win_length: 400, n_mels: 40}",
    "model.n_mels=40",
    "data.held_out_size=3",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_CACHE", str(tmp_path_factory.getbasetemp() / "sounds"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has learned next to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUMOK_CACHE", str(tmp_path_factory.getbasetemp() / "sounds"))
        return train_run(tmp_path_factory.mktemp("voice") / "run", small_recipe("tacotron", "data.held_out_size=5"))


@pytest.fixture(scope="module")
def voice(run: Run) -> SpeechPredictor:
    found: SpeechPredictor = jumok.load(run.folder, "cpu")
    found.model.decoder.stop_projection.bias.data.fill_(-99.0)  # it speaks as long as it may
    return found


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("recordings"), 30)


def run_cli(*args: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(cli_app.app, ["run", *map(str, args), "--device", "cpu"])
    error = f"{found.stderr}{found.exception if isinstance(found.exception, InputError) else ''}"
    return found.exit_code, found.stdout, error


def test_the_examples_in_the_docstrings() -> None:
    for module in (speak_predictor, speak_prediction, speak_metrics, speak_judges):
        assert doctest.testmod(module).failed == 0


# ----------------------------------------------------------------------------------------------- learning


def test_a_validation_tells_whether_it_reads_and_whether_styles_do_something(run: Run) -> None:
    [told] = events(run, "validation")
    names = {"loss", "alignment/diagonality", "alignment/complete", "alignment/truncated", "style/spread"}
    assert names | {"style/effect"} <= told.keys()
    kinds = [one["alarm"].partition(":")[0] for one in events(run, "alarm")]
    assert "style tokens have no effect" in kinds  # after three steps


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    more = ["train.schedule=constant", "train.validate_every=2"]
    straight = train_run(tmp_path / "one", small_recipe("tacotron", *more, "train.max_steps=4"))
    train_run(tmp_path / "two", small_recipe("tacotron", *more, "train.max_steps=2"))
    stopped = train_run(tmp_path / "two", small_recipe("tacotron", *more, "train.max_steps=4"))
    last = "state/00000004/model.safetensors"
    one, two = (load_file(each.folder / last) for each in (straight, stopped))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(
        one["style_tokens.default_weights"], torch.full_like(one["style_tokens.default_weights"], 1 / 8)
    )


def test_where_symbols_are_spoken_is_found_in_mels_and_learned_from(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    class Utterances(speak_task.SpeechBatcher):
        def __init__(self, *args: object, **more: object) -> None:
            given.update(
                {name: more[name] for name in ("frame_symbols", "n_mels") if more["frame_symbols"] is not None}
            )
            super().__init__(*args, **more)  # type: ignore[arg-type]

    def found(
        symbols: list[list[int]], mels: list[NDArray[np.float16]], **_: object
    ) -> list[forced_alignment.FrameSymbols]:
        given["shapes"] = [mel.shape for mel in mels]
        return [np.arange(len(mel)) % len(text) for text, mel in zip(symbols, mels, strict=True)]

    monkeypatch.setattr(speak_task, "SpeechBatcher", Utterances)
    monkeypatch.setattr(forced_alignment, "align_recordings", found)
    asked = [f"data.train={table}", "data.test=null", *TABLE, "model.alignment_loss=0.1"]
    asked += ["audio.linear_spectrogram=true", "model.linear_bins=257"]
    run = train_run(tmp_path / "run", small_recipe("tacotron/fsdd", *asked, "train.max_steps=3"))
    shapes, places = given["shapes"], given["frame_symbols"]
    assert {width for _, width in shapes} == {40}  # type: ignore[attr-defined]
    assert [len(one) for one in places] == [frames for frames, _ in shapes]  # type: ignore[attr-defined]
    assert all((np.diff(one)[: one.max()] == 1).all() for one in places)  # type: ignore[attr-defined]
    kept = run.folder / "data" / "forced_alignments.npy"
    np.save(kept, np.load(kept)[:-1])
    with pytest.raises(InputError, match="the data has changed since"):
        train_run(run.folder, small_recipe("tacotron/fsdd", *asked, "train.max_steps=3"))
    kept.write_bytes(b"")
    with pytest.raises(InputError, match=r"forced_alignments\.npy, which training needs, cannot be read"):
        train_run(run.folder, small_recipe("tacotron/fsdd", *asked, "train.max_steps=3"))


def test_where_symbols_are_is_found_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [
        "model.alignment_loss=0.1",
        "train.schedule=constant",
        "train.validate_every=2",
        "train.log_every=1",
    ]
    straight = train_run(tmp_path / "one", small_recipe("tacotron", *more, "train.max_steps=4"))
    train_run(tmp_path / "two", small_recipe("tacotron", *more, "train.max_steps=2"))
    monkeypatch.delattr(forced_alignment, "align_recordings")
    stopped = train_run(tmp_path / "two", small_recipe("tacotron", *more, "train.max_steps=4"))
    one, two = (load_file(each.folder / "state/00000004/model.safetensors") for each in (straight, stopped))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(told["alignment"] > 0 for told in events(stopped, "train"))
    assert all("alignment" not in told for told in events(stopped, "validation"))


def test_recordings_of_others_are_learned_from_and_broken_ones_named(tmp_path: Path, table: Path) -> None:
    chosen = [*TABLE, f"data.train={table}", f"data.test={table}"]
    run = train_run(tmp_path / "one", small_recipe("tacotron", *chosen))
    voice = jumok.load(run.folder, "cpu")
    assert len(voice.load_split("test").examples) == 6
    assert len(voice.load_split("valid").examples) == 3
    said = voice.speak("one two")
    assert said.sample_rate == 8000
    assert [one.symbols for one in said.segments] == [(*"one", "</s>"), (*"two", "</s>")]  # it knows no space
    broken = folder_of(tmp_path / "broken", 30, broken=(7,))
    chosen = [*TABLE, f"data.train={broken}", f"data.test={broken}"]
    with pytest.raises(InputError, match=r"metadata\.tsv:9 7\.wav: a damaged recording"):
        train_run(tmp_path / "two", small_recipe("tacotron", *chosen))
    run = train_run(tmp_path / "three", small_recipe("tacotron", *chosen, "data.on_error=skip"))
    assert "7.wav: a damaged recording" in (run.folder / "data" / "skipped.txt").read_text(encoding="utf-8")
    with pytest.raises(InputError, match=r"a recording that is too long .* and data\.max_seconds is 0\.1"):
        train_run(tmp_path / "four", small_recipe("tacotron", *TABLE, f"data.train={table}", "data.max_seconds=0.1"))


def test_of_few_texts_recordings_are_held_out_and_of_many_texts(tmp_path: Path, table: Path) -> None:
    few = SpeechTask(Run(tmp_path / "few", small_recipe("tacotron", *TABLE, f"data.train={table}")))
    few.write_held_out()
    parts = {"train": few.train_split().examples, "test": few.load_split("test").examples}
    assert {one.text for one in parts["train"]} == {one.text for one in parts["test"]}
    lines = [f"{n % 30}.wav\ttext {n}" for n in range(60)]
    (table / "many.tsv").write_text("\n".join(["file\ttext", *lines]), encoding="utf-8")
    chosen = small_recipe("tacotron", *TABLE, f"data.train={table / 'many.tsv'}")
    assert SpeechTask(Run(tmp_path / "many", chosen))._has_many_texts


def test_a_voice_without_styles_and_one_of_linear_spectra(tmp_path: Path) -> None:
    plain = [
        "audio={sample_rate: 8000, n_fft: 512, hop_length: 100, win_length: 400, n_mels: 40, linear_spectrogram: true}",
        "model.n_mels=40",
    ]
    chosen = recipe.load(
        "tacotron",
        [
            *small_without_style(),
            *plain,
            "model.linear_bins=257",
            "model.attention=additive",
            "model.postnet_layers=0",
        ],
    )
    voice = jumok.load(train_run(tmp_path / "run", chosen).folder, "cpu")
    said = voice.speak("one")
    assert said.style_weights == ()
    [scene] = voice.build_viewer_data("one")
    assert scene.style is None
    with pytest.raises(InputError, match="this voice has no style tokens"):
        voice.speak("one", style_weights="1=1")


def small_without_style() -> list[str]:
    from speech_runs import SIZES, SMALL

    sizes = [one for one in SIZES if not one.startswith("model.style")]
    return [*SMALL, *sizes, "model.style=null", "model.forward_attention=false"]


# ------------------------------------------------------------------------------------------------- at work


def test_what_is_said(voice: SpeechPredictor) -> None:
    said = voice.speak("forty two")
    [piece] = said.segments
    assert "".join(piece.symbols) == "forty two</s>"
    frames, bands = piece.mel.shape
    assert (said.sample_rate, bands) == (16000, 80)
    assert piece.alignment.shape == (-(-frames // 4), 10)
    torch.testing.assert_close(piece.alignment.sum(1), torch.ones(len(piece.alignment)))
    assert len(said.waveform) == (frames - 1) * 200
    assert sum(said.style_weights) == pytest.approx(1.0, abs=1e-4)
    assert np.array_equal(voice.speak("forty two").waveform, said.waveform)
    assert np.array_equal(voice.speak("FORTY   two").waveform, said.waveform)
    assert voice.speak("42").segments[0].symbols == piece.symbols


def test_lines_said_together_sound_as_they_do_alone(voice: SpeechPredictor) -> None:
    texts = ["one", "seventy seven", "seven"]
    for together, text in zip(voice.predict(texts, SpeechOptions()), texts, strict=True):
        alone = voice.speak(text).segments[0]
        assert together.segments[0].mel.shape == alone.mel.shape
        # What refines mels sees a few frames on, which are not there alone.
        np.testing.assert_allclose(together.segments[0].mel[:-8], alone.mel[:-8], atol=2e-5)
        torch.testing.assert_close(together.segments[0].alignment, alone.alignment, atol=1e-5, rtol=0)


def test_a_text_of_any_length_is_said_in_parts(voice: SpeechPredictor) -> None:
    text = "Forty two. Seven, eight and nine? " + "seventy " * 7
    with pytest.raises(InputError, match="the voice does not know a d, because no training text"):
        voice.split_segments(text, "line 1")
    with pytest.warns(UserWarning, match="leaves it out"):
        said = voice.speak(text.replace(" and", ""))
    longest = json.loads((voice.run.folder / "sizes.json").read_text())["max_symbols"]
    texts = ["".join(piece.symbols[:-1]) for piece in said.segments]
    assert texts[:2] == ["forty two", "seven eight"]
    assert " ".join(texts) == "forty two seven eight nine " + " ".join(["seventy"] * 7)
    assert all(len(piece.symbols) <= longest for piece in said.segments)
    endless = voice.split_segments("one " * 20_000 + "o" * 5000, "the text")
    assert max(map(len, endless)) < longest
    assert "".join(endless).replace(" ", "") == "one" * 20_000 + "o" * 5000
    pauses = (len(said.segments) - 1) * 4000
    assert len(said.waveform) == sum(len(piece.waveform) for piece in said.segments) + pauses


def test_a_voice_that_does_not_stop_is_cut_off_and_told(voice: SpeechPredictor, tmp_path: Path) -> None:
    bias = voice.model.decoder.stop_projection.bias.data
    before = bias.clone()
    said = voice.speak("one")
    assert not said.finished
    assert len(said.segments[0].mel) == voice.get_max_frames(4)
    bias.fill_(99.0)
    assert voice.speak("one").finished
    bias.copy_(before)


def test_styles_from_a_recording_from_tokens_and_the_usual_one(voice: SpeechPredictor, tmp_path: Path) -> None:
    from jumok.data.audio import save_audio
    from jumok.data.builtin.spoken_numbers import synthesize_text

    save_audio(tmp_path / "ref.flac", synthesize_text("nine", "bright").waveform, 16000)
    weights = voice.get_style_weights(SpeechOptions(style_audio=str(tmp_path / "ref.flac")))
    assert weights is not None
    assert weights.shape == (1, 2, 8)
    torch.testing.assert_close(weights.sum(2), torch.ones(1, 2))
    mel = voice.audio.mel_spectrogram(voice.audio.read_waveform(tmp_path / "ref.flac"))
    own = voice.model.encode_style(torch.from_numpy(mel)[None], [len(mel)])
    torch.testing.assert_close(voice.model.mix_style(weights), own)
    mixed = voice.get_style_weights(SpeechOptions(style_weights="3=0.4,5=-0.3"))
    assert mixed is not None
    values = voice.model.style_tokens.compute_token_styles()
    torch.testing.assert_close(voice.model.mix_style(mixed)[0], 0.4 * values[2] - 0.3 * values[4])
    assert voice.speak("one", style_weights="3=0.4,5=-0.3").style_weights == pytest.approx(
        [0, 0, 0.4, 0, -0.3, 0, 0, 0]
    )
    assert torch.equal(voice.get_style_weights(SpeechOptions()), voice.model.style_tokens.default_weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0=1", "9=1", "x=1", "3=nan", "3=10.5", "3=", "", "3=1,3=1", "3=1,"])
def test_tokens_that_are_none(given: str) -> None:
    if given == "3=":
        assert parse_style_weights(given, 4) == [0, 0, 1, 0]
    else:
        with pytest.raises(InputError, match="--style-weights"):
            parse_style_weights(given, 8)


def test_signs_that_a_voice_never_saw_are_read_as_those_it_knows(voice: SpeechPredictor) -> None:
    symbols = SpeechSymbols((".", *voice.tokenizer.characters[:-1]), "en")
    other = SpeechPredictor(voice.task, voice.model, symbols)
    assert other.split_segments("One? Two!", "it") == ["one.", "two."]
    with pytest.warns(UserWarning, match="does not know ;, and leaves it out"):
        assert other.split_segments("one; two", "it") == ["one two"]  # it knows no comma either
    with pytest.warns(UserWarning, match="leaves it out"):
        said = other.speak("one; two? $")
    assert said.unknown_characters == ("$",)
    told = json.loads(next(said.to_lines(n_best=False, alignments=False, as_json=True)))
    assert (told["unknown_characters"], told["segments"]) == (["$"], ["one two."])


def test_a_short_word_has_time_and_what_was_not_read_is_told(voice: SpeechPredictor) -> None:
    assert voice.get_max_frames(1) * voice.audio.config.frame_seconds >= 2.0
    stuck, read = torch.eye(6)[[0] * 6], torch.eye(6)
    mel = np.zeros((6, 40), np.float32)
    for alignment, told in ((stuck, "4 of 5 symbols were skipped"), (read, None)):
        piece = SpeechSegment((*"seven", "</s>"), mel, alignment, False, lambda: np.zeros(9, np.float32))
        found = SpeechPrediction(0, "seven", (piece,)).warnings
        assert [told is not None and one.startswith(told) for one in found] == [True] * (told is not None)


def test_a_style_can_be_looked_at(run: Run, tmp_path: Path) -> None:
    def look(*args: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli_app.app, ["look", str(run.folder), "one", "--device", "cpu", *args])
        return found.exit_code, str(found.exception)

    made = {}
    for name, asked in {"usual": [], "mixed": ["--style-weights", "3=2"]}.items():
        assert look("--out", str(tmp_path / f"{name}.html"), *asked)[0] == 0
        made[name] = (tmp_path / f"{name}.html").read_bytes()
    assert made["usual"] != made["mixed"]
    assert "there is no such file" in look("--style-audio", "nowhere.wav")[1]


def test_a_folder_is_written_again_if_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "0001.wav").write_bytes(b"kept")
    with pytest.raises(InputError, match=r"already exists.* --overwrite"):
        WavWriter(tmp_path)
    said = WavWriter(tmp_path, overwrite=True)(SpeechPrediction(0, "one", (), np.zeros(80, np.float32)))
    assert said.file == tmp_path / "0001.wav"
    assert said.file.read_bytes().startswith(b"RIFF")


def test_the_command_writes_files_and_loses_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = run_cli(run.folder, "one")
    assert (code, out) == (0, "speech.wav\tone\n"), error
    assert run_cli(run.folder, "one")[1] == "speech-2.wav\tone\n"
    code, out, _ = run_cli(run.folder, "two", "--out", "a/b.flac", "--style-weights", "2=0.5", "--json")
    told = json.loads(out)
    assert (told["file"], told["style_weights"][1], told["sample_rate"]) == ("a/b.flac", 0.5, 16000)
    wave, rate = samples(tmp_path / "a" / "b.flac")
    assert (len(wave) / rate, rate) == (pytest.approx(told["duration_seconds"], abs=1e-3), 16000)
    (tmp_path / "lines.txt").write_text("one\n\nthree\n", encoding="utf-8")
    code, out, error = run_cli(run.folder, "lines.txt", "--out", "many", "--on-error", "skip")
    assert out.splitlines() == ["many/0001.wav\tone", "", "many/0003.wav\tthree"]
    assert "line 2 has nothing to speak" in error
    code, _, error = run_cli(run.folder, "lines.txt", "--out", "many")
    assert code == 1
    assert "many/0001.wav already exists, and is not overwritten" in error
    (tmp_path / "two.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert "is one file, but there are more lines" in run_cli(run.folder, "two.txt", "--out", "a.wav")[2]
    code, _, error = run_cli(run.folder, "one", "--out", "c.wav", "--attention-map", "map.png")
    assert code == 0, error
    assert (tmp_path / "map.png").stat().st_size > 5000


WRONG = {
    "weights": (["one", "--style-weights", "9=1"], "a token from 1 to 8"),
    "both": (["one", "--style-weights", "1=1", "--style-audio", "x.wav"], "exclude each other"),
    "no such file": (["one", "--style-audio", "gone.wav"], "--style-audio gone.wav: there is no such file"),
    "no recording": (["one", "--style-audio", "text.wav"], "not a recording in WAV, FLAC or OGG"),
    "unknown": (["ein Ü"], "the voice does not know ü, because no training text has it"),
    "nothing": ([" "], "line 1 has nothing to speak"),
    "an ending": (["one", "--out", "a.mp3"], "speech is written as .wav, .flac, .ogg"),
    "a file": (["one", "--out", "text"], "is a file, but no audio file"),
    "a beam": (["one", "--beam-size", "3"], "--beam-size: this model speaks"),
    "links": (["one", "--alignments"], "--alignments: only translations"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_said_is_refused(case: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("text.wav", "text"):
        Path(name).write_text("this is a text", encoding="utf-8")
    args, why = WRONG[case]
    code, _, error = run_cli(run.folder, *args)
    assert code == 1
    assert why in error


def test_other_tasks_have_no_style() -> None:
    with pytest.raises(InputError, match="--style-weights: this model does not generate"):
        NBestOptions.from_command_line(style_weights="1=1")


# ------------------------------------------------------------------------------------------------- looking


def test_a_scene_of_speech_can_be_told_anew(voice: SpeechPredictor) -> None:
    [scene] = voice.build_viewer_data("forty two")
    [layer] = scene.layers
    assert layer.name == "decoder.attention"
    assert list(layer.col_labels or ()) == [*"forty␣two", "</s>"]
    assert scene.speech is not None
    assert scene.style is not None
    assert layer.shape[0] == scene.speech.num_steps
    assert scene.style.names == tuple(f"token {n}" for n in range(1, 9))
    assert scene.resynthesize is not None
    other = scene.resynthesize([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert other.style is not None
    assert other.style.mean_weights.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        voice.build_viewer_data("forty two. one")
    assert any("the text has 2 segments" in str(one.message) for one in found)
    with pytest.raises(InputError, match="this model speaks"):
        voice.build_viewer_data("one", "two")


# ------------------------------------------------------------------------------------------------- judging


def test_an_evaluation_of_built_in_voices(run: Run) -> None:
    spoken = io.StringIO()
    found = evaluate(jumok.load(run.folder, "cpu"), "test", SpeechOptions(), Console(file=spoken, width=200))
    kept = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    lines = (run.folder / "eval" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    each = [json.loads(line) for line in lines]
    assert kept["num_examples"] == len(each) == len(jumok.load(run.folder, "cpu").load_split("test").examples)
    assert kept["mcd"] == pytest.approx(np.mean([one["mcd"] for one in each]), abs=1e-3)
    assert kept["alignment/diagonality"] == pytest.approx(np.mean([one["diagonality"] for one in each]), abs=1e-3)
    assert {row["emotion"] for row in kept["styles"]} == {one["emotion"] for one in each}
    assert [row["token"] for row in kept["style_tokens"]] == [str(n) for n in range(1, 9)]
    assert 0 <= kept["style/pitch_concordance"] <= 1
    assert any(alarm.startswith("style tokens have no effect") for alarm in kept["alarms"])
    assert "ALARM: style tokens have no effect" in spoken.getvalue()
    for name in ("test-tokens.png", "test-1.png"):
        assert (run.folder / "figures" / name).stat().st_size > 5000
    assert samples(run.folder / "eval" / "sample-1.wav")[1] == 16000
    assert found.statistic(np.array([0, 0])) == pytest.approx(each[0]["mcd"], abs=1e-3)


def test_runs_are_compared_by_how_far_they_are_from_the_recordings(run: Run, tmp_path: Path) -> None:
    other = train_run(tmp_path / "other", small_recipe("tacotron", "data.held_out_size=5", "train.seed=2"))
    compare([run, other], "test", SpeechOptions(), tmp_path / "out", "cpu", Console(quiet=True))
    told = json.loads((tmp_path / "out" / "test.json").read_text(encoding="utf-8"))
    assert [one["low"] <= one["value"] == one["mcd"] <= one["high"] for one in told] == [True, True]


def test_judges_of_recordings_with_labels(tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speak_judges, "NUM_STEPS", 3)
    monkeypatch.setattr(speak_judges, "BATCH_SIZE", 8)
    lines = (table / "metadata.tsv").read_text(encoding="utf-8").splitlines()
    new = [line.replace("speaker 1", "a new one") if line.endswith("test") else line for line in lines]
    (table / "new.tsv").write_text("\n".join(new), encoding="utf-8")
    chosen = [*TABLE, f"data.train={table / 'new.tsv'}", f"data.test={table / 'new.tsv'}"]
    run = train_run(tmp_path / "run", small_recipe("tacotron", *chosen))
    kept = evaluate(jumok.load(run.folder, "cpu"), "test", SpeechOptions(), Console(quiet=True)).metrics
    rows = {(row["label"], row["speakers"]): row for row in kept["judges"]}
    assert rows["emotion", "known"]["count"] + rows["emotion", "new"]["count"] == 6
    assert rows["text", "new"]["chance"] == 0.5
    assert ("speaker", "new") not in rows  # who is not known is not asked for
    assert kept["judges/emotion_new"] == rows["emotion", "new"]["synthesized"]


def test_a_judge_learns_and_styles_come_from_other_texts() -> None:
    chance = np.random.default_rng(1)
    labels = [n % 3 for n in range(60)]
    mels = [np.zeros((int(chance.integers(8, 30)), 20), np.float32) for _ in labels]
    for mel, label in zip(mels, labels, strict=True):
        mel[:, 6 * label : 6 * label + 5] = 0.6
    model = speak_judges.train_judge(mels, labels, seed=1, device=torch.device("cpu"), num_steps=20)
    found = speak_judges.predict_probabilities(model, mels)
    assert found.sum(1) == pytest.approx(np.ones(60))
    assert (found.argmax(1) == labels).mean() > 0.9

    def one(text: str, speaker: str) -> SpeechExample:
        return SpeechExample(BuiltinUtterance(1, 1), text, "", speaker)

    given = [one("a", "x"), one("a", "x"), one("b", "y"), one("b", "x"), one("c", "y")]
    assert speak_judges.choose_style_references(given) == [3, 3, 4, 0, 2]
    assert speak_judges.choose_style_references(given[:2]) == [0, 1]
    assert speak_metrics.compute_concordance([1.0, 3.0, 2.0], [10.0, 20.0, 30.0]) == pytest.approx(2 / 3)


# ------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", ["fsdd", "arctic", "ravdess"])
def test_every_recipe_of_recordings_trains_and_speaks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "data" / "speech" / name, 30)
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    run = train_run(tmp_path / "run", small_recipe(f"tacotron/{name}", "data.held_out_size=3"))
    assert jumok.load(run.folder, "cpu").speak("two").sample_rate == run.recipe.audio.sample_rate


MISFITS = {
    "mels": (["model.n_mels=40"], "both must be equal"),
    "linear": (
        ["audio.linear_spectrogram=true"],
        "model.linear_bins=0, but audio has 80 mels and 513 frequencies",
    ),
    "hop": (["audio.hop_length=2000"], "hop_length=2000, win_length"),
    "a typo": (["audio.sample_ratte=1"], "did you mean audio.sample_rate"),
    "numbers": (["text.number_language=fr"], "text.number_language"),
    "best": (["evaluation.select_by=bleu"], "evaluation.select_by"),
    "pause": (["decode.pause_seconds=-1"], "0 or more"),
    "few mels": (["model.n_mels=13", "audio.n_mels=13"], "more than 13 is expected"),
    "voices": (["data.builtin_size=0"], "1 or more is expected"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_recipe_that_does_not_fit_says_why(case: str) -> None:
    overrides, why = MISFITS[case]
    with pytest.raises(InputError, match=why):
        recipe.load("tacotron", overrides)


def test_what_a_token_does_is_told_apart_from_what_texts_are_like() -> None:
    levels, rng = np.array([0.5, 1.0, 4.0, 2.0]), np.random.default_rng(1)
    noise = 0.01 * rng.standard_normal((3, 4))
    found = speak_metrics.estimate_effects(levels + np.array([[0.0], [0.3], [-0.3]]) + noise)
    assert [mean for mean, _ in found] == pytest.approx([1.875, 2.175, 1.575], abs=0.02)
    assert all(off < 0.02 for _, off in found)  # texts differ by far more
    (mean, off), (_, unknown) = speak_metrics.estimate_effects([[1.0, math.nan, 3.0], [2.0, 2.0, math.inf]])
    assert mean == pytest.approx(2.0, abs=0.3)
    assert math.isfinite(off)
    assert math.isfinite(unknown)
    assert all(math.isnan(x) for one in speak_metrics.estimate_effects([[math.nan] * 2] * 2) for x in one)


# ------------------------------------------------------------------------------------ styles from others


def test_styles_are_learned_from_others_of_the_same_speaker(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[list[str] | None] = []

    class Utterances(speak_task.SpeechBatcher):
        def __init__(self, *args: object, **more: object) -> None:
            made.append(more.get("style_groups"))  # type: ignore[arg-type]
            super().__init__(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(speak_task, "SpeechBatcher", Utterances)
    asked = [f"data.train={table}", "data.test=null", *TABLE]
    train_run(tmp_path / "own", small_recipe("tacotron/fsdd", *asked, "data.style_reference=[]"))
    assert set(map(type, made)) == {type(None)}
    made.clear()
    train_run(tmp_path / "other", small_recipe("tacotron/fsdd", *asked, "data.style_reference=[speaker, emotion]"))
    [manners] = [one for one in made if one is not None]  # validation listens to each itself
    assert set(manners) == {f"speaker {n}\n{mood}" for n in range(3) for mood in ("sad", "merry")}


def test_a_style_from_others_needs_to_know_who_they_are(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "voices", 12)
    lines = (folder / "metadata.tsv").read_text().replace("\tspeaker 1\t", "\t\t")
    (folder / "metadata.tsv").write_text(lines)
    chosen = small_recipe("tacotron/fsdd", f"data.train={folder}", "data.test=null", *TABLE)
    with pytest.raises(InputError, match=r"metadata.tsv:3 has no speaker.*data.speaker_column"):
        train_run(tmp_path / "run", chosen)
