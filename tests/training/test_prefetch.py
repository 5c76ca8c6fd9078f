"""Batches made in advance: the same ones in the same order."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from training_toy import PointData

from jumok.batches.tokens import Seq2SeqBatch
from jumok.training.distributed import DistributedRanks
from jumok.training.prefetch import iter_step_batches, map_tensors, prefetch_items


def test_prefetching_stops_at_its_depth() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    stream = prefetch_items(items(), depth=3)
    assert [next(stream) for _ in range(5)] == [0, 1, 2, 3, 4]
    deadline = time.monotonic() + 5
    while len(made) < 9 and time.monotonic() < deadline:  # 5 taken, 3 ready, 1 in hand
        time.sleep(0.01)
    assert len(made) == 9
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_errors_come_after_the_items_before_them() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise KeyError("three")

    stream = prefetch_items(items(), depth=5)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(KeyError, match="three"):
        next(stream)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_all_items_are_returned(depth: int) -> None:
    assert list(prefetch_items(iter(range(7)), depth)) == list(range(7))
    assert list(prefetch_items(iter(()), depth)) == []


def test_ranks_share_each_batch() -> None:
    data, world, turns = PointData(), 3, 2
    shares = [iter_step_batches(data, DistributedRanks(rank, world), turns) for rank in range(world)]
    for step in range(12):
        mine = [next(share) for share in shares]
        epoch, position = divmod(step, 5)
        assert {(work.epoch, work.epoch_step) for work in mine} == {(epoch, position)}
        assert {work.next_position for work in mine} == {divmod(step + 1, 5)}
        assert {len(work.micro_batches) for work in mine} == {turns}
        real = [i for work in mine for batch, weight in work.micro_batches if weight for i in batch.index]
        assert sorted(real) == sorted(data.batches(epoch)[position].tolist())
        idle = [batch for work in mine for batch, weight in work.micro_batches if not weight]
        assert all(len(batch.index) == 1 for batch in idle)
        assert len(idle) == (5 if position == 4 else 0)  # the last batch has one example for six parts


def test_starting_in_the_middle_of_an_epoch() -> None:
    from_there = iter_step_batches(PointData(), DistributedRanks(), 1, epoch=2, epoch_step=3)
    work = next(from_there)
    assert work.micro_batches[0][0].index == tuple(PointData().batches(2)[3].tolist())
    assert work.next_position == (2, 4)


@dataclass(frozen=True)
class Odd:
    pairs: Seq2SeqBatch
    more: list[Tensor]
    names: dict[str, Tensor]
    word: str = "word"


def test_map_tensors_reaches_every_tensor() -> None:
    pairs = Seq2SeqBatch.from_sequences([[7, 8], [9]], [[5], [6, 4]], example_indices=[3, 1])
    batch = Odd(pairs, [torch.ones(2)], {"x": torch.ones(3)})
    changed = map_tensors(batch, lambda x: x + 100)
    assert torch.equal(changed.pairs.source.ids, pairs.source.ids + 100)
    assert torch.equal(changed.pairs.labels, pairs.labels + 100)
    assert changed.pairs.source.lengths == pairs.source.lengths
    assert (changed.pairs.example_indices, changed.pairs.count, changed.word) == ((3, 1), 5, "word")
    assert changed.more[0].tolist() == [101, 101]
    assert changed.names["x"].tolist() == [101] * 3
    assert np.array_equal(pairs.labels[0, :1], [5])  # what came is as it was
