"""Tagging: the entities of a text, by a tag for each of its words.

::

    the U.N. sent Ekeus to Baghdad    →    the [U.N.](ORG) sent [Ekeus](PER) to [Baghdad](LOC)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from jumok.batches.text import TaggingBatch
from jumok.data.readers import tagging
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.tagging import TaggingExample, make_iob2_labels
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.models.bert import BertConfig, BertTagger
from jumok.run import Run
from jumok.tasks.config import DataSource
from jumok.tasks.fine_tuning import BertTask
from jumok.tasks.tag.config import TaggingRecipe
from jumok.tasks.tag.predictor import TaggingPredictor


class TaggingTask(BertTask[TaggingExample, TaggingPredictor]):
    """Tagging of words by BERT."""

    description = "find the entities of a text"
    example_type = TaggingExample
    batch_type = TaggingBatch
    recipe: TaggingRecipe

    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[TaggingExample | InvalidExample]:
        data = self.recipe.data
        sentences = tagging.read_tagging_examples(
            data_source,
            word_column=data.word_column,
            tag_column=data.tag_column,
            scheme=data.tag_scheme,
            split=split_name,
        )
        learns_labels = split_name == "train" and not self.run.has_checkpoint
        return sentences if learns_labels else self._check_tags(sentences)

    def _check_tags(
        self, sentences: Iterator[TaggingExample | InvalidExample]
    ) -> Iterator[TaggingExample | InvalidExample]:
        """Replace sentences with unknown tags by an ``InvalidExample``."""
        known = set(self.labels)
        for sentence in sentences:
            if isinstance(sentence, TaggingExample):
                index = next((n for n, tag in enumerate(sentence.tags) if tag not in known), None)
                if index is not None:
                    path, _, line = sentence.location.rpartition(":")
                    message = (
                        f"{sentence.tags[index]!r} of the word {sentence.words[index]!r}; the tags are: "
                        f"{', '.join(self.labels)}"
                    )
                    yield InvalidExample(f"{path}:{int(line) + index}", "an unknown tag", message)
                    continue
            yield sentence

    def get_split_key(self, example: TaggingExample) -> str:
        return " ".join(example.words)

    def get_texts(self, example: TaggingExample) -> Iterable[str]:
        return [" ".join(example.words)]

    def collect_labels(self, examples: Sequence[TaggingExample]) -> list[str]:
        types = dict.fromkeys(tag[2:] for example in examples for tag in example.tags if tag != "O")
        return make_iob2_labels(list(types))

    def build_bert_model(self, config: BertConfig, vocab_size: int) -> nn.Module:
        return BertTagger(config, vocab_size, len(self.labels))

    def build_predictor(self, model: nn.Module, tokenizer: WordPieceTokenizer) -> TaggingPredictor:
        return TaggingPredictor(self, model, tokenizer)


def build_task(run: Run) -> TaggingTask:
    """Build the task of a run."""
    return TaggingTask(run)
