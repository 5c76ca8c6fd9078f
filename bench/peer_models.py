"""Models that ours is compared with: Marian of transformers, and the usual loop of an RNN."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.tokens import BOS, EOS, IGNORE, UNK, Seq2SeqBatch
from jumok.models.seq2seq import Seq2Seq

Step = Callable[..., tuple[Tensor, Tensor]]


def load_marian(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load an exported model with transformers."""
    from transformers import MarianMTModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    return MarianMTModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype)


def marian_loss(model: Any, smoothing: float) -> Callable[..., Tensor]:
    """Return the summed loss as a function of source ids and mask, target ids and labels."""

    def loss(source: Tensor, source_mask: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        # As in its data collator: no mask for the target, which is padded at the right.
        inputs = {"input_ids": source, "attention_mask": source_mask, "decoder_input_ids": target}
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
        options: dict[str, Any] = {"ignore_index": IGNORE, "label_smoothing": smoothing}
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", **options)

    return loss


class Loop(nn.Module):
    """Bahdanau's model as a Python loop over attention and GRUCell, with the weights of ``ours``.

    The projection of the keys runs before the loop, readout and generator after it.
    """

    def __init__(self, ours: Seq2Seq) -> None:
        super().__init__()
        width, annotation = ours.config.width, ours.config.annotation_width
        inputs = ours.config.embedding_width + annotation
        self.source_embedding = copy.deepcopy(ours.source_embedding)
        self.target_embedding = copy.deepcopy(ours.target_embedding)
        self.encoder, self.bridge = copy.deepcopy(ours.encoder), copy.deepcopy(ours.bridge)
        score: Any = ours.decoder.attention and ours.decoder.attention.score
        self.query, self.key = copy.deepcopy(score.query), copy.deepcopy(score.key)
        self.v = nn.Linear(width, 1, bias=False)
        self.cell = nn.GRUCell(inputs, width)
        self.readout = nn.Linear(width + inputs, width)
        self.generator = copy.deepcopy(ours.generator)
        readout: Any = ours.decoder.readout
        with torch.no_grad():
            self.v.weight.copy_(score.v[None])
            for name, parameter in self.cell.named_parameters():
                parameter.copy_(getattr(ours.decoder.rnn, f"{name}_l0"))
            self.readout.weight.copy_(torch.cat([readout.state_projection.weight, readout.word_projection.weight], 1))
            self.readout.bias.copy_(readout.word_projection.bias)

    def loss(self, batch: Seq2SeqBatch, step: Step) -> Tensor:
        """Return the loss summed over all labels; ``step`` is :meth:`step` or its compiled version."""
        annotations, hidden = self.encoder(self.source_embedding(batch.source.ids))
        first = torch.tanh(self.bridge(torch.cat([hidden[0], hidden[1]], -1)))
        readouts = self.decode(self.target_embedding(batch.target.ids), annotations, first, step)
        logits = self.generator(readouts).flatten(0, 1)
        return F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")

    def decode(self, words: Tensor, annotations: Tensor, state: Tensor, step: Step) -> Tensor:
        """Return the inputs of the generator."""
        keys, states, contexts = self.key(annotations), [], []
        for word in words.unbind(1):
            state, context = step(self, word, state, keys, annotations)
            states.append(state)
            contexts.append(context)
        blend = self.readout(torch.cat([torch.stack(states, 1), torch.stack(contexts, 1), words], -1))
        return torch.maximum(*blend.chunk(2, -1))

    def step(self, word: Tensor, state: Tensor, keys: Tensor, annotations: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.v(torch.tanh(self.query(state)[:, None] + keys)).squeeze(-1)
        context = torch.bmm(scores.softmax(-1)[:, None], annotations).squeeze(1)
        return self.cell(torch.cat([word, context], -1), state), context


def load_ctranslate2(marian: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model in CTranslate2, with ids as words.

    The converter for Marian cannot be used: as in the original Marian, it expects zeros as the first input of the
    decoder and <pad> as the last word.
    """
    import ctranslate2
    from ctranslate2.converters import transformers

    loader = transformers.BartLoader()
    marian.config.normalize_before = marian.config.normalize_embedding = False
    with torch.no_grad():
        spec = loader.get_model_spec(marian)
    for register, words in (
        (spec.register_source_vocabulary, marian.config.vocab_size),
        (spec.register_target_vocabulary, marian.config.decoder_vocab_size),
    ):
        register([str(number) for number in range(words)])
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = str(UNK), str(BOS), str(EOS)
    spec.config.decoder_start_token = str(BOS)
    spec.validate()
    spec.optimize(quantization=str(dtype).removeprefix("torch."))
    folder.mkdir()
    spec.save(str(folder))
    return ctranslate2.Translator(
        str(folder), device=device.type, compute_type=str(dtype).removeprefix("torch."), intra_threads=1
    )
