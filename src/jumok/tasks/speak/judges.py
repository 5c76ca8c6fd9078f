"""Judges of a voice: small classifiers that are trained on recordings only, and classify synthesized speech.

If recordings have labels (one of a few texts, the speaker, the emotion), judges learn to predict them from the *real*
training recordings. Then the voice speaks each text in the style of a recording of **another text** by the same
speaker with the same emotion, and the judges predict the text and the style. Their accuracy on the real recordings of
the split is reported next to it.

A judge gets mel spectrograms of the waveform, as a listener hears it, not those that the model predicts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from jumok.data.readers.speech import SpeechExample
from jumok.inference.line_io import iterate_chunks

if TYPE_CHECKING:
    from jumok.tasks.speak.predictor import SpeechPredictor

LABEL_FIELDS = ("text", "speaker", "emotion")
MAX_CLASSES, MIN_CLASS_EXAMPLES = 24, 5  # limits of what can be learned: classes, and recordings of each
CHANNELS = (16, 32, 64, 64)
BATCH_SIZE = 64  # recordings in a batch
NUM_STEPS, LEARNING_RATE = 500, 3e-3
Mels = Sequence[NDArray[np.float32]]  # (T, M) each


class SpeechJudge(nn.Module):
    """Convolutions over mel spectrograms, mean and maximum over time, and a linear classifier.

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
        self.dropout = nn.Dropout(0.4)
        self.output = nn.Linear(2 * bands * CHANNELS[-1], num_classes)

    def forward(self, mels: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of mels ``(B, T, M)`` with these lengths, padded with zeros."""
        x = self.layers(4 * mels[:, None] - 2).transpose(1, 2).flatten(2)  # (B, T', …)
        pooled_lengths = (lengths + 2 ** len(CHANNELS) - 1) // 2 ** len(CHANNELS)
        is_valid = (torch.arange(x.shape[1], device=x.device) < pooled_lengths[:, None])[..., None]
        mean = x.where(is_valid, 0.0).sum(1) / pooled_lengths[:, None]
        maximum = x.masked_fill(~is_valid, -1e4).amax(1)
        logits: Tensor = self.output(self.dropout(torch.cat([mean, maximum], 1)))
        return logits


def train_judge(mels: Mels, labels: Sequence[int], *, seed: int, device: torch.device, num_steps: int) -> SpeechJudge:
    """Train a judge on recordings and augmented copies of them."""
    rng = np.random.default_rng(seed)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch.inference_mode(False):
        torch.manual_seed(seed)
        model = SpeechJudge(mels[0].shape[1], max(labels) + 1).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(8 * (n + 1) / num_steps, 0.5 + 0.5 * math.cos(math.pi * n / num_steps))
        )
        for indices in _sample_batches(len(mels), num_steps, rng):
            batch, lengths = _collate_mels([_augment_mel(mels[index], rng) for index in indices], device)
            targets = torch.tensor([labels[index] for index in indices], device=device)
            optimizer.zero_grad()
            F.cross_entropy(model(batch, lengths), targets, label_smoothing=0.05).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.inference_mode()
def predict_probabilities(model: SpeechJudge, mels: Mels) -> NDArray[np.float64]:
    """The probabilities of the classes: ``(N, num_classes)``."""
    device = model.output.weight.device
    probabilities = []
    for chunk in iterate_chunks(mels, BATCH_SIZE):
        logits = model(*_collate_mels(chunk, device))
        probabilities.append(logits.double().softmax(1).cpu().numpy())
    return np.concatenate(probabilities)


def _sample_batches(num_examples: int, num_steps: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Indices of recordings; each epoch has all of them once."""
    epochs = itertools.chain.from_iterable(rng.permutation(num_examples).tolist() for _ in itertools.count())
    yield from itertools.islice(iterate_chunks(epochs, BATCH_SIZE), num_steps)


def _augment_mel(mel: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Change speed and loudness, add silence, noise and gaps, and blur, as a model's speech is blurred."""
    num_frames = max(4, round(len(mel) * rng.uniform(0.85, 1.15)))
    positions = np.linspace(0, len(mel) - 1, num_frames)
    low = np.floor(positions).astype(int)
    high, fraction = np.minimum(low + 1, len(mel) - 1), (positions - low)[:, None].astype(np.float32)
    x = mel[low] * (1 - fraction) + mel[high] * fraction
    if rng.random() < 0.4:  # blur in time and frequency
        padded = np.pad(x, ((1, 1), (1, 1)), mode="edge")
        x = (x + (padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]) / 4) / 2
    x = x + np.float32(rng.normal(0, 0.03)) * (x > 0)
    x = x + rng.normal(0, 0.02, x.shape).astype(np.float32)
    for view in (x.T, x):  # a gap in frequency, and one in time
        if rng.random() < 0.5:
            width = int(rng.integers(1, max(2, len(view) // 10)))
            start = int(rng.integers(0, len(view) - width))
            view[start : start + width] = x.mean()
    silence = rng.integers(0, 6, 2)
    return np.pad(np.clip(x, 0, 1.2), (tuple(silence), (0, 0))).astype(np.float32)


def _collate_mels(mels: Mels, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = pad_sequence([torch.from_numpy(np.asarray(mel, np.float32)) for mel in mels], batch_first=True)
    return batch.to(device), torch.tensor([len(mel) for mel in mels], device=device)


# ------------------------------------------------------------------------------------------------- evaluation


def evaluate_with_judges(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], mels: Mels, style_weights: Tensor | None
) -> dict[str, Any]:
    """The accuracies of judges, by label: a table, and each metric by its name.

    Speakers that the training data does not have are reported separately from those that it has. If the split has
    only new speakers, the others are taken from the validation data.
    """
    train = predictor.task.train_split().examples
    labels = [name for name in LABEL_FIELDS if _is_learnable([getattr(x, name) for x in train])]
    if not labels:
        return {}
    known_speakers = {example.speaker for example in train}
    groups = {"": list(range(len(examples)))}
    if any(example.speaker not in known_speakers for example in examples):
        groups = {
            "known": [n for n, example in enumerate(examples) if example.speaker in known_speakers],
            "new": [n for n, example in enumerate(examples) if example.speaker not in known_speakers],
        }
        if not groups["known"]:
            first = len(examples)
            more = predictor.load_split("valid").examples
            more_mels = predictor.load_mels(more)
            examples, mels = [*examples, *more], [*mels, *more_mels]
            if style_weights is not None:
                style_weights = torch.cat([style_weights, predictor.extract_style_weights(*more_mels)])
            groups["known"] = list(range(first, len(examples)))
    synthesized = _synthesize_mels(predictor, examples, style_weights)
    train_mels = predictor.load_mels(train)
    metrics: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for label in labels:
        accuracies = _compute_accuracies(predictor, label, train, train_mels, examples, mels, synthesized, groups)
        for group, (real, speech, num_classes, count) in accuracies.items():
            row = {"label": label, "speakers": group or "all", "real": real, "synthesized": speech}
            rows.append({**row, "chance": 1 / num_classes, "count": count})
            name = f"judges/{label}{f'_{group}' if group else ''}"
            metrics |= {name: speech, f"{name}_real": real}
    return metrics | {"judges": rows}


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
    """By group: mean accuracy on real and on synthesized speech, number of classes, number of examples."""
    names = sorted({getattr(example, label) for example in train})
    class_ids = {name: index for index, name in enumerate(names)}
    targets = np.array([class_ids.get(getattr(example, label), -1) for example in examples])
    train_targets = [class_ids[getattr(example, label)] for example in train]
    is_correct = []
    for seed in range(1, predictor.task.recipe.evaluation.num_judges + 1):
        judge = train_judge(train_mels, train_targets, seed=seed, device=predictor.device, num_steps=NUM_STEPS)
        is_correct.append([predict_probabilities(judge, x).argmax(1) == targets for x in (mels, synthesized_mels)])
    real, speech = np.mean(is_correct, 0)  # (N,) each
    accuracies = {}
    for group, members in groups.items():
        indices = [index for index in members if targets[index] >= 0]
        if indices:
            means = float(real[indices].mean()), float(speech[indices].mean())
            accuracies[group] = (*means, len(names), len(indices))
    return accuracies


def _synthesize_mels(
    predictor: SpeechPredictor, examples: Sequence[SpeechExample], style_weights: Tensor | None
) -> list[NDArray[np.float32]]:
    """Each text in the style of a recording of another text, as mel spectrograms of its waveform."""
    if style_weights is not None:
        style_weights = style_weights[choose_style_references(examples)]
    audio, sample_rate = predictor.audio, predictor.audio.config.sample_rate
    mels = []
    for segment in predictor.synthesize_segments([example.text for example in examples], style_weights):
        waveform = audio.preprocess(segment.waveform, sample_rate)
        if not len(waveform):
            waveform = np.zeros(sample_rate // 10, np.float32)
        mels.append(audio.mel_spectrogram(waveform))
    return mels


def choose_style_references(examples: Sequence[SpeechExample]) -> list[int]:
    """For each recording the index of the next one with the same speaker and emotion, but another text.

    If there is none, its own index.
    """
    references = []
    for index, example in enumerate(examples):
        order = (*range(index + 1, len(examples)), *range(index))
        matches = (
            n
            for n in order
            if (examples[n].speaker, examples[n].emotion) == (example.speaker, example.emotion)
            and examples[n].text != example.text
        )
        references.append(next(matches, index))
    return references


def _is_learnable(labels: Sequence[str]) -> bool:
    counts = Counter(labels)
    return "" not in counts and 2 <= len(counts) <= MAX_CLASSES and min(counts.values()) >= MIN_CLASS_EXAMPLES
