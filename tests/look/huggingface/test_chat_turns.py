"""Tests of the turns of a chat, with templates as published models have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jumok.look.huggingface.chat_turns import find_chat_turns

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SHOUTING = "{% for m in messages %}<{{ m.role }}> {{ m.content | upper }} {% endfor %}"  # changes the words
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}<u>{{ messages[0].content }}"


def build_tokenizer(template: str) -> Any:
    """A tokenizer that splits a text into special tokens, words and blanks."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    pattern = Regex(r"<[^>]*>|\[/?INST\]|\w+|\n|[^\w\s]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>", eos_token="</s>", chat_template=template
    )


def find_texts(template: str, text: str, *, add_reply: bool = True) -> dict[str, str]:
    """Return the text of each turn."""
    tokenizer = build_tokenizer(template)
    messages = [{"role": "user", "content": text}]
    options = {"add_generation_prompt": add_reply}
    ids = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt", **options)["input_ids"]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    offsets = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    turns = find_chat_turns(tokenizer, text, ids, add_reply=add_reply)
    return {
        turn.name: prompt[offsets[turn.start][0] : offsets[turn.stop - 1][1]] if turn.start < turn.stop else ""
        for turn in turns
    }


TURNS = {
    "qwen": (
        QWEN,
        {
            "system": "<|im_start|>system\nYou are helpful.<|im_end|>\n",
            "user": "<|im_start|>user\nWhat is it?<|im_end|>\n",
            "assistant": "<|im_start|>assistant\n",
        },
    ),
    "llama": (
        LLAMA,
        {
            "user": "<|start_header_id|>user<|end_header_id|>\n\nWhat is it?<|eot_id|>",
            "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n",
        },
    ),
    "gemma": (
        GEMMA,
        {"user": "<start_of_turn>user\nWhat is it?<end_of_turn>\n", "assistant": "<start_of_turn>model\n"},
    ),
    "mistral": (MISTRAL, {"user": "[INST] What is it?[/INST]", "assistant": ""}),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_of_published_templates(name: str) -> None:
    template, expected = TURNS[name]
    assert find_texts(template, "What is it?") == expected
    del expected["assistant"]
    assert find_texts(template, "What is it?", add_reply=False) == expected


@pytest.mark.parametrize("template", [SHOUTING, ONE_TURN])
def test_templates_that_cannot_be_split_give_no_turns(template: str) -> None:
    assert find_texts(template, "What is it?", add_reply=False) == {}


def test_tokenizer_without_offsets_gives_no_turns() -> None:
    class SlowTokenizer:
        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return " ".join(message["content"] for message in messages)

        def __call__(self, text: str, **options: Any) -> Any:
            raise NotImplementedError("return_offset_mapping is not available when using Python tokenizers")

    assert find_chat_turns(SlowTokenizer(), "a", torch.zeros(1, 1, dtype=torch.long), add_reply=False) == []
