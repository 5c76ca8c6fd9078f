"""Keys as a score wants them, and what the steps of a loop over them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from jumok.attention.caching import BoundedCache, is_capturing_cuda_graph

if TYPE_CHECKING:
    from jumok.attention.scores import Score

T = TypeVar("T")
PREPARED_CACHE_SIZE = 4  # things that prepared keys keep for the steps over them; the oldest goes first


@dataclass(frozen=True, eq=False)
class PreparedKeys:
    """Keys as a score wants them, computed once per source by ``score.prepare(keys)``.

    ``keys`` is ``(…, K, width)``. ``owner`` is the score with the parameters that made them; None when it has
    none. What the steps of a loop over these keys share is kept with them, not on any module.
    """

    keys: Tensor
    score_name: str
    owner: Score | None = field(default=None, repr=False)
    owner_version: int = -1  # how often the maker's weight had been written to; -1: not known
    _cache: BoundedCache = field(default_factory=lambda: BoundedCache(PREPARED_CACHE_SIZE), repr=False)

    def get_or_compute(self, name: Hashable, inputs: tuple[Tensor, ...], compute: Callable[[], T]) -> T:
        """What ``compute`` gives, made once for these keys and the tensors ``of`` while those do not change."""
        if torch.compiler.is_compiling():
            return compute()
        state = tuple((x.requires_grad, get_tensor_version(x)) for x in inputs)
        key = (name, torch.is_grad_enabled(), is_capturing_cuda_graph(), state, *map(id, inputs))
        return self._cache.get_or_compute(key, lambda: (compute(), inputs))[
            0
        ]  # with ``of``: so no id is given to another

    def reorder(self, index: Tensor) -> PreparedKeys:
        """The rows ``index`` of the batch, in that order; a row may come twice or never (beam search)."""
        chosen = self.keys.index_select(0, index)
        return PreparedKeys(chosen, self.score_name, self.owner, self.owner_version)

    def __repr__(self) -> str:
        return f"Prepared(keys {tuple(self.keys.shape)}, by {self.score_name})"

    def clear_cache(self) -> None:
        """Drop what the steps so far shared."""
        self._cache.clear()


KeyLike = Tensor | PreparedKeys


def get_tensor_version(x: Tensor) -> int:
    """How often ``x`` was written to; -1 where nobody counts."""
    return -1 if torch.compiler.is_compiling() or x.is_inference() else x._version
