"""Data of a pretraining run: training, validation and test documents.

A recipe names data for all three. Where it names no validation or test data, documents are held out of the training
data, chosen by their text alone: a document that occurs twice is never on both sides.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jumok.data.batching.pretraining import PretrainingBatcher
from jumok.data.caches.document_store import DocumentStore, prepare_document_store
from jumok.data.readers import documents
from jumok.data.readers.documents import DocumentCorpus, DocumentRows, TextDocument
from jumok.data.splits import HashedHoldOut
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.files import write_text
from jumok.run import Run
from jumok.tasks.base import DatasetSplit
from jumok.tasks.config import DataSource
from jumok.tasks.pretrain.config import PretrainingDataConfig

MAX_BATCH_TOKENS = 16384  # in a batch of held-out sequences
MASKING_SEED = 0  # the same tokens are masked in every evaluation


@dataclass(frozen=True)
class PretrainingData:
    """The documents of a run. ``folder`` is that of the run, where the held-out documents are stored."""

    config: PretrainingDataConfig
    folder: Path

    def train_documents(self) -> DocumentCorpus:
        """The training documents, without those that are held out."""
        if self.config.train is None:
            raise InputError(
                "there is no text to train on: name some, as in data.train=my.txt, with an empty line between "
                "documents; texts/*.txt.gz, or the name of a data set (wiki_en/text), is possible, too"
            )
        corpus = self._open_documents(self.config.train, "train")
        hold_out = self._hold_out
        if not hold_out.paths:
            return corpus
        fraction = hold_out.resolve_fraction(corpus)
        if not hold_out.is_written:
            self._write_held_out(corpus, fraction)
        return corpus.filter(
            f"without {fraction} for {list(hold_out.paths)}",
            lambda document: hold_out.is_training_example(document, fraction),
        )

    def held_out_documents(self, split_name: str) -> DocumentCorpus:
        """The validation or test documents."""
        data_source: DataSource | None = getattr(self.config, split_name)
        if data_source is not None:
            return self._open_documents(data_source, split_name)
        path = self._hold_out.paths[split_name]
        if not path.is_file():
            raise InputError(
                f"{path} is missing: the data that training held out; train again, or set data.{split_name}"
            )
        return documents.find_documents(str(path))

    @functools.cached_property
    def _hold_out(self) -> HashedHoldOut[TextDocument]:
        return HashedHoldOut(self.folder / "data", self.config, ".txt", lambda document: document.text, "documents")

    def _open_documents(self, data_source: DataSource, split: str) -> DocumentCorpus:
        config = self.config
        rows = None if config.text_column is None else DocumentRows(config.text_column, config.rows_per_document)
        return documents.find_documents(data_source, split=split, on_error=config.on_error, rows=rows)

    def _write_held_out(self, corpus: DocumentCorpus, fraction: float) -> None:
        """Write the held-out documents to files that anybody can read."""
        splits = self._hold_out.collect(corpus, fraction)
        for name, path in self._hold_out.paths.items():
            if len(splits[name]) < 2:
                raise InputError(
                    f"there are too few documents to hold some out; set data.{name}, or use more text. An empty "
                    "line separates documents"
                )
            write_text(path, "\n\n".join(document.text for document in splits[name]) + "\n")


@dataclass(frozen=True)
class PretrainingSplit(DatasetSplit[Any]):
    """Held-out documents as sequences with masked tokens, the same ones every time."""

    batcher: PretrainingBatcher = field(kw_only=True)
    vocabulary: str = field(kw_only=True)  # the fingerprint of the tokenizer

    @property
    def store(self) -> DocumentStore:
        return self.batcher.store

    @property
    def num_examples(self) -> int:
        return len(self.store)

    @property
    def description(self) -> str:
        return self.store.summary

    def comparison_key(self) -> Mapping[str, Any]:
        digest = hashlib.sha256(self.store.documents.tobytes())
        for array in (self.store.sentences.offsets, self.store.sentences.ids):
            digest.update(array.tobytes())
        return {"vocabulary": self.vocabulary, "masking": asdict(self.batcher.config), "data": digest.hexdigest()}


def load_pretraining_split(run: Run, tokenizer: WordPieceTokenizer, split_name: str) -> PretrainingSplit:
    """The validation or test documents of a run."""
    masking = run.recipe.masking
    texts = PretrainingData(run.recipe.data, run.folder).held_out_documents(split_name)
    store = prepare_document_store(run.folder / "data" / split_name, texts, tokenizer)
    max_tokens = max(MAX_BATCH_TOKENS, 2 * masking.sequence_length)
    batcher = PretrainingBatcher(store, tokenizer, masking, max_tokens=max_tokens, seed=MASKING_SEED)
    return PretrainingSplit(split_name, (), store.skipped, batcher=batcher, vocabulary=tokenizer.fingerprint)
