"""Which tokens stand along the axes of an attention, and how they are written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jumok.attention.positions import PositionEmbedding
from jumok.errors import InputError

NON_TOKEN_PATTERN = re.compile(r"pos(ition)?|type|segment|time|label|class|rel(ative)?_", re.IGNORECASE)
SOURCE_PATTERN = re.compile(r"source|encoder|src", re.IGNORECASE)
SPACE_MARK = "▁"


@dataclass(frozen=True, eq=False)
class TokenLookup:
    """Token ids that a model looked up."""

    embedding_name: str  # the name of the table …
    module_name: str  # … and of the module that did
    ids: Tensor  # (B, L)


def find_token_embeddings(model: nn.Module) -> set[int]:
    """The ids of the modules that look up tokens, not positions or the like."""
    told = set()
    for module in model.modules():
        ask = getattr(module, "get_input_embeddings", None)  # Hugging Face's models can say
        if callable(ask):
            try:
                told.add(id(ask()))
            except (NotImplementedError, AttributeError):
                continue
    ours = {
        id(table)
        for module in model.modules()
        if isinstance(module, PositionEmbedding)
        for table in module.modules()
    }
    tables = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and id(module) not in ours
    }
    known = {id(table) for table in tables.values() if id(table) in told}
    return known or {
        id(table) for name, table in tables.items() if not NON_TOKEN_PATTERN.search(name.rpartition(".")[2])
    }


def match_lookups(
    lookups: Sequence[TokenLookup], name: str, shape: tuple[int, int, int, int], kind: str
) -> tuple[TokenLookup | None, TokenLookup | None]:
    """The tokens of the queries and of the keys of an attention; None where they are not known.

    The reads are those before it. A model reads what it is about to work on, so the last of the right length
    is the one; and of two such, the one whose reader is nearer: a decoder's queries are the decoder's words.
    """
    batch, _, queries, keys = shape
    if kind == "channel":
        return None, None

    def last(length: int, other: TokenLookup | None = None) -> TokenLookup | None:
        fits = [
            read
            for read in lookups
            if read is not other and read.ids.shape[1] == length and batch % max(1, len(read.ids)) == 0
        ]
        return (
            max(fits, key=lambda read: (_count_shared_prefix(read.module_name, name), lookups.index(read)))
            if fits
            else None
        )

    down = last(queries)
    if kind == "self":
        return down, down if queries == keys else last(keys)
    fits = [
        r for r in lookups if r is not down and r.ids.shape[1] == keys and batch % max(1, len(r.ids)) == 0
    ]
    return down, fits[-1] if fits else None


def _count_shared_prefix(first: str, second: str) -> int:
    """How many names the paths of two modules have in common."""
    count = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def decode_tokens(tokenizer: Any, lookup: TokenLookup, batch_size: int) -> list[list[str]]:
    """The text of every token, for each of ``batch_size`` sequences; rows of a beam share their source's."""
    writer = _get_token_decoder(tokenizer, lookup.embedding_name)
    rows = [writer(ids) for ids in lookup.ids.tolist()]
    return [rows[at * len(rows) // batch_size] for at in range(batch_size)]


def _get_token_decoder(tokenizer: Any, embedding_name: str) -> Any:
    """From a list of ids to their texts, by whatever kind of tokenizer."""
    sides = getattr(tokenizer, "source", None), getattr(tokenizer, "target", None)
    if None not in sides:  # one for each language
        tokenizer = sides[0] if SOURCE_PATTERN.search(embedding_name) else sides[1]
    if hasattr(tokenizer, "pieces"):
        return tokenizer.pieces
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        is_bytes = "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        is_bytes = is_bytes or hasattr(tokenizer, "byte_decoder")

        def names(ids: list[int]) -> list[str]:
            found = (tokenizer.convert_ids_to_tokens(i) for i in ids)
            pieces = [str(i) if piece is None else str(piece) for i, piece in zip(ids, found, strict=True)]
            return [_decode_byte_piece(piece) for piece in pieces] if is_bytes else pieces

        return names
    if hasattr(tokenizer, "id_to_token"):
        return lambda ids: [tokenizer.id_to_token(i) or str(i) for i in ids]
    if callable(tokenizer):
        return tokenizer
    raise InputError(
        f"tokenizer={type(tokenizer).__name__} came; a tokenizer of Hugging Face or of jumok is expected, or "
        "a function from a list of token ids to their texts"
    )


def _decode_byte_piece(piece: str) -> str:
    """The text of a piece whose characters stand for bytes; ▁ for a space, <0xEC> for part of a character."""
    if not set(piece) <= BYTE_VALUES.keys():  # a special token
        return piece
    raw = bytes(BYTE_VALUES[character] for character in piece)
    try:
        return raw.decode().replace(" ", SPACE_MARK)
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)


def _build_byte_table() -> dict[str, int]:
    """Byte-level tokenizers write printable bytes as themselves, and the others as characters from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_VALUES = _build_byte_table()


def extract_token_ids(args: Any) -> Tensor | None:
    """Token ids ``(B, L)`` from the arguments of an embedding; None if these are none."""
    ids = args[0] if args else None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.is_nested:
        return None
    if ids.dim() == 1:
        return ids.detach()[None]
    return ids.detach() if ids.dim() == 2 else None
