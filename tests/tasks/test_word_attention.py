"""Word attention classifiers, trained on documents with known decisive words."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_runs import GOOD, make_number, make_pair, make_review, write_table
from rich.console import Console
from typer.testing import CliRunner

import jumok
from jumok import InputError, recipe
from jumok.cli.app import app
from jumok.data.builtin.decisive_words import find_decisive_words
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)
KINDS = ("self_attentive", "hierarchical")
TEXT = "The soup was awful. Overall the museum was splendid. My sister waited near the film."
SMALL = ["model.embedding_width=32", "model.width=32", "model.attention_width=32", "model.dropout=0.1"]
SMALL += ["train.batch_tokens=1024", "train.learning_rate=1e-2", "train.warmup_steps=20", "train.max_epochs=4"]
SMALL += ["train.device=cpu", "train.tensorboard=false", "train.validate_every=1000000"]


def train_run(folder: Path, kind: str, *settings: str) -> Run:
    run = Run.create_or_resume(folder, recipe.load(f"{kind}/default", [*SMALL, *settings]))
    train(build_task(run), QUIET)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    settings = {"self_attentive": ["train.learning_rate=1.5e-2"], "hierarchical": ["train.max_epochs=3"]}
    data = ["data.builtin_size=1200", "data.held_out_size=100"]
    return {kind: train_run(folder / kind, kind, *data, *settings[kind]) for kind in KINDS}


@pytest.fixture(params=KINDS)
def predictor(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Any:
    return jumok.load(runs[request.param].folder, "cpu")


def reviews(tmp_path: Path, count: int = 200) -> str:
    rng = random.Random(1)
    return write_table(tmp_path / "reviews.tsv", "text\tlabel", [make_review(rng) for _ in range(count)])


# ---------------------------------------------------------------------------------------------- training


def test_the_decisive_sentence_is_attended_to(predictor: Any) -> None:
    evaluation = evaluate(predictor, "test", NBestOptions(), QUIET)
    stored = json.loads((predictor.run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["accuracy"] == evaluation.metrics["accuracy"] >= 0.95
    assert stored["sentence_hits"] >= 0.9 > 3 * stored["sentence_hits_by_chance"]
    assert stored["attention_hits"] >= 0.4 > 3 * stored["attention_hits_by_chance"]
    assert "mean_absolute_error" not in stored
    assert predictor.classify(TEXT).label == "praise"
    assert predictor.classify(TEXT.replace("Overall", "Yesterday").replace("The soup", "Overall it")).label == "blame"


def test_highlighted_documents(predictor: Any) -> None:
    document, second = predictor.highlight_texts([TEXT, "Overall  it was shabby!"])
    assert document.text == TEXT
    assert second.text == "Overall it was shabby!"
    assert document.sentence_offsets == (0, 5, 11, 18)
    assert dict(document.class_probabilities) == pytest.approx(dict(predictor.classify(TEXT).classes), abs=1e-5)
    assert document.weights.sum(1) == pytest.approx(np.ones(document.num_hops), abs=1e-5)
    assert document.get_sentence_weights()[1] > 0.5
    assert set(find_decisive_words(document.words)) == {5, 9}
    assert (document.sentence_weights is None) == (predictor.task.recipe.model.type == "self_attentive")
    assert document.num_hops == getattr(predictor.task.recipe.model, "num_hops", 1)
    alone = predictor.highlight_texts([TEXT])[0]  # batching does not matter
    assert document.weights == pytest.approx(alone.weights, abs=1e-5)


def test_weights_equal_those_of_watch(predictor: Any) -> None:
    [document] = predictor.highlight_texts([TEXT])
    batch = predictor.task.build_batches(
        list(predictor.encode([predictor.parse_line(TEXT)])), batch_tokens=100
    ).collate([0])
    with torch.inference_mode(), jumok.watch(predictor.model, predictor.tokenizer) as captures:
        predictor.model.logits(batch)
    if document.sentence_weights is None:
        assert captures.names == ["attention"]
        assert captures[0].weights(batch=0)[0].numpy() == pytest.approx(document.weights, abs=1e-6)
        assert list(captures[0].key_tokens[0][:2]) == ["▁the", "▁soup"]
        return
    assert captures.names == ["word_level", "sentence_level"]
    assert captures["sentence_level"].weights(batch=0)[0, 0].numpy() == pytest.approx(
        document.sentence_weights, abs=1e-6
    )
    second = captures["word_level"].weights(batch=1)[0, 0, :6].numpy()
    assert document.normalize_within_sentences()[5:11] == pytest.approx(second, abs=1e-6)


def test_probabilities_of_words_equal_those_of_the_text(predictor: Any) -> None:
    [document] = predictor.highlight_texts([TEXT])
    sentences = [
        document.words[begin:end]
        for begin, end in zip(document.sentence_offsets, document.sentence_offsets[1:], strict=False)
    ]
    names = list(predictor.labels)
    whole, without, nothing = predictor.predict_probabilities(
        [sentences, [sentences[0], [], sentences[2]], [[], [], []]]
    )
    assert dict(zip(names, whole, strict=True)) == pytest.approx(dict(document.class_probabilities), abs=1e-6)
    assert without[names.index("praise")] < 0.5 < whole[names.index("praise")]
    assert nothing.sum() == pytest.approx(1)
    assert predictor.predict_probabilities([]).shape == (0, 3)


def test_commands(predictor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(predictor.run.folder)

    def jumok(*words: str) -> str:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert jumok("run", run, TEXT).startswith("praise\t")
    assert json.loads(jumok("run", run, TEXT, "--json"))["label"] == "praise"
    assert len(jumok("run", run, TEXT, "--n-best", "2").splitlines()) == 2
    Path("text.txt").write_text(f"{TEXT}\n{TEXT}\n", encoding="utf-8")
    assert len(jumok("run", run, "text.txt", "--attention-map", "map.png").splitlines()) == 2
    assert Path("map.png").stat().st_size > 1000
    jumok("look", run, "text.txt", "--out", "look.html")
    assert "splendid" in Path("look.html").read_text(encoding="utf-8")
    assert "attention_hits" in jumok("eval", run, "--split", "valid")


def test_viewer_data_has_the_document_and_its_layers(predictor: Any) -> None:
    [view] = predictor.build_viewer_data(TEXT)
    assert view.document is not None
    assert view.document.text == TEXT
    assert view.label == ""
    shapes = {layer.name: (layer.shape, len(layer.heads)) for layer in view.layers}
    if view.document.sentence_weights is None:
        assert shapes == {"attention": ((1, 18), 4)}
    else:
        assert shapes == {"word_level": ((1, 18), 1), "sentence_level": ((1, 3), 1)}
    for layer in view.layers:
        total = layer.source.weights(0, slice(0, 1), slice(0, layer.shape[1])).sum()
        assert total == pytest.approx(3 if layer.name == "word_level" else 1, abs=1e-4)
    name = "sentence_level" if len(shapes) == 2 else "attention"
    most = int((view.document.weights[0] if len(shapes) == 1 else view.document.sentence_weights).argmax())
    _, after = predictor.build_viewer_data(TEXT, ablations={name: [(0, most)]})
    gone = after.document.weights[0] if len(shapes) == 1 else after.document.sentence_weights
    assert gone[most] == 0
    assert gone.sum() == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------------------- other data


def test_korean_subwords(tmp_path: Path) -> None:
    settings = ["data.train=decisive-words-ko", "data.builtin_size=300", "data.held_out_size=40"]
    settings += ["tokenizer.type=bpe", "tokenizer.vocab_size=700", "train.max_epochs=1"]
    predictor = jumok.load(train_run(tmp_path / "run", "self_attentive", *settings).folder, "cpu")
    [document] = predictor.highlight_texts(["결국 박물관은 훌륭했다. 국물은 지루했다."])
    assert document.words == ("결국", "박물관은", "훌륭했다", ".", "국물은", "지루했다", ".")
    assert document.sentence_offsets == (0, 4, 7)
    [[ids]] = predictor.tokenizer.encode([[document.words[:4]]])
    assert len(ids) >= 4
    assert document.weights.sum(1) == pytest.approx(np.ones(4), abs=1e-5)


def test_text_pairs(tmp_path: Path) -> None:
    rng = random.Random(2)
    path = write_table(tmp_path / "pairs.tsv", "a\tb\tlabel", [make_pair(rng) for _ in range(300)])
    settings = [
        f"data.train={path}",
        "data.text_column=a",
        "data.pair_column=b",
        "data.held_out_size=40",
        "model.num_hops=2",
    ]
    predictor: Any = load_predictor(
        train_run(tmp_path / "run", "self_attentive", *settings, "train.max_epochs=6", "train.batch_tokens=256"), "cpu"
    )
    assert predictor.score_examples(predictor.task.load_split("test").examples).metrics["accuracy"] > 0.9
    assert predictor.classify("the sad", "a lovely").label == "1"
    [document] = predictor.highlight_texts(["a lovely film ||| the sad"])
    assert document.words == ("a", "lovely", "film", "the", "sad")
    assert document.sentence_offsets == (0, 3, 5)
    assert document.weights[:, :3].sum(1) == pytest.approx(np.full(2, 0.5), abs=1e-5)
    probabilities = predictor.predict_probabilities([[["a", "lovely", "film"], ["the", "sad"]]])[0]
    assert dict(zip(predictor.labels, probabilities, strict=True)) == pytest.approx(
        dict(document.class_probabilities), abs=1e-6
    )
    with pytest.raises(InputError, match="document 1 has 1 texts; this model reads two"):
        predictor.predict_probabilities([[["a"]]])
    with pytest.raises(InputError, match="a hierarchical model reads one text"):
        train_run(tmp_path / "other", "hierarchical", *settings[:4])
    with pytest.raises(InputError, match=r"model\.text_pairs: true, but data\.pair_column"):
        train_run(tmp_path / "third", "self_attentive", "model.text_pairs=true")


def test_regression_and_numeric_classes(tmp_path: Path) -> None:
    rng = random.Random(3)
    path = write_table(tmp_path / "numbers.tsv", "text\tscore", [make_number(rng) for _ in range(300)])
    settings = [f"data.train={path}", "data.label_column=score", "data.held_out_size=40"]
    predictor: Any = load_predictor(
        train_run(tmp_path / "run", "hierarchical", *settings, "data.regression=true", "train.max_epochs=8"), "cpu"
    )
    assert predictor.score_examples(predictor.task.load_split("test").examples).metrics["spearman"] > 0.8
    assert predictor.highlight_texts([" ".join(GOOD)])[0].class_probabilities == ()
    assert predictor.build_viewer_data("the film")[0].title.startswith("the film  →  ")
    with pytest.raises(InputError, match="predicts a number"):
        predictor.predict_probabilities([[["a"]]])
    classes: Any = load_predictor(
        train_run(tmp_path / "classes", "hierarchical", *settings, "train.max_epochs=1"), "cpu"
    )
    examples = classes.task.load_split("test").examples
    evaluation = classes.score_examples(examples)
    lines = [json.loads(line) for line in evaluation.outputs]
    by_hand = np.mean([abs(float(line["prediction"]) - float(line["target"])) for line in lines])
    assert evaluation.metrics["mean_absolute_error"] == pytest.approx(by_hand)


def test_embeddings_are_initialized_from_word_vectors(tmp_path: Path) -> None:
    (tmp_path / "some.vec").write_text("2 32\nlovely " + "0.5 " * 32 + "\nzebra " + "0.1 " * 32 + "\n")
    settings = [f"data.train={reviews(tmp_path)}", "data.held_out_size=20", f"word_vectors={tmp_path / 'some.vec'}"]
    settings += ["train.max_epochs=null", "train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=1e-9"]
    console = Console(record=True, width=200)
    run = Run.create_or_resume(tmp_path / "run", recipe.load("self_attentive", [*SMALL, *settings]))
    train(build_task(run), console)
    assert "1 of " in console.export_text()
    predictor: Any = load_predictor(run, "cpu")
    [[ids]] = predictor.tokenizer.encode([[["lovely"]]])
    assert predictor.model.embedding.weight[ids[0]].detach().numpy() == pytest.approx(np.full(32, 0.5), abs=1e-5)


# ----------------------------------------------------------------------------------------- invalid input


def test_empty_short_and_long_texts(predictor: Any) -> None:
    assert sum(probability for _, probability in predictor.classify("").classes) == pytest.approx(1)
    assert len([prediction.label for prediction in predictor.predict(["", "overall"], NBestOptions())]) == 2
    for text in ("", "  \n"):
        with pytest.raises(InputError, match="the text has no words"):
            predictor.build_viewer_data(text)
    with pytest.raises(InputError, match="text 2 has no words"):
        predictor.highlight_texts(["good", " "])
    [document] = predictor.highlight_texts(["overall"])
    assert document.weights.shape[1] == 1
    long = " ".join([TEXT] * 1700)
    [whole] = predictor.highlight_texts([long])
    assert (len(whole.sentence_offsets), len(whole.words)) == (5101, 1700 * 18)
    assert whole.weights.sum(1) == pytest.approx(np.ones(whole.num_hops), abs=1e-3)
    with pytest.raises(InputError, match="too many for a figure"):
        predictor.draw_attention(next(predictor.predict([long], NBestOptions())), Path("x.png"))
    with pytest.raises(InputError, match="reads one text, but got two"):
        predictor.classify("a", "b")
    with pytest.raises(InputError, match="cannot be exported"):
        predictor.export("hf", Path("x"))
    with pytest.raises(InputError, match="--target: this model does not generate"):
        predictor.build_viewer_data("a", "b")


def test_typos_in_a_recipe() -> None:
    base = {"task": "classify", "data": {"train": "x"}}
    with pytest.raises(InputError, match=r"model\.type: 'hierachical' is unknown; .* did you mean hierarchical\?"):
        recipe.parse({**base, "model": {"type": "hierachical"}})
    with pytest.raises(InputError, match=r"model\.hops: .*did you mean model\.num_hops\?"):
        recipe.parse({**base, "model": {"type": "self_attentive", "hops": 3}})
    with pytest.raises(InputError, match=r"tokenizer\.lowr: .*did you mean tokenizer\.lowercase\?"):
        recipe.parse({**base, "model": {"type": "hierarchical"}, "tokenizer": {"lowr": True}})
    with pytest.raises(InputError, match="pretrained: "):
        recipe.parse({**base, "model": {"type": "hierarchical"}, "pretrained": "x"})
    with pytest.raises(InputError, match=r"tokenizer: vocab_size=3: expected 33 or more"):
        recipe.parse({**base, "model": {"type": "hierarchical"}, "tokenizer": {"vocab_size": 3}})
    assert recipe.parse(base).model.type == "bert"
    assert recipe.to_dict(recipe.parse({**base, "model": {"type": "bert"}}))["model"]["type"] == "bert"


def test_unknown_labels_and_data_sets(tmp_path: Path) -> None:
    other = write_table(tmp_path / "valid.tsv", "text\tlabel", [("fine", "1"), ("so so", "maybe")])
    with pytest.raises(InputError, match=r"valid\.tsv:3: an unknown label \('maybe'"):
        train_run(tmp_path / "run", "hierarchical", f"data.train={reviews(tmp_path)}", f"data.valid={other}")
    with pytest.raises(InputError, match="decisive-words-fr"):
        train_run(tmp_path / "fr", "hierarchical", "data.train=decisive-words-fr")


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_needs_the_same_data(kind: str, tmp_path: Path) -> None:
    path = reviews(tmp_path, 100)
    settings = [f"data.train={path}", "data.held_out_size=10", "train.max_epochs=null", "train.schedule=constant"]
    settings += ["model.num_bigrams=30"]
    train_run(tmp_path / "whole", kind, *settings, "train.max_steps=24")
    half = train_run(tmp_path / "half", kind, *settings, "train.max_steps=6")
    train_run(half.folder, kind, *settings, "train.max_steps=24")
    whole, resumed = (load_predictor(Run.open(tmp_path / name), "cpu").model.state_dict() for name in ("whole", "half"))
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())
    assert whole["bigrams.bigram_codes"].unique().numel() > 20  # fitted to the data
    Path(path).write_text(Path(path).read_text() + "something new\t1\n", encoding="utf-8")
    with pytest.raises(InputError, match="the data has changed"):
        train_run(half.folder, kind, *settings, "train.max_steps=25")


def test_word_dropout_is_only_used_in_training(runs: dict[str, Run]) -> None:
    for kind in KINDS:
        predictor: Any = load_predictor(runs[kind], "cpu")
        model = predictor.model
        model.config = replace(model.config, word_dropout=0.9)
        batch = predictor.task.build_batches(
            list(predictor.encode([predictor.parse_line(TEXT)])), batch_tokens=100
        ).collate([0])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        at_rest = model.eval().logits(batch)
        assert torch.equal(at_rest, model.logits(batch))
        assert not torch.allclose(at_rest, model.train().logits(batch), atol=1e-3)
