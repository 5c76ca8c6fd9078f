"""The graphs of models that read: BERT with its heads, and the classifiers of words.

::

    BERT            input_ids, token_type_ids, attention_mask  (B, L)
                    →  logits  (B, C) of a classifier, (B, L, C) of a tagger
                    →  starts, ends  (B, L) of one that answers
                    and places  (M,)  →  words  (M, V), next  (B, 2)  of one that was pretrained

    selfattentive   ids  (B, L), lengths  (B,); of pairs, second_ids and second_lengths too
                    →  logits  (B, C), attention  (B, R, L), second_attention

    hierarchical    ids  (B, L), lengths  (B,): the sentences of all documents
                    documents  (N, S), document_lengths  (N,): the numbers of the sentences of each
                    →  logits  (N, C), attention  (B, L), document_attention  (N, S)

``places`` are those of hidden words, counted through all rows. A length is 1 or more; what stands behind it,
is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from jumok.annotated import Labelled, LabelledDocuments, LabelledPairs, Masked, Texts
from jumok.attention.kinds import Mask, Ready
from jumok.batch import Tokens
from jumok.exchange.onnx.graphs import Graph, Named, looked
from jumok.models.bert import Classifier, Pretraining, Spans, Tagger
from jumok.models.hierarchical import Hierarchical
from jumok.models.selfattentive import SelfAttentive

__all__ = ["Reads", "given", "graph", "probe", "wanted"]

Reads = Classifier | Tagger | Spans | Pretraining | SelfAttentive | Hierarchical
BERTS = (Classifier, Tagger, Spans, Pretraining)


def graph(model: Reads) -> Graph:
    """The graph of a model."""
    example = given(model, probe(model, [3, 5]))
    if isinstance(model, BERTS):
        sizes: dict[str, tuple[str, ...]] = dict.fromkeys(example, ("batch", "length"))
        if "places" in sizes:
            sizes["places"] = ("places",)
        return Graph(model, lambda inputs: _by_bert(model, inputs), example, sizes)
    if isinstance(model, SelfAttentive):
        sizes = {"ids": ("batch", "length"), "lengths": ("batch",)}
        sizes |= {"second_ids": ("batch", "second_length"), "second_lengths": ("batch",)}
        return Graph(model, lambda inputs: _by_hops(model, inputs), example, sizes)
    sizes = {
        "ids": ("sentences", "length"),
        "lengths": ("sentences",),
        "documents": ("batch", "longest"),
        "document_lengths": ("batch",),
    }
    return Graph(model, lambda inputs: _by_levels(model, inputs), example, sizes)


# ----------------------------------------------------------------------------------------- what they say


@dataclass(frozen=True, eq=False)
class _Given(Tokens):
    """Texts in rows, with what the graph was told of where they are."""

    seen: Tensor | None = None  # (B, L), True at tokens

    @cached_property
    def mask(self) -> Mask | None:
        assert self.seen is not None
        # A row of padding only sees all of it, so that it gives numbers, if none that anybody wants.
        seen = self.seen | ~self.seen.any(-1, keepdim=True)
        return Ready(torch.where(seen[:, None, None], 0.0, -torch.inf))

    @cached_property
    def real(self) -> Tensor:
        assert self.seen is not None
        return self.seen


def _by_bert(model: Classifier | Tagger | Spans | Pretraining, inputs: Named) -> Named:
    ids, segments = inputs["input_ids"], inputs["token_type_ids"]
    tokens = _Given(ids, (), seen=inputs["attention_mask"] == 1)
    if isinstance(model, Pretraining):
        hidden = model.bert.encode(tokens, segments)
        said = {}
        if model.words is not None:
            said["words"] = model.words.logits(hidden.flatten(0, 1).index_select(0, inputs["places"]))
        if model.next is not None:
            said["next"] = model.next(model.bert.pool(hidden[:, 0]))
        return said
    batch = Texts(tokens=tokens, segments=segments)
    if isinstance(model, Spans):
        return dict(zip(("starts", "ends"), model.logits(batch), strict=True))
    if isinstance(model, Tagger):
        return {"logits": model.logits(batch)}
    return {"logits": model.logits(batch, ids.shape[0])}


def _by_hops(model: SelfAttentive, inputs: Named) -> Named:
    tokens = _of_lengths(inputs["ids"], inputs["lengths"])
    parts: dict[str, Any] = {"tokens": tokens, "segments": tokens.ids, "labels": tokens.ids[:, 0]}
    names = ["attention"]
    if not model.config.pairs:
        logits = model.logits(Labelled(**parts))
    else:
        seconds = _of_lengths(inputs["second_ids"], inputs["second_lengths"])
        logits = model.logits(LabelledPairs(**parts, seconds=seconds))
        names.append("second_attention")
    return {"logits": logits, **dict(zip(names, looked(), strict=True))}


def _by_levels(model: Hierarchical, inputs: Named) -> Named:
    tokens = _of_lengths(inputs["ids"], inputs["lengths"])
    documents = _of_lengths(inputs["documents"], inputs["document_lengths"])
    labels = inputs["document_lengths"]  # as many as documents
    batch = LabelledDocuments(tokens=tokens, segments=tokens.ids, labels=labels, sentences=documents)
    logits = model.logits(batch)
    words, sentences = (one.squeeze(1) for one in looked())
    return {"logits": logits, "attention": words, "document_attention": sentences}


def _of_lengths(ids: Tensor, lengths: Tensor) -> Tokens:
    return Tokens(ids, (1,), counts=lengths)


# ----------------------------------------------------------------------------------- from batches of ours


def given(model: Reads, batch: Texts) -> Named:
    """A batch as the inputs of the model's graph."""
    if isinstance(model, BERTS):
        tokens = batch.tokens
        named = {
            "input_ids": tokens.ids,
            "token_type_ids": batch.segments,
            "attention_mask": tokens.real.long(),
        }
        return {**named, "places": batch.places} if isinstance(batch, Masked) else named
    ids, lengths = _padded(batch.tokens)
    named = {"ids": ids, "lengths": lengths}
    if isinstance(batch, LabelledPairs):
        named["second_ids"], named["second_lengths"] = _padded(batch.seconds)
    if isinstance(batch, LabelledDocuments):
        named["documents"], named["document_lengths"] = _padded(batch.sentences)
    return named


def _padded(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A row a sequence, and the lengths, of which each is at least 1."""
    if tokens.packed:
        rows = tokens.ids[0].split(list(tokens.lengths))
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    else:
        ids = tokens.ids
    if not ids.shape[1]:
        ids = ids.new_zeros(len(ids), 1)
    return ids, torch.tensor(tokens.lengths).clamp(min=1)


def probe(model: Reads, lengths: Sequence[int]) -> Any:
    """A batch of texts of such lengths, of any words."""
    words = _words(model)

    def row(number: int, length: int) -> list[int]:
        return [(7 * number + 3 * at + 1) % words for at in range(length)]

    rows = [row(number, length) for number, length in enumerate(lengths)]
    if isinstance(model, BERTS):
        segments = [[int(2 * at >= length) for at in range(length)] for length in lengths]
        if model.bert.config.segments < 2:
            segments = [[0] * length for length in lengths]
        if not isinstance(model, Pretraining):
            return Texts.of(rows, segments)
        places = [number * max(lengths) + length - 1 for number, length in enumerate(lengths)]
        return Masked.of(rows, segments, places=places, labels=places, next=[0] * len(rows))
    labels = [0] * len(rows)
    if isinstance(model, Hierarchical):  # the first document has all sentences but one, the last one that
        sentences = [[*range(len(rows) - 1)], [len(rows) - 1]] if len(rows) > 2 else [[0, 1], [1]]
        return LabelledDocuments.of(rows, sentences=sentences, labels=[0, 0])
    if model.config.pairs:
        seconds = [row(number + 5, length + 2) for number, length in enumerate(reversed(lengths))]
        return LabelledPairs.of(rows, seconds=seconds, labels=labels)
    return Labelled.of(rows, labels=labels)


def _words(model: Reads) -> int:
    table: nn.Embedding = model.bert.word_embedding if isinstance(model, BERTS) else model.embedding
    return table.num_embeddings


@torch.no_grad()
def wanted(model: Reads, batch: Any) -> Named:
    """What the model itself says of a batch, by the names of the graph's outputs."""
    if isinstance(model, Pretraining):
        said = zip(("words", "next"), model.logits(batch), strict=True)
        return {name: x for name, x in said if x is not None}
    if isinstance(model, Spans):
        return dict(zip(("starts", "ends"), model.logits(batch), strict=True))
    logits = {"logits": model.logits(batch)}
    if isinstance(model, Classifier | Tagger):
        return logits
    maps = [one.weights.squeeze(-2) for one in model.maps(batch)]
    if isinstance(model, Hierarchical):
        words, sentences = (one.squeeze(1) for one in maps)
        return {**logits, "attention": words, "document_attention": sentences}
    return {**logits, **dict(zip(("attention", "second_attention"), maps, strict=False))}
