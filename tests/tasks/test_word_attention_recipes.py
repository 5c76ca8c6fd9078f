"""Every recipe of the word attention classifiers, on small data with the layout of the real data."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pytest
from labelled_runs import make_pair, make_review, write_gzip
from rich.console import Console

from jumok import recipe
from jumok.run import Run
from jumok.tasks import build_task, load_predictor
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions
from jumok.tasks.training import train

pytestmark = pytest.mark.long


NAMES = [name for name in recipe.list_builtin() if name.startswith(("self_attentive/", "hierarchical/"))]
SMALL = ["model.embedding_width=8", "model.width=8", "model.attention_width=8", "data.held_out_size=20"]
SMALL += ["data.builtin_size=120", "tokenizer.vocab_size=400", "train.max_epochs=null", "train.max_steps=3"]
SMALL += ["train.warmup_steps=1", "train.batch_tokens=256", "train.device=cpu", "train.tensorboard=false"]
STARS = (1, 2, 3, 4, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for JUMOK_DATA, with tables like the real ones."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(1)
    for split in ("train", "test", "dev"):
        rows = [make_review(rng) for _ in range(60)]
        stars = [rng.choice(STARS) for _ in rows]
        documents = [
            {"id": n, "text": f"{text}.<br /><br />{text}", "label": int(label), "rating": rating}
            for n, ((text, label), rating) in enumerate(zip(rows, stars, strict=True))
        ]
        write_gzip(root / "imdb" / f"{split}.jsonl", "".join(f"{json.dumps(document)}\n" for document in documents))
        lines = "".join(f"7\t{text}\t{label}\n" for text, label in rows)
        write_gzip(root / "nsmc" / f"{split}.tsv", f"id\tdocument\tlabel\n{lines}8\t\t1\n")
        file = io.StringIO()
        for text, _ in rows:
            title = ["a title"] if split == "test" else []
            csv.writer(file, quoting=csv.QUOTE_ALL).writerow([rng.randint(1, 4), *title, f"{text} #39;s"])
        write_gzip(root / "ag_news" / f"{split}.csv", file.getvalue())
        names = ["entailment", "not_entailment"]
        pairs = (make_pair(rng) for _ in range(60))
        lines = "".join(f"{n}\t{a}\t{b}\t{names[int(c)]}\n" for n, (a, b, c) in enumerate(pairs))
        write_gzip(root / "rte" / f"{split}.tsv", f"index\tsentence1\tsentence2\tlabel\n{lines}")
    return root


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_and_is_evaluated(
    name: str, data_sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(data_sets))
    run = Run.create_or_resume(tmp_path / "run", recipe.load(name, SMALL))
    train(build_task(run), Console(quiet=True))
    predictor = load_predictor(Run.open(run.folder), "cpu")
    evaluate(predictor, "test", NBestOptions(), Console(quiet=True))
    stored = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert 0 <= stored["accuracy"] <= 1
    assert stored["num_skipped"] == (1 if "nsmc" in name else 0)
    assert ("mean_absolute_error" in stored) == ("ratings" in name)
    assert ("attention_hits" in stored) == ("default" in name)
    classes = {"imdb": 2, "imdb-ratings": 8, "ag_news": 4, "nsmc": 2, "rte": 2, "default": 3}
    assert len(predictor.labels) == len(stored["confusion"]) == classes[name.partition("/")[2]]
    line = "a lovely film\tthe story was sad" if "rte" in name else "a lovely film"
    [prediction] = predictor.predict([line], NBestOptions())
    assert prediction.label in predictor.labels
    if "imdb" in name:
        assert "br" not in predictor.task.tokenize_words(predictor.load_split("test").examples[0].text).words  # type: ignore[attr-defined]
    if "ag_news" in name:
        assert all(example.text.startswith("a title . ") for example in predictor.load_split("test").examples)
