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

from jumok.look.capture.adapters.call_site import GenerateResult, ObservedCall
from jumok.look.capture.adapters.softmax import return_scores
from jumok.look.capture.capture_store import MergedCalls
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.generation_steps import (
    CapturedStep,
    GenerationAttention,
    ReturnedSequences,
    SingleStepAttention,
)
from jumok.look.capture.merge import AttentionPart, MaskCache, merge_parts

if TYPE_CHECKING:
    from jumok.look.capture.watch import CaptureObserver


class GenerationMergeError(Exception):
    """It cannot be told how the steps follow from each other; the message says why."""


class GenerationCapture:
    """All layers in one call of ``generate``."""

    def __init__(self, observer: CaptureObserver) -> None:
        self.observer = observer
        self.layers: dict[tuple[str, int], GenerationLayer] = {}
        self.row_parents: dict[int, Tensor] = {}  # of each turn in which rows moved: where each came from
        self.next_row_order: Tensor | None = None  # how the search has moved the rows, for the step to come
        self.restart_forwards: set[int] = (
            set()
        )  # turns in which everything was computed anew, without a cache
        self.mask_cache: MaskCache = {}
        self.result: GenerateResult | None = None
        self._forward_index = 0
        self._layer_calls: Counter[str] = Counter()  # of each layer in this turn
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # those of this turn, cut

    def add_call(self, name: str, kind: str, call: ObservedCall) -> None:
        """A layer attends."""
        turn = self.observer.module_stack.forward_index
        if turn != self._forward_index:
            self._forward_index, self._layer_calls, self._masks = turn, Counter(), {}
        at = (name, self._layer_calls[name])
        self._layer_calls[name] += 1
        layer = self.layers.setdefault(at, GenerationLayer(name, kind, self))
        layer.num_calls += 1
        if layer.failure_reason is not None:
            self._add_separate_call(layer, call)
            return
        rows, _, queries, _ = call.attention.shape
        ids = (read.ids for read in reversed(self.observer.lookups))
        mine = next((one for one in ids if one.shape == (rows, queries)), None)
        try:
            step = layer.add_step(call, turn, mine)
        except GenerationMergeError as error:
            layer.failure_reason = str(error)
            self._add_separate_call(layer, call)
            return
        self.observer.captures.calls.append(
            self.observer.build_layer(name, kind, SingleStepAttention(self, step), layer.lookups)
        )

    def _add_separate_call(self, layer: GenerationLayer, call: ObservedCall) -> None:
        """Record a call of a layer whose steps do not follow from each other, with keys of its own."""
        kept = self.observer.store.detach_attention(call.attention)
        kept = replace(kept, key=kept.key.clone())  # the model's cache may write into them
        entry = self.observer.build_layer(layer.name, layer.kind, MergedCalls(kept, call), layer.lookups)
        self.observer.captures.calls.append(entry)

    def slice_mask(self, mask: Tensor | None, num_keys: int) -> Tensor | None:
        """The mask for the first so many keys; the same tensor for all layers that share it."""
        if mask is None:
            return None
        at = (id(mask), num_keys)
        if at not in self._masks:
            cut = mask[..., :num_keys] if mask.shape[-1] > num_keys else mask
            self._masks[at] = mask, self.observer.store.detach_mask(cut)
        return self._masks[at][1]

    def set_result(self, result: GenerateResult) -> None:
        """``generate`` returned. It may be one that another called: the search itself, whose sequences are
        whole, is preferred to what a model makes of them; of several searches, the last one.
        """
        if self.result is None or result.includes_prompt >= self.result.includes_prompt:
            self.result = result

    def build_captures(self) -> None:
        """The entries of what was generated."""
        main, returned, why = self._find_decoder_layer(), None, None
        try:
            if main is not None and self.result is not None:
                returned = self._locate_returned(main, self.result)
        except GenerationMergeError as error:
            why = str(error)
        for layer in self.layers.values():
            decodes = main is not None and layer.forward_indices == main.forward_indices
            reason = layer.failure_reason or (why if decodes else None)
            if reason is not None:
                steps = f"{layer.num_calls} step{'s' * (layer.num_calls != 1)}"
                reason = f"its {steps} cannot be joined into one map ({reason}); each is in seen.calls"
                self.observer.on_missed_attention(layer.name, reason)
            elif layer.last_step is not None:
                source = GenerationAttention(
                    self, layer.last_step, layer.earlier_steps, returned if decodes else None
                )
                entry = self.observer.build_layer(layer.name, layer.kind, source, layer.lookups)
                self.observer.captures.layers.append(entry)

    def clear(self) -> None:
        """Let go of what only the next step would have needed."""
        self.layers, self._masks = {}, {}

    def trace_rows(self, step: CapturedStep, rows: Tensor) -> list[tuple[CapturedStep, Tensor]]:
        """The steps up to this one, and the row of each in which ``rows`` lived then."""
        path = []
        for one in step.iterate_back():
            path.append((one, rows))
            since = -1 if one.previous is None else one.previous.forward_index
            for turn in sorted((t for t in self.row_parents if since < t <= one.forward_index), reverse=True):
                rows = self.row_parents[turn][rows]
        return path[::-1]

    def merge_steps(self, step: CapturedStep, rows: Tensor) -> CapturedAttention:
        """The attention of some rows, from the first step to this one."""
        path = self.trace_rows(step, rows)
        moved = any(not torch.equal(at, torch.arange(len(one.new_keys))) for one, at in path)
        parts = [one.part.select_rows(at) if moved else one.part for one, at in path]
        return merge_parts(parts, self.gather_keys(path), step.scale, step.softcap, self.mask_cache)

    def gather_keys(self, path: list[tuple[CapturedStep, Tensor]]) -> Tensor:
        """The keys of all steps, each from its own row."""
        return torch.cat([one.new_keys[at.to(one.new_keys.device)] for one, at in path], dim=2)

    def _find_decoder_layer(self) -> GenerationLayer | None:
        """The layer that tells how the decoder's rows moved: the first self-attention with most steps.

        Without a cache every layer has one step, the encoder's too: the decoder's is the later one.
        """
        some = [
            layer
            for layer in self.layers.values()
            if layer.last_step is not None and not layer.has_fixed_keys
        ]
        return max(
            some, key=lambda layer: (len(layer.forward_indices), max(layer.forward_indices)), default=None
        )

    def _locate_returned(
        self, decoder_layer: GenerationLayer, result: GenerateResult
    ) -> ReturnedSequences | None:
        """Where each returned sequence ended; None: all rows are returned, as they are at the end."""
        last, sequences = decoder_layer.last_step, getattr(result.output, "sequences", result.output)
        assert last is not None
        if not isinstance(sequences, Tensor):
            return None
        sequences = sequences.cpu()
        rows, moved = len(last.new_keys), bool(self.row_parents) or self.next_row_order is not None
        sampled = (
            last.token_ids is None and last.previous is not None
        )  # or beam search, but then its cache moves
        if not moved and len(sequences) == rows and (rows == result.batch_size or sampled):
            return None
        history = [
            (step.forward_index, _require_ids(step)) for step in decoder_layer.earlier_steps
        ] + self._list_row_tokens(last)
        several, first = len(sequences) // result.batch_size, history[0][1]
        if len(first) % result.batch_size or len(sequences) % result.batch_size:
            raise GenerationMergeError(
                f"{len(sequences)} sequences were returned for {result.batch_size} prompts"
            )
        begun = first[:: len(first) // result.batch_size].repeat_interleave(several, 0)
        # A ``generate`` of the model's own may return what it generated without the prompt.
        wholes = [sequences] if result.includes_prompt else [sequences, torch.cat([begun, sequences], dim=1)]
        fits: list[ReturnedSequences] = []
        for whole in wholes:
            ends = [
                _find_sequence_end(tokens, history, at // several, result.batch_size)
                for at, tokens in enumerate(whole)
            ]
            if None not in ends:
                fits.append(([end for end in ends if end is not None], whole))
        if not fits:
            raise GenerationMergeError("the returned sequence is that of no row")
        if any(ends != fits[0][0] for ends, _ in fits):
            raise GenerationMergeError(
                "it cannot be told whether the returned sequences begin with the prompt"
            )
        return None if fits[0][0] == [(last.forward_index, row) for row in range(rows)] else fits[0]

    def _list_row_tokens(self, last_step: CapturedStep) -> list[tuple[int, Tensor]]:
        """After each turn up to the last step, the tokens of every row so far."""
        history: list[tuple[int, Tensor]] = []
        for step in reversed(list(last_step.iterate_back())):
            ids = _require_ids(step)
            if history:
                since, before = history[-1]
                for turn in sorted(t for t in self.row_parents if since < t <= step.forward_index):
                    before = before[self.row_parents[turn]]
                ids = torch.cat([before, ids], dim=1)
            history.append((step.forward_index, ids))
        return history


def _require_ids(step: CapturedStep) -> Tensor:
    if step.token_ids is None:
        raise GenerationMergeError(
            "beam search over embeddings, not tokens: which beam was returned is not known"
        )
    return step.token_ids


def _find_sequence_end(
    sequence: Tensor, history: list[tuple[int, Tensor]], prompt_index: int, batch_size: int
) -> tuple[int, int] | None:
    """Turn and row of the longest tokens that a sequence begins with, among the rows of its prompt."""
    for turn, rows in reversed(history):
        length, beams = rows.shape[1], len(rows) // batch_size
        padding = sequence[length + 1 :]  # the last token is not fed, and what follows it says nothing
        if length <= len(sequence) and bool((padding == padding[:1]).all()):
            same = (
                (rows[prompt_index * beams : (prompt_index + 1) * beams] == sequence[:length])
                .all(1)
                .nonzero()
            )
            if len(same):
                return turn, prompt_index * beams + int(same[0, 0])
    return None


# ------------------------------------------------------------------------------------- one layer


class GenerationLayer:
    """The steps of one layer, and its keys so far."""

    def __init__(self, name: str, kind: str, generation: GenerationCapture) -> None:
        self.name, self.kind, self.generation = name, kind, generation
        self.lookups = tuple(generation.observer.lookups)  # the source's tokens among them
        self.has_fixed_keys = kind == "cross"  # all steps attend to the same keys
        self.last_step: CapturedStep | None = None
        self.earlier_steps: list[
            CapturedStep
        ] = []  # without a cache, each step computes all anew: those before the last
        self.num_calls = 0  # how often it attended
        self.failure_reason: str | None = None  # why its steps cannot be joined
        self._key_buffer: Tensor | None = (
            None  # (R, G, room, D) on the model's device, in today's order of rows
        )
        self._num_keys = 0

    @property
    def forward_indices(self) -> set[int]:
        return (
            set()
            if self.last_step is None
            else {step.forward_index for step in self.last_step.iterate_back()}
        )

    def add_step(self, call: ObservedCall, forward_index: int, token_ids: Tensor | None) -> CapturedStep:
        kept, keeper = call.attention, self.generation.observer.store
        if self.has_fixed_keys and forward_index in self.generation.restart_forwards:
            self._restart()
        past, seen, first = self._locate_keys(kept, forward_index)
        new = kept.key.detach()[:, :, past:seen].clone()
        self._append_keys(new)
        part = replace(
            AttentionPart.from_attention(kept),
            query=keeper.detach_tensor(kept.query),
            mask=self.generation.slice_mask(kept.mask, seen),
            score_mod=keeper.move_score_mod(kept),
            num_keys=seen,
            first_key=first,
        )
        tokens = None if token_ids is None else token_ids.cpu()
        new = keeper.detach_tensor(new)
        self.last_step = CapturedStep(
            part,
            new,
            tokens,
            forward_index,
            self._num_keys,
            self.last_step,
            kept.scale,
            kept.softcap,
            call.sink,
        )
        return self.last_step

    def _locate_keys(self, attention: CapturedAttention, forward_index: int) -> tuple[int, int, int]:
        """Of a step's keys: how many are known, how many there are, and which of all is the first of them."""
        parents = self.generation.row_parents
        told = parents.get(forward_index, self.generation.next_row_order)
        _, _, queries, count = attention.shape
        length, past = self._num_keys, count - queries
        if self._key_buffer is None:
            # All that it can see: its own tokens, those of an earlier cache, or a source; of a static cache,
            # the room behind is left out.
            return 0, queries if _is_blocked_from(attention, queries) else count, 0
        known, key = self._key_buffer[:, :, :length], attention.key.detach()
        may_be_fixed = (self.has_fixed_keys or len(self.forward_indices) == 1) and count == length
        if may_be_fixed and _match_rows(known, key, told) is not None:
            # Rows of a beam have the same source, up to the last bit: which of them a row is does not matter.
            self.has_fixed_keys, self._key_buffer = True, key
            return length, length, 0
        if self.has_fixed_keys:
            raise GenerationMergeError("the keys of its cross-attention change from step to step")
        if past == 0:
            self._restart()
            self.generation.restart_forwards.add(forward_index)
            return 0, count, 0
        if past > length:
            if not _is_blocked_from(attention, length + queries):
                raise GenerationMergeError("it attends to keys that no step has made")
            past = length
        if past < length and attention.score_function is return_scores:
            raise GenerationMergeError(
                "it has scores alone, and these do not tell which keys were dropped from its cache"
            )
        # A sliding window drops the first keys, an assistant whose guess was rejected the last ones.
        for first in dict.fromkeys((length - past, 0)):
            moved = _match_rows(known[:, :, first : first + past], key[:, :, :past], told)
            if moved is None:
                continue
            if not torch.equal(moved, torch.arange(len(known))):
                parents[forward_index] = moved
                self._key_buffer = self._key_buffer[moved.to(known.device)]
            if first == 0:
                self._truncate(past)
            return past, past + queries, first
        raise GenerationMergeError("its keys do not go on from those of the step before")

    def _restart(self) -> None:
        """Begin anew."""
        if self.last_step is not None:
            self.earlier_steps = (
                [*self.earlier_steps, self.last_step] if self.last_step.previous is None else []
            )
        self.last_step, self._key_buffer, self._num_keys = None, None, 0

    def _truncate(self, num_keys: int) -> None:
        """Forget what came after so many keys."""
        while self.last_step is not None and self.last_step.num_keys > num_keys:
            extra = self.last_step.num_keys - num_keys
            whole = self.last_step.new_keys.shape[2] <= extra
            self.last_step = self.last_step.previous if whole else self.last_step.truncate(extra)
        self._num_keys = num_keys

    def _append_keys(self, new_keys: Tensor) -> None:
        after = self._num_keys + new_keys.shape[2]
        if self._key_buffer is None or after > self._key_buffer.shape[2]:
            # Doubled, so that T steps copy O(T) and not O(T²).
            room = new_keys.new_empty(*new_keys.shape[:2], 2 * after, new_keys.shape[3])
            if self._key_buffer is not None:
                room[:, :, : self._num_keys] = self._key_buffer[:, :, : self._num_keys]
            self._key_buffer = room
        if new_keys.shape[2]:
            self._key_buffer[:, :, self._num_keys : after] = new_keys
        self._num_keys = after


def _match_rows(previous: Tensor, current: Tensor, row_order: Tensor | None) -> Tensor | None:
    """Which row of ``previous`` each row of ``current`` is; None if one is none. ``told``: by others."""
    if previous.shape[1:] != current.shape[1:]:
        return None
    for guess in (row_order, torch.arange(len(previous))):
        if (
            guess is not None
            and len(guess) == len(current)
            and torch.equal(previous[guess.to(previous.device)], current)
        ):
            return guess
    found = []
    ends = (previous[None, :, :, -1] == current[:, None, :, -1]).flatten(2).all(2)  # (R now, R before)
    for row, candidates in enumerate(ends.cpu()):
        fits = (at for at in candidates.nonzero()[:, 0].tolist() if torch.equal(previous[at], current[row]))
        at = next(fits, None)
        if at is None:
            return None
        found.append(at)
    return torch.tensor(found)


def _is_blocked_from(attention: CapturedAttention, position: int) -> bool:
    """Whether no query may attend to the keys from this place on: the last query sees most."""
    _, _, queries, keys = attention.shape
    if position >= keys:
        return True
    scores = attention.compute_scores(0, slice(0, 1), slice(queries - 1, queries), slice(position, keys))
    return bool((scores == -torch.inf).all())
