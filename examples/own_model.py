"""A translation model of one's own, trained, searched with and seen: python examples/own_model.py my.tsv."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import jumok
from jumok.batches.tokens import EOS, IGNORE, Loss, Seq2SeqBatch, Tokens
from jumok.data.batching.length_batching import TranslationBatcher
from jumok.data.caches.token_store import prepare_token_store
from jumok.data.tokenizers.tokenizer import TokenizerConfig, TokenizerPair
from jumok.decoding import beam
from jumok.tasks.translate.data import TranslationData, TranslationDataConfig
from jumok.training import TrainConfig, ValidationReport, train


@dataclass(frozen=True)
class State:
    """What is remembered between two words: the source as it was read, and how far the decoder is."""

    memory: Tensor  # (N, K, D)
    lengths: Tensor  # (N,)
    hidden: Tensor  # (1, N, D)

    def reorder(self, index: Tensor, sources: list[int] | None = None) -> "State":
        return State(self.memory[index], self.lengths[index], self.hidden[:, index])


class Mine(nn.Module):
    """A GRU reads, another writes, and between them is attention with four heads."""

    def __init__(self, source: int, target: int, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source, width), nn.Embedding(target, width)
        self.reader = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.attention = jumok.MultiHead(width, num_heads=4, key_width=width)
        self.words = nn.Linear(2 * width, target)

    def start(self, source: Tokens) -> State:
        """Read the source (B, K)."""
        packed = pack_padded_sequence(self.source(source.ids), source.lengths, True, enforce_sorted=False)
        read, last = self.reader(packed)
        memory, _ = pad_packed_sequence(read, batch_first=True, total_length=source.ids.shape[1])
        return State(memory, source.lengths_tensor, torch.cat([*last], -1)[None])

    def write(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """Logits (N, T, V) of the words behind ``ids`` (N, T)."""
        said, hidden = self.writer(self.target(ids), state.hidden)  # (N, T, D)
        context = self.attention(said, state.memory, mask=jumok.masks.padding(state.lengths))
        return self.words(torch.cat([said, context], -1)), replace(state, hidden=hidden)

    def step(self, state: State, ids: Tensor) -> tuple[Tensor, State]:
        """The same for one word each, (N,)."""
        logits, state = self.write(state, ids[:, None])
        return logits[:, 0], state

    def loss(self, batch: Seq2SeqBatch) -> Loss:
        """Summed over all labels; the loop divides by their number."""
        logits, _ = self.write(self.start(batch.source), batch.target.ids)
        nll = nn.CrossEntropyLoss(ignore_index=IGNORE, reduction="sum")(logits.transpose(1, 2), batch.labels)
        return Loss(nll, batch.count)


def main(
    data: TranslationDataConfig, folder: Path = Path("runs/own-model"), steps: int = 600
) -> list[tuple[str, str]]:
    """Train, see where the model looks, and translate sentences that it never saw."""
    texts = TranslationData(data, folder)  # finds the columns, holds pairs out for validation and test
    words = TokenizerPair.train(corpus := texts.train_corpus(), TokenizerConfig(vocab_size=4000))
    store = prepare_token_store(folder / "data" / "train", corpus, words)  # tokenised, on disk, however large
    some = texts.valid_split().examples[:200]
    encode = words.source.encode  # one vocabulary for both languages
    judged = Seq2SeqBatch.from_sequences(
        encode([pair.source for pair in some]), encode([pair.target for pair in some])
    )

    def validate(model: nn.Module) -> ValidationReport:
        nll = model.loss(judged.to(next(model.parameters()).device)).total.item() / judged.count
        return ValidationReport({"nll": nll}, select_by="nll", higher_is_better=False)

    model = Mine(words.source.vocab_size, words.target.vocab_size)
    settings = TrainConfig(
        max_steps=steps, learning_rate=3e-3, schedule="cosine", warmup_steps=2, validate_every=200
    )
    train(
        model,
        TranslationBatcher(store, max_tokens=1024, seed=1),
        settings,
        folder,
        validate=validate,
        console=Console(),
    )
    with jumok.watch(model.cpu().eval()) as seen, torch.no_grad():
        model.loss(judged)
    print(seen, seen[0].weights(batch=0, head=2).shape)  # where head 2 looked, in the first sentence
    unseen = [pair.source for pair in texts.test_split().examples[:3]]
    source = Tokens.pad([[*ids, EOS] for ids in encode(unseen)])
    found = [words.target.decode(best.ids) for [best] in beam(model, source, beam_size=4)]
    return list(zip(unseen, found, strict=True))


if __name__ == "__main__":
    for pair in main(
        TranslationDataConfig(train=sys.argv[1])
        if sys.argv[1:]
        else TranslationDataConfig(builtin_size=20_000)
    ):
        print(*pair, sep=" → ")
