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

from jumok.batches.tokens import Seq2SeqBatch
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.readers.word_alignments import AlignmentLinks
from jumok.errors import InputError, JumokError
from jumok.look.views.alignment_selection import (
    AlignmentView,
    SentencePairAttention,
    compute_agreement,
    compute_consistency,
    list_alignment_views,
)
from jumok.metrics.symmetrization import Symmetrization, product_links
from jumok.metrics.word_alignment import argmax_links, swap_links
from jumok.tasks.translate.config import TranslationDecodeConfig
from jumok.tasks.translate.predictor import TranslationPredictor, split_by_map_size

PAIRS_PER_CHUNK = 1024  # pairs that are read before any is aligned, so that those of like length go together
MAX_SELECTION_PAIRS = 1000  # pairs that views are chosen by
MIN_SELECTION_PAIRS = 200  # fewer than this hardly tell which view is best: the run's validation data joins them
T = TypeVar("T")


@dataclass(frozen=True)
class AlignmentViewFilter:
    """Which views may be chosen: all, or those of a layer, of a head or the mean, plain or shifted."""

    layer: int | None = None
    head: int | Literal["auto", "mean"] = "auto"
    shift: bool | None = None

    @classmethod
    def from_recipe(cls, decode_config: TranslationDecodeConfig, num_layers: int) -> AlignmentViewFilter:
        """What ``decode:`` of a recipe says; a layer, of so many, may be counted from the end."""
        layer = decode_config.alignment_layer
        if layer is None:
            return cls(shift=decode_config.alignment_shift)
        return cls(layer if layer >= 0 else num_layers + layer, "mean", decode_config.alignment_shift)

    def select_views(self, views: Sequence[AlignmentView]) -> list[int]:
        """The numbers of those views of a model that may be chosen."""
        found = [number for number, view in enumerate(views) if self._allows(view)]
        if not found:
            layers, most = (max(n) + 1 for n in zip(*((v.layer, v.head or 0) for v in views), strict=True))
            came = {"layer": self.layer, "head": None if self.head == "auto" else self.head}
            told = ", ".join(f"{name} {number}" for name, number in came.items() if number is not None)
            raise InputError(
                f"{told} came; this model's attention to the source has "
                f"{layers} layers with {most} heads each, both counted from 0"
            )
        return found

    def _allows(self, view: AlignmentView) -> bool:
        heads = {"auto": view.head, "mean": None}
        return (
            self.layer in (None, view.layer)
            and view.head == heads.get(str(self.head), self.head)
            and self.shift in (None, view.shift)
        )

    @property
    def is_fixed(self) -> bool:
        return self.layer is not None and self.head != "auto" and self.shift is not None


@dataclass(frozen=True)
class SelectedAlignmentViews:
    """The view of each direction, and why these."""

    forward: AlignmentView
    backward: AlignmentView | None
    reason: str

    def __str__(self) -> str:
        both = str(self.forward) if self.backward is None else f"{self.forward}; back: {self.backward}"
        return f"{both}; {self.reason}"


@dataclass(frozen=True)
class WordAlignment:
    """The links of a pair, and those of either model; all are (source word, target word)."""

    links: AlignmentLinks
    forward_links: AlignmentLinks
    backward_links: AlignmentLinks | None = None


class WordAligner:
    """Links by a model and, if there is one, by a model of the other direction.

    >>> aligner = WordAligner(jumok.load("runs/en-fr"), jumok.load("runs/fr-en"))  # doctest: +SKIP
    >>> chosen = aligner.select_views(pairs)  # doctest: +SKIP
    >>> [found.links for found in aligner.align(pairs, chosen)]  # doctest: +SKIP
    """

    def __init__(self, forward: TranslationPredictor, backward: TranslationPredictor | None = None) -> None:
        forward.check_has_attention()
        if backward is not None:
            backward.check_has_attention()
            _check_directions(forward, backward)
        self.forward, self.backward = forward, backward

    def select_views(
        self, pairs: Sequence[TranslationExample], view_filter: AlignmentViewFilter | None = None
    ) -> SelectedAlignmentViews:
        """The views by which the two directions agree most, or the view whose links are the most consistent.

        The first of the pairs tell it; if there are few, together with the run's validation data.
        """
        view_filter = view_filter or AlignmentViewFilter()
        sample = list(pairs[: 1 if view_filter.is_fixed else MAX_SELECTION_PAIRS])
        if len(sample) < MIN_SELECTION_PAIRS and not view_filter.is_fixed:
            known = (one for one in _load_validation_pairs(self.forward) if self.find_length_problem(one) is None)
            sample += itertools.islice(known, MIN_SELECTION_PAIRS - len(sample))
        if not sample:
            raise InputError("there are no pairs of sentences to choose a layer by")
        mine = _ViewLinks.from_pairs(self.forward, sample, view_filter)
        if self.backward is None:
            texts = [(one.source.lower().split(), one.target.lower().split()) for one in sample]
            scores = compute_consistency(mine.link_indices, texts)
            best = int(scores.argmax())
            why = f"consistency {float(scores[best]):.2f}"
            return SelectedAlignmentViews(
                mine.views[best], None, "as asked" if view_filter.is_fixed else _format_reason(why, sample)
            )
        theirs = _ViewLinks.from_pairs(self.backward, [reverse_pair(one) for one in sample], view_filter)
        both = compute_agreement(mine.link_indices, theirs.link_indices)
        one, other = divmod(int(both.argmax()), both.shape[1])
        why = _format_reason(f"agreement {float(both.max()):.3f}", sample)
        return SelectedAlignmentViews(mine.views[one], theirs.views[other], "as asked" if view_filter.is_fixed else why)

    def align(
        self,
        pairs: Iterable[TranslationExample],
        views: SelectedAlignmentViews,
        symmetrize: Symmetrization = product_links,
    ) -> Iterator[WordAlignment]:
        """The links of each pair, in their order; ``symmetrize`` makes one of two directions."""
        for forth, back in self.compute_maps(pairs, views):
            links = argmax_links(forth)
            if back is None:
                yield WordAlignment(links, links)
            else:
                yield WordAlignment(symmetrize(forth, back), links, swap_links(argmax_links(back)))

    def compute_maps(
        self, pairs: Iterable[TranslationExample], views: SelectedAlignmentViews
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the maps ``(target words, source words)`` of each pair, and those of the reverse model."""
        waiting = iter(pairs)
        while window := list(itertools.islice(waiting, PAIRS_PER_CHUNK)):
            forth = read_attention(
                self.forward,
                window,
                functools.partial(SentencePairAttention.compute_word_map, view=views.forward),
            )
            back: Sequence[Tensor | None] = [None] * len(window)
            if self.backward is not None and (view := views.backward) is not None:
                back = read_attention(
                    self.backward,
                    [reverse_pair(one) for one in window],
                    functools.partial(SentencePairAttention.compute_word_map, view=view),
                )
            yield from zip(forth, back, strict=True)

    def find_length_problem(self, pair: TranslationExample) -> InvalidExample | None:
        """Why a pair cannot be aligned, if a model's learned positions do not reach far enough."""
        for translator, one in ((self.forward, pair), (self.backward, reverse_pair(pair))):
            longest = None if translator is None else getattr(translator.model, "max_length", None)
            if translator is None or longest is None:
                continue
            sides = (
                _AlignmentText.from_text(translator, one.source, "source"),
                _AlignmentText.from_text(translator, one.target, "target"),
            )
            most = max(len(side.token_ids) for side in sides)
            if most >= longest:  # one more is the end
                told = f"{most} tokens; this model, which has learned positions, takes {longest - 1}"
                return InvalidExample(pair.location, "too long", told)
        return None


@dataclass(frozen=True, eq=False)
class _ViewLinks:
    """Links that each candidate view picks: ``(views, target words)`` for each pair."""

    views: list[AlignmentView]
    link_indices: list[Tensor]

    @classmethod
    def from_pairs(
        cls,
        predictor: TranslationPredictor,
        pairs: Sequence[TranslationExample],
        view_filter: AlignmentViewFilter,
    ) -> _ViewLinks:
        found = read_attention(predictor, pairs, lambda looked: (looked.weights.shape[:2], looked.pick_source_words()))
        known = list_alignment_views(*found[0][0])
        allowed = view_filter.select_views(known)
        return cls([known[n] for n in allowed], [picks[allowed] for _, picks in found])


@torch.inference_mode()
def read_attention(
    predictor: TranslationPredictor,
    pairs: Sequence[TranslationExample],
    reader: Callable[[SentencePairAttention], T],
) -> list[T]:
    """What ``reader`` makes of where the model looked while it said each target, in the order of the pairs.

    Pairs of like length go together. All maps of a pair are many: they are gone when it is read.
    """
    texts = [_AlignmentText.from_text(predictor, pair.source, "source") for pair in pairs]
    others = [_AlignmentText.from_text(predictor, pair.target, "target") for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda n: (len(others[n].token_ids), len(texts[n].token_ids)))
    said, given = [others[n] for n in order], [texts[n] for n in order]
    found: dict[int, T] = {}
    for part in split_by_map_size([text.token_ids for text in given], [text.token_ids for text in said]):
        batch = Seq2SeqBatch.from_sequences(
            [text.token_ids for text in given[part]], [text.token_ids for text in said[part]]
        )
        maps = predictor.model.compute_attention_maps(batch.to(predictor.device))
        weights = torch.stack([one.weights.float() for one in maps]).cpu()  # (L, B, H, Q + 1, K)
        for row, n in enumerate(order[part]):
            x, y = texts[n], others[n]
            own = weights[:, row, :, : len(y.token_ids) + 1, : len(x.token_ids)]
            found[n] = reader(SentencePairAttention(own, y.word_indices, x.word_indices, (y.num_words, x.num_words)))
    return [found[n] for n in range(len(pairs))]


@dataclass(frozen=True)
class _AlignmentText:
    """A text as the model gets it, and which of its words, between spaces, each token belongs to."""

    token_ids: list[int]
    word_indices: list[int]
    num_words: int  # of its words

    @classmethod
    def from_text(cls, predictor: TranslationPredictor, text: str, side: Literal["source", "target"]) -> _AlignmentText:
        prepare = functools.partial(predictor.data.preprocess, side=side)
        tokenizer = getattr(predictor.tokenizers, side)
        prepared = prepare(text)
        words = text.split()
        owners = _map_preprocessed_words(words, len(prepared.split()), prepare)
        ids = tokenizer.encode([prepared])[0]
        return cls(ids, [owners[n] for n in tokenizer.word_ids_from_text(prepared)], len(words))


def _map_preprocessed_words(
    words: Sequence[str], num_preprocessed: int, preprocess: Callable[[str], str]
) -> Sequence[int]:
    """For each word of the prepared text the number of the word that it came from.

    >>> _map_preprocessed_words(["l'eau", "bout."], 4, lambda text: text.replace("'", " ").replace(".", " ."))
    [0, 0, 1, 1]
    """
    if num_preprocessed == len(words):
        return range(num_preprocessed)
    counts = [len(preprocess(word).split()) for word in words]
    if sum(counts) != num_preprocessed:  # neighbours matter: how many there are up to each word, if one more follows
        ends = [len(preprocess(" ".join([*words[:n], "x"])).split()) - 1 for n in range(1, len(words))]
        counts = [max(0, b - a) for a, b in itertools.pairwise([0, *ends, num_preprocessed])]
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    return (owners + [len(words) - 1] * num_preprocessed)[:num_preprocessed]


def reverse_pair(pair: TranslationExample) -> TranslationExample:
    """The same pair for the other direction."""
    return TranslationExample(pair.target, pair.source, pair.location)


def _load_validation_pairs(predictor: TranslationPredictor) -> list[TranslationExample]:
    """The run's own, if it is still there."""
    try:
        return list(predictor.data.valid_split().examples)
    except (JumokError, OSError):
        return []


def _format_reason(score: str, pairs: Sequence[TranslationExample]) -> str:
    return f"chosen by {score} on {len(pairs):,} pairs"


def _check_directions(forward: TranslationPredictor, backward: TranslationPredictor) -> None:
    """Raise if both go the same way, as far as names (en, fr), or columns of the same data, can tell."""
    one, other = forward.run.recipe.data, backward.run.recipe.data
    are_told = one.train == other.train or not isinstance(one.source, int)
    if (one.source, one.target) == (other.source, other.target) and are_told:
        raise InputError(
            f"{backward.run.folder} translates {one.source} to {one.target}, as {forward.run.folder} does; "
            f"the reverse goes from {one.target} to {one.source}"
        )
