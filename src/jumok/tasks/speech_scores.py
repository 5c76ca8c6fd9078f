"""How good a voice is: does it read its texts, how far is it from recordings, what do its styles do?

Every text of a split is said in the style of its own recording, and compared with that. Looked into wholly,

- every style that the data has a name for is given to the same few texts: are pitch and rate in the order of
  the recordings?
- there is more of one style token in turn: what are pitch, energy and duration then?
- texts are said in the style of recordings of *other* texts, and judges listen (``speech_judges.py``).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.data.recordings import Recording, Said
from jumok.data.sound import saved
from jumok.data.voices import STYLES
from jumok.metrics.alignment_health import alignments_health
from jumok.metrics.distortion import distortion
from jumok.metrics.pitch import Prosody, prosody
from jumok.tasks import speech_judges
from jumok.tasks.verdicts import Judgement
from jumok.training import alarms

if TYPE_CHECKING:
    from jumok.tasks.speaker import Speaker
    from jumok.tasks.spoken import Piece

__all__ = ["in_order", "judge"]

TEXTS = 12  # that are said in every style, and with every token
MOST = 24  # styles that are told apart
DRAWN = 2  # utterances that are drawn, and kept as sounds
LOOKED_AT = 64  # utterances whose styles are measured
SHARE = 0.3  # of the style that is the one token
WITHIN = 1.96  # standard errors: 95 % of a normal distribution


def judge(speaker: Speaker, examples: Sequence[Recording], *, wholly: bool) -> Judgement:
    """The figures of some recordings; ``wholly``, also what styles do, which takes its time."""
    encoded = speaker.encoded(speaker.encode(examples), None)
    bands = speaker.sound.config.mels
    mels = [np.asarray(speaker.use.cache[one.sound][:, :bands], np.float32) for one in encoded]
    styles = None if speaker.model.style is None else speaker.style_of(*mels)
    pieces = list(speaker.said([one.text for one in examples], styles))
    spans = -speaker.sound.config.floor
    apart = np.array(
        [distortion(one.mel, mel, spans=spans).decibels for one, mel in zip(pieces, mels, strict=True)]
    )
    figures: dict[str, Any] = {"mcd": float(apart.mean()), "loss": speaker.loss(examples)}
    alignments = [one.alignment for one in pieces]
    figures |= alignments_health(alignments, *zip(*(one.shape for one in alignments), strict=True), ends=True)
    figures["alignment/cut"] = sum(one.is_cut for one in pieces) / len(pieces)
    health = speaker.health(examples[:LOOKED_AT])
    figures |= {name: value for name, value in health.items() if name.startswith("style/")}
    drawings: dict[str, Callable[[Path], Path]] = {}
    if wholly:
        if styles is not None:
            figures |= _by_style(speaker, examples, mels, styles)
            tokens = by_token(speaker, _texts(examples))
            figures["tokens"] = tokens
            drawings["tokens"] = functools.partial(_draw_tokens, tokens)
        if speaker.run.recipe.score.judges:
            figures |= speech_judges.judged(speaker, examples, mels, styles)
        for number, one in enumerate(pieces[:DRAWN], 1):
            saved(_sound(speaker, number), one.wave, speaker.sound.config.rate)
            style = None if styles is None else styles[number - 1 : number]
            drawings[str(number)] = functools.partial(_draw, speaker, examples[number - 1].text, style)
    figures["alarms"] = alarms([{name: x for name, x in figures.items() if isinstance(x, float)}], 1.0)
    return Judgement(
        figures,
        "mcd",
        lambda some: float(apart[some].mean()),
        [
            json.dumps(_told(one, piece, len(mel), far, speaker), ensure_ascii=False)
            for one, piece, mel, far in zip(examples, pieces, mels, apart, strict=True)
        ],
        [
            *(
                f"  {one.text[:60]}  →  {piece.health}"
                for one, piece in zip(examples[:5], pieces, strict=False)
            ),
            *(f"ALARM: {alarm}" for alarm in figures["alarms"]),
        ],
        drawings=drawings,
    )


def _told(example: Recording, piece: Piece, frames: int, apart: float, speaker: Speaker) -> dict[str, Any]:
    health, frame = piece.health, speaker.sound.config.seconds
    return {
        "recording": example.sound.where,
        "text": example.text,
        "speaker": example.speaker,
        "emotion": example.emotion,
        "seconds": round(len(piece.mel) * frame, 3),
        "seconds of the recording": round(frames * frame, 3),
        "mcd": round(float(apart), 3),
        "diagonality": round(health.diagonality, 4),
        "skipped": [piece.symbols[at] for at in health.skipped],
        "repeated": [piece.symbols[at] for at in health.repeated],
        "finished": not piece.is_cut,
    }


def _sound(speaker: Speaker, number: int) -> Path:
    return speaker.run.folder / "eval" / f"said-{number}.wav"


def _draw(speaker: Speaker, text: str, style: Tensor | None, path: Path) -> Path:
    from jumok.look import show

    return show.save(speaker.scene(text, style), path)


def _draw_tokens(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    from jumok.look.style_figure import draw_effects

    return draw_effects(rows, path)


def _texts(examples: Sequence[Recording]) -> list[str]:
    """A few different ones, of all lengths."""
    different = sorted({one.text for one in examples}, key=lambda text: (len(text), text))
    chosen = np.linspace(0, len(different) - 1, min(TEXTS, len(different))).round().astype(int)
    return [different[number] for number in chosen]


# ------------------------------------------------------------------------------------------------- styles


def _by_style(
    speaker: Speaker, examples: Sequence[Recording], mels: Sequence[NDArray[Any]], styles: Tensor
) -> dict[str, Any]:
    """The same texts in each style that has a name, and whether pitch and rate come out in order.

    The order that is expected is that of the recordings, or of the built-in voices as they were made.
    """
    kind = "emotion" if any(one.emotion for one in examples) else "speaker"
    names = [getattr(one, kind) for one in examples]
    different = [name for name in dict.fromkeys(names) if name]
    if not 2 <= len(different) <= MOST:
        return {}
    texts, rows = _texts(examples), []
    for name in different:
        those = [number for number, one in enumerate(names) if one == name]
        said = _measured(speaker, speaker.said(texts, styles[those].mean(0, keepdim=True)))
        real = _measured_recordings(speaker, [examples[number] for number in those[: 2 * TEXTS]])
        wanted = STYLES.get(name) if isinstance(examples[0].sound, Said) else None
        rows.append(
            {
                kind: name,
                "recordings": len(those),
                "pitch wanted": real["pitch"] if wanted is None else wanted.pitch,
                "pitch": said["pitch"],
                "rate wanted": real["rate"] if wanted is None else wanted.speed,
                "rate": said["rate"],
            }
        )
    rows.sort(key=lambda row: row["pitch wanted"])
    return {
        f"style/{name}_in_order": in_order(
            [row[name] for row in rows], [row[f"{name} wanted"] for row in rows]
        )
        for name in ("pitch", "rate")
    } | {"styles": rows}


def in_order(said: Sequence[float], wanted: Sequence[float]) -> float:
    """The share of pairs that are in the right order; what is no number is in no order.

    >>> in_order([90.0, 130.0, 120.0], [1.0, 2.0, 3.0])
    0.6666666666666666
    """
    pairs = [
        (a - b) * (x - y) > 0 for (a, x), (b, y) in itertools.combinations(zip(said, wanted, strict=True), 2)
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def by_token(speaker: Speaker, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Mean pitch, energy and duration of the same texts, with more of one style token each, with intervals.

    The usual style is moved towards the token, by no more than styles of recordings are: with a token alone,
    a voice would say what it never learned to. An interval holds the mean with 95 %, by how much what the
    token does differs from text to text; that the texts themselves differ, in length say, does not count.
    """
    tokens = speaker.model.style.config.tokens
    rows: list[dict[str, Any]] = [{"token": str(number + 1)} for number in range(tokens)]
    said: list[list[Prosody]] = []
    for number in range(tokens):
        alone = speaker.mixed(torch.eye(tokens)[number].tolist())
        weights = torch.lerp(speaker.model.style.usual, alone, SHARE)
        said.append([_heard(speaker, one) for one in speaker.said(texts, weights)])
    for name in ("pitch", "energy", "seconds"):
        found = effects([[getattr(one, name) for one in each] for each in said])
        for row, one in zip(rows, found, strict=True):
            row[name], row[f"{name} ±"] = one
    return rows


def effects(values: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The mean of each row of values, and how far it may be off; a column is one text, and has its own level.

    >>> [(round(mean, 2), round(off, 2)) for mean, off in effects([[1, 5, 9], [3, 7, 10.9]])]
    [(5.0, 0.03), (6.97, 0.03)]
    """
    table = np.array(values, float)
    table[~np.isfinite(table)] = np.nan
    with warnings.catch_warnings():  # of rows and texts that have no number at all
        warnings.simplefilter("ignore", RuntimeWarning)
        own = table - np.nanmean(table, 0) + np.nanmean(table)
        counts = np.isfinite(own).sum(1)
        means, spreads = np.nanmean(own, 1), np.nanstd(own, 1, ddof=1)
    within = np.where(counts > 1, WITHIN * spreads / np.sqrt(np.maximum(counts, 1)), np.nan)
    return list(zip(means.tolist(), within.tolist(), strict=True))


def _heard(speaker: Speaker, piece: Piece) -> Prosody:
    return prosody(piece.wave, speaker.sound.config.rate)


def _measured(speaker: Speaker, pieces: Any) -> dict[str, float]:
    found = [(_heard(speaker, one), len(one.symbols) - 1) for one in pieces]
    return _means(found)


def _measured_recordings(speaker: Speaker, examples: Sequence[Recording]) -> dict[str, float]:
    found = []
    for one in examples:
        wave = one.sound.decode(speaker.sound)
        assert isinstance(wave, np.ndarray)  # it was judged
        found.append((prosody(wave, speaker.sound.config.rate), len(speaker.tokenizer.spelled(one.text))))
    return _means(found)


def _means(found: Sequence[tuple[Prosody, int]]) -> dict[str, float]:
    """Pitch, in the middle, for an octave off is an error; and the rate, symbols a second."""
    pitches = np.array([one.pitch for one, _ in found])
    rates = [symbols / one.seconds for one, symbols in found if one.seconds > 0]
    heard = pitches[np.isfinite(pitches)]
    return {
        "pitch": float(np.median(heard)) if len(heard) else math.nan,
        "rate": float(np.mean(rates)) if rates else math.nan,
    }
