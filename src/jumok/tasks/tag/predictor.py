"""A trained tagger: the entities of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jumok.batches.tokens import IGNORE
from jumok.data.batching.texts import EncodedText
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.tagging import Entity, TaggingExample, convert_to_iob2, extract_entities, label_first_pieces
from jumok.data.tokenizers.windows import find_central_window
from jumok.errors import InputError
from jumok.models.bert import BertTagger
from jumok.tasks.base import Evaluation, Prediction
from jumok.tasks.options import NBestOptions
from jumok.tasks.predictors import FineTunedPredictor
from jumok.tasks.tag import metrics as tag_metrics
from jumok.tasks.tag.data import WORD_PATTERN, encode_sentences, locate_pieces, split_windows

if TYPE_CHECKING:
    from jumok.tasks.tag.task import TaggingTask


@dataclass(frozen=True)
class TaggingPrediction(Prediction):
    """The words of a line, their spans in the line, their tags in IOB2, and the probabilities of the tags."""

    words: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    tags: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()

    @property
    def entities(self) -> list[Entity]:
        """The entities as ranges of words."""
        return extract_entities(self.tags)

    def to_entity_dicts(self) -> Iterator[dict[str, Any]]:
        """The entities with their texts, spans in the line, and probabilities."""
        for entity_type, first, last in self.entities:
            start, end = self.spans[first][0], self.spans[last - 1][1]
            yield {
                "type": entity_type,
                "text": self.input[start:end],
                "start": start,
                "end": end,
                "probability": float(np.prod(self.probabilities[first:last])),
            }

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        return {"entities": list(self.to_entity_dicts()), "words": self.words, "tags": self.tags}

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The line with its entities in brackets."""
        text, end = "", 0
        for entity in self.to_entity_dicts():
            text += f"{self.input[end : entity['start']]}[{entity['text']}]({entity['type']})"
            end = entity["end"]
        yield text + self.input[end:]


class TaggingPredictor(FineTunedPredictor[TaggingPrediction]):
    """A model that finds entities.

    >>> tagger = jumok.load("runs/bert-conll2003")  # doctest: +SKIP
    >>> tagger.tag("Ekeus heads for Baghdad .").entities[1]  # doctest: +SKIP
    Entity(type='LOC', begin=3, end=4)
    """

    task: TaggingTask
    model: BertTagger

    @property
    def labels(self) -> Sequence[str]:
        return self.task.labels

    def tag(self, text: str) -> TaggingPrediction:
        """Tag one text. For many texts use :meth:`predict`."""
        return next(self.predict([text], NBestOptions()))

    def predict_chunk(
        self, lines: Sequence[str], options: NBestOptions, first_index: int
    ) -> Iterator[TaggingPrediction]:
        if options.n_best > 1:
            raise InputError("--n-best: each word has one tag, the likeliest; --json shows its probability")
        sentences = [self.parse_line(line) for line in lines]
        outputs = self._predict_tags(sentences, first_index)
        rows = zip(lines, sentences, outputs, strict=True)
        for index, (line, sentence, (tags, probabilities)) in enumerate(rows, first_index):
            spans = tuple(word.span() for word in WORD_PATTERN.finditer(line))
            yield TaggingPrediction(index, line, sentence.words, spans, tuple(convert_to_iob2(tags)), probabilities)

    def parse_line(self, line: str, index: int = 0) -> TaggingExample:
        words = tuple(WORD_PATTERN.findall(line))
        return TaggingExample(words, ("O",) * len(words), "")

    def encode(self, examples: Iterable[TaggingExample]) -> Iterator[list[EncodedText] | InvalidExample]:
        return encode_sentences(examples, self.labels, self.tokenizer, self.max_tokens, self.task.recipe.data)

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text. Raise if it is too long."""
        return sum(len(row.ids) for row in self.encode_windows(self.parse_line(text)))

    def score_examples(
        self, examples: Sequence[TaggingExample], options: NBestOptions | None = None, *, detailed: bool = False
    ) -> Evaluation:
        return tag_metrics.score_tagging(examples, [tags for tags, _ in self._predict_tags(examples, None)])

    def _predict_tags(
        self, sentences: Sequence[TaggingExample], first_index: int | None
    ) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
        """The likeliest tag of each word, and its probability.

        Of a sentence in several windows, each word is tagged in the window that shows most on both sides of it.
        """
        config = self.task.recipe.data
        located = [pieces for _, pieces in locate_pieces(sentences, self.tokenizer)]
        encoded = self.check_encoded(self.encode(sentences), first_index)
        outputs = iter(
            self.compute_outputs(
                [row for windows in encoded for row in windows], lambda batch: [self.model.logits(batch)]
            )
        )
        for sentence, pieces, rows in zip(sentences, located, encoded, strict=True):
            windows = split_windows(pieces, self.max_tokens, config, "")
            assert not isinstance(windows, InvalidExample)
            by_window = [next(outputs)[0].double().softmax(-1).numpy() for _ in rows]
            # A word without pieces, such as a control character, is no entity.
            tags, probabilities = ["O"] * len(sentence.words), [1.0] * len(sentence.words)
            for index, word in enumerate(label_first_pieces(pieces.word_ids, range(len(sentence.words)))):
                if word != IGNORE:
                    window = find_central_window(index, windows)
                    row = by_window[window][1 + index - windows[window][0]]
                    best = int(row.argmax())
                    tags[word], probabilities[word] = self.task.labels[best], float(row[best])
            yield tuple(tags), tuple(probabilities)
