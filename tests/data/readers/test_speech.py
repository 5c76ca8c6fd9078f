"""Recordings with transcripts: layouts, and invalid or missing recordings."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jumok.data.audio import AudioConfig, AudioLimits, AudioProcessor, save_audio
from jumok.data.builtin.spoken_numbers import synthesize_text
from jumok.data.readers.invalid_examples import InvalidExample, SkippedExamples, skip_invalid
from jumok.data.readers.speech import (
    AudioFile,
    BuiltinUtterance,
    SpeechColumns,
    SpeechExample,
    make_builtin_examples,
    read_speech_examples,
)
from jumok.errors import InputError

soundfile = pytest.importorskip("soundfile")

TEXTS = {"a": 'she said "one|" ', "b": "친구와 둘", "c": "three, 3"}
PITCHES = {"a": 250.0, "b": 500.0, "c": 1000.0}


def write_recordings(folder: Path, suffix: str = ".wav") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pitch in PITCHES.items():
        save_audio(folder / f"{name}{suffix}", 0.5 * np.sin(2 * np.pi * pitch * np.arange(1600) / 16000), 16000)


def write_tar(path: Path, folder: Path, under: str = "") -> Path:
    with tarfile.open(path, "w") as tar:
        for example in sorted(folder.rglob("*")):
            if example.is_file():
                tar.add(example, f"{under}{example.relative_to(folder)}")
    return path


def measure_pitches(examples: list[SpeechExample | InvalidExample]) -> dict[str, float]:
    """Of each text, the pitch of its sound."""
    pitches = {}
    for example in examples:
        assert isinstance(example, SpeechExample), str(example)
        waveform = example.audio.decode(AudioProcessor())
        assert not isinstance(waveform, InvalidExample)
        pitches[example.text] = float(np.abs(np.fft.rfft(waveform)).argmax() * 16000 / len(waveform))
    return pitches


EXPECTED = {TEXTS[name].strip(): PITCHES[name] for name in TEXTS}


@pytest.mark.parametrize("location", ["folder", "tar", "tar with a folder"])
@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
def test_ljspeech_layout(tmp_path: Path, location: str, suffix: str) -> None:
    folder = tmp_path / "LJ"
    write_recordings(folder / "wavs", suffix)
    texts = [TEXTS["a"].replace("|", ""), TEXTS["b"], TEXTS["c"]]
    lines = [f"a|SHE SAID|{texts[0]}", f"b|{texts[1]}|", f"c|{texts[2]}"]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = folder
    if location != "folder":
        path = write_tar(tmp_path / "packed.tar", folder, "LJSpeech-1.1/" if "with" in location else "")
    expected = {text.strip(): pitch for text, pitch in zip(texts, PITCHES.values(), strict=True)}
    assert measure_pitches(list(read_speech_examples(str(path)))) == expected


def format_tables(folder: Path) -> dict[str, str]:
    """One table, written in three ways."""
    rows = [
        {"file": f"takes/{name}.flac", "text": TEXTS[name], "speaker": speaker, "emotion": "calm", "split": split}
        for name, speaker, split in (("a", "ann", "train"), ("b", "bob", "dev"), ("c", "ann", "train"))
    ]
    quoted = [[f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row.values()] for row in rows]
    return {
        "my.tsv": "\n".join("\t".join(row) for row in [list(rows[0]), *(list(row.values()) for row in rows)]),
        "my.csv": "\n".join(",".join(row) for row in [list(rows[0]), *quoted]),
        "my.jsonl": "\n".join(json.dumps(row) for row in rows),
    }


@pytest.mark.parametrize("name", ["my.tsv", "my.csv", "my.jsonl"])
def test_tables_with_speaker_emotion_and_split(tmp_path: Path, name: str) -> None:
    write_recordings(tmp_path / "takes", ".flac")
    (tmp_path / name).write_text(format_tables(tmp_path)[name], encoding="utf-8")
    path = str(tmp_path / name)
    examples = list(read_speech_examples(path))
    assert measure_pitches(examples) == EXPECTED
    assert [example.speaker for example in examples] == ["ann", "bob", "ann"]
    assert {example.emotion for example in examples} == {"calm"}
    assert [example.text for example in read_speech_examples(path, split="val")] == [TEXTS["b"]]
    assert len(list(read_speech_examples(path, split="training"))) == 2
    with pytest.raises(InputError, match=r"no recordings of the split 'test'; its splits are: dev, train"):
        list(read_speech_examples(path, split="test"))


def test_columns_by_name_or_number(tmp_path: Path) -> None:
    write_recordings(tmp_path)
    table = tmp_path / "my.tsv"
    table.write_text("wav\twords\na.wav\tone\nb.wav\ttwo\n")
    assert len(list(read_speech_examples(str(table), columns=SpeechColumns(text="words")))) == 2
    with pytest.raises(InputError, match=r"no column 'text' or 'sentence'.*'words'"):
        list(read_speech_examples(str(table)))
    table.write_text("a\tone\nb\ttwo\n")
    numbers = SpeechColumns(file=1, text=2)
    assert [example.text for example in read_speech_examples(str(table), columns=numbers)] == ["one", "two"]
    assert [example.speaker for example in read_speech_examples(str(table), columns=numbers)] == ["", ""]


def test_tar_with_table_under_jumok_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recordings(tmp_path / "in" / "takes", ".flac")
    (tmp_path / "in" / "metadata.tsv").write_text(format_tables(tmp_path)["my.tsv"] + "\n\nz\tx\n", encoding="utf-8")
    (tmp_path / "data" / "speech").mkdir(parents=True)
    write_tar(tmp_path / "data" / "speech" / "mine.tar", tmp_path / "in")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    *examples, _, invalid = read_speech_examples("speech/mine")
    assert measure_pitches(examples) == EXPECTED
    assert isinstance(invalid, InvalidExample)
    assert invalid.location == f"{tmp_path}/data/speech/mine.tar:metadata.tsv:6"  # not what it was unpacked to
    assert isinstance(examples[0].audio, AudioFile)
    assert examples[0].audio.offset > 0  # it was not unpacked
    assert [
        example.text
        for example in read_speech_examples("speech/mine.tar", split="valid")
        if isinstance(example, SpeechExample)
    ] == [TEXTS["b"]]


def test_audio_path(tmp_path: Path) -> None:
    write_recordings(tmp_path / "in")
    write_tar(tmp_path / "takes.tar", tmp_path / "in", "deep/down/")
    table = tmp_path / "my.tsv"
    table.write_text("file\ttext\na\tone\nb.wav\ttwo\n")
    for location in ("in", "takes.tar"):
        examples = list(read_speech_examples(str(table), audio_path=str(tmp_path / location)))
        assert measure_pitches(examples) == {"one": 250.0, "two": 500.0}
    with pytest.raises(InputError, match=r"there is no folder or .tar 'none'"):
        list(read_speech_examples(str(table), audio_path="none"))


def test_invalid_recordings_stop_or_are_skipped(tmp_path: Path) -> None:
    write_recordings(tmp_path, ".flac")
    flac = (tmp_path / "b.flac").read_bytes()
    (tmp_path / "b.flac").write_bytes(flac[: len(flac) // 2])
    (tmp_path / "text.wav").write_text("this is no sound\n" * 9)
    (tmp_path / "empty.wav").write_bytes(b"")
    table = tmp_path / "my.tsv"
    rows = ["a.flac\tone", "b.flac\ttwo", "text.wav\tthree", "empty.wav\tfour", "gone.wav\tfive", "c.flac\t "]
    table.write_text("\n".join(["file\ttext", *rows]))

    def decoded() -> list[SpeechExample | InvalidExample]:
        results: list[SpeechExample | InvalidExample] = []
        for example in read_speech_examples(str(table)):
            if isinstance(example, SpeechExample):
                waveform = example.audio.decode(AudioProcessor(), f"{example.location} {example.audio.name}")
                example = waveform if isinstance(waveform, InvalidExample) else example
            results.append(example)
        return results

    assert [str(example).partition(" (")[0] for example in decoded()[1:]] == [
        f"{table}:3 b.flac: a damaged recording",
        f"{table}:4 text.wav: not a recording in WAV, FLAC or OGG",
        f"{table}:5 empty.wav: an empty recording",
        f"{table}:6 gone.wav: a missing recording",
        f"{table}:7: an empty text",
    ]
    skipped = SkippedExamples()
    assert [example.text for example in skip_invalid(decoded(), "skip", skipped)] == ["one"]
    assert skipped.total == 5
    with pytest.raises(InputError, match=r"my.tsv:3 b.flac: a damaged recording.*data.on_error=skip"):
        list(skip_invalid(decoded(), "stop", SkippedExamples()))
    too_large = AudioFile.from_path(tmp_path / "a.flac").decode(AudioProcessor(), limits=AudioLimits(max_bytes=100))
    assert "too many bytes" in str(too_large)


def test_invalid_data_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        list(read_speech_examples(str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match="cannot be read from the hub"):
        list(read_speech_examples("hub:some/where"))
    (tmp_path / "x.wav").write_bytes(b"x")
    write_tar(tmp_path / "no.tar", tmp_path)
    with pytest.raises(InputError, match=r"no.tar contains no table"):
        list(read_speech_examples(str(tmp_path / "no.tar")))
    with io.BytesIO(b"no tar at all") as file:
        (tmp_path / "bad.tar").write_bytes(file.read())
    with pytest.raises(InputError, match=r"bad.tar cannot be read"):
        list(read_speech_examples(str(tmp_path / "bad.tar")))


def test_builtin_utterances() -> None:
    pytest.importorskip("librosa")
    first, second = make_builtin_examples(3, 2, sample_rate=8000, first_index=5)
    assert first.audio == BuiltinUtterance(3, 5, 8000)
    assert first.text == BuiltinUtterance(3, 5).utterance.text
    assert first.emotion == BuiltinUtterance(3, 5).utterance.style
    assert first.audio.identity != second.audio.identity
    waveform = first.audio.decode(AudioProcessor(AudioConfig.for_sample_rate(8000)))
    np.testing.assert_array_equal(waveform, BuiltinUtterance(3, 5, 8000).utterance.waveform)  # as loud as its style is
    resampled = first.audio.decode(AudioProcessor())
    assert len(resampled) == pytest.approx(2 * len(waveform), abs=2)
    assert synthesize_text("one").text == "one"
