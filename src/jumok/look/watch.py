"""See where a PyTorch model attends, while it runs its own kernels and says the same to the bit."""

from __future__ import annotations

import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jumok.errors import InputError
from jumok.look.adapters import listening
from jumok.look.adapters.compiled import uncompiled
from jumok.look.adapters.maps import UNUSED
from jumok.look.adapters.site import Found, GenerateResult, Listener
from jumok.look.adapters.trail import Frame, class_name, kind_by_name, looks_like_attention, may_attend
from jumok.look.generation import Generation
from jumok.look.kept import Kept
from jumok.look.seen import Entry, Seen, Source, matches
from jumok.look.sources import Keeper, Pieces, goes_on
from jumok.look.tokens import Read, as_ids, token_embeddings

Keep = str | Sequence[str] | Callable[[str], bool]

READS = 8  # token ids that are remembered: those of the two sides of some models
WAYS = (
    "the attention of Hugging Face's models, F.scaled_dot_product_attention, nn.MultiheadAttention and "
    "nn.Transformer…, FlexAttention, jumok.attend, and a softmax whose output multiplies values"
)


@contextmanager
def watch(
    model: nn.Module,
    tokenizer: Any = None,
    keep: Keep | None = None,
    device: torch.device | str | None = None,
) -> Iterator[Seen]:
    """See every attention call that ``model`` makes, whatever kernels it runs; its output stays as it is.

    Queries, keys and the model's own mask are kept by reference, O(length) beside that mask, and weights are
    computed from them when they are asked for: those before dropout.

    Args:
        model: any module: of Hugging Face, of ``torch.nn``, of yours, of jumok.
        tokenizer: to write the tokens along the axes: of Hugging Face or of jumok, or a function from a list
            of token ids to their texts.
        keep: which layers to keep: a name, in which * stands for anything, several of these, or a function
            that says of a name whether. None: all.
        device: where to, "cpu" to spare a GPU's memory. None: everything stays where it is.

    >>> model = torch.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True).eval()
    >>> with watch(model) as seen:
    ...     y = model(torch.randn(1, 5, 8))
    >>> seen
    1 attention:
        0 <self_attn: self, 1 × 2 × 5 × 5>
    >>> seen["self_attn"].weights(batch=0, head=1).shape
    torch.Size([5, 5])
    """
    watcher = Watcher(
        uncompiled(model, "watch"),
        tokenizer,
        _chooser(keep),
        None if device is None else torch.device(device),
    )
    with listening(watcher):
        yield watcher.seen
    watcher.conclude()


class Watcher(Listener):
    """Keeps what the adapters tell of."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, wanted: Callable[[str], bool], device: torch.device | None
    ) -> None:
        super().__init__(model)
        self.seen = Seen()
        self.generation: Generation | None = None
        self.tokenizer, self.wanted, self.keeper = tokenizer, wanted, Keeper(device)
        self.reads: deque[Read] = deque(maxlen=READS)
        self.unwanted: Counter[str] = Counter()
        self.ran: Counter[str] = Counter()
        self._embeddings = token_embeddings(model)
        self._expected: set[str] = set()  # missed because of their names alone
        self._turn = 0
        self._open: dict[str, tuple[Pieces, Kept]] = {}  # each layer's last in this turn, and as it was found

    def generation_begins(self) -> None:
        self.generation = Generation(self)

    def generation_returns(self, result: GenerateResult) -> None:
        if self.generation is not None:
            self.generation.returns(result)

    def generation_ends(self, finished: bool) -> None:
        generation, self.generation = self.generation, None
        if generation is not None:
            if finished:
                generation.finish()
            generation.forget()

    def rows_moved(self, rows: Tensor) -> None:
        if self.generation is not None:
            self.generation.told = rows

    def enter(self, module: nn.Module, name: str, args: Any) -> None:
        self.ran[name] += 1
        if id(module) in self._embeddings and (ids := as_ids(args)) is not None:
            frame = self.trail.frame
            self.reads.append(Read(name, frame.name if frame else "", ids))

    def leave(self, frame: Frame) -> None:
        for name, found, _ in frame.weighed:
            self.see(name, found)
        super().leave(frame)
        if may_attend(frame.module) and not frame.saw and not frame.reported:
            scripted = isinstance(frame.module, torch.jit.ScriptModule)
            how = "is scripted, and runs without Python" if scripted else "attends in a way that is not seen"
            self._expected.add(frame.name)
            self.miss(frame.name, f"{class_name(frame.module)} {how}")

    def see(self, name: str, found: Found) -> None:
        if not self.wanted(name):
            self.unwanted[name] += 1
            return
        kind = found.kind or self._kind(name, found.kept)
        if self.generation is not None:
            self.generation.add(name, kind, found)
            return
        if self._turn != self.trail.turn:
            self._turn, self._open = self.trail.turn, {}
        pieces, before = self._open.get(name, (None, found.kept))
        if pieces is not None and goes_on(before, found.kept):
            kept = replace(self.keeper.kept(found.kept), key=pieces.first.key)
            pieces.append(Pieces(kept, found))
            self._open[name] = pieces, found.kept
        else:
            kept = self.keeper.kept(found.kept)
            pieces = Pieces(kept, found)
            if self.keeper.device is not None:  # then what was found is not to be held longer than needed
                self._open = {}
            self._open[name] = pieces, found.kept
            self.seen.entries.append(self.entry(name, kind, pieces))
        self.seen.calls.append(self.entry(name, kind, Pieces(kept, found)))

    def miss(self, name: str, reason: str) -> None:
        self.seen.unseen[name] = reason

    def entry(self, name: str, kind: str, source: Source, reads: Sequence[Read] | None = None) -> Entry:
        reads = tuple(self.reads) if reads is None else reads
        return Entry(name, kind, source, reads, self.tokenizer, self.trail.turn, self.ran[name])

    def _kind(self, name: str, kept: Kept) -> str:
        frame = self.trail.frame
        told = kind_by_name(name, None if frame is None else frame.module)
        if told is not None:
            return told
        _, _, queries, keys = kept.shape
        cached = self.generates or kept.diagonal is not None
        return "self" if queries == keys or cached else "cross"

    def conclude(self) -> None:
        """Say what was not seen. If nothing was, that is an error: an empty answer would look like one."""
        known = {*self.seen.names, *self.unwanted}
        unseen = self.seen.unseen
        for name, reason in list(unseen.items()):
            sure = name in known and reason != UNUSED and name not in self._expected  # another of its calls
            if not self.wanted(name) or (self._is_part(name, known) and not sure):
                del unseen[name]
        listed = "; ".join(f"{name}: {why}" for name, why in list(unseen.items())[:8])
        if self.seen.entries:
            if unseen:
                warnings.warn(f"watch could not see all attention. {listed}", stacklevel=4)
            return
        if unseen and self.seen.calls:
            calls = f"seen.calls has all {len(self.seen.calls)} calls, but no layer has an entry in seen"
            raise InputError(f"{calls}. {listed}")
        if unseen:
            raise InputError(f"watch saw no attention. {listed}. What can be seen: {WAYS}")
        if self.unwanted:
            ran = ", ".join(list(self.unwanted)[:12])
            raise InputError(f"keep= chose none of the layers that ran: {ran}")
        if not self.ran:
            raise InputError(
                "watch saw nothing: the model was not called inside the with block, or in another thread, or "
                "only as compiled by torch.compile, which runs without Python; call the model itself there, "
                'in the thread that watches, or with torch.compiler.set_stance("force_eager")'
            )
        raise InputError(
            f"watch saw no attention in the {len(self.ran)} modules that ran, such as "
            f"{', '.join(list(self.ran)[-3:])}. What can be seen: {WAYS}"
        )

    def _is_part(self, name: str, known: set[str]) -> bool:
        """Whether a module is one of these, or part of one that attends: then it is seen with it."""
        above = (name[: dot.start()] for dot in re.finditer(r"\.", name))
        return name in known or any(
            one in known and looks_like_attention(self.trail.named(one)) for one in above
        )


def _chooser(keep: Keep | None) -> Callable[[str], bool]:
    if keep is None:
        return lambda name: True
    if callable(keep):
        return keep
    patterns = [keep] if isinstance(keep, str) else list(keep)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise InputError(f"keep={keep!r} came; names of layers, or a function of a name, are expected")
    return lambda name: any(matches(name, pattern) for pattern in patterns)
