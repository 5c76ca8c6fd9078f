"""Tiny random models of transformers, with sizes that differ, and their inputs."""

from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 41

BERT_SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
GROUPED_SIZES = {
    **BERT_SIZES,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
ENCODER_DECODER_SIZES = {
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 17,
    "decoder_ffn_dim": 17,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BLOOM_SIZES = {"hidden_size": 12, "n_layer": 2, "n_head": 3}

# The name of the configuration, the name of the model, and options of the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {**BERT_SIZES, "max_position_embeddings": 64}),
    "bloom": ("BloomConfig", "BloomModel", BLOOM_SIZES),
    "bloom_lm": (
        "BloomConfig",
        "BloomForCausalLM",
        {**BLOOM_SIZES, "initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": None},
    ),
    "deberta": (
        "DebertaV2Config",
        "DebertaV2Model",
        {**BERT_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2Model",
        {**GROUPED_SIZES, "sliding_window": 3, "attn_logit_softcapping": 2.0, "initializer_range": 0.5},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_positions": 64,
            "n_embd": 15,
            "n_layer": 2,
            "n_head": 3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssModel",
        {
            **GROUPED_SIZES,
            "intermediate_size": 8,
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "gptj": (
        "GPTJConfig",
        "GPTJModel",
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "rotary_dim": 4, "n_positions": 32},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED_SIZES, "initializer_range": 0.3}),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        {
            **ENCODER_DECODER_SIZES,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
            "init_std": 0.4,
        },
    ),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        {**GROUPED_SIZES, "sliding_window": 4, "initializer_range": 0.3},
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"d_model": 12, "n_layers": 2, "n_heads": 3, "max_seq_len": 32, "initializer_range": 0.5},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 12,
            "d_kv": 4,
            "d_ff": 17,
            "num_layers": 2,
            "num_heads": 3,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "vit": ("ViTConfig", "ViTModel", {**BERT_SIZES, "image_size": 15, "patch_size": 5}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **ENCODER_DECODER_SIZES,
            "num_mel_bins": 7,
            "max_source_positions": 11,
            "max_target_positions": 32,
            "bos_token_id": 1,
            "decoder_start_token_id": 1,
        },
    ),
}


def build_model(name: str, **options: Any) -> Any:
    """Build one of these models, with the same weights every time."""
    import transformers

    torch.manual_seed(0)
    config_name, model_name, defaults = MODELS[name]
    sizes = {} if name == "vit" else {"vocab_size": VOCAB_SIZE}
    config = getattr(transformers, config_name)(**(sizes | defaults | options))
    return getattr(transformers, model_name)(config, **({"add_pooling_layer": False} if name == "vit" else {})).eval()


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (rows, length))


def build_inputs(name: str, *, for_generation: bool = False) -> dict[str, Tensor]:
    """Return inputs of a model: two rows, of which the second is padded."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 15, 15)}
    decoder_ids = random_ids(2, 5)
    if name == "whisper":
        inputs = {"input_features": torch.randn(2, 7, 22), "attention_mask": torch.ones(2, 22)}
        return (
            inputs if for_generation else {"input_features": inputs["input_features"], "decoder_input_ids": decoder_ids}
        )
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, slice(4, 7) if name in ("bert", "t5", "marian", "deberta") else slice(3)] = 0  # decoders pad at the start
    inputs = {"input_ids": random_ids(2, 7), "attention_mask": mask}
    return inputs | {"decoder_input_ids": decoder_ids} if name in ("t5", "marian") and not for_generation else inputs


def list_attentions(output: Any) -> list[Tensor]:
    """Return the weights of ``output_attentions``, in the order in which they are computed."""
    if getattr(output, "attentions", None) is not None:
        return list(output.attentions)
    layers = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(weights for layer in layers for weights in layer)]


def attend_with_sinks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """Eager attention of transformers with a sink for each query: one more score, which belongs to no key."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.mT * scaling + (0.0 if mask is None else mask)
    sinks = 3 * query.sum(-1, keepdim=True)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2).contiguous(), weights
