"""The ``jumok`` application: its commands, and how errors are reported.

The commands only parse their arguments and call the package. They import heavy modules such as torch when
they run, so that ``jumok --help`` is fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from jumok.cli import conversion, evaluation, inference, serving, training, viewing
from jumok.cli.options import GroupedCommand
from jumok.cli.terminal import exit_with_error, show_warnings
from jumok.errors import JumokError

# The OpenMP threads of torch wait for each other by spinning. With the default count, one other busy process
# makes training tens of times slower. OpenMP reads this variable when a command imports torch.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Parts of the messages of torch for a GPU, for a CPU, and for sizes that exceed any memory.
OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "storage size calculation overflowed",
)

COMMANDS: dict[str, Callable[..., None]] = {
    "train": training.train,
    "run": inference.predict,
    "eval": evaluation.evaluate,
    "compare": evaluation.compare,
    "align": inference.align,
    "look": viewing.look,
    "serve": serving.serve,
    "recipes": training.recipes,
    "export": conversion.export,
    "convert": conversion.convert,
}
DATA_COMMANDS: dict[str, Callable[..., None]] = {"get": training.get_dataset}


def _build_app() -> typer.Typer:
    app = typer.Typer(
        name="jumok",
        help="Train, run and inspect attention models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    data_app = typer.Typer(help="Download public data sets.", no_args_is_help=True)
    for parent, commands in ((app, COMMANDS), (data_app, DATA_COMMANDS)):
        for name, command in commands.items():
            parent.command(name, cls=GroupedCommand)(command)
    app.add_typer(data_app, name="data")
    return app


app = _build_app()


def main() -> None:
    """Run a command. Report an error in one or two lines and exit with a nonzero status."""
    with show_warnings():
        _run_app()


def _run_app() -> None:
    try:
        app(standalone_mode=True)
    except JumokError as error:
        exit_with_error(str(error), getattr(error, "exit_status", 1))
    except OSError as error:  # for example a full disk, or a folder without write permission
        exit_with_error(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (MemoryError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not any(text in reason.lower() for text in OUT_OF_MEMORY_MESSAGES):
            raise
        exit_with_error(
            "out of memory: use smaller batches (train.batch_tokens=… with train.accumulation_steps=…) or a "
            f"smaller model (model.width=…). {reason or 'Python cannot allocate more memory'}"
        )
