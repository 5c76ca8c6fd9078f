"""Small data sets with the names that recipes use, and small runs."""

import gzip
import sys
from pathlib import Path

import pytest

from jumok.look.views.alignment_selection import AlignmentView
from jumok.run import Run
from jumok.tasks.translate.word_alignment import WordAligner

sys.path.insert(0, str(Path(__file__).parent))

from planted_attention import make_pairs, plant_attention
from translation_runs import sentences, train_run


@pytest.fixture(scope="session")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JUMOK_DATA with the layout of the real data."""
    root = tmp_path_factory.mktemp("data")
    splits = {
        "multi30k": (("train", 60), ("val", 7), ("test2016", 11)),
        "europarl": (("train", 60), ("dev", 7), ("test", 11), ("gold", 5)),
    }
    for name, parts in splits.items():
        (root / name).mkdir()
        for seed, (split, count) in enumerate(parts):
            pairs = sentences(count, seed)
            for language, texts in (
                ("en", [p.english for p in pairs]),
                ("de", [p.korean for p in pairs]),
                ("fr", [p.korean for p in pairs]),
            ):
                text = "".join(f"{line}\n" for line in texts)
                (root / name / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
            links = [f"{n} {k} {e} S" for n, p in enumerate(pairs, 1) for e, k in p.sure_links]
            if split == "gold":
                (root / name / "gold.links.txt").write_text("".join(f"{line}\n" for line in links))
    (root / "hansards").mkdir()
    for language, texts in (
        ("en", [p.english for p in sentences(90, 0)]),
        ("fr", [p.korean for p in sentences(90, 0)]),
    ):
        (root / "hansards" / f"train.{language}").write_text("".join(f"{line}\n" for line in texts))
    gold = [p for p in sentences(9, 1) if "'" not in p.english]  # an apostrophe would be set apart
    text = "".join(f"{p.english} ||| {p.korean}\n" for p in gold)
    (root / "hansards" / "gold.en-fr.txt").write_text(text, encoding="utf-8")
    lines = (" ".join(f"{e + 1}-{k + 1}" for e, k in p.sure_links) for p in gold)
    (root / "hansards" / "gold.links.txt").write_text("".join(f"{line}\n" for line in lines))
    (root / "koen").mkdir()
    for seed, (split, count) in enumerate((("train", 60), ("val", 7), ("test", 11))):
        rows = ["english\tkorean\tsource", *(f"{p.english}\t{p.korean}\tours" for p in sentences(count, seed))]
        (root / "koen" / f"{split}.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def bahdanau(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "bahdanau", "bahdanau")


@pytest.fixture(scope="session")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_run(tmp_path_factory.mktemp("runs") / "transformer", "transformer")


@pytest.fixture(scope="session")
def word_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs with a tokenizer of whole words. They are hardly trained."""
    folder = tmp_path_factory.mktemp("words")
    lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in make_pairs(300, seed=1))
    (folder / "table.tsv").write_text(f"low\thigh\n{lines}", encoding="utf-8")
    settings = ["tokenizer.type=words", f"data.train={folder / 'table.tsv'}", "data.held_out_size=30"]
    forward, backward = ["data.source=low", "data.target=high"], ["data.source=high", "data.target=low"]
    return {
        "forward": train_run(folder / "forward", "transformer", *settings, *forward),
        "backward": train_run(folder / "backward", "transformer", *settings, *backward),
        "fixed": train_run(folder / "fixed", "fixed", *settings, *forward),
        "short": train_run(folder / "short", "convolutional", *settings, *forward, "model.max_positions=12"),
    }


@pytest.fixture
def aligner(word_runs: dict[str, Run]) -> WordAligner:
    """Two directions, each with one head whose links are correct."""
    return WordAligner(
        plant_attention(word_runs["forward"], AlignmentView(1, 2, True)),
        plant_attention(word_runs["backward"], AlignmentView(0, 1, False)),
    )
