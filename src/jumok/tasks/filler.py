"""A pretrained BERT at work: it says hidden words, and whether one text follows another.

::

    the capital of France is [MASK] .          →   paris 0.41, lyon 0.08, …
    he opened the door ||| she went in         →   next 0.93
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jumok.annotated import Masked
from jumok.data.wordpiece import WordPieces
from jumok.errors import InputError
from jumok.models.bert import Bert, Pretraining
from jumok.run import Run
from jumok.tasks.common import Asked

if TYPE_CHECKING:
    from jumok.look.scene import Scene
    from jumok.look.without import Out

__all__ = ["Filled", "Filler", "Search", "attention_maps"]

AT_ONCE = 1024  # lines that are read before any is answered, so that those of like length go together
TOKENS = 8192  # in a batch
USUAL = 5  # words that are told of each mask, unless more are asked for
# What may stand between the first text and the second: ||| with white space around it, or white space that
# has a tab in it. All white space is consumed, so that a long run of it takes linear time.
GAP = re.compile(r"\s*+\|\|\|\s*+|\s++")


@dataclass(frozen=True)
class Search(Asked):
    """What one asks of a prediction: how many words for each mask. The rest is for translation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam is not None or self.sample:
            raise InputError(
                "--beam and --sample are for translation; of each [MASK] --n-best words are told"
            )


@dataclass(frozen=True, eq=False)
class Filled:
    """One line, and what the model says of it."""

    number: int  # of the line, from 0
    text: str
    words: list[list[tuple[str, float]]]  # the likeliest for each mask, with their probabilities
    filled: str  # the text with the likeliest words
    next: float | None = None  # the probability that the second text follows the first, if there are two
    finished: bool = True

    @property
    def has_words(self) -> bool:
        """Whether there is something to draw a map of."""
        return bool(self.text.strip())

    def lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it: fields with tabs between them, or JSON."""
        if alignments:
            raise InputError("--alignments: a model of one text makes no links between two")
        if as_json:
            words = [[{"word": word, "probability": p} for word, p in some] for some in self.words]
            known = {"line": self.number, "text": self.text, "filled": self.filled, "masks": words}
            yield json.dumps({**known, "next": self.next}, ensure_ascii=False)
            return
        fields = [", ".join(f"{word} {p:.3f}" for word, p in some) for some in self.words]
        if self.next is not None:
            fields.insert(0, f"next {self.next:.3f}" if self.next >= 0.5 else f"not next {1 - self.next:.3f}")
        yield "\t".join(fields)


class Filler:
    """A pretrained model with its tokenizer.

    >>> bert = jumok.load("runs/bert-wiki")  # doctest: +SKIP
    >>> bert.fill("the capital of france is [MASK] .").words[0][0]  # doctest: +SKIP
    ('paris', 0.41)
    """

    def __init__(self, run: Run, model: Pretraining, tokenizer: WordPieces) -> None:
        self.run, self.model, self.tokenizer = run, model, tokenizer

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def fill(self, text: str, n_best: int = USUAL) -> Filled:
        """One text; many of them by :meth:`predict`."""
        return next(self.predict([text], Search(n_best=n_best)))

    def predict(
        self, lines: Iterable[str], search: Search, *, align: bool = False, first: int = 0
    ) -> Iterator[Filled]:
        """What is hidden in every line, in their order; ``first`` is the number of the first line."""
        many = search.n_best if search.n_best > 1 else USUAL
        numbered = enumerate(lines, first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            rows = [self._row(number, line) for number, line in window]
            found: dict[int, Filled] = {}
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
            while order:
                some = order[: max(1, TOKENS // len(rows[order[0]][0]))]
                order = order[len(some) :]
                said = self._said([rows[i] for i in some], many)
                for i, (words, follows) in zip(some, said, strict=True):
                    found[i] = self._filled(*window[i], rows[i], words, follows)
            yield from (found[i] for i in range(len(window)))

    def length(self, line: str) -> int:
        """How many tokens the model reads of a line; one that it cannot answer is an error."""
        return len(self._row(0, line)[0])

    def _row(self, number: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of a line, which must have something to be said of it."""
        mask = self.tokenizer.names["mask"]
        if mask not in line and len(_texts(line)) == 1:
            raise InputError(
                f"line {number + 1} hides no word: write {mask} for one, or two texts with ||| between them, "
                "to be told whether the second follows the first"
            )
        return self._read(number, line)

    def _read(self, number: int, line: str) -> tuple[list[int], list[int]]:
        """The ids and segments of a text, or of two with ||| or a tab between them."""
        texts = _texts(line)
        if len(texts) > 2:
            raise InputError(
                f"line {number + 1} has {len(texts)} texts with ||| or tabs between; one or two can be"
            )
        row = self.tokenizer.joined(*self.tokenizer.encode(texts, special=True))
        most = self.model.bert.config.positions
        if len(row[0]) > most:
            raise InputError(
                f"line {number + 1} has {len(row[0])} tokens, and this model takes {most} at most; divide it"
            )
        return row

    def _batch(self, rows: Sequence[tuple[list[int], list[int]]]) -> Masked:
        width = max(len(ids) for ids, _ in rows)
        places = [
            n * width + at
            for n, (ids, _) in enumerate(rows)
            for at, i in enumerate(ids)
            if i == self.tokenizer.mask
        ]
        batch = Masked.of(
            [ids for ids, _ in rows],
            [segments for _, segments in rows],
            places=torch.tensor(places, dtype=torch.long),
            labels=torch.zeros(len(places), dtype=torch.long),
            next=torch.zeros(len(rows), dtype=torch.long),
            count=len(places),
        )
        return batch.to(self.device)

    @torch.inference_mode()
    def _said(
        self, rows: Sequence[tuple[list[int], list[int]]], many: int
    ) -> Iterator[tuple[list[list[tuple[int, float]]], float]]:
        """For each row the likeliest words of its masks, and the probability that its second text is next."""
        words, follows = self.model.logits(self._batch(rows))
        assert words is not None
        words = words[:, : self.tokenizer.size].float()  # an embedding may have more rows than that
        words[:, self.tokenizer.special] = -torch.inf  # none of them is a word
        best = words.softmax(-1).topk(min(many, words.shape[1]), dim=-1)
        told = map(zip, best.indices.tolist(), best.values.tolist())
        shares = [1.0] * len(rows) if follows is None else follows.float().softmax(-1)[:, 0].tolist()
        for (ids, _), share in zip(rows, shares, strict=True):
            yield [list(some) for some in itertools.islice(told, ids.count(self.tokenizer.mask))], share

    def _filled(
        self,
        number: int,
        line: str,
        row: tuple[list[int], list[int]],
        words: list[list[tuple[int, float]]],
        follows: float,
    ) -> Filled:
        ids, segments = row
        best = iter(words)
        said = [next(best)[0][0] if i == self.tokenizer.mask else i for i in ids]
        is_pair = any(segments)
        middle = segments.index(1) if is_pair else len(ids)
        parts = [self.tokenizer.decode(part) for part in (said[:middle], said[middle:]) if part]
        told = [[(self.tokenizer.tokens([i])[0], share) for i, share in some] for some in words]
        return Filled(number, line, told, " ||| ".join(parts), follows if is_pair else None)

    # ------------------------------------------------------------------------------------------- looking

    def check_maps(self) -> None:
        """There always are some."""

    def draw(self, filled: Filled, path: Path, title: str = "") -> Path:
        """The attention of the last layer, its heads averaged, as a picture."""
        from jumok.look.figures import heat_map

        row = self._row(filled.number, filled.text)
        batch = self._batch([row])
        with torch.inference_mode():
            weights = attention_maps(self.model.bert, batch)[-1][0].float().mean(0)
        names = self.tokenizer.tokens(row[0])
        return heat_map(weights.cpu(), names, names, path, title=title)

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """All attention of the model while it reads one text, or two; and again ``without`` some of it."""
        from jumok.look.scene import Scene
        from jumok.look.watch import watch
        from jumok.look.without import before_and_after

        line = text if target is None else f"{text} ||| {target}"
        batch = self._batch([self._read(0, line)])

        def look() -> Scene:
            with torch.inference_mode(), watch(self.model, self.tokenizer) as seen:
                self.model.bert.encode(batch.tokens, batch.segments)
            return Scene.of(seen, title=line)

        return before_and_after(self.model, without, look)

    def export(self, to: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a folder with BERT's architecture."""
        if to != "hf":
            raise InputError(f"--to {to}: hf is what a pretraining run can be exported to")
        from jumok.exchange.bert import export_bert

        export_bert(self.model, self.tokenizer, folder)


def _texts(line: str) -> list[str]:
    """The texts of a line, with ||| or a tab between them.

    >>> _texts(" he opened the door ||| she left ")
    ['he opened the door', 'she left']
    """
    line = line.strip()
    texts, begin = [], 0
    for gap in GAP.finditer(line):
        if "|" in gap[0] or "\t" in gap[0]:
            texts.append(line[begin : gap.start()])
            begin = gap.end()
    return [*texts, line[begin:]]


def attention_maps(bert: Bert, batch: Any) -> list[Tensor]:
    """Where the heads of each layer look, ``(B, H, L, L)`` each; the batch is padded."""
    seen: list[Tensor] = []

    def look(attention: Any, given: tuple[Tensor, ...]) -> None:
        seen.append(attention.weights(given[0], mask=batch.tokens.mask))

    hooks = [layer.attention.register_forward_pre_hook(look) for layer in bert.layers]
    try:
        bert.encode(batch.tokens, batch.segments)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
