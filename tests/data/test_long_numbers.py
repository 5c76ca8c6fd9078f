"""Python converts at most 4,300 digits: a longer number in a text is an error with a clear message."""

from __future__ import annotations

from pathlib import Path

import pytest

from jumok import InputError
from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.readers import classification, word_alignments
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.look.viewer import comparison
from jumok.tasks.translate import corpus_alignment

LONG_NUMBER = "1" * 5000


def test_links(tmp_path: Path) -> None:
    for text in (f"0-{LONG_NUMBER}\n", f"0-0\n{LONG_NUMBER}-1\n", f"1 1 1\n1 {LONG_NUMBER} 1\n"):
        (tmp_path / "gold.links").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="expected a link such as"):
            word_alignments.read_alignments(tmp_path / "gold.links")


def test_options_and_scenes() -> None:
    with pytest.raises(InputError, match="LAYER:1"):
        comparison.parse_ablations([f"encoder.0:{LONG_NUMBER}"])
    with pytest.raises(InputError, match="counted from 0"):
        corpus_alignment.parse_view_filter(LONG_NUMBER, "auto", None)
    with pytest.raises(InputError, match="expected the number of a scene"):
        BuiltinScene.from_name(f"scenes:{LONG_NUMBER}")


def test_label_too_large_for_a_float() -> None:
    assert isinstance(classification._parse_number(10**400, "here:1"), InvalidExample)
