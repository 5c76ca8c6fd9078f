"""Models whose attention is known, so that the right links are known too."""

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


def pairs(count: int, seed: int = 0, longest: int = 9) -> list[TranslationExample]:
    """Sentences whose translation is the same words in capitals, in the opposite order."""
    chance = random.Random(seed)
    made = [chance.choices(WORDS, k=chance.randint(1, longest)) for _ in range(count)]
    return [
        TranslationExample(" ".join(one), " ".join(reversed(one)).upper(), f"made:{n}") for n, one in enumerate(made, 1)
    ]


def opposite(pair: TranslationExample) -> frozenset[tuple[int, int]]:
    """The right links of such a pair."""
    count = len(pair.source.split())
    return frozenset((count - 1 - target, target) for target in range(count))


class Planted(nn.Module):
    """Two layers of three heads that look anywhere, but for the head of ``view``, which knows where to look.

    The step that reads target word t, if the view is shifted, or else says it, looks at word n − 1 − t.
    """

    def __init__(self, view: AlignmentView) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.view = view
        self.batches: list[int] = []  # how many pairs came together

    def compute_attention_maps(self, batch: Seq2SeqBatch) -> list[LayerAttention]:
        rows, steps, columns = len(batch.source.lengths), batch.target.ids.shape[1], batch.source.ids.shape[1]
        self.batches.append(rows)
        found = torch.zeros(2, rows, 3, steps, columns)
        for row, (x, y) in enumerate(zip(batch.source.lengths, batch.target.lengths, strict=True)):
            chance = torch.Generator().manual_seed(int(batch.source.ids[row, :x].sum()) + x)
            found[:, row, :, :y, :x] = torch.rand(2, 3, y, x, generator=chance)
            for t in range(y - 1):
                place = (self.view.layer, row, self.view.head, t + int(self.view.shift))
                found[place] = 0.0
                found[(*place, x - 2 - t)] = 0.4  # x counts </s> too
        return [LayerAttention(f"decoder.{n}.source_attention", one) for n, one in enumerate(found)]


def planted(run: Run, view: AlignmentView) -> TranslationPredictor:
    """The translator of a run with such a model in the place of its own."""
    translator = load_predictor(run, "cpu")
    translator.model = Planted(view)
    return translator
