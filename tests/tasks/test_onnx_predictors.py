"""Runs by ONNX Runtime: as an engine, and as folders whose README is run without jumok."""

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
from labelled_runs import filler, pair, question, sentence, squad, table, tagged, train_run
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

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUIET = Console(quiet=True)
FEW: dict[str, Any] = {"train": {"max_epochs": None, "max_steps": 3, "warmup_steps": 1, "validate_every": 3}}
WORDY = [
    "model.embedding_width=7",
    "model.width=5",
    "model.attention_width=11",
    "model.num_bigrams=50",
    "train.max_steps=3",
]
WORDY += ["train.device=cpu", "train.tensorboard=false", "data.builtin_size=200", "data.held_out_size=20"]
WORDY += ["train.max_epochs=null", "train.warmup_steps=2", "train.validate_every=3"]
DOCUMENTS = ["Awful.", "", "The soup was awful. Overall the museum was splendid.\nI waited! " * 9, "well"]
SLOW = pytest.mark.slow


def made(kind: str, folder: Path) -> tuple[Run, list[str]]:
    """A run, and lines for it: of one word, and of many."""
    chance = random.Random(1)
    data: dict[str, Any] = {"held_out_size": 9}
    lines = ["good", "a good film of a sort " * 3, "it ."]
    if kind == "pairs":
        data |= {"train": table(folder / "x.tsv", "text\tother\tlabel", [pair(chance) for _ in range(60)])}
        run = train_run(folder / "run", "classify", {**data, "pair_column": "other"}, **FEW)
        return run, ["he is old ||| he is young", "a ||| b", "the long text here ||| x"]
    if kind == "tag":
        data |= {"train": tagged(folder / "x.txt", [sentence(chance) for _ in range(60)]), "tag_scheme": "iob1"}
        return train_run(folder / "run", "tag", data, **FEW), [*lines, "Ekeus went to Baghdad , then home ."]
    if kind == "answer":
        data |= {"train": squad(folder / "x.json", [[question(chance)] for _ in range(60)])}
        lines = ["who?\tit was he", "where did it go\tto a far land", "?\tit"]
        return train_run(folder / "run", "answer", data, **FEW), lines
    if kind == "pretrain":
        counts = [" ".join(filler(chance, 9)) for _ in range(100)]
        text = "\n\n".join(f"{one}.\none two three four five.\nsix {one}." for one in counts)
        (folder / "x.txt").write_text(text, encoding="utf-8")
        small = [
            "model.width=8",
            "model.num_layers=2",
            "model.num_heads=2",
            "model.feed_forward_width=16",
            "tokenizer.vocab_size=150",
        ]
        small += [
            "model.max_positions=64",
            "masking.sequence_length=32",
            "data.held_out_size=9",
            "train.batch_tokens=512",
        ]
        small += [
            "train.max_epochs=null",
            "train.max_minutes=null",
            "train.validate_every=2",
            "train.device=cpu",
        ]
        small += ["train.tensorboard=false", "train.warmup_steps=1", "train.max_steps=2"]
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
    run, lines = made(request.param, folder)
    out = folder / engines.compute_run_digest(run)  # the name that an engine gives its folder
    done = CliRunner().invoke(app, ["export", str(run.folder), str(out), "--format", "onnx"])
    assert done.exit_code == 0, done.output
    assert "its outputs differ from PyTorch by at most" in done.output
    return run, lines, out


@pytest.fixture
def kept(exported: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, which an engine finds: what it would make is the same, and need not be made twice."""
    monkeypatch.setattr(engines, "get_engine_files", lambda run, engine, make: exported[2])
    return exported


def search(run: Run, **asked: Any) -> Any:
    return build_task(run).options_type(**asked)


def test_an_engine_says_what_pytorch_says(kept: Any) -> None:
    run, lines, _ = kept
    usual, engine = load_predictor(run, "cpu"), onnx_engine.load(run, "cpu")
    for asked in [{}, {"n_best": 3}, {"beam_size": 1}]:
        if "beam_size" in asked and run.recipe.task != "translate":
            continue
        if "n_best" in asked and run.recipe.task == "tag":
            continue
        wanted, said = (list(one.predict(lines, search(run, **asked))) for one in (usual, engine))
        for one, two in zip(wanted, said, strict=True):
            texts = ([*some.to_lines(n_best=False, alignments=False, as_json=True)] for some in (one, two))
            for left, right in zip(*texts, strict=True):
                same(json.loads(left), json.loads(right))
    if run.recipe.task != "translate":
        given = re.split(r"\s*\|\|\|\s*|\t", lines[0]) if run.recipe.task in ("classify", "answer") else lines[:1]
        assert engine.count_tokens(*given) == usual.count_tokens(*given)


def same(left: Any, right: Any) -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list):
        for one, two in zip(left, right, strict=True):
            same(one, two)
    elif isinstance(left, float):
        assert left == pytest.approx(right, abs=1e-4)
    else:
        assert left == right


def test_an_engine_shows_where_the_model_looked(kept: Any, tmp_path: Path) -> None:
    run, lines, _ = kept
    usual, engine = load_predictor(run, "cpu"), onnx_engine.load(run, "cpu")
    [wanted], [said] = usual.build_viewer_data(lines[0]), engine.build_viewer_data(lines[0])
    assert said.title == wanted.title
    assert [one.name for one in said.layers] == [one.name for one in wanted.layers]
    if run.recipe.task == "translate":
        one, two = (some.translate(lines[0]) for some in (usual, engine))
        assert one.alignment == two.alignment
        assert one.alignment
    if hasattr(engine, "highlight_texts"):
        one, two = (some.highlight_texts(lines[2:])[0] for some in (usual, engine))
        np.testing.assert_allclose(one.weights, two.weights, atol=1e-5)
    [prediction] = engine.predict(lines[:1], search(run), with_attention=True)
    assert engine.draw_attention(prediction, tmp_path / "map.png").stat().st_size > 1000


def alone(code: str, folder: Path) -> str:
    """What a program prints that can import neither jumok nor PyTorch."""
    code = f"import sys; sys.modules['jumok'] = sys.modules['torch'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_readme_is_all_that_one_needs(exported: Any) -> None:
    run, _, folder = exported
    text = (folder / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    said = alone(code, folder)
    reader = load_predictor(run, "cpu")
    if run.recipe.task == "translate":
        assert (
            said == reader.translate("this is an example sentence", TranslationOptions(beam_size=1)).translation.strip()
        )
    elif run.recipe.task == "classify":
        given = ["He is old. ||| He is young."]
        if run.recipe.data.pair_column is None:
            text = "The plot is thin. I loved it."
            given = [text if run.recipe.model.type == "hierarchical" else "a film that makes you happy"]
        [wanted] = reader.predict(given, search(run))
        label, share = said.splitlines()[0].split()[-2:]
        assert label == wanted.label
        assert float(share) == pytest.approx(wanted.classes[0][1], abs=1e-4)
        if run.recipe.model.type == "bert":
            page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
            blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
            [code] = [one for one in blocks if "onnxruntime" in one]
            assert set(eval(alone(code, folder))) <= set(reader.labels)
    elif run.recipe.task == "tag":
        words = ["Ekeus", "heads", "for", "Baghdad", "."]
        tags = [tag for _, tag in eval(said)]
        assert len(tags) == len(words)
        tagging = reader.tag(" ".join(words))
        assert [one.split("-")[-1] for one in tags] == [one.split("-")[-1] for one in tagging.tags]
    elif run.recipe.task == "answer":
        wanted = reader.answer("Where is Seoul?", "Seoul is the capital of Korea.")
        assert said == f"Where is Seoul? {wanted.answer.text}".strip()
    else:
        wanted = reader.fill("the capital of france is [MASK] .").mask_predictions[0]
        assert {word for word, _ in wanted[:1]} <= set(eval(said))


@pytest.mark.parametrize("exported", ["pairs"], indirect=True)  # one kind will do
def test_files_are_made_once_for_each_weights(exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, lines, folder = exported
    run = replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
    asked = []

    def write(model: Any, new: Path) -> float:
        asked.append(shutil.copy(folder / "model.onnx", new))
        return 0.0

    monkeypatch.setattr(onnx, "write_graphs", write)
    first, second = onnx_engine.load(run, "cpu"), engines.load_predictor(run, "onnx", "cpu")
    assert [*first.predict(lines, search(run))] == [*second.predict(lines, search(run))]
    assert len(asked) == 1
    [before] = engines.get_engine_cache_folder(run, "onnx").iterdir()
    weights = load_file(run.weights_path)
    save_file({name: x + 1 for name, x in weights.items()}, run.weights_path)  # trained further
    onnx_engine.load(run, "cpu")
    [after] = engines.get_engine_cache_folder(run, "onnx").iterdir()
    assert len(asked) == 2
    assert after != before
    with pytest.raises(InputError, match="onnxruntime-gpu"):
        onnx_engine.load(run, "cuda")


@pytest.mark.parametrize("exported", ["pairs", "bahdanau"], indirect=True)
@pytest.mark.parametrize("deleted", [False, True], ids=["replaced", "deleted"])
def test_maps_are_of_the_weights_that_were_loaded(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deleted: bool
) -> None:
    run, lines, folder = exported
    run = replace(run, folder=shutil.copytree(run.folder, tmp_path / "run"))
    made_before = [*folder.glob("*.onnx")]
    monkeypatch.setattr(onnx, "write_graphs", lambda _, new: [shutil.copy(path, new) for path in made_before])
    kept, engine = onnx_engine.load(run, "cpu"), onnx_engine.load(run, "cpu")
    seen = kept.build_viewer_data(lines[0])
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
    assert len(kept.build_viewer_data(lines[0])) == len(seen)  # those that were loaded before stay


def test_what_has_no_graph_is_told(transformer: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ctranslate2"):
        onnx.export_onnx(transformer, tmp_path / "out")
    with pytest.raises(InputError, match="ctranslate2"):
        onnx_engine.load(transformer)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, bahdanau: Run) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not an earlier export"):
        onnx.export_onnx(bahdanau, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_state_is_reordered_but_for_the_number_of_words() -> None:
    state = onnx_engine.OnnxDecoderState({"hidden": torch.arange(6.0).view(3, 2), "said": torch.tensor(4)})
    after = state.reorder(torch.tensor([2, 0, 0])).tensors
    assert after["hidden"].tolist() == [[4, 5], [0, 1], [0, 1]]
    assert after["said"] == 4
