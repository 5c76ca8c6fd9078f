"""Captioning: a sentence about an image, and the part of the image that each word attends to.

::

    data            images with one or more captions each (see ``jumok.data.readers.captions``), or built-in scenes
    image_encoder   a convolutional network that makes a feature map of an image. If it is frozen, features are
                    computed once and cached on disk; otherwise it is trained with the rest
    model           generates the caption: ``captioner`` (an LSTM with soft or hard attention) or ``transformer``

Images are resized to a square, so that the feature map covers the whole image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jumok.data.batching.captions import CaptionBatcher
from jumok.data.builtin.scenes import DATA_SEED, LANGUAGES, BuiltinScene, draw_cached_scene, draw_scene
from jumok.data.caches.image_features import ImageFeatureCache
from jumok.data.image_inputs import CachedFeatureInputs, DeviceFeatureInputs, ImageInputs, PixelInputs
from jumok.data.images import ImageFile
from jumok.data.readers import captions
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.tokenizers.tokenizer import Tokenizer
from jumok.errors import InputError
from jumok.files import get_cache_folder
from jumok.models.caption_transformer import CaptionTransformer
from jumok.models.captioner import Captioner, ImageCaptioner
from jumok.models.layers.image_encoder import ImageEncoder
from jumok.run import Run
from jumok.tasks.base import DatasetSplit, FingerprintedDataset, format_model_size
from jumok.tasks.batch_layout import resolve_batch_layout
from jumok.tasks.caption import inputs
from jumok.tasks.caption.config import CaptionRecipe
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPredictor, EncodedImage
from jumok.tasks.config import DataSource
from jumok.tasks.jsonl_input import JsonObject
from jumok.tasks.supervised import SupervisedTask
from jumok.training import DistributedRanks, load_weights, save_weights

MODEL_TYPES: dict[str, Any] = {"captioner": Captioner, "transformer": CaptionTransformer}
MAX_GPU_MEMORY_FRACTION = 0.5  # of the free GPU memory, for the features of all images


class CaptionTask(SupervisedTask[CaptionExample, CaptionPredictor]):
    """Captioning of images."""

    description = "describe an image, or a folder of images"
    options_type = CaptionOptions
    example_type = CaptionExample
    encodes_with_model = True
    reads_lines = False
    recipe: CaptionRecipe

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._feature_cache: ImageFeatureCache | None = None

    @property
    def input_example(self) -> str:
        is_builtin = self.recipe.data.train in tuple(LANGUAGES)  # it may be a list, which has no hash
        return "scenes:4" if is_builtin else "photo.jpg"

    @property
    def is_encoder_frozen(self) -> bool:
        return self.recipe.image_encoder.finetune_from_level is None

    # Data.

    def read_examples(self, data_source: DataSource, split_name: str) -> Iterator[CaptionExample | InvalidExample]:
        data = self.recipe.data
        if isinstance(data_source, str) and data_source in LANGUAGES:
            return make_builtin_examples(data_source, data.builtin_size)
        examples = captions.read_caption_examples(
            data_source, split=split_name, columns=data.columns, images=data.images
        )
        return self.log_skipped(usable for example in examples for usable in self._drop_unusable_captions(example))

    def _drop_unusable_captions(
        self, example: CaptionExample | InvalidExample
    ) -> Iterator[CaptionExample | InvalidExample]:
        """The example without captions that are too long or have no words, and an ``InvalidExample`` for each."""
        if isinstance(example, InvalidExample):
            yield example
            return
        usable, max_words = [], self.recipe.data.max_words
        for caption in example.captions:
            count = len(self.recipe.tokenizer.preprocess(caption).split())
            location = f"{example.location} {example.image.name}"
            if count > max_words:
                message = f"{count} words, and data.max_words is {max_words}; it is {caption[:60]!r}"
                yield InvalidExample(location, "a caption of too many words", message)
            elif count:
                usable.append(caption)
            else:
                yield InvalidExample(location, "a caption without words", caption)
        if usable and isinstance(example.image, ImageFile):
            # The path is absolute, because the run may be evaluated in another folder.
            image = replace(example.image, path=example.image.path.absolute())
            yield replace(example, image=image, captions=tuple(usable))

    def get_split_key(self, example: CaptionExample) -> str:
        return example.image.name  # the same images are held out wherever the data is

    # Training.

    def write_artifacts(self, train_split: DatasetSplit[CaptionExample]) -> None:
        config = self.recipe.tokenizer
        lines = (config.preprocess(text) for example in train_split.examples for text in example.captions)
        Tokenizer.train(lines, config.tokenizer_config).save(self.run.folder / "tokenizer.json")
        weights = self.recipe.image_encoder.weights
        if weights is not None:  # from now on the run has its own copy
            save_weights(self._build_encoder(weights).net, self._encoder_weights_path)

    @property
    def _encoder_weights_path(self) -> Path:
        return self.run.folder / "encoder.safetensors"

    def _build_encoder(self, weights: str | None) -> ImageEncoder:
        config = self.recipe.image_encoder
        try:
            return ImageEncoder.from_name(
                config.backbone,
                weights,
                feature_level=config.feature_level,
                finetune_from_level=config.finetune_from_level,
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
            decoder = MODEL_TYPES[config.type](config, tokenizer.vocab_size, encoder.feature_width)
        except ValueError as error:
            raise InputError(f"model: {error}") from None
        return ImageCaptioner(encoder, decoder), tokenizer

    def build_predictor(self, model: Any, tokenizer: Tokenizer) -> CaptionPredictor:
        return CaptionPredictor(self, model, tokenizer)

    def build_batcher(
        self, encoded: Sequence[EncodedImage], model: ImageCaptioner, ranks: DistributedRanks
    ) -> CaptionBatcher:
        config = self.recipe.train
        return CaptionBatcher(
            self.build_image_inputs(encoded, model, ranks.device),
            [example.caption_ids for example in encoded],
            max_tokens=config.batch_tokens,
            seed=config.seed,
            mix_lengths=not self.is_encoder_frozen,
            fixed_shapes=resolve_batch_layout(self.run, ranks).fixed_shapes,
            image_names=[example.image.location for example in encoded],
        )

    def build_image_inputs(
        self, encoded: Sequence[EncodedImage], model: ImageCaptioner, device: torch.device
    ) -> ImageInputs:
        """The inputs of the model for these images: cached features, or pixels if the encoder is trained."""
        cache = self.get_feature_cache(model.encoder)
        rows = cache.row_indices(example.image for example in encoded)
        if not self.is_encoder_frozen:
            return PixelInputs(cache.features, rows, self.recipe.data.augmentation)
        grid = model.encoder.compute_grid(self.recipe.image_encoder.image_size)
        cached = CachedFeatureInputs(cache.features, rows, grid)
        size = len(rows) * cache.features[0].nbytes
        if device.type == "cuda" and size < MAX_GPU_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]:
            return DeviceFeatureInputs.from_cached(cached)
        return cached

    def get_feature_cache(self, encoder: ImageEncoder) -> ImageFeatureCache:
        """The cache of features, which all runs share; or of resized images, if the encoder is trained."""
        if self._feature_cache is None:  # all models of a run have the same frozen encoder
            self._feature_cache = self._open_feature_cache(encoder)
        return self._feature_cache

    def _open_feature_cache(self, encoder: ImageEncoder) -> ImageFeatureCache:
        config = self.recipe.image_encoder
        if not self.is_encoder_frozen:
            return ImageFeatureCache.open(
                self.run.folder / "data" / "images",
                encoder="squashed",
                image_size=config.image_size,
                storage_type="uint8",
            )
        return ImageFeatureCache.open(
            Path(config.cache_folder or get_cache_folder()) / "features",
            encoder=f"{config.backbone} {encoder.feature_level} squashed {_digest_weights(encoder.net)}",
            image_size=config.image_size,
        )

    def init_weights(self, model: Any, tokenizer: Tokenizer) -> list[str]:
        weights = self.recipe.image_encoder.weights
        return [] if weights is None else [f"The image encoder is initialized from {weights}"]

    def describe_model(self, model: nn.Module, tokenizer: Tokenizer, dataset: FingerprintedDataset) -> str:
        num_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        return (
            f"{self.recipe.model.type} on {self.recipe.image_encoder.backbone}: {format_model_size(model)}, of "
            f"which {num_trained / 1e6:.1f} M are trained, vocabulary of {tokenizer.vocab_size:,}, "
            f"{len(dataset):,} captions"
        )

    # Inputs.

    @staticmethod
    def read_chunks(text: str | None, *, skip_invalid: bool = False) -> AbstractContextManager[Iterator[list[str]]]:
        return inputs.read_chunks(text, skip_invalid=skip_invalid)

    @staticmethod
    def read_text(text: str) -> str:
        return text  # the name of an image

    @staticmethod
    def make_jsonl_reader(path: Path) -> Callable[[JsonObject], str]:
        return inputs.make_image_reader(path)


def make_builtin_examples(data_source: str, num_scenes: int) -> Iterator[CaptionExample]:
    """Built-in scenes with their captions."""
    language = LANGUAGES[data_source]
    for number in range(num_scenes):
        scene = draw_cached_scene(DATA_SEED, number) if language == "en" else draw_scene(DATA_SEED, number, language)
        yield CaptionExample(BuiltinScene(DATA_SEED, number), (scene.caption,), f"{data_source}:{number}", scene.boxes)


def _digest_weights(module: nn.Module) -> str:
    """Identify the weights of a module."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def build_task(run: Run) -> CaptionTask:
    """Build the task of a run."""
    return CaptionTask(run)
