"""examples/own_model.py has at most a hundred lines and runs on a table."""

import importlib.util
from pathlib import Path

from docs_parts import ROOT

from jumok.data.builtin.english_korean import read_pairs
from jumok.tasks.translate.config import TranslationDataConfig

FILE = ROOT / "examples" / "own_model.py"


def test_it_trains_translates_and_can_be_seen(tmp_path: Path, capsys: object) -> None:
    table = tmp_path / "my.tsv"
    pairs = [pair for pair in read_pairs("valid", 1000) if len(pair.english.split()) <= 6][:150]
    table.write_text("".join(f"{pair.english}\t{pair.korean}\n" for pair in pairs), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("own_model", FILE)
    assert spec is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    translations = own.main(TranslationDataConfig(train=str(table)), tmp_path / "run", steps=3)
    assert len(translations) == 3
    assert all(" → " in line for line in translations)
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_it_is_short() -> None:
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 100
