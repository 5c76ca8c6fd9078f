"""A first map: learn to read dates, then look at where the model looked.

People write dates in many ways. A small encoder-decoder with attention (Bahdanau et al., 2015)
learns here, in less than half a minute on a CPU, to turn every one of these into 2021-03-23:

    the 23rd of March 2021 · Tuesday, March 23, 2021 · 23 Mar '21 · 03/23/2021 · 23.3.21

Nobody tells it which letters matter. To write the month it has to find the month, wherever that
stands, and its attention weights show that it does.

    python examples/first_map.py
"""

import random
import string
import time
from datetime import date, timedelta
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import jumok

SOURCE = "\0 ',./" + string.digits + string.ascii_letters  # what is read; \0 is padding
TARGET = string.digits + "-"  # what is written: ten of these
START = len(TARGET)  # stands for "nothing written yet"


def spellings(day: date) -> list[str]:
    """Every way in which this little world writes a date."""
    d = day.day
    nth = f"{d}th" if 11 <= d <= 13 else f"{d}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(d % 10, 'th') }"
    return [
        f"the {nth} of {day:%B %Y}",
        f"{day:%A, %B} {d}, {day:%Y}",
        f"{day:%B} {nth}, {day:%Y}",
        f"{d} {day:%b '%y}",  # two digits of a year: 50 to 99 are 19.., 00 to 49 are 20..
        f"{day:%m/%d/%Y}",  # between strokes the month comes first,
        f"{d}.{day.month}.{day:%y}",  # between points the day does
    ]


def encode(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Texts as symbol numbers (B, K), padded, and their lengths (B,)."""
    rows = [torch.tensor([SOURCE.index(letter) for letter in text]) for text in texts]
    return pad_sequence(rows, batch_first=True), torch.tensor([len(text) for text in texts])


class DateReader(nn.Module):
    """A GRU that writes a date and, before each character, looks back at what another GRU has read."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed_source = nn.Embedding(len(SOURCE), width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.begin = nn.Linear(width, width)
        self.score = jumok.scores.Additive(query_width=width, key_width=2 * width, hidden=width)
        self.embed_target = nn.Embedding(len(TARGET) + 1, width)
        self.decoder = nn.GRUCell(3 * width, width)
        self.choose = nn.Linear(3 * width, len(TARGET))

    def forward(self, text: Tensor, lengths: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, 10, symbols) and attention weights (B, 10, K) for text (B, K).

        With a target (B, 10), each step is told the true character before it (training);
        without one, it goes on from the character that the model itself wrote.
        """
        letters = pack_padded_sequence(self.embed_source(text), lengths, True, enforce_sorted=False)
        read, last = self.encoder(letters)
        memory, _ = pad_packed_sequence(read, batch_first=True)  # (B, K, 2D)
        keys = self.score.prepare(memory)  # once, for all ten steps
        mask = jumok.masks.padding(lengths)
        state = torch.tanh(self.begin(last[1]))  # (B, D)
        symbol = torch.full_like(lengths, START)  # (B,)
        logits, maps = [], []
        for step in range(10):
            weights = jumok.weights(state[:, None], keys, score=self.score, mask=mask)  # (B, 1, K)
            context = jumok.mix(weights, memory)[:, 0]  # (B, 2D)
            state = self.decoder(torch.cat([self.embed_target(symbol), context], -1), state)
            logits.append(self.choose(torch.cat([state, context], -1)))
            maps.append(weights[:, 0])
            symbol = logits[-1].argmax(-1) if target is None else target[:, step]
        return torch.stack(logits, 1), torch.stack(maps, 1)


def train(model: DateReader, days: list[date], steps: int = 200) -> None:
    """Show the model random days in random spellings."""
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(1, steps + 1):
        batch = random.choices(days, k=128)
        text, lengths = encode([random.choice(spellings(day)) for day in batch])
        target = torch.tensor([[TARGET.index(letter) for letter in day.isoformat()] for day in batch])
        logits, _ = model(text, lengths, target)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"  step {step:3d}   loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def read(model: DateReader, texts: list[str]) -> tuple[list[str], Tensor]:
    """What the model writes for each text, and its attention weights (B, 10, K)."""
    logits, maps = model(*encode(texts))
    return ["".join(TARGET[i] for i in row) for row in logits.argmax(-1).tolist()], maps


def draw(weights: Tensor, text: str, written: str, path: Path) -> None:
    """A row for each character written, a column for each character read."""
    figure = Figure(figsize=(0.36 * len(text) + 1.4, 0.36 * len(written) + 0.9), layout="constrained")
    axes = figure.subplots()
    # One hue from light to dark needs no colour vision.
    cells = axes.pcolormesh(weights, cmap="Blues", vmin=0, vmax=1, edgecolors="#dde5ee", linewidth=0.8)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.set_xticks([n + 0.5 for n in range(len(text))], list(text.replace(" ", "␣")))
    axes.set_yticks([n + 0.5 for n in range(len(written))], list(written))
    axes.tick_params(length=0, labelsize=15, labelfontfamily="monospace")
    axes.spines[:].set_visible(False)
    axes.set_title("Where the model looked to write each character of the date", size=13, pad=12)
    legend = figure.colorbar(cells, aspect=28, pad=0.02, label="attention weight (a row adds up to 1)")
    legend.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, bbox_inches="tight", pad_inches=0.2)


def main() -> None:
    """Train, test on days never seen in any spelling, and draw the map of one of them."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the steps are small: more threads would mostly wait for each other
    days = [date(1950, 1, 1) + timedelta(n) for n in range(36_525)]  # a hundred years
    random.shuffle(days)
    held_out, seen = days[:500], days[500:]

    model, begin = DateReader(), time.perf_counter()
    train(model, seen)
    print(f"trained in {time.perf_counter() - begin:.0f} s")

    texts = [text for day in held_out for text in spellings(day)]
    answers = [day.isoformat() for day in held_out for _ in spellings(day)]
    written, maps = read(model, texts)
    right = sum(a == b for a, b in zip(written, answers, strict=True))
    print(f"on days never seen in training, {right:,} of {len(texts):,} spellings are read exactly right:")
    for n in range(6):
        print(f"  {texts[n]:>28} → {written[n]}")

    path = Path("runs/first_map.png")
    draw(maps[0, :, : len(texts[0])], texts[0], written[0], path)
    print(f"the map of the first one: {path}")


if __name__ == "__main__":
    main()
