"""Pretraining: every recipe, training, resuming, mask filling and errors."""

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import jumok
from jumok import InputError, recipe
from jumok.attention import gpu_support
from jumok.attention.gpu_support import GPUProperties
from jumok.cli import app as cli_app
from jumok.data.caches.document_store import DocumentStore
from jumok.export.bert import export_bert
from jumok.models.bert import BertPretrainingModel
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.batch_layout import resolve_packing
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.pretrain import metrics as pretrain_metrics
from jumok.tasks.pretrain.config import PretrainingDataConfig
from jumok.tasks.pretrain.data import PretrainingData
from jumok.tasks.pretrain.predictor import FillMaskOptions, compute_attention_maps
from jumok.tasks.training import train

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)
SMALL = ["model.width=16", "model.num_layers=2", "model.num_heads=2", "model.feed_forward_width=32"]
SMALL += ["model.max_positions=64", "masking.sequence_length=32", "tokenizer.vocab_size=200", "data.held_out_size=19"]
SMALL += ["train.batch_tokens=512", "train.device=cpu", "train.max_epochs=null", "train.max_minutes=null"]
SMALL += ["train.max_steps=3", "train.warmup_steps=2", "train.log_every=1", "train.validate_every=3"]
SMALL += ["train.tensorboard=false"]
PRETRAINING = [name for name, path in recipe.list_builtin().items() if recipe.read(path)["task"] == "pretrain"]
WORDS = {
    "en": ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    "ko": ["하나", "둘", "셋", "넷", "다섯", "여섯", "일곱", "여덟", "아홉", "열", "열하나", "열둘"],
}


def make_text(language: str = "en", count: int = 200, seed: int = 1) -> str:
    """Generate documents that count up or down, so that each word follows from its neighbours."""
    rng = random.Random(seed)
    documents = []
    for _ in range(count):
        words = WORDS[language][:: rng.choice((1, -1))]
        sentences = []
        for _ in range(rng.randint(3, 6)):
            begin, length = rng.randrange(12), rng.randint(4, 8)
            sentences.append(" ".join(itertools.islice(itertools.cycle(words), begin, begin + length)) + ".")
        documents.append("\n".join(sentences))
    return "\n\n".join(documents)


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JUMOK_DATA."""
    root = tmp_path_factory.mktemp("data")
    for language in WORDS:
        (root / f"wiki_{language}").mkdir()
        (root / f"wiki_{language}" / "text.txt.gz").write_bytes(gzip.compress(make_text(language).encode()))
    articles = [
        {"title": str(n), "paragraphs": [{"context": line, "qas": []} for line in document.split("\n")]}
        for n, document in enumerate(make_text().split("\n\n"))
    ]
    (root / "jaquad" / "train").mkdir(parents=True)
    (root / "jaquad" / "train" / "0.json").write_text(json.dumps({"data": articles}))
    reviews = make_text("ko", count=3000).replace("\n\n", "\n").split("\n")
    (root / "nsmc").mkdir()
    (root / "nsmc" / "train.tsv").write_text("\n".join(["id\tdocument", *(f"1\t{review}" for review in reviews)]))
    return root


def small(folder: Path, data_sets: Path, *settings: str, name: str = "bert") -> Run:
    source = [] if "/" in name else [f"data.train={data_sets / 'wiki_en' / 'text.txt.gz'}"]
    return Run.create_or_resume(folder, recipe.load(name, [*SMALL, *source, *settings]))


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, data_sets: Path) -> Run:
    """A trained run."""
    settings = ["model.width=64", "model.feed_forward_width=128", "model.dropout=0", "masking.sequence_length=16"]
    settings += ["train.learning_rate=3e-3", "train.max_steps=300", "train.warmup_steps=50", "train.validate_every=100"]
    settings += ["train.log_every=20"]
    run = small(tmp_path_factory.mktemp("runs") / "learned", data_sets, *settings)
    train(build_task(run), QUIET)
    return run


def metrics(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


# --------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", PRETRAINING)
def test_every_recipe_trains_and_is_evaluated(
    name: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    settings = (
        ["pretrained=null"] if name != "bert/default" else [f"data.train={data_sets / 'wiki_en' / 'text.txt.gz'}"]
    )
    run = small(tmp_path / "run", data_sets, *settings, name=name)
    train(build_task(run), QUIET)
    events = metrics(run)
    events = [line for line in events if line["event"] != "alarm"]  # attention alarms of an untrained model
    assert [line["event"] for line in events] == ["train", "train", "train", "validation"]
    assert {"masked_lm", "next_sentence"} <= events[0].keys()
    assert {"mlm_accuracy", "nsp_accuracy", "perplexity", "attention/entropy"} <= events[-1].keys()
    predictor = jumok.load(run.folder, "cpu")
    evaluation = evaluate(predictor, "test", FillMaskOptions(), QUIET)
    stored = json.loads((run.folder / "eval" / "test.json").read_text())
    for name in ("mlm_accuracy", "num_pairs", "num_masked_tokens"):
        assert stored[name] == evaluation.metrics[name]
    assert (run.folder / "figures" / "accuracy.png").stat().st_size > 1000
    assert len(predictor.fill("one [MASK] three").mask_predictions[0]) == 5


def test_loss_and_accuracy_improve(learned: Run) -> None:
    events = metrics(learned)
    losses = [line["loss"] for line in events if line["event"] == "train"]
    assert losses[0] > 3.0
    assert losses[-1] < 0.6 * losses[0]
    last = [line for line in events if line["event"] == "validation"][-1]
    assert last["mlm_accuracy"] > 0.6
    assert last["perplexity"] < 5
    # The loss is the sum of both parts.
    line = events[0]
    assert line["loss"] == pytest.approx(line["masked_lm"] + line["next_sentence"])
    assert 0.6 < line["next_sentence"] < 0.8  # about log 2, chance


def test_resumed_training_gives_identical_weights(data_sets: Path, tmp_path: Path) -> None:
    settings = ["train.schedule=constant", "train.validate_every=4", "train.batch_tokens=2048"]
    whole = small(tmp_path / "whole", data_sets, *settings, "train.max_steps=8")
    train(build_task(whole), QUIET)
    for steps in (3, 8):
        parts = small(tmp_path / "parts", data_sets, *settings, f"train.max_steps={steps}")
        train(build_task(parts), QUIET)
    whole_weights, resumed_weights = (
        load_file(run.folder / "state" / "00000008" / "model.safetensors") for run in (whole, parts)
    )
    assert whole_weights.keys() == resumed_weights.keys()
    assert all(torch.equal(whole_weights[name], resumed_weights[name]) for name in whole_weights)
    losses = [[line["loss"] for line in metrics(run) if line["event"] == "train"] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert max(line["epoch"] for line in metrics(whole)) >= 1  # training continues beyond an epoch


def test_held_out_documents_are_not_in_the_training_data(tmp_path: Path) -> None:
    twice = make_text(count=150) + "\n\n" + make_text(count=150)  # every document a second time
    (tmp_path / "text.txt").write_text(twice)
    data = PretrainingData(PretrainingDataConfig(train=str(tmp_path / "text.txt"), held_out_size=20), tmp_path)
    parts = {"train": {document.text for document in data.train_documents()}}
    for name in ("valid", "test"):
        parts[name] = {document.text for document in data.held_out_documents(name)}
        assert 10 <= sum(1 for _ in data.held_out_documents(name)) <= 40
    assert not parts["train"] & parts["valid"]
    assert not parts["train"] & parts["test"]
    assert not parts["valid"] & parts["test"]
    assert set().union(*parts.values()) == {document.strip() for document in twice.split("\n\n")}
    named = PretrainingData(
        PretrainingDataConfig(train=str(tmp_path / "text.txt"), valid=str(tmp_path / "text.txt")), tmp_path / "b"
    )
    assert len({document.text for document in named.train_documents()}) < 150  # the test documents are held out
    assert len({document.text for document in named.held_out_documents("valid")}) == 150


def test_the_vocabulary_of_another_run(learned: Run, data_sets: Path, tmp_path: Path) -> None:
    run = small(
        tmp_path / "run",
        data_sets,
        f"tokenizer.pretrained={learned.folder}",
        "train.max_steps=1",
        "train.warmup_steps=0",
    )
    train(build_task(run), QUIET)
    assert (run.folder / "tokenizer.json").read_text() == (learned.folder / "tokenizer.json").read_text()


def test_validation_always_masks_the_same_words(learned: Run) -> None:
    predictor = load_predictor(learned, "cpu")
    scores, repeated = (
        pretrain_metrics.score_model(predictor.model, predictor.load_split("valid").batcher) for _ in "ab"
    )
    assert scores == repeated
    best = max(line["mlm_accuracy"] for line in metrics(learned) if line["event"] == "validation")
    assert scores.mlm_accuracy == pytest.approx(best, abs=0.05)


# ------------------------------------------------------------------------------------------------- prediction


def test_masked_words_are_predicted(learned: Run) -> None:
    predictor = load_predictor(learned, "cpu")
    prediction = predictor.fill("two three four [MASK] six seven.")
    assert prediction.mask_predictions[0][0][0] == "five"
    assert prediction.filled_text == "two three four five six seven."
    assert prediction.next_sentence_probability is None
    assert sum(
        probability for _, probability in predictor.fill("one [MASK] three", n_best=500).mask_predictions[0]
    ) == pytest.approx(1.0)
    probabilities = [probability for _, probability in prediction.mask_predictions[0]]
    assert probabilities == sorted(probabilities, reverse=True)


def test_batching_keeps_order_and_predictions(learned: Run) -> None:
    predictor = load_predictor(learned, "cpu")
    lines = [
        "two three [MASK] five six seven eight.",
        "three [MASK]",
        "one two. ||| three four [MASK] six.",
        "one\ttwo",
    ]
    together = list(predictor.predict(lines, FillMaskOptions(n_best=3)))
    for number, (prediction, line) in enumerate(zip(together, lines, strict=True)):
        alone = predictor.fill(line, 3)
        assert prediction.index == number
        assert [[word for word, _ in candidates] for candidates in prediction.mask_predictions] == [
            [w for w, _ in s] for s in alone.mask_predictions
        ]
        assert prediction.next_sentence_probability == pytest.approx(alone.next_sentence_probability, abs=1e-5)
    assert [prediction.next_sentence_probability is None for prediction in together] == [True, True, False, False]
    assert [len(prediction.mask_predictions) for prediction in together] == [1, 1, 1, 0]


def test_output_lines(learned: Run) -> None:
    predictor = load_predictor(learned, "cpu")
    prediction = predictor.fill("one two. ||| three [MASK] five.", 2)
    (line,) = prediction.to_lines(n_best=True)
    following, words = line.split("\t")
    assert following.startswith(("next 0.", "next 1.", "not next 0.", "not next 1."))
    assert [word.split()[0] for word in words.split(", ")] == [word for word, _ in prediction.mask_predictions[0]]
    (line,) = prediction.to_lines(as_json=True)
    content = json.loads(line)
    assert (content["next_sentence_probability"], content["mask_predictions"][0][0]["word"]) == (
        prediction.next_sentence_probability,
        prediction.mask_predictions[0][0][0],
    )


def test_invalid_lines_and_options(learned: Run, tmp_path: Path) -> None:
    predictor = load_predictor(learned, "cpu")
    with pytest.raises(InputError, match=r"line 2 has no mask: write \[MASK\]"):
        list(predictor.predict(["one [MASK]", "one two"], FillMaskOptions()))
    with pytest.raises(InputError, match=r"line 1 has 67 tokens.*64 at most"):
        predictor.fill("[MASK] " * 65)
    with pytest.raises(InputError, match="3 texts"):
        predictor.fill("one ||| two ||| [MASK]")
    with pytest.raises(InputError, match="only translations"):
        list(predictor.fill("[MASK]").to_lines(alignments=True))
    with pytest.raises(InputError, match="--beam-size: this model fills masks"):
        FillMaskOptions.from_command_line(beam_size=4)
    with pytest.raises(InputError, match="can be exported to hf"):
        predictor.export("onnx", tmp_path)
    with pytest.raises(InputError, match="test or valid"):
        evaluate(predictor, "train", FillMaskOptions(), QUIET)


def test_attention_figures_and_viewer_data(learned: Run, tmp_path: Path) -> None:
    predictor = load_predictor(learned, "cpu")
    prediction = predictor.fill("one [MASK] three")
    assert predictor.draw_attention(prediction, tmp_path / "map.png").stat().st_size > 1000
    (view,) = predictor.build_viewer_data("one two", "three")
    assert len(view.layers) == 2
    assert list(view.layers[0].row_labels) == ["[CLS]", "one", "two", "[SEP]", "three", "[SEP]"]
    (same,) = predictor.build_viewer_data("one two ||| three")
    assert list(same.layers[0].row_labels) == list(view.layers[0].row_labels)
    with pytest.raises(InputError, match="tokens, and this model takes"):
        predictor.build_viewer_data("one " * 1000)
    batch = predictor._build_batch(
        [predictor._encode_masked_line(0, "one [MASK] three"), predictor._encode_masked_line(0, "[MASK]")]
    )
    first, second = compute_attention_maps(predictor.model.bert, batch)
    assert first.shape == second.shape == (2, 2, 5, 5)
    assert torch.allclose(first.sum(-1)[1, :, :3], torch.ones(2, 3))
    assert (first[1, :, :, 3:] == 0).all()


def test_comparison_needs_the_same_masking(learned: Run, data_sets: Path, tmp_path: Path) -> None:
    settings = [f"tokenizer.pretrained={learned.folder}", "train.max_steps=1", "train.warmup_steps=0"]
    other = small(tmp_path / "other", data_sets, *settings, "masking.sequence_length=16")
    train(build_task(other), QUIET)
    compare([learned, other], "test", FillMaskOptions(), tmp_path / "out", "cpu", QUIET)
    results = json.loads((tmp_path / "out" / "test.json").read_text())
    assert [result["name"] for result in results] == [str(learned.folder), str(other.folder)]
    assert results[0]["loss"] < results[1]["loss"]
    third = small(tmp_path / "third", data_sets, *settings, "masking.sequence_length=24")
    train(build_task(third), QUIET)
    with pytest.raises(InputError, match="has other test masking"):
        compare([learned, third], "test", FillMaskOptions(), tmp_path / "out", "cpu", QUIET)


def test_commands(learned: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def output(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["jumok", *words])
        with pytest.raises(SystemExit) as ended:
            cli_app.main()
        assert not ended.value.code
        return capsys.readouterr().out

    folder = str(learned.folder)
    assert output("run", folder, "two three four [MASK] six seven.", "--device", "cpu").startswith("five 0.")
    assert json.loads(output("run", folder, "[MASK]", "--json", "--n-best", "2"))["mask_predictions"][0][1]["word"]
    assert "accuracy, next sentence" in output("eval", folder, "--split", "valid", "--device", "cpu")


# ------------------------------------------------------------------------------------ errors and other data


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["masking.sequence_length=65"], "masking.sequence_length=65 is more than model.max_positions=64"),
        (["model.pooler=false"], "a pooler"),
        (["train.batch_tokens=50"], r"train.batch_tokens=50"),
        (["tokenizer.vocab_size=5"], "size=5"),
        (["masking.mask_probability=2"], "mask_probability=2"),
        (["data.held_out_size=0"], "held_out_size=0"),
    ],
)
def test_contradicting_settings(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe.load("bert", [*SMALL, *overrides])


def test_training_without_text_is_an_error(tmp_path: Path) -> None:
    run = Run.create_or_resume(tmp_path / "run", recipe.load("bert", SMALL))
    with pytest.raises(InputError, match=r"data\.train=my\.txt"):
        train(build_task(run), QUIET)


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text(make_text(count=3))
    run = Run.create_or_resume(tmp_path / "run", recipe.load("bert", [*SMALL, f"data.train={tmp_path / 'few.txt'}"]))
    with pytest.raises(InputError, match=r"set data\.valid"):
        train(build_task(run), QUIET)


def test_pretraining_continues_with_other_text(learned: Run, data_sets: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(make_text(count=100, seed=2))
    sizes = ["model.width=64", "model.feed_forward_width=128", "masking.sequence_length=16"]
    settings = [*sizes, f"pretrained={learned.folder}", f"data.train={tmp_path / 'other.txt'}", "data.held_out_size=10"]
    run = small(
        tmp_path / "on", data_sets, *settings, "train.learning_rate=1e-12", "train.max_steps=2", "train.warmup_steps=1"
    )
    train(build_task(run), QUIET)
    before, after = load_predictor(learned, "cpu"), load_predictor(run, "cpu")
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    for name, weight in before.model.state_dict().items():  # those of the heads, too
        torch.testing.assert_close(after.model.state_dict()[name], weight, atol=1e-6, rtol=0)
    other = small(tmp_path / "other", data_sets, f"pretrained={learned.folder}")
    with pytest.raises(InputError, match=r"width=16.*width=64.*give model: its sizes"):
        train(build_task(other), QUIET)


def test_a_pretrained_embedding_may_have_more_rows_than_tokens(learned: Run, data_sets: Path, tmp_path: Path) -> None:
    before = load_predictor(learned, "cpu")
    model, pieces = before.model, before.tokenizer
    rounded = -(-pieces.vocab_size // 64) * 64
    assert rounded > pieces.vocab_size
    larger = BertPretrainingModel(model.bert.config, rounded)
    larger.load_state_dict(
        {
            name: nn.functional.pad(weight, (0, 0) * (weight.dim() - 1) + (0, rounded - pieces.vocab_size))
            if weight.shape[0] == pieces.vocab_size
            else weight
            for name, weight in model.state_dict().items()
        }
    )
    export_bert(larger, pieces, tmp_path / "hf")
    (tmp_path / "other.txt").write_text(make_text(count=100, seed=2))
    settings = [
        "model.width=64",
        "model.feed_forward_width=128",
        "masking.sequence_length=16",
        f"pretrained={tmp_path / 'hf'}",
    ]
    settings += [f"data.train={tmp_path / 'other.txt'}", "data.held_out_size=10", "train.learning_rate=1e-12"]
    run = small(tmp_path / "on", data_sets, *settings, "train.max_steps=2", "train.warmup_steps=1")
    train(build_task(run), QUIET)
    after = load_predictor(run, "cpu")
    assert after.model.bert.word_embedding.num_embeddings == rounded
    for name, weight in larger.state_dict().items():
        torch.testing.assert_close(after.model.state_dict()[name], weight, atol=1e-6, rtol=0)
    assert len(after.fill("one [MASK] three", n_best=10**6).mask_predictions[0]) == pieces.vocab_size


def is_packed(chosen: Any, device: torch.device) -> bool:
    length = chosen.masking.sequence_length
    return resolve_packing(chosen.data.packing, chosen.model, length, chosen.train, device)


def test_auto_packing_needs_a_gpu_and_half_precision(
    data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = small(tmp_path / "run", data_sets).recipe
    assert not is_packed(chosen, torch.device("cpu"))
    other = recipe.load("bert", [*SMALL, "train.precision=float32"])
    scaled = recipe.load("bert", [*SMALL, "train.precision=fp16"])
    gpu = torch.device("cuda")
    for pretended, packed in ((GPUProperties((9, 0), 232_448), True), (GPUProperties((7, 5), 65_536), False)):
        monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device, properties=pretended: properties)
        assert is_packed(chosen, gpu) is packed
        assert is_packed(scaled, gpu) is packed
        assert not is_packed(other, gpu)


def test_packed_and_padded_training(data_sets: Path, tmp_path: Path) -> None:
    losses = []
    for packed in ("true", "false"):
        run = small(tmp_path / packed, data_sets, f"data.packing={packed}", "train.max_steps=1", "train.warmup_steps=0",
                    "train.batch_tokens=65536", "model.dropout=0")  # fmt: skip
        train(build_task(run), QUIET)
        losses.append(metrics(run)[0]["loss"])
    assert DocumentStore.open(run.folder / "data" / "train").skipped.total == 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # a single batch
