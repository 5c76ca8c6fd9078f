"""A run is a folder: what `jumok train` makes and every later command starts from.

::

    runs/transformer/multi30k-en-de/
        recipe.yaml          all settings, spelled out, and the number of this format
        tokenizer.json       (two of them where the languages have vocabularies of their own)
        model.safetensors    the best weights so far
        metrics.jsonl        a line for every few steps and every validation
        state/               what resuming needs
        data/                the tokenised training data, and what was held out of it
        figures/, eval/      what `jumok eval` found

Nothing in it is a pickle: a run from a stranger can be loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jumok import recipe as recipes
from jumok.errors import InputError
from jumok.files import written

__all__ = ["FORMAT", "Run"]

FORMAT = 1
# These may differ when a run is resumed: they say how long to go on and how to show it, not what is learned.
MAY_CHANGE = (
    "epochs",
    "steps",
    "minutes",
    "patience",
    "log_every",
    "save_every",
    "device",
    "prefetch",
    "tensorboard",
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
            raise InputError(f"there is no run {folder}{_near(folder)}")
        if not path.is_file():
            raise InputError(f"{folder} is no run: it has no recipe.yaml; `jumok train RECIPE` makes a run")
        tree = recipes.read(path)
        found = tree.pop("format", None)
        if found != FORMAT:
            raise InputError(
                f"{path} has format {found!r}, and this jumok reads format {FORMAT}; "
                "use the jumok that made it, or train again"
            )
        return cls(folder, recipes.parse(tree, str(path)))

    @classmethod
    def start(cls, folder: str | Path, recipe: Any) -> Run:
        """A new run, or, where the folder holds one, that run with its recipe as it may be changed."""
        folder = Path(folder)
        path = folder / "recipe.yaml"
        if os.environ.get("RANK", "0") != "0":  # with torchrun, the first process sees to the folder
            return cls(folder, recipe)
        if path.is_file():
            before, after = recipes.plain(cls.open(folder).recipe), recipes.plain(recipe)
            _refuse_changes(folder, before, after)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is there and is no run; give another folder with --out")
        folder.mkdir(parents=True, exist_ok=True)
        with written(path) as temporary:
            temporary.write_text(recipes.write(recipe, header=f"format: {FORMAT}\n"), encoding="utf-8")
        return cls(folder, recipe)

    @property
    def weights(self) -> Path:
        """The best weights so far."""
        path = self.folder / "model.safetensors"
        if not path.is_file():
            raise InputError(
                f"{self.folder} has no model.safetensors yet: training has not come to its first validation"
            )
        return path


def _refuse_changes(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    allowed = {f"train.{key}" for key in MAY_CHANGE}
    changes = [change for change in recipes.changed(before, after) if change[0] not in allowed]
    if changes:
        told = "\n".join(f"  {key}: {old!r} then, {new!r} now" for key, old, new in changes)
        raise InputError(
            f"{folder} was begun with another recipe:\n{told}\n"
            "Give these the values of then to resume it, or another folder with --out to begin anew."
        )


def _near(folder: Path) -> str:
    """The runs that are there, for a message."""
    root = next((one for one in (folder.parent, Path("runs")) if one.is_dir()), None)
    if root is None:
        return "; `jumok train RECIPE` makes one"
    found = sorted(str(path.parent) for path in root.rglob("recipe.yaml"))[:8]
    return f"; under {root} there are: {', '.join(found)}" if found else "; `jumok train RECIPE` makes one"
