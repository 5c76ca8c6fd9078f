"""Download of data sets: verified files, or none."""

import gzip
import hashlib
import http.server
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from jumok.data import download
from jumok.data.download import DATASETS, RemoteDataset, RemoteFile, download_dataset
from jumok.data.readers.parallel_corpus import find_corpus
from jumok.errors import InputError, JumokError

TEXTS = {"train.en.gz": b"a dog\n", "train.de.gz": b"ein Hund\n"}


def make_dataset(url: str) -> RemoteDataset:
    files = [RemoteFile(name, hashlib.sha256(text).hexdigest()) for name, text in TEXTS.items()]
    files[1] = RemoteFile("train.de.gz", files[1].sha256, "train_german.gz")
    return RemoteDataset(url, "two lines", "none", tuple(files))


class FailingHandler(http.server.SimpleHTTPRequestHandler):
    """A handler that can fail in the usual ways."""

    def do_GET(self) -> None:
        failure = getattr(self.server, "failure", None)
        if failure == "cut off":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"\x1f\x8b and then nothing")
        elif failure == "a page":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>please log in</html>")
        elif failure == "broken":
            self.send_error(503, "overloaded")
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "train.en.gz").write_bytes(gzip.compress(TEXTS["train.en.gz"]))
    (folder / "train_german.gz").write_bytes(gzip.compress(TEXTS["train.de.gz"], 1))

    class Handler(FailingHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setitem(DATASETS, "tiny", make_dataset(f"http://127.0.0.1:{server.server_port}"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_downloaded_dataset_is_found_by_name(
    origin: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    output = io.StringIO()
    folder = download_dataset("tiny", console=Console(file=output, width=200))
    assert folder == tmp_path / "data" / "tiny"
    assert sorted(path.name for path in folder.iterdir()) == sorted(TEXTS)
    (pair,) = find_corpus("tiny/train", source="en", target="de")
    assert (pair.source, pair.target) == ("a dog", "ein Hund")
    size = len(gzip.compress(TEXTS["train.en.gz"]))
    for text in ("tiny: two lines", "licence: none", f"{size}/{size} bytes", "train.de.gz", f"Downloaded to {folder}"):
        assert text in output.getvalue()


def test_only_damaged_files_are_downloaded_again(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    folder = download_dataset("tiny", tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "train.de.gz").write_bytes(b"\x1f\x8bcut")
    download_dataset("tiny", tmp_path)
    assert (folder / "train.en.gz").stat().st_mtime_ns == first["train.en.gz"]
    assert gzip.decompress((folder / "train.de.gz").read_bytes()) == b"ein Hund\n"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("cut off", r"only \d+ of 100000 bytes were received"),
        ("a page", "has an unexpected text"),
        ("broken", "the server returned 503 overloaded"),
    ],
)
def test_failed_download_is_an_error_and_leaves_nothing(
    origin: http.server.HTTPServer, tmp_path: Path, failure: str, message: str
) -> None:
    origin.failure = failure  # type: ignore[attr-defined]
    with pytest.raises(JumokError, match=message):
        download_dataset("tiny", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_file_with_another_checksum_is_rejected(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    (tmp_path / "origin" / "train.en.gz").write_bytes(gzip.compress(b"another dog\n"))
    with pytest.raises(JumokError, match=r"an unexpected text .SHA-256 "):
        download_dataset("tiny", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("is_url", [True, False])
@pytest.mark.parametrize("remote_name", ["train_german.gz", "train.de.gz"])
def test_mirror_is_a_folder_or_a_url_with_either_name(
    origin: http.server.HTTPServer, tmp_path: Path, remote_name: str, is_url: bool
) -> None:
    (tmp_path / "origin" / "train_german.gz").rename(tmp_path / "origin" / remote_name)
    mirror = f"http://127.0.0.1:{origin.server_port}/" if is_url else str(tmp_path / "origin")
    folder = download_dataset("tiny", tmp_path / "data", mirror=mirror)
    assert gzip.decompress((folder / "train.de.gz").read_bytes()) == b"ein Hund\n"


def test_no_network_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "tiny", make_dataset("http://127.0.0.1:9"))  # a closed port
    with pytest.raises(JumokError, match=r"train\.en\.gz cannot be reached: .*Check the network.*--mirror"):
        download_dataset("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_download_keeps_existing_files(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    folder = download_dataset("tiny", tmp_path / "data")
    (folder / "train.de.gz").unlink()
    (tmp_path / "empty" / "tiny").mkdir(parents=True)
    origin.failure = "broken"  # type: ignore[attr-defined]
    for name in ("data", "empty"):
        with pytest.raises(JumokError, match="503"):
            download_dataset("tiny", tmp_path / name)
    assert [path.name for path in folder.iterdir()] == ["train.en.gz"]
    assert (tmp_path / "empty" / "tiny").is_dir()


def test_missing_mirror_folder_or_file_is_an_error(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere to download from; a URL begins with") as missing_folder:
        download_dataset("tiny", tmp_path / "data", mirror=str(tmp_path / "nowhere"))
    (tmp_path / "origin" / "train_german.gz").unlink()
    with pytest.raises(InputError, match=r"origin does not contain train_german\.gz or train\.de\.gz") as missing_file:
        download_dataset("tiny", tmp_path / "data", mirror=str(tmp_path / "origin"))
    assert "online" not in f"{missing_folder.value} {missing_file.value}"


def test_unknown_and_manual_datasets_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data set 'multi30'.*the data sets are: multi30k"):
        download_dataset("multi30", tmp_path)
    for name in download.MANUAL_DATASETS:
        with pytest.raises(InputError, match=f"{name} cannot be downloaded: it is "):
            download_dataset(name, tmp_path)


def test_table_of_datasets_is_complete() -> None:
    for dataset in DATASETS.values():
        assert dataset.url.startswith("https://")
        assert dataset.description
        assert dataset.license
        assert len({file.name for file in dataset.files}) == len(dataset.files)
        for file in dataset.files:
            assert file.name.endswith(".gz")
            assert len(bytes.fromhex(file.sha256)) == 32
