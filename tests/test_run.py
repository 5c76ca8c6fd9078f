"""Run folders: creating, opening, resuming, errors."""

from pathlib import Path

import pytest

from jumok import InputError
from jumok.files import atomic_write
from jumok.recipe import load
from jumok.run import FORMAT_VERSION, Run


def test_a_new_run_can_be_opened(tmp_path: Path) -> None:
    recipe = load("bahdanau", ["train.max_steps=5"])
    run = Run.create_or_resume(tmp_path / "a" / "run", recipe)
    assert Run.open(run.folder).recipe == recipe
    assert (run.folder / "recipe.yaml").read_text(encoding="utf-8").startswith(f"format: {FORMAT_VERSION}\n")


def test_the_same_recipe_resumes_and_may_train_longer(tmp_path: Path) -> None:
    Run.create_or_resume(tmp_path / "run", load("bahdanau", ["train.max_steps=5"]))
    write_checkpoint(tmp_path / "run")
    Run.create_or_resume(tmp_path / "run", load("bahdanau", ["train.max_steps=5"]))
    longer = Run.create_or_resume(tmp_path / "run", load("bahdanau", ["train.max_steps=9", "train.device=cpu"]))
    assert Run.open(longer.folder).recipe.train.max_steps == 9


def write_checkpoint(folder: Path) -> None:
    (folder / "state" / "00000001").mkdir(parents=True)
    (folder / "state" / "00000001" / "state.json").write_text("{}", encoding="utf-8")


def test_a_run_without_a_checkpoint_accepts_another_recipe(tmp_path: Path) -> None:
    Run.create_or_resume(tmp_path / "run", load("bahdanau", ["data.train=typo.tsv"]))
    (tmp_path / "run" / "tokenizer.json").write_text("{}", encoding="utf-8")
    Run.create_or_resume(tmp_path / "run", load("bahdanau", ["data.train=right.tsv"]))
    assert not (tmp_path / "run" / "tokenizer.json").exists()
    assert Run.open(tmp_path / "run").recipe.data.train == "right.tsv"


def test_a_changed_recipe_is_an_error_that_names_the_changes(tmp_path: Path) -> None:
    Run.create_or_resume(tmp_path / "run", load("bahdanau"))
    write_checkpoint(tmp_path / "run")
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    with pytest.raises(InputError) as caught:
        Run.create_or_resume(tmp_path / "run", load("bahdanau", ["model.width=64", "train.seed=3"]))
    for part in ("model.width: 256 before, 64 now", "train.seed: 1 before, 3 now", "--out"):
        assert part in str(caught.value)
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before


def test_a_foreign_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(InputError, match="is not a run"):
        Run.create_or_resume(tmp_path / "photos", load("bahdanau"))
    with pytest.raises(InputError, match=r"no recipe\.yaml"):
        Run.open(tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]


def test_a_missing_run_is_reported_with_existing_ones(tmp_path: Path) -> None:
    Run.create_or_resume(tmp_path / "bahdanau", load("bahdanau"))
    with pytest.raises(InputError) as caught:
        Run.open(tmp_path / "bahdnau")
    assert str(tmp_path / "bahdanau") in str(caught.value)


def test_another_format_is_an_error(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", load("bahdanau"))
    path = run.folder / "recipe.yaml"
    text = path.read_text(encoding="utf-8")
    for version in (1, 99):
        path.write_text(text.replace(f"format: {FORMAT_VERSION}", f"format: {version}"), encoding="utf-8")
        with pytest.raises(InputError, match=rf"format {version}.* reads format 2; train again with this"):
            Run.open(run.folder)
        with pytest.raises(InputError, match="or use the version that wrote it"):
            Run.create_or_resume(run.folder, load("bahdanau"))


def test_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wait for the first validation"):
        _ = Run.create_or_resume(tmp_path / "run", load("bahdanau")).weights_path


def test_files_are_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "text.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("old", encoding="utf-8")

    def fail() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["text.txt"]


def test_a_hugging_face_folder_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"is not a run.*pretrained=.*from this Hugging Face folder"):
        Run.open(tmp_path)
