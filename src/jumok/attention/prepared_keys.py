"""Keys that a score has already projected, and the cache that the steps of a decoding loop share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from jumok.attention.caching import BoundedCache, get_tensor_version, is_capturing_cuda_graph

if TYPE_CHECKING:
    from jumok.attention.scores import Score

T = TypeVar("T")
PREPARED_CACHE_SIZE = 4  # entries that prepared keys cache for the steps of a loop


@dataclass(frozen=True, eq=False)
class PreparedKeys:
    """Keys ``(…, K, width)`` as a score compares them, computed once per source by ``score.prepare(keys)``.

    Values that the steps of a loop share are cached here, not on a module.
    """

    keys: Tensor
    score_name: str
    owner: Score | None = field(default=None, repr=False)  # the score whose parameters projected the keys
    owner_version: int = -1  # how often its key projection had been written to; -1 if unknown
    _cache: BoundedCache = field(default_factory=lambda: BoundedCache(PREPARED_CACHE_SIZE), repr=False)

    def get_or_compute(self, name: Hashable, inputs: tuple[Tensor, ...], compute: Callable[[], T]) -> T:
        """Return the cached value ``name``, or compute it. It stays valid while ``inputs`` do not change."""
        if torch.compiler.is_compiling():
            return compute()
        state = tuple((x.requires_grad, get_tensor_version(x)) for x in inputs)
        key = (name, torch.is_grad_enabled(), is_capturing_cuda_graph(), state, *map(id, inputs))
        # The entry holds the inputs, so that no other tensor gets their ids.
        value, _ = self._cache.get_or_compute(key, lambda: (compute(), inputs))
        return value

    def reorder(self, index: Tensor) -> PreparedKeys:
        """Return the rows ``index`` of the batch, in that order. A row may be repeated or left out."""
        keys = self.keys.index_select(0, index)
        return PreparedKeys(keys, self.score_name, self.owner, self.owner_version)

    def __repr__(self) -> str:
        return f"PreparedKeys({tuple(self.keys.shape)}, by {self.score_name})"

    def clear_cache(self) -> None:
        """Drop the values that the steps so far have shared."""
        self._cache.clear()


KeyLike = Tensor | PreparedKeys
