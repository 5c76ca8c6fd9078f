"""Tests of finding the folder of a Hugging Face model: local, or in the cache of the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from safetensors.torch import load_file

from jumok import InputError
from jumok.look.huggingface.capture import capture_huggingface_model
from jumok.look.huggingface.folder import find_model_folder, is_hub_name

pytestmark = pytest.mark.long


NAME, COMMIT = "someone/tiny-bert", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def snapshot(cache: Path, bert: Path) -> Path:
    """The tiny BERT in that cache, as links to blobs."""
    repo = cache / "models--someone--tiny-bert"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(bert.iterdir())):
        shutil.copyfile(file, repo / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}")
    return snapshot


def test_cached_model_is_found_by_its_name(snapshot: Path, bert: Path) -> None:
    assert find_model_folder(NAME) == snapshot
    (cached,) = capture_huggingface_model(NAME, "a cat sat", device="cpu")
    (local,) = capture_huggingface_model(bert, "a cat sat", device="cpu")
    assert (cached.layers[0].compute_weights(0) == local.layers[0].compute_weights(0)).all()


def test_local_paths_are_not_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("runs/transformer")
    assert is_hub_name("gpt2")
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/transformer")
    assert not is_hub_name("runs")
    assert not any(map(is_hub_name, ("./gpt2", "../gpt2", "/gpt2", "a/b/c", "~/gpt2", "a b", "")))
    assert find_model_folder("runs/transformer") == Path("runs/transformer")


def test_model_that_is_not_cached_is_an_error_offline(cache: Path) -> None:
    with pytest.raises(
        InputError, match=r"no folder nobody/nothing.*hub\).*Missing: config\.json.*`hf download nobody/n"
    ):
        find_model_folder("nobody/nothing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_listed(snapshot: Path, name: str) -> None:
    for file in snapshot.glob("tokenizer*" if name == "tokenizer.json" else name):
        file.unlink()
    expected = (
        "in safetensors.*hf download" if name == "model.safetensors" else f"Missing:.*{name}.*`hf download {NAME}`"
    )
    with pytest.raises(InputError, match=expected):
        find_model_folder(NAME)


def test_missing_shards_are_listed(snapshot: Path) -> None:
    (snapshot / "model.safetensors").rename(snapshot / "model-1.safetensors")
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(InputError, match=r"Missing: model-2\.safetensors\. Download"):
        find_model_folder(NAME)


def _build_http_error(error_type: type[errors.HfHubHTTPError]) -> Exception:
    error = error_type.__new__(error_type)
    Exception.__init__(error, "404 Client Error")
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (_build_http_error(errors.RepositoryNotFoundError), r"no folder someone/tiny-bert, and .*hf auth login"),
        (_build_http_error(errors.GatedRepoError), r"gated.*https://huggingface\.co/someone/tiny-bert"),
        (errors.IncompleteSnapshotError("1 file(s) are missing (a.json).", "x"), r"missing \(a\.json\).*hf download"),
        (errors.LocalEntryNotFoundError("Got: ConnectError"), "cannot be reached"),
        (OSError("disk full"), "cannot be downloaded from the Hugging Face hub: disk full"),
    ],
)
def test_errors_of_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(InputError, match=reason):
        find_model_folder(NAME)


def test_download_requests_no_code_and_no_pickles(cache: Path, monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    requests: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        requests.append(options)
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model_folder(NAME) == bert
    files = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    unwanted = ["modeling.py", "pytorch_model.bin", "original/model.safetensors", "tf_model.h5", "README.md"]
    assert list(huggingface_hub.utils.filter_repo_objects(files + unwanted, **requests[0])) == files


def test_pickled_weights_are_refused(bert: Path, tmp_path: Path, snapshot: Path) -> None:
    local = shutil.copytree(bert, tmp_path / "local")
    for folder in (local, snapshot):
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"only as a pickle.*`jumok convert .*local --out NEW`"):
        capture_huggingface_model(local, "a cat", device="cpu")
    with pytest.raises(InputError, match=rf"only as a pickle.*`jumok convert .*{COMMIT} --out NEW`"):
        capture_huggingface_model(NAME, "a cat", device="cpu")
