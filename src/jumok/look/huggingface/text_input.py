"""The text input of a Hugging Face model: tokenized, perhaps as a turn of a chat, and short enough."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from jumok.errors import InputError
from jumok.look.huggingface.loading import list_modalities, shorten_message

MAX_TITLE_LENGTH = 160  # characters of a text in the title


def get_text_model(model: Any) -> Any:
    """Return the model that reads the text: the model itself, or a part of a multimodal model."""
    return model if list_modalities(model) == ["text"] else getattr(model, "text_model", model)


def encode_text(
    folder: Path, text_model: Any, tokenizer: Any, text: str, *, chat: bool = False, add_reply: bool = False
) -> Any:
    """Tokenize the text. Returns the fields that the model accepts.

    With ``chat``, the text is the user's turn, and ``add_reply`` begins the model's turn.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer in {folder} has no chat template, which --chat needs: give a chat model, "
            "or leave --chat out"
        )
    try:
        if chat:
            encoded = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=add_reply,
                return_dict=True,
                return_tensors="pt",
            )
        else:
            encoded = tokenizer(text, return_tensors="pt")
    except Exception as error:
        raise InputError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) takes no {'chat' if chat else 'plain text'}: "
            f"{shorten_message(error)}"
        ) from error
    for name in encoded.keys() - inspect.signature(text_model.forward).parameters.keys():
        del encoded[name]
    if "input_ids" not in encoded or not encoded["input_ids"].numel():
        raise InputError(f"the tokenizer in {folder} returns no tokens for this text: {text!r}")
    return encoded


def check_length(model: Any, num_tokens: int, num_generated: int = 0) -> None:
    """Check that the model has positions for the tokens of a text and for those that it generates."""
    max_tokens = _get_max_tokens(model)
    if max_tokens is None or num_tokens + num_generated <= max_tokens:
        return
    if num_tokens >= max_tokens:
        raise InputError(
            f"the text has {num_tokens} tokens, and this model takes {max_tokens} at most; shorten it to about its "
            f"first {100 * max_tokens / num_tokens:.3g} %, or use a model with more positions"
        )
    raise InputError(
        f"the text has {num_tokens} tokens, --generate {num_generated} makes {num_tokens + num_generated}, and this "
        f"model takes {max_tokens} at most; shorten the text, or --generate {max_tokens - num_tokens}"
    )


def _get_max_tokens(model: Any) -> int | None:
    """Return the maximum number of tokens; None if there is none."""
    for name, module in model.named_modules():
        # The positions of RoBERTa begin after that of padding.
        is_table = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
        if is_table and module.padding_idx is not None:
            return int(module.num_embeddings - module.padding_idx - 1)
    max_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return max_tokens


def shorten_title(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TITLE_LENGTH else f"{line[:MAX_TITLE_LENGTH].rstrip()} …"
