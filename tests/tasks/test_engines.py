"""Other engines than PyTorch: the same answers by the same methods."""

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


def told(one: TranslationPrediction) -> tuple[str, bool, list[str], list[str]]:
    return one.translation, one.finished, one.source_words, one.target_words


# ------------------------------------------------------------------------------------ the same answers


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
def test_ctranslate2_says_what_torch_says(
    search: TranslationOptions, by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor
) -> None:
    ours, theirs = (list(one.predict(TEXTS, search, first_index=3)) for one in (by_torch, exact))
    for x, y in zip(ours, theirs, strict=True):
        assert x.index == y.index
        for one, other in zip((x, *x.alternatives), (y, *y.alternatives), strict=True):
            assert told(one) == told(other)
            assert other.score == pytest.approx(one.score, abs=0.02)
    assert ours[40].translation == theirs[40].translation == ""
    assert len({one.translation for one in theirs}) > 20


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("coverage", [0.0, 0.4])
def test_a_beam_is_ranked_by_our_score(
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
    ours, theirs = (list(one.predict(TEXTS[:25], TranslationOptions(n_best=3))) for one in (by_torch, exact))
    for x, y in zip(ours, theirs, strict=True):
        assert x.translation == y.translation
        assert y.score == pytest.approx(x.score, abs=0.02)
        scores = [one.score for one in (y, *y.alternatives)]
        assert scores == sorted(scores, reverse=True)
        # Where more hypotheses end at a time than there is room for, CTranslate2 keeps those it likes best;
        # of coverage it knows nothing.
        both = {one.translation for one in x.alternatives} & {one.translation for one in y.alternatives}
        assert coverage or both


def test_eight_bits_say_nearly_the_same(run: Run, by_torch: TranslationPredictor) -> None:
    quick = engines.load_predictor(run, "ctranslate2", "cpu")
    assert quick.engine.compute_type.startswith("int8")
    texts, references = zip(*sentences(150, seed=4), strict=True)
    metric = translate_metrics.build_bleu(run)
    ours, theirs = (
        metric.score([said.translation for said in one.predict(texts, TranslationOptions())], references).value
        for one in (by_torch, quick)
    )
    assert ours > 60
    assert abs(ours - theirs) < 1.5


# -------------------------------------------------------------------------------------- length limits


@pytest.mark.parametrize("beam", [1, 3])
def test_what_never_ends_is_cut_off_at_our_limit(
    beam: int, by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor, monkeypatch: Any
) -> None:
    texts = ["one two", "five five"] if beam > 1 else ["one", "two three four nine nine one", "five six"]
    for one in (by_torch, exact):
        monkeypatch.setattr(one, "_max_target_tokens", lambda length: length // 2)
    ours, theirs = (list(one.predict(texts, TranslationOptions(beam_size=beam))) for one in (by_torch, exact))
    assert [told(one) for one in ours] == [told(one) for one in theirs]
    assert not all(one.finished for one in theirs)
    assert [one.score for one in theirs] == pytest.approx([one.score for one in ours], abs=0.02)


def test_a_text_that_is_too_long_is_refused(exact: CTranslate2TranslationPredictor) -> None:
    text = " ".join(["one"] * exchange.MAX_POSITIONS)
    with pytest.raises(InputError, match=r"line 1 has 4096 tokens, .* --engine torch,.* takes 4095 at most"):
        exact.count_tokens(text)
    fits = " ".join(["one"] * (exchange.MAX_POSITIONS - 1))
    assert exact.count_tokens(fits) == exchange.MAX_POSITIONS


def test_the_longest_text_is_translated(exact: CTranslate2TranslationPredictor, monkeypatch: Any) -> None:
    fits = " ".join(["one"] * (exchange.MAX_POSITIONS - 1))
    monkeypatch.setattr(exact, "_max_target_tokens", lambda length: 2)
    assert exact.translate(fits, TranslationOptions(beam_size=1), with_attention=False).target_words


# ------------------------------------------------------------------------------------------ listening


class Crowd:
    """Listens to all, and leaves one sentence after some words of it."""

    def __init__(self, leaves: int | None = None, after: int = 1) -> None:
        self.leaves, self.after = leaves, after
        self.said: dict[int, list[list[int]]] = {}

    def is_cancelled(self, sentence: int) -> bool:
        return sentence == self.leaves and len(self.said.get(sentence, ())) >= self.after

    def is_streaming(self, sentence: int) -> bool:
        return True

    def on_tokens(self, sentence: int, ids: Sequence[int]) -> None:
        self.said.setdefault(sentence, []).append(list(ids))


def test_a_greedy_search_is_heard_as_that_of_torch(
    by_torch: TranslationPredictor, exact: CTranslate2TranslationPredictor
) -> None:
    ours, theirs = Crowd(), Crowd()
    list(by_torch.predict(TEXTS, TranslationOptions(beam_size=1), first_index=5, listener=ours))
    found = list(exact.predict(TEXTS, TranslationOptions(beam_size=1), first_index=5, listener=theirs))
    assert ours.said == theirs.said
    assert all(EOS not in ids for steps in theirs.said.values() for ids in steps)
    assert all(exact.ids_to_text(steps[-1]) == found[n - 5].translation for n, steps in theirs.said.items())


def test_who_leaves_is_not_worked_for(exact: CTranslate2TranslationPredictor) -> None:
    texts = ["one two three four five six", "six five four three two one", "nine one nine one nine one"]
    whole = [one.translation for one in exact.predict(texts, TranslationOptions(beam_size=1))]
    crowd = Crowd(leaves=1, after=2)
    found = [one.translation for one in exact.predict(texts, TranslationOptions(beam_size=1), listener=crowd)]
    assert len(crowd.said[1]) == 2
    assert [found[0], found[2]] == [whole[0], whole[2]]


def test_a_beam_is_not_heard(exact: CTranslate2TranslationPredictor) -> None:
    crowd = Crowd()
    [found] = exact.predict(["one two"], TranslationOptions(beam_size=2), listener=crowd)
    assert found.translation == "eins zwei"
    assert crowd.said == {}


# -------------------------------------------------------------------------- what CTranslate2 cannot do


def test_maps_come_from_torch_which_is_loaded_for_them(run: Run, by_torch: TranslationPredictor) -> None:
    quick = engines.load_predictor(run, "ctranslate2", "cpu")
    quick.count_tokens("one two three")
    quick.translate("one two three", with_attention=False)
    assert "model" not in vars(quick)
    found = quick.translate("one two three")
    assert "model" in vars(quick)
    assert found.alignment == by_torch.translate("one two three").alignment
    [scene] = quick.build_viewer_data("one two", "eins zwei")
    assert scene.layers


def test_sampling_is_refused(exact: CTranslate2TranslationPredictor) -> None:
    with pytest.raises(InputError, match=r"--sample: .* --engine torch"):
        exact.translate("one two", TranslationOptions(sample=True))


def test_other_models_are_refused(bahdanau: Run) -> None:
    with pytest.raises(InputError, match=r"a seq2seq model for the task translate; .*--engine onnx, .* --engine torch"):
        engines.load_predictor(bahdanau, "ctranslate2", "cpu")
    assert not engines.get_engine_cache_folder(bahdanau, "ctranslate2").exists()


def test_an_engine_that_is_none_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="--engine tensorrt: it is one of torch, ctranslate2, onnx"):
        engines.load_predictor(run, "tensorrt")


def test_a_device_that_is_none_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match=r"device 'cuda:7'"):
        engines.load_predictor(run, "ctranslate2", "cuda:7")
    with pytest.raises(InputError, match=r"device 'tpu'"):
        engines.load_predictor(run, "ctranslate2", "tpu")


def test_a_gpu_that_it_cannot_compute_on_is_told_at_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        """What CTranslate2 gives where CUDA's libraries are missing: nothing is amiss until it computes."""

        def __init__(self, *_: Any, **more: Any) -> None:
            assert more["compute_type"] == "float16"

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


# ------------------------------------------------------------------------------------- what is kept


def test_files_are_made_once_and_anew_for_other_weights(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, made = Run.open(tmp_path / "run"), []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model.bin").write_text("…")

    first = engines.get_engine_files(mine, "some", make)
    assert engines.get_engine_files(mine, "some", make) == first
    assert len(made) == 1
    assert [path.name for path in first.iterdir()] == ["model.bin"]
    with mine.weights_path.open("ab") as file:
        file.write(b" ")
    second = engines.get_engine_files(mine, "some", make)
    assert second != first
    assert list(engines.get_engine_cache_folder(mine, "some").iterdir()) == [second]


def test_what_fails_leaves_nothing(run: Run, tmp_path: Path) -> None:
    mine = Run.open(shutil.copytree(run.folder, tmp_path / "run"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        engines.get_engine_files(mine, "some", broken)
    assert list(engines.get_engine_cache_folder(mine, "some").iterdir()) == []


def test_two_may_make_them_at_the_same_time(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, together, found = Run.open(tmp_path / "run"), threading.Barrier(2), []

    def make(folder: Path) -> None:
        (folder / "model.bin").write_text("…")
        together.wait(10)

    threads = [
        threading.Thread(target=lambda: found.append(engines.get_engine_files(mine, "some", make))) for _ in "ab"
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found[0] == found[1]
    assert os.listdir(found[0]) == ["model.bin"]
