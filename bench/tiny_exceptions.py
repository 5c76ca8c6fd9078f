"""What single model types of transformers need beyond the general rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from tiny_inputs import InputBuilder

# Arguments of a configuration that has no default one.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "informer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "time_series_transformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
}
# Settings of small configurations, after the general rules, wherever a configuration of the type is.
SETTINGS: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_id": 150},
    "chameleon": {"vocabulary_map": {"<image>": 150, "IMGIMGAZ": 140}},
    "csm": {"num_codebooks": 4},
    "csm_depth_decoder_model": {"num_codebooks": 4},
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "donut-swin": {"window_size": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "emu3_text_model": {"pad_token_id": 0},
    "ernie4_5_vl_moe_text": {"rope_parameters.mrope_section": [1, 1, 2]},
    "esm": {"vocab_size": 160, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "florence_vision": {"embed_dim": [16, 32, 32, 32], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": {"head_dim": 16},
    "instructblip": {"image_token_index": 150},
    "instructblipvideo": {"video_token_index": 150},
    "kosmos-2": {"latent_query_num": 4},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"d_model": 32, "d_latents": 32, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 64},
    "sam2_hiera_det_model": {
        "hidden_size": 32,
        "image_size": [64, 64],
        "embed_dim_per_stage": [32, 64, 128, 256],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "blocks_per_stage": [1, 1, 2, 1],
        "global_attention_blocks": [3],
        "window_size_per_stage": [8, 4, 14, 7],
        "query_stride": [2, 2],
    },
    "sam2_mask_decoder": {"hidden_size": 32},
    "sam2_prompt_encoder": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
    "sam2_vision_model": {
        "backbone_channel_list": [256, 128, 64, 32],
        "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam_hq_prompt_encoder": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "image_embedding_size": 8},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16, "image_size": 64, "global_attn_indexes": [1]},
    "sam_prompt_encoder": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "image_embedding_size": 8},
    "sam_vision_model": {"output_channels": 32, "num_pos_feats": 16, "image_size": 64, "global_attn_indexes": [1]},
    "sew": {"num_feat_extract_layers": 13},
    "sew-d": {"num_feat_extract_layers": 13},
    "step3p5": {"sliding_window": 16},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
}


def build_default_config(model_type: str, config_class: Any) -> Any:
    """Return the default configuration of a type."""
    return config_class(**ARGUMENTS.get(model_type, {}))


def prepare_model(model: nn.Module) -> nn.Module:
    """Set what a model needs before its first call."""
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return model


def _build_time_series(builder: InputBuilder) -> dict[str, Any]:
    """Return a history, as long as the lags need, and the values to predict."""
    config = builder.config
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": builder.draw(2, past),
        "past_time_features": builder.draw(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": builder.draw(2, future),
        "future_time_features": builder.draw(2, future, config.num_time_features),
    }


def _build_codes(name: str, count: str) -> Callable[[InputBuilder], dict[str, Any]]:
    """Return a builder of texts, and of codes of several codebooks for each frame."""

    def build(builder: InputBuilder) -> dict[str, Any]:
        num_codebooks = builder.find_setting(count) or 1
        text = {} if name == "input_ids" else {"input_ids": builder.draw_ids(7)}
        return {**text, name: builder.draw_ids(5, num_codebooks)}

    return build


def _build_music(builder: InputBuilder) -> dict[str, Any]:
    """Return a text, and codes whose codebooks are a part of the batch."""
    num_codebooks = builder.find_setting("num_codebooks") or 4
    codes = builder.draw_ids(5).repeat_interleave(num_codebooks, 0)
    return {"input_ids": builder.draw_ids(7), "attention_mask": torch.ones(2, 7).long(), "decoder_input_ids": codes}


def _build_tiles(builder: InputBuilder) -> dict[str, Any]:
    """Return images in tiles, and for a language model a text that attends to them."""
    size, tiles = builder.image_size, builder.find_setting("max_num_tiles") or 4
    inputs = {
        "pixel_values": builder.draw(2, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(2, 1).long(),
        "aspect_ratio_mask": torch.ones(2, 1, tiles).long(),
    }
    if "input_ids" in builder.parameters:
        inputs |= {"input_ids": builder.draw_ids(7), "attention_mask": torch.ones(2, 7).long()}
        inputs["cross_attention_mask"] = torch.ones(2, 7, 1, tiles).long()
    return inputs


def _build_retrieval(builder: InputBuilder) -> dict[str, Any]:
    """Return a question, and documents with their scores."""
    count = builder.config.n_docs
    return {
        "input_ids": builder.draw_ids(7),
        "attention_mask": torch.ones(2, 7).long(),
        "context_input_ids": builder.draw_ids(7).repeat(count, 1),
        "context_attention_mask": torch.ones(2 * count, 7).long(),
        "doc_scores": builder.draw(2, count),
        "decoder_input_ids": builder.draw_ids(5),
    }


def _build_clap(builder: InputBuilder) -> dict[str, Any]:
    sounds = {"input_features": builder.draw(2, 1, 1024, 64), "is_longer": torch.tensor([[False], [False]])}
    texts = {"input_ids": builder.draw_ids(7), "attention_mask": torch.ones(2, 7).long()}
    return {**sounds, **{name: x for name, x in texts.items() if name in builder.parameters}}


def _build_idefics(builder: InputBuilder) -> dict[str, Any]:
    return {
        "input_ids": builder.draw_ids(7),
        "attention_mask": torch.ones(2, 7).long(),
        "pixel_values": builder.draw(2, 1, 3, builder.image_size, builder.image_size),
        "image_attention_mask": torch.ones(2, 7, 1).long(),
    }


def _build_kosmos(builder: InputBuilder) -> dict[str, Any]:
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0]] * 2).bool()
    image = builder.draw(2, 3, builder.image_size, builder.image_size)
    return {"input_ids": builder.draw_ids(7), "pixel_values": image, "image_embeds_position_mask": mask}


# Inputs that the general rules do not find.
INPUTS: dict[str, Callable[[InputBuilder], dict[str, Any]]] = {
    "autoformer": _build_time_series,
    "clap": _build_clap,
    "clap_audio_model": _build_clap,
    "csm": _build_codes("input_ids", "num_codebooks"),
    "dia": _build_codes("decoder_input_ids", "num_channels"),
    "idefics": _build_idefics,
    "informer": _build_time_series,
    "kosmos-2": _build_kosmos,
    "mllama": _build_tiles,
    "mllama_vision_model": _build_tiles,
    "musicgen": _build_music,
    "musicgen_melody": _build_music,
    "perceiver": lambda builder: {"inputs": builder.draw(2, 7, 32)},
    "rag": _build_retrieval,
    "time_series_transformer": _build_time_series,
    "xmod": lambda builder: {"input_ids": builder.draw_ids(7), "lang_ids": torch.zeros(2).long()},
}


def list_inputs(model_type: str, builder: InputBuilder) -> Iterator[dict[str, Any]]:
    """List the inputs of a type that are exceptions."""
    if model_type in INPUTS:
        yield INPUTS[model_type](builder)
