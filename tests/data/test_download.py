"""Fetching data sets: whole and checked, or not at all."""

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


def made(address: str) -> RemoteDataset:
    files = [RemoteFile(name, hashlib.sha256(text).hexdigest()) for name, text in TEXTS.items()]
    files[1] = RemoteFile("train.de.gz", files[1].sha256, "train_german.gz")
    return RemoteDataset(address, "two lines", "none", tuple(files))


class Origin(http.server.SimpleHTTPRequestHandler):
    """A web server that can also fail in the usual ways."""

    def do_GET(self) -> None:
        trouble = getattr(self.server, "trouble", None)
        if trouble == "cut off":
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            self.wfile.write(b"\x1f\x8b and then nothing")
        elif trouble == "a page":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>please log in</html>")
        elif trouble == "broken":
            self.send_error(503, "overloaded")
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "train.en.gz").write_bytes(gzip.compress(TEXTS["train.en.gz"]))
    (folder / "train_german.gz").write_bytes(gzip.compress(TEXTS["train.de.gz"], 1))

    class Here(Origin):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as server:
        monkeypatch.setitem(DATASETS, "tiny", made(f"http://127.0.0.1:{server.server_port}"))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_data_set_is_fetched_and_found_by_name(
    origin: http.server.HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUMOK_DATA", str(tmp_path / "data"))
    shown = io.StringIO()
    place = download_dataset("tiny", console=Console(file=shown, width=200))
    assert place == tmp_path / "data" / "tiny"
    assert sorted(path.name for path in place.iterdir()) == sorted(TEXTS)
    (one,) = find_corpus("tiny/train", source="en", target="de")
    assert (one.source, one.target) == ("a dog", "ein Hund")
    size = len(gzip.compress(TEXTS["train.en.gz"]))
    for told in ("tiny: two lines", "licence: none", f"{size}/{size} bytes", "train.de.gz", f"Downloaded to {place}"):
        assert told in shown.getvalue()


def test_what_is_there_and_right_is_kept_and_what_is_wrong_is_fetched_again(
    origin: http.server.HTTPServer, tmp_path: Path
) -> None:
    place = download_dataset("tiny", tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    (place / "train.de.gz").write_bytes(b"\x1f\x8bcut")
    download_dataset("tiny", tmp_path)
    assert (place / "train.en.gz").stat().st_mtime_ns == first["train.en.gz"]
    assert gzip.decompress((place / "train.de.gz").read_bytes()) == b"ein Hund\n"


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        ("cut off", r"only \d+ of 100000 bytes were received"),
        ("a page", "has an unexpected text"),
        ("broken", "the server returned 503 overloaded"),
    ],
)
def test_trouble_is_told_and_nothing_is_kept(
    origin: http.server.HTTPServer, tmp_path: Path, trouble: str, told: str
) -> None:
    origin.trouble = trouble  # type: ignore[attr-defined]
    with pytest.raises(JumokError, match=told):
        download_dataset("tiny", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_another_text_is_refused(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    (tmp_path / "origin" / "train.en.gz").write_bytes(gzip.compress(b"another dog\n"))
    with pytest.raises(JumokError, match=r"an unexpected text .SHA-256 "):
        download_dataset("tiny", tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("as_address", [True, False])
@pytest.mark.parametrize("german", ["train_german.gz", "train.de.gz"])
def test_a_mirror_may_be_a_folder_or_an_address_with_either_name(
    origin: http.server.HTTPServer, tmp_path: Path, german: str, as_address: bool
) -> None:
    (tmp_path / "origin" / "train_german.gz").rename(tmp_path / "origin" / german)
    mirror = f"http://127.0.0.1:{origin.server_port}/" if as_address else str(tmp_path / "origin")
    place = download_dataset("tiny", tmp_path / "data", mirror=mirror)
    assert gzip.decompress((place / "train.de.gz").read_bytes()) == b"ein Hund\n"


def test_no_network_is_told_kindly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "tiny", made("http://127.0.0.1:9"))  # nobody listens there
    with pytest.raises(JumokError, match=r"train\.en\.gz cannot be reached: .*Check the network.*--mirror"):
        download_dataset("tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_a_failure_stays(origin: http.server.HTTPServer, tmp_path: Path) -> None:
    place = download_dataset("tiny", tmp_path / "data")
    (place / "train.de.gz").unlink()
    (tmp_path / "empty" / "tiny").mkdir(parents=True)
    origin.trouble = "broken"  # type: ignore[attr-defined]
    for folder in ("data", "empty"):
        with pytest.raises(JumokError, match="503"):
            download_dataset("tiny", tmp_path / folder)
    assert [path.name for path in place.iterdir()] == ["train.en.gz"]
    assert (tmp_path / "empty" / "tiny").is_dir()


def test_a_folder_that_is_not_there_or_lacks_a_file_is_told_as_such(
    origin: http.server.HTTPServer, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere to download from; a URL begins with") as no:
        download_dataset("tiny", tmp_path / "data", mirror=str(tmp_path / "nowhere"))
    (tmp_path / "origin" / "train_german.gz").unlink()
    with pytest.raises(InputError, match=r"origin does not contain train_german\.gz or train\.de\.gz") as lacks:
        download_dataset("tiny", tmp_path / "data", mirror=str(tmp_path / "origin"))
    assert "online" not in f"{no.value} {lacks.value}"


def test_unknown_names_and_data_that_nobody_offers_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no data set 'multi30'.*the data sets are: multi30k"):
        download_dataset("multi30", tmp_path)
    for name in download.MANUAL_DATASETS:
        with pytest.raises(InputError, match=f"{name} cannot be downloaded: it is "):
            download_dataset(name, tmp_path)


def test_the_table_is_sound() -> None:
    for data_set in DATASETS.values():
        assert data_set.url.startswith("https://")
        assert data_set.description
        assert data_set.license
        assert len({file.name for file in data_set.files}) == len(data_set.files)
        for file in data_set.files:
            assert file.name.endswith(".gz")
            assert len(bytes.fromhex(file.sha256)) == 32
