"""Tests of `jumok look`: runs and Hugging Face folders as HTML files and figures."""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from jumok import InputError
from jumok.cli.app import app
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.look.viewer import huggingface_model, view_writer
from jumok.look.viewer.viewer_data import ViewerData
from jumok.run import Run
from jumok.tasks import load_predictor

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks"))
from translation_runs import train_run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "sat", "here"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT in a Hugging Face folder."""
    path = tmp_path_factory.mktemp("hf") / "bert"
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=6,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("run") / "transformer", "transformer")


def test_run_has_all_attention_layers(run: Run) -> None:
    (data,) = load_predictor(run, "cpu").build_viewer_data("this is an example sentence", target="이것은 예문이다")
    kinds = [(layer.name, layer.kind) for layer in data.layers]
    assert kinds == [
        ("encoder.0.attention", "self"),
        ("encoder.1.attention", "self"),
        ("decoder.0.self_attention", "causal self"),
        ("decoder.0.cross_attention", "cross"),
        ("decoder.1.self_attention", "causal self"),
        ("decoder.1.cross_attention", "cross"),
    ]
    cross, own = data.layers[-1], data.layers[-2]
    assert cross.row_labels is not None
    assert own.row_labels is not None
    assert cross.row_labels[-1] == "</s>"  # what it message
    assert own.row_labels[0] == "<s>"  # the input of the decoder
    assert list(cross.row_labels)[:-1] == list(own.row_labels)[1:]
    assert "→  이것은 예문이다" in data.title


def test_layer_weights_equal_attention_maps(run: Run) -> None:
    translator = load_predictor(run, "cpu")
    (data,) = translator.build_viewer_data("this is an example sentence", target="이것은 예문이다")
    maps, _ = translator.compute_attention_maps([_example("this is an example sentence", "이것은 예문이다")])
    for layer, attention_map in zip([x for x in data.layers if x.kind == "cross"], maps, strict=True):
        rows, cols = layer.shape
        weights = torch.as_tensor(layer.source.weights(1, slice(0, rows), slice(0, cols)))
        torch.testing.assert_close(weights.float(), attention_map.weights[0, 1, :rows, :cols].float())


def _example(source: str, target: str) -> TranslationExample:
    return TranslationExample(source, target, "here")


def test_fixed_context_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no attention"):
        load_predictor(train_run(tmp_path / "fixed", "fixed"), "cpu").build_viewer_data("this")


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


@pytest.mark.parametrize("name", ["map.html", "map.png", "map.svg"])
def test_command_writes_files(name: str, bert: Path, run: Run, tmp_path: Path) -> None:
    for model, text in ((bert, "a cat sat"), (run.folder, "this is an example sentence")):
        path = tmp_path / model.name / name
        path.parent.mkdir(exist_ok=True)
        result = CliRunner().invoke(app, ["look", str(model), text, "--out", str(path), "--device", "cpu"])
        assert result.exit_code == 0, result.output
        assert str(path) in result.output
        assert path.stat().st_size > 5000


INVALID_OPTIONS: dict[str, tuple[dict[str, object], list[str]]] = {
    "layer": ({"layer": "encodr.layer.0*"}, ["encodr.layer.0*", "encoder.layer.0.attention.self"]),
    "head": ({"head": 2}, ["2 heads", "head 2"]),
    "suffix": ({"path": Path("map.gif")}, ["map.gif", ".html", ".png"]),
}


@pytest.mark.parametrize("name", INVALID_OPTIONS)
def test_invalid_selections_are_rejected(name: str, bert: Path, tmp_path: Path) -> None:
    (data,) = huggingface_model.capture_huggingface_model(bert, "a cat", device="cpu")
    options, words = INVALID_OPTIONS[name]
    with pytest.raises(InputError) as error:
        view_writer.save_view(data, **{"path": tmp_path / "map.png"} | options)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)


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
TEXT = {**SIZES, "vocab_size": len(WORDS), "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}


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
    config = transformers.LxmertConfig(**{**SIZES, "vocab_size": len(WORDS)}, **counts)
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
    model = transformers.T5EncoderModel(transformers.T5Config(vocab_size=len(WORDS), **sizes))
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


def test_command_rejects_unused_options(bert: Path, tmp_path: Path) -> None:
    for option in (["--head", "1"], ["--layer", "encoder.*"]):
        result = CliRunner().invoke(app, ["look", str(bert), "a cat", *option])
        assert isinstance(result.exception, InputError)
        assert "--out" in str(result.exception)
    result = CliRunner().invoke(app, ["look", str(tmp_path), "a cat"])
    assert isinstance(result.exception, InputError)
    assert "recipe.yaml" in str(result.exception)
    assert "config.json" in str(result.exception)


def test_run_is_compared_with_ablation(run: Run, bert: Path) -> None:
    cross = "decoder.1.cross_attention"
    text, target = "this is an example sentence", "이것은 예문이다"
    before, after = load_predictor(run, "cpu").build_viewer_data(text, target, ablations={cross: [1, (0, 0, 2)]})
    assert before.label.startswith("before, log-probability -")
    assert after.label.startswith("after, log-probability -")
    assert before.label.split()[-1] != after.label.split()[-1]
    first, second = (next(layer for layer in data.layers if layer.name == cross) for data in (before, after))
    whole = slice(0, first.shape[0]), slice(0, first.shape[1])
    assert torch.as_tensor(second.source.weights(1, *whole)).sum() == 0
    full, ablated = (torch.as_tensor(layer.source.weights(0, *whole))[0, 2].item() for layer in (first, second))
    assert full > 0 == ablated

    before, after = huggingface_model.capture_huggingface_model(
        bert, "a cat", ablations={"encoder.layer.0.attention.self": [0]}, device="cpu"
    )
    assert (before.label, after.label) == ("before", "after")


def test_command_compares_with_ablation(bert: Path, tmp_path: Path) -> None:
    layer = "encoder.layer.0.attention.self"

    def run_look(path: Path, ablation: str) -> str:
        arguments = ["look", str(bert), "a cat", "--out", str(path), "--device", "cpu", "--knock-out", ablation]
        result = CliRunner().invoke(app, arguments)
        return str(result.exception or result.output)

    assert "written to" in run_look(tmp_path / "both.html", f"{layer}:1")
    assert '"after"' in (tmp_path / "both.html").read_text()
    assert "two; use an .html file" in run_look(tmp_path / "both.png", f"{layer}:1")
    assert "LAYER:8-2" in run_look(tmp_path / "both.html", layer)
    assert "2 heads" in run_look(tmp_path / "both.html", f"{layer}:5")
    assert "no layer 'encoder.layer.9'" in run_look(tmp_path / "both.html", "encoder.layer.9:0")
