"""Word links of given pairs: which words they are of, in which order they come, and which view is chosen."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tasks_planted import opposite, pairs, planted
from tasks_small import trained
from torch import nn

from jumok import InputError
from jumok.batch import Map, Pairs
from jumok.data.links import Gold
from jumok.data.sources import Example
from jumok.look.align import View
from jumok.metrics.alignment import alignment_score, flipped, strongest, to_words
from jumok.metrics.symmetry import SYMMETRIES
from jumok.run import Run
from jumok.tasks import aligning, evaluation, translate, translator
from jumok.tasks.aligning import Aligner, Asked, Chosen, _owners, _Text
from jumok.tasks.corpora import Split
from jumok.tasks.translator import Translator


def only(view: View) -> Chosen:
    return Chosen(view, None, "")


# --------------------------------------------------------------------------------------------------- choosing


def test_the_view_that_looks_at_the_translation_is_chosen_by_agreement(both: Aligner) -> None:
    chosen = both.choose(pairs(250))
    assert (chosen.forth, chosen.back) == (View(1, 2, True), View(0, 1, False))
    assert "agreement 1.000 on 250 pairs" in str(chosen)
    assert [one.links for one in both.align(pairs(7), chosen)] == [opposite(one) for one in pairs(7)]


@pytest.mark.parametrize("view", [View(0, 0, True), View(1, 2, False)])
def test_with_one_direction_it_is_chosen_by_consistency(view: View, word_runs: dict[str, Run]) -> None:
    aligner = Aligner(planted(word_runs["forth"], view))
    chosen = aligner.choose(pairs(250))
    assert (chosen.forth, chosen.back) == (view, None)
    assert "consistency" in str(chosen)
    [found] = aligner.align(pairs(1), chosen)
    assert found.links == found.forth == opposite(pairs(1)[0])
    assert found.back is None


def test_few_pairs_are_joined_by_the_validation_data(both: Aligner) -> None:
    chosen = both.choose(pairs(1))
    assert (chosen.forth, chosen.back) == (View(1, 2, True), View(0, 1, False))
    valid = len(both.forth.texts.valid().examples)
    assert f"on {1 + valid} pairs" in str(chosen)


def test_without_validation_data_the_pairs_alone_tell(both: Aligner, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise InputError("it is gone")

    monkeypatch.setattr(type(both.forth.texts), "valid", missing)
    assert "on 3 pairs" in str(both.choose(pairs(3)))
    with pytest.raises(InputError, match="no pairs"):
        both.choose([])


def test_what_is_asked_for_bounds_the_choice(both: Aligner) -> None:
    assert both.choose(pairs(50), Asked(layer=0)).forth.layer == 0
    assert both.choose(pairs(50), Asked(head="mean")).forth.head is None
    assert both.choose(pairs(50), Asked(head=1)).back == View(0, 1, False)
    assert both.choose(pairs(50), Asked(shift=False)).forth.shift is False
    settled = both.choose(pairs(50), Asked(1, 0, True))
    assert (settled.forth, settled.back) == (View(1, 0, True), View(1, 0, True))
    assert "as asked" in str(settled)


@pytest.mark.parametrize("asked", [Asked(layer=2), Asked(head=3), Asked(layer=-1)])
def test_a_layer_or_head_that_is_not_there_is_told(asked: Asked, both: Aligner) -> None:
    with pytest.raises(InputError, match="2 layers with 3 heads each, both counted from 0"):
        both.choose(pairs(3), asked)


# ---------------------------------------------------------------------------------------------- words, order


def test_order_is_kept_whatever_goes_together(both: Aligner, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = both.choose(pairs(200))
    some = pairs(43, seed=5, longest=17)
    whole = list(both.align(some, chosen))
    model = both.forth.model
    model.batches.clear()
    alone = [next(both.align([one], chosen)) for one in some]
    assert whole == alone
    assert model.batches == [1] * 43
    monkeypatch.setattr(aligning, "AT_ONCE", 5)
    model.batches.clear()
    assert list(both.align(iter(some), chosen)) == whole
    assert model.batches == [5] * 8 + [3]


def test_long_pairs_are_looked_at_a_few_at_a_time(both: Aligner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translator, "WEIGHTS", 200)
    chosen = both.choose(pairs(50))
    both.forth.model.batches.clear()
    some = pairs(11, seed=8)
    assert [one.links for one in both.align(some, chosen)] == [opposite(one) for one in some]
    assert len(both.forth.model.batches) > 3


def test_it_streams(both: Aligner) -> None:
    chosen = both.choose(pairs(50))
    endless = (pairs(1, seed=n)[0] for n in iter(int, 1))
    assert next(both.align(endless, chosen)).links == opposite(pairs(1)[0])


def test_the_two_directions_are_made_one_as_asked(both: Aligner) -> None:
    chosen = Chosen(View(0, 0), View(1, 1), "")  # views that look anywhere
    some = pairs(5)
    for name, symmetry in SYMMETRIES.items():
        for one, (forth, back) in zip(
            both.align(some, chosen, symmetry), both.maps(some, chosen), strict=True
        ):
            assert back is not None
            assert (one.forth, one.back) == (strongest(forth), flipped(strongest(back)))
            assert one.links == SYMMETRIES[name](forth, back)
    assert both.back is not None
    back = Aligner(both.back).align([aligning.turned(one) for one in some], only(View(1, 1)))
    assert [one.back for one in both.align(some, chosen)] == [flipped(one.links) for one in back]


@pytest.mark.parametrize(
    ("text", "owners"),
    [("l'eau bout.", [0, 0, 1, 1]), ("a b", [0, 1]), ("x'y'z", [0, 0, 0]), ("", []), (".", [0])],
)
def test_each_prepared_word_belongs_to_a_word_of_the_text(text: str, owners: list[int]) -> None:
    def prepare(line: str) -> str:
        return line.replace("'", "' ").replace(".", " .")

    assert list(_owners(text.split(), len(prepare(text).split()), prepare)) == owners


def test_words_that_their_neighbours_change_are_counted_from_the_front() -> None:
    def prepare(line: str) -> str:  # a point is a word of its own at the end only, as with Moses
        return f"{line[:-1]} ." if line.endswith(".") else line

    words = ["mr.", "x", "came", "home."]
    assert list(_owners(words, len(prepare(" ".join(words)).split()), prepare)) == [0, 1, 2, 3, 3]


def test_links_count_the_words_that_came_not_the_prepared_ones(tmp_path: Path) -> None:
    lines = [f"the dog{n}'s bone.\tl'os du chien{n}." for n in range(60)]
    (tmp_path / "t.tsv").write_text("en\tfr\n" + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    sides = ["data.source=en", "data.target=fr", "data.prepare=spelled-out", "data.held_out=5"]
    run = trained(tmp_path / "run", "transformer", f"data.train={tmp_path / 't.tsv'}", *sides)
    loaded = translate.load(run, "cpu")
    text = _Text.of(loaded, "L'os du chien.", "target")
    pieces = loaded.tokenizers.target.pieces(text.ids)
    assert "".join(pieces).replace("▁", " ").strip() == "le os de le chien ."
    assert text.count == 3
    begin = {piece: word for piece, word in zip(pieces, text.words, strict=True) if piece.startswith("▁")}
    assert text.words == sorted(text.words)
    assert (text.words[0], begin["▁de"], text.words[-1]) == (0, 1, 2)
    aligner = Aligner(loaded)
    [found] = aligner.align([Example("The dog's bone.", "L'os du chien.", "")], only(View(0)))
    assert {target for _, target in found.links} == {0, 1, 2}
    assert {source for source, _ in found.links} <= {0, 1, 2}


@pytest.mark.parametrize("name", ["bahdanau", "transformer"])
def test_links_are_those_of_the_translator_itself(name: str, request: pytest.FixtureRequest) -> None:
    translator = translate.load(request.getfixturevalue(name), "cpu")
    some = [
        Example("we walk to the market", "우리는 시장에 걸어간다", ""),
        Example("i run", "나는 달린다", ""),
    ]
    maps, batch = translator.maps(some)
    view = View(max(0, len(maps) - 2))
    found = [one.links for one in Aligner(translator).align(some, only(view))]
    for row, (pair, links) in enumerate(zip(some, found, strict=True)):
        weights = maps[view.layer].weights[row].mean(0)[: batch.target.lengths[row] - 1]
        words = (
            translator.tokenizers.target.words(pair.target),
            translator.tokenizers.source.words(pair.source),
        )
        assert links == strongest(to_words(weights[:, : len(words[1])], *words))


# ---------------------------------------------------------------------------------------------- what is wrong


def test_models_that_cannot_align_are_refused(word_runs: dict[str, Run]) -> None:
    with pytest.raises(InputError, match="no attention"):
        Aligner(translate.load(word_runs["fixed"], "cpu"))
    with pytest.raises(
        InputError, match=r"forth translates low to high, as .*; the reverse goes from high to low"
    ):
        Aligner(translate.load(word_runs["forth"], "cpu"), translate.load(word_runs["forth"], "cpu"))


def test_columns_by_number_tell_directions_of_the_same_data_only(bahdanau: Run) -> None:
    one, other = translate.load(bahdanau, "cpu"), translate.load(bahdanau, "cpu")
    with pytest.raises(InputError, match="translates 1 to 2, as"):
        Aligner(one, other)
    recipe = other.run.recipe
    for data in (replace(recipe.data, train="other.tsv"), replace(recipe.data, source=2, target=1)):
        other.run = replace(other.run, recipe=replace(recipe, data=data))
        Aligner(one, other)


def test_validation_data_that_the_model_cannot_take_chooses_nothing(
    word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    aligner = Aligner(translate.load(word_runs["short"], "cpu"))
    valid = Split("valid", [Example("ba " * 12, "BA", ""), Example("da fa", "FA DA", "")])
    monkeypatch.setattr(type(aligner.forth.texts), "valid", lambda _: valid)
    assert "on 2 pairs" in str(aligner.choose(pairs(1)))


def test_a_text_that_preparing_leaves_nothing_of_has_no_links(word_runs: dict[str, Run]) -> None:
    forth = planted(word_runs["forth"], View(0, 0))
    forth.texts = replace(forth.texts, config=replace(forth.texts.config, prepare="spelled-out"))
    some = [Example("\u0301", "BA", ""), Example("ba", "\u0301", ""), Example("\u0301", "\u0301", "")]
    assert [one.links for one in Aligner(forth).align(some, only(View(0, 0)))] == [frozenset()] * 3


def test_a_pair_that_learned_positions_do_not_reach_is_told(word_runs: dict[str, Run]) -> None:
    aligner = Aligner(translate.load(word_runs["short"], "cpu"))
    assert aligner.unfit(Example("ba" + " ba" * 10, "BA", "here:1")) is None
    for pair in (Example("ba" + " ba" * 11, "BA", "here:1"), Example("ba", "BA" + " BA" * 11, "here:1")):
        flaw = aligner.unfit(pair)
        assert str(flaw) == "here:1: too long (12 tokens; this model, which has learned positions, takes 11)"


def test_attention_to_no_word_gives_no_link(word_runs: dict[str, Run]) -> None:
    class Silent(nn.Linear):
        def maps(self, batch: Pairs) -> list[Map]:
            rows, steps = batch.target.ids.shape
            return [Map("", torch.zeros(rows, 1, steps, batch.source.ids.shape[1]))]

    loaded = translate.load(word_runs["forth"], "cpu")
    loaded.model = Silent(1, 1)
    aligner = Aligner(loaded)
    chosen = aligner.choose(pairs(5))
    assert [one.links for one in aligner.align(pairs(5), chosen)] == [frozenset()] * 5


# ------------------------------------------------------------------------------------------------- evaluation


def with_gold(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> Split:
    """Pairs with gold links, which every planted view but one misses."""
    some = pairs(60, seed=4)
    gold = Split("gold", some, [Gold(opposite(one)) for one in some])
    monkeypatch.setattr(type(translator.texts), "gold", lambda _: gold)
    return gold


@pytest.mark.parametrize("view", [View(0, 0, True), View(1, 2, False)])
def test_eval_reads_links_where_align_does(
    view: View, word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = planted(word_runs["forth"], view)
    gold = with_gold(translator, monkeypatch)
    found = evaluation._links(translator, Split("test", pairs(5)))
    assert found["links"].error_rate == 0  # layer 0, all heads, plain: above 0.5
    assert found["links_by"].startswith(str(view))
    aligner = Aligner(translator)
    chosen = aligner.choose(gold.examples)
    assert found["links_by"] == str(chosen)
    assert gold.links is not None
    assert found["links"] == alignment_score(
        [one.links for one in aligner.align(gold.examples, chosen)], gold.links
    )


def test_eval_keeps_to_the_recipe(word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    translator = planted(word_runs["forth"], View(1, 2, True))
    with_gold(translator, monkeypatch)
    for decode, told in (
        (translate.DecodeConfig(align_shift=True), "layer 1, head 2, shifted"),
        (
            translate.DecodeConfig(align_layer=-2, align_shift=False),
            "layer 0, mean of heads, plain; as asked",
        ),
    ):
        translator.decode = decode
        assert evaluation._links(translator, Split("test", pairs(5)))["links_by"].startswith(told)


def test_eval_gives_no_links_to_a_pair_that_is_too_long(
    word_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    translator = translate.load(word_runs["short"], "cpu")
    some = [*pairs(3, longest=5), Example("ba" + " ba" * 11, "BA", "here:4")]
    gold = Split("gold", some, [Gold(frozenset({(0, 0)}))] * 4)
    monkeypatch.setattr(type(translator.texts), "gold", lambda _: gold)
    found = evaluation._links(translator, Split("test", pairs(5)))
    assert found["links"].found == sum(len(one.target.split()) for one in some[:3])
    assert found["links"].sure == 4
