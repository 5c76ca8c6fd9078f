"""The steps of ``model.generate(…)``, merged into one attention per layer over prompt and generated tokens.

The keys of a step begin with those of the steps before. This shows which row a step continues, for any type
of cache: only the new keys of each step are stored, and a row whose earlier keys are those of *another* row
of the previous step has been moved there by beam search::

    step 1   row 0  a b c          step 2   row 0  d e f G      continues row 1
             row 1  d e f                   row 1  d e f H      continues row 1

Attention that is written out by hand has scores and no keys. In this case the search reports how it reorders
its cache. The rows of a returned sequence follow from these moves and from its tokens. The last token is
never fed to the model, so it has no row.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jumok.look.capture.capture_store import MergedCalls
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.generation_steps import (
    CapturedStep,
    GenerationAttention,
    ReturnedSequences,
    SingleStepAttention,
)
from jumok.look.capture.merge import AttentionPart, MaskCache, merge_parts
from jumok.look.capture.observer import GenerateResult, ObservedCall

if TYPE_CHECKING:
    from jumok.look.capture.captures import CapturedLayer
    from jumok.look.capture.watch import CaptureObserver


class GenerationMergeError(Exception):
    """The steps of a generation cannot be merged; the message gives the reason."""


class GenerationCapture:
    """All layers in one call of ``generate``."""

    def __init__(self, observer: CaptureObserver) -> None:
        self.observer = observer
        self.layers: dict[tuple[str, int], GenerationLayer] = {}
        self.row_parents: dict[int, Tensor] = {}  # by forward index, if rows moved: where each came from
        self.next_row_order: Tensor | None = None  # how the search has reordered the rows for the next step
        # Forward indices at which everything was computed again, without a cache.
        self.restart_forwards: set[int] = set()
        self.mask_cache: MaskCache = {}
        self.result: GenerateResult | None = None
        self._forward_index = 0
        self._layer_calls: Counter[str] = Counter()  # of each layer in this forward
        self._masks: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # sliced masks of this forward
        self._token_ids: dict[int, tuple[Tensor, Tensor]] = {}  # tokens of this forward, and their copies

    def add_call(self, name: str, kind: str, call: ObservedCall) -> None:
        """Add an attention call of a layer."""
        forward_index = self.observer.module_stack.forward_index
        if forward_index != self._forward_index:
            self._forward_index, self._layer_calls = forward_index, Counter()
            self._masks, self._token_ids = {}, {}
        key = (name, self._layer_calls[name])
        self._layer_calls[name] += 1
        layer = self.layers.setdefault(key, GenerationLayer(name, kind, self))
        layer.num_calls += 1
        if layer.failure_reason is not None:
            self._add_separate_call(layer, call)
            return
        rows, _, num_queries, _ = call.attention.shape
        token_ids = self._find_tokens((rows, num_queries))
        try:
            step = layer.add_step(call, forward_index, token_ids)
        except GenerationMergeError as error:
            layer.failure_reason = str(error)
            self._add_separate_call(layer, call)
            return
        captured_step = self.observer.build_layer(name, kind, SingleStepAttention(self, step), layer.lookups)
        layer.calls.append(captured_step)
        self.observer.captures.calls.append(captured_step)

    def _find_tokens(self, shape: tuple[int, int]) -> Tensor | None:
        """Return a copy of the tokens of this shape ``(R, Q)`` that were embedded last; layers share it."""
        ids = (lookup.ids for lookup in reversed(self.observer.lookups))
        tokens = next((candidate for candidate in ids if candidate.shape == shape), None)
        if tokens is None:
            return None
        if id(tokens) not in self._token_ids:
            self._token_ids[id(tokens)] = tokens, tokens.detach().clone()
        return self._token_ids[id(tokens)][1]

    def _add_separate_call(self, layer: GenerationLayer, call: ObservedCall) -> None:
        """Add a call of a layer whose steps cannot be merged, with its own keys."""
        attention = self.observer.store.detach_attention(call.attention)
        attention = replace(attention, key=attention.key.clone())  # the model's cache may overwrite them
        captured_layer = self.observer.build_layer(layer.name, layer.kind, MergedCalls(attention, call), layer.lookups)
        self.observer.captures.calls.append(captured_layer)

    def slice_mask(self, mask: Tensor | None, num_keys: int) -> Tensor | None:
        """Return the mask of the first ``num_keys`` keys; the same tensor for all layers that share it."""
        if mask is None:
            return None
        key = (id(mask), num_keys)
        if key not in self._masks:
            sliced = mask[..., :num_keys] if mask.shape[-1] > num_keys else mask
            self._masks[key] = mask, self.observer.store.detach_mask(sliced)
        return self._masks[key][1]

    def set_result(self, result: GenerateResult) -> None:
        """Store the return value of ``generate``, which may be nested.

        The search itself, whose sequences are complete, takes precedence over what a model returns from it;
        of several searches, the last one is used.
        """
        if self.result is None or result.includes_prompt >= self.result.includes_prompt:
            self.result = result

    def build_captures(self) -> None:
        """Build the captured layers of the generation."""
        for layer in self.layers.values():
            try:
                layer.verify_keys()
            except GenerationMergeError as error:
                layer.failure_reason = str(error)
        decoder_layer, returned, merge_error = self._find_decoder_layer(), None, None
        try:
            if decoder_layer is not None and self.result is not None:
                returned = self._locate_returned(decoder_layer, self.result)
        except GenerationMergeError as error:
            merge_error = str(error)
        for layer in self.layers.values():
            is_decoder = decoder_layer is not None and layer.forward_indices == decoder_layer.forward_indices
            reason = layer.failure_reason or (merge_error if is_decoder else None)
            if reason is not None:
                steps = f"{layer.num_calls} step{'s' * (layer.num_calls != 1)}"
                place = "; each is in captures.calls" if layer.calls else ""
                reason = f"its {steps} cannot be merged into one map ({reason}){place}"
                self.observer.on_missed_attention(layer.name, reason)
            elif layer.last_step is not None:
                source = GenerationAttention(
                    self, layer.last_step, layer.earlier_steps, returned if is_decoder else None
                )
                captured_layer = self.observer.build_layer(layer.name, layer.kind, source, layer.lookups)
                self.observer.captures.layers.append(captured_layer)

    def clear(self) -> None:
        """Release what only the next step would need."""
        self.layers, self._masks = {}, {}

    def trace_rows(self, step: CapturedStep, rows: Tensor) -> list[tuple[CapturedStep, Tensor]]:
        """Return the steps up to this one, each with the rows that ``rows`` had then."""
        path = []
        for current in step.iterate_back():
            path.append((current, rows))
            for parents in reversed(self._list_moves(current)):
                rows = parents[rows]
        return path[::-1]

    def _list_moves(self, step: CapturedStep) -> list[Tensor]:
        """Return how rows moved between the previous step and this one: for each move, where they came from."""
        previous_index = -1 if step.previous is None else step.previous.forward_index
        return [self.row_parents[t] for t in sorted(self.row_parents) if previous_index < t <= step.forward_index]

    def merge_steps(self, step: CapturedStep, rows: Tensor) -> CapturedAttention:
        """Return the attention of some rows, from the first step to this one."""
        path = self.trace_rows(step, rows)
        has_moved = any(
            not torch.equal(step_rows, torch.arange(len(path_step.new_keys))) for path_step, step_rows in path
        )
        parts = [
            path_step.part.select_rows(step_rows) if has_moved else path_step.part for path_step, step_rows in path
        ]
        return merge_parts(parts, self.gather_keys(path), step.scale, step.softcap, self.mask_cache)

    def gather_keys(self, path: list[tuple[CapturedStep, Tensor]]) -> Tensor:
        """Return the keys of all steps, each from its own row."""
        return torch.cat([step.new_keys[rows.to(step.new_keys.device)] for step, rows in path], dim=2)

    def _find_decoder_layer(self) -> GenerationLayer | None:
        """Return the layer that shows how the decoder's rows moved: the first self-attention with most steps.

        Without a cache, every layer has one step, including the encoder's: the decoder's is the later one.
        """
        candidates = [
            layer for layer in self.layers.values() if layer.last_step is not None and not layer.has_fixed_keys
        ]
        return max(
            candidates,
            key=lambda layer: (len(layer.forward_indices), max(layer.forward_indices)),
            default=None,
        )

    def _locate_returned(self, decoder_layer: GenerationLayer, result: GenerateResult) -> ReturnedSequences | None:
        """Return where each returned sequence ended; None: all rows are returned, as they are at the end."""
        last_step, sequences = decoder_layer.last_step, getattr(result.output, "sequences", result.output)
        assert last_step is not None
        if not isinstance(sequences, Tensor):
            return None
        sequences = sequences.cpu()
        num_rows, has_moved = len(last_step.new_keys), bool(self.row_parents) or self.next_row_order is not None
        # Sampling, or beam search, but then its cache moves.
        is_sampled = last_step.token_ids is None and last_step.previous is not None
        if not has_moved and len(sequences) == num_rows and (num_rows == result.batch_size or is_sampled):
            return None
        earlier = [(step.forward_index, _require_ids(step)) for step in decoder_layer.earlier_steps]
        history = earlier + self._list_row_tokens(last_step)
        num_per_prompt, first = len(sequences) // result.batch_size, history[0][1]
        if len(first) % result.batch_size or len(sequences) % result.batch_size:
            raise GenerationMergeError(f"{len(sequences)} sequences were returned for {result.batch_size} prompts")
        prompts = first[:: len(first) // result.batch_size].repeat_interleave(num_per_prompt, 0)
        # A ``generate`` method of the model may return the generated tokens without the prompt.
        candidates = [sequences] if result.includes_prompt else [sequences, torch.cat([prompts, sequences], dim=1)]
        fits: list[ReturnedSequences] = []
        for candidate in candidates:
            ends = [
                _find_sequence_end(tokens, history, i // num_per_prompt, result.batch_size)
                for i, tokens in enumerate(candidate)
            ]
            if None not in ends:
                fits.append(([end for end in ends if end is not None], candidate))
        if not fits:
            raise GenerationMergeError("the returned sequence matches no row")
        if any(ends != fits[0][0] for ends, _ in fits):
            raise GenerationMergeError("it is ambiguous whether the returned sequences begin with the prompt")
        return None if fits[0][0] == [(last_step.forward_index, row) for row in range(num_rows)] else fits[0]

    def _list_row_tokens(self, last_step: CapturedStep) -> list[tuple[int, Tensor]]:
        """Return, after each forward up to the last step, the tokens of every row so far."""
        history: list[tuple[int, Tensor]] = []
        for step in reversed(list(last_step.iterate_back())):
            ids = _require_ids(step)
            if history:
                _, previous_ids = history[-1]
                for parents in self._list_moves(step):
                    previous_ids = previous_ids[parents]
                ids = torch.cat([previous_ids, ids], dim=1)
            history.append((step.forward_index, ids))
        return history


def _require_ids(step: CapturedStep) -> Tensor:
    if step.token_ids is None:
        raise GenerationMergeError("beam search over embeddings, not tokens: it is unknown which beam was returned")
    return step.token_ids.cpu()


def _find_sequence_end(
    sequence: Tensor, history: list[tuple[int, Tensor]], prompt_index: int, batch_size: int
) -> tuple[int, int] | None:
    """Return forward index and row of the longest prefix of a sequence, among the rows of its prompt."""
    for forward_index, rows in reversed(history):
        length, beam_size = rows.shape[1], len(rows) // batch_size
        padding = sequence[length + 1 :]  # the last token is not fed to the model, the rest is padding
        if length <= len(sequence) and bool((padding == padding[:1]).all()):
            matches = (
                (rows[prompt_index * beam_size : (prompt_index + 1) * beam_size] == sequence[:length]).all(1).nonzero()
            )
            if len(matches):
                return forward_index, prompt_index * beam_size + int(matches[0, 0])
    return None


# ------------------------------------------------------------------------------------- one layer


class GenerationLayer:
    """The steps of one layer, and its keys so far."""

    def __init__(self, name: str, kind: str, generation: GenerationCapture) -> None:
        self.name, self.kind, self.generation = name, kind, generation
        self.lookups = tuple(generation.observer.lookups)  # includes the tokens of the source
        self.has_fixed_keys = kind == "cross"  # all steps attend to the same keys
        self.last_step: CapturedStep | None = None
        # Without a cache, each step computes everything again: the steps before the last one.
        self.earlier_steps: list[CapturedStep] = []
        self.num_calls = 0
        self.calls: list[CapturedLayer] = []  # its steps, each by itself
        self.failure_reason: str | None = None  # why its steps cannot be merged
        # (R, G, capacity, D) on the model's device, in the current order of rows.
        self._key_buffer: Tensor | None = None
        self._num_keys = 0
        # While every step appends to a single row, no keys are compared: a comparison in each step would read the
        # whole cache and wait for the GPU. These are the keys of the last step, which are compared at the end.
        self._unverified_keys: Tensor | None = None

    @property
    def forward_indices(self) -> set[int]:
        return set() if self.last_step is None else {step.forward_index for step in self.last_step.iterate_back()}

    def add_step(self, call: ObservedCall, forward_index: int, token_ids: Tensor | None) -> CapturedStep:
        attention, store = call.attention, self.generation.observer.store
        if self.has_fixed_keys and forward_index in self.generation.restart_forwards:
            self._restart()
        past, num_keys, first_key = self._locate_keys(attention, forward_index)
        new_keys = attention.key.detach()[:, :, past:num_keys].clone()
        self._append_keys(new_keys)
        part = AttentionPart(
            store.detach_tensor(attention.query),
            num_keys,
            first_key,
            self.generation.slice_mask(attention.mask, num_keys),
            attention.diagonal,
            attention.window,
            store.move_score_mod(attention),
            attention.score_function,
        )
        new_keys = store.detach_tensor(new_keys)
        self.last_step = CapturedStep(
            part,
            new_keys,
            token_ids,
            forward_index,
            self._num_keys,
            self.last_step,
            attention.scale,
            attention.softcap,
            None if call.sink is None else store.detach_tensor(call.sink),
            # The lse of scores shows that their weights were modified. Otherwise it can be computed again.
            store.detach_tensor(attention.lse) if attention.has_only_scores and attention.lse is not None else None,
        )
        return self.last_step

    def _locate_keys(self, attention: CapturedAttention, forward_index: int) -> tuple[int, int, int]:
        """Return how many keys of a step are known, how many it has, and the index of the first of them."""
        parents = self.generation.row_parents
        row_order = parents.get(forward_index, self.generation.next_row_order)
        _, _, num_queries, num_keys = attention.shape
        num_stored, num_past = self._num_keys, num_keys - num_queries
        key = attention.key.detach()
        is_single_row = len(key) == 1 and row_order is None and not attention.has_only_scores
        if self.last_step is None:
            # All keys that are visible: its own tokens, those of an earlier cache, or a source. The unused
            # part of a static cache is left out.
            if is_single_row and not self.has_fixed_keys and num_past == 0:
                self._unverified_keys = key
            return 0, num_queries if _is_blocked_from(attention, num_queries) else num_keys, 0
        if self._unverified_keys is not None:
            if is_single_row and num_past == num_stored:
                self._unverified_keys = key
                return num_past, num_keys, 0
            self.verify_keys(min(num_past, num_stored))
            self._num_keys = 0
            self._append_keys(self._concatenate_keys().to(key.device))
        assert self._key_buffer is not None
        stored = self._key_buffer[:, :, :num_stored]
        is_second = self.last_step.previous is None
        if (
            (self.has_fixed_keys or is_second)
            and num_keys == num_stored
            and _match_rows(stored, key, row_order) is not None
        ):
            # Rows of a beam have an identical source: which of them a row is does not matter.
            self.has_fixed_keys, self._key_buffer = True, key
            return num_stored, num_stored, 0
        if self.has_fixed_keys:
            raise GenerationMergeError("the keys of its cross-attention change from step to step")
        if num_past == 0:
            self._restart()
            self.generation.restart_forwards.add(forward_index)
            return 0, num_keys, 0
        if num_past > num_stored:
            if not _is_blocked_from(attention, num_stored + num_queries):
                raise GenerationMergeError("it attends to keys that no step has computed")
            num_past = num_stored
        if num_past < num_stored and attention.has_only_scores:
            raise GenerationMergeError("it has only scores, which do not show which keys were dropped from its cache")
        # A sliding window drops the first keys, assisted decoding drops the last ones after a rejection.
        for first in dict.fromkeys((num_stored - num_past, 0)):
            order = _match_rows(stored[:, :, first : first + num_past], key[:, :, :num_past], row_order)
            if order is None:
                continue
            if not torch.equal(order, torch.arange(len(stored))):
                parents[forward_index] = order
                self._key_buffer = self._key_buffer[order.to(stored.device)]
            if first == 0:
                self._truncate(num_past)
            return num_past, num_past + num_queries, first
        raise GenerationMergeError("its keys do not continue those of the previous step")

    def verify_keys(self, num_keys: int | None = None) -> None:
        """Check that the first keys of the last step, or all of them, are those that the steps appended."""
        unverified, self._unverified_keys = self._unverified_keys, None
        if unverified is None or self.last_step is None or self.last_step.previous is None:
            return
        num_keys = self._num_keys if num_keys is None else num_keys
        appended = self._concatenate_keys()[:, :, :num_keys]
        if not torch.equal(unverified[:, :, :num_keys].to(appended.device), appended):
            # The keys that its steps saw are lost.
            calls, self.calls = set(map(id, self.calls)), []
            captures = self.generation.observer.captures
            captures.calls = [call for call in captures.calls if id(call) not in calls]
            raise GenerationMergeError("its cache changes the keys of earlier steps")

    def _concatenate_keys(self) -> Tensor:
        """Return the keys of all steps ``(R, G, K, D)``, which have moved no row."""
        assert self.last_step is not None
        return torch.cat([step.new_keys for step in self.last_step.iterate_back()][::-1], dim=2)

    def _restart(self) -> None:
        """Start again without keys."""
        if self.last_step is not None:
            self.earlier_steps = [*self.earlier_steps, self.last_step] if self.last_step.previous is None else []
        self.last_step, self._key_buffer, self._unverified_keys, self._num_keys = None, None, None, 0

    def _truncate(self, num_keys: int) -> None:
        """Drop all keys after the first ``num_keys``."""
        while self.last_step is not None and self.last_step.num_keys > num_keys:
            num_extra = self.last_step.num_keys - num_keys
            is_whole = self.last_step.new_keys.shape[2] <= num_extra
            self.last_step = self.last_step.previous if is_whole else self.last_step.truncate(num_extra)
        self._num_keys = num_keys

    def _append_keys(self, new_keys: Tensor) -> None:
        num_after = self._num_keys + new_keys.shape[2]
        if self._unverified_keys is not None:
            self._num_keys = num_after
            return
        if self._key_buffer is None or num_after > self._key_buffer.shape[2]:
            # The capacity doubles, so that T steps copy O(T) keys and not O(T²).
            buffer = new_keys.new_empty(*new_keys.shape[:2], 2 * num_after, new_keys.shape[3])
            if self._key_buffer is not None:
                buffer[:, :, : self._num_keys] = self._key_buffer[:, :, : self._num_keys]
            self._key_buffer = buffer
        if new_keys.shape[2]:
            self._key_buffer[:, :, self._num_keys : num_after] = new_keys
        self._num_keys = num_after


def _match_rows(previous: Tensor, current: Tensor, row_order: Tensor | None) -> Tensor | None:
    """Return which row of ``previous`` each row of ``current`` is, or None. ``row_order`` is tried first."""
    if previous.shape[1:] != current.shape[1:]:
        return None
    for order in (row_order, torch.arange(len(previous))):
        if (
            order is not None
            and len(order) == len(current)
            and torch.equal(previous[order.to(previous.device)], current)
        ):
            return order
    matches = []
    ends = (previous[None, :, :, -1] == current[:, None, :, -1]).flatten(2).all(2)  # (R now, R before)
    for row, candidates in enumerate(ends.cpu()):
        fits = (
            candidate
            for candidate in candidates.nonzero()[:, 0].tolist()
            if torch.equal(previous[candidate], current[row])
        )
        candidate = next(fits, None)
        if candidate is None:
            return None
        matches.append(candidate)
    return torch.tensor(matches)


def _is_blocked_from(attention: CapturedAttention, position: int) -> bool:
    """Return whether no query may attend to the keys from this position on: the last query sees most."""
    _, _, num_queries, num_keys = attention.shape
    if position >= num_keys:
        return True
    scores = attention.compute_scores(0, slice(0, 1), slice(num_queries - 1, num_queries), slice(position, num_keys))
    return bool((scores == -torch.inf).all())
