"""Tests of `jumok look`: runs and Hugging Face folders as HTML files and figures."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jumok import InputError
from jumok.cli.app import app
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.look.figures.plots import draw_heat_map
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.look.viewer import view_writer
from jumok.look.viewer.preparation import prepare_for_display
from jumok.run import Run
from jumok.tasks import load_predictor

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks"))
from translation_runs import train_run

pytestmark = pytest.mark.long


def test_run_has_all_attention_layers(run: Run) -> None:
    (data,) = load_predictor(run, "cpu").build_viewer_data("this is an example sentence", target="이것은 예문이다")
    kinds = [(layer.name, layer.kind) for layer in data.layers]
    assert kinds == [
        ("encoder.0.attention", "self"),
        ("encoder.1.attention", "self"),
        ("decoder.0.self_attention", "causal self"),
        ("decoder.0.cross_attention", "cross"),
        ("decoder.1.self_attention", "causal self"),
        ("decoder.1.cross_attention", "cross"),
    ]
    cross, own = data.layers[-1], data.layers[-2]
    assert cross.row_labels is not None
    assert own.row_labels is not None
    assert cross.row_labels[-1] == "</s>"  # what it message
    assert own.row_labels[0] == "<s>"  # the input of the decoder
    assert list(cross.row_labels)[:-1] == list(own.row_labels)[1:]
    assert own.row_outputs == cross.row_labels  # each row predicts the next token
    assert "→  이것은 예문이다" in data.title


def test_layer_weights_equal_attention_maps(run: Run) -> None:
    translator = load_predictor(run, "cpu")
    (data,) = translator.build_viewer_data("this is an example sentence", target="이것은 예문이다")
    maps, _ = translator.compute_attention_maps([_example("this is an example sentence", "이것은 예문이다")])
    for layer, attention_map in zip([x for x in data.layers if x.kind == "cross"], maps, strict=True):
        rows, cols = layer.shape
        weights = torch.as_tensor(layer.source.weights(1, slice(0, rows), slice(0, cols)))
        torch.testing.assert_close(weights.float(), attention_map.weights[0, 1, :rows, :cols].float())


def _example(source: str, target: str) -> TranslationExample:
    return TranslationExample(source, target, "here")


def test_fixed_context_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no attention"):
        load_predictor(train_run(tmp_path / "fixed", "fixed"), "cpu").build_viewer_data("this")


@pytest.mark.parametrize("name", ["map.html", "map.png", "map.svg"])
def test_command_writes_files(name: str, bert: Path, run: Run, tmp_path: Path) -> None:
    for model, text in ((bert, "a cat sat"), (run.folder, "this is an example sentence")):
        path = tmp_path / model.name / name
        path.parent.mkdir(exist_ok=True)
        result = CliRunner().invoke(app, ["look", str(model), text, "--out", str(path), "--device", "cpu"])
        assert result.exit_code == 0, result.output
        assert str(path) in result.output
        assert path.stat().st_size > 5000


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the last map that was drawn."""
    arguments: dict[str, Any] = {}

    def draw(weights: Any, rows: Any, columns: Any, path: Path, **options: Any) -> Path:
        arguments.clear()
        arguments.update(weights=weights, rows=rows, columns=columns, **options)
        return draw_heat_map(weights, rows, columns, path, **options)

    monkeypatch.setattr(view_writer, "draw_heat_map", draw)
    return arguments


def test_figure_shows_what_the_viewer_opens_with(run: Run, tmp_path: Path, drawn: dict[str, Any]) -> None:
    (data,) = load_predictor(run, "cpu").build_viewer_data("this is an example sentence", target="이것은 예문이다")
    prepared = prepare_for_display(data)
    assert prepared.opening is not None
    opened = prepared.layers[prepared.opening.layer]
    assert opened.kind == "cross"
    view_writer.save_view(data, tmp_path / "map.png")
    assert drawn["title"] == data.title
    assert drawn["subtitle"][0] == f"{opened.name}, mean of {len(opened.heads)} heads"
    assert drawn["subtitle"][-1] == prepared.opening.reason
    expected = np.mean([opened.compute_weights(head) for head in opened.heads], 0)
    np.testing.assert_allclose(drawn["weights"], expected, rtol=1e-6)


def test_figure_of_the_mean_over_layers(bert: Path, tmp_path: Path, drawn: dict[str, Any]) -> None:
    (data,) = capture_huggingface_model(bert, "a cat sat", device="cpu")
    view_writer.save_view(data, tmp_path / "map.png", layer="mean")
    expected = np.mean([layer.compute_weights(head) for layer in data.layers for head in layer.heads], 0)
    np.testing.assert_allclose(drawn["weights"], expected, rtol=1e-5)
    assert drawn["subtitle"][0] == "mean of all 2 layers, all heads"
    path = view_writer.save_view(data, tmp_path / "map.html", layer="mean")
    assert path.read_text().count('"mean_of":2') == 1
    assert '"mean_of":0' not in path.read_text()
    with pytest.raises(InputError, match="mean over all heads, and head 1"):
        view_writer.save_view(data, tmp_path / "map.png", layer="mean", head=1)
    with pytest.raises(InputError, match="no two layers"):
        view_writer.save_view(data.with_layers(data.layers[:1]), tmp_path / "map.png", layer="mean")


def test_command_leaves_sinks_out(bert: Path, llama: Path, tmp_path: Path, drawn: dict[str, Any]) -> None:
    arguments = ["--out", str(tmp_path / "map.png"), "--device", "cpu", "--without-sinks"]
    result = CliRunner().invoke(app, ["look", str(llama), "w1 w2 w3 w4", *arguments])
    assert result.exit_code == 0, result.output
    assert drawn["hidden_columns"] == (0,)
    assert "without sinks" in drawn["subtitle"][-1]
    np.testing.assert_allclose(drawn["weights"].sum(1), [0, 1, 1, 1], rtol=1e-5)
    assert (drawn["weights"][:, 0] == 0).all()
    result = CliRunner().invoke(app, ["look", str(bert), "a cat sat", *arguments])
    assert "no layer has special tokens" in str(result.exception)


INVALID_OPTIONS: dict[str, tuple[dict[str, object], list[str]]] = {
    "layer": ({"layer": "encodr.layer.0*"}, ["encodr.layer.0*", "encoder.layer.0.attention.self"]),
    "head": ({"head": 2}, ["2 heads", "head 2"]),
    "suffix": ({"path": Path("map.gif")}, ["map.gif", ".html", ".png"]),
}


@pytest.mark.parametrize("name", INVALID_OPTIONS)
def test_invalid_selections_are_rejected(name: str, bert: Path, tmp_path: Path) -> None:
    (data,) = capture_huggingface_model(bert, "a cat", device="cpu")
    options, words = INVALID_OPTIONS[name]
    with pytest.raises(InputError) as error:
        view_writer.save_view(data, **{"path": tmp_path / "map.png"} | options)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


def test_command_rejects_unused_options(bert: Path, tmp_path: Path) -> None:
    for option in (["--head", "1"], ["--layer", "encoder.*"]):
        result = CliRunner().invoke(app, ["look", str(bert), "a cat", *option])
        assert isinstance(result.exception, InputError)
        assert "--out" in str(result.exception)
    result = CliRunner().invoke(app, ["look", str(tmp_path), "a cat"])
    assert isinstance(result.exception, InputError)
    assert "recipe.yaml" in str(result.exception)
    assert "config.json" in str(result.exception)


def test_run_is_compared_with_ablation(run: Run, bert: Path) -> None:
    cross = "decoder.1.cross_attention"
    text, target = "this is an example sentence", "이것은 예문이다"
    before, after = load_predictor(run, "cpu").build_viewer_data(text, target, ablations={cross: [1, (0, 0, 2)]})
    assert before.label.startswith("before, log-probability -")
    assert after.label.startswith("after, log-probability -")
    assert before.label.split()[-1] != after.label.split()[-1]
    first, second = (next(layer for layer in data.layers if layer.name == cross) for data in (before, after))
    whole = slice(0, first.shape[0]), slice(0, first.shape[1])
    assert torch.as_tensor(second.source.weights(1, *whole)).sum() == 0
    full, ablated = (torch.as_tensor(layer.source.weights(0, *whole))[0, 2].item() for layer in (first, second))
    assert full > 0 == ablated

    before, after = capture_huggingface_model(
        bert, "a cat", ablations={"encoder.layer.0.attention.self": [0]}, device="cpu"
    )
    assert (before.label, after.label) == ("before", "after")


def test_command_compares_with_ablation(bert: Path, tmp_path: Path) -> None:
    layer = "encoder.layer.0.attention.self"

    def run_look(path: Path, ablation: str) -> str:
        arguments = ["look", str(bert), "a cat", "--out", str(path), "--device", "cpu", "--knock-out", ablation]
        result = CliRunner().invoke(app, arguments)
        return str(result.exception or result.output)

    assert "written to" in run_look(tmp_path / "both.html", f"{layer}:1")
    assert '"after"' in (tmp_path / "both.html").read_text()
    assert "two; use an .html file" in run_look(tmp_path / "both.png", f"{layer}:1")
    assert "LAYER:8-2" in run_look(tmp_path / "both.html", layer)
    assert "2 heads" in run_look(tmp_path / "both.html", f"{layer}:5")
    assert "no layer 'encoder.layer.9'" in run_look(tmp_path / "both.html", "encoder.layer.9:0")
