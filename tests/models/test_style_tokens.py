"""Style tokens: what a style is made of, whichever way it comes."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from jumok.batches.speech import SpeechBatch, frames_as_tokens
from jumok.models.layers.style_tokens import StyleConfig, StyleTokens
from jumok.models.tacotron import Tacotron, TacotronConfig

pytestmark = pytest.mark.long


MELS, TOKENS, HEADS, WIDTH = 5, 7, 2, 6
FRAMES = (11, 3, 1)
CONFIG = StyleConfig(num_tokens=TOKENS, num_heads=HEADS, width=WIDTH, conv_channels=(2, 3))
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def made() -> StyleTokens:
    torch.manual_seed(0)
    model = StyleTokens(CONFIG, MELS).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        for norm in model.reference_encoder.norms:
            norm.running_mean.add_(torch.randn_like(norm.running_mean))
    return model


def sounds() -> Tensor:
    return torch.randn(3, 11, MELS, generator=torch.manual_seed(1)).double()


def test_init_scale_makes_styles_differ() -> None:
    def spread(eager: bool) -> Tensor:
        torch.manual_seed(0)
        config = StyleConfig(num_tokens=12, num_heads=4, width=128, conv_channels=(8, 8), large_init=eager)
        model = StyleTokens(config, MELS)
        return model.weights(sounds().float(), frames_as_tokens(sounds(), FRAMES)).std(0).mean()

    assert spread(True) > 5 * spread(False)


def test_reference_encoder_is_convolutions_and_a_gru() -> None:
    model = made().reference_encoder
    x = sounds()[:1, None]
    for convolution, norm in zip(model.convolutions, model.norms, strict=True):
        plain = nn.BatchNorm2d(len(norm.running_mean)).double().eval()
        plain.load_state_dict(
            {
                "weight": norm.weight,
                "bias": norm.bias,
                "running_mean": norm.running_mean,
                "running_var": norm.running_var,
                "num_batches_tracked": torch.tensor(0),
            }
        )
        x = plain(convolution(x)).relu()
    assert x.shape == (1, 3, 3, 2)  # 11 frames are 6, then 3; 5 mels are 3, then 2
    _, last = model.rnn(x.transpose(1, 2).flatten(2))
    torch.testing.assert_close(model(sounds()[:1], frames_as_tokens(sounds()[:1], [11])), last[0], **EXACT)


def test_style_is_the_weighted_sum_of_tokens() -> None:
    model, mels = made(), sounds()
    frames = frames_as_tokens(mels, FRAMES)
    weights = model.weights(mels, frames)
    assert weights.shape == (3, HEADS, TOKENS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, HEADS).double())
    torch.testing.assert_close(model(mels, frames), model.mix(weights), **EXACT)


def test_one_token_gives_its_value() -> None:
    model = made()
    projected = model.attention.project_source.weight[WIDTH:]  # keys come first, then values
    for number, value in enumerate(model.compute_token_styles()):
        by_hand = model.attention.merge.weight @ (projected @ torch.tanh(model.tokens[number]))
        chosen = torch.zeros(1, TOKENS).double()
        chosen[0, number] = 1.0
        torch.testing.assert_close(value, by_hand, **EXACT)
        torch.testing.assert_close(model.mix(chosen)[0], value, **EXACT)
        torch.testing.assert_close(model.mix(0.4 * chosen)[0], 0.4 * value, **EXACT)


def test_mixing_is_linear() -> None:
    model = made()
    a, b = torch.randn(2, 4, HEADS, TOKENS).double()
    torch.testing.assert_close(model.mix(2 * a - 3 * b), 2 * model.mix(a) - 3 * model.mix(b), **EXACT)
    alike = torch.randn(4, TOKENS).double()
    torch.testing.assert_close(model.mix(alike), alike @ model.compute_token_styles(), **EXACT)
    assert (model.mix(torch.zeros(2, TOKENS).double()) == 0).all()


@pytest.mark.parametrize("training", [False, True])
def test_gradients_reach_all_parameters_but_not_padding(training: bool) -> None:
    result = []
    for fill, counts in ((0.0, None), (math.nan, None), (math.nan, torch.tensor(FRAMES))):
        model, mels = made().train(training), sounds()
        real = frames_as_tokens(mels, FRAMES).valid_mask
        mels = mels.masked_fill(~real[..., None], fill).requires_grad_()
        styles = model(mels, frames_as_tokens(mels, FRAMES, counts))
        gradients = torch.autograd.grad(styles.square().sum(), [mels, *model.parameters()])
        assert all(g.isfinite().all() for g in gradients)
        assert (gradients[0][~real] == 0).all()
        assert model.tokens.grad is None
        assert gradients[1].shape == (TOKENS, WIDTH // HEADS)
        assert (gradients[1].abs().sum(1) > 0).all(), "a token without a gradient"
        result.append((styles, gradients))
    torch.testing.assert_close(result[1], result[0], **EXACT)
    torch.testing.assert_close(result[2], result[0], rtol=1e-7, atol=1e-9)


def test_batches_equal_single_sounds() -> None:
    model, mels = made(), sounds()
    together = model(mels, frames_as_tokens(mels, FRAMES))
    for row, frames in enumerate(FRAMES):
        own = mels[row : row + 1, :frames]
        torch.testing.assert_close(model(own, frames_as_tokens(own, [frames])), together[row : row + 1], **EXACT)


def test_invalid_inputs_raise() -> None:
    for weights in (torch.zeros(TOKENS), torch.zeros(1, TOKENS + 1), torch.zeros(1, HEADS + 1, TOKENS)):
        with pytest.raises(ValueError, match="weights have shape"):
            made().mix(weights.double())


def test_synthesis_uses_the_given_style() -> None:
    torch.manual_seed(0)
    config = TacotronConfig(
        n_mels=MELS,
        embedding_width=7,
        encoder_width=3,
        conv_bank_size=2,
        decoder_width=8,
        postnet_layers=0,
        style=CONFIG,
    )
    model = Tacotron(config, 13).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.decoder.stop_projection.bias.fill_(-99.0)
    mels = sounds()
    batch = SpeechBatch.from_sequences([[5, 6, 3], [7, 3], [8, 3]], list(mels))
    batch = dataclasses.replace(batch, mels=mels)
    own = model.encode_style(mels, batch.mel_lengths)
    torch.testing.assert_close(own, made_of(model, mels), **EXACT)
    torch.testing.assert_close(
        model.predict_teacher_forced(batch), model.predict_teacher_forced(batch, style=own), **EXACT
    )
    assert not torch.allclose(
        model.predict_teacher_forced(batch), model.predict_teacher_forced(batch, style=own.roll(1, 0))
    )
    uniform = model.mix_style(torch.full((1, TOKENS), 1 / TOKENS, dtype=torch.float64))
    output = model.synthesize(batch.text, max_frames=5)  # nothing was learned yet, so the usual style is of all tokens
    torch.testing.assert_close(output.mels, model.synthesize(batch.text, style=uniform, max_frames=5).mels)
    token = model.mix_style(torch.eye(TOKENS).double()[:1])
    assert not torch.allclose(output.mels, model.synthesize(batch.text, style=token, max_frames=5).mels)
    text, tokens = model.compute_attention_maps(batch)
    assert text.name in dict(model.named_modules())
    assert tokens.name in dict(model.named_modules())
    assert tokens.weights.shape == (3, HEADS, 1, TOKENS)


def made_of(model: Tacotron, mels: Tensor) -> Tensor:
    assert model.style_tokens is not None
    return model.style_tokens(mels, frames_as_tokens(mels, (11, 11, 11)))  # type: ignore[no-any-return]


def test_default_style_is_that_of_the_sound_nearest_to_the_mean() -> None:
    model = made()
    frames = frames_as_tokens(sounds(), FRAMES)
    model.train()
    before = model.mean_weights.clone()
    model(sounds(), frames)
    norms = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in model.reference_encoder.norms]
    weights = model.weights(sounds(), frames).detach()
    for norm, (mean, variance) in zip(model.reference_encoder.norms, norms, strict=True):
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
    counted = (weights * torch.tensor(FRAMES)[:, None, None]).sum(0) / sum(FRAMES)
    torch.testing.assert_close(model.mean_weights[0], 0.99 * before[0] + 0.01 * counted, **EXACT)
    for _ in range(600):
        model(sounds(), frames)
    torch.testing.assert_close(model.mean_weights[0], counted, rtol=1e-2, atol=1e-2)
    apart = (weights - model.mean_weights).abs().sum((1, 2))
    assert apart[:2].argmin() == apart.argmin() or FRAMES[int(apart.argmin())] == 1
    torch.testing.assert_close(model.default_weights[0], weights[int(apart[:2].argmin())], **EXACT)
    model.eval()
    kept = model.default_weights.clone()
    model(sounds(), frames)
    assert torch.equal(model.default_weights, kept)
