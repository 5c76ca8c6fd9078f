"""Gradients by CUDA graphs, one for each form of batch: the same as launched; and without a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from jumok.batches.tokens import Seq2SeqBatch
from jumok.errors import InputError
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig
from jumok.training import TrainConfig, cuda_graphs, learner
from jumok.training.cuda_graphs import CudaGraphGradients
from jumok.training.distributed import DistributedRanks
from jumok.training.learner import Learner, should_compile
from jumok.training.prefetch import iter_step_batches

pytestmark = pytest.mark.long


WORDS = 23
CPU = torch.device("cpu")
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "bahdanau": (Seq2Seq, Seq2SeqConfig(width=16, embedding_width=8, dropout=0.0)),
    "luong": (
        Seq2Seq,
        Seq2SeqConfig(
            cell="lstm", num_layers=2, width=16, embedding_width=8, dropout=0.0,
            attention_score="general", attention_query="current",
            readout="tanh",
        ),
    ),
    "convolutional": (ConvolutionalSeq2Seq, ConvolutionalConfig(embedding_width=8, width=16, dropout=0.0)),
    "transformer": (
        Transformer,
        TransformerConfig(
            width=32, num_heads=2, feed_forward_width=16, encoder_layers=2, decoder_layers=2, dropout=0.0
        ),
    ),
}  # fmt: skip


def batch(seed: int, rows: int = 3, *, packed: bool = False, longest: int = 7) -> Seq2SeqBatch:
    """Sentences of many lengths, the first of them always the longest."""
    chance = torch.Generator().manual_seed(seed)

    def sentences() -> list[list[int]]:
        lengths = [longest, *torch.randint(1, longest, (rows - 1,), generator=chance).tolist()]
        return [torch.randint(4, WORDS, (n,), generator=chance).tolist() for n in lengths]

    if not packed:
        return Seq2SeqBatch.from_sequences(sentences(), sentences()).with_static_shapes()
    whole = Seq2SeqBatch.from_sequences(
        sentences(), sentences(), packed=True, min_lengths=((longest + 1) * rows + 1,) * 2
    )
    source, target = (replace(side, max_length=32) for side in (whole.source, whole.target))
    return replace(whole, source=source, target=target)


def model(name: str = "bahdanau") -> nn.Module:
    torch.manual_seed(3)
    kind, config = MODELS[name]
    return kind(config, WORDS, WORDS)


def build_step(of: nn.Module, low: bool = False) -> Callable[[Seq2SeqBatch, Tensor], Tensor]:
    def run(batch: Seq2SeqBatch, scale: Tensor) -> Tensor:
        with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=low):
            total = of.loss(batch).total  # type: ignore[operator]
        (total * scale).backward()
        return total.detach()

    return run


def plain(of: nn.Module, batch: Seq2SeqBatch, low: bool = False) -> tuple[Tensor, list[Tensor]]:
    """What should be found: the loss, and its gradients a label."""
    of.zero_grad()
    device = next(of.parameters()).device
    value = build_step(of, low)(batch.to(device), torch.tensor(1 / batch.count, device=device))
    return value, gradients_of(of)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def check(network: nn.Module, gradients: CudaGraphGradients[Seq2SeqBatch], batches: list[Seq2SeqBatch]) -> None:
    """Value and gradients of each batch, whatever was in ``grad`` before, while the weights change."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for number, each in enumerate(batches):
        value, right = plain(network, each)
        torch.testing.assert_close(gradients(each, 1 / each.count), value)
        torch.testing.assert_close(gradients_of(network), right)
        optimizer.step()
        if number % 2:
            optimizer.zero_grad()


def test_without_a_gpu_no_graphs_are_used() -> None:
    network = model()
    check(
        network, CudaGraphGradients(build_step(network), network.parameters(), CPU), [batch(seed) for seed in range(4)]
    )


@pytest.mark.parametrize("name", MODELS)
def test_each_graph_key_has_a_graph_from_its_second_batch_on(name: str, pretended: list[str]) -> None:
    network = model(name)
    gradients = CudaGraphGradients(build_step(network), network.parameters(), CPU)
    packed = name == "transformer"
    batch_list = [batch(seed, rows, packed=packed) for rows in (3, 2) for seed in range(4)]
    check(network, gradients, batch_list)
    assert pretended == ["recorded", *["replayed"] * 3] * 2


def test_batches_without_a_graph_key_run_without_graphs(pretended: list[str]) -> None:
    network = model()
    uneven = [Seq2SeqBatch.from_sequences([[5, 6], [7]], [[8], [9, 10]])] * 3
    assert uneven[0].graph_key is None
    check(network, CudaGraphGradients(build_step(network), network.parameters(), CPU), uneven)
    assert not pretended


def test_keys_beyond_the_limit_run_without_graphs(pretended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 1)
    network = model()
    batch_list = [batch(seed, rows) for seed in range(3) for rows in (3, 2)]
    check(network, CudaGraphGradients(build_step(network), network.parameters(), CPU), batch_list)
    assert pretended.count("recorded") == 1


def test_a_failed_capture_is_reported_and_graphs_are_disabled(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore words")

    monkeypatch.setattr(cuda_graphs._GraphRecorder, "capture", refused)
    network = model()
    gradients = CudaGraphGradients(build_step(network), network.parameters(), CPU)
    check(network, gradients, [batch(seed) for seed in range(4)])
    assert gradients.capture_error == "operation not permitted when stream is capturing"


def test_returned_losses_are_not_overwritten(pretended: list[str]) -> None:
    network = model()
    gradients = CudaGraphGradients(build_step(network), network.parameters(), CPU)
    gradients(batch(0), 1.0)
    first = gradients(batch(1), 1.0)
    before = first.clone()
    gradients(batch(2), 1.0)
    assert torch.equal(first, before)


def test_frozen_parameters_get_no_gradient(pretended: list[str]) -> None:
    network: Any = model()
    network.source_embedding.requires_grad_(False)
    gradients = CudaGraphGradients(build_step(network), network.parameters(), CPU)
    for seed in range(3):
        gradients(batch(seed), 1.0)
    assert network.source_embedding.weight.grad is None
    assert network.target_embedding.weight.grad is not None


def test_by_default_only_steps_in_cuda_graphs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "supports_compile", lambda device: device.type == "cuda")
    gpu, cpu, config = torch.device("cuda"), torch.device("cpu"), TrainConfig(max_steps=1)
    transformer = model("transformer")
    assert should_compile(config, transformer, gpu, use_graphs=True)
    assert not should_compile(config, transformer, gpu, use_graphs=False)
    assert not should_compile(config, transformer, cpu, use_graphs=False)
    assert not should_compile(config, model("bahdanau"), gpu, use_graphs=True)
    for value in (True, False):
        assert should_compile(replace(config, compile=value), transformer, gpu, use_graphs=False) == value


def test_when_cuda_graphs_are_used() -> None:
    gpu = torch.device("cuda")
    assert cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1), gpu, 1)
    assert not cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1), CPU, 1)
    assert not cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1), gpu, 2)
    assert not cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1, accumulation_steps=2), gpu, 1)
    assert not cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1, cuda_graphs=False), gpu, 1)
    with pytest.raises(InputError, match="needs a GPU"):
        cuda_graphs.should_use_cuda_graphs(TrainConfig(max_steps=1, cuda_graphs=True), CPU, 1)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs without a GPU: a replay runs all again and writes to where the first run's results are."""
    events: list[str] = []

    def captured(_: Any, run: Callable[[], Tensor], warm_ups: int = 0) -> tuple[Callable[[], None], Tensor]:
        events.append("recorded")
        written = run()

        def replay() -> None:
            events.append("replayed")
            written.copy_(run())

        return replay, written

    monkeypatch.setattr(cuda_graphs._GraphRecorder, "capture", captured)
    monkeypatch.setattr(cuda_graphs, "_supports_graphs", lambda device: True)
    return events


@pytest.mark.gpu
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_replays_equal_plain_steps(name: str, low: bool) -> None:
    network = model(name).cuda()
    gradients = CudaGraphGradients(build_step(network, low), network.parameters(), torch.device("cuda"))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for seed in range(6):
        each = batch(seed, rows=3 - seed % 2, packed=low and name == "transformer")
        value, right = plain(network, each, low)
        results = gradients(each, 1 / each.count)
        torch.testing.assert_close(results, value, rtol=1e-2 if low else 1e-4, atol=1e-4)
        for came, expected in zip(gradients_of(network), right, strict=True):
            assert (came - expected).norm() <= (5e-2 if low else 1e-3) * expected.norm() + 1e-5
        optimizer.step()
        optimizer.zero_grad()
    assert gradients.capture_error is None


@pytest.mark.gpu
def test_dropout_differs_from_replay_to_replay_and_follows_the_seed() -> None:
    torch.manual_seed(3)
    network = Seq2Seq(Seq2SeqConfig(width=16, embedding_width=8, dropout=0.5), WORDS, WORDS).cuda()
    gradients = CudaGraphGradients(build_step(network), network.parameters(), torch.device("cuda"))
    results = []
    for seed in (1, 1, 1, 2, 1):
        torch.cuda.manual_seed(seed)
        results.append(gradients(batch(0), 1.0).item())
    assert results[2] == results[4] != results[3]


@pytest.mark.gpu
def test_attention_dropout_of_packed_sentences_differs_from_replay_to_replay() -> None:
    torch.manual_seed(3)
    config = replace(MODELS["transformer"][1], attention_dropout=0.5)
    network = Transformer(config, WORDS, WORDS).cuda()
    gradients = CudaGraphGradients(build_step(network, low=True), network.parameters(), torch.device("cuda"))
    results = []
    for seed in (1, 1, 1, 2, 1):
        torch.cuda.manual_seed(seed)
        results.append(gradients(batch(0, packed=True), 1.0).item())
    assert gradients.capture_error is None
    assert results[2] == results[4] != results[3]


class Same:
    """The same few batches in every epoch."""

    def batches(self, epoch: int) -> list[np.ndarray[Any, Any]]:
        return [np.array([number]) for number in range(6)]

    def divide(self, index: Any, parts: int) -> list[Any]:
        return [index]

    def collate(self, index: Any) -> Seq2SeqBatch:
        return batch(int(index[0]), rows=3 - int(index[0]) % 2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam"},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "sgd", "momentum": 0.9},
    ],
)
def test_training_with_graphs_equals_training_without(options: dict[str, Any]) -> None:
    gpu, results = torch.device("cuda"), []
    for recorded in (True, False):
        settings = TrainConfig(
            max_steps=20,
            warmup_steps=5,
            cuda_graphs=recorded,
            compile=False,
            precision="float32",
            max_grad_norm=0.5,
            **options,
        )
        learner = Learner(model(), settings, DistributedRanks(device=gpu), last_step=20)
        stream = iter_step_batches(Same(), learner.ranks, accumulation_steps=1)
        results.append(torch.stack([learner.step(next(stream), number) for number in range(1, 21)]).cpu())
        assert learner.capture_error is None
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_non_finite_gradients_are_skipped_with_graphs() -> None:
    learner = Learner(
        model(),
        TrainConfig(max_steps=20, cuda_graphs=True, compile=False),
        DistributedRanks(device=torch.device("cuda")),
        last_step=20,
    )
    stream = iter_step_batches(Same(), learner.ranks, accumulation_steps=1)
    for number in range(1, 11):
        learner.step(next(stream), number)
    weight = learner.model.source_embedding.weight
    with torch.no_grad():
        weight.fill_(torch.inf)
    others = [parameter.clone() for parameter in learner.model.parameters() if parameter is not weight]
    learner.step(next(stream), 11)
    now = [parameter for parameter in learner.model.parameters() if parameter is not weight]
    assert all(torch.equal(a, b) for a, b in zip(now, others, strict=True))
