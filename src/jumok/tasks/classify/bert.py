"""Classification by BERT.

A text that is longer than the model's input is an error, or is read in windows (``data.on_overflow``). In training,
each window is an example of its own; in prediction, the probabilities of the windows are averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from jumok.batches.text import ClassificationBatch
from jumok.data.batching.texts import EncodedText
from jumok.data.readers.classification import ClassificationExample
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.tokenizers.windows import make_windows
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.models.bert import BertClassifier, BertConfig
from jumok.tasks.classify.config import BertClassificationRecipe
from jumok.tasks.classify.data import ClassificationTask
from jumok.tasks.classify.predictor import TEXTS_PER_CHUNK, ClassificationPrediction, ClassificationPredictor
from jumok.tasks.fine_tuning import TOO_LONG_HINT, BertTask
from jumok.tasks.predictors import FineTunedPredictor


class BertClassificationTask(
    ClassificationTask["BertClassificationPredictor"], BertTask[ClassificationExample, "BertClassificationPredictor"]
):
    """Classification by BERT."""

    batch_type = ClassificationBatch
    recipe: BertClassificationRecipe

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        try:
            return BertClassifier(config, vocab_size, self.num_outputs)
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> BertClassificationPredictor:
        return BertClassificationPredictor(self, model, tokenizer)


class BertClassificationPredictor(ClassificationPredictor, FineTunedPredictor[ClassificationPrediction]):
    """A BERT that classifies texts."""

    task: BertClassificationTask
    model: BertClassifier

    def count_tokens(self, text: str, text_pair: str | None = None) -> int:
        return sum(len(row.ids) for row in self.encode_windows(self._build_example(text, text_pair)))

    def predict_outputs(self, samples: Sequence[ClassificationExample], first_index: int | None) -> NDArray[np.float64]:
        """The outputs are averaged over the windows of a text, and over both orders of a pair."""
        encoded = self.check_encoded(self.encode(samples), first_index)
        outputs = iter(
            self.compute_outputs(
                [row for windows in encoded for row in windows], lambda batch: [self.model.logits(batch)]
            )
        )
        means = []
        for windows in encoded:
            logits = np.array([next(outputs)[0].double().numpy() for _ in windows])
            if not self.task.data_config.regression:
                logits = np.exp(logits - logits.max(1, keepdims=True))
                logits /= logits.sum(1, keepdims=True)
            means.append(logits.mean(0))
        return np.array(means)

    def encode(self, examples: Iterable[ClassificationExample]) -> Iterator[list[EncodedText] | InvalidExample]:
        for chunk in iterate_chunks(examples, TEXTS_PER_CHUNK):
            encoded = iter(self.tokenizer.encode([text for example in chunk for text in self.task.get_texts(example)]))
            for example in chunk:
                token_ids = [next(encoded) for _ in self.task.get_texts(example)]
                windows = self._split_windows(token_ids, example.location)
                if isinstance(windows, InvalidExample):
                    yield windows
                    continue
                target = self.task.get_target(example)
                if self.task.recipe.data.symmetric_pairs:
                    windows = [*windows, *([second, first] for first, second in windows)]
                yield [EncodedText(*self.tokenizer.join_segments(*texts), {"labels": target}) for texts in windows]

    def _split_windows(self, token_ids: list[list[int]], location: str) -> list[list[list[int]]] | InvalidExample:
        """One or two texts as they fit into the model, in several windows of the longer one if necessary."""
        max_text_tokens = self.max_tokens - 1 - len(token_ids)
        length = sum(map(len, token_ids))
        if length <= max_text_tokens:
            return [token_ids]
        data = self.task.recipe.data
        message = f"{length + self.max_tokens - max_text_tokens} tokens, and the model reads {self.max_tokens} at once"
        if data.on_overflow == "error":
            return InvalidExample(location, "a text that is too long", f"{message}; {TOO_LONG_HINT}")
        longer = max(range(len(token_ids)), key=lambda n: len(token_ids[n]))
        window_size = max_text_tokens - (length - len(token_ids[longer]))
        if window_size < min(len(token_ids[longer]), max_text_tokens // 4):
            return InvalidExample(
                location, "two texts that are too long", f"{message}, even in windows of the longer one"
            )
        windows = make_windows(len(token_ids[longer]), window_size, data.window_stride)
        return [
            [text[start:end] if n == longer else text for n, text in enumerate(token_ids)] for start, end in windows
        ]
