"""jumok's own attention, with all its scores and masks, and jumok's models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import random_qkv, run_watched
from torch import Tensor, nn

import jumok
from jumok import masks, scores
from jumok.attention.masks import Mask
from jumok.batches.tokens import Seq2SeqBatch
from jumok.look.capture.captures import Captures
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.long


SOURCES, TARGETS = [[5, 6, 7], [8, 9]], [[5, 6], [7, 8, 9, 10]]


class Attention(nn.Module):
    def __init__(self, score: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.score, self.options = score, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return jumok.attend(query, key, value, score=self.score, **self.options)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return jumok.weights(query, key, score=self.score, **self.options)


SCORES: dict[str, Callable[[], nn.Module | None]] = {
    "none": lambda: None,
    "dot": scores.Dot,
    "general": lambda: scores.General(4, 4),
    "additive": lambda: scores.Additive(4, 4, 11),
    "concat": lambda: scores.Concat(4, 4, 11),
}


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 5, 3)])
@pytest.mark.parametrize("name", SCORES)
def test_every_score(name: str, leading: tuple[int, ...]) -> None:
    model = Attention(SCORES[name](), softcap=3.0)
    query, key, value = random_qkv(*leading)
    _, captures = run_watched(model, query, key, value)
    expected = model.weights(query, key)
    torch.testing.assert_close(captures[0].weights().reshape(expected.shape), expected)


MASKS: dict[str, Callable[[], Mask]] = {
    "padding": lambda: masks.padding([4, 7]),
    "causal": masks.causal,
    "causal at the top": lambda: masks.causal(0),
    "window": lambda: masks.window(1, 1),
    "ragged": lambda: masks.causal([1, 2]),
    "documents": lambda: masks.documents([0, 0, 0, 1, 1, 2, 2], query_ids=[0, 0, 1, 2, 2]),
    "tensor": lambda: masks.tensor(torch.rand(3, 5, 7) < 0.7),
    "both": lambda: masks.causal() & masks.padding([4, 7]),
    "either": lambda: masks.window(0, 0) | masks.padding([2, 1]),
    "not": lambda: ~masks.causal(),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, biased: bool) -> None:
    bias = torch.randn(3, 5, 7).masked_fill(torch.rand(3, 5, 7) < 0.2, -torch.inf) if biased else None
    model = Attention(mask=MASKS[name](), bias=bias)
    query, key, value = random_qkv(2, 3)
    _, captures = run_watched(model, query, key, value)
    torch.testing.assert_close(captures[0].weights(), model.weights(query, key))


def test_masks_with_three_dimensions() -> None:
    model = Attention(mask=masks.padding([4, 7]) & masks.causal(), bias=torch.randn(2, 5, 7))
    query, key, value = random_qkv(2)
    _, captures = run_watched(model, query, key, value)
    torch.testing.assert_close(captures[0].weights()[:, 0], model.weights(query, key))


def test_mask_of_long_packed_documents_is_not_stored_as_a_tensor() -> None:
    ids = torch.arange(4096) // 100
    x = torch.randn(1, 1, 4096, 4)
    model = Attention(mask=masks.documents(ids) & masks.causal())
    _, captures = run_watched(model, x, x, x)
    attention = captures[0].attention
    assert attention.mask is None
    assert attention.diagonal == 0
    expected = jumok.weights(x[:, :, 300:310], x[:, :, :310], mask=masks.documents(ids[:310]) & masks.causal())
    torch.testing.assert_close(captures[0].weights(rows=slice(300, 310), cols=slice(0, 310)), expected)


@pytest.mark.parametrize("name", ["none", "additive"])
def test_grouped_queries(name: str) -> None:
    model = Attention(SCORES[name]())
    query, key, value = random_qkv(2, 6, key_heads=2)
    _, captures = run_watched(model, query, key, value)
    assert captures[0].attention.key.shape[1] == 2
    torch.testing.assert_close(captures[0].weights(), model.weights(query, key))


def test_dropout_and_half_precision() -> None:
    model = Attention(scores.Additive(4, 4, 11), dropout=0.5)
    query, key, value = random_qkv(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        _, captures = run_watched(model, query, key, value)
    torch.testing.assert_close(captures[0].weights(), jumok.weights(query, key, score=model.score), atol=0.01, rtol=0)


def test_weights_that_are_modified_before_mix() -> None:
    class PowerAttention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, power: float) -> Tensor:
            weights = jumok.weights(query, key)
            return jumok.mix(weights if power == 1 else weights**power, value)

    model, inputs = PowerAttention(), random_qkv(2, 3)
    expected = jumok.weights(*inputs[:2])
    _, captures = run_watched(model, *inputs, 1)
    assert len(captures) == 1
    torch.testing.assert_close(captures[0].weights(), expected)
    _, captures = run_watched(model, *inputs, 2)
    assert len(captures) == 1
    torch.testing.assert_close(captures[0].weights(), expected**2)  # rows do not sum to one


def test_modified_parameters_of_a_score_are_an_error() -> None:
    model, inputs = Attention(scores.Additive(4, 4, 11)), random_qkv(2, 3)
    _, captures = run_watched(model, *inputs)
    with torch.no_grad():
        model.score.v.mul_(2)  # type: ignore[union-attr, operator]
    with pytest.raises(jumok.InputError, match="optimizer"):
        captures[0].weights()


def test_location_sensitive_steps_are_one_layer() -> None:
    class DecoderLoop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.location = scores.LocationSensitive(4, 4, 11, num_filters=3, kernel_size=3)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, previous, self.weights = self.location.prepare(key), torch.zeros(2, 7), []
            for step in query.unbind(1):
                score = self.location.with_previous(previous)
                previous = jumok.weights(step[:, None], keys, score=score)[:, 0]
                self.weights.append(previous.detach())
                out = jumok.mix(previous[:, None], value)
            return out

    model, inputs = DecoderLoop(), random_qkv(2)
    _, captures = run_watched(model, *inputs)
    assert len(captures) == 1
    assert len(captures.calls) == 5
    torch.testing.assert_close(captures[0].weights()[:, 0], torch.stack(model.weights, dim=1))


# -------------------------------------------------------------------------------------- jumok's models


def run_loss(model: Any) -> tuple[Captures, Seq2SeqBatch]:
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    return run_watched(model, call=lambda: model.loss(batch).total)[1], batch


def test_transformer() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=2, decoder_layers=2)
    model = Transformer(config, 11, 13).eval()
    captures, batch = run_loss(model)
    assert [(layer.name, layer.kind, layer.is_causal) for layer in captures] == [
        ("encoder.0.attention", "self", False),
        ("encoder.1.attention", "self", False),
        ("decoder.0.self_attention", "self", True),
        ("decoder.0.cross_attention", "cross", False),
        ("decoder.1.self_attention", "self", True),
        ("decoder.1.cross_attention", "cross", False),
    ]
    for attention_map in model.compute_attention_maps(batch):
        torch.testing.assert_close(captures[attention_map.name].weights(), attention_map.weights)
    assert captures[0].query_ids is not None
    assert torch.equal(captures[0].query_ids, batch.source.ids)
    cross = captures["decoder.0.cross_attention"]
    assert cross.query_ids is not None
    assert cross.key_ids is not None
    assert torch.equal(cross.query_ids, batch.target.ids)
    assert torch.equal(cross.key_ids, batch.source.ids)


def test_names_of_a_decoding_step() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=1, decoder_layers=1)
    model = Transformer(config, 11, 13).eval()
    state = model.start(Seq2SeqBatch.from_sequences(SOURCES, TARGETS).source)
    with torch.no_grad(), watch(model) as captures:
        model.step(state, torch.tensor([2, 2]))
    assert captures.names == ["decoder.0.self_attention", "decoder.0.cross_attention"]


SEQ2SEQ_CONFIGS = {
    "bahdanau": Seq2SeqConfig(),
    "luong": Seq2SeqConfig(
        cell="lstm",
        num_layers=2,
        bidirectional=False,
        attention_score="general",
        attention_query="current",
        readout="tanh",
    ),
    "local-m": Seq2SeqConfig(attention="local-m", attention_score="general", attention_window=1),
    "local-p": Seq2SeqConfig(attention="local-p", attention_score="general", attention_window=1),
    "at once": Seq2SeqConfig(input_feeding=False),
}


@pytest.mark.parametrize("name", SEQ2SEQ_CONFIGS)
def test_recurrent_models(name: str) -> None:
    from dataclasses import replace

    model = Seq2Seq(replace(SEQ2SEQ_CONFIGS[name], width=5, embedding_width=3, dropout=0.0), 11, 13).eval()
    captures, batch = run_loss(model)
    assert captures.names == ["decoder.attention"]
    assert len(captures) == 1  # for all steps
    (expected,) = model.compute_attention_maps(batch)
    is_token = batch.target.valid_mask[:, None]
    torch.testing.assert_close(captures[0].weights()[is_token], expected.weights[is_token])


def test_convolutional_models() -> None:
    model = ConvolutionalSeq2Seq(ConvolutionalConfig(embedding_width=6, width=10), 11, 13).eval()
    captures, batch = run_loss(model)
    for layer, expected in zip(captures, model.compute_attention_maps(batch), strict=True):
        assert layer.name == expected.name
        torch.testing.assert_close(layer.weights(), expected.weights)


def test_tokens_of_a_jumok_tokenizer() -> None:
    from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
    from jumok.data.tokenizers.vocabulary import TokenizerConfig

    english = Tokenizer.train(["the dog", "the cat"] * 2, TokenizerConfig("words", vocab_size=50))
    korean = Tokenizer.train(["그 개", "그 고양이"] * 2, TokenizerConfig("words", vocab_size=50))
    model = Seq2Seq(Seq2SeqConfig(width=5, embedding_width=3), english.vocab_size, korean.vocab_size).eval()
    batch = Seq2SeqBatch.from_sequences(english.encode(["the dog"]), korean.encode(["그 고양이"]))
    with watch(model, TokenizerPair(english, korean)) as captures:
        model.loss(batch)
    assert captures[0].query_tokens == [["<s>", "▁그", "▁고양이"]]
    assert captures[0].key_tokens == [["▁the", "▁dog", "</s>"]]


# ------------------------------------------------------------------------------------------- knock_out


@pytest.mark.parametrize("name", ["none", "additive"])
def test_knock_out(name: str) -> None:
    model, inputs = Attention(SCORES[name](), mask=masks.padding([4, 7])), random_qkv(2, 3)
    expected = model.weights(*inputs[:2])
    expected[:, 1] = 0
    expected[:, :, 4, 2] = expected[:, 0, 3, 0] = 0
    for head, row in ((0, 3), (0, 4), (2, 4)):
        expected[:, head, row] /= expected[:, head, row].sum(-1, keepdim=True)
    with torch.no_grad(), knock_out(model, {"Attention": [1, (4, 2), (0, 3, 0)]}), watch(model) as captures:
        out = model(*inputs)
        weights_outside = model.weights(*inputs[:2])  # outside of the model's forward
    torch.testing.assert_close(out, expected @ inputs[2])
    torch.testing.assert_close(captures[0].weights(), expected)
    assert weights_outside[0, 1].sum() > 4


def test_knock_out_one_head_of_a_transformer() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=1, decoder_layers=1)
    model, batch = Transformer(config, 11, 13).eval(), Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    before = model.loss(batch).total
    attention = model.decoder[0].cross_attention
    with torch.no_grad(), knock_out(model, {"decoder.0.cross_attention": [2]}):
        without = model.loss(batch).total
    with torch.no_grad():
        attention.merge.weight[:, 8:] = 0  # the third head
    torch.testing.assert_close(without, model.loss(batch).total)
    assert not torch.allclose(before, without)
