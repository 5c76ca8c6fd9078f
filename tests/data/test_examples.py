"""Encoded texts as batches: packed, padded and alike say the same, and what fills up does not count."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jumok.annotated import Labelled, Spanned, TaggedWords, Texts
from jumok.batch import IGNORE
from jumok.data import examples as module
from jumok.data import windows as windows_module
from jumok.data.examples import Examples, Row
from jumok.errors import InputError
from jumok.models.bert import BertConfig, Classifier, Spans, Tagger

LENGTHS = [3, 11, 5, 2, 7, 13, 3, 5, 17, 2]
LAYOUTS = [{"packed": packed, "alike": alike} for packed in (False, True) for alike in (False, True)]


def rows(kind: type[Texts]) -> list[Row]:
    found = []
    for number, length in enumerate(LENGTHS):
        ids = [2, *(5 + (number + at) % 20 for at in range(length - 2)), 3]
        segments = [int(at > length // 2) for at in range(length)]
        marks: dict[str, Any] = {"labels": number % 3}
        if kind is TaggedWords:
            marks = {"labels": [IGNORE, *(at % 3 if at % 2 else IGNORE for at in range(length - 2)), IGNORE]}
        if kind is Spanned:
            marks = {"allowed": [at == 0 or segment == 1 for at, segment in enumerate(segments)]}
            marks |= {"starts": length // 2 + 1 if length > 2 else 0, "ends": length - 1 if length > 2 else 0}
        found.append(Row(ids, segments, marks))
    return found


MODELS = {
    Labelled: lambda config: Classifier(config, 30, 3),
    TaggedWords: lambda config: Tagger(config, 30, 3),
    Spanned: lambda config: Spans(config, 30),
}


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module) == (0, 1)
    assert doctest.testmod(windows_module) == (0, 3)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_loss_of_the_single_texts(kind: type[Texts], layout: dict[str, bool]) -> None:
    config = BertConfig(width=8, layers=2, heads=2, feed_forward=16, positions=17)
    model: Any = MODELS[kind](config).eval()
    given = rows(kind)
    data = Examples(kind, given, tokens=64, seed=1, longest=17, **layout)
    seen: list[int] = []
    total, count = 0.0, 0
    for index in data.batches(0):
        batch = data.collate(index)
        loss = model.loss(batch)
        total, count = total + float(loss.total), count + loss.count
        seen += batch.index
    assert sorted(seen) == list(range(len(given)))
    alone = [model.loss(Examples(kind, [row], tokens=64, seed=1).collate([0])) for row in given]
    assert count == sum(one.count for one in alone)
    assert total == pytest.approx(sum(float(one.total) for one in alone), rel=1e-4)


@torch.no_grad()
def test_numbers_are_learned_from_in_every_layout() -> None:
    config = BertConfig(width=8, layers=1, heads=2, feed_forward=16, positions=17)
    model = Classifier(config, 30, 1).eval()
    given = [Row(row.ids, row.segments, {"labels": float(n)}) for n, row in enumerate(rows(Labelled))]
    losses = []
    for layout in LAYOUTS:
        data = Examples(Labelled, given, tokens=1000, seed=1, longest=17, **layout)
        batch = data.collate(range(10))
        assert isinstance(batch, Labelled)
        assert batch.labels.dtype == torch.float32
        losses.append(float(model.loss(batch).total))
    assert losses == pytest.approx([losses[0]] * 4)


def test_batches_of_like_sizes_are_alike() -> None:
    given = rows(Labelled) * 20
    for packed in (False, True):
        data = Examples(Labelled, given, tokens=128, seed=1, packed=packed, alike=True)
        forms = [data.collate(index).form for index in data.batches(0)]
        assert None not in forms
        assert len(set(forms)) < len(forms) / 2


def test_no_filler_is_longer_than_the_model_reads() -> None:
    data = Examples(Labelled, rows(Labelled), tokens=512, seed=1, packed=True, longest=17)
    assert max(data.collate(data.batches(0)[0]).tokens.lengths) <= 17


def test_the_parts_of_a_batch_are_all_of_it() -> None:
    data = Examples(Labelled, rows(Labelled), tokens=64, seed=1)
    parts = data.divide(np.arange(10, dtype=np.uint32), 3)
    assert sorted(int(n) for part in parts for n in part) == list(range(10))


def test_other_labels_tags_or_spans_have_another_fingerprint() -> None:
    def found(kind: type[Texts], given: list[Row]) -> str:
        return Examples(kind, given, tokens=64, seed=1).fingerprint

    for kind, mark in ((Labelled, "labels"), (TaggedWords, "labels"), (Spanned, "starts"), (Spanned, "ends")):
        given = rows(kind)
        old: Any = given[1].marks[mark]
        new = [*old[:3], 2, *old[4:]] if isinstance(old, list) else old + 1
        assert new != old
        changed = [*given[:1], replace(given[1], marks={**given[1].marks, mark: new}), *given[2:]]
        assert found(kind, rows(kind)) == found(kind, given) != found(kind, changed)


def test_nothing_to_learn_from() -> None:
    with pytest.raises(InputError, match="no example is left"):
        Examples(Labelled, [], tokens=64, seed=1)
