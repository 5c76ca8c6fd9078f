"""Export of a Transformer to Marian's format for ``transformers``, with identical logits and translations.

Marian is the same model except for the order of its position encodings: all sines come first, then all
cosines, while in jumok (and in the paper) they alternate. The positions are not part of the file. The order
of the features in the residual stream is arbitrary, as long as all layers agree. So the weights that read or
write the stream are exported in Marian's order.

::

    jumok     sin cos sin cos sin cos           Marian        sin sin sin cos cos cos
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


def export_marian(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    target_tokenizer: Tokenizer | None = None,
    max_length: int = 512,
) -> Path:
    """Write a folder for ``MarianMTModel.from_pretrained(folder)`` of ``transformers``.

    The folder is written atomically. It replaces an earlier export, but no other folder.

    Args:
        model: a :class:`~jumok.models.transformer.Transformer` with ``norm="post"``.
        folder: the new folder.
        tokenizer: the tokenizer of the source, and also of the target if there is no other. It is loaded by
            ``AutoTokenizer.from_pretrained(folder)`` and appends ``</s>``.
        target_tokenizer: the tokenizer of the target, written to the subfolder ``target``.
        max_length: the maximum number of tokens of a sentence.

    Returns:
        The folder.
    """
    model = _check_exportable(model)
    if max_length < 1:
        raise InputError(f"export_marian(max_length={max_length}): 1 or more is expected")
    folder = Path(folder)
    check_replaceable(folder)
    _check_tokenizer("tokenizer", tokenizer, model.source_embedding.num_embeddings)
    _check_tokenizer("target_tokenizer", target_tokenizer or tokenizer, model.target_embedding.num_embeddings)
    with create_export_folder(folder) as new:
        write_json(new / "config.json", _build_config(model, max_length))
        write_json(new / "generation_config.json", _build_generation_config(max_length))
        write_safetensors(dict(_iter_weights(model)), new / "model.safetensors")
        if tokenizer is not None:
            _write_tokenizer(new, tokenizer, max_length)
        if target_tokenizer is not None:
            _write_tokenizer(new / "target", target_tokenizer, max_length)
    return folder


# ----------------------------------------------------------------------------------- checks


def _check_exportable(model: nn.Module) -> Transformer:
    if not isinstance(model, Transformer):
        raise InputError(f"expected a Transformer; a {type(model).__name__} came, which transformers does not have")
    if model.config.norm != "post":
        raise InputError(
            f"model.norm={model.config.norm!r} cannot be exported, because Marian normalizes after each "
            "residual sum; train with model.norm=post"
        )
    return model


def _check_tokenizer(name: str, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is None:
        return
    if not isinstance(tokenizer, Tokenizer):
        raise InputError(f"{name}: expected a tokenizers.Tokenizer; a {type(tokenizer).__name__} came")
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"{name} has {tokenizer.get_vocab_size()} words, but the model has {vocab_size}; give the "
            "tokenizer of the model"
        )
    first_tokens = [tokenizer.id_to_token(token_id) for token_id in range(len(SPECIAL_TOKENS))]
    if first_tokens != list(SPECIAL_TOKENS):
        raise InputError(f"{name} starts with {first_tokens}; expected {list(SPECIAL_TOKENS)}")


# -------------------------------------------------------------------------------------- config


def _build_config(model: Transformer, max_length: int) -> dict[str, Any]:
    config = model.config
    return {
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "dtype": str(model.output.weight.dtype).removeprefix("torch."),
        "vocab_size": model.source_embedding.num_embeddings,
        "decoder_vocab_size": model.target_embedding.num_embeddings,
        "share_encoder_decoder_embeddings": config.tie_embeddings == "all",
        "tie_word_embeddings": config.tie_embeddings != "none",
        "d_model": config.width,
        "scale_embedding": True,
        "max_position_embeddings": max_length,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.feed_forward_width,
        "decoder_ffn_dim": config.feed_forward_width,
        "activation_function": config.activation,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "is_encoder_decoder": True,
        "use_cache": True,
        **_get_special_ids(),
    }


def _build_generation_config(max_length: int) -> dict[str, Any]:
    return {**_get_special_ids(), "max_length": max_length, "num_beams": 1, "do_sample": False}


def _get_special_ids() -> dict[str, Any]:
    # Without the last entry, Marian would end every translation with the token 0.
    return {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    folder.mkdir(exist_ok=True)
    exported = Tokenizer.from_str(tokenizer.to_str())  # a copy
    exported.no_padding()
    exported.no_truncation()
    eos = SPECIAL_TOKENS[EOS]
    exported.post_processor = TemplateProcessing(single=f"$A {eos}", pair=None, special_tokens=[(eos, EOS)])
    exported.save(str(folder / "tokenizer.json"))
    special_ids = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: SPECIAL_TOKENS[token_id] for name, token_id in special_ids.items()},
            "model_max_length": max_length,
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )


# --------------------------------------------------------------------------------------- weights

WeightItems = Iterator[tuple[str, Tensor]]


def _iter_weights(model: Transformer) -> WeightItems:
    """Yield the weights with their names in Marian."""
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
        yield from _iter_norm(f"{name}.encoder_attn_layer_norm", decoder.feed_forward.attention_residual, order)
        yield from _iter_feed_forward(name, decoder.feed_forward, order)


def _iter_attention(name: str, attention: MultiHead, order: Tensor) -> WeightItems:
    """Yield the weights of an attention. The projections read the stream, and the output writes it."""
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
