"""Data of a captioning run: images with one or more captions each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jumok.data.builtin import scenes
from jumok.data.builtin.scenes import DATA_SEED, LANGUAGES, BuiltinScene, draw_cached_scene
from jumok.data.readers import captions
from jumok.data.readers.captions import CaptionExample
from jumok.data.readers.invalid_examples import InvalidExample
from jumok.tasks.caption.config import CaptionRecipe
from jumok.tasks.config import DataSource


def read_examples(
    recipe: CaptionRecipe, data_source: DataSource, split_name: str
) -> Iterator[CaptionExample | InvalidExample]:
    """Read images with their captions, without captions that are too long or have no words."""
    data = recipe.data
    if isinstance(data_source, str) and data_source in LANGUAGES:
        yield from _read_builtin(data_source, data.builtin_size)
        return
    examples = captions.read_caption_examples(data_source, split=split_name, columns=data.columns, images=data.images)
    for example in examples:
        yield from _drop_unusable_captions(recipe, example)


def _drop_unusable_captions(
    recipe: CaptionRecipe, example: CaptionExample | InvalidExample
) -> Iterator[CaptionExample | InvalidExample]:
    """The example without captions that are too long or have no words, and an ``InvalidExample`` for each."""
    if isinstance(example, InvalidExample):
        yield example
        return
    usable, max_words = [], recipe.data.max_words
    for caption in example.captions:
        count = len(recipe.tokenizer.preprocess(caption).split())
        if 0 < count <= max_words:
            usable.append(caption)
            continue
        location = f"{example.location} {example.image.name}"
        if count:
            message = f"{count} words, and data.max_words is {max_words}; it is {caption[:60]!r}"
            yield InvalidExample(location, "a caption of too many words", message)
        else:
            yield InvalidExample(location, "a caption without words", caption)
    if usable and not isinstance(example.image, BuiltinScene):
        # The path is absolute, because the run may be evaluated in another folder.
        image = replace(example.image, path=example.image.path.absolute())
        yield replace(example, image=image, captions=tuple(usable))


def _read_builtin(name: str, num_scenes: int) -> Iterator[CaptionExample]:
    language = LANGUAGES[name]
    for number in range(num_scenes):
        scene = (
            draw_cached_scene(DATA_SEED, number) if language == "en" else scenes.draw_scene(DATA_SEED, number, language)
        )
        image = BuiltinScene(DATA_SEED, number)
        yield CaptionExample(image, (scene.caption,), f"{name}:{number}", scene.boxes)
