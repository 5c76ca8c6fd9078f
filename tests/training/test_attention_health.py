"""Figures of attention maps, by hand."""

import math

import pytest
import torch

from jumok.errors import InputError
from jumok.training import compute_attention_health, find_alarms

UNIFORM, SHARP = torch.full((1, 1, 2, 2), 0.5), torch.eye(2)[None, None]


def test_by_hand() -> None:
    weights = torch.tensor([[[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]]])  # 2 queries, 3 keys
    figures = compute_attention_health([weights], query_lengths=[2], key_lengths=[3])
    entropy = 1.5 * math.log(2)  # ½ log 2 + 2 · ¼ log 4, and 0 for the second
    assert figures["attention/entropy"] == pytest.approx(entropy / math.log(3) / 2)
    assert figures["attention/max_weight"] == pytest.approx(0.75)
    assert figures["attention/coverage"] == pytest.approx((1 + 0.25 + 0.25) / 3)  # 1.5 is no more than 1
    assert figures["attention/uniform_heads"] == 0
    assert figures["attention/single_key_heads"] == 0  # the first key has ¾ of all weight


def test_heads_that_attend_to_a_single_key() -> None:
    stuck = torch.zeros(1, 1, 2, 2)
    stuck[..., 1] = 1.0
    assert (
        compute_attention_health([torch.cat([stuck, SHARP], 1)], query_lengths=[2])["attention/single_key_heads"] == 0.5
    )
    one_query = compute_attention_health([stuck[:, :, :1]], query_lengths=[1], key_lengths=[2])
    assert one_query["attention/single_key_heads"] == 0  # one look is no habit


def test_alarms_by_hand() -> None:
    healthy = {
        "attention/uniform_heads": 0.5,
        "attention/single_key_heads": 0.5,
        "alignment/diagonality": 0.9,
    }
    healthy |= {"style/diversity": 0.3, "style/effect": 0.2}
    assert find_alarms([], 1.0) == []
    assert find_alarms([healthy], 1.0) == []
    ill = {"attention/uniform_heads": 0.25, "attention/single_key_heads": 0.75, "alignment/diagonality": 0.3}
    ill |= {"style/diversity": 0.3, "style/effect": 0.001}
    assert find_alarms([ill], 0.2) == []
    diagonal, style, heads = find_alarms([ill], 0.5)
    assert diagonal.startswith("attention never became diagonal: its diagonality was at most 0.30")
    assert style.startswith("style tokens have no effect: the mels do not depend on the style")
    assert heads.startswith("attention has no effect: 75% of the heads always attend to the same key")
    assert [one.partition(":")[0] for one in find_alarms([healthy, ill], 0.5)] == [
        "style tokens have no effect",
        "attention has no effect",
    ]  # it was diagonal before
    assert find_alarms([{"loss": 1.0}], 1.0) == []


def test_uniform_heads_are_counted_over_all_layers() -> None:
    figures = compute_attention_health([torch.cat([UNIFORM, SHARP], 1), SHARP, SHARP], query_lengths=[2])
    assert figures["attention/uniform_heads"] == 0.25
    assert figures["attention/entropy"] == pytest.approx(0.25)


def test_padding_is_ignored() -> None:
    torch.manual_seed(0)
    short = torch.randn(1, 3, 2, 5).softmax(-1)
    long = torch.randn(1, 3, 7, 11).softmax(-1)
    padded = torch.full((2, 3, 7, 11), math.nan)
    padded[0, :, :2, :5], padded[1] = short[0], long[0]
    both = compute_attention_health([padded], query_lengths=[2, 7], key_lengths=[5, 11])
    a, b = compute_attention_health([short], [2], [5]), compute_attention_health([long], [7], [11])
    name = "attention/max_weight"  # a mean over queries
    assert both[name] == pytest.approx((2 * a[name] + 7 * b[name]) / 9)
    name = "attention/coverage"  # a mean over keys
    assert both[name] == pytest.approx((5 * a[name] + 11 * b[name]) / 16)


def test_sequences_of_one_key_are_skipped() -> None:
    weights = torch.zeros(2, 1, 2, 2)
    weights[0, :, :, 0] = 1.0  # one key, looked at fully
    weights[1] = 0.5
    figures = compute_attention_health([weights], query_lengths=[2, 2], key_lengths=[1, 2])
    assert figures["attention/entropy"] == pytest.approx(1.0)
    only = compute_attention_health([weights[:1]], query_lengths=[2], key_lengths=[1])
    assert (only["attention/entropy"], only["attention/uniform_heads"]) == (0.0, 0.0)


def test_no_maps_give_no_metrics() -> None:
    assert compute_attention_health([], [3]) == {}
    assert compute_attention_health([torch.zeros(0, 2, 3, 5)], []) == {}


def test_half_precision_maps() -> None:
    figures = compute_attention_health([UNIFORM.bfloat16()], query_lengths=[2])
    assert figures["attention/entropy"] == pytest.approx(1.0)


def test_wrong_shapes_raise() -> None:
    with pytest.raises(InputError, match=r"a map \(2, 2\) given with 1 query lengths"):
        compute_attention_health([torch.eye(2)], [2])
    with pytest.raises(InputError, match="2 query lengths"):
        compute_attention_health([SHARP], [2, 2])
