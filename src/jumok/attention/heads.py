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

__all__ = ["MultiHead"]


class MultiHead(nn.Module):
    """Several attentions side by side, each on its own projection of queries, keys and values.

    A module is made for self-attention, or, with ``key_width``, for cross-attention. Nothing is kept on it
    between calls:

    - ``mha(x)``: self-attention of whole sequences.
    - ``out, cache = mha.step(x, cache)``: self-attention of new tokens that follow those in the cache.
    - ``mha.weights(x)``: where each head looks.
    - ``mha(x, source)``: cross-attention. ``mha.prepare(source)`` may stand in for the source, so that its
      keys and values are computed once for all steps.

    Args:
        width: of ``x``, and of the result.
        heads: H, for the queries.
        key_heads: Hk, for keys and values, each of which serves ``heads / num_key_heads`` queries' heads (grouped
            queries; 1 is multi-query). None: as many as the queries have.
        key_width: of the source of cross-attention. None: self-attention.
        head_width: D; None is ``width / heads``.
        bias: whether the projections add one.
        dropout: the share of the attention weights that is dropped in training.
        score: one of :mod:`jumok.scores` between vectors of width D, shared by all heads; None is scaled
            dot-product.
        softcap: as in :func:`jumok.attend`.

    >>> import jumok, torch
    >>> mha = jumok.MultiHead(width=12, heads=4, key_heads=2)
    >>> x = torch.randn(2, 5, 12)
    >>> whole = mha(x, mask=jumok.masks.causal())
    >>> whole.shape
    torch.Size([2, 5, 12])
    >>> first, cache = mha.step(x[:, :3], jumok.Cache())
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
            raise InputError(f"MultiHead(dropout={dropout}): a probability in [0, 1) is expected")
        self.width, self.key_width = width, key_width
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.head_width = width // num_heads if head_width is None else head_width
        self.dropout = dropout
        self.score, self.softcap = score, softcap
        query_size, key_size = num_heads * self.head_width, num_key_heads * self.head_width
        if key_width is None:
            # Queries, keys and values in one product, in this order.
            self.project = Projection(width, query_size + 2 * key_size, bias)
        else:
            self.project_query = Projection(width, query_size, bias)
            self.project_source = Projection(key_width, 2 * key_size, bias)  # keys, values
        self.merge = Projection(query_size, width, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each projection on its own by Glorot's rule, the biases at zero."""
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
        """Attend from ``x`` to itself, or to the source: ``(B, Q, width)``.

        Args:
            x: ``(B, Q, width)``.
            source: of cross-attention, ``(B, K, key_width)``, or what :meth:`prepare` gave.
            mask: one of :mod:`jumok.masks`, for weights ``(B, H, Q, K)``. Without one, all may attend to all.
                The padding of a prepared source is kept out in any case.
            bias: added to the scores, broadcasts to ``(B, H, Q, K)`` (T5's relative positions, ALiBi).
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
        """Where each head looks, ``(B, H, Q, K)``: the weights that the same call of the module mixes by."""
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
            cache: what the step before returned; ``KVCache()`` at the first.
            mask: for weights ``(B, H, T, K)``, K the cached keys and the new ones. None is
                ``cache.causal(T, lengths)``; a mask that is given takes its place, but what lies behind a
                row's end stays out. Where rows differ in length, a mask needs to know where each begins:
                ``masks.window(128, 0, offset=cache.offset)``.
            bias: as in :meth:`forward`.
            lengths: how many of the new tokens of each row are real; None: all of them.

        Returns:
            ``(B, T, width)``, and the cache that holds the new tokens too.
        """
        if not isinstance(cache, KVCache):
            raise InputError(
                f"MultiHead.step: {type(cache).__name__} came as the cache; the first is Cache()"
            )
        self._check_owner(cache)
        query, key, value = self._project_qkv(x)
        given = mask is not None
        if mask is None:
            mask = cache.build_causal_mask(x.shape[1], lengths)
        elif isinstance(cache.offset, tuple) and any(
            _is_aligned_to_last_key(part) for part in mask.conjuncts()
        ):
            raise InputError(
                f"MultiHead.step: the rows of the cache differ in length, so {mask!r} would begin at a wrong "
                "place; give the mask offset=cache.offset"
            )
        cache = replace(cache, owner=self).append(key, value, lengths)
        if given and cache.padding_mask is not None:
            mask = mask & cache.padding_mask
        return self._attend_and_merge(query, cache.key, cache.value, mask, bias), cache

    def prepare(self, source: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """Keys and values of a source ``(B, K, key_width)``: computed once, used at every step.

        ``lengths`` tells how many tokens of each row are real; None: all of them.
        """
        if self.key_width is None:
            raise InputError(
                "MultiHead was made for self-attention; to attend to a source, make it with the width of "
                f"that source: MultiHead(…, key_width={source.shape[-1]})"
            )
        _check_input("source", source, "key_width", self.key_width)
        key, value = self._split_qkv_heads(
            self.project_source(source), [self.num_key_heads, self.num_key_heads]
        )
        return KVCache(owner=self).append(key, value, lengths).zero_padding()

    def _project_inputs(
        self, x: Tensor, source: Tensor | KVCache | None, mask: Mask | None
    ) -> tuple[Tensor, Tensor, Tensor, Mask | None]:
        """Queries, keys and values of a whole call, and its mask with the padding known to the source."""
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
                "MultiHead: these keys and values were made by another module; each layer has a cache, and a "
                "prepared source, of its own"
            )

    def _project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, H, Q, D)``, keys and values ``(B, Hk, Q, D)`` of self-attention."""
        if self.key_width is not None:
            raise InputError(
                f"MultiHead(…, key_width={self.key_width}) was made for cross-attention: pass a source, as "
                "in mha(x, source); for self-attention leave key_width out"
            )
        _check_input("x", x, "width", self.width)
        query, key, value = self._split_qkv_heads(self.project(x), self._qkv_head_counts())
        return query, key, value

    def _project_query(self, x: Tensor, source: KVCache) -> Tensor:
        """The queries ``(B, H, Q, D)`` of cross-attention."""
        _check_input("x", x, "width", self.width)
        self._check_owner(source)
        heads, width = source.key.shape[1], source.key.shape[3]
        if self.key_width is None or (heads, width) != (self.num_key_heads, self.head_width):
            raise InputError(
                f"MultiHead: the source was prepared by another module, with {heads} heads of width {width}; "
                "give this one what its own prepare(source) makes"
            )
        return self._split_heads(self.project_query(x))

    def _qkv_head_counts(self) -> list[int]:
        """How many heads queries, keys and values have in the one product of self-attention."""
        return [self.num_heads, self.num_key_heads, self.num_key_heads]

    def _split_qkv_heads(self, x: Tensor, head_counts: list[int]) -> list[Tensor]:
        """``(B, T, · D)`` to ``(B, heads, T, D)``, one for each of these numbers of heads."""
        if type(x) is Tensor and x.is_cpu and len(set(head_counts)) == 1 and not is_tracing():
            # Fewer operations; only kernels for GPUs write the gradients side by side.
            return list(
                x.unflatten(2, (len(head_counts), -1, self.head_width)).permute(2, 0, 3, 1, 4).unbind()
            )
        return [self._split_heads(part) for part in split_qkv(x, [n * self.head_width for n in head_counts])]

    def _split_heads(self, x: Tensor) -> Tensor:
        """``(B, T, heads · D)`` to ``(B, heads, T, D)``."""
        return x.unflatten(2, (-1, self.head_width)).transpose(1, 2)  # type: ignore[no-any-return]

    def _attend_and_merge(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, bias: Tensor | None
    ) -> Tensor:
        mixed = attend(  # (B, H, Q, D)
            query,
            key,
            value,
            score=self.score,
            mask=mask,
            bias=bias,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        merged: Tensor = self.merge(mixed.transpose(1, 2).flatten(2))
        return merged


def _is_aligned_to_last_key(mask: Mask) -> bool:
    """Whether the mask is aligned to the last key, wherever that is."""
    return isinstance(mask, WindowMask) and mask.offset is None


def _check_sizes(
    width: int, num_heads: int, num_key_heads: int, key_width: int | None, head_width: int | None
) -> None:
    sizes = {"width": width, "heads": num_heads, "key_heads": num_key_heads}
    for name, size in {**sizes, "key_width": key_width, "head_width": head_width}.items():
        if size is not None and size < 1:
            raise InputError(f"MultiHead({name}={size}): 1 or more is expected")
    if head_width is None and width % num_heads:
        raise InputError(
            f"MultiHead(width={width}, heads={num_heads}): the width does not divide into the heads; "
            "change one of them, or give head_width="
        )
    if num_heads % num_key_heads:
        raise InputError(
            f"MultiHead(heads={num_heads}, key_heads={num_key_heads}): each key head serves equally many heads, "
            "so heads must be a multiple of key_heads"
        )


def _check_input(name: str, x: Tensor, argument: str, width: int) -> None:
    if x.dim() != 3 or x.shape[-1] != width:
        raise InputError(
            f"MultiHead: {name} of shape {tuple(x.shape)} came; expected (batch, length, {width}), with the "
            f"{argument} that the module was made for; a single sequence goes in as {name}[None]"
        )
