"""The task of tagging: the entities in a text, told by a tag for each of its words.

::

    the U.N. sent Ekeus to Baghdad    →    the [U.N.](ORG) sent [Ekeus](PER) to [Baghdad](LOC)

The tag of a word is read off its first piece. A sentence longer than the model reads goes through it in
windows, and each word is tagged in the window that shows most on both sides of it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import regex
from numpy.typing import NDArray
from rich.console import Console
from torch import nn

from jumok.annotated import TaggedWords
from jumok.batch import IGNORE
from jumok.data import tagged
from jumok.data.examples import Row
from jumok.data.formats import Flaw
from jumok.data.segmentation import EXTEND, LETTER, NO_SIGN, SIGN, SPACELESS
from jumok.data.tagged import Entity, Scheme, Sentence, entities, first_pieces, iob2, labels_of
from jumok.data.windows import Window, central, windows
from jumok.data.wordpiece import Pieces, WordPieceConfig, WordPieces
from jumok.errors import InputError
from jumok.metrics.tagging import EntityScore, tag_score
from jumok.models.bert import BertConfig, Tagger
from jumok.run import Run
from jumok.tasks import fine_tuning, verdicts
from jumok.tasks.fine_tuning import TOO_LONG, BertUse, From, LabelledData, Named, Search
from jumok.tasks.reader import BertReader, Prediction
from jumok.tasks.verdicts import Judgement
from jumok.training import Settings, Summary

__all__ = ["Recipe", "Search", "compare", "evaluate", "load", "train"]

AT_ONCE = 1024  # sentences that are tokenised together
SHOWN = 3  # sample sentences a validation
# A word of a text that nobody has divided: letters and digits, with signs inside them; or a sign alone. The
# last point of U.N. is part of it, that of a sentence is not.
WORD = regex.compile(
    rf"(?V1)(?:[\p{{L}}\p{{Nl}}\p{{No}}]\.){{2,}}+(?![\p{{L}}\p{{N}}_-])"
    rf"|[{LETTER}](?:[{LETTER}{EXTEND}.'’&/-]*[{LETTER}{EXTEND}])?"
    rf"|{SPACELESS}|{SIGN}|[^{NO_SIGN}][{EXTEND}]*+"
)


@dataclass(frozen=True)
class DataConfig(LabelledData):
    """The ``data:`` section. Files are read as :mod:`jumok.data.tagged` says."""

    word: int = 1  # the column of the words, counted from 1, or from the end: -1 is the last
    tag: int = -1
    scheme: Scheme = "any"  # how tags mark entities; any: read IOB1 and IOB2 as they come


@dataclass(frozen=True)
class Recipe:
    """Everything that a tagging run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["tag"]
    data: DataConfig
    # A run or a Hugging Face folder; null: new weights, and a vocabulary learned from the data.
    from_: From = None
    scratch: bool = False  # take over sizes and vocabulary only: new weights, to compare with
    model: BertConfig = field(default_factory=BertConfig)  # with ``from``, only its dropouts count
    text: WordPieceConfig = field(default_factory=WordPieceConfig)
    train: Settings = field(default_factory=Settings)


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return fine_tuning.train(Tag(run), console)


def load(run: Run, device: str = "auto") -> TagReader:
    """The trained model of a run, ready to find entities."""
    use = Tag(run)
    return TagReader(use, *fine_tuning.load_model(use, device))


def evaluate(predictor: TagReader, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what it said."""
    return verdicts.evaluate(predictor, split, console)


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same data."""
    verdicts.compare(runs, load, split, out, device, console)


# ------------------------------------------------------------------------------------------------- the use


class Tag(BertUse[Sentence]):
    """Tags of words, for one run."""

    does = "find the entities of a text"
    kind = Sentence
    batch = TaggedWords

    def read(self, named: Named, split: str) -> Iterator[Sentence | Flaw]:
        data: DataConfig = self.recipe.data
        found = tagged.read(named, word=data.word, tag=data.tag, scheme=data.scheme, split=split)
        return found if split == "train" and not self.run.has_begun else self._checked(found)

    def _checked(self, found: Iterator[Sentence | Flaw]) -> Iterator[Sentence | Flaw]:
        """The same sentences, with a flaw for each that has a tag that was never learned."""
        known = set(self.labels)
        for one in found:
            if isinstance(one, Sentence):
                at = next((n for n, tag in enumerate(one.tags) if tag not in known), None)
                if at is not None:
                    path, _, line = one.where.rpartition(":")
                    told = (
                        f"{one.tags[at]!r} of the word {one.words[at]!r}; known are: {', '.join(self.labels)}"
                    )
                    yield Flaw(f"{path}:{int(line) + at}", "an unknown tag", told)
                    continue
            yield one

    def key(self, example: Sentence) -> str:
        return " ".join(example.words)

    def texts(self, example: Sentence) -> Iterable[str]:
        return [" ".join(example.words)]

    def settle(self, examples: Sequence[Sentence]) -> list[str]:
        kinds = dict.fromkeys(tag[2:] for one in examples for tag in one.tags if tag != "O")
        return labels_of(list(kinds))

    def head(self, config: BertConfig, vocabulary: int) -> nn.Module:
        return Tagger(config, vocabulary, len(self.labels))

    def rows(
        self, examples: Iterable[Sentence], pieces: WordPieces, longest: int
    ) -> Iterator[list[Row] | Flaw]:
        numbers = {tag: number for number, tag in enumerate(self.labels)}
        for one, found in self.located(examples, pieces):
            parts = self.windows(found, longest, one.where)
            if isinstance(parts, Flaw):
                yield parts
                continue
            labels = first_pieces(found.words, [numbers[tag] for tag in one.tags])
            yield [
                _row(found, part, pieces, _counted(labels, part, number, parts))
                for number, part in enumerate(parts)
            ]

    def located(self, examples: Iterable[Sentence], pieces: WordPieces) -> Iterator[tuple[Sentence, Pieces]]:
        """Sentences with the pieces of their words."""
        examples = iter(examples)
        while some := list(itertools.islice(examples, AT_ONCE)):
            yield from zip(some, pieces.located_all([one.words for one in some]), strict=True)

    def windows(self, found: Pieces, longest: int, where: str) -> list[Window] | Flaw:
        """What of a sentence is read at once."""
        room = longest - 2
        if len(found.ids) > room and self.recipe.data.long == "refuse":
            told = f"{len(found.ids) + 2} tokens, and {longest} are read at once; {TOO_LONG}"
            return Flaw(where, "a sentence that is too long", told)
        return windows(len(found.ids), room, self.recipe.data.stride)

    def predictor(self, model: nn.Module, pieces: WordPieces) -> TagReader:
        return TagReader(self, model, pieces)


def _row(found: Pieces, part: Window, pieces: WordPieces, labels: list[int]) -> Row:
    ids, segments = pieces.joined(found.ids[part.begin : part.end])
    return Row(ids, segments, {"labels": [IGNORE, *labels, IGNORE]})


def _counted(labels: list[int], part: Window, number: int, parts: list[Window]) -> list[int]:
    """The labels of a window. Each word counts in one window only, the one that is asked for it later."""
    return [
        IGNORE if labels[at] == IGNORE or central(at, parts) != number else labels[at]
        for at in range(part.begin, part.end)
    ]


# ------------------------------------------------------------------------------------------------- at work


@dataclass(frozen=True)
class Tagging(Prediction):
    """The words of a line, where each begins and ends, their tags in IOB2, and how likely each tag is."""

    words: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    tags: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()

    @property
    def entities(self) -> list[Entity]:
        """Runs of words, with their kinds."""
        return entities(self.tags)

    def found(self) -> Iterator[dict[str, Any]]:
        """The entities with their texts, where in the line they stand, and how likely they are."""
        for kind, first, last in self.entities:
            begin, end = self.spans[first][0], self.spans[last - 1][1]
            share = float(np.prod(self.probabilities[first:last]))
            yield {
                "kind": kind,
                "text": self.text[begin:end],
                "begin": begin,
                "end": end,
                "probability": share,
            }

    def written(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        if as_json:
            known = {"line": self.number, "text": self.text, "entities": list(self.found())}
            yield json.dumps({**known, "words": self.words, "tags": self.tags}, ensure_ascii=False)
            return
        said, done = "", 0
        for kind, begin, end in self.entities:
            first, last = self.spans[begin][0], self.spans[end - 1][1]
            said += f"{self.text[done:first]}[{self.text[first:last]}]({kind})"
            done = last
        yield said + self.text[done:]


class TagReader(BertReader):
    """A model that finds entities.

    >>> reader = jumok.load("runs/bert-conll2003")  # doctest: +SKIP
    >>> reader.tag("Ekeus heads for Baghdad .").entities[1]  # doctest: +SKIP
    Entity(kind='LOC', begin=3, end=4)
    """

    @property
    def labels(self) -> Sequence[str]:
        found: list[str] = self.use.labels
        return found

    def tag(self, text: str) -> Tagging:
        """One text; many of them by :meth:`predict`."""
        return next(self.predict([text], Search()))

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Tagging]:
        """The entities of every line, in their order."""
        if search.n_best > 1:
            raise InputError("--n-best: each word has one tag here, the likeliest; --json tells how likely")
        numbered = enumerate(lines, first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            found = [list(WORD.finditer(line)) for _, line in window]
            sentences = [
                Sentence(tuple(one.group() for one in words), ("O",) * len(words), "") for words in found
            ]
            said = self._tags(sentences, window[0][0])
            for (number, line), words, (tags, shares) in zip(window, found, said, strict=True):
                spans = tuple(word.span() for word in words)
                texts = tuple(word.group() for word in words)
                yield Tagging(number, line, texts, spans, tuple(iob2(tags)), shares)

    def length(self, text: str) -> int:
        """How many tokens the model reads of a text; one that is too long is an error."""
        return sum(len(row.ids) for row in self.windows(text))

    def windows(self, text: str) -> list[Row]:
        words = tuple(WORD.findall(text))
        rows: list[Row]
        [rows] = self.encoded(
            self.use.rows([Sentence(words, ("O",) * len(words), "")], self.tokenizer, self.longest)
        )
        return rows

    def judge(self, examples: Sequence[Sentence]) -> Judgement:
        said = [tags for tags, _ in self._tags(examples, None)]
        score = tag_score([one.tags for one in examples], said)
        figures: dict[str, Any] = {
            "f1": score.whole.f1,
            "precision": score.whole.precision,
            "recall": score.whole.recall,
            "accuracy": score.accuracy,
        }
        figures["kinds"] = [
            {"kind": kind, "precision": one.precision, "recall": one.recall, "f1": one.f1, "count": one.true}
            for kind, one in score.kinds.items()
        ]
        each = np.array([_counts(one.tags, tags) for one, tags in zip(examples, said, strict=True)])

        def of(some: NDArray[np.int64]) -> float:
            return EntityScore(*each[some].sum(0).tolist()).f1

        outputs = [
            json.dumps({"words": one.words, "said": tags, "wanted": one.tags}, ensure_ascii=False)
            for one, tags in zip(examples, said, strict=True)
        ]
        samples = [
            line
            for one, tags in zip(examples[:SHOWN], said, strict=False)
            for line in (f"  said    {_marked(one.words, tags)}", f"  wanted  {_marked(one.words, one.tags)}")
        ]
        return Judgement(figures, "f1", of, outputs, samples)

    def _tags(
        self, sentences: Sequence[Sentence], first: int | None
    ) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
        """The likeliest tag of each word, and how likely it is; ``first`` is the number of the first line."""
        located = [found for _, found in self.use.located(sentences, self.tokenizer)]
        rows = self.encoded(self.use.rows(sentences, self.tokenizer, self.longest), first)
        said = iter(
            self.outputs([row for some in rows for row in some], lambda batch: [self.model.logits(batch)])
        )
        for sentence, pieces, some in zip(sentences, located, rows, strict=True):
            parts = self.use.windows(pieces, self.longest, "")
            logits = [next(said)[0].double().softmax(-1).numpy() for _ in some]
            # A word of which no piece is left, as a control character has none, is no entity.
            tags, shares = ["O"] * len(sentence.words), [1.0] * len(sentence.words)
            labels = first_pieces(pieces.words, range(len(sentence.words)))
            for at, word in enumerate(labels):
                if word != IGNORE:
                    window = central(at, parts)
                    share = logits[window][1 + at - parts[window].begin]
                    best = int(share.argmax())
                    tags[word], shares[word] = self.use.labels[best], float(share[best])
            yield tuple(tags), tuple(shares)


def _counts(wanted: Sequence[str], said: Sequence[str]) -> tuple[int, int, int]:
    found = tag_score([wanted], [said]).whole
    return found.right, found.said, found.true


def _marked(words: Sequence[str], tags: Sequence[str]) -> str:
    """A sentence with its entities in brackets."""
    shown = list(words)
    for kind, begin, end in entities(tags):
        shown[begin] = f"[{shown[begin]}"
        shown[end - 1] = f"{shown[end - 1]}]({kind})"
    return " ".join(shown)
