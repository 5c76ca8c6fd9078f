"""watch: FlexAttention, compiled or not."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from jumok.errors import InputError
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:flex_attention called without torch.compile"
)
ORIGINAL = flex_attention
compiled = torch.compile(flex_attention, backend="eager")


class Attention(nn.Module):
    def __init__(self, attend: Any, **options: Any) -> None:
        super().__init__()
        self.attend, self.options = attend, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return self.attend(query, key, value, **self.options)


class Global(Attention):
    """Calls the compiled function by a name of this file."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return compiled(query, key, value, **self.options)


class Late(Attention):
    """Looks for the function when it is called."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as found

        return found(query, key, value, **self.options)


def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * (q - k).abs() + 0.01 * b


def looked_up(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[b][h][q][k]  # one index after the other: right for single numbers only


def past(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


TABLE = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(0))


def qkv(heads: int = 6, key_heads: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, 5, 4), torch.randn(2, key_heads, 7, 4), torch.randn(2, key_heads, 7, 4)


def run(model: nn.Module, *args: Tensor) -> Any:
    with torch.no_grad():
        before = model(*args)
        with watch(model) as seen:
            watched = model(*args)
    one, other = (x[0] if isinstance(x, tuple) else x for x in (before, watched))
    assert torch.equal(one, other)
    assert flex_attention is ORIGINAL
    assert torch.nn.attention.flex_attention.flex_attention is ORIGINAL
    return seen


@pytest.mark.parametrize("make", [Attention, Global, Late])
@pytest.mark.parametrize("attend", [flex_attention, compiled], ids=["plain", "compiled"])
def test_scores_are_changed_and_masked(attend: Any, make: type[Attention]) -> None:
    query, key, value = qkv()
    mask = create_block_mask(past, 1, 1, 5, 7, device="cpu")
    seen = run(make(attend, score_mod=bias, block_mask=mask, scale=0.3), query, key, value)
    b, h, q, k = (torch.arange(n) for n in (2, 6, 5, 7))
    b, h, q = b[:, None, None, None], h[:, None, None], q[:, None]
    scores = query @ key.mT * 0.3
    scores = scores - 0.1 * (h + 1) * (q - k).abs() + 0.01 * b
    expected = scores.masked_fill(q < k, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen[0].weights(), expected)
    torch.testing.assert_close(seen[0].weights(batch=1, head=4, rows=3), expected[1, 4, 3])
    assert seen[0].shape == (2, 6, 5, 7)


def test_functions_that_are_written_for_single_numbers() -> None:
    query, key, value = qkv()
    seen = run(Attention(flex_attention, score_mod=looked_up), query, key, value)
    torch.testing.assert_close(seen[0].weights(), (query @ key.mT / 2 + TABLE).softmax(-1))


def test_grouped_queries() -> None:
    query, key, value = qkv(6, 2)
    seen = run(Attention(compiled, enable_gqa=True), query, key, value)
    torch.testing.assert_close(seen[0].weights(), (query @ key.repeat_interleave(3, 1).mT / 2).softmax(-1))


def test_a_mask_of_blocks_alone() -> None:
    query, key, value = (torch.randn(1, 2, 256, 4) for _ in range(3))
    # Blocks of 128: the first row of blocks sees the first, the second both; the rule of the last is `past`.
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32),
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32),
        mask_mod=past,
    )
    seen = run(Attention(flex_attention, block_mask=mask), query, key, value)
    allowed = torch.zeros(256, 256, dtype=torch.bool)
    allowed[:, :128] = True
    allowed[128:, 128:] = torch.ones(128, 128, dtype=torch.bool).tril()
    expected = (query @ key.mT / 2).masked_fill(~allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(seen[0].weights(), expected)


def test_the_sums_of_rows_are_taken_where_they_are_asked_for() -> None:
    query, key, value = qkv()
    seen = run(Attention(flex_attention, return_aux=AuxRequest(lse=True)), query, key, value)
    assert seen[0].attention.lse is not None
    torch.testing.assert_close(seen[0].attention.lse, (query @ key.mT / 2).logsumexp(-1))


def test_what_is_compiled_while_watching_is_the_function_itself() -> None:
    held: list[Any] = []

    def lazily(*args: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as found

        held.append(torch.compile(found, backend="eager"))
        return found(*args)

    query, key, value = qkv()
    run(Attention(lazily), query, key, value)
    assert all(one._torchdynamo_orig_callable is ORIGINAL for one in held)


def test_a_compiled_function_around_it_runs_as_before() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def inner(*args: Tensor) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*args) + flex_attention(*args)

    model, given = nn.Sequential(Attention(inner), Attention(flex_attention)), qkv()
    model.forward = lambda *args: (model[0](*args), model[1](*args))  # type: ignore[method-assign]
    with torch.no_grad():
        before = model(*given)
        with (
            pytest.warns(UserWarning, match="0: Attention attends in an unsupported way"),
            watch(model) as seen,
        ):
            watched = model(*given)
        after = model(*given)
    assert torch.equal(before[0], watched[0])
    assert torch.equal(before[0], after[0])
    assert seen.names == ["1"]


class Learned(nn.Module):
    """Its scores are changed by a parameter, which is read in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.slope, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.how = how

    def rule(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.slope[h] * (q - k)

    def forward(self, *qkv: Tensor) -> Any:
        slope = self.slope

        def free(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        def given(slope: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        rules = {
            "closure": free,
            "attribute": lambda score, b, h, q, k: score + self.slope[h] * (q - k),
            "method": self.rule,
            "partial": functools.partial(given, slope),
            "inner": lambda *args: self.rule(*args),
        }
        return flex_attention(*qkv, score_mod=rules[self.how])


@pytest.mark.parametrize("how", ["closure", "attribute", "method", "partial", "inner"])
def test_a_rule_whose_parameters_have_changed_is_not_asked(how: str) -> None:
    model = Learned(how)
    seen = run(model, *qkv())
    before = seen[0].weights()
    with torch.no_grad():
        model.other.add_(1)  # which it does not read
    assert torch.equal(seen[0].weights(), before)
    with torch.no_grad():
        model.slope.add_(1)
    with pytest.raises(InputError, match="overwritten"):
        seen[0].weights()


def test_knocked_out() -> None:
    query, key, value = qkv()
    mask = create_block_mask(past, 1, 1, 5, 7, device="cpu")
    model = Attention(compiled, block_mask=mask)
    with torch.no_grad(), knock_out(model, {"Attention": [2, (4, 1), (0, 3, 0)]}), watch(model) as seen:
        out = model(query, key, value)
    scores = (query @ key.mT / 2).masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(1), -torch.inf)
    scores[:, :, 4, 1] = scores[:, 0, 3, 0] = -torch.inf
    weights = scores.softmax(-1)
    weights[:, 2] = 0
    torch.testing.assert_close(out, weights @ value)
    torch.testing.assert_close(seen[0].weights(), weights)
