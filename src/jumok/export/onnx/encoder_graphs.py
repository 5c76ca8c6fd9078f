"""The graphs of models that read: BERT with its heads, and the classifiers of words.

::

    BERT            input_ids, token_type_ids, attention_mask  (B, L)
                    →  logits  (B, C) of a classifier, (B, L, C) of a tagger
                    →  starts, ends  (B, L) of one that answers
                    and places  (M,)  →  words  (M, V), next  (B, 2)  of one that was pretrained

    self_attentive   ids  (B, L), lengths  (B,); of pairs, second_ids and second_lengths too
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

from jumok.attention.mask_types import AdditiveMask, Mask
from jumok.batches.text import ClassificationBatch, DocumentBatch, PretrainingBatch, TextBatch, TextPairBatch
from jumok.batches.tokens import Tokens
from jumok.export.onnx.graphs import NamedTensors, OnnxGraph, take_recorded_weights
from jumok.models.bert import BertClassifier, BertPretrainingModel, BertSpanExtractor, BertTagger
from jumok.models.hierarchical import HierarchicalAttentionNetwork
from jumok.models.self_attentive import SelfAttentiveClassifier

__all__ = ["EncoderModel", "build_graph", "build_inputs", "build_probe_batch", "compute_expected_outputs"]

EncoderModel = (
    BertClassifier
    | BertTagger
    | BertSpanExtractor
    | BertPretrainingModel
    | SelfAttentiveClassifier
    | HierarchicalAttentionNetwork
)
BERT_MODELS = (BertClassifier, BertTagger, BertSpanExtractor, BertPretrainingModel)


def build_graph(model: EncoderModel) -> OnnxGraph:
    """The graph of a model."""
    example = build_inputs(model, build_probe_batch(model, [3, 5]))
    if isinstance(model, BERT_MODELS):
        sizes: dict[str, tuple[str, ...]] = dict.fromkeys(example, ("batch", "length"))
        if "places" in sizes:
            sizes["places"] = ("places",)
        return OnnxGraph(model, lambda inputs: _run_bert(model, inputs), example, sizes)
    if isinstance(model, SelfAttentiveClassifier):
        sizes = {"ids": ("batch", "length"), "lengths": ("batch",)}
        sizes |= {"second_ids": ("batch", "second_length"), "second_lengths": ("batch",)}
        return OnnxGraph(model, lambda inputs: _run_self_attentive(model, inputs), example, sizes)
    sizes = {
        "ids": ("sentences", "length"),
        "lengths": ("sentences",),
        "documents": ("batch", "longest"),
        "document_lengths": ("batch",),
    }
    return OnnxGraph(model, lambda inputs: _run_hierarchical(model, inputs), example, sizes)


# ----------------------------------------------------------------------------------------- what they say


@dataclass(frozen=True, eq=False)
class _OnnxTokens(Tokens):
    """Texts in rows, with what the graph was told of where they are."""

    attention_mask: Tensor | None = None  # (B, L), True at tokens

    @cached_property
    def mask(self) -> Mask | None:
        assert self.attention_mask is not None
        # A row of padding only sees all of it, so that it gives numbers, if none that anybody wants.
        seen = self.attention_mask | ~self.attention_mask.any(-1, keepdim=True)
        return AdditiveMask(torch.where(seen[:, None, None], 0.0, -torch.inf))

    @cached_property
    def valid_mask(self) -> Tensor:
        assert self.attention_mask is not None
        return self.attention_mask


def _run_bert(
    model: BertClassifier | BertTagger | BertSpanExtractor | BertPretrainingModel, inputs: NamedTensors
) -> NamedTensors:
    ids, segments = inputs["input_ids"], inputs["token_type_ids"]
    tokens = _OnnxTokens(ids, (), attention_mask=inputs["attention_mask"] == 1)
    if isinstance(model, BertPretrainingModel):
        hidden = model.bert.encode(tokens, segments)
        said = {}
        if model.mlm_head is not None:
            said["words"] = model.mlm_head.logits(hidden.flatten(0, 1).index_select(0, inputs["places"]))
        if model.nsp_head is not None:
            said["next"] = model.nsp_head(model.bert.pool(hidden[:, 0]))
        return said
    batch = TextBatch(tokens=tokens, segments=segments)
    if isinstance(model, BertSpanExtractor):
        return dict(zip(("starts", "ends"), model.logits(batch), strict=True))
    if isinstance(model, BertTagger):
        return {"logits": model.logits(batch)}
    return {"logits": model.logits(batch, ids.shape[0])}


def _run_self_attentive(model: SelfAttentiveClassifier, inputs: NamedTensors) -> NamedTensors:
    tokens = _build_tokens(inputs["ids"], inputs["lengths"])
    parts: dict[str, Any] = {"tokens": tokens, "segments": tokens.ids, "labels": tokens.ids[:, 0]}
    names = ["attention"]
    if not model.config.text_pairs:
        logits = model.logits(ClassificationBatch(**parts))
    else:
        seconds = _build_tokens(inputs["second_ids"], inputs["second_lengths"])
        logits = model.logits(TextPairBatch(**parts, second_tokens=seconds))
        names.append("second_attention")
    return {"logits": logits, **dict(zip(names, take_recorded_weights(), strict=True))}


def _run_hierarchical(model: HierarchicalAttentionNetwork, inputs: NamedTensors) -> NamedTensors:
    tokens = _build_tokens(inputs["ids"], inputs["lengths"])
    documents = _build_tokens(inputs["documents"], inputs["document_lengths"])
    labels = inputs["document_lengths"]  # as many as documents
    batch = DocumentBatch(tokens=tokens, segments=tokens.ids, labels=labels, sentence_indices=documents)
    logits = model.logits(batch)
    words, sentences = (one.squeeze(1) for one in take_recorded_weights())
    return {"logits": logits, "attention": words, "document_attention": sentences}


def _build_tokens(ids: Tensor, lengths: Tensor) -> Tokens:
    return Tokens(ids, (1,), device_lengths=lengths)


# ----------------------------------------------------------------------------------- from batches of ours


def build_inputs(model: EncoderModel, batch: TextBatch) -> NamedTensors:
    """A batch as the inputs of the model's graph."""
    if isinstance(model, BERT_MODELS):
        tokens = batch.tokens
        named = {
            "input_ids": tokens.ids,
            "token_type_ids": batch.segments,
            "attention_mask": tokens.valid_mask.long(),
        }
        return {**named, "places": batch.masked_indices} if isinstance(batch, PretrainingBatch) else named
    ids, lengths = _pad_tokens(batch.tokens)
    named = {"ids": ids, "lengths": lengths}
    if isinstance(batch, TextPairBatch):
        named["second_ids"], named["second_lengths"] = _pad_tokens(batch.second_tokens)
    if isinstance(batch, DocumentBatch):
        named["documents"], named["document_lengths"] = _pad_tokens(batch.sentence_indices)
    return named


def _pad_tokens(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A row a sequence, and the lengths, of which each is at least 1."""
    if tokens.packed:
        rows = tokens.ids[0].split(list(tokens.lengths))
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    else:
        ids = tokens.ids
    if not ids.shape[1]:
        ids = ids.new_zeros(len(ids), 1)
    return ids, torch.tensor(tokens.lengths).clamp(min=1)


def build_probe_batch(model: EncoderModel, lengths: Sequence[int]) -> Any:
    """A batch of texts of such lengths, of any words."""
    words = _get_vocab_size(model)

    def row(number: int, length: int) -> list[int]:
        return [(7 * number + 3 * at + 1) % words for at in range(length)]

    rows = [row(number, length) for number, length in enumerate(lengths)]
    if isinstance(model, BERT_MODELS):
        segments = [[int(2 * at >= length) for at in range(length)] for length in lengths]
        if model.bert.config.num_segments < 2:
            segments = [[0] * length for length in lengths]
        if not isinstance(model, BertPretrainingModel):
            return TextBatch.from_sequences(rows, segments)
        places = [number * max(lengths) + length - 1 for number, length in enumerate(lengths)]
        return PretrainingBatch.from_sequences(
            rows, segments, masked_indices=places, labels=places, next_sentence_labels=[0] * len(rows)
        )
    labels = [0] * len(rows)
    if isinstance(
        model, HierarchicalAttentionNetwork
    ):  # the first document has all sentences but one, the last one that
        sentences = [[*range(len(rows) - 1)], [len(rows) - 1]] if len(rows) > 2 else [[0, 1], [1]]
        return DocumentBatch.from_sequences(rows, sentence_indices=sentences, labels=[0, 0])
    if model.config.text_pairs:
        seconds = [row(number + 5, length + 2) for number, length in enumerate(reversed(lengths))]
        return TextPairBatch.from_sequences(rows, second_tokens=seconds, labels=labels)
    return ClassificationBatch.from_sequences(rows, labels=labels)


def _get_vocab_size(model: EncoderModel) -> int:
    table: nn.Embedding = model.bert.word_embedding if isinstance(model, BERT_MODELS) else model.embedding
    return table.num_embeddings


@torch.no_grad()
def compute_expected_outputs(model: EncoderModel, batch: Any) -> NamedTensors:
    """What the model itself says of a batch, by the names of the graph's outputs."""
    if isinstance(model, BertPretrainingModel):
        said = zip(("words", "next"), model.logits(batch), strict=True)
        return {name: x for name, x in said if x is not None}
    if isinstance(model, BertSpanExtractor):
        return dict(zip(("starts", "ends"), model.logits(batch), strict=True))
    logits = {"logits": model.logits(batch)}
    if isinstance(model, BertClassifier | BertTagger):
        return logits
    maps = [one.weights.squeeze(-2) for one in model.compute_attention_maps(batch)]
    if isinstance(model, HierarchicalAttentionNetwork):
        words, sentences = (one.squeeze(1) for one in maps)
        return {**logits, "attention": words, "document_attention": sentences}
    return {**logits, **dict(zip(("attention", "second_attention"), maps, strict=False))}
