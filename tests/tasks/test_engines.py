"""Other engines than PyTorch: the same answers by the same methods."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tasks_numbers
from tasks_numbers import sentences

from jumok.batch import EOS
from jumok.errors import InputError, MissingExtra
from jumok.exchange import ctranslate2 as exchange
from jumok.run import Run
from jumok.tasks import by_ctranslate2, engines, evaluation, translate
from jumok.tasks.by_ctranslate2 import ByCTranslate2
from jumok.tasks.translator import Search, Translation, Translator

pytest.importorskip("ctranslate2")

TEXTS = [english for english, _ in sentences(40, seed=2)] + ["", "seven nobody knows eight", "  "]


@pytest.fixture(scope="module")
def run() -> Run:
    return tasks_numbers.trained()


@pytest.fixture(scope="module")
def by_torch(run: Run) -> Translator:
    return engines.load(run, "torch", "cpu")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exact(run: Run) -> ByCTranslate2:
    return by_ctranslate2.load(run, "cpu", "float32")


def told(one: Translation) -> tuple[str, bool, list[str], list[str]]:
    return one.text, one.finished, one.source_words, one.words


# ------------------------------------------------------------------------------------ the same answers


@pytest.mark.parametrize(
    "search",
    [Search(beam=1), Search(), Search(beam=4), Search(beam=9, n_best=4)],
    ids=["greedy", "recipe's", "beam", "some"],
)
def test_ctranslate2_says_what_torch_says(search: Search, by_torch: Translator, exact: ByCTranslate2) -> None:
    ours, theirs = (list(one.predict(TEXTS, search, first=3)) for one in (by_torch, exact))
    for x, y in zip(ours, theirs, strict=True):
        assert x.number == y.number
        for one, other in zip((x, *x.others), (y, *y.others), strict=True):
            assert told(one) == told(other)
            assert other.score == pytest.approx(one.score, abs=0.02)
    assert ours[40].text == theirs[40].text == ""
    assert len({one.text for one in theirs}) > 20


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("coverage", [0.0, 0.4])
def test_a_beam_is_ranked_by_our_score(
    penalty: float, coverage: float, run: Run, by_torch: Translator, exact: ByCTranslate2, monkeypatch: Any
) -> None:
    decode = translate.DecodeConfig(beam=3, length_penalty=penalty, coverage=coverage)
    monkeypatch.setattr(by_torch, "decode", decode)
    monkeypatch.setattr(exact, "decode", decode)
    ours, theirs = (list(one.predict(TEXTS[:25], Search(n_best=3))) for one in (by_torch, exact))
    for x, y in zip(ours, theirs, strict=True):
        assert x.text == y.text
        assert y.score == pytest.approx(x.score, abs=0.02)
        scores = [one.score for one in (y, *y.others)]
        assert scores == sorted(scores, reverse=True)
        # Where more hypotheses end at a time than there is room for, CTranslate2 keeps those it likes best;
        # of coverage it knows nothing.
        both = {one.text for one in x.others} & {one.text for one in y.others}
        assert coverage or both


def test_eight_bits_say_nearly_the_same(run: Run, by_torch: Translator) -> None:
    quick = engines.load(run, "ctranslate2", "cpu")
    assert quick.engine.compute_type.startswith("int8")
    texts, references = zip(*sentences(150, seed=4), strict=True)
    metric = evaluation.bleu_of(run)
    ours, theirs = (
        metric.score([said.text for said in one.predict(texts, Search())], references).value
        for one in (by_torch, quick)
    )
    assert ours > 60
    assert abs(ours - theirs) < 1.5


# -------------------------------------------------------------------------------------- length limits


@pytest.mark.parametrize("beam", [1, 3])
def test_what_never_ends_is_cut_off_at_our_limit(
    beam: int, by_torch: Translator, exact: ByCTranslate2, monkeypatch: Any
) -> None:
    texts = ["one two", "five five"] if beam > 1 else ["one", "two three four nine nine one", "five six"]
    for one in (by_torch, exact):
        monkeypatch.setattr(one, "_limit", lambda length: length // 2)
    ours, theirs = (list(one.predict(texts, Search(beam=beam))) for one in (by_torch, exact))
    assert [told(one) for one in ours] == [told(one) for one in theirs]
    assert not all(one.finished for one in theirs)
    assert [one.score for one in theirs] == pytest.approx([one.score for one in ours], abs=0.02)


def test_a_text_that_is_too_long_is_refused(exact: ByCTranslate2) -> None:
    text = " ".join(["one"] * exchange.POSITIONS)
    with pytest.raises(InputError, match=r"line 1 has 4096 tokens, .* --engine torch,.* takes 4095 at most"):
        exact.length(text)
    fits = " ".join(["one"] * (exchange.POSITIONS - 1))
    assert exact.length(fits) == exchange.POSITIONS


def test_the_longest_text_is_translated(exact: ByCTranslate2, monkeypatch: Any) -> None:
    fits = " ".join(["one"] * (exchange.POSITIONS - 1))
    monkeypatch.setattr(exact, "_limit", lambda length: 2)
    assert exact.translate(fits, Search(beam=1), align=False).words


# ------------------------------------------------------------------------------------------ listening


class Crowd:
    """Listens to all, and leaves one sentence after some words of it."""

    def __init__(self, leaves: int | None = None, after: int = 1) -> None:
        self.leaves, self.after = leaves, after
        self.said: dict[int, list[list[int]]] = {}

    def gone(self, sentence: int) -> bool:
        return sentence == self.leaves and len(self.said.get(sentence, ())) >= self.after

    def hears(self, sentence: int) -> bool:
        return True

    def heard(self, sentence: int, ids: Sequence[int]) -> None:
        self.said.setdefault(sentence, []).append(list(ids))


def test_a_greedy_search_is_heard_as_that_of_torch(by_torch: Translator, exact: ByCTranslate2) -> None:
    ours, theirs = Crowd(), Crowd()
    list(by_torch.predict(TEXTS, Search(beam=1), first=5, listener=ours))
    found = list(exact.predict(TEXTS, Search(beam=1), first=5, listener=theirs))
    assert ours.said == theirs.said
    assert all(EOS not in ids for steps in theirs.said.values() for ids in steps)
    assert all(exact.shown(steps[-1]) == found[n - 5].text for n, steps in theirs.said.items())


def test_who_leaves_is_not_worked_for(exact: ByCTranslate2) -> None:
    texts = ["one two three four five six", "six five four three two one", "nine one nine one nine one"]
    whole = [one.text for one in exact.predict(texts, Search(beam=1))]
    crowd = Crowd(leaves=1, after=2)
    found = [one.text for one in exact.predict(texts, Search(beam=1), listener=crowd)]
    assert len(crowd.said[1]) == 2
    assert [found[0], found[2]] == [whole[0], whole[2]]


def test_a_beam_is_not_heard(exact: ByCTranslate2) -> None:
    crowd = Crowd()
    [found] = exact.predict(["one two"], Search(beam=2), listener=crowd)
    assert found.text == "eins zwei"
    assert crowd.said == {}


# -------------------------------------------------------------------------- what CTranslate2 cannot do


def test_maps_come_from_torch_which_is_loaded_for_them(run: Run, by_torch: Translator) -> None:
    quick = engines.load(run, "ctranslate2", "cpu")
    quick.length("one two three")
    quick.translate("one two three", align=False)
    assert "model" not in vars(quick)
    found = quick.translate("one two three")
    assert "model" in vars(quick)
    assert found.links == by_torch.translate("one two three").links
    [scene] = quick.look("one two", "eins zwei")
    assert scene.layers


def test_sampling_is_refused(exact: ByCTranslate2) -> None:
    with pytest.raises(InputError, match=r"--sample: .* --engine torch"):
        exact.translate("one two", Search(sample=True))


def test_other_models_are_refused(bahdanau: Run) -> None:
    with pytest.raises(
        InputError, match=r"a seq2seq of the task translate: .*--engine onnx .* --engine torch"
    ):
        engines.load(bahdanau, "ctranslate2", "cpu")
    assert not engines.cache_of(bahdanau, "ctranslate2").exists()


def test_an_engine_that_is_none_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="--engine tensorrt: it is one of torch, ctranslate2, onnx"):
        engines.load(run, "tensorrt")


def test_a_device_that_is_none_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match=r"device 'cuda:7'"):
        engines.load(run, "ctranslate2", "cuda:7")
    with pytest.raises(InputError, match=r"device 'tpu'"):
        engines.load(run, "ctranslate2", "tpu")


def test_a_gpu_that_it_cannot_compute_on_is_told_at_the_start(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        """What CTranslate2 gives where CUDA's libraries are missing: nothing is amiss until it computes."""

        def __init__(self, *_: Any, **more: Any) -> None:
            assert more["compute_type"] == "float16"

        def translate_batch(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("Library libcublas.so.12 is not found or cannot be loaded")

    library = exchange.library()
    monkeypatch.setattr(library, "Translator", Opened)
    monkeypatch.setattr(library, "get_supported_compute_types", lambda *_: {"float16", "float32"})
    monkeypatch.setattr(library, "get_cuda_device_count", lambda: 1)
    with pytest.raises(InputError, match=r"device 'cuda' with float16: Library libcublas"):
        engines.load(run, "ctranslate2")


def test_a_missing_package_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    exchange.library.cache_clear()
    with pytest.raises(MissingExtra, match=r'pip install "jumok\[export\]"'):
        engines.load(run, "ctranslate2", "cpu")


# ------------------------------------------------------------------------------------- what is kept


def test_files_are_made_once_and_anew_for_other_weights(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, made = Run.open(tmp_path / "run"), []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model.bin").write_text("…")

    first = engines.kept(mine, "some", make)
    assert engines.kept(mine, "some", make) == first
    assert len(made) == 1
    assert [path.name for path in first.iterdir()] == ["model.bin"]
    with mine.weights.open("ab") as file:
        file.write(b" ")
    second = engines.kept(mine, "some", make)
    assert second != first
    assert list(engines.cache_of(mine, "some").iterdir()) == [second]


def test_what_fails_leaves_nothing(run: Run, tmp_path: Path) -> None:
    mine = Run.open(shutil.copytree(run.folder, tmp_path / "run"))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        engines.kept(mine, "some", broken)
    assert list(engines.cache_of(mine, "some").iterdir()) == []


def test_two_may_make_them_at_the_same_time(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    mine, together, found = Run.open(tmp_path / "run"), threading.Barrier(2), []

    def make(folder: Path) -> None:
        (folder / "model.bin").write_text("…")
        together.wait(10)

    threads = [threading.Thread(target=lambda: found.append(engines.kept(mine, "some", make))) for _ in "ab"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found[0] == found[1]
    assert os.listdir(found[0]) == ["model.bin"]
