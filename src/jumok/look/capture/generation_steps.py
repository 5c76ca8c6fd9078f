"""The steps of a generation as capture sources: all steps as one attention, or a single step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture.capture_store import add_sink
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.merge import AttentionPart, merge_batch, merge_parts

if TYPE_CHECKING:
    from jumok.look.capture.generation import GenerationCapture

# For each returned sequence the forward index and the row in which it ended; and all of its tokens.
ReturnedSequences = tuple[list[tuple[int, int]], Tensor]


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """What one forward of the model added to one layer."""

    part: AttentionPart
    new_keys: Tensor  # (R, G, new keys, D)
    token_ids: Tensor | None  # (R, Q): the tokens of the queries
    forward_index: int
    num_keys: int  # the keys so far
    previous: CapturedStep | None
    scale: float
    softcap: float | None
    sink: Tensor | None  # (H,) or (R, H, Q)
    lse: Tensor | None  # (R, H, Q), of scores whose weights were modified

    def iterate_back(self) -> Iterator[CapturedStep]:
        """Iterate over the step and those before it, latest first."""
        step: CapturedStep | None = self
        while step is not None:
            yield step
            step = step.previous

    def truncate(self, num_tokens: int) -> CapturedStep:
        """Return the step without its last tokens."""
        part = self.part.truncate(self.part.num_queries - num_tokens, self.part.num_keys - num_tokens)
        ids = None if self.token_ids is None else self.token_ids[:, :-num_tokens]
        return replace(
            self,
            part=part,
            new_keys=self.new_keys[:, :, :-num_tokens],
            sink=self.sink[..., :-num_tokens] if self.sink is not None and self.sink.dim() == 3 else self.sink,
            lse=None if self.lse is None else self.lse[..., :-num_tokens],
            token_ids=ids,
            num_keys=self.num_keys - num_tokens,
        )


class GenerationAttention:
    """All steps of a layer as one attention: for every row, or for the sequences that were returned."""

    def __init__(
        self,
        generation: GenerationCapture,
        last_step: CapturedStep,
        earlier_steps: Sequence[CapturedStep],
        returned: ReturnedSequences | None,
    ) -> None:
        self._generation = generation
        self._final_steps = [(last_step, torch.arange(len(last_step.part.query)))]
        self._token_ids = None
        if returned is not None:
            ends, self._token_ids = returned
            steps = {step.forward_index: step for step in (*earlier_steps, *last_step.iterate_back())}
            self._final_steps = [(steps[forward_index], torch.tensor([row])) for forward_index, row in ends]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows = sum(len(rows) for _, rows in self._final_steps)
        num_queries = max(
            sum(previous.part.num_queries for previous in step.iterate_back()) for step, _ in self._final_steps
        )
        num_keys = max(step.num_keys for step, _ in self._final_steps)
        return rows, self._final_steps[0][0].part.query.shape[1], num_queries, num_keys

    @functools.cached_property
    def attention(self) -> CapturedAttention:
        attentions = [self._generation.merge_steps(step, rows) for step, rows in self._final_steps]
        attention = attentions[0] if len(attentions) == 1 else merge_batch(attentions)
        lse, sink = self._merge_rows("lse", attention.shape[2]), self._final_steps[0][0].sink
        if lse is not None:
            attention = replace(attention, lse=lse)
        if sink is not None and sink.dim() == 3:
            sink = self._merge_rows("sink", attention.shape[2])
        return attention if sink is None else add_sink(attention, sink)

    def _merge_rows(self, name: Literal["lse", "sink"], num_queries: int) -> Tensor | None:
        """Return the numbers that all steps have for their rows, ``(R, H, Q)``; None if they have none."""
        sequences = []
        for last_step, rows in self._final_steps:
            values = [
                None if (x := getattr(step, name)) is None else x[step_rows.to(x.device)]
                for step, step_rows in self._generation.trace_rows(last_step, rows)
            ]
            numbers = [x for x in values if x is not None]
            if not numbers:
                return None
            if len(numbers) < len(values):
                raise InputError("only some steps modify their weights; each step is in captures.calls")
            merged = torch.cat(numbers, dim=2)
            sequences.append(F.pad(merged, (0, num_queries - merged.shape[2])))
        return torch.cat(sequences)

    @functools.cached_property
    def query_ids(self) -> Tensor | None:
        if self._token_ids is not None:
            return self._token_ids[:, : self.shape[2]].cpu()
        path = self._generation.trace_rows(*self._final_steps[0])
        token_ids = [step.token_ids.cpu()[rows] for step, rows in path if step.token_ids is not None]
        return torch.cat(token_ids, dim=1) if len(token_ids) == len(path) else None


class SingleStepAttention:
    """A single step of a layer, as the model computed it."""

    def __init__(self, generation: GenerationCapture, step: CapturedStep) -> None:
        self._generation, self._step = generation, step

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, heads, queries, _ = self._step.part.query.shape
        return rows, heads, queries, self._step.part.num_keys

    @functools.cached_property
    def attention(self) -> CapturedAttention:
        step, part = self._step, self._step.part
        keys = self._generation.gather_keys(self._generation.trace_rows(step, torch.arange(len(part.query))))
        visible = keys[:, :, part.first_key : part.first_key + part.num_keys]
        attention = merge_parts([replace(part, first_key=0)], visible, step.scale, step.softcap)
        attention = attention if step.lse is None else replace(attention, lse=step.lse)
        return attention if step.sink is None else add_sink(attention, step.sink)

    @property
    def query_ids(self) -> Tensor | None:
        return None if self._step.token_ids is None else self._step.token_ids.cpu()
