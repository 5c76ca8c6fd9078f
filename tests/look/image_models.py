"""Tiny random models that read images, with their real processors, in Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.utils import is_torchvision_available

TEXT = {"num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 12, "max_position_embeddings": 4096}
VISION = {"num_hidden_layers": 2, "hidden_size": 20, "intermediate_size": 16, "num_attention_heads": 2}
WORDS = [
    *("[PAD]", "[UNK]", "<s>", "</s>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<boi>", "<eoi>", "<img>", "</img>"),
    *("<IMG_CONTEXT>", "<|image|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|user|>", "<|assistant|>", "<video>"),
]
NUM_SPECIAL = len(WORDS)
WORDS += [f"w{n}" for n in range(32)]
IDS = {word: n for n, word in enumerate(WORDS)}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|user|>{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %} {{ part.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer(**tokens: str) -> Any:
    """Return a tokenizer that splits at spaces, with the special tokens of vision-language models."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=WORDS[4:NUM_SPECIAL],
        extra_special_tokens=tokens,
    )


def _ids(config: Any) -> Any:
    return {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": None, **config}


def _llama() -> Any:
    return transformers.LlamaConfig(**_ids(DECODER))


def _clip_vision(size: int, patch: int) -> Any:
    return transformers.CLIPVisionConfig(**VISION, image_size=size, patch_size=patch)


def _clip_processor(size: int, **options: Any) -> Any:
    crop = {"height": size, "width": size}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=crop, **options)


def _chat(token: str) -> str:
    return CHAT_TEMPLATE.replace("IMAGE", token)


def build_llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=_clip_vision(35, 7), text_config=_llama(), image_token_index=IDS["<image>"]
    )
    processor = transformers.LlavaProcessor(
        _clip_processor(35), build_tokenizer(image_token="<image>"), patch_size=7, num_additional_image_tokens=1,
        vision_feature_select_strategy="default", chat_template=_chat("<image>"),
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), processor


def build_llava_next() -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56], [28, 84]]
    config = transformers.LlavaNextConfig(
        vision_config=_clip_vision(28, 7),
        text_config=_llama(),
        image_token_index=IDS["<image>"],
        image_grid_pinpoints=pinpoints,
    )
    image_processor = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        image_processor, build_tokenizer(image_token="<image>"), patch_size=7, num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config), processor


class _WithoutVideos:
    """Lets a processor be built without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)  # type: ignore[misc]


def _without_videos(processor_class: Any, *args: Any, **options: Any) -> Any:
    return type(processor_class.__name__, (_WithoutVideos, processor_class), {})(*args, None, **options)


def _qwen(name: str, vision: dict[str, Any], patch: int) -> tuple[Any, Any]:
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
    text = {**_ids({**DECODER, "hidden_size": 24, "head_dim": 12}), "rope_parameters": rope}
    if name != "Qwen3VL":
        del text["head_dim"]
    config = getattr(transformers, f"{name}Config")(
        vision_config={"patch_size": patch, "spatial_merge_size": 2, **vision},
        text_config=text,
        **{key: IDS[token] for key, token in tokens.items()},
    )
    image_processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 16 * patch**2, "longest_edge": 200 * patch**2}
    )
    tokenizer = build_tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    chat = _chat("<|vision_start|><|image_pad|><|vision_end|>")
    processor_class = getattr(transformers, f"{name.replace('_', '_')}Processor")
    return model, _without_videos(processor_class, image_processor, tokenizer, chat_template=chat)


def build_qwen2_vl() -> tuple[Any, Any]:
    return _qwen("Qwen2VL", {"depth": 2, "embed_dim": 16, "hidden_size": 24, "num_heads": 2}, 7)


def build_qwen2_5_vl() -> tuple[Any, Any]:
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "out_hidden_size": 24, "num_heads": 2}
    return _qwen("Qwen2_5_VL", {**sizes, "window_size": 28, "fullatt_block_indexes": [1]}, 7)


def build_qwen3_vl() -> tuple[Any, Any]:
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "out_hidden_size": 24, "num_heads": 2}
    return _qwen("Qwen3VL", {**sizes, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}, 7)


def build_gemma3() -> tuple[Any, Any]:
    vision = transformers.SiglipVisionConfig(**VISION, image_size=48, patch_size=6, vision_use_head=False)
    text = transformers.Gemma3TextConfig(**{**_ids(DECODER), "eos_token_id": None}, sliding_window=4096)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16, boi_token_index=IDS["<boi>"],
        eoi_token_index=IDS["<eoi>"], image_token_index=IDS["<image>"],
    )  # fmt: skip
    tokenizer = build_tokenizer(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>")
    image_processor = transformers.Gemma3ImageProcessorPil(size={"height": 48, "width": 48})
    processor = transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # it is 0 at first
    return model, processor


def build_idefics3() -> tuple[Any, Any]:
    vision = transformers.models.idefics3.Idefics3VisionConfig(**VISION, image_size=24, patch_size=4)
    config = transformers.Idefics3Config(
        image_token_id=IDS["<image>"], vision_config=vision, text_config=_llama(), scale_factor=2, pad_token_id=0
    )
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 72}, max_image_size={"longest_edge": 24}
    )
    tokenizer = build_tokenizer(image_token="<image>")
    tokenizer.add_tokens([f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)])
    model = transformers.Idefics3ForConditionalGeneration(config)
    model.resize_token_embeddings(len(tokenizer))
    return model, transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=9)


def build_paligemma() -> tuple[Any, Any]:
    vision = transformers.SiglipVisionConfig(**VISION, image_size=30, patch_size=6, projection_dim=24)
    text = transformers.GemmaConfig(**_ids(DECODER))
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=IDS["<image>"], projection_dim=24, hidden_size=24
    )
    image_processor = transformers.SiglipImageProcessorPil(size={"height": 30, "width": 30})
    image_processor.image_seq_length = 25
    model = transformers.PaliGemmaForConditionalGeneration(config)
    processor = transformers.PaliGemmaProcessor(image_processor, build_tokenizer(image_token="<image>"))
    model.resize_token_embeddings(len(processor.tokenizer))
    return model, processor


def build_internvl() -> tuple[Any, Any]:
    vision = {**VISION, "image_size": [24, 24], "patch_size": [4, 4]}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=_llama(), image_token_id=IDS["<IMG_CONTEXT>"], image_seq_length=9
    )
    image_processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": 24, "width": 24}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    processor = _without_videos(
        transformers.InternVLProcessor, image_processor, build_tokenizer(**tokens), image_seq_length=9
    )
    return transformers.InternVLForConditionalGeneration(config), processor


def build_mistral3() -> tuple[Any, Any]:
    vision = transformers.PixtralVisionConfig(**VISION, image_size=56, patch_size=7, head_dim=10)
    config = transformers.Mistral3Config(
        vision_config=vision,
        text_config=transformers.MistralConfig(**_ids(DECODER)),
        image_token_index=IDS["[IMG]"],
        spatial_merge_size=2,
    )
    image_processor = transformers.PixtralImageProcessorPil(
        size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}
    )
    processor = transformers.PixtralProcessor(
        image_processor, build_tokenizer(), patch_size=7, spatial_merge_size=2, image_token="[IMG]"
    )
    return transformers.Mistral3ForConditionalGeneration(config), processor


def build_mllama() -> tuple[Any, Any]:
    vision = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
        "intermediate_size": 12,
        "vision_output_dim": 32, "image_size": 28, "patch_size": 7, "max_num_tiles": 4,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    }  # fmt: skip
    text = {**_ids(DECODER), "num_hidden_layers": 3, "cross_attention_layers": [1]}
    del text["head_dim"]
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IDS["<|image|>"])
    image_processor = transformers.MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=4)
    processor = transformers.MllamaProcessor(image_processor, build_tokenizer(image_token="<|image|>"))
    model = transformers.MllamaForConditionalGeneration(config)
    for layer in model.model.language_model.layers:  # otherwise the gates of cross-attention are closed
        if hasattr(layer, "cross_attn_attn_gate"):
            torch.nn.init.ones_(layer.cross_attn_attn_gate)
            torch.nn.init.ones_(layer.cross_attn_mlp_gate)
    return model, processor


def build_florence2() -> tuple[Any, Any]:
    vision = {
        "depths": [1, 1, 1, 1], "embed_dim": [8, 8, 16, 16], "num_heads": [2, 2, 2, 2], "num_groups": [2, 2, 2, 2],
        "window_size": 4, "projection_dim": 24,
    }  # fmt: skip
    text = {
        "model_type": "bart", "vocab_size": len(WORDS), "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    }  # fmt: skip
    config = transformers.Florence2Config(
        text_config=text, vision_config=vision, image_token_id=IDS["<image>"], decoder_start_token_id=2,
        pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    image_processor = _clip_processor(128, do_center_crop=False)
    image_processor.size = transformers.image_utils.SizeDict(height=128, width=128)
    image_processor.image_seq_length = 17
    processor = transformers.Florence2Processor(image_processor, build_tokenizer(image_token="<image>"))
    return transformers.Florence2ForConditionalGeneration(config), processor


def build_blip() -> tuple[Any, Any]:
    text = {
        "vocab_size": len(WORDS), "encoder_hidden_size": 20, "projection_dim": 8, "num_hidden_layers": 2,
        "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2, "bos_token_id": 2, "eos_token_id": 3,
        "pad_token_id": 0, "sep_token_id": 3, "max_position_embeddings": 64, "initializer_range": 0.3,
    }  # fmt: skip
    vision = {**VISION, "image_size": 30, "patch_size": 6, "initializer_range": 0.3}
    config = transformers.BlipConfig(text_config=text, vision_config=vision)
    image_processor = transformers.BlipImageProcessorPil(size={"height": 30, "width": 30})
    return (
        transformers.BlipForConditionalGeneration(config),
        transformers.BlipProcessor(image_processor, build_tokenizer()),
    )


def build_captioner() -> tuple[Any, Any]:
    vision = transformers.ViTModel(transformers.ViTConfig(**VISION, image_size=30, patch_size=6))
    text = {"n_embd": 24, "n_layer": 2, "n_head": 2, "is_decoder": True, "add_cross_attention": True}
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_ids(text)))
    model = transformers.VisionEncoderDecoderModel(encoder=vision, decoder=decoder)
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 2
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 3
    return model, [transformers.ViTImageProcessorPil(size={"height": 30, "width": 30}), build_tokenizer()]


VISION_LANGUAGE_MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": build_llava,
    "llava_next": build_llava_next,
    "qwen2_vl": build_qwen2_vl,
    "qwen2_5_vl": build_qwen2_5_vl,
    "qwen3_vl": build_qwen3_vl,
    "gemma3": build_gemma3,
    "idefics3": build_idefics3,
    "paligemma": build_paligemma,
    "internvl": build_internvl,
    **({"mistral3": build_mistral3} if is_torchvision_available() else {}),  # its processor needs torchvision
    "florence2": build_florence2,
    "mllama": build_mllama,
    "blip": build_blip,
    "captioner": build_captioner,
}


def _encoder(name: str, processor: Any, **options: Any) -> tuple[Any, Any]:
    config = getattr(transformers, f"{name}Config")(**VISION, image_size=30, patch_size=6, **options)
    return getattr(transformers, f"{name}Model")(config), processor


def _square(name: str) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(size={"height": 30, "width": 30})


def build_clip() -> tuple[Any, Any]:
    text = {**TEXT, "vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    vision = {**VISION, "image_size": 30, "patch_size": 6}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    return model, transformers.CLIPProcessor(_clip_processor(30), build_tokenizer())


def build_siglip() -> tuple[Any, Any]:
    config = transformers.SiglipVisionConfig(**VISION, image_size=30, patch_size=6)
    return transformers.SiglipVisionModel(config), _square("Siglip")


def build_beit() -> tuple[Any, Any]:
    model, _ = _encoder("Beit", None, use_relative_position_bias=True)
    return model, transformers.BeitImageProcessorPil(
        size={"height": 30, "width": 30}, do_center_crop=False, do_resize=True
    )


def build_swin() -> tuple[Any, Any]:
    """Windows of 7 × 7 patches on 15 × 15 patches."""
    config = transformers.SwinConfig(image_size=30, patch_size=2, embed_dim=8, depths=[2], num_heads=[2])
    return transformers.SwinModel(config), _square("ViT")


def build_idefics2() -> tuple[Any, Any]:
    """Its image tokens are outputs of a resampler."""
    perceiver = {
        "hidden_size": 24, "resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2,
        "resampler_head_dim": 12, "num_key_value_heads": 1,
    }  # fmt: skip
    config = transformers.Idefics2Config(
        image_token_id=IDS["<image>"], vision_config={**VISION, "image_size": 28, "patch_size": 7},
        perceiver_config=perceiver, text_config=transformers.MistralConfig(**_ids(DECODER)), pad_token_id=0,
    )  # fmt: skip
    image_processor = transformers.Idefics2ImageProcessorPil(
        size={"shortest_edge": 14, "longest_edge": 28}, do_image_splitting=False
    )
    processor = transformers.Idefics2Processor(
        image_processor,
        build_tokenizer(image_token="<image>", image_boundary_token="<fake_token_around_image>"),
        image_seq_len=3,
    )
    return transformers.Idefics2ForConditionalGeneration(config), processor


# Models that read images alone; their patches are keys after class and register tokens.
ENCODERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "vit": lambda: _encoder("ViT", _square("ViT")),
    "deit": lambda: _encoder("DeiT", _clip_processor(30)),
    "clip": build_clip,
    "clip_vision": lambda: (transformers.CLIPVisionModel(_clip_vision(30, 6)), _clip_processor(30)),
    "siglip": build_siglip,
    "dinov2_registers": lambda: _encoder("Dinov2WithRegisters", _clip_processor(30), num_register_tokens=4),
    "beit": build_beit,
}


def save_model(build: Callable[[], tuple[Any, Any]], folder: Path) -> Path:
    """Save a model and its processor; the same random weights every time."""
    torch.manual_seed(0)
    model, processors = build()
    model.save_pretrained(folder)
    for processor in processors if isinstance(processors, list) else [processors]:
        _save(processor, folder)
    return folder


def _save(processor: Any, folder: Path) -> None:
    if getattr(processor, "video_processor", 0) is None:
        del processor.video_processor
        processor.image_processor.save_pretrained(folder)
        processor.tokenizer.save_pretrained(folder)
        if processor.chat_template:
            (folder / "chat_template.jinja").write_text(processor.chat_template)
        options = {"image_seq_length": getattr(processor, "image_seq_length", None)}
        (folder / "processor_config.json").write_text(json.dumps({k: v for k, v in options.items() if v is not None}))
        return
    processor.save_pretrained(folder)
