"""Models with known attention, so that the correct links are known."""

import random

import torch
from torch import nn

from jumok.batches.tokens import LayerAttention, Seq2SeqBatch
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.look.views.alignment_selection import AlignmentView
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate.predictor import TranslationPredictor

WORDS = [f"{a}{b}" for a in "bdfgk" for b in "aeiou"]


def make_pairs(count: int, seed: int = 0, max_words: int = 9) -> list[TranslationExample]:
    """Sentences whose translation is the same words in capitals, in reverse order."""
    rng = random.Random(seed)
    sentences = [rng.choices(WORDS, k=rng.randint(1, max_words)) for _ in range(count)]
    return [
        TranslationExample(" ".join(words), " ".join(reversed(words)).upper(), f"generated:{number}")
        for number, words in enumerate(sentences, 1)
    ]


def gold_links(pair: TranslationExample) -> frozenset[tuple[int, int]]:
    """The correct links of such a pair."""
    count = len(pair.source.split())
    return frozenset((count - 1 - target, target) for target in range(count))


class PlantedAttention(nn.Module):
    """Two layers of three heads with random weights, except for the head of ``view``, which is correct.

    The step that reads (if the view is shifted) or predicts the target word t attends to the source word n − 1 − t.
    """

    def __init__(self, view: AlignmentView) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.view = view
        self.batch_sizes: list[int] = []

    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        rows, steps, columns = len(batch.source.lengths), batch.target.ids.shape[1], batch.source.ids.shape[1]
        self.batch_sizes.append(rows)
        weights = torch.zeros(2, rows, 3, steps, columns)
        for row, (x, y) in enumerate(zip(batch.source.lengths, batch.target.lengths, strict=True)):
            generator = torch.Generator().manual_seed(int(batch.source.ids[row, :x].sum()) + x)
            weights[:, row, :, :y, :x] = torch.rand(2, 3, y, x, generator=generator)
            for t in range(y - 1):
                index = (self.view.layer, row, self.view.head, t + int(self.view.shift))
                weights[index] = 0.0
                weights[(*index, x - 2 - t)] = 0.4  # x includes EOS
        return [LayerAttention(f"decoder.{n}.source_attention", layer) for n, layer in enumerate(weights)]


def plant_attention(run: Run, view: AlignmentView) -> TranslationPredictor:
    """The predictor of a run with such a model instead of its own."""
    predictor = load_predictor(run, "cpu")
    assert isinstance(predictor, TranslationPredictor)
    predictor.model = PlantedAttention(view)
    return predictor
