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
from jumok.batches.tokens import EOS, LayerAttention, Seq2SeqBatch, Tokens
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.decoding import Hypothesis
from jumok.errors import InputError
from jumok.metrics import word_alignment
from jumok.models.layers.cuda_graph_decoder import CudaGraphDecoder
from jumok.models.transformer import Transformer
from jumok.run import Run
from jumok.tasks.common import GenerationOptions
from jumok.tasks.translate.data import TranslationData

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData

__all__ = [
    "StreamingBatch",
    "TranslationDecodeConfig",
    "TranslationOptions",
    "TranslationPrediction",
    "TranslationPredictor",
    "split_by_map_size",
]

LINES_PER_CHUNK = (
    1024  # lines that are read before any is translated, so that those of like length go together
)
MAX_MAP_WEIGHTS = 1 << 18  # of one head of one layer that are looked at together
MAX_BATCH_TOKENS = 8192  # source tokens times hypotheses in a batch


@dataclass(frozen=True)
class TranslationDecodeConfig:
    """The ``decode:`` section: how to search, and which attention tells the word links."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    beam_size: int = 5
    length_penalty: float = 1.0
    coverage_penalty: float = 0.0  # how much leaving source words out counts against a translation
    # The attention that links are read from. None: `eval` chooses it, as `jumok align` does; `run` takes the last
    # layer but one, plain.
    alignment_layer: int | None = None
    alignment_shift: bool | None = None  # the links of a word from the step after it, at which it is read

    def __post_init__(self) -> None:
        if self.beam_size < 1:
            raise ValueError(f"beam_size={self.beam_size}: 1 or more is expected")
        if self.length_penalty < 0 or self.coverage_penalty < 0:
            raise ValueError("length_penalty and coverage_penalty are 0 or more")


@dataclass(frozen=True)
class TranslationOptions(GenerationOptions):
    """What one asks of a translation; None: what the recipe says."""


@dataclass(frozen=True)
class StreamingBatch:
    """Who follows a search, and the numbers that its lines have there."""

    listener: decoding.StreamListener
    line_indices: list[int]


@dataclass(frozen=True, eq=False)
class TranslationPrediction:
    """One line and what became of it. Words are between spaces, of the text as the tokenizer gets it."""

    index: int  # of the line, from 0
    source: str
    translation: str  # as a reader wants it
    source_words: list[str]
    target_words: list[str]
    score: float
    finished: bool
    alternatives: tuple[TranslationPrediction, ...] = ()  # of an n-best list, those behind the first
    alignment: list[tuple[int, int]] | None = None  # (source word, word)
    attention: Tensor | None = None  # (words, source words)

    @property
    def is_drawable(self) -> bool:
        """On both sides, so that there is a map to draw."""
        return bool(self.target_words and self.source_words)

    def to_lines(self, *, n_best: bool, alignments: bool, as_json: bool) -> Iterator[str]:
        """As ``jumok run`` writes it: the text, or fields with ||| between them, or JSON."""
        for one in (self, *self.alternatives):
            pharaoh = " ".join(f"{i}-{j}" for i, j in one.alignment or [])
            if as_json:
                known = {"source": one.source, "translation": one.translation, "score": one.score}
                known |= {
                    "finished": one.finished,
                    "source_words": one.source_words,
                    "target_words": one.target_words,
                }
                known |= {} if one.alignment is None else {"alignment": pharaoh}
                yield json.dumps({"line": one.index, **known}, ensure_ascii=False)
            elif n_best:
                fields = [
                    str(one.index),
                    one.translation,
                    f"{one.score:.4f}",
                    *([pharaoh] if alignments else []),
                ]
                yield " ||| ".join(fields)
            else:
                yield f"{one.translation} ||| {pharaoh}" if alignments else one.translation


class TranslationPredictor:
    """A model with its tokenizers.

    >>> translator = jumok.load("runs/bahdanau")  # doctest: +SKIP
    >>> translator.translate("this is an example sentence").translation  # doctest: +SKIP
    '이것은 예문이다'
    """

    length_limit_reason = "has learned positions"  # if there is a longest text

    def __init__(self, run: Run, model: Any, tokenizers: TokenizerPair, data: TranslationData) -> None:
        self.run, self.model, self.tokenizers, self.data = run, model, tokenizers, data
        self.decode_config: TranslationDecodeConfig = run.recipe.decode
        self._decoder = _wrap_cuda_graphs(model)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source; that of the target is ``tokenizers.target``."""
        return self.tokenizers.source

    @property
    def max_source_tokens(self) -> int | None:
        """How many tokens a text may have, EOS included; None: any number."""
        found: int | None = getattr(self.model, "max_length", None)
        return found

    @property
    def is_reentrant(self) -> bool:
        """Whether texts can be translated between two steps of another search: CUDA graphs share memory."""
        return not isinstance(self._decoder, CudaGraphDecoder)

    @property
    def device(self) -> torch.device:
        weight: Tensor = next(iter(self.model.parameters()))
        return weight.device

    # ----------------------------------------------------------------------------------------- translating

    def translate(
        self, text: str, options: TranslationOptions | None = None, *, with_attention: bool = True
    ) -> TranslationPrediction:
        """One text, with its links and map; many of them by :meth:`predict`."""
        if not isinstance(text, str):
            raise InputError(f"translate takes one text, and {type(text).__name__} came; predict takes many")
        return next(self.predict([text], options or TranslationOptions(), with_attention=with_attention))

    def predict(
        self,
        lines: Iterable[str],
        options: TranslationOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
        listener: decoding.StreamListener | None = None,
    ) -> Iterator[TranslationPrediction]:
        """A translation for every line, in their order; ``first_index`` is the number of the first line.

        A ``listener`` follows what is said of each line while it is said, and may give lines up.
        """
        numbered = enumerate(lines, first_index)
        generator = torch.Generator().manual_seed(options.seed + first_index)
        while window := list(itertools.islice(numbered, LINES_PER_CHUNK)):
            prepared = [self.data.preprocess(line.strip(), "source") for _, line in window]
            ids = self.tokenizers.source.encode(prepared)
            self._check_lengths([number for number, _ in window], ids)
            found: dict[int, TranslationPrediction] = {}
            for batch in self._group_by_length(ids, options):
                heard = None if listener is None else StreamingBatch(listener, [window[i][0] for i in batch])
                hypotheses = self._decode_batch([ids[i] for i in batch], options, generator, heard)
                looked: Sequence[Sequence[Tensor | None]]
                if with_attention and self.has_attention:
                    looked = self._compute_n_best_attention([ids[i] for i in batch], hypotheses)
                else:
                    looked = [[None] * len(some) for some in hypotheses]
                for i, some, weights in zip(batch, hypotheses, looked, strict=True):
                    found[i] = self._build_prediction(*window[i], prepared[i], some, weights)
            yield from (found[i] for i in range(len(window)))

    def count_tokens(self, text: str) -> int:
        """How many tokens the model reads of a text, EOS included; one that is too long is an error."""
        ids = self.tokenizers.source.encode([self.data.preprocess(text.strip(), "source")])
        self._check_lengths([0], ids)
        return len(ids[0]) + 1

    def ids_to_text(self, target_ids: Sequence[int]) -> str:
        """The text of what was said, or of a part of it, as a reader wants it."""
        return self.data.postprocess(self.tokenizers.target.decode(target_ids))

    def _check_lengths(self, line_indices: list[int], source_ids: list[list[int]]) -> None:
        longest = self.max_source_tokens
        for number, one in zip(line_indices, source_ids, strict=True):
            if longest is not None and len(one) + 1 > longest:
                raise InputError(
                    f"line {number + 1} has {len(one)} tokens, and this model, which {self.length_limit_reason}, "
                    f"takes {longest - 1} at most; divide the line into sentences"
                )

    def _max_target_tokens(self, num_source_tokens: int) -> int:
        """The most tokens of a translation."""
        usual = decoding.default_max_length(num_source_tokens)
        return usual if self.max_source_tokens is None else min(usual, self.max_source_tokens - 1)

    def _group_by_length(
        self, source_ids: list[list[int]], options: TranslationOptions
    ) -> Iterator[list[int]]:
        """The numbers of lines of like length, as many as fit together; the longest first."""
        room = max(
            1,
            MAX_BATCH_TOKENS // (1 if options.sample else options.beam_size or self.decode_config.beam_size),
        )
        order = sorted(range(len(source_ids)), key=lambda i: -len(source_ids[i]))
        while order:
            rows = max(1, room // (len(source_ids[order[0]]) + 1))
            yield order[:rows]
            order = order[rows:]

    @torch.inference_mode()
    def _decode_batch(
        self,
        source_ids: list[list[int]],
        options: TranslationOptions,
        generator: torch.Generator,
        streaming: StreamingBatch | None,
    ) -> list[list[Hypothesis]]:
        source = Tokens.pad([[*one, EOS] for one in source_ids]).to(self.device)
        model = self._decoder
        if streaming is not None:  # an empty line is answered without the model
            asked = [number for number, one in zip(streaming.line_indices, source_ids, strict=True) if one]
            model = decoding.StreamingDecoder(model, streaming.listener, asked)
        beam = self.decode_config.beam_size if options.beam_size is None else options.beam_size
        if options.sample:
            drawn = decoding.sample(
                model,
                source,
                temperature=options.temperature,
                top_k=options.top_k or None,
                top_p=options.top_p if options.top_p < 1 else None,
                generator=generator,
                max_length=self._max_target_tokens,
            )
            return [[one] for one in drawn]
        if beam == 1 and options.n_best == 1:
            return [
                [one] for one in decoding.greedy_search(model, source, max_length=self._max_target_tokens)
            ]
        return decoding.beam_search(
            model,
            source,
            beam_size=max(beam, options.n_best),
            n_best=options.n_best,
            length_penalty=self.decode_config.length_penalty,
            coverage=self._make_coverage_term(source_ids) if self.decode_config.coverage_penalty else None,
            max_length=self._max_target_tokens,
        )

    def _make_coverage_term(self, source_ids: list[list[int]]) -> decoding.CoverageScorer:
        def term(sentences: Sequence[int], said: Sequence[tuple[int, ...]]) -> Tensor:
            sources = [source_ids[n] for n in sentences]
            weights = self._compute_layer_weights(sources, said)
            rows = torch.tensor([len(one) + 1 for one in said], device=weights.device)
            real = torch.arange(weights.shape[1], device=weights.device) < rows[:, None]
            return decoding.coverage_penalty(
                weights * real[:, :, None],
                [len(one) + 1 for one in sources],
                self.decode_config.coverage_penalty,
            )

        return term

    def _build_prediction(
        self,
        index: int,
        line: str,
        prepared: str,
        hypotheses: list[Hypothesis],
        attentions: Sequence[Tensor | None],
    ) -> TranslationPrediction:
        first, *others = (
            self._build_hypothesis_prediction(index, line, prepared, hypothesis, weights)
            for hypothesis, weights in zip(hypotheses, attentions, strict=True)
        )
        return replace(first, alternatives=tuple(others))

    def _build_hypothesis_prediction(
        self, index: int, line: str, prepared: str, hypothesis: Hypothesis, attention: Tensor | None
    ) -> TranslationPrediction:
        text = self.tokenizers.target.decode(hypothesis.ids)
        weights = links = None
        if attention is not None:
            rows, columns = (
                self.tokenizers.target.word_ids_from_ids(hypothesis.ids),
                self.tokenizers.source.word_ids_from_text(prepared),
            )
            weights = _merge_to_words(attention, rows, columns)
            links = sorted(word_alignment.argmax_links(weights))
        return TranslationPrediction(
            index=index,
            source=line,
            translation=self.data.postprocess(text),
            source_words=prepared.split(),
            target_words=text.split(),
            score=hypothesis.score,
            finished=hypothesis.finished,
            alignment=links,
            attention=weights,
        )

    # --------------------------------------------------------------------------------------------- looking

    def compute_attention_maps(
        self, pairs: Sequence[TranslationExample]
    ) -> tuple[list[LayerAttention], Seq2SeqBatch]:
        """All attention of the model while it says the targets of these pairs, and the batch they made.

        Only of the first ones, if all would be too many weights.
        """
        batch = self.build_batch(pairs)
        first = next(
            split_by_map_size(
                [[0] * n for n in batch.source.lengths], [[0] * n for n in batch.target.lengths]
            )
        )
        if first.stop < len(pairs):
            batch = self.build_batch(pairs[first])
        with torch.inference_mode():
            return self.model.compute_attention_maps(batch), batch

    def build_batch(self, pairs: Sequence[TranslationExample]) -> Seq2SeqBatch:
        """Pairs of texts as the model takes them, padded."""
        sources = self.tokenizers.source.encode([self.data.preprocess(one.source, "source") for one in pairs])
        targets = self.tokenizers.target.encode([self.data.preprocess(one.target, "target") for one in pairs])
        return Seq2SeqBatch.from_sequences(sources, targets).to(self.device)

    @property
    def has_attention(self) -> bool:
        """Whether the model has any attention between source and target."""
        return getattr(self.run.recipe.model, "attention", True) is not None

    def check_has_attention(self) -> None:
        """Raise if it has none."""
        if not self.has_attention:
            raise InputError(
                "this model has no attention (a fixed context), so there are no links and no map"
            )

    def _compute_n_best_attention(
        self, source_ids: list[list[int]], hypotheses: list[list[Hypothesis]]
    ) -> list[list[Tensor]]:
        """The same for all hypotheses of each source."""
        each = [source for source, some in zip(source_ids, hypotheses, strict=True) for _ in some]
        looked = iter(
            self._compute_attention(each, [hypothesis.ids for some in hypotheses for hypothesis in some])
        )
        return [[next(looked) for _ in some] for some in hypotheses]

    def _compute_attention(
        self, source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """How much each piece said looked at each of the source, ``(Q, K)`` for each pair, without EOS."""
        shift = int(self.decode_config.alignment_shift or False)
        found: list[Tensor] = []
        for part in split_by_map_size(source_ids, target_ids):
            weights = self._compute_layer_weights(source_ids[part], target_ids[part])
            found += (
                one[shift : shift + len(y), : len(x)].cpu()
                for one, x, y in zip(weights, source_ids[part], target_ids[part], strict=True)
            )
        return found

    @torch.inference_mode()
    def _compute_layer_weights(
        self, source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """The layer that tells links best, its heads averaged, ``(B, Q, K)``, with EOS and padding."""
        maps = self.model.compute_attention_maps(Seq2SeqBatch.from_sequences(source_ids, target_ids).to(self.device))
        if not maps:
            raise InputError(
                "this model has no attention (a fixed context), so there are no links and no map"
            )
        layer = self.decode_config.alignment_layer
        if layer is None:
            layer = max(0, len(maps) - 2)
        if not -len(maps) <= layer < len(maps):
            raise InputError(
                f"decode.alignment_layer is {layer}, and the model has {len(maps)} layers, from 0 on"
            )
        weights: Tensor = maps[layer].weights.float().mean(1)
        return weights

    def draw_attention(self, prediction: TranslationPrediction, path: Path, title: str = "") -> Path:
        """The map of a translation as a picture."""
        from jumok.look.figures.plots import draw_heat_map

        self.check_has_attention()
        if prediction.attention is None:
            raise InputError("this translation was made without its map: translate with with_attention=True")
        return draw_heat_map(
            prediction.attention, prediction.target_words, prediction.source_words, path, title=title
        )

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """All attention of the model while it says ``target``, or its own translation, for the viewer.

        With heads or edges to do ``ablations``: a second time, while it says the same without them, and how
        likely that was each time.
        """
        from jumok.look.capture.watch import watch
        from jumok.look.viewer.comparison import compare_with_ablation
        from jumok.look.viewer.viewer_data import ViewerData

        self.check_has_attention()
        said = self.translate(text, with_attention=False).translation if target is None else target
        batch = self.build_batch([TranslationExample(text, said, "the text")])
        words = self.tokenizers.target.ids_to_tokens(batch.labels[0].tolist())

        def look() -> ViewerData:
            with watch(self.model, self.tokenizers) as seen:
                loss = self.model.loss(batch)
            label = f"log-probability {-loss.total.item():.2f}"
            scene = ViewerData.from_captures(seen, title=f"{text}  →  {said}", label=label)
            # Between the two texts, a row is named by the word it says rather than by the one it was told.
            layers = (replace(one, row_labels=words) if one.kind == "cross" else one for one in scene.layers)
            return replace(scene, layers=tuple(layers))

        with torch.inference_mode():
            return compare_with_ablation(self.model, ablations, look)

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model in another format: ``hf``, a Marian folder."""
        if format_name != "hf":
            raise InputError(f"--format {format_name}: hf is what a translation run can be exported to")
        from jumok.export.marian import export_marian

        target = None if self.tokenizers.is_shared else self.tokenizers.target.backend
        export_marian(self.model, folder, tokenizer=self.tokenizers.source.backend, target_tokenizer=target)


def _wrap_cuda_graphs(model: Any) -> Any:
    """What a search steps through: the model, or on a GPU its steps as CUDA graphs, where it has them."""
    on_gpu = next(iter(model.parameters())).is_cuda
    return CudaGraphDecoder(model) if on_gpu and isinstance(model, Transformer) else model


def split_by_map_size(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Neighbours as many as have maps of bounded size together."""
    begin = longest_x = longest_y = 0
    for end, (x, y) in enumerate(zip(sources, targets, strict=True)):
        longest_x, longest_y = max(longest_x, len(x) + 1), max(longest_y, len(y) + 1)
        if end > begin and (end + 1 - begin) * longest_x * longest_y > MAX_MAP_WEIGHTS:
            yield slice(begin, end)
            begin, longest_x, longest_y = end, len(x) + 1, len(y) + 1
    if begin < len(sources):
        yield slice(begin, len(sources))


def _merge_to_words(weights: Tensor, row_words: Sequence[int], column_words: Sequence[int]) -> Tensor:
    """A map of pieces as one of words; -1 is a piece of no word."""
    target, source = ([None if word < 0 else word for word in words] for words in (row_words, column_words))
    return word_alignment.pool_to_words(weights, target, source)
