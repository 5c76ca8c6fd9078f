"""Judges of a voice: small classifiers that learned from recordings alone, and listen to what was said.

Where recordings have labels (which of a few texts, who speaks, with which emotion), judges learn to tell them
from the *real* training recordings. Then the voice says each text in the style of a recording of **another
text** by the same speaker, with the same emotion, and the judges are asked: which text was that? Whose style?
How good they are is told beside it: on the real recordings of the split.

A judge hears the waveform, as a listener would: made of what the model says, and turned into mels again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.data.readers.speech import SpeechExample

if TYPE_CHECKING:
    from jumok.tasks.speak.predictor import SpeechPredictor

__all__ = [
    "SpeechJudge",
    "choose_style_references",
    "evaluate_with_judges",
    "predict_probabilities",
    "train_judge",
]

LABEL_FIELDS = ("text", "speaker", "emotion")
MAX_CLASSES, MIN_CLASS_EXAMPLES = (
    24,
    5,
)  # kinds of a label, and recordings of each in the training data, that can be learned
CHANNELS = (16, 32, 64, 64)
BATCH_SIZE = 64  # recordings in a batch
NUM_STEPS, LEARNING_RATE = 500, 3e-3
Mels = Sequence[NDArray[np.float32]]  # (T, M) each


class SpeechJudge(nn.Module):
    """Convolutions over mels, the mean and the most over time, and a class.

    >>> SpeechJudge(num_mels=40, num_classes=10)(torch.zeros(2, 33, 40), torch.tensor([33, 20])).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_mels: int, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip((1, *CHANNELS[:-1]), CHANNELS, strict=True):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
        self.layers = nn.Sequential(*layers)
        bands = -(-num_mels // 2 ** len(CHANNELS))
        self.drop = nn.Dropout(0.4)
        self.output = nn.Linear(2 * bands * CHANNELS[-1], num_classes)

    def forward(self, mels: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of mels ``(B, T, M)`` with so many real frames, zero behind them."""
        x = self.layers(4 * mels[:, None] - 2).transpose(1, 2).flatten(2)  # (B, T', …)
        left = (lengths + 2 ** len(CHANNELS) - 1) // 2 ** len(CHANNELS)
        real = (torch.arange(x.shape[1], device=x.device) < left[:, None])[..., None]
        mean = x.where(real, 0.0).sum(1) / left[:, None]
        most = x.masked_fill(~real, -1e4).amax(1)
        logits: Tensor = self.output(self.drop(torch.cat([mean, most], 1)))
        return logits


def train_judge(
    mels: Mels, labels: Sequence[int], *, seed: int, device: torch.device, num_steps: int
) -> SpeechJudge:
    """A judge that has learned to tell these recordings apart, as they are and a little changed."""
    chance = np.random.default_rng(seed)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.inference_mode(False):
        torch.manual_seed(seed)
        model = SpeechJudge(mels[0].shape[1], max(labels) + 1).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(8 * (n + 1) / num_steps, 0.5 + 0.5 * math.cos(math.pi * n / num_steps))
        )
        for index in _sample_batches(len(mels), num_steps, chance):
            batch, frames = _collate_mels([_augment_mel(mels[number], chance) for number in index], device)
            wanted = torch.tensor([labels[number] for number in index], device=device)
            optimizer.zero_grad()
            F.cross_entropy(model(batch, frames), wanted, label_smoothing=0.05).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.inference_mode()
def predict_probabilities(model: SpeechJudge, mels: Mels) -> NDArray[np.float64]:
    """How likely each class is for each sound: ``(sounds, num_classes)``."""
    device = model.output.weight.device
    found = []
    for begin in range(0, len(mels), BATCH_SIZE):
        batch, frames = _collate_mels(mels[begin : begin + BATCH_SIZE], device)
        found.append(model(batch, frames).double().softmax(1).cpu().numpy())
    return np.concatenate(found)


def _sample_batches(num_examples: int, num_steps: int, rng: np.random.Generator) -> Any:
    """Numbers of recordings, all of them before one comes again."""
    left: list[int] = []
    for _ in range(num_steps):
        while len(left) < BATCH_SIZE:
            left += rng.permutation(num_examples).tolist()
        index, left = left[:BATCH_SIZE], left[BATCH_SIZE:]
        yield index


def _augment_mel(mel: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Faster or slower, louder or softer, with silence around it, noise, gaps, or blurred, as speech is that
    a model makes.
    """
    frames = max(4, round(len(mel) * rng.uniform(0.85, 1.15)))
    at = np.linspace(0, len(mel) - 1, frames)
    low = np.floor(at).astype(int)
    high, share = np.minimum(low + 1, len(mel) - 1), (at - low)[:, None].astype(np.float32)
    x = mel[low] * (1 - share) + mel[high] * share
    if rng.random() < 0.4:  # blurred in time and pitch
        padded = np.pad(x, ((1, 1), (1, 1)), mode="edge")
        x = (x + (padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]) / 4) / 2
    x = x + np.float32(rng.normal(0, 0.03)) * (x > 0)
    x = x + rng.normal(0, 0.02, x.shape).astype(np.float32)
    if rng.random() < 0.5:
        width = int(rng.integers(1, max(2, x.shape[1] // 10)))
        begin = int(rng.integers(0, x.shape[1] - width))
        x[:, begin : begin + width] = x.mean()
    if rng.random() < 0.5:
        width = int(rng.integers(1, max(2, len(x) // 10)))
        begin = int(rng.integers(0, len(x) - width))
        x[begin : begin + width] = x.mean()
    around = rng.integers(0, 6, 2)
    return np.pad(np.clip(x, 0, 1.2), (tuple(around), (0, 0))).astype(np.float32)


def _collate_mels(mels: Mels, device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = [len(one) for one in mels]
    batch = torch.zeros(len(mels), max(sizes), mels[0].shape[1])
    for row, one in zip(batch, mels, strict=True):
        row[: len(one)] = torch.from_numpy(np.asarray(one, np.float32))
    return batch.to(device), torch.tensor(sizes, device=device)


# ------------------------------------------------------------------------------------------------- a voice


def evaluate_with_judges(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], mels: Mels, style_weights: Tensor | None
) -> dict[str, Any]:
    """What judges say of a voice, by label: a table, and each figure by its name.

    Speakers that the voice never heard are told apart from those it learned from: these are then taken from
    the validation data, unless the split has them.
    """
    train = predictor.task.train_split().examples
    learnable = [name for name in LABEL_FIELDS if _is_learnable([getattr(one, name) for one in train])]
    if not learnable:
        return {}
    known = {one.speaker for one in train}
    groups = {"": list(range(len(examples)))}
    if any(one.speaker not in known for one in examples):
        groups = {
            "known": [n for n, one in enumerate(examples) if one.speaker in known],
            "new": [n for n, one in enumerate(examples) if one.speaker not in known],
        }
        if not groups["known"]:
            first = len(examples)
            more = predictor.load_split("valid").examples
            own = predictor.load_mels(more)
            examples, mels = [*examples, *more], [*mels, *own]
            if style_weights is not None:
                style_weights = torch.cat([style_weights, predictor.extract_style_weights(*own)])
            groups["known"] = list(range(first, len(examples)))
    heard = _synthesize_mels(predictor, examples, style_weights)
    real = predictor.load_mels(train)
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for label in learnable:
        each = _compute_accuracies(predictor, label, train, real, examples, mels, heard, groups)
        for group, (of_real, of_said, classes, count) in each.items():
            row = {"judges tell": label, "speakers": group or "all", "real": of_real, "said": of_said}
            rows.append({**row, "chance": 1 / classes, "sounds": count})
            name = f"judges/{label}{f'_{group}' if group else ''}"
            found |= {name: of_said, f"{name}_real": of_real}
    return found | {"judges": rows}


def _compute_accuracies(
    predictor: SpeechPredictor,
    label: str,
    train: Sequence[SpeechExample],
    train_mels: Mels,
    examples: Sequence[SpeechExample],
    mels: Mels,
    synthesized_mels: Mels,
    groups: dict[str, list[int]],
) -> dict[str, tuple[float, float, int, int]]:
    """By group: how often judges are right of real recordings and of what was said, the mean of them all."""
    names = sorted({getattr(one, label) for one in train})
    number = {name: at for at, name in enumerate(names)}
    wanted = np.array([number.get(getattr(one, label), -1) for one in examples])
    right = []
    for seed in range(1, predictor.run.recipe.evaluation.num_judges + 1):
        labels = [number[getattr(one, label)] for one in train]
        model = train_judge(train_mels, labels, seed=seed, device=predictor.device, num_steps=NUM_STEPS)
        right.append(
            [predict_probabilities(model, sounds).argmax(1) == wanted for sounds in (mels, synthesized_mels)]
        )
    shares = np.mean(right, 0)  # (real and said, sounds)
    found = {}
    for group, members in groups.items():
        those = [at for at in members if wanted[at] >= 0]
        if those:
            found[group] = (*(float(one[those].mean()) for one in shares), len(names), len(those))
    return found  # type: ignore[return-value]


def _synthesize_mels(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], style_weights: Tensor | None
) -> list[NDArray[np.float32]]:
    """Each text in the style of a recording of another one, as mels of its waveform."""
    given = style_weights if style_weights is None else style_weights[choose_style_references(examples)]
    rate = predictor.audio.config.sample_rate
    found = []
    for piece in predictor.synthesize_segments([one.text for one in examples], given):
        wave = predictor.audio.preprocess(piece.waveform, rate)
        found.append(predictor.audio.mel_spectrogram(wave if len(wave) else np.zeros(rate // 10, np.float32)))
    return found


def choose_style_references(examples: Sequence[SpeechExample]) -> list[int]:
    """For each recording the number of the next one of another text, but alike in speaker and emotion.

    Where there is none, its own.
    """
    found = []
    for at, one in enumerate(examples):
        order = (*range(at + 1, len(examples)), *range(at))
        alike = (
            n
            for n in order
            if (examples[n].speaker, examples[n].emotion) == (one.speaker, one.emotion)
            and examples[n].text != one.text
        )
        found.append(next(alike, at))
    return found


def _is_learnable(labels: Sequence[str]) -> bool:
    counts = Counter(labels)
    return "" not in counts and 2 <= len(counts) <= MAX_CLASSES and min(counts.values()) >= MIN_CLASS_EXAMPLES
