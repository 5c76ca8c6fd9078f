"""Tiny random models of Hugging Face's, whose sizes differ, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WORDS = 41


def tiny(name: str, **options: Any) -> Any:
    """One of the models below, the same every time."""
    torch.manual_seed(0)
    return MODELS[name](**options).eval()


def ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, WORDS, (rows, length))


def _bert(**options: Any) -> Any:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    return BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes, **options))


def _llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 17}
    kinds = {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, initializer_range=0.3, **sizes, **(kinds | options)))


def _mistral(**options: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 17}
    kinds = {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "eos_token_id": None}
    config = MistralConfig(vocab_size=WORDS, sliding_window=4, initializer_range=0.3, **sizes, **(kinds | options))
    return MistralForCausalLM(config)


def _gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    kinds = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(n_positions=64, n_embd=15, n_layer=2, n_head=3, **(kinds | options))
    return GPT2LMHeadModel(config)


def _t5(**options: Any) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
    kinds = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, **(kinds | options)))


def _marian(**options: Any) -> Any:
    from transformers import MarianConfig, MarianMTModel

    sizes = {"d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    inner = {"encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "init_std": 0.4}
    kinds = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    return MarianMTModel(MarianConfig(vocab_size=WORDS, **sizes, **heads, **inner, **(kinds | options)))


def _vit(**options: Any) -> Any:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    return ViTModel(ViTConfig(image_size=15, patch_size=5, **sizes, **options), add_pooling_layer=False)


def _whisper(**options: Any) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 12, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 7}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    inner = {
        "encoder_ffn_dim": 17,
        "decoder_ffn_dim": 17,
        "max_source_positions": 11,
        "max_target_positions": 32,
    }
    kinds = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(vocab_size=WORDS, **sizes, **heads, **inner, **(kinds | options))
    return WhisperForConditionalGeneration(config)


def _gemma2(**options: Any) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 17}
    kinds = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "attn_logit_softcapping": 2.0}
    return Gemma2Model(Gemma2Config(vocab_size=WORDS, initializer_range=0.5, **sizes, **(kinds | options)))


def _gpt_oss(**options: Any) -> Any:
    from transformers import GptOssConfig, GptOssModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 8}
    kinds = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3, "num_local_experts": 2}
    return GptOssModel(GptOssConfig(vocab_size=WORDS, num_experts_per_tok=1, **sizes, **(kinds | options)))


def _bloom(**options: Any) -> Any:
    from transformers import BloomConfig, BloomModel

    return BloomModel(BloomConfig(vocab_size=WORDS, hidden_size=12, n_layer=2, n_head=3, **options))


def _gptj(**options: Any) -> Any:
    from transformers import GPTJConfig, GPTJModel

    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "rotary_dim": 4, "n_positions": 32}
    return GPTJModel(GPTJConfig(vocab_size=WORDS, **sizes, **options))


def _mpt(**options: Any) -> Any:
    from transformers import MptConfig, MptForCausalLM

    sizes = {"d_model": 12, "n_layers": 2, "n_heads": 3, "max_seq_len": 32, "initializer_range": 0.5}
    return MptForCausalLM(MptConfig(vocab_size=WORDS, **(sizes | options)))


def _bloom_that_writes(**options: Any) -> Any:
    from transformers import BloomConfig, BloomForCausalLM

    kinds = {"initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": None}
    return BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=12, n_layer=2, n_head=3, **(kinds | options)))


def _deberta(**options: Any) -> Any:
    from transformers import DebertaV2Config, DebertaV2Model

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 17}
    kinds = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
    return DebertaV2Model(DebertaV2Config(vocab_size=WORDS, **sizes, **(kinds | options)))


MODELS: dict[str, Callable[..., Any]] = {
    "bert": _bert,
    "bloom": _bloom,
    "bloom_that_writes": _bloom_that_writes,
    "deberta": _deberta,
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "marian": _marian,
    "mistral": _mistral,
    "mpt": _mpt,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}


def inputs(name: str) -> dict[str, Tensor]:
    """What to give the model: two rows, of which the second is padded."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 15, 15)}
    decoder = {"decoder_input_ids": ids(2, 5)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 7, 22), **decoder}
    mask = torch.ones(2, 7, dtype=torch.long)
    if name in ("bert", "t5", "marian", "deberta"):
        mask[1, 4:] = 0
    else:  # decoders begin with their padding
        mask[1, :3] = 0
    given = {"input_ids": ids(2, 7), "attention_mask": mask}
    return given | decoder if name in ("t5", "marian") else given


def attentions(output: Any) -> list[Tensor]:
    """What ``output_attentions`` gives, in the order in which it is computed."""
    if getattr(output, "attentions", None) is not None:
        return list(output.attentions)
    both = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(one for pair in both for one in pair)]
