"""What attend, weights and mix compute: by hand, beside their peers, and what they say of bad input."""

import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import jumok
import jumok.attention
from jumok import attend, masks, mix, scores, weights
from jumok.attention.mask_types import AttentionShape

LN2 = math.log(2)
DOUBLE = torch.float64
B, H, Q, K, D, V = 2, 3, 5, 7, 11, 13


def qkv(*leading: int, dtype: torch.dtype = DOUBLE) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (Q, D), (K, D), (K, V)
    query, key, value = (torch.randn(*leading, *shape, dtype=dtype) for shape in shapes)
    return query, key, value


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------------------------- by hand


def test_weights_of_scores_0_ln2_ln4_are_1_2_and_4_sevenths() -> None:
    query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [LN2], [2 * LN2]])
    value = torch.tensor([[7.0], [14.0], [21.0]])

    assert weights(query, key).tolist() == [pytest.approx([1 / 7, 2 / 7, 4 / 7])]
    assert attend(query, key, value).item() == pytest.approx(17)  # (7 + 2·14 + 4·21) / 7


def test_scaled_dot_divides_by_the_root_of_the_width() -> None:
    query = torch.tensor([[2.0, 0.0, 0.0, 0.0]])  # √4 = 2
    key = torch.zeros(3, 4)
    key[:, 0] = torch.tensor([0.0, LN2, 2 * LN2])

    assert weights(query, key).tolist() == [pytest.approx([1 / 7, 2 / 7, 4 / 7])]
    assert weights(query, key, score=scores.Dot()).tolist() == [pytest.approx([1 / 21, 4 / 21, 16 / 21])]
    assert weights(query, key, scale=0.0).tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3])]


def test_a_mask_leaves_the_others_their_proportion() -> None:
    query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [LN2], [2 * LN2]])
    value = torch.tensor([[3.0], [6.0], [torch.nan]])

    assert weights(query, key, mask=masks.padding(2)).tolist() == [pytest.approx([1 / 3, 2 / 3, 0])]
    assert attend(query, key, value, mask=masks.padding(2)).item() == pytest.approx(5)  # (3 + 2·6) / 3
    assert attend(query, key, value, mask=masks.padding(0)).item() == 0


def test_softcap_comes_before_the_bias() -> None:
    query, key = torch.tensor([[1.0]]), torch.tensor([[1000.0], [-1000.0]])  # capped: 1 and -1
    bias, value = torch.tensor([0.0, 2.0]), torch.tensor([[4.0], [8.0]])

    out = attend(query, key, value, bias=bias, softcap=1.0)

    assert out.item() == pytest.approx(6)  # equal scores; the other order would leave 1 and -1


def test_the_scale_comes_before_the_softcap() -> None:
    query, key = torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]])
    capped = weights(query, key, softcap=3.0, scale=0.5)

    ratio = math.exp(3 * math.tanh(2 * 0.5 / 3))
    assert capped.tolist() == [pytest.approx([1 / (1 + ratio), ratio / (1 + ratio)])]


def test_minus_infinity_in_a_bias_is_a_mask_and_the_rest_is_added() -> None:
    query, key = torch.zeros(1, 1), torch.zeros(3, 1)
    bias, value = torch.tensor([[0.0, -torch.inf, math.log(3)]]), torch.tensor([[4.0], [torch.nan], [8.0]])

    assert weights(query, key, bias=bias).tolist() == [pytest.approx([1 / 4, 0, 3 / 4])]
    assert attend(query, key, value, bias=bias).item() == pytest.approx(7)
    assert attend(query, key, value, bias=torch.full((1, 3), -torch.inf)).item() == 0


def test_mix_is_a_weighted_mean() -> None:
    value = torch.tensor([[4.0], [8.0], [torch.nan]])
    assert mix(torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.5, 0.0]]), value).tolist() == [[7.0], [6.0]]


# --------------------------------------------------------------------------------- the peers

MASKS = {
    "none": None,
    "causal": masks.causal(),
    "padding": masks.padding([4, 7]),
    "both": masks.causal() & masks.padding([4, 6]),
    "window": masks.window(2, 1),
    "any": masks.tensor(torch.arange(B * Q * K).reshape(B, 1, Q, K) % 3 > 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
def test_attend_equals_pytorch(name: str, backend: SDPBackend) -> None:
    query, key, value = qkv(B, H)
    mask = MASKS[name]
    allowed = None if mask is None else mask.to_dense(Q, K)
    if allowed is not None and allowed.dim() == 3:
        allowed = allowed[:, None]
    with sdpa_kernel([backend, SDPBackend.MATH]):
        theirs = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        close(attend(query, key, value, mask=mask), theirs)


def test_attend_equals_multihead_attention_around_its_projections() -> None:
    theirs = nn.MultiheadAttention(H * D, H, batch_first=True, dtype=DOUBLE)
    x, y = torch.randn(B, Q, H * D, dtype=DOUBLE), torch.randn(B, K, H * D, dtype=DOUBLE)
    dropped, padded = torch.zeros(Q, K, dtype=torch.bool), torch.zeros(B, K, dtype=torch.bool)
    dropped[:, 1], dropped[0, 3], padded[1, 5:] = True, True, True
    expected, shown = theirs(x, y, y, attn_mask=dropped, key_padding_mask=padded, average_attn_weights=False)

    projections = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), (x, y, y), strict=True)
    query, key, value = (F.linear(z, w, b).unflatten(-1, (H, D)).transpose(1, 2) for w, b, z in projections)
    mask = masks.from_blocked(dropped) & masks.from_zero_one(~padded)
    out = theirs.out_proj(attend(query, key, value, mask=mask).transpose(1, 2).flatten(2))

    close(out, expected)
    close(weights(query, key, mask=mask), shown)


# --------------------------------------------------------------------- shapes and dtypes


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 3, 5), (2, 3, 1, 5)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["open", "causal"])
def test_any_leading_dimensions(plain: Callable[..., Tensor], leading: tuple[int, ...], masked: bool) -> None:
    query, key, value = qkv(*leading)
    allowed = masks.causal().to_dense(Q, K) if masked else None
    out = attend(query, key, value, mask=masks.causal() if masked else None)
    close(out, plain(query, key, value, allowed))


BROADCAST = [
    ((B, H), (), ()),
    ((B, H), (H,), (B, 1)),
    ((1, 1), (B, H), (1, H)),
    ((B, 1), (1, H), (B, H)),
    ((5, 1, H), (1, B, 1), (B, H)),
    ((B,), (), (B,)),
    ((1, 1), (), (B, H)),
]


@pytest.mark.parametrize("softcap", [None, 1e9], ids=["fused", "reference"])
@pytest.mark.parametrize("leading", BROADCAST, ids=str)
def test_leading_dimensions_broadcast(
    plain: Callable[..., Tensor], leading: tuple[tuple[int, ...], ...], softcap: float | None
) -> None:
    query, key, value = (qkv(*shape)[i] for i, shape in enumerate(leading))
    close(attend(query, key, value, softcap=softcap), plain(query, key, value))


@pytest.mark.parametrize("softcap", [None, 1e9], ids=["fused", "reference"])
@pytest.mark.parametrize("batches", [(B, B), (1, B), (B, 1)], ids=str)
@pytest.mark.parametrize("heads", [2, 1], ids=["grouped", "multi-query"])
def test_query_heads_share_key_heads(
    plain: Callable[..., Tensor], heads: int, batches: tuple[int, int], softcap: float | None
) -> None:
    query, key, value = qkv(batches[0], 6)[0], *qkv(batches[1], heads)[1:]
    mask = masks.tensor(torch.rand(6, Q, K) < 0.7) & masks.padding(torch.tensor([[6], [5]]))
    allowed = mask.to_dense_rows(AttentionShape(2, Q, K, query.device), slice(0, Q))

    out = attend(query, key, value, mask=mask, softcap=softcap)

    close(out, plain(query, key, value, allowed))
    close(out, mix(weights(query, key, mask=mask), value))


def test_query_heads_share_keys_of_an_additive_score() -> None:
    score = scores.Additive(D, D, 3).double()
    query, key, value = qkv(B, 6)[0], *qkv(B, 2)[1:]
    repeated = (x.repeat_interleave(3, dim=1) for x in (key, value))
    close(attend(query, key, value, score=score), attend(query, *repeated, score=score))


@pytest.mark.parametrize("score", [None, scores.Additive(D, D, 3).double()], ids=["dot", "additive"])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([0, 0])], ids=["open", "causal", "padding"])
def test_without_keys_every_query_gets_zeros(score: scores.Score | None, mask: masks.Mask | None) -> None:
    query, key, value = (x.requires_grad_() for x in qkv(B, H))
    out = attend(query, key[..., :0, :], value[..., :0, :], score=score, mask=mask)
    out.sum().backward()

    assert out.shape == (B, H, Q, V)
    assert not out.any()
    assert query.grad is None or not query.grad.any()


@pytest.mark.parametrize("score", [None, scores.Additive(D, D, 3).double()], ids=["dot", "additive"])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding([4, 7])], ids=["open", "causal", "padding"])
def test_without_queries_nothing_comes_out(score: scores.Score | None, mask: masks.Mask | None) -> None:
    query, key, value = qkv(B, H)
    assert attend(query[..., :0, :], key, value, score=score, mask=mask).shape == (B, H, 0, V)
    assert weights(query[..., :0, :], key, score=score, mask=mask).shape == (B, H, 0, K)


def test_an_empty_batch_gives_an_empty_batch() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert attend(*qkv(0, H), mask=masks.causal() & masks.padding(empty)).shape == (0, H, Q, V)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 1e9], ids=["fused", "reference"])
def test_every_dtype_comes_back_and_is_as_exact_as_it_can_be(
    plain: Callable[..., Tensor], dtype: torch.dtype, softcap: float | None
) -> None:
    query, key, value = qkv(B, H, dtype=dtype)
    mask = masks.causal() & masks.padding([4, 6])
    bias = torch.randn(Q, K, dtype=dtype)
    exact = plain(*(x.double() for x in (query, key, value)), mask.to_dense(Q, K)[:, None], bias.double())

    out = attend(query, key, value, mask=mask, bias=bias, softcap=softcap)

    assert out.dtype == dtype
    error = (out.double() - exact).abs().max().item()
    assert error <= 4 * torch.finfo(dtype).eps * value.abs().max().item()


def test_autocast_brings_mixed_dtypes_together(plain: Callable[..., Tensor]) -> None:
    query, key, value = qkv(B, dtype=torch.float32)
    score = scores.General(D, D)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        keys = score.prepare(key)  # bfloat16
        out = attend(query, keys, value, score=score, mask=masks.padding([4, 7]))
    exact = attend(query, key, value, score=score, mask=masks.padding([4, 7]))
    torch.testing.assert_close(out.float(), exact.detach(), rtol=0, atol=0.05)


# ------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["fused", "reference"])
def test_gradients_of_everything_that_has_some(softcap: float | None) -> None:
    inputs = [x.requires_grad_() for x in (*qkv(B), torch.randn(Q, K, dtype=DOUBLE))]
    blocked = torch.zeros(Q, K, dtype=torch.bool)
    blocked[:, 2], blocked[1] = True, True  # a key and a query that the bias takes out
    mask = masks.causal() & masks.padding([5, 7])

    def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        bias = bias.masked_fill(blocked, -torch.inf)
        return attend(query, key, value, mask=mask, bias=bias, softcap=softcap)

    assert not run(*inputs)[:, 1].any()
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_a_weight_of_zero_has_its_gradient() -> None:
    """Hard attention passes weights of exactly 0 whose gradient is the value there."""
    one_hot = torch.tensor([[0.0, 1.0, 0.0]], dtype=DOUBLE, requires_grad=True)
    value = torch.tensor([[2.0], [3.0], [5.0]], dtype=DOUBLE, requires_grad=True)
    mix(one_hot, value).sum().backward()
    assert one_hot.grad.tolist() == [[2.0, 3.0, 5.0]]
    assert value.grad.tolist() == [[0.0], [1.0], [0.0]]


def test_mix_keeps_what_nobody_uses_out_of_result_and_gradients() -> None:
    shares = torch.tensor([[0.25, 0.75, 0.0]], dtype=DOUBLE, requires_grad=True)
    value = torch.tensor([[4.0], [8.0], [torch.inf]], dtype=DOUBLE, requires_grad=True)
    mix(shares, value).sum().backward()
    assert shares.grad.tolist() == [[4.0, 8.0, 0.0]]
    assert value.grad.tolist() == [[0.25], [0.75], [0.0]]


def test_mix_broadcasts_weights_of_one_head_over_values_of_many() -> None:
    shares, value = torch.rand(B, 1, Q, K, dtype=DOUBLE), torch.rand(B, H, K, V, dtype=DOUBLE)
    close(mix(shares, value), shares @ value)


# --------------------------------------------------------------------------------- dropout


def dropped_weights(share: float, **rest: Any) -> tuple[Tensor, Tensor]:
    """The weights before and after dropout; with the identity for values they are what comes out."""
    query, key, _ = qkv(B, H)
    return weights(query, key), attend(query, key, torch.eye(K, dtype=DOUBLE), dropout=share, **rest)


def test_dropout_drops_some_weights_and_scales_up_the_others() -> None:
    whole, dropped = dropped_weights(0.25)
    kept = dropped != 0
    assert 0.1 < (~kept).double().mean().item() < 0.4
    close(dropped[kept], whole[kept] / 0.75)


def test_dropout_keeps_the_mean() -> None:
    query, key, value = qkv(B, H)
    many = (x.expand(4000, *x.shape) for x in (query, key, value))
    torch.testing.assert_close(
        attend(*many, dropout=0.3).mean(0),
        attend(query, key, value),
        rtol=0,
        atol=0.1 * value.abs().max().item(),
    )


def test_no_dropout_is_exact() -> None:
    query, key, value = qkv(B, H)
    assert torch.equal(attend(query, key, value, dropout=0.0), attend(query, key, value))


@pytest.mark.usefixtures("in_chunks")
def test_dropout_follows_the_seed_and_the_gradient_drops_the_same_weights() -> None:
    query, key, value = (x.requires_grad_() for x in qkv(B, H))
    torch.manual_seed(3)
    one = attend(query, key, value, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(one, attend(query, key, value, dropout=0.5))
    torch.manual_seed(4)
    assert not torch.equal(one, attend(query, key, value, dropout=0.5))

    pull = torch.randn_like(one)
    (one * pull).sum().backward()
    # The output is linear in the values, so ∂out/∂value · value is the output, if the same weights fell.
    assert (value.grad * value).sum().item() == pytest.approx((one * pull).sum().item())


# ---------------------------------------------------------------------------------- errors

q, k, v = torch.zeros(2, 6, 5, 8), torch.zeros(2, 6, 7, 8), torch.zeros(2, 6, 7, 9)
additive = scores.Additive(8, 8, 3)

BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a list": (lambda: attend([[1.0]], k, v), ["query", "tensor", "list"]),
    "a vector": (lambda: attend(q[0, 0, 0], k, v), ["query", "(8,)", "query[None]"]),
    "whole numbers": (lambda: attend(q.long(), k.long(), v.long()), ["query", "int64", ".float()"]),
    "widths": (lambda: attend(q, k[..., :3], v), ["query has width 8", "key 3", "General", "Additive"]),
    "widths of a dot": (
        lambda: attend(q, k[..., :3], v, score=scores.Dot()),
        ["width 8", "key 3", "General"],
    ),
    "query of a score": (
        lambda: attend(q, k, v, score=scores.Additive(5, 8, 3)),
        ["Additive", "query has width 8", "expects 5", "query_width=8"],
    ),
    "key of a score": (
        lambda: attend(q, k, v, score=scores.General(8, 5)),
        ["General", "key has width 8", "expects 5", "key_width=8"],
    ),
    "values": (lambda: attend(q, k, v[..., :4, :]), ["7 keys", "4 values"]),
    "batches": (
        lambda: attend(q, k[:1].expand(3, 6, 7, 8), v),
        ["(2, 6, 5, 8)", "(3, 6, 7, 8)", "broadcast"],
    ),
    "heads": (
        lambda: attend(q, k[:, :4], v[:, :4]),
        ["(2, 6, 5, 8)", "(2, 4, 7, 8)", "multiple of key heads"],
    ),
    "heads of values": (lambda: attend(q, k[:, :3], v[:, :2]), ["6 heads", "key 3", "(2, 2, 7, 9)"]),
    "values without heads": (lambda: attend(q, k[:, :3], v[0, 0]), ["6 heads", "key 3", "(7, 9)"]),
    "key device": (lambda: attend(q, k.to("meta"), v), ["key is on meta", "query on cpu", ".to()"]),
    "value device": (lambda: attend(q, k, v.to("meta")), ["value is on meta", "query on cpu", ".to()"]),
    "bias device": (lambda: attend(q, k, v, bias=torch.zeros(7, device="meta")), ["bias is on meta", "cpu"]),
    "mask device": (
        lambda: attend(q, k, v, mask=masks.tensor(torch.ones(7, dtype=torch.bool, device="meta"))),
        ["mask", "on meta", "cpu", ".to()"],
    ),
    "score device": (
        lambda: attend(q, k, v, score=scores.General(8, 8).to("meta")),
        ["General is on meta", "query on cpu", ".to()"],
    ),
    "key dtype": (lambda: attend(q, k.half(), v), ["key is torch.float16", "query torch.float32", ".to()"]),
    "value dtype": (lambda: attend(q, k, v.double()), ["value is torch.float64", "query torch.float32"]),
    "score dtype": (
        lambda: attend(q.double(), k.double(), v.double(), score=additive),
        ["Additive is torch.float32", "query torch.float64", ".to()"],
    ),
    "score class": (lambda: attend(q, k, v, score=scores.Dot), ["jumok.scores", "an object, such as Dot()"]),
    "score name": (lambda: attend(q, k, v, score="dot"), ["jumok.scores", "'dot'"]),
    "prepared for none": (lambda: attend(q, additive.prepare(k), v), ["prepared by Additive", "score="]),
    "prepared by another": (
        lambda: attend(q, additive.prepare(k), v, score=scores.Concat(8, 8, 3)),
        ["prepared by Additive", "score is Concat", "own prepare(keys)"],
    ),
    "mask tensor": (
        lambda: attend(q, k, v, mask=torch.ones(5, 7, dtype=torch.bool)),
        ["mask", "Tensor", "jumok.masks.tensor(t)", "True = may attend"],
    ),
    "bool bias": (
        lambda: attend(q, k, v, bias=torch.ones(5, 7, dtype=torch.bool)),
        ["bias", "torch.bool", "mask=jumok.masks.tensor(t)"],
    ),
    "bias shape": (lambda: attend(q, k, v, bias=torch.zeros(7, 5)), ["bias", "(7, 5)", "(2, 6, 5, 7)"]),
    "bias list": (lambda: attend(q, k, v, bias=[0.0]), ["bias", "tensor", "list"]),
    "dropout 1": (lambda: attend(q, k, v, dropout=1.0), ["dropout=1.0", "[0, 1)"]),
    "dropout -1": (lambda: attend(q, k, v, dropout=-0.1), ["dropout=-0.1", "[0, 1)"]),
    "dropout word": (lambda: attend(q, k, v, dropout="some"), ["dropout='some'", "[0, 1)"]),
    "softcap 0": (lambda: attend(q, k, v, softcap=0), ["softcap=0", "positive", "None"]),
    "softcap nan": (lambda: attend(q, k, v, softcap=math.nan), ["softcap=nan", "positive"]),
    "scale": (lambda: attend(q, k, v, scale="1"), ["scale='1'", "number"]),
    "mix lengths": (lambda: mix(q, v), ["8 keys", "7 values"]),
    "mix vector": (lambda: mix(torch.ones(7), torch.ones(7, 9)), ["weights", "(7,)", "weights[None]"]),
    "mix dtype": (lambda: mix(torch.ones(5, 7).half(), torch.ones(7, 9)), ["value", "weights", "float16"]),
    "mix heads": (lambda: mix(torch.ones(2, 6, 5, 7), v[:, :4]), ["(2, 6, 5, 7)", "(2, 4, 7, 9)"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_what_came_what_was_expected_and_the_fix(name: str) -> None:
    call, parts = BAD[name]
    with pytest.raises(jumok.InputError) as error:
        call()
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


@pytest.mark.parametrize("ask", [weights, jumok.explain], ids=["weights", "explain"])
def test_the_others_check_their_arguments_too(ask: Callable[..., Any]) -> None:
    rest = (v,) if ask is jumok.explain else ()
    with pytest.raises(jumok.InputError, match="length of 8, but there are only 7 keys"):
        ask(q, k, *rest, mask=masks.padding([7, 8]))


# -------------------------------------------------------------------------- as it is written


@pytest.mark.parametrize("shown", [jumok.attend, jumok.weights, jumok.mix, jumok.explain, jumok.MultiHead, masks.Mask])
def test_the_examples_that_people_paste_import_what_they_use(shown: Any) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(shown, globs={})
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", ["none", "both", "any"])
def test_compiled_attend_gives_the_same(name: str) -> None:
    compiled = torch.compile(attend, fullgraph=True)
    mask = MASKS[name]
    for _ in range(2):  # what a mask remembers must not change anything
        inputs = [x.requires_grad_() for x in qkv(B, H, dtype=torch.float32)]
        ours, plain = compiled(*inputs, mask=mask), attend(*inputs, mask=mask)
        torch.testing.assert_close(ours, plain)
        pull = torch.randn_like(plain)
        for one, other in zip(*(torch.autograd.grad(x, inputs, pull) for x in (ours, plain)), strict=True):
            torch.testing.assert_close(one, other)


def test_autocast_brings_mixed_types_together() -> None:
    query, key, value = torch.randn(2, 5, 8), torch.randn(2, 7, 8).bfloat16(), torch.randn(2, 7, 3)
    score = scores.Additive(8, 8, 11)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(query, key, value, mask=masks.padding([4, 7]))
        prepared = score.prepare(key)
        loop = attend(query[:, :1], prepared, value, score=score)
    assert out.dtype == loop.dtype == torch.bfloat16
    expected = attend(query, key.float(), value, mask=masks.padding([4, 7]))
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------- low precision


SCORES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "dot": jumok.scores.Dot,
    "general": lambda: jumok.scores.General(64, 64),
    "additive": lambda: jumok.scores.Additive(64, 64, 47),
    "concat": lambda: jumok.scores.Concat(64, 64, 47),
    "location": lambda: jumok.scores.LocationSensitive(64, 64, 47, num_filters=3, kernel_size=5),
}


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.002), (torch.float16, 0.0003)])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("autocast", [False, True])
def test_weights_round_no_score(name: str, dtype: torch.dtype, most: float, autocast: bool) -> None:
    """Against float64, from queries and keys as the score has projected them: what is left is one rounding.

    The scores reach about 20, which bfloat16 would round to multiples of 1/8.
    """
    query, keys = 3 * torch.randn(2, 31, 64), 3 * torch.randn(2, 37, 64)
    score, scale = SCORES[name](), {"none": None, "dot": 1 / 8}.get(name, 8.0)
    if name == "general":
        scale = 1.0
    query, keys = query.to(dtype), keys.to(dtype)
    if score is None or name == "dot":
        exact = (query.double() @ keys.double().mT / 8).softmax(-1)
    else:
        score = score.to(dtype)
        prepared = score.prepare(keys)
        previous = torch.rand(2, 37, dtype=dtype)
        if name == "general":
            scores = query.double() @ prepared.keys.double().mT
        else:
            keyed = prepared.keys
            if name == "location":
                keyed = keyed + score.compute_location_term(previous[:, None])
            asked = score.project_query(query)
            pairs = asked.double()[:, :, None] + keyed.double()[:, None]
            scores = pairs.tanh() @ score.v.double() * scale
        exact, keys = scores.softmax(-1), prepared
        score = score.with_previous(previous) if name == "location" else score
    with torch.autocast("cpu", dtype, enabled=autocast):
        found = jumok.weights(query, keys, score=score, scale=scale)
        mixed = jumok.attend(query, keys, torch.eye(37, dtype=dtype).expand(2, 37, 37), score=score, scale=scale)
    assert found.dtype == dtype
    assert (found.double() - exact).abs().max() <= most
    assert (mixed.double() - exact).abs().max() <= most
