"""Untrusted folders: no code in them is run, and nothing outside them is read or shown."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from jumok.errors import InputError, MissingExtra
from jumok.export.safetensors_converter import convert_to_safetensors
from jumok.files import check_symlinks
from jumok.inference import engines
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.recipe import load
from jumok.run import Run
from jumok.tasks import pretrained

SECRET = "root:x:0:0:hunter2\n"
CODE = """
import pathlib
pathlib.Path("{ran}").touch()
from transformers import PretrainedConfig, PreTrainedModel
class Config(PretrainedConfig):
    model_type = "stranger"
class Model(PreTrainedModel):
    config_class = Config
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "passwd.yaml"
    path.write_text(SECRET, encoding="utf-8")
    return path


@pytest.fixture
def untrusted_run(transformer: Run, tmp_path: Path) -> Path:
    """A copy of a run, to be changed."""
    return shutil.copytree(transformer.folder, tmp_path / "stranger")


# ------------------------------------------------------------------------------------------ no code is run


@pytest.mark.parametrize("model_type", ["stranger", "bert"])
def test_code_of_a_hugging_face_folder_is_not_run(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "evil"
    folder.mkdir()
    auto_map = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    config = {"model_type": model_type, "auto_map": auto_map, "vocab_size": 5}
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(config), encoding="utf-8")
    (folder / "evil.py").write_text(CODE.replace("{ran}", str(folder / "RAN")), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(InputError, match="cannot be loaded"):
        capture_huggingface_model(folder, "a text", device="cpu")
    assert sys.stdin.read() == "y\n" * 9  # there was no prompt
    assert not (folder / "RAN").exists()


def test_a_package_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, here = tmp_path / "site", tmp_path / "here"
    for root in (installed, here):
        inner = root / "some_model" / "inner"
        inner.mkdir(parents=True)
        (root / "some_model" / "__init__.py").write_text("raise SystemExit('code was run')", encoding="utf-8")
        for name in ("config.json", "model.safetensors"):
            (inner / name).touch()
    monkeypatch.chdir(here)
    for root in ("", str(here)):
        monkeypatch.setattr(sys, "path", [root, *sys.path])
    with pytest.raises(MissingExtra, match="not installed: pip install some_model"):
        pretrained._find_in_package("some_model.inner")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    for name in ("some-model", "some_model.inner"):
        assert pretrained._find_in_package(name) == installed / "some_model" / "inner"


def test_engine_files_inside_a_run_are_not_used(untrusted_run: Path) -> None:
    """A graph inside a run may belong to another model, even if its folder is named after the right digest."""
    run = Run.open(untrusted_run)
    own = engines.get_engine_files(run, "some", lambda folder: (folder / "graph").write_text("ours") and None)
    assert not own.is_relative_to(untrusted_run)
    shutil.copytree(own.parent, untrusted_run / "engines" / "some")
    (untrusted_run / "engines" / "some" / own.name / "graph").write_text("theirs")
    shutil.rmtree(own)
    again = engines.get_engine_files(run, "some", lambda folder: (folder / "graph").write_text("ours") and None)
    assert (again / "graph").read_text() == "ours"


@pytest.mark.parametrize("name", ["model.safetensors", "recipe.yaml", "tokenizer.json"])
def test_engine_files_depend_on_all_files_of_a_run(untrusted_run: Path, name: str) -> None:
    run = Run.open(untrusted_run)
    first = engines.get_engine_files(run, "some", lambda folder: None)
    with (untrusted_run / name).open("ab") as file:
        file.write(b" ")
    assert engines.get_engine_files(run, "some", lambda folder: None) != first


# --------------------------------------------------------------------------------- nothing outside is read


@pytest.mark.parametrize("name", ["recipe.yaml", "model.safetensors", "tokenizer.json"])
def test_a_symbolic_link_out_of_a_run_is_an_error(untrusted_run: Path, secret: Path, name: str) -> None:
    (untrusted_run / name).unlink()
    (untrusted_run / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"{name} is a symbolic link that leads out") as error:
        Run.open(untrusted_run)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("base", ["{secret}", "../passwd.yaml", "bahdanau"])
def test_the_recipe_of_a_run_has_no_base(untrusted_run: Path, secret: Path, base: str) -> None:
    with (untrusted_run / "recipe.yaml").open("a", encoding="utf-8") as file:
        file.write(f"\nbase: {base.format(secret=secret)}\n")
    with pytest.raises(InputError, match="must contain all of its settings") as error:
        Run.open(untrusted_run)
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("text", [SECRET, "[hunter2]", "- hunter2", "a: b: hunter2", "hunter2: {", "7"])
def test_an_error_about_a_base_does_not_show_the_file(tmp_path: Path, text: str) -> None:
    for name in ("passwd", "passwd.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        mine = tmp_path / "mine.yaml"
        mine.write_text(f"base: {tmp_path / name}\n", encoding="utf-8")
        with pytest.raises(InputError) as error:
            load(str(mine))
        assert "hunter2" not in str(error.value)


def test_conversion_copies_nothing_from_outside(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save({"x": torch.ones(2)}, folder / "pytorch_model.bin")
    (folder / "vocab.txt").symlink_to(secret)
    with pytest.raises(InputError, match=r"vocab\.txt is a symbolic link that leads out"):
        convert_to_safetensors(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_symbolic_links_inside_a_folder_and_of_the_hub_are_allowed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1a2b", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "3c4d").write_text("{}", encoding="utf-8")
    (snapshot / "config.json").symlink_to("../../blobs/3c4d")
    (snapshot / "same.json").symlink_to("config.json")
    check_symlinks(snapshot)
    (snapshot / "circle").symlink_to("circle")
    (snapshot / "lost").symlink_to("nowhere")
    check_symlinks(snapshot)
    (tmp_path / "linked").symlink_to(snapshot)
    check_symlinks(tmp_path / "linked")
