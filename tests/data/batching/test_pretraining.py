"""Segment pairs and masked words: probabilities, layouts and reproducibility."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jumok.data.batching.pretraining as module
from jumok import InputError
from jumok.batches.text import PretrainingBatch
from jumok.batches.tokens import IGNORE
from jumok.data.batching import pretraining
from jumok.data.batching.pretraining import (
    MaskingConfig,
    PretrainingBatcher,
    choose_masked_tokens,
    make_segment_pairs,
)
from jumok.data.caches import document_store
from jumok.data.caches.document_store import DocumentStore
from jumok.data.counter_rng import CounterRng
from jumok.data.readers import documents
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer

LENGTH = 27


@pytest.fixture(scope="module")
def tokenizer() -> WordPieceTokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return WordPieceTokenizer.train([f"{a}{b} {b}" for a in letters for b in letters], 1200)


@pytest.fixture(scope="module")
def store(tokenizer: WordPieceTokenizer, tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    """Documents of 2 to 13 sentences of 1 to 11 words each, some of several pieces."""
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(3)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))

    def sentence() -> str:
        return " ".join("".join(rng.choice(letters, rng.integers(1, 7))) for _ in range(rng.integers(1, 12)))

    texts = ["\n".join(sentence() for _ in range(rng.integers(2, 14))) for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    return document_store.prepare_document_store(
        folder / "store", documents.find_documents(str(folder / "text.txt")), tokenizer
    )


def make_batcher(store: DocumentStore, tokenizer: WordPieceTokenizer, **second: Any) -> PretrainingBatcher:
    config = MaskingConfig(sequence_length=LENGTH, whole_word_masking=second.pop("whole_words", False))
    return PretrainingBatcher(store, tokenizer, config, **({"max_tokens": 1024, "seed": 1} | second))


def collate_epoch(batcher: PretrainingBatcher, epoch: int = 0) -> list[PretrainingBatch]:
    return [batcher.collate(index) for index in batcher.batches(epoch)]


def is_close_to_share(count: int, total: int, share: float) -> bool:
    """Whether so many of these are about this share: five standard deviations."""
    return abs(count - share * total) < 5 * math.sqrt(total * share * (1 - share))


# --------------------------------------------------------------------------------------------------- pairs


def plan_epoch(store: DocumentStore, epoch: int = 0) -> tuple[Any, Any, Any]:
    rng, config = CounterRng(1, epoch), MaskingConfig(sequence_length=LENGTH)
    starts = pretraining._find_pair_starts(store, rng, config)
    return (
        starts,
        pretraining._plan_segments(store, starts, rng, config),
        make_segment_pairs(store, starts, rng, config),
    )


def test_every_sentence_is_in_one_pair(store: DocumentStore) -> None:
    starts, plan, _ = plan_epoch(store)
    assert starts[0] == 0
    assert (plan.next_start[:-1] == starts[1:]).all()  # none is left out, and none comes twice
    assert plan.next_start[-1] == store.documents[-1]
    assert (plan.next_start <= store.documents[plan.document + 1]).all()  # none reaches into the next document
    assert (plan.next_start - starts >= 1).all()


def test_half_of_the_second_segments_are_random(
    store: DocumentStore,
) -> None:
    counted = [0, 0]
    for epoch in range(8):
        starts, plan, pairs = plan_epoch(store, epoch)
        counted[0] += int(pairs.is_random.sum())
        counted[1] += len(starts)
        offsets = store.sentences.offsets.astype(np.int64)
        ends = offsets[store.documents]  # of documents, in tokens
        first, second = (np.searchsorted(ends, at, side="right") - 1 for at in (pairs.first_start, pairs.second_start))
        assert (first == plan.document).all()
        assert ((second == first) == ~pairs.is_random).all()
        # What is next begins where the first ended, but for what was cut off between them.
        between = pairs.second_start - (pairs.first_start + pairs.first_length)
        assert (between[~pairs.is_random] >= 0).all()
        uncut = ~pairs.is_random & (plan.target_length == LENGTH - 3) & (pairs.lengths < LENGTH)
        assert uncut.any()
        assert (between[uncut] == 0).all()
        for begin, length, document in (
            (pairs.first_start, pairs.first_length, first),
            (pairs.second_start, pairs.second_length, second),
        ):
            assert (length >= 1).all()
            assert (begin + length <= ends[document + 1]).all()
    assert is_close_to_share(*counted, 0.5)


def test_sequence_lengths(store: DocumentStore) -> None:
    _, plan, pairs = plan_epoch(store)
    assert pairs.lengths.max() == LENGTH
    assert is_close_to_share(
        int((plan.target_length < LENGTH - 3).sum()), len(plan.target_length), 0.1 * (1 - 1 / (LENGTH - 4))
    )
    assert set(plan.target_length.tolist()) <= set(range(2, LENGTH - 2))


def test_trimming_matches_the_reference(store: DocumentStore) -> None:
    """A token at a time from the longer one, of equal ones from the second."""
    starts, plan, pairs = plan_epoch(store)
    offsets = store.sentences.offsets.astype(np.int64)
    shortened = 0
    for n in np.flatnonzero(~pairs.is_random):
        a = int(offsets[plan.cut[n]] - offsets[starts[n]])
        b = int(offsets[plan.end[n]] - offsets[plan.cut[n]])
        shortened += a + b > LENGTH - 3
        while a + b > LENGTH - 3:
            a, b = (a - 1, b) if a > b else (a, b - 1)
        assert (a, b) == (pairs.first_length[n], pairs.second_length[n])
    assert shortened > 100


def test_single_document_raises(tokenizer: WordPieceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b\nc d")
    store = document_store.prepare_document_store(
        tmp_path / "store", documents.find_documents(str(tmp_path / "text.txt")), tokenizer
    )
    with pytest.raises(InputError, match="only one document"):
        make_batcher(store, tokenizer)


# ------------------------------------------------------------------------------------------- hidden words


def test_mask_probabilities(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    batcher = make_batcher(store, tokenizer)
    tokens = labels = masks = unchanged = 0
    for epoch in range(4):
        for batch in collate_epoch(batcher, epoch):
            lengths = np.array(batch.tokens.lengths)
            width = batch.tokens.ids.shape[1]
            expected = np.maximum(1, np.rint(0.15 * lengths))
            assert (np.bincount(batch.masked_indices.numpy() // width, minlength=len(lengths)) == expected).all()
            shown = batch.tokens.ids.flatten()[batch.masked_indices]
            tokens, labels = tokens + int(lengths.sum()), labels + batch.count
            masks += int((shown == tokenizer.mask_id).sum())
            unchanged += int((shown == batch.labels).sum())
            assert not set(batch.labels.tolist()) & set(tokenizer.special_ids)
            assert len(set(batch.masked_indices.tolist())) == batch.count == len(batch.masked_indices)
            others = shown[(shown != tokenizer.mask_id) & (shown != batch.labels)]
            assert not set(others.tolist()) & set(tokenizer.special_ids)
    assert abs(labels / tokens - 0.15) < 0.01
    assert is_close_to_share(masks, labels, 0.8)
    assert is_close_to_share(
        unchanged, labels, 0.1 + 0.1 / (tokenizer.vocab_size - 5)
    )  # a word at random may be the word itself
    assert is_close_to_share(labels - masks - unchanged, labels, 0.1 * (1 - 1 / (tokenizer.vocab_size - 5)))


def test_unmasked_tokens_are_unchanged(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    batcher = make_batcher(store, tokenizer)
    for index in list(batcher.batches(0))[:5]:
        batch = batcher.collate(index)
        starts = np.asarray(index)
        pairs = make_segment_pairs(store, starts, CounterRng(1, 0), batcher.config)
        ids = batch.tokens.ids.flatten().clone()
        ids[batch.masked_indices] = batch.labels
        for row, number in zip(ids.view(batch.tokens.ids.shape), range(len(starts)), strict=True):
            a, b = (
                store.sentences.ids[begin : begin + length].tolist()
                for begin, length in (
                    (pairs.first_start[number], pairs.first_length[number]),
                    (pairs.second_start[number], pairs.second_length[number]),
                )
            )
            expected, segments = tokenizer.join_segments(a, b)
            length = batch.tokens.lengths[number]
            assert row[:length].tolist() == expected
            assert batch.segments[number, :length].tolist() == segments
            assert batch.next_sentence_labels[number] == int(pairs.is_random[number])


def test_every_position_is_masked_equally_often(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    batcher = make_batcher(store, tokenizer)
    words, hits = np.zeros(LENGTH), np.zeros(LENGTH)  # by the place in sequences of full length
    for epoch in range(6):
        for batch in collate_epoch(batcher, epoch):
            if batch.tokens.ids.shape[1] < LENGTH:
                continue
            full = torch.tensor(batch.tokens.lengths) == LENGTH
            is_masked = torch.zeros(batch.tokens.ids.shape, dtype=torch.bool)
            is_masked.view(-1)[batch.masked_indices] = True
            special = (batch.tokens.ids == tokenizer.sep_id) | (batch.tokens.ids == tokenizer.cls_id)
            words += (~special)[full].sum(0).numpy()
            hits += is_masked[full].sum(0).numpy()
    assert hits[0] == hits[-1] == words[0] == words[-1] == 0
    for position in range(1, LENGTH - 1):
        assert is_close_to_share(int(hits[position]), int(words[position]), round(0.15 * LENGTH) / (LENGTH - 3))


@given(
    lengths=st.lists(st.integers(4, 30), min_size=1, max_size=5),
    is_continuation=st.lists(st.booleans(), min_size=150, max_size=150),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 100),
)
def test_whole_word_masking_matches_the_reference(
    lengths: list[int], is_continuation: list[bool], share: float, seed: int
) -> None:
    """Words in random order, each if it still fits."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    is_maskable = np.ones(total, bool)
    is_maskable[ends - 1] = False
    is_maskable[ends - lengths] = False
    starts_word = ~np.array(is_continuation[:total])
    starts_word[ends - np.array(lengths) + 1] = True
    bits = np.random.default_rng(seed).integers(0, 1 << 63, total, dtype=np.uint64) * np.uint64(2)
    num_masked = np.maximum(1, np.rint(share * np.array(lengths))).astype(np.int64)
    expected: list[int] = []
    for end, length, remaining in zip(ends.tolist(), lengths, num_masked.tolist(), strict=True):
        words: list[list[int]] = []
        for position in range(end - length + 1, end - 1):
            if starts_word[position]:
                words.append([])
            words[-1].append(position)
        for word in sorted(words, key=lambda word: int(bits[word[0]])):
            if len(word) <= remaining:
                expected += word
                remaining -= len(word)
    pairs = choose_masked_tokens(bits, np.array(lengths), num_masked, is_maskable, starts_word)
    assert pairs.tolist() == sorted(expected)


def test_pieces_of_a_word_are_masked_together(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    batcher = make_batcher(store, tokenizer, whole_words=True)
    num_continued = 0
    for batch in collate_epoch(batcher):
        is_masked = torch.zeros(batch.tokens.ids.numel(), dtype=torch.bool)
        is_masked[batch.masked_indices] = True
        ids = batch.tokens.ids.flatten().clone()
        ids[batch.masked_indices] = batch.labels
        is_continuation = torch.from_numpy(tokenizer.is_continuation)[ids]
        continues = is_continuation[1:] & (ids[:-1] != tokenizer.sep_id) & (ids[:-1] != tokenizer.cls_id)
        assert (is_masked[1:] == is_masked[:-1])[continues].all()
        num_continued += int((is_masked[1:] & continues).sum())
    assert num_continued > 50


# --------------------------------------------------------------------------------------------------- batches


def contents(batch: PretrainingBatch) -> dict[int, tuple[Any, ...]]:
    """Each pair of a batch by its number: ids, segments, what is hidden where, whether it is next."""
    flat, segments = batch.tokens.ids.flatten(), batch.segments.flatten()
    starts_word = batch.first_token_indices(len(batch.example_indices)).tolist()
    counted = batch.labels != IGNORE
    masked_words = dict(zip(batch.masked_indices[counted].tolist(), batch.labels[counted].tolist(), strict=True))
    assert len(masked_words) == batch.count
    pairs = {}
    for number, begin, length, following in zip(
        batch.example_indices, starts_word, batch.tokens.lengths, batch.next_sentence_labels.tolist(), strict=False
    ):
        where = range(begin, begin + length)
        is_masked = tuple((position - begin, masked_words[position]) for position in where if position in masked_words)
        pairs[number] = (flat[begin : begin + length].tolist(), segments[where].tolist(), is_masked, following)
    assert sum(len(first[2]) for first in pairs.values()) == batch.count
    return pairs


@pytest.mark.parametrize("layout", [{"packed": True}, {"packed": True, "fixed_shapes": True}, {"fixed_shapes": True}])
def test_layouts_have_the_same_pairs(
    store: DocumentStore, tokenizer: WordPieceTokenizer, layout: dict[str, bool]
) -> None:
    padded: dict[int, Any] = {}
    for batch in collate_epoch(make_batcher(store, tokenizer)):
        padded |= contents(batch)
    pairs: dict[int, Any] = {}
    graph_keys = []
    for batch in collate_epoch(make_batcher(store, tokenizer, **layout)):
        assert not pairs.keys() & set(batch.example_indices)
        pairs |= contents(batch)
        graph_keys.append(batch.graph_key)
        assert (batch.next_sentence_labels[len(batch.example_indices) :] == IGNORE).all()
    assert pairs == padded
    assert None not in graph_keys
    assert len(set(graph_keys[:-2])) <= (2 if "packed" in layout else 12)


def test_batches_fit_the_budget(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    for layout in ({}, {"packed": True}):
        for batch in collate_epoch(make_batcher(store, tokenizer, **layout)):
            assert batch.tokens.ids.numel() <= 1024
            assert max(batch.tokens.lengths) <= LENGTH
    packed = collate_epoch(make_batcher(store, tokenizer, packed=True))
    assert all(batch.tokens.ids.shape == (1, 1024) for batch in packed[:-1])


def test_order_depends_on_seed_and_epoch(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    first, second = (make_batcher(store, tokenizer, packed=True) for _ in range(2))
    for epoch in (3, 0):  # in any order
        for a, b in zip(first.batches(epoch), second.batches(epoch), strict=True):
            assert (a == b).all()
    index = first.batches(2)[1]
    first.batches(0)
    assert contents(first.collate(index)) == contents(second.collate(index))
    starts = [{n % module.EPOCH_STRIDE for b in first.batches(epoch) for n in b.tolist()} for epoch in (0, 1)]
    assert starts[0] != starts[1]
    shared = sorted(starts[0] & starts[1])[:50]
    assert shared
    masked = [contents(first.collate([n + epoch * module.EPOCH_STRIDE for n in shared])) for epoch in (0, 1)]
    assert list(masked[0].values()) != list(masked[1].values())
    other_seed = make_batcher(store, tokenizer, seed=2)
    assert [b.tolist() for b in other_seed.batches(0)] != [
        b.tolist() for b in make_batcher(store, tokenizer).batches(0)
    ]


def test_divide(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    batcher = make_batcher(store, tokenizer)
    for index in batcher.batches(1)[:5]:
        parts = batcher.divide(index, 3)
        assert sorted(np.concatenate(parts).tolist()) == sorted(index.tolist())
        complete = contents(batcher.collate(index))
        divided: dict[int, Any] = {}
        tokens = []
        for part in parts:
            batch = batcher.collate(part)
            divided |= contents(batch)
            tokens.append(sum(batch.tokens.lengths))
        assert divided == complete  # whoever makes them
        assert max(tokens) - min(tokens) <= LENGTH
    assert [len(part) for part in batcher.divide(index[:2], 3)] == [1, 1, 0]


def test_order_does_not_depend_on_the_layout_window(
    store: DocumentStore, tokenizer: WordPieceTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [index.tolist() for index in make_batcher(store, tokenizer).batches(0)]
    monkeypatch.setattr(module, "LAYOUT_WINDOW", 7)
    assert [index.tolist() for index in make_batcher(store, tokenizer).batches(0)] == expected


def test_invalid_masking_config() -> None:
    with pytest.raises(ValueError, match="length=4"):
        MaskingConfig(sequence_length=4)
    with pytest.raises(ValueError, match=r"mask_probability=1\.5"):
        MaskingConfig(mask_probability=1.5)


def test_too_small_budget_raises(store: DocumentStore, tokenizer: WordPieceTokenizer) -> None:
    with pytest.raises(InputError, match="two sequences"):
        make_batcher(store, tokenizer, max_tokens=LENGTH)
