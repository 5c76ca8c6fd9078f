"""Keys as a score wants them, and what the steps of a loop over them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from jumok.attention.memo import Memo, capturing

if TYPE_CHECKING:
    from jumok.attention.scores import Score

T = TypeVar("T")
REMEMBERED = 4  # things that prepared keys keep for the steps over them; the oldest goes first


@dataclass(frozen=True, eq=False)
class Prepared:
    """Keys as a score wants them, computed once per source by ``score.prepare(keys)``.

    ``keys`` is ``(…, K, width)``. ``maker`` is the score with the parameters that made them; None when it has
    none. What the steps of a loop over these keys share is kept with them, not on any module.
    """

    keys: Tensor
    made_by: str
    maker: Score | None = field(default=None, repr=False)
    made_at: int = -1  # how often the maker's weight had been written to; -1: not known
    _memo: Memo = field(default_factory=lambda: Memo(REMEMBERED), repr=False)

    def remember(self, what: Hashable, of: tuple[Tensor, ...], make: Callable[[], T]) -> T:
        """What ``make`` gives, made once for these keys and the tensors ``of`` while those do not change."""
        if torch.compiler.is_compiling():
            return make()
        state = tuple((x.requires_grad, version_of(x)) for x in of)
        key = (what, torch.is_grad_enabled(), capturing(), state, *map(id, of))
        return self._memo.remember(key, lambda: (make(), of))[0]  # with ``of``: so no id is given to another

    def reorder(self, index: Tensor) -> Prepared:
        """The rows ``index`` of the batch, in that order; a row may come twice or never (beam search)."""
        chosen = self.keys.index_select(0, index)
        return Prepared(chosen, self.made_by, self.maker, self.made_at)

    def __repr__(self) -> str:
        return f"Prepared(keys {tuple(self.keys.shape)}, by {self.made_by})"

    def forget(self) -> None:
        """Drop what the steps so far shared."""
        self._memo.clear()


Key = Tensor | Prepared


def version_of(x: Tensor) -> int:
    """How often ``x`` was written to; -1 where nobody counts."""
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version
