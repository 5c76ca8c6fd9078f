"""The benchmark of word links runs on small models, and scores all views, the chosen ones, and eflomal."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jumok import recipe
from jumok.data.builtin import english_korean
from jumok.run import Run
from jumok.tasks.translate import task as translate_task

ROOT = Path(__file__).parents[1]
SIZES = {"width": 8, "heads": 2, "feed_forward": 16, "encoder_layers": 1, "decoder_layers": 3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Both directions, hardly trained, with eleven gold pairs."""
    folder = tmp_path_factory.mktemp("align")
    found = list(itertools.islice(english_korean.generate_pairs(3, 200, max_words=7), 200))
    for name, some in (("train", found[11:]), ("gold", found[:11])):
        text = "".join(f"{pair.english}\t{pair.korean}\n" for pair in some)
        (folder / f"{name}.tsv").write_text(f"en\tko\n{text}", encoding="utf-8")
    links = (" ".join(f"{i}-{j}" for i, j in pair.sure_links) for pair in found[:11])
    (folder / "gold.links").write_text("".join(f"{line}\n" for line in links), encoding="utf-8")
    made = []
    for source, target in (("en", "ko"), ("ko", "en")):
        tree: dict[str, Any] = {
            "task": "translate",
            "model": {"kind": "transformer", **SIZES},
            "data": {"train": [str(folder / "train.tsv"), str(folder / "gold.tsv")], "held_out": 9},
            "text": {"size": 400},
            "train": {"steps": 2, "tokens": 512, "validate_every": 2, "average": 0, "tensorboard": False},
        }
        tree["data"] |= {"source": source, "target": target, "gold": str(folder / "gold")}
        tree["train"]["device"] = "cpu"
        run = Run.create_or_resume(folder / f"{source}-{target}", recipe.parse(tree))
        translate_task.train(run, Console(quiet=True))
        made.append(run)
    return made


def ran(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "bench/align.py", "--quick", "--device", "cpu", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "JUMOK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *lines, _ = done.stdout.splitlines()  # the last names a file, wherever that is
    assert max(map(len, lines)) <= 110
    return json.loads(Path(arguments[-1]).read_text(encoding="utf-8")), done.stdout


def test_every_view_the_choice_and_the_peer_are_scored(runs: list[Run], tmp_path: Path) -> None:
    found, said = ran(runs[0].folder, runs[1].folder, "--out", tmp_path / "align.json")
    assert (found["commit"], found["sentences"]) == ("abc1234", 11)
    views = [row for row in found["rows"] if row["section"] == "views"]
    assert len(views) == 2 * 2 * 3 * 3  # directions, plain and shifted, layers, heads and their mean
    rates = {(row["pass"], row["case"]): row["ways"]["attention"]["error_rate"] for row in views}
    links = {row["case"]: row for row in found["rows"] if row["section"] == "links"}
    assert set(links) == {
        *("plain", "shifted", "chosen"),
        *("plain, means", "shifted, means", "chosen, means"),
        "eflomal",
    }
    for name, row in links.items():
        if name != "eflomal":  # what was chosen is one of the views, and has its score
            forth, back, why = row["chosen"].split("; ")
            assert row["ways"]["forth"]["error_rate"] == rates["forth", forth]
            assert row["ways"]["back"]["error_rate"] == rates["back", back.removeprefix("back: ")]
            assert "agreement" in why
    both = links["chosen"]["ways"]
    assert set(both) == {
        "forth",
        "back",
        "together",
        "grow-diag",
        "grow-diag-final-and",
        "intersection",
        "union",
    }
    assert both["intersection"]["found"] <= both["grow-diag"]["found"] <= both["union"]["found"]
    assert "alignment error rate" in said
    peer = links["eflomal"]["ways"]
    if importlib.util.find_spec("eflomal") is None:
        assert "pip install eflomal" in peer["eflomal"]["error"]
    else:  # hardly trained models know less than words that come together tell
        assert peer["grow-diag"]["error_rate"] < both["grow-diag"]["error_rate"]
        learned = translate_task.TranslationData(runs[0].recipe.data, runs[0].folder).train_corpus()
        assert links["eflomal"]["pairs"] == sum("gold.tsv" not in pair.location for pair in learned) + 11


def test_gold_can_be_named(runs: list[Run], tmp_path: Path) -> None:
    gold = runs[0].recipe.data.gold
    arguments = ["--section", "eflomal", "--gold", gold, "--out", tmp_path / "align.json"]
    found, _ = ran(runs[0].folder, runs[1].folder, *arguments)
    assert found["gold"] == gold
    assert [row["case"] for row in found["rows"]] == ["eflomal"]
