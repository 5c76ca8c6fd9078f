"""Every recipe of a fine-tuned BERT, on small data with the layout of the real data, and the commands."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled_runs import (
    MODEL,
    make_number,
    make_pair,
    make_question,
    make_review,
    make_sentence,
    write_gzip,
    write_squad,
    write_tagged,
)
from rich.console import Console
from typer.testing import CliRunner

from jumok import recipe
from jumok.cli.app import app
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train

pytestmark = pytest.mark.long


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


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JUMOK_DATA, with tables like the real ones."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    for split, name in (("train", "sentence"), ("dev", "content")):
        rows = "".join(f"{label}\t{text}\r\n" for text, label in (make_review(rng) for _ in range(60)))
        write_gzip(root / "sst2" / f"{split}.tsv", f"label\t{name}\r\n{rows}")
        rows = "".join(f'{c}\t1\t2\t{a} "\t{b}\n' for a, b, c in (make_pair(rng) for _ in range(60)))
        write_gzip(root / "mrpc" / f"{split}.tsv", f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n{rows}")
        names = ["entailment", "not_entailment"]
        rows = "".join(
            f"{n}\t{a}\t{b}\t{names[int(c)]}\n" for n, (a, b, c) in enumerate(make_pair(rng) for _ in range(60))
        )
        write_gzip(root / "rte" / f"{split}.tsv", f"index\tsentence1\tsentence2\tlabel\n{rows}")
    for split in ("train", "dev", "test"):
        rows = "".join(
            f"g\tf\t2012\t1\t{score}.5\t{text}\tso\n" for text, score in (make_number(rng) for _ in range(60))
        )
        write_gzip(root / "korsts" / f"{split}.tsv", f"genre\tfilename\tyear\tid\tscore\tsentence1\tsentence2\n{rows}")
        rows = "".join(f"7\t{text}\t{label}\n" for text, label in (make_review(rng) for _ in range(60)))
        write_gzip(root / "nsmc" / f"{split}.tsv", f"id\tdocument\tlabel\n{rows}8\t\t1\n")
        path = root / "conll.txt"
        write_tagged(path, [[("-DOCSTART-", "O")], *(make_sentence(rng) for _ in range(60))])
        write_gzip(root / "conll2003" / f"{split}.txt", path.read_text())
    for name in ("jaquad/train/jaquad_train_0000", "jaquad/dev/jaquad_dev_0000", "korquad/dev", "xquad/en"):
        path = root / "squad.json"
        write_squad(path, [[make_question(rng, 30) for _ in range(3)] for _ in range(20)])
        write_gzip(root / f"{name}.json", path.read_text())
    return root


LINES = {
    "classify": "a lovely film",
    "pair": "a lovely film\tthe story was sad",
    "tag": "Anna was Paris.",
    "answer": "who?\tAnna lives in Paris",
}


@pytest.mark.parametrize("name", USES)
def test_every_recipe_trains_and_is_evaluated(
    name: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    run = Run.create_or_resume(tmp_path / "run", recipe.load(name, SMALL))
    train(build_task(run), Console(quiet=True))
    predictor = load_predictor(Run.open(run.folder), "cpu")
    split = predictor.load_split("test")
    evaluation = evaluate(predictor, "test", NBestOptions(), Console(quiet=True))
    stored = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert stored[evaluation.select_by] == pytest.approx(evaluation.statistic(np.arange(len(split.examples))))
    assert stored["num_examples"] == len(split.examples) == len(evaluation.outputs) > 0
    assert stored["num_skipped"] == (1 if "nsmc" in name else 0)
    events = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    last = [event for event in events if event["event"] == "validation"][-1]
    assert last["loss"] > 0  # decides between equal scores
    kind = "pair" if getattr(run.recipe.data, "pair_column", None) else run.recipe.task
    [prediction] = predictor.predict([LINES[kind]], NBestOptions())
    [line] = prediction.to_lines()
    assert line
    want = {"mrpc": "f1", "korsts": "spearman", "conll2003": "f1", "quad": "f1"}
    assert evaluation.select_by == next((best for data, best in want.items() if data in name), "accuracy")


def test_tables_without_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in AG News: the title has its own column in one table, and is part of the text in the other."""
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    rng = random.Random(1)
    (tmp_path / "news").mkdir()
    for split, columns in (("train", 2), ("test", 3)):
        with (tmp_path / "news" / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            for text, label in (make_review(rng) for _ in range(60)):
                writer.writerow([label, *(["a title"] * (columns - 2)), text])
    tree: dict[str, Any] = recipe.to_dict(recipe.load("bert/sst2", SMALL))
    tree["data"] |= {"train": "news/train", "test": "news/test", "text_column": [2, 3], "label_column": 1}
    run = Run.create_or_resume(tmp_path / "run", recipe.parse(tree))
    train(build_task(run), Console(quiet=True))
    texts = [example.text for example in load_predictor(run, "cpu").load_split("test").examples]
    assert all(text.startswith("a title . ") for text in texts)


@pytest.mark.parametrize(
    ("name", "kind"), [("bert/sst2", "classify"), ("bert/conll2003", "tag"), ("bert/xquad-en", "answer")]
)
def test_commands(name: str, kind: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    monkeypatch.chdir(tmp_path)

    def jumok(*words: str) -> str:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert "jumok run run" in jumok("train", name, *SMALL, "--out", "run")
    Path("lines.txt").write_text(f"{LINES[kind]}\n{LINES[kind]}\n", encoding="utf-8")
    lines = [json.loads(line) for line in jumok("run", "run", "lines.txt", "--json").splitlines()]
    assert [line["line"] for line in lines] == [0, 1]
    assert {"classify": "label", "tag": "tags", "answer": "start"}[kind] in lines[0]
    jumok("run", "run", "lines.txt", "--attention-map", "map.png")
    assert Path("map.png").stat().st_size > 1000
    assert "examples" in jumok("eval", "run", "--split", "valid")
    jumok("look", "run", LINES[kind], "--out", "look.html")
    assert "[CLS]" in Path("look.html").read_text(encoding="utf-8")
    jumok("export", "run", "exported")
    assert (Path("exported") / "config.json").is_file()
