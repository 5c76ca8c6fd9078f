"""The turns of a chat prompt: which of its tokens belong to the system, the user and the assistant.

A chat template is a program that writes one text. Its parts are found with conversations of markers: what it writes
before and after the user's words, and what it writes between the words of the assistant and those of the user::

    <bos> <system> Be brief. <end>  <user> WORDS <end>  <assistant>
         └──────── system ────────┘└──── user ────────┘└ assistant ┘

A template that writes the words differently, or a tokenizer without offsets, gives no turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from jumok.look.viewer.token_marks import LabelledSpan

FIRST_MARKER, SECOND_MARKER, THIRD_MARKER = "jumokfirst", "jumoksecond", "jumokthird"


def find_chat_turns(tokenizer: Any, text: str, input_ids: torch.Tensor, *, add_reply: bool) -> list[LabelledSpan]:
    """Return the turns of a prompt ``(1, L)`` with the user's ``text``; empty if they cannot be found.

    With ``add_reply``, the last turn is the assistant's, which begins the reply, perhaps without a token yet.
    """
    try:
        prompt = _render(tokenizer, [text], add_reply=add_reply)
        ends = _find_turn_ends(tokenizer, prompt, add_reply=add_reply)
        encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
    except Exception:  # templates raise errors of any type, and slow tokenizers know no offsets
        return []
    if not ends or list(encoded["input_ids"]) != input_ids[0].tolist():
        return []
    starts = [start for start, _ in encoded["offset_mapping"]]
    spans = []
    for (_, first), (name, last) in itertools.pairwise([("", 0), *ends]):
        inside = [n for n, start in enumerate(starts) if first <= start < last]
        if name and inside:
            spans.append(LabelledSpan(inside[0], inside[-1] + 1, name))
    if add_reply and spans[-1].name != "assistant":  # nothing but the end of the user's turn precedes the reply
        spans.append(LabelledSpan(len(starts), len(starts), "assistant"))
    return spans


def _find_turn_ends(tokenizer: Any, prompt: str, *, add_reply: bool) -> list[tuple[str, int]]:
    """Return the name of each part of the prompt, "" for none, and the character at which it ends."""
    before, after = _split(_render(tokenizer, [FIRST_MARKER]), FIRST_MARKER)
    without_reply = f"{before}{FIRST_MARKER}{after}"
    with_reply = _render(tokenizer, [FIRST_MARKER], add_reply=True)
    if not with_reply.startswith(without_reply):
        return []
    reply = with_reply.removeprefix(without_reply) if add_reply else ""
    if not (prompt.startswith(before) and prompt.endswith(after + reply)):
        return []
    conversation = _render(tokenizer, [FIRST_MARKER, SECOND_MARKER, THIRD_MARKER])
    between, _ = _split(_split(conversation, SECOND_MARKER)[1], THIRD_MARKER)
    # What precedes each of the user's turns, without the end of another turn.
    header = _find_common_end(before, between)
    if after and len(header) < len(before):
        header = header.removeprefix(after)
    # Special tokens may have the same last letters, as in <s> and <|end|>: the header begins with a token.
    offsets = tokenizer(before, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    starts = [start for start, _ in offsets if start >= len(before) - len(header)]
    system = before[: min(starts, default=len(before))]
    bos = getattr(tokenizer, "bos_token", None) or ""
    bos = bos if bos and system.startswith(bos) else ""
    ends = [("", len(bos)), ("system" if system.removeprefix(bos).strip() else "", len(system))]
    ends.append(("user", len(prompt) - len(reply)))
    return [*ends, ("assistant", len(prompt))] if reply else ends


def _render(tokenizer: Any, contents: Sequence[str], *, add_reply: bool = False) -> str:
    """Return the text of a conversation that the user begins."""
    messages = [
        {"role": role, "content": content}
        for role, content in zip(itertools.cycle(("user", "assistant")), contents, strict=False)
    ]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=add_reply, tokenize=False))


def _split(text: str, marker: str) -> tuple[str, str]:
    before, after = text.split(marker)  # ValueError unless the marker occurs once
    return before, after


def _find_common_end(first: str, second: str) -> str:
    pairs = zip(reversed(first), reversed(second), strict=False)
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return first[len(first) - length :]
