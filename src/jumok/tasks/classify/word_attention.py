"""Classification by models of words whose attention shows what decided: self-attentive and hierarchical.

::

    self-attentive   a text is one sequence of words; several hops attend to it, each to other words
    hierarchical     a text is sentences of words; one attention over the words of each, one over the sentences

Texts of any length are read as a whole. The predictor returns the word weights of texts with ``highlight_texts``,
and the probabilities of texts with words removed with ``predict_probabilities``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from jumok.batches.text import ClassificationBatch, DocumentBatch, TextBatch, TextPairBatch
from jumok.batches.tokens import UNK
from jumok.data.batching.documents import DocumentBatcher
from jumok.data.batching.text_pairs import TextPairBatcher
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.builtin import decisive_words
from jumok.data.readers.classification import ClassificationExample
from jumok.data.tokenizers.word_tokenizer import SegmentedText, WordSentences, WordTokenizer, segment_text
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.metrics.attention_hits import attention_hit_rates
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.self_attentive import SelfAttentiveClassifier, SelfAttentiveConfig
from jumok.tasks.base import DatasetSplit, Evaluation, FingerprintedDataset, format_model_size
from jumok.tasks.batch_layout import resolve_batch_layout
from jumok.tasks.classify.config import HierarchicalRecipe, SelfAttentiveRecipe
from jumok.tasks.classify.data import ClassificationTask
from jumok.tasks.classify.predictor import TEXTS_PER_CHUNK, ClassificationPredictor
from jumok.tasks.options import NBestOptions
from jumok.tasks.predictors import compute_mean_loss
from jumok.tasks.pretrained import init_embedding
from jumok.training import DistributedRanks

if TYPE_CHECKING:
    from jumok.look.viewer.attended_document import AttendedDocument
    from jumok.look.viewer.viewer_data import ViewerData

MAX_BATCH_TOKENS = 16384  # in a batch of predictions
MAX_TITLE_CHARS = 120
WordAttentionModel = SelfAttentiveClassifier | HierarchicalAttentionNetwork


@dataclass(frozen=True)
class WordAttentionEncoding:
    """An encoded example: the ids of its sentences (hierarchical), or of its one or two texts (self-attentive)."""

    token_ids: list[list[int]]
    target: int | float


class WordAttentionTask(ClassificationTask["WordAttentionPredictor"]):
    """Classification by a model of words."""

    recipe: SelfAttentiveRecipe | HierarchicalRecipe

    @property
    def is_hierarchical(self) -> bool:
        return isinstance(self.recipe.model, HierarchicalConfig)

    def write_artifacts(self, train_split: DatasetSplit[ClassificationExample]) -> None:
        self._check_recipe()
        texts = (
            self.tokenize_words(text).sentences for example in train_split.examples for text in self.get_texts(example)
        )
        WordTokenizer.train(texts, self.recipe.tokenizer).save(self.run.folder)

    def build_model(self) -> tuple[WordAttentionModel, WordTokenizer]:
        self._check_recipe()
        tokenizer, config = WordTokenizer.load(self.run.folder), self.recipe.model
        if isinstance(config, HierarchicalConfig):
            return HierarchicalAttentionNetwork(config, tokenizer.vocab_size, self.num_outputs), tokenizer
        config = replace(config, text_pairs=self.has_pairs)
        return SelfAttentiveClassifier(config, tokenizer.vocab_size, self.num_outputs), tokenizer

    def _check_recipe(self) -> None:
        config = self.recipe.model
        if self.is_hierarchical and self.has_pairs:
            raise InputError("data.pair_column: a hierarchical model reads one text; self-attentive models read pairs")
        if isinstance(config, SelfAttentiveConfig) and config.text_pairs and not self.has_pairs:
            raise InputError("model.text_pairs: true, but data.pair_column names no column of second texts")

    def build_predictor(self, model: Any, tokenizer: WordTokenizer) -> WordAttentionPredictor:
        return WordAttentionPredictor(self, model, tokenizer)

    def build_batcher(
        self, encoded: Sequence[WordAttentionEncoding], model: WordAttentionModel, ranks: DistributedRanks
    ) -> TextBatcher | DocumentBatcher | TextPairBatcher:
        if model.bigrams is not None and not self.run.has_checkpoint:
            model.bigrams.fit(itertools.chain.from_iterable(example.token_ids for example in encoded))
        fixed_shapes = resolve_batch_layout(self.run, ranks).fixed_shapes
        config = self.recipe.train
        return self.build_batches(
            encoded, batch_tokens=config.batch_tokens, seed=config.seed, fixed_shapes=fixed_shapes
        )

    def build_batches(
        self, encoded: Sequence[WordAttentionEncoding], *, batch_tokens: int, seed: int = 0, fixed_shapes: bool = False
    ) -> TextBatcher | DocumentBatcher | TextPairBatcher:
        """Build batches. Batches of documents never have fixed shapes, and are fast without them."""
        labels: Any = [example.target for example in encoded]
        if self.is_hierarchical:
            return DocumentBatcher(
                [example.token_ids for example in encoded],
                labels,
                max_tokens=batch_tokens,
                seed=seed,
                group_by_steps=True,
            )
        if self.has_pairs:
            firsts, seconds = zip(*(example.token_ids for example in encoded), strict=True)
            return TextPairBatcher(
                firsts, seconds, labels, max_tokens=batch_tokens, seed=seed, fixed_shapes=fixed_shapes
            )
        rows = [
            EncodedText(example.token_ids[0], [0] * len(example.token_ids[0]), {"labels": example.target})
            for example in encoded
        ]
        return TextBatcher(ClassificationBatch, rows, max_tokens=batch_tokens, seed=seed, fixed_shapes=fixed_shapes)

    def init_weights(self, model: WordAttentionModel, tokenizer: WordTokenizer) -> list[str]:
        """Initialize the embedding from word vectors, if the recipe names some."""
        path = self.recipe.word_vectors
        if path is None:
            return []
        words = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
        return [init_embedding(path, model.embedding, words, "words")]

    def describe_model(self, model: nn.Module, tokenizer: WordTokenizer, dataset: FingerprintedDataset) -> str:
        return (
            f"{self.recipe.model.type}: {format_model_size(model)}, vocabulary of {tokenizer.vocab_size:,}, "
            f"{len(dataset):,} texts"
        )

    def tokenize_words(self, text: str) -> SegmentedText:
        """Split a text into sentences of words."""
        return segment_text(text, strip_markup=self.recipe.tokenizer.strip_markup)

    def join_sentences(self, texts: Sequence[Sequence[list[int]]]) -> list[list[int]]:
        """The ids of the sentences of one or two texts, as the model reads them."""
        if self.is_hierarchical:
            return [*itertools.chain.from_iterable(texts)] or [[UNK]]
        return [[*itertools.chain.from_iterable(text)] or [UNK] for text in texts]


class WordAttentionPredictor(ClassificationPredictor):
    """A model that classifies texts and returns its word weights.

    >>> classifier = jumok.load("runs/hierarchical-imdb")  # doctest: +SKIP
    >>> [document] = classifier.highlight_texts(["The plot is thin. I loved it."])  # doctest: +SKIP
    >>> document.class_probabilities[0], document.sentence_weights  # doctest: +SKIP
    (('positive', 0.93), array([0.08, 0.92], dtype=float32))
    """

    task: WordAttentionTask
    tokenizer: WordTokenizer

    def encode(self, examples: Iterable[ClassificationExample]) -> Iterator[WordAttentionEncoding]:
        for chunk in iterate_chunks(examples, TEXTS_PER_CHUNK):
            texts = [
                [self.task.tokenize_words(text).sentences for text in self.task.get_texts(example)] for example in chunk
            ]
            for example, token_ids in zip(chunk, self._encode_texts(texts), strict=True):
                yield WordAttentionEncoding(token_ids, self.task.get_target(example))

    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        [encoded] = self.encode([self._build_example(text, text_pair)])
        return sum(map(len, encoded.token_ids))

    def predict_outputs(self, samples: Sequence[ClassificationExample], first_index: int | None) -> NDArray[np.float64]:
        return self._predict_encoded(list(self.encode(samples)))

    def highlight_texts(self, texts: Sequence[str]) -> list[AttendedDocument]:
        """The prediction and the word weights of texts. A tab or ||| separates the two texts of a pair."""
        examples = [self.parse_line(text, index) for index, text in enumerate(texts)]
        return self._build_documents(
            [self._tokenize_example(example, number) for number, example in enumerate(examples, 1)]
        )

    def predict_probabilities(self, documents: Sequence[WordSentences]) -> NDArray[np.float64]:
        """Probabilities ``(N, C)`` of texts that are given as sentences of words; of a pair, as its two texts.

        Words may have been removed; a sentence may be empty.
        """
        if self.task.data_config.regression:
            raise InputError("this model predicts a number, and no probabilities")
        if not len(documents):
            return np.zeros((0, self.task.num_outputs))
        has_pairs = self.task.has_pairs
        texts = [[[words] for words in document] if has_pairs else [document] for document in documents]
        for number, parts in enumerate(texts, 1):
            if has_pairs and len(parts) != 2:
                raise InputError(f"document {number} has {len(parts)} texts; this model reads two")
        return self._predict_encoded(
            [WordAttentionEncoding(token_ids, self._dummy_target) for token_ids in self._encode_texts(texts)]
        )

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[ClassificationExample]) -> float:
        dataset = self.task.build_batches(list(self.encode(examples)), batch_tokens=MAX_BATCH_TOKENS)
        return compute_mean_loss(self.model, dataset, self.device)

    def score_examples(
        self, examples: Sequence[ClassificationExample], options: NBestOptions | None = None, *, detailed: bool = False
    ) -> Evaluation:
        """For built-in documents, also measure how often the model attends to the decisive words."""
        evaluation = super().score_examples(examples, options, detailed=detailed)
        if not all(example.location.startswith(tuple(decisive_words.LANGUAGES)) for example in examples):
            return evaluation
        documents = self.highlight_texts([example.text for example in examples])
        rates = attention_hit_rates(
            [
                (
                    document.get_word_weights(),
                    decisive_words.find_decisive_words(document.words),
                    document.sentence_offsets,
                )
                for document in documents
            ]
        )
        return replace(evaluation, metrics={**evaluation.metrics, **rates})

    # ------------------------------------------------------------------------------------------------- attention

    def make_viewer_factory(
        self, text: str, target: str | None = None, options: NBestOptions | None = None
    ) -> Callable[[], ViewerData]:
        if target is not None:
            raise InputError("--target: this model does not generate text")
        example = self.parse_line(text)
        texts = self._tokenize_example(example, None)

        def capture() -> ViewerData:
            [document] = self._build_documents([texts])
            label = self._format_prediction(document, example)
            title = text if len(text) <= MAX_TITLE_CHARS else f"{text[:MAX_TITLE_CHARS]}…"
            return self._build_document_view(document, f"{title}  →  {label}", label)

        return capture

    def draw_attention(self, prediction: Any, path: Path, title: str = "") -> Path:
        """Draw the text with its words shaded by their weights."""
        from jumok.look.figures.document_figure import draw_document

        [document] = self.highlight_texts([prediction.input])
        return draw_document(document, path, title=title)

    def _build_document_view(self, document: AttendedDocument, title: str, label: str) -> ViewerData:
        """The document, and its weights as layers: hops as heads; or words in sentences, and sentences."""
        from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer

        weights = {"attention": (document.weights, document.words)}
        if document.sentence_weights is not None:
            starts = [" ".join(document.words[start : start + 4]) for start in document.sentence_offsets[:-1]]
            weights = {
                "word_level": (document.normalize_within_sentences()[None], document.words),
                "sentence_level": (document.sentence_weights[None], tuple(starts)),
            }
        layers = tuple(
            ViewerLayer(
                name,
                "pooling",
                (1, len(col_labels)),
                tuple(range(len(x))),
                ArrayWeightSource(x[:, None]),
                (label,),
                col_labels,
            )
            for name, (x, col_labels) in weights.items()
        )
        return ViewerData(layers, title, label, document=document)

    def _format_prediction(self, document: AttendedDocument, example: ClassificationExample) -> str:
        if document.class_probabilities:
            label, probability = document.class_probabilities[0]
            return f"{label} {probability:.4f}"
        return f"{float(self.predict_outputs([example], None)[0, 0]):.4f}"

    # ----------------------------------------------------------------------------------------------------------

    @property
    def _dummy_target(self) -> int | float:
        return 0.0 if self.task.data_config.regression else 0

    def _tokenize_example(self, example: ClassificationExample, number: int | None) -> list[SegmentedText]:
        """The words of one or two texts. Raise if a text has none."""
        texts = [self.task.tokenize_words(text) for text in self.task.get_texts(example)]
        if not all(text.words for text in texts):
            name = "the text" if number is None else f"text {number}"
            raise InputError(f"{name} has no words; a text with words is expected")
        return texts

    def _encode_texts(self, texts: Sequence[Sequence[WordSentences]]) -> list[list[list[int]]]:
        """Encode examples, each of one or two texts."""
        encoded = iter(self.tokenizer.encode([text for example in texts for text in example]))
        return [self.task.join_sentences([next(encoded) for _ in example]) for example in texts]

    def _predict_encoded(self, encoded: Sequence[WordAttentionEncoding]) -> NDArray[np.float64]:
        outputs = np.zeros((len(encoded), self.task.num_outputs))
        for batch in self._iterate_batches(encoded):
            logits: Tensor = self.model.logits(batch)[: len(batch.example_indices)].double()
            values = logits if self.task.data_config.regression else logits.softmax(-1)
            outputs[list(batch.example_indices)] = values.cpu().numpy()
        return outputs

    def _iterate_batches(self, encoded: Sequence[WordAttentionEncoding]) -> Iterator[TextBatch]:
        dataset = self.task.build_batches(encoded, batch_tokens=MAX_BATCH_TOKENS)
        with torch.inference_mode():
            for index in dataset.batches(0):
                yield dataset.collate(index).to(self.device)

    def _build_documents(self, texts: Sequence[list[SegmentedText]]) -> list[AttendedDocument]:
        from jumok.look.viewer.attended_document import AttendedDocument

        token_ids = self._encode_texts([[text.sentences for text in example] for example in texts])
        encoded = [WordAttentionEncoding(ids, self._dummy_target) for ids in token_ids]
        outputs = self._predict_encoded(encoded) if encoded else np.zeros((0, 1))
        by_example: dict[int, tuple[NDArray[np.float32], NDArray[np.float32] | None]] = {}
        for batch in self._iterate_batches(encoded) if encoded else ():
            by_example |= zip(batch.example_indices, self._compute_token_weights(batch), strict=True)
        documents = []
        for index, example in enumerate(texts):
            token_weights, sentence_weights = by_example[index]
            words = tuple(itertools.chain.from_iterable(text.words for text in example))
            spaces = [*example[0].spaces, *(gap or " " for text in example[1:] for gap in text.spaces)]
            offsets = example[0].sentence_bounds if len(example) == 1 else (0, len(example[0].words), len(words))
            weights = np.zeros((len(token_weights), len(words)), np.float32)
            if token_weights.shape == weights.shape:  # each word is one token
                weights = token_weights
            else:
                np.add.at(weights.T, self._compute_word_indices(example), token_weights.T)
            documents.append(
                AttendedDocument(
                    words, tuple(spaces), offsets, weights, sentence_weights, self._rank_labels(outputs[index])
                )
            )
        return documents

    def _compute_token_weights(
        self, batch: TextBatch
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32] | None]]:
        """The weights of the tokens of each text ``(hops, tokens)``, and of its sentences, if it has any."""
        maps = [layer.weights.float().cpu().numpy() for layer in self.model.compute_attention_maps(batch)]
        if isinstance(batch, DocumentBatch):
            word_weights, all_sentence_weights = (weights[:, 0, 0] for weights in maps)
            first = 0
            for row, size in enumerate(batch.sentence_indices.lengths[: len(batch.example_indices)]):
                sentence_weights = all_sentence_weights[row, :size]
                lengths = batch.tokens.lengths[first : first + size]
                rows = zip(sentence_weights, word_weights[first : first + size], lengths, strict=True)
                weighted = [sentence_weight * weights[:length] for sentence_weight, weights, length in rows]
                yield np.concatenate(weighted)[None], sentence_weights
                first += size
            return
        sides = [batch.tokens]
        if isinstance(batch, TextPairBatch):
            sides.append(batch.second_tokens)
        for row in range(len(batch.example_indices)):
            halves = [
                weights[row, :, 0, : tokens.lengths[row]] / len(maps)
                for weights, tokens in zip(maps, sides, strict=True)
            ]
            yield np.concatenate(halves, axis=1), None

    def _compute_word_indices(self, texts: Sequence[SegmentedText]) -> NDArray[np.int64]:
        """The word of each token."""
        indices: list[int] = []
        start = 0
        for sentence in (words for text in texts for words in text.sentences):
            indices += (start + index for index in self.tokenizer.word_ids_from_words(sentence) or [0])
            start += len(sentence)
        return np.array(indices)

    def _rank_labels(self, probabilities: NDArray[np.float64]) -> tuple[tuple[str, float], ...]:
        names = self.labels
        order = np.argsort(-probabilities, kind="stable") if names else ()
        return tuple((names[i], float(probabilities[i])) for i in order)
