"""Question answering, on small generated data."""

from __future__ import annotations

import json
import random
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from labelled_runs import make_question, train_run, write_squad
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

pytestmark = pytest.mark.long


QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("questions")
    rng = random.Random(1)
    # Some texts are longer than the model reads at once.
    articles = [[make_question(rng, most) for most in (3, 5, 8, 60)] for _ in range(60)]
    data = {"train": write_squad(folder / "train.json", articles), "held_out_size": 40, "window_stride": 16}
    return train_run(folder / "run", "answer", data, train={"max_epochs": 15, "batch_tokens": 1024})


def test_answering_learns_spans(run: Run) -> None:
    predictor = jumok.load(run.folder, "cpu")
    evaluation = evaluate(predictor, "test", NBestOptions(), QUIET)
    assert evaluation.metrics["exact_match"] == evaluation.metrics["f1"] == evaluation.metrics["f1_upper_bound"] == 1
    split = predictor.load_split("test")
    assert max(len(example.context.split()) for example in split.examples) > 40
    train = {example.article for example in predictor.task.train_split().examples}
    assert not train & {example.article for example in split.examples}  # whole articles are held out


def test_output_lines(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    context = "the film  Carla Maria lives in New York and"
    prediction = predictor.answer("where?", context)
    assert prediction.answer == ContextSpan("New York", context.index("New York"))
    assert context[prediction.answer.start : prediction.answer.end] == "New York"
    probability = prediction.answers[0][1]
    assert 0.5 < probability <= 1
    [line] = prediction.to_lines()
    assert line == f"New York\t{prediction.answer.start}-{prediction.answer.end}\t{probability:.4f}"
    lines = [f"who?\t{context}", json.dumps({"question": "where?", "context": context})]
    who, where = predictor.predict(lines, NBestOptions(), first_index=4)
    assert (who.index, who.answer.text) == (4, "Carla Maria")
    assert where.answers == prediction.answers
    [content] = map(json.loads, where.to_lines(as_json=True))
    assert (content["answer"], content["start"], content["end"]) == ("New York", 31, 39)
    [several] = predictor.predict(lines[:1], NBestOptions(n_best=3))
    probabilities = [probability for _, probability in several.answers]
    assert len(probabilities) == 3
    assert probabilities == sorted(probabilities, reverse=True)
    assert several.answer == who.answer
    assert len(list(several.to_lines(n_best=True))) == 3


def test_answers_in_later_windows(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    context = " ".join(["film"] * 100 + ["Bruno lives in Busan"] + ["story"] * 70)
    assert predictor.answer("who?", context).answer == ContextSpan("Bruno", context.index("Bruno"))
    assert predictor.answer("where?", context).answer == ContextSpan("Busan", context.index("Busan"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a question alone", "line 3 has no tab"),
        ('{"question": "who?"}', 'line 3 needs the texts "question" and "context"'),
        ("{who?", "line 3 starts like JSON, but is not JSON"),
        ("who " * 40 + "?\tAnna lives in Busan and a film", "line 3: a question that is too long"),
    ],
)
def test_invalid_lines(run: Run, line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(load_predictor(run, "cpu").predict([line], NBestOptions(), first_index=2))


def test_bars_separate_like_a_tab(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    tabbed, barred = predictor.predict(["who?\tAnna lives in Busan", "who? ||| Anna lives in Busan"], NBestOptions())
    assert barred.answers == tabbed.answers


def test_an_empty_text_has_no_answer(run: Run) -> None:
    prediction = load_predictor(run, "cpu").answer("who?", "")
    assert prediction.answer == ContextSpan("", 0)
    [line] = prediction.to_lines()
    assert line.startswith("(no answer)\t0-0\t")


def test_a_long_text_is_an_error_without_windows(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(run.recipe, data=replace(run.recipe.data, on_overflow="error"))
    with pytest.raises(InputError, match="line 1: a text that is too long"):
        predictor.answer("who?", "film " * 60)


def test_encoded_rows_of_a_question(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    context = " ".join(["film"] * 50 + ["New York"])
    example = AnswerExample("where?", context, (ContextSpan("New York", context.index("New")),), "1", "a", "x")
    [rows] = predictor.encode([example])
    assert len(rows) > 1
    for row in rows:
        start, end = row.annotations["starts"], row.annotations["ends"]
        text = predictor.tokenizer.decode(row.ids[start : end + 1])
        assert (start, end) == (0, 0) or text == "new york"
        assert all(allowed == ((segment == 1 and i != len(row.ids) - 1) or i == 0) for i, (allowed, segment)
                   in enumerate(zip(row.annotations["answer_mask"], row.segments, strict=True)))  # fmt: skip
    assert rows[0].annotations["starts"] == 0  # the first window does not contain it
    assert rows[-1].annotations["starts"] > 0


def test_windows_overlap_enough_for_an_answer(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    predictor.task.recipe = replace(run.recipe, data=replace(run.recipe.data, window_stride=128))
    words = ["film"] * 33 + ["was", "a", "story"] + ["film"] * 40  # "who?" leaves room for 35
    context = " ".join(words)
    start = context.index("was a story")
    inside = AnswerExample("who?", context, (ContextSpan("was a story", start),), "1", "a", "x:1")
    [encoded] = encode_questions([inside], predictor.tokenizer, predictor.max_tokens, predictor.task.recipe.data)
    assert [tuple(part) for part in encoded.windows][:2] == [(0, 35), (17, 52)]
    assert predictor.score_examples([inside]).metrics["exact_match_upper_bound"] == 1
    # No window contains an answer that is longer than the overlap of two windows; it cannot be found.
    long = replace(inside, answers=(ContextSpan(" ".join(words[:38]), 0),))
    assert predictor.score_examples([long]).metrics["exact_match_upper_bound"] == 0


def test_unanswerable_questions(tmp_path: Path) -> None:
    rng = random.Random(4)
    articles = []
    for _ in range(160):
        paragraph = make_question(rng)
        paragraph["qas"].append({"id": f"x{rng.random()}", "question": "when?", "answers": []})
        articles.append([paragraph])
    path = write_squad(tmp_path / "train.json", articles)
    with pytest.raises(InputError, match=r"article 'article 0'.*a question without an answer"):
        train_run(tmp_path / "refuses", "answer", {"train": path})
    data = {"train": path, "held_out_size": 40, "has_unanswerable": True}
    run = train_run(tmp_path / "run", "answer", data, train={"max_epochs": 25, "batch_tokens": 1024})
    predictor = load_predictor(run, "cpu")
    assert predictor.answer("when?", "the film Anna lives in Paris and").answer.text == ""
    assert predictor.answer("who?", "the film Anna lives in Paris and").answer.text == "Anna"
    assert predictor.score_examples(predictor.load_split("test").examples).metrics["exact_match"] > 0.95


def test_viewer_data_and_export(run: Run, tmp_path: Path) -> None:
    predictor = load_predictor(run, "cpu")
    rows = predictor.build_viewer_data("who?\tAnna lives in Busan")[0].layers[0].row_labels
    assert rows[:4] == ["[CLS]", "who", "?", "[SEP]"]
    predictor.export("hf", tmp_path / "hf")
    assert type(jumok.load(tmp_path / "hf", "cpu").model).__name__ == "BertSpanExtractor"


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_answers_in_decomposed_text_are_complete(form: str) -> None:
    learned = WordPieceTokenizer.train(["나는 학교에 갔다 café naïve über the end"] * 5, vocab_size=300)
    words = ["나는", "café", "naïve", "the", "학교", "über"]
    context = unicodedata.normalize(form, " ".join(words))
    question = EncodedQuestion(
        AnswerExample("?", context, (), "", "", ""), [], learned.encode_with_offsets([context])[0], []
    )
    owners = question.context_pieces.word_ids
    begin = 0
    for number, word in enumerate(unicodedata.normalize(form, raw_word) for raw_word in words):
        pieces = [at for at, owner in enumerate(owners) if owner == number]
        assert question.build_answer(pieces[0], pieces[-1]) == ContextSpan(word, begin)
        for piece in pieces:  # no piece ends inside a letter
            text = question.build_answer(piece, piece).text
            composed = unicodedata.normalize("NFC", text)
            assert composed in unicodedata.normalize("NFC", word)
            assert not unicodedata.combining(text[0])
        begin += len(word) + 1


def test_answers_end_at_grapheme_boundaries(run: Run) -> None:
    predictor = load_predictor(run, "cpu")
    context = unicodedata.normalize("NFD", "café 나는 각 naïve")
    prediction = predictor.answer("각?", context, n_best=20)
    boundaries = set(find_grapheme_boundaries(context))
    for answer, _ in prediction.answers:
        assert context[answer.start : answer.end] == answer.text
        assert {answer.start, answer.end} <= boundaries
