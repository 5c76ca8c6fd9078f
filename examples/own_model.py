"""Train your own translation model and capture its attention: python examples/own_model.py my.tsv."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jumok
from jumok.batches.tokens import EOS, IGNORE, Loss, Seq2SeqBatch, Tokens
from jumok.data.batching.translation import TranslationBatcher
from jumok.data.caches.token_store import prepare_token_store
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.data.tokenizers.vocabulary import TokenizerConfig
from jumok.decoding import beam_search
from jumok.tasks.translate.config import TranslationDataConfig
from jumok.tasks.translate.data import TranslationData
from jumok.training import TrainConfig, ValidationReport, train


@dataclass(frozen=True)
class OwnState:
    """Decoder state: the encoded source and the hidden state of the decoder."""

    memory: Tensor  # (N, K, D)
    lengths: Tensor  # (N,)
    hidden: Tensor  # (1, N, D)

    def reorder(self, index: Tensor, sources: list[int] | None = None) -> "OwnState":
        return OwnState(self.memory[index], self.lengths[index], self.hidden[:, index])


class OwnModel(nn.Module):
    """A GRU encoder and a GRU decoder with multi-head attention."""

    def __init__(self, source_size: int, target_size: int, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source_size, width), nn.Embedding(target_size, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.attention = jumok.MultiHead(width, num_heads=4, key_width=width)
        self.output = nn.Linear(2 * width, target_size)

    def start(self, source: Tokens) -> OwnState:
        """Encode the source (B, K)."""
        packed = pack_padded_sequence(self.source(source.ids), source.lengths, True, enforce_sorted=False)
        outputs, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(outputs, batch_first=True, total_length=source.ids.shape[1])
        return OwnState(memory, source.lengths_tensor, torch.cat([*last], -1)[None])

    def decode(self, state: OwnState, ids: Tensor) -> tuple[Tensor, OwnState]:
        """Logits (N, T, V) of the tokens that follow ``ids`` (N, T)."""
        outputs, hidden = self.decoder(self.target(ids), state.hidden)  # (N, T, D)
        context = self.attention(outputs, state.memory, mask=jumok.masks.padding(state.lengths))
        return self.output(torch.cat([outputs, context], -1)), replace(state, hidden=hidden)

    def step(self, state: OwnState, ids: Tensor) -> tuple[Tensor, OwnState]:
        """The same for one token per row, (N,)."""
        logits, state = self.decode(state, ids[:, None])
        return logits[:, 0], state

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Sum over all labels. The training loop divides by their number."""
        logits, _ = self.decode(self.start(batch.source), batch.target.ids)
        nll = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")(logits.transpose(1, 2), batch.labels)
        return Loss(nll, batch.count)


def main(config: TranslationDataConfig, folder: Path = Path("runs/own-model"), steps: int = 600) -> list[str]:
    """Train the model, capture its attention, and translate three test sentences."""
    data = TranslationData(config, folder)  # finds the columns, holds out pairs for validation and test
    tokenizers = TokenizerPair.train(corpus := data.train_corpus(), TokenizerConfig(vocab_size=4000))
    store = prepare_token_store(folder / "data" / "train", corpus, tokenizers)  # token ids, on disk
    encode = tokenizers.source.encode  # one vocabulary for both languages
    pairs = data.valid_split().examples[:200]
    valid = Seq2SeqBatch.from_sequences(encode([p.source for p in pairs]), encode([p.target for p in pairs]))

    def validate(model: nn.Module) -> ValidationReport:
        nll = model.loss(valid.to(next(model.parameters()).device)).total.item() / valid.count
        return ValidationReport({"nll": nll}, select_by="nll", higher_is_better=False)

    model = OwnModel(tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    settings = TrainConfig(max_steps=steps, validate_every=200, learning_rate=3e-3, schedule="cosine", warmup_steps=2)
    batcher = TranslationBatcher(store, max_tokens=1024, seed=1)
    train(model, batcher, settings, folder, validate=validate, console=Console())
    with jumok.watch(model.cpu().eval()) as captures, torch.no_grad():
        model.loss(valid)
    print(captures, captures[0].weights(batch=0, head=2).shape)  # the weights of head 2 in the first sentence
    test = [pair.source for pair in data.test_split().examples[:3]]
    results = beam_search(model, Tokens.pad([[*ids, EOS] for ids in encode(test)]), beam_size=4)
    decoded = [tokenizers.target.decode(best.ids) for [best] in results]
    return [f"{source} → {target}" for source, target in zip(test, decoded, strict=True)]


if __name__ == "__main__":
    named = {"train": sys.argv[1]} if sys.argv[1:] else {"builtin_size": 20_000}
    print(*main(TranslationDataConfig(**named)), sep="\n")
