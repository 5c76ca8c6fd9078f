"""The recurrent encoder-decoders: by hand, beside a naive reading of the papers, and against themselves."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jumok.batches.tokens import BOS, EOS, Seq2SeqBatch, Tokens
from jumok.models.layers.recurrent import (
    RecurrentStepper,
    build_rnn,
    reverse_sequences,
    run_rnn,
    run_rnn_on_tokens,
)
from jumok.models.seq2seq import DecoderAttention, Seq2Seq, Seq2SeqConfig

pytestmark = pytest.mark.long


SOURCE, TARGET = 11, 13  # vocabularies
EXACT = {"rtol": 1e-9, "atol": 1e-9}

SOURCES = [[4, 9, 5], [7], [10, 6]]
TARGETS = [[5, 12], [4, 8, 11, 6, 10], [9]]  # the second is longer than its source

SUTSKEVER = Seq2SeqConfig(
    cell="lstm",
    num_layers=2,
    bidirectional=False,
    reverse_source=True,
    attention=None,
    input_feeding=False,
    readout="plain",
)
CHO = Seq2SeqConfig(bidirectional=False, attention=None)
BAHDANAU = Seq2SeqConfig()
LUONG = Seq2SeqConfig(
    cell="lstm",
    num_layers=2,
    bidirectional=False,
    attention_score="general",
    attention_query="current",
    readout="tanh",
)
FAMILIES = {"sutskever": SUTSKEVER, "cho": CHO, "bahdanau": BAHDANAU, "luong": LUONG}


def small(config: Seq2SeqConfig, **changes: Any) -> Seq2SeqConfig:
    return dataclasses.replace(config, width=5, embedding_width=3, attention_window=1, dropout=0.0, **changes)


def combinations() -> Iterator[Seq2SeqConfig]:
    """Every cell, reach, score, query and feeding; the other choices take turns."""
    turn = itertools.count()

    def build_next(**chosen: Any) -> Seq2SeqConfig:
        n = next(turn)
        both = n % 3 != 0 and chosen.get("attention_score") != "dot"
        plain = chosen["attention"] is None or (chosen["attention_query"] == "previous" and chosen["input_feeding"])
        readouts = ["maxout", "tanh", "plain"] if plain else ["maxout", "tanh"]
        readout = readouts[n // 2 % len(readouts)]
        tie = "target" if readout != "plain" and n % 5 == 0 else "none"
        more = {"num_layers": 1 + n % 2, "readout": readout, "tie_embeddings": tie}
        return small(BAHDANAU, bidirectional=both, reverse_source=not both and n % 2 == 0, **more, **chosen)

    for cell, feeding in itertools.product(("gru", "lstm"), (True, False)):
        for _ in range(5):
            yield build_next(cell=cell, attention=None, input_feeding=feeding)
        for reach, query in itertools.product(("global", "local-m", "local-p"), ("previous", "current")):
            for score in ("dot", "scaled-dot", "general", "additive", "concat"):
                yield build_next(
                    cell=cell,
                    attention=reach,
                    attention_score=score,
                    attention_query=query,
                    input_feeding=feeding,
                )


def title(config: Seq2SeqConfig) -> str:
    parts = [config.cell, config.attention or "fixed", config.attention_score, config.attention_query]
    parts += [name for name in ("input_feeding", "bidirectional", "reverse_source") if getattr(config, name)]
    parts += ["tied"] * (config.tie_embeddings == "target")
    return "-".join([*parts, config.readout, str(config.num_layers)])


ALL = list(combinations())
# Beside the naive one, which is slow: all of the global ones, and of the local ones each with one score.
SOME = [c for n, c in enumerate(ALL) if c.attention in (None, "global") or n % 5 == n // 5 % 5]


def made(config: Seq2SeqConfig) -> Seq2Seq:
    model = Seq2Seq(config, SOURCE, TARGET).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # biases are not zero, scores not nearly equal
    return model


@pytest.fixture
def batch() -> Seq2SeqBatch:
    return Seq2SeqBatch.from_sequences(SOURCES, TARGETS)


def told(model: Seq2Seq, batch: Seq2SeqBatch) -> Tensor:
    """The logits of all steps, ``(B, T, V)``, of a model that is told the target."""
    words = model.target_embedding(batch.target.ids)
    _, readouts, _ = model.decoder(words, model.start(batch.source))
    return model.generator(readouts)


def loss_and_gradients(model: Seq2Seq, batch: Seq2SeqBatch) -> list[Tensor]:
    total = model.loss(batch).total
    return [total.detach(), *torch.autograd.grad(total, list(model.parameters()))]


def test_the_grid_is_what_it_says() -> None:
    assert len(ALL) == len(set(ALL)) == 2 * 2 * (5 + 3 * 2 * 5)
    for field in (
        "cell",
        "num_layers",
        "bidirectional",
        "reverse_source",
        "readout",
        "tie_embeddings",
        "attention_query",
        "attention_score",
    ):
        assert len({getattr(config, field) for config in SOME}) == len({getattr(c, field) for c in ALL}) > 1
    local = {(c.cell, c.attention, c.attention_query, c.input_feeding) for c in SOME}
    assert len(local) >= 2 * 3 * 2 * 2


# ------------------------------------------------------------------------------------------- by hand


def zeroed(config: Seq2SeqConfig, words: dict[int, list[float]], said: list[float]) -> Seq2Seq:
    """All zero, but embeddings of some source words and of BOS; and each cell's n is tanh of its input.

    With gates of ½, a state is then halfway between the one before and n = tanh(x).
    """
    model = Seq2Seq(config, 5, 5).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for word, embedding in words.items():
            model.source_embedding.weight[word] = torch.tensor(embedding)
        model.target_embedding.weight[BOS] = torch.tensor(said)
        for rnn in (model.encoder, model.decoder.rnn):
            rnn.weight_ih_l0[4:6, :2] = torch.eye(2)  # rows of r, z and n, of two units each
    return model


LN2, LN3 = math.log(2), math.log(3)  # tanh(ln 2) = 0.6, tanh(ln 3) = 0.8, tanh(ln 3 / 2) = 0.5
WORD = 4
HAND = Seq2SeqConfig(width=2, embedding_width=2, bidirectional=False, dropout=0.0)


def test_a_step_of_luong_by_hand() -> None:
    # The encoder, from (0, 0): WORD is (ln 3, 0), so h̄_1 = ½ (0.8, 0) = (0.4, 0);
    #                           EOS is (0, ln 3), so h̄_2 = ½ (0, 0.8) + ½ (0.4, 0) = (0.2, 0.4).
    # The decoder goes on from there with BOS, (ln 3, 0): h_1 = ½ (0.8, 0) + ½ (0.2, 0.4) = (0.5, 0.2).
    # h_1 · h̄_1 = 0.2 and h_1 · h̄_2 = 0.18. W is 50 √2 ln 3, and scores are over √2: they differ by ln 3, the
    # weights are ¾ and ¼.
    # c = ¾ (0.4, 0) + ¼ (0.2, 0.4) = (0.35, 0.1).
    # W_c [h; c] = (c_1 ln 3 / 0.35, h_2 ln 2 / 0.2), so h̃ = (0.8, 0.6).
    # The generator says 5 h̃_1 = 4 for WORD, 10 h̃_2 = 6 for UNK.
    config = dataclasses.replace(HAND, attention_score="general", attention_query="current", readout="tanh")
    model = zeroed(config, {WORD: [LN3, 0], EOS: [0, LN3]}, said=[LN3, 0])
    with torch.no_grad():
        model.decoder.attention.score.key.weight.copy_(50 * math.sqrt(2) * LN3 * torch.eye(2))
        model.decoder.readout.state_projection.weight.copy_(torch.tensor([[0, 0, LN3 / 0.35, 0], [0, LN2 / 0.2, 0, 0]]))
        model.generator.weight.copy_(torch.tensor([[0, 0], [0, 10], [0, 0], [0, 0], [5, 0]]))
    batch = Seq2SeqBatch.from_sequences([[WORD]], [[]])
    logits, state = model.step(model.start(batch.source), torch.tensor([BOS]))
    torch.testing.assert_close(logits, torch.tensor([[0, 6, 0, 0, 4.0]]).double())
    torch.testing.assert_close(state.hidden[0], torch.tensor([[[0.5, 0.2]]]).double())
    torch.testing.assert_close(state.input_feed, torch.tensor([[0.8, 0.6]]).double())
    torch.testing.assert_close(
        model.compute_attention_maps(batch)[0].weights, torch.tensor([[[[0.75, 0.25]]]]).double()
    )
    # The only label is EOS, with the logit 0.
    loss = model.loss(batch)
    assert loss.total.item() == pytest.approx(math.log(3 + math.exp(6) + math.exp(4)))
    assert loss.count == 1


def test_a_step_of_bahdanau_by_hand() -> None:
    # The encoder as above: h̄_1 = (0.4, 0), h̄_2 = s_0 = (0.2, 0.4).
    # The first row of U h̄_j is h̄_j1 ln 3 / 0.4: ln 3 and ln 3 / 2, with tanh 0.8 and 0.5. With
    # v = (ln 4 / 0.3, 0) the scores differ by ln 4: the weights are 0.8 and 0.2.
    # c_1 = 0.8 (0.4, 0) + 0.2 (0.2, 0.4) = (0.36, 0.08).
    # The cell's n = tanh(c_1 · (ln 3 / 0.36), c_2 · (ln 2 / 0.08)) = (0.8, 0.6), since BOS is (0, 0):
    # s_1 = ½ (0.8, 0.6) + ½ (0.2, 0.4) = (0.5, 0.5).
    # Readout: the larger one of 2 s_1 = 1 and 25 c_2 = 2 is 2. The generator says three times that for WORD.
    model = zeroed(HAND, {WORD: [LN3, 0], EOS: [0, LN3]}, said=[0, 0])
    with torch.no_grad():
        score = model.decoder.attention.score
        score.key.weight[0, 0] = LN3 / 0.4
        score.v[0] = math.log(4) / 0.3
        model.decoder.rnn.weight_ih_l0[4, 2] = LN3 / 0.36
        model.decoder.rnn.weight_ih_l0[5, 3] = LN2 / 0.08
        model.decoder.readout.state_projection.weight.copy_(torch.tensor([[2, 0, 0, 0], [0, 0, 0, 25.0]]))
        model.generator.weight[WORD] = 3
    batch = Seq2SeqBatch.from_sequences([[WORD]], [[]])
    logits, state = model.step(model.start(batch.source), torch.tensor([BOS]))
    torch.testing.assert_close(logits, torch.tensor([[0, 0, 0, 0, 6.0]]).double())
    torch.testing.assert_close(state.hidden[0], torch.tensor([[[0.5, 0.5]]]).double())
    torch.testing.assert_close(model.compute_attention_maps(batch)[0].weights, torch.tensor([[[[0.8, 0.2]]]]).double())


def test_a_fixed_context_by_hand() -> None:
    # Read in reverse, EOS comes first: (0, 0.4), then WORD: ½ (0.8, 0) + ½ (0, 0.4) = (0.4, 0.2) = s_0.
    # BOS is (0, ln 2): s_1 = ½ (0, 0.6) + ½ (0.4, 0.2) = (0.2, 0.4). UNK and WORD get 10 s_1.
    config = dataclasses.replace(HAND, attention=None, input_feeding=False, readout="plain", reverse_source=True)
    model = zeroed(config, {WORD: [LN3, 0], EOS: [0, LN3]}, said=[0, LN2])
    with torch.no_grad():
        model.generator.weight[1, 0] = model.generator.weight[WORD, 1] = 10
    logits, _ = model.step(model.start(Tokens.pad([[WORD, EOS]])), torch.tensor([BOS]))
    torch.testing.assert_close(logits, torch.tensor([[0, 2, 0, 0, 4.0]]).double())


def test_local_windows_by_hand() -> None:
    # All scores are equal. Step t sees those of the words t − 1 … t + 1 that are there; past the end, the
    # last two.
    look = DecoderAttention("local-m", "general", query_width=2, annotation_width=3, window=1)
    source = look.prepare(torch.zeros(2, 4, 3), *padding([4, 2]))
    weights = look.weights(torch.zeros(2, 6, 2), source).detach()
    half, third = 1 / 2, 1 / 3
    long = [[half, half, 0, 0], [third, third, third, 0], [0, third, third, third], *[[0, 0, half, half]] * 3]
    torch.testing.assert_close(weights, torch.tensor([long, [[half, half, 0, 0]] * 6]))
    # Without padding it is the same, and asked one by one, with the number of the step.
    torch.testing.assert_close(look.weights(torch.zeros(1, 6, 2), look.prepare(torch.zeros(1, 4, 3))), weights[:1])
    for t in range(6):
        torch.testing.assert_close(look.weights(torch.zeros(2, 1, 2), source, t), weights[:, t : t + 1])


def test_a_predicted_window_by_hand() -> None:
    # v · tanh(W q) = 0, so p is in the middle: 2 of 4 words, 1 of 2. D = 2, so σ = 1: the bell is 1 at p,
    # e^−½ one word away, e^−2 two. The softmax of equal scores is ¼ for four words in reach, ½ for two.
    look = DecoderAttention("local-p", "general", query_width=2, annotation_width=3, window=2)
    nn.init.zeros_(look.position_predictor[2].weight)
    source = look.prepare(torch.zeros(2, 4, 3), *padding([4, 2]))
    one, two = math.exp(-1 / 2), math.exp(-2)
    expected = [[[two / 4, one / 4, 1 / 4, one / 4]], [[one / 2, 1 / 2, 0, 0]]]
    torch.testing.assert_close(look.weights(torch.ones(2, 1, 2), source).detach(), torch.tensor(expected))


def padding(lengths: list[int]) -> tuple[Any, Tensor]:
    return Tokens.pad([[1] * n for n in lengths]).mask, torch.tensor(lengths)


# ---------------------------------------------------------------------- beside a naive reading of the papers


class Naive:
    """One sentence at a time, one vector at a time, without padding: the papers' equations as they stand."""

    def __init__(self, model: Seq2Seq) -> None:
        self.config = model.config
        self.p = dict(model.named_parameters(remove_duplicate=False))

    def cell(self, name: str, suffix: str, x: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        w, u, b, d = (self.p[f"{name}.{kind}_{suffix}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        h = hidden[0]
        if self.config.cell == "gru":
            wr, wz, wn = (w @ x + b).chunk(3)
            ur, uz, un = (u @ h + d).chunk(3)
            r, z = torch.sigmoid(wr + ur), torch.sigmoid(wz + uz)
            n = torch.tanh(wn + r * un)
            return ((1 - z) * n + z * h,)
        i, f, g, o = (w @ x + b + u @ h + d).chunk(4)
        c = torch.sigmoid(f) * hidden[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def encode(self, source: list[int]) -> tuple[list[Tensor], list[tuple[Tensor, ...]], Tensor]:
        """Annotations, the decoder's first hidden state by layer, and the last state of all."""
        config = self.config
        zero = (torch.zeros(config.width, dtype=torch.float64),) * (1 if config.cell == "gru" else 2)
        xs = [self.p["source_embedding.weight"][word] for word in source]
        if config.reverse_source:
            xs = xs[::-1]
        lasts = []
        for layer in range(config.num_layers):
            forward, hidden = [], zero
            for x in xs:
                hidden = self.cell("encoder", f"l{layer}", x, hidden)
                forward.append(hidden[0])
            lasts.append(hidden)
            if config.bidirectional:
                backward, hidden = [], zero
                for x in xs[::-1]:
                    hidden = self.cell("encoder", f"l{layer}_reverse", x, hidden)
                    backward.insert(0, hidden[0])
                forward = [torch.cat(pair) for pair in zip(forward, backward, strict=True)]
            xs = forward
        if not config.bidirectional:
            return xs[::-1] if config.reverse_source else xs, lasts, lasts[-1][0]
        last = torch.cat([lasts[-1][0], hidden[0]])
        first = torch.tanh(self.p["bridge.weight"] @ last + self.p["bridge.bias"])
        parts = [part.split(config.width) for part in first.chunk(len(zero))]
        return xs, list(zip(*parts, strict=True)), last

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        p = {name.removeprefix("decoder.attention."): x for name, x in self.p.items()}
        match self.config.attention_score:
            case "dot":
                return q @ k
            case "scaled-dot":
                return (
                    (p["query_projection.weight"] @ q) @ (p["key_projection.weight"] @ k) / math.sqrt(self.config.width)
                )
            case "general":
                return q @ p["score.key.weight"] @ k / math.sqrt(self.config.width)
            case "additive":
                return p["score.v"] @ torch.tanh(p["score.query.weight"] @ q + p["score.key.weight"] @ k)
            case "concat":
                return p["score.v"] @ torch.tanh(p["score.both.weight"] @ torch.cat([q, k]))

    def attend(self, q: Tensor, annotations: list[Tensor], t: int) -> tuple[Tensor, Tensor]:
        d, words = self.config.attention_window, len(annotations)
        places, centre = range(words), torch.tensor(0.0)
        if self.config.attention == "local-m":
            centre = torch.tensor(float(min(t, words - 1)))
        if self.config.attention == "local-p":
            w, v = (
                self.p["decoder.attention.position_predictor.0.weight"],
                self.p["decoder.attention.position_predictor.2.weight"],
            )
            centre = words * torch.sigmoid(v @ torch.tanh(w @ q))[0]
        if self.config.attention != "global":
            places = [j for j in places if abs(j - centre.item()) <= d]
        exps = {j: torch.exp(self.score(q, annotations[j])) for j in places}
        weights = [exps[j] / sum(exps.values()) if j in exps else 0 * q.sum() for j in range(words)]
        if self.config.attention == "local-p":
            weights = [a * torch.exp(-((j - centre) ** 2) / (2 * (d / 2) ** 2)) for j, a in enumerate(weights)]
        return sum(a * h for a, h in zip(weights, annotations, strict=True)), torch.stack(weights)

    def readout(self, state: Tensor, context: Tensor | None, y: Tensor) -> Tensor:
        if self.config.readout == "plain":
            return state
        x = self.p["decoder.readout.state_projection.weight"] @ (
            state if context is None else torch.cat([state, context])
        )
        if self.config.readout == "tanh":
            return torch.tanh(x)
        x = x + self.p["decoder.readout.word_projection.weight"] @ y + self.p["decoder.readout.word_projection.bias"]
        half = len(x) // 2
        return torch.stack([torch.max(x[i], x[i + half]) for i in range(half)])

    def __call__(self, source: list[int], target: list[int]) -> tuple[Tensor, list[Tensor]]:
        """The loss of one pair, and where each step looked."""
        config = self.config
        annotations, hidden, last = self.encode([*source, EOS])
        previous = torch.zeros(len(self.p["generator.weight"][0]), dtype=torch.float64)  # h̃
        loss, maps = torch.zeros((), dtype=torch.float64), []
        for t, (said, label) in enumerate(zip([BOS, *target], [*target, EOS], strict=True)):
            y = self.p["target_embedding.weight"][said]
            context = last if config.attention is None and config.input_feeding else None
            if config.attention is not None and config.attention_query == "previous":
                context, weights = self.attend(hidden[-1][0], annotations, t)
                maps.append(weights)
            x = y
            if config.input_feeding:
                late = config.attention is not None and config.attention_query == "current"
                x = torch.cat([y, previous if late else context])
            after = []
            for layer in range(config.num_layers):
                after.append(self.cell("decoder.rnn", f"l{layer}", x, hidden[layer]))
                x = after[-1][0]
            hidden = after
            if config.attention is not None and config.attention_query == "current":
                context, weights = self.attend(hidden[-1][0], annotations, t)
                maps.append(weights)
            previous = self.readout(hidden[-1][0], context, y)
            logits = self.p["generator.weight"] @ previous + self.p["generator.bias"]
            loss = loss + logits.exp().sum().log() - logits[label]
        return loss, maps


@pytest.mark.parametrize("config", SOME, ids=title)
def test_loss_gradients_and_maps_are_those_of_the_papers(config: Seq2SeqConfig, batch: Seq2SeqBatch) -> None:
    model = made(config)
    parameters = dict(model.named_parameters())
    naive = Naive(model)
    losses, maps = zip(*(naive(*pair) for pair in zip(SOURCES, TARGETS, strict=True)), strict=True)
    ours = model.loss(batch)
    torch.testing.assert_close(ours.total, sum(losses), **EXACT)
    assert ours.count == sum(len(target) + 1 for target in TARGETS)
    mine, theirs = (torch.autograd.grad(x, list(parameters.values())) for x in (ours.total, sum(losses)))
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT, msg=lambda text, name=name: f"{name}: {text}")
    found = model.compute_attention_maps(batch)
    assert len(found) == (config.attention is not None)
    for row, expected in enumerate(maps if found else ()):
        weights = found[0].weights[row, 0]
        steps, words = len(TARGETS[row]) + 1, len(SOURCES[row]) + 1
        torch.testing.assert_close(weights[:steps, :words], torch.stack(expected), **EXACT)
        assert not weights[steps:].any()
        assert not weights[:, words:].any()


# ------------------------------------------------------------------------------------- against itself


@pytest.mark.parametrize("config", ALL, ids=title)
@torch.no_grad()
def test_step_by_step_it_says_and_sees_the_same(config: Seq2SeqConfig, batch: Seq2SeqBatch) -> None:
    model = made(config)
    expected = told(model, batch)
    seen: list[Tensor] = []
    if model.decoder.attention is not None:
        model.decoder.attention.register_forward_pre_hook(lambda m, given: seen.append(m.weights(*given)))
    state = model.start(batch.source)
    for t, ids in enumerate(batch.target.ids.unbind(1)):
        logits, state = model.step(state, ids)
        assert logits.shape == (len(SOURCES), TARGET)
        torch.testing.assert_close(logits, expected[:, t], **EXACT)
    real = batch.target.valid_mask
    for found in model.compute_attention_maps(batch):
        assert found.name in dict(model.named_modules())
        assert found.weights.shape == (
            len(SOURCES),
            1,
            *batch.target.ids.shape[1:],
            batch.source.ids.shape[1],
        )
        steps = torch.stack([one.squeeze(1) for one in seen[: real.shape[1]]], 1)
        torch.testing.assert_close(found.weights[:, 0], steps * real[..., None], **EXACT)
        sums = found.weights[:, 0].sum(-1)[real]
        if config.attention == "local-p":
            assert ((sums > 0) & (sums < 1)).all()
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))


def test_nothing_stays_on_the_module(batch: Seq2SeqBatch) -> None:
    model = made(small(LUONG))
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    state = model.start(batch.source)
    model.step(state, batch.target.ids[:, 0])
    model.loss(batch)
    model.compute_attention_maps(batch)
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.num_steps = 3  # type: ignore[misc]


def test_it_learns_to_reverse() -> None:
    torch.manual_seed(3)
    sources = [torch.randint(4, 10, (n,)).tolist() for n in range(1, 7) for _ in range(8)]
    batch = Seq2SeqBatch.from_sequences(sources, [source[::-1] for source in sources])
    model = Seq2Seq(Seq2SeqConfig(width=32, embedding_width=16, dropout=0.0), 10, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model.loss(batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    assert loss.total / loss.count < 0.05
    with torch.no_grad():
        state, ids, said = model.start(batch.source), torch.full((len(sources),), BOS), []
        for _ in range(7):
            logits, state = model.step(state, ids)
            ids = logits.argmax(-1)
            said.append(ids)
    for row, source in zip(torch.stack(said, 1).tolist(), sources, strict=True):
        assert row[: len(source) + 1] == [*source[::-1], EOS]
    # It looks where the word is: for label t at the t-th word from the end.
    weights = model.compute_attention_maps(batch)[0].weights[:, 0]
    right = [weights[b, t].argmax() == len(s) - 1 - t for b, s in enumerate(sources) for t in range(len(s))]
    assert sum(right) > 0.8 * len(right)


# ------------------------------------------------------------------------------------ recurrent layers

CELLS = ["gru", "lstm"]


@pytest.mark.parametrize("cell", CELLS)
def test_steps_are_the_whole_sentence_word_by_word(cell: Any) -> None:
    rnn = build_rnn(cell, input_width=7, width=5, num_layers=3).double()
    x, y = torch.randn(2, 11, 3).double(), torch.randn(2, 11, 4).double()
    hidden = tuple(torch.randn(3, 2, 5).double() for _ in range(1 if cell == "gru" else 2))
    states, after = run_rnn(rnn, torch.cat([x, y], -1), hidden)
    steps, tops = RecurrentStepper(rnn, known_width=3), []
    now = list(zip(*(part.unbind(0) for part in hidden), strict=True))
    for gates, fed in zip(steps.prepare(x).unbind(1), y.unbind(1), strict=True):
        now = steps(gates, fed, now)
        tops.append(now[-1][0])
    torch.testing.assert_close(torch.stack(tops, 1), states, **EXACT)
    for mine, theirs in zip(zip(*now, strict=True), after, strict=True):
        torch.testing.assert_close(torch.stack(mine), theirs, **EXACT)
    slope = torch.randn_like(states)
    mine, theirs = (
        torch.autograd.grad((out * slope).sum(), list(rnn.parameters())) for out in (torch.stack(tops, 1), states)
    )
    torch.testing.assert_close(mine, theirs, **EXACT)


def test_dropout_between_layers_is_there_step_by_step_too() -> None:
    rnn = build_rnn("gru", input_width=3, width=5, num_layers=2, dropout=0.9)
    hidden = [(torch.ones(2, 5),)] * 2
    fed, gates = torch.ones(2, 3), torch.zeros(2, 15)
    assert not torch.equal(
        RecurrentStepper(rnn, 0)(gates, fed, hidden)[1][0], RecurrentStepper(rnn, 0)(gates, fed, hidden)[1][0]
    )
    rnn.eval()
    assert torch.equal(
        RecurrentStepper(rnn, 0)(gates, fed, hidden)[1][0], RecurrentStepper(rnn, 0)(gates, fed, hidden)[1][0]
    )


@pytest.mark.parametrize("config", SOME, ids=title)
def test_batches_that_are_alike_are_the_same_batches(config: Seq2SeqConfig, batch: Seq2SeqBatch) -> None:
    model = made(config)
    for mine, theirs in zip(
        loss_and_gradients(model, batch.with_static_shapes()), loss_and_gradients(model, batch), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_sentences_are_read_as_if_alone(cell: Any, bidirectional: bool, alike: bool) -> None:
    rnn = build_rnn(cell, input_width=3, width=5, num_layers=2, bidirectional=bidirectional).double()
    lengths = [2, 7, 1, 4, 1, 3]  # sorting these and undoing that are different permutations
    x = torch.randn(len(lengths), 7, 3).double()
    tokens = Tokens.pad([[5] * n for n in lengths])
    states, hidden = run_rnn_on_tokens(rnn, x, tokens.with_static_shapes() if alike else tokens)
    for row, n in enumerate(lengths):
        alone, last = run_rnn_on_tokens(rnn, x[row : row + 1, :n], Tokens.pad([[5] * n]))
        torch.testing.assert_close(states[row, :n], alone[0], **EXACT)
        assert not states[row, n:].any()
        for mine, theirs in zip(hidden, last, strict=True):
            torch.testing.assert_close(mine[:, row], theirs[:, 0], **EXACT)


def test_rows_are_reversed_within_their_lengths() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 0, 0]])[..., None]
    assert reverse_sequences(x, torch.tensor([3, 2, 1]))[..., 0].tolist() == [[3, 2, 1], [5, 4, 0], [6, 0, 0]]
    assert reverse_sequences(x, None)[..., 0].tolist() == [[3, 2, 1], [0, 5, 4], [0, 0, 6]]


def test_layers_start_orthogonal_and_an_lstm_remembering() -> None:
    rnn = build_rnn("lstm", input_width=3, width=5, num_layers=2, bidirectional=True)
    for gate in rnn.weight_hh_l1_reverse.split(5):
        torch.testing.assert_close(gate @ gate.t(), torch.eye(5), rtol=0, atol=1e-5)
    assert (rnn.bias_ih_l0 + rnn.bias_hh_l0).tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10


# -------------------------------------------------------------------------------------------- choices


def test_empty_sources_raise() -> None:
    model = made(small(BAHDANAU))
    for empty in (Tokens.pad([[5], []]), Tokens.pad([])):
        with pytest.raises(ValueError, match="at least one token"):
            model.start(empty)


def test_one_word_to_one_word() -> None:
    for config in FAMILIES.values():
        loss = made(small(config)).loss(Seq2SeqBatch.from_sequences([[]], [[]]))
        assert loss.count == 1
        assert loss.total.isfinite()


# --------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("config", SOME, ids=title)
def test_the_gpu_says_the_same(config: Seq2SeqConfig, batch: Seq2SeqBatch) -> None:
    model = made(config).float()
    expected = loss_and_gradients(model, batch)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = loss_and_gradients(model.cuda(), batch.to("cuda"))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_the_gpu_is_never_waited_for(config: Seq2SeqConfig, batch: Seq2SeqBatch) -> None:
    model = Seq2Seq(small(config), SOURCE, TARGET).cuda()
    batch = batch.to("cuda")
    loss_and_gradients(model, batch)  # kernels are compiled and tuned
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            loss_and_gradients(model, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [BAHDANAU, LUONG], ids=["bahdanau", "luong"])
def test_a_batch_without_padding_is_captured_in_a_cuda_graph(config: Seq2SeqConfig) -> None:
    model = Seq2Seq(small(config), SOURCE, TARGET).cuda()
    batch = Seq2SeqBatch.from_sequences([[4, 5, 6]] * 3, [[7, 8]] * 3).to("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            loss_and_gradients(model, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradients(model, batch)
    batch.source.ids.copy_(torch.randint(4, SOURCE, batch.source.ids.shape))
    graph.replay()
    for mine, theirs in zip(captured, loss_and_gradients(model, batch), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
