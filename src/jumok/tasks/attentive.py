"""Classification by models of words whose attention tells what decided: self-attentive and hierarchical.

::

    selfattentive    a text is one sequence of words; several hops look at it, each at words of its own
    hierarchical     a text is sentences of words; one look at the words of each, one at the sentences

Texts of any length are read whole. The reader of a run says where it looked, ``documents(texts)``, and what
it would say of texts with some words taken away, ``probabilities(…)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jumok.annotated import Labelled, LabelledDocuments, Texts
from jumok.batch import UNK
from jumok.data import decisive, vectors
from jumok.data.examples import Examples, Row
from jumok.data.labelled import Sample
from jumok.data.nested import Nested
from jumok.data.paired import Paired
from jumok.data.worded import Sentences, Words, WordsConfig, Written, written
from jumok.errors import InputError
from jumok.metrics.hits import hit_rates
from jumok.models.hierarchical import Hierarchical, HierarchicalConfig
from jumok.models.selfattentive import SelfAttentive, SelfAttentiveConfig
from jumok.tasks import common
from jumok.tasks.classes import AT_ONCE, Classes, ClassReader, ScoreConfig, TextData
from jumok.tasks.reader import Prediction, mean_loss
from jumok.tasks.supervised import Named, Split
from jumok.tasks.verdicts import Judgement
from jumok.training import Ranks, Settings

if TYPE_CHECKING:
    from jumok.look.document import Document
    from jumok.look.scene import Scene

__all__ = ["RECIPES", "Attentive", "AttentiveReader", "HierarchicalRecipe", "SelfAttentiveRecipe"]

BUILT_IN = "decisive-words-en"
TOKENS = 16384  # in a batch, at work
LONGEST_TITLE = 120  # characters


@dataclass(frozen=True)
class DataConfig(TextData):
    """The ``data:`` section."""

    train: Named = BUILT_IN


@dataclass(frozen=True)
class _Recipe:
    """What the recipes of both models have."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["classify"]
    data: DataConfig = field(default_factory=DataConfig)
    text: WordsConfig = field(default_factory=WordsConfig)
    vectors: str | None = None  # a file of word vectors (.vec, word2vec) that the embedding begins from
    train: Settings = field(default_factory=Settings)
    score: ScoreConfig = field(default_factory=ScoreConfig)


@dataclass(frozen=True)
class SelfAttentiveRecipe(_Recipe):
    """Everything that a run of a self-attentive model depends on."""

    model: SelfAttentiveConfig = field(default_factory=SelfAttentiveConfig)


@dataclass(frozen=True)
class HierarchicalRecipe(_Recipe):
    """Everything that a run of a hierarchical attention network depends on."""

    model: HierarchicalConfig = field(default_factory=HierarchicalConfig)


RECIPES: dict[str, type] = {"selfattentive": SelfAttentiveRecipe, "hierarchical": HierarchicalRecipe}


@dataclass(frozen=True)
class Encoded:
    """What a model reads of a text: the ids of its sentences; if self-attentive, of the text, or of two."""

    parts: list[list[int]]
    label: int | float


# ------------------------------------------------------------------------------------------------- the use


class Attentive(Classes):
    """Labels of texts by a model of words, for one run."""

    @property
    def by_sentence(self) -> bool:
        return isinstance(self.recipe.model, HierarchicalConfig)

    def prepare(self, train: Split[Sample]) -> None:
        self._check()
        texts = (self.written(text).sentences for one in train.examples for text in self.texts(one))
        Words.train(texts, self.recipe.text).save(self.run.folder)

    def made(self) -> tuple[nn.Module, Words]:
        self._check()
        words, config = Words.load(self.run.folder), self.recipe.model
        if self.by_sentence:
            return Hierarchical(config, words.size, self.outputs), words
        pairs = self.recipe.data.pair is not None
        return SelfAttentive(replace(config, pairs=pairs), words.size, self.outputs), words

    def _check(self) -> None:
        pairs = self.recipe.data.pair is not None
        if self.by_sentence and pairs:
            raise InputError("data.pair: a hierarchical model reads one text; selfattentive ones read pairs")
        if getattr(self.recipe.model, "pairs", False) and not pairs:
            raise InputError("model.pairs: true, but data.pair names no column of second texts")

    def begin(self, model: Any, tokenizer: Words) -> str | None:
        path: str | None = self.recipe.vectors
        if path is None:
            return None
        words = tokenizer.pieces(range(tokenizer.size))
        found = vectors.fill(model.embedding, words, vectors.read(Path(path), words))
        return f"{found:,} of {len(words):,} words begin from {path}"

    def written(self, text: str) -> Written:
        """A text as sentences of words."""
        return written(text, markup=self.recipe.text.markup)

    def parts(self, texts: Sequence[Sequence[list[int]]]) -> list[list[int]]:
        """One text or two, in ids of their sentences, as the model reads them."""
        if self.by_sentence:
            return [*itertools.chain.from_iterable(texts)] or [[UNK]]
        return [[*itertools.chain.from_iterable(text)] or [UNK] for text in texts]

    def learnable(self, encoded: Sequence[Encoded], model: Any, ranks: Ranks) -> Examples | Nested | Paired:
        train: Settings = self.recipe.train
        if model.bigrams is not None and not self.run.has_begun:
            model.bigrams.learn(itertools.chain.from_iterable(one.parts for one in encoded))
        alike = common.layout(self.run, ranks, packed=False)["alike"]
        return self.laid(encoded, tokens=train.tokens, seed=train.seed, alike=alike)

    def laid(
        self, encoded: Sequence[Encoded], *, tokens: int, seed: int = 0, alike: bool = False
    ) -> Examples | Nested | Paired:
        """As batches. Those of documents are like no other, and none the slower for it."""
        labels: Any = [one.label for one in encoded]
        if self.by_sentence:
            return Nested([one.parts for one in encoded], labels, tokens=tokens, seed=seed, by_steps=True)
        if self.recipe.data.pair is not None:
            firsts, seconds = zip(*(one.parts for one in encoded), strict=True)
            return Paired(firsts, seconds, labels, tokens=tokens, seed=seed, alike=alike)
        rows = [Row(one.parts[0], [0] * len(one.parts[0]), {"labels": one.label}) for one in encoded]
        return Examples(Labelled, rows, tokens=tokens, seed=seed, alike=alike)

    def predictor(self, model: nn.Module, tokenizer: Words) -> AttentiveReader:
        return AttentiveReader(self, model, tokenizer)

    def told(self, model: nn.Module, tokenizer: Words, texts: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        kind = self.recipe.model.kind
        return f"{kind}: {weights:.1f} M weights, vocabulary of {tokenizer.size:,}, {texts:,} texts"


# ------------------------------------------------------------------------------------------------- at work


class AttentiveReader(ClassReader):
    """A model that labels texts and tells what it looked at.

    >>> reader = jumok.load("runs/hierarchical-imdb")  # doctest: +SKIP
    >>> [document] = reader.documents(["The plot is thin. I loved it."])  # doctest: +SKIP
    >>> document.said[0], document.by_sentence()  # doctest: +SKIP
    (('positive', 0.93), array([0.08, 0.92], dtype=float32))
    """

    use: Attentive
    tokenizer: Words

    def encode(self, examples: Iterable[Sample]) -> Iterator[Encoded]:
        examples = iter(examples)
        while some := list(itertools.islice(examples, AT_ONCE)):
            texts = [[self.use.written(text).sentences for text in self.use.texts(one)] for one in some]
            for one, parts in zip(some, self._parts(texts), strict=True):
                yield Encoded(parts, self.use.number(one))

    def length(self, text: str, pair: str | None = None) -> int:
        [encoded] = self.encode([self._sample(text, pair)])
        return sum(map(len, encoded.parts))

    def said(self, samples: Sequence[Sample], first: int | None) -> NDArray[np.float64]:
        return self._said(list(self.encode(samples)))

    def documents(self, texts: Sequence[str]) -> list[Document]:
        """What is said of texts, and where the model looked. Of a pair, a line with a tab or ||| in it."""
        samples = [self.of_line(text, number) for number, text in enumerate(texts)]
        return self._documents([self._words(one, number) for number, one in enumerate(samples, 1)])

    def probabilities(self, documents: Sequence[Sentences]) -> NDArray[np.float64]:
        """``(N, C)`` for texts that come as sentences of words; of a pair, as its two texts.

        Words may have been taken away; of sentences nothing may be left.
        """
        if self.use.recipe.data.regression:
            raise InputError("this model says a number of a text, and no probabilities")
        if not len(documents):
            return np.zeros((0, self.use.outputs))
        pairs = self.use.recipe.data.pair is not None
        texts = [[[words] for words in one] if pairs else [one] for one in documents]
        for number, one in enumerate(texts, 1):
            if pairs and len(one) != 2:
                raise InputError(f"document {number} has {len(one)} texts; this model reads two")
        return self._said([Encoded(parts, self._no_label) for parts in self._parts(texts)])

    @torch.inference_mode()
    def loss(self, examples: Sequence[Sample]) -> float:
        data = self.use.laid(list(self.encode(examples)), tokens=TOKENS)
        return mean_loss(self.model, data, self.device)

    def judge(self, examples: Sequence[Sample]) -> Judgement:
        """And, of data whose decisive words are known, how often the model looked at them."""
        found = super().judge(examples)
        if not all(one.where.startswith(tuple(decisive.LANGUAGES)) for one in examples):
            return found
        documents = self.documents([one.text for one in examples])
        rates = hit_rates([(one.of(), decisive.decisive(one.words), one.sentences) for one in documents])
        return replace(found, figures={**found.figures, **rates})

    # --------------------------------------------------------------------------------------------- looking

    def looking(self, text: str) -> Callable[[], Scene]:
        sample = self.of_line(text)
        words = self._words(sample, None)

        def look() -> Scene:
            [document] = self._documents([words])
            said = self._in_words(document, sample)
            title = text if len(text) <= LONGEST_TITLE else f"{text[:LONGEST_TITLE]}…"
            return self._scene(document, f"{title}  →  {said}", said)

        return look

    def draw(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The text as a picture, its words shaded by their weights."""
        from jumok.look.document_figure import draw_document

        [document] = self.documents([prediction.text])
        return draw_document(document, path, title=title)

    def _scene(self, document: Document, title: str, said: str) -> Scene:
        """The document, and its weights as layers: hops as heads; or words in sentences, and sentences."""
        from jumok.look.scene import Arrays, Layer, Scene

        weights = {"attention": (document.weights, document.words)}
        if document.within is not None:
            begins = [" ".join(document.words[begin : begin + 4]) for begin in document.sentences[:-1]]
            weights = {
                "words": (document.in_sentences()[None], document.words),
                "sentences": (document.within[None], tuple(begins)),
            }
        layers = tuple(
            Layer(name, "pooling", (1, len(cols)), tuple(range(len(x))), Arrays(x[:, None]), (said,), cols)
            for name, (x, cols) in weights.items()
        )
        return Scene(layers, title, said, document=document)

    def _in_words(self, document: Document, sample: Sample) -> str:
        if document.said:
            label, share = document.said[0]
            return f"{label} {share:.4f}"
        return f"{float(self.said([sample], None)[0, 0]):.4f}"

    # ------------------------------------------------------------------------------------------------------

    @property
    def _no_label(self) -> int | float:
        return 0.0 if self.use.recipe.data.regression else 0

    def _words(self, sample: Sample, number: int | None) -> list[Written]:
        """The words of the text, or the two; what has none is an error."""
        found = [self.use.written(text) for text in self.use.texts(sample)]
        if not all(one.words for one in found):
            raise InputError(
                f"{'the text' if number is None else f'text {number}'} has no words to look at; give it some"
            )
        return found

    def _parts(self, texts: Sequence[Sequence[Sentences]]) -> list[list[list[int]]]:
        """What the model reads of examples, each of one or two texts."""
        encoded = iter(self.tokenizer.encode([text for some in texts for text in some]))
        return [self.use.parts([next(encoded) for _ in some]) for some in texts]

    def _said(self, encoded: Sequence[Encoded]) -> NDArray[np.float64]:
        found = np.zeros((len(encoded), self.use.outputs))
        for batch in self._batches(encoded):
            logits: Tensor = self.model.logits(batch)[: len(batch.index)].double()
            said = logits if self.use.recipe.data.regression else logits.softmax(-1)
            found[list(batch.index)] = said.cpu().numpy()
        return found

    def _batches(self, encoded: Sequence[Encoded]) -> Iterator[Texts]:
        data = self.use.laid(encoded, tokens=TOKENS)
        with torch.inference_mode():
            for index in data.batches(0):
                yield data.collate(index).to(self.device)

    def _documents(self, texts: Sequence[list[Written]]) -> list[Document]:
        from jumok.look.document import Document

        parts = self._parts([[one.sentences for one in some] for some in texts])
        encoded = [Encoded(one, self._no_label) for one in parts]
        said = self._said(encoded) if encoded else np.zeros((0, 1))
        looked: dict[int, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {}
        for batch in self._batches(encoded) if encoded else ():
            looked |= zip(batch.index, self._looked(batch), strict=True)
        found = []
        for number, some in enumerate(texts):
            of_tokens, within = looked[number]
            words = tuple(itertools.chain.from_iterable(one.words for one in some))
            before = [*some[0].before, *(gap or " " for one in some[1:] for gap in one.before)]
            edges = some[0].edges if len(some) == 1 else (0, len(some[0].words), len(words))
            weights = np.zeros((len(of_tokens), len(words)), np.float32)
            if of_tokens.shape == weights.shape:  # each word is one token
                weights = of_tokens
            else:
                np.add.at(weights.T, self._places(some), of_tokens.T)
            found.append(Document(words, tuple(before), edges, weights, within, self._ranked(said[number])))
        return found

    def _looked(self, batch: Texts) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """For each text, the weights of its tokens ``(hops, tokens)``, and of its sentences if it has any."""
        maps = [one.weights.float().cpu().numpy() for one in self.model.maps(batch)]
        if isinstance(batch, LabelledDocuments):
            of_words, of_sentences = (one[:, 0, 0] for one in maps)
            first = 0
            for number, size in enumerate(batch.sentences.lengths[: len(batch.index)]):
                within = of_sentences[number, :size]
                lengths = batch.tokens.lengths[first : first + size]
                rows = zip(within, of_words[first : first + size], lengths, strict=True)
                yield np.concatenate([share * row[:length] for share, row, length in rows])[None], within
                first += size
            return
        sides = [batch.tokens, *([] if len(maps) == 1 else [batch.seconds])]  # type: ignore[attr-defined]
        for number in range(len(batch.index)):
            halves = [
                one[number, :, 0, : tokens.lengths[number]] / len(maps)
                for one, tokens in zip(maps, sides, strict=True)
            ]
            yield np.concatenate(halves, axis=1), None

    def _places(self, texts: Sequence[Written]) -> NDArray[np.int64]:
        """The number of the word of each token."""
        places: list[int] = []
        begin = 0
        for sentence in (words for one in texts for words in one.sentences):
            places += (begin + place for place in self.tokenizer.places(sentence) or [0])
            begin += len(sentence)
        return np.array(places)

    def _ranked(self, said: NDArray[np.float64]) -> tuple[tuple[str, float], ...]:
        names = self.labels
        return tuple((names[at], float(said[at])) for at in np.argsort(-said, kind="stable")) if names else ()
