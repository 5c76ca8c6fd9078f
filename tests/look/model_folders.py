"""Fixtures: tiny Hugging Face folders, and a trained run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from jumok.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from tiny_models import VOCAB_SIZE, build_model
from translation_runs import train_run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "here"]


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(path: Path, words: list[str], **options: Any) -> None:
    """Save a tokenizer that splits at spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **options).save_pretrained(path)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "bert"
    save_tokenizer(path, WORDS)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=6,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    return path


def _build_words() -> list[str]:
    special = [*WORDS[:4], "<|user|>", "<|assistant|>", "<|end|>"]
    return [*special, *(f"w{n}" for n in range(VOCAB_SIZE - len(special)))]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for 8,192 tokens, with a chat template, in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "llama"
    save_tokenizer(path, _build_words(), chat_template=CHAT_TEMPLATE)
    build_model("llama", max_position_embeddings=8192).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "t5"
    save_tokenizer(path, _build_words())
    build_model("t5", eos_token_id=None).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("run") / "transformer", "transformer")
