"""Show, attend and tell: against a naive implementation of the paper, against itself, and trained."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

import jumok
from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.batches.tokens import BOS, EOS, IGNORE, Tokens
from jumok.decoding.beam import beam_search
from jumok.decoding.greedy import greedy_search
from jumok.models import captioner
from jumok.models.caption_transformer import CaptionTransformer
from jumok.models.captioner import Captioner, CaptionerConfig
from jumok.models.transformer import TransformerConfig

pytestmark = pytest.mark.long


VOCABULARY, FEATURES = 13, 5
GRID = (2, 3)
EXACT = {"rtol": 1e-9, "atol": 1e-9}
CAPTIONS = [[5, 12], [4, 8, 11, 6, 10], [9]]

SOFT = CaptionerConfig(width=7, embedding_width=3, attention_width=4, dropout=0.0, doubly_stochastic_penalty=0.3)
HARD = dataclasses.replace(SOFT, attention="hard")


def build_model(config: CaptionerConfig, seed: int = 0) -> Captioner:
    torch.manual_seed(seed)
    model = Captioner(config, VOCABULARY, FEATURES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # no bias is zero, scores differ clearly
    return model


def build_batch(captions: list[list[int]] = CAPTIONS, **more: Any) -> CaptionBatch:
    features = torch.randn(len(captions), 6, FEATURES, generator=torch.manual_seed(1)).double()
    return CaptionBatch.from_sequences(features, GRID, captions, **more)


def gradients(model: nn.Module, total: Tensor) -> list[Tensor]:
    result = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), result, strict=True)]


# ------------------------------------------------------------------------ against a naive implementation


def naive(
    model: Captioner, features: Tensor, caption: list[int], positions: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """The logits ``(T, V)`` and weights ``(T, P)`` of one image: the paper's equations, a vector at a time.

    ``positions``: the positions to attend to, if they are given.
    """
    p = dict(model.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0.0)

    mean = sum(features) / len(features)
    h, c = (
        torch.tanh(linear(f"{name}.2", torch.tanh(linear(f"{name}.0", mean)))) for name in ("init_hidden", "init_cell")
    )
    logits, attention = [], []
    for step, word in enumerate([BOS, *caption]):
        y = p["embedding.weight"][word]
        e = torch.stack(
            [
                p["attention.score.v"]
                @ torch.tanh(linear("attention.score.query", h) + linear("attention.score.key", a))
                for a in features
            ]
        )
        alpha = e.exp() / e.exp().sum()
        if positions:
            z = features[positions[step]]
        elif model.config.attention == "hard" and model.config.inference_attention == "hard":
            z = features[int(alpha.argmax())]
        else:
            z = sum(alpha[i] * features[i] for i in range(len(features)))
        if model.config.context_gate:
            z = z / (1 + torch.exp(-linear("gate", h)))
        gates = p["cell.weight_ih_l0"] @ torch.cat([y, z]) + p["cell.bias_ih_l0"]
        i, f, g, o = (gates + p["cell.weight_hh_l0"] @ h + p["cell.bias_hh_l0"]).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        logits.append(linear("generator", y + linear("hidden_projection", h) + linear("context_projection", z)))
        attention.append(alpha)
    return torch.stack(logits), torch.stack(attention)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("attention", ["soft", "hard", "hard, soft at inference"])
def test_equals_a_naive_implementation_of_the_paper(gate: bool, attention: str) -> None:
    inference: Any = "hard" if attention == "hard" else "soft"
    kind: dict[str, Any] = {} if attention == "soft" else {"attention": "hard", "inference_attention": inference}
    model, batch = build_model(dataclasses.replace(SOFT, context_gate=gate, **kind)), build_batch()
    nll = uneven = torch.zeros(()).double()
    for number, caption in enumerate(CAPTIONS):
        logits, attention = naive(model, batch.features[number], caption)
        steps = len(caption) + 1
        nll = nll - logits.log_softmax(-1)[range(steps), [*caption, EOS]].sum()
        uneven = uneven + (1 - attention.sum(0)).square().sum()
        weights = model.compute_attention_maps(batch)[0].weights
        torch.testing.assert_close(weights[number, 0, :steps], attention, **EXACT)
        assert not weights[number, 0, steps:].any()
    loss = model.loss(batch)
    assert loss.count == batch.count == 11
    assert set(loss.parts) == {"nll", "doubly_stochastic"}
    torch.testing.assert_close(loss.parts["nll"], nll.detach(), **EXACT)
    torch.testing.assert_close(loss.parts["doubly_stochastic"], 0.3 * uneven.detach(), **EXACT)
    torch.testing.assert_close(loss.total, loss.parts["nll"], **EXACT)  # in eval mode; in training mode:
    if attention == "soft":
        total = model.train().loss(batch).total
        torch.testing.assert_close(total, nll + 0.3 * uneven, **EXACT)
        expected = gradients(model, nll + 0.3 * uneven)
        torch.testing.assert_close(gradients(model, total), expected, **EXACT)
        assert all(gradient.any() for gradient in expected)


def test_recorded_and_recomputed_weights_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel does not return weights, so they are computed after the loop.
    model, batch = build_model(SOFT).train(), build_batch()
    recorded = model.loss(batch)
    monkeypatch.setattr(captioner, "triton_unsupported_reason", lambda x: None)
    assert model._build_recorder(batch) is None
    recomputed = model.loss(batch)
    torch.testing.assert_close(recomputed.total, recorded.total, **EXACT)
    torch.testing.assert_close(gradients(model, recomputed.total), gradients(model, recorded.total), **EXACT)


def test_penalty_by_hand() -> None:
    # One image of two positions, two steps of (¾ ¼): sums 1½ and ½, penalty ¼ + ¼. The third step is padding.
    weights = torch.tensor([[[0.75, 0.25], [0.75, 0.25], [0.9, 0.1]], [[1, 0], [1, 0], [1, 0]]])
    counts = torch.tensor([[True, True, False], [False] * 3])
    assert captioner._doubly_stochastic_penalty(weights, counts) == 0.5


# ------------------------------------------------------------------------------------------ against itself


MODELS: dict[str, CaptionerConfig | TransformerConfig] = {
    "soft": SOFT,
    "plain": dataclasses.replace(SOFT, context_gate=False, doubly_stochastic_penalty=0.0),
    "hard": HARD,
    "expectation": dataclasses.replace(HARD, inference_attention="soft"),
    "transformer": TransformerConfig(
        width=6, num_heads=2, feed_forward_width=7, encoder_layers=1, decoder_layers=2, dropout=0.0
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    config = MODELS[request.param]
    if isinstance(config, CaptionerConfig):
        return build_model(config)
    torch.manual_seed(0)
    return CaptionTransformer(config, VOCABULARY, FEATURES).double().eval()


def run_steps(model: Any, batch: CaptionBatch) -> Tensor:
    state, logits = model.start(batch.features), []
    for ids in batch.target.ids.T:
        now, state = model.step(state, ids)
        logits.append(now)
    return torch.stack(logits, 1)


def test_padding_and_other_rows_do_not_matter(model: Any) -> None:
    batch = build_batch()
    alone = [
        CaptionBatch.from_sequences(batch.features[n : n + 1], GRID, [caption]) for n, caption in enumerate(CAPTIONS)
    ]
    total = sum(model.loss(example).total for example in alone)
    expected = gradients(model, total)
    wide = CaptionBatch.from_sequences(batch.features, GRID, CAPTIONS, min_length=11)
    wide.target.ids[~wide.target.valid_mask] = 7  # padding may hold any word
    for changed in (batch, wide, wide.with_static_shapes(), batch.with_static_shapes()):
        result = model.loss(changed).total
        torch.testing.assert_close(result, total, **EXACT)
        torch.testing.assert_close(gradients(model, result), expected, **EXACT)
    for example, result in zip(alone, model.compute_attention_maps(wide)[0].weights, strict=True):
        weights = model.compute_attention_maps(example)[0].weights[0]
        torch.testing.assert_close(result[:, : weights.shape[1]], weights, **EXACT)


def test_soft_penalty_ignores_padding() -> None:
    model = build_model(SOFT).train()
    totals = [model.loss(build_batch(min_length=to)).total for to in (0, 11)]
    torch.testing.assert_close(*totals, **EXACT)
    filled = build_batch()
    filled.labels[2] = IGNORE  # a padding row
    alone = build_batch(CAPTIONS[:2])
    torch.testing.assert_close(
        model.loss(filled).total, model.loss(dataclasses.replace(alone, features=filled.features[:2])).total
    )


def test_searches_over_images(model: Any) -> None:
    source = features_as_tokens(build_batch().features)
    with torch.inference_mode():
        [example] = {
            len(result)
            for result in (
                greedy_search(model, source, max_length=6),
                beam_search(model, source, max_length=6),
            )
        }
        assert example == 3
        best = beam_search(model, source, beam_size=VOCABULARY**2, max_length=2, length_penalty=0.0)
    # A beam that holds all captions of up to two words finds the most probable one.
    words = [4, 5, 6, 7, 8, 9, 10, 11, 12]
    captions = [[], *([a] for a in words), *([a, b] for a in words for b in words)]
    for row, [first, *_] in enumerate(best):
        features = source.ids[row : row + 1].expand(len(captions), -1, -1)
        batch = CaptionBatch.from_sequences(features, GRID, [list(caption) for caption in captions])
        log_p = run_steps(model, batch).log_softmax(-1)
        each = log_p.take_along_dim(batch.labels.clamp(min=0)[..., None], -1)[..., 0]
        totals = each.where(batch.labels != IGNORE, 0).sum(1)
        assert first.finished
        assert list(first.ids) == captions[int(totals.argmax())]
        assert first.logprob == pytest.approx(totals.max().item(), rel=1e-5)


def test_maps_equal_those_of_watch() -> None:
    model, batch = build_model(SOFT), build_batch(CAPTIONS[:1])
    with jumok.watch(model) as seen, torch.no_grad():
        run_steps(model, batch)
    assert len(seen) == 3
    assert {example.name for example in seen} == {"attention"}
    result = torch.cat([torch.as_tensor(example.weights(head=0)).reshape(1, -1) for example in seen])
    torch.testing.assert_close(
        result.double(), model.compute_attention_maps(batch)[0].weights[0, 0], rtol=1e-5, atol=1e-6
    )


def test_half_precision_features(model: Any) -> None:
    batch = build_batch()
    half = dataclasses.replace(batch, features=batch.features.half())
    exact = dataclasses.replace(batch, features=half.features.double())
    torch.testing.assert_close(model.loss(half).total, model.loss(exact).total, **EXACT)
    assert model.compute_attention_maps(half)[0].weights.dtype == torch.float64


@pytest.mark.parametrize("config", [SOFT, HARD], ids=["soft", "hard"])
def test_autocast_changes_the_loss_little(config: CaptionerConfig) -> None:
    model, batch = build_model(config).float().train(), build_batch()
    batch = dataclasses.replace(batch, features=batch.features.float())
    parts = []
    for low in (False, True):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model.loss(batch)
        loss.total.backward()
        assert loss.total.dtype == torch.float32
        parts.append(loss.parts["nll"].item())
    assert parts[1] == pytest.approx(parts[0], rel=0.2 if config is HARD else 0.02)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --------------------------------------------------------------------------------------- hard attention

TINY = dataclasses.replace(HARD, width=3, doubly_stochastic_penalty=0.0, entropy_bonus=0.0, soft_probability=0.0)


def tiny_batch(captions: int = 1) -> CaptionBatch:
    features = torch.randn(captions, 3, FEATURES, generator=torch.manual_seed(2)).double()
    return CaptionBatch.from_sequences(features, (1, 3), [[5]] * captions)


def nll_of(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).take_along_dim(labels[:, None], -1).sum()


def averages(model: Captioner, monkeypatch: pytest.MonkeyPatch, baseline: float) -> list[list[Tensor]]:
    """Over all nine samples s: the gradient of the mean of −log p(y | s), and the mean gradient of the loss.

    The first by autograd through p(s) of the naive model, the second from the loss with each sample.
    """
    batch = tiny_batch()
    mean: Any = 0.0
    learned: Any = [0.0] * len(list(model.parameters()))
    for positions in itertools.product(range(3), repeat=2):
        logits, attention = naive(model, batch.features[0], [5], positions)
        p = attention[0, positions[0]] * attention[1, positions[1]]
        mean = mean + p * nll_of(logits, batch.labels[0])
        draws = iter(positions)
        monkeypatch.setattr(captioner, "sample_positions", lambda weights, draws=draws: torch.tensor([[next(draws)]]))
        model.baseline.fill_(baseline)
        here = gradients(model, model.loss(batch).total)
        learned = [total + p.detach() * example for total, example in zip(learned, here, strict=True)]
    return [gradients(model, mean), learned]


@pytest.mark.parametrize("baseline", [0.0, -2.5])
def test_reinforce_is_unbiased(monkeypatch: pytest.MonkeyPatch, baseline: float) -> None:
    model = build_model(TINY).train()
    exact, learned = averages(model, monkeypatch, baseline)
    torch.testing.assert_close(learned, exact, **EXACT)
    scores = [exact[n] for n, (name, _) in enumerate(model.named_parameters()) if "attention" in name]
    assert all(gradient.abs().max() > 1e-4 for gradient in scores)
    # Without REINFORCE, attention gets gradients only through the gate and the next query.
    silent, learned = averages(
        build_model(dataclasses.replace(TINY, reinforce_loss=0.0)).train(), monkeypatch, baseline
    )
    assert max((a - b).abs().max() for a, b in zip(silent, learned, strict=True)) > 1e-2


def test_positions_are_sampled_by_probability() -> None:
    weights = torch.tensor([0.5, 0.3, 0.2, 0.0]).expand(20_000, 1, 4)
    torch.manual_seed(0)
    chosen = captioner.sample_positions(weights)
    assert chosen.shape == (20_000, 1)
    shares = chosen.flatten().bincount(minlength=4) / 20_000
    torch.testing.assert_close(shares, weights[0, 0], atol=0.012, rtol=0)  # over three standard deviations
    assert shares[3] == 0
    torch.manual_seed(0)
    assert torch.equal(captioner.sample_positions(weights), chosen)


def test_entropy_by_hand() -> None:
    weights = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], requires_grad=True)
    result = captioner.entropy(weights)
    torch.testing.assert_close(result, torch.tensor([math.log(2), 0.0]))
    result.sum().backward()
    assert weights.grad.isfinite().all()


def test_results_depend_on_the_seed() -> None:
    model, batch = build_model(HARD).train(), build_batch()
    totals = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.baseline.fill_(-1.0)
        totals.append(model.loss(batch).total)
    assert totals[0] == totals[1] != totals[2]


def test_soft_rows_equal_soft_attention() -> None:
    soft, hard_one = (
        build_model(
            dataclasses.replace(config, doubly_stochastic_penalty=0.4, entropy_bonus=0.0, soft_probability=1.0)
        ).train()
        for config in (SOFT, HARD)
    )
    losses = [model.loss(build_batch()) for model in (soft, hard_one)]
    torch.testing.assert_close(losses[1].total, losses[0].total, **EXACT)
    torch.testing.assert_close(gradients(hard_one, losses[1].total), gradients(soft, losses[0].total), **EXACT)
    assert hard_one.baseline.item() == pytest.approx(-math.log(VOCABULARY))  # nothing was sampled


def test_soft_probability_is_the_share_of_soft_rows() -> None:
    model = Captioner(dataclasses.replace(HARD, soft_probability=0.25), VOCABULARY, FEATURES)
    torch.manual_seed(0)
    draws = model._build_recorder(CaptionBatch.from_sequences(torch.zeros(4000, 1, FEATURES), (1, 1), [[]] * 4000))
    assert isinstance(draws, captioner.HardAttentionSampler)
    assert draws.sampled_rows.double().mean().item() == pytest.approx(0.75, abs=0.02)


def test_the_baseline_changes_in_training_only() -> None:
    model = build_model(dataclasses.replace(TINY, baseline_decay=0.75)).train()
    model.baseline.fill_(-4.0)
    torch.manual_seed(0)
    loss = model.loss(tiny_batch(3))
    mean = -loss.parts["nll"].item() / 6
    assert model.baseline.item() == pytest.approx(0.75 * -4.0 + 0.25 * mean)
    before = model.baseline.item()
    model.eval().loss(tiny_batch(3))
    model.compute_attention_maps(tiny_batch(3))
    assert model.baseline.item() == before
    assert "baseline" in model.state_dict()  # so that training resumes exactly


def test_the_parts_of_hard_attention_add_up() -> None:
    model = build_model(dataclasses.replace(HARD, entropy_bonus=0.2)).train()
    loss = model.loss(build_batch())
    assert set(loss.parts) == {"nll", "doubly_stochastic", "reinforce", "entropy"}
    torch.testing.assert_close(loss.total.detach(), sum(loss.parts.values()), **EXACT)
    assert -0.2 * math.log(6) * 11 < loss.parts["entropy"] < 0
    assert loss.parts["reinforce"] == 0  # it has only a gradient, tested above
    assert set(model.eval().loss(build_batch()).parts) == {"nll", "doubly_stochastic"}


# -------------------------------------------------------------------------------------------- it learns


def objects(count: int, seed: int) -> tuple[CaptionBatch, Tensor]:
    """Images of nine positions; one position holds one of four objects, whose name is the caption."""
    chance = torch.Generator().manual_seed(seed)
    positions, objects = (torch.randint(0, n, (count,), generator=chance) for n in (9, 4))
    features = torch.zeros(count, 9, 5)
    features[..., 4] = 1.0  # an empty position
    features[range(count), positions] = torch.eye(5)[objects]
    return CaptionBatch.from_sequences(features, (3, 3), [[4 + int(example)] for example in objects]), positions


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_learns_to_attend_to_named_objects(attention: Any) -> None:
    torch.manual_seed(0)
    config = CaptionerConfig(
        attention=attention,
        width=24,
        embedding_width=12,
        attention_width=16,
        doubly_stochastic_penalty=0.0,
        dropout=0.0,
        entropy_bonus=0.02,
    )
    model = Captioner(config, 8, 5)
    # The initial state could see the object in the mean of the positions: so it does not get the mean.
    for first in (model.init_hidden, model.init_cell):
        nn.init.zeros_(first[0].weight).requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(120 if attention == "soft" else 240):
        batch, _ = objects(64, seed=step)
        loss = model.loss(batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    model.eval()
    batch, positions = objects(97, seed=1_000_000)
    nll = model.loss(batch).parts["nll"].item() / batch.count
    assert nll < 0.05  # log 4 / 2 = 0.69 without attention
    attention = model.compute_attention_maps(batch)[0].weights[:, 0, 0].argmax(-1)
    assert (attention == positions).double().mean() > 0.97
    result = greedy_search(model, batch.source, max_length=3)
    assert [example.ids for example in result] == [(int(ids[1]),) for ids in batch.target.ids]


# ---------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("attention_width", -1),
        ("dropout", 1.0),
        ("label_smoothing", -0.1),
        ("baseline_decay", 1.0),
        ("soft_probability", 1.1),
        ("doubly_stochastic_penalty", float("nan")),
        ("entropy_bonus", -1.0),
    ],
)
def test_invalid_values_raise(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        dataclasses.replace(SOFT, **{field: value})


def test_recipe_keys_are_validated() -> None:
    adapter = TypeAdapter(CaptionerConfig)
    assert adapter.validate_python({"type": "captioner", "attention": "hard"}).attention == "hard"
    for wrong in ({"attention": "medium"}, {"witdh": 5}, {"inference_attention": "asleep"}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_invalid_batches_raise(model: Any) -> None:
    for shape in ((2, 6, 4), (2, 5), (0, 6, 5), (2, 0, 5)):
        with pytest.raises(ValueError, match="features have shape"):
            model.start(torch.zeros(shape))
    with pytest.raises(ValueError, match="one cell for each"):
        CaptionBatch.from_sequences(torch.zeros(1, 6, FEATURES), (2, 2), [[5]])
    with pytest.raises(ValueError, match="one caption per image"):
        CaptionBatch.from_sequences(torch.zeros(1, 6, FEATURES), (2, 3), [[5], [6]])


def test_packed_captions_raise() -> None:
    batch = build_batch()
    packed = dataclasses.replace(batch, target=Tokens.pack([[BOS, 5], [BOS], [BOS]]))
    with pytest.raises(ValueError, match="one caption per row"):
        build_model(SOFT).loss(packed)


def test_tying_embeddings_to_images_raises() -> None:
    with pytest.raises(ValueError, match="tie_embeddings='target'"):
        CaptionTransformer(TransformerConfig(tie_embeddings="all"), VOCABULARY, FEATURES)


def test_images_of_one_position(model: Any) -> None:
    batch = CaptionBatch.from_sequences(torch.ones(1, 1, FEATURES).double(), (1, 1), [[]])
    assert model.loss(batch).total.isfinite()
    weights = model.compute_attention_maps(batch)[0].weights
    torch.testing.assert_close(weights, torch.ones_like(weights))
    assert len(greedy_search(model, batch.source, max_length=2)) == 1


# --------------------------------------------------------------------------------------------- the batch


def test_static_shapes_share_a_graph_key() -> None:
    batch, other = (build_batch(captions, min_length=6) for captions in (CAPTIONS, [[4], [5], [6, 7]]))
    assert batch.graph_key is None
    assert batch.with_static_shapes().graph_key == other.with_static_shapes().graph_key is not None
    assert batch.with_static_shapes().graph_key != build_batch(CAPTIONS, min_length=7).with_static_shapes().graph_key
    there = batch.with_static_shapes().to("cpu")
    assert there.grid == GRID
    assert there.count == 11
    assert torch.equal(there.labels, batch.labels)


def test_batches_of_pixels() -> None:
    batch = CaptionBatch.from_sequences(torch.zeros(2, 3, 8, 6, dtype=torch.uint8), (8, 6), [[5], [6]])
    assert batch.has_pixels
    assert not build_batch().has_pixels
