"""Translation: every recipe, data, training, prediction and comparison."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from translation_runs import small_recipe, train_run

import jumok
from jumok import InputError, recipe
from jumok.attention import gpu_support
from jumok.attention.gpu_support import GPUProperties
from jumok.batches.tokens import EOS
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.metrics.translation import TranslationScore
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.comparison import compare
from jumok.tasks.evaluation import evaluate
from jumok.tasks.translate import metrics as translate_metrics
from jumok.tasks.translate.config import BUILTIN_CORPUS, TranslationDataConfig, TranslationDecodeConfig
from jumok.tasks.translate.data import TranslationData
from jumok.tasks.translate.predictor import TranslationOptions
from jumok.tasks.translate.task import TranslationTask
from jumok.tasks.translate.word_alignment import WordAligner
from jumok.training import cuda_graphs

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)


TRANSLATING = [name for name, path in recipe.list_builtin().items() if recipe.read(path)["task"] == "translate"]


@pytest.mark.parametrize("name", TRANSLATING)
def test_every_recipe_trains_and_is_evaluated(
    name: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    run = train_run(tmp_path / "run", name)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if line["event"] != "alarm"]  # attention alarms of an untrained model
    assert events == ["train", "train", "train", "validation"]
    translator = jumok.load(run.folder, "cpu")
    evaluation = evaluate(translator, "test", TranslationOptions(beam_size=2), QUIET)
    stored = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored["bleu"]["value"] == evaluation.metrics["bleu"]["value"]
    count = len(translator.data.test_split().examples) if "hansards" in name else 11  # held out of the training data
    assert stored["num_examples"] == count > 0
    assert len((run.folder / "eval" / "test.txt").read_text(encoding="utf-8").splitlines()) == count
    assert ("bleu_moses" in stored) == ("multi30k" in name)
    has_gold = run.recipe.data.train == BUILTIN_CORPUS or "europarl" in name or "hansards" in name
    assert ("alignment" in stored) == (has_gold and not name.startswith("fixed"))
    assert (run.folder / "figures" / "test-by-length.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------- prediction


def test_batching_keeps_order_and_empty_lines(bahdanau: Run) -> None:
    translator = load_predictor(bahdanau, "cpu")
    lines = ["we walk", "", "the king sleeps because it snows in busan", "we walk", "  ", "i run"]
    together = list(translator.predict(lines, TranslationOptions()))
    alone = [translator.translate(line) for line in lines]
    one_at_a_time = [
        next(translator.predict([line], TranslationOptions(), first_index=n)) for n, line in enumerate(lines)
    ]
    assert (
        [prediction.translation for prediction in together]
        == [prediction.translation for prediction in alone]
        == [prediction.translation for prediction in one_at_a_time]
    )
    assert [prediction.index for prediction in together] == list(range(6))
    assert together[1].translation == together[4].translation == ""
    assert translator.translate(" we walk ").translation == together[0].translation
    assert together[0].translation == together[3].translation


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_attention_belongs_to_the_best_hypothesis(name: str, request: pytest.FixtureRequest) -> None:
    translator = load_predictor(request.getfixturevalue(name), "cpu")
    for prediction in translator.predict(
        ["we walk to the market", "i run"], TranslationOptions(beam_size=3), with_attention=True
    ):
        assert prediction.attention is not None
        assert prediction.attention.shape == (len(prediction.target_words), len(prediction.source_words))
        assert prediction.alignment == sorted((int(row.argmax()), n) for n, row in enumerate(prediction.attention))
        # Compute the same map from the translation: the layer before the last, averaged over heads.
        maps, batch = translator.compute_attention_maps(
            [TranslationExample(prediction.input, " ".join(prediction.target_words), "")]
        )
        layer = maps[max(0, len(maps) - 2)].weights[0].mean(0)
        assert layer.shape == (batch.target.lengths[0], batch.source.lengths[0])
        assert float(prediction.attention.sum()) <= len(prediction.target_words) + 1e-4


def test_links_of_reference_translations(bahdanau: Run) -> None:
    translator = load_predictor(bahdanau, "cpu")
    pairs = [TranslationExample("we walk", "우리는 걷는다", ""), TranslationExample("i run", "나는 달린다", "")]
    aligner = WordAligner(translator)
    links = [links.links for links in aligner.align(pairs, aligner.select_views(pairs))]
    assert [sorted(target for _, target in links) for links in links] == [[0, 1], [0, 1]]
    assert all(0 <= source < 2 for links in links for source, _ in links)


def test_beam_search_and_sampling(bahdanau: Run) -> None:
    translator = load_predictor(bahdanau, "cpu")
    [best] = translator.predict(["we walk to the market"], TranslationOptions(beam_size=4, n_best=3))
    scores = [best.score, *(other.score for other in best.alternatives)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    samples = [translator.translate("we walk", TranslationOptions(sample=True, seed=5)).translation for _ in range(2)]
    assert samples[0] == samples[1]
    assert (
        len({translator.translate("we walk", TranslationOptions(sample=True, seed=n)).translation for n in range(5)})
        > 1
    )


def test_the_coverage_penalty_changes_scores(bahdanau: Run) -> None:
    plain = load_predictor(bahdanau, "cpu")
    covering = load_predictor(bahdanau, "cpu")
    covering.decode_config = TranslationDecodeConfig(coverage_penalty=5.0)
    for translator in (plain, covering):  # otherwise the untrained model hardly predicts EOS
        translator.model.generator.bias.data[EOS] += 4
    search = TranslationOptions(beam_size=4, n_best=4)
    prediction, other = (t.translate("we walk to the market", search, with_attention=False) for t in (plain, covering))
    assert other.score < prediction.score  # coverage is below 0 unless every word is covered


def test_output_lines(bahdanau: Run) -> None:
    translator = load_predictor(bahdanau, "cpu")
    prediction = translator.translate("we walk", TranslationOptions(beam_size=2, n_best=2))
    pharaoh = " ".join(f"{i}-{j}" for i, j in prediction.alignment or [])
    assert next(prediction.to_lines(alignments=True)) == f"{prediction.translation} ||| {pharaoh}"
    numbered = list(prediction.to_lines(n_best=True))
    assert numbered[0] == f"0 ||| {prediction.translation} ||| {prediction.score:.4f}"
    assert len(numbered) == 2
    content = json.loads(next(prediction.to_lines(as_json=True)))
    assert content["translation"] == prediction.translation
    assert content["source_words"] == ["we", "walk"]
    assert content["alignment"] == [list(link) for link in prediction.alignment or []]


# -------------------------------------------------------------------------------------------------- data


def write_pairs(path: Path, count: int = 60) -> None:
    rows = [f"{'word ' * (n % 7 + 1)}{n}\t{'wort ' * (n % 5 + 1)}{n}" for n in range(count)]
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def test_held_out_splits_are_disjoint(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv", 400)
    texts = TranslationData(TranslationDataConfig(train=str(tmp_path / "my.tsv"), held_out_size=20), tmp_path / "run")
    train = {pair.source for pair in texts.train_corpus()}
    valid, test = ({pair.source for pair in split.examples} for split in (texts.valid_split(), texts.test_split()))
    assert len(train) + len(valid) + len(test) == 400
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert 5 <= len(valid) <= 45
    again = TranslationData(TranslationDataConfig(train=str(tmp_path / "my.tsv"), held_out_size=20), tmp_path / "run")
    assert {pair.source for pair in again.train_corpus()} == train
    assert {pair.source for pair in again.test_split().examples} == test


def test_a_test_set_does_not_change_the_validation_data(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv", 200)
    write_pairs(tmp_path / "test.tsv", 9)
    config = TranslationDataConfig(train=str(tmp_path / "my.tsv"), test=str(tmp_path / "test.tsv"), held_out_size=20)
    texts = TranslationData(config, tmp_path / "run")
    assert len(list(texts.train_corpus())) + len(texts.valid_split().examples) == 200
    data_without_test = TranslationData(
        TranslationDataConfig(train=str(tmp_path / "my.tsv"), held_out_size=20), tmp_path / "both"
    )
    data_without_test.train_corpus()
    expected, actual = ([(p.source, p.target) for p in t.valid_split().examples] for t in (data_without_test, texts))
    assert expected == actual  # a test set makes no difference
    assert len(texts.test_split().examples) == 9


def test_neighbouring_pairs_are_also_concatenated(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv", 7)
    config = TranslationDataConfig(train=str(tmp_path / "my.tsv"), valid="x.tsv", test="x.tsv")
    plain = list(TranslationData(config, tmp_path).train_corpus())
    joined = TranslationData(replace(config, max_concatenated_pairs=3), tmp_path).train_corpus()
    pairs = list(joined)
    assert [pair for pair in pairs if pair in plain] == plain
    assert len(pairs) == 7 + 3 + 2  # three concatenations of two pairs, and two of three
    longest = [pair for pair in pairs if len(pair.source.split()) == sum(len(x.source.split()) for x in plain[3:6])]
    assert [pair.target for pair in longest] == [" ".join(x.target for x in plain[3:6])]
    assert joined.fingerprint != TranslationData(config, tmp_path).train_corpus().fingerprint
    assert (
        len(
            list(
                TranslationData(
                    TranslationDataConfig(builtin_size=10, held_out_size=3, max_concatenated_pairs=2), tmp_path
                ).train_corpus()
            )
        )
        == 15
    )


def test_preprocessing_is_applied_to_every_split(tmp_path: Path) -> None:
    (tmp_path / "my.tsv").write_text("en\tfr\n" + "Let's go.\tAllons-y du côté d'ici.\n" * 3)
    named = dict.fromkeys(("train", "valid", "test"), str(tmp_path / "my.tsv"))
    texts = TranslationData(
        TranslationDataConfig(**named, source="en", target="fr", preprocessing="expand-contractions"), tmp_path
    )
    for pair in (next(iter(texts.train_corpus())), texts.valid_split().examples[0], texts.test_split().examples[0]):
        assert (pair.source, pair.target) == ("let us go .", "allons - y de le cote de ici .")
    assert texts.preprocess("L'été", "target") == "le ete"
    assert texts.postprocess("le ete") == "le ete"


def test_training_on_a_table(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv")
    run = train_run(tmp_path / "run", "bahdanau", f"data.train={tmp_path / 'my.tsv'}", "data.held_out_size=5")
    assert isinstance(load_predictor(run, "cpu").translate("word 3").translation, str)


def test_too_little_data_is_an_error(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv", 2)
    texts = TranslationData(TranslationDataConfig(train=str(tmp_path / "my.tsv")), tmp_path / "run")
    with pytest.raises(InputError, match="too little training data"):
        texts.train_corpus()


def test_embeddings_are_initialized_from_word_vectors(tmp_path: Path) -> None:
    (tmp_path / "words.vec").write_text("1 8\nking " + " ".join(["0.5"] * 8) + "\n", encoding="utf-8")
    run = Run.create_or_resume(
        tmp_path / "run",
        small_recipe(
            "bahdanau", "tokenizer.type=words", f"word_vectors.source={tmp_path / 'words.vec'}", "data.builtin_size=900"
        ),
    )
    task = TranslationTask(run)
    task.prepare(QUIET)
    model, tokenizers = task.build_model()
    [message] = task.init_weights(model, tokenizers)
    assert message.endswith(f"source words are initialized from {tmp_path / 'words.vec'}")
    [king] = tokenizers.source.encode(["king"])[0]
    assert torch.equal(model.source_embedding.weight[king], torch.full((8,), 0.5))


# ---------------------------------------------------------------------------------- resuming, comparison


def test_resumed_training_gives_identical_weights(tmp_path: Path) -> None:
    whole = train_run(tmp_path / "whole", "bahdanau", "train.max_steps=6", "train.save_every=1")
    train_run(tmp_path / "broken", "bahdanau", "train.max_steps=2", "train.save_every=1")
    broken = train_run(tmp_path / "broken", "bahdanau", "train.max_steps=6", "train.save_every=1")
    states = [sorted((run.folder / "state" / "00000006").glob("*.safetensors")) for run in (whole, broken)]
    assert len(states[0]) == len(states[1]) == 2  # the model's weights and the optimizer's numbers
    for whole_file, resumed_file in zip(*states, strict=True):
        assert whole_file.read_bytes() == resumed_file.read_bytes()


@pytest.mark.parametrize("name", ["bahdanau", "convolutional", "transformer"])
def test_training_resumes_on_another_device_with_the_same_batches(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as gpu:
        gpu.setattr(cuda_graphs, "should_use_cuda_graphs", lambda *_: True)
        gpu.setattr(TranslationTask, "_use_packing", lambda *_: name == "transformer")
        whole = train_run(tmp_path / "whole", name)
        train_run(tmp_path / "parts", name, "train.max_steps=2")
    parts = train_run(tmp_path / "parts", name)
    plain = train_run(tmp_path / "plain", name)
    weights_of_runs = [
        load_file(run.folder / "state" / "00000003" / "model.safetensors") for run in (whole, parts, plain)
    ]
    for key, weight in weights_of_runs[0].items():
        torch.testing.assert_close(weights_of_runs[1][key], weight)
    assert not all(torch.allclose(weights_of_runs[2][key], weight) for key, weight in weights_of_runs[0].items())


def test_signatures_are_not_wrapped(data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    run = train_run(tmp_path / "run", next(name for name in TRANSLATING if "multi30k" in name))
    file = io.StringIO()
    narrow = Console(file=file, force_terminal=True, color_system=None, width=40)
    evaluation = evaluate(load_predictor(run, "cpu"), "test", TranslationOptions(beam_size=1), narrow)
    lines = file.getvalue().splitlines()
    for metric in ("bleu", "chrf", "bleu_moses"):
        assert sum(line.endswith(f": {evaluation.metrics[metric]['signature']}") for line in lines) == 1


def test_perplexity_decides_while_bleu_is_at_chance_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nought:
        def score(self, translations: list[str], references: list[str]) -> TranslationScore:
            return TranslationScore("BLEU", next(by_chance), "")

    by_chance = iter([0.25, 0.0, 0.125])
    monkeypatch.setattr(translate_metrics, "build_bleu", lambda run: Nought())
    run = train_run(tmp_path / "run", "bahdanau", "train.max_steps=6", "train.validate_every=2", "train.patience=1")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    validations = [(line["perplexity"], line["is_best"]) for line in lines if line["event"] == "validation"]
    assert [best for _, best in validations] == [True, True, True]
    assert validations == sorted(validations, reverse=True)


def test_comparison_of_runs(bahdanau: Run, transformer: Run, tmp_path: Path) -> None:
    compare([bahdanau, transformer], "test", TranslationOptions(beam_size=1), tmp_path / "out", "cpu", QUIET)
    results = json.loads((tmp_path / "out" / "test.json").read_text(encoding="utf-8"))
    assert [result["name"] for result in results] == [str(bahdanau.folder), str(transformer.folder)]
    assert results[0]["p_value"] is None
    assert 0 <= results[1]["p_value"] <= 1
    assert (tmp_path / "out" / "test-by-length.png").stat().st_size > 1000


def test_comparison_needs_the_same_data(bahdanau: Run, tmp_path: Path) -> None:
    other = train_run(tmp_path / "run", "bahdanau", "data.held_out_size=12")
    with pytest.raises(InputError, match="has other test sentences"):
        compare([bahdanau, other], "test", TranslationOptions(), tmp_path / "out", "cpu", QUIET)


def test_comparison_needs_different_runs(bahdanau: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="twice"):
        compare([bahdanau, bahdanau], "test", TranslationOptions(), tmp_path / "out", "cpu", QUIET)


def test_changed_data_is_an_error(tmp_path: Path) -> None:
    write_pairs(tmp_path / "my.tsv")
    settings = (f"data.train={tmp_path / 'my.tsv'}", "data.held_out_size=5")
    train_run(tmp_path / "run", "bahdanau", *settings)
    write_pairs(tmp_path / "my.tsv", 90)
    with pytest.raises(InputError, match="the data has changed"):
        train_run(tmp_path / "run", "bahdanau", *settings, "train.max_steps=5")


def test_a_line_longer_than_the_learned_positions_is_an_error(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", "convolutional", "model.max_positions=200")
    translator = load_predictor(run, "cpu")
    with pytest.raises(InputError, match=r"line 2 has 2\d\d tokens.*199 at most"):
        list(translator.predict(["we walk", "x" * 211], TranslationOptions()))
    for prediction in translator.predict(["we walk to the market and run " * 5], TranslationOptions()):
        assert len(prediction.translation) < 1000  # its 2 n + 20 tokens would be more than there are positions


def test_every_hypothesis_has_an_alignment(bahdanau: Run) -> None:
    best = load_predictor(bahdanau, "cpu").translate("we walk", TranslationOptions(beam_size=3, n_best=3))
    for prediction in (best, *best.alternatives):
        assert prediction.alignment is not None
        assert [target for _, target in sorted(prediction.alignment, key=lambda link: link[1])] == list(
            range(len(prediction.target_words))
        )


def test_invalid_uses_of_a_run(bahdanau: Run, tmp_path: Path) -> None:
    translator = load_predictor(bahdanau, "cpu")
    with pytest.raises(InputError, match="test or valid"):
        evaluate(translator, "tset", TranslationOptions(), QUIET)
    with pytest.raises(InputError, match="hf"):
        translator.export("tflite", tmp_path / "out")
    with pytest.raises(InputError, match="cannot be used here"):
        load_predictor(bahdanau, "cuda:77")
    moved = tmp_path / "moved"
    shutil.copytree(bahdanau.folder, moved)
    (moved / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors yet"):
        jumok.load(moved)


def test_a_fixed_context_has_no_alignment(tmp_path: Path) -> None:
    translator = load_predictor(train_run(tmp_path / "run", "fixed"), "cpu")
    prediction = translator.translate("we walk")
    assert prediction.alignment is None
    with pytest.raises(InputError, match="no attention"):
        translator.draw_attention(prediction, tmp_path / "map.png")


def test_packing_needs_a_transformer(tmp_path: Path) -> None:
    train_run(tmp_path / "packed", "transformer", "data.packing=true")
    with pytest.raises(InputError, match="padded"):
        train_run(tmp_path / "run", "bahdanau", "data.packing=true")


@pytest.mark.parametrize(
    ("changed", "packed"),
    [
        ([], True),
        (["train.precision=float32"], False),
        (["model.attention_dropout=0.1"], False),  # of up to 256 tokens
        (["model.attention_dropout=0.1", "data.max_tokens=127"], True),
        (["model.attention_dropout=0.1", "data.max_tokens=128"], False),  # and EOS
        (["model.attention_dropout=0.1", "data.max_tokens=127", "model.width=10"], False),  # heads of width 5
        (["model.attention_dropout=0.1", "data.packing=true"], True),
    ],
)
def test_auto_packing(changed: list[str], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="dropout is fast with Triton")
    monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device: GPUProperties((9, 0), 232_448))
    run = Run(Path("runs/none"), small_recipe("transformer", "model.width=16", *changed))
    assert TranslationTask(run)._use_packing(torch.device("cuda")) is packed
