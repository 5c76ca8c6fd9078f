"""Tiny random audio models in Hugging Face folders, with real feature extractors, and recordings for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SAMPLE_RATE = 16000
WORDS = ["▁the", "▁dog", "▁run", "s", "▁home", "▁now"]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "<s>", "</s>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
AUDIO_TOKEN_ID = SPECIAL_TOKENS.index("<|AUDIO|>")

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17,
         "initializer_range": 0.5}  # fmt: skip
CONVOLUTIONS = {"conv_dim": (12,) * 7, "feat_extract_norm": "layer", "num_conv_pos_embeddings": 1,
                "num_conv_pos_embedding_groups": 2}  # fmt: skip
SQUEEZED = {**CONVOLUTIONS, "conv_dim": (12,) * 13}
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
ENCODER_DECODER = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
                   "decoder_attention_heads": 3, "encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "init_std": 0.5,
                   **TOKEN_IDS}  # fmt: skip
MOONSHINE = {"hidden_size": 24, "intermediate_size": 17, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
             "encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3, "initializer_range": 0.5,
             **TOKEN_IDS}  # fmt: skip

# The prefix of the model's classes, the suffix of its model class, options; the feature extractor and its options. No
# normalization depends on the whole recording, so that a click changes the frames around it alone.
MODELS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {**ENCODER_DECODER, "max_target_positions": 32, "suppress_tokens": [], "begin_suppress_tokens": []},
        "Whisper",
        {"chunk_length": 5},
    ),
    "speech_to_text": (
        "Speech2Text",
        "ForConditionalGeneration",
        {**ENCODER_DECODER, "input_feat_per_channel": 80},
        "Speech2Text",
        {"do_ceptral_normalize": False},
    ),
    "moonshine": ("Moonshine", "ForConditionalGeneration", MOONSHINE, "Wav2Vec2", {"do_normalize": False}),
    "wav2vec2": ("Wav2Vec2", "Model", {**SIZES, **CONVOLUTIONS}, "Wav2Vec2", {"do_normalize": False}),
    "hubert": ("Hubert", "Model", {**SIZES, **CONVOLUTIONS}, "Wav2Vec2", {"do_normalize": False}),
    "wavlm": ("WavLM", "Model", {**SIZES, **CONVOLUTIONS}, "Wav2Vec2", {"do_normalize": False}),
    "sew": ("SEW", "Model", {**SIZES, **SQUEEZED, "squeeze_factor": 2}, "Wav2Vec2", {"do_normalize": False}),
    "ast": (
        "AST",
        "Model",
        {**SIZES, "max_length": 256, "num_mel_bins": 32},
        "AST",
        {"max_length": 256, "num_mel_bins": 32},
    ),
    "wav2vec2_bert": ("Wav2Vec2Bert", "Model", SIZES, "SeamlessM4T", {}),
}
ENCODER_DECODERS = ("whisper", "speech_to_text", "moonshine")


def build_tokenizer() -> Any:
    """Return a tokenizer of a few words, with ▁ for spaces."""
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in [*SPECIAL_TOKENS, *WORDS]], unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=SPECIAL_TOKENS[4:],
    )  # fmt: skip


def save_audio_model(name: str, path: Path, **generation: Any) -> Path:
    """Save a model with its feature extractor and tokenizer; ``generation``: of its generation_config.json."""
    torch.manual_seed(0)
    prefix, suffix, options, extractor, extractor_options = MODELS[name]
    if name in ENCODER_DECODERS:
        options = {**options, "vocab_size": len(SPECIAL_TOKENS) + len(WORDS)}
    if name == "whisper":
        options = {**options, "max_source_positions": 250}
    model = getattr(transformers, f"{prefix}{suffix}")(getattr(transformers, f"{prefix}Config")(**options))
    if generation:
        model.generation_config = transformers.GenerationConfig(**TOKEN_IDS, **generation)
    model.save_pretrained(path)
    getattr(transformers, f"{extractor}FeatureExtractor")(**extractor_options).save_pretrained(path)
    if name in ENCODER_DECODERS:
        build_tokenizer().save_pretrained(path)
    return path


def save_qwen_audio(path: Path) -> Path:
    """Save a language model with audio tokens, and its processor."""
    torch.manual_seed(0)
    audio = {"d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 17,
             "max_source_positions": 250}  # fmt: skip
    text = {**SIZES, "model_type": "qwen2", "vocab_size": 13, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "eos_token_id": None}  # fmt: skip
    config = transformers.Qwen2AudioConfig(
        audio_config={**audio, "num_mel_bins": 80}, text_config=text, audio_token_index=AUDIO_TOKEN_ID
    )
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(path)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=5)
    transformers.Qwen2AudioProcessor(extractor, build_tokenizer()).save_pretrained(path)
    return path


def generate_noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Return noise that is loud at the beginning: Whisper's features depend on the loudest frame."""
    noise = 0.05 * np.random.default_rng(seed).standard_normal(round(seconds * SAMPLE_RATE))
    noise[:1600] *= 6
    return noise.astype(np.float32)
