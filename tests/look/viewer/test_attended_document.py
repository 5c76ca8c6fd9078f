"""Tests of documents with weights, and of their JSON."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.look.viewer import html_file
from jumok.look.viewer.attended_document import AttendedDocument
from jumok.look.viewer.tiles import TileRequest, unpack
from jumok.look.viewer.viewer_data import ViewerData, answer_request, build_manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from example_documents import REVIEW, build_hierarchical_document, build_long_document, build_multi_hop_document

pytestmark = pytest.mark.filterwarnings("ignore:no installed font has")  # where no Korean font is installed


def test_text_equals_the_original() -> None:
    assert build_hierarchical_document().text == "".join(REVIEW)


def test_word_and_sentence_weights() -> None:
    document = build_hierarchical_document()
    assert document.get_sentence_weights() == pytest.approx([0.2, 0.3, 0.5])
    normalized = document.normalize_within_sentences()
    assert np.add.reduceat(normalized, document.sentence_offsets[:-1]) == pytest.approx([1, 1, 1])
    assert normalized[document.words.index("drags")] == pytest.approx(0.5)

    hops = build_multi_hop_document()
    assert hops.num_hops == 3
    sunday = hops.words.index("일요일에")
    other = 0.3 / (len(hops.words) - 1)
    assert hops.get_word_weights(0)[sunday] == pytest.approx(0.7)
    assert hops.get_word_weights()[sunday] == pytest.approx((0.7 + 2 * other) / 3)
    assert hops.get_sentence_weights(0).sum() == pytest.approx(1)
    assert hops.get_sentence_weights(0).argmax() == 0
    with pytest.raises(InputError, match="hop 3 was requested; there are 3: 0 to 2"):
        hops.get_word_weights(3)


def test_sentence_with_zero_weight_is_not_normalized() -> None:
    document = AttendedDocument(("a", "b"), ("", " "), (0, 1, 2), np.array([[0.0, 1.0]]))
    assert document.normalize_within_sentences().tolist() == [0, 1]


def test_tensors_and_lists_are_accepted() -> None:
    weights = torch.tensor([[0.25, 0.75]], dtype=torch.bfloat16, requires_grad=True)
    document = AttendedDocument(["a", "b"], ["", " "], [0, 2], weights)  # type: ignore[arg-type]
    assert document.weights.dtype == np.float32
    assert document.weights.tolist() == [[0.25, 0.75]]
    assert document.words == ("a", "b")


FIELDS: dict[str, Any] = {
    "words": ("a", "b", "c"),
    "separators": ("", " ", " "),
    "sentence_offsets": (0, 1, 3),
    "weights": np.ones((2, 3)),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"words": (), "separators": ()}, "without words"),
        ({"separators": ("", " ")}, "3 words and 2 separators"),
        ({"words": ("a", 5, "c")}, r"words\[1\] is 5; expected a text"),
        ({"separators": ("", None, "")}, r"separators\[1\] is None"),
        ({"sentence_offsets": ()}, "from 0 to 3"),
        ({"sentence_offsets": (0,)}, "from 0 to 3"),
        ({"sentence_offsets": (1, 3)}, r"sentence_offsets=\(1, 3\)"),
        ({"sentence_offsets": (0, 2)}, r"\(0, 3\) is one sentence"),
        ({"sentence_offsets": (0, 4)}, "from 0 to 3"),
        ({"sentence_offsets": (0, 1.5, 3)}, "integers"),
        ({"sentence_offsets": (0, 1, 1, 3)}, "sentence 1 goes from word 1 to 1"),
        ({"sentence_offsets": (0, 2, 1, 3)}, "increasing offsets"),
        ({"weights": np.ones(3)}, r"weights of shape \(3,\)"),
        ({"weights": np.ones((2, 4))}, "the last of them 3"),
        ({"weights": np.ones((0, 3))}, "shape"),
        ({"weights": [["x", "y", "z"]]}, "not an array of numbers"),
        ({"weights": np.array([[0.5, np.nan, 0.5]])}, r"weights\[\(0, 1\)\] is nan"),
        ({"weights": np.array([[0.5, np.inf, 0.5]])}, "finite"),
        ({"weights": np.array([[0.5, 1.0, -0.5]])}, "from 0 on"),
        ({"sentence_weights": np.array([0.5, 0.5])}, "sentence_weights given with 2 hops"),
        ({"weights": np.ones((1, 3)), "sentence_weights": np.ones(3)}, r"sentence_weights of shape \(3,\)"),
        ({"weights": np.ones((1, 3)), "sentence_weights": np.array([1.0, -1.0])}, r"sentence_weights\[1\] is -1"),
        ({"class_probabilities": (("a", 1.5),)}, "expected 0 to 1"),
        ({"class_probabilities": (("a", float("nan")),)}, "expected 0 to 1"),
        ({"class_probabilities": (("a", 0.2), ("b", 0.8))}, "descending order"),
    ],
)
def test_invalid_documents_are_rejected(change: dict[str, Any], message: str) -> None:
    AttendedDocument(**FIELDS)
    with pytest.raises(InputError, match=message):
        AttendedDocument(**FIELDS | change)


def test_json_contains_packed_exact_weights() -> None:
    document = build_long_document(num_hops=7)
    data = ViewerData.from_document(document, title="t")
    entry = build_manifest([data])["data"][0]["document"]
    assert np.array_equal(unpack(base64.b64decode(entry["weights"])), document.weights)
    assert (entry["num_hops"], entry["sentence_weights"], entry["label"]) == (7, None, None)
    assert "".join(map("".join, zip(entry["separators"], entry["words"], strict=True))) == document.text
    assert len(json.dumps(entry)) < 5.4 * 2000 * 7 + 16 * 2000
    entry = build_hierarchical_document().to_json()
    assert unpack(base64.b64decode(entry["sentence_weights"])).tolist() == [pytest.approx([0.2, 0.3, 0.5])]
    assert entry["class_probabilities"] == [["positive", 0.875], ["negative", 0.125]]


def test_sentence_offsets_may_be_numpy_integers() -> None:
    document = AttendedDocument(**FIELDS | {"sentence_offsets": tuple(np.array([0, 1, 3]))})
    assert json.loads(json.dumps(document.to_json()))["sentence_offsets"] == [0, 1, 3]


def test_document_weights_become_a_layer() -> None:
    document = build_multi_hop_document()
    data = ViewerData.from_document(document)
    (layer,) = data.layers
    assert layer.row_labels == ["hop 0", "hop 1", "hop 2"]
    request = TileRequest(0, 0, (1, 2), (0, len(document.words)), quantity="weights")
    assert np.array_equal(unpack(answer_request([data], request))[0], document.weights[1])


def test_html_file_escapes_the_document() -> None:
    document = build_hierarchical_document()
    data = ViewerData.from_document(replace(document, words=("</script>", *document.words[1:])))
    text = html_file.render_html(data, heads={"attention": [0]})
    assert text.count("</script>") == 4  # manifest, index, tiles and the viewer
    assert "\\u003c/script>" in text
