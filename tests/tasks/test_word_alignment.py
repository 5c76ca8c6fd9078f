"""Word alignment of given pairs: words, order, and the selection of views."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_attention import gold_links, make_pairs, plant_attention
from torch import nn
from translation_runs import train_run

from jumok import InputError
from jumok.batches.tokens import LayerAttention, Seq2SeqBatch
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.readers.word_alignments import AlignmentLinks, GoldAlignment
from jumok.look.views.alignment_selection import AlignmentView
from jumok.metrics.symmetrization import SYMMETRIZATIONS
from jumok.metrics.word_alignment import argmax_links, pool_to_words, score_alignment, swap_links
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate import metrics as translate_metrics
from jumok.tasks.translate import predictor as translate_predictor
from jumok.tasks.translate import word_alignment
from jumok.tasks.translate.config import TranslationDecodeConfig
from jumok.tasks.translate.data import TranslationSplit
from jumok.tasks.translate.predictor import TranslationPredictor
from jumok.tasks.translate.word_alignment import (
    AlignmentViewFilter,
    SelectedAlignmentViews,
    WordAligner,
    _AlignmentText,
    _map_preprocessed_words,
)

pytestmark = pytest.mark.long


PLANTED_VIEWS = AlignmentView(1, 2, True), AlignmentView(0, 1, False)  # of the fixture ``aligner``


def align(
    aligner: WordAligner, pairs: list[TranslationExample], view: AlignmentView | None = None
) -> list[AlignmentLinks]:
    views = aligner.select_views(pairs) if view is None else SelectedAlignmentViews(view, None, "")
    return [alignment.links for alignment in aligner.align(pairs, views)]


# ------------------------------------------------------------------------------------------ selection of views


def test_two_directions_select_the_views_that_agree(aligner: WordAligner) -> None:
    views = aligner.select_views(make_pairs(250))
    assert (views.forward, views.backward) == PLANTED_VIEWS
    assert "agreement 1.000 on 250 pairs" in str(views)
    pairs = make_pairs(7)
    assert [alignment.links for alignment in aligner.align(pairs, views)] == [gold_links(pair) for pair in pairs]


@pytest.mark.parametrize("view", [AlignmentView(0, 0, True), AlignmentView(1, 2, False)])
def test_one_direction_selects_the_most_consistent_view(view: AlignmentView, word_runs: dict[str, Run]) -> None:
    aligner = WordAligner(plant_attention(word_runs["forward"], view))
    views = aligner.select_views(make_pairs(250))
    assert (views.forward, views.backward) == (view, None)
    assert "consistency" in str(views)
    [alignment] = aligner.align(make_pairs(1), views)
    assert alignment.links == alignment.forward_links == gold_links(make_pairs(1)[0])
    assert alignment.backward_links is None


def test_validation_data_is_added_to_few_pairs(aligner: WordAligner) -> None:
    views = aligner.select_views(make_pairs(1))
    assert (views.forward, views.backward) == PLANTED_VIEWS
    assert f"on {1 + len(aligner.forward.data.valid_split().examples)} pairs" in str(views)


def test_missing_validation_data_is_ignored(aligner: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(_: object) -> None:
        raise InputError("it is gone")

    monkeypatch.setattr(type(aligner.forward.data), "valid_split", raise_error)
    assert "on 3 pairs" in str(aligner.select_views(make_pairs(3)))
    with pytest.raises(InputError, match="no pairs"):
        aligner.select_views([])


def test_too_long_validation_pairs_are_ignored(word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    pairs = [TranslationExample("ba " * 12, "BA", ""), TranslationExample("da fa", "FA DA", "")]
    monkeypatch.setattr(type(aligner.forward.data), "valid_split", lambda _: TranslationSplit("valid", pairs))
    assert "on 2 pairs" in str(aligner.select_views(make_pairs(1)))


def test_a_filter_limits_the_selection(aligner: WordAligner) -> None:
    pairs = make_pairs(50)
    assert aligner.select_views(pairs, AlignmentViewFilter(layer=0)).forward.layer == 0
    assert aligner.select_views(pairs, AlignmentViewFilter(head="mean")).forward.head is None
    assert aligner.select_views(pairs, AlignmentViewFilter(head=1)).backward == AlignmentView(0, 1, False)
    assert aligner.select_views(pairs, AlignmentViewFilter(shift=False)).forward.shift is False
    fixed = aligner.select_views(pairs, AlignmentViewFilter(1, 0, True))
    assert (fixed.forward, fixed.backward) == (AlignmentView(1, 0, True), AlignmentView(1, 0, True))
    assert "as requested" in str(fixed)


@pytest.mark.parametrize(
    "view_filter", [AlignmentViewFilter(layer=2), AlignmentViewFilter(head=3), AlignmentViewFilter(layer=-1)]
)
def test_an_unknown_layer_or_head_is_an_error(view_filter: AlignmentViewFilter, aligner: WordAligner) -> None:
    with pytest.raises(InputError, match="2 layers with 3 heads each, both counted from 0"):
        aligner.select_views(make_pairs(3), view_filter)


# -------------------------------------------------------------------------------------------- words and order


def test_batches_do_not_change_links_or_order(aligner: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    views = aligner.select_views(make_pairs(200))
    pairs = make_pairs(43, seed=5, max_words=17)
    alignments = list(aligner.align(pairs, views))
    batch_sizes = aligner.forward.model.batch_sizes
    batch_sizes.clear()
    assert [next(aligner.align([pair], views)) for pair in pairs] == alignments
    assert batch_sizes == [1] * 43
    monkeypatch.setattr(word_alignment, "PAIRS_PER_CHUNK", 5)
    batch_sizes.clear()
    assert list(aligner.align(iter(pairs), views)) == alignments
    assert batch_sizes == [5] * 8 + [3]


def test_long_pairs_are_divided_into_small_batches(aligner: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate_predictor, "MAX_MAP_WEIGHTS", 200)
    views = aligner.select_views(make_pairs(50))
    aligner.forward.model.batch_sizes.clear()
    pairs = make_pairs(11, seed=8)
    assert [alignment.links for alignment in aligner.align(pairs, views)] == [gold_links(pair) for pair in pairs]
    assert len(aligner.forward.model.batch_sizes) > 3


def test_endless_pairs_are_streamed(aligner: WordAligner) -> None:
    views = aligner.select_views(make_pairs(50))
    endless = (make_pairs(1, seed=n)[0] for n in iter(int, 1))
    assert next(aligner.align(endless, views)).links == gold_links(make_pairs(1)[0])


def test_every_symmetrization_combines_both_directions(aligner: WordAligner) -> None:
    views = SelectedAlignmentViews(AlignmentView(0, 0), AlignmentView(1, 1), "")  # views with random weights
    pairs = make_pairs(5)
    for symmetrize in SYMMETRIZATIONS.values():
        maps = aligner.compute_maps(pairs, views)
        for alignment, (forward, backward) in zip(aligner.align(pairs, views, symmetrize), maps, strict=True):
            assert backward is not None
            assert alignment.forward_links == argmax_links(forward)
            assert alignment.backward_links == swap_links(argmax_links(backward))
            assert alignment.links == symmetrize(forward, backward)
    assert aligner.backward is not None
    reverse_links = align(
        WordAligner(aligner.backward), [word_alignment.reverse_pair(pair) for pair in pairs], AlignmentView(1, 1)
    )
    backward_links = [alignment.backward_links for alignment in aligner.align(pairs, views)]
    assert backward_links == [swap_links(links) for links in reverse_links]


@pytest.mark.parametrize(
    ("text", "indices"), [("l'eau bout.", [0, 0, 1, 1]), ("a b", [0, 1]), ("x'y'z", [0, 0, 0]), ("", []), (".", [0])]
)
def test_preprocessed_words_are_mapped_to_words_of_the_text(text: str, indices: list[int]) -> None:
    def preprocess(line: str) -> str:
        return line.replace("'", "' ").replace(".", " .")

    assert list(_map_preprocessed_words(text.split(), len(preprocess(text).split()), preprocess)) == indices


def test_words_that_depend_on_their_neighbours_are_counted_by_prefixes() -> None:
    def preprocess(line: str) -> str:  # a full stop is split off at the end only, as with Moses
        return f"{line[:-1]} ." if line.endswith(".") else line

    words = ["mr.", "x", "came", "home."]
    num_preprocessed = len(preprocess(" ".join(words)).split())
    assert list(_map_preprocessed_words(words, num_preprocessed, preprocess)) == [0, 1, 2, 3, 3]


def test_links_count_the_words_before_preprocessing(tmp_path: Path) -> None:
    lines = [f"the dog{n}'s bone.\tl'os du chien{n}." for n in range(60)]
    (tmp_path / "t.tsv").write_text("en\tfr\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    sides = ["data.source=en", "data.target=fr", "data.preprocessing=expand-contractions", "data.held_out_size=5"]
    run = train_run(tmp_path / "run", "transformer", f"data.train={tmp_path / 't.tsv'}", *sides)
    predictor = load_predictor(run, "cpu")
    text = _AlignmentText.from_text(predictor, "L'os du chien.", "target")
    pieces = predictor.tokenizers.target.ids_to_tokens(text.token_ids)
    assert "".join(pieces).replace("▁", " ").strip() == "le os de le chien ."
    assert text.num_words == 3
    first_pieces = {piece: word for piece, word in zip(pieces, text.word_indices, strict=True) if piece.startswith("▁")}
    assert text.word_indices == sorted(text.word_indices)
    assert (text.word_indices[0], first_pieces["▁de"], text.word_indices[-1]) == (0, 1, 2)
    pair = TranslationExample("The dog's bone.", "L'os du chien.", "")
    [links] = align(WordAligner(predictor), [pair], AlignmentView(0))
    assert {target for _, target in links} == {0, 1, 2}
    assert {source for source, _ in links} <= {0, 1, 2}


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_links_equal_those_of_the_attention_maps(name: str, request: pytest.FixtureRequest) -> None:
    predictor = load_predictor(request.getfixturevalue(name), "cpu")
    pairs = [
        TranslationExample("we walk to the market", "우리는 시장에 걸어간다", ""),
        TranslationExample("i run", "나는 달린다", ""),
    ]
    maps, batch = predictor.compute_attention_maps(pairs)
    view = AlignmentView(max(0, len(maps) - 2))
    for row, (pair, links) in enumerate(zip(pairs, align(WordAligner(predictor), pairs, view), strict=True)):
        weights = maps[view.layer].weights[row].mean(0)[: batch.target.lengths[row] - 1]
        target_words = predictor.tokenizers.target.word_ids_from_text(pair.target)
        source_words = predictor.tokenizers.source.word_ids_from_text(pair.source)
        assert links == argmax_links(pool_to_words(weights[:, : len(source_words)], target_words, source_words))


def test_a_text_without_words_after_preprocessing_has_no_links(word_runs: dict[str, Run]) -> None:
    predictor = plant_attention(word_runs["forward"], AlignmentView(0, 0))
    config = replace(predictor.data.config, preprocessing="expand-contractions")
    predictor.data = replace(predictor.data, config=config)
    pairs = [TranslationExample(*texts, "") for texts in (("\u0301", "BA"), ("ba", "\u0301"), ("\u0301", "\u0301"))]
    assert align(WordAligner(predictor), pairs, AlignmentView(0, 0)) == [frozenset()] * 3


def test_attention_weights_of_zero_give_no_links(word_runs: dict[str, Run]) -> None:
    class ZeroAttention(nn.Linear):
        def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
            rows, steps = batch.target.ids.shape
            return [LayerAttention("", torch.zeros(rows, 1, steps, batch.source.ids.shape[1]))]

    predictor = load_predictor(word_runs["forward"], "cpu")
    predictor.model = ZeroAttention(1, 1)
    assert align(WordAligner(predictor), make_pairs(5)) == [frozenset()] * 5


# ---------------------------------------------------------------------------------------------- invalid models


def test_models_that_cannot_align_are_errors(word_runs: dict[str, Run]) -> None:
    with pytest.raises(InputError, match="no attention"):
        WordAligner(load_predictor(word_runs["fixed"], "cpu"))
    forward = load_predictor(word_runs["forward"], "cpu")
    message = r"forward translates low to high, as .*; the reverse goes from high to low"
    with pytest.raises(InputError, match=message):
        WordAligner(forward, forward)


def test_numbered_columns_are_only_compared_for_the_same_data(bahdanau: Run) -> None:
    forward, backward = load_predictor(bahdanau, "cpu"), load_predictor(bahdanau, "cpu")
    with pytest.raises(InputError, match="translates 1 to 2, as"):
        WordAligner(forward, backward)
    recipe = backward.run.recipe
    for data in (replace(recipe.data, train="other.tsv"), replace(recipe.data, source=2, target=1)):
        backward.run = replace(backward.run, recipe=replace(recipe, data=data))
        WordAligner(forward, backward)


def test_a_pair_longer_than_the_learned_positions_is_described(word_runs: dict[str, Run]) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    assert aligner.find_length_problem(TranslationExample("ba" + " ba" * 10, "BA", "x:1")) is None
    for texts in (("ba" + " ba" * 11, "BA"), ("ba", "BA" + " BA" * 11)):
        problem = aligner.find_length_problem(TranslationExample(*texts, "x:1"))
        assert str(problem) == "x:1: too long (12 tokens; this model, which has learned positions, takes 11)"


# -------------------------------------------------------------------------------------------------- evaluation


def set_gold_split(predictor: TranslationPredictor, monkeypatch: pytest.MonkeyPatch) -> TranslationSplit:
    """Pairs with gold links, which only the planted view finds."""
    pairs = make_pairs(60, seed=4)
    gold = TranslationSplit("gold", pairs, gold_alignments=[GoldAlignment(gold_links(pair)) for pair in pairs])
    monkeypatch.setattr(type(predictor.data), "gold_split", lambda _: gold)
    return gold


def score_test_split(predictor: TranslationPredictor) -> translate_metrics.SplitAlignmentScore:
    score = translate_metrics.score_word_alignment(predictor, TranslationSplit("test", make_pairs(5)))
    assert score is not None
    return score


@pytest.mark.parametrize("view", [AlignmentView(0, 0, True), AlignmentView(1, 2, False)])
def test_evaluation_selects_views_as_align_does(
    view: AlignmentView, word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = plant_attention(word_runs["forward"], view)
    gold = set_gold_split(predictor, monkeypatch)
    result = score_test_split(predictor)
    assert result.score.error_rate == 0  # with layer 0, all heads, plain: above 0.5
    aligner = WordAligner(predictor)
    views = aligner.select_views(gold.examples)
    assert views.forward == view
    assert result.view == str(views)
    assert gold.gold_alignments is not None
    assert result.score == score_alignment(align(aligner, list(gold.examples)), gold.gold_alignments)


@pytest.mark.parametrize(
    ("decode", "view"),
    [
        (TranslationDecodeConfig(alignment_shift=True), "layer 1, head 2, shifted"),
        (TranslationDecodeConfig(alignment_layer=-2, alignment_shift=False), "layer 0, mean of heads, plain; as requ"),
    ],
)
def test_evaluation_uses_the_view_of_the_recipe(
    decode: TranslationDecodeConfig, view: str, word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = plant_attention(word_runs["forward"], AlignmentView(1, 2, True))
    set_gold_split(predictor, monkeypatch)
    predictor.decode_config = decode
    assert score_test_split(predictor).view.startswith(view)


def test_evaluation_gives_no_links_to_a_pair_that_is_too_long(
    word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = load_predictor(word_runs["short"], "cpu")
    pairs = [*make_pairs(3, max_words=5), TranslationExample("ba" + " ba" * 11, "BA", "x:4")]
    gold = TranslationSplit("gold", pairs, gold_alignments=[GoldAlignment(frozenset({(0, 0)}))] * 4)
    monkeypatch.setattr(type(predictor.data), "gold_split", lambda _: gold)
    score = score_test_split(predictor).score
    assert score.num_links == sum(len(pair.target.split()) for pair in pairs[:3])
    assert score.num_sure_links == 4
