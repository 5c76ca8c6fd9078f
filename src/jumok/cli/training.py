"""``jumok train``, ``jumok recipes`` and ``jumok data get``."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from jumok.cli.options import io_option
from jumok.cli.terminal import build_console, exit_with_error
from jumok.errors import InputError


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="Name of a recipe (see `jumok recipes`) or a YAML file.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Override recipe settings, for example train.max_steps=500."),
    ] = None,
    out: Annotated[Path | None, io_option(help="Run folder. Defaults to a folder under runs/.")] = None,
) -> None:
    """Train a model. If the run folder already exists, resume training."""
    from jumok import recipe as recipe_module
    from jumok.run import Run, lock_run_folder
    from jumok.tasks import build_task, training

    loaded_recipe = recipe_module.load(recipe, overrides or [])
    folder = out or recipe_module.get_run_folder(recipe)
    with _handle_stop_signals(), lock_run_folder(folder):
        training.train(build_task(Run.create_or_resume(folder, loaded_recipe)), build_console())


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show this recipe. Without a name, list all recipes.")
    ] = None,
    copy_to: Annotated[Path | None, typer.Option(help="Copy the recipe to this file.")] = None,
) -> None:
    """List, show or copy the built-in recipes."""
    from jumok import recipe as recipe_module

    if name is None:
        for recipe_name, path in recipe_module.list_builtin().items():
            print(f"{recipe_name:<34} {recipe_module.read_summary(path)}")
        return
    text = recipe_module.find(name).read_text(encoding="utf-8")
    if copy_to is None:
        print(text, end="")
    elif copy_to.exists():
        raise InputError(f"{copy_to} already exists; choose another file name")
    else:
        copy_to.write_text(text, encoding="utf-8")
        print(f"written to {copy_to}; to train it, run: jumok train {copy_to}")


def get_dataset(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the data set.")],
    out: Annotated[Path | None, typer.Option(help="Folder to download to. Defaults to JUMOK_DATA, or data/.")] = None,
    mirror: Annotated[
        str | None, typer.Option(help="URL or folder to copy the files from instead of the original source.")
    ] = None,
) -> None:
    """Download a public data set and verify its checksums."""
    from jumok.data import download

    download.download_dataset(name, folder=out, mirror=mirror, console=build_console())


@contextlib.contextmanager
def _handle_stop_signals() -> Iterator[None]:
    """Treat SIGTERM as Ctrl+C, and tell the user how to resume. The training loop handles both itself."""
    signal_number = signal.SIGINT

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        nonlocal signal_number
        signal_number = signal.Signals(number)
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    previous_handler = signal.signal(signal.SIGTERM, interrupt) if is_main_thread else None
    try:
        yield
    except KeyboardInterrupt:
        exit_with_error("stopped; run the same command again to resume", 128 + signal_number)
    finally:
        if is_main_thread:
            signal.signal(signal.SIGTERM, previous_handler or signal.SIG_DFL)
