"""The steps of ``model.generate(…)`` as one attention a layer, over the prompt and what was generated.

A step's keys begin with those of the steps before. That is how it is found out what a step goes on from,
whatever the cache: of each step only the new keys are kept, and a row whose earlier keys are those of
*another* row of the step before has been moved there by beam search::

    step 1   row 0  a b c          step 2   row 0  d e f G      its past is that of row 1,
             row 1  d e f                   row 1  d e f H      and so is this one's

Attention that is written out by hand shows scores and no keys: there the search tells how it moves its cache.
From these moves, and from the tokens of a returned sequence, follows which rows it lived in. The last token
is never fed back to the model: it has no row.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jumok.look.adapters.site import Found
from jumok.look.adapters.softmax import as_given
from jumok.look.kept import Kept
from jumok.look.sources import with_sink
from jumok.look.stitch import Memo, Part, side_by_side, stitched

if TYPE_CHECKING:
    from jumok.look.watch import Watcher

# For each returned sequence the turn and the row in which it ended; and all of its tokens.
Returned = tuple[list[tuple[int, int]], Tensor]


class Broken(Exception):
    """It cannot be told how the steps follow from each other; the message says why."""


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


class Generation:
    """All layers in one call of ``generate``."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.layers: dict[tuple[str, int], Layer] = {}
        self.parents: dict[int, Tensor] = {}  # of each turn in which rows moved: where each came from
        self.told: Tensor | None = None  # how the search has moved the rows, for the step to come
        self.restarts: set[int] = set()  # turns in which everything was computed anew, without a cache
        self.memo: Memo = {}
        self._turn = 0
        self._calls: Counter[str] = Counter()  # of each layer in this turn
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # those of this turn, cut

    def add(self, name: str, kind: str, found: Found) -> None:
        """A layer attends."""
        turn = self.watcher.trail.turn
        if turn != self._turn:
            self._turn, self._calls, self._masks = turn, Counter(), {}
        at = (name, self._calls[name])
        self._calls[name] += 1
        layer = self.layers.setdefault(at, Layer(name, kind, self))
        if layer.broken is not None:
            return
        rows, _, queries, _ = found.kept.shape
        ids = (read.ids for read in reversed(self.watcher.reads))
        mine = next((one for one in ids if one.shape == (rows, queries)), None)
        try:
            step = layer.add(found, turn, mine)
        except Broken as error:
            layer.broken = str(error)
            return
        self.watcher.seen.calls.append(self.watcher.entry(name, kind, Alone(self, step), layer.reads))

    def mask(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """The mask for the first so many keys; the same tensor for all layers that share it."""
        if mask is None:
            return None
        at = (id(mask), keys)
        if at not in self._masks:
            cut = mask[..., :keys] if mask.shape[-1] > keys else mask
            self._masks[at] = mask, self.watcher.keeper.mask(cut)
        return self._masks[at][1]

    def finish(self, output: Any, batch: int) -> None:
        """The entries of what was generated, from a batch of so many prompts."""
        sequences = getattr(output, "sequences", output)
        main, returned, why = self._main(), None, None
        try:
            if main is not None and isinstance(sequences, Tensor):
                returned = self._returned(main, sequences.cpu(), batch)
        except Broken as error:
            why = str(error)
        for layer in self.layers.values():
            decodes = main is not None and layer.turns == main.turns
            reason = layer.broken or (why if decodes else None)
            if reason is not None:
                self.watcher.miss(layer.name, f"its steps cannot be joined, see seen.calls: {reason}")
            elif layer.last is not None:
                source = Walk(self, layer.last, returned if decodes else None)
                entry = self.watcher.entry(layer.name, layer.kind, source, layer.reads)
                self.watcher.seen.entries.append(entry)

    def forget(self) -> None:
        """Let go of what only the next step would have needed."""
        self.layers, self._masks = {}, {}

    def walk(self, step: Step, rows: Tensor) -> list[tuple[Step, Tensor]]:
        """The steps up to this one, and the row of each in which ``rows`` lived then."""
        path = []
        for one in step.back():
            path.append((one, rows))
            since = -1 if one.before is None else one.before.turn
            for turn in sorted((t for t in self.parents if since < t <= one.turn), reverse=True):
                rows = self.parents[turn][rows]
        return path[::-1]

    def joined(self, step: Step, rows: Tensor) -> Kept:
        """The attention of some rows, from the first step to this one."""
        path = self.walk(step, rows)
        moved = any(not torch.equal(at, torch.arange(len(one.new))) for one, at in path)
        parts = [one.part.chosen(at) if moved else one.part for one, at in path]
        return stitched(parts, self.keys(path), step.scale, step.softcap, self.memo)

    def keys(self, path: list[tuple[Step, Tensor]]) -> Tensor:
        """The keys of all steps, each from its own row."""
        return torch.cat([one.new[at.to(one.new.device)] for one, at in path], dim=2)

    def _main(self) -> Layer | None:
        """The layer that tells how the decoder's rows moved: the first self-attention with most steps."""
        some = [layer for layer in self.layers.values() if layer.last is not None and not layer.fixed]
        return max(some, key=lambda layer: len(layer.turns), default=None)

    def _returned(self, main: Layer, sequences: Tensor, batch: int) -> Returned | None:
        """Where each returned sequence ended; None: all rows are returned, as they are at the end."""
        last = main.last
        assert last is not None
        rows, moved = len(last.new), bool(self.parents) or self.told is not None
        sampled = last.ids is None and last.before is not None  # or beam search, but then its cache moves
        if not moved and len(sequences) == rows and (rows == batch or sampled):
            return None
        told: list[tuple[int, Tensor]] = []  # after each turn, the tokens of every row
        for one in reversed(list(last.back())):
            if one.ids is None:
                raise Broken("beam search over embeddings, not tokens: which beam was returned is not known")
            ids = one.ids
            if told:
                since, history = told[-1]
                for turn in sorted(t for t in self.parents if since < t <= one.turn):
                    history = history[self.parents[turn]]
                ids = torch.cat([history, ids], dim=1)
            told.append((one.turn, ids))
        several, first = len(sequences) // batch, told[0][1]
        for left_out in (0, first.shape[1]):  # some models return what they said without how it began
            begun = first[:: rows // batch, :left_out].repeat_interleave(several, 0)
            whole = torch.cat([begun, sequences], dim=1)
            ends = [_end(tokens, told, at // several, batch) for at, tokens in enumerate(whole)]
            if ends == [(last.turn, row) for row in range(rows)]:
                return None
            if None not in ends:
                return [end for end in ends if end is not None], whole
        raise Broken("the returned sequence is that of no row")


def _end(sequence: Tensor, told: list[tuple[int, Tensor]], prompt: int, batch: int) -> tuple[int, int] | None:
    """Turn and row of the longest tokens that a sequence begins with, among the rows of its prompt."""
    for turn, rows in reversed(told):
        length, beams = rows.shape[1], len(rows) // batch
        padding = sequence[length + 1 :]  # the last token is not fed, and what follows it says nothing
        if length <= len(sequence) and bool((padding == padding[:1]).all()):
            same = (rows[prompt * beams : (prompt + 1) * beams] == sequence[:length]).all(1).nonzero()
            if len(same):
                return turn, prompt * beams + int(same[0, 0])
    return None


# ------------------------------------------------------------------------------------- one layer


class Layer:
    """The steps of one layer, and its keys so far."""

    def __init__(self, name: str, kind: str, generation: Generation) -> None:
        self.name, self.kind, self.generation = name, kind, generation
        self.reads = tuple(generation.watcher.reads)  # the source's tokens among them
        self.fixed = kind == "cross"  # all steps attend to the same keys
        self.last: Step | None = None
        self.broken: str | None = None
        self._keys: Tensor | None = None  # (R, G, room, D) on the model's device, in today's order of rows
        self._length = 0

    @property
    def turns(self) -> set[int]:
        return set() if self.last is None else {step.turn for step in self.last.back()}

    def add(self, found: Found, turn: int, ids: Tensor | None) -> Step:
        kept, keeper = found.kept, self.generation.watcher.keeper
        if self.fixed and turn in self.generation.restarts:
            self._forget()
        past, seen, first = self._known(kept, turn)
        new = kept.key.detach()[:, :, past:seen].clone()
        self._append(new)
        part = replace(
            Part.of(kept),
            query=keeper.tensor(kept.query),
            mask=self.generation.mask(kept.mask, seen),
            change=keeper.change(kept),
            keys=seen,
            first=first,
        )
        tokens = None if ids is None else ids.cpu()
        new = keeper.tensor(new)
        self.last = Step(
            part, new, tokens, turn, self._length, self.last, kept.scale, kept.softcap, found.sink
        )
        return self.last

    def _known(self, kept: Kept, turn: int) -> tuple[int, int, int]:
        """Of a step's keys: how many are known, how many there are, and which of all is the first of them."""
        parents = self.generation.parents
        told = parents.get(turn, self.generation.told)
        _, _, queries, count = kept.shape
        length, past = self._length, count - queries
        if self._keys is None:
            # All that it can see: its own tokens, those of an earlier cache, or a source; of a static cache,
            # the room behind is left out.
            return 0, queries if _blocked_from(kept, queries) else count, 0
        known, key = self._keys[:, :, :length], kept.key.detach()
        may_be_fixed = (self.fixed or len(self.turns) == 1) and count == length
        if may_be_fixed and _moves(known, key, told) is not None:
            # Rows of a beam have the same source, up to the last bit: which of them a row is does not matter.
            self.fixed, self._keys = True, key
            return length, length, 0
        if self.fixed:
            raise Broken("the keys of its cross-attention change from step to step")
        if past == 0:
            self._forget()
            self.generation.restarts.add(turn)
            return 0, count, 0
        if past > length:
            if not _blocked_from(kept, length + queries):
                raise Broken("it attends to keys that no step has made")
            past = length
        if past < length and kept.score is as_given:
            raise Broken("it has scores alone, and these do not tell which keys were dropped from its cache")
        # A sliding window drops the first keys, an assistant whose guess was rejected the last ones.
        for first in dict.fromkeys((length - past, 0)):
            moved = _moves(known[:, :, first : first + past], key[:, :, :past], told)
            if moved is None:
                continue
            if not torch.equal(moved, torch.arange(len(known))):
                parents[turn] = moved
                self._keys = self._keys[moved.to(known.device)]
            if first == 0:
                self._cut(past)
            return past, past + queries, first
        raise Broken("its keys do not go on from those of the step before")

    def _forget(self) -> None:
        """Begin anew."""
        self.last, self._keys, self._length = None, None, 0

    def _cut(self, length: int) -> None:
        """Forget what came after so many keys."""
        while self.last is not None and self.last.length > length:
            extra = self.last.length - length
            whole = self.last.new.shape[2] <= extra
            self.last = self.last.before if whole else self.last.cut(extra)
        self._length = length

    def _append(self, new: Tensor) -> None:
        after = self._length + new.shape[2]
        if self._keys is None or after > self._keys.shape[2]:
            # Doubled, so that T steps copy O(T) and not O(T²).
            room = new.new_empty(*new.shape[:2], 2 * after, new.shape[3])
            if self._keys is not None:
                room[:, :, : self._length] = self._keys[:, :, : self._length]
            self._keys = room
        if new.shape[2]:
            self._keys[:, :, self._length : after] = new
        self._length = after


def _moves(known: Tensor, now: Tensor, told: Tensor | None) -> Tensor | None:
    """Which row of ``known`` each row of ``now`` is; None if one is none. ``told``: by others."""
    if known.shape[1:] != now.shape[1:]:
        return None
    for guess in (told, torch.arange(len(known))):
        if guess is not None and len(guess) == len(now) and torch.equal(known[guess.to(known.device)], now):
            return guess
    found = []
    ends = (known[None, :, :, -1] == now[:, None, :, -1]).flatten(2).all(2)  # (R now, R before)
    for row, candidates in enumerate(ends.cpu()):
        fits = (at for at in candidates.nonzero()[:, 0].tolist() if torch.equal(known[at], now[row]))
        at = next(fits, None)
        if at is None:
            return None
        found.append(at)
    return torch.tensor(found)


def _blocked_from(kept: Kept, place: int) -> bool:
    """Whether no query may attend to the keys from this place on: the last query sees most."""
    _, _, queries, keys = kept.shape
    if place >= keys:
        return True
    scores = kept.scores(0, slice(0, 1), slice(queries - 1, queries), slice(place, keys))
    return bool((scores == -torch.inf).all())


# ------------------------------------------------------------------------------- what entries show


class Walk:
    """All steps of a layer as one attention: of every row, or of the sequences that were returned."""

    def __init__(self, generation: Generation, last: Step, returned: Returned | None) -> None:
        self._generation = generation
        self._ends = [(last, torch.arange(len(last.part.query)))]
        self._tokens = None
        if returned is not None:
            ends, self._tokens = returned
            at = {step.turn: step for step in last.back()}
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
        ids = [step.ids for step in self._ends[0][0].back()]
        known = [one for one in reversed(ids) if one is not None]
        return torch.cat(known, dim=1) if len(known) == len(ids) else None


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
