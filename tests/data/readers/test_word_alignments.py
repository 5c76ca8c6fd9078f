"""Gold word alignments in published formats."""

import gzip
from pathlib import Path

import pytest

from jumok.data.readers import word_alignments
from jumok.data.readers.word_alignments import GoldAlignment
from jumok.errors import InputError


def write_file(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_pharaoh_format_from_0_and_from_1(tmp_path: Path) -> None:
    expected = [
        GoldAlignment(frozenset({(0, 0)}), frozenset({(0, 0), (1, 2)})),
        GoldAlignment(frozenset(), frozenset()),
        GoldAlignment(frozenset({(4, 3)}), frozenset({(4, 3), (0, 1)})),
    ]
    from_0 = write_file(tmp_path / "a.txt", "0-0 1p2\n\n4-3 0?1\n")
    from_1 = write_file(tmp_path / "b.txt.gz", "1-1 2p3\n\n5-4 1?2\n")
    assert word_alignments.read_alignments(from_0) == word_alignments.read_alignments(from_1) == expected
    assert word_alignments.read_alignments(from_1, first_index=0)[0].sure == {(1, 1)}
    with pytest.raises(InputError, match=r"a\.txt:1: a word is 0, but words start at 1"):
        word_alignments.read_alignments(from_0, first_index=1)


def test_one_link_per_line(tmp_path: Path) -> None:
    path = write_file(tmp_path / "gold.txt", "1 0 0 S\n1 2 1 S \n3 5 6 P\n3 5 7\n")
    assert word_alignments.read_alignments(path) == [
        GoldAlignment(frozenset({(0, 0), (2, 1)}), frozenset({(0, 0), (2, 1)})),
        GoldAlignment(frozenset(), frozenset()),
        GoldAlignment(frozenset({(5, 7)}), frozenset({(5, 6), (5, 7)})),
    ]
    assert len(word_alignments.read_alignments(path, num_pairs=5)) == 5
    with pytest.raises(InputError, match="links for pair 3, and there are 2 pairs"):
        word_alignments.read_alignments(path, num_pairs=2)


def test_swap_sides() -> None:
    alignment = GoldAlignment(frozenset({(0, 5)}), frozenset({(0, 5), (2, 3)}))
    assert alignment.swap_sides() == GoldAlignment(frozenset({(5, 0)}), frozenset({(5, 0), (3, 2)}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-0 1:2\n", ":1: '1:2'; expected a link such as 3-4"),
        ("1 0 0 S\n1 0 S\n", ":2: '1 0 S'; expected a link such as 17 3 4 S"),
        ("1 0 0 S\n0 1 1 S\n", ":2: '0 1 1 S'.*pairs from 1"),
        ("", "is empty"),
    ],
)
def test_invalid_link_error_gives_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        word_alignments.read_alignments(write_file(tmp_path / "gold.txt", text))


def test_find_alignment_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set").mkdir()
    path = write_file(tmp_path / "set" / "gold.links.txt.gz", "0-0\n")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    assert word_alignments.find_alignment_file("set/gold") == word_alignments.find_alignment_file(str(path)) == path
    with pytest.raises(InputError, match=r"no file set/dev .*contains: gold\.links\.txt\.gz"):
        word_alignments.find_alignment_file("set/dev")
