"""A trained translation model: translations with word alignments and attention maps, and their scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from jumok import decoding
from jumok.batches.tokens import EOS, LayerAttention, Seq2SeqBatch, Tokens
from jumok.data.readers.parallel_corpus import TranslationExample
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.decoding import Hypothesis, StreamListener
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.metrics import word_alignment
from jumok.models.cuda_graph_decoder import CudaGraphDecoder
from jumok.models.transformer import Transformer
from jumok.run import Run
from jumok.tasks.base import Evaluation, Prediction, Predictor, SplitName
from jumok.tasks.generation import generate, merge_to_words
from jumok.tasks.options import GenerationOptions
from jumok.tasks.predictors import group_by_length
from jumok.tasks.translate import metrics as translate_metrics
from jumok.tasks.translate.config import TranslationDecodeConfig
from jumok.tasks.translate.data import TranslationData, TranslationSplit
from jumok.training import ValidationReport, compute_attention_health

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import ViewerData, ViewerLayer

LINES_PER_CHUNK = 1024  # lines that are read before any is translated, so that similar lengths share a batch
MAX_MAP_WEIGHTS = 1 << 18  # attention weights of one head of one layer that are computed together
MAX_BATCH_TOKENS = 8192  # source tokens times hypotheses in a batch
NUM_SAMPLES = 3  # sample translations per validation
NUM_HEALTH_EXAMPLES = 32  # sentences whose attention is measured at a validation
CHANCE_BLEU = 1.0  # BLEU below this is chance; perplexity decides then


@dataclass(frozen=True)
class TranslationOptions(GenerationOptions):
    """Options of a translation."""


@dataclass(frozen=True)
class StreamingBatch:
    """A listener, and the indices that the lines of a batch have for it."""

    listener: StreamListener
    line_indices: list[int]


@dataclass(frozen=True, eq=False)
class TranslationPrediction(Prediction):
    """The translation of a line. Words are separated by spaces, after preprocessing."""

    supports_alignments: ClassVar[bool] = True

    translation: str  # after postprocessing
    source_words: list[str]
    target_words: list[str]
    score: float = 0.0
    alternatives: tuple[TranslationPrediction, ...] = field(default=(), kw_only=True)
    alignment: list[tuple[int, int]] | None = None  # (source word, target word)
    attention: Tensor | None = None  # (target words, source words)

    @property
    def is_drawable(self) -> bool:
        return bool(self.target_words and self.source_words)

    def to_lines(self, *, n_best: bool = False, alignments: bool = False, as_json: bool = False) -> Iterator[str]:
        """The translation, or fields that ||| separates, or JSON."""
        lines = super().to_lines(n_best=n_best, alignments=alignments, as_json=as_json)
        for prediction, line in zip((self, *self.alternatives), lines, strict=True):
            links = word_alignment.format_links(frozenset(prediction.alignment or ()))
            yield f"{line} ||| {links}" if alignments and not as_json else line

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        for prediction in (self, *self.alternatives):
            text = prediction.translation
            yield f"{self.index} ||| {text} ||| {prediction.score:.4f}" if n_best else text

    @property
    def input_fields(self) -> dict[str, Any]:
        return {"source": self.input}

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "translation": self.translation,
            "score": self.score,
            "finished": self.finished,
            "source_words": self.source_words,
            "target_words": self.target_words,
        }
        if self.alignment is not None:
            fields["alignment"] = self.alignment
        return fields


class TranslationPredictor(Predictor[TranslationPrediction, TranslationOptions]):
    """A translation model with its tokenizers.

    >>> translator = jumok.load("runs/bahdanau")  # doctest: +SKIP
    >>> translator.translate("this is an example sentence").translation  # doctest: +SKIP
    '이것은 예문이다'

    ``load_model`` returns the PyTorch model. An engine passes its own ``decoder``, and loads the model only when
    attention is needed.
    """

    length_limit_reason = "has learned positions"  # if there is a maximum length

    def __init__(
        self,
        run: Run,
        tokenizers: TokenizerPair,
        data: TranslationData,
        load_model: Callable[[], Any],
        decoder: Any = None,
    ) -> None:
        self.run, self.tokenizers, self.data = run, tokenizers, data
        self.tokenizer = tokenizers.source
        self.decode_config: TranslationDecodeConfig = run.recipe.decode
        self._load_model, self._given_decoder = load_model, decoder

    @functools.cached_property
    def model(self) -> Any:
        """The PyTorch model."""
        return self._load_model()

    @functools.cached_property
    def _decoder(self) -> Any:
        """What the search steps through. It is chosen at the first search, when the model is on its device."""
        return _wrap_cuda_graphs(self.model) if self._given_decoder is None else self._given_decoder

    @property
    def max_source_tokens(self) -> int | None:
        """The maximum length of a text, including EOS; None: no limit."""
        max_length: int | None = getattr(self.model, "max_length", None)
        return max_length

    @property
    def is_reentrant(self) -> bool:
        """Whether another search may run between two steps of a search. CUDA graphs share memory."""
        return not isinstance(self._decoder, CudaGraphDecoder)

    # ----------------------------------------------------------------------------------------------- translation

    def translate(
        self, text: str, options: TranslationOptions | None = None, *, with_attention: bool = True
    ) -> TranslationPrediction:
        """Translate one text, with its word alignment and attention map. For many texts use :meth:`predict`."""
        if not isinstance(text, str):
            raise InputError(f"translate takes one text, but got {type(text).__name__}; predict takes many")
        return next(self.predict([text], options or TranslationOptions(), with_attention=with_attention))

    def predict(
        self,
        lines: Iterable[str],
        options: TranslationOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
        listener: StreamListener | None = None,
    ) -> Iterator[TranslationPrediction]:
        """Translate lines, in their order.

        A ``listener`` follows the translation of each line, and may cancel lines.
        """
        generator = torch.Generator().manual_seed(options.seed + first_index)
        num_hypotheses = 1 if options.sample else options.beam_size or self.decode_config.beam_size
        max_tokens = max(1, MAX_BATCH_TOKENS // num_hypotheses)
        for chunk in iterate_chunks(enumerate(lines, first_index), LINES_PER_CHUNK):
            texts = [self.data.preprocess(line.strip(), "source") for _, line in chunk]
            ids = self.tokenizers.source.encode(texts)
            self._check_lengths([index for index, _ in chunk], ids)
            predictions: dict[int, TranslationPrediction] = {}
            for batch in group_by_length([len(line_ids) + 1 for line_ids in ids], max_tokens):
                streaming = None if listener is None else StreamingBatch(listener, [chunk[i][0] for i in batch])
                hypotheses = self._decode_batch([ids[i] for i in batch], options, generator, streaming)
                attentions: Sequence[Sequence[Tensor | None]]
                if with_attention and self.has_attention:
                    attentions = self._compute_n_best_attention([ids[i] for i in batch], hypotheses)
                else:
                    attentions = [[None] * len(n_best) for n_best in hypotheses]
                for i, n_best, weights in zip(batch, hypotheses, attentions, strict=True):
                    predictions[i] = self._build_prediction(*chunk[i], texts[i], n_best, weights)
            yield from (predictions[i] for i in range(len(chunk)))

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text, including EOS. Raise if it is too long."""
        ids = self.tokenizers.source.encode([self.data.preprocess(text.strip(), "source")])
        self._check_lengths([0], ids)
        return len(ids[0]) + 1

    def ids_to_text(self, target_ids: Sequence[int]) -> str:
        """The text of a translation, or of a part of it."""
        return self.data.postprocess(self.tokenizers.target.decode(target_ids))

    def _check_lengths(self, line_indices: list[int], source_ids: list[list[int]]) -> None:
        max_tokens = self.max_source_tokens
        for index, ids in zip(line_indices, source_ids, strict=True):
            if max_tokens is not None and len(ids) + 1 > max_tokens:
                raise InputError(
                    f"line {index + 1} has {len(ids)} tokens, and this model, which "
                    f"{self.length_limit_reason}, takes {max_tokens - 1} at most; split the line into sentences"
                )

    def _max_target_tokens(self, num_source_tokens: int) -> int:
        """The maximum length of a translation."""
        default = decoding.default_max_length(num_source_tokens)
        return default if self.max_source_tokens is None else min(default, self.max_source_tokens - 1)

    @torch.inference_mode()
    def _decode_batch(
        self,
        source_ids: list[list[int]],
        options: TranslationOptions,
        generator: torch.Generator,
        streaming: StreamingBatch | None,
    ) -> list[list[Hypothesis]]:
        source = Tokens.pad([[*ids, EOS] for ids in source_ids]).to(self.device)
        model = self._decoder
        if streaming is not None:  # the model is not used for empty lines
            indices = [index for index, ids in zip(streaming.line_indices, source_ids, strict=True) if ids]
            model = decoding.StreamingDecoder(model, streaming.listener, indices)
        return generate(
            model,
            source,
            options,
            beam_size=self.decode_config.beam_size,
            length_penalty=self.decode_config.length_penalty,
            max_length=self._max_target_tokens,
            generator=generator,
            coverage=self._make_coverage_scorer(source_ids) if self.decode_config.coverage_penalty else None,
        )

    def _make_coverage_scorer(self, source_ids: list[list[int]]) -> decoding.CoverageScorer:
        def score(sentences: Sequence[int], target_ids: Sequence[tuple[int, ...]]) -> Tensor:
            sources = [source_ids[n] for n in sentences]
            weights = self._compute_layer_weights(sources, target_ids)
            lengths = torch.tensor([len(ids) + 1 for ids in target_ids], device=weights.device)
            is_valid = torch.arange(weights.shape[1], device=weights.device) < lengths[:, None]
            return decoding.coverage_penalty(
                weights * is_valid[:, :, None], [len(ids) + 1 for ids in sources], self.decode_config.coverage_penalty
            )

        return score

    def _build_prediction(
        self, index: int, line: str, text: str, hypotheses: list[Hypothesis], attentions: Sequence[Tensor | None]
    ) -> TranslationPrediction:
        best, *others = (
            self._build_hypothesis_prediction(index, line, text, hypothesis, weights)
            for hypothesis, weights in zip(hypotheses, attentions, strict=True)
        )
        return replace(best, alternatives=tuple(others))

    def _build_hypothesis_prediction(
        self, index: int, line: str, text: str, hypothesis: Hypothesis, attention: Tensor | None
    ) -> TranslationPrediction:
        target = self.tokenizers.target.decode(hypothesis.ids)
        weights = alignment = None
        if attention is not None:
            rows = self.tokenizers.target.word_ids_from_ids(hypothesis.ids)
            columns = self.tokenizers.source.word_ids_from_text(text)
            weights = merge_to_words(attention, rows, columns)
            alignment = sorted(word_alignment.argmax_links(weights))
        return TranslationPrediction(
            index,
            line,
            self.data.postprocess(target),
            source_words=text.split(),
            target_words=target.split(),
            score=hypothesis.score,
            finished=hypothesis.finished,
            alignment=alignment,
            attention=weights,
        )

    # ------------------------------------------------------------------------------------------------- attention

    @property
    def has_attention(self) -> bool:
        """Whether the model has attention between source and target."""
        return getattr(self.run.recipe.model, "attention", True) is not None

    def build_batch(self, pairs: Sequence[TranslationExample]) -> Seq2SeqBatch:
        """Encode pairs of texts as a padded batch."""
        sources = self.tokenizers.source.encode([self.data.preprocess(pair.source, "source") for pair in pairs])
        targets = self.tokenizers.target.encode([self.data.preprocess(pair.target, "target") for pair in pairs])
        return Seq2SeqBatch.from_sequences(sources, targets).to(self.device)

    def compute_attention_maps(self, pairs: Sequence[TranslationExample]) -> tuple[list[LayerAttention], Seq2SeqBatch]:
        """All attention maps of the model for these pairs, and their batch.

        If all maps together would be too large, only the first pairs are used.
        """
        batch = self.build_batch(pairs)
        first = next(
            split_by_map_size([[0] * n for n in batch.source.lengths], [[0] * n for n in batch.target.lengths])
        )
        if first.stop < len(pairs):
            batch = self.build_batch(pairs[first])
        with torch.inference_mode():
            return self.model.compute_attention_maps(batch), batch

    def _compute_n_best_attention(
        self, source_ids: list[list[int]], hypotheses: list[list[Hypothesis]]
    ) -> list[list[Tensor]]:
        """The attention maps ``(Q, K)`` of all hypotheses of each source."""
        sources = [ids for ids, n_best in zip(source_ids, hypotheses, strict=True) for _ in n_best]
        targets = [hypothesis.ids for n_best in hypotheses for hypothesis in n_best]
        maps = iter(self._compute_attention(sources, targets))
        return [[next(maps) for _ in n_best] for n_best in hypotheses]

    def _compute_attention(
        self, source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The attention map ``(Q, K)`` of each pair, without EOS."""
        shift = int(self.decode_config.alignment_shift or False)
        maps: list[Tensor] = []
        for part in split_by_map_size(source_ids, target_ids):
            weights = self._compute_layer_weights(source_ids[part], target_ids[part])
            maps += (
                x[shift : shift + len(target), : len(source)].cpu()
                for x, source, target in zip(weights, source_ids[part], target_ids[part], strict=True)
            )
        return maps

    @torch.inference_mode()
    def _compute_layer_weights(
        self, source_ids: Sequence[Sequence[int]], target_ids: Sequence[Sequence[int]]
    ) -> Tensor:
        """The weights of the alignment layer, averaged over heads: ``(B, Q, K)``, with EOS and padding."""
        batch = Seq2SeqBatch.from_sequences(source_ids, target_ids).to(self.device)
        maps = self.model.compute_attention_maps(batch)
        if not maps:
            self.check_has_attention()
        layer = self.decode_config.alignment_layer
        if layer is None:
            layer = max(0, len(maps) - 2)
        if not -len(maps) <= layer < len(maps):
            raise InputError(f"decode.alignment_layer is {layer}, and the model has {len(maps)} layers, counted from 0")
        weights: Tensor = maps[layer].weights.float().mean(1)
        return weights

    def draw_attention(self, prediction: TranslationPrediction, path: Path, title: str = "") -> Path:
        """Draw the attention map of a translation."""
        from jumok.look.figures.plots import draw_heat_map

        self.check_has_attention()
        if prediction.attention is None:
            raise InputError("this translation has no attention map: translate it with with_attention=True")
        return draw_heat_map(prediction.attention, prediction.target_words, prediction.source_words, path, title=title)

    def build_viewer_data(
        self,
        text: str,
        target: str | None = None,
        *,
        options: TranslationOptions | None = None,
        ablations: Ablations | None = None,
    ) -> list[ViewerData]:
        """Capture all attention for ``target``, or for the model's own translation, for the viewer.

        With ``ablations``, capture it a second time without these heads or edges. Both captures show the
        log-probability of the target.
        """
        from jumok.look.capture.watch import watch
        from jumok.look.viewer.comparison import compare_with_ablation
        from jumok.look.viewer.viewer_data import ViewerData

        self.check_has_attention()
        if target is None:
            target = self.translate(text, options, with_attention=False).translation
        batch = self.build_batch([TranslationExample(text, target, "the text")])
        words = self.tokenizers.target.ids_to_tokens(batch.labels[0].tolist())

        def capture() -> ViewerData:
            with watch(self.model, self.tokenizers) as captures:
                loss = self.model.loss(batch)
            label = f"log-probability {-loss.total.item():.2f}"
            data = ViewerData.from_captures(captures, title=f"{text}  →  {target}", label=label)
            return data.with_layers([label_rows(layer) for layer in data.layers])

        def label_rows(layer: ViewerLayer) -> ViewerLayer:
            # In cross-attention, a row is labelled by the token that it predicts, not by the one it reads.
            if layer.kind == "cross":
                return replace(layer, row_labels=words)
            is_decoder = layer.kind == "causal self" and layer.shape[0] == len(words)
            return replace(layer, row_outputs=words) if is_decoder else layer

        with torch.inference_mode():
            return compare_with_ablation(self.model, ablations, capture)

    # ---------------------------------------------------------------------------------------------------- scores

    def load_split(self, name: SplitName) -> TranslationSplit:
        return self.data.load_split(name)

    def score_split(
        self,
        split: TranslationSplit,
        options: TranslationOptions,
        *,
        detailed: bool = False,
        scored_like: Evaluation | None = None,
    ) -> Evaluation:
        metric = None if scored_like is None else scored_like.scoring
        return translate_metrics.evaluate_translations(self, split, options, detailed=detailed, metric=metric)

    def validate(self, split: TranslationSplit) -> ValidationReport:
        """BLEU of greedy search, perplexity, and the health of the attention."""
        pairs = split.examples
        predictions = list(self.predict([pair.source for pair in pairs], TranslationOptions(beam_size=1)))
        bleu = translate_metrics.build_bleu(self.run).score(
            [prediction.translation for prediction in predictions], [pair.target for pair in pairs]
        )
        metrics = {"bleu": bleu.value, "perplexity": translate_metrics.compute_perplexity(self, pairs)}
        maps, batch = self.compute_attention_maps(pairs[:NUM_HEALTH_EXAMPLES])
        weights = [layer.weights for layer in maps]
        metrics |= compute_attention_health(weights, batch.target.lengths, batch.source.lengths)
        samples = [
            line
            for pair, prediction in itertools.islice(zip(pairs, predictions, strict=True), NUM_SAMPLES)
            for line in (
                f"  source      {pair.source}",
                f"  prediction  {prediction.translation}",
                f"  target      {pair.target}",
            )
        ]
        return ValidationReport(
            metrics, select_by="bleu", tie_breaker="perplexity", chance_level=CHANCE_BLEU, samples=samples
        )

    def export(self, format_name: str, folder: Path) -> None:
        """Write the model as a Marian folder of Hugging Face (``hf``)."""
        if format_name != "hf":
            raise InputError(f"--format {format_name}: a translation run can be exported to hf")
        from jumok.export.marian import export_marian

        target = None if self.tokenizers.is_shared else self.tokenizers.target.backend
        export_marian(self.model, folder, tokenizer=self.tokenizers.source.backend, target_tokenizer=target)


def _wrap_cuda_graphs(model: Any) -> Any:
    """The model, or for a Transformer on a GPU a decoder that runs its steps as CUDA graphs."""
    on_gpu = next(iter(model.parameters())).is_cuda
    return CudaGraphDecoder(model) if on_gpu and isinstance(model, Transformer) else model


def split_by_map_size(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Divide pairs into slices whose attention maps have a bounded size."""
    start = max_source = max_target = 0
    for end, (source, target) in enumerate(zip(sources, targets, strict=True)):
        max_source, max_target = max(max_source, len(source) + 1), max(max_target, len(target) + 1)
        if end > start and (end + 1 - start) * max_source * max_target > MAX_MAP_WEIGHTS:
            yield slice(start, end)
            start, max_source, max_target = end, len(source) + 1, len(target) + 1
    if start < len(sources):
        yield slice(start, len(sources))
