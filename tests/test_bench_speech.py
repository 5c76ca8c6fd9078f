"""The benchmark of speech runs, on the smallest sizes, and both decoders are found to say the same."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok import recipe
from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import EOS
from jumok.models.tacotron import Tacotron

pytest.importorskip("librosa")
ROOT = Path(__file__).parents[1]
MODULES = {"report", "drawn", "peers", "training", "frame_loop", "speech"}
TEXTS = [[7, 12, EOS], [4, 8, 11, 6, 10, EOS], [9, EOS]]
FRAMES = (7, 12, 2)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark, imported as scripts of bench/ are."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield importlib.import_module("speech")
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def batch_of(mels: int) -> SpeechBatch:
    draw = torch.manual_seed(1)
    return SpeechBatch.from_sequences(TEXTS, [torch.rand(frames, mels, generator=draw) for frames in FRAMES])


def shaken(bench: Any, **changes: Any) -> Tacotron:
    torch.manual_seed(0)
    model = Tacotron(dataclasses.replace(bench.SMALL, **changes), 13)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def test_it_measures_both_decoders_and_the_parts_of_speaking(tmp_path: Path) -> None:
    out = tmp_path / "speech.json"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "bench/speech.py", "--quick", "--device", "cpu", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert last.endswith(out.name)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["commit"] == "abc1234"
    learning, one, four = found["rows"]
    for row in found["rows"]:
        assert not [way for way in row["ways"].values() if "error" in way], row
        assert "errors" not in row

    ways = learning["ways"]
    assert list(ways) == ["ours", "loop"]
    assert ways["ours"]["start"] == pytest.approx(ways["loop"]["start"], rel=1e-3)  # the same dropout, too
    for way in ways.values():
        assert way["frames_s"] == pytest.approx(learning["frames"] / way["ms"] * 1e3, rel=1e-3)
    assert learning["ratios"]["ours / loop"] == pytest.approx(
        ways["ours"]["ms"] / ways["loop"]["ms"], rel=1e-3
    )
    assert learning["weights"]["ours"] == learning["weights"]["loop"]
    assert learning["differs"]["mels"] <= 1e-4
    assert 50 < learning["launches"]["ours"] < learning["launches"]["loop"]

    for row, many in ((one, 1), (four, 4)):
        assert list(row["ways"]) == ["ours", "the network", "Griffin-Lim"]
        assert row["seconds"] == pytest.approx(many * round(9 * np.exp(1.537)) / 80)
        for way in row["ways"].values():
            assert way["times_real"] == pytest.approx(row["seconds"] / way["ms"] * 1e3, rel=1e-3)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("attention", ["additive", "location-sensitive"])
def test_the_loop_is_our_decoder(bench: Any, attention: str, forward: bool) -> None:
    ours = shaken(bench, attention=attention, forward_attention=forward)
    loop, again = bench.looped(ours), bench.looped(ours)
    assert type(loop.decoder) is bench.FrameLoop
    assert sum(x.numel() for x in loop.parameters()) == sum(x.numel() for x in ours.parameters())
    batch = batch_of(ours.config.n_mels)
    found = []
    for model, given in ((ours, batch), (loop, batch), (again, batch.with_static_shapes())):
        mels = model.eval().predict_teacher_forced(given)
        torch.manual_seed(2)
        total = model.train().loss(given).total
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(total, list(named.values()))
        shared = {name: x for name, x in zip(named, gradients, strict=True) if "decoder" not in name}
        decoded = [x for name, x in zip(named, gradients, strict=True) if "decoder" in name]
        found.append((mels, total, shared, sum(x.square().sum() for x in decoded)))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-5)


def test_decoders_that_say_other_things_are_not_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.Plan(torch.device("cpu"), quick=True, compile=False)
    ours = bench.network(bench.SMALL)
    batch = batch_of(ours.config.mels)
    assert bench.check(plan, ours, batch)["mels"] < 1e-5
    attention = sys.modules["frame_loop"].Attention
    forward = attention.forward
    monkeypatch.setattr(
        attention,
        "forward",
        lambda self, *given: (1.001 * forward(self, *given)[0], forward(self, *given)[1]),
    )
    with pytest.raises(RuntimeError, match="do not say the same"):
        bench.check(plan, ours, batch)


def test_drawn_sounds_are_as_long_as_those_of_arctic(bench: Any) -> None:
    known = recipe.load(bench.RECIPE)
    sizes = bench.Sizes(dataclasses.replace(known.model, mels=1), known.train, known.train.tokens, 4000)
    data = bench.utterances(sizes, alike=True)
    assert np.mean(data.sizes) == pytest.approx(48.9, abs=1)
    assert np.mean(data.lengths) == pytest.approx(225.5, abs=10)  # those of 250 recordings
    assert np.std(data.lengths) == pytest.approx(62.5, abs=15)
    assert np.quantile(data.lengths, [0.05, 0.95]) == pytest.approx([124, 332], rel=0.15)
    assert data.ids.max() < bench.ALPHABET
    assert (data.lengths == bench.utterances(sizes, alike=False).lengths).all()
