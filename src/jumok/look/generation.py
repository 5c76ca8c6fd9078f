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

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jumok.look.adapters.site import Found, GenerateResult
from jumok.look.adapters.softmax import as_given
from jumok.look.kept import Kept
from jumok.look.sources import Pieces
from jumok.look.steps import Alone, Returned, Step, Walk
from jumok.look.stitch import Memo, Part, stitched

if TYPE_CHECKING:
    from jumok.look.watch import Watcher


class Broken(Exception):
    """It cannot be told how the steps follow from each other; the message says why."""


class Generation:
    """All layers in one call of ``generate``."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher
        self.layers: dict[tuple[str, int], Layer] = {}
        self.parents: dict[int, Tensor] = {}  # of each turn in which rows moved: where each came from
        self.told: Tensor | None = None  # how the search has moved the rows, for the step to come
        self.restarts: set[int] = set()  # turns in which everything was computed anew, without a cache
        self.memo: Memo = {}
        self.result: GenerateResult | None = None
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
        layer.calls += 1
        if layer.broken is not None:
            self._add_alone(layer, found)
            return
        rows, _, queries, _ = found.kept.shape
        ids = (read.ids for read in reversed(self.watcher.reads))
        mine = next((one for one in ids if one.shape == (rows, queries)), None)
        try:
            step = layer.add(found, turn, mine)
        except Broken as error:
            layer.broken = str(error)
            self._add_alone(layer, found)
            return
        self.watcher.seen.calls.append(self.watcher.entry(name, kind, Alone(self, step), layer.reads))

    def _add_alone(self, layer: Layer, found: Found) -> None:
        """Record a call of a layer whose steps do not follow from each other, with keys of its own."""
        kept = self.watcher.keeper.kept(found.kept)
        kept = replace(kept, key=kept.key.clone())  # the model's cache may write into them
        entry = self.watcher.entry(layer.name, layer.kind, Pieces(kept, found), layer.reads)
        self.watcher.seen.calls.append(entry)

    def mask(self, mask: Tensor | None, keys: int) -> Tensor | None:
        """The mask for the first so many keys; the same tensor for all layers that share it."""
        if mask is None:
            return None
        at = (id(mask), keys)
        if at not in self._masks:
            cut = mask[..., :keys] if mask.shape[-1] > keys else mask
            self._masks[at] = mask, self.watcher.keeper.mask(cut)
        return self._masks[at][1]

    def returns(self, result: GenerateResult) -> None:
        """``generate`` returned. It may be one that another called: the search itself, whose sequences are
        whole, is preferred to what a model makes of them; of several searches, the last one.
        """
        if self.result is None or result.includes_prompt >= self.result.includes_prompt:
            self.result = result

    def finish(self) -> None:
        """The entries of what was generated."""
        main, returned, why = self._main(), None, None
        try:
            if main is not None and self.result is not None:
                returned = self._returned(main, self.result)
        except Broken as error:
            why = str(error)
        for layer in self.layers.values():
            decodes = main is not None and layer.turns == main.turns
            reason = layer.broken or (why if decodes else None)
            if reason is not None:
                steps = f"{layer.calls} step{'s' * (layer.calls != 1)}"
                reason = f"its {steps} cannot be joined into one map ({reason}); each is in seen.calls"
                self.watcher.miss(layer.name, reason)
            elif layer.last is not None:
                source = Walk(self, layer.last, layer.earlier, returned if decodes else None)
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
        """The layer that tells how the decoder's rows moved: the first self-attention with most steps.

        Without a cache every layer has one step, the encoder's too: the decoder's is the later one.
        """
        some = [layer for layer in self.layers.values() if layer.last is not None and not layer.fixed]
        return max(some, key=lambda layer: (len(layer.turns), max(layer.turns)), default=None)

    def _returned(self, main: Layer, result: GenerateResult) -> Returned | None:
        """Where each returned sequence ended; None: all rows are returned, as they are at the end."""
        last, sequences = main.last, getattr(result.output, "sequences", result.output)
        assert last is not None
        if not isinstance(sequences, Tensor):
            return None
        sequences = sequences.cpu()
        rows, moved = len(last.new), bool(self.parents) or self.told is not None
        sampled = last.ids is None and last.before is not None  # or beam search, but then its cache moves
        if not moved and len(sequences) == rows and (rows == result.batch or sampled):
            return None
        history = [(step.turn, _known_ids(step)) for step in main.earlier] + self._tokens(last)
        several, first = len(sequences) // result.batch, history[0][1]
        if len(first) % result.batch or len(sequences) % result.batch:
            raise Broken(f"{len(sequences)} sequences were returned for {result.batch} prompts")
        begun = first[:: len(first) // result.batch].repeat_interleave(several, 0)
        # A ``generate`` of the model's own may return what it generated without the prompt.
        wholes = [sequences] if result.includes_prompt else [sequences, torch.cat([begun, sequences], dim=1)]
        fits: list[Returned] = []
        for whole in wholes:
            ends = [_end(tokens, history, at // several, result.batch) for at, tokens in enumerate(whole)]
            if None not in ends:
                fits.append(([end for end in ends if end is not None], whole))
        if not fits:
            raise Broken("the returned sequence is that of no row")
        if any(ends != fits[0][0] for ends, _ in fits):
            raise Broken("it cannot be told whether the returned sequences begin with the prompt")
        return None if fits[0][0] == [(last.turn, row) for row in range(rows)] else fits[0]

    def _tokens(self, last: Step) -> list[tuple[int, Tensor]]:
        """After each turn up to the last step, the tokens of every row so far."""
        history: list[tuple[int, Tensor]] = []
        for step in reversed(list(last.back())):
            ids = _known_ids(step)
            if history:
                since, before = history[-1]
                for turn in sorted(t for t in self.parents if since < t <= step.turn):
                    before = before[self.parents[turn]]
                ids = torch.cat([before, ids], dim=1)
            history.append((step.turn, ids))
        return history


def _known_ids(step: Step) -> Tensor:
    if step.ids is None:
        raise Broken("beam search over embeddings, not tokens: which beam was returned is not known")
    return step.ids


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
        self.earlier: list[Step] = []  # without a cache, each step computes all anew: those before the last
        self.calls = 0  # how often it attended
        self.broken: str | None = None  # why its steps cannot be joined
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
        if self.last is not None:
            self.earlier = [*self.earlier, self.last] if self.last.before is None else []
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
