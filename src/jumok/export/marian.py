"""A Transformer as a Marian folder, which ``transformers`` loads: same logits, same translations.

Marian is the same model but for one thing: in its positions all sines come first and then all cosines, where
in ours (and in the paper) they alternate. Its positions are not part of its file. But nothing depends on the
order of the numbers in the residual stream, as long as all who read and write it agree: so the weights that
touch the stream are written in Marian's order.

::

    ours      sin cos sin cos sin cos           Marian's      sin sin sin cos cos cos
               0   1   2   3   4   5                           0   2   4   1   3   5
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from jumok.attention.heads import MultiHead
from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.errors import InputError
from jumok.export.export_folder import check_replaceable, create_export_folder, write_json
from jumok.models.transformer import FeedForward, ResidualNorm, Transformer
from jumok.training.weights import write_safetensors

__all__ = ["export_marian"]


def export_marian(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    target_tokenizer: Tokenizer | None = None,
    max_length: int = 512,
) -> Path:
    """Write a folder that ``transformers`` loads, by ``MarianMTModel.from_pretrained(folder)``.

    It appears whole or not at all, and takes the place of an earlier export only.

    Args:
        model: a :class:`~jumok.models.transformer.Transformer` with its norms "post".
        folder: to be made.
        tokenizer: of the source, and if no other is given, of the target: ``AutoTokenizer.from_pretrained(
            folder)`` gives it back, ending each sentence with ``</s>``.
        target_tokenizer: if the target has its own; it goes to the folder ``target`` inside.
        longest: how many tokens a sentence may have there.

    Returns:
        The folder.
    """
    model = _check_exportable(model)
    if max_length < 1:
        raise InputError(f"export_marian(longest={max_length}): 1 or more is expected")
    folder = Path(folder)
    check_replaceable(folder)
    for name, one, words in (
        ("tokenizer", tokenizer, model.source_embedding.num_embeddings),
        ("target_tokenizer", target_tokenizer or tokenizer, model.target_embedding.num_embeddings),
    ):
        _check_tokenizer(name, one, words)
    with create_export_folder(folder) as new:
        write_json(new / "config.json", _build_config(model, max_length))
        write_json(new / "generation_config.json", _build_generation_config(max_length))
        write_safetensors(dict(_iter_weights(model)), new / "model.safetensors")
        if tokenizer is not None:
            _write_tokenizer(new, tokenizer, max_length)
        if target_tokenizer is not None:
            _write_tokenizer(new / "target", target_tokenizer, max_length)
    return folder


# ----------------------------------------------------------------------------------- what can go


def _check_exportable(model: nn.Module) -> Transformer:
    if not isinstance(model, Transformer):
        raise InputError(
            f"a Marian folder holds a Transformer, and this is a {type(model).__name__}, which transformers "
            "does not have"
        )
    if model.config.norm != "post":
        raise InputError(
            f"model.norm={model.config.norm!r} cannot be exported: Marian has its layer norms after each "
            'residual sum; train with model.norm="post"'
        )
    return model


def _check_tokenizer(name: str, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        raise InputError(f"{name}: a tokenizers.Tokenizer is expected, {type(tokenizer).__name__} came")
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"{name} has {tokenizer.get_vocab_size()} words, but the model {vocab_size}; give the one it was "
            "trained with"
        )
    found = [tokenizer.id_to_token(number) for number in range(len(SPECIAL_TOKENS))]
    if found != list(SPECIAL_TOKENS):
        raise InputError(
            f"{name} begins with {found}; every vocabulary of ours begins with {list(SPECIAL_TOKENS)}"
        )


# -------------------------------------------------------------------------------------- settings


def _build_config(model: Transformer, max_length: int) -> dict[str, Any]:
    ours = model.config
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "dtype": str(model.output.weight.dtype).removeprefix("torch."),
        "vocab_size": model.source_embedding.num_embeddings,
        "decoder_vocab_size": model.target_embedding.num_embeddings,
        "share_encoder_decoder_embeddings": ours.tie_embeddings == "all",
        "tie_word_embeddings": ours.tie_embeddings != "none",
        "d_model": ours.width,
        "scale_embedding": True,
        "max_position_embeddings": max_length,
        "encoder_layers": ours.encoder_layers,
        "decoder_layers": ours.decoder_layers,
        "encoder_attention_heads": ours.num_heads,
        "decoder_attention_heads": ours.num_heads,
        "encoder_ffn_dim": ours.feed_forward_width,
        "decoder_ffn_dim": ours.feed_forward_width,
        "activation_function": ours.activation,
        "dropout": ours.dropout,
        "attention_dropout": ours.attention_dropout,
        "activation_dropout": ours.activation_dropout,
        "is_encoder_decoder": True,
        "use_cache": True,
        **_get_special_ids(),
    }


def _build_generation_config(max_length: int) -> dict[str, Any]:
    return {**_get_special_ids(), "max_length": max_length, "num_beams": 1, "do_sample": False}


def _get_special_ids() -> dict[str, Any]:
    # Without the last one, Marian would end every translation with its word 0.
    return {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    folder.mkdir(exist_ok=True)
    ours = Tokenizer.from_str(tokenizer.to_str())  # a copy, to be changed
    ours.no_padding()
    ours.no_truncation()
    end = SPECIAL_TOKENS[EOS]
    ours.post_processor = TemplateProcessing(single=f"$A {end}", pair=None, special_tokens=[(end, EOS)])
    ours.save(str(folder / "tokenizer.json"))
    names = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: SPECIAL_TOKENS[number] for name, number in names.items()},
            "model_max_length": max_length,
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )


# --------------------------------------------------------------------------------------- weights

WeightItems = Iterator[tuple[str, Tensor]]


def _iter_weights(model: Transformer) -> WeightItems:
    """Marian's name and value of each weight."""
    width = model.config.width
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    for name, weight in _iter_reordered_weights(model, order):
        yield name, weight.detach().cpu().contiguous()


def _iter_reordered_weights(model: Transformer, order: Tensor) -> WeightItems:
    tie = model.config.tie_embeddings
    if tie == "all":
        yield "model.shared.weight", model.target_embedding.weight[:, order]
    else:
        yield "model.encoder.embed_tokens.weight", model.source_embedding.weight[:, order]
        yield "model.decoder.embed_tokens.weight", model.target_embedding.weight[:, order]
    if tie == "none":
        yield "lm_head.weight", model.output.weight[:, order]
    yield "final_logits_bias", model.output.weight.new_zeros(1, model.target_embedding.num_embeddings)
    for number, encoder in enumerate(model.encoder):
        name = f"model.encoder.layers.{number}"
        yield from _iter_attention(f"{name}.self_attn", encoder.attention, order)
        yield from _iter_norm(f"{name}.self_attn_layer_norm", encoder.feed_forward.attention_residual, order)
        yield from _iter_feed_forward(name, encoder.feed_forward, order)
    for number, decoder in enumerate(model.decoder):
        name = f"model.decoder.layers.{number}"
        yield from _iter_attention(f"{name}.self_attn", decoder.self_attention, order)
        yield from _iter_norm(f"{name}.self_attn_layer_norm", decoder.self_attention_residual, order)
        yield from _iter_attention(f"{name}.encoder_attn", decoder.cross_attention, order)
        yield from _iter_norm(
            f"{name}.encoder_attn_layer_norm", decoder.feed_forward.attention_residual, order
        )
        yield from _iter_feed_forward(name, decoder.feed_forward, order)


def _iter_attention(name: str, attention: MultiHead, order: Tensor) -> WeightItems:
    """Queries, keys and values read the stream; what is merged from the heads is written to it."""
    if attention.key_width is None:
        weights, biases = attention.project.weight.chunk(3), attention.project.bias.chunk(3)
    else:
        query, source = attention.project_query, attention.project_source
        weights, biases = (query.weight, *source.weight.chunk(2)), (query.bias, *source.bias.chunk(2))
    for part, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
        yield f"{name}.{part}.weight", weight[:, order]
        yield f"{name}.{part}.bias", bias
    yield from _iter_output_projection(f"{name}.out_proj", attention.merge, order)


def _iter_feed_forward(name: str, layer: FeedForward, order: Tensor) -> WeightItems:
    yield f"{name}.fc1.weight", layer.widen.weight[:, order]
    yield f"{name}.fc1.bias", layer.widen.bias
    yield from _iter_output_projection(f"{name}.fc2", layer.narrow, order)
    yield from _iter_norm(f"{name}.final_layer_norm", layer.residual, order)


def _iter_output_projection(name: str, layer: nn.Linear, order: Tensor) -> WeightItems:
    yield f"{name}.weight", layer.weight[order]
    yield f"{name}.bias", layer.bias[order]


def _iter_norm(name: str, residual_norm: ResidualNorm, order: Tensor) -> WeightItems:
    yield f"{name}.weight", residual_norm.norm.weight[order]
    yield f"{name}.bias", residual_norm.norm.bias[order]
