"""Tokenizers: nothing is lost on the way to ids and back, and the same text gives the same tokenizer."""

import functools
import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from jumok.data.readers.parallel_corpus import ParallelCorpus
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerPair
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.errors import InputError

LINES = [
    "the small dog sees the big dog .",
    "Die Katze läuft über die Straße.",
    "이것은 예문이다. 책은 사과는",
    'a "quote", a T-shirt; 3.5 or 1,000?',
    "don't &apos;s &quot; <s> </s> <0x41>",
] * 4
SEEN = "".join(sorted(set("".join(LINES))))
WHITE = [chr(code) for code in range(0x110000) if chr(code).isspace()]
SUBWORDS = ("bpe", "unigram", "characters")
KINDS = (*SUBWORDS, "words")


@functools.cache
def trained(kind: str, has_bytes: bool = True, lower: bool = False, size: int = 420) -> Tokenizer:
    config = TokenizerConfig(kind, vocab_size=size, byte_fallback=has_bytes, lowercase=lower)  # type: ignore[arg-type]
    return Tokenizer.train(LINES, config)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("kind", SUBWORDS)
@given(st.text(SEEN + " ").map(nfc))
def test_seen_characters_come_back_exactly_and_never_as_a_special_token(kind: str, text: str) -> None:
    for has_bytes in (True, False):
        tokenizer = trained(kind, has_bytes)
        ids = tokenizer.encode([text])[0]
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {PAD, UNK, BOS, EOS}


@pytest.mark.parametrize("kind", SUBWORDS)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")).map(nfc))
def test_with_bytes_any_text_comes_back(kind: str, text: str) -> None:
    text = "".join(" " if c.isspace() else c for c in text)
    tokenizer = trained(kind)
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", [" the  dog ", "   ", "", "<s>a</s><pad><unk>", "<0x41><0xE2>"])
def test_spaces_and_the_names_of_special_tokens_are_plain_text(kind: str, line: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode([line])[0]
    assert not set(ids) & {PAD, BOS, EOS}
    if kind != "words":
        assert tokenizer.decode(ids) == line
        assert all(i >= 260 for i in ids)  # 4 to 259 are the bytes


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_white_space_becomes_spaces_and_what_is_decoded_is_one_line(kind: str, data: st.DataObject) -> None:
    tokenizer = trained(kind)
    for white in WHITE:
        assert tokenizer.encode([f"the{white}dog"]) == tokenizer.encode(["the dog"])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(4, 40)))
    assert len(tokenizer.decode(ids).splitlines()) <= 1


def test_words_are_whole_with_signs_apart_and_spaces_kept() -> None:
    tokenizer = trained("words")
    ids = tokenizer.encode(["the  T-shirt, don't &apos;s 3.5."])[0]
    assert tokenizer.ids_to_tokens(ids) == ["▁the", "▁", "▁T-shirt", ",", "▁don't", "▁&apos;s", "▁3.5", "."]
    assert tokenizer.decode(ids) == "the  T-shirt, don't &apos;s 3.5."
    unknown = tokenizer.encode(["the zebra."])[0]
    assert unknown[1] == UNK
    assert tokenizer.decode(unknown) == "the <unk>."


def test_hangul_stays_whole_syllables_and_jamo_become_them() -> None:
    tokenizer = trained("characters")
    apart = unicodedata.normalize("NFD", "책은")
    assert len(apart) == 6
    assert tokenizer.ids_to_tokens(tokenizer.encode([apart])[0]) == ["책", "은"]
    assert tokenizer.decode(tokenizer.encode([apart])[0]) == "책은"
    accents = tokenizer.encode(["über läuft"])[0]
    assert tokenizer.ids_to_tokens(accents)[0] == "ü"


def test_lower_makes_letters_small() -> None:
    tokenizer = trained("bpe", lower=True)
    assert tokenizer.decode(tokenizer.encode(["DIE Straße 이것은"])[0]) == "die straße 이것은"


def test_no_piece_joins_letters_and_signs() -> None:
    for kind in ("bpe", "unigram"):
        tokenizer = trained(kind, size=600)
        for piece in tokenizer.ids_to_tokens(range(260, tokenizer.vocab_size)):
            letters = [c.isalnum() or c == "_" or unicodedata.combining(c) > 0 for c in piece.strip("▁")]
            assert all(letters) or not any(letters) or piece.strip("▁")[0] in "&aopsqut", piece


def test_a_unigram_vocabulary_has_whole_words() -> None:
    tokenizer = trained("unigram", size=600)
    assert tokenizer.ids_to_tokens(tokenizer.encode(["the dog sees"])[0]) == ["▁the", "▁dog", "▁sees"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first_then_bytes_and_the_size_is_kept(kind: str) -> None:
    tokenizer = trained(kind)
    assert tuple(tokenizer.ids_to_tokens(range(4))) == SPECIAL_TOKENS
    assert tokenizer.vocab_size <= 420
    assert len(set(tokenizer.ids_to_tokens(range(tokenizer.vocab_size)))) == tokenizer.vocab_size
    if kind != "words":
        assert tokenizer.ids_to_tokens([4, 259]) == ["<0x00>", "<0xFF>"]
        assert trained(kind, has_bytes=False).ids_to_tokens([4])[0] != "<0x00>"


def test_training_again_gives_the_same_file_in_this_process_and_in_another() -> None:
    again = [Tokenizer.train(iter(LINES), TokenizerConfig(kind, vocab_size=420)) for kind in KINDS]  # type: ignore[arg-type]
    code = """
import json, sys
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
lines, kinds = json.loads(sys.argv[1])
print(*(Tokenizer.train(lines, TokenizerConfig(kind, vocab_size=420)).fingerprint for kind in kinds))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([LINES, KINDS])], capture_output=True, text=True, check=True
    )
    first = [trained(kind).fingerprint for kind in KINDS]
    assert [one.fingerprint for one in again] == first
    assert done.stdout.split() == first


@pytest.mark.parametrize("kind", ["bpe", "characters", "unigram", "words"])
def test_equally_rare_characters_and_words_leave_nothing_to_chance(kind: str) -> None:
    rare = [f"{chr(0xAC00 + n)}{chr(0xAC00 + n)} w{n}" for n in range(300)] * 2
    config = TokenizerConfig(kind, vocab_size=1200 if kind == "unigram" else 420)  # type: ignore[arg-type]
    first = Tokenizer.train([*LINES, *rare], config)
    assert first.vocab_size <= config.vocab_size
    for _ in range(5):
        assert Tokenizer.train([*LINES, *rare], config).fingerprint == first.fingerprint
    if kind in ("bpe", "characters"):  # of the equally rare, the first ones by code point
        kept = [piece for piece in first.ids_to_tokens(range(first.vocab_size)) if len(piece) == 1 and piece >= "가"]
        rarest = [piece for piece in kept if piece not in SEEN]
        assert 5 < len(rarest) < 300
        assert rarest == [chr(0xAC00 + n) for n in range(len(rarest))]


# ----------------------------------------------------------------------------------------- words of a text


@pytest.mark.parametrize("kind", KINDS)
def test_the_word_of_every_token(kind: str) -> None:
    tokenizer = trained(kind)
    text = "  the dog  zzz. 책은 "
    numbers = tokenizer.word_ids_from_text(text)
    ids = tokenizer.encode([text])[0]
    assert len(numbers) == len(ids)
    by_word: dict[int, list[int]] = {}
    for number, i in zip(numbers, ids, strict=True):
        by_word.setdefault(number, []).append(i)
    decoded = [tokenizer.decode(by_word[n]).strip() for n in range(len(by_word))]
    if kind == "words":
        assert decoded == ["the", "dog", "<unk>.", "책은"]
    else:
        assert decoded == ["the", "dog", "zzz.", "책은"]
    assert tokenizer.word_ids_from_ids([BOS, *ids, EOS, PAD]) == [-1, *numbers, -1, -1]


@pytest.mark.parametrize("kind", SUBWORDS)
@given(st.text(st.sampled_from("dog 책.é\U0001f436<>-▁\xa0\u3000\n")).filter(str.strip).map(nfc))
def test_words_are_those_between_white_space(kind: str, text: str) -> None:
    tokenizer = trained(kind)
    numbers = tokenizer.word_ids_from_text(text)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(len(text.split())))
    assert tokenizer.word_ids_from_ids(tokenizer.encode([text])[0]) == numbers


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_the_words_of_any_ids_are_those_of_their_text(kind: str, data: st.DataObject) -> None:
    tokenizer = trained(kind)
    some = [i + 4 for text in ("\n", "\u3000", "é", "▁") for i in text.encode()]  # as bytes, whole and in part
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from([*some, 30])))
    if kind == "words":
        ids = [i % tokenizer.vocab_size for i in ids]
    numbers = [number for number in tokenizer.word_ids_from_ids(ids) if number >= 0]
    assert numbers == sorted(numbers)
    if tokenizer.decode(ids).split():
        assert set(numbers) == set(range(len(tokenizer.decode(ids).split())))


def test_an_unknown_word_of_an_output_is_a_word_of_its_own() -> None:
    tokenizer = trained("words")
    the, dot = tokenizer.encode(["the."])[0]
    ids = [the, UNK, UNK, dot]
    assert tokenizer.decode(ids) == "the <unk> <unk>."
    assert tokenizer.word_ids_from_ids(ids) == [0, 1, 2, 2]


# ------------------------------------------------------------------------------------------ files and sides


@pytest.mark.parametrize("joint", [True, False])
def test_both_sides_are_saved_and_loaded(tmp_path: Path, joint: bool) -> None:
    corpus = ParallelCorpus.from_pairs("numbers", lambda: ((f"dog {n}", f"개 {n}\n") for n in range(50)))
    made = TokenizerPair.train(corpus, TokenizerConfig("characters", vocab_size=420, shared_vocabulary=joint))
    made.save(tmp_path)
    names = ["tokenizer.json"] if joint else ["tokenizer.source.json", "tokenizer.target.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = TokenizerPair.load(tmp_path)
    assert loaded.is_shared == joint
    assert loaded.source.fingerprint == made.source.fingerprint
    assert loaded.target.fingerprint == made.target.fingerprint
    assert ("개" in made.source.ids_to_tokens(range(made.source.vocab_size))) == joint
    assert "개" in made.target.ids_to_tokens(range(made.target.vocab_size))
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / names[0]))  # the library's own
    assert plain.encode("dog 3").ids == loaded.source.encode(["dog 3"])[0]


def test_the_examples_are_gone_through_once() -> None:
    config = TokenizerConfig("words", vocab_size=420, shared_vocabulary=False)
    once = iter(list(ParallelCorpus.from_pairs("x", lambda: [("a dog", "ein Hund")] * 3)))
    made = TokenizerPair.train(once, config)
    assert made.source.ids_to_tokens([5, 6]) == ["▁a", "▁dog"]
    assert made.target.ids_to_tokens([5, 6]) == ["▁Hund", "▁ein"]


def test_what_is_no_tokenizer_of_ours_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "tokenizer.json"
        with pytest.raises(InputError, match="there is no "):
            Tokenizer.load(path)
        path.write_text("{}")
        with pytest.raises(InputError, match="is not a tokenizer"):
            Tokenizer.load(path)
        tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")).save(str(path))
        with pytest.raises(InputError, match=r"id 0 is 'a'; in jumok it is '<pad>'"):
            Tokenizer.load(path)


def test_mistakes_are_told() -> None:
    with pytest.raises(InputError, match="vocab_size=100: expected 2"):
        TokenizerConfig("bpe", vocab_size=100)
    with pytest.raises(InputError, match="no text to train a vocabulary on"):
        Tokenizer.train([], TokenizerConfig())
    with pytest.raises(InputError, match="must contain all characters"):
        Tokenizer.train(["".join(map(chr, range(0xAC00, 0xB000)))], TokenizerConfig("unigram", vocab_size=400))
    tokenizer = trained("bpe")
    with pytest.raises(InputError, match="is not a string that can be encoded in UTF-8"):
        tokenizer.encode(["fine", "\ud83d"])
    with pytest.raises(InputError, match=r"a token id is 9999; expected 0 to"):
        tokenizer.ids_to_tokens([5, 9999])
    with pytest.raises(InputError, match="a token id is -1"):
        tokenizer.ids_to_tokens([-1])


def test_a_large_alphabet_leaves_room_for_pieces_and_its_rare_characters_are_bytes() -> None:
    rare = "".join(map(chr, range(0xAC00, 0xAC00 + 900)))
    tokenizer = Tokenizer.train([*LINES, rare], TokenizerConfig("bpe", vocab_size=600))
    characters = [piece for piece in tokenizer.ids_to_tokens(range(260, tokenizer.vocab_size)) if len(piece) == 1]
    assert len(characters) == (600 - 260) // 2
    assert "▁the" in tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
    assert tokenizer.decode(tokenizer.encode([rare])[0]) == rare
