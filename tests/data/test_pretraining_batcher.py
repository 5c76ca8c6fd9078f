"""Pairs of segments and hidden words: shares as published, nothing lost, the same whenever one asks."""

import doctest
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
def pieces() -> WordPieceTokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return WordPieceTokenizer.train([f"{a}{b} {b}" for a in letters for b in letters], 1200)


@pytest.fixture(scope="module")
def store(pieces: WordPieceTokenizer, tmp_path_factory: pytest.TempPathFactory) -> DocumentStore:
    """Documents of 2 to 13 sentences of 1 to 11 words each, some of several pieces."""
    folder = tmp_path_factory.mktemp("documents")
    chance = np.random.default_rng(3)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))

    def sentence() -> str:
        return " ".join("".join(chance.choice(letters, chance.integers(1, 7))) for _ in range(chance.integers(1, 12)))

    texts = ["\n".join(sentence() for _ in range(chance.integers(2, 14))) for _ in range(300)]
    (folder / "text.txt").write_text("\n\n".join(texts))
    return document_store.prepare_document_store(
        folder / "store", documents.find_documents(str(folder / "text.txt")), pieces
    )


def made(store: DocumentStore, pieces: WordPieceTokenizer, **other: Any) -> PretrainingBatcher:
    config = MaskingConfig(sequence_length=LENGTH, whole_word_masking=other.pop("whole_words", False))
    return PretrainingBatcher(store, pieces, config, **({"max_tokens": 1024, "seed": 1} | other))


def all_of(data: PretrainingBatcher, epoch: int = 0) -> list[PretrainingBatch]:
    return [data.collate(index) for index in data.batches(epoch)]


def within(count: int, of: int, share: float) -> bool:
    """Whether so many of these are about this share: five standard deviations."""
    return abs(count - share * of) < 5 * math.sqrt(of * share * (1 - share))


# --------------------------------------------------------------------------------------------------- pairs


def laid_out(store: DocumentStore, epoch: int = 0) -> tuple[Any, Any, Any]:
    chance, config = CounterRng(1, epoch), MaskingConfig(sequence_length=LENGTH)
    starts = pretraining._find_pair_starts(store, chance, config)
    return (
        starts,
        pretraining._plan_segments(store, starts, chance, config),
        make_segment_pairs(store, starts, chance, config),
    )


def test_every_sentence_is_in_one_pair_of_its_own_document(store: DocumentStore) -> None:
    starts, own, _ = laid_out(store)
    assert starts[0] == 0
    assert (own.next_start[:-1] == starts[1:]).all()  # none is left out, and none comes twice
    assert own.next_start[-1] == store.documents[-1]
    assert (own.next_start <= store.documents[own.document + 1]).all()  # none reaches into the next document
    assert (own.next_start - starts >= 1).all()


def test_half_of_the_second_segments_are_next_and_the_others_from_another_document(
    store: DocumentStore,
) -> None:
    counts = [0, 0]
    for epoch in range(8):
        starts, own, found = laid_out(store, epoch)
        counts[0] += int(found.is_random.sum())
        counts[1] += len(starts)
        offsets = store.sentences.offsets.astype(np.int64)
        ends = offsets[store.documents]  # of documents, in tokens
        first, second = (np.searchsorted(ends, at, side="right") - 1 for at in (found.first_start, found.second_start))
        assert (first == own.document).all()
        assert ((second == first) == ~found.is_random).all()
        # What is next begins where the first ended, but for what was cut off between them.
        between = found.second_start - (found.first_start + found.first_length)
        assert (between[~found.is_random] >= 0).all()
        uncut = ~found.is_random & (own.target_length == LENGTH - 3) & (found.lengths < LENGTH)
        assert uncut.any()
        assert (between[uncut] == 0).all()
        for begin, length, document in (
            (found.first_start, found.first_length, first),
            (found.second_start, found.second_length, second),
        ):
            assert (length >= 1).all()
            assert (begin + length <= ends[document + 1]).all()
    assert within(*counts, 0.5)


def test_sequences_are_filled_up_and_some_are_shorter(store: DocumentStore) -> None:
    _, own, found = laid_out(store)
    assert found.lengths.max() == LENGTH
    assert within(int((own.target_length < LENGTH - 3).sum()), len(own.target_length), 0.1 * (1 - 1 / (LENGTH - 4)))
    assert set(own.target_length.tolist()) <= set(range(2, LENGTH - 2))


def test_segments_that_do_not_fit_are_shortened_as_published(store: DocumentStore) -> None:
    """A token at a time from the longer one, of equal ones from the second."""
    starts, own, found = laid_out(store)
    offsets = store.sentences.offsets.astype(np.int64)
    shortened = 0
    for n in np.flatnonzero(~found.is_random):
        a = int(offsets[own.cut[n]] - offsets[starts[n]])
        b = int(offsets[own.end[n]] - offsets[own.cut[n]])
        shortened += a + b > LENGTH - 3
        while a + b > LENGTH - 3:
            a, b = (a - 1, b) if a > b else (a, b - 1)
        assert (a, b) == (found.first_length[n], found.second_length[n])
    assert shortened > 100


def test_a_single_document_is_not_enough(pieces: WordPieceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a b\nc d")
    store = document_store.prepare_document_store(
        tmp_path / "store", documents.find_documents(str(tmp_path / "text.txt")), pieces
    )
    with pytest.raises(InputError, match="only one document"):
        made(store, pieces)


# ------------------------------------------------------------------------------------------- hidden words


def test_fifteen_percent_are_said_and_hidden_as_published(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    data = made(store, pieces)
    tokens = labels = masks = kept = 0
    for epoch in range(4):
        for batch in all_of(data, epoch):
            lengths = np.array(batch.tokens.lengths)
            width = batch.tokens.ids.shape[1]
            wanted = np.maximum(1, np.rint(0.15 * lengths))
            assert (np.bincount(batch.masked_indices.numpy() // width, minlength=len(lengths)) == wanted).all()
            shown = batch.tokens.ids.flatten()[batch.masked_indices]
            tokens, labels = tokens + int(lengths.sum()), labels + batch.count
            masks += int((shown == pieces.mask_id).sum())
            kept += int((shown == batch.labels).sum())
            assert not set(batch.labels.tolist()) & set(pieces.special_ids)
            assert len(set(batch.masked_indices.tolist())) == batch.count == len(batch.masked_indices)
            others = shown[(shown != pieces.mask_id) & (shown != batch.labels)]
            assert not set(others.tolist()) & set(pieces.special_ids)
    assert abs(labels / tokens - 0.15) < 0.01
    assert within(masks, labels, 0.8)
    assert within(kept, labels, 0.1 + 0.1 / (pieces.vocab_size - 5))  # a word at random may be the word itself
    assert within(labels - masks - kept, labels, 0.1 * (1 - 1 / (pieces.vocab_size - 5)))


def test_everything_else_is_as_it_was_written(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    data = made(store, pieces)
    for index in list(data.batches(0))[:5]:
        batch = data.collate(index)
        starts = np.asarray(index)
        found = make_segment_pairs(store, starts, CounterRng(1, 0), data.config)
        ids = batch.tokens.ids.flatten().clone()
        ids[batch.masked_indices] = batch.labels
        for row, number in zip(ids.view(batch.tokens.ids.shape), range(len(starts)), strict=True):
            a, b = (
                store.sentences.ids[begin : begin + length].tolist()
                for begin, length in (
                    (found.first_start[number], found.first_length[number]),
                    (found.second_start[number], found.second_length[number]),
                )
            )
            wanted, segments = pieces.join_segments(a, b)
            length = batch.tokens.lengths[number]
            assert row[:length].tolist() == wanted
            assert batch.segments[number, :length].tolist() == segments
            assert batch.next_sentence_labels[number] == int(found.is_random[number])


def test_every_word_has_the_same_chance(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    data = made(store, pieces)
    words, hits = np.zeros(LENGTH), np.zeros(LENGTH)  # by the place in sequences of full length
    for epoch in range(6):
        for batch in all_of(data, epoch):
            if batch.tokens.ids.shape[1] < LENGTH:
                continue
            full = torch.tensor(batch.tokens.lengths) == LENGTH
            said = torch.zeros(batch.tokens.ids.shape, dtype=torch.bool)
            said.view(-1)[batch.masked_indices] = True
            special = (batch.tokens.ids == pieces.sep_id) | (batch.tokens.ids == pieces.cls_id)
            words += (~special)[full].sum(0).numpy()
            hits += said[full].sum(0).numpy()
    assert hits[0] == hits[-1] == words[0] == words[-1] == 0
    for place in range(1, LENGTH - 1):
        assert within(int(hits[place]), int(words[place]), round(0.15 * LENGTH) / (LENGTH - 3))


@given(
    lengths=st.lists(st.integers(4, 30), min_size=1, max_size=5),
    inside=st.lists(st.booleans(), min_size=150, max_size=150),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 100),
)
def test_whole_words_are_taken_as_one_takes_them_by_hand(
    lengths: list[int], inside: list[bool], share: float, seed: int
) -> None:
    """Words in the order of chance, each if it still fits."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    can = np.ones(total, bool)
    can[ends - 1] = False
    can[ends - lengths] = False
    begins = ~np.array(inside[:total])
    begins[ends - np.array(lengths) + 1] = True
    bits = np.random.default_rng(seed).integers(0, 1 << 63, total, dtype=np.uint64) * np.uint64(2)
    wanted = np.maximum(1, np.rint(share * np.array(lengths))).astype(np.int64)
    expected: list[int] = []
    for end, length, room in zip(ends.tolist(), lengths, wanted.tolist(), strict=True):
        words: list[list[int]] = []
        for place in range(end - length + 1, end - 1):
            if begins[place]:
                words.append([])
            words[-1].append(place)
        for word in sorted(words, key=lambda word: int(bits[word[0]])):
            if len(word) <= room:
                expected += word
                room -= len(word)
    found = choose_masked_tokens(bits, np.array(lengths), wanted, can, begins)
    assert found.tolist() == sorted(expected)


def test_pieces_of_a_word_are_hidden_together(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    data = made(store, pieces, whole_words=True)
    several = 0
    for batch in all_of(data):
        said = torch.zeros(batch.tokens.ids.numel(), dtype=torch.bool)
        said[batch.masked_indices] = True
        ids = batch.tokens.ids.flatten().clone()
        ids[batch.masked_indices] = batch.labels
        inside = torch.from_numpy(pieces.is_continuation)[ids]
        goes_on = inside[1:] & (ids[:-1] != pieces.sep_id) & (ids[:-1] != pieces.cls_id)
        assert (said[1:] == said[:-1])[goes_on].all()
        several += int((said[1:] & goes_on).sum())
    assert several > 50


# --------------------------------------------------------------------------------------------------- batches


def contents(batch: PretrainingBatch) -> dict[int, tuple[Any, ...]]:
    """Each pair of a batch by its number: ids, segments, what is hidden where, whether it is next."""
    flat, segments = batch.tokens.ids.flatten(), batch.segments.flatten()
    begins = batch.first_token_indices(len(batch.example_indices)).tolist()
    counts = batch.labels != IGNORE
    hidden = dict(zip(batch.masked_indices[counts].tolist(), batch.labels[counts].tolist(), strict=True))
    assert len(hidden) == batch.count
    found = {}
    for number, begin, length, following in zip(
        batch.example_indices, begins, batch.tokens.lengths, batch.next_sentence_labels.tolist(), strict=False
    ):
        where = range(begin, begin + length)
        said = tuple((place - begin, hidden[place]) for place in where if place in hidden)
        found[number] = (flat[begin : begin + length].tolist(), segments[where].tolist(), said, following)
    assert sum(len(one[2]) for one in found.values()) == batch.count
    return found


@pytest.mark.parametrize("layout", [{"packed": True}, {"packed": True, "fixed_shapes": True}, {"fixed_shapes": True}])
def test_every_layout_has_the_same_pairs(
    store: DocumentStore, pieces: WordPieceTokenizer, layout: dict[str, bool]
) -> None:
    plain: dict[int, Any] = {}
    for batch in all_of(made(store, pieces)):
        plain |= contents(batch)
    found: dict[int, Any] = {}
    forms = []
    for batch in all_of(made(store, pieces, **layout)):
        assert not found.keys() & set(batch.example_indices)
        found |= contents(batch)
        forms.append(batch.graph_key)
        assert (batch.next_sentence_labels[len(batch.example_indices) :] == IGNORE).all()
    assert found == plain
    assert None not in forms
    assert len(set(forms[:-2])) <= (2 if "packed" in layout else 12)


def test_a_batch_keeps_to_its_budget(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    for layout in ({}, {"packed": True}):
        for batch in all_of(made(store, pieces, **layout)):
            assert batch.tokens.ids.numel() <= 1024
            assert max(batch.tokens.lengths) <= LENGTH
    packed = all_of(made(store, pieces, packed=True))
    assert all(batch.tokens.ids.shape == (1, 1024) for batch in packed[:-1])


def test_an_epoch_comes_again_the_same_and_the_next_one_is_another(
    store: DocumentStore, pieces: WordPieceTokenizer
) -> None:
    one, other = (made(store, pieces, packed=True) for _ in range(2))
    for epoch in (3, 0):  # in any order
        for a, b in zip(one.batches(epoch), other.batches(epoch), strict=True):
            assert (a == b).all()
    index = one.batches(2)[1]
    one.batches(0)
    assert contents(one.collate(index)) == contents(other.collate(index))
    first, second = ({n % module.EPOCH_STRIDE for b in one.batches(epoch) for n in b.tolist()} for epoch in (0, 1))
    assert first != second
    same = first & second
    assert same
    some = sorted(same)[:50]
    drawn = [contents(one.collate([n + epoch * module.EPOCH_STRIDE for n in some])) for epoch in (0, 1)]
    assert list(drawn[0].values()) != list(drawn[1].values())
    seeded = made(store, pieces, seed=2)
    assert [b.tolist() for b in seeded.batches(0)] != [b.tolist() for b in made(store, pieces).batches(0)]


def test_parts_of_a_batch_are_all_of_it_and_do_not_overlap(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    data = made(store, pieces)
    for index in data.batches(1)[:5]:
        parts = data.divide(index, 3)
        assert sorted(np.concatenate(parts).tolist()) == sorted(index.tolist())
        whole = contents(data.collate(index))
        apart: dict[int, Any] = {}
        tokens = []
        for part in parts:
            batch = data.collate(part)
            apart |= contents(batch)
            tokens.append(sum(batch.tokens.lengths))
        assert apart == whole  # whoever makes them
        assert max(tokens) - min(tokens) <= LENGTH
    assert [len(part) for part in data.divide(index[:2], 3)] == [1, 1, 0]


def test_windows_do_not_show(store: DocumentStore, pieces: WordPieceTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [index.tolist() for index in made(store, pieces).batches(0)]
    monkeypatch.setattr(module, "LAYOUT_WINDOW", 7)
    assert [index.tolist() for index in made(store, pieces).batches(0)] == wanted


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="length=4"):
        MaskingConfig(sequence_length=4)
    with pytest.raises(ValueError, match=r"mask_probability=1\.5"):
        MaskingConfig(mask_probability=1.5)


def test_a_budget_too_small_is_told(store: DocumentStore, pieces: WordPieceTokenizer) -> None:
    with pytest.raises(InputError, match="two sequences"):
        made(store, pieces, max_tokens=LENGTH)


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0
