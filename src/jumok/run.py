"""A run is a folder: what `jumok train` makes and every later command starts from.

::

    runs/transformer/multi30k-en-de/
        recipe.yaml          all settings, spelled out, and the number of this format
        tokenizer.json       (two of them where the languages have vocabularies of their own)
        model.json           the sizes of a BERT that it has from what it began from
        labels.json          the names of its classes or tags, in their order
        encoder.safetensors  the weights that the encoder of pictures began from
        model.safetensors    the best weights so far
        metrics.jsonl        a line for every few steps and every validation
        state/               what resuming needs
        data/                the tokenised training data, and what was held out of it
        figures/, eval/      what `jumok eval` found

Nothing in it is a pickle, no file of it may be a link that leads out of it, and its recipe stands on its own:
a run from a stranger can be loaded.
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

__all__ = ["FORMAT_VERSION", "Run", "lock_run_folder"]

FORMAT_VERSION = 1
LOCK_FILE = ".lock"
# These may differ when a run is resumed: how long to go on, where, and how it is shown; besides them all of
# ``decode`` and ``score``, which come after training.
CHANGEABLE_TRAIN_KEYS = (
    "epochs steps minutes patience log_every save_every tensorboard device prefetch accumulate compile graphs"
)


@dataclass(frozen=True)
class Run:
    """A run's folder and its recipe."""

    folder: Path
    recipe: Any

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """A run that is there."""
        folder = Path(folder)
        path = folder / "recipe.yaml"
        if not folder.exists():
            raise InputError(f"there is no run {folder}{_suggest_runs(folder)}")
        if not path.is_file():
            theirs = (folder / "config.json").is_file()
            told = (
                "`jumok train RECIPE from=…` makes one of this Hugging Face folder"
                if theirs
                else "`jumok train RECIPE` makes a run"
            )
            raise InputError(f"{folder} is no run: it has no recipe.yaml; {told}")
        check_symlinks(folder)
        tree = recipes.read(path, forbid_base=True)
        found = tree.pop("format", None)
        if found != FORMAT_VERSION:
            raise InputError(
                f"{path} has format {found!r}, and this jumok reads format {FORMAT_VERSION}; "
                "use the jumok that made it, or train again"
            )
        return cls(folder, recipes.parse(tree, str(path)))

    @classmethod
    def create_or_resume(cls, folder: str | Path, recipe: Any) -> Run:
        """A new run, or, where the folder holds one, that run with its recipe as it may be changed."""
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
            elif before != after:  # nothing was learned yet: what was made ready for it is made anew
                _remove_prepared_data(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(
                recipes.to_yaml(recipe, header=f"format: {FORMAT_VERSION}\n"), encoding="utf-8"
            )
        return run

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a state to go on from."""
        return any((self.folder / "state").glob("*/state.json"))

    @property
    def model_files(self) -> list[Path]:
        """The files that a prediction depends on."""
        names = ("recipe.yaml", "*.json", "*.safetensors")
        return sorted(path for name in names for path in self.folder.glob(name))

    @property
    def weights_path(self) -> Path:
        """The best weights so far."""
        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise InputError(f"{self.folder} has no model.safetensors yet: its training has hardly begun")
        return path


def _is_main_process() -> bool:
    """Whether this process sees to the folder: with torchrun, the first one does."""
    return os.environ.get("RANK", "0") == "0"


def _check_not_foreign(folder: Path) -> None:
    """Refuse a folder that holds something, but no run."""
    if (folder / "recipe.yaml").is_file() or not folder.exists():
        return
    if not folder.is_dir() or any(path.name != LOCK_FILE for path in folder.iterdir()):
        raise InputError(f"{folder} is there and is no run; give another folder with --out")


def _refuse_changes(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    allowed = {f"train.{key}" for key in CHANGEABLE_TRAIN_KEYS.split()}
    changes = [
        change
        for change in recipes.iter_changes(before, after)
        if change[0] not in allowed and not change[0].startswith(("decode.", "score."))
    ]
    if changes:
        told = "\n".join(f"  {key}: {old!r} then, {new!r} now" for key, old, new in changes)
        raise InputError(
            f"{folder} was begun with another recipe:\n{told}\n"
            "Give these the values of then to resume it, or another folder with --out to begin anew."
        )


def _remove_prepared_data(folder: Path) -> None:
    for path in (*folder.glob("tokenizer*.json"), folder / "encoder.safetensors"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "data", ignore_errors=True)


def _suggest_runs(folder: Path) -> str:
    """The runs that are there, for a message."""
    for root in dict.fromkeys([folder.parent, Path("runs")]):
        found = sorted(str(path.parent) for path in root.glob("*/recipe.yaml"))
        if found:
            return f"; there are: {', '.join(found[:8])}" + (", …" if len(found) > 8 else "")
    return "; `jumok train RECIPE` makes one"


@contextlib.contextmanager
def lock_run_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a run's folder, where files can be locked. It need not be there.

    With torchrun, the first process has the lock.
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
            raise InputError(f"another process is training in {folder}; wait for it, or give --out") from None
        except OSError:  # a file system without locks
            pass
        yield
