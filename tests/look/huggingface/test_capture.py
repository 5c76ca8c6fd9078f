"""Tests of capturing the models of Hugging Face folders."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import jumok
from jumok import InputError
from jumok.cli.app import app
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.look.huggingface.folder import is_huggingface_folder
from jumok.look.viewer import view_writer
from jumok.look.viewer.view_writer import list_row_labels
from jumok.look.viewer.viewer_data import ArrayWeightSource, ViewerData, ViewerLayer
from jumok.look.viewer.word_merging import merge_into_words
from jumok.run import Run
from jumok.tasks import load_predictor

pytestmark = pytest.mark.long


def test_huggingface_folder(bert: Path) -> None:
    assert is_huggingface_folder(bert)
    (data,) = capture_huggingface_model(bert, "a cat sat here", device="cpu")
    assert [layer.name for layer in data.layers] == ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]
    assert data.layers[0].row_labels == ["a", "cat", "sat", "here"]


def test_huggingface_translation_folder(run: Run, tmp_path: Path) -> None:
    load_predictor(run, "cpu").export("hf", tmp_path / "marian")
    text, target = "this is an example sentence", "이것은 예문이다"
    (data,) = capture_huggingface_model(tmp_path / "marian", text, target, device="cpu")
    assert {layer.kind for layer in data.layers} == {"self", "causal self", "cross"}
    (own,) = capture_huggingface_model(tmp_path / "marian", text, device="cpu")
    assert len(own.layers) == len(data.layers)


def test_invalid_inputs_are_rejected(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="7 tokens, and this model takes 6"):
        capture_huggingface_model(bert, "a cat sat here a cat sat", device="cpu")
    with pytest.raises(InputError, match="of one text"):
        capture_huggingface_model(bert, "a cat", "a cat", device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be loaded"):
        capture_huggingface_model(tmp_path, "a cat", device="cpu")
    large = ViewerData.from_weights({"layer": torch.eye(401)})
    with pytest.raises(InputError, match="too large for a figure"):
        view_writer.save_view(large, tmp_path / "map.png")


def test_unavailable_device_is_rejected(bert: Path) -> None:
    for device in ("cuda:99", "foo"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used here"):
            capture_huggingface_model(bert, "a cat", device=device)


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
        capture_huggingface_model(tmp_path, "a cat", device="cpu")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    (data,) = capture_huggingface_model(tmp_path, "a cat sat", device="cpu")
    (layer,) = data.layers
    assert layer.name.startswith("text_model.")
    assert layer.kind == "causal self"
    assert layer.row_labels == ["a", "cat", "sat"]


def test_encoder_without_decoder(bert: Path, tmp_path: Path) -> None:
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 3}
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes))
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    (data,) = capture_huggingface_model(tmp_path, "a cat", device="cpu")
    assert [layer.kind for layer in data.layers] == ["self"]
    with pytest.raises(InputError, match=r"\(t5\) without a decoder"):
        capture_huggingface_model(tmp_path, "a cat", generate=2, device="cpu")


def test_missing_tokenizer_is_rejected(bert: Path, tmp_path: Path) -> None:
    """transformers makes a BERT tokenizer up that knows no word: every word would be [UNK]."""
    transformers.BertModel.from_pretrained(bert).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no tokenizer"):
        capture_huggingface_model(tmp_path, "a cat", device="cpu")


def test_code_of_the_folder_is_never_run(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be loaded") as error:
        capture_huggingface_model(tmp_path, "a cat", device="cpu")
    assert len(str(error.value)) < 500


def test_empty_text_is_rejected(bert: Path) -> None:
    with pytest.raises(InputError, match="the text is empty"):
        capture_huggingface_model(bert, "", device="cpu")


def test_missing_weights_are_reported_only_if_they_matter(bert: Path, tmp_path: Path, capfd: Any) -> None:
    import safetensors.torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForMaskedLM.from_pretrained(bert)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    capfd.readouterr()
    assert len(capture_huggingface_model(tmp_path, "a cat", device="cpu")) == 1
    assert capfd.readouterr() == ("", "")
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.1.attention.self.query.weight"
    safetensors.torch.save_file(
        {key: value for key, value in weights.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.warns(UserWarning, match=r"lacks 1 weights.*query\.weight"):
        capture_huggingface_model(tmp_path, "a cat", device="cpu")


def _texts(layer: Any) -> list[str]:
    return list(layer.row_labels)


def test_generated_tokens_follow_the_text(llama: Path) -> None:
    (data,) = capture_huggingface_model(llama, "w1 w2 w3 w4", generate=5, device="cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    encoded = tokenizer("w1 w2 w3 w4", return_tensors="pt")
    with torch.inference_mode(), jumok.watch(model) as captures:
        output_ids = model.generate(
            encoded["input_ids"], attention_mask=encoded["attention_mask"], do_sample=False, max_new_tokens=5
        )
    assert _texts(data.layers[0]) == tokenizer.convert_ids_to_tokens(output_ids[0])
    assert [layer.name for layer in data.layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert data.title == f"w1 w2 w3 w4  →  {tokenizer.decode(output_ids[0, 4:])}"
    for layer, merged in zip(data.layers, captures, strict=True):
        assert layer.shape == (9, 9)
        assert layer.first_generated == (4, 4)
        # The steps of the generation, which lack the last token, saw the same.
        steps = merged.weights(batch=0)
        weights = torch.stack([torch.as_tensor(layer.compute_weights(head)) for head in layer.heads])
        torch.testing.assert_close(weights[:, :8, :8], steps, atol=1e-5, rtol=1e-4)


def test_chat_template_makes_the_text_a_turn(llama: Path) -> None:
    (data,) = capture_huggingface_model(llama, "w1 w2", chat=True, device="cpu")
    assert _texts(data.layers[0]) == ["<|user|>", "w1", "w2", "<|end|>"]
    (data,) = capture_huggingface_model(llama, "w1 w2", chat=True, generate=2, device="cpu")
    assert _texts(data.layers[0])[:5] == ["<|user|>", "w1", "w2", "<|end|>", "<|assistant|>"]
    assert data.layers[0].first_generated == (5, 5)
    turns = ((0, 4, "user"), (4, 7, "assistant"))
    assert data.layers[0].spans == (turns, turns)


def test_encoder_decoder_generates_at_most_n_tokens(t5: Path) -> None:
    (data,) = capture_huggingface_model(t5, "w1 w2 w3", generate=4, device="cpu")
    marks = {layer.kind: (layer.shape, layer.first_generated) for layer in data.layers}
    assert marks == {
        "self": ((3, 3), (None, None)),
        "causal self": ((4, 4), (1, 1)),
        "cross": ((4, 3), (0, None)),  # the start token produced the first token
    }
    own, cross = (next(layer for layer in data.layers if layer.kind == kind) for kind in ("causal self", "cross"))
    assert cross.row_outputs is not None
    assert list(cross.row_outputs)[:-1] == list(own.row_labels or ())[1:]  # a row produced what the next one reads
    assert own.row_outputs == cross.row_outputs
    assert data.title == f"w1 w2 w3  →  {' '.join(cross.row_outputs)}"
    assert list_row_labels(cross)[1] == f"{own.row_labels[1]} → {cross.row_outputs[1]}"  # type: ignore[index]
    (data,) = capture_huggingface_model(t5, "w1 w2 w3", "w4 w5", device="cpu")
    assert {layer.first_generated for layer in data.layers} == {(None, None)}  # the target was given
    cross = data.layers[-1]
    assert (_texts(cross), cross.row_outputs) == (["[PAD]", "w4"], ["w4", "w5"])
    (words,) = merge_into_words(data.with_layers([cross])).layers
    assert words.row_labels == ["w4", "w5"]  # labelled by what they produced


def test_rows_of_a_decoder_know_the_next_token(llama: Path, bert: Path) -> None:
    (data,) = capture_huggingface_model(llama, "w1 w2 w3", device="cpu")
    assert data.layers[0].row_outputs == ["w2", "w3", ""]
    (data,) = capture_huggingface_model(llama, "w1 w2 w3", generate=2, device="cpu")
    assert data.layers[0].row_outputs == [*_texts(data.layers[0])[1:], ""]
    (data,) = capture_huggingface_model(bert, "a cat sat", device="cpu")
    assert data.layers[0].row_outputs is None


def test_ablation_keeps_the_generated_text(llama: Path) -> None:
    before, after = capture_huggingface_model(
        llama, "w1 w2", generate=3, ablations={"layers.0.self_attn": [0]}, device="cpu"
    )
    assert _texts(before.layers[0]) == _texts(after.layers[0])
    assert after.layers[0].first_generated == (2, 2)


def test_merged_words_keep_the_mark() -> None:
    layer = ViewerLayer(
        "a",
        "self",
        (4, 4),
        (0,),
        ArrayWeightSource(torch.eye(4)),
        ["▁a", "b", "▁c", "d"],
        ["▁a", "b", "▁c", "d"],
        (2, 3),
    )
    (merged,) = merge_into_words(ViewerData((layer,))).layers
    assert merged.first_generated == (1, 2)  # no word begins with the last token


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text": " \n"}, "the text is empty"),
        ({"generate": 0}, "--generate 0: expected"),
        ({"generate": 2, "target": "w1"}, "--generate and --target"),
        ({"text": "w1 w2 w3", "generate": 8190}, "3 tokens, --generate 8190 makes 8193.* 8192 .*--generate 8189"),
        ({"text": "w1 " * 8193}, "8193 tokens, and this model takes 8192 at most; shorten it"),
    ],
)
def test_invalid_generation_is_rejected(llama: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        capture_huggingface_model(llama, **{"text": "w1", "device": "cpu"} | options)


def test_encoder_cannot_generate_or_chat(bert: Path) -> None:
    with pytest.raises(InputError, match=r"\(bert\) without a decoder.*leave --generate out"):
        capture_huggingface_model(bert, "a cat", generate=2, device="cpu")
    with pytest.raises(InputError, match="no chat template"):
        capture_huggingface_model(bert, "a cat", chat=True, device="cpu")


def test_positions_of_roberta_begin_after_padding(bert: Path, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(**TEXT | {"pad_token_id": 1}, max_position_embeddings=7)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    assert capture_huggingface_model(tmp_path, "a cat sat here a", device="cpu")
    with pytest.raises(InputError, match="6 tokens, and this model takes 5"):
        capture_huggingface_model(tmp_path, "a cat sat here a cat", device="cpu")


def test_long_text_needs_no_map_in_memory(llama: Path) -> None:
    """One map of all heads of 8,000 tokens would take 1.4 GiB."""
    text = " ".join(f"w{n % 30}" for n in range(8000))
    program = f"""
import resource
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.look.viewer.tiles import TileRequest
from jumok.look.viewer.viewer_data import answer_request
capture_huggingface_model({str(llama)!r}, "w1 w2", device="cpu")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = capture_huggingface_model({str(llama)!r}, {text!r}, device="cpu")
assert data[0].layers[1].shape == (8000, 8000)
assert len(data[0].title) < 200
answer_request(data, TileRequest(layer=1, head=0, rows=(0, 8000), cols=(0, 8000)))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 400  # MiB
