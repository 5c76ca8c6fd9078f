"""The models of words at work: learned on documents whose decisive words are known, and where they look."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from labelled_runs import GOOD, number, pair, review, table
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

QUIET = Console(quiet=True)
KINDS = ("self_attentive", "hierarchical")
TEXT = "The soup was awful. Overall the museum was splendid. My sister waited near the film."
SMALL = [
    "model.embedding_width=32",
    "model.width=32",
    "model.attention_width=32",
    "model.dropout=0.1",
    "train.batch_tokens=1024",
]
SMALL += ["train.learning_rate=1e-2", "train.warmup_steps=20", "train.max_epochs=4", "train.device=cpu"]
SMALL += ["train.tensorboard=false", "train.validate_every=1000000"]


def train_run(folder: Path, kind: str, *more: str) -> Run:
    run = Run.create_or_resume(folder, recipe.load(f"{kind}/default", [*SMALL, *more]))
    train(build_task(run), QUIET)
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    more = {"self_attentive": ["train.learning_rate=1.5e-2"], "hierarchical": ["train.max_epochs=3"]}
    data = ["data.builtin_size=1200", "data.held_out_size=100"]
    return {kind: train_run(folder / kind, kind, *data, *more[kind]) for kind in KINDS}


@pytest.fixture(params=KINDS)
def reader(request: pytest.FixtureRequest, runs: dict[str, Run]) -> Any:
    return jumok.load(runs[request.param].folder, "cpu")


def reviews(tmp_path: Path, count: int = 200) -> str:
    chance = random.Random(1)
    return table(tmp_path / "reviews.tsv", "text\tlabel", [review(chance) for _ in range(count)])


# ---------------------------------------------------------------------------------------------- learning


def test_the_deciding_sentence_is_found(reader: Any) -> None:
    found = evaluate(reader, "test", NBestOptions(), QUIET)
    kept = json.loads((reader.run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["accuracy"] == found.metrics["accuracy"] >= 0.95
    assert kept["sentence_hits"] >= 0.9 > 3 * kept["sentence_hits_by_chance"]
    assert kept["attention_hits"] >= 0.4 > 3 * kept["attention_hits_by_chance"]
    assert "mean_absolute_error" not in kept
    assert reader.classify(TEXT).label == "praise"
    assert reader.classify(TEXT.replace("Overall", "Yesterday").replace("The soup", "Overall it")).label == "blame"


def test_documents_tell_where_it_looked(reader: Any) -> None:
    one, other = reader.highlight_texts([TEXT, "Overall  it was shabby!"])
    assert one.text == TEXT
    assert other.text == "Overall it was shabby!"
    assert one.sentence_offsets == (0, 5, 11, 18)
    assert dict(one.class_probabilities) == pytest.approx(dict(reader.classify(TEXT).classes), abs=1e-5)
    assert one.weights.sum(1) == pytest.approx(np.ones(one.num_hops), abs=1e-5)
    assert one.get_sentence_weights()[1] > 0.5
    assert set(find_decisive_words(one.words)) == {5, 9}
    assert (one.sentence_weights is None) == (reader.task.recipe.model.type == "self_attentive")
    assert one.num_hops == getattr(reader.task.recipe.model, "num_hops", 1)
    alone = reader.highlight_texts([TEXT])[0]  # its neighbours in a batch do not matter
    assert one.weights == pytest.approx(alone.weights, abs=1e-5)


def test_the_weights_are_those_that_watch_sees(reader: Any) -> None:
    [document] = reader.highlight_texts([TEXT])
    batch = reader.task.build_batches(list(reader.encode([reader.parse_line(TEXT)])), batch_tokens=100).collate([0])
    with torch.inference_mode(), jumok.watch(reader.model, reader.tokenizer) as seen:
        reader.model.logits(batch)
    if document.sentence_weights is None:
        assert seen.names == ["attention"]
        assert seen[0].weights(batch=0)[0].numpy() == pytest.approx(document.weights, abs=1e-6)
        assert list(seen[0].key_tokens[0][:2]) == ["▁the", "▁soup"]
        return
    assert seen.names == ["word_level", "sentence_level"]
    assert seen["sentence_level"].weights(batch=0)[0, 0].numpy() == pytest.approx(document.sentence_weights, abs=1e-6)
    second = seen["word_level"].weights(batch=1)[0, 0, :6].numpy()
    assert document.normalize_within_sentences()[5:11] == pytest.approx(second, abs=1e-6)


def test_probabilities_of_words_are_those_of_the_text(reader: Any) -> None:
    [one] = reader.highlight_texts([TEXT])
    sentences = [
        one.words[begin:end] for begin, end in zip(one.sentence_offsets, one.sentence_offsets[1:], strict=False)
    ]
    names = list(reader.labels)
    whole, without, nothing = reader.predict_probabilities([sentences, [sentences[0], [], sentences[2]], [[], [], []]])
    assert dict(zip(names, whole, strict=True)) == pytest.approx(dict(one.class_probabilities), abs=1e-6)
    assert without[names.index("praise")] < 0.5 < whole[names.index("praise")]
    assert nothing.sum() == pytest.approx(1)
    assert reader.predict_probabilities([]).shape == (0, 3)


def test_the_commands(reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(reader.run.folder)

    def jumok(*words: str) -> str:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert jumok("run", run, TEXT).startswith("praise\t")
    assert json.loads(jumok("run", run, TEXT, "--json"))["label"] == "praise"
    assert len(jumok("run", run, TEXT, "--n-best", "2").splitlines()) == 2
    Path("text.txt").write_text(f"{TEXT}\n{TEXT}\n", encoding="utf-8")
    assert len(jumok("run", run, "text.txt", "--attention-map", "map.png").splitlines()) == 2
    assert Path("map.png").stat().st_size > 1000
    jumok("look", run, "text.txt", "--out", "look.html")
    assert "splendid" in Path("look.html").read_text(encoding="utf-8")
    assert "attention_hits" in jumok("eval", run, "--split", "valid")


def test_scenes_have_the_document_and_its_layers(reader: Any) -> None:
    [scene] = reader.build_viewer_data(TEXT)
    assert scene.document is not None
    assert scene.document.text == TEXT
    assert scene.label == ""
    shapes = {layer.name: (layer.shape, len(layer.heads)) for layer in scene.layers}
    if scene.document.sentence_weights is None:
        assert shapes == {"attention": ((1, 18), 4)}
    else:
        assert shapes == {"word_level": ((1, 18), 1), "sentence_level": ((1, 3), 1)}
    for layer in scene.layers:
        total = layer.source.weights(0, slice(0, 1), slice(0, layer.shape[1])).sum()
        assert total == pytest.approx(3 if layer.name == "word_level" else 1, abs=1e-4)
    name = "sentence_level" if len(shapes) == 2 else "attention"
    most = int((scene.document.weights[0] if len(shapes) == 1 else scene.document.sentence_weights).argmax())
    _, after = reader.build_viewer_data(TEXT, ablations={name: [(0, most)]})
    gone = after.document.weights[0] if len(shapes) == 1 else after.document.sentence_weights
    assert gone[most] == 0
    assert gone.sum() == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------- other data, other text


def test_korean_in_pieces(tmp_path: Path) -> None:
    more = ["data.train=decisive-words-ko", "data.builtin_size=300", "data.held_out_size=40"]
    more += ["tokenizer.type=bpe", "tokenizer.vocab_size=700", "train.max_epochs=1"]
    found = jumok.load(train_run(tmp_path / "run", "self_attentive", *more).folder, "cpu")
    [one] = found.highlight_texts(["결국 박물관은 훌륭했다. 국물은 지루했다."])
    assert one.words == ("결국", "박물관은", "훌륭했다", ".", "국물은", "지루했다", ".")
    assert one.sentence_offsets == (0, 4, 7)
    [[ids]] = found.tokenizer.encode([[one.words[:4]]])
    assert len(ids) >= 4
    assert one.weights.sum(1) == pytest.approx(np.ones(4), abs=1e-5)


def test_pairs(tmp_path: Path) -> None:
    chance = random.Random(2)
    path = table(tmp_path / "pairs.tsv", "a\tb\tlabel", [pair(chance) for _ in range(300)])
    more = [
        f"data.train={path}",
        "data.text_column=a",
        "data.pair_column=b",
        "data.held_out_size=40",
        "model.num_hops=2",
    ]
    found: Any = load_predictor(
        train_run(tmp_path / "run", "self_attentive", *more, "train.max_epochs=6", "train.batch_tokens=256"),
        "cpu",
    )
    assert found.score_examples(found.task.load_split("test").examples).metrics["accuracy"] > 0.9
    assert found.classify("the sad", "a lovely").label == "1"
    [one] = found.highlight_texts(["a lovely film ||| the sad"])
    assert one.words == ("a", "lovely", "film", "the", "sad")
    assert one.sentence_offsets == (0, 3, 5)
    assert one.weights[:, :3].sum(1) == pytest.approx(np.full(2, 0.5), abs=1e-5)
    shares = found.predict_probabilities([[["a", "lovely", "film"], ["the", "sad"]]])[0]
    assert dict(zip(found.labels, shares, strict=True)) == pytest.approx(dict(one.class_probabilities), abs=1e-6)
    with pytest.raises(InputError, match="document 1 has 1 texts; this model reads two"):
        found.predict_probabilities([[["a"]]])
    with pytest.raises(InputError, match="a hierarchical model reads one text"):
        train_run(tmp_path / "other", "hierarchical", *more[:4])
    with pytest.raises(InputError, match=r"model\.text_pairs: true, but data\.pair_column"):
        train_run(tmp_path / "third", "self_attentive", "model.text_pairs=true")


def test_numbers_and_classes_that_are_numbers(tmp_path: Path) -> None:
    chance = random.Random(3)
    path = table(tmp_path / "numbers.tsv", "text\tscore", [number(chance) for _ in range(300)])
    more = [f"data.train={path}", "data.label_column=score", "data.held_out_size=40"]
    found: Any = load_predictor(
        train_run(tmp_path / "run", "hierarchical", *more, "data.regression=true", "train.max_epochs=8"), "cpu"
    )
    assert found.score_examples(found.task.load_split("test").examples).metrics["spearman"] > 0.8
    assert found.highlight_texts([" ".join(GOOD)])[0].class_probabilities == ()
    assert found.build_viewer_data("the film")[0].title.startswith("the film  →  ")
    with pytest.raises(InputError, match="predicts a number"):
        found.predict_probabilities([[["a"]]])
    classes: Any = load_predictor(train_run(tmp_path / "classes", "hierarchical", *more, "train.max_epochs=1"), "cpu")
    examples = classes.task.load_split("test").examples
    judged = classes.score_examples(examples)
    said = [json.loads(line) for line in judged.outputs]
    by_hand = np.mean([abs(float(one["prediction"]) - float(one["target"])) for one in said])
    assert judged.metrics["mean_absolute_error"] == pytest.approx(by_hand)


def test_words_begin_from_vectors(tmp_path: Path) -> None:
    (tmp_path / "some.vec").write_text("2 32\nlovely " + "0.5 " * 32 + "\nzebra " + "0.1 " * 32 + "\n")
    more = [f"data.train={reviews(tmp_path)}", "data.held_out_size=20", f"word_vectors={tmp_path / 'some.vec'}"]
    more += ["train.max_epochs=null", "train.max_steps=1", "train.warmup_steps=0", "train.learning_rate=1e-9"]
    console = Console(record=True, width=200)
    run = Run.create_or_resume(tmp_path / "run", recipe.load("self_attentive", [*SMALL, *more]))
    train(build_task(run), console)
    assert "1 of " in console.export_text()
    found: Any = load_predictor(run, "cpu")
    [[ids]] = found.tokenizer.encode([[["lovely"]]])
    assert found.model.embedding.weight[ids[0]].detach().numpy() == pytest.approx(np.full(32, 0.5), abs=1e-5)


# --------------------------------------------------------------------------------------------- bad input


def test_texts_of_no_word_of_one_and_of_many(reader: Any) -> None:
    assert sum(share for _, share in reader.classify("").classes) == pytest.approx(1)
    assert len([one.label for one in reader.predict(["", "overall"], NBestOptions())]) == 2
    for text in ("", "  \n"):
        with pytest.raises(InputError, match="the text has no words"):
            reader.build_viewer_data(text)
    with pytest.raises(InputError, match="text 2 has no words"):
        reader.highlight_texts(["good", " "])
    [one] = reader.highlight_texts(["overall"])
    assert one.weights.shape[1] == 1
    long = " ".join([TEXT] * 1700)
    [whole] = reader.highlight_texts([long])
    assert (len(whole.sentence_offsets), len(whole.words)) == (5101, 1700 * 18)
    assert whole.weights.sum(1) == pytest.approx(np.ones(whole.num_hops), abs=1e-3)
    with pytest.raises(InputError, match="too many for a figure"):
        reader.draw_attention(next(reader.predict([long], NBestOptions())), Path("x.png"))
    with pytest.raises(InputError, match="reads one text, but two came"):
        reader.classify("a", "b")
    with pytest.raises(InputError, match="cannot be exported"):
        reader.export("hf", Path("x"))
    with pytest.raises(InputError, match="--target: this model does not generate"):
        reader.build_viewer_data("a", "b")


def test_typos_in_a_recipe() -> None:
    base = {"task": "classify", "data": {"train": "x"}}
    with pytest.raises(InputError, match=r"model\.type: 'hierachical' came; .* did you mean hierarchical\?"):
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


def test_an_unknown_label_and_a_data_set_that_is_not_there(tmp_path: Path) -> None:
    other = table(tmp_path / "valid.tsv", "text\tlabel", [("fine", "1"), ("so so", "maybe")])
    with pytest.raises(InputError, match=r"valid\.tsv:3: an unknown label \('maybe'"):
        train_run(tmp_path / "run", "hierarchical", f"data.train={reviews(tmp_path)}", f"data.valid={other}")
    with pytest.raises(InputError, match="decisive-words-fr"):
        train_run(tmp_path / "fr", "hierarchical", "data.train=decisive-words-fr")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_and_refuses_other_data(kind: str, tmp_path: Path) -> None:
    path = reviews(tmp_path, 100)
    more = [f"data.train={path}", "data.held_out_size=10", "train.max_epochs=null", "train.schedule=constant"]
    more += ["model.num_bigrams=30"]
    train_run(tmp_path / "whole", kind, *more, "train.max_steps=24")
    half = train_run(tmp_path / "half", kind, *more, "train.max_steps=6")
    train_run(half.folder, kind, *more, "train.max_steps=24")
    one, two = (load_predictor(Run.open(tmp_path / name), "cpu").model.state_dict() for name in ("whole", "half"))
    assert all(torch.equal(x, two[name]) for name, x in one.items())
    assert one["bigrams.bigram_codes"].unique().numel() > 20  # those of the data
    Path(path).write_text(Path(path).read_text() + "something new\t1\n", encoding="utf-8")
    with pytest.raises(InputError, match="the data has changed"):
        train_run(half.folder, kind, *more, "train.max_steps=25")


def test_word_dropout_hides_words_only_in_training(runs: dict[str, Run]) -> None:
    for kind in KINDS:
        found: Any = load_predictor(runs[kind], "cpu")
        model = found.model
        model.config = replace(model.config, word_dropout=0.9)
        batch = found.task.build_batches(list(found.encode([found.parse_line(TEXT)])), batch_tokens=100).collate([0])
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        at_rest = model.eval().logits(batch)
        assert torch.equal(at_rest, model.logits(batch))
        assert not torch.allclose(at_rest, model.train().logits(batch), atol=1e-3)
