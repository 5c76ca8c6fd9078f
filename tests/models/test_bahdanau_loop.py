"""The loop of Bahdanau's decoder as one autograd function, compared with the plain loop over the steps."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import jumok
from jumok.attention import masks
from jumok.models import seq2seq
from jumok.models.layers.bahdanau_loop import run_bahdanau_loop
from jumok.models.seq2seq import Seq2SeqConfig, Seq2SeqDecoder, Seq2SeqState

B, T, S, E, W = 3, 5, 7, 2, 11
CONFIG = Seq2SeqConfig(width=W, embedding_width=E, dropout=0.0)


def build_decoder(config: Seq2SeqConfig = CONFIG, **options: Any) -> tuple[Seq2SeqDecoder, list[Tensor]]:
    """A decoder with larger weights than initial ones, and its inputs: embeddings, annotations, first state."""
    decoder = Seq2SeqDecoder(config).to(**options)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    shapes = (B, T, E), (B, S, config.annotation_width), (B, W)
    return decoder, [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def decode(decoder: Seq2SeqDecoder, inputs: list[Tensor], lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    """States, readouts and the final state."""
    embeddings, annotations, first_state = inputs
    mask = None
    if lengths is not None:
        valid_mask = torch.arange(S, device=lengths.device) < lengths[:, None]
        annotations, mask = annotations * valid_mask[..., None], masks.tensor(valid_mask[:, None])
    assert decoder.attention is not None
    memory = decoder.attention.prepare(annotations, mask, lengths)
    states, readouts, final = decoder(embeddings, Seq2SeqState((first_state[None],), memory))
    return states, readouts, final.hidden[0]


def decode_and_differentiate(
    decoder: Seq2SeqDecoder, inputs: list[Tensor], lengths: Tensor | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    outputs = decode(decoder, inputs, lengths)
    leaves = [x for x in (*inputs, *decoder.parameters()) if x.requires_grad]
    weights = [torch.linspace(-1, 1, x.numel()).to(x).view_as(x) for x in outputs]
    return outputs, torch.autograd.grad(outputs, leaves, weights)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per call of the fused loop."""
    calls: list[Any] = []

    def count(*args: Any) -> Any:
        calls.append(args)
        return run_bahdanau_loop(*args)

    monkeypatch.setattr(seq2seq, "run_bahdanau_loop", count)
    return calls


@pytest.mark.parametrize("lengths", [None, [S, 1, 4]], ids=["unpadded", "padded"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_equal_those_of_the_plain_loop(
    device: str, dtype: torch.dtype, lengths: list[int] | None, fused_calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, inputs = build_decoder(device=device, dtype=dtype)
    source_lengths = None if lengths is None else torch.tensor(lengths, device=device)
    outputs, gradients = decode_and_differentiate(decoder, inputs, source_lengths)
    assert len(fused_calls) == (device == "cpu" or dtype == torch.float32)  # the kernels have no float64
    monkeypatch.setattr(seq2seq, "can_run_bahdanau_loop", lambda *_: False)
    plain_outputs, plain_gradients = decode_and_differentiate(decoder, inputs, source_lengths)
    for output, plain_output in zip(outputs, plain_outputs, strict=True):
        assert output.equal(plain_output)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(gradients, plain_gradients, **tolerance)


class _Decode(nn.Module):
    def __init__(self, decoder: Seq2SeqDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return decode(self.decoder, list(inputs), torch.tensor([S, 1, 4]))


def test_gradients_equal_finite_differences() -> None:
    decoder, inputs = build_decoder(dtype=torch.float64)
    names, parameters = zip(*_Decode(decoder).named_parameters(), strict=True)

    def run(*tensors: Tensor) -> Any:
        return functional_call(_Decode(decoder), dict(zip(names, tensors[3:], strict=True)), tensors[:3])

    assert torch.autograd.gradcheck(run, (*inputs, *parameters), fast_mode=True)


def test_frozen_parameters_and_inputs_get_no_gradient(fused_calls: list[Any]) -> None:
    decoder, inputs = build_decoder(dtype=torch.float64)
    expected = decode_and_differentiate(decoder, inputs)[1][0]
    decoder.requires_grad_(False)
    gradients = decode_and_differentiate(decoder, [inputs[0], *(x.detach() for x in inputs[1:])])[1]
    torch.testing.assert_close(gradients, (expected,))
    assert len(fused_calls) == 2


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    decoder, inputs = build_decoder(dtype=torch.float64)
    total = decode(decoder, inputs)[1].sum()
    first, second = (torch.autograd.grad(total, inputs, retain_graph=True) for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_raises() -> None:
    decoder, inputs = build_decoder()
    with pytest.raises(RuntimeError, match="differentiable once only"):
        decode(decoder, inputs)[0].sum().backward(create_graph=True)


def test_buffers_are_freed_with_the_graph() -> None:
    decoder, inputs = build_decoder()
    gc.disable()
    try:
        outputs = decode(decoder, inputs)
        outputs[1].sum().backward()
        references = [weakref.ref(x) for x in outputs]
        del outputs
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "changes",
    [{"cell": "lstm"}, {"num_layers": 2}, {"attention": "local-m"}, {"attention_score": "general"}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_decoders_run_the_plain_loop(changes: dict[str, Any], fused_calls: list[Any]) -> None:
    config = Seq2SeqConfig(width=W, embedding_width=E, **changes)
    decoder, (embeddings, annotations, first_state) = build_decoder(config)
    hidden = (first_state.expand(config.num_layers, B, W),) * (2 if config.cell == "lstm" else 1)
    assert decoder.attention is not None
    decoder(embeddings, Seq2SeqState(hidden, decoder.attention.prepare(annotations)))
    assert not fused_calls


def test_observers_and_hooks_see_every_step(fused_calls: list[Any]) -> None:
    decoder, inputs = build_decoder()
    with jumok.watch(decoder) as captures:
        watched = decode(decoder, inputs)[1]
    assert len(captures) == 1
    assert not fused_calls

    steps: list[Any] = []
    assert decoder.attention is not None
    handle = decoder.attention.register_forward_hook(lambda *_: steps.append(1))
    hooked = decode(decoder, inputs)[1]
    handle.remove()
    assert len(steps) == T
    assert not fused_calls

    assert decode(decoder, inputs)[1].equal(watched)
    assert hooked.equal(watched)
    assert len(fused_calls) == 1
    with torch.no_grad():
        assert decode(decoder, inputs)[1].equal(watched)
    assert len(fused_calls) == 1
