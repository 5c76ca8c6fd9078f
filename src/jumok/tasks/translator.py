"""A trained translation model at work: text in, text out, with word links and maps; and how good it is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from jumok import decoding
from jumok.batch import EOS, Map, Pairs, Tokens
from jumok.data.sources import Example
from jumok.data.text import Tokenizers
from jumok.decoding import Hypothesis
from jumok.errors import InputError
from jumok.metrics import alignment
from jumok.models.graphed import Graphed
from jumok.models.transformer import Transformer
from jumok.run import Run
from jumok.tasks.common import AskedOfWriter
from jumok.tasks.corpora import Texts

if TYPE_CHECKING:
    from jumok.look.scene import Scene
    from jumok.look.without import Out

__all__ = ["DecodeConfig", "Heard", "Search", "Translation", "Translator", "parts"]

AT_ONCE = 1024  # lines that are read before any is translated, so that those of like length go together
WEIGHTS = 1 << 18  # of one head of one layer that are looked at together
TOKENS = 8192  # source tokens times hypotheses in a batch


@dataclass(frozen=True)
class DecodeConfig:
    """The ``decode:`` section: how to search, and which attention tells the word links."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    beam: int = 5
    length_penalty: float = 1.0
    coverage: float = 0.0  # how much leaving source words out counts against a translation
    # The attention that links are read from. None: `eval` chooses it, as `align` does; `run` takes the last
    # layer but one, plain.
    align_layer: int | None = None
    align_shift: bool | None = None  # the links of a word from the step after it, at which it is read

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam={self.beam}: 1 or more is expected")
        if self.length_penalty < 0 or self.coverage < 0:
            raise ValueError("length_penalty and coverage are 0 or more")


@dataclass(frozen=True)
class Search(AskedOfWriter):
    """What one asks of a translation; None: what the recipe says."""


@dataclass(frozen=True)
class Heard:
    """Who follows a search, and the numbers that its lines have there."""

    listener: decoding.Listener
    numbers: list[int]


@dataclass(frozen=True, eq=False)
class Translation:
    """One line and what became of it. Words are between spaces, of the text as the tokenizer gets it."""

    number: int  # of the line, from 0
    source: str
    text: str  # as a reader wants it
    source_words: list[str]
    words: list[str]
    score: float
    finished: bool
    others: tuple[Translation, ...] = ()  # of an n-best list, those behind the first
    links: list[tuple[int, int]] | None = None  # (source word, word)
    weights: Tensor | None = None  # (words, source words)

    @property
    def has_words(self) -> bool:
        """On both sides, so that there is a map to draw."""
        return bool(self.words and self.source_words)

    def lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it: the text, or fields with ||| between them, or JSON."""
        for one in (self, *self.others):
            pharaoh = " ".join(f"{i}-{j}" for i, j in one.links or [])
            if as_json:
                known = {"source": one.source, "translation": one.text, "score": one.score}
                known |= {"finished": one.finished, "source_words": one.source_words, "words": one.words}
                known |= {} if one.links is None else {"links": pharaoh}
                yield json.dumps({"line": one.number, **known}, ensure_ascii=False)
            elif n_best:
                fields = [str(one.number), one.text, f"{one.score:.4f}", *([pharaoh] if alignments else [])]
                yield " ||| ".join(fields)
            else:
                yield f"{one.text} ||| {pharaoh}" if alignments else one.text


class Translator:
    """A model with its tokenizers.

    >>> translator = jumok.load("runs/bahdanau")  # doctest: +SKIP
    >>> translator.translate("this is an example sentence").text  # doctest: +SKIP
    '이것은 예문이다'
    """

    why_no_longer = "has learned positions"  # if there is a longest text

    def __init__(self, run: Run, model: Any, tokenizers: Tokenizers, texts: Texts) -> None:
        self.run, self.model, self.tokenizers, self.texts = run, model, tokenizers, texts
        self.decode: DecodeConfig = run.recipe.decode
        self._searched = _fast(model)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source; that of the target is ``tokenizers.target``."""
        return self.tokenizers.source

    @property
    def longest(self) -> int | None:
        """How many tokens a text may have, EOS included; None: any number."""
        found: int | None = getattr(self.model, "longest", None)
        return found

    @property
    def is_reentrant(self) -> bool:
        """Whether texts can be translated between two steps of another search: CUDA graphs share memory."""
        return not isinstance(self._searched, Graphed)

    @property
    def device(self) -> torch.device:
        weight: Tensor = next(iter(self.model.parameters()))
        return weight.device

    # ----------------------------------------------------------------------------------------- translating

    def translate(self, text: str, search: Search | None = None, *, align: bool = True) -> Translation:
        """One text, with its links and map; many of them by :meth:`predict`."""
        if not isinstance(text, str):
            raise InputError(f"translate takes one text, and {type(text).__name__} came; predict takes many")
        return next(self.predict([text], search or Search(), align=align))

    def predict(
        self,
        lines: Iterable[str],
        search: Search,
        *,
        align: bool = False,
        first: int = 0,
        listener: decoding.Listener | None = None,
    ) -> Iterator[Translation]:
        """A translation for every line, in their order; ``first`` is the number of the first line.

        A ``listener`` follows what is said of each line while it is said, and may give lines up.
        """
        numbered = enumerate(lines, first)
        generator = torch.Generator().manual_seed(search.seed + first)
        while window := list(itertools.islice(numbered, AT_ONCE)):
            prepared = [self.texts.prepared(line.strip(), "source") for _, line in window]
            ids = self.tokenizers.source.encode(prepared)
            self._check_lengths([number for number, _ in window], ids)
            found: dict[int, Translation] = {}
            for batch in self._batches(ids, search):
                heard = None if listener is None else Heard(listener, [window[i][0] for i in batch])
                hypotheses = self._search([ids[i] for i in batch], search, generator, heard)
                looked: Sequence[Sequence[Tensor | None]]
                if align and self.has_maps:
                    looked = self._looked_all([ids[i] for i in batch], hypotheses)
                else:
                    looked = [[None] * len(some) for some in hypotheses]
                for i, some, weights in zip(batch, hypotheses, looked, strict=True):
                    found[i] = self._translation(*window[i], prepared[i], some, weights)
            yield from (found[i] for i in range(len(window)))

    def length(self, text: str) -> int:
        """How many tokens the model reads of a text, EOS included; one that is too long is an error."""
        ids = self.tokenizers.source.encode([self.texts.prepared(text.strip(), "source")])
        self._check_lengths([0], ids)
        return len(ids[0]) + 1

    def shown(self, ids: Sequence[int]) -> str:
        """The text of what was said, or of a part of it, as a reader wants it."""
        return self.texts.shown(self.tokenizers.target.decode(ids))

    def _check_lengths(self, numbers: list[int], ids: list[list[int]]) -> None:
        longest = self.longest
        for number, one in zip(numbers, ids, strict=True):
            if longest is not None and len(one) + 1 > longest:
                raise InputError(
                    f"line {number + 1} has {len(one)} tokens, and this model, which {self.why_no_longer}, "
                    f"takes {longest - 1} at most; divide the line into sentences"
                )

    def _limit(self, source: int) -> int:
        """The most tokens of a translation."""
        usual = decoding.twice_plus_20(source)
        return usual if self.longest is None else min(usual, self.longest - 1)

    def _batches(self, ids: list[list[int]], search: Search) -> Iterator[list[int]]:
        """The numbers of lines of like length, as many as fit together; the longest first."""
        room = max(1, TOKENS // (1 if search.sample else search.beam or self.decode.beam))
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        while order:
            rows = max(1, room // (len(ids[order[0]]) + 1))
            yield order[:rows]
            order = order[rows:]

    @torch.inference_mode()
    def _search(
        self, ids: list[list[int]], search: Search, generator: torch.Generator, heard: Heard | None
    ) -> list[list[Hypothesis]]:
        source = Tokens.padded([[*one, EOS] for one in ids]).to(self.device)
        model = self._searched
        if heard is not None:  # an empty line is answered without the model
            asked = [number for number, one in zip(heard.numbers, ids, strict=True) if one]
            model = decoding.Followed(model, heard.listener, asked)
        beam = self.decode.beam if search.beam is None else search.beam
        if search.sample:
            drawn = decoding.sample(
                model,
                source,
                temperature=search.temperature,
                top_k=search.top_k or None,
                top_p=search.top_p if search.top_p < 1 else None,
                generator=generator,
                longest=self._limit,
            )
            return [[one] for one in drawn]
        if beam == 1 and search.n_best == 1:
            return [[one] for one in decoding.greedy(model, source, longest=self._limit)]
        return decoding.beam(
            model,
            source,
            size=max(beam, search.n_best),
            n_best=search.n_best,
            length_penalty=self.decode.length_penalty,
            coverage=self._coverage(ids) if self.decode.coverage else None,
            longest=self._limit,
        )

    def _coverage(self, ids: list[list[int]]) -> decoding.Coverage:
        def term(sentences: Sequence[int], said: Sequence[tuple[int, ...]]) -> Tensor:
            sources = [ids[n] for n in sentences]
            weights = self._weights(sources, said)
            rows = torch.tensor([len(one) + 1 for one in said], device=weights.device)
            real = torch.arange(weights.shape[1], device=weights.device) < rows[:, None]
            return decoding.coverage_term(
                weights * real[:, :, None], [len(one) + 1 for one in sources], self.decode.coverage
            )

        return term

    def _translation(
        self, number: int, line: str, prepared: str, found: list[Hypothesis], looked: Sequence[Tensor | None]
    ) -> Translation:
        first, *others = (
            self._one(number, line, prepared, hypothesis, weights)
            for hypothesis, weights in zip(found, looked, strict=True)
        )
        return replace(first, others=tuple(others))

    def _one(
        self, number: int, line: str, prepared: str, found: Hypothesis, looked: Tensor | None
    ) -> Translation:
        text = self.tokenizers.target.decode(found.ids)
        weights = links = None
        if looked is not None:
            rows, columns = self.tokenizers.target.words_of(found.ids), self.tokenizers.source.words(prepared)
            weights = _of_words(looked, rows, columns)
            links = sorted(alignment.strongest(weights))
        return Translation(
            number=number,
            source=line,
            text=self.texts.shown(text),
            source_words=prepared.split(),
            words=text.split(),
            score=found.score,
            finished=found.finished,
            links=links,
            weights=weights,
        )

    # --------------------------------------------------------------------------------------------- looking

    def maps(self, pairs: Sequence[Example]) -> tuple[list[Map], Pairs]:
        """All attention of the model while it says the targets of these pairs, and the batch they made.

        Only of the first ones, if all would be too many weights.
        """
        batch = self.batch(pairs)
        first = next(parts([[0] * n for n in batch.source.lengths], [[0] * n for n in batch.target.lengths]))
        if first.stop < len(pairs):
            batch = self.batch(pairs[first])
        with torch.inference_mode():
            return self.model.maps(batch), batch

    def batch(self, pairs: Sequence[Example]) -> Pairs:
        """Pairs of texts as the model takes them, padded."""
        sources = self.tokenizers.source.encode([self.texts.prepared(one.source, "source") for one in pairs])
        targets = self.tokenizers.target.encode([self.texts.prepared(one.target, "target") for one in pairs])
        return Pairs.of(sources, targets).to(self.device)

    @property
    def has_maps(self) -> bool:
        """Whether the model has any attention between source and target."""
        return getattr(self.run.recipe.model, "attention", True) is not None

    def check_maps(self) -> None:
        """Raise if it has none."""
        if not self.has_maps:
            raise InputError(
                "this model has no attention (a fixed context), so there are no links and no map"
            )

    def _looked_all(self, sources: list[list[int]], found: list[list[Hypothesis]]) -> list[list[Tensor]]:
        """The same for all hypotheses of each source."""
        each = [source for source, some in zip(sources, found, strict=True) for _ in some]
        looked = iter(self._looked(each, [hypothesis.ids for some in found for hypothesis in some]))
        return [[next(looked) for _ in some] for some in found]

    def _looked(self, sources: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> list[Tensor]:
        """How much each piece said looked at each of the source, ``(Q, K)`` for each pair, without EOS."""
        shift = int(self.decode.align_shift or False)
        found: list[Tensor] = []
        for part in parts(sources, said):
            weights = self._weights(sources[part], said[part])
            found += (
                one[shift : shift + len(y), : len(x)].cpu()
                for one, x, y in zip(weights, sources[part], said[part], strict=True)
            )
        return found

    @torch.inference_mode()
    def _weights(self, sources: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Tensor:
        """The layer that tells links best, its heads averaged, ``(B, Q, K)``, with EOS and padding."""
        maps = self.model.maps(Pairs.of(sources, said).to(self.device))
        if not maps:
            raise InputError(
                "this model has no attention (a fixed context), so there are no links and no map"
            )
        layer = self.decode.align_layer
        if layer is None:
            layer = max(0, len(maps) - 2)
        if not -len(maps) <= layer < len(maps):
            raise InputError(
                f"decode.align_layer is {layer}, and the model has {len(maps)} layers, from 0 on"
            )
        weights: Tensor = maps[layer].weights.float().mean(1)
        return weights

    def draw(self, translation: Translation, path: Path, title: str = "") -> Path:
        """The map of a translation as a picture."""
        from jumok.look.figures import heat_map

        self.check_maps()
        if translation.weights is None:
            raise InputError("this translation was made without its map: translate with align=True")
        return heat_map(translation.weights, translation.words, translation.source_words, path, title=title)

    def look(self, text: str, target: str | None = None, *, without: Out | None = None) -> list[Scene]:
        """All attention of the model while it says ``target``, or its own translation, for the viewer.

        With heads or edges to do ``without``: a second time, while it says the same without them, and how
        likely that was each time.
        """
        from jumok.look.scene import Scene
        from jumok.look.watch import watch
        from jumok.look.without import before_and_after

        self.check_maps()
        said = self.translate(text, align=False).text if target is None else target
        batch = self.batch([Example(text, said, "the text")])
        words = self.tokenizers.target.pieces(batch.labels[0].tolist())

        def look() -> Scene:
            with watch(self.model, self.tokenizers) as seen:
                loss = self.model.loss(batch)
            label = f"log-probability {-loss.total.item():.2f}"
            scene = Scene.of(seen, title=f"{text}  →  {said}", label=label)
            # Between the two texts, a row is named by the word it says rather than by the one it was told.
            layers = (replace(one, rows=words) if one.kind == "cross" else one for one in scene.layers)
            return replace(scene, layers=tuple(layers))

        with torch.inference_mode():
            return before_and_after(self.model, without, look)

    def export(self, to: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a Marian folder."""
        if to != "hf":
            raise InputError(f"--to {to}: hf is what a translation run can be exported to")
        from jumok.exchange.huggingface import export_marian

        target = None if self.tokenizers.joint else self.tokenizers.target.inner
        export_marian(self.model, folder, tokenizer=self.tokenizers.source.inner, target_tokenizer=target)


def _fast(model: Any) -> Any:
    """What a search steps through: the model, or on a GPU its steps as CUDA graphs, where it has them."""
    on_gpu = next(iter(model.parameters())).is_cuda
    return Graphed(model) if on_gpu and isinstance(model, Transformer) else model


def parts(sources: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Neighbours as many as have maps of bounded size together."""
    begin = longest_x = longest_y = 0
    for end, (x, y) in enumerate(zip(sources, said, strict=True)):
        longest_x, longest_y = max(longest_x, len(x) + 1), max(longest_y, len(y) + 1)
        if end > begin and (end + 1 - begin) * longest_x * longest_y > WEIGHTS:
            yield slice(begin, end)
            begin, longest_x, longest_y = end, len(x) + 1, len(y) + 1
    if begin < len(sources):
        yield slice(begin, len(sources))


def _of_words(weights: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
    """A map of pieces as one of words; -1 is a piece of no word."""
    target, source = ([None if word < 0 else word for word in words] for words in (rows, columns))
    return alignment.to_words(weights, target, source)
