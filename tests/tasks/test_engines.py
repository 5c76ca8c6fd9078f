"""Engines other than PyTorch give the same results through the same methods."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import number_translation
import pytest
from number_translation import sentences

from jumok.batches.tokens import EOS
from jumok.errors import InputError, MissingExtra
from jumok.export import ctranslate2 as exchange
from jumok.inference import ctranslate2_engine, engines
from jumok.inference.ctranslate2_engine import CTranslate2TranslationPredictor
from jumok.run import Run
from jumok.tasks.translate import metrics as translate_metrics
from jumok.tasks.translate.config import TranslationDecodeConfig
from jumok.tasks.translate.predictor import TranslationOptions, TranslationPrediction, TranslationPredictor

pytestmark = pytest.mark.long


pytest.importorskip("ctranslate2")

TEXTS = [english for english, _ in sentences(40, seed=2)] + ["", "seven nobody knows eight", "  "]


@pytest.fixture(scope="module")
def run() -> Run:
    return number_translation.train_run()


@pytest.fixture(scope="module")
def by_torch(run: Run) -> TranslationPredictor:
    return engines.load_predictor(run, "torch", "cpu")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exact(run: Run) -> CTranslate2TranslationPredictor:
    return ctranslate2_engine.load(run, "cpu", "float32")


def get_texts(prediction: TranslationPrediction) -> tuple[str, bool, list[str], list[str]]:
    return prediction.translation, prediction.finished, prediction.source_words, prediction.target_words


# ---------------------------------------------------------------------------------------- translations


@pytest.mark.parametrize(
    "search",
    [
        TranslationOptions(beam_size=1),
        TranslationOptions(),
        TranslationOptions(beam_size=4),
        TranslationOptions(beam_size=9, n_best=4),
    ],
    ids=["greedy", "recipe's", "beam", "some"],
)
def test_translations_equal_those_of_torch(
    search: TranslationOptions, by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor
) -> None:
    ours, theirs = (list(predictor.predict(TEXTS, search, first_index=3)) for predictor in (by_torch, exact))
    for x, y in zip(ours, theirs, strict=True):
        assert x.index == y.index
        for prediction, other in zip((x, *x.alternatives), (y, *y.alternatives), strict=True):
            assert get_texts(prediction) == get_texts(other)
            assert other.score == pytest.approx(prediction.score, abs=0.02)
    assert ours[40].translation == theirs[40].translation == ""
    assert len({prediction.translation for prediction in theirs}) > 20


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("coverage", [0.0, 0.4])
def test_hypotheses_are_ranked_by_our_score(
    penalty: float,
    coverage: float,
    run: Run,
    by_torch: TranslationPredictor,
    exact: CTranslate2TranslationPredictor,
    monkeypatch: Any,
) -> None:
    decode = TranslationDecodeConfig(beam_size=3, length_penalty=penalty, coverage_penalty=coverage)
    monkeypatch.setattr(by_torch, "decode_config", decode)
    monkeypatch.setattr(exact, "decode_config", decode)
    ours, theirs = (
        list(predictor.predict(TEXTS[:25], TranslationOptions(n_best=3))) for predictor in (by_torch, exact)
    )
    for x, y in zip(ours, theirs, strict=True):
        assert x.translation == y.translation
        assert y.score == pytest.approx(x.score, abs=0.02)
        scores = [prediction.score for prediction in (y, *y.alternatives)]
        assert scores == sorted(scores, reverse=True)
        # If more hypotheses end at a step than fit into the beam, CTranslate2 keeps the best by its own score,
        # which has no coverage.
        common = {prediction.translation for prediction in x.alternatives} & {
            prediction.translation for prediction in y.alternatives
        }
        assert coverage or common


def test_quantization_hardly_changes_bleu(run: Run, by_torch: TranslationPredictor) -> None:
    quick = engines.load_predictor(run, "ctranslate2", "cpu")
    assert quick.engine.compute_type.startswith("int8")
    texts, references = zip(*sentences(150, seed=4), strict=True)
    metric = translate_metrics.build_bleu(run)
    ours, theirs = (
        metric.score(
            [prediction.translation for prediction in predictor.predict(texts, TranslationOptions())], references
        ).value
        for predictor in (by_torch, quick)
    )
    assert ours > 60
    assert abs(ours - theirs) < 1.5


# -------------------------------------------------------------------------------------- length limits


@pytest.mark.parametrize("beam", [1, 3])
def test_translations_are_cut_off_at_our_limit(
    beam: int, by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor, monkeypatch: Any
) -> None:
    texts = ["one two", "five five"] if beam > 1 else ["one", "two three four nine nine one", "five six"]
    for predictor in (by_torch, exact):
        monkeypatch.setattr(predictor, "_max_target_tokens", lambda length: length // 2)
    ours, theirs = (
        list(predictor.predict(texts, TranslationOptions(beam_size=beam))) for predictor in (by_torch, exact)
    )
    assert [get_texts(prediction) for prediction in ours] == [get_texts(prediction) for prediction in theirs]
    assert not all(prediction.finished for prediction in theirs)
    assert [prediction.score for prediction in theirs] == pytest.approx(
        [prediction.score for prediction in ours], abs=0.02
    )


def test_a_text_that_is_too_long_is_an_error(exact: CTranslate2TranslationPredictor) -> None:
    text = " ".join(["one"] * exchange.MAX_POSITIONS)
    with pytest.raises(InputError, match=r"line 1 has 4096 tokens, .* --engine torch,.* takes 4095 at most"):
        exact.count_tokens(text)
    fits = " ".join(["one"] * (exchange.MAX_POSITIONS - 1))
    assert exact.count_tokens(fits) == exchange.MAX_POSITIONS


def test_the_longest_text_is_translated(exact: CTranslate2TranslationPredictor, monkeypatch: Any) -> None:
    fits = " ".join(["one"] * (exchange.MAX_POSITIONS - 1))
    monkeypatch.setattr(exact, "_max_target_tokens", lambda length: 2)
    assert exact.translate(fits, TranslationOptions(beam_size=1), with_attention=False).target_words


# ------------------------------------------------------------------------------------------ streaming


class RecordingListener:
    """Records the tokens of all sentences, and cancels one of them after some tokens."""

    def __init__(self, cancelled: int | None = None, after: int = 1) -> None:
        self.cancelled, self.after = cancelled, after
        self.tokens: dict[int, list[list[int]]] = {}

    def is_cancelled(self, sentence: int) -> bool:
        return sentence == self.cancelled and len(self.tokens.get(sentence, ())) >= self.after

    def is_streaming(self, sentence: int) -> bool:
        return True

    def on_tokens(self, sentence: int, ids: Sequence[int]) -> None:
        self.tokens.setdefault(sentence, []).append(list(ids))


def test_greedy_search_streams_the_same_tokens_as_torch(
    by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor
) -> None:
    ours, theirs = RecordingListener(), RecordingListener()
    list(by_torch.predict(TEXTS, TranslationOptions(beam_size=1), first_index=5, listener=ours))
    predictions = list(exact.predict(TEXTS, TranslationOptions(beam_size=1), first_index=5, listener=theirs))
    assert ours.tokens == theirs.tokens
    assert all(EOS not in ids for steps in theirs.tokens.values() for ids in steps)
    assert all(exact.ids_to_text(steps[-1]) == predictions[n - 5].translation for n, steps in theirs.tokens.items())


def test_a_cancelled_sentence_is_not_decoded_further(exact: CTranslate2TranslationPredictor) -> None:
    texts = ["one two three four five six", "six five four three two one", "nine one nine one nine one"]
    whole = [prediction.translation for prediction in exact.predict(texts, TranslationOptions(beam_size=1))]
    listener = RecordingListener(cancelled=1, after=2)
    translations = [
        prediction.translation
        for prediction in exact.predict(texts, TranslationOptions(beam_size=1), listener=listener)
    ]
    assert len(listener.tokens[1]) == 2
    assert [translations[0], translations[2]] == [whole[0], whole[2]]


def test_beam_search_does_not_stream(exact: CTranslate2TranslationPredictor) -> None:
    listener = RecordingListener()
    [prediction] = exact.predict(["one two"], TranslationOptions(beam_size=2), listener=listener)
    assert prediction.translation == "eins zwei"
    assert listener.tokens == {}


# ----------------------------------------------------------------------------------------- limitations


def test_the_torch_model_is_loaded_for_attention_only(run: Run, by_torch: TranslationPredictor) -> None:
    quick = engines.load_predictor(run, "ctranslate2", "cpu")
    quick.count_tokens("one two three")
    quick.translate("one two three", with_attention=False)
    assert "model" not in vars(quick)
    prediction = quick.translate("one two three")
    assert "model" in vars(quick)
    assert prediction.alignment == by_torch.translate("one two three").alignment
    [view] = quick.build_viewer_data("one two", "eins zwei")
    assert view.layers


def test_sampling_is_an_error(exact: CTranslate2TranslationPredictor) -> None:
    with pytest.raises(InputError, match=r"--sample: .* --engine torch"):
        exact.translate("one two", TranslationOptions(sample=True))


def test_other_models_are_an_error(bahdanau: Run) -> None:
    with pytest.raises(InputError, match=r"a seq2seq model for the task translate; .*--engine onnx, .* --engine torch"):
        engines.load_predictor(bahdanau, "ctranslate2", "cpu")
    assert not engines.get_engine_cache_folder(bahdanau, "ctranslate2").exists()


def test_an_unknown_engine_is_an_error(run: Run) -> None:
    with pytest.raises(InputError, match="--engine tensorrt: it is one of torch, ctranslate2, onnx"):
        engines.load_predictor(run, "tensorrt")


def test_an_unknown_device_is_an_error(run: Run) -> None:
    with pytest.raises(InputError, match=r"device 'cuda:7'"):
        engines.load_predictor(run, "ctranslate2", "cuda:7")
    with pytest.raises(InputError, match=r"device 'tpu'"):
        engines.load_predictor(run, "ctranslate2", "tpu")


def test_an_unusable_gpu_is_reported_at_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        """CTranslate2 without the libraries of CUDA: the first computation fails."""

        def __init__(self, *_: Any, **options: Any) -> None:
            assert options["compute_type"] == "float16"

        def translate_batch(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("Library libcublas.so.12 is not found or cannot be loaded")

    library = exchange.import_ctranslate2()
    monkeypatch.setattr(library, "Translator", Opened)
    monkeypatch.setattr(library, "get_supported_compute_types", lambda *_: {"float16", "float32"})
    monkeypatch.setattr(library, "get_cuda_device_count", lambda: 1)
    with pytest.raises(InputError, match=r"device 'cuda' with float16: Library libcublas"):
        engines.load_predictor(run, "ctranslate2")


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[export\]"'):
        engines.load_predictor(run, "ctranslate2", "cpu")


# ------------------------------------------------------------------------------------- engine files


def test_engine_files_are_rebuilt_for_other_weights(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, built = Run.open(tmp_path / "run"), []

    def make(folder: Path) -> None:
        built.append(folder)
        (folder / "model.bin").write_text("…")

    first = engines.get_engine_files(mine, "some", make)
    assert engines.get_engine_files(mine, "some", make) == first
    assert len(built) == 1
    assert [path.name for path in first.iterdir()] == ["model.bin"]
    with mine.weights_path.open("ab") as file:
        file.write(b" ")
    second = engines.get_engine_files(mine, "some", make)
    assert second != first
    assert list(engines.get_engine_cache_folder(mine, "some").iterdir()) == [second]


def test_a_failed_build_leaves_no_files(run: Run, tmp_path: Path) -> None:
    mine = Run.open(shutil.copytree(run.folder, tmp_path / "run"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        engines.get_engine_files(mine, "some", broken)
    assert list(engines.get_engine_cache_folder(mine, "some").iterdir()) == []


def test_concurrent_builds(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, together, folders = Run.open(tmp_path / "run"), threading.Barrier(2), []

    def make(folder: Path) -> None:
        (folder / "model.bin").write_text("…")
        together.wait(10)

    threads = [
        threading.Thread(target=lambda: folders.append(engines.get_engine_files(mine, "some", make))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders[0] == folders[1]
    assert os.listdir(folders[0]) == ["model.bin"]
