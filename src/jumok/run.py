"""A run is a folder that `jumok train` creates and that all other commands take.

::

    runs/transformer-multi30k-en-de/
        recipe.yaml          all settings, and the number of this format
        tokenizer.json       (two files if source and target have their own vocabularies)
        model.json           the model sizes of a pretrained BERT
        labels.json          the names of the classes or tags, in order
        encoder.safetensors  the initial weights of the image encoder
        model.safetensors    the best weights so far
        metrics.jsonl        one line every few steps and for every validation
        state/               checkpoints for resuming
        data/                the tokenized training data and the held-out data
        figures/, eval/      results of `jumok eval`

A run contains no pickles, no symbolic links that lead out of the folder, and a recipe without a base. So it
is safe to load a run from an untrusted source.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumok import recipe as recipes
from jumok.errors import InputError
from jumok.files import atomic_write, check_symlinks

FORMAT_VERSION = 2
LOCK_FILE = ".lock"
# Settings of ``train`` that may change when a run is resumed: when to stop, where to run, what to display.
# All of ``decode`` and ``evaluation`` may change too, since they are used after training.
CHANGEABLE_TRAIN_KEYS = (
    "max_epochs max_steps max_minutes patience log_every save_every tensorboard device "
    "prefetch_batches accumulation_steps compile cuda_graphs"
)
CHANGEABLE_SECTIONS = ("decode.", "evaluation.")


@dataclass(frozen=True)
class Run:
    """A run's folder and its recipe."""

    folder: Path
    recipe: Any

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open an existing run."""
        folder = Path(folder)
        path = folder / "recipe.yaml"
        if not folder.exists():
            raise InputError(f"there is no run {folder}{_suggest_runs(folder)}")
        if not path.is_file():
            is_hugging_face = (folder / "config.json").is_file()
            advice = (
                "`jumok train RECIPE pretrained=…` trains a run from this Hugging Face folder"
                if is_hugging_face
                else "`jumok train RECIPE` creates a run"
            )
            raise InputError(f"{folder} is not a run: it has no recipe.yaml; {advice}")
        check_symlinks(folder)
        tree = recipes.read(path, forbid_base=True)
        version = tree.pop("format", None)
        if version != FORMAT_VERSION:
            raise InputError(
                f"{path} has format {version!r}, and this version of jumok reads format {FORMAT_VERSION}; "
                "train again with this version, or use the version that wrote it"
            )
        return cls(folder, recipes.parse(tree, str(path)))

    @classmethod
    def create_or_resume(cls, folder: str | Path, recipe: Any) -> Run:
        """Create a run, or resume the one in the folder if only changeable settings differ."""
        folder = Path(folder)
        path = folder / "recipe.yaml"
        run = cls(folder, recipe)
        if not _is_main_process():
            return run
        _check_not_foreign(folder)
        if path.is_file():
            before, after = recipes.to_dict(cls.open(folder).recipe), recipes.to_dict(recipe)
            if run.has_checkpoint:
                _refuse_changes(folder, before, after)
            elif before != after:  # training has not started, so the data can be prepared again
                _remove_prepared_data(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(recipes.to_yaml(recipe, header=f"format: {FORMAT_VERSION}\n"), encoding="utf-8")
        return run

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return any((self.folder / "state").glob("*/state.json"))

    @property
    def model_files(self) -> list[Path]:
        """The files that predictions depend on."""
        names = ("recipe.yaml", "*.json", "*.safetensors")
        return sorted(path for name in names for path in self.folder.glob(name))

    @property
    def weights_path(self) -> Path:
        """The path of the best weights so far."""
        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise InputError(f"{self.folder} has no model.safetensors yet; wait for the first validation")
        return path


def _is_main_process() -> bool:
    """Whether this process writes to the folder. With torchrun, only the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _check_not_foreign(folder: Path) -> None:
    """Raise an error if the folder holds something other than a run."""
    if (folder / "recipe.yaml").is_file() or not folder.exists():
        return
    if not folder.is_dir() or any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise InputError(f"{folder} exists and is not a run; give another folder with --out")


def _refuse_changes(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    allowed = {f"train.{key}" for key in CHANGEABLE_TRAIN_KEYS.split()}
    changes = [
        change
        for change in recipes.iter_changes(before, after)
        if change[0] not in allowed and not change[0].startswith(CHANGEABLE_SECTIONS)
    ]
    if changes:
        lines = "\n".join(f"  {key}: {old!r} before, {new!r} now" for key, old, new in changes)
        raise InputError(
            f"{folder} was started with another recipe:\n{lines}\n"
            "Restore these values to resume the run, or give another folder with --out to start a new one."
        )


def _remove_prepared_data(folder: Path) -> None:
    for path in (*folder.glob("tokenizer*.json"), folder / "encoder.safetensors"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "data", ignore_errors=True)


def _suggest_runs(folder: Path) -> str:
    """List the existing runs for an error message."""
    for root in dict.fromkeys([folder.parent, Path("runs")]):
        runs = sorted(str(path.parent) for path in root.glob("*/recipe.yaml"))
        if runs:
            return f"; there are: {', '.join(runs[:8])}" + (", …" if len(runs) > 8 else "")
    return "; `jumok train RECIPE` creates one"


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a run's folder, which is created if it does not exist.

    With torchrun, the first process holds the lock. File systems without locks are not protected.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    if not _is_main_process():
        yield
        return
    _check_not_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process is training in {folder}; wait for it, or give another folder with --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
