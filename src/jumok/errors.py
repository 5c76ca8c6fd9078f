"""The exceptions of jumok. Every message says what was given, what was expected, and how to fix it."""

from __future__ import annotations


class JumokError(Exception):
    """Base class of all exceptions that jumok raises."""


class InputError(JumokError, ValueError):
    """An argument, a file or a field is invalid."""


class MissingExtra(JumokError, ImportError):
    """A package is not installed. The message contains the command that installs it."""
