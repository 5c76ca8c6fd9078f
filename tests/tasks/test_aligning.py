"""Word links of given pairs: which words they are of, in which order they come, and which view is chosen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tasks_planted import opposite, pairs, planted
from tasks_small import trained
from torch import nn

from jumok import InputError
from jumok.batches.tokens import LayerAttention, Seq2SeqBatch
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.readers.word_alignments import GoldAlignment
from jumok.look.views.alignment_selection import AlignmentView
from jumok.metrics.symmetrization import SYMMETRIZATIONS
from jumok.metrics.word_alignment import argmax_links, pool_to_words, score_alignment, swap_links
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate import (
    metrics as translate_metrics,
)
from jumok.tasks.translate import (
    predictor as translate_predictor,
)
from jumok.tasks.translate import (
    word_alignment,
)
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


def only(view: AlignmentView) -> SelectedAlignmentViews:
    return SelectedAlignmentViews(view, None, "")


# --------------------------------------------------------------------------------------------------- choosing


def test_the_view_that_looks_at_the_translation_is_chosen_by_agreement(both: WordAligner) -> None:
    chosen = both.select_views(pairs(250))
    assert (chosen.forward, chosen.backward) == (AlignmentView(1, 2, True), AlignmentView(0, 1, False))
    assert "agreement 1.000 on 250 pairs" in str(chosen)
    assert [one.links for one in both.align(pairs(7), chosen)] == [opposite(one) for one in pairs(7)]


@pytest.mark.parametrize("view", [AlignmentView(0, 0, True), AlignmentView(1, 2, False)])
def test_with_one_direction_it_is_chosen_by_consistency(view: AlignmentView, word_runs: dict[str, Run]) -> None:
    aligner = WordAligner(planted(word_runs["forth"], view))
    chosen = aligner.select_views(pairs(250))
    assert (chosen.forward, chosen.backward) == (view, None)
    assert "consistency" in str(chosen)
    [found] = aligner.align(pairs(1), chosen)
    assert found.links == found.forward_links == opposite(pairs(1)[0])
    assert found.backward_links is None


def test_few_pairs_are_joined_by_the_validation_data(both: WordAligner) -> None:
    chosen = both.select_views(pairs(1))
    assert (chosen.forward, chosen.backward) == (AlignmentView(1, 2, True), AlignmentView(0, 1, False))
    valid = len(both.forward.data.valid_split().examples)
    assert f"on {1 + valid} pairs" in str(chosen)


def test_without_validation_data_the_pairs_alone_tell(both: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise InputError("it is gone")

    monkeypatch.setattr(type(both.forward.data), "valid_split", missing)
    assert "on 3 pairs" in str(both.select_views(pairs(3)))
    with pytest.raises(InputError, match="no pairs"):
        both.select_views([])


def test_what_is_asked_for_bounds_the_choice(both: WordAligner) -> None:
    assert both.select_views(pairs(50), AlignmentViewFilter(layer=0)).forward.layer == 0
    assert both.select_views(pairs(50), AlignmentViewFilter(head="mean")).forward.head is None
    assert both.select_views(pairs(50), AlignmentViewFilter(head=1)).backward == AlignmentView(0, 1, False)
    assert both.select_views(pairs(50), AlignmentViewFilter(shift=False)).forward.shift is False
    settled = both.select_views(pairs(50), AlignmentViewFilter(1, 0, True))
    assert (settled.forward, settled.backward) == (AlignmentView(1, 0, True), AlignmentView(1, 0, True))
    assert "as asked" in str(settled)


@pytest.mark.parametrize(
    "asked", [AlignmentViewFilter(layer=2), AlignmentViewFilter(head=3), AlignmentViewFilter(layer=-1)]
)
def test_a_layer_or_head_that_is_not_there_is_told(asked: AlignmentViewFilter, both: WordAligner) -> None:
    with pytest.raises(InputError, match="2 layers with 3 heads each, both counted from 0"):
        both.select_views(pairs(3), asked)


# ---------------------------------------------------------------------------------------------- words, order


def test_order_is_kept_whatever_goes_together(both: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = both.select_views(pairs(200))
    some = pairs(43, seed=5, longest=17)
    whole = list(both.align(some, chosen))
    model = both.forward.model
    model.batches.clear()
    alone = [next(both.align([one], chosen)) for one in some]
    assert whole == alone
    assert model.batches == [1] * 43
    monkeypatch.setattr(word_alignment, "PAIRS_PER_CHUNK", 5)
    model.batches.clear()
    assert list(both.align(iter(some), chosen)) == whole
    assert model.batches == [5] * 8 + [3]


def test_long_pairs_are_looked_at_a_few_at_a_time(both: WordAligner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translate_predictor, "MAX_MAP_WEIGHTS", 200)
    chosen = both.select_views(pairs(50))
    both.forward.model.batches.clear()
    some = pairs(11, seed=8)
    assert [one.links for one in both.align(some, chosen)] == [opposite(one) for one in some]
    assert len(both.forward.model.batches) > 3


def test_it_streams(both: WordAligner) -> None:
    chosen = both.select_views(pairs(50))
    endless = (pairs(1, seed=n)[0] for n in iter(int, 1))
    assert next(both.align(endless, chosen)).links == opposite(pairs(1)[0])


def test_the_two_directions_are_made_one_as_asked(both: WordAligner) -> None:
    chosen = SelectedAlignmentViews(AlignmentView(0, 0), AlignmentView(1, 1), "")  # views that look anywhere
    some = pairs(5)
    for name, symmetry in SYMMETRIZATIONS.items():
        for one, (forth, back) in zip(both.align(some, chosen, symmetry), both.compute_maps(some, chosen), strict=True):
            assert back is not None
            assert (one.forward_links, one.backward_links) == (
                argmax_links(forth),
                swap_links(argmax_links(back)),
            )
            assert one.links == SYMMETRIZATIONS[name](forth, back)
    assert both.backward is not None
    back = WordAligner(both.backward).align(
        [word_alignment.reverse_pair(one) for one in some], only(AlignmentView(1, 1))
    )
    assert [one.backward_links for one in both.align(some, chosen)] == [swap_links(one.links) for one in back]


@pytest.mark.parametrize(
    ("text", "owners"),
    [("l'eau bout.", [0, 0, 1, 1]), ("a b", [0, 1]), ("x'y'z", [0, 0, 0]), ("", []), (".", [0])],
)
def test_each_prepared_word_belongs_to_a_word_of_the_text(text: str, owners: list[int]) -> None:
    def prepare(line: str) -> str:
        return line.replace("'", "' ").replace(".", " .")

    assert list(_map_preprocessed_words(text.split(), len(prepare(text).split()), prepare)) == owners


def test_words_that_their_neighbours_change_are_counted_from_the_front() -> None:
    def prepare(line: str) -> str:  # a point is a word of its own at the end only, as with Moses
        return f"{line[:-1]} ." if line.endswith(".") else line

    words = ["mr.", "x", "came", "home."]
    assert list(_map_preprocessed_words(words, len(prepare(" ".join(words)).split()), prepare)) == [
        0,
        1,
        2,
        3,
        3,
    ]


def test_links_count_the_words_that_came_not_the_prepared_ones(tmp_path: Path) -> None:
    lines = [f"the dog{n}'s bone.\tl'os du chien{n}." for n in range(60)]
    (tmp_path / "t.tsv").write_text("en\tfr\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    sides = ["data.source=en", "data.target=fr", "data.preprocessing=expand-contractions", "data.held_out_size=5"]
    run = trained(tmp_path / "run", "transformer", f"data.train={tmp_path / 't.tsv'}", *sides)
    loaded = load_predictor(run, "cpu")
    text = _AlignmentText.from_text(loaded, "L'os du chien.", "target")
    pieces = loaded.tokenizers.target.ids_to_tokens(text.token_ids)
    assert "".join(pieces).replace("▁", " ").strip() == "le os de le chien ."
    assert text.num_words == 3
    begin = {piece: word for piece, word in zip(pieces, text.word_indices, strict=True) if piece.startswith("▁")}
    assert text.word_indices == sorted(text.word_indices)
    assert (text.word_indices[0], begin["▁de"], text.word_indices[-1]) == (0, 1, 2)
    aligner = WordAligner(loaded)
    [found] = aligner.align([TranslationExample("The dog's bone.", "L'os du chien.", "")], only(AlignmentView(0)))
    assert {target for _, target in found.links} == {0, 1, 2}
    assert {source for source, _ in found.links} <= {0, 1, 2}


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_links_are_those_of_the_translator_itself(name: str, request: pytest.FixtureRequest) -> None:
    translator = load_predictor(request.getfixturevalue(name), "cpu")
    some = [
        TranslationExample("we walk to the market", "우리는 시장에 걸어간다", ""),
        TranslationExample("i run", "나는 달린다", ""),
    ]
    maps, batch = translator.compute_attention_maps(some)
    view = AlignmentView(max(0, len(maps) - 2))
    found = [one.links for one in WordAligner(translator).align(some, only(view))]
    for row, (pair, links) in enumerate(zip(some, found, strict=True)):
        weights = maps[view.layer].weights[row].mean(0)[: batch.target.lengths[row] - 1]
        words = (
            translator.tokenizers.target.word_ids_from_text(pair.target),
            translator.tokenizers.source.word_ids_from_text(pair.source),
        )
        assert links == argmax_links(pool_to_words(weights[:, : len(words[1])], *words))


# ---------------------------------------------------------------------------------------------- what is wrong


def test_models_that_cannot_align_are_refused(word_runs: dict[str, Run]) -> None:
    with pytest.raises(InputError, match="no attention"):
        WordAligner(load_predictor(word_runs["fixed"], "cpu"))
    with pytest.raises(InputError, match=r"forth translates low to high, as .*; the reverse goes from high to low"):
        WordAligner(load_predictor(word_runs["forth"], "cpu"), load_predictor(word_runs["forth"], "cpu"))


def test_columns_by_number_tell_directions_of_the_same_data_only(bahdanau: Run) -> None:
    one, other = load_predictor(bahdanau, "cpu"), load_predictor(bahdanau, "cpu")
    with pytest.raises(InputError, match="translates 1 to 2, as"):
        WordAligner(one, other)
    recipe = other.run.recipe
    for data in (replace(recipe.data, train="other.tsv"), replace(recipe.data, source=2, target=1)):
        other.run = replace(other.run, recipe=replace(recipe, data=data))
        WordAligner(one, other)


def test_validation_data_that_the_model_cannot_take_chooses_nothing(
    word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    valid = TranslationSplit(
        "valid", [TranslationExample("ba " * 12, "BA", ""), TranslationExample("da fa", "FA DA", "")]
    )
    monkeypatch.setattr(type(aligner.forward.data), "valid_split", lambda _: valid)
    assert "on 2 pairs" in str(aligner.select_views(pairs(1)))


def test_a_text_that_preparing_leaves_nothing_of_has_no_links(word_runs: dict[str, Run]) -> None:
    forth = planted(word_runs["forth"], AlignmentView(0, 0))
    forth.data = replace(forth.data, config=replace(forth.data.config, preprocessing="expand-contractions"))
    some = [
        TranslationExample("\u0301", "BA", ""),
        TranslationExample("ba", "\u0301", ""),
        TranslationExample("\u0301", "\u0301", ""),
    ]
    assert [one.links for one in WordAligner(forth).align(some, only(AlignmentView(0, 0)))] == [frozenset()] * 3


def test_a_pair_that_learned_positions_do_not_reach_is_told(word_runs: dict[str, Run]) -> None:
    aligner = WordAligner(load_predictor(word_runs["short"], "cpu"))
    assert aligner.find_length_problem(TranslationExample("ba" + " ba" * 10, "BA", "here:1")) is None
    for pair in (
        TranslationExample("ba" + " ba" * 11, "BA", "here:1"),
        TranslationExample("ba", "BA" + " BA" * 11, "here:1"),
    ):
        flaw = aligner.find_length_problem(pair)
        assert str(flaw) == "here:1: too long (12 tokens; this model, which has learned positions, takes 11)"


def test_attention_to_no_word_gives_no_link(word_runs: dict[str, Run]) -> None:
    class Silent(nn.Linear):
        def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
            rows, steps = batch.target.ids.shape
            return [LayerAttention("", torch.zeros(rows, 1, steps, batch.source.ids.shape[1]))]

    loaded = load_predictor(word_runs["forth"], "cpu")
    loaded.model = Silent(1, 1)
    aligner = WordAligner(loaded)
    chosen = aligner.select_views(pairs(5))
    assert [one.links for one in aligner.align(pairs(5), chosen)] == [frozenset()] * 5


# ------------------------------------------------------------------------------------------------- evaluation


def with_gold(translator: TranslationPredictor, monkeypatch: pytest.MonkeyPatch) -> TranslationSplit:
    """Pairs with gold links, which every planted view but one misses."""
    some = pairs(60, seed=4)
    gold = TranslationSplit("gold", some, gold_alignments=[GoldAlignment(opposite(one)) for one in some])
    monkeypatch.setattr(type(translator.data), "gold_split", lambda _: gold)
    return gold


@pytest.mark.parametrize("view", [AlignmentView(0, 0, True), AlignmentView(1, 2, False)])
def test_eval_reads_links_where_align_does(
    view: AlignmentView, word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = planted(word_runs["forth"], view)
    gold = with_gold(translator, monkeypatch)
    found = translate_metrics.score_word_alignment(translator, TranslationSplit("test", pairs(5)))
    assert found is not None
    assert found.score.error_rate == 0  # layer 0, all heads, plain: above 0.5
    assert found.view.startswith(str(view))
    aligner = WordAligner(translator)
    chosen = aligner.select_views(gold.examples)
    assert found.view == str(chosen)
    assert gold.gold_alignments is not None
    assert found.score == score_alignment(
        [one.links for one in aligner.align(gold.examples, chosen)], gold.gold_alignments
    )


def test_eval_keeps_to_the_recipe(word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    translator = planted(word_runs["forth"], AlignmentView(1, 2, True))
    with_gold(translator, monkeypatch)
    for decode, told in (
        (TranslationDecodeConfig(alignment_shift=True), "layer 1, head 2, shifted"),
        (
            TranslationDecodeConfig(alignment_layer=-2, alignment_shift=False),
            "layer 0, mean of heads, plain; as asked",
        ),
    ):
        translator.decode_config = decode
        found = translate_metrics.score_word_alignment(translator, TranslationSplit("test", pairs(5)))
        assert found is not None
        assert found.view.startswith(told)


def test_eval_gives_no_links_to_a_pair_that_is_too_long(
    word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = load_predictor(word_runs["short"], "cpu")
    some = [*pairs(3, longest=5), TranslationExample("ba" + " ba" * 11, "BA", "here:4")]
    gold = TranslationSplit("gold", some, gold_alignments=[GoldAlignment(frozenset({(0, 0)}))] * 4)
    monkeypatch.setattr(type(translator.data), "gold_split", lambda _: gold)
    found = translate_metrics.score_word_alignment(translator, TranslationSplit("test", pairs(5)))
    assert found is not None
    assert found.score.num_links == sum(len(one.target.split()) for one in some[:3])
    assert found.score.num_sure_links == 4
