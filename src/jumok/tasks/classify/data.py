"""Data of a classification run: texts or text pairs, with classes or numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

from jumok.data.builtin import decisive_words
from jumok.data.readers import classification
from jumok.data.readers.classification import ClassificationColumns, ClassificationExample, LabelSet, unescape_treebank
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.errors import InputError
from jumok.tasks import jsonl_input
from jumok.tasks.classify.config import ClassificationDataConfig, ClassificationRecipe
from jumok.tasks.config import DataSource
from jumok.tasks.options import NBestOptions
from jumok.tasks.supervised import SupervisedPredictorT, SupervisedTask

BUILTIN_SEED = 1  # of the built-in documents


class ClassificationTask(SupervisedTask[ClassificationExample, SupervisedPredictorT]):
    """Classification of texts. Subclasses add the model."""

    description = "classify a text"
    options_type = NBestOptions
    example_type = ClassificationExample
    make_jsonl_reader = staticmethod(jsonl_input.make_pair_reader)
    recipe: ClassificationRecipe

    @property
    def data_config(self) -> ClassificationDataConfig:
        return self.recipe.data

    @property
    def has_pairs(self) -> bool:
        """Whether an example has two texts."""
        return self.data_config.pair_column is not None

    @property
    def input_example(self) -> str:
        return "… ||| …" if self.has_pairs else "…"

    @functools.cached_property
    def label_set(self) -> LabelSet:
        """The classes; in regression, one class that stands for the number."""
        label_names = self.data_config.label_names
        return LabelSet.from_config(self.labels if label_names is None else label_names)

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the model."""
        return 1 if self.data_config.regression else len(self.label_set)

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[ClassificationExample | InvalidExample]:
        data = self.data_config
        if isinstance(data_source, str) and data_source in decisive_words.LANGUAGES:
            examples = _read_builtin(data_source, data)
        else:
            columns = ClassificationColumns(data.text_column, data.label_column, data.pair_column, data.has_header)
            examples = classification.read_classification_examples(
                data_source, columns, regression=data.regression, split=split_name
            )
        learns_labels = split_name == "train" and data.label_names is None and not self.run.has_checkpoint
        if data.regression or learns_labels:
            return examples
        return self.label_set.check_examples(examples)

    def get_split_key(self, example: ClassificationExample) -> str:
        return f"{example.text}\t{example.pair or ''}"

    def get_texts(self, example: ClassificationExample) -> Iterable[str]:
        """One text or two, as the tokenizer gets them."""
        texts = [example.text] if example.pair is None else [example.text, example.pair]
        return map(unescape_treebank, texts) if self.data_config.unescape_treebank else texts

    def collect_labels(self, examples: Sequence[ClassificationExample]) -> list[str]:
        data = self.data_config
        if data.regression:
            return []
        label_set = (
            LabelSet.from_examples(examples) if data.label_names is None else LabelSet.from_config(data.label_names)
        )
        positive_label = self.recipe.evaluation.positive_label
        if positive_label is not None and positive_label not in label_set.names:
            raise InputError(
                f"evaluation.positive_label is {positive_label!r}; the classes are {', '.join(label_set.names)}"
            )
        return list(label_set.names)

    def get_target(self, example: ClassificationExample) -> int | float:
        """The index of the class, or the number."""
        return example.label if isinstance(example.label, float) else self.label_set.index(example.label)


def _read_builtin(name: str, config: ClassificationDataConfig) -> Iterator[ClassificationExample | InvalidExample]:
    if config.pair_column is not None or config.regression:
        raise InputError(f"data: {name} has single texts with classes: remove pair_column and regression")
    documents = decisive_words.generate_documents(BUILTIN_SEED, config.builtin_size, name)
    for number, document in enumerate(documents, 1):
        yield ClassificationExample(document.text, None, document.label, f"{name}:{number}")
