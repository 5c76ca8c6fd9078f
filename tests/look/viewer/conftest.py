"""A trained run and a Hugging Face folder, for the tests of the viewer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from jumok.run import Run

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks"))
from translation_runs import train_run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "here"]


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "bert"
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=6,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("run") / "transformer", "transformer")
