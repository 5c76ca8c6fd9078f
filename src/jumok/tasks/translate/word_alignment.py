"""Word alignment of sentence pairs, from the attention of a model while it decodes the given target.

One model links each target word to a source word; a model for the opposite direction can be combined with it.
Words are separated by spaces in the given texts, whatever the tokenizers of the models do.
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
from jumok.inference.line_io import iterate_chunks
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

PAIRS_PER_CHUNK = 1024  # so many pairs that similar lengths share a batch
MAX_SELECTION_PAIRS = 1000  # pairs that views are selected on
MIN_SELECTION_PAIRS = 200  # if there are fewer pairs, the validation data of the run is added
T = TypeVar("T")


@dataclass(frozen=True)
class AlignmentViewFilter:
    """Limits the selection of views: to a layer, to a head or the mean of heads, to plain or shifted views."""

    layer: int | None = None
    head: int | Literal["auto", "mean"] = "auto"
    shift: bool | None = None

    @classmethod
    def from_recipe(cls, decode_config: TranslationDecodeConfig, num_layers: int) -> AlignmentViewFilter:
        """The filter of ``decode:`` of a recipe, where a layer may be counted from the end."""
        layer = decode_config.alignment_layer
        if layer is None:
            return cls(shift=decode_config.alignment_shift)
        return cls(layer if layer >= 0 else num_layers + layer, "mean", decode_config.alignment_shift)

    @property
    def is_fixed(self) -> bool:
        """Whether a single view is left."""
        return self.layer is not None and self.head != "auto" and self.shift is not None

    def select_views(self, views: Sequence[AlignmentView]) -> list[int]:
        """The indices of the views that pass the filter."""
        indices = [index for index, view in enumerate(views) if self._allows(view)]
        if not indices:
            num_layers, num_heads = (max(n) + 1 for n in zip(*((v.layer, v.head or 0) for v in views), strict=True))
            settings = {"layer": self.layer, "head": None if self.head == "auto" else self.head}
            description = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
            raise InputError(
                f"{description} is invalid; this model's attention to the source has "
                f"{num_layers} layers with {num_heads} heads each, both counted from 0"
            )
        return indices

    def _allows(self, view: AlignmentView) -> bool:
        heads = {"auto": view.head, "mean": None}
        return (
            self.layer in (None, view.layer)
            and view.head == heads.get(str(self.head), self.head)
            and self.shift in (None, view.shift)
        )


@dataclass(frozen=True)
class SelectedAlignmentViews:
    """The view of each direction, and how they were selected."""

    forward: AlignmentView
    backward: AlignmentView | None
    reason: str

    def __str__(self) -> str:
        backward = "" if self.backward is None else f"; reverse: {self.backward}"
        return f"{self.forward}{backward}; {self.reason}"


@dataclass(frozen=True)
class WordAlignment:
    """The links of a pair, and those of each model. All are (source word, target word)."""

    links: AlignmentLinks
    forward_links: AlignmentLinks
    backward_links: AlignmentLinks | None = None


class WordAligner:
    """Aligns words with a model and, if there is one, with a model for the opposite direction.

    >>> aligner = WordAligner(jumok.load("runs/en-fr"), jumok.load("runs/fr-en"))  # doctest: +SKIP
    >>> views = aligner.select_views(pairs)  # doctest: +SKIP
    >>> [alignment.links for alignment in aligner.align(pairs, views)]  # doctest: +SKIP
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
        """Select the views on which both directions agree most, or the view whose links are most consistent.

        The first pairs are used; if there are few, also the validation data of the run.
        """
        view_filter = view_filter or AlignmentViewFilter()
        sample = list(pairs[: 1 if view_filter.is_fixed else MAX_SELECTION_PAIRS])
        if len(sample) < MIN_SELECTION_PAIRS and not view_filter.is_fixed:
            valid = (pair for pair in _load_validation_pairs(self.forward) if self.find_length_problem(pair) is None)
            sample += itertools.islice(valid, MIN_SELECTION_PAIRS - len(sample))
        if not sample:
            raise InputError("there are no pairs of sentences to select a layer on")
        forward = _ViewLinks.from_pairs(self.forward, sample, view_filter)
        if self.backward is None:
            texts = [(pair.source.lower().split(), pair.target.lower().split()) for pair in sample]
            consistency = compute_consistency(forward.link_indices, texts)
            forward_view, backward_view = forward.views[int(consistency.argmax())], None
            score = f"consistency {float(consistency.max()):.2f}"
        else:
            backward = _ViewLinks.from_pairs(self.backward, [reverse_pair(pair) for pair in sample], view_filter)
            agreement = compute_agreement(forward.link_indices, backward.link_indices)
            row, column = divmod(int(agreement.argmax()), agreement.shape[1])
            forward_view, backward_view = forward.views[row], backward.views[column]
            score = f"agreement {float(agreement.max()):.3f}"
        reason = "as requested" if view_filter.is_fixed else f"chosen by {score} on {len(sample):,} pairs"
        return SelectedAlignmentViews(forward_view, backward_view, reason)

    def align(
        self,
        pairs: Iterable[TranslationExample],
        views: SelectedAlignmentViews,
        symmetrize: Symmetrization = product_links,
    ) -> Iterator[WordAlignment]:
        """The links of each pair, in their order. ``symmetrize`` combines both directions."""
        for forward, backward in self.compute_maps(pairs, views):
            links = argmax_links(forward)
            if backward is None:
                yield WordAlignment(links, links)
            else:
                yield WordAlignment(symmetrize(forward, backward), links, swap_links(argmax_links(backward)))

    def compute_maps(
        self, pairs: Iterable[TranslationExample], views: SelectedAlignmentViews
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the maps ``(target words, source words)`` of each pair, and those of the reverse model."""
        compute_map = SentencePairAttention.compute_word_map
        for chunk in iterate_chunks(pairs, PAIRS_PER_CHUNK):
            forward = read_attention(self.forward, chunk, functools.partial(compute_map, view=views.forward))
            backward: Sequence[Tensor | None] = [None] * len(chunk)
            if self.backward is not None and (view := views.backward) is not None:
                reversed_chunk = [reverse_pair(pair) for pair in chunk]
                backward = read_attention(self.backward, reversed_chunk, functools.partial(compute_map, view=view))
            yield from zip(forward, backward, strict=True)

    def find_length_problem(self, pair: TranslationExample) -> InvalidExample | None:
        """Describe why a pair cannot be aligned, if it is longer than the learned positions of a model."""
        for predictor, example in ((self.forward, pair), (self.backward, reverse_pair(pair))):
            max_length = None if predictor is None else getattr(predictor.model, "max_length", None)
            if predictor is None or max_length is None:
                continue
            sides: tuple[tuple[str, Literal["source", "target"]], ...]
            sides = (example.source, "source"), (example.target, "target")
            length = max(len(_AlignmentText.from_text(predictor, text, side).token_ids) for text, side in sides)
            if length >= max_length:  # EOS is one more
                message = f"{length} tokens; this model, which has learned positions, takes {max_length - 1}"
                return InvalidExample(pair.location, "too long", message)
        return None


@dataclass(frozen=True, eq=False)
class _ViewLinks:
    """The links of each candidate view: ``(views, target words)`` for each pair."""

    views: list[AlignmentView]
    link_indices: list[Tensor]

    @classmethod
    def from_pairs(
        cls, predictor: TranslationPredictor, pairs: Sequence[TranslationExample], view_filter: AlignmentViewFilter
    ) -> _ViewLinks:
        results = read_attention(
            predictor, pairs, lambda attention: (attention.weights.shape[:2], attention.pick_source_words())
        )
        views = list_alignment_views(*results[0][0])
        allowed = view_filter.select_views(views)
        return cls([views[index] for index in allowed], [picks[allowed] for _, picks in results])


@torch.inference_mode()
def read_attention(
    predictor: TranslationPredictor, pairs: Sequence[TranslationExample], reader: Callable[[SentencePairAttention], T]
) -> list[T]:
    """Call ``reader`` with the attention of the model for each pair. Returns the results in the order of the pairs.

    Pairs of similar length share a batch. The attention of a batch is freed after it is read, since it is large.
    """
    sources = [_AlignmentText.from_text(predictor, pair.source, "source") for pair in pairs]
    targets = [_AlignmentText.from_text(predictor, pair.target, "target") for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda n: (len(targets[n].token_ids), len(sources[n].token_ids)))
    source_ids, target_ids = ([texts[n].token_ids for n in order] for texts in (sources, targets))
    results: dict[int, T] = {}
    for part in split_by_map_size(source_ids, target_ids):
        batch = Seq2SeqBatch.from_sequences(source_ids[part], target_ids[part])
        maps = predictor.model.compute_attention_maps(batch.to(predictor.device))
        weights = torch.stack([layer.weights.float() for layer in maps]).cpu()  # (L, B, H, Q + 1, K)
        for row, n in enumerate(order[part]):
            source, target = sources[n], targets[n]
            pair_weights = weights[:, row, :, : len(target.token_ids) + 1, : len(source.token_ids)]
            num_words = target.num_words, source.num_words
            results[n] = reader(
                SentencePairAttention(pair_weights, target.word_indices, source.word_indices, num_words)
            )
    return [results[n] for n in range(len(pairs))]


@dataclass(frozen=True)
class _AlignmentText:
    """The tokens of a text, and the word of each token."""

    token_ids: list[int]
    word_indices: list[int]
    num_words: int

    @classmethod
    def from_text(cls, predictor: TranslationPredictor, text: str, side: Literal["source", "target"]) -> _AlignmentText:
        preprocess = functools.partial(predictor.data.preprocess, side=side)
        tokenizer = getattr(predictor.tokenizers, side)
        preprocessed, words = preprocess(text), text.split()
        word_map = _map_preprocessed_words(words, len(preprocessed.split()), preprocess)
        [ids] = tokenizer.encode([preprocessed])
        return cls(ids, [word_map[n] for n in tokenizer.word_ids_from_text(preprocessed)], len(words))


def _map_preprocessed_words(
    words: Sequence[str], num_preprocessed: int, preprocess: Callable[[str], str]
) -> Sequence[int]:
    """For each word of the preprocessed text, the index of the word that it came from.

    >>> _map_preprocessed_words(["l'eau", "bout."], 4, lambda text: text.replace("'", " ").replace(".", " ."))
    [0, 0, 1, 1]
    """
    if num_preprocessed == len(words):
        return range(num_preprocessed)
    counts = [len(preprocess(word).split()) for word in words]
    if sum(counts) != num_preprocessed:  # neighbours matter: count the words of each prefix, followed by another word
        ends = [len(preprocess(" ".join([*words[:n], "x"])).split()) - 1 for n in range(1, len(words))]
        counts = [max(0, end - start) for start, end in itertools.pairwise([0, *ends, num_preprocessed])]
    indices = [index for index, count in enumerate(counts) for _ in range(count)]
    return (indices + [len(words) - 1] * num_preprocessed)[:num_preprocessed]


def reverse_pair(pair: TranslationExample) -> TranslationExample:
    """The same pair for the opposite direction."""
    return TranslationExample(pair.target, pair.source, pair.location)


def _load_validation_pairs(predictor: TranslationPredictor) -> list[TranslationExample]:
    """The validation data of the run, if it still exists."""
    try:
        return list(predictor.data.valid_split().examples)
    except (JumokError, OSError):
        return []


def _check_directions(forward: TranslationPredictor, backward: TranslationPredictor) -> None:
    """Raise if both have the same direction, as far as names (en, fr), or columns of the same data, show it."""
    data, other = forward.run.recipe.data, backward.run.recipe.data
    are_comparable = data.train == other.train or not isinstance(data.source, int)
    if (data.source, data.target) == (other.source, other.target) and are_comparable:
        raise InputError(
            f"{backward.run.folder} translates {data.source} to {data.target}, as {forward.run.folder} does; "
            f"the reverse goes from {data.target} to {data.source}"
        )
