"""Recipes of translation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pydantic

from jumok.config import Config
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.metrics.translation import BleuTokenization
from jumok.models.convolutional import ConvolutionalConfig
from jumok.models.seq2seq import Seq2SeqConfig
from jumok.models.transformer import TransformerConfig
from jumok.tasks.config import AutoBool, BeamSearchConfig, DataConfig, DataSource
from jumok.training import TrainConfig

BUILTIN_CORPUS = "english-korean"
TranslationModelConfig = Seq2SeqConfig | ConvolutionalConfig | TransformerConfig


@dataclass(frozen=True)
class TranslationDataConfig(DataConfig):
    """The ``data:`` section. :mod:`jumok.data.readers.parallel_corpus` describes how texts are named."""

    train: DataSource = BUILTIN_CORPUS
    gold_alignments: str | None = None  # sentence pairs with manual word alignments, to score alignments with
    gold_target_first: bool = False  # the alignments list the target word first
    source: str | int = 1  # suffix of a file, or name or number of a column
    target: str | int = 2
    # moses-lowercase: as in papers on Multi30k; expand-contractions: as in corpora with manual alignments.
    preprocessing: Literal["none", "moses-lowercase", "expand-contractions"] = "none"
    max_tokens: int = 256  # pairs with a longer side are left out of training
    builtin_size: int = 100_000  # number of training pairs of the built-in corpus, at most 100,000
    # Also concatenate neighbouring pairs, up to this many, so that training has longer sentences.
    max_concatenated_pairs: int = 1
    packing: AutoBool = "auto"  # concatenate sentences instead of padding; auto: where that is faster

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(positive=("max_tokens", "builtin_size", "max_concatenated_pairs"))
        are_named = isinstance(self.source, str) and isinstance(self.target, str)
        if self.preprocessing != "none" and not are_named:
            raise ValueError(
                f"preprocessing={self.preprocessing!r} needs the languages: set source and target to their names, "
                "as in source: en"
            )


@dataclass(frozen=True)
class WordVectorsConfig(Config):
    """The ``word_vectors:`` section: files of word vectors (.vec, word2vec) to initialize the embeddings from."""

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class TranslationDecodeConfig(BeamSearchConfig):
    """The ``decode:`` section: the search, and the attention that word alignments are read from."""

    coverage_penalty: float = 0.0  # penalty for source words that get little attention
    # None: `jumok eval` selects layer and shift as `jumok align` does; `jumok run` uses the last layer but one.
    alignment_layer: int | None = None
    alignment_shift: bool | None = None  # read the alignment of a word from the next decoder step

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(non_negative=("coverage_penalty",))


@dataclass(frozen=True)
class TranslationEvaluationConfig(Config):
    """The ``evaluation:`` section."""

    bleu_tokenizer: BleuTokenization | Literal["auto"] = "auto"  # auto: by the language ``data.target``


@dataclass(frozen=True)
class TranslationRecipe(Config):
    """A recipe of translation."""

    task: Literal["translate"]
    model: Annotated[TranslationModelConfig, pydantic.Field(discriminator="type")]
    data: TranslationDataConfig = field(default_factory=TranslationDataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    word_vectors: WordVectorsConfig = field(default_factory=WordVectorsConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: TranslationDecodeConfig = field(default_factory=TranslationDecodeConfig)
    evaluation: TranslationEvaluationConfig = field(default_factory=TranslationEvaluationConfig)


RECIPE_TYPES: dict[str, type] = dict.fromkeys(("seq2seq", "convolutional", "transformer"), TranslationRecipe)
