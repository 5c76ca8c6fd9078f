"""A trained captioner at work: pictures in, sentences out, and where it looked; and how good it is."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok import decoding
from jumok.batches.images import CaptionBatch, features_as_tokens
from jumok.data.batching.captions import CaptionBatcher
from jumok.data.builtin.scenes import IMAGE_SIZE, BuiltinScene
from jumok.data.image_inputs import build_square_resize
from jumok.data.images import IMAGE_LIMITS, ImageFile, ImageLimits, Pixels, decode_image
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.formats import InvalidExample
from jumok.decoding import Hypothesis
from jumok.errors import InputError
from jumok.metrics import captions, word_alignment
from jumok.metrics.pointing_game import score_pointing
from jumok.tasks.base import Evaluation
from jumok.tasks.caption.inputs import ARCHIVE_SEPARATOR, ImageFinder
from jumok.tasks.common import GenerationOptions
from jumok.tasks.predictors import Prediction, SupervisedPredictor, compute_mean_loss
from jumok.training import ValidationReport, compute_attention_health

if TYPE_CHECKING:
    from jumok.look.viewer.comparison import Ablations
    from jumok.look.viewer.viewer_data import AttendedImage, ViewerData

__all__ = ["CaptionOptions", "CaptionPrediction", "CaptionPredictor", "EncodedImage"]

IMAGES_PER_BATCH = 64  # pictures that are looked at together
MAX_BATCH_TOKENS = 4096  # of captions, in a batch whose loss is computed
NUM_SAMPLES = 5  # sample captions
NUM_FIGURES = 3  # pictures with where the model looked, of a test set
NUM_HEALTH_EXAMPLES = 32  # pictures whose attention is measured at a validation
MAX_SHOWN_SIDE = 800  # pixels of a picture that is shown
ImageSource = ImageFile | BuiltinScene


@dataclass(frozen=True)
class CaptionOptions(GenerationOptions):
    """What one asks of a caption; None: what the recipe says."""


@dataclass(frozen=True, eq=False)
class CaptionPrediction(Prediction):
    """What is said of a picture; ``ids_to_text``, which a prediction has of what it is about, is its name."""

    caption: str = ""
    words: tuple[str, ...] = ()
    score: float = 0.0
    is_finished: bool = True
    alternatives: tuple[CaptionPrediction, ...] = ()  # of an n-best list, those behind the first
    attention: Tensor | None = None  # (words, rows, columns): where it looked

    @property
    def image_name(self) -> str:
        return self.input

    @property
    def finished(self) -> bool:
        return self.is_finished

    @property
    def is_drawable(self) -> bool:
        return bool(self.words)

    def format_lines(self, *, n_best: bool, as_json: bool) -> Iterator[str]:
        """The name of the picture, a tab and the caption; in an n-best list, the score behind it."""
        for one in (self, *self.alternatives):
            if as_json:
                known: dict[str, Any] = {"line": one.index, "image": one.image_name, "caption": one.caption}
                known |= {"score": one.score, "finished": one.finished, "words": list(one.words)}
                if one.attention is not None:
                    rows, columns = one.attention.shape[1:]
                    strongest = one.attention.flatten(1).argmax(1).tolist()
                    known |= {"grid_size": [rows, columns], "attention_peaks": [divmod(at, columns) for at in strongest]}
                yield json.dumps(known, ensure_ascii=False)
            else:
                fields = [one.image_name, one.caption, *([f"{one.score:.4f}"] if n_best else [])]
                yield "\t".join(fields)


class EncodedImage(NamedTuple):
    """A picture, and the token ids of its captions."""

    image: ImageSource
    caption_ids: list[list[int]]


class CaptionPredictor(SupervisedPredictor):
    """A model that says what is in a picture.

    >>> reader = jumok.load("runs/captioner")  # doctest: +SKIP
    >>> said = reader.caption("photo.jpg")  # doctest: +SKIP
    >>> said.caption, said.attention.shape  # (words, rows, columns)  # doctest: +SKIP
    ('a small red circle left of a star', torch.Size([8, 6, 6]))
    """

    def __init__(self, task: Any, model: Any, tokenizer: Any, options: CaptionOptions | None = None) -> None:
        super().__init__(task, model, tokenizer)
        self.options = CaptionOptions() if options is None else options  # that evaluations use
        self.preprocess_image = build_square_resize(task.recipe.image_encoder.image_size)
        self._find_image = ImageFinder()

    def with_options(self, options: CaptionOptions) -> CaptionPredictor:
        """The same reader; evaluations search like this."""
        return CaptionPredictor(self.task, self.model, self.tokenizer, options)

    # ---------------------------------------------------------------------------------------- from pictures

    def caption(
        self,
        image: str | Path | bytes | Pixels,
        options: CaptionOptions | None = None,
        *,
        with_attention: bool = True,
    ) -> CaptionPrediction:
        """One picture: its file, the bytes of one, or colours ``(height, width, 3)`` from 0 to 255."""
        if isinstance(image, str | Path):
            return next(
                self.predict([str(image)], options or CaptionOptions(), with_attention=with_attention)
            )
        return next(self.caption_images([image], options, with_attention=with_attention))

    def caption_images(
        self,
        images: Iterable[bytes | Pixels],
        options: CaptionOptions | None = None,
        *,
        with_attention: bool = True,
        limits: ImageLimits = IMAGE_LIMITS,
    ) -> Iterator[CaptionPrediction]:
        """Some pictures together, each the bytes of a file within ``limits``, or colours."""
        some = (("", _decode_image(picture, limits)) for picture in images)
        return self._predict_images(some, options or CaptionOptions(), with_attention, 0)

    def predict(
        self,
        lines: Iterable[str],
        options: CaptionOptions,
        *,
        with_attention: bool = False,
        first_index: int = 0,
    ) -> Iterator[CaptionPrediction]:
        """A caption for every picture, told by its name, in their order."""
        names = iter(lines)
        while some := list(itertools.islice(names, IMAGES_PER_BATCH)):
            pixels = (
                (name, self._load_pixels(name, number)) for number, name in enumerate(some, first_index + 1)
            )
            yield from self._predict_images(pixels, options, with_attention, first_index)
            first_index += len(some)

    def _load_pixels(self, name: str, line_number: int = 1) -> Pixels:
        if not name.strip():
            raise InputError(f"line {line_number} is empty; the name of a picture is expected")
        found = self._find_image(name).decode(name)
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        return found

    def _predict_images(
        self,
        named_pixels: Iterable[tuple[str, Pixels]],
        options: CaptionOptions,
        with_attention: bool,
        first_index: int,
    ) -> Iterator[CaptionPrediction]:
        # One after the other: of a large picture no more is kept than what the model sees of it.
        names, squares = zip(
            *((name, self.preprocess_image(pixels)) for name, pixels in named_pixels), strict=True
        )
        places = self.extract_features(squares)
        found = self.decode_captions(places, options, first_index)
        looked: Iterator[Tensor | None] = itertools.repeat(None)
        if with_attention:
            index = [n for n, each in enumerate(found) for _ in each]
            looked = iter(self.compute_attention(places[index], [one.ids for each in found for one in each]))
        for number, (name, each) in enumerate(zip(names, found, strict=True), first_index):
            best, *others = (
                CaptionPrediction(
                    number,
                    name,
                    self.ids_to_text(one.ids),
                    tuple(self._ids_to_words(one.ids)),
                    one.score,
                    one.finished,
                    attention=weights,
                )
                for one, weights in zip(each, looked, strict=False)
            )
            yield replace(best, alternatives=tuple(others))

    @torch.inference_mode()
    def extract_features(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """What the encoder makes of pictures ``(3, S, S)``: ``(B, P, F)``."""
        places: Tensor = self.model.encoder(torch.from_numpy(np.stack(images)).to(self.device))[0]
        return places

    @torch.inference_mode()
    def decode_captions(
        self, features: Tensor, options: CaptionOptions, first_index: int = 0
    ) -> list[list[Hypothesis]]:
        """What a search finds for pictures, given their places: one hypothesis, or the best ones."""
        decode = self.run.recipe.decode
        source, limit = features_as_tokens(features), decode.max_tokens
        beam = decode.beam_size if options.beam_size is None else options.beam_size
        if options.sample:
            drawn = decoding.sample(
                self.model,
                source,
                temperature=options.temperature,
                top_k=options.top_k or None,
                top_p=options.top_p if options.top_p < 1 else None,
                generator=torch.Generator().manual_seed(options.seed + first_index),
                max_length=limit,
            )
            return [[one] for one in drawn]
        if beam == 1 and options.n_best == 1:
            return [[one] for one in decoding.greedy_search(self.model, source, max_length=limit)]
        return decoding.beam_search(
            self.model,
            source,
            beam_size=max(beam, options.n_best),
            n_best=options.n_best,
            length_penalty=decode.length_penalty,
            max_length=limit,
        )

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """A caption as one reads it: what was split off words to be counted is put back."""
        text: str = self.tokenizer.decode(ids)
        for ending in captions.CONTRACTION_ENDINGS if self.run.recipe.tokenizer.normalize else ():
            text = text.replace(f" {ending}", ending)
        return text

    def _ids_to_words(self, ids: Sequence[int]) -> list[str]:
        """As the model says them, one a row of its map."""
        return str(self.tokenizer.decode(ids)).split()

    # -------------------------------------------------------------------------------------------- attention

    @functools.cached_property
    def grid_size(self) -> tuple[int, int]:
        """The rows and columns of places."""
        found: tuple[int, int] = self.model.encoder.compute_grid(self.run.recipe.image_encoder.image_size)
        return found

    @torch.inference_mode()
    def compute_attention(self, features: Tensor, caption_ids: Sequence[Sequence[int]]) -> list[Tensor]:
        """Where the model looked for each word of captions, ``(word_indices, rows, columns)``, one a picture.

        Of a Transformer: in its last layer but one, in the mean of its heads.
        """
        maps = self.model.compute_attention_maps(
            CaptionBatch.from_sequences(features, self.grid_size, caption_ids).to(self.device)
        )
        weights = maps[max(0, len(maps) - 2)].weights.float().mean(1).cpu()  # (B, T, P)
        return [
            _merge_to_words(one[: len(ids)], self.tokenizer.word_ids_from_ids(ids)).unflatten(-1, self.grid_size)
            for one, ids in zip(weights, caption_ids, strict=True)
        ]

    def make_viewer_factory(self, text: str) -> Callable[[], ViewerData]:
        return self._make_named_viewer_factory(text, None)

    def build_viewer_data(
        self, text: str, target: str | None = None, *, ablations: Ablations | None = None
    ) -> list[ViewerData]:
        """Where the model looks in a picture while it says ``target``, or its own caption, for the viewer.

        ``ablations`` some of it, the same again: how likely is the caption then?
        """
        from jumok.look.viewer.comparison import compare_with_ablation

        return compare_with_ablation(self.model, ablations, self._make_named_viewer_factory(text, target))

    def build_image_viewer_data(
        self, image: bytes | Pixels, target: str | None = None, *, limits: ImageLimits = IMAGE_LIMITS
    ) -> list[ViewerData]:
        """The same of the bytes of a file within ``limits``, or of colours."""
        return [self._make_image_viewer_factory("", _decode_image(image, limits), target)()]

    def _make_named_viewer_factory(self, name: str, target: str | None) -> Callable[[], ViewerData]:
        return self._make_image_viewer_factory(name, self._load_pixels(name), target)

    def _make_image_viewer_factory(
        self, name: str, pixels: Pixels, target: str | None
    ) -> Callable[[], ViewerData]:
        places = self.extract_features([self.preprocess_image(pixels)])
        if target is None:
            ids = list(self.decode_captions(places, self.options)[0][0].ids)
        else:
            [ids] = self.tokenizer.encode([self.run.recipe.tokenizer.preprocess(target)])
        if not ids:
            told = name or "the picture"
            raise InputError(f"{told}: nothing is said of it, so there are no words to look at")
        return lambda: self._build_caption_view(name, _build_thumbnail(pixels, self.grid_size), places, ids)

    @torch.inference_mode()
    def _build_caption_view(
        self, name: str, thumbnail: AttendedImage, features: Tensor, caption_ids: list[int]
    ) -> ViewerData:
        from jumok.look.viewer.viewer_data import ViewerData

        batch = CaptionBatch.from_sequences(features, self.grid_size, [caption_ids]).to(self.device)
        loss = self.model.loss(batch).parts["nll"].item()
        words = self.tokenizer.word_ids_from_ids(caption_ids)
        layers = {
            one.name: torch.stack(
                [_merge_to_words(head, words) for head in one.weights[0, :, : len(caption_ids)].cpu()]
            )
            for one in self.model.compute_attention_maps(batch)
        }
        rows, columns = self.grid_size
        return ViewerData.from_weights(
            layers,
            row_labels=self._ids_to_words(caption_ids),
            col_labels=[f"{row + 1}, {column + 1}" for row in range(rows) for column in range(columns)],
            title=f"{Path(name.rpartition(ARCHIVE_SEPARATOR)[2]).name}  →  {self.ids_to_text(caption_ids)}"
            if name
            else self.ids_to_text(caption_ids),
            label=f"log-probability {-loss:.2f}",
            image=thumbnail,
        )

    def draw_attention(self, prediction: Prediction, path: Path, title: str = "") -> Path:
        """The picture, and where the model looked for each word of what it says."""
        from jumok.look.viewer import view_writer

        [scene] = self.build_viewer_data(prediction.input)
        return view_writer.save_view(replace(scene, title=title or scene.title), path)

    # ------------------------------------------------------------------------------------------------- data

    def encode(self, examples: Iterable[CaptionExample]) -> Iterator[EncodedImage | InvalidExample]:
        """What is learned of pictures, once all that the model is given of them is on the disk."""
        cache, prepared = self.task.get_feature_cache(self.model.encoder), self.run.recipe.tokenizer.preprocess
        make = self._extract_frozen_features if self.task.is_encoder_frozen else np.stack
        for one in self.task.log_skipped(cache.fill(examples, self.preprocess_image, make)):
            if isinstance(one, InvalidExample):
                yield one
            else:
                yield EncodedImage(
                    one.image, self.tokenizer.encode([prepared(text) for text in one.captions])
                )

    def _extract_frozen_features(self, images: list[NDArray[np.uint8]]) -> NDArray[Any]:
        was_training = self.model.training
        self.model.eval()
        features: NDArray[Any] = self.extract_features(images).float().cpu().numpy()
        self.model.train(was_training)
        return features

    def _iterate_features(
        self, encoded: Sequence[EncodedImage]
    ) -> Iterator[tuple[Tensor, Sequence[EncodedImage]]]:
        """The places of pictures whose features or squares are on the disk, some at a time."""
        cache = self.task.get_feature_cache(self.model.encoder)
        for begin in range(0, len(encoded), IMAGES_PER_BATCH):
            some = encoded[begin : begin + IMAGES_PER_BATCH]
            kept = cache.features[cache.row_indices(one.image for one in some)]
            if self.task.is_encoder_frozen:
                yield torch.from_numpy(kept).to(self.device, torch.float32), some
            else:
                yield self.extract_features(list(kept)), some

    # ----------------------------------------------------------------------------------------------- judging

    @torch.inference_mode()
    def compute_loss(self, examples: Sequence[CaptionExample]) -> float:
        encoded = self.check_encoded(self.encode(examples), None)
        given = self.task.build_image_inputs(encoded, self.model, torch.device("cpu"))
        data = CaptionBatcher(given, [one.caption_ids for one in encoded], max_tokens=MAX_BATCH_TOKENS, seed=0)
        return compute_mean_loss(self.model, data, self.device)

    def validate(self, examples: Sequence[CaptionExample]) -> ValidationReport:
        """For the training loop: by greedy search."""
        found = self.with_options(CaptionOptions(beam_size=1)).score_examples(examples)
        loss, best = self.compute_loss(examples), self.run.recipe.evaluation.select_by
        numbers = {name: value for name, value in found.metrics.items() if isinstance(value, int | float)}
        return ValidationReport(
            {**numbers, "loss": loss, **self._measure_attention_health(examples[:NUM_HEALTH_EXAMPLES])},
            select_by=best,
            higher_is_better=best != "loss",
            tie_breaker=None if best == "loss" else "loss",
            samples=found.samples,
        )

    def _measure_attention_health(self, examples: Sequence[CaptionExample]) -> dict[str, float]:
        found: list[EncodedImage] = self.check_encoded(self.encode(examples), None)
        (places, some), *_ = self._iterate_features(found)
        said = [one.caption_ids[0] for one in some]
        batch = CaptionBatch.from_sequences(places, self.grid_size, said).to(self.device)
        weights = [one.weights for one in self.model.compute_attention_maps(batch)]
        return compute_attention_health(weights, batch.target.lengths, [places.shape[1]] * len(some))

    def score_examples(self, examples: Sequence[CaptionExample]) -> Evaluation:
        """Against all captions of each picture, and, where boxes are known, does it look at them?

        The words of the first reference are looked at then, so that each counts whatever the model says.
        """
        encoded: list[EncodedImage] = self.check_encoded(self.encode(examples), None)
        said: list[str] = []
        maps: list[Tensor] = []
        for places, some in self._iterate_features(encoded):
            said += [self.ids_to_text(best.ids) for best, *_ in self.decode_captions(places, self.options)]
            if examples[0].boxes:
                maps += self.compute_attention(places, [one.caption_ids[0] for one in some])
        told = [captions.tokenize_caption(text) for text in said]
        wanted = [[captions.tokenize_caption(text) for text in one.captions] for one in examples]
        scores = captions.score_captions(told, wanted)
        figures = _build_metrics(scores)
        figures["exact"] = float(np.mean([one in some for one, some in zip(told, wanted, strict=True)]))
        if maps:
            found = score_pointing(maps, [one.boxes for one in examples], (IMAGE_SIZE, IMAGE_SIZE))
            figures |= {"pointing": found.accuracy, "pointing_by_chance": found.chance}
        return Evaluation(
            figures,
            "cider_d",
            lambda some: float(scores.cider_d_per_image[some].mean()),
            [
                json.dumps(
                    {
                        "image": one.image.location,
                        "prediction": text,
                        "target": list(one.captions),
                        "cider_d": round(float(score), 4),
                    },
                    ensure_ascii=False,
                )
                for one, text, score in zip(examples, said, scores.cider_d_per_image, strict=True)
            ],
            [
                line
                for one, text in zip(examples[:NUM_SAMPLES], said, strict=False)
                for line in (f"  {one.image.name}", f"    said    {text}", f"    wanted  {one.captions[0]}")
            ],
            extra_figures={
                str(number): functools.partial(self._draw_example, one)
                for number, one in enumerate(examples[:NUM_FIGURES], 1)
            },
        )

    def _draw_example(self, example: CaptionExample, path: Path) -> Path:
        from jumok.look.viewer import view_writer

        pixels = example.image.decode()
        if isinstance(
            pixels, InvalidExample
        ):  # it was judged by its features, and is gone since they were made
            raise InputError(str(pixels))
        places = self.extract_features([self.preprocess_image(pixels)])
        ids = list(self.decode_captions(places, self.options)[0][0].ids)
        [ids] = [ids] if ids else self.tokenizer.encode([example.captions[0]])
        scene = self._build_caption_view(
            example.image.name, _build_thumbnail(pixels, self.grid_size), places, ids
        )
        return view_writer.save_view(scene, path)


# ------------------------------------------------------------------------------------------------------------


def _build_metrics(scores: captions.CaptionScores) -> dict[str, Any]:
    """BLEU as it is usual, with brevity penalty, and beside it without, as early papers give it."""
    bleu = scores.bleu
    figures: dict[str, Any] = {f"bleu{n}": value for n, value in enumerate(bleu.value, 1)}
    figures |= {f"bleu{n}_without_brevity": value for n, value in enumerate(bleu.unpenalized, 1)}
    return figures | {"brevity": bleu.brevity_penalty, "rouge_l": scores.rouge_l, "cider_d": scores.cider_d}


def _merge_to_words(weights: Tensor, word_indices: Sequence[int]) -> Tensor:
    """A map ``(pieces, P)`` as one of words ``(word_indices, P)``; -1 is a piece of no word."""
    rows = [None if word < 0 else word for word in word_indices]
    return word_alignment.pool_to_words(weights, rows, range(weights.shape[-1]))


def _decode_image(image: Any, limits: ImageLimits) -> Pixels:
    """The colours of a file's bytes; or colours, if that is what these are."""
    if isinstance(image, bytes):
        found = decode_image(image, "the picture", limits)
        if isinstance(found, InvalidExample):
            raise InputError(str(found))
        return found
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise InputError(
            f"a picture of {pixels.dtype} and shape {pixels.shape} came; expected uint8 (height, width, 3)"
        )
    return np.asarray(pixels, np.uint8)


def _build_thumbnail(pixels: Pixels, grid_size: tuple[int, int]) -> AttendedImage:
    """As the viewer gets it: upright, no larger than needed."""
    from jumok.data.readers.text_files import import_optional
    from jumok.look.viewer.viewer_data import AttendedImage

    longest = max(pixels.shape[:2])
    if longest > MAX_SHOWN_SIDE:
        pillow = import_optional("PIL.Image", "images")
        height, width = (max(1, round(side * MAX_SHOWN_SIDE / longest)) for side in pixels.shape[:2])
        pixels = np.asarray(pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BICUBIC))
    return AttendedImage.from_pixels(pixels, grid_size)
