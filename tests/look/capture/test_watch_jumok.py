"""watch: jumok's own attention, with all its scores and masks, and its models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
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

SOURCES, TARGETS = [[5, 6, 7], [8, 9]], [[5, 6], [7, 8, 9, 10]]


class Attention(nn.Module):
    def __init__(self, score: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.score, self.options = score, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return jumok.attend(query, key, value, score=self.score, **self.options)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        return jumok.weights(query, key, score=self.score, **self.options)


def run(model: nn.Module, call: Callable[[], Any]) -> Captures:
    """The call's output is the same while the model is watched."""
    torch.manual_seed(1)
    before = call()
    torch.manual_seed(1)
    with watch(model) as seen:
        watched = call()
    assert torch.equal(before, watched)
    return seen


def qkv(*leading: int, key_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = leading if key_heads is None else (*leading[:-1], key_heads)
    return torch.randn(*leading, 5, 4), torch.randn(*keys, 7, 4), torch.randn(*keys, 7, 3)


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
    query, key, value = qkv(*leading)
    seen = run(model, lambda: model(query, key, value))
    expected = model.weights(query, key)
    torch.testing.assert_close(seen[0].weights().reshape(expected.shape), expected)


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
    query, key, value = qkv(2, 3)
    seen = run(model, lambda: model(query, key, value))
    torch.testing.assert_close(seen[0].weights(), model.weights(query, key))


def test_masks_of_three_dimensions() -> None:
    model = Attention(mask=masks.padding([4, 7]) & masks.causal(), bias=torch.randn(2, 5, 7))
    query, key, value = qkv(2)
    seen = run(model, lambda: model(query, key, value))
    torch.testing.assert_close(seen[0].weights()[:, 0], model.weights(query, key))


def test_long_packed_documents_are_kept_without_a_tensor_of_their_mask() -> None:
    ids = torch.arange(4096) // 100
    x = torch.randn(1, 1, 4096, 4)
    model = Attention(mask=masks.documents(ids) & masks.causal())
    seen = run(model, lambda: model(x, x, x))
    kept = seen[0].attention
    assert kept.mask is None
    assert kept.diagonal == 0
    expected = jumok.weights(x[:, :, 300:310], x[:, :, :310], mask=masks.documents(ids[:310]) & masks.causal())
    torch.testing.assert_close(seen[0].weights(rows=slice(300, 310), cols=slice(0, 310)), expected)


@pytest.mark.parametrize("name", ["none", "additive"])
def test_grouped_queries(name: str) -> None:
    model = Attention(SCORES[name]())
    query, key, value = qkv(2, 6, key_heads=2)
    seen = run(model, lambda: model(query, key, value))
    assert seen[0].attention.key.shape[1] == 2
    torch.testing.assert_close(seen[0].weights(), model.weights(query, key))


def test_dropout_and_half_precision() -> None:
    model = Attention(scores.Additive(4, 4, 11), dropout=0.5)
    query, key, value = qkv(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        seen = run(model, lambda: model(query, key, value))
    torch.testing.assert_close(seen[0].weights(), jumok.weights(query, key, score=model.score), atol=0.01, rtol=0)


def test_weights_alone_and_weights_that_are_changed_before_they_are_used() -> None:
    class Sharpened(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, power: float) -> Tensor:
            weights = jumok.weights(query, key)
            return jumok.mix(weights if power == 1 else weights**power, value)

    model, given = Sharpened(), qkv(2, 3)
    expected = jumok.weights(*given[:2])
    seen = run(model, lambda: model(*given, 1))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].weights(), expected)
    seen = run(model, lambda: model(*given, 2))
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].weights(), expected**2)  # rows do not sum to one, nor do they seem to


def test_the_parameters_of_a_score_may_not_change_before_it_is_asked() -> None:
    model, given = Attention(scores.Additive(4, 4, 11)), qkv(2, 3)
    seen = run(model, lambda: model(*given))
    with torch.no_grad():
        model.score.v.mul_(2)  # type: ignore[union-attr, operator]
    with pytest.raises(jumok.InputError, match="optimizer"):
        seen[0].weights()


def test_location_sensitive_steps_are_one_entry() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.location = scores.LocationSensitive(4, 4, 11, num_filters=3, kernel_size=3)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, previous, self.told = self.location.prepare(key), torch.zeros(2, 7), []
            for step in query.unbind(1):
                score = self.location.with_previous(previous)
                previous = jumok.weights(step[:, None], keys, score=score)[:, 0]
                self.told.append(previous.detach())
                out = jumok.mix(previous[:, None], value)
            return out

    model, given = Loop(), qkv(2)
    seen = run(model, lambda: model(*given))
    assert len(seen) == 1
    assert len(seen.calls) == 5
    torch.testing.assert_close(seen[0].weights()[:, 0], torch.stack(model.told, dim=1))


# ----------------------------------------------------------------------------------------- our models


def looked(model: Any) -> tuple[Captures, Seq2SeqBatch]:
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    return run(model, lambda: model.loss(batch).total), batch


def test_the_transformer() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=2, decoder_layers=2)
    model = Transformer(config, 11, 13).eval()
    seen, batch = looked(model)
    assert [(entry.name, entry.kind, entry.is_causal) for entry in seen] == [
        ("encoder.0.attention", "self", False),
        ("encoder.1.attention", "self", False),
        ("decoder.0.self_attention", "self", True),
        ("decoder.0.cross_attention", "cross", False),
        ("decoder.1.self_attention", "self", True),
        ("decoder.1.cross_attention", "cross", False),
    ]
    for told in model.compute_attention_maps(batch):
        torch.testing.assert_close(seen[told.name].weights(), told.weights)
    assert seen[0].query_ids is not None
    assert torch.equal(seen[0].query_ids, batch.source.ids)
    cross = seen["decoder.0.cross_attention"]
    assert cross.query_ids is not None
    assert cross.key_ids is not None
    assert torch.equal(cross.query_ids, batch.target.ids)
    assert torch.equal(cross.key_ids, batch.source.ids)


def test_a_step_with_a_cache_has_the_name_of_its_layer() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=1, decoder_layers=1)
    model = Transformer(config, 11, 13).eval()
    state = model.start(Seq2SeqBatch.from_sequences(SOURCES, TARGETS).source)
    with torch.no_grad(), watch(model) as seen:
        model.step(state, torch.tensor([2, 2]))
    assert seen.names == ["decoder.0.self_attention", "decoder.0.cross_attention"]


FAMILIES = {
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


@pytest.mark.parametrize("name", FAMILIES)
def test_recurrent_models(name: str) -> None:
    from dataclasses import replace

    model = Seq2Seq(replace(FAMILIES[name], width=5, embedding_width=3, dropout=0.0), 11, 13).eval()
    seen, batch = looked(model)
    assert seen.names == ["decoder.attention"]
    assert len(seen) == 1  # however many steps it took
    (told,) = model.compute_attention_maps(batch)
    real = batch.target.valid_mask[:, None]
    torch.testing.assert_close(seen[0].weights()[real], told.weights[real])


def test_convolutional_models() -> None:
    model = ConvolutionalSeq2Seq(ConvolutionalConfig(embedding_width=6, width=10), 11, 13).eval()
    seen, batch = looked(model)
    for entry, told in zip(seen, model.compute_attention_maps(batch), strict=True):
        assert entry.name == told.name
        torch.testing.assert_close(entry.weights(), told.weights)


def test_our_tokenizer_writes_the_tokens() -> None:
    from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
    from jumok.data.tokenizers.vocabulary import TokenizerConfig

    english = Tokenizer.train(["the dog", "the cat"] * 2, TokenizerConfig("words", vocab_size=50))
    korean = Tokenizer.train(["그 개", "그 고양이"] * 2, TokenizerConfig("words", vocab_size=50))
    model = Seq2Seq(Seq2SeqConfig(width=5, embedding_width=3), english.vocab_size, korean.vocab_size).eval()
    batch = Seq2SeqBatch.from_sequences(english.encode(["the dog"]), korean.encode(["그 고양이"]))
    with watch(model, TokenizerPair(english, korean)) as seen:
        model.loss(batch)
    assert seen[0].query_tokens == [["<s>", "▁그", "▁고양이"]]
    assert seen[0].key_tokens == [["▁the", "▁dog", "</s>"]]


# ------------------------------------------------------------------------------------------ knocked out


@pytest.mark.parametrize("name", ["none", "additive"])
def test_knocked_out(name: str) -> None:
    model, given = Attention(SCORES[name](), mask=masks.padding([4, 7])), qkv(2, 3)
    expected = model.weights(*given[:2])
    expected[:, 1] = 0
    expected[:, :, 4, 2] = expected[:, 0, 3, 0] = 0
    for head, row in ((0, 3), (0, 4), (2, 4)):
        expected[:, head, row] /= expected[:, head, row].sum(-1, keepdim=True)
    with torch.no_grad(), knock_out(model, {"Attention": [1, (4, 2), (0, 3, 0)]}), watch(model) as seen:
        out = model(*given)
        told = model.weights(*given[:2])  # outside of the model's forward: as it is
    torch.testing.assert_close(out, expected @ given[2])
    torch.testing.assert_close(seen[0].weights(), expected)
    assert told[0, 1].sum() > 4


def test_a_head_less_in_our_transformer() -> None:
    config = TransformerConfig(width=12, num_heads=3, feed_forward_width=17, encoder_layers=1, decoder_layers=1)
    model, batch = Transformer(config, 11, 13).eval(), Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    before = model.loss(batch).total
    attention = model.decoder[0].cross_attention
    with torch.no_grad(), knock_out(model, {"decoder.0.cross_attention": [2]}):
        without = model.loss(batch).total
    with torch.no_grad():
        attention.merge.weight[:, 8:] = 0  # what the third head says is not heard
    torch.testing.assert_close(without, model.loss(batch).total)
    assert not torch.allclose(before, without)
