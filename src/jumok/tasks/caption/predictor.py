"""A trained captioner: captions of images with attention maps, and their scores."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.data.batching.captions import CaptionBatcher
from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.image_inputs import build_square_resize
from jumok.data.images import IMAGE_LIMITS, ImageFile, ImageLimits, Pixels, decode_image
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.data.tokenizers.tokenizer import Tokenizer
from jumok.decoding import Hypothesis, StreamListener
from jumok.errors import InputError
from jumok.inference.line_io import iterate_chunks
from jumok.metrics import captions
from jumok.models.captioner import ImageCaptioner
from jumok.tasks.base import DatasetSplit, Evaluation, Prediction
from jumok.tasks.caption import metrics as caption_metrics
from jumok.tasks.caption.inputs import ARCHIVE_SEPARATOR, ImageFinder
from jumok.tasks.generation import generate, merge_to_words
from jumok.tasks.options import GenerationOptions
from jumok.tasks.predictors import SupervisedPredictor, compute_mean_loss
from jumok.training import ValidationReport, compute_attention_health

if TYPE_CHECKING:
    from jumok.look.viewer.attended_image import AttendedImage
    from jumok.look.viewer.viewer_data import ViewerData
    from jumok.tasks.caption.task import CaptionTask

IMAGES_PER_BATCH = 64  # images that are encoded together
MAX_BATCH_TOKENS = 4096  # caption tokens in a batch whose loss is computed
NUM_FIGURES = 3  # images whose attention is drawn
NUM_HEALTH_EXAMPLES = 32  # images whose attention is measured at a validation
MAX_SHOWN_SIDE = 800  # pixels of an image in the viewer
ImageSource = ImageFile | BuiltinScene


@dataclass(frozen=True)
class CaptionOptions(GenerationOptions):
    """Options of captioning."""


@dataclass(frozen=True, eq=False)
class CaptionPrediction(Prediction):
    """The caption of an image; ``input`` is the name of the image."""

    caption: str = ""
    words: tuple[str, ...] = ()
    score: float = 0.0
    alternatives: tuple[CaptionPrediction, ...] = field(default=(), kw_only=True)
    attention: Tensor | None = None  # (words, rows, columns)

    @property
    def image_name(self) -> str:
        return self.input

    @property
    def is_drawable(self) -> bool:
        return bool(self.words)

    @property
    def attention_peaks(self) -> list[tuple[int, int]] | None:
        """The row and column with the highest weight, for each word."""
        if self.attention is None:
            return None
        return [divmod(i, self.attention.shape[2]) for i in self.attention.flatten(1).argmax(1).tolist()]

    def format_lines(self, *, n_best: bool) -> Iterator[str]:
        """The name of the image, a tab and the caption; in an n-best list, also the score."""
        for prediction in (self, *self.alternatives):
            score = [f"{prediction.score:.4f}"] if n_best else []
            yield "\t".join([prediction.image_name, prediction.caption, *score])

    @property
    def input_fields(self) -> dict[str, Any]:
        return {"image": self.image_name}

    def to_dict(self, *, n_best: bool = False) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "caption": self.caption,
            "score": self.score,
            "finished": self.finished,
            "words": list(self.words),
        }
        if self.attention is not None:
            fields["grid_size"] = list(self.attention.shape[1:])
            fields["attention_peaks"] = self.attention_peaks
        return fields


class EncodedImage(NamedTuple):
    """An image, and the token ids of its captions."""

    image: ImageSource
    caption_ids: list[list[int]]


class CaptionPredictor(SupervisedPredictor[CaptionPrediction, CaptionOptions]):
    """A model that describes images.

    >>> captioner = jumok.load("runs/captioner")  # doctest: +SKIP
    >>> prediction = captioner.caption("photo.jpg")  # doctest: +SKIP
    >>> prediction.caption, prediction.attention.shape  # (words, rows, columns)  # doctest: +SKIP
    ('a small red circle left of a star', torch.Size([8, 6, 6]))
    """

    task: CaptionTask
    model: ImageCaptioner
    tokenizer: Tokenizer

    def __init__(self, task: CaptionTask, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__(task, model, tokenizer)
        self.preprocess_image = build_square_resize(task.recipe.image_encoder.image_size)
        self._find_image = ImageFinder()

    # ------------------------------------------------------------------------------------------------ prediction

    def caption(
        self,
        image: str | Path | bytes | Pixels,
        options: CaptionOptions | None = None,
        *,
        with_attention: bool = True,
    ) -> CaptionPrediction:
        """Describe one image: its path, the bytes of a file, or pixels ``(height, width, 3)`` from 0 to 255."""
        if isinstance(image, str | Path):
            options = options or CaptionOptions()
            return next(self.predict([str(image)], options, with_attention=with_attention))
        return next(self.caption_images([image], options, with_attention=with_attention))

    def caption_images(
        self,
        images: Iterable[bytes | Pixels],
        options: CaptionOptions | None = None,
        *,
        with_attention: bool = True,
        limits: ImageLimits = IMAGE_LIMITS,
    ) -> Iterator[CaptionPrediction]:
        """Describe a batch of images, each the bytes of a file within ``limits``, or pixels."""
        named_pixels = (("", _decode_image(image, limits)) for image in images)
        return self._predict_images(named_pixels, options or CaptionOptions(), with_attention, 0)

    def predict(
        self,
        lines: Iterable[str],
        options: CaptionOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
        listener: StreamListener | None = None,
    ) -> Iterator[CaptionPrediction]:
        """Describe images, given by their names, in their order."""
        for chunk in iterate_chunks(enumerate(lines, first_index), IMAGES_PER_BATCH):
            named_pixels = ((name, self._load_pixels(name, index + 1)) for index, name in chunk)
            yield from self._predict_images(named_pixels, options, with_attention, chunk[0][0])

    def _load_pixels(self, name: str, line_number: int = 1) -> Pixels:
        if not name.strip():
            raise InputError(f"line {line_number} is empty; the name of an image is expected")
        pixels = self._find_image(name).decode(name)
        if isinstance(pixels, InvalidExample):
            raise InputError(str(pixels))
        return pixels

    def _predict_images(
        self,
        named_pixels: Iterable[tuple[str, Pixels]],
        options: CaptionOptions,
        with_attention: bool,
        first_index: int,
    ) -> Iterator[CaptionPrediction]:
        # Images are resized one at a time, so that only one large image is in memory.
        names, squares = zip(*((name, self.preprocess_image(pixels)) for name, pixels in named_pixels), strict=True)
        features = self.extract_features(squares)
        hypotheses = self.decode_captions(features, options, first_index)
        attentions: Iterator[Tensor | None] = itertools.repeat(None)
        if with_attention:
            rows = [row for row, n_best in enumerate(hypotheses) for _ in n_best]
            ids = [hypothesis.ids for n_best in hypotheses for hypothesis in n_best]
            attentions = iter(self.compute_attention(features[rows], ids))
        for index, (name, n_best) in enumerate(zip(names, hypotheses, strict=True), first_index):
            best, *others = (
                CaptionPrediction(
                    index,
                    name,
                    self.ids_to_text(hypothesis.ids),
                    tuple(self._ids_to_words(hypothesis.ids)),
                    hypothesis.score,
                    attention=attention,
                    finished=hypothesis.finished,
                )
                for hypothesis, attention in zip(n_best, attentions, strict=False)
            )
            yield replace(best, alternatives=tuple(others))

    @torch.inference_mode()
    def extract_features(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Encode images ``(3, S, S)``: features ``(B, P, F)``."""
        features: Tensor = self.model.encoder(torch.from_numpy(np.stack(images)).to(self.device))[0]
        return features

    @torch.inference_mode()
    def decode_captions(
        self, features: Tensor, options: CaptionOptions, first_index: int = 0
    ) -> list[list[Hypothesis]]:
        """Search for the best captions of images, given by their features ``(B, P, F)``."""
        config = self.task.recipe.decode
        return generate(
            self.model,
            features_as_tokens(features),
            options,
            beam_size=config.beam_size,
            length_penalty=config.length_penalty,
            max_length=config.max_tokens,
            generator=torch.Generator().manual_seed(options.seed + first_index),
        )

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """The text of a caption. Endings that were split off for scoring are joined again."""
        text = self.tokenizer.decode(ids)
        for ending in captions.CONTRACTION_ENDINGS if self.task.recipe.tokenizer.normalize else ():
            text = text.replace(f" {ending}", ending)
        return text

    def _ids_to_words(self, ids: Sequence[int]) -> list[str]:
        """The words of a caption, one per row of its attention map."""
        return self.tokenizer.decode(ids).split()

    # ------------------------------------------------------------------------------------------------- attention

    @functools.cached_property
    def grid_size(self) -> tuple[int, int]:
        """The number of rows and columns of the feature map."""
        size: tuple[int, int] = self.model.encoder.compute_grid(self.task.recipe.image_encoder.image_size)
        return size

    @torch.inference_mode()
    def compute_attention(self, features: Tensor, caption_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """The attention maps ``(words, rows, columns)`` of captions, one per image.

        For a Transformer, these are of its last layer but one, averaged over heads.
        """
        batch = CaptionBatch.from_sequences(features, self.grid_size, caption_ids).to(self.device)
        maps = self.model.compute_attention_maps(batch)
        weights = maps[max(0, len(maps) - 2)].weights.float().mean(1).cpu()  # (B, T, P)
        return [
            self._merge_to_words(x[: len(ids)], ids).unflatten(-1, self.grid_size)
            for x, ids in zip(weights, caption_ids, strict=True)
        ]

    def _merge_to_words(self, weights: Tensor, ids: Sequence[int]) -> Tensor:
        """Merge a map ``(tokens, P)`` into one of words ``(words, P)``."""
        return merge_to_words(weights, self.tokenizer.word_ids_from_ids(ids), range(weights.shape[-1]))

    def make_viewer_factory(
        self, text: str, target: str | None = None, options: CaptionOptions | None = None
    ) -> Callable[[], ViewerData]:
        """The attention of ``target``, or of the model's own caption, and its log-probability."""
        return self._make_image_viewer_factory(text, self._load_pixels(text), target, options)

    def build_image_viewer_data(
        self, image: bytes | Pixels, target: str | None = None, *, limits: ImageLimits = IMAGE_LIMITS
    ) -> list[ViewerData]:
        """The viewer data of an image: the bytes of a file within ``limits``, or pixels."""
        return [self._make_image_viewer_factory("", _decode_image(image, limits), target)()]

    def _make_image_viewer_factory(
        self, name: str, pixels: Pixels, target: str | None, options: CaptionOptions | None = None
    ) -> Callable[[], ViewerData]:
        features = self.extract_features([self.preprocess_image(pixels)])
        if target is None:
            ids = list(self.decode_captions(features, options or CaptionOptions())[0][0].ids)
        else:
            [ids] = self.tokenizer.encode([self.task.recipe.tokenizer.preprocess(target)])
        if not ids:
            raise InputError(f"{name or 'the image'}: its caption is empty, so there is no attention to show")
        return lambda: self._build_caption_view(name, _build_thumbnail(pixels, self.grid_size), features, ids)

    @torch.inference_mode()
    def _build_caption_view(
        self, name: str, thumbnail: AttendedImage, features: Tensor, caption_ids: list[int]
    ) -> ViewerData:
        from jumok.look.viewer.viewer_data import ViewerData

        batch = CaptionBatch.from_sequences(features, self.grid_size, [caption_ids]).to(self.device)
        nll = self.model.loss(batch).parts["nll"].item()
        layers = {
            layer.name: torch.stack(
                [self._merge_to_words(head, caption_ids) for head in layer.weights[0, :, : len(caption_ids)].cpu()]
            )
            for layer in self.model.compute_attention_maps(batch)
        }
        rows, columns = self.grid_size
        file_name = Path(name.rpartition(ARCHIVE_SEPARATOR)[2]).name if name else ""
        caption = self.ids_to_text(caption_ids)
        return ViewerData.from_weights(
            layers,
            row_labels=self._ids_to_words(caption_ids),
            col_labels=[f"{row + 1}, {column + 1}" for row in range(rows) for column in range(columns)],
            title=f"{file_name}  →  {caption}" if name else caption,
            label=f"log-probability {-nll:.2f}",
            image=thumbnail,
        )

    def draw_attention(self, prediction: Any, path: Path, title: str = "") -> Path:
        """Draw the image with the attention of each word of its caption."""
        from jumok.look.viewer import view_writer

        [data] = self.build_viewer_data(prediction.input)
        return view_writer.save_view(replace(data, title=title or data.title), path)

    # ------------------------------------------------------------------------------------------------------ data

    def encode(self, examples: Iterable[CaptionExample]) -> Iterator[EncodedImage | InvalidExample]:
        """Encode examples, after their features or resized images are in the cache."""
        cache = self.task.get_feature_cache(self.model.encoder)
        preprocess = self.task.recipe.tokenizer.preprocess
        extract = self._extract_frozen_features if self.task.is_encoder_frozen else np.stack
        cached = cache.fill(examples, self.preprocess_image, extract)
        for example in self.task.log_skipped(cached):
            if isinstance(example, InvalidExample):
                yield example
            else:
                texts = [preprocess(text) for text in example.captions]
                yield EncodedImage(example.image, self.tokenizer.encode(texts))

    def _extract_frozen_features(self, images: list[NDArray[np.uint8]]) -> NDArray[Any]:
        was_training = self.model.training
        self.model.eval()
        features: NDArray[Any] = self.extract_features(images).float().cpu().numpy()
        self.model.train(was_training)
        return features

    def _iterate_features(self, encoded: Sequence[EncodedImage]) -> Iterator[tuple[Tensor, Sequence[EncodedImage]]]:
        """The features ``(B, P, F)`` of encoded images, a batch at a time."""
        cache = self.task.get_feature_cache(self.model.encoder)
        for chunk in iterate_chunks(encoded, IMAGES_PER_BATCH):
            cached = cache.features[cache.row_indices(example.image for example in chunk)]
            if self.task.is_encoder_frozen:
                yield torch.from_numpy(cached).to(self.device, torch.float32), chunk
            else:
                yield self.extract_features(list(cached)), chunk

    # ---------------------------------------------------------------------------------------------------- scores

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[CaptionExample]) -> float:
        encoded = self.check_encoded(self.encode(examples), None)
        inputs = self.task.build_image_inputs(encoded, self.model, torch.device("cpu"))
        captions_ids = [example.caption_ids for example in encoded]
        dataset = CaptionBatcher(inputs, captions_ids, max_tokens=MAX_BATCH_TOKENS, seed=0)
        return compute_mean_loss(self.model, dataset, self.device)

    def validate(self, split: DatasetSplit[CaptionExample]) -> ValidationReport:
        """Scores of greedy search, the loss, and the health of the attention."""
        evaluation = self.score_examples(split.examples, CaptionOptions(beam_size=1))
        report = evaluation.to_validation_report(self.compute_loss(split.examples))
        health = self._measure_attention_health(split.examples[:NUM_HEALTH_EXAMPLES])
        select_by = self.task.recipe.evaluation.select_by
        return replace(
            report,
            metrics={**report.metrics, **health},
            select_by=select_by,
            higher_is_better=select_by != "loss",
            tie_breaker=None if select_by == "loss" else "loss",
        )

    def _measure_attention_health(self, examples: Sequence[CaptionExample]) -> dict[str, float]:
        encoded: list[EncodedImage] = self.check_encoded(self.encode(examples), None)
        (features, chunk), *_ = self._iterate_features(encoded)
        ids = [example.caption_ids[0] for example in chunk]
        batch = CaptionBatch.from_sequences(features, self.grid_size, ids).to(self.device)
        weights = [layer.weights for layer in self.model.compute_attention_maps(batch)]
        return compute_attention_health(weights, batch.target.lengths, [features.shape[1]] * len(chunk))

    def score_examples(
        self,
        examples: Sequence[CaptionExample],
        options: CaptionOptions | None = None,
        *,
        detailed: bool = False,
    ) -> Evaluation:
        """Score captions; where boxes are known, also whether the words of the first caption point to them."""
        options = options or CaptionOptions()
        encoded: list[EncodedImage] = self.check_encoded(self.encode(examples), None)
        predictions: list[str] = []
        maps: list[Tensor] = []
        for features, chunk in self._iterate_features(encoded):
            hypotheses = self.decode_captions(features, options)
            predictions += [self.ids_to_text(best.ids) for best, *_ in hypotheses]
            if examples[0].boxes:
                maps += self.compute_attention(features, [example.caption_ids[0] for example in chunk])
        figures: dict[str, Callable[[Path], Path]] = {}
        if detailed:
            figures = {
                str(number): functools.partial(self._draw_example, example, options)
                for number, example in enumerate(examples[:NUM_FIGURES], 1)
            }
        return caption_metrics.score_predictions(examples, predictions, maps, figures)

    def _draw_example(self, example: CaptionExample, options: CaptionOptions, path: Path) -> Path:
        from jumok.look.viewer import view_writer

        pixels = example.image.decode()
        if isinstance(pixels, InvalidExample):  # its features are cached, but the file is gone
            raise InputError(str(pixels))
        features = self.extract_features([self.preprocess_image(pixels)])
        ids = list(self.decode_captions(features, options)[0][0].ids)
        [ids] = [ids] if ids else self.tokenizer.encode([example.captions[0]])
        thumbnail = _build_thumbnail(pixels, self.grid_size)
        return view_writer.save_view(self._build_caption_view(example.image.name, thumbnail, features, ids), path)


# --------------------------------------------------------------------------------------------------------------


def _decode_image(image: Any, limits: ImageLimits) -> Pixels:
    """The pixels of the bytes of a file, or pixels themselves."""
    if isinstance(image, bytes):
        decoded = decode_image(image, "the image", limits)
        if isinstance(decoded, InvalidExample):
            raise InputError(str(decoded))
        return decoded
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(
            f"an image of {pixels.dtype} and shape {pixels.shape} is invalid; expected uint8 (height, width, 3)"
        )
    return np.asarray(pixels, np.uint8)


def _build_thumbnail(pixels: Pixels, grid_size: tuple[int, int]) -> AttendedImage:
    """The image for the viewer, no larger than needed."""
    from jumok.data.readers.text_files import import_optional
    from jumok.look.viewer.attended_image import AttendedImage

    longer_side = max(pixels.shape[:2])
    if longer_side > MAX_SHOWN_SIDE:
        pillow = import_optional("PIL.Image", "images")
        height, width = (max(1, round(side * MAX_SHOWN_SIDE / longer_side)) for side in pixels.shape[:2])
        pixels = np.asarray(pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BICUBIC))
    return AttendedImage.from_pixels(pixels, grid_size)
