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

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.errors import InputError
from jumok.export.export_folder import check_replaceable, create_export_folder
from jumok.files import write_json
from jumok.models.transformer import Transformer
from jumok.training.weights import write_safetensors

SPECIAL_IDS = {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,  # otherwise Marian ends every translation with the token 0
}


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
        generation_config = {**SPECIAL_IDS, "max_length": max_length, "num_beams": 1, "do_sample": False}
        write_json(new / "generation_config.json", generation_config)
        write_safetensors(_collect_weights(model), new / "model.safetensors")
        if tokenizer is not None:
            _write_tokenizer(new, tokenizer, max_length)
        if target_tokenizer is not None:
            _write_tokenizer(new / "target", target_tokenizer, max_length)
    return folder


# ----------------------------------------------------------------------------------- checks


def _check_exportable(model: nn.Module) -> Transformer:
    if not isinstance(model, Transformer):
        raise InputError(f"expected a Transformer, got a {type(model).__name__}, which transformers does not have")
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
        raise InputError(f"{name}: expected a tokenizers.Tokenizer, got a {type(tokenizer).__name__}")
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
        **SPECIAL_IDS,
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

# The modules of a layer and their names in Marian. Queries, keys and values are blocks of one matrix in jumok.
FEED_FORWARD_NAMES = {
    "feed_forward.widen": ("fc1",),
    "feed_forward.narrow": ("fc2",),
    "feed_forward.residual.norm": ("final_layer_norm",),
}
ENCODER_NAMES = {
    "attention.project": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.merge": ("self_attn.out_proj",),
    "feed_forward.attention_residual.norm": ("self_attn_layer_norm",),
    **FEED_FORWARD_NAMES,
}
DECODER_NAMES = {
    "self_attention.project": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.merge": ("self_attn.out_proj",),
    "self_attention_residual.norm": ("self_attn_layer_norm",),
    "cross_attention.project_query": ("encoder_attn.q_proj",),
    "cross_attention.project_source": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attention.merge": ("encoder_attn.out_proj",),
    "feed_forward.attention_residual.norm": ("encoder_attn_layer_norm",),
    **FEED_FORWARD_NAMES,
}
READING_MODULES = (".project", ".project_query", ".project_source", ".widen")  # read the residual stream; others write


def _collect_weights(model: Transformer) -> dict[str, Tensor]:
    """Collect the weights by their names in Marian, with the features of the residual stream in its order."""
    width, tie = model.config.width, model.config.tie_embeddings
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    weights = {"final_logits_bias": model.output.weight.new_zeros(1, model.target_embedding.num_embeddings)}
    if tie == "all":
        weights["model.shared.weight"] = model.target_embedding.weight[:, order]
    else:
        weights["model.encoder.embed_tokens.weight"] = model.source_embedding.weight[:, order]
        weights["model.decoder.embed_tokens.weight"] = model.target_embedding.weight[:, order]
    if tie == "none":
        weights["lm_head.weight"] = model.output.weight[:, order]
    for side, layers, names in (("encoder", model.encoder, ENCODER_NAMES), ("decoder", model.decoder, DECODER_NAMES)):
        for number, layer in enumerate(layers):
            for name, marian_names in names.items():
                module: Any = layer.get_submodule(name)
                is_reading, count = name.endswith(READING_MODULES), len(marian_names)
                parts = (module.weight[:, order] if is_reading else module.weight[order]).chunk(count)
                biases = (module.bias if is_reading else module.bias[order]).chunk(count)
                for marian_name, weight, bias in zip(marian_names, parts, biases, strict=True):
                    prefix = f"model.{side}.layers.{number}.{marian_name}"
                    weights |= {f"{prefix}.weight": weight, f"{prefix}.bias": bias}
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
