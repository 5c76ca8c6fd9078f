"""Answers in texts, from SQuAD's format to a span of characters: learned to the last one, in windows too."""

from __future__ import annotations

import json
import random
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from labelled_runs import question, squad, train_run
from rich.console import Console

import jumok
from jumok import InputError
from jumok.data.readers.squad import AnswerExample, ContextSpan
from jumok.data.tokenizers.segmentation import find_grapheme_boundaries
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.answer.data import EncodedQuestion, encode_questions
from jumok.tasks.evaluation import evaluate
from jumok.tasks.options import NBestOptions

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("questions")
    chance = random.Random(1)
    # Some texts are longer than the model reads at once.
    articles = [[question(chance, most) for most in (3, 5, 8, 60)] for _ in range(60)]
    data = {"train": squad(folder / "train.json", articles), "held_out_size": 40, "window_stride": 16}
    return train_run(folder / "run", "answer", data, train={"max_epochs": 15, "batch_tokens": 1024})


def test_answers_are_learned(run: Run) -> None:
    reader = jumok.load(run.folder, "cpu")
    found = evaluate(reader, "test", NBestOptions(), QUIET)
    assert found.metrics["exact_match"] == found.metrics["f1"] == found.metrics["f1_upper_bound"] == 1
    split = reader.load_split("test")
    assert max(len(one.context.split()) for one in split.examples) > 40
    train = {one.article for one in reader.task.train_split().examples}
    assert not train & {one.article for one in split.examples}  # whole articles are held out


def test_what_is_said_in_words(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    context = "the film  Carla Maria lives in New York and"
    found = reader.answer("where?", context)
    assert found.answer == ContextSpan("New York", context.index("New York"))
    assert context[found.answer.start : found.answer.end] == "New York"
    share = found.answers[0][1]
    assert 0.5 < share <= 1
    [line] = found.to_lines(n_best=False, alignments=False, as_json=False)
    assert line == f"New York\t{found.answer.start}-{found.answer.end}\t{share:.4f}"
    lines = [f"who?\t{context}", json.dumps({"question": "where?", "context": context})]
    who, where = reader.predict(lines, NBestOptions(), first_index=4)
    assert (who.index, who.answer.text) == (4, "Carla Maria")
    assert where.answers == found.answers
    [told] = map(json.loads, where.to_lines(n_best=False, alignments=False, as_json=True))
    assert (told["answer"], told["start"], told["end"]) == ("New York", 31, 39)
    [several] = reader.predict(lines[:1], NBestOptions(n_best=3))
    shares = [share for _, share in several.answers]
    assert len(shares) == 3
    assert shares == sorted(shares, reverse=True)
    assert several.answer == who.answer
    assert len(list(several.to_lines(n_best=True, alignments=False, as_json=False))) == 3


def test_answers_far_into_a_long_text(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    context = " ".join(["film"] * 100 + ["Bruno lives in Busan"] + ["story"] * 70)
    assert reader.answer("who?", context).answer == ContextSpan("Bruno", context.index("Bruno"))
    assert reader.answer("where?", context).answer == ContextSpan("Busan", context.index("Busan"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("a question alone", "line 3 has no tab"),
        ('{"question": "who?"}', 'line 3 needs the texts "question" and "context"'),
        ("{who?", "line 3 starts like JSON, but is not JSON"),
        ("who " * 40 + "?\tAnna lives in Busan and a film", "line 3: a question that is too long"),
    ],
)
def test_lines_that_cannot_be_answered(run: Run, line: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        list(load_predictor(run, "cpu").predict([line], NBestOptions(), first_index=2))


def test_bars_do_for_a_tab(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    tabbed, barred = reader.predict(["who?\tAnna lives in Busan", "who? ||| Anna lives in Busan"], NBestOptions())
    assert barred.answers == tabbed.answers


def test_an_empty_text_has_no_answer(run: Run) -> None:
    found = load_predictor(run, "cpu").answer("who?", "")
    assert found.answer == ContextSpan("", 0)
    [line] = found.to_lines(n_best=False, alignments=False, as_json=False)
    assert line.startswith("(no answer)\t0-0\t")


def test_a_long_text_is_refused_if_the_recipe_says_so(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="error"))
    with pytest.raises(InputError, match="line 1: a text that is too long"):
        reader.answer("who?", "film " * 60)


def test_the_rows_of_a_question(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    context = " ".join(["film"] * 50 + ["New York"])
    asked = AnswerExample("where?", context, (ContextSpan("New York", context.index("New")),), "1", "a", "x")
    [rows] = reader.encode([asked])
    assert len(rows) > 1
    for row in rows:
        start, end = row.annotations["starts"], row.annotations["ends"]
        said = reader.tokenizer.decode(row.ids[start : end + 1])
        assert (start, end) == (0, 0) or said == "new york"
        assert all(allowed == ((segment == 1 and i != len(row.ids) - 1) or i == 0) for i, (allowed, segment)
                   in enumerate(zip(row.annotations["answer_mask"], row.segments, strict=True)))  # fmt: skip
    assert rows[0].annotations["starts"] == 0  # the first window does not hold it
    assert rows[-1].annotations["starts"] > 0


def test_an_answer_across_the_ends_of_windows_is_whole_in_another(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    reader.task.recipe = replace(run.recipe, data=replace(run.recipe.data, window_stride=128))  # more than fits
    words = ["film"] * 33 + ["was", "a", "story"] + ["film"] * 40  # "who?" leaves room for 35
    context = " ".join(words)
    start = context.index("was a story")
    inside = AnswerExample("who?", context, (ContextSpan("was a story", start),), "1", "a", "x:1")
    [asked] = encode_questions([inside], reader.tokenizer, reader.max_tokens, reader.task.recipe.data)
    assert [tuple(part) for part in asked.windows][:2] == [(0, 35), (17, 52)]
    assert reader.score_examples([inside]).metrics["exact_match_upper_bound"] == 1
    # One that is longer than half a window may still be whole in none: nobody can find that.
    long = replace(inside, answers=(ContextSpan(" ".join(words[:38]), 0),))
    assert reader.score_examples([long]).metrics["exact_match_upper_bound"] == 0


def test_questions_without_an_answer_are_learned(tmp_path: Path) -> None:
    chance = random.Random(4)
    articles = []
    for _ in range(160):
        one = question(chance)
        one["qas"].append({"id": f"x{chance.random()}", "question": "when?", "answers": []})
        articles.append([one])
    path = squad(tmp_path / "train.json", articles)
    with pytest.raises(InputError, match=r"article 'article 0'.*a question without an answer"):
        train_run(tmp_path / "refuses", "answer", {"train": path})
    data = {"train": path, "held_out_size": 40, "has_unanswerable": True}
    run = train_run(tmp_path / "run", "answer", data, train={"max_epochs": 25, "batch_tokens": 1024})
    reader = load_predictor(run, "cpu")
    assert reader.answer("when?", "the film Anna lives in Paris and").answer.text == ""
    assert reader.answer("who?", "the film Anna lives in Paris and").answer.text == "Anna"
    assert reader.score_examples(reader.load_split("test").examples).metrics["exact_match"] > 0.95


def test_look_and_export(run: Run, tmp_path: Path) -> None:
    reader = load_predictor(run, "cpu")
    rows = reader.build_viewer_data("who?\tAnna lives in Busan")[0].layers[0].row_labels
    assert rows[:4] == ["[CLS]", "who", "?", "[SEP]"]
    reader.export("hf", tmp_path / "hf")
    assert type(jumok.load(tmp_path / "hf", "cpu").model).__name__ == "BertSpanExtractor"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_answers_in_decomposed_text_are_whole(form: str) -> None:
    learned = WordPieceTokenizer.train(["나는 학교에 갔다 café naïve über the end"] * 5, vocab_size=300)
    words = ["나는", "café", "naïve", "the", "학교", "über"]
    context = unicodedata.normalize(form, " ".join(words))
    asked = EncodedQuestion(AnswerExample("?", context, (), "", "", ""), [], learned.encode_with_offsets(context), [])
    owners = asked.context_pieces.word_ids
    begin = 0
    for number, word in enumerate(unicodedata.normalize(form, one) for one in words):
        pieces = [at for at, owner in enumerate(owners) if owner == number]
        assert asked.build_answer(pieces[0], pieces[-1]) == ContextSpan(word, begin)
        for piece in pieces:  # nor is any piece cut inside a letter
            text = asked.build_answer(piece, piece).text
            composed = unicodedata.normalize("NFC", text)
            assert composed in unicodedata.normalize("NFC", word)
            assert not unicodedata.combining(text[0])
        begin += len(word) + 1


def test_a_question_about_decomposed_text(run: Run) -> None:
    reader = load_predictor(run, "cpu")
    context = unicodedata.normalize("NFD", "café 나는 각 naïve")
    found = reader.answer("각?", context, n_best=20)
    boundaries = set(find_grapheme_boundaries(context))
    for one, _ in found.answers:
        assert context[one.start : one.end] == one.text
        assert {one.start, one.end} <= boundaries
