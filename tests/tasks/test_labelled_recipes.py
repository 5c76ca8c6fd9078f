"""Every recipe of BERT's uses, made small, on data laid out as the real one is; the commands on its run."""

from __future__ import annotations

import csv
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled_runs import MODEL, number, pair, question, review, sentence, squad, tagged
from rich.console import Console
from typer.testing import CliRunner

from jumok import recipe
from jumok.cli.app import app
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train

USES = {
    name: recipe.read(path)["task"]
    for name, path in recipe.list_builtin().items()
    if recipe.read(path)["task"] in ("classify", "tag", "answer") and name.startswith("bert/")
}
SMALL = [f"model.{key}={value}" for key, value in MODEL.items() if "dropout" not in key]
SMALL += [
    "model.max_positions=64",
    "pretrained=null",
    "tokenizer.vocab_size=200",
    "data.max_tokens=64",
    "data.held_out_size=20",
]
SMALL += [
    "train.max_epochs=null",
    "train.max_steps=3",
    "train.warmup_steps=1",
    "train.batch_tokens=512",
    "train.device=cpu",
]
SMALL += ["train.tensorboard=false"]


def zipped(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What JUMOK_DATA may name: tables with the columns, line ends and signs of the real ones."""
    root, chance = tmp_path_factory.mktemp("data"), random.Random(1)
    for split, name in (("train", "sentence"), ("dev", "content")):
        rows = "".join(f"{label}\t{text}\r\n" for text, label in (review(chance) for _ in range(60)))
        zipped(root / "sst2" / f"{split}.tsv", f"label\t{name}\r\n{rows}")
        rows = "".join(f'{c}\t1\t2\t{a} "\t{b}\n' for a, b, c in (pair(chance) for _ in range(60)))
        zipped(root / "mrpc" / f"{split}.tsv", f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n{rows}")
        names = ["entailment", "not_entailment"]
        rows = "".join(
            f"{n}\t{a}\t{b}\t{names[int(c)]}\n" for n, (a, b, c) in enumerate(pair(chance) for _ in range(60))
        )
        zipped(root / "rte" / f"{split}.tsv", f"index\tsentence1\tsentence2\tlabel\n{rows}")
    for split in ("train", "dev", "test"):
        rows = "".join(f"g\tf\t2012\t1\t{score}.5\t{text}\tso\n" for text, score in (number(chance) for _ in range(60)))
        zipped(
            root / "korsts" / f"{split}.tsv",
            f"genre\tfilename\tyear\tid\tscore\tsentence1\tsentence2\n{rows}",
        )
        rows = "".join(f"7\t{text}\t{label}\n" for text, label in (review(chance) for _ in range(60)))
        zipped(root / "nsmc" / f"{split}.tsv", f"id\tdocument\tlabel\n{rows}8\t\t1\n")
        path = root / "conll.txt"
        tagged(path, [[("-DOCSTART-", "O")], *(sentence(chance) for _ in range(60))])
        zipped(root / "conll2003" / f"{split}.txt", path.read_text())
    for name in ("jaquad/train/jaquad_train_0000", "jaquad/dev/jaquad_dev_0000", "korquad/dev", "xquad/en"):
        path = root / "squad.json"
        squad(path, [[question(chance, 30) for _ in range(3)] for _ in range(20)])
        zipped(root / f"{name}.json", path.read_text())
    return root


LINES = {
    "classify": "a lovely film",
    "pair": "a lovely film\tthe story was sad",
    "tag": "Anna was Paris.",
    "answer": "who?\tAnna lives in Paris",
}


@pytest.mark.parametrize("name", USES)
def test_every_recipe_trains_answers_and_is_scored(
    name: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    run = Run.create_or_resume(tmp_path / "run", recipe.load(name, SMALL))
    train(build_task(run), Console(quiet=True))
    reader = load_predictor(Run.open(run.folder), "cpu")
    split = reader.load_split("test")
    found = evaluate(reader, "test", NBestOptions(), Console(quiet=True))
    kept = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept[found.select_by] == pytest.approx(found.statistic(np.arange(len(split.examples))))
    assert kept["num_examples"] == len(split.examples) == len(found.outputs) > 0
    assert kept["num_skipped"] == (1 if "nsmc" in name else 0)
    events = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "validation"][-1]
    assert last["loss"] > 0  # tells weights of the same score apart
    kind = "pair" if getattr(run.recipe.data, "pair_column", None) else run.recipe.task
    [one] = reader.predict([LINES[kind]], NBestOptions())
    [line] = one.to_lines(n_best=False, alignments=False, as_json=False)
    assert line
    want = {"mrpc": "f1", "korsts": "spearman", "conll2003": "f1", "quad": "f1"}
    assert found.select_by == next((best for data, best in want.items() if data in name), "accuracy")


def test_news_in_tables_without_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ag_news is: the title in a column of its own in the one table, and in the text in the other."""
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    chance = random.Random(1)
    (tmp_path / "news").mkdir()
    for split, columns in (("train", 2), ("test", 3)):
        with (tmp_path / "news" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            for text, label in (review(chance) for _ in range(60)):
                writer.writerow([label, *(["a title"] * (columns - 2)), text])
    tree: dict[str, Any] = recipe.to_dict(recipe.load("bert/sst2", SMALL))
    tree["data"] |= {"train": "news/train", "test": "news/test", "text_column": [2, 3], "label_column": 1}
    run = Run.create_or_resume(tmp_path / "run", recipe.parse(tree))
    train(build_task(run), Console(quiet=True))
    texts = [one.text for one in load_predictor(run, "cpu").load_split("test").examples]
    assert all(text.startswith("a title . ") for text in texts)


@pytest.mark.parametrize(
    ("name", "kind"), [("bert/sst2", "classify"), ("bert/conll2003", "tag"), ("bert/xquad-en", "answer")]
)
def test_the_commands(name: str, kind: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    monkeypatch.chdir(tmp_path)

    def jumok(*words: str) -> str:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "jumok run run" in jumok("train", name, *SMALL, "--out", "run")
    Path("lines.txt").write_text(f"{LINES[kind]}\n{LINES[kind]}\n", encoding="utf-8")
    told = [json.loads(line) for line in jumok("run", "run", "lines.txt", "--json").splitlines()]
    assert [one["line"] for one in told] == [0, 1]
    assert {"classify": "label", "tag": "tags", "answer": "start"}[kind] in told[0]
    jumok("run", "run", "lines.txt", "--attention-map", "map.png")
    assert Path("map.png").stat().st_size > 1000
    assert "examples" in jumok("eval", "run", "--split", "valid")
    jumok("look", "run", LINES[kind], "--out", "look.html")
    assert "[CLS]" in Path("look.html").read_text(encoding="utf-8")
    jumok("export", "run", "exported")
    assert (Path("exported") / "config.json").is_file()
