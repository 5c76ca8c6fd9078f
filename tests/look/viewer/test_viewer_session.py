"""Tests of synthesis with other style token weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.look.viewer.comparison import compare_with_ablation
from jumok.look.viewer.synthesized_speech import StyleTokenWeights, SynthesizedSpeech
from jumok.look.viewer.tiles import TileRequest, unpack
from jumok.look.viewer.viewer_data import ViewerData, build_manifest
from jumok.look.viewer.viewer_session import MAX_RESYNTHESES, ViewerSession

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_speech import (
    build_diagonal,
    build_speech_data,
)

PAYLOAD = {"data": 0, "weights": [0.0, 0.5, 0.0, 0.0, -0.25]}


def build_entry(data: ViewerData) -> dict[str, Any]:
    entry: dict[str, Any] = build_manifest([data])["data"][0]
    return entry


def test_each_resynthesis_has_its_own_number() -> None:
    session = ViewerSession(build_speech_data())
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    before = session.answer_request(TileRequest(**whole))
    first, second = (session.resynthesize(PAYLOAD)["data"][0] for _ in range(2))
    assert (first["number"], second["number"]) == (1, 2)
    assert first["layers"][0]["shape"] == [80, 19]  # 53 * 1.5 steps
    assert first["style"]["weights"] == [PAYLOAD["weights"]] * 2
    assert first["style"]["can_resynthesize"]
    assert session.answer_request(TileRequest(**whole)) == before
    assert unpack(session.answer_request(TileRequest(**whole, data_index=2))).shape == (3, 4)
    assert session.build_manifest()["data"][0]["layers"][0]["shape"] == [53, 19]


def test_only_recent_resyntheses_are_stored() -> None:
    session = ViewerSession(build_speech_data())
    numbers = [session.resynthesize(PAYLOAD)["data"][0]["number"] for _ in range(MAX_RESYNTHESES + 1)]
    whole = {"layer": 0, "head": 0, "rows": (0, 3), "cols": (0, 4)}
    with pytest.raises(InputError, match="move a slider"):
        session.answer_request(TileRequest(**whole, data_index=numbers[0]))
    assert session.answer_request(TileRequest(**whole, data_index=numbers[-1]))
    with pytest.raises(InputError, match="there are 1"):
        session.answer_request(TileRequest(**whole, data_index=numbers[-1] + 1))


def test_resynthesis_without_style_reports_requested_weights() -> None:
    plain = replace(build_speech_data(), style=None, resynthesize=None)
    data = replace(build_speech_data(), resynthesize=lambda weights: plain)
    resynthesized = ViewerSession([build_speech_data(), data]).resynthesize({**PAYLOAD, "data": 1})["data"][0]
    assert resynthesized["style"]["weights"] == [PAYLOAD["weights"]]
    assert resynthesized["number"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": 1}, "expected 0 to 0"),
        ({"data": "0"}, "expected 0 to 0"),
        ({"weights": None}, "list of 5"),
        ({"weights": "01234"}, "list of 5"),
        ({"weights": [0.1] * 4}, "list of 5"),
        ({"weights": [0, 0, 0, 0, 1.5]}, "token 4; expected a number from -1 to 1"),
        ({"weights": [0, 0, 0, 0, float("nan")]}, "nan given for token 4"),
        ({"weights": [0, "1", 0, 0, 0]}, "1 given for token 1"),
        ({"weights": [True, 0, 0, 0, 0]}, "True given for token 0"),
    ],
)
def test_invalid_resynthesis_request_is_rejected(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ViewerSession(build_speech_data()).resynthesize({**PAYLOAD, **change})
    with pytest.raises(InputError, match="no style tokens whose"):
        ViewerSession(build_speech_data(can_resynthesize=False)).resynthesize({**PAYLOAD, **change, "data": 0})


def test_resynthesis_keeps_the_ablation() -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 5, 4)

    def synthesize(weights: list[float] | None = None) -> ViewerData:
        output = model(x, x, x)[0][0].detach()
        return ViewerData.from_weights(
            {"a": build_diagonal(5, 3)},
            speech=SynthesizedSpeech(output.numpy()),
            style=StyleTokenWeights(("t",), np.ones(1)),
            resynthesize=synthesize,
        )

    session = ViewerSession(compare_with_ablation(model, {"MultiheadAttention": [0]}, synthesize))
    assert session.viewer_data[1].resynthesize is not None
    before, after = (session.resynthesize({"data": n, "weights": [0.5]})["data"][0] for n in range(2))
    first, second = (build_entry(data) for data in session.viewer_data)
    assert before["speech"]["mel"] == first["speech"]["mel"] != second["speech"]["mel"]
    assert after["speech"]["mel"] == second["speech"]["mel"]
