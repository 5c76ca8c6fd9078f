"""Exported folders, loaded by ``transformers``: equal logits, translations and tokens."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor, nn

from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, Seq2SeqBatch, Tokens
from jumok.errors import InputError
from jumok.export import marian
from jumok.export.marian import export_marian
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.transformer import Transformer, TransformerConfig

SOURCE, TARGET = 23, 29  # words
SMALL = TransformerConfig(width=14, num_heads=2, feed_forward_width=19, encoder_layers=2, decoder_layers=3)
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TARGETS = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]]


def build_model(**changes: Any) -> Transformer:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, **changes)
    model = Transformer(config, TARGET if config.tie_embeddings == "all" else SOURCE, TARGET).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # also biases and norms, which are initialized with 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def compute_logits(model: Transformer, batch: Seq2SeqBatch) -> Tensor:
    """Compute the logits ``(B, T, V)`` step by step."""
    state, steps = model.start(batch.source), []
    for position in range(batch.target.ids.shape[1]):
        logits, state = model.step(state, batch.target.ids[:, position])
        steps.append(logits)
    return torch.stack(steps, dim=1)


@torch.inference_mode()
def search_greedily(model: Transformer, source: Tokens, max_length: int) -> Tensor:
    """Greedy search with the output format of ``generate``: BOS first, PAD after EOS."""
    state, token_ids = model.start(source), [torch.full((len(source.lengths),), BOS)]
    is_finished = torch.zeros(len(source.lengths), dtype=torch.bool)
    while len(token_ids) < max_length and not is_finished.all():
        logits, state = model.step(state, token_ids[-1])
        token_ids.append(torch.where(is_finished, PAD, logits.argmax(-1)))
        is_finished |= token_ids[-1] == EOS
    return torch.stack(token_ids, dim=1)


@pytest.fixture(scope="module")
def transformers() -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.mark.filterwarnings("ignore")  # warnings of transformers; its log is checked below
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": "all"},
        {"tie_embeddings": "target", "activation": "gelu"},
        {"tie_embeddings": "none", "activation": "swish"},
        {"width": 15, "num_heads": 3},  # an odd width has one more sine than cosines
    ],
    ids=str,
)
def test_logits_and_greedy_output_are_equal(
    changes: dict[str, Any], tmp_path: Path, transformers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(**changes)
    folder = export_marian(model, tmp_path / "marian")
    transformers.utils.logging.enable_propagation()  # to caplog
    with caplog.at_level(logging.WARNING):
        marian, message = transformers.MarianMTModel.from_pretrained(folder, output_loading_info=True)
    assert not any(message.values())
    assert caplog.records == []
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    mask = batch.source.valid_mask.long()
    with torch.inference_mode():
        output = marian(input_ids=batch.source.ids, attention_mask=mask, decoder_input_ids=batch.target.ids)
        torch.testing.assert_close(compute_logits(model, batch), output.logits, rtol=1e-4, atol=1e-4)
        token_ids = marian.generate(input_ids=batch.source.ids, attention_mask=mask, max_length=40)
    assert torch.equal(search_greedily(model, batch.source, 40), token_ids)
    assert marian.config.dropout == model.config.dropout
    assert marian.num_parameters() == sum(p.numel() for p in model.parameters()) + 2 * 512 * model.config.width


@pytest.mark.filterwarnings("ignore")
def test_transformers_can_save_and_load_it_again(tmp_path: Path, transformers: Any) -> None:
    model = build_model(tie_embeddings="all")
    transformers.MarianMTModel.from_pretrained(export_marian(model, tmp_path / "a")).save_pretrained(tmp_path / "b")
    marian = transformers.MarianMTModel.from_pretrained(tmp_path / "b")
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    with torch.inference_mode():
        logits = marian(
            input_ids=batch.source.ids,
            attention_mask=batch.source.valid_mask.long(),
            decoder_input_ids=batch.target.ids,
        ).logits
    torch.testing.assert_close(logits, compute_logits(model, batch), rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------- tokenizers


def build_tokenizer(*vocabulary_words: str) -> tokenizers.Tokenizer:
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *vocabulary_words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.filterwarnings("ignore")
def test_the_tokenizer_is_exported(tmp_path: Path, transformers: Any) -> None:
    joint = build_tokenizer("the", "dog", "barks")
    original = joint.to_str()
    model = Transformer(dataclasses.replace(SMALL, tie_embeddings="all"), 7, 7)
    folder = export_marian(model, tmp_path / "marian", tokenizer=joint, max_length=77)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(["the dog barks", "the cat"], padding=True)
    assert encoded["input_ids"] == [[4, 5, 6, EOS], [4, 1, EOS, PAD]]
    assert encoded["attention_mask"] == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert tokenizer.decode([BOS, 5, 6, EOS, PAD], skip_special_tokens=True) == "dog barks"
    assert tokenizer.model_max_length == 77
    assert joint.to_str() == original  # the original is unchanged


@pytest.mark.filterwarnings("ignore")
def test_two_tokenizers_are_exported_to_two_folders(tmp_path: Path, transformers: Any) -> None:
    english, korean = build_tokenizer("the", "dog"), build_tokenizer("그", "개", "가")
    model = Transformer(SMALL, 6, 7)
    folder = export_marian(model, tmp_path / "marian", tokenizer=english, target_tokenizer=korean)
    assert transformers.AutoTokenizer.from_pretrained(folder)("the dog")["input_ids"] == [4, 5, EOS]
    assert transformers.AutoTokenizer.from_pretrained(folder / "target").decode([5, 6]) == "개 가"


def test_the_tokenizer_of_another_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer has 6 words, but the model has 23"):
        export_marian(build_model(), tmp_path / "marian", tokenizer=build_tokenizer("the", "dog"))
    with pytest.raises(InputError, match=r"target_tokenizer has 6 words, but the model has 7"):
        export_marian(Transformer(SMALL, 6, 7), tmp_path / "marian", tokenizer=build_tokenizer("the", "dog"))
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    with pytest.raises(InputError, match=r"starts with \['a', 'b', None, None\]"):
        export_marian(Transformer(SMALL, 2, 2), tmp_path / "marian", tokenizer=other)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ the folder


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    folder = export_marian(build_model(), tmp_path / "deep" / "marian")
    (folder / "old file").write_text("")
    export_marian(build_model(width=10), folder)
    assert json.loads((folder / "config.json").read_text())["d_model"] == 10
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "jumok.json",
        "model.safetensors",
    ]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_foreign_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="is not an earlier export"):
        export_marian(build_model(), tmp_path)
    with pytest.raises(InputError, match="is a file"):
        export_marian(build_model(), tmp_path / "thesis.txt")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]
    (tmp_path / "empty").mkdir()
    export_marian(build_model(), tmp_path / "empty")


def test_a_failed_export_keeps_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_marian(build_model(), tmp_path / "marian")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(marian, "write_safetensors", fail)
    with pytest.raises(OSError, match="no space"):
        export_marian(build_model(width=10), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Transformer(dataclasses.replace(SMALL, norm="pre"), SOURCE, TARGET), "model.norm='pre'"),
        (ConvolutionalSeq2Seq(ConvolutionalConfig(embedding_width=4, width=4), SOURCE, TARGET), "Convolutional"),
    ],
    ids=["pre-norm", "convolutional"],
)
def test_unsupported_models_are_rejected(model: nn.Module, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        export_marian(model, tmp_path / "marian")
    assert list(tmp_path.iterdir()) == []
