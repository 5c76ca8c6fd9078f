"""Tests of capturing the models of Hugging Face folders."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from jumok import InputError
from jumok.cli.app import app
from jumok.look.viewer import huggingface_model, view_writer
from jumok.look.viewer.viewer_data import ViewerData
from jumok.run import Run
from jumok.tasks import load_predictor


def test_huggingface_folder(bert: Path) -> None:
    assert huggingface_model.is_huggingface_folder(bert)
    (data,) = huggingface_model.capture_huggingface_model(bert, "a cat sat here", device="cpu")
    assert [layer.name for layer in data.layers] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert data.layers[0].row_labels == ["a", "cat", "sat", "here"]


def test_huggingface_translation_folder(run: Run, tmp_path: Path) -> None:
    load_predictor(run, "cpu").export("hf", tmp_path / "marian")
    text, target = "this is an example sentence", "이것은 예문이다"
    (data,) = huggingface_model.capture_huggingface_model(tmp_path / "marian", text, target, device="cpu")
    assert {layer.kind for layer in data.layers} == {"self", "causal self", "cross"}
    (own,) = huggingface_model.capture_huggingface_model(tmp_path / "marian", text, device="cpu")
    assert len(own.layers) == len(data.layers)


def test_invalid_inputs_are_rejected(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="7 tokens, and this model takes 6"):
        huggingface_model.capture_huggingface_model(bert, "a cat sat here a cat sat", device="cpu")
    with pytest.raises(InputError, match="of one text"):
        huggingface_model.capture_huggingface_model(bert, "a cat", "a cat", device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be loaded"):
        huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")
    large = ViewerData.from_weights({"layer": torch.eye(401)})
    with pytest.raises(InputError, match="too large for a figure"):
        view_writer.save_view(large, tmp_path / "map.png")


def test_unavailable_device_is_rejected(bert: Path) -> None:
    for device in ("cuda:99", "foo"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used here"):
            huggingface_model.capture_huggingface_model(bert, "a cat", device=device)


VOCAB_SIZE = 8  # of the tokenizer of the `bert` fixture
SIZES = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}

IMAGE = {**SIZES, "image_size": 15, "patch_size": 5}

ENCODER_DECODER = {
    "d_model": 12,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}

TEXT = {**SIZES, "vocab_size": VOCAB_SIZE, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}


def _vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**IMAGE))


def _clip() -> Any:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)
    return transformers.CLIPModel(config)


def _wav2vec2() -> Any:
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.Wav2Vec2Config(**SIZES, **layers, **positions, num_feat_extract_layers=2)
    return transformers.Wav2Vec2Model(config)


def _whisper() -> Any:
    sizes = {"vocab_size": 9, "num_mel_bins": 7, "max_source_positions": 11, "max_target_positions": 16}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **ENCODER_DECODER))


def _lxmert() -> Any:
    counts = {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 5}
    config = transformers.LxmertConfig(**{**SIZES, "vocab_size": VOCAB_SIZE}, **counts)
    return transformers.LxmertModel(config)


def _captioner() -> Any:
    sizes = {"vocab_size": 9, "n_embd": 12, "n_layer": 1, "n_head": 3, "add_cross_attention": True}
    decoder = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, is_decoder=True))
    return transformers.VisionEncoderDecoderModel(encoder=_vit(), decoder=decoder)


def _speaker() -> Any:
    sizes = {name: size for name, size in ENCODER_DECODER.items() if name != "d_model"}
    nets = {"speech_decoder_prenet_units": 8, "speech_decoder_postnet_units": 8, "speaker_embedding_dim": 6}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = transformers.SpeechT5Config(vocab_size=9, hidden_size=12, **sizes, **nets, **positions)
    return transformers.SpeechT5ForTextToSpeech(config)


INPUT_ERRORS = {
    "vit": (_vit, r"\(vit\) that reads no text.*needs an image.*images=image.*jumok\.watch\(model\)"),
    "wav2vec2": (_wav2vec2, r"reads no text.*needs audio.*AutoFeatureExtractor.*samples.*model\(\*\*inputs\)"),
    "whisper": (_whisper, r"reads no text.*needs audio.*model\.generate\(\*\*inputs\)"),
    "lxmert": (_lxmert, r"cannot run on text alone: `visual_feats`.*needs an image.*text=text"),
    "captioner": (_captioner, r"reads no text.*needs an image.*model\.generate"),
    "speaker": (_speaker, r"does not output text.*model\.generate"),
}


@pytest.mark.parametrize("name", INPUT_ERRORS)
def test_models_that_need_other_inputs_are_rejected(name: str, bert: Path, tmp_path: Path) -> None:
    build, reason = INPUT_ERRORS[name]
    build().save_pretrained(tmp_path)
    for with_tokenizer in (False, True):
        if with_tokenizer:
            transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
        result = CliRunner().invoke(app, ["look", str(tmp_path), "a cat", "--out", str(tmp_path / "map.html")])
        assert isinstance(result.exception, InputError)
        message = " ".join(str(result.exception).split())
        assert len(message) < 700
        if with_tokenizer or name != "lxmert":
            assert re.search(reason, message)
        else:
            assert "no tokenizer" in message


def test_text_model_of_clip(bert: Path, tmp_path: Path) -> None:
    _clip().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"no tokenizer.*tokenizer\.save_pretrained"):
        huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    (data,) = huggingface_model.capture_huggingface_model(tmp_path, "a cat sat", device="cpu")
    (layer,) = data.layers
    assert layer.name.startswith("text_model.")
    assert layer.kind == "causal self"
    assert layer.row_labels == ["a", "cat", "sat"]


def test_encoder_without_decoder(bert: Path, tmp_path: Path) -> None:
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 3}
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes))
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    (data,) = huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")
    assert [layer.kind for layer in data.layers] == ["self"]


def test_missing_tokenizer_is_rejected(bert: Path, tmp_path: Path) -> None:
    """transformers makes a BERT tokenizer up that knows no word: every word would be [UNK]."""
    transformers.BertModel.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no tokenizer"):
        huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")


def test_code_of_the_folder_is_never_run(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be loaded") as error:
        huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")
    assert len(str(error.value)) < 500


def test_empty_text_is_rejected(bert: Path) -> None:
    with pytest.raises(InputError, match="returns no tokens"):
        huggingface_model.capture_huggingface_model(bert, "", device="cpu")


def test_missing_weights_are_reported_only_if_they_matter(bert: Path, tmp_path: Path, capfd: Any) -> None:
    import safetensors.torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForMaskedLM.from_pretrained(bert)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    capfd.readouterr()
    assert len(huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")) == 1
    assert capfd.readouterr() == ("", "")
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.query.weight"
    safetensors.torch.save_file(
        {key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.warns(UserWarning, match=r"lacks 1 weights.*query\.weight"):
        huggingface_model.capture_huggingface_model(tmp_path, "a cat", device="cpu")
