"""Classification by models of words whose attention tells what decided: self-attentive and hierarchical.

::

    self_attentive    a text is one sequence of words; several hops look at it, each at words of its own
    hierarchical     a text is sentences of words; one look at the words of each, one at the sentences

Texts of any length are read whole. The reader of a run says where it looked, ``highlight_texts(texts)``, and what
it would say of texts with some words taken away, ``predict_probabilities(…)``.
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

from jumok.batches.text import ClassificationBatch, DocumentBatch, TextBatch
from jumok.batches.tokens import UNK
from jumok.data.batching.documents import DocumentBatcher
from jumok.data.batching.text_pairs import TextPairBatcher
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.builtin import decisive_words
from jumok.data.readers import word_vectors
from jumok.data.readers.classification import ClassificationExample
from jumok.data.tokenizers.word_tokenizer import (
    SegmentedText,
    WordSentences,
    WordTokenizer,
    WordTokenizerConfig,
    segment_text,
)
from jumok.errors import InputError
from jumok.metrics.attention_hits import attention_hit_rates
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.self_attentive import SelfAttentiveClassifier, SelfAttentiveConfig
from jumok.tasks import common
from jumok.tasks.base import Evaluation
from jumok.tasks.classify.predictor import (
    TEXTS_PER_CHUNK,
    ClassificationDataConfig,
    ClassificationEvaluationConfig,
    ClassificationPredictor,
    ClassificationTask,
)
from jumok.tasks.predictors import Prediction, compute_mean_loss
from jumok.tasks.supervised import DatasetSplit, DataSource
from jumok.training import DistributedRanks, TrainConfig

if TYPE_CHECKING:
    from jumok.look.viewer.attended_document import AttendedDocument
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = [
    "WORD_ATTENTION_RECIPE_TYPES",
    "HierarchicalRecipe",
    "SelfAttentiveRecipe",
    "WordAttentionPredictor",
    "WordAttentionTask",
]

BUILTIN_DATASET = "decisive-words-en"
MAX_BATCH_TOKENS = 16384  # in a batch, at work
MAX_TITLE_CHARS = 120  # characters


@dataclass(frozen=True)
class WordAttentionDataConfig(ClassificationDataConfig):
    """The ``data:`` section."""

    train: DataSource = BUILTIN_DATASET


@dataclass(frozen=True)
class _WordAttentionRecipe:
    """What the recipes of both models have."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["classify"]
    data: WordAttentionDataConfig = field(default_factory=WordAttentionDataConfig)
    tokenizer: WordTokenizerConfig = field(default_factory=WordTokenizerConfig)
    word_vectors: str | None = None  # a file of word vectors (.vec, word2vec) that the embedding begins from
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: ClassificationEvaluationConfig = field(default_factory=ClassificationEvaluationConfig)


@dataclass(frozen=True)
class SelfAttentiveRecipe(_WordAttentionRecipe):
    """Everything that a run of a self-attentive model depends on."""

    model: SelfAttentiveConfig = field(default_factory=SelfAttentiveConfig)


@dataclass(frozen=True)
class HierarchicalRecipe(_WordAttentionRecipe):
    """Everything that a run of a hierarchical attention network depends on."""

    model: HierarchicalConfig = field(default_factory=HierarchicalConfig)


WORD_ATTENTION_RECIPE_TYPES: dict[str, type] = {
    "self_attentive": SelfAttentiveRecipe,
    "hierarchical": HierarchicalRecipe,
}


@dataclass(frozen=True)
class WordAttentionEncoding:
    """What a model reads of a text: the ids of its sentences; if self-attentive, of the text, or of two."""

    token_ids: list[list[int]]
    target: int | float


# ------------------------------------------------------------------------------------------------- the use


class WordAttentionTask(ClassificationTask):
    """Labels of texts by a model of words, for one run."""

    @property
    def is_hierarchical(self) -> bool:
        return isinstance(self.recipe.model, HierarchicalConfig)

    def prepare(self, train: DatasetSplit[ClassificationExample]) -> None:
        self._check_recipe()
        texts = (
            self.tokenize_words(text).sentences for one in train.examples for text in self.get_texts(one)
        )
        WordTokenizer.train(texts, self.recipe.tokenizer).save(self.run.folder)

    def build_model(self) -> tuple[nn.Module, WordTokenizer]:
        self._check_recipe()
        words, config = WordTokenizer.load(self.run.folder), self.recipe.model
        if self.is_hierarchical:
            return HierarchicalAttentionNetwork(config, words.vocab_size, self.num_outputs), words
        pairs = self.recipe.data.pair_column is not None
        return SelfAttentiveClassifier(
            replace(config, text_pairs=pairs), words.vocab_size, self.num_outputs
        ), words

    def _check_recipe(self) -> None:
        pairs = self.recipe.data.pair_column is not None
        if self.is_hierarchical and pairs:
            raise InputError("data.pair_column: a hierarchical model reads one text; self_attentive ones read pairs")
        if getattr(self.recipe.model, "text_pairs", False) and not pairs:
            raise InputError("model.text_pairs: true, but data.pair_column names no column of second texts")

    def init_weights(self, model: Any, tokenizer: WordTokenizer) -> str | None:
        path: str | None = self.recipe.word_vectors
        if path is None:
            return None
        words = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
        found = word_vectors.fill_embedding(
            model.embedding, words, word_vectors.read_word_vectors(Path(path), words)
        )
        return f"{found:,} of {len(words):,} words begin from {path}"

    def tokenize_words(self, text: str) -> SegmentedText:
        """A text as sentences of words."""
        return segment_text(text, strip_markup=self.recipe.tokenizer.strip_markup)

    def join_sentences(self, texts: Sequence[Sequence[list[int]]]) -> list[list[int]]:
        """One text or two, in ids of their sentences, as the model reads them."""
        if self.is_hierarchical:
            return [*itertools.chain.from_iterable(texts)] or [[UNK]]
        return [[*itertools.chain.from_iterable(text)] or [UNK] for text in texts]

    def build_dataset(
        self, encoded: Sequence[WordAttentionEncoding], model: Any, ranks: DistributedRanks
    ) -> TextBatcher | DocumentBatcher | TextPairBatcher:
        train: TrainConfig = self.recipe.train
        if model.bigrams is not None and not self.run.has_checkpoint:
            model.bigrams.learn(itertools.chain.from_iterable(one.token_ids for one in encoded))
        alike = common.resolve_batch_layout(self.run, ranks, packed=False)["fixed_shapes"]
        return self.build_batches(
            encoded, batch_tokens=train.batch_tokens, seed=train.seed, static_shapes=alike
        )

    def build_batches(
        self,
        encoded: Sequence[WordAttentionEncoding],
        *,
        batch_tokens: int,
        seed: int = 0,
        static_shapes: bool = False,
    ) -> TextBatcher | DocumentBatcher | TextPairBatcher:
        """As batches. Those of documents are like no other, and none the slower for it."""
        labels: Any = [one.target for one in encoded]
        if self.is_hierarchical:
            return DocumentBatcher(
                [one.token_ids for one in encoded],
                labels,
                max_tokens=batch_tokens,
                seed=seed,
                group_by_steps=True,
            )
        if self.recipe.data.pair_column is not None:
            firsts, seconds = zip(*(one.token_ids for one in encoded), strict=True)
            return TextPairBatcher(
                firsts, seconds, labels, max_tokens=batch_tokens, seed=seed, fixed_shapes=static_shapes
            )
        rows = [
            EncodedText(one.token_ids[0], [0] * len(one.token_ids[0]), {"labels": one.target})
            for one in encoded
        ]
        return TextBatcher(
            ClassificationBatch, rows, max_tokens=batch_tokens, seed=seed, fixed_shapes=static_shapes
        )

    def build_predictor(self, model: nn.Module, tokenizer: WordTokenizer) -> WordAttentionPredictor:
        return WordAttentionPredictor(self, model, tokenizer)

    def describe_model(self, model: nn.Module, tokenizer: WordTokenizer, num_examples: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        kind = self.recipe.model.type
        return (
            f"{kind}: {weights:.1f} M weights, vocabulary of {tokenizer.vocab_size:,}, {num_examples:,} texts"
        )


# ------------------------------------------------------------------------------------------------- at work


class WordAttentionPredictor(ClassificationPredictor):
    """A model that labels texts and tells what it looked at.

    >>> reader = jumok.load("runs/hierarchical-imdb")  # doctest: +SKIP
    >>> [document] = reader.highlight_texts(["The plot is thin. I loved it."])  # doctest: +SKIP
    >>> document.class_probabilities[0], document.sentence_weights  # doctest: +SKIP
    (('positive', 0.93), array([0.08, 0.92], dtype=float32))
    """

    task: WordAttentionTask
    tokenizer: WordTokenizer

    def encode(self, examples: Iterable[ClassificationExample]) -> Iterator[WordAttentionEncoding]:
        examples = iter(examples)
        while some := list(itertools.islice(examples, TEXTS_PER_CHUNK)):
            texts = [
                [self.task.tokenize_words(text).sentences for text in self.task.get_texts(one)]
                for one in some
            ]
            for one, parts in zip(some, self._encode_texts(texts), strict=True):
                yield WordAttentionEncoding(parts, self.task.get_target(one))

    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        [encoded] = self.encode([self._build_sample(text, text_pair)])
        return sum(map(len, encoded.token_ids))

    def predict_outputs(
        self, samples: Sequence[ClassificationExample], first_index: int | None
    ) -> NDArray[np.float64]:
        return self._predict_encoded(list(self.encode(samples)))

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        """What is said of texts, and where the model looked. Of a pair, a line with a tab or ||| in it."""
        samples = [self.parse_line(text, number) for number, text in enumerate(texts)]
        return self._build_documents(
            [self._tokenize_sample(one, number) for number, one in enumerate(samples, 1)]
        )

    def predict_probabilities(self, documents: Sequence[WordSentences]) -> NDArray[np.float64]:
        """``(N, C)`` for texts that come as sentences of words; of a pair, as its two texts.

        Words may have been taken away; of sentences nothing may be left.
        """
        if self.task.recipe.data.regression:
            raise InputError("this model says a number of a text, and no probabilities")
        if not len(documents):
            return np.zeros((0, self.task.num_outputs))
        pairs = self.task.recipe.data.pair_column is not None
        texts = [[[words] for words in one] if pairs else [one] for one in documents]
        for number, one in enumerate(texts, 1):
            if pairs and len(one) != 2:
                raise InputError(f"document {number} has {len(one)} texts; this model reads two")
        return self._predict_encoded(
            [WordAttentionEncoding(parts, self._dummy_target) for parts in self._encode_texts(texts)]
        )

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[ClassificationExample]) -> float:
        data = self.task.build_batches(list(self.encode(examples)), batch_tokens=MAX_BATCH_TOKENS)
        return compute_mean_loss(self.model, data, self.device)

    def score_examples(self, examples: Sequence[ClassificationExample]) -> Evaluation:
        """And, of data whose decisive words are known, how often the model looked at them."""
        found = super().score_examples(examples)
        if not all(one.location.startswith(tuple(decisive_words.LANGUAGES)) for one in examples):
            return found
        documents = self.highlight_texts([one.text for one in examples])
        rates = attention_hit_rates(
            [
                (one.get_word_weights(), decisive_words.find_decisive_words(one.words), one.sentence_offsets)
                for one in documents
            ]
        )
        return replace(found, metrics={**found.metrics, **rates})

    # --------------------------------------------------------------------------------------------- looking

    def make_viewer_factory(self, text: str) -> Callable[[], ViewerData]:
        sample = self.parse_line(text)
        words = self._tokenize_sample(sample, None)

        def look() -> ViewerData:
            [document] = self._build_documents([words])
            said = self._format_prediction(document, sample)
            title = text if len(text) <= MAX_TITLE_CHARS else f"{text[:MAX_TITLE_CHARS]}…"
            return self._build_document_view(document, f"{title}  →  {said}", said)

        return look

    def draw_attention(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The text as a picture, its words shaded by their weights."""
        from jumok.look.figures.document_figure import draw_document

        [document] = self.highlight_texts([prediction.input])
        return draw_document(document, path, title=title)

    def _build_document_view(
        self, document: AttendedDocument, title: str, prediction_text: str
    ) -> ViewerData:
        """The document, and its weights as layers: hops as heads; or words in sentences, and sentences."""
        from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

        weights = {"attention": (document.weights, document.words)}
        if document.sentence_weights is not None:
            begins = [" ".join(document.words[begin : begin + 4]) for begin in document.sentence_offsets[:-1]]
            weights = {
                "words": (document.normalize_within_sentences()[None], document.words),
                "sentences": (document.sentence_weights[None], tuple(begins)),
            }
        layers = tuple(
            ViewerLayer(
                name,
                "pooling",
                (1, len(cols)),
                tuple(range(len(x))),
                ArrayWeightSource(x[:, None]),
                (prediction_text,),
                cols,
            )
            for name, (x, cols) in weights.items()
        )
        return ViewerData(layers, title, prediction_text, document=document)

    def _format_prediction(self, document: AttendedDocument, sample: ClassificationExample) -> str:
        if document.class_probabilities:
            label, share = document.class_probabilities[0]
            return f"{label} {share:.4f}"
        return f"{float(self.predict_outputs([sample], None)[0, 0]):.4f}"

    # ------------------------------------------------------------------------------------------------------

    @property
    def _dummy_target(self) -> int | float:
        return 0.0 if self.task.recipe.data.regression else 0

    def _tokenize_sample(self, sample: ClassificationExample, index: int | None) -> list[SegmentedText]:
        """The words of the text, or the two; what has none is an error."""
        found = [self.task.tokenize_words(text) for text in self.task.get_texts(sample)]
        if not all(one.words for one in found):
            raise InputError(
                f"{'the text' if index is None else f'text {index}'} has no words to look at; give it some"
            )
        return found

    def _encode_texts(self, texts: Sequence[Sequence[WordSentences]]) -> list[list[list[int]]]:
        """What the model reads of examples, each of one or two texts."""
        encoded = iter(self.tokenizer.encode([text for some in texts for text in some]))
        return [self.task.join_sentences([next(encoded) for _ in some]) for some in texts]

    def _predict_encoded(self, encoded: Sequence[WordAttentionEncoding]) -> NDArray[np.float64]:
        found = np.zeros((len(encoded), self.task.num_outputs))
        for batch in self._iterate_batches(encoded):
            logits: Tensor = self.model.logits(batch)[: len(batch.example_indices)].double()
            said = logits if self.task.recipe.data.regression else logits.softmax(-1)
            found[list(batch.example_indices)] = said.cpu().numpy()
        return found

    def _iterate_batches(self, encoded: Sequence[WordAttentionEncoding]) -> Iterator[TextBatch]:
        data = self.task.build_batches(encoded, batch_tokens=MAX_BATCH_TOKENS)
        with torch.inference_mode():
            for index in data.batches(0):
                yield data.collate(index).to(self.device)

    def _build_documents(self, texts: Sequence[list[SegmentedText]]) -> list[AttendedDocument]:
        from jumok.look.viewer.attended_document import AttendedDocument

        parts = self._encode_texts([[one.sentences for one in some] for some in texts])
        encoded = [WordAttentionEncoding(one, self._dummy_target) for one in parts]
        said = self._predict_encoded(encoded) if encoded else np.zeros((0, 1))
        looked: dict[int, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {}
        for batch in self._iterate_batches(encoded) if encoded else ():
            looked |= zip(batch.example_indices, self._compute_token_weights(batch), strict=True)
        found = []
        for number, some in enumerate(texts):
            of_tokens, within = looked[number]
            words = tuple(itertools.chain.from_iterable(one.words for one in some))
            before = [*some[0].spaces, *(gap or " " for one in some[1:] for gap in one.spaces)]
            edges = some[0].sentence_bounds if len(some) == 1 else (0, len(some[0].words), len(words))
            weights = np.zeros((len(of_tokens), len(words)), np.float32)
            if of_tokens.shape == weights.shape:  # each word is one token
                weights = of_tokens
            else:
                np.add.at(weights.T, self._compute_word_indices(some), of_tokens.T)
            found.append(
                AttendedDocument(
                    words, tuple(before), edges, weights, within, self._rank_labels(said[number])
                )
            )
        return found

    def _compute_token_weights(
        self, batch: TextBatch
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """For each text, the weights of its tokens ``(hops, batch_tokens)``, and of its sentences if it has any."""
        maps = [one.weights.float().cpu().numpy() for one in self.model.compute_attention_maps(batch)]
        if isinstance(batch, DocumentBatch):
            of_words, of_sentences = (one[:, 0, 0] for one in maps)
            first = 0
            for number, size in enumerate(batch.sentence_indices.lengths[: len(batch.example_indices)]):
                within = of_sentences[number, :size]
                lengths = batch.tokens.lengths[first : first + size]
                rows = zip(within, of_words[first : first + size], lengths, strict=True)
                yield np.concatenate([share * row[:length] for share, row, length in rows])[None], within
                first += size
            return
        sides = [batch.tokens, *([] if len(maps) == 1 else [batch.second_tokens])]  # type: ignore[attr-defined]
        for number in range(len(batch.example_indices)):
            halves = [
                one[number, :, 0, : tokens.lengths[number]] / len(maps)
                for one, tokens in zip(maps, sides, strict=True)
            ]
            yield np.concatenate(halves, axis=1), None

    def _compute_word_indices(self, texts: Sequence[SegmentedText]) -> NDArray[np.int64]:
        """The number of the word of each token."""
        places: list[int] = []
        begin = 0
        for sentence in (words for one in texts for words in one.sentences):
            places += (begin + place for place in self.tokenizer.word_ids_from_words(sentence) or [0])
            begin += len(sentence)
        return np.array(places)

    def _rank_labels(self, probabilities: NDArray[np.float64]) -> tuple[tuple[str, float], ...]:
        names = self.labels
        return (
            tuple((names[at], float(probabilities[at])) for at in np.argsort(-probabilities, kind="stable"))
            if names
            else ()
        )
