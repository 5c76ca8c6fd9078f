"""ONNX graphs of encoder models: BERT with its heads, and the word-attention classifiers.

::

    BERT             input_ids, token_type_ids, attention_mask  (B, L)
                     →  logits  (B, C) of a classifier, (B, L, C) of a tagger
                     →  start_logits, end_logits  (B, L) of question answering
                     and masked_positions  (M,)  →  mlm_logits  (M, V), nsp_logits  (B, 2)  of pretraining

    self_attentive   ids  (B, L), lengths  (B,); for text pairs also second_ids and second_lengths
                     →  logits  (B, C), attention  (B, R, L), second_attention

    hierarchical     ids  (B, L), lengths  (B,): the sentences of all documents
                     document_sentences  (N, S), document_lengths  (N,): the sentence numbers of each document
                     →  logits  (N, C), attention  (B, L), document_attention  (N, S)

``masked_positions`` index the flattened ``input_ids``. A length is at least 1. Ids beyond the length of a row
are ignored.
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
    """Build the graph of a model."""
    example = build_inputs(model, build_probe_batch(model, [3, 5]))
    if isinstance(model, BERT_MODELS):
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(example, ("batch", "length"))
        if "masked_positions" in axes:
            axes["masked_positions"] = ("num_masked",)
        return OnnxGraph(model, lambda inputs: _run_bert(model, inputs), example, axes)
    if isinstance(model, SelfAttentiveClassifier):
        axes = {"ids": ("batch", "length"), "lengths": ("batch",)}
        axes |= {"second_ids": ("batch", "second_length"), "second_lengths": ("batch",)}
        return OnnxGraph(model, lambda inputs: _run_self_attentive(model, inputs), example, axes)
    axes = {
        "ids": ("sentences", "length"),
        "lengths": ("sentences",),
        "document_sentences": ("batch", "max_sentences"),
        "document_lengths": ("batch",),
    }
    return OnnxGraph(model, lambda inputs: _run_hierarchical(model, inputs), example, axes)


# ----------------------------------------------------------------------------------------- outputs


@dataclass(frozen=True, eq=False)
class _OnnxTokens(Tokens):
    """Padded texts with the attention mask of the graph."""

    attention_mask: Tensor | None = None  # (B, L), True at tokens

    @cached_property
    def mask(self) -> Mask | None:
        """The mask of the padding. A row without tokens attends to all of its padding, which avoids NaN."""
        assert self.attention_mask is not None
        visible = self.attention_mask | ~self.attention_mask.any(-1, keepdim=True)
        return AdditiveMask(torch.where(visible[:, None, None], 0.0, -torch.inf))

    @cached_property
    def valid_mask(self) -> Tensor:
        """``(B, L)``, True at tokens."""
        assert self.attention_mask is not None
        return self.attention_mask


def _run_bert(
    model: BertClassifier | BertTagger | BertSpanExtractor | BertPretrainingModel, inputs: NamedTensors
) -> NamedTensors:
    ids, segments = inputs["input_ids"], inputs["token_type_ids"]
    tokens = _OnnxTokens(ids, (), attention_mask=inputs["attention_mask"] == 1)
    if isinstance(model, BertPretrainingModel):
        hidden = model.bert.encode(tokens, segments)
        outputs = {}
        if model.mlm_head is not None:
            masked = hidden.flatten(0, 1).index_select(0, inputs["masked_positions"])
            outputs["mlm_logits"] = model.mlm_head.logits(masked)
        if model.nsp_head is not None:
            outputs["nsp_logits"] = model.nsp_head(model.bert.pool(hidden[:, 0]))
        return outputs
    batch = TextBatch(tokens=tokens, segments=segments)
    if isinstance(model, BertSpanExtractor):
        return dict(zip(("start_logits", "end_logits"), model.logits(batch), strict=True))
    if isinstance(model, BertTagger):
        return {"logits": model.logits(batch)}
    return {"logits": model.logits(batch, ids.shape[0])}


def _run_self_attentive(model: SelfAttentiveClassifier, inputs: NamedTensors) -> NamedTensors:
    tokens = _build_tokens(inputs["ids"], inputs["lengths"])
    fields: dict[str, Any] = {"tokens": tokens, "segments": tokens.ids, "labels": tokens.ids[:, 0]}
    names = ["attention"]
    if not model.config.text_pairs:
        logits = model.logits(ClassificationBatch(**fields))
    else:
        second_tokens = _build_tokens(inputs["second_ids"], inputs["second_lengths"])
        logits = model.logits(TextPairBatch(**fields, second_tokens=second_tokens))
        names.append("second_attention")
    return {"logits": logits, **dict(zip(names, take_recorded_weights(), strict=True))}


def _run_hierarchical(model: HierarchicalAttentionNetwork, inputs: NamedTensors) -> NamedTensors:
    tokens = _build_tokens(inputs["ids"], inputs["lengths"])
    documents = _build_tokens(inputs["document_sentences"], inputs["document_lengths"])
    labels = inputs["document_lengths"]  # any tensor (N,)
    batch = DocumentBatch(tokens=tokens, segments=tokens.ids, labels=labels, sentence_indices=documents)
    logits = model.logits(batch)
    words, sentences = (weights.squeeze(1) for weights in take_recorded_weights())
    return {"logits": logits, "attention": words, "document_attention": sentences}


def _build_tokens(ids: Tensor, lengths: Tensor) -> Tokens:
    return Tokens(ids, (1,), device_lengths=lengths)


# ----------------------------------------------------------------------------------- inputs


def build_inputs(model: EncoderModel, batch: TextBatch) -> NamedTensors:
    """Return a batch as the inputs of the graph of a model."""
    if isinstance(model, BERT_MODELS):
        tokens = batch.tokens
        inputs = {"input_ids": tokens.ids, "token_type_ids": batch.segments, "attention_mask": tokens.valid_mask.long()}
        if isinstance(batch, PretrainingBatch):
            inputs["masked_positions"] = batch.masked_indices
        return inputs
    ids, lengths = _pad_tokens(batch.tokens)
    inputs = {"ids": ids, "lengths": lengths}
    if isinstance(batch, TextPairBatch):
        inputs["second_ids"], inputs["second_lengths"] = _pad_tokens(batch.second_tokens)
    if isinstance(batch, DocumentBatch):
        inputs["document_sentences"], inputs["document_lengths"] = _pad_tokens(batch.sentence_indices)
    return inputs


def _pad_tokens(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the padded ids, one row per sequence, and the lengths, at least 1 each."""
    if tokens.packed:
        rows = tokens.ids[0].split(list(tokens.lengths))
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    else:
        ids = tokens.ids
    if not ids.shape[1]:
        ids = ids.new_zeros(len(ids), 1)
    return ids, torch.tensor(tokens.lengths).clamp(min=1)


def build_probe_batch(model: EncoderModel, lengths: Sequence[int]) -> Any:
    """Build a batch of texts with these lengths and arbitrary words."""
    vocab_size = _get_vocab_size(model)

    def build_row(number: int, length: int) -> list[int]:
        return [(7 * number + 3 * i + 1) % vocab_size for i in range(length)]

    rows = [build_row(number, length) for number, length in enumerate(lengths)]
    if isinstance(model, BERT_MODELS):
        segments = [[int(2 * i >= length) for i in range(length)] for length in lengths]
        if model.bert.config.num_segments < 2:
            segments = [[0] * length for length in lengths]
        if not isinstance(model, BertPretrainingModel):
            return TextBatch.from_sequences(rows, segments)
        masked = [number * max(lengths) + length - 1 for number, length in enumerate(lengths)]
        return PretrainingBatch.from_sequences(
            rows, segments, masked_indices=masked, labels=masked, next_sentence_labels=[0] * len(rows)
        )
    labels = [0] * len(rows)
    if isinstance(model, HierarchicalAttentionNetwork):
        # The first document has all sentences but the last, which is the second document.
        sentences = [[*range(len(rows) - 1)], [len(rows) - 1]] if len(rows) > 2 else [[0, 1], [1]]
        return DocumentBatch.from_sequences(rows, sentence_indices=sentences, labels=[0, 0])
    if model.config.text_pairs:
        second_rows = [build_row(number + 5, length + 2) for number, length in enumerate(reversed(lengths))]
        return TextPairBatch.from_sequences(rows, second_tokens=second_rows, labels=labels)
    return ClassificationBatch.from_sequences(rows, labels=labels)


def _get_vocab_size(model: EncoderModel) -> int:
    embedding: nn.Embedding = model.bert.word_embedding if isinstance(model, BERT_MODELS) else model.embedding
    return embedding.num_embeddings


@torch.no_grad()
def compute_expected_outputs(model: EncoderModel, batch: Any) -> NamedTensors:
    """Compute the outputs of the model itself, by the names of the outputs of the graph."""
    if isinstance(model, BertPretrainingModel):
        outputs = zip(("mlm_logits", "nsp_logits"), model.logits(batch), strict=True)
        return {name: x for name, x in outputs if x is not None}
    if isinstance(model, BertSpanExtractor):
        return dict(zip(("start_logits", "end_logits"), model.logits(batch), strict=True))
    logits = {"logits": model.logits(batch)}
    if isinstance(model, BertClassifier | BertTagger):
        return logits
    maps = [layer.weights.squeeze(-2) for layer in model.compute_attention_maps(batch)]
    if isinstance(model, HierarchicalAttentionNetwork):
        words, sentences = (weights.squeeze(1) for weights in maps)
        return {**logits, "attention": words, "document_attention": sentences}
    return {**logits, **dict(zip(("attention", "second_attention"), maps, strict=False))}
