"""Translation with CTranslate2: int8 on a CPU, float16 on a GPU.

Only the search is different. Pre- and postprocessing and length limits are those of the PyTorch predictor, and the
hypotheses of a beam are ranked by our score, so CTranslate2 returns all of them. Attention comes from the PyTorch
model, which is loaded when it is first needed.

A greedy search reports its tokens while it runs, and a sentence can be cancelled. For beam search, CTranslate2
reports nothing before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jumok import decoding
from jumok.batches.tokens import EOS, SPECIAL_TOKENS
from jumok.data.tokenizers.tokenizer import TokenizerPair
from jumok.decoding import Hypothesis
from jumok.decoding.constraints import EMPTY_HYPOTHESIS
from jumok.errors import InputError
from jumok.export import ctranslate2 as exchange
from jumok.inference import engines
from jumok.run import Run
from jumok.tasks import load_predictor
from jumok.tasks.translate.data import TranslationData
from jumok.tasks.translate.predictor import StreamingBatch, TranslationOptions, TranslationPredictor

NO_PENALTY = 1e-9  # with 0, CTranslate2 stops as soon as the best hypothesis is certain


def load(run: Run, device: str = "auto", compute_type: str = "auto") -> CTranslate2TranslationPredictor:
    """Load the translation model of a run.

    ``compute_type`` is the type of the matrix products, as CTranslate2 names it. ``auto`` means int8 on a CPU, and
    float16 on a GPU.
    """
    exchange.check_supported(run)
    exchange.import_ctranslate2()

    def build_files(folder: Path) -> None:
        predictor: Any = load_predictor(run, "cpu")
        exchange.write_model(predictor.model, predictor.tokenizers, folder)

    folder = engines.get_engine_files(run, "ctranslate2", build_files)
    return CTranslate2TranslationPredictor(run, folder, device, compute_type, digest=folder.name)


class CTranslate2TranslationPredictor(TranslationPredictor):
    """A translation model that CTranslate2 runs, from a folder that :mod:`jumok.export.ctranslate2` wrote."""

    length_limit_reason = "is run by CTranslate2 (with --engine torch, there is no limit)"

    def __init__(
        self, run: Run, folder: Path, device: str = "auto", compute_type: str = "auto", digest: str | None = None
    ) -> None:
        run_digest = digest or engines.compute_run_digest(run)
        self.engine = _open_translator(folder, device, compute_type)
        super().__init__(
            run,
            TokenizerPair.load(run.folder),
            TranslationData(run.recipe.data, run.folder),
            lambda: engines.load_torch_predictor(run, run_digest, device).model,
            decoder=self.engine,
        )
        source, target = self.tokenizers.source, self.tokenizers.target
        self._source_pieces = source.ids_to_tokens(range(source.vocab_size))
        self._target_ids = {piece: index for index, piece in enumerate(target.ids_to_tokens(range(target.vocab_size)))}

    @property
    def max_source_tokens(self) -> int:
        """The maximum length of a text, including EOS."""
        return exchange.MAX_POSITIONS

    @property
    def is_reentrant(self) -> bool:
        """CTranslate2 cannot start another search in the callback of a search."""
        return False

    def _decode_batch(
        self,
        source_ids: list[list[int]],
        options: TranslationOptions,
        generator: torch.Generator,
        streaming: StreamingBatch | None,
    ) -> list[list[Hypothesis]]:
        if options.sample:
            raise InputError("--sample: CTranslate2 cannot sample with a seed; use --engine torch")
        hypotheses = [[EMPTY_HYPOTHESIS] for _ in source_ids]
        rows = [row for row, ids in enumerate(source_ids) if ids]  # the model is not used for empty lines
        if not rows:
            return hypotheses
        size = max(self.decode_config.beam_size if options.beam_size is None else options.beam_size, options.n_best)
        penalty = self.decode_config.length_penalty if size > 1 else 0.0
        coverage = self._make_coverage_scorer(source_ids) if size > 1 and self.decode_config.coverage_penalty else None
        # All hypotheses are needed to rank them by our score, unless that is the log-probability.
        num_hypotheses = size if penalty or coverage is not None else options.n_best
        exponent = _match_length_penalty(penalty, source_ids) or (NO_PENALTY if num_hypotheses > 1 else 0.0)
        sources = [[self._source_pieces[i] for i in source_ids[row]] for row in rows]
        limits = [self._max_target_tokens(len(source_ids[row]) + 1) for row in rows]
        results = self.engine.translate_batch(
            sources,
            beam_size=size,
            num_hypotheses=num_hypotheses,
            length_penalty=exponent,
            max_decoding_length=max(limits) + 1,  # EOS counts there
            min_decoding_length=0,
            max_input_length=0,
            return_end_token=True,
            return_scores=True,
            callback=None if streaming is None or size > 1 else _CTranslate2Callback(streaming, rows, limits),
        )
        for row, source, limit, result in zip(rows, sources, limits, results, strict=True):
            finished: list[Hypothesis] = []
            truncated: list[tuple[int, ...]] = []
            for tokens, score in zip(result.hypotheses, result.scores, strict=True):
                ids = tuple(self._target_ids[token] for token in tokens)
                if ids[-1:] == (EOS,) and len(ids) <= limit + 1:
                    finished.append(_build_hypothesis(ids, score * len(ids) ** exponent, penalty))
                else:
                    truncated.append(ids[:limit])
            if coverage is not None and finished:
                terms = coverage([row] * len(finished), [hypothesis.ids for hypothesis in finished]).tolist()
                finished = [replace(x, score=x.score + term) for x, term in zip(finished, terms, strict=True)]
            best = sorted(finished, key=lambda hypothesis: -hypothesis.score)
            if len(best) < options.n_best:  # truncated hypotheses come last
                best += self._score_truncated(source, list(dict.fromkeys(truncated)), penalty)
            hypotheses[row] = best[: options.n_best]
        return hypotheses

    def _score_truncated(
        self, source_pieces: list[str], truncated: Sequence[tuple[int, ...]], length_penalty: float
    ) -> list[Hypothesis]:
        """Score hypotheses that reached the length limit, best first."""
        pieces = [self.tokenizers.target.ids_to_tokens(ids) for ids in truncated]
        results = (
            self.engine.score_batch([source_pieces] * len(truncated), pieces, max_input_length=0) if truncated else []
        )
        scored = (
            _build_hypothesis(ids, sum(result.log_probs[: len(ids)]), length_penalty)
            for ids, result in zip(truncated, results, strict=True)
        )
        return sorted(scored, key=lambda hypothesis: -hypothesis.score)


def _match_length_penalty(length_penalty: float, source_ids: list[list[int]]) -> float:
    """The exponent with which length^exponent grows like our ((5 + length) / 6)^penalty at these lengths.

    CTranslate2 uses it to drop hypotheses if more of them end at a step than the beam has room for.
    """
    length = sum(len(ids) + 1 for ids in source_ids) / len(source_ids)
    return length_penalty * length / (5 + length)


def _build_hypothesis(token_ids: tuple[int, ...], logprob: float, length_penalty: float) -> Hypothesis:
    """A hypothesis of these ids, which end with EOS if it is finished, scored like :mod:`jumok.decoding.beam`."""
    score = logprob / ((5 + len(token_ids)) / 6) ** length_penalty
    if token_ids[-1:] == (EOS,):
        return Hypothesis(token_ids[:-1], score, logprob, finished=True)
    return Hypothesis(token_ids, score, logprob, finished=False)


class _CTranslate2Callback:
    """Reports the tokens of a greedy search; returning true ends a sentence."""

    def __init__(self, streaming: StreamingBatch, rows: list[int], max_tokens: list[int]) -> None:
        self._listener: decoding.StreamListener = streaming.listener
        self._line_indices, self._max_tokens = [streaming.line_indices[row] for row in rows], max_tokens
        self._token_ids: list[list[int]] = [[] for _ in rows]

    def __call__(self, step: Any) -> bool:
        """CTranslate2 calls it for every token of every sentence."""
        sentence, ids = self._line_indices[step.batch_id], self._token_ids[step.batch_id]
        if step.token_id != EOS and len(ids) < self._max_tokens[step.batch_id]:
            ids.append(step.token_id)
            if self._listener.is_streaming(sentence):
                self._listener.on_tokens(sentence, ids)
        return step.step >= self._max_tokens[step.batch_id] or self._listener.is_cancelled(sentence)


def _open_translator(folder: Path, device: str, compute_type: str) -> Any:
    library = exchange.import_ctranslate2()
    if device == "auto":
        device = "cuda" if library.get_cuda_device_count() else "cpu"
    kind, _, number = device.partition(":")
    try:
        if compute_type == "auto":
            preferred = ("float16",) if kind == "cuda" else ("int8",)
            supported = library.get_supported_compute_types(kind, int(number or 0))
            compute_type = next((name for name in preferred if name in supported), "default")
        translator = library.Translator(
            str(folder),
            kind,
            device_index=int(number or 0),
            compute_type=compute_type,
            # As many as PyTorch uses; the default is four, even with fewer cores.
            intra_threads=torch.get_num_threads(),
        )
        if kind == "cuda":  # CUDA libraries are loaded at the first computation, not at a request
            translator.translate_batch([[SPECIAL_TOKENS[EOS]]], max_decoding_length=1)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"CTranslate2 cannot be used on device {device!r} with {compute_type}: {error}") from None
    return translator
