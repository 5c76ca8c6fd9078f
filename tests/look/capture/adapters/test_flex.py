"""FlexAttention, compiled or not."""

import functools
from typing import Any

import pytest
import torch
from attention_models import FunctionAttention, causal_mask, random_qkv, reference_weights, run_watched
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from jumok.errors import InputError
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without torch.compile"),
]
ORIGINAL = flex_attention
compiled_flex = torch.compile(flex_attention, backend="eager")


class GlobalFunction(FunctionAttention):
    """Calls the compiled function by a global name."""

    def forward(self, *qkv: Tensor) -> Any:
        return compiled_flex(*qkv, **self.options)


class ImportInForward(FunctionAttention):
    """Imports the function when it is called."""

    def forward(self, *qkv: Tensor) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as imported_flex

        return imported_flex(*qkv, **self.options)


TABLE = torch.randn(2, 6, 5, 7, generator=torch.Generator().manual_seed(0))


def add_table_value(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + TABLE[b][h][q][k]  # correct for single indices only


def add_distance_bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - 0.1 * (h + 1) * (q - k).abs() + 0.01 * b


def is_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def run(model: nn.Module, *qkv: Tensor) -> Any:
    with torch.no_grad():
        _, captures = run_watched(model, *qkv)
    assert torch.nn.attention.flex_attention.flex_attention is flex_attention is ORIGINAL
    return captures


@pytest.mark.parametrize("module_class", [FunctionAttention, GlobalFunction, ImportInForward])
@pytest.mark.parametrize("attend", [flex_attention, compiled_flex], ids=["plain", "compiled"])
def test_score_mod_and_block_mask(attend: Any, module_class: type[FunctionAttention]) -> None:
    query, key, value = random_qkv(2, 6)
    mask = create_block_mask(is_causal, 1, 1, 5, 7, device="cpu")
    captures = run(module_class(attend, score_mod=add_distance_bias, block_mask=mask, scale=0.3), query, key, value)
    b, h, q, k = (torch.arange(n) for n in (2, 6, 5, 7))
    b, h, q = b[:, None, None, None], h[:, None, None], q[:, None]
    bias = add_distance_bias(torch.zeros(()), b, h, q, k)
    expected = reference_weights(query, key, causal_mask(5, 7), scale=0.3, bias=bias)
    torch.testing.assert_close(captures[0].weights(), expected)
    torch.testing.assert_close(captures[0].weights(batch=1, head=4, rows=3), expected[1, 4, 3])
    assert captures[0].shape == (2, 6, 5, 7)


def test_score_mod_written_for_single_indices() -> None:
    query, key, value = random_qkv(2, 6)
    captures = run(FunctionAttention(flex_attention, score_mod=add_table_value), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key, bias=TABLE))


def test_grouped_queries() -> None:
    query, key, value = random_qkv(2, 6, key_heads=2)
    captures = run(FunctionAttention(compiled_flex, enable_gqa=True), query, key, value)
    torch.testing.assert_close(captures[0].weights(), reference_weights(query, key))


def test_block_mask_that_skips_blocks() -> None:
    query, key, value = (torch.randn(1, 2, 256, 4) for _ in range(3))
    # Blocks of 128: the first row of blocks sees the first one, the second row both, and `is_causal` masks the last.
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [1, 0]]]], dtype=torch.int32),
        torch.tensor([[[1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 0], [0, 0]]]], dtype=torch.int32),
        mask_mod=is_causal,
    )
    captures = run(FunctionAttention(flex_attention, block_mask=mask), query, key, value)
    allowed = causal_mask(256, 256)
    allowed[:, :128] = True
    expected = reference_weights(query, key, allowed)
    torch.testing.assert_close(captures[0].weights(), expected)


def test_row_log_sum_exp_is_stored_if_it_was_requested() -> None:
    query, key, value = random_qkv(2, 6)
    captures = run(FunctionAttention(flex_attention, return_aux=AuxRequest(lse=True)), query, key, value)
    assert captures[0].attention.lse is not None
    torch.testing.assert_close(captures[0].attention.lse, (query @ key.mT / 2).logsumexp(-1))


def test_functions_compiled_while_watching_are_the_originals() -> None:
    compiled_functions: list[Any] = []

    def compile_and_attend(*args: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention as imported_flex

        compiled_functions.append(torch.compile(imported_flex, backend="eager"))
        return imported_flex(*args)

    run(FunctionAttention(compile_and_attend), *random_qkv(2, 6))
    assert all(function._torchdynamo_orig_callable is ORIGINAL for function in compiled_functions)


def test_compiled_function_that_calls_it_is_reported() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def inner(*args: Tensor) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*args) + flex_attention(*args)

    model, qkv = nn.Sequential(FunctionAttention(inner), FunctionAttention(flex_attention)), random_qkv(2, 6)
    model.forward = lambda *args: (model[0](*args), model[1](*args))  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="0: FunctionAttention attends in an unsupported way"):
        captures = run(model, *qkv)
    assert captures.names == ["1"]


class LearnedSlope(nn.Module):
    """Its score mod reads a parameter in one of several ways."""

    def __init__(self, reads_slope_by: str) -> None:
        super().__init__()
        self.slope, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.reads_slope_by = reads_slope_by

    def modify_score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.slope[h] * (q - k)

    def forward(self, *qkv: Tensor) -> Any:
        slope = self.slope

        def with_closure(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        def with_argument(slope: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        score_mods = {
            "closure": with_closure,
            "attribute": lambda score, b, h, q, k: score + self.slope[h] * (q - k),
            "method": self.modify_score,
            "partial": functools.partial(with_argument, slope),
            "inner": lambda *args: self.modify_score(*args),
        }
        return flex_attention(*qkv, score_mod=score_mods[self.reads_slope_by])


@pytest.mark.parametrize("reads_slope_by", ["closure", "attribute", "method", "partial", "inner"])
def test_modified_parameters_of_a_score_mod_are_an_error(reads_slope_by: str) -> None:
    model = LearnedSlope(reads_slope_by)
    captures = run(model, *random_qkv(2, 6))
    before = captures[0].weights()
    with torch.no_grad():
        model.other.add_(1)  # the score mod does not read it
    assert torch.equal(captures[0].weights(), before)
    with torch.no_grad():
        model.slope.add_(1)
    with pytest.raises(InputError, match="overwritten"):
        captures[0].weights()


def test_knock_out() -> None:
    query, key, value = random_qkv(2, 6)
    mask = create_block_mask(is_causal, 1, 1, 5, 7, device="cpu")
    model = FunctionAttention(compiled_flex, block_mask=mask)
    with torch.no_grad(), knock_out(model, {"FunctionAttention": [2, (4, 1), (0, 3, 0)]}), watch(model) as captures:
        out = model(query, key, value)
    scores = (query @ key.mT / 2).masked_fill(~causal_mask(5, 7), -torch.inf)
    scores[:, :, 4, 1] = scores[:, 0, 3, 0] = -torch.inf
    weights = scores.softmax(-1)
    weights[:, 2] = 0
    torch.testing.assert_close(out, weights @ value)
    torch.testing.assert_close(captures[0].weights(), weights)
