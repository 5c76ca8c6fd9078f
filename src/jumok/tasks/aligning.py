"""Word links of given pairs of sentences, from the attention of a model that is told both sides.

One model links each target word to a source word; with a model of the other direction, the two are made one.
Words are those between spaces in the text that came, whatever the models' tokenizers make of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from jumok.batch import Pairs
from jumok.data.sources import Example, Flaw
from jumok.errors import InputError, JumokError
from jumok.look.align import Looked, View, agreement, consistency, views
from jumok.metrics.alignment import Links, flipped, strongest
from jumok.metrics.symmetry import Symmetry, together
from jumok.tasks.translator import DecodeConfig, Translator, parts

__all__ = ["AT_ONCE", "SAMPLE", "Aligned", "Aligner", "Asked", "Chosen", "look", "turned"]

AT_ONCE = 1024  # pairs that are read before any is aligned, so that those of like length go together
SAMPLE = 1000  # pairs that views are chosen by
ENOUGH = 200  # fewer than this hardly tell which view is best: the run's validation data joins them
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """Which views may be chosen: all, or those of a layer, of a head or the mean, plain or shifted."""

    layer: int | None = None
    head: int | Literal["auto", "mean"] = "auto"
    shift: bool | None = None

    @classmethod
    def of_recipe(cls, decode: DecodeConfig, layers: int) -> Asked:
        """What ``decode:`` of a recipe says; a layer, of so many, may be counted from the end."""
        layer = decode.align_layer
        if layer is None:
            return cls(shift=decode.align_shift)
        return cls(layer if layer >= 0 else layers + layer, "mean", decode.align_shift)

    def of(self, known: Sequence[View]) -> list[int]:
        """The numbers of those views of a model that may be chosen."""
        found = [number for number, view in enumerate(known) if self._allows(view)]
        if not found:
            layers, most = (max(n) + 1 for n in zip(*((v.layer, v.head or 0) for v in known), strict=True))
            came = {"layer": self.layer, "head": None if self.head == "auto" else self.head}
            told = ", ".join(f"{name} {number}" for name, number in came.items() if number is not None)
            raise InputError(
                f"{told} came; this model's attention to the source has "
                f"{layers} layers with {most} heads each, both counted from 0"
            )
        return found

    def _allows(self, view: View) -> bool:
        heads = {"auto": view.head, "mean": None}
        return (
            self.layer in (None, view.layer)
            and view.head == heads.get(str(self.head), self.head)
            and self.shift in (None, view.shift)
        )

    @property
    def is_settled(self) -> bool:
        return self.layer is not None and self.head != "auto" and self.shift is not None


@dataclass(frozen=True)
class Chosen:
    """The view of each direction, and why these."""

    forth: View
    back: View | None
    why: str

    def __str__(self) -> str:
        both = str(self.forth) if self.back is None else f"{self.forth}; back: {self.back}"
        return f"{both}; {self.why}"


@dataclass(frozen=True)
class Aligned:
    """The links of a pair, and those of either model; all are (source word, target word)."""

    links: Links
    forth: Links
    back: Links | None = None


class Aligner:
    """Links by a model and, if there is one, by a model of the other direction.

    >>> aligner = Aligner(jumok.load("runs/en-fr"), jumok.load("runs/fr-en"))  # doctest: +SKIP
    >>> chosen = aligner.choose(pairs)  # doctest: +SKIP
    >>> [found.links for found in aligner.align(pairs, chosen)]  # doctest: +SKIP
    """

    def __init__(self, forth: Translator, back: Translator | None = None) -> None:
        forth.check_maps()
        if back is not None:
            back.check_maps()
            _check_directions(forth, back)
        self.forth, self.back = forth, back

    def choose(self, pairs: Sequence[Example], asked: Asked | None = None) -> Chosen:
        """The views by which the two directions agree most, or the view whose links are the most consistent.

        The first of the pairs tell it; if there are few, together with the run's validation data.
        """
        asked = asked or Asked()
        sample = list(pairs[: 1 if asked.is_settled else SAMPLE])
        if len(sample) < ENOUGH and not asked.is_settled:
            known = (one for one in _validation(self.forth) if self.unfit(one) is None)
            sample += itertools.islice(known, ENOUGH - len(sample))
        if not sample:
            raise InputError("there are no pairs of sentences to choose a layer by")
        mine = _Picks.of(self.forth, sample, asked)
        if self.back is None:
            texts = [(one.source.lower().split(), one.target.lower().split()) for one in sample]
            scores = consistency(mine.picks, texts)
            best = int(scores.argmax())
            why = f"consistency {float(scores[best]):.2f}"
            return Chosen(mine.views[best], None, "as asked" if asked.is_settled else _told(why, sample))
        theirs = _Picks.of(self.back, [turned(one) for one in sample], asked)
        both = agreement(mine.picks, theirs.picks)
        one, other = divmod(int(both.argmax()), both.shape[1])
        why = _told(f"agreement {float(both.max()):.3f}", sample)
        return Chosen(mine.views[one], theirs.views[other], "as asked" if asked.is_settled else why)

    def align(
        self, pairs: Iterable[Example], chosen: Chosen, symmetry: Symmetry = together
    ) -> Iterator[Aligned]:
        """The links of each pair, in their order; ``symmetry`` makes one of two directions."""
        for forth, back in self.maps(pairs, chosen):
            links = strongest(forth)
            if back is None:
                yield Aligned(links, links)
            else:
                yield Aligned(symmetry(forth, back), links, flipped(strongest(back)))

    def maps(self, pairs: Iterable[Example], chosen: Chosen) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The maps behind them: ``(target words, source words)``, and the opposite from the other model."""
        waiting = iter(pairs)
        while window := list(itertools.islice(waiting, AT_ONCE)):
            forth = look(self.forth, window, functools.partial(Looked.map, view=chosen.forth))
            back: Sequence[Tensor | None] = [None] * len(window)
            if self.back is not None and (view := chosen.back) is not None:
                back = look(
                    self.back, [turned(one) for one in window], functools.partial(Looked.map, view=view)
                )
            yield from zip(forth, back, strict=True)

    def unfit(self, pair: Example) -> Flaw | None:
        """Why a pair cannot be aligned, if a model's learned positions do not reach far enough."""
        for translator, one in ((self.forth, pair), (self.back, turned(pair))):
            longest = None if translator is None else getattr(translator.model, "longest", None)
            if translator is None or longest is None:
                continue
            sides = _Text.of(translator, one.source, "source"), _Text.of(translator, one.target, "target")
            most = max(len(side.ids) for side in sides)
            if most >= longest:  # one more is the end
                told = f"{most} tokens; this model, which has learned positions, takes {longest - 1}"
                return Flaw(pair.where, "too long", told)
        return None


@dataclass(frozen=True, eq=False)
class _Picks:
    """What the views of a model that may be chosen pick: ``(views, target words)`` for each pair."""

    views: list[View]
    picks: list[Tensor]

    @classmethod
    def of(cls, translator: Translator, pairs: Sequence[Example], asked: Asked) -> _Picks:
        found = look(translator, pairs, lambda looked: (looked.weights.shape[:2], looked.picks()))
        known = views(*found[0][0])
        allowed = asked.of(known)
        return cls([known[n] for n in allowed], [picks[allowed] for _, picks in found])


@torch.inference_mode()
def look(translator: Translator, pairs: Sequence[Example], read: Callable[[Looked], T]) -> list[T]:
    """What ``read`` makes of where the model looked while it said each target, in the order of the pairs.

    Pairs of like length go together. All maps of a pair are many: they are gone when it is read.
    """
    texts = [_Text.of(translator, pair.source, "source") for pair in pairs]
    others = [_Text.of(translator, pair.target, "target") for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda n: (len(others[n].ids), len(texts[n].ids)))
    said, given = [others[n] for n in order], [texts[n] for n in order]
    found: dict[int, T] = {}
    for part in parts([text.ids for text in given], [text.ids for text in said]):
        batch = Pairs.of([text.ids for text in given[part]], [text.ids for text in said[part]])
        maps = translator.model.maps(batch.to(translator.device))
        weights = torch.stack([one.weights.float() for one in maps]).cpu()  # (L, B, H, Q + 1, K)
        for row, n in enumerate(order[part]):
            x, y = texts[n], others[n]
            own = weights[:, row, :, : len(y.ids) + 1, : len(x.ids)]
            found[n] = read(Looked(own, y.words, x.words, (y.count, x.count)))
    return [found[n] for n in range(len(pairs))]


@dataclass(frozen=True)
class _Text:
    """A text as the model gets it, and which of its words, between spaces, each token belongs to."""

    ids: list[int]
    words: list[int]
    count: int  # of its words

    @classmethod
    def of(cls, translator: Translator, text: str, side: Literal["source", "target"]) -> _Text:
        prepare = functools.partial(translator.texts.prepared, side=side)
        tokenizer = getattr(translator.tokenizers, side)
        prepared = prepare(text)
        words = text.split()
        owners = _owners(words, len(prepared.split()), prepare)
        ids = tokenizer.encode([prepared])[0]
        return cls(ids, [owners[n] for n in tokenizer.words(prepared)], len(words))


def _owners(words: Sequence[str], prepared: int, prepare: Callable[[str], str]) -> Sequence[int]:
    """For each word of the prepared text the number of the word that it came from.

    >>> _owners(["l'eau", "bout."], 4, lambda text: text.replace("'", " ").replace(".", " ."))
    [0, 0, 1, 1]
    """
    if prepared == len(words):
        return range(prepared)
    counts = [len(prepare(word).split()) for word in words]
    if sum(counts) != prepared:  # neighbours matter: how many there are up to each word, if one more follows
        ends = [len(prepare(" ".join([*words[:n], "x"])).split()) - 1 for n in range(1, len(words))]
        counts = [max(0, b - a) for a, b in itertools.pairwise([0, *ends, prepared])]
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    return (owners + [len(words) - 1] * prepared)[:prepared]


def turned(pair: Example) -> Example:
    """The same pair for the other direction."""
    return Example(pair.target, pair.source, pair.where)


def _validation(translator: Translator) -> list[Example]:
    """The run's own, if it is still there."""
    try:
        return translator.texts.valid().examples
    except (JumokError, OSError):
        return []


def _told(score: str, sample: Sequence[Example]) -> str:
    return f"chosen by {score} on {len(sample):,} pairs"


def _check_directions(forth: Translator, back: Translator) -> None:
    """Raise if both go the same way, as far as names (en, fr), or columns of the same data, can tell."""
    one, other = forth.run.recipe.data, back.run.recipe.data
    are_told = one.train == other.train or not isinstance(one.source, int)
    if (one.source, one.target) == (other.source, other.target) and are_told:
        raise InputError(
            f"{back.run.folder} translates {one.source} to {one.target}, as {forth.run.folder} does; "
            f"the reverse goes from {one.target} to {one.source}"
        )
