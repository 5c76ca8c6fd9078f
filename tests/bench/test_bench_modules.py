"""Parts of the benchmarks: reports, reference networks, random data."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok import recipe
from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import BOS, EOS, IGNORE, PAD, Seq2SeqBatch
from jumok.data.batching.documents import DocumentBatcher
from jumok.look.capture.captures import CapturedLayer
from jumok.models.bert import BertConfig, BertPretrainingModel
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jumok.models.tacotron import Tacotron

pytestmark = pytest.mark.long


Bench = Callable[[str], Any]
CPU = torch.device("cpu")
DOCUMENTS = [[[4, 9, 5], [7]], [[10, 6, 8, 8, 21, 4, 5]], [[5, 5], [20, 13, 11, 4], [9], [6, 7]]]


def fail() -> None:
    raise RuntimeError("out of memory\nand more")


# ------------------------------------------------------------------------------------------------ reports


def test_a_failure_is_reported_in_its_place_and_the_rest_goes_on(bench: Bench, tmp_path: Path) -> None:
    report = bench("report").Report("test", CPU, repeats=2)
    report.out = tmp_path / "deep" / "test.json"
    row = report.row("section", "case", "forward")
    report.measure(row, "broken", fail)
    report.measure(row, "fine", lambda: torch.ones(3) + 1)
    report.note(row, errors={"ours": {"out": math.nan}})
    text = report.out.read_text(encoding="utf-8")
    (saved,) = json.loads(text, parse_constant=lambda name: pytest.fail(name))["rows"]
    assert saved["implementations"]["broken"] == {"error": "RuntimeError: out of memory"}
    assert saved["implementations"]["fine"]["repeats"] == 2
    assert saved["errors"]["ours"]["out"] == "nan"
    report.seconds = 0
    result = report.measure(report.row("section", "case"), "late", lambda: pytest.fail("was run"))
    assert result == {"error": "skipped, the time limit was reached"}


def test_a_training_run_that_fails_or_is_late_is_reported(bench: Bench) -> None:
    training_runs = bench("training_runs")
    report = training_runs.Report("test", CPU)
    row = report.row("pretraining", "case", tokens=1)
    training_runs.measure_implementation(
        report, row, training_runs.Implementation("broken", fail), "tokens", "tokens_s"
    )
    report.seconds = 0.0
    late = training_runs.Implementation("late", lambda: training_runs.TrainingRun(lambda: pytest.fail("was run")))
    training_runs.measure_implementation(report, row, late, "tokens", "tokens_s")
    assert row["implementations"]["broken"] == {"error": "RuntimeError: out of memory"}
    assert row["implementations"]["late"]["error"].startswith("skipped")


def test_numbers_have_three_significant_digits(bench: Bench) -> None:
    number = bench("report").number
    texts = [number(x) for x in (0.064231, 1.0, 0.99996, 12.345, 123.4, 6148.2, 3.2e-7, 0.0, None, math.nan)]
    assert texts == ["0.0642", "1.00", "1.00", "12.3", "123", "6,148", "3.2e-07", "0", "–", "nan"]


def test_ways_are_called_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    bert = bench("bert")
    seconds = iter([9.0, 9.0, 1.0, 2.0, 1.0, 4.0, 2.0, 6.0])  # a first call of each, then three turns
    monkeypatch.setattr(bert.r, "time_call", lambda run: (run(), next(seconds))[1])
    called: list[str] = []
    runs = {name: lambda name=name: called.append(name) for name in ("ours", "transformers")}
    report = bert.Report("test", CPU)
    row = report.row("inference", "case", tokens=100)
    bert.measure_in_turns(report, row, runs, 3)
    assert called == ["ours", "transformers"] * 4
    assert row["implementations"]["ours"]["ms"] == 1000
    assert row["implementations"]["transformers"]["tokens_s"] == 25
    assert (row["in_turn"], row["best"]) == (3, 2)  # 2, 4, 3; and 2 / 1
    late = report.row("inference", "late", tokens=100)
    report.seconds = 0.0
    bert.measure_in_turns(report, late, runs, 3)
    assert late["implementations"]["ours"]["error"].startswith("skipped")


def test_the_most_important_ways_are_measured_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    bert = bench("bert")
    order: list[tuple[str, str]] = []
    monkeypatch.setattr(bert, "measure", lambda report, row, result: order.append((row["pass"][-3:], result.name)))
    bert.pretraining(bert.Report("test", CPU), bert.Settings(CPU, quick=True, compile=True))
    first = ["ours", "transformers, compiled", "transformers"]
    assert order[:6] == [(share, name) for share in ("0.1", "0.0") for name in first]
    assert order[6:] == [(share, name) for share in ("0.1", "0.0") for name in ("ours, padded", "ours, eager")]


# ---------------------------------------------------------------------------------------------- attention


def test_the_tanh_floor_of_an_h200(bench: Bench) -> None:
    attention = bench("attention")
    report = bench("report").Report("test", CPU)
    assert attention.tanh_floor(report, 32 * 128 * 128 * 512, 1) is None
    report.head["machine"] |= {"multiprocessors": 132, "sm_mhz": 1980.0}
    assert attention.tanh_floor(report, 32 * 128 * 128 * 512, 1) == pytest.approx(0.0642, abs=1e-4)


def test_the_float64_reference_is_the_same_in_chunks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = bench("attention")
    settings = attention.AttentionSettings(CPU, quick=True)
    score = settings.build_score(7, 7, 5)
    leaves = [settings.random(2, n, 7) for n in (11, 3, 3)]
    leaves += [score.query.weight, score.key.weight, score.v]
    upstream = settings.random(2, 11, 7, grad=False)
    whole = attention.additive_in_float64(leaves, upstream)
    monkeypatch.setattr(attention, "MAX_ELEMENTS", 4 * 3 * 5)  # four rows at a time
    for x, y in zip(attention.additive_in_float64(leaves, upstream), whole, strict=True):
        torch.testing.assert_close(x, y)


def test_the_check_of_maps_finds_a_wrong_map(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    look = bench("look")
    layer = look.Layer(*torch.randn(3, 1, 2, 31, 8).unbind(), causal=True)
    compute = look.statistics.compute_pooled_map
    assert look.compute_errors(layer, layer.capture(None), 7)["worst_cell"] < 1e-5
    monkeypatch.setattr(look.statistics, "compute_pooled_map", lambda *args, **more: compute(*args, **more).flip(-1))
    assert look.compute_errors(layer, layer.capture(None), 7)["worst_cell"] > 0.1
    for tokens in (1, 2, 131072):
        for sides in look.draw_rectangles(tokens):
            assert all(0 <= start < end <= tokens for start, end in sides)


def test_coverage_finds_wrong_silent_and_changed_models(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5")
    coverage = bench("watch_coverage")
    assert coverage.check_case("transformers", "gpt2")["verdict"] == "right"
    with monkeypatch.context() as patch:
        weights = CapturedLayer.weights
        patch.setattr(CapturedLayer, "weights", lambda layer: weights(layer).flip(1))  # its heads
        assert coverage.check_case("transformers", "gpt2")["verdict"] == "wrong"
    with monkeypatch.context() as patch:
        patch.setattr(coverage, "watch", functools.partial(coverage.watch, layers="h.0.*"))
        assert coverage.check_case("transformers", "gpt2")["verdict"] == "silent"
    with monkeypatch.context() as patch:
        patch.setattr(coverage, "is_equal", lambda before, after: False)
        assert coverage.check_case("transformers", "gpt2")["verdict"] == "output changed"


def test_inputs_for_coverage_follow_the_documentation_and_the_errors_of_models(bench: Bench) -> None:
    pytest.importorskip("transformers", minversion="5")
    tiny_inputs = bench("tiny_inputs")
    doc = """
        Args:
            pixel_values (`torch.FloatTensor` of shape `(batch_size, 3, height, width)`):
                Images.
            freq (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
                Frequencies.
            context (`torch.Tensor`):
    """
    assert tiny_inputs.find_documented_shapes(doc) == {
        "pixel_values": ("`torch.FloatTensor` ", ["batch_size", " 3", " height", " width"]),
        "freq": ("`torch.LongTensor` ", ["batch_size"]),
        "context": ("`torch.Tensor`", None),
    }
    library = bench("coverage_libraries").Transformers()
    llava = library.find_model("llava", [])
    num_patches = (32 // 8) ** 2
    assert llava.inputs["pixel_values"].shape == (2, 3, 32, 32)
    assert (llava.inputs["input_ids"] == llava.model.config.image_token_id).sum(-1).tolist() == [num_patches] * 2
    decoder = library.find_model("sam_mask_decoder", [])  # a part, with the inputs of the whole model
    assert decoder.title == "SamMaskDecoder of SamModel"


def test_the_oracle_of_coverage_computes_masked_and_grouped_attention(bench: Bench) -> None:
    pytest.importorskip("transformers", minversion="5")
    oracle = bench("attention_oracle")
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = torch.rand(5, 7) > 0.3
    mask[:, 0] = True
    for options in ({"attn_mask": mask}, {"is_causal": True}, {"attn_mask": torch.randn(5, 7), "scale": 0.2}):
        weights = oracle.compute_sdpa_weights(query, key, value, enable_gqa=True, **options)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), out)


# ------------------------------------------------------------------------------------------ translation


def test_random_lengths_are_uniform_and_correlated(bench: Bench) -> None:
    text = bench("random_text").Text(pairs=1000, shortest=8, longest=64, vocab_size=50)
    batches = text.draw(4)
    lengths = torch.tensor([[len(ids) + 1 for sides in batches for ids in sides[n]] for n in (0, 1)])
    assert (int(lengths.min()), int(lengths.max())) == (8, 64)
    torch.testing.assert_close(lengths.double().mean(1), torch.full((2,), 36.0).double(), atol=1, rtol=0)
    assert float(torch.corrcoef(lengths.double())[0, 1]) == pytest.approx(0.9, abs=0.02)
    sums = [sum(len(ids) for side in sides for ids in side) for sides in batches]
    assert max(sums) - min(sums) < 64  # batches of similar size
    words = torch.tensor([word for sides in batches for side in sides for ids in side for word in ids])
    assert (int(words.min()), int(words.max())) == (4, 49)
    assert text.draw(4) == batches


def test_the_usual_loop_is_the_same_model(bench: Bench) -> None:
    peers = bench("peer_models")
    ours = Seq2Seq(Seq2SeqConfig(width=6, embedding_width=5, dropout=0.0), 23, 29).double()
    loop = peers.Loop(ours).double()
    assert sum(p.numel() for p in loop.parameters()) == sum(p.numel() for p in ours.parameters())
    batch = Seq2SeqBatch.from_sequences([[5, 6, 7], [8, 9, 10]], [[11, 12], [13, 14]])
    loss, loop_loss = ours.loss(batch).total, loop.loss(batch, peers.Loop.step)
    torch.testing.assert_close(loss, loop_loss)
    loss.backward()
    loop_loss.backward()
    torch.testing.assert_close(loop.encoder.weight_ih_l0.grad, ours.encoder.weight_ih_l0.grad)
    torch.testing.assert_close(loop.query.weight.grad, ours.decoder.attention.score.query.weight.grad)
    torch.testing.assert_close(loop.generator.weight.grad, ours.generator.weight.grad)


def test_decoding_batches_outputs_and_differences(bench: Bench) -> None:
    decoding = bench("decoding")
    workload = decoding.Workload(None, [[7] * n for n in range(1, 12)])
    assert [batch.lengths for batch in workload.batches(4)] == [(2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)]
    assert [batch.lengths for batch in workload.batches(1, 3)] == [(3,), (7,), (11,)]
    assert len(workload.batches(100, 3)) == 1

    assert decoding.strip_special_tokens([5, 6, EOS, PAD, PAD], 9) == (5, 6)
    assert decoding.strip_special_tokens([5, 6, 7], 2) == (5, 6)  # cut off by the limit
    assert decoding.strip_special_tokens([EOS, BOS], 2) == ()

    compare = decoding.compare_translations
    assert compare([(1,), (2, 3)], [(1,), (2, 3)]) == {"equal": 1.0}
    result = compare([(1,), (2, 3, 4), (5,)], [(1,), (2, 9), (6,)])
    assert result["equal"] == pytest.approx(1 / 3)
    assert result["first"] == {"sentence": 1, "word": 1, "ours": (3, 4), "transformers": (9,)}
    assert compare([(1, 2)], [(1,)])["first"]["word"] == 1


# ------------------------------------------------------------------------------------------------- BERT


def test_random_texts_are_the_same_packed_padded_and_for_transformers(bench: Bench) -> None:
    pytest.importorskip("transformers")
    bert = bench("bert")
    first, second = bert.RandomTexts.draw(bert.Size(texts=8, shortest=8, longest=24, vocab_size=50), 2)
    assert sorted(first.lengths) == sorted(second.lengths) == [8 + n * 17 // 8 for n in range(8)]
    assert not np.array_equal(first.ids, second.ids)
    assert first.packed().graph_key == second.packed().graph_key
    assert first.padded().graph_key == second.padded().graph_key

    packed, padded = first.packed(), first.padded()
    counted = packed.labels != IGNORE
    assert int(counted.sum()) == padded.count == packed.count == sum(round(n * 0.15) for n in first.lengths)
    masked = [batch.tokens.ids.flatten()[batch.masked_indices] for batch in (packed, padded)]
    assert torch.equal(masked[0][counted], masked[1])
    inputs = bert.Inputs.from_batch(padded).named
    assert int((inputs["labels"] != IGNORE).sum()) == padded.count
    assert torch.equal(inputs["labels"].flatten()[padded.masked_indices], padded.labels)
    assert inputs["attention_mask"].sum(1).tolist() == first.lengths.tolist()
    for ids, length in zip(inputs["input_ids"].tolist(), first.lengths, strict=True):
        assert ids[0] == bert.CLS
        assert ids[length // 2] == ids[length - 1] == bert.SEP
        assert set(ids[length:]) <= {bert.PAD}
    config = BertConfig(width=8, num_heads=2, feed_forward_width=16, max_positions=128)
    model = BertPretrainingModel(config, 50).eval()
    torch.testing.assert_close(model.loss(packed).total, model.loss(padded).total)

    (texts,) = bert.RandomTexts.draw(bert.Size(texts=200, shortest=32, longest=128, vocab_size=300), 1)
    shown = texts.ids[texts.masked_indices]
    assert np.mean(shown == bert.MASK) == pytest.approx(0.8, abs=0.03)
    assert np.mean(shown == texts.labels) == pytest.approx(0.1, abs=0.03)
    assert texts.labels.min() > bert.MASK  # special tokens are never predicted
    assert np.mean(texts.lengths) == pytest.approx(80, abs=0.5)


def test_length_distributions_have_the_shares_of_real_tokens(bench: Bench) -> None:
    pytest.importorskip("transformers")
    mixes = bench("bert").length_distributions(128, 32)
    real = {name: float(lengths.sum()) / (32 * lengths.max()) for name, lengths in mixes.items()}
    assert [len(lengths) for lengths in mixes.values()] == [32] * 5
    assert real["32 to 128"] == pytest.approx(80 / 128, abs=0.02)
    assert real["one of 128, the rest of 16"] == (128 + 31 * 16) / (32 * 128)
    assert real["all of 64"] == 1
    assert real["112 to 128"] > 0.9
    assert 0.15 < real["as sentences are"] < 0.45


# ---------------------------------------------------------------------------------------- classification


@pytest.mark.parametrize("packed", [True, False], ids=["packed GRU", "padded GRU"])
def test_the_padded_network_is_the_same_model(bench: Bench, packed: bool) -> None:
    padded_network = bench("padded_network")
    ours = HierarchicalAttentionNetwork(HierarchicalConfig(embedding_width=7, width=3, attention_width=5), 23, 2).eval()
    if packed:  # any weights; those over padding are right while biases are zero
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    theirs = padded_network.PaddedNetwork.copy_of(ours, packed)
    shapes = [{name: x.shape for name, x in model.named_parameters()} for model in (theirs, ours)]
    assert shapes[0] == shapes[1]
    block = padded_network.Block.from_documents(DOCUMENTS, [1, 0, 1])
    assert block.ids.shape == (3, 4, 7)
    assert int((block.ids != PAD).sum()) == sum(len(s) for document in DOCUMENTS for s in document)
    batch = DocumentBatcher(DOCUMENTS, [1, 0, 1], max_tokens=100, seed=1).collate([0, 1, 2])
    torch.testing.assert_close(theirs(block), ours.logits(batch), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.loss(block), ours.loss(batch).total / 3)


def test_networks_with_different_outputs_are_not_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    classify = bench("classify")
    settings = classify.Settings(CPU, quick=True)
    texts = classify.load_reviews("train", 7)
    ours = classify.build_network(texts.vocab_size, settings)
    assert max(classify.check(settings, ours, texts).values()) < 1e-6
    network = classify.PaddedNetwork
    forward = network.forward
    monkeypatch.setattr(network, "forward", lambda self, block: forward(self, block) + 2e-5)
    with pytest.raises(RuntimeError, match="must be equal"):
        classify.check(settings, ours, texts)


def test_random_documents_and_the_costs_of_batches(bench: Bench) -> None:
    pytest.importorskip("sklearn")
    reviews = bench("reviews")
    texts = reviews.draw_random_reviews(5000, 300)
    words = [len(sentence) for document in texts.documents for sentence in document]
    assert np.mean([len(document) for document in texts.documents]) == pytest.approx(12, abs=1)  # IMDB: 12.1
    assert np.mean(words) == pytest.approx(22.5, abs=1)  # IMDB: 22.3
    assert np.quantile(words, 0.99) == pytest.approx(90, abs=20)  # IMDB: 77
    assert min(min(s) for document in texts.documents for s in document) == 4  # no special tokens
    assert max(max(s) for document in texts.documents for s in document) < texts.vocab_size == 300
    assert set(texts.labels) == {0, 1}

    few = reviews.Reviews("test", DOCUMENTS, [0, 1, 0], 30)
    assert few.num_words == [4, 7, 9]
    describe = bench("classify").describe_batches
    assert describe([[0, 2], [1]], few, "packed") == {"batches": 2, "steps": (4 + 4) + (7 + 1)}
    assert describe([[0, 2], [1]], few, "padded")["real"] == 20 / (2 * 4 * 4 + 7)


def test_tfidf_errors_and_the_task_of_a_run(bench: Bench, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    tfidf = bench("tfidf")
    shares = np.array([[0.5, 0.1, 0.4], [0.0, 0.0, 1.0]])
    errors = tfidf.errors(shares, np.array([1, 2, 10]), np.array([3, 10]))
    assert errors == {"mean_error": 1.0, "mean_error_of_mean": pytest.approx((0.7 + 4.0 - 3) / 2)}

    def task_of(name: str, settings: str | None) -> str:
        run = tmp_path / name
        (run / "eval").mkdir(parents=True)
        (run / "eval" / "test.json").write_text('{"accuracy": 0.9, "names": ["a"]}', encoding="utf-8")
        if settings:
            (run / "recipe.yaml").write_text(settings, encoding="utf-8")
        (scores,) = tfidf.load_scores([run])
        assert scores["accuracy"] == 0.9
        task: str = scores["task"]
        return task

    assert task_of("a", "data: {train: imdb/train, label_column: label}") == "imdb"
    assert task_of("b", "data: {train: imdb/train, label_column: rating}") == "imdb-ratings"
    assert task_of("c", "data: {train: nsmc/train}") == "nsmc"
    assert task_of("hierarchical-imdb-ratings", None) == "imdb-ratings"
    assert task_of("mine", "data: {train: my.tsv}") == "unknown"
    with pytest.raises(FileNotFoundError, match="jumok eval"):
        tfidf.load_scores([tmp_path / "nothing"])


# ------------------------------------------------------------------------------------------------ speech


def speech_batch(n_mels: int) -> SpeechBatch:
    texts = [[7, 12, EOS], [4, 8, 11, 6, 10, EOS], [9, EOS]]
    generator = torch.manual_seed(1)
    return SpeechBatch.from_sequences(texts, [torch.rand(frames, n_mels, generator=generator) for frames in (7, 12, 2)])


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("attention", ["additive", "location-sensitive"])
def test_the_frame_loop_is_the_same_decoder(bench: Bench, attention: str, forward: bool) -> None:
    pytest.importorskip("librosa")
    speech = bench("speech")
    config = dataclasses.replace(speech.SMALL_CONFIG, attention=attention, forward_attention=forward)
    ours = Tacotron(config, 13)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    loop, again = speech.with_frame_loop(ours), speech.with_frame_loop(ours)
    assert type(loop.decoder) is speech.FrameLoop
    assert sum(x.numel() for x in loop.parameters()) == sum(x.numel() for x in ours.parameters())
    batch = speech_batch(config.n_mels)
    results = []
    for model, inputs in ((ours, batch), (loop, batch), (again, batch.with_static_shapes())):
        mels = model.eval().predict_teacher_forced(inputs)
        torch.manual_seed(2)
        total = model.train().loss(inputs).total
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = list(zip(names, torch.autograd.grad(total, parameters), strict=True))
        shared = {name: x for name, x in gradients if "decoder" not in name}
        decoder = sum(x.square().sum() for name, x in gradients if "decoder" in name)
        results.append((mels, total, shared, decoder))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)


def test_decoders_with_different_outputs_are_not_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("librosa")
    speech = bench("speech")
    settings = speech.Settings(CPU, quick=True)
    ours = speech.build_network(speech.SMALL_CONFIG)
    batch = speech_batch(ours.config.n_mels)
    assert speech.check(settings, ours, batch)["mels"] < 1e-5
    attention = sys.modules["frame_loop"].LoopAttention
    forward = attention.forward

    def changed(self: Any, *inputs: Any) -> Any:
        context, *rest = forward(self, *inputs)
        return 1.001 * context, *rest

    monkeypatch.setattr(attention, "forward", changed)
    with pytest.raises(RuntimeError, match="must be equal"):
        speech.check(settings, ours, batch)


def test_random_utterances_are_as_long_as_those_of_arctic(bench: Bench) -> None:
    pytest.importorskip("librosa")
    speech = bench("speech")
    settings = recipe.load(speech.RECIPE)
    model = dataclasses.replace(settings.model, n_mels=1)
    sizes = speech.Sizes(model, settings.train, settings.train.batch_tokens, 4000)
    data = speech.draw_utterances(sizes, fixed_shapes=True)
    assert np.mean(data.symbols.lengths) == pytest.approx(48.9, abs=1)
    assert np.mean(data.lengths) == pytest.approx(225.5, abs=10)  # those of 250 recordings
    assert np.std(data.lengths) == pytest.approx(62.5, abs=15)
    assert np.quantile(data.lengths, [0.05, 0.95]) == pytest.approx([124, 332], rel=0.15)
    assert data.symbols.ids.max() < speech.NUM_CLASSES
    assert (data.lengths == speech.draw_utterances(sizes, fixed_shapes=False).lengths).all()
