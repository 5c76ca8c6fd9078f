"""The convolutional model beside the formulas of its paper, and each way through it beside the others."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.positions import LearnedPositions, SinusoidalPositions
from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, Tokens
from jumok.errors import InputError
from jumok.models import convolutional
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq

pytestmark = pytest.mark.long


SOURCE, TARGET = 23, 29  # words
SMALL = ConvolutionalConfig(
    embedding_width=7,
    width=11,
    kernel_size=3,
    encoder_layers=2,
    decoder_layers=3,
    max_positions=17,
    dropout=0.0,
    label_smoothing=0.1,
)
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TARGETS = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]]


def small(**changes: Any) -> ConvolutionalSeq2Seq:
    torch.manual_seed(0)
    config = dataclasses.replace(SMALL, **changes)
    model = ConvolutionalSeq2Seq(config, TARGET if config.tie_embeddings == "all" else SOURCE, TARGET).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases too, which begin at 0
            parameter += 0.3 * torch.randn_like(parameter)
    return model


# --------------------------------------------------------------------------- the paper, word by word


class Paper:
    """Section 3 of Gehring 2017 for one sentence pair, in loops, with weights of a model of ours."""

    def __init__(self, model: ConvolutionalSeq2Seq) -> None:
        self.model, self.config = model, model.config

    @staticmethod
    def linear(layer: nn.Linear, x: Tensor) -> Tensor:
        """Weight normalisation: w = g · v / |v| for each output (Salimans and Kingma 2016)."""
        if hasattr(layer, "parametrizations"):
            g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
            weight = torch.stack([g[row] * v[row] / v[row].square().sum().sqrt() for row in range(len(v))])
        else:
            weight = layer.weight
        return weight @ x + layer.bias

    def convolution(self, layer: nn.Linear, window: list[Tensor]) -> Tensor:
        both = self.linear(layer, torch.cat(window))
        a, b = both[: len(both) // 2], both[len(both) // 2 :]
        return a * torch.sigmoid(b)

    def embedded(self, table: nn.Embedding, entry: Any, ids: list[int]) -> list[Tensor]:
        results = []
        for place, number in enumerate(ids):
            if isinstance(entry.position, LearnedPositions):
                position = entry.position.table.weight[place]
            else:  # of the standard deviation of an embedding, 0.1
                position = 0.1 * math.sqrt(2) * SinusoidalPositions(7).embed(torch.tensor(place)).double()
            results.append(table.weight[number] + position)
        return results

    def logits(self, source: list[int], target: list[int]) -> Tensor:
        model, half, kernel = self.model, math.sqrt(0.5), self.config.kernel_size
        nothing = torch.zeros(self.config.width, dtype=torch.float64)
        e = self.embedded(model.source_embedding, model.source_input_layer, source)
        h = [self.linear(model.widen_source, x) for x in e]
        for layer in model.encoder:
            side = [nothing] * (kernel // 2)
            padded = [*side, *h, *side]
            new = [self.convolution(layer.convolution, padded[i : i + kernel]) for i in range(len(h))]
            h = [half * (x + y) for x, y in zip(h, new, strict=True)]
        z = [self.linear(model.narrow_source, x) for x in h]
        for x in z:  # gradients of the encoder are scaled by the number of attention mechanisms
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient / self.config.decoder_layers)
        z = [x.clone() for x in z]

        g = self.embedded(model.target_embedding, model.target_input_layer, target)
        h = [self.linear(model.widen_target, x) for x in g]
        for layer in model.decoder:
            padded = [nothing] * (kernel - 1) + h
            new = []
            for i in range(len(h)):
                y = self.convolution(layer.convolution, padded[i : i + kernel])
                d = self.linear(layer.query_projection, y) + g[i]
                a = torch.stack([d @ x for x in z]).softmax(0)
                c = sum(a[j] * (z[j] + e[j]) for j in range(len(z)))
                m = len(z)
                c = m * math.sqrt(1 / m) * c
                new.append(half * (y + self.linear(layer.context_projection, c)))
            h = [half * (x + y) for x, y in zip(h, new, strict=True)]
        return torch.stack([self.linear(model.output, self.linear(model.narrow_target, x)) for x in h])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernel_size": 5},
        {"kernel_size": 1},
        {"tie_embeddings": "target"},
        {"tie_embeddings": "all"},
        {"position_encoding": "sinusoid"},
    ],
    ids=str,
)
def test_equals_a_naive_implementation_of_the_paper(changes: dict[str, Any]) -> None:
    model = small(**changes)
    paper = Paper(model)
    loss = model.loss(Seq2SeqBatch.from_sequences(SOURCES, TARGETS))
    expected = sum(
        F.cross_entropy(
            paper.logits([*source, EOS], [BOS, *target]),
            torch.tensor([*target, EOS]),
            label_smoothing=0.1,
            reduction="sum",
        )
        for source, target in zip(SOURCES, TARGETS, strict=True)
    )
    torch.testing.assert_close(loss.total, expected)
    assert loss.count == 15
    names, of = zip(*model.named_parameters(), strict=True)
    ours, theirs = torch.autograd.grad(loss.total, of), torch.autograd.grad(expected, of)
    for name, got, want in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------------- beginning


def test_initial_weights_have_the_variances_of_the_paper() -> None:
    config = ConvolutionalConfig(embedding_width=64, width=128, kernel_size=3, dropout=0.25)
    model = ConvolutionalSeq2Seq(config, 997, 499)
    kept = 0.75
    expected = [
        (model.source_embedding.weight, 0.1),
        (model.target_embedding.weight, 0.1),
        (model.source_input_layer.position.table.weight, 0.1),
        (model.widen_source.weight, math.sqrt(kept / 64)),
        (model.encoder[0].convolution.weight, math.sqrt(4 * kept / (3 * 128))),
        (model.decoder[0].convolution.weight, math.sqrt(4 * kept / (3 * 128))),
        (model.narrow_source.weight, math.sqrt(1 / 128)),
        (model.decoder[0].query_projection.weight, math.sqrt(1 / 128)),
        (model.decoder[0].context_projection.weight, math.sqrt(1 / 64)),
        (model.output.weight, math.sqrt(kept / 64)),
    ]
    for weight, deviation in expected:
        assert weight.std().item() == pytest.approx(deviation, rel=0.03)
    assert all(not one.any() for name, one in model.named_parameters() if name.endswith("bias"))


def test_initial_loss_is_that_of_guessing() -> None:
    words = 211
    batch = Seq2SeqBatch.from_sequences(*(torch.randint(4, words, (2, 13, 17)).tolist()))
    loss = ConvolutionalSeq2Seq(ConvolutionalConfig(embedding_width=64, width=64), words, words).eval().loss(batch)
    assert loss.total.item() / loss.count == pytest.approx(math.log(words), abs=0.1)


# --------------------------------------------------------------------------- padding and causality


def test_later_words_do_not_matter() -> None:
    model = small().eval()
    one, other = (
        Seq2SeqBatch.from_sequences([[5, 6]], [[7, 8, 9]]),
        Seq2SeqBatch.from_sequences([[5, 6]], [[7, 8, 10]]),
    )
    for batch in (one, other):
        batch.labels[0] = torch.tensor([1, 1, 1, IGNORE])
    torch.testing.assert_close(model.loss(one).total, model.loss(other).total)
    for batch in (one, other):
        batch.labels[0, 3] = 1
    assert not torch.isclose(model.loss(one).total, model.loss(other).total)


# ------------------------------------------------------------------------------------- decoding


def test_maps_equal_those_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small().eval()
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    maps = model.compute_attention_maps(batch)
    names = dict(model.named_modules())
    assert [names[one.name] for one in maps] == list(model.decoder)
    used: list[Tensor] = []

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        used.append(convolutional.weights(query, key, **options))
        return convolutional_attend(query, key, value, **options)

    convolutional_attend = convolutional.attend
    monkeypatch.setattr(convolutional, "attend", watched)
    with torch.no_grad():
        state = model.start(batch.source)
        for place in range(batch.target.ids.shape[1]):
            _, state = model.step(state, batch.target.ids[:, place])
    assert [one.weights.shape for one in maps] == [(4, 1, 6, 8)] * 3
    for number, results in enumerate(used):
        place, layer = divmod(number, 3)
        torch.testing.assert_close(results, maps[layer].weights[:, 0, place : place + 1])
    for one in maps:
        assert torch.equal(one.weights == 0, ~batch.source.valid_mask[:, None, None].expand(4, 1, 6, 8))


# ------------------------------------------------------------------------------------- training


# --------------------------------------------------------------------------------- what is refused


def test_sequences_longer_than_the_positions_raise() -> None:
    model = small()
    model.loss(Seq2SeqBatch.from_sequences([[5] * 16], [[6] * 16]))
    for sides in (([[5] * 17], [[6]]), ([[5]], [[6] * 17])):
        with pytest.raises(InputError, match=r"position 17.*0 … 16"):
            model.loss(Seq2SeqBatch.from_sequences(*sides))
    state = model.start(Tokens.pad([[5, EOS]]))
    for _ in range(17):
        _, state = model.step(state, torch.tensor([6]))
    with pytest.raises(InputError, match="position 17"):
        model.step(state, torch.tensor([6]))
    small(position_encoding="sinusoid").loss(Seq2SeqBatch.from_sequences([[5] * 40], [[6] * 40]))
