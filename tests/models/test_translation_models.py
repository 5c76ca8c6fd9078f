"""What holds for every translation model: padding, training mode, autocast, tied embeddings, learning."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from jumok.batches.tokens import BOS, Seq2SeqBatch
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.long

SOURCE_WORDS, TARGET_WORDS = 23, 29
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TARGETS = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]]  # the second is longer than its source
EXACT = {"rtol": 1e-9, "atol": 1e-9}

TRANSFORMER = TransformerConfig(
    width=14, num_heads=2, feed_forward_width=19, encoder_layers=2, decoder_layers=3, dropout=0.0
)
CONVOLUTIONAL = ConvolutionalConfig(
    embedding_width=7, width=11, encoder_layers=2, decoder_layers=3, max_positions=17, dropout=0.0
)
RECURRENT = Seq2SeqConfig(width=5, embedding_width=3, num_layers=2, attention_window=1, dropout=0.0)
LUONG = dataclasses.replace(
    RECURRENT,
    cell="lstm",
    bidirectional=False,
    attention_score="general",
    attention_query="current",
    readout="tanh",
)
CONFIGS: dict[str, Any] = {
    "transformer": TRANSFORMER,
    "transformer, norm first": dataclasses.replace(TRANSFORMER, norm="pre"),
    "convolutional": CONVOLUTIONAL,
    "convolutional, sinusoid": dataclasses.replace(CONVOLUTIONAL, kernel_size=5, position_encoding="sinusoid"),
    "sutskever": dataclasses.replace(LUONG, attention=None, input_feeding=False, reverse_source=True, readout="plain"),
    "cho": dataclasses.replace(RECURRENT, bidirectional=False, attention=None),
    "bahdanau": RECURRENT,
    "luong": LUONG,
    "luong, local": dataclasses.replace(LUONG, attention="local-p"),
}
MODELS = {TransformerConfig: Transformer, ConvolutionalConfig: ConvolutionalSeq2Seq, Seq2SeqConfig: Seq2Seq}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Any:
    return CONFIGS[request.param]


def build_model(config: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = dataclasses.replace(config, **changes)
    source_words = TARGET_WORDS if config.tie_embeddings == "all" else SOURCE_WORDS
    model = MODELS[type(config)](config, source_words, TARGET_WORDS).double()
    with torch.no_grad():
        for parameter in model.parameters():  # so that biases are not 0 and scores are not nearly equal
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def build_batch(**options: Any) -> Seq2SeqBatch:
    return Seq2SeqBatch.from_sequences(SOURCES, TARGETS, **options)


def test_padding_is_never_read(config: Any) -> None:
    model, batch = build_model(config).eval(), build_batch()
    wide = build_batch(min_lengths=(11, 13))
    for tokens in (wide.source, wide.target):
        tokens.ids[~tokens.valid_mask] = 19
    alone = [model.loss(Seq2SeqBatch.from_sequences([s], [t])).total for s, t in zip(SOURCES, TARGETS, strict=True)]
    for padded in (batch, wide, batch.with_static_shapes()):
        torch.testing.assert_close(model.loss(padded).total, sum(alone), **EXACT)
    for one, other in zip(model.compute_attention_maps(wide), model.compute_attention_maps(batch), strict=True):
        steps, words = other.weights.shape[2:]
        valid = batch.target.valid_mask[:, None, :, None]
        torch.testing.assert_close(one.weights[:, :, :steps, :words] * valid, other.weights * valid, **EXACT)


def test_smoothing_and_dropout_are_for_training_only(config: Any) -> None:
    batch = build_batch()
    smoothed = build_model(config, label_smoothing=0.3).loss(batch)
    exact = build_model(config, label_smoothing=0.3).eval().loss(batch)
    assert not torch.isclose(smoothed.total, exact.total)
    torch.testing.assert_close(smoothed.parts["nll"], exact.total.detach(), **EXACT)
    assert torch.equal(exact.total, exact.parts["nll"])
    assert not smoothed.parts["nll"].requires_grad
    rates = [name for name in ("dropout", "attention_dropout", "activation_dropout") if hasattr(config, name)]
    for name in rates:
        model = build_model(config, **{name: 0.5})
        assert not torch.equal(model.loss(batch).total, model.loss(batch).total), name
        model.eval()
        assert torch.equal(model.loss(batch).total, model.loss(batch).total), name


def test_under_autocast_the_loss_is_near_and_gradients_are_float32(config: Any) -> None:
    model, batch = build_model(config).float(), build_batch()
    exact = model.loss(batch).total
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(build_batch(packed=isinstance(model, Transformer)))
        state = model.start(batch.source)
        _, state = model.step(state, torch.full((4,), BOS))
        logits, _ = model.step(state.reorder(torch.tensor([2, 0])), torch.tensor([5, 6]))
    assert logits.isfinite().all()
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total, exact, rtol=0.02, atol=0.1)
    loss.total.backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in model.parameters())


def test_tied_embeddings_are_one_parameter_of_a_model_and_of_its_copy(config: Any) -> None:
    ties = ("none", "target") if isinstance(config, Seq2SeqConfig) else ("none", "target", "all")
    ties = ties[:1] if getattr(config, "readout", "") == "plain" else ties
    counts = []
    for tie in ties:
        model = build_model(config, tie_embeddings=tie).eval()
        twin, total = copy.deepcopy(model), model.loss(build_batch()).total
        assert torch.equal(twin.loss(build_batch()).total, total)
        with torch.no_grad():
            twin.target_embedding.weight.zero_()
        output = twin.generator if isinstance(twin, Seq2Seq) else twin.output
        assert (output.weight is twin.target_embedding.weight) == (tie != "none")
        assert (twin.source_embedding is twin.target_embedding) == (tie == "all")
        assert torch.equal(model.loss(build_batch()).total, total)
        counts.append(sum(x.numel() for x in model.parameters()))
    if len(ties) == 3:
        width = model.target_embedding.embedding_dim
        assert counts[1] - counts[2] == SOURCE_WORDS * width


def test_a_joint_vocabulary_is_needed_to_tie_all() -> None:
    for config in (TRANSFORMER, CONVOLUTIONAL):
        with pytest.raises(ValueError, match=r"23 source words and 29 target words"):
            MODELS[type(config)](dataclasses.replace(config, tie_embeddings="all"), SOURCE_WORDS, TARGET_WORDS)


def test_packed_tokens_raise_where_rows_matter(config: Any) -> None:
    model, packed = build_model(config), build_batch(packed=True)
    calls = [lambda batch: model.start(batch.source)]
    if not isinstance(config, TransformerConfig):
        calls.append(model.loss)
    if getattr(config, "attention", True):
        calls.append(model.compute_attention_maps)
    for call in calls:
        with pytest.raises(ValueError, match="packed"):
            call(packed)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (TRANSFORMER, {"width": 10, "num_heads": 3}, "width=10"),
        (TRANSFORMER, {"num_heads": 0}, "num_heads=0"),
        (TRANSFORMER, {"decoder_layers": 0}, "decoder_layers=0"),
        (TRANSFORMER, {"dropout": 1.0}, "dropout=1.0"),
        (TRANSFORMER, {"label_smoothing": -0.1}, "label_smoothing=-0.1"),
        (CONVOLUTIONAL, {"kernel_size": 4}, "kernel_size=4"),
        (CONVOLUTIONAL, {"width": 0}, "width=0"),
        (CONVOLUTIONAL, {"max_positions": 0}, "max_positions=0"),
        (CONVOLUTIONAL, {"dropout": 1.0}, "dropout=1.0"),
        (RECURRENT, {"num_layers": -1}, "num_layers=-1"),
        (RECURRENT, {"attention_window": 0}, "attention_window=0"),
        (RECURRENT, {"reverse_source": True}, "both directions"),
        (RECURRENT, {"attention_score": "dot"}, "attention_score='general'"),
        (RECURRENT, {"attention_query": "current", "readout": "plain"}, "readout='tanh'"),
        (RECURRENT, {"input_feeding": False, "readout": "plain"}, "readout='tanh'"),
        (RECURRENT, {"tie_embeddings": "target", "readout": "plain"}, "make them equal"),
        (RECURRENT, {"cell": "rnn"}, "cell"),
        (RECURRENT, {"cells": "gru"}, "cells"),
    ],
)
def test_invalid_configs_raise(config: Any, changes: dict[str, Any], message: str) -> None:
    adapter = TypeAdapter(type(config))
    assert adapter.validate_python(dataclasses.asdict(config)) == config
    with pytest.raises(ValidationError, match=message):
        adapter.validate_python({**dataclasses.asdict(config), **changes})


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(
            width=32, num_heads=2, feed_forward_width=64, encoder_layers=1, decoder_layers=1, dropout=0.0,
            label_smoothing=0.0, tie_embeddings="all",
        ),
        ConvolutionalConfig(
            embedding_width=32, width=32, encoder_layers=1, decoder_layers=1, dropout=0.0, label_smoothing=0.0,
            max_positions=8,
        ),
    ],
    ids=["transformer", "convolutional"],
)  # fmt: skip
def test_learns_to_copy(config: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[type(config)](config, 12, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def build_random_batch() -> Seq2SeqBatch:
        lines = [torch.randint(4, 12, (int(n),)).tolist() for n in torch.randint(2, 7, (64,))]
        return Seq2SeqBatch.from_sequences(lines, lines)

    for _ in range(200):
        loss = model.loss(build_random_batch())
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    with torch.inference_mode():
        loss = model.eval().loss(build_random_batch())
    assert loss.total.item() / loss.count < 0.1
