"""A trained captioner at work: pictures in, sentences out, and where it looked; and how good it is."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok import decoding
from jumok.data.captioned import Captioned
from jumok.data.described import Described
from jumok.data.drawn import Drawn
from jumok.data.formats import Flaw
from jumok.data.pictures import LIMITS, Limits, PictureFile, Pixels, decode
from jumok.data.scenes import SIZE
from jumok.data.views import squashed
from jumok.decoding import Hypothesis
from jumok.errors import InputError
from jumok.metrics import alignment, captions
from jumok.metrics.pointing import pointing
from jumok.pictures import Captions, source_of
from jumok.tasks.caption_inputs import INSIDE, Finder
from jumok.tasks.common import AskedOfWriter
from jumok.tasks.reader import Prediction, Reader, mean_loss
from jumok.tasks.verdicts import Judgement
from jumok.training import Report, attention_health

if TYPE_CHECKING:
    from jumok.look.scene import Picture, Scene
    from jumok.look.without import Out

__all__ = ["Caption", "CaptionReader", "Encoded", "Search"]

AT_ONCE = 64  # pictures that are looked at together
TOKENS = 4096  # of captions, in a batch whose loss is computed
SHOWN = 5  # sample captions
DRAWN = 3  # pictures with where the model looked, of a test set
LOOKED_AT = 32  # pictures whose attention is measured at a validation
LONGEST_SIDE = 800  # pixels of a picture that is shown
AnyPicture = PictureFile | Drawn


@dataclass(frozen=True)
class Search(AskedOfWriter):
    """What one asks of a caption; None: what the recipe says."""


@dataclass(frozen=True, eq=False)
class Caption(Prediction):
    """What is said of a picture; ``text``, which a prediction has of what it is about, is its name."""

    caption: str = ""
    words: tuple[str, ...] = ()
    score: float = 0.0
    is_finished: bool = True
    others: tuple[Caption, ...] = ()  # of an n-best list, those behind the first
    weights: Tensor | None = None  # (words, rows, columns): where it looked

    @property
    def picture(self) -> str:
        return self.text

    @property
    def finished(self) -> bool:
        return self.is_finished

    @property
    def has_words(self) -> bool:
        return bool(self.words)

    def written(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The name of the picture, a tab and the caption; in an n-best list, the score behind it."""
        for one in (self, *self.others):
            if as_json:
                known: dict[str, Any] = {"line": one.number, "picture": one.picture, "caption": one.caption}
                known |= {"score": one.score, "finished": one.finished, "words": list(one.words)}
                if one.weights is not None:
                    rows, columns = one.weights.shape[1:]
                    strongest = one.weights.flatten(1).argmax(1).tolist()
                    known |= {"grid": [rows, columns], "places": [divmod(at, columns) for at in strongest]}
                yield json.dumps(known, ensure_ascii=False)
            else:
                fields = [one.picture, one.caption, *([f"{one.score:.4f}"] if n_best else [])]
                yield "\t".join(fields)


class Encoded(NamedTuple):
    """A picture, and the token ids of its captions."""

    picture: AnyPicture
    captions: list[list[int]]


class CaptionReader(Reader):
    """A model that says what is in a picture.

    >>> reader = jumok.load("runs/captioner")  # doctest: +SKIP
    >>> said = reader.describe("photo.jpg")  # doctest: +SKIP
    >>> said.caption, said.weights.shape  # (words, rows, columns)  # doctest: +SKIP
    ('a small red circle left of a star', torch.Size([8, 6, 6]))
    """

    def __init__(self, use: Any, model: Any, tokenizer: Any, search: Search | None = None) -> None:
        super().__init__(use, model, tokenizer)
        self.search = Search() if search is None else search  # that evaluations use
        self.prepare = squashed(use.recipe.encoder.size)
        self._find = Finder()

    def searching(self, search: Search) -> CaptionReader:
        """The same reader; evaluations search like this."""
        return CaptionReader(self.use, self.model, self.tokenizer, search)

    # ---------------------------------------------------------------------------------------- from pictures

    def describe(
        self, picture: str | Path | bytes | Pixels, search: Search | None = None, *, align: bool = True
    ) -> Caption:
        """One picture: its file, the bytes of one, or colours ``(height, width, 3)`` from 0 to 255."""
        if isinstance(picture, str | Path):
            return next(self.predict([str(picture)], search or Search(), align=align))
        return next(self.describe_all([picture], search, align=align))

    def describe_all(
        self,
        pictures: Iterable[bytes | Pixels],
        search: Search | None = None,
        *,
        align: bool = True,
        limits: Limits = LIMITS,
    ) -> Iterator[Caption]:
        """Some pictures together, each the bytes of a file within ``limits``, or colours."""
        some = (("", _pixels_of(picture, limits)) for picture in pictures)
        return self._captions(some, search or Search(), align, 0)

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Caption]:
        """A caption for every picture, told by its name, in their order."""
        names = iter(lines)
        while some := list(itertools.islice(names, AT_ONCE)):
            pixels = ((name, self._pixels(name, number)) for number, name in enumerate(some, first + 1))
            yield from self._captions(pixels, search, align, first)
            first += len(some)

    def _pixels(self, name: str, number: int = 1) -> Pixels:
        if not name.strip():
            raise InputError(f"line {number} is empty; the name of a picture is expected")
        found = self._find(name).decode(name)
        if isinstance(found, Flaw):
            raise InputError(str(found))
        return found

    def _captions(
        self, some: Iterable[tuple[str, Pixels]], search: Search, align: bool, first: int
    ) -> Iterator[Caption]:
        # One after the other: of a large picture no more is kept than what the model sees of it.
        names, squares = zip(*((name, self.prepare(pixels)) for name, pixels in some), strict=True)
        places = self.places(squares)
        found = self.said(places, search, first)
        looked: Iterator[Tensor | None] = itertools.repeat(None)
        if align:
            index = [n for n, each in enumerate(found) for _ in each]
            looked = iter(self.looked(places[index], [one.ids for each in found for one in each]))
        for number, (name, each) in enumerate(zip(names, found, strict=True), first):
            best, *others = (
                Caption(
                    number,
                    name,
                    self.text(one.ids),
                    tuple(self._words(one.ids)),
                    one.score,
                    one.finished,
                    weights=weights,
                )
                for one, weights in zip(each, looked, strict=False)
            )
            yield replace(best, others=tuple(others))

    @torch.inference_mode()
    def places(self, squares: Sequence[NDArray[np.uint8]]) -> Tensor:
        """What the encoder makes of pictures ``(3, S, S)``: ``(B, P, F)``."""
        places: Tensor = self.model.encoder(torch.from_numpy(np.stack(squares)).to(self.device))[0]
        return places

    @torch.inference_mode()
    def said(self, places: Tensor, search: Search, first: int = 0) -> list[list[Hypothesis]]:
        """What a search finds for pictures, given their places: one hypothesis, or the best ones."""
        decode = self.run.recipe.decode
        source, limit = source_of(places), decode.longest
        beam = decode.beam if search.beam is None else search.beam
        if search.sample:
            drawn = decoding.sample(
                self.model,
                source,
                temperature=search.temperature,
                top_k=search.top_k or None,
                top_p=search.top_p if search.top_p < 1 else None,
                generator=torch.Generator().manual_seed(search.seed + first),
                longest=limit,
            )
            return [[one] for one in drawn]
        if beam == 1 and search.n_best == 1:
            return [[one] for one in decoding.greedy(self.model, source, longest=limit)]
        return decoding.beam(
            self.model,
            source,
            size=max(beam, search.n_best),
            n_best=search.n_best,
            length_penalty=decode.length_penalty,
            longest=limit,
        )

    def text(self, ids: Sequence[int]) -> str:
        """A caption as one reads it: what was split off words to be counted is put back."""
        text: str = self.tokenizer.decode(ids)
        for ending in captions.ENDINGS if self.run.recipe.text.plain else ():
            text = text.replace(f" {ending}", ending)
        return text

    def _words(self, ids: Sequence[int]) -> list[str]:
        """As the model says them, one a row of its map."""
        return str(self.tokenizer.decode(ids)).split()

    # -------------------------------------------------------------------------------------------- attention

    @functools.cached_property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of places."""
        found: tuple[int, int] = self.model.encoder.grid(self.run.recipe.encoder.size)
        return found

    @torch.inference_mode()
    def looked(self, places: Tensor, said: Sequence[Sequence[int]]) -> list[Tensor]:
        """Where the model looked for each word of captions, ``(words, rows, columns)``, one a picture.

        Of a Transformer: in its last layer but one, in the mean of its heads.
        """
        maps = self.model.maps(Captions.of(places, self.grid, said).to(self.device))
        weights = maps[max(0, len(maps) - 2)].weights.float().mean(1).cpu()  # (B, T, P)
        return [
            _of_words(one[: len(ids)], self.tokenizer.words_of(ids)).unflatten(-1, self.grid)
            for one, ids in zip(weights, said, strict=True)
        ]

    def looking(self, text: str) -> Callable[[], Scene]:
        return self._looking(text, None)

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """Where the model looks in a picture while it says ``target``, or its own caption, for the viewer.

        ``without`` some of it, the same again: how likely is the caption then?
        """
        from jumok.look.without import before_and_after

        return before_and_after(self.model, without, self._looking(text, target))

    def look_at(
        self, picture: bytes | Pixels, target: str | None = None, *, limits: Limits = LIMITS
    ) -> list[Scene]:
        """The same of the bytes of a file within ``limits``, or of colours."""
        return [self._looking_at("", _pixels_of(picture, limits), target)()]

    def _looking(self, name: str, target: str | None) -> Callable[[], Scene]:
        return self._looking_at(name, self._pixels(name), target)

    def _looking_at(self, name: str, pixels: Pixels, target: str | None) -> Callable[[], Scene]:
        places = self.places([self.prepare(pixels)])
        if target is None:
            ids = list(self.said(places, self.search)[0][0].ids)
        else:
            [ids] = self.tokenizer.encode([self.run.recipe.text.prepared(target)])
        if not ids:
            told = name or "the picture"
            raise InputError(f"{told}: nothing is said of it, so there are no words to look at")
        return lambda: self._scene(name, _shown(pixels, self.grid), places, ids)

    @torch.inference_mode()
    def _scene(self, name: str, picture: Picture, places: Tensor, ids: list[int]) -> Scene:
        from jumok.look.scene import Scene

        batch = Captions.of(places, self.grid, [ids]).to(self.device)
        loss = self.model.loss(batch).parts["nll"].item()
        words = self.tokenizer.words_of(ids)
        layers = {
            one.name: torch.stack([_of_words(head, words) for head in one.weights[0, :, : len(ids)].cpu()])
            for one in self.model.maps(batch)
        }
        rows, columns = self.grid
        return Scene.of_weights(
            layers,
            rows=self._words(ids),
            cols=[f"{row + 1}, {column + 1}" for row in range(rows) for column in range(columns)],
            title=f"{Path(name.rpartition(INSIDE)[2]).name}  →  {self.text(ids)}" if name else self.text(ids),
            label=f"log-probability {-loss:.2f}",
            picture=picture,
        )

    def draw(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The picture, and where the model looked for each word of what it says."""
        from jumok.look import show

        [scene] = self.look(prediction.text)
        return show.save(replace(scene, title=title or scene.title), path)

    # ------------------------------------------------------------------------------------------------- data

    def encode(self, examples: Iterable[Captioned]) -> Iterator[Encoded | Flaw]:
        """What is learned of pictures, once all that the model is given of them is on the disk."""
        cache, prepared = self.use.cache(self.model.encoder), self.run.recipe.text.prepared
        make = self._features if self.use.is_frozen else np.stack
        for one in self.use.noted(cache.filled(examples, self.prepare, make)):
            if isinstance(one, Flaw):
                yield one
            else:
                yield Encoded(one.picture, self.tokenizer.encode([prepared(text) for text in one.captions]))

    def _features(self, squares: list[NDArray[np.uint8]]) -> NDArray[Any]:
        was_training = self.model.training
        self.model.eval()
        features: NDArray[Any] = self.places(squares).float().cpu().numpy()
        self.model.train(was_training)
        return features

    def _places_of(self, encoded: Sequence[Encoded]) -> Iterator[tuple[Tensor, Sequence[Encoded]]]:
        """The places of pictures whose features or squares are on the disk, some at a time."""
        cache = self.use.cache(self.model.encoder)
        for begin in range(0, len(encoded), AT_ONCE):
            some = encoded[begin : begin + AT_ONCE]
            kept = cache.features[cache.rows(one.picture for one in some)]
            if self.use.is_frozen:
                yield torch.from_numpy(kept).to(self.device, torch.float32), some
            else:
                yield self.places(list(kept)), some

    # ----------------------------------------------------------------------------------------------- judging

    @torch.inference_mode()
    def loss(self, examples: Sequence[Captioned]) -> float:
        encoded = self.encoded(self.encode(examples), None)
        given = self.use.given(encoded, self.model, torch.device("cpu"))
        data = Described(given, [one.captions for one in encoded], tokens=TOKENS, seed=0)
        return mean_loss(self.model, data, self.device)

    def report(self, examples: Sequence[Captioned]) -> Report:
        """For the training loop: by greedy search."""
        found = self.searching(Search(beam=1)).judge(examples)
        loss, best = self.loss(examples), self.run.recipe.score.best
        numbers = {name: value for name, value in found.figures.items() if isinstance(value, int | float)}
        return Report(
            {**numbers, "loss": loss, **self._health(examples[:LOOKED_AT])},
            best=best,
            higher_is_better=best != "loss",
            tie=None if best == "loss" else "loss",
            samples=found.samples,
        )

    def _health(self, examples: Sequence[Captioned]) -> dict[str, float]:
        found: list[Encoded] = self.encoded(self.encode(examples), None)
        (places, some), *_ = self._places_of(found)
        said = [one.captions[0] for one in some]
        batch = Captions.of(places, self.grid, said).to(self.device)
        weights = [one.weights for one in self.model.maps(batch)]
        return attention_health(weights, batch.told.lengths, [places.shape[1]] * len(some))

    def judge(self, examples: Sequence[Captioned]) -> Judgement:
        """Against all captions of each picture, and, where boxes are known, does it look at them?

        The words of the first reference are looked at then, so that each counts whatever the model says.
        """
        encoded: list[Encoded] = self.encoded(self.encode(examples), None)
        said: list[str] = []
        maps: list[Tensor] = []
        for places, some in self._places_of(encoded):
            said += [self.text(best.ids) for best, *_ in self.said(places, self.search)]
            if examples[0].boxes:
                maps += self.looked(places, [one.captions[0] for one in some])
        told = [captions.words(text) for text in said]
        wanted = [[captions.words(text) for text in one.captions] for one in examples]
        scores = captions.score(told, wanted)
        figures = _figures(scores)
        figures["exact"] = float(np.mean([one in some for one, some in zip(told, wanted, strict=True)]))
        if maps:
            found = pointing(maps, [one.boxes for one in examples], (SIZE, SIZE))
            figures |= {"pointing": found.accuracy, "pointing_by_chance": found.chance}
        return Judgement(
            figures,
            "cider_d",
            lambda some: float(scores.each[some].mean()),
            [
                json.dumps(
                    {
                        "picture": one.picture.where,
                        "said": text,
                        "wanted": list(one.captions),
                        "cider_d": round(float(score), 4),
                    },
                    ensure_ascii=False,
                )
                for one, text, score in zip(examples, said, scores.each, strict=True)
            ],
            [
                line
                for one, text in zip(examples[:SHOWN], said, strict=False)
                for line in (f"  {one.picture.name}", f"    said    {text}", f"    wanted  {one.captions[0]}")
            ],
            drawings={
                str(number): functools.partial(self._draw_example, one)
                for number, one in enumerate(examples[:DRAWN], 1)
            },
        )

    def _draw_example(self, example: Captioned, path: Path) -> Path:
        from jumok.look import show

        pixels = example.picture.decode()
        if isinstance(pixels, Flaw):  # it was judged by its features, and is gone since they were made
            raise InputError(str(pixels))
        places = self.places([self.prepare(pixels)])
        ids = list(self.said(places, self.search)[0][0].ids)
        [ids] = [ids] if ids else self.tokenizer.encode([example.captions[0]])
        scene = self._scene(example.picture.name, _shown(pixels, self.grid), places, ids)
        return show.save(scene, path)


# ------------------------------------------------------------------------------------------------------------


def _figures(scores: captions.CaptionScores) -> dict[str, Any]:
    """BLEU as it is usual, with brevity penalty, and beside it without, as early papers give it."""
    bleu = scores.bleu
    figures: dict[str, Any] = {f"bleu{n}": value for n, value in enumerate(bleu.value, 1)}
    figures |= {f"bleu{n}_without_brevity": value for n, value in enumerate(bleu.plain, 1)}
    return figures | {"brevity": bleu.brevity, "rouge_l": scores.rouge_l, "cider_d": scores.cider_d}


def _of_words(weights: Tensor, words: Sequence[int]) -> Tensor:
    """A map ``(pieces, P)`` as one of words ``(words, P)``; -1 is a piece of no word."""
    rows = [None if word < 0 else word for word in words]
    return alignment.to_words(weights, rows, range(weights.shape[-1]))


def _pixels_of(picture: Any, limits: Limits) -> Pixels:
    """The colours of a file's bytes; or colours, if that is what these are."""
    if isinstance(picture, bytes):
        found = decode(picture, "the picture", limits)
        if isinstance(found, Flaw):
            raise InputError(str(found))
        return found
    pixels = np.asarray(picture)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(
            f"a picture of {pixels.dtype} and shape {pixels.shape} came; expected uint8 (height, width, 3)"
        )
    return np.asarray(pixels, np.uint8)


def _shown(pixels: Pixels, grid: tuple[int, int]) -> Picture:
    """As the viewer gets it: upright, no larger than needed."""
    from jumok.data.files import needed
    from jumok.look.scene import Picture

    longest = max(pixels.shape[:2])
    if longest > LONGEST_SIDE:
        pillow = needed("PIL.Image", "images")
        height, width = (max(1, round(side * LONGEST_SIDE / longest)) for side in pixels.shape[:2])
        pixels = np.asarray(pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BICUBIC))
    return Picture.of_pixels(pixels, grid)
