"""The Transformer beside PyTorch's own layers, and each way through it beside the others."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.heads import MultiHead
from jumok.attention.positions import SinusoidalPositions
from jumok.batches.tokens import BOS, IGNORE, Seq2SeqBatch
from jumok.models.layers.source_sharing import reorder_sources
from jumok.models.transformer import FeedForward, ResidualNorm, Transformer, TransformerConfig

pytestmark = pytest.mark.long


SOURCE, TARGET = 23, 29  # words
SMALL = TransformerConfig(
    width=14,
    num_heads=2,
    feed_forward_width=19,
    encoder_layers=2,
    decoder_layers=3,
    dropout=0.0,
    label_smoothing=0.1,
)
SOURCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17]]
TARGETS = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]]


def small(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    config = dataclasses.replace(SMALL, **changes)
    model = Transformer(config, TARGET if config.tie_embeddings == "all" else SOURCE, TARGET).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which begin at 0 and 1
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def log_p(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """The log-probabilities of all words at each place of one sentence alone, as in the loss: ``(T, V)``."""
    hidden: list[Tensor] = []
    hook = model.output.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    model.loss(Seq2SeqBatch.from_sequences([source], [target]))
    hook.remove()
    return model.output.logits(hidden[0]).detach().log_softmax(-1)


def each_label(model: Transformer, batch: Seq2SeqBatch) -> Tensor:
    """What each label that counts costs, in order."""
    costs = []
    for place in (batch.labels.flatten() != IGNORE).nonzero()[:, 0]:
        labels = torch.full_like(batch.labels, IGNORE)
        labels.view(-1)[place] = batch.labels.view(-1)[place]
        costs.append(model.loss(dataclasses.replace(batch, labels=labels)).parts["nll"])
    return torch.stack(costs)


# ------------------------------------------------------------------------- PyTorch's own layers


class Oracle:
    """The same model of ``nn.TransformerEncoderLayer`` and ``nn.TransformerDecoderLayer``."""

    def __init__(self, model: Transformer) -> None:
        config = self.config = model.config
        self.model = model
        first = config.norm == "pre"
        common = {
            "d_model": config.width,
            "nhead": config.num_heads,
            "dim_feedforward": config.feed_forward_width,
            "dropout": 0.0,
            "activation": {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}[config.activation],
            "batch_first": True,
            "norm_first": first,
            "dtype": torch.float64,
        }
        norm = nn.LayerNorm(config.width, dtype=torch.float64) if first else None
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**common), config.encoder_layers, norm, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(**common), config.decoder_layers, copy.deepcopy(norm)
        )
        self.pairs = list(self._pairs())
        with torch.no_grad():
            for ours, theirs in self.pairs:
                theirs.copy_(ours)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Our parameter and theirs."""
        for ours, theirs in zip(self.model.encoder, self.encoder.layers, strict=True):
            yield from self._own(ours.attention, theirs.self_attn)
            yield from self._fed(ours.feed_forward, theirs)
        for ours, theirs in zip(self.model.decoder, self.decoder.layers, strict=True):
            yield from self._own(ours.self_attention, theirs.self_attn)
            width, cross = self.config.width, ours.cross_attention
            for part in ("weight", "bias"):
                query, rest = getattr(theirs.multihead_attn, f"in_proj_{part}").split([width, 2 * width])
                yield getattr(cross.project_query, part), query
                yield getattr(cross.project_source, part), rest
            yield from _both(cross.merge, theirs.multihead_attn.out_proj)
            yield from self._fed(ours.feed_forward, theirs)
        yield from self._norms(
            self.model.source_input_layer.norm,
            [[layer.feed_forward.attention_residual, layer.feed_forward.residual] for layer in self.model.encoder],
            [[layer.norm1, layer.norm2] for layer in self.encoder.layers],
            self.encoder.norm,
        )
        yield from self._norms(
            self.model.target_input_layer.norm,
            [
                [
                    layer.self_attention_residual,
                    layer.feed_forward.attention_residual,
                    layer.feed_forward.residual,
                ]
                for layer in self.model.decoder
            ],
            [[layer.norm1, layer.norm2, layer.norm3] for layer in self.decoder.layers],
            self.decoder.norm,
        )

    @staticmethod
    def _own(ours: MultiHead, theirs: nn.MultiheadAttention) -> Iterator[tuple[Tensor, Tensor]]:
        yield ours.project.weight, theirs.in_proj_weight
        yield ours.project.bias, theirs.in_proj_bias
        yield from _both(ours.merge, theirs.out_proj)

    @staticmethod
    def _fed(ours: FeedForward, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
        yield from _both(ours.widen, theirs.linear1)
        yield from _both(ours.narrow, theirs.linear2)

    @staticmethod
    def _norms(first: Any, ours: list[list[ResidualNorm]], theirs: list[list[Any]], last: Any) -> Iterator[Any]:
        """In order. With the norm first, theirs stand one place further: before a sublayer, not after."""
        own = [join.norm for layer in ours for join in layer]
        other = [norm for layer in theirs for norm in layer]
        if first is not None:
            own, other = [first, *own], [*other, last]
        for one, another in zip(own, other, strict=True):
            yield from _both(one, another)

    def loss(self, batch: Seq2SeqBatch, smoothing: float) -> Tensor:
        scale, position = math.sqrt(self.config.width), SinusoidalPositions(self.config.width)
        source = self.model.source_embedding(batch.source.ids) * scale
        target = self.model.target_embedding(batch.target.ids) * scale
        padding = ~batch.source.valid_mask
        encoded = self.encoder(source + position(source), src_key_padding_mask=padding)
        length = target.shape[1]
        hidden = self.decoder(
            target + position(target),
            encoded,
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            memory_key_padding_mask=padding,
        )
        logits = F.linear(hidden, self.model.output.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), label_smoothing=smoothing, reduction="sum")


def _both(ours: Any, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield ours.weight, theirs.weight
    yield ours.bias, theirs.bias


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tie", ["none", "target", "all"])
def test_equal_to_the_layers_of_torch(norm: str, activation: str, tie: str) -> None:
    model = small(norm=norm, activation=activation, tie_embeddings=tie)
    oracle = Oracle(model)
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    loss = model.loss(batch)
    expected = oracle.loss(batch, smoothing=0.1)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.parts["nll"], oracle.loss(batch, smoothing=0.0).detach())
    assert loss.count == sum(len(target) + 1 for target in TARGETS)

    ours = torch.autograd.grad(loss.total, [*model.parameters()])
    named = dict(zip(map(id, model.parameters()), ours, strict=True))
    whole = [*oracle.encoder.parameters(), *oracle.decoder.parameters()]
    shared = [model.source_embedding.weight, model.target_embedding.weight]
    theirs = torch.autograd.grad(expected, [*whole, *shared])
    for parameter, gradient in zip(shared, theirs[len(whole) :], strict=True):
        torch.testing.assert_close(named[id(parameter)], gradient)
    # Written over their values, so that the same pairs show the gradients.
    with torch.no_grad():
        for parameter, gradient in zip(whole, theirs, strict=False):
            parameter.copy_(gradient)
    for mine, gradient in oracle.pairs:
        torch.testing.assert_close(named[id(mine)], gradient.detach())


# ------------------------------------------------------------------------------------- by hand


def test_by_hand_one_word_one_layer() -> None:
    """With all projections at zero each layer only norms: what is left are embedding, position and output."""
    config = TransformerConfig(
        width=2,
        num_heads=1,
        feed_forward_width=1,
        encoder_layers=1,
        decoder_layers=1,
        dropout=0.0,
        label_smoothing=0.0,
    )
    model = Transformer(config, 5, 5).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.output.weight[3] = torch.tensor([0.5, -0.5])
    # <s> is 0, and its place 0 is (sin 0, cos 0) = (0, 1): normed (−1, 1). The logit of </s> is −1, others 0.
    loss = model.loss(Seq2SeqBatch.from_sequences([[4]], [[]]))
    assert loss.total.item() == pytest.approx(math.log(4 + math.exp(-1)) + 1, abs=1e-4)


def test_equal_words_at_first_the_loss_is_that_of_guessing() -> None:
    words = 211
    batch = Seq2SeqBatch.from_sequences(*(torch.randint(4, words, (2, 13, 17)).tolist()))
    for norm, tie in itertools.product(("post", "pre"), ("none", "target", "all")):
        config = TransformerConfig(width=64, num_heads=4, feed_forward_width=128, norm=norm, tie_embeddings=tie)
        loss = Transformer(config, words, words).eval().loss(batch)
        # A hidden state has length √width and a word's vector a variance of 1/width: logits ~ N(0, 1).
        assert loss.total.item() / loss.count == pytest.approx(math.log(words) + 0.5, abs=0.35)


def test_embeddings_and_projections_begin_as_they_should() -> None:
    model = Transformer(
        TransformerConfig(width=64, num_heads=4, feed_forward_width=256, tie_embeddings="none"), 997, 499
    )
    for table in (model.source_embedding.weight, model.target_embedding.weight, model.output.weight):
        assert table.std().item() == pytest.approx(64**-0.5, rel=0.02)
    assert model.encoder[0].feed_forward.widen.weight.abs().max().item() <= math.sqrt(6 / (64 + 256))
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))


# ------------------------------------------------------------------------------ packed and padded


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("to", [(0, 0), (20, 23)])
def test_packed_is_padded(norm: str, to: tuple[int, int]) -> None:
    model = small(norm=norm)
    padded, packed = (
        Seq2SeqBatch.from_sequences(SOURCES, TARGETS),
        Seq2SeqBatch.from_sequences(SOURCES, TARGETS, packed=True, min_lengths=to),
    )
    one, other = model.loss(padded), model.loss(packed)
    torch.testing.assert_close(other.total, one.total)
    torch.testing.assert_close(other.parts["nll"], one.parts["nll"])
    assert one.count == other.count
    of = [*model.parameters()]
    for got, want in zip(torch.autograd.grad(other.total, of), torch.autograd.grad(one.total, of), strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(each_label(model, packed), each_label(model, padded))


def test_packed_is_padded_in_float32() -> None:
    model = small().float().eval()
    with torch.no_grad():
        got = each_label(model, Seq2SeqBatch.from_sequences(SOURCES, TARGETS, packed=True))
        torch.testing.assert_close(
            got, each_label(model, Seq2SeqBatch.from_sequences(SOURCES, TARGETS)), rtol=1e-5, atol=1e-5
        )


def test_packed_in_another_order_costs_the_same() -> None:
    model = small().eval()
    order = [2, 0, 3, 1]
    mixed = Seq2SeqBatch.from_sequences([SOURCES[i] for i in order], [TARGETS[i] for i in order], packed=True)
    torch.testing.assert_close(model.loss(mixed).total, model.loss(Seq2SeqBatch.from_sequences(SOURCES, TARGETS)).total)


def test_later_words_do_not_matter() -> None:
    model = small().eval()
    one, other = (log_p(model, [5, 6], target) for target in ([7, 8, 9], [7, 8, 10]))
    torch.testing.assert_close(one[:3], other[:3])
    assert not torch.allclose(one[3], other[3])


# ------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize(
    ("index", "sources", "shared", "expected"),
    [
        ([0, 1, 2], range(3), 1, ([0, 1, 2], 1)),
        ([2, 2, 0, 0], [2, 0], 1, ([2, 0], 2)),
        ([1, 1, 1, 1, 0, 0], [1, 1, 0], 1, ([1, 1, 0], 2)),
        ([5, 3, 4, 0, 1, 2], [1, 0], 3, ([1, 0], 3)),
        ([0, 5], [0, 1], 3, ([0, 1], 1)),
        ([0, 5, 4], None, 3, ([0, 1, 1], 1)),
        ([], [], 3, ([], 1)),
        ([], None, 3, ([], 1)),
    ],
)
def test_which_sources_rows_need(
    index: list[int], sources: list[int] | None, shared: int, expected: tuple[list[int], int]
) -> None:
    assert reorder_sources(torch.tensor(index, dtype=torch.long), sources, shared) == expected


@pytest.mark.parametrize(
    ("index", "sources"),
    [([0, 1, 2], [0, 1]), ([0, 1, 2, 3], [0, 1]), ([0, 1, 3, 3], [1, 0]), ([0], []), ([], [0, 1])],
)
def test_sources_that_rows_are_not_of_are_refused(index: list[int], sources: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(index)} rows and there are {len(sources)} sources"):
        reorder_sources(torch.tensor(index, dtype=torch.long), sources, rows_per_source=3)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_maps_are_where_the_steps_looked(norm: str) -> None:
    model = small(norm=norm).eval()
    batch = Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    maps = model.compute_attention_maps(batch)
    names = dict(model.named_modules())
    assert [names[one.name] for one in maps] == [layer.cross_attention for layer in model.decoder]
    asked: list[list[tuple[Any, ...]]] = [[] for _ in maps]
    for layer, calls in zip(model.decoder, asked, strict=True):
        layer.cross_attention.register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args))
    with torch.no_grad():
        state = model.start(batch.source)
        for place in range(batch.target.ids.shape[1]):
            _, state = model.step(state, batch.target.ids[:, place])
        for layer, calls, found in zip(model.decoder, asked, maps, strict=True):
            assert found.weights.shape == (4, 2, 6, 8)
            for place, (x, source) in enumerate(calls):
                torch.testing.assert_close(
                    layer.cross_attention.weights(x, source)[:, :, 0], found.weights[:, :, place]
                )
            assert torch.equal(found.weights == 0, ~batch.source.valid_mask[:, None, None].expand(4, 2, 6, 8))
            torch.testing.assert_close(found.weights.sum(-1), torch.ones(4, 2, 6, dtype=torch.float64))


# ------------------------------------------------------------------------------------- training


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_once_for_all_batches() -> None:
    """What differs from batch to batch, masks and lengths, is no part of what is compiled."""
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = small()
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    model.compile(backend=counted)
    sizes = []
    for rows in range(1, 5):
        batch = Seq2SeqBatch.from_sequences(SOURCES[:rows], TARGETS[:rows], packed=True, min_lengths=(20, 20))
        torch.testing.assert_close(model.loss(batch).total, plain.loss(batch).total)
        sizes.append(len(graphs))
    assert sizes == [7] * 4  # Entry, Join, FeedForward, Output, 3 sizes of Projection: layers share theirs
    model.eval()
    state = model.start(Seq2SeqBatch.from_sequences(SOURCES, TARGETS).source)
    model.step(state, torch.full((4,), BOS))
    assert len(graphs) == 7  # while decoding nothing is compiled
    torch.compiler.reset()


# --------------------------------------------------------------------------------- what is refused
