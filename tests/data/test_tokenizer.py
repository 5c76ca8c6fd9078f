"""Tokenizers: text survives encoding and decoding, and the same text gives the same tokenizer."""

import functools
import json
import subprocess
import sys
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

pytestmark = pytest.mark.long


LINES = [
    "the small dog sees the big dog .",
    "Die Katze läuft über die Straße.",
    "이것은 예문이다. 책은 사과는",
    'a "quote", a T-shirt; 3.5 or 1,000?',
    "don't &apos;s &quot; <s> </s> <0x41>",
] * 4
KNOWN_CHARACTERS = "".join(sorted(set("".join(LINES))))
WHITESPACE = [chr(code) for code in range(0x110000) if chr(code).isspace()]
SUBWORD_TYPES = ("bpe", "unigram", "characters")
TYPES = (*SUBWORD_TYPES, "words")


@functools.cache
def train(type_: str, byte_fallback: bool = True, lowercase: bool = False, vocab_size: int = 420) -> Tokenizer:
    config = TokenizerConfig(type_, vocab_size, byte_fallback=byte_fallback, lowercase=lowercase)  # type: ignore[arg-type]
    return Tokenizer.train(LINES, config)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0]


def list_tokens(tokenizer: Tokenizer) -> list[str]:
    return tokenizer.ids_to_tokens(range(tokenizer.vocab_size))


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize("type_", SUBWORD_TYPES)
@given(st.text(KNOWN_CHARACTERS + " ").map(nfc))
def test_known_characters_are_restored_without_special_tokens(type_: str, byte_fallback: bool, text: str) -> None:
    tokenizer = train(type_, byte_fallback)
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {PAD, UNK, BOS, EOS}


@pytest.mark.parametrize("type_", SUBWORD_TYPES)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")).map(nfc))
def test_any_text_is_restored_with_byte_fallback(type_: str, text: str) -> None:
    text = "".join(" " if c.isspace() else c for c in text)
    tokenizer = train(type_)
    ids = encode(tokenizer, text)
    assert tokenizer.decode(ids) == tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == text


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("line", [" the  dog ", "   ", "", "<s>a</s><pad><unk>", "<0x41><0xE2>"])
def test_spaces_and_names_of_special_tokens_are_plain_text(type_: str, line: str) -> None:
    tokenizer = train(type_)
    ids = encode(tokenizer, line)
    assert not set(ids) & {PAD, BOS, EOS}
    if type_ != "words":
        assert tokenizer.decode(ids) == line
        assert all(i >= 260 for i in ids)  # 4 to 259 are the bytes


@pytest.mark.parametrize("type_", TYPES)
def test_whitespace_becomes_spaces(type_: str) -> None:
    tokenizer = train(type_)
    assert all(encode(tokenizer, f"the{character}dog") == encode(tokenizer, "the dog") for character in WHITESPACE)


@pytest.mark.parametrize("type_", TYPES)
@given(st.data())
def test_any_ids_are_decoded_to_one_line_whose_words_are_numbered(type_: str, data: st.DataObject) -> None:
    tokenizer = train(type_)
    byte_ids = [i + 4 for text in ("\n", "\u3000", "é", "▁") for i in text.encode()]
    options = st.integers(0, tokenizer.vocab_size - 1) | st.sampled_from([*byte_ids, *range(4, 41)])
    ids = [i % tokenizer.vocab_size for i in data.draw(st.lists(options))]
    text = tokenizer.decode(ids)
    assert len(text.splitlines()) <= 1
    word_ids = [word_id for word_id in tokenizer.word_ids_from_ids(ids) if word_id >= 0]
    assert word_ids == sorted(word_ids)
    if text.split():
        assert set(word_ids) == set(range(len(text.split())))


def test_word_tokens_are_words_and_symbols() -> None:
    tokenizer = train("words")
    text = "the  T-shirt, don't &apos;s 3.5."
    ids = encode(tokenizer, text)
    assert tokenizer.ids_to_tokens(ids) == ["▁the", "▁", "▁T-shirt", ",", "▁don't", "▁&apos;s", "▁3.5", "."]
    assert tokenizer.decode(ids) == text
    unknown = encode(tokenizer, "the zebra.")
    assert unknown[1] == UNK
    assert tokenizer.decode(unknown) == "the <unk>."


def test_jamo_are_composed_to_syllables() -> None:
    tokenizer = train("characters")
    ids = encode(tokenizer, unicodedata.normalize("NFD", "책은"))
    assert tokenizer.ids_to_tokens(ids) == ["책", "은"]
    assert tokenizer.decode(ids) == "책은"
    assert tokenizer.ids_to_tokens(encode(tokenizer, "über läuft"))[0] == "ü"


def test_lowercase() -> None:
    tokenizer = train("bpe", lowercase=True)
    assert tokenizer.decode(encode(tokenizer, "DIE Straße 이것은")) == "die straße 이것은"


@pytest.mark.parametrize("type_", ["bpe", "unigram"])
def test_no_piece_joins_letters_and_symbols(type_: str) -> None:
    for piece in list_tokens(train(type_, vocab_size=600))[260:]:
        is_letter = [c.isalnum() or c == "_" or unicodedata.combining(c) > 0 for c in piece.strip("▁")]
        assert all(is_letter) or not any(is_letter) or piece.strip("▁")[0] in "&aopsqut", piece


def test_unigram_vocabulary_has_whole_words() -> None:
    tokenizer = train("unigram", vocab_size=600)
    assert tokenizer.ids_to_tokens(encode(tokenizer, "the dog sees")) == ["▁the", "▁dog", "▁sees"]


@pytest.mark.parametrize("type_", TYPES)
def test_vocabulary_begins_with_special_tokens_and_bytes(type_: str) -> None:
    tokens = list_tokens(train(type_))
    assert tuple(tokens[:4]) == SPECIAL_TOKENS
    assert len(set(tokens)) == len(tokens) <= 420
    if type_ != "words":
        assert (tokens[4], tokens[259]) == ("<0x00>", "<0xFF>")
        assert train(type_, byte_fallback=False).ids_to_tokens([4])[0] != "<0x00>"


def test_training_is_deterministic_across_processes() -> None:
    code = """
import json, sys
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
lines, types = json.loads(sys.argv[1])
print(*(Tokenizer.train(iter(lines), TokenizerConfig(type_, vocab_size=420)).fingerprint for type_ in types))
"""
    process = subprocess.run(
        [sys.executable, "-c", code, json.dumps([LINES, TYPES])], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [train(type_).fingerprint for type_ in TYPES]


@pytest.mark.parametrize("type_", TYPES)
def test_training_is_deterministic_with_equally_rare_characters_and_words(type_: str) -> None:
    rare = [f"{chr(0xAC00 + n)}{chr(0xAC00 + n)} w{n}" for n in range(300)] * 2
    config = TokenizerConfig(type_, vocab_size=1200 if type_ == "unigram" else 420)  # type: ignore[arg-type]
    first = Tokenizer.train([*LINES, *rare], config)
    assert first.vocab_size <= config.vocab_size
    for _ in range(5):
        assert Tokenizer.train([*LINES, *rare], config).fingerprint == first.fingerprint
    if type_ in ("bpe", "characters"):  # of equally rare characters, those with the lowest code points
        rarest = [p for p in list_tokens(first) if len(p) == 1 and p >= "가" and p not in KNOWN_CHARACTERS]
        assert 5 < len(rarest) < 300
        assert rarest == [chr(0xAC00 + n) for n in range(len(rarest))]


def test_rare_characters_of_a_large_alphabet_are_bytes() -> None:
    rare = "".join(map(chr, range(0xAC00, 0xAC00 + 900)))
    tokenizer = Tokenizer.train([*LINES, rare], TokenizerConfig("bpe", vocab_size=600))
    assert sum(len(token) == 1 for token in list_tokens(tokenizer)[260:]) == (600 - 260) // 2
    assert "▁the" in list_tokens(tokenizer)
    assert tokenizer.decode(encode(tokenizer, rare)) == rare


# ----------------------------------------------------------------------------------------- words of a text


@pytest.mark.parametrize("type_", TYPES)
def test_word_of_each_token(type_: str) -> None:
    tokenizer = train(type_)
    text = "  the dog  zzz. 책은 "
    word_ids, ids = tokenizer.word_ids_from_text(text), encode(tokenizer, text)
    ids_of_words: dict[int, list[int]] = {}
    for word_id, i in zip(word_ids, ids, strict=True):
        ids_of_words.setdefault(word_id, []).append(i)
    decoded = [tokenizer.decode(ids_of_words[n]).strip() for n in range(len(ids_of_words))]
    assert decoded == ["the", "dog", "<unk>." if type_ == "words" else "zzz.", "책은"]
    assert tokenizer.word_ids_from_ids([BOS, *ids, EOS, PAD]) == [-1, *word_ids, -1, -1]


@pytest.mark.parametrize("type_", SUBWORD_TYPES)
@given(st.text(st.sampled_from("dog 책.é\U0001f436<>-▁\xa0\u3000\n")).filter(str.strip).map(nfc))
def test_words_are_separated_by_whitespace(type_: str, text: str) -> None:
    tokenizer = train(type_)
    word_ids = tokenizer.word_ids_from_text(text)
    assert word_ids == sorted(word_ids)
    assert set(word_ids) == set(range(len(text.split())))
    assert tokenizer.word_ids_from_ids(encode(tokenizer, text)) == word_ids


def test_unknown_word_in_an_output_is_a_separate_word() -> None:
    tokenizer = train("words")
    the, dot = encode(tokenizer, "the.")
    ids = [the, UNK, UNK, dot]
    assert tokenizer.decode(ids) == "the <unk> <unk>."
    assert tokenizer.word_ids_from_ids(ids) == [0, 1, 2, 2]


# ------------------------------------------------------------------------------------------ files and sides


@pytest.mark.parametrize("shared", [True, False])
def test_save_and_load_both_sides(tmp_path: Path, shared: bool) -> None:
    corpus = ParallelCorpus.from_pairs("numbers", lambda: ((f"dog {n}", f"개 {n}\n") for n in range(50)))
    pair = TokenizerPair.train(corpus, TokenizerConfig("characters", vocab_size=420, shared_vocabulary=shared))
    pair.save(tmp_path)
    names = ["tokenizer.json"] if shared else ["tokenizer.source.json", "tokenizer.target.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    loaded = TokenizerPair.load(tmp_path)
    assert loaded.is_shared == shared
    assert loaded.source.fingerprint == pair.source.fingerprint
    assert loaded.target.fingerprint == pair.target.fingerprint
    assert ("개" in list_tokens(pair.source)) == shared
    assert "개" in list_tokens(pair.target)
    library_tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / names[0]))
    assert library_tokenizer.encode("dog 3").ids == encode(loaded.source, "dog 3")


def test_examples_are_iterated_once() -> None:
    iterator = iter(list(ParallelCorpus.from_pairs("x", lambda: [("a dog", "ein Hund")] * 3)))
    pair = TokenizerPair.train(iterator, TokenizerConfig("words", vocab_size=420, shared_vocabulary=False))
    assert pair.source.ids_to_tokens([5, 6]) == ["▁a", "▁dog"]
    assert pair.target.ids_to_tokens([5, 6]) == ["▁Hund", "▁ein"]


def test_invalid_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(InputError, match="there is no "):
        Tokenizer.load(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="is not a tokenizer"):
        Tokenizer.load(path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")).save(str(path))
    with pytest.raises(InputError, match=r"id 0 is 'a'; in jumok it is '<pad>'"):
        Tokenizer.load(path)


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(InputError, match="vocab_size=100: expected 2"):
        TokenizerConfig("bpe", vocab_size=100)
    with pytest.raises(InputError, match="no text to train a vocabulary on"):
        Tokenizer.train([], TokenizerConfig())
    with pytest.raises(InputError, match="must contain all characters"):
        Tokenizer.train(["".join(map(chr, range(0xAC00, 0xB000)))], TokenizerConfig("unigram", vocab_size=400))
    tokenizer = train("bpe")
    with pytest.raises(InputError, match="is not a string that can be encoded in UTF-8"):
        tokenizer.encode(["fine", "\ud83d"])
    with pytest.raises(InputError, match=r"a token id is 9999; expected 0 to"):
        tokenizer.ids_to_tokens([5, 9999])
    with pytest.raises(InputError, match="a token id is -1"):
        tokenizer.ids_to_tokens([-1])
