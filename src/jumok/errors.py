"""The exceptions of jumok. Every message says what came, what was expected, and how to mend it."""

from __future__ import annotations


class JumokError(Exception):
    """The base of everything that jumok raises on purpose."""


class InputError(JumokError, ValueError):
    """An argument, a file or a field does not fit; the message says which, and what would."""


class MissingExtra(JumokError, ImportError):
    """A part of jumok needs a package that is not installed; the message names the command for it."""
