"""The command line interface. Each module has one group of commands, and :mod:`.app` registers them all."""

from jumok.cli.app import main

__all__ = ["main"]
