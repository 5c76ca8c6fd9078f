"""Recordings by name: every layout gives the same, and what is broken or missing is named."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from jumok.data.formats import Flaw
from jumok.data.recordings import Columns, Recording, RecordingFile, Said, built_in, find
from jumok.data.sound import Limits, Sound, SoundConfig, saved
from jumok.data.sources import Skipped, usable
from jumok.data.voices import say
from jumok.errors import InputError

soundfile = pytest.importorskip("soundfile")

TEXTS = {"a": 'she said "one|" ', "b": "친구와 둘", "c": "three, 3"}
PITCHES = {"a": 250.0, "b": 500.0, "c": 1000.0}


def sounds(folder: Path, ending: str = ".wav") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pitch in PITCHES.items():
        saved(folder / f"{name}{ending}", 0.5 * np.sin(2 * np.pi * pitch * np.arange(1600) / 16000), 16000)


def packed(path: Path, folder: Path, under: str = "") -> Path:
    with tarfile.open(path, "w") as tar:
        for one in sorted(folder.rglob("*")):
            if one.is_file():
                tar.add(one, f"{under}{one.relative_to(folder)}")
    return path


def heard(found: list[Recording | Flaw]) -> dict[str, float]:
    """Of each text, the pitch of its sound."""
    pitches = {}
    for one in found:
        assert isinstance(one, Recording), str(one)
        wave = one.sound.decode(Sound())
        assert not isinstance(wave, Flaw)
        pitches[one.text] = float(np.abs(np.fft.rfft(wave)).argmax() * 16000 / len(wave))
    return pitches


EXPECTED = {TEXTS[name].strip(): PITCHES[name] for name in TEXTS}


@pytest.mark.parametrize("place", ["folder", "tar", "tar with a folder"])
@pytest.mark.parametrize("ending", [".wav", ".flac", ".ogg"])
def test_as_ljspeech_is_published(tmp_path: Path, place: str, ending: str) -> None:
    folder = tmp_path / "LJ"
    sounds(folder / "wavs", ending)
    texts = [TEXTS["a"].replace("|", ""), TEXTS["b"], TEXTS["c"]]
    lines = [f"a|SHE SAID|{texts[0]}", f"b|{texts[1]}|", f"c|{texts[2]}"]
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    where = folder
    if place != "folder":
        where = packed(tmp_path / "packed.tar", folder, "LJSpeech-1.1/" if "with" in place else "")
    expected = {text.strip(): pitch for text, pitch in zip(texts, PITCHES.values(), strict=True)}
    assert heard(list(find(str(where)))) == expected


def tables(folder: Path) -> dict[str, str]:
    """One table, written in three ways."""
    rows = [
        {"file": f"takes/{name}.flac", "text": TEXTS[name], "speaker": who, "emotion": "calm", "split": split}
        for name, who, split in (("a", "ann", "train"), ("b", "bob", "dev"), ("c", "ann", "train"))
    ]
    quoted = [[f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row.values()] for row in rows]
    return {
        "my.tsv": "\n".join("\t".join(row) for row in [list(rows[0]), *(list(row.values()) for row in rows)]),
        "my.csv": "\n".join(",".join(row) for row in [list(rows[0]), *quoted]),
        "my.jsonl": "\n".join(json.dumps(row) for row in rows),
    }


@pytest.mark.parametrize("name", ["my.tsv", "my.csv", "my.jsonl"])
def test_tables_with_speaker_emotion_and_split(tmp_path: Path, name: str) -> None:
    sounds(tmp_path / "takes", ".flac")
    (tmp_path / name).write_text(tables(tmp_path)[name], encoding="utf-8")
    where = str(tmp_path / name)
    found = list(find(where))
    assert heard(found) == EXPECTED
    assert [one.speaker for one in found] == ["ann", "bob", "ann"]
    assert {one.emotion for one in found} == {"calm"}
    assert [one.text for one in find(where, split="val")] == [TEXTS["b"]]
    assert len(list(find(where, split="training"))) == 2
    with pytest.raises(InputError, match=r"no recordings of the split 'test'; its splits are: dev, train"):
        list(find(where, split="test"))


def test_columns_are_told_by_name_or_number(tmp_path: Path) -> None:
    sounds(tmp_path)
    table = tmp_path / "my.tsv"
    table.write_text("wav\twords\na.wav\tone\nb.wav\ttwo\n")
    assert len(list(find(str(table), columns=Columns(text="words")))) == 2
    with pytest.raises(InputError, match=r"no column 'text' or 'sentence'.*'words'"):
        list(find(str(table)))
    table.write_text("a\tone\nb\ttwo\n")
    numbers = Columns(file=1, text=2)
    assert [one.text for one in find(str(table), columns=numbers)] == ["one", "two"]
    assert [one.speaker for one in find(str(table), columns=numbers)] == ["", ""]


def test_a_tar_with_a_table_in_it_under_jumok_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sounds(tmp_path / "in" / "takes", ".flac")
    (tmp_path / "in" / "metadata.tsv").write_text(tables(tmp_path)["my.tsv"] + "\n\nz\tx\n", encoding="utf-8")
    (tmp_path / "data" / "speech").mkdir(parents=True)
    packed(tmp_path / "data" / "speech" / "mine.tar", tmp_path / "in")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    *found, _, flaw = find("speech/mine")
    assert heard(found) == EXPECTED
    assert isinstance(flaw, Flaw)
    assert flaw.where == f"{tmp_path}/data/speech/mine.tar:metadata.tsv:6"  # not what it was unpacked to
    assert isinstance(found[0].sound, RecordingFile)
    assert found[0].sound.begin > 0  # it was not unpacked
    assert [one.text for one in find("speech/mine.tar", split="valid") if isinstance(one, Recording)] == [
        TEXTS["b"]
    ]


def test_sounds_elsewhere(tmp_path: Path) -> None:
    sounds(tmp_path / "in")
    packed(tmp_path / "takes.tar", tmp_path / "in", "deep/down/")
    table = tmp_path / "my.tsv"
    table.write_text("file\ttext\na\tone\nb.wav\ttwo\n")
    for place in ("in", "takes.tar"):
        found = list(find(str(table), recordings=str(tmp_path / place)))
        assert heard(found) == {"one": 250.0, "two": 500.0}
    with pytest.raises(InputError, match=r"there is no folder or .tar 'none'"):
        list(find(str(table), recordings="none"))


def test_what_is_missing_or_broken_is_named_or_skipped(tmp_path: Path) -> None:
    sounds(tmp_path, ".flac")
    flac = (tmp_path / "b.flac").read_bytes()
    (tmp_path / "b.flac").write_bytes(flac[: len(flac) // 2])
    (tmp_path / "text.wav").write_text("this is no sound\n" * 9)
    (tmp_path / "empty.wav").write_bytes(b"")
    table = tmp_path / "my.tsv"
    rows = ["a.flac\tone", "b.flac\ttwo", "text.wav\tthree", "empty.wav\tfour", "gone.wav\tfive", "c.flac\t "]
    table.write_text("\n".join(["file\ttext", *rows]))

    def decoded() -> list[Recording | Flaw]:
        every: list[Recording | Flaw] = []
        for one in find(str(table)):
            if isinstance(one, Recording):
                wave = one.sound.decode(Sound(), f"{one.where} {one.sound.name}")
                one = wave if isinstance(wave, Flaw) else one
            every.append(one)
        return every

    assert [str(one).partition(" (")[0] for one in decoded()[1:]] == [
        f"{table}:3 b.flac: a damaged recording",
        f"{table}:4 text.wav: no recording in WAV, FLAC or OGG",
        f"{table}:5 empty.wav: an empty recording",
        f"{table}:6 gone.wav: a missing recording",
        f"{table}:7: an empty text",
    ]
    skipped = Skipped()
    assert [one.text for one in usable(decoded(), "skip", skipped)] == ["one"]
    assert skipped.total == 5
    with pytest.raises(InputError, match=r"my.tsv:3 b.flac: a damaged recording.*data.on_error=skip"):
        list(usable(decoded(), "stop", Skipped()))
    large = RecordingFile.of(tmp_path / "a.flac").decode(Sound(), limits=Limits(size=100))
    assert "too many bytes" in str(large)


def test_places_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        list(find(str(tmp_path / "nowhere")))
    with pytest.raises(InputError, match="not read from the hub"):
        list(find("hub:some/where"))
    (tmp_path / "x.wav").write_bytes(b"x")
    packed(tmp_path / "no.tar", tmp_path)
    with pytest.raises(InputError, match=r"no.tar has no table"):
        list(find(str(tmp_path / "no.tar")))
    with io.BytesIO(b"no tar at all") as file:
        (tmp_path / "bad.tar").write_bytes(file.read())
    with pytest.raises(InputError, match=r"bad.tar cannot be read"):
        list(find(str(tmp_path / "bad.tar")))


def test_the_built_in_voices_are_recordings_like_others() -> None:
    pytest.importorskip("librosa")
    first, second = built_in(3, 2, rate=8000, first=5)
    assert first.sound == Said(3, 5, 8000)
    assert first.text == Said(3, 5).utterance.text
    assert first.emotion == Said(3, 5).utterance.style
    assert first.sound.identity != second.sound.identity
    wave = first.sound.decode(Sound(SoundConfig.at(8000)))
    np.testing.assert_array_equal(wave, Said(3, 5, 8000).utterance.wave)  # as loud as its style is
    resampled = first.sound.decode(Sound())
    assert len(resampled) == pytest.approx(2 * len(wave), abs=2)
    assert say("one").text == "one"
