"""Every model that a search can use implements ``start``, ``step`` and ``reorder`` as the protocol says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, Tokens
from jumok.decoding import beam_search, greedy_search
from jumok.models.caption_transformer import CaptionTransformer
from jumok.models.captioner import Captioner, CaptionerConfig
from jumok.models.convolutional import ConvolutionalConfig, ConvolutionalSeq2Seq
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.transformer import Transformer, TransformerConfig

SOURCE_WORDS, TARGET_WORDS = 19, 23
SOURCES = [[4, 5, 6], [7], [8, 9, 10, 11, 12, 13, 14], [15, 16]]
TARGETS = [[4, 5], [6, 7, 8, 9, 10], [11], [12, 13, 14]]
NUM_SOURCES = len(SOURCES)
IMAGE_WIDTH, GRID = 5, (2, 3)
FEATURES = torch.randn(NUM_SOURCES, 6, IMAGE_WIDTH, generator=torch.Generator().manual_seed(1)).double()
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def build_seq2seq_configs() -> dict[str, Seq2SeqConfig]:
    configs = {}
    for cell, attention, query in itertools.product(
        ("gru", "lstm"), (None, "global", "local-m", "local-p"), ("previous", "current")
    ):
        if attention is None and query == "current":
            continue
        configs[f"seq2seq-{cell}-{attention}-{query}"] = Seq2SeqConfig(
            width=6,
            embedding_width=7,
            cell=cell,
            num_layers=1 + (cell == "lstm"),
            attention=attention,
            attention_score="general" if query == "current" else "additive",
            attention_query=query,
            attention_window=1,
            readout="tanh",
            dropout=0.0,
        )
    return configs


TRANSFORMER: dict[str, Any] = {
    "width": 8,
    "num_heads": 2,
    "feed_forward_width": 11,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "dropout": 0.0,
}
CAPTIONER: dict[str, Any] = {"width": 7, "embedding_width": 3, "attention_width": 4, "dropout": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    **{
        name: lambda config=config: Seq2Seq(config, SOURCE_WORDS, TARGET_WORDS)
        for name, config in build_seq2seq_configs().items()
    },
    **{
        f"convolutional-{kernel_size}-{encoding}": lambda k=kernel_size, e=encoding: ConvolutionalSeq2Seq(
            ConvolutionalConfig(
                width=8, embedding_width=6, kernel_size=k, position_encoding=e, max_positions=40, dropout=0.0
            ),
            SOURCE_WORDS,
            TARGET_WORDS,
        )
        for kernel_size, encoding in ((3, "learned"), (5, "sinusoid"), (1, "learned"))
    },
    **{
        f"transformer-{norm}": lambda norm=norm: Transformer(
            TransformerConfig(**TRANSFORMER, norm=norm), SOURCE_WORDS, TARGET_WORDS
        )
        for norm in ("pre", "post")
    },
    **{
        f"captioner-{attention}": lambda attention=attention: Captioner(
            CaptionerConfig(**CAPTIONER, attention=attention), TARGET_WORDS, IMAGE_WIDTH
        )
        for attention in ("soft", "hard")
    },
    "caption_transformer": lambda: CaptionTransformer(
        TransformerConfig(**TRANSFORMER, tie_embeddings="target"), TARGET_WORDS, IMAGE_WIDTH
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model = MODELS[request.param]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that biases are not 0 and scores are not nearly equal
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def is_captioner(model: Any) -> bool:
    return isinstance(model, Captioner | CaptionTransformer)


def build_source(model: Any, rows: Sequence[int] = range(NUM_SOURCES)) -> Tokens:
    if is_captioner(model):
        return features_as_tokens(FEATURES[list(rows)])
    return Tokens.pad([[*SOURCES[row], EOS] for row in rows])


def compute_log_probs(model: Any, row: int, prefix: Sequence[int]) -> Tensor:
    """The log-probabilities ``(V,)`` of the next token of one source, decoded alone."""
    state = model.start(build_source(model, [row]))
    logits = torch.empty(0)
    for token_id in (BOS, *prefix):
        logits, state = model.step(state, torch.tensor([token_id]))
    return logits[0].log_softmax(-1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_steps_have_the_training_loss(model: Any, mode: Callable[[], Any]) -> None:
    batch: Any = (
        CaptionBatch.from_sequences(FEATURES, GRID, TARGETS)
        if is_captioner(model)
        else Seq2SeqBatch.from_sequences(SOURCES, TARGETS)
    )
    nll = torch.zeros((), dtype=torch.float64)
    with mode():
        state = model.start(build_source(model))
        for ids, labels in zip(batch.target.ids.T, batch.labels.T, strict=True):
            logits, state = model.step(state, ids)
            assert logits.shape == (NUM_SOURCES, TARGET_WORDS)
            nll = nll + F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE)
    torch.testing.assert_close(nll.detach(), model.loss(batch).parts["nll"].detach(), **EXACT, check_dtype=False)


# Rows of the state after each reorder, and the sources that remain if they are known.
MOVES: list[tuple[list[int], list[int] | None]] = [
    ([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 2, 3]),  # three beams each, before the first token
    ([2, 0, 0, 4, 5, 3, 6, 6, 6, 11, 9, 10], [0, 1, 2, 3]),  # within each source
    ([0, 1, 2, 6, 7, 8, 9, 9, 10], [0, 2, 3]),  # one sentence is done
    ([8, 7, 1, 0, 4], None),  # any rows at all
    ([3], [3]),
    ([0, 0], [0]),
]


@pytest.mark.parametrize("with_sources", [False, True])
@torch.inference_mode()
def test_rows_are_repeated_dropped_and_permuted(model: Any, with_sources: bool) -> None:
    """Every row gives what its source gives alone with the same tokens."""
    next_ids = itertools.cycle([7, 11, 5, 13, 4, 17, 9])
    paths: list[tuple[int, list[int]]] = [(row, []) for row in range(NUM_SOURCES)]  # source and tokens
    state = model.start(build_source(model))
    ids = torch.full((NUM_SOURCES,), BOS)
    for index, sources in MOVES:
        state = state.reorder(torch.tensor(index), sources if with_sources else None)
        paths = [(paths[row][0], [*paths[row][1]]) for row in index]
        logits, state = model.step(state, ids[torch.tensor(index)])
        for (source, prefix), row in zip(paths, logits.log_softmax(-1), strict=True):
            torch.testing.assert_close(row, compute_log_probs(model, source, prefix), **EXACT)
        ids = torch.tensor([next(next_ids) for _ in index])
        for (_, prefix), token_id in zip(paths, ids.tolist(), strict=True):
            prefix.append(token_id)


@torch.inference_mode()
def test_a_state_is_immutable(model: Any) -> None:
    _, state = model.step(model.start(build_source(model)), torch.full((NUM_SOURCES,), BOS))
    ids = torch.tensor([4, 5, 6, 7])
    first, _ = model.step(state, ids)
    model.step(state.reorder(torch.tensor([3, 1])), torch.tensor([9, 9]))
    model.step(state, torch.tensor([9, 9, 9, 9]))
    assert torch.equal(model.step(state, ids)[0], first)


@torch.inference_mode()
def test_all_sources_in_their_order_need_no_copy(model: Any) -> None:
    state = model.start(build_source(model))
    assert state.reorder(torch.arange(NUM_SOURCES), range(NUM_SOURCES)) is state


@torch.inference_mode()
def test_rows_that_stay_with_their_source_leave_the_memory_where_it_is(model: Any) -> None:
    def get_memory(state: Any) -> Any:
        return state.source if isinstance(model, Transformer | CaptionTransformer) else state.memory

    state = model.start(build_source(model)).reorder(torch.arange(4).repeat_interleave(3), range(4))
    _, state = model.step(state, torch.full((12,), BOS))
    within = state.reorder(torch.tensor([2, 2, 0, 3, 4, 5, 8, 7, 6, 9, 9, 9]), range(4))
    assert get_memory(within) is get_memory(state)
    fewer = within.reorder(torch.tensor([3, 4, 5, 9, 10, 11]), [1, 3])
    assert get_memory(fewer) is None or get_memory(fewer) is not get_memory(state)
    assert (fewer.rows_per_source, fewer.reorder(torch.tensor([2, 3, 4])).rows_per_source) == (3, 1)


@torch.inference_mode()
def test_reorder_to_zero_rows(model: Any) -> None:
    nothing = torch.tensor([], dtype=torch.long)
    state = model.start(build_source(model)).reorder(torch.arange(4).repeat_interleave(3), range(4))
    for empty in (state.reorder(nothing, []), state.reorder(nothing)):
        assert model.step(empty, nothing)[0].shape == (0, TARGET_WORDS)


@torch.inference_mode()
def test_rows_of_other_sources_raise(model: Any) -> None:
    state = model.start(build_source(model)).reorder(torch.arange(4).repeat_interleave(2), range(4))
    with pytest.raises(ValueError, match="3 rows and there are 2 sources"):
        state.reorder(torch.tensor([0, 1, 2]), [0, 1])


@torch.inference_mode()
def test_a_beam_of_1_is_greedy_search(model: Any) -> None:
    source = build_source(model)
    greedy = greedy_search(model, source, max_length=6)
    assert len(greedy) == NUM_SOURCES
    for [hypothesis], expected in zip(beam_search(model, source, beam_size=1, max_length=6), greedy, strict=True):
        assert hypothesis.ids == expected.ids
        assert hypothesis.logprob == pytest.approx(expected.logprob)
