"""Base class of tokenizers that use the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jumok.errors import InputError
from jumok.files import atomic_write


@dataclass(frozen=True, eq=False)
class BackendTokenizer:
    """Text to token ids and back."""

    backend: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self.backend.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """Identifies the tokenizer."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    def ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """The entry of each id in the vocabulary."""
        tokens = []
        for i in ids:
            token = self.backend.id_to_token(i) if i >= 0 else None
            if token is None:
                raise InputError(f"a token id is {i}; expected 0 to {self.vocab_size - 1}")
            tokens.append(token)
        return tokens

    def write_backend(self, path: Path) -> None:
        """Write a JSON file in the format of the ``tokenizers`` library."""
        with atomic_write(path) as part:
            part.write_text(self.backend.to_str(pretty=True), encoding="utf-8")


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a JSON file in the format of the ``tokenizers`` library."""
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no {path}") from None
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path} is not a tokenizer: {error}") from None


def encode_batch(encode: Callable[..., list[Any]], texts: Sequence[Any], **options: bool) -> list[Any]:
    """Call an ``encode_batch`` method of the library, with a clear error for text that is not valid Unicode."""
    try:
        return encode(list(texts), add_special_tokens=False, **options)
    except TypeError:
        invalid = next((text for text in texts if not _is_valid_text(text)), None)
        raise InputError(f"{invalid!r} is not a string that can be encoded in UTF-8") from None


def _is_valid_text(text: object) -> bool:
    """Whether this is a string, or a sequence of strings, without lone surrogates."""
    try:
        words = [text] if isinstance(text, str) else list(text)  # type: ignore[call-overload]
        return all(isinstance(word, str) and word.encode() is not None for word in words)
    except (TypeError, UnicodeEncodeError):
        return False
