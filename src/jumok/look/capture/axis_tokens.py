"""Token ids and token texts along the axes of an attention."""

from __future__ import annotations

import contextlib
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
    """Token ids that a model looked up in an embedding."""

    embedding_name: str  # name of the embedding module …
    module_name: str  # … and of the module that called it
    ids: Tensor  # (B, L)


def find_token_embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the modules that embed tokens, as opposed to positions or the like."""
    tables: dict[int, str] = {}
    input_ids: set[int] = set()
    position_ids: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            tables[id(module)] = name
        elif isinstance(module, PositionEmbedding):
            position_ids.update(map(id, module.modules()))
        elif callable(getattr(type(module), "get_input_embeddings", None)):  # of Hugging Face
            with contextlib.suppress(NotImplementedError, AttributeError):
                input_ids.add(id(module.get_input_embeddings()))
    return (tables.keys() & input_ids - position_ids) or {
        table_id
        for table_id, name in tables.items()
        if table_id not in position_ids and not NON_TOKEN_PATTERN.search(name.rpartition(".")[2])
    }


def match_lookups(
    lookups: Sequence[TokenLookup], name: str, shape: tuple[int, int, int, int], kind: str
) -> tuple[TokenLookup | None, TokenLookup | None]:
    """Return the tokens of the queries and of the keys of an attention; None where they are unknown.

    ``lookups`` are those before the attention. A model embeds what it processes next, so the last lookup of
    the right length matches. Among several, the one whose caller is nearest is preferred: the queries of a
    decoder are the tokens of the decoder.
    """
    batch, _, num_queries, num_keys = shape
    if kind == "channel":
        return None, None

    def find_last(length: int) -> TokenLookup | None:
        fitting = [
            lookup for lookup in lookups if lookup.ids.shape[1] == length and batch % max(1, len(lookup.ids)) == 0
        ]

        def get_rank(lookup: TokenLookup) -> tuple[int, int]:
            return _count_shared_prefix(lookup.module_name, name), lookups.index(lookup)

        return max(fitting, key=get_rank) if fitting else None

    query_lookup = find_last(num_queries)
    if kind == "self":
        return query_lookup, query_lookup if num_queries == num_keys else find_last(num_keys)
    fitting = [
        lookup
        for lookup in lookups
        if lookup is not query_lookup and lookup.ids.shape[1] == num_keys and batch % max(1, len(lookup.ids)) == 0
    ]
    return query_lookup, fitting[-1] if fitting else None


def _count_shared_prefix(first: str, second: str) -> int:
    """Return the number of leading names that the paths of two modules share."""
    count = 0
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def decode_tokens(tokenizer: Any, lookup: TokenLookup, batch_size: int) -> list[list[str]]:
    """Return the token texts of ``batch_size`` sequences; rows of a beam share those of their source.

    Negative ids are padding behind the tokens, whose text is empty.
    """
    decode = _get_token_decoder(tokenizer, lookup.embedding_name)
    rows = [decode([i for i in ids if i >= 0]) + [""] * sum(i < 0 for i in ids) for ids in lookup.ids.tolist()]
    return [rows[i * len(rows) // batch_size] for i in range(batch_size)]


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the texts of token ids."""
    texts: list[str] = _get_token_decoder(tokenizer, "")(list(ids))
    return texts


def _get_token_decoder(tokenizer: Any, embedding_name: str) -> Any:
    """Return a function from a list of ids to their texts, for any supported type of tokenizer."""
    sides = getattr(tokenizer, "source", None), getattr(tokenizer, "target", None)
    if None not in sides:  # a tokenizer for each language
        tokenizer = sides[0] if SOURCE_PATTERN.search(embedding_name) else sides[1]
    if hasattr(tokenizer, "ids_to_tokens"):
        return tokenizer.ids_to_tokens
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        is_bytes = "ByteLevel" in str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        is_bytes = is_bytes or hasattr(tokenizer, "byte_decoder")

        def decode(ids: list[int]) -> list[str]:
            tokens = (tokenizer.convert_ids_to_tokens(i) for i in ids)
            pieces = [str(i) if piece is None else str(piece) for i, piece in zip(ids, tokens, strict=True)]
            return [_decode_byte_piece(piece) for piece in pieces] if is_bytes else pieces

        return decode
    if hasattr(tokenizer, "id_to_token"):
        return lambda ids: [tokenizer.id_to_token(i) or str(i) for i in ids]
    if callable(tokenizer):
        return tokenizer
    raise InputError(
        f"tokenizer={type(tokenizer).__name__} is not supported; pass a tokenizer of Hugging Face or of "
        "jumok, or a function from a list of token ids to their texts"
    )


def _decode_byte_piece(piece: str) -> str:
    """Return the text of a byte-level piece, with ▁ for a space and <0xEC> for part of a character."""
    if not set(piece) <= BYTE_VALUES.keys():  # a special token
        return piece
    raw = bytes(BYTE_VALUES[character] for character in piece)
    try:
        return raw.decode().replace(" ", SPACE_MARK)
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in raw)


def _build_byte_table() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers.

    They write printable bytes as themselves and the others as characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_VALUES = _build_byte_table()


def extract_token_ids(args: Any) -> Tensor | None:
    """Return token ids ``(B, L)`` from the arguments of an embedding, or None."""
    ids = args[0] if args else None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool or ids.is_nested:
        return None
    if ids.dim() == 1:
        return ids.detach()[None]
    return ids.detach() if ids.dim() == 2 else None
