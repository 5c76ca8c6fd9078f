"""A trained voice at work: texts in, sounds out, in a style of one's choice; and how good it is."""

from __future__ import annotations

import functools
import itertools
import math
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.batch import Tokens
from jumok.data.formats import Flaw
from jumok.data.frames import Heard
from jumok.data.recordings import Recording
from jumok.data.sentences import sentences
from jumok.data.sound import Sound, Wave, wav
from jumok.data.spoken import Symbols
from jumok.errors import InputError
from jumok.files import read_json
from jumok.metrics.alignment_health import alignments_health, style_effect, style_health
from jumok.metrics.distortion import distortion
from jumok.models.tacotron import Said
from jumok.speech import Speech
from jumok.tasks.common import Asked
from jumok.tasks.reader import Prediction, Reader, mean_losses
from jumok.tasks.spoken import Piece, Spoken, parts, read_tokens
from jumok.tasks.verdicts import Judgement
from jumok.training import Report

if TYPE_CHECKING:
    from jumok.look.scene import Scene
    from jumok.look.without import Out

__all__ = ["Encoded", "Piece", "Search", "Speaker", "Spoken"]

AT_ONCE = 32  # pieces of text that are said together
FRAMES = 20_000  # in a batch whose loss is computed
LOOKED_AT = 32  # utterances whose attention is measured at a validation
AT_LEAST = 2.0  # seconds that any text may take: silence before and after a short word is as long as ever
PAUSES = ".,!?;:"  # signs between sentences, and parts of them
LIKE = {"!": ".", "?": ".", ";": ",", ":": ","}  # signs that are read as others, if a voice never saw them
TOO_LONG = 1.5  # times what the slowest recording took for as many symbols: it is not going to stop
LAYER = "decoder.attention"
END = "</s>"


@dataclass(frozen=True)
class Search(Asked):
    """What one asks of a voice: a style. There is nothing to search here."""

    has_style: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.beam, self.n_best, self.sample) != (None, 1, False):
            raise InputError(
                "--beam, --n-best and --sample are for models that write text; this one speaks, and "
                "--style-from or --token say how"
            )
        if self.style_from is not None and self.token is not None:
            raise InputError("--style-from and --token came: a style is taken from one of them")


class Encoded(NamedTuple):
    """The symbols of a recording, the recording, and what is known of how it is spoken."""

    ids: list[int]
    sound: Heard
    manner: str = ""


class Speaker(Reader):
    """A model that says texts.

    >>> voice = jumok.load("runs/tacotron")  # doctest: +SKIP
    >>> said = voice.say("forty two", token="3=0.4")  # doctest: +SKIP
    >>> said.wave.shape, said.rate, said.pieces[0].alignment.shape  # doctest: +SKIP
    ((14400,), 16000, torch.Size([18, 10]))
    """

    def __init__(
        self, use: Any, model: Any, tokenizer: Symbols, search: Search | None = None, *, wholly: bool = False
    ) -> None:
        super().__init__(use, model, tokenizer)
        self.search = Search() if search is None else search  # that evaluations speak with
        self.sound: Sound = use.sound
        self._wholly = wholly

    def searching(self, search: Search) -> Speaker:
        """The same voice; evaluations ask it for this."""
        return Speaker(self.use, self.model, self.tokenizer, search, wholly=self._wholly)

    def judged_wholly(self) -> Speaker:
        """The same voice; evaluations take their time, and look at styles too."""
        return Speaker(self.use, self.model, self.tokenizer, self.search, wholly=True)

    # ------------------------------------------------------------------------------------------- from texts

    def say(
        self,
        text: str,
        *,
        style_from: str | Path | None = None,
        token: str | Mapping[int, float] | None = None,
    ) -> Spoken:
        """One text of any length, in the usual style, that of a recording, or a mix of tokens: "3=0.4,5=0.3",
        or ``{3: 0.4, 5: 0.3}``.

        Sentences are said one after the other.
        """
        if isinstance(token, Mapping):
            token = ",".join(f"{number}={weight}" for number, weight in token.items())
        search = Search(style_from=None if style_from is None else str(style_from), token=token)
        return next(self.predict([text], search))

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Spoken]:
        """The sound of every line, in their order."""
        weights = self.style(search)
        texts = iter(lines)
        while some := list(itertools.islice(texts, AT_ONCE)):
            cut = [self.pieces(text, f"line {number}") for number, text in enumerate(some, first + 1)]
            said = iter(self.said([piece for pieces in cut for piece in pieces], weights))
            for number, (text, pieces) in enumerate(zip(some, cut, strict=True), first):
                yield self.joined(number, text, list(itertools.islice(said, len(pieces))), weights)
            first += len(some)

    def joined(self, number: int, text: str, pieces: Sequence[Piece], weights: Tensor | None) -> Spoken:
        """What was said in several goes, with pauses between them."""
        rate, decode = self.sound.config.rate, self.run.recipe.decode
        pause = np.zeros(round(decode.pause * rate), np.float32)
        waves = [part for one in pieces for part in (pause, one.wave)][1:]
        signs = tuple(self.left_out(text))
        return Spoken(number, text, tuple(pieces), np.concatenate(waves), rate, weights, left_out=signs)

    def pieces(self, text: str, where: str) -> list[str]:
        """A text in parts that are said in one go: sentences, and of what is too long, parts of sentences."""
        symbols: Symbols = self.tokenizer
        text = self._readable(text)
        unknown = self._unknown(text)
        signs = [one for one in unknown if _is_sign(one)]
        if len(unknown) > len(signs):
            strange = " ".join(one for one in unknown if one not in signs)
            raise InputError(
                f"{where}: the voice does not know {strange}, for no text that it learned from has it; it "
                f"knows {' '.join(symbols.characters).strip()}"
            )
        if signs:
            warnings.warn(f"the voice does not know {' '.join(signs)}, and leaves it out", stacklevel=2)
        # An apostrophe stands inside a word, all else between words.
        plain = str.maketrans({one: "" if one == "'" else " " for one in signs})
        whole = [symbols.normal(symbols.normal(one).translate(plain)) for one in sentences(text)]
        most = self.run.recipe.decode.symbols or self._sizes["symbols"]

        def fits(part: str) -> bool:
            return len(symbols.encode(part)) <= most and not symbols.unknown(part)

        found = [part for one in whole for part in parts(one, fits)]
        if not any(any(map(str.isalnum, part)) for part in found):
            raise InputError(f"{where} has nothing to say; a text is expected, it is {text[:60]!r}")
        return found

    def left_out(self, text: str) -> list[str]:
        """The signs of a text that the voice does not know, and does without, but for those of pauses."""
        return [one for one in self._unknown(self._readable(text)) if _is_sign(one) and one not in PAUSES]

    def _readable(self, text: str) -> str:
        known = set(self.tokenizer.characters)
        return text.translate({ord(one): other for one, other in LIKE.items() if one not in known >= {other}})

    def _unknown(self, text: str) -> list[str]:
        return [one for one in self.tokenizer.unknown(text) if one != " "]  # without it, word by word is said

    def said(self, texts: Sequence[str], weights: Tensor | None) -> Iterator[Piece]:
        """Texts that are short enough, each in one go.

        ``weights`` of style tokens are ``(1, H, N)`` for all, or ``(B, H, N)``, a style for each.
        """
        for begin in range(0, len(texts), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            each = weights if weights is None or len(weights) == 1 else weights[some]
            yield from self._pieces(texts[some], each)

    @torch.inference_mode()
    def _pieces(self, texts: Sequence[str], weights: Tensor | None) -> list[Piece]:
        style = None if weights is None else self.model.style_from(weights)
        ids = [self.tokenizer.encode(text) for text in texts]
        longest = self.longest(max(map(len, ids)))
        said = self.model.say(Tokens.padded(ids).to(self.device), style=style, longest=longest)
        spectra = said.mels if said.linear is None else said.linear
        found = []
        for number, text in enumerate(texts):
            limit = self.longest(len(ids[number]))  # its own, whatever it is said with
            frames = min(said.frames[number], limit)
            steps = -(-frames // self.run.recipe.model.reduction)
            found.append(
                Piece(
                    (*self.tokenizer.spelled(text), END),
                    _numbers(said.mels[number, :frames]),
                    said.alignments[number, :steps, : len(ids[number])].float().cpu(),
                    said.cut[number] or said.frames[number] > limit,
                    functools.partial(self.heard, _numbers(spectra[number, :frames])),
                )
            )
        return found

    def heard(self, spectra: NDArray[np.float32]) -> Wave:
        """The waveform of spectra ``(T, M)``."""
        decode = self.run.recipe.decode
        return self.sound.wave(spectra, turns=decode.turns, sharpen=decode.sharpen)

    def longest(self, symbols: int) -> int:
        """The frames after which a text of so many symbols is cut off."""
        frames = math.ceil(TOO_LONG * float(self._sizes["frames a symbol"]) * symbols)
        return max(frames, round(AT_LEAST / self.sound.config.seconds))

    @functools.cached_property
    def _sizes(self) -> dict[str, Any]:
        path = self.run.folder / "sizes.json"
        found: dict[str, Any] = read_json(path, dict)
        if not all(isinstance(found.get(name), int | float) for name in ("frames a symbol", "symbols")):
            raise InputError(f"{path} is damaged: expected numbers as frames a symbol and symbols")
        return found

    # ----------------------------------------------------------------------------------------------- styles

    def style(self, search: Search) -> Tensor | None:
        """The weights of style tokens ``(1, H, N)`` that are asked for; None: the voice has no styles."""
        tokens = self.model.style
        if tokens is None:
            if search.style_from is not None or search.token is not None:
                raise InputError("this voice has no style tokens: train one whose recipe has model.style")
            return None
        if search.style_from is not None:
            return self.style_of(self.sound.mel(self._reference(Path(search.style_from))))
        if search.token is not None:
            return self.mixed(read_tokens(search.token, tokens.config.tokens))
        usual: Tensor = tokens.usual
        return usual

    def _reference(self, path: Path) -> Wave:
        if not path.is_file():
            raise InputError(f"--style-from {path}: there is no such file; a recording is expected")
        return self.sound.read(path)

    @torch.no_grad()
    def style_of(self, *mels: NDArray[Any]) -> Tensor:
        """How much of each token is in these sounds ``(T, M)``, by head: ``(B, H, N)``."""
        found = []
        for begin in range(0, len(mels), AT_ONCE):
            some = [torch.from_numpy(np.asarray(x, np.float32)) for x in mels[begin : begin + AT_ONCE]]
            batch = Speech.of([[0]] * len(some), some).to(self.device)
            found.append(self.model.style.weights(batch.mels, batch.sound))
        return torch.cat(found)

    def mixed(self, weights: Sequence[float]) -> Tensor:
        """The same weights for all heads, ``(1, H, N)``."""
        row = torch.tensor(weights, dtype=torch.float32, device=self.device)
        return row.expand(1, self.model.style.config.heads, -1)

    # -------------------------------------------------------------------------------------------- attention

    def looking(self, text: str) -> Callable[[], Scene]:
        return self._looking(text, self.style(self.search))

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """What is said, where in the text each step of it looked, and its style, for the viewer.

        ``without`` some of it, the same again.
        """
        from jumok.look.without import before_and_after

        if target is not None:
            raise InputError("--target is for models that write text; this one speaks")
        return before_and_after(self.model, without, self.looking(text))

    def _looking(self, text: str, weights: Tensor | None) -> Callable[[], Scene]:
        first, *others = self.pieces(text, "the text")
        if others:
            warnings.warn(
                f"a text that is said in {1 + len(others)} parts: shown is the first, {first!r}; give another"
                " one to see that",
                stacklevel=2,
            )
        return lambda: self.scene(first, weights)

    def scene(self, text: str, weights: Tensor | None) -> Scene:
        """What is said of a text in one go, with weights of style tokens ``(1, H, N)``."""
        [piece] = self.said([text], weights)
        return self._scene_of(piece, text, weights)

    def _scene_of(self, piece: Piece, text: str, weights: Tensor | None) -> Scene:
        from jumok.look.scene import Scene, Style
        from jumok.look.scene import Speech as Heard

        style = None
        if weights is not None:
            names = [f"token {n}" for n in range(1, weights.shape[2] + 1)]
            style = Style(tuple(names), weights[0].float().cpu().numpy())
        return Scene.of_weights(
            {LAYER: piece.alignment},
            cols=["␣" if one == " " else one for one in piece.symbols],
            title=text,
            label=str(piece.health),
            speech=Heard(
                piece.mel,
                seconds=self.sound.config.seconds,
                wave=wav(piece.wave, self.sound.config.rate),
                step=self.run.recipe.model.reduction,
            ),
            style=style,
            retell=None if style is None else lambda wish: self.scene(text, self.mixed(wish)),
        )

    def draw(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The spectrogram of the first part that is said, with the alignment, and the style tokens."""
        from jumok.look import show

        assert isinstance(prediction, Spoken)
        piece = prediction.pieces[0]
        scene = self._scene_of(piece, piece.text, prediction.style)
        return show.save(replace(scene, title=title or scene.title), path)

    # ------------------------------------------------------------------------------------------------- data

    def encode(self, examples: Iterable[Recording]) -> Iterator[Encoded | Flaw]:
        """What is learned of recordings, once their spectra are on the disk."""
        found: Iterator[Encoded | Flaw] = self.use.noted(self._encode(examples))
        return found

    def _encode(self, examples: Iterable[Recording]) -> Iterator[Encoded | Flaw]:
        cache, longest = self.use.cache, self.run.recipe.data.longest
        for one in cache.filled(examples):
            if isinstance(one, Flaw):
                yield one
                continue
            seconds = cache.frames(one.sound) * self.sound.config.seconds
            if seconds > longest:
                told = f"{seconds:.1f} seconds, and data.longest is {longest:g}"
                yield Flaw(f"{one.where} {one.sound.name}", "too long a recording", told)
            else:
                yield Encoded(self.tokenizer.encode(one.text), one.sound, self.use.manner(one))

    def batch(self, encoded: Sequence[Encoded]) -> Speech:
        """All of these at once, on the device."""
        data = self.use.utterances(encoded, FRAMES, 0, alike=False)
        found: Speech = data.collate(range(len(encoded))).to(self.device)
        return found

    # ----------------------------------------------------------------------------------------------- judging

    def loss(self, examples: Sequence[Recording]) -> float:
        return self._losses(examples)["loss"]

    @torch.inference_mode()
    def _losses(self, examples: Sequence[Recording]) -> dict[str, float]:
        encoded = self.encoded(self.encode(examples), None)
        return mean_losses(self.model, self.use.utterances(encoded, FRAMES, 0, alike=False), self.device)

    def report(self, examples: Sequence[Recording]) -> Report:
        """For the training loop: does it read, and do styles make a difference?"""
        losses = self._losses(examples)
        told = {name: losses[name] for name in ("loss", "mel", "stop")}
        figures = told | self.health(examples[:LOOKED_AT])
        best = self.run.recipe.score.best
        if best in figures:
            return Report(figures, best=best, higher_is_better=False)
        return Report(figures, best=f"alignment/{best}", tie="loss")

    @torch.inference_mode()
    def health(self, examples: Sequence[Recording]) -> dict[str, float]:
        """Of texts that the voice says by itself, each in the style of its recording."""
        batch = self.batch(self.encoded(self.encode(examples), None))
        style, figures = None, {}
        if self.model.style is not None:
            weights = self.model.style.weights(batch.mels, batch.sound)
            style = self.model.style_from(weights)
            figures = style_health(weights)
            if len(examples) > 1:
                own, other = (self.model.told(batch, style=one) for one in (style, style.roll(1, 0)))
                figures["style/effect"] = style_effect(own, other, batch.frames)
        longest = self.longest(max(batch.text.lengths))
        said = self.model.say(batch.text, style=style, longest=longest)
        found = alignments_health(said.alignments.float(), said.steps, batch.text.lengths, ends=True)
        found["alignment/cut"] = sum(said.cut) / len(said.cut)
        return {"mcd": self._apart(said, batch), **found, **figures}

    def _apart(self, said: Said, batch: Speech) -> float:
        """How far what was said is from the recordings, in dB, on average."""
        pairs = zip(said.mels, said.frames, batch.mels, batch.frames, strict=True)
        each = [
            distortion(_numbers(own[:size]), _numbers(real[:frames]), spans=-self.sound.config.floor).decibels
            for own, size, real, frames in pairs
        ]
        return float(np.mean(each))

    def judge(self, examples: Sequence[Recording]) -> Judgement:
        """Does it read its texts, how far is it from the recordings, and what do styles do?"""
        from jumok.tasks import speech_scores

        return speech_scores.judge(self, examples, wholly=self._wholly)


def _is_sign(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSZC"


def _numbers(x: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = x.float().cpu().numpy()
    return found
