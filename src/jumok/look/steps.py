"""The steps of a generation, and the entries that show them: all steps as one attention, or one by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jumok.look.kept import Kept
from jumok.look.sources import with_sink
from jumok.look.stitch import Part, side_by_side, stitched

if TYPE_CHECKING:
    from jumok.look.generation import Generation

# For each returned sequence the turn and the row in which it ended; and all of its tokens.
Returned = tuple[list[tuple[int, int]], Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """What one forward of the model added to one layer."""

    part: Part
    new: Tensor  # (R, G, new keys, D)
    ids: Tensor | None  # (R, Q): the tokens of the queries
    turn: int
    length: int  # the keys so far
    before: Step | None
    scale: float
    softcap: float | None
    sink: Tensor | None

    def back(self) -> Iterator[Step]:
        """The step and those before it."""
        step: Step | None = self
        while step is not None:
            yield step
            step = step.before

    def cut(self, extra: int) -> Step:
        """The step without its last tokens."""
        part = self.part.cut(self.part.count - extra, self.part.keys - extra)
        ids = None if self.ids is None else self.ids[:, :-extra]
        return replace(self, part=part, new=self.new[:, :, :-extra], ids=ids, length=self.length - extra)


class Walk:
    """All steps of a layer as one attention: of every row, or of the sequences that were returned."""

    def __init__(
        self, generation: Generation, last: Step, earlier: Sequence[Step], returned: Returned | None
    ) -> None:
        self._generation = generation
        self._ends = [(last, torch.arange(len(last.part.query)))]
        self._tokens = None
        if returned is not None:
            ends, self._tokens = returned
            at = {step.turn: step for step in (*earlier, *last.back())}
            self._ends = [(at[turn], torch.tensor([row])) for turn, row in ends]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows = sum(len(rows) for _, rows in self._ends)
        queries = max(sum(one.part.count for one in step.back()) for step, _ in self._ends)
        keys = max(step.length for step, _ in self._ends)
        return rows, self._ends[0][0].part.query.shape[1], queries, keys

    @functools.cached_property
    def kept(self) -> Kept:
        each = [self._generation.joined(step, rows) for step, rows in self._ends]
        joined = each[0] if len(each) == 1 else side_by_side(each)
        sink = self._ends[0][0].sink
        return joined if sink is None else with_sink(joined, sink)

    @functools.cached_property
    def row_ids(self) -> Tensor | None:
        if self._tokens is not None:
            return self._tokens[:, : self.shape[2]].cpu()
        path = self._generation.walk(*self._ends[0])
        known = [step.ids[rows] for step, rows in path if step.ids is not None]
        return torch.cat(known, dim=1) if len(known) == len(path) else None


class Alone:
    """One step of a layer by itself, as the model computed it."""

    def __init__(self, generation: Generation, step: Step) -> None:
        self._generation, self._step = generation, step

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, queries, _ = self._step.part.query.shape
        return rows, heads, queries, self._step.part.keys

    @functools.cached_property
    def kept(self) -> Kept:
        step, part = self._step, self._step.part
        keys = self._generation.keys(self._generation.walk(step, torch.arange(len(part.query))))
        seen = keys[:, :, part.first : part.first + part.keys]
        kept = stitched([replace(part, first=0)], seen, step.scale, step.softcap)
        return kept if step.sink is None else with_sink(kept, step.sink)

    @property
    def row_ids(self) -> Tensor | None:
        return self._step.ids
