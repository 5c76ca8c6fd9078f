"""Image files, and captioning recipes with small sizes."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from rich.console import Console

from jumok import recipe
from jumok.data.builtin.scenes import ShapeScene, draw_scene
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.training import train

QUIET = Console(quiet=True)
SMALL = [
    "train.device=cpu",
    "train.average_checkpoints=0",
    "train.tensorboard=false",
    "train.max_epochs=null",
]
SMALL += [
    "train.max_steps=3",
    "train.warmup_steps=1",
    "train.validate_every=3",
    "train.log_every=1",
    "train.batch_tokens=64",
]
SIZES = {
    "captioner": ["model.width=8", "model.embedding_width=8", "model.attention_width=8"],
    "transformer": ["model.width=8", "model.num_heads=2", "model.feed_forward_width=16"],
}


def drawn(count: int) -> list[ShapeScene]:
    return [draw_scene(77, number) for number in range(count)]


def png(of: ShapeScene) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(of.pixels).save(file, "PNG")
    return file.getvalue()


def folder_of(path: Path, count: int, broken: tuple[int, ...] = ()) -> Path:
    """Write a folder of images, and ``captions.jsonl`` with two captions of each."""
    path.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, made in enumerate(drawn(count)):
        data = png(made)
        (path / f"{number}.png").write_bytes(data[: len(data) // 2] if number in broken else data)
        rows.append({"image": f"{number}.png", "captions": [made.caption, f"I see {made.caption}."]})
    lines = (json.dumps(row) for row in rows)
    (path / "captions.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path / "captions.jsonl"


def data_set(path: Path) -> None:
    """Write a folder like Flickr8k: images in a .tar, all splits in one compressed table."""
    path.mkdir(parents=True)
    lines = ["image\tsplit\tcaption"]
    with tarfile.open(path / "images.tar", "w") as tar:
        for number, made in enumerate(drawn(13)):
            data, name = png(made), f"{number}.png"
            member = tarfile.TarInfo(f"images/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            split = "train" if number < 8 else "dev" if number < 11 else "test"
            lines += [f"{name}\t{split}\t{made.caption} .", f"{name}\t{split}\tA dog 's {made.caption} ."]
    text = "".join(f"{line}\n" for line in lines)
    (path / "captions.tsv.gz").write_bytes(gzip.compress(text.encode()))


def small_recipe(name: str, *more: str) -> Any:
    """A recipe with small sizes."""
    kind = recipe.load(name).model.type
    return recipe.load(name, [*SMALL, *SIZES[kind], *more])


def train_run(folder: Path, chosen: Any) -> Run:
    run = Run.create_or_resume(folder, chosen)
    train(build_task(run), QUIET)
    return run
