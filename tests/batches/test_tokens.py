"""Token sequences and source–target batches, padded and packed."""

import torch

from jumok import attend, masks
from jumok.batches.tokens import EOS, IGNORE, PAD, Seq2SeqBatch, Tokens

SENTENCES = [[7, 8, 9], [5], [6, 4]]


def test_padded_tokens() -> None:
    tokens = Tokens.pad(SENTENCES)
    assert tokens.ids.tolist() == [[7, 8, 9], [5, PAD, PAD], [6, 4, PAD]]
    assert tokens.valid_mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert tokens.positions is None
    assert repr(tokens.mask) == repr(masks.padding([3, 1, 2]))
    assert Tokens.pad([[1, 2], [3, 4]]).mask is None  # nothing to bar: the fastest paths
    assert Tokens.pad([[1, 2]], min_length=3).ids.tolist() == [[1, 2, PAD]]


def test_packed_tokens() -> None:
    tokens = Tokens.pack(SENTENCES, min_tokens=8)
    assert tokens.ids.tolist() == [[7, 8, 9, 5, 6, 4, PAD, PAD]]
    assert tokens.lengths == (3, 1, 2, 2)
    assert tokens.positions is not None
    assert tokens.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert tokens.mask is not None
    allowed = tokens.mask.to_dense(8, 8)
    assert allowed[1].tolist() == [True] * 3 + [False] * 5
    assert tokens.causal_mask.to_dense(8, 8)[1].tolist() == [True] * 2 + [False] * 6


def test_attention_is_equal_for_padded_and_packed_tokens() -> None:
    queries = [[1] * n for n in (2, 5, 3)]
    keys = [[1] * n for n in (4, 1, 7)]
    x = [torch.randn(n, 11, dtype=torch.float64) for n in (2, 5, 3)]
    y = [torch.randn(n, 11, dtype=torch.float64) for n in (4, 1, 7)]
    padded = [torch.nn.utils.rnn.pad_sequence(z, batch_first=True) for z in (x, y)]
    mask = Tokens.pad(keys).cross_attention_mask(Tokens.pad(queries))
    rows = attend(padded[0], padded[1], padded[1], mask=mask)
    packed = [torch.cat(z)[None] for z in (x, y)]
    mask = Tokens.pack(keys).cross_attention_mask(Tokens.pack(queries))
    together = attend(packed[0], packed[1], packed[1], mask=mask)
    expected = torch.cat([row[:n] for row, n in zip(rows, (2, 5, 3), strict=True)])
    torch.testing.assert_close(together[0], expected)


def test_seq2seq_batch_shifts_the_target() -> None:
    pairs = Seq2SeqBatch.from_sequences([[7, 8], [9]], [[4], [5, 6]], example_indices=[30, 10])
    assert pairs.source.ids.tolist() == [[7, 8, EOS], [9, EOS, PAD]]
    assert pairs.target.ids.tolist() == [[2, 4, PAD], [2, 5, 6]]
    assert pairs.labels.tolist() == [[4, EOS, IGNORE], [5, 6, EOS]]
    assert pairs.count == 5
    assert pairs.example_indices == (30, 10)


def test_packed_seq2seq_batch_has_fillers_on_both_sides() -> None:
    sources, targets = [[7, 8], [9]], [[4], [5, 6]]
    exact = Seq2SeqBatch.from_sequences(sources, targets, packed=True)
    assert exact.source.lengths == (3, 2)
    assert exact.target.lengths == (2, 3)
    full = Seq2SeqBatch.from_sequences(sources, targets, packed=True, min_lengths=(5, 8))
    assert full.source.lengths == (3, 2, 1)
    assert full.target.lengths == (2, 3, 3)
    assert full.labels.tolist() == [[4, EOS, 5, 6, EOS, IGNORE, IGNORE, IGNORE]]
    assert full.count == exact.count == 5
