"""Functions of FlashAttention with the signatures of its versions, written in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

PAGE_SIZE = 3
computed_weights: list[Tensor] = []  # of each sequence (H, Q, K)


# ------------------------------------------------------------------------ what the functions compute


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    slopes: Tensor | None = None,
    first_key: int = 0,
    chunk: int = 0,
    sink: Tensor | None = None,
) -> Tensor:
    """One sequence: queries ``(Q, H, D)``, keys ``(K, G, D)``. Masks are aligned at the end."""
    num_queries, num_keys = len(q), len(k)
    left, right = (float("inf") if size is None or size < 0 else size for size in window_size)
    right = 0 if causal else right
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    positions = range(num_keys - num_queries, num_keys)
    distances = torch.tensor([[float(abs(p - j)) for j in range(num_keys)] for p in positions])
    is_visible = torch.tensor(
        [
            [
                first_key <= j and p - left <= j <= p + right and (not chunk or j // chunk == p // chunk)
                for j in range(num_keys)
            ]
            for p in positions
        ]
    )
    scores = scores if slopes is None else scores - slopes[:, None, None] * distances
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :num_keys]
    computed_weights.append(weights)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], 1))


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Tensor:
    slopes = options.pop("alibi_slopes", None)
    out = torch.zeros_like(q)
    for n in range(len(cu_seqlens_q) - 1):
        rows, cols = (slice(int(cu[n]), int(cu[n + 1])) for cu in (cu_seqlens_q, cu_seqlens_k))
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        out[rows] = attend(q[rows], k[cols], v[cols], slopes=own_slopes, **options)
    return out


def to_pages(x: Tensor, table: Tensor) -> Tensor:
    """Return pages ``(pages, size, …)`` with the rows of ``x`` ``(B, L, …)`` at their places in ``table``."""
    pages = torch.full((int(table.max()) + 2, PAGE_SIZE, *x.shape[2:]), torch.nan)
    for row, numbers in zip(x, table, strict=True):
        for page, number in zip(row.split(PAGE_SIZE), numbers, strict=False):
            pages[number, : len(page)] = page
    return pages


# ---------------------------------------------------------------------------- version 2 (and 2.8)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    slopes = [alibi_slopes] * len(q) if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes
    out = torch.stack([attend(*row, slopes=slopes[n], **options) for n, row in enumerate(zip(q, k, v, strict=True))])
    return (out, torch.zeros(1), None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_func(*qkv.unbind(2), 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_func(q, *kv.unbind(2), 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    if block_table is not None:
        lengths = cu_seqlens_k.diff().tolist()
        k, v = (
            torch.cat([x[table].flatten(0, 1)[:n] for table, n in zip(block_table.long(), lengths, strict=True)])
            for x in (k, v)
        )
    return attend_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, softmax_scale, causal, window_size,
        softcap, alibi_slopes,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_varlen_func(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
        window_size, softcap, alibi_slopes,
    )  # fmt: skip


def rotate(x: Tensor, positions: list[int], cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of dimensions of ``(L, H, D)`` as complex numbers."""
    half = cos.shape[-1]
    first, second = (0, 1) if interleaved else (0, half)
    step = 2 if interleaved else 1
    x = x.clone()
    real, imaginary = x[..., first : 2 * half : step][..., :half], x[..., second : 2 * half : step][..., :half]
    turned = torch.complex(real, imaginary) * torch.complex(cos[positions], sin[positions])[:, None]
    x[..., first : 2 * half : step][..., :half] = turned.real
    x[..., second : 2 * half : step][..., :half] = turned.imag
    return x


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    out = []
    for n in range(len(q)):
        row = n if cache_batch_idx is None else int(cache_batch_idx[n])
        length = cache_seqlens if isinstance(cache_seqlens, int) else None
        if length is None:
            length = k_cache.shape[1] if cache_seqlens is None else int(cache_seqlens[n])
        query, num_new = q[n], 0 if k is None else k.shape[1]

        def locate(j: int, n: int = n, row: int = row) -> tuple[int, int]:
            if block_table is None:
                return row, j
            return int(block_table[n, j // PAGE_SIZE]), j % PAGE_SIZE

        if rotary_cos is not None:
            is_local = causal or tuple(window_size) != (-1, -1)
            steps = [length + (i if is_local else 0) for i in range(len(query))]
            query = rotate(query, steps, rotary_cos, rotary_sin, rotary_interleaved)
        for i in range(num_new):
            new = k[n, i][None]
            if rotary_cos is not None:
                new = rotate(new, [length + i], rotary_cos, rotary_sin, rotary_interleaved)
            with torch._C._AutoDispatchBelowAutograd():  # a kernel does not count versions
                k_cache.data[locate(length + i)], v_cache.data[locate(length + i)] = new[0], v[n, i]
        keys, values = (
            torch.stack([cache[locate(j)] for j in range(length + num_new)]) for cache in (k_cache, v_cache)
        )
        first_key = 0 if cache_leftpad is None else int(cache_leftpad[n])
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        out.append(attend(query, keys, values, slopes=alibi_slopes, first_key=first_key, **options))
    return torch.stack(out)


VERSION_2 = (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_with_kvcache,
)


# -------------------------------------------------------------------------------------- version 3


def flash_attn_3_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    if qv is not None:
        softmax_scale = (q.shape[-1] + qv.shape[-1]) ** -0.5 if softmax_scale is None else softmax_scale
        q, k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return torch.stack([attend(*row, chunk=attention_chunk, **options) for row in zip(q, k, v, strict=True)])


def flash_attn_3_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    heads = (qkv.shape[2] - num_heads_q) // 2
    return flash_attn_3_func(*qkv.split([num_heads_q, heads, heads], 2), softmax_scale, causal)


def flash_attn_3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    out = torch.zeros_like(q)
    for n, (first_query, first_key) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_k[:-1], strict=True)):
        rows = slice(int(first_query), int(first_query + seqused_q[n]))
        cols = slice(int(first_key), int(first_key + seqused_k[n]))
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        out[rows] = attend(q[rows], k[cols], v[cols], **options)
    return out


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    out = torch.zeros_like(q)
    for n, length in enumerate(cache_seqlens.tolist()):
        rows = slice(int(cu_seqlens_q[n]), int(cu_seqlens_q[n + 1]))
        keys, values = (cache[page_table[n].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
        out[rows] = attend(q[rows], keys, values, **options)
    return out


# -------------------------------------------------------------------------------------- version 4


def flash_attn_4_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, mask_mod=None, full_block_cnt=None, full_block_idx=None,
    mask_block_cnt=None, mask_block_idx=None, block_size=None, return_lse=False,
):  # fmt: skip
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    return torch.stack([attend(*row, sink=learnable_sink, **options) for row in zip(q, k, v, strict=True)]), None
