"""Token ids on disk: round trips, reuse, interrupted and concurrent writing."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jumok import files
from jumok.data.caches import token_store as module
from jumok.data.caches.token_store import TokenStore, prepare_token_store
from jumok.data.readers.invalid_examples import SkippedExamples
from jumok.data.readers.parallel_corpus import ParallelCorpus, find_corpus
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.errors import InputError

pytestmark = pytest.mark.long


LETTERS = Tokenizer.train(["abcdefghij 가나다"], TokenizerConfig("characters", vocab_size=400))
BOTH = TokenizerPair(LETTERS, LETTERS)


def corpus(*pairs: tuple[str, str], name: str = "made") -> ParallelCorpus:
    return ParallelCorpus.from_pairs(name, lambda: pairs)


def contents(store: TokenStore) -> list[tuple[str, str]]:
    return [tuple(LETTERS.decode(side.tolist()) for side in store[n]) for n in range(len(store))]  # type: ignore[misc]


@settings(max_examples=20)  # a store is synced to the disk, which takes its time
@given(st.lists(st.tuples(*[st.text("abcé가🐶", min_size=1, max_size=9)] * 2), min_size=1, max_size=11))
def test_round_trip(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EXAMPLES_PER_CHUNK", 3)
        store = prepare_token_store(Path(folder) / "train", corpus(*pairs), BOTH)
        assert contents(store) == pairs
        assert store.source.lengths.tolist() == [len(LETTERS.encode([source])[0]) for source, _ in pairs]
        assert store.target.lengths.tolist() == [len(LETTERS.encode([target])[0]) for _, target in pairs]
        assert not store.skipped.total


def test_arrays_are_read_only_memory_maps(tmp_path: Path) -> None:
    store = prepare_token_store(tmp_path / "train", corpus(("abc", "de")), BOTH)
    source, target = store[0]
    assert (source.dtype, len(source), len(target)) == (np.uint16, 3, 2)
    assert np.shares_memory(source, store.source.ids)
    with pytest.raises(ValueError, match="read-only"):
        source[0] = 0
    with pytest.raises(IndexError):
        store[1]
    unpickled = pickle.loads(pickle.dumps(store))  # as for another process
    assert contents(unpickled) == [("abc", "de")]
    assert len(pickle.dumps(store)) < 500


def test_large_vocabularies_use_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Large:
        vocab_size, fingerprint = 70_000, "large"

        def encode(self, lines: list[str]) -> list[list[int]]:
            return [[69_999, len(line)] for line in lines]

    class Sides:
        source, target = Large(), LETTERS

    store = prepare_token_store(tmp_path / "train", corpus(("abc", "de")), Sides())  # type: ignore[arg-type]
    assert store[0][0].tolist() == [69_999, 3]
    assert (store.source.ids.dtype, store.target.ids.dtype) == (np.uint32, np.uint16)


def test_too_long_examples_are_skipped_and_counted(tmp_path: Path) -> None:
    pairs = [("abc", "de"), ("abcdef", "de"), ("a", "abcdef"), ("abcde", "abcde")]
    store = prepare_token_store(tmp_path / "train", corpus(*pairs), BOTH, max_tokens=5)
    assert contents(store) == [pairs[0], pairs[3]]
    message = (
        "2 skipped: 1 × a source of more than 5 tokens (first: made:2); "
        "1 × a target of more than 5 tokens (first: made:3)"
    )
    assert str(store.skipped) == str(TokenStore.open(tmp_path / "train").skipped) == message
    with pytest.raises(InputError, match="none of 4 examples is left; 4 skipped"):
        prepare_token_store(tmp_path / "other", corpus(*pairs), BOTH, max_tokens=0)
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


def test_invalid_lines_are_counted_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "my.tsv").write_text("a\tb\nc\t\nd\te\n")
    store = prepare_token_store(
        tmp_path / "s", find_corpus(str(tmp_path / "my.tsv"), source=1, target=2, on_error="skip"), BOTH
    )
    assert contents(store) == [("a", "b"), ("d", "e")]
    assert store.skipped == SkippedExamples(store.skipped.counts, {"an empty target": f"{tmp_path / 'my.tsv'}:2"})


def test_store_is_reused_until_something_changes(tmp_path: Path) -> None:
    path = tmp_path / "train"
    calls = []

    def pairs() -> list[tuple[str, str]]:
        calls.append(1)
        return [("ab", "cd")]

    def prepare(name: str = "made", tokenizers: TokenizerPair = BOTH, max_tokens: int = 7) -> int:
        prepare_token_store(path, ParallelCorpus.from_pairs(name, pairs), tokenizers, max_tokens=max_tokens)
        return len(calls)

    assert (prepare(), prepare()) == (1, 1)
    assert prepare(max_tokens=8) == 2
    assert prepare(name="other", max_tokens=8) == 3
    words = Tokenizer.train(["ab cd"] * 2, TokenizerConfig("words", vocab_size=100))
    assert prepare("other", TokenizerPair(LETTERS, words), 8) == 4
    assert prepare("other", TokenizerPair(LETTERS, words), 8) == 4
    assert [source.name for source in tmp_path.iterdir()] == ["train"]  # and nothing is left lying about


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXAMPLES_PER_CHUNK", 3)
    message: list[int] = []
    prepare_token_store(tmp_path / "s", corpus(*[("a", "b")] * 7), BOTH, progress=message.append)
    assert message == [3, 6, 7]


def test_error_while_writing_leaves_the_old_store(tmp_path: Path) -> None:
    def broken() -> list[tuple[str, str]]:
        raise InputError("no more")

    prepare_token_store(tmp_path / "s", corpus(("a", "b")), BOTH)
    with pytest.raises(InputError, match="no more"):
        prepare_token_store(tmp_path / "s", ParallelCorpus.from_pairs("broken", broken), BOTH)
    assert contents(TokenStore.open(tmp_path / "s")) == [("a", "b")]
    assert [source.name for source in tmp_path.iterdir()] == ["s"]


KILLED_SCRIPT = """
import sys, time
from pathlib import Path
from jumok.data.caches import token_store
from jumok.data.readers.parallel_corpus import ParallelCorpus
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair

def pairs():
    yield from [("a", "b")] * 7
    print("half-way", flush=True)
    time.sleep(60)

token_store.EXAMPLES_PER_CHUNK = 3
letters = Tokenizer.load(Path(sys.argv[2]))
corpus = ParallelCorpus.from_pairs("made", pairs)
token_store.prepare_token_store(Path(sys.argv[1]), corpus, TokenizerPair(letters, letters))
"""


def test_killed_process_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LETTERS.save(tmp_path / "letters.json")
    path = tmp_path / "s"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_SCRIPT, str(path), str(tmp_path / "letters.json")], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half-way\n"
        process.send_signal(signal.SIGKILL)
    abandoned = list(tmp_path.glob(".s-*.tmp"))
    assert len(abandoned) == 1
    assert not path.exists()
    store = prepare_token_store(path, corpus(*[("a", "b")] * 9), BOTH)  # the same name, and so the same fingerprint
    assert len(store) == 9
    assert abandoned[0].exists()  # it might be another process's that is at work
    hour_ago = time.time() - 2 * files.ABANDONED_SECONDS
    for item in (abandoned[0], *abandoned[0].rglob("*")):
        os.utime(item, (hour_ago, hour_ago))
    prepare_token_store(path, corpus(("a", "b"), name="new"), BOTH)
    assert not abandoned[0].exists()


def test_other_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match="exists and is not a store of token ids"):
        prepare_token_store(tmp_path / "s", corpus(("a", "b")), BOTH)
    with pytest.raises(InputError, match="is not a store"):
        TokenStore.open(tmp_path / "s")
    assert (tmp_path / "s" / "thesis.txt").read_text() == "dear"


def test_damaged_store_raises(tmp_path: Path) -> None:
    path = tmp_path / "s"
    prepare_token_store(path, corpus(*[("abc", "de")] * 50), BOTH)
    ids = path / "target.ids.npy"
    content = ids.read_bytes()
    ids.write_bytes(content[:-20])
    with pytest.raises(InputError, match=r"is damaged.*remove this folder"):
        TokenStore.open(path)
    ids.unlink()
    with pytest.raises(InputError, match="is damaged"):
        TokenStore.open(path)
    np.save(ids, np.zeros(3, np.uint16))
    with pytest.raises(InputError, match="do not fit together"):
        TokenStore.open(path)


@pytest.mark.parametrize("exists", [False, True])
def test_concurrent_writers(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "s"
    if exists:
        prepare_token_store(path, corpus(("old", "old"), name="old"), BOTH)
    barrier = threading.Barrier(2, timeout=30)

    def pairs() -> Iterator[tuple[str, str]]:
        barrier.wait()
        yield from [("abc", "de")] * 500

    def make(_: int) -> int:
        return len(prepare_token_store(path, ParallelCorpus.from_pairs("made", pairs), BOTH))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make, range(2))) == [500, 500]
    assert contents(TokenStore.open(path))[499] == ("abc", "de")
    assert [source.name for source in tmp_path.iterdir()] == ["s"]


def test_writing_uses_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXAMPLES_PER_CHUNK", 100)
    images = ParallelCorpus.from_pairs("many", lambda: (("abcdefghij" * 9, "abc") for _ in range(4_000)))
    tracemalloc.start()
    store = prepare_token_store(tmp_path / "s", images, BOTH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(store.source.ids) == 4_000 * 90
    assert peak < 2 << 20  # as Python numbers, the ids alone would take 2.7 MiB and more
