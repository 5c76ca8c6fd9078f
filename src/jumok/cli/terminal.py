"""Output of the commands to the terminal: the console, warnings and error messages."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PACKAGE_FOLDER = Path(__file__).parents[1]


def build_console() -> Console:
    """Build the console that training and evaluation print to."""
    from rich.console import Console

    return Console(highlight=False)


def exit_with_error(message: str, status: int = 1) -> NoReturn:
    """Print an error message and exit with a nonzero status."""
    print(f"jumok: {message}", file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def show_warnings() -> Iterator[None]:
    """Print the warnings of this package as one line each, without the source location.

    Warnings of other packages are shown as usual.
    """
    with warnings.catch_warnings():
        show_usual_warning = warnings.showwarning

        def show_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if Path(filename).is_relative_to(PACKAGE_FOLDER):
                print(f"jumok: {message}", file=sys.stderr)
            else:
                show_usual_warning(message, category, filename, lineno, file, line)

        warnings.showwarning = show_warning
        yield
