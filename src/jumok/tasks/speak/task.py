"""Speech synthesis: from a text to speech, in a style of choice.

::

    data       recordings with their texts (see ``jumok.data.readers.speech``), or built-in voices
    audio      spectrograms of recordings, and waveforms of spectrograms
    text       the symbols of a text: characters, and Hangul as its letters
    model      ``tacotron``, with or without style tokens

The spectrograms of recordings are cached on disk, for all runs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from jumok.data.audio import AudioProcessor
from jumok.data.batching.speech import SpeechBatcher
from jumok.data.caches.spectrograms import SpectrogramCache
from jumok.data.readers import speech
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.readers.speech import AudioFile, BuiltinUtterance, SpeechExample
from jumok.data.tokenizers.speech_symbols import SpeechSymbols
from jumok.errors import InputError
from jumok.files import atomic_write, get_cache_folder, write_json
from jumok.models.tacotron import Tacotron
from jumok.run import Run
from jumok.tasks.base import DatasetSplit, FingerprintedDataset, PredictionWriter, format_model_size
from jumok.tasks.batch_layout import resolve_batch_layout
from jumok.tasks.config import DataSource
from jumok.tasks.speak.config import BUILTIN_DATASET, SpeechRecipe
from jumok.tasks.speak.predictor import EncodedUtterance, SpeechOptions, SpeechPredictor
from jumok.tasks.speak.wav_writer import WavWriter
from jumok.tasks.supervised import SupervisedTask
from jumok.training import DistributedRanks

if TYPE_CHECKING:
    from jumok.tasks.speak.forced_alignment import FrameSymbols

BUILTIN_SEED = 1
BUILTIN_SAMPLE_RATES = (8000, 16000)
MAX_REPEATED_TEXTS = 50  # data with at most this many texts has many recordings of each


class SpeechTask(SupervisedTask[SpeechExample, SpeechPredictor]):
    """Speech synthesis."""

    description = "speak a text"
    options_type = SpeechOptions
    example_type = SpeechExample
    writes_files = True
    recipe: SpeechRecipe

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.audio = AudioProcessor(self.recipe.audio)

    @property
    def input_example(self) -> str:
        return "forty two" if self.recipe.data.train == BUILTIN_DATASET else "…"

    @property
    def dataset_message(self) -> str:
        aligning = " and aligning their symbols" if self.recipe.model.alignment_loss else ""
        return f"reading the recordings{aligning}"

    # Data.

    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[SpeechExample | InvalidExample]:
        data, sample_rate = self.recipe.data, self.recipe.audio.sample_rate
        if data_source == BUILTIN_DATASET:
            if sample_rate not in BUILTIN_SAMPLE_RATES:
                sample_rate = BUILTIN_SAMPLE_RATES[-1]
            return speech.make_builtin_examples(BUILTIN_SEED, data.builtin_size, sample_rate)
        examples = speech.read_speech_examples(
            data_source, split=split_name, columns=data.columns, audio_path=data.recordings
        )
        return self.log_skipped(map(_make_path_absolute, examples))

    def get_split_key(self, example: SpeechExample) -> str:
        """Of many texts, some are held out; of a few texts, some of their recordings.

        A built-in text is held out in one style, and trained in the others.
        """
        if isinstance(example.audio, BuiltinUtterance):
            return f"{example.text} {example.emotion}"
        return example.text if self._has_many_texts else example.audio.name

    @functools.cached_property
    def _has_many_texts(self) -> bool:
        return len({example.text for example in self.all_examples}) > MAX_REPEATED_TEXTS

    def collect_labels(self, examples: Sequence[SpeechExample]) -> list[str]:
        for name in self.recipe.data.style_reference:
            for example in examples:
                if not getattr(example, name):
                    raise InputError(
                        f"data.style_reference: {example.location} has no {name}; set data.{name}_column, or leave "
                        "it out, and each recording is trained with its own style"
                    )
        return []

    def get_style_group(self, example: SpeechExample) -> str:
        """Recordings of the same group are trained with each other's styles."""
        return "\n".join(getattr(example, name) for name in self.recipe.data.style_reference)

    @functools.cached_property
    def feature_cache(self) -> SpectrogramCache:
        """The cache of spectrograms."""
        folder = Path(self.recipe.data.cache_folder or get_cache_folder())
        return SpectrogramCache.open(folder / "sounds", self.audio)

    # Training.

    def write_artifacts(self, train_split: DatasetSplit[SpeechExample]) -> None:
        texts = (example.text for example in train_split.examples)
        SpeechSymbols.from_texts(texts, self.recipe.text.number_language).save(self.run.folder)

    def build_model(self) -> tuple[Tacotron, SpeechSymbols]:
        symbols = SpeechSymbols.load(self.run.folder)
        try:
            return Tacotron(self.recipe.model, symbols.vocab_size), symbols
        except ValueError as error:
            raise InputError(f"model: {error}") from None

    def build_predictor(self, model: Any, tokenizer: SpeechSymbols) -> SpeechPredictor:
        return SpeechPredictor(self, model, tokenizer)

    def build_batcher(self, encoded: Sequence[EncodedUtterance], model: Any, ranks: DistributedRanks) -> SpeechBatcher:
        if ranks.is_main and not self.run.has_checkpoint:
            self._write_size_limits(encoded)
        fixed_shapes = resolve_batch_layout(self.run, ranks).fixed_shapes
        recipe = self.recipe
        return self.build_utterances(
            encoded,
            recipe.train.batch_tokens,
            recipe.train.seed,
            fixed_shapes=fixed_shapes,
            style_groups=[x.style_group for x in encoded] if recipe.data.style_reference else None,
            frame_symbols=self._load_forced_alignments(encoded, ranks) if recipe.model.alignment_loss else None,
        )

    def build_utterances(
        self,
        encoded: Sequence[EncodedUtterance],
        batch_frames: int,
        seed: int,
        *,
        fixed_shapes: bool = False,
        style_groups: Sequence[str] | None = None,
        frame_symbols: Sequence[FrameSymbols] | None = None,
    ) -> SpeechBatcher:
        """Build batches of up to ``batch_frames`` frames."""
        return SpeechBatcher(
            [utterance.symbol_ids for utterance in encoded],
            [self.feature_cache[utterance.recording] for utterance in encoded],
            max_frames=batch_frames,
            seed=seed,
            n_mels=self.recipe.audio.n_mels,
            fixed_shapes=fixed_shapes,
            audio_names=[utterance.recording.location for utterance in encoded],
            style_groups=style_groups,
            frame_symbols=frame_symbols,
        )

    def _load_forced_alignments(
        self, encoded: Sequence[EncodedUtterance], ranks: DistributedRanks
    ) -> list[FrameSymbols]:
        """The symbol of each frame. The main process computes them when a run starts, and stores them."""
        path, n_mels = self.run.folder / "data" / "forced_alignments.npy", self.recipe.audio.n_mels
        if ranks.is_main and not (self.run.has_checkpoint and path.is_file()):
            from jumok.tasks.speak.forced_alignment import align_recordings

            alignments = align_recordings(
                [utterance.symbol_ids for utterance in encoded],
                [self.feature_cache[utterance.recording][:, :n_mels] for utterance in encoded],
                seed=self.recipe.train.seed,
                device=ranks.device,
            )
            with atomic_write(path) as part, part.open("wb") as file:
                np.save(file, np.concatenate(alignments).astype(np.int32))
        ranks.barrier()
        ends = np.cumsum([self.feature_cache.num_frames(utterance.recording) for utterance in encoded])
        try:
            symbols = np.load(path).astype(np.int64)
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path}, which training needs, cannot be read: {error}") from None
        if len(symbols) != ends[-1]:
            raise InputError(
                f"the data has changed since the training of {self.run.folder} started: it had {len(symbols):,} "
                f"frames, and has {ends[-1]:,}; restore it, or start a new run in another folder with --out"
            )
        return np.split(symbols, ends[:-1])

    def _write_size_limits(self, encoded: Sequence[EncodedUtterance]) -> None:
        """Write the sizes of texts and recordings. Synthesis that takes much longer is cut off."""
        symbols = np.array([len(utterance.symbol_ids) for utterance in encoded])
        frames = np.array([self.feature_cache.num_frames(utterance.recording) for utterance in encoded])
        write_json(
            self.run.folder / "sizes.json",
            {
                "max_symbols": int(symbols.max()),
                "max_frames": int(frames.max()),
                "max_frames_per_symbol": float((frames / symbols).max()),
            },
        )

    def describe_model(self, model: nn.Module, tokenizer: SpeechSymbols, dataset: FingerprintedDataset) -> str:
        style = self.recipe.model.style
        tokens = "no style tokens" if style is None else f"{style.num_tokens} style tokens"
        return (
            f"{self.recipe.model.type}: {format_model_size(model)}, {tokens}, {tokenizer.vocab_size} symbols, "
            f"{len(dataset):,} recordings"
        )

    # Outputs.

    @staticmethod
    def open_writer(output_path: Path | None, *, overwrite: bool = False) -> PredictionWriter:
        return WavWriter(output_path, overwrite=overwrite)


def _make_path_absolute(example: SpeechExample | InvalidExample) -> SpeechExample | InvalidExample:
    """The path is made absolute, because the run may be evaluated in another folder."""
    if isinstance(example, InvalidExample) or not isinstance(example.audio, AudioFile):
        return example
    return replace(example, audio=replace(example.audio, path=example.audio.path.absolute()))


def build_task(run: Run) -> SpeechTask:
    """Build the task of a run."""
    return SpeechTask(run)
