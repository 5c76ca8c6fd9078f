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
from jumok.batch import EOS, SPECIAL
from jumok.data.text import Tokenizers
from jumok.decoding import Hypothesis
from jumok.decoding.rules import EMPTY
from jumok.errors import InputError
from jumok.exchange import ctranslate2 as exchange
from jumok.run import Run
from jumok.tasks import engines
from jumok.tasks.corpora import Texts
from jumok.tasks.translator import Heard, Search, Translator

__all__ = ["ByCTranslate2", "load"]

NO_PENALTY = (
    1e-9  # 0 would tell CTranslate2 to stop when the best hypothesis is sure, whatever the others are
)


def load(run: Run, device: str = "auto", compute: str = "auto") -> ByCTranslate2:
    """The translator of a run.

    ``compute`` is the type of the products, as CTranslate2 names it; auto: int8, and on a GPU float16.
    """
    exchange.check(run)
    exchange.library()

    def make(folder: Path) -> None:
        from jumok.tasks import translate

        source = translate.load(run, "cpu")
        exchange.write(source.model, source.tokenizers, folder)

    digest = engines.run_digest(run)
    return ByCTranslate2(run, engines.kept(run, "ctranslate2", make), device, compute, digest)


class ByCTranslate2(Translator):
    """A translator that has CTranslate2 search, in a folder that :mod:`jumok.exchange.ctranslate2` wrote."""

    why_no_longer = "is run by CTranslate2 (by --engine torch, it knows no limit)"

    def __init__(
        self, run: Run, folder: Path, device: str = "auto", compute: str = "auto", digest: str | None = None
    ) -> None:
        self.run, self.tokenizers = run, Tokenizers.load(run.folder)
        self.texts, self.decode = Texts(run.recipe.data, run.folder), run.recipe.decode
        self.engine = _opened(folder, device, compute)
        self._torch_device, self._digest = device, digest or engines.run_digest(run)
        source, target = self.tokenizers.source, self.tokenizers.target
        self._pieces = source.pieces(range(source.size))
        self._ids = {piece: number for number, piece in enumerate(target.pieces(range(target.size)))}

    @functools.cached_property
    def model(self) -> Any:
        """The same in PyTorch, for maps and links."""
        return engines.load_torch(self.run, self._digest, self._torch_device).model

    @property
    def longest(self) -> int:
        """How many tokens a text may have, EOS included."""
        return exchange.POSITIONS

    @property
    def is_reentrant(self) -> bool:
        """CTranslate2 calls back from a search, and cannot begin another one there."""
        return False

    def _search(
        self, ids: list[list[int]], search: Search, generator: torch.Generator, heard: Heard | None
    ) -> list[list[Hypothesis]]:
        if search.sample:
            raise InputError(
                "--sample: CTranslate2 draws without a seed that could be given again; use --engine torch"
            )
        found = [[EMPTY] for _ in ids]
        asked = [row for row, one in enumerate(ids) if one]  # an empty line is answered without the model
        if not asked:
            return found
        size = max(self.decode.beam if search.beam is None else search.beam, search.n_best)
        penalty = self.decode.length_penalty if size > 1 else 0.0
        coverage = self._coverage(ids) if size > 1 and self.decode.coverage else None
        # All that was found is needed to rank it by our score, unless that is the log-probability.
        wanted = size if penalty or coverage is not None else search.n_best
        theirs = _like(penalty, ids) or (NO_PENALTY if wanted > 1 else 0.0)
        sources = [[self._pieces[i] for i in ids[row]] for row in asked]
        limits = [self._limit(len(ids[row]) + 1) for row in asked]
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
            callback=None if heard is None or size > 1 else _Listening(heard, asked, limits),
        )
        for row, source, limit, result in zip(asked, sources, limits, results, strict=True):
            finished: list[Hypothesis] = []
            cut: list[tuple[int, ...]] = []
            for tokens, score in zip(result.hypotheses, result.scores, strict=True):
                said = tuple(self._ids[token] for token in tokens)
                if said[-1:] == (EOS,) and len(said) <= limit + 1:
                    finished.append(_hypothesis(said, score * len(said) ** theirs, penalty))
                else:
                    cut.append(said[:limit])
            if coverage is not None and finished:
                terms = coverage([row] * len(finished), [one.ids for one in finished]).tolist()
                finished = [replace(x, score=x.score + term) for x, term in zip(finished, terms, strict=True)]
            best = sorted(finished, key=lambda one: -one.score)
            if len(best) < search.n_best:  # those that were cut off stand behind all others
                best += self._scored(source, list(dict.fromkeys(cut)), penalty)
            found[row] = best[: search.n_best]
        return found

    def _scored(self, source: list[str], cut: Sequence[tuple[int, ...]], penalty: float) -> list[Hypothesis]:
        """Hypotheses that the length limit ended, the best first."""
        pieces = [self.tokenizers.target.pieces(one) for one in cut]
        results = self.engine.score_batch([source] * len(cut), pieces, max_input_length=0) if cut else []
        scored = (
            _hypothesis(said, sum(result.log_probs[: len(said)]), penalty)
            for said, result in zip(cut, results, strict=True)
        )
        return sorted(scored, key=lambda one: -one.score)


def _like(penalty: float, ids: list[list[int]]) -> float:
    """The exponent by which length^exponent grows as ours, ((5 + length) / 6)^penalty, does at these lengths.

    If more hypotheses end at a time than a beam has room for, CTranslate2 leaves the last of them out by it.
    """
    length = sum(len(one) + 1 for one in ids) / len(ids)
    return penalty * length / (5 + length)


def _hypothesis(said: tuple[int, ...], logprob: float, penalty: float) -> Hypothesis:
    """One that has said this, EOS included if it has come to an end; scored as :mod:`jumok.decoding.beam`."""
    score = logprob / ((5 + len(said)) / 6) ** penalty
    if said[-1:] == (EOS,):
        return Hypothesis(said[:-1], score, logprob, finished=True)
    return Hypothesis(said, score, logprob, finished=False)


class _Listening:
    """Passes on what a greedy search says, token by token; true ends a sentence."""

    def __init__(self, heard: Heard, asked: list[int], limits: list[int]) -> None:
        self._listener: decoding.Listener = heard.listener
        self._numbers, self._limits = [heard.numbers[row] for row in asked], limits
        self._said: list[list[int]] = [[] for _ in asked]

    def __call__(self, step: Any) -> bool:
        """What CTranslate2 calls for every token of every sentence."""
        sentence, said = self._numbers[step.batch_id], self._said[step.batch_id]
        if step.token_id != EOS and len(said) < self._limits[step.batch_id]:
            said.append(step.token_id)
            if self._listener.hears(sentence):
                self._listener.heard(sentence, said)
        return step.step >= self._limits[step.batch_id] or self._listener.gone(sentence)


def _opened(folder: Path, device: str, compute: str) -> Any:
    library = exchange.library()
    if device == "auto":
        device = "cuda" if library.get_cuda_device_count() else "cpu"
    kind, _, number = device.partition(":")
    try:
        if compute == "auto":
            wanted = ("float16",) if kind == "cuda" else ("int8",)
            able = library.get_supported_compute_types(kind, int(number or 0))
            compute = next((one for one in wanted if one in able), "default")
        opened = library.Translator(
            str(folder),
            kind,
            device_index=int(number or 0),
            compute_type=compute,
            # As many as PyTorch would take: its own default is four, however few cores there are.
            intra_threads=torch.get_num_threads(),
        )
        if kind == "cuda":  # it looks for CUDA's libraries when it first computes: not in somebody's request
            opened.translate_batch([[SPECIAL[EOS]]], max_decoding_length=1)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"CTranslate2 cannot be used on device {device!r} with {compute}: {error}") from None
    return opened
