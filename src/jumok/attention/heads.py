"""Multi-head attention: project, split into heads, attend, merge.

Shapes: ``B`` batch, ``H`` heads of the queries, ``Hk`` heads of keys and values, ``Q`` queries, ``K`` keys,
``D`` width of a head.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from jumok.attention.caching import is_tracing
from jumok.attention.compiled_block import Projection
from jumok.attention.core import attend, weights
from jumok.attention.kv_cache import KVCache, PerRowInts
from jumok.attention.mask_types import WindowMask
from jumok.attention.masks import Mask
from jumok.attention.scores import Score
from jumok.attention.split_qkv import split_qkv
from jumok.errors import InputError


class MultiHead(nn.Module):
    """Multi-head attention. Each head attends on its own projection of queries, keys and values.

    A module does self-attention or, with ``key_width``, cross-attention. It stores nothing between calls:

    - ``mha(x)``: self-attention of whole sequences.
    - ``out, cache = mha.step(x, cache)``: self-attention of new tokens that follow those in the cache.
    - ``mha.weights(x)``: the attention weights of each head.
    - ``mha(x, source)``: cross-attention. Pass ``mha.prepare(source)`` in place of the source to compute its
      keys and values once for all steps.

    Args:
        width: the width of ``x`` and of the result.
        num_heads: H, the number of query heads.
        num_key_heads: Hk, the number of key and value heads. Each serves ``num_heads / num_key_heads`` query
            heads (grouped queries; 1 is multi-query attention). Default: ``num_heads``.
        key_width: the width of the source of cross-attention. Default: self-attention.
        head_width: D, the width of a head. Default: ``width / num_heads``.
        bias: whether the projections have a bias.
        dropout: probability with which an attention weight is dropped in training.
        score: one of :mod:`jumok.scores` for vectors of width D, shared by all heads. Default: scaled dot
            product.
        softcap: as in :func:`jumok.attend`.

    >>> import jumok, torch
    >>> mha = jumok.MultiHead(width=12, num_heads=4, num_key_heads=2)
    >>> x = torch.randn(2, 5, 12)
    >>> whole = mha(x, mask=jumok.masks.causal())
    >>> whole.shape
    torch.Size([2, 5, 12])
    >>> first, cache = mha.step(x[:, :3], jumok.KVCache())
    >>> rest, cache = mha.step(x[:, 3:], cache)
    >>> torch.allclose(torch.cat([first, rest], dim=1), whole, atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        num_key_heads: int | None = None,
        key_width: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        score: Score | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        _check_sizes(width, num_heads, num_key_heads, key_width, head_width)
        if not 0 <= dropout < 1:
            raise InputError(f"MultiHead(dropout={dropout}): expected a probability in [0, 1)")
        self.width, self.key_width = width, key_width
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.head_width = width // num_heads if head_width is None else head_width
        self.dropout = dropout
        self.score, self.softcap = score, softcap
        query_size, key_size = num_heads * self.head_width, num_key_heads * self.head_width
        if key_width is None:
            # One matrix product computes queries, keys and values, in this order.
            self.project = Projection(width, query_size + 2 * key_size, bias)
        else:
            self.project_query = Projection(width, query_size, bias)
            self.project_source = Projection(key_width, 2 * key_size, bias)  # keys, values
        self.merge = Projection(query_size, width, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each projection separately by Glorot's rule, and the biases to zero."""
        if self.key_width is None:
            weights = self.project.weight.split([n * self.head_width for n in self._qkv_head_counts()])
        else:
            weights = (self.project_query.weight, *self.project_source.weight.chunk(2))
        for weight in (*weights, self.merge.weight):
            nn.init.xavier_uniform_(weight)
        for layer in self.children():
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        source: Tensor | KVCache | None = None,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``x`` to itself or to the source. Returns ``(B, Q, width)``.

        Args:
            x: ``(B, Q, width)``.
            source: of cross-attention, ``(B, K, key_width)``, or the result of :meth:`prepare`.
            mask: one of :mod:`jumok.masks`, for weights ``(B, H, Q, K)``. Default: every query sees every
                key, except the padding of a prepared source, which is always masked.
            bias: added to the scores. It broadcasts to ``(B, H, Q, K)`` (T5's relative positions, ALiBi).
        """
        query, key, value, mask = self._project_inputs(x, source, mask)
        return self._attend_and_merge(query, key, value, mask, bias)

    def weights(
        self,
        x: Tensor,
        source: Tensor | KVCache | None = None,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention weights ``(B, H, Q, K)`` that the same call of the module uses."""
        query, key, _, mask = self._project_inputs(x, source, mask)
        return weights(query, key, score=self.score, mask=mask, bias=bias, softcap=self.softcap)

    def step(
        self,
        x: Tensor,
        cache: KVCache,
        *,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        lengths: PerRowInts | None = None,
    ) -> tuple[Tensor, KVCache]:
        """Self-attention of new tokens, one or several, that follow those in the cache.

        Args:
            x: the T new tokens, ``(B, T, width)``.
            cache: the cache that the previous step returned; ``KVCache()`` at the first step.
            mask: for weights ``(B, H, T, K)``, where K counts the cached and the new keys. Default:
                ``cache.build_causal_mask(T, lengths)``. Positions after the end of a row are always masked.
                If the rows differ in length, give the mask their offsets:
                ``masks.window(128, 0, offset=cache.offset)``.
            bias: as in :meth:`forward`.
            lengths: how many of the new tokens of each row are real. Default: all.

        Returns:
            The output ``(B, T, width)``, and the cache that contains the new tokens too.
        """
        if not isinstance(cache, KVCache):
            raise InputError(
                f"MultiHead.step: the cache must be a KVCache, not {type(cache).__name__}; "
                "the first step takes KVCache()"
            )
        self._check_owner(cache)
        query, key, value = self._project_qkv(x)
        has_own_mask = mask is not None
        if mask is None:
            mask = cache.build_causal_mask(x.shape[1], lengths)
        elif isinstance(cache.offset, tuple) and any(
            _is_aligned_to_last_key(conjunct) for conjunct in mask.conjuncts()
        ):
            raise InputError(
                f"MultiHead.step: the rows of the cache differ in length, so {mask!r} would start at a wrong "
                "position; give the mask offset=cache.offset"
            )
        cache = replace(cache, owner=self).append(key, value, lengths)
        if has_own_mask and cache.padding_mask is not None:
            mask = mask & cache.padding_mask
        return self._attend_and_merge(query, cache.key, cache.value, mask, bias), cache

    def prepare(self, source: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """Compute keys and values of a source ``(B, K, key_width)`` once, for use at every step.

        ``lengths`` is the number of real tokens of each row. Default: all.
        """
        if self.key_width is None:
            raise InputError(
                "this MultiHead does self-attention; to attend to a source, create it with the width of "
                f"the source: MultiHead(…, key_width={source.shape[-1]})"
            )
        _check_input("source", source, "key_width", self.key_width)
        key, value = self._split_qkv_heads(self.project_source(source), [self.num_key_heads, self.num_key_heads])
        return KVCache(owner=self).append(key, value, lengths).zero_padding()

    def _project_inputs(
        self, x: Tensor, source: Tensor | KVCache | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
        """Return queries, keys and values of a call, and its mask combined with the padding of the source."""
        if source is None:
            return *self._project_qkv(x), mask
        if not isinstance(source, KVCache):
            source = self.prepare(source)
        query = self._project_query(x, source)
        if source.padding_mask is not None:
            mask = source.padding_mask if mask is None else mask & source.padding_mask
        return query, source.key, source.value, mask

    def _check_owner(self, cache: KVCache) -> None:
        if cache.owner is not None and cache.owner is not self:
            raise InputError(
                "MultiHead: these keys and values were computed by another module; each layer needs its own "
                "cache and its own prepared source"
            )

    def _project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``(B, H, Q, D)``, keys and values ``(B, Hk, Q, D)`` of self-attention."""
        if self.key_width is not None:
            raise InputError(
                f"MultiHead(…, key_width={self.key_width}) does cross-attention: pass a source, as in "
                "mha(x, source); for self-attention, omit key_width"
            )
        _check_input("x", x, "width", self.width)
        query, key, value = self._split_qkv_heads(self.project(x), self._qkv_head_counts())
        return query, key, value

    def _project_query(self, x: Tensor, source: KVCache) -> Tensor:
        """Return the queries ``(B, H, Q, D)`` of cross-attention."""
        _check_input("x", x, "width", self.width)
        self._check_owner(source)
        num_heads, width = source.key.shape[1], source.key.shape[3]
        if self.key_width is None or (num_heads, width) != (self.num_key_heads, self.head_width):
            raise InputError(
                f"MultiHead: the source was prepared by another module, with {num_heads} heads of width "
                f"{width}; pass the result of this module's own prepare(source)"
            )
        return self._split_heads(self.project_query(x))

    def _qkv_head_counts(self) -> list[int]:
        """Return the number of heads of queries, keys and values in the projection of self-attention."""
        return [self.num_heads, self.num_key_heads, self.num_key_heads]

    def _split_qkv_heads(self, x: Tensor, head_counts: list[int]) -> list[Tensor]:
        """Split ``(B, T, · D)`` into one ``(B, heads, T, D)`` for each of these numbers of heads."""
        if type(x) is Tensor and x.is_cpu and len(set(head_counts)) == 1 and not is_tracing():
            # Fewer operations. Only GPU kernels write the gradients next to each other.
            return list(x.unflatten(2, (len(head_counts), -1, self.head_width)).permute(2, 0, 3, 1, 4).unbind())
        return list(split_qkv(self._split_heads(x), head_counts))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape ``(B, T, heads · D)`` to ``(B, heads, T, D)``."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)  # type: ignore[no-any-return]

    def _attend_and_merge(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, bias: Tensor | None
    ) -> Tensor:
        out = attend(  # (B, H, Q, D)
            query,
            key,
            value,
            score=self.score,
            mask=mask,
            bias=bias,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        merged: Tensor = self.merge(out.transpose(1, 2).flatten(2))
        return merged


def _is_aligned_to_last_key(mask: Mask) -> bool:
    """Return whether the mask is aligned bottom-right, relative to the last key."""
    return isinstance(mask, WindowMask) and mask.offset is None


def _check_sizes(width: int, num_heads: int, num_key_heads: int, key_width: int | None, head_width: int | None) -> None:
    sizes = {
        "width": width,
        "num_heads": num_heads,
        "num_key_heads": num_key_heads,
        "key_width": key_width,
        "head_width": head_width,
    }
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise InputError(f"MultiHead({name}={size}): expected 1 or more")
    if head_width is None and width % num_heads:
        raise InputError(
            f"MultiHead(width={width}, num_heads={num_heads}): the width is not a multiple of num_heads; "
            "change one of them, or give head_width="
        )
    if num_heads % num_key_heads:
        raise InputError(
            f"MultiHead(num_heads={num_heads}, num_key_heads={num_key_heads}): each key head serves the same "
            "number of query heads, so num_heads must be a multiple of num_key_heads"
        )


def _check_input(name: str, x: Tensor, argument: str, width: int) -> None:
    if x.dim() != 3 or x.shape[-1] != width:
        raise InputError(
            f"MultiHead: {name} has shape {tuple(x.shape)}; expected (batch, length, {width}), where {width} "
            f"is the {argument} of the module; pass a single sequence as {name}[None]"
        )
