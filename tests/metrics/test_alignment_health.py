"""Figures of alignments drawn by hand."""

import math

import pytest
import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.metrics.alignment_health import (
    average_alignment_health,
    diagnose_attention,
    diagnose_style,
    measure_alignment_health,
    measure_style_effect,
    measure_style_health,
)


def drawn(path: list[int], symbols: int) -> Tensor:
    """All weight on one symbol a step."""
    return torch.eye(symbols)[path]


def test_a_perfect_diagonal() -> None:
    for path, symbols in (
        ([0, 0, 1, 1, 1, 2, 2, 3, 3, 3], 4),
        (list(range(11)), 11),
        ([0, 0, 0, 1, 1, 1], 2),
    ):
        health = measure_alignment_health(drawn(path, symbols))
        assert health.diagonality == 1.0
        assert health.coverage == 1.0
        assert health.entropy == 0.0
        assert health.skipped == ()
        assert health.repeated == ()
        assert health.is_complete


def test_attention_stuck_at_one_symbol() -> None:
    # Symbol 4 of 10 is at 0.4 to 0.5. Near it are the steps from 0.2 to 0.7: 5 of 10. Of the other symbols it
    # is 5 too, but 4 and 3 of those at either end: 44 of 100 in all.
    health = measure_alignment_health(drawn([4] * 10, 10))
    assert health.diagonality == pytest.approx((0.5 - 0.44) / 0.56)
    assert health.coverage == pytest.approx(0.1)
    assert health.skipped == (0, 1, 2, 3, 5, 6, 7, 8, 9)
    assert health.repeated == ()
    assert measure_alignment_health(drawn([9] * 10, 10)).diagonality == 0.0


def test_uniform_attention() -> None:
    for steps, symbols in ((20, 4), (9, 7), (50, 50)):
        health = measure_alignment_health(torch.full((steps, symbols), 1 / symbols))
        assert health.diagonality == pytest.approx(0.0, abs=1e-6)
        assert health.entropy == pytest.approx(1.0)
        assert health.skipped == ()
        assert not health.is_complete


def test_weight_split_between_two_symbols() -> None:
    health = measure_alignment_health(torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]]))
    assert health.entropy == pytest.approx(0.5)  # log 2 / log 4
    assert health.coverage == pytest.approx((0.5 + 1 + 0.5 + 0) / 4)
    assert health.skipped == (3,)


def test_skipped_symbols() -> None:
    health = measure_alignment_health(drawn([0, 1, 2, 2, 5, 6, 7, 7], 8))
    assert health.skipped == (3, 4)
    assert health.repeated == ()
    assert not health.is_complete
    soft = drawn([0, 1, 2, 2, 5, 6, 7, 7], 8)
    soft[3, 2], soft[3, 3], soft[3, 4] = 0.8, 0.15, 0.05  # a silent letter is hardly looked at, but it is
    assert measure_alignment_health(soft).skipped == (4,)


def test_the_last_symbols_are_not_counted_as_skipped() -> None:
    stops = drawn([0, 1, 2, 3], 5)
    assert measure_alignment_health(stops).skipped == (4,)
    health = measure_alignment_health(stops, has_end_symbol=True)
    assert health.skipped == ()
    assert health.coverage == 1.0
    assert health.is_complete
    assert measure_alignment_health(drawn([0, 1, 2, 4], 5), has_end_symbol=True).skipped == (3,)
    assert measure_alignment_health(torch.ones(3, 1), has_end_symbol=True).coverage == 1.0
    figures = average_alignment_health([stops], [4], [5], has_end_symbol=True)
    assert figures["alignment/complete"] == 1.0
    assert figures["alignment/skipped"] == 0.0


@pytest.mark.parametrize(
    ("path", "repeated"),
    [
        ([0, 1, 2, 3, 1, 2, 3, 4], (1, 2, 3)),
        ([0, 1, 0, 1, 2, 1, 2, 3, 4], ()),  # wavering
        ([0, 1, 2, 3, 4, 0], (0,)),
        ([0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 4], (0, 1, 2, 3, 4)),
        ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], ()),
    ],
)
def test_repeated_symbols(path: list[int], repeated: tuple[int, ...]) -> None:
    health = measure_alignment_health(drawn(path, 5))
    assert health.repeated == repeated
    assert health.skipped == ()
    assert str(health).endswith(f"0 skipped, {len(repeated)} repeated")


def test_one_step_or_one_symbol() -> None:
    assert measure_alignment_health(torch.ones(5, 1)).diagonality == 1.0
    assert measure_alignment_health(torch.ones(1, 1)).entropy == 0.0
    nothing = measure_alignment_health(torch.zeros(3, 4))
    assert nothing.diagonality == 0.0
    assert nothing.skipped == (0, 1, 2, 3)
    for shape in ((0, 3), (3, 0), (2, 3, 4)):
        with pytest.raises(InputError, match="alignment has shape"):
            measure_alignment_health(torch.zeros(shape))


def test_padding_of_a_batch_is_ignored() -> None:
    padded = torch.full((2, 6, 5), math.nan)
    padded[0, :5, :5] = torch.eye(5)
    padded[1, :6, :3] = drawn([0, 0, 0, 2, 2, 2], 3)
    figures = average_alignment_health(padded, [5, 6], [5, 3])
    apart = [measure_alignment_health(torch.eye(5)), measure_alignment_health(drawn([0, 0, 0, 2, 2, 2], 3))]
    assert figures["alignment/diagonality"] == pytest.approx(sum(one.diagonality for one in apart) / 2)
    assert figures["alignment/skipped"] == 1 / 8
    assert figures["alignment/repeated"] == 0.0
    assert figures["alignment/complete"] == 0.5
    assert average_alignment_health([], [], []) == {}
    with pytest.raises(InputError, match="2 alignments"):
        average_alignment_health(padded, [5], [5, 3])


def test_attention_alarm() -> None:
    assert diagnose_attention([0.1, 0.2], progress=0.1) is None  # too early
    assert diagnose_attention([0.1, 0.8, 0.3], progress=0.9) is None  # it was
    assert diagnose_attention([], progress=0.9) is None
    assert diagnose_attention([math.nan], progress=0.9) is None
    said = diagnose_attention([0.1, 0.25, 0.2], progress=0.6)
    assert said is not None
    assert "at most 0.25 after 60%" in said


def test_style_metrics() -> None:
    same = torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(5, 3, 4)
    figures = measure_style_health(same)
    assert figures["style/spread"] == 0.0
    assert figures["style/entropy"] == pytest.approx(0.75)  # (½ + ½ + ½) of log₂ 4
    assert figures["style/tokens"] == pytest.approx(2**1.5)
    apart = torch.eye(4)[:, None]  # each utterance has a token of its own: 3/4 of its weight is elsewhere
    assert measure_style_health(apart)["style/spread"] == 0.75
    assert measure_style_health(apart)["style/tokens"] == 4.0
    with pytest.raises(InputError, match="weights have shape"):
        measure_style_health(torch.ones(2, 3))


def test_style_alarm() -> None:
    assert diagnose_style({"style/spread": 0.0}, progress=0.1) is None
    assert diagnose_style({"style/spread": 0.4, "style/effect": 0.3}, progress=1.0) is None
    assert diagnose_style({}, progress=1.0) is None
    same = diagnose_style({"style/spread": 0.001, "style/effect": 0.3}, progress=1.0)
    assert same is not None
    assert "same weights" in same
    unheard = diagnose_style({"style/spread": 0.5, "style/effect": 0.001}, progress=1.0)
    assert unheard is not None
    assert "do not depend on the style" in unheard


def test_style_effect() -> None:
    own = torch.tensor([[[0.0, 0.0], [2.0, 4.0], [math.nan, 9.0]]])  # 1 and 2 away from their means
    assert measure_style_effect(own, own, [2]) == 0.0
    assert measure_style_effect(own, own + 3.0, [2]) == 2.0
    with pytest.raises(InputError, match="2 frame_counts"):
        measure_style_effect(own, own, [2, 3])
