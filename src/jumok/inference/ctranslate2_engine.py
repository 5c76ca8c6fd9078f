"""A translator whose searches are done by CTranslate2: int8 on a CPU, float16 on a GPU.

Only the search is another. Texts go the same way, the length limits are ours, and what a beam found is ranked
by our score, for which CTranslate2 is asked for all that it found. What it does not tell, where the model
looks, comes from the PyTorch model, which is loaded when that is first asked for.

While a greedy search goes on, it is heard what it says, and a sentence can be given up; of a beam CTranslate2
tells nothing before its end.
"""

from __future__ import annotations

import functools
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
from jumok.tasks.translate.data import TranslationData
from jumok.tasks.translate.predictor import StreamingBatch, TranslationOptions, TranslationPredictor

__all__ = ["CTranslate2TranslationPredictor", "load"]

NO_PENALTY = (
    1e-9  # 0 would tell CTranslate2 to stop when the best hypothesis is sure, whatever the others are
)


def load(run: Run, device: str = "auto", compute_type: str = "auto") -> CTranslate2TranslationPredictor:
    """The translator of a run.

    ``compute_type`` is the type of the products, as CTranslate2 names it; auto: int8, and on a GPU float16.
    """
    exchange.check_supported(run)
    exchange.import_ctranslate2()

    def make(folder: Path) -> None:
        from jumok.tasks.translate import task as translate_task

        source = translate_task.load(run, "cpu")
        exchange.write_model(source.model, source.tokenizers, folder)

    digest = engines.compute_run_digest(run)
    return CTranslate2TranslationPredictor(
        run, engines.get_engine_files(run, "ctranslate2", make), device, compute_type, digest
    )


class CTranslate2TranslationPredictor(TranslationPredictor):
    """A translator that has CTranslate2 search, in a folder that :mod:`jumok.exchange.ctranslate2` wrote."""

    length_limit_reason = "is run by CTranslate2 (by --engine torch, it knows no limit)"

    def __init__(
        self,
        run: Run,
        folder: Path,
        device: str = "auto",
        compute_type: str = "auto",
        digest: str | None = None,
    ) -> None:
        self.run, self.tokenizers = run, TokenizerPair.load(run.folder)
        self.data, self.decode_config = TranslationData(run.recipe.data, run.folder), run.recipe.decode
        self.engine = _open_translator(folder, device, compute_type)
        self._torch_device, self._digest = device, digest or engines.compute_run_digest(run)
        source, target = self.tokenizers.source, self.tokenizers.target
        self._source_pieces = source.ids_to_tokens(range(source.vocab_size))
        self._target_ids = {
            piece: number for number, piece in enumerate(target.ids_to_tokens(range(target.vocab_size)))
        }

    @functools.cached_property
    def model(self) -> Any:
        """The same in PyTorch, for maps and links."""
        return engines.load_torch_predictor(self.run, self._digest, self._torch_device).model

    @property
    def max_source_tokens(self) -> int:
        """How many tokens a text may have, EOS included."""
        return exchange.MAX_POSITIONS

    @property
    def is_reentrant(self) -> bool:
        """CTranslate2 calls back from a search, and cannot begin another one there."""
        return False

    def _decode_batch(
        self,
        source_ids: list[list[int]],
        options: TranslationOptions,
        generator: torch.Generator,
        streaming: StreamingBatch | None,
    ) -> list[list[Hypothesis]]:
        if options.sample:
            raise InputError(
                "--sample: CTranslate2 draws without a seed that could be given again; use --engine torch"
            )
        found = [[EMPTY_HYPOTHESIS] for _ in source_ids]
        asked = [
            row for row, one in enumerate(source_ids) if one
        ]  # an empty line is answered without the model
        if not asked:
            return found
        size = max(
            self.decode_config.beam_size if options.beam_size is None else options.beam_size, options.n_best
        )
        penalty = self.decode_config.length_penalty if size > 1 else 0.0
        coverage = (
            self._make_coverage_term(source_ids) if size > 1 and self.decode_config.coverage_penalty else None
        )
        # All that was found is needed to rank it by our score, unless that is the log-probability.
        wanted = size if penalty or coverage is not None else options.n_best
        theirs = _match_length_penalty(penalty, source_ids) or (NO_PENALTY if wanted > 1 else 0.0)
        sources = [[self._source_pieces[i] for i in source_ids[row]] for row in asked]
        limits = [self._max_target_tokens(len(source_ids[row]) + 1) for row in asked]
        results = self.engine.translate_batch(
            sources,
            beam_size=size,
            num_hypotheses=wanted,
            length_penalty=theirs,
            max_decoding_length=max(limits) + 1,  # EOS counts there
            min_decoding_length=0,
            max_input_length=0,
            return_end_token=True,
            return_scores=True,
            callback=None
            if streaming is None or size > 1
            else _CTranslate2Callback(streaming, asked, limits),
        )
        for row, source, limit, result in zip(asked, sources, limits, results, strict=True):
            finished: list[Hypothesis] = []
            cut: list[tuple[int, ...]] = []
            for tokens, score in zip(result.hypotheses, result.scores, strict=True):
                said = tuple(self._target_ids[token] for token in tokens)
                if said[-1:] == (EOS,) and len(said) <= limit + 1:
                    finished.append(_build_hypothesis(said, score * len(said) ** theirs, penalty))
                else:
                    cut.append(said[:limit])
            if coverage is not None and finished:
                terms = coverage([row] * len(finished), [one.ids for one in finished]).tolist()
                finished = [replace(x, score=x.score + term) for x, term in zip(finished, terms, strict=True)]
            best = sorted(finished, key=lambda one: -one.score)
            if len(best) < options.n_best:  # those that were cut off stand behind all others
                best += self._score_truncated(source, list(dict.fromkeys(cut)), penalty)
            found[row] = best[: options.n_best]
        return found

    def _score_truncated(
        self, source_pieces: list[str], truncated: Sequence[tuple[int, ...]], length_penalty: float
    ) -> list[Hypothesis]:
        """Hypotheses that the length limit ended, the best first."""
        pieces = [self.tokenizers.target.ids_to_tokens(one) for one in truncated]
        results = (
            self.engine.score_batch([source_pieces] * len(truncated), pieces, max_input_length=0)
            if truncated
            else []
        )
        scored = (
            _build_hypothesis(said, sum(result.log_probs[: len(said)]), length_penalty)
            for said, result in zip(truncated, results, strict=True)
        )
        return sorted(scored, key=lambda one: -one.score)


def _match_length_penalty(length_penalty: float, source_ids: list[list[int]]) -> float:
    """The exponent by which length^exponent grows as ours, ((5 + length) / 6)^penalty, does at these lengths.

    If more hypotheses end at a time than a beam has room for, CTranslate2 leaves the last of them out by it.
    """
    length = sum(len(one) + 1 for one in source_ids) / len(source_ids)
    return length_penalty * length / (5 + length)


def _build_hypothesis(token_ids: tuple[int, ...], logprob: float, length_penalty: float) -> Hypothesis:
    """One that has said this, EOS included if it has come to an end; scored as :mod:`jumok.decoding.beam`."""
    score = logprob / ((5 + len(token_ids)) / 6) ** length_penalty
    if token_ids[-1:] == (EOS,):
        return Hypothesis(token_ids[:-1], score, logprob, finished=True)
    return Hypothesis(token_ids, score, logprob, finished=False)


class _CTranslate2Callback:
    """Passes on what a greedy search says, token by token; true ends a sentence."""

    def __init__(self, streaming: StreamingBatch, rows: list[int], max_tokens: list[int]) -> None:
        self._listener: decoding.StreamListener = streaming.listener
        self._line_indices, self._max_tokens = [streaming.line_indices[row] for row in rows], max_tokens
        self._token_ids: list[list[int]] = [[] for _ in rows]

    def __call__(self, step: Any) -> bool:
        """What CTranslate2 calls for every token of every sentence."""
        sentence, said = self._line_indices[step.batch_id], self._token_ids[step.batch_id]
        if step.token_id != EOS and len(said) < self._max_tokens[step.batch_id]:
            said.append(step.token_id)
            if self._listener.is_streaming(sentence):
                self._listener.on_tokens(sentence, said)
        return step.step >= self._max_tokens[step.batch_id] or self._listener.is_cancelled(sentence)


def _open_translator(folder: Path, device: str, compute_type: str) -> Any:
    library = exchange.import_ctranslate2()
    if device == "auto":
        device = "cuda" if library.get_cuda_device_count() else "cpu"
    kind, _, number = device.partition(":")
    try:
        if compute_type == "auto":
            wanted = ("float16",) if kind == "cuda" else ("int8",)
            able = library.get_supported_compute_types(kind, int(number or 0))
            compute_type = next((one for one in wanted if one in able), "default")
        opened = library.Translator(
            str(folder),
            kind,
            device_index=int(number or 0),
            compute_type=compute_type,
            # As many as PyTorch would take: its own default is four, however few cores there are.
            intra_threads=torch.get_num_threads(),
        )
        if kind == "cuda":  # it looks for CUDA's libraries when it first computes: not in somebody's request
            opened.translate_batch([[SPECIAL_TOKENS[EOS]]], max_decoding_length=1)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"CTranslate2 cannot be used on device {device!r} with {compute_type}: {error}"
        ) from None
    return opened
