"""Prediction with ONNX Runtime: as an engine, and as exported folders, whose README program runs without jumok."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_runs import (
    make_pair,
    make_question,
    make_sentence,
    random_words,
    train_run,
    write_squad,
    write_table,
    write_tagged,
)
from rich.console import Console
from safetensors.torch import load_file, save_file
from translation_runs import train_run as translating
from typer.testing import CliRunner

from jumok import InputError, recipe
from jumok.cli.app import app
from jumok.export import onnx
from jumok.inference import engines, onnx_engine
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.training import train
from jumok.tasks.translate.predictor import TranslationOptions

pytestmark = pytest.mark.long


pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUIET = Console(quiet=True)
FEW: dict[str, Any] = {"train": {"max_epochs": None, "max_steps": 3, "warmup_steps": 1, "validate_every": 3}}
WORDY = ["model.embedding_width=7", "model.width=5", "model.attention_width=11", "model.num_bigrams=50"]
WORDY += ["train.max_steps=3", "train.device=cpu", "train.tensorboard=false", "data.builtin_size=200"]
WORDY += ["data.held_out_size=20", "train.max_epochs=null", "train.warmup_steps=2", "train.validate_every=3"]
DOCUMENTS = ["Awful.", "", "The soup was awful. Overall the museum was splendid.\nI waited! " * 9, "well"]
SLOW = pytest.mark.slow


def train_kind(kind: str, folder: Path) -> tuple[Run, list[str]]:
    """Train a run. Also returns short and long lines for it."""
    rng = random.Random(1)
    data: dict[str, Any] = {"held_out_size": 9}
    lines = ["good", "a good film of a sort " * 3, "it ."]
    if kind == "pairs":
        data |= {"train": write_table(folder / "x.tsv", "text\tother\tlabel", [make_pair(rng) for _ in range(60)])}
        run = train_run(folder / "run", "classify", {**data, "pair_column": "other"}, **FEW)
        return run, ["he is old ||| he is young", "a ||| b", "the long text here ||| x"]
    if kind == "tag":
        data |= {"train": write_tagged(folder / "x.txt", [make_sentence(rng) for _ in range(60)]), "tag_scheme": "iob1"}
        return train_run(folder / "run", "tag", data, **FEW), [*lines, "Ekeus went to Baghdad , then home ."]
    if kind == "answer":
        data |= {"train": write_squad(folder / "x.json", [[make_question(rng)] for _ in range(60)])}
        lines = ["who?\tit was he", "where did it go\tto a far land", "?\tit"]
        return train_run(folder / "run", "answer", data, **FEW), lines
    if kind == "pretrain":
        counts = [" ".join(random_words(rng, 9)) for _ in range(100)]
        text = "\n\n".join(f"{words}.\none two three four five.\nsix {words}." for words in counts)
        (folder / "x.txt").write_text(text, encoding="utf-8")
        small = ["model.width=8", "model.num_layers=2", "model.num_heads=2", "model.feed_forward_width=16"]
        small += ["tokenizer.vocab_size=150", "model.max_positions=64", "masking.sequence_length=32"]
        small += ["data.held_out_size=9", "train.batch_tokens=512", "train.max_epochs=null", "train.max_minutes=null"]
        small += ["train.validate_every=2", "train.device=cpu", "train.tensorboard=false", "train.warmup_steps=1"]
        small += ["train.max_steps=2"]
        small += [f"data.train={folder / 'x.txt'}"]
        run = Run.create_or_resume(folder / "run", recipe.load("bert/default", small))
        train(build_task(run), QUIET)
        return run, ["one [MASK] three", "[MASK] ||| six seven [MASK] nine .", "one ||| two"]
    if kind in ("self_attentive", "hierarchical"):
        run = Run.create_or_resume(folder / "run", recipe.load(f"{kind}/default", WORDY))
        train(build_task(run), QUIET)
        return run, DOCUMENTS
    run = translating(folder / "run", kind)
    return run, ["the dog sees a cat", "he goes", "", "the old man goes to the house and sees the cat"]


KINDS = ["pairs", "hierarchical", "bahdanau"]
MORE = ["tag", "answer", "pretrain", "self_attentive", "luong", "convolutional"]


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(name, marks=SLOW) for name in MORE)])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run, lines for it, and its export."""
    folder = tmp_path_factory.mktemp(request.param)
    run, lines = train_kind(request.param, folder)
    out = folder / engines.compute_run_digest(run)  # the name that an engine gives its folder
    done = CliRunner().invoke(app, ["export", str(run.folder), str(out), "--format", "onnx"])
    assert done.exit_code == 0, done.output
    assert "its outputs differ from PyTorch by at most" in done.output
    return run, lines, out


@pytest.fixture
def engine_export(exported: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, used as the engine files, so that they are not built again."""
    monkeypatch.setattr(engines, "get_engine_files", lambda run, engine, make: exported[2])
    return exported


def search(run: Run, **options: Any) -> Any:
    return build_task(run).options_type(**options)


def test_predictions_equal_those_of_pytorch(engine_export: Any) -> None:
    run, lines, _ = engine_export
    usual, engine = load_predictor(run, "cpu"), onnx_engine.load(run, "cpu")
    for options in [{}, {"n_best": 3}, {"beam_size": 1}]:
        if "beam_size" in options and run.recipe.task != "translate":
            continue
        if "n_best" in options and run.recipe.task == "tag":
            continue
        expected, actual = (list(predictor.predict(lines, search(run, **options))) for predictor in (usual, engine))
        for x, y in zip(expected, actual, strict=True):
            texts = ([*prediction.to_lines(as_json=True)] for prediction in (x, y))
            for left, right in zip(*texts, strict=True):
                assert_almost_equal(json.loads(left), json.loads(right))
    if run.recipe.task != "translate":
        texts = re.split(r"\s*\|\|\|\s*|\t", lines[0]) if run.recipe.task in ("classify", "answer") else lines[:1]
        assert engine.count_tokens(*texts) == usual.count_tokens(*texts)


def assert_almost_equal(left: Any, right: Any) -> None:
    """Compare JSON values; numbers may differ slightly."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_almost_equal(left[key], right[key])
    elif isinstance(left, list):
        for x, y in zip(left, right, strict=True):
            assert_almost_equal(x, y)
    elif isinstance(left, float):
        assert left == pytest.approx(right, abs=1e-4)
    else:
        assert left == right


def test_attention_equals_that_of_pytorch(engine_export: Any, tmp_path: Path) -> None:
    run, lines, _ = engine_export
    usual, engine = load_predictor(run, "cpu"), onnx_engine.load(run, "cpu")
    [expected], [actual] = usual.build_viewer_data(lines[0]), engine.build_viewer_data(lines[0])
    assert actual.title == expected.title
    assert [layer.name for layer in actual.layers] == [layer.name for layer in expected.layers]
    if run.recipe.task == "translate":
        x, y = (predictor.translate(lines[0]) for predictor in (usual, engine))
        assert x.alignment == y.alignment
        assert x.alignment
    if hasattr(engine, "highlight_texts"):
        x, y = (predictor.highlight_texts(lines[2:])[0] for predictor in (usual, engine))
        np.testing.assert_allclose(x.weights, y.weights, atol=1e-5)
    [prediction] = engine.predict(lines[:1], search(run), with_attention=True)
    assert engine.draw_attention(prediction, tmp_path / "map.png").stat().st_size > 1000


def run_without_jumok(code: str, folder: Path) -> str:
    """Run a program that can import neither jumok nor PyTorch. Returns its output."""
    code = f"import sys; sys.modules['jumok'] = sys.modules['torch'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_readme_program_runs_without_jumok(exported: Any) -> None:
    run, _, folder = exported
    text = (folder / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    actual = run_without_jumok(code, folder)
    predictor = load_predictor(run, "cpu")
    if run.recipe.task == "translate":
        assert (
            actual
            == predictor.translate("this is an example sentence", TranslationOptions(beam_size=1)).translation.strip()
        )
    elif run.recipe.task == "classify":
        texts = ["He is old. ||| He is young."]
        if run.recipe.data.pair_column is None:
            text = "The plot is thin. I loved it."
            texts = [text if run.recipe.model.type == "hierarchical" else "a film that makes you happy"]
        [expected] = predictor.predict(texts, search(run))
        label, probability = actual.splitlines()[0].split()[-2:]
        assert label == expected.label
        assert float(probability) == pytest.approx(expected.classes[0][1], abs=1e-4)
        if run.recipe.model.type == "bert":
            page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
            blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
            [code] = [text for text in blocks if "onnxruntime" in text]
            assert set(eval(run_without_jumok(code, folder))) <= set(predictor.labels)
    elif run.recipe.task == "tag":
        words = ["Ekeus", "heads", "for", "Baghdad", "."]
        tags = [tag for _, tag in eval(actual)]
        assert len(tags) == len(words)
        tagging = predictor.tag(" ".join(words))
        assert [text.split("-")[-1] for text in tags] == [text.split("-")[-1] for text in tagging.tags]
    elif run.recipe.task == "answer":
        expected = predictor.answer("Where is Seoul?", "Seoul is the capital of Korea.")
        assert actual == f"Where is Seoul? {expected.answer.text}".strip()
    else:
        expected = predictor.fill("the capital of france is [MASK] .").mask_predictions[0]
        assert {word for word, _ in expected[:1]} <= set(eval(actual))


@pytest.mark.parametrize("exported", ["pairs"], indirect=True)  # one kind is enough
def test_engine_files_are_built_once_per_weights(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lines, folder = exported
    run = replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
    copies = []

    def write(model: Any, new: Path) -> float:
        copies.append(shutil.copy(folder / "model.onnx", new))
        return 0.0

    monkeypatch.setattr(onnx, "write_graphs", write)
    first, second = onnx_engine.load(run, "cpu"), engines.load_predictor(run, "onnx", "cpu")
    assert [*first.predict(lines, search(run))] == [*second.predict(lines, search(run))]
    assert len(copies) == 1
    [before] = engines.get_engine_cache_folder(run, "onnx").iterdir()
    weights = load_file(run.weights_path)
    save_file({name: x + 1 for name, x in weights.items()}, run.weights_path)  # trained further
    onnx_engine.load(run, "cpu")
    [after] = engines.get_engine_cache_folder(run, "onnx").iterdir()
    assert len(copies) == 2
    assert after != before
    with pytest.raises(InputError, match="onnxruntime-gpu"):
        onnx_engine.load(run, "cuda")


@pytest.mark.parametrize("exported", ["pairs", "bahdanau"], indirect=True)
@pytest.mark.parametrize("deleted", [False, True], ids=["replaced", "deleted"])
def test_attention_uses_the_weights_that_were_loaded(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deleted: bool
) -> None:
    run, lines, folder = exported
    run = replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
    made_before = [*folder.glob("*.onnx")]
    monkeypatch.setattr(onnx, "write_graphs", lambda _, new: [shutil.copy(path, new) for path in made_before])
    earlier_engine, engine = onnx_engine.load(run, "cpu"), onnx_engine.load(run, "cpu")
    views = earlier_engine.build_viewer_data(lines[0])
    expected = [*map(repr, engine.predict(lines, search(run)))]
    if deleted:
        shutil.rmtree(run.folder)
    else:
        weights = load_file(run.weights_path)
        save_file({name: x + 1 for name, x in weights.items()}, run.weights_path)
    with pytest.raises(engines.RunChangedError, match=r"were changed or deleted after it was loaded") as refused:
        engine.build_viewer_data(lines[0])
    assert str(tmp_path) not in str(refused.value)
    assert [*map(repr, engine.predict(lines, search(run)))] == expected
    assert len(earlier_engine.build_viewer_data(lines[0])) == len(views)  # those that were loaded before stay


def test_unsupported_models_are_an_error(transformer: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ctranslate2"):
        onnx.export_onnx(transformer, tmp_path / "out")
    with pytest.raises(InputError, match="ctranslate2"):
        onnx_engine.load(transformer)
    assert not (tmp_path / "out").exists()


def test_reordering_a_decoder_state() -> None:
    state = onnx_engine.OnnxDecoderState({"hidden": torch.arange(6.0).view(3, 2), "said": torch.tensor(4)})
    after = state.reorder(torch.tensor([2, 0, 0])).tensors
    assert after["hidden"].tolist() == [[4, 5], [0, 1], [0, 1]]
    assert after["said"] == 4
