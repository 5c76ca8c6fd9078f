"""Image files, and captioning recipes with small sizes."""

import gzip
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jumok import recipe
from jumok.data.builtin.scenes import ShapeScene, draw_scene
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

QUIET = Console(quiet=True)
SMALL = ["train.device=cpu", "train.average_checkpoints=0", "train.tensorboard=false", "train.max_epochs=null"]
SMALL += ["train.max_steps=3", "train.warmup_steps=1", "train.validate_every=3", "train.log_every=1"]
SMALL += ["train.batch_tokens=64", "decode.max_tokens=6"]
SIZES = {
    "captioner": ["model.width=8", "model.embedding_width=8", "model.attention_width=8"],
    "transformer": ["model.width=8", "model.num_heads=2", "model.feed_forward_width=16"],
}


def draw_scenes(count: int) -> list[ShapeScene]:
    return [draw_scene(77, number) for number in range(count)]


def encode_png(scene: ShapeScene) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(scene.pixels).save(file, "PNG")
    return file.getvalue()


def write_images(folder: Path, count: int, damaged: Sequence[int] = ()) -> Path:
    """Write a folder of images, and ``captions.jsonl`` with two captions of each. Returns the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, scene in enumerate(draw_scenes(count)):
        data = encode_png(scene)
        (folder / f"{number}.png").write_bytes(data[: len(data) // 2] if number in damaged else data)
        row = {"image": f"{number}.png", "captions": [scene.caption, f"I see {scene.caption}."]}
        lines.append(f"{json.dumps(row)}\n")
    path = folder / "captions.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_flickr8k(folder: Path) -> Path:
    """Write a folder like Flickr8k: images in a .tar, all splits in one compressed table. Returns its path."""
    folder.mkdir(parents=True)
    lines = ["image\tsplit\tcaption\n"]
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number, scene in enumerate(draw_scenes(13)):
            data, name = encode_png(scene), f"{number}.png"
            member = tarfile.TarInfo(f"images/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            split = "train" if number < 8 else "dev" if number < 11 else "test"
            lines += [f"{name}\t{split}\t{caption} .\n" for caption in (scene.caption, f"A dog 's {scene.caption}")]
    path = folder / "captions.tsv.gz"
    path.write_bytes(gzip.compress("".join(lines).encode()))
    return path


def small_recipe(name: str, *overrides: str) -> Any:
    """A recipe with small sizes."""
    return recipe.load(name, [*SMALL, *SIZES[recipe.load(name).model.type], *overrides])


def train_run(folder: Path, settings: Any, console: Console = QUIET) -> Run:
    run = Run.create_or_resume(folder, settings)
    train(build_task(run), console)
    return run
