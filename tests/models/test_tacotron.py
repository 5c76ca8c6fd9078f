"""Tacotron: against a naive implementation of the paper, against itself, and trained."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS, Tokens
from jumok.models.layers.style_tokens import StyleConfig
from jumok.models.tacotron import Tacotron, TacotronConfig, guided_attention_loss
from jumok.models.tacotron_decoder import forward_attention
from jumok.training.prefetch import map_tensors

pytestmark = pytest.mark.long


SYMBOLS, MELS, LINEAR = 13, 5, 11
EXACT = {"rtol": 1e-9, "atol": 1e-9}
TEXTS = [[7, 12, EOS], [4, 8, 11, 6, 10, EOS], [9, EOS]]
FRAMES = (7, 12, 2)
KINDS: list[dict[str, Any]] = [
    {"attention": attention, "forward_attention": forward}
    for attention in ("additive", "location-sensitive")
    for forward in (False, True)
]

TINY = TacotronConfig(
    n_mels=MELS,
    linear_bins=LINEAR,
    reduction_factor=3,
    embedding_width=7,
    encoder_width=3,
    conv_bank_size=4,
    highway_layers=1,
    prenet_widths=(6, 5),
    prenet_dropout=0.0,
    decoder_width=8,
    postnet_layers=2,
    postnet_width=6,
    attention_width=7,
    location_filters=3,
    location_kernel_size=5,
    guided_attention_loss=0.7,
    style=StyleConfig(num_tokens=3, num_heads=2, width=4, conv_channels=(2, 3)),
)


def perturb(model: nn.Module, by: float = 0.3) -> None:
    """Add noise, so that no bias is zero and no norm is the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            buffer.add_(torch.rand_like(buffer) if name.endswith("running_var") else torch.randn_like(buffer))


def build_model(config: TacotronConfig = TINY, seed: int = 0) -> Tacotron:
    torch.manual_seed(seed)
    model = Tacotron(config, SYMBOLS).double().eval()
    perturb(model)
    return model


def build_batch(rows: slice = slice(None), to: tuple[int, int] = (0, 0)) -> SpeechBatch:
    draw = torch.manual_seed(1)
    mels = [torch.randn(frames, MELS, generator=draw) for frames in FRAMES]
    linear = [torch.randn(frames, LINEAR, generator=draw) for frames in FRAMES]
    batch = SpeechBatch.from_sequences(TEXTS[rows], mels[rows], linear[rows], min_lengths=to)
    return dataclasses.replace(batch, mels=batch.mels.double(), linear_spectrograms=batch.linear_spectrograms.double())  # type: ignore[union-attr]


def with_nan(batch: SpeechBatch) -> SpeechBatch:
    """NaN in all padding."""
    padding = ~batch.mel_tokens.valid_mask[..., None]
    assert batch.linear_spectrograms is not None
    mels, linear = (x.masked_fill(padding, math.nan) for x in (batch.mels, batch.linear_spectrograms))
    return dataclasses.replace(batch, mels=mels, linear_spectrograms=linear)


def gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    results = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    assert all(g is not None for g in results), [n for n, g in zip(named, results, strict=True) if g is None]
    return dict(zip(named, results, strict=True))  # type: ignore[arg-type]


# ------------------------------------------------------------------------ against a naive implementation


def naive(model: Tacotron, states: Tensor, mels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mels ``(S r, M)``, stop logits and weights ``(S, L)`` of one utterance, step by step."""
    decoder, config = model.decoder, model.config
    p = dict(decoder.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0.0)

    def gru(name: str, x: Tensor, h: Tensor) -> Tensor:
        from_input, from_state = p[f"{name}.weight_ih_l0"] @ x, p[f"{name}.weight_hh_l0"] @ h
        from_input, from_state = from_input + p[f"{name}.bias_ih_l0"], from_state + p[f"{name}.bias_hh_l0"]
        (r, z, n), (state_r, state_z, state_n) = from_input.chunk(3), from_state.chunk(3)
        r, z = torch.sigmoid(r + state_r), torch.sigmoid(z + state_z)
        return (1 - z) * torch.tanh(n + r * state_n) + z * h

    r, length = config.reduction_factor, len(states)
    zeros = states.new_zeros
    h, c, decoder_states = (
        zeros(config.decoder_width),
        zeros(states.shape[1]),
        [zeros(config.decoder_width)] * config.decoder_layers,
    )
    alpha, total = zeros(length), zeros(length)
    if config.forward_attention:
        alpha[0] = 1.0
    output: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(-(-len(mels) // r)):
        x = mels[step * r - 1] if step else zeros(config.n_mels)
        for layer in range(2):
            x = torch.relu(linear(f"prenet.layers.{layer}", x))
        h = gru("attention_rnn", torch.cat([x, c]), h)
        e = []
        for n in range(length):
            inside = linear("attention.score.query", h) + linear("attention.score.key", states[n])
            if config.attention == "location-sensitive":
                kernel, half = p["attention.score.convolution.weight"], config.location_kernel_size // 2
                around = F.pad(torch.stack([alpha, total]), (half, half))[:, n : n + config.location_kernel_size]
                inside = inside + linear("attention.score.location", (kernel * around).sum((1, 2)))
            e.append(p["attention.score.v"] @ torch.tanh(inside))
        y = torch.stack(e).exp()
        y = y / y.sum()
        if config.forward_attention:
            y = torch.stack([y[n] * (alpha[n] + (alpha[n - 1] if n else 0.0)) for n in range(length)])
            y = y / y.sum()
        alpha, total = y, total + y
        c = sum(y[n] * states[n] for n in range(length))  # type: ignore[assignment]
        x = linear("rnn_projection", torch.cat([h, c]))
        for layer in range(config.decoder_layers):
            decoder_states[layer] = gru(f"decoder_rnns.{layer}", x, decoder_states[layer])
            x = x + decoder_states[layer]
        x = torch.cat([x, c])
        output.append((linear("mel_projection", x).view(r, -1), linear("stop_projection", x), alpha))
    mels, stops, weights = zip(*output, strict=True)
    return torch.cat(mels), torch.cat(stops), torch.stack(weights)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_naive_implementation_of_the_paper(kind: dict[str, Any]) -> None:
    model, batch = build_model(dataclasses.replace(TINY, postnet_layers=0, linear_bins=0, **kind)), build_batch()
    mel = stop = guided = torch.zeros(()).double()
    attention = model.compute_attention_maps(batch)[0].weights
    styles = model.encode_style(batch.mels, batch.mel_lengths)
    for number, (text, frames) in enumerate(zip(TEXTS, FRAMES, strict=True)):
        true = batch.mels[number, :frames]
        states = model._encode_text(Tokens.pad([text]), styles[number]).states[0]
        mels, stops, weights = naive(model, states, true)
        torch.testing.assert_close(attention[number, 0, : len(weights), : len(text)], weights, **EXACT)
        assert (attention[number, 0, len(weights) :] == 0).all()
        assert (attention[number, 0, :, len(text) :] == 0).all()
        mel = mel + (mels[:frames] - true).abs().mean(1).sum()
        p = torch.sigmoid(stops[:frames])
        stop = stop - (1 - p[:-1]).log().sum() - model.config.stop_positive_weight * p[-1].log()
        for frame in range(frames):
            step = frame // 3
            apart = torch.arange(len(text)).double() / len(text) - step / len(weights)
            guided = guided + 0.7 * (weights[step] * (1 - torch.exp(-(apart**2) / 0.08))).sum()
    loss = model.loss(batch)
    assert loss.count == sum(FRAMES)
    for name, expected in {"mel": mel, "stop": stop, "guided_attention": guided}.items():
        torch.testing.assert_close(loss.parts[name], expected, **EXACT, msg=name)
    torch.testing.assert_close(loss.total, mel + stop, **EXACT)
    torch.testing.assert_close(model.train().loss(batch).parts["guided_attention"] > 0, torch.tensor(True))


# ------------------------------------------------------------------------------------------- against itself


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_single_utterances(kind: dict[str, Any]) -> None:
    model = build_model(dataclasses.replace(TINY, **kind))
    whole = model.loss(build_batch())
    alone = [model.loss(build_batch(slice(row, row + 1))) for row in range(3)]
    torch.testing.assert_close(whole.total, sum(loss.total for loss in alone), **EXACT)
    assert list(whole.parts) == ["mel", "mel_before_postnet", "linear", "stop", "guided_attention"]
    for name, part in whole.parts.items():
        torch.testing.assert_close(part, sum(loss.parts[name] for loss in alone), **EXACT, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
def test_padding_does_not_matter(kind: dict[str, Any], training: bool) -> None:
    expected = []
    for batch in (
        build_batch(),
        with_nan(build_batch()),
        with_nan(build_batch(to=(9, 17))),
        build_batch().with_static_shapes(),
    ):
        model = build_model(dataclasses.replace(TINY, **kind)).train(training)
        loss = model.loss(batch)
        expected.append((loss.total, gradients(model, loss.total), dict(model.named_buffers())))
    for other in expected[1:]:
        torch.testing.assert_close(other, expected[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_alignment_loss_by_hand(kind: dict[str, Any]) -> None:
    model = build_model(dataclasses.replace(TINY, alignment_loss=0.3, **kind))
    places = [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5], [1, 1]]
    batch = build_batch(to=(0, 14))
    aligned = dataclasses.replace(batch, alignment=Tokens.pad(places, 14, fill=-1).ids)
    weights, expected = model.compute_attention_maps(batch)[0].weights[:, 0], 0.0
    for row, row_positions in enumerate(places):
        for frame, place in enumerate(row_positions):
            expected -= 0.3 * math.log(weights[row, frame // 3, place].item() + 1e-4)
    loss = model.loss(aligned)
    assert loss.parts["alignment"].item() == pytest.approx(expected)
    torch.testing.assert_close(loss.total, model.loss(batch).total, **EXACT)  # added in training only
    total = model.train().loss(aligned)
    torch.testing.assert_close(total.total.detach(), sum(total.parts.values()), **EXACT)
    assert (
        dataclasses.replace(batch.with_static_shapes(), alignment=aligned.alignment).graph_key
        != batch.with_static_shapes().graph_key
    )
    assert aligned.to("meta").alignment.is_meta  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="one symbol index per frame"):
        dataclasses.replace(batch, alignment=torch.zeros(3, 2))


def test_style_from_another_row() -> None:
    model, batch = build_model(), build_batch()
    assert model.style_tokens is not None
    styles = model.encode_style(batch.mels, batch.mel_lengths)
    turned = torch.tensor([1, 2, 0])
    prediction = model.predict_teacher_forced(dataclasses.replace(batch, style_reference=turned))
    torch.testing.assert_close(prediction, model.predict_teacher_forced(batch, style=styles[turned]), **EXACT)
    assert not torch.allclose(prediction, model.predict_teacher_forced(batch))
    assert (
        dataclasses.replace(batch.with_static_shapes(), style_reference=turned).graph_key
        != batch.with_static_shapes().graph_key
    )


def test_training_total_is_the_sum_of_its_parts() -> None:
    loss = build_model().train().loss(build_batch())
    torch.testing.assert_close(loss.total.detach(), sum(loss.parts.values()), **EXACT)
    loss = build_model().loss(build_batch())
    torch.testing.assert_close(loss.total.detach(), sum(loss.parts.values()) - loss.parts["guided_attention"], **EXACT)


@pytest.mark.parametrize("kind", KINDS)
def test_synthesis_equals_teacher_forcing_on_its_output(kind: dict[str, Any]) -> None:
    model = build_model(dataclasses.replace(TINY, style=None, postnet_layers=0, linear_bins=0, **kind))
    with torch.no_grad():
        model.decoder.stop_projection.bias.fill_(-99.0)  # never stops
    text = Tokens.pad(TEXTS)
    output = model.synthesize(text, max_frames=13)
    assert output.mel_lengths == (13, 13, 13)
    batch = SpeechBatch(text, output.mels, output.mel_lengths, sum(output.mel_lengths))
    torch.testing.assert_close(model.predict_teacher_forced(batch), output.mels, **EXACT)
    torch.testing.assert_close(model.compute_attention_maps(batch)[0].weights[:, 0], output.alignments, **EXACT)


def test_synthesis_in_a_batch_equals_synthesis_alone() -> None:
    style = torch.randn(3, 4).double()
    for seed in range(20):  # until some are truncated, and some are not
        model = build_model(seed=seed)
        with torch.no_grad():
            model.decoder.stop_projection.weight.mul_(3.0)
            model.decoder.stop_projection.bias.fill_(-1.0)
        output = model.synthesize(Tokens.pad(TEXTS), style=style, max_frames=10)
        if any(output.truncated) and not all(output.truncated):
            break
    assert output.linear_spectrograms is not None
    assert any(output.truncated) != all(output.truncated)
    for row, text in enumerate(TEXTS):
        single = model.synthesize(Tokens.pad([text]), style=style[row], max_frames=10)
        frames, steps = output.mel_lengths[row], -(-output.mel_lengths[row] // 3)
        assert output.step_lengths[row] == steps
        assert single.mel_lengths == (frames,)
        assert single.truncated == (output.truncated[row],)
        assert single.linear_spectrograms is not None
        assert frames == 10 if output.truncated[row] else frames <= 10
        torch.testing.assert_close(output.mels[row, :frames], single.mels[0], **EXACT)
        torch.testing.assert_close(output.linear_spectrograms[row, :frames], single.linear_spectrograms[0], **EXACT)
        torch.testing.assert_close(output.alignments[row, :steps, : len(text)], single.alignments[0], **EXACT)
        for behind in (
            output.mels[row, frames:],
            output.linear_spectrograms[row, frames:],
            output.alignments[row, steps:],
        ):
            assert (behind == 0).all()


def test_synthesis_without_stop_is_truncated() -> None:
    model = build_model(dataclasses.replace(TINY, linear_bins=0))
    with torch.no_grad():
        model.decoder.stop_projection.weight.zero_()
        model.decoder.stop_projection.bias.fill_(-9.0)
    output = model.synthesize(Tokens.pad(TEXTS), max_frames=7)
    assert output.mel_lengths == (7, 7, 7)
    assert output.truncated == (True, True, True)
    assert output.mels.shape == (3, 7, MELS)
    assert output.alignments.shape == (3, 3, 6)
    assert output.linear_spectrograms is None
    with torch.no_grad():
        model.decoder.stop_projection.bias.copy_(torch.tensor([-9.0, 9.0, 9.0]))  # at the second frame of a step
    output = model.synthesize(Tokens.pad(TEXTS), max_frames=7)
    assert output.mel_lengths == (2, 2, 2)
    assert output.truncated == (False, False, False)
    assert model.synthesize(Tokens.pad(TEXTS), max_frames=1).truncated == (True, True, True)


def test_synthesis_is_random_only_with_prenet_dropout_at_inference() -> None:
    text = Tokens.pad(TEXTS)
    for drops in (False, True):
        model = build_model(dataclasses.replace(TINY, prenet_dropout=0.5, prenet_dropout_at_inference=drops))
        first, second = (model.synthesize(text, max_frames=9).mels for _ in range(2))
        assert (first.shape == second.shape and torch.equal(first, second)) is not drops


@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronization_with_the_host(kind: dict[str, Any]) -> None:
    # The meta device has no values: reading one fails.
    model = Tacotron(dataclasses.replace(TINY, **kind), SYMBOLS).double().to("meta")
    loss = model.loss(build_batch().with_static_shapes().to("meta"))
    loss.total.backward()
    assert loss.total.shape == ()


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind: dict[str, Any]) -> None:
    model, batch = build_model(dataclasses.replace(TINY, **kind)).float(), build_batch()
    assert batch.linear_spectrograms is not None
    batch = dataclasses.replace(batch, mels=batch.mels.float(), linear_spectrograms=batch.linear_spectrograms.float())
    for training in (False, True):
        model.train(training)
        exact = model.loss(batch).total
        with torch.autocast("cpu", torch.bfloat16):
            total = model.loss(batch).total
            output = model.synthesize(batch.text, max_frames=9)
        assert total.dtype == torch.float32
        assert output.mels.dtype == torch.float32
        assert abs(total - exact) < 0.05 * exact
        assert all(g.isfinite().all() for g in gradients(model, total).values())


def test_invalid_inputs_raise() -> None:
    model, batch = build_model(), build_batch()
    with pytest.raises(ValueError, match="n_mels=5"):
        model.loss(dataclasses.replace(batch, mels=batch.mels[..., :4]))
    with pytest.raises(ValueError, match="11 frequencies, but the batch has no linear spectrograms"):
        model.loss(dataclasses.replace(batch, linear_spectrograms=None))
    with pytest.raises(ValueError, match="packed"):
        model.synthesize(Tokens.pack(TEXTS), max_frames=3)
    with pytest.raises(ValueError, match="lengths"):
        model.synthesize(Tokens.pad([[3], []]), max_frames=3)
    with pytest.raises(ValueError, match="max_frames=0"):
        model.synthesize(batch.text, max_frames=0)
    with pytest.raises(ValueError, match="style has shape"):
        model.synthesize(batch.text, style=torch.zeros(2, 4), max_frames=3)
    plain = build_model(dataclasses.replace(TINY, style=None))
    with pytest.raises(ValueError, match="no style tokens"):
        plain.synthesize(batch.text, style=torch.zeros(3, 4), max_frames=3)
    with pytest.raises(ValueError, match="no style tokens"):
        plain.mix_style(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_mels", 0),
        ("reduction_factor", 0),
        ("prenet_dropout", 1.0),
        ("location_kernel_size", 4),
        ("prenet_widths", (3, 0)),
        ("guided_attention_loss", -1.0),
        ("guided_attention_sigma", 0.0),
        ("linear_bins", -1),
        ("style", {"num_heads": 3, "width": 8}),
        ("style", {"conv_channels": ()}),
        ("widht", 8),
    ],
)
def test_invalid_configs_raise(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        TypeAdapter(TacotronConfig).validate_python({field: value})
    from_state = dataclasses.asdict(TINY)
    assert TypeAdapter(TacotronConfig).validate_python(from_state) == TINY


# ------------------------------------------------------------------------------------------------ the batch


def test_static_shapes_of_speech_batches() -> None:
    first, second = build_batch(to=(8, 16)), build_batch(slice(0, 3), to=(8, 16))
    assert first.graph_key is None
    assert (
        first.with_static_shapes().graph_key
        == second.with_static_shapes().graph_key
        != build_batch(to=(8, 17)).with_static_shapes().graph_key
    )
    alike = first.with_static_shapes()
    assert alike.device_mel_lengths is not None
    assert alike.device_mel_lengths.tolist() == list(FRAMES)
    assert torch.equal(alike.mel_tokens.valid_mask, first.mel_tokens.valid_mask)
    assert map_tensors(alike, torch.clone).graph_key == alike.graph_key  # as a recorded step copies a batch
    assert alike.to("meta").device_mel_lengths.is_meta
    assert alike.to("meta").mels.is_meta
    with pytest.raises(ValueError, match="from 1 to 12"):
        dataclasses.replace(first, mels=first.mels[:, :12], linear_spectrograms=None, mel_lengths=(7, 13, 2))
    with pytest.raises(ValueError, match="2 mel_lengths"):
        dataclasses.replace(first, mel_lengths=(7, 12))
    with pytest.raises(ValueError, match="linear_spectrograms have"):
        dataclasses.replace(first, linear_spectrograms=torch.zeros(3, 4, 5))


# ------------------------------------------------------------------------------------- options of attention


def test_guided_attention_by_hand() -> None:
    # Three steps and four symbols of five: the last step and the last symbol are padding.
    weights = torch.zeros(1, 3, 5)
    weights[0, 0, 0] = 1.0
    weights[0, 1, 3] = 0.5
    weights[0, 1, 2] = 0.5
    weights[0, 2, 0] = 1.0
    cost = guided_attention_loss(weights, torch.tensor([2]), torch.tensor([4]), sigma=0.5)
    expected = [
        0.0,
        0.5 * (1 - math.exp(-(0.25**2) / 0.5)),
        0.0,
    ]  # symbol 3 of 4 is a quarter from step 1 of 2
    torch.testing.assert_close(cost, torch.tensor([expected]))


def test_forward_attention_moves_by_at_most_one_symbol() -> None:
    torch.manual_seed(2)
    alpha = torch.eye(7)[:1].double()
    for step in range(1, 12):
        y = torch.randn(1, 7).double().mul(4).softmax(-1)
        before, alpha = alpha, forward_attention(y, alpha)
        torch.testing.assert_close(alpha.sum(), torch.tensor(1.0).double())
        assert (alpha[0, step + 1 :] == 0).all()
        expected = y * torch.stack([before[0, n] + (before[0, n - 1] if n else 0.0) for n in range(7)])
        torch.testing.assert_close(alpha, expected / expected.sum())
    sure = forward_attention(torch.full((1, 7), 1 / 7), torch.eye(7)[3:4])
    assert torch.equal(sure, torch.tensor([[0, 0, 0, 0.5, 0.5, 0, 0]]))
    # If no reachable symbol has weight, the alignment stays, and gradients are finite.
    y = torch.eye(7)[:1].requires_grad_()
    lost = forward_attention(y, torch.eye(7)[3:4])
    assert torch.equal(lost, torch.eye(7)[3:4])
    assert torch.autograd.grad(lost.sum(), y)[0].isfinite().all()


def test_forward_attention_skips_no_symbol() -> None:
    model = build_model(dataclasses.replace(TINY, forward_attention=True))
    (weights, _) = (results.weights for results in model.compute_attention_maps(build_batch()))
    for step in range(4):
        assert (weights[1, 0, step, step + 2 :] == 0).all()
    torch.testing.assert_close(weights[1, 0].sum(-1), torch.ones(4).double())


# ---------------------------------------------------------------------------------------------- it learns


def test_overfits_two_utterances() -> None:
    torch.manual_seed(3)
    config = TacotronConfig(
        n_mels=MELS,
        linear_bins=3,
        reduction_factor=2,
        embedding_width=16,
        encoder_width=16,
        conv_bank_size=3,
        highway_layers=1,
        prenet_widths=(32, 16),
        prenet_dropout=0.1,
        decoder_width=32,
        decoder_layers=1,
        postnet_layers=2,
        postnet_width=16,
        attention_width=16,
        location_filters=4,
        location_kernel_size=5,
        guided_attention_loss=1.0,
    )
    sounds = [torch.randn(number, MELS).repeat_interleave(3, 0) for number in (3, 4)]
    sounds[1] = sounds[1][:11]  # not a multiple of the reduction factor
    batch = SpeechBatch.from_sequences([[5, 6, EOS], [7, 5, 8, EOS]], sounds, [sound[:, :3] for sound in sounds])
    assert batch.linear_spectrograms is not None
    model = Tacotron(config, SYMBOLS).train()
    optimizer = torch.optim.Adam(model.parameters())
    steps = 120
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / steps)
        optimizer.zero_grad()
        loss = model.loss(batch)
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    output = model.eval().synthesize(batch.text, max_frames=30)
    assert output.mel_lengths == (9, 11)
    assert output.truncated == (False, False)
    assert (output.mels - batch.mels).abs().mean() < 0.1
    assert output.linear_spectrograms is not None
    assert (output.linear_spectrograms - batch.linear_spectrograms).abs().mean() < 0.15
    assert output.alignments[1, :6].argmax(-1).diff().min() >= 0  # monotonic
