"""Python converts at most 4,300 digits: a longer number in a text is an error message, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from jumok import InputError
from jumok.data import labelled, links
from jumok.data.drawn import Drawn
from jumok.data.formats import Flaw
from jumok.look import without
from jumok.tasks import linking

LONG = "1" * 5000


def test_gold_links(tmp_path: Path) -> None:
    for text in (f"0-{LONG}\n", f"0-0\n{LONG}-1\n", f"1 1 1\n1 {LONG} 1\n"):
        (tmp_path / "gold.links").write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="a link is written as in"):
            links.read(tmp_path / "gold.links")


def test_options_and_names() -> None:
    with pytest.raises(InputError, match="LAYER:1"):
        without.read([f"encoder.0:{LONG}"])
    with pytest.raises(InputError, match="counted from 0"):
        linking.asked(LONG, "auto", None)
    with pytest.raises(InputError, match="told by its number"):
        Drawn.named(f"scenes:{LONG}")


def test_a_label_beyond_any_float() -> None:
    assert isinstance(labelled._number(10**400, "here:1"), Flaw)
