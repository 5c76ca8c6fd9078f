"""The layer and the head that a viewer or a figure opens with: those whose weights are the most telling.

Most heads of a trained model put most of their weight on special tokens, on the first token, on the token itself
or on its neighbours. Their maps look alike for every text. A map tells more the more of the weight is on other
keys, the *content*, and the fewer of these keys have it::

    score = mean over the queries of  c · (1 − H / log n)

    c   share of the weight on the content
    H   entropy of the weights on the content
    n   number of content keys that the query can see

In a model with cross-attention, these layers are candidates; if a decoder generated tokens, their queries. Of a short
text the mean of the heads of the layer with the highest score is opened, of a long one the head with the highest
score, because the mean of long maps takes long to compute. Long maps are scored by some of their rows, very long
ones only in some layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jumok.look.viewer.tiles import FloatArray, to_float32_array
from jumok.look.viewer.viewer_data import Opening, ViewerData, ViewerLayer

MAX_MEAN_LENGTH = 2048  # tokens of a side, up to which the mean of the heads is opened
MAX_SAMPLES = 1 << 24  # weights that are computed to choose the opening
MIN_ROWS, MAX_ROWS = 4, 64  # rows of a head
MIN_RANKED_ROWS = 16  # … if all heads are ranked
NUM_SPANS = 4  # evenly spread over the map
NEIGHBOUR_DISTANCE = 1  # in self-attention, a token's neighbours are not content


@dataclass(frozen=True)
class MapStatistics:
    """How the weights of a map are distributed, as means over its queries; shares of the weight of a row."""

    score: float
    content_share: float
    sink_share: float  # on the first token and special tokens

    @property
    def near_share(self) -> float:
        """The share on the token itself and its neighbours."""
        return max(0.0, 1 - self.content_share - self.sink_share)


def choose_opening(data: ViewerData, *, by_head: bool = False) -> Opening:
    """Choose the layer and the head whose weights are the most telling; with ``by_head``, always a single head."""
    indices = list_candidates(data.layers)
    samples_per_row = sum(len(data.layers[n].heads) * data.layers[n].shape[1] for n in indices)
    indices = indices[:: -(-samples_per_row * MIN_ROWS // MAX_SAMPLES)]  # of very long maps, not all layers
    num_rows = min(MAX_ROWS, max(MIN_ROWS, MAX_SAMPLES // samples_per_row))
    candidates = [data.layers[n] for n in indices]
    if by_head or max(max(layer.shape) for layer in candidates) > MAX_MEAN_LENGTH:
        heads = _score_layers(data.layers, indices, num_rows)
        best_layer, best_head = max(heads, key=lambda choice: heads[choice].score)
        return Opening(best_layer, best_head, _describe(heads[best_layer, best_head], candidates, len(heads), "heads"))
    layers = [_score_mean(layer, num_rows) for layer in candidates]
    best = int(np.argmax([statistics.score for statistics in layers]))
    layer = candidates[best]
    reason = _describe(layers[best], candidates, len(layers), "layers")
    if len(layer.heads) == 1:
        return Opening(indices[best], layer.heads[0], reason)
    if reason:
        sharpest = np.argmax([statistics.score for statistics in _score_heads(layer, num_rows)])
        reason += f"; head {layer.heads[int(sharpest)]} the most"
    return Opening(indices[best], None, reason)


def score_heads(layers: Sequence[ViewerLayer]) -> dict[tuple[int, int], float]:
    """Return how telling each head is, by the index of its layer and its number."""
    samples_per_row = sum(len(layer.heads) * layer.shape[1] for layer in layers)
    num_rows = min(MAX_ROWS, max(MIN_RANKED_ROWS, MAX_SAMPLES // samples_per_row))
    statistics = _score_layers(layers, range(len(layers)), num_rows)
    return {head: map_statistics.score for head, map_statistics in statistics.items()}


def list_candidates(layers: Sequence[ViewerLayer]) -> list[int]:
    """Return the indices of the layers that may be opened: between two texts, or of generated tokens, or all."""
    indices = [n for n, layer in enumerate(layers) if not layer.mean_of] or list(range(len(layers)))
    tests: tuple[Callable[[ViewerLayer], bool], ...] = (
        lambda layer: layer.kind == "cross",
        lambda layer: layer.first_generated != (None, None),
        lambda layer: layer.kind != "channel",
    )
    matches = ([n for n in indices if test(layers[n])] for test in tests)
    return next((candidates for candidates in matches if candidates), indices)


def compute_statistics(layer: ViewerLayer, rows: NDArray[np.int64], weights: FloatArray) -> MapStatistics:
    """Return the statistics of the weights ``(R, K)`` of these rows."""
    is_sink = np.zeros(layer.shape[1], bool)
    is_sink[list(layer.sinks)] = True
    is_content = np.broadcast_to(~is_sink, weights.shape)
    if layer.is_self:
        distances = np.abs(rows[:, None] - np.arange(layer.shape[1]))
        is_content = is_content & (distances > NEIGHBOUR_DISTANCE)
    totals = np.maximum(weights.sum(1), 1e-30)
    content = np.where(is_content, weights, 0)
    shares = content.sum(1) / totals
    num_content = np.count_nonzero(content, axis=1)
    probabilities = content / np.maximum(content.sum(1), 1e-30)[:, None]
    entropies = -np.sum(probabilities * np.log(np.maximum(probabilities, 1e-30)), axis=1)
    # A query that can see one content key or none tells nothing.
    focus = np.where(num_content > 1, 1 - entropies / np.log(np.maximum(num_content, 2)), 0)
    return MapStatistics(
        score=float(np.mean(shares * focus)),
        content_share=float(np.mean(shares)),
        sink_share=float(np.mean(weights[:, is_sink].sum(1) / totals)),
    )


def _score_layers(
    layers: Sequence[ViewerLayer], indices: Iterable[int], num_rows: int
) -> dict[tuple[int, int], MapStatistics]:
    return {
        (index, head): statistics
        for index in indices
        for head, statistics in zip(layers[index].heads, _score_heads(layers[index], num_rows), strict=True)
    }


def _score_heads(layer: ViewerLayer, num_rows: int) -> list[MapStatistics]:
    rows, weights_by_head = _sample_rows(layer, num_rows)
    return [compute_statistics(layer, rows, weights) for weights in weights_by_head]


def _score_mean(layer: ViewerLayer, num_rows: int) -> MapStatistics:
    rows, weights_by_head = _sample_rows(layer, num_rows)
    return compute_statistics(layer, rows, np.mean(np.stack(weights_by_head), axis=0, dtype=np.float32))


def _sample_rows(layer: ViewerLayer, num_rows: int) -> tuple[NDArray[np.int64], list[FloatArray]]:
    """Return the numbers of some rows ``(R,)`` and their weights in each head ``(R, K)``."""
    spans = list(_choose_spans(layer.first_generated[0] or 0, layer.shape[0], num_rows))
    cols = slice(0, layer.shape[1])
    weights = [
        np.concatenate([to_float32_array(layer.source.weights(head, span, cols)) for span in spans])
        for head in layer.heads
    ]
    return np.concatenate([np.arange(span.start, span.stop) for span in spans]), weights


def _choose_spans(first: int, last: int, num_rows: int) -> Iterator[slice]:
    length = last - first
    if length <= num_rows:
        yield slice(first, last)
        return
    size = max(1, num_rows // NUM_SPANS)
    for n in range(NUM_SPANS):
        # The last span ends with the text, where a causal query sees all of it.
        start = first + (n + 1) * length // NUM_SPANS - size
        yield slice(max(first, start), max(first, start) + size)


def _describe(statistics: MapStatistics, candidates: Sequence[ViewerLayer], count: int, name: str) -> str:
    """Return why a map was chosen among ``count`` maps of the candidates."""
    if count < 2:
        return ""
    if statistics.content_share > 0.995:
        return f"most telling of {count} {name}: the most concentrated weights"
    others = "special tokens and neighbours" if candidates[0].is_self else "special tokens"
    return f"most telling of {count} {name}: {statistics.content_share:.0%} of the weight beyond {others}"
