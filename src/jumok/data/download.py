"""Download of public data sets, with checksums.

A file is downloaded to a temporary name, its text is verified, and then it is renamed. Existing files with
the right checksum are kept. The checksum is that of the uncompressed *text*, so it does not depend on how a
file was compressed. A mirror, a URL or a folder with the same files, can replace the original source.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import DownloadColumn, Progress

from jumok.data.readers.dataset_files import rank_by_similarity
from jumok.data.readers.text_files import data_folder, open_decompressed
from jumok.errors import InputError, JumokError
from jumok.files import atomic_write

CHUNK_BYTES = 1 << 16
TIMEOUT_SECONDS = 30.0  # a connection without data for so long is closed


@dataclass(frozen=True)
class RemoteFile:
    """A gzipped file: its local name, the SHA-256 of its text, and its remote name if different."""

    name: str
    sha256: str
    remote_name: str = ""


@dataclass(frozen=True)
class RemoteDataset:
    """A data set: its URL, a description, its license and its files."""

    url: str
    description: str
    license: str
    files: tuple[RemoteFile, ...]


DATASETS = {
    "multi30k": RemoteDataset(
        "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw",
        "image captions in English, German and French: 29,000 to train, 1,014 to validate, 1,000 to test",
        "none stated; the pictures are Flickr's, the text is for research (Elliott et al. 2016, 2017)",
        (
            RemoteFile("train.en.gz", "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
            RemoteFile("train.de.gz", "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
            RemoteFile("train.fr.gz", "5925a3c18f1587b6b54b87743106e6e8ab93618edb6f65d19eac0621f853a10d"),
            RemoteFile("val.en.gz", "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"),
            RemoteFile("val.de.gz", "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"),
            RemoteFile("val.fr.gz", "5304e444d842e962b2dda4d816b70b22a1765b15401642b7ca37a67477e708dc"),
            RemoteFile(
                "test2016.en.gz",
                "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
                "test_2016_flickr.en.gz",
            ),
            RemoteFile(
                "test2016.de.gz",
                "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
                "test_2016_flickr.de.gz",
            ),
            RemoteFile(
                "test2016.fr.gz",
                "cb3160d69b002bb638e66cc7612fcd56cb0af82eadc9c142dedc438afb885ef6",
                "test_2016_flickr.fr.gz",
            ),
        ),
    )
}
# Data sets of our recipes that cannot be downloaded in this form.
MANUAL_DATASETS = {
    "europarl": "a split of our own of UDS-SFB-B6's direct Europarl, with Biçici's (2014) hand-aligned pairs",
    "koen": "a split of our own of the Korean Python and Django documentation, the Bible and Tatoeba",
    "hansards": "raeidsaqur/Hansard on GitHub, with the 447 hand-aligned pairs that awesome-align comes with",
}


def download_dataset(
    name: str, folder: Path | None = None, *, mirror: str | None = None, console: Console | None = None
) -> Path:
    """Download a data set to ``folder/NAME``, by default under ``JUMOK_DATA``. Returns that folder.

    ``mirror``: a URL or a folder with the same files, under their local or remote names. ``console``: shows
    the progress.
    """
    dataset = _get_dataset(name)
    destination = (data_folder() if folder is None else folder) / name
    address = (mirror or dataset.url).rstrip("/")
    if "://" not in address and not Path(address).is_dir():
        raise InputError(f"there is no folder {address} to download from; a URL begins with https://")
    console = console or Console(quiet=True)
    console.print(f"{name}: {dataset.description}\nfrom {address}\nlicence: {dataset.license}", markup=False)
    progress = Progress(*Progress.get_default_columns(), DownloadColumn(), console=console)
    with _remove_empty_folders_on_error(destination), progress:
        for file in dataset.files:
            task = progress.add_task(file.name, total=None)
            if _text_checksum(destination / file.name) == file.sha256:
                progress.update(task, total=1, completed=1, visible=False)
            else:
                names = [file.remote_name or file.name, *([file.name] if mirror else [])]
                urls = [f"{address}/{remote_name}" for remote_name in names]
                on_progress = functools.partial(progress.update, task)
                _download_file(file, destination / file.name, urls, on_progress)
    console.print(f"Downloaded to {destination}. In recipes, its name is {name}.", markup=False)
    return destination


@contextlib.contextmanager
def _remove_empty_folders_on_error(destination: Path) -> Iterator[None]:
    """If an error occurs, remove new folders that are still empty."""
    new_folders = [folder for folder in (destination, *destination.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty, or not created yet
            for folder in new_folders:
                folder.rmdir()
        raise


def _get_dataset(name: str) -> RemoteDataset:
    if name in DATASETS:
        return DATASETS[name]
    if name in MANUAL_DATASETS:
        raise InputError(
            f"{name} cannot be downloaded: it is {MANUAL_DATASETS[name]}. Put its files into the folder "
            f"{name} under {data_folder()} (set JUMOK_DATA to use another one), where recipes find it"
        )
    names = ", ".join(rank_by_similarity(name, list(DATASETS)))
    raise InputError(f"there is no data set {name!r} to download; the data sets are: {names}")


def _download_file(file: RemoteFile, path: Path, urls: list[str], on_progress: Callable[..., None]) -> None:
    """Download to a temporary name, check the text, rename."""
    with atomic_write(path) as part, _open_first_url(urls) as response:
        content_length = response.headers.get("Content-Length", "")
        total_bytes = int(content_length) if content_length.isdecimal() and len(content_length) < 19 else None
        num_bytes = _write_response(response, part, total_bytes, on_progress)
        if total_bytes is not None and num_bytes < total_bytes:
            raise JumokError(f"{response.url}: only {num_bytes} of {total_bytes} bytes were received; try again")
        checksum = _text_checksum(part)
        if checksum != file.sha256:
            problem = f"has an unexpected text (SHA-256 {checksum})" if checksum else "is damaged"
            raise JumokError(
                f"{response.url}: the file {problem}: it was changed at its source or in transit. It was not kept"
            )


def _write_response(
    response: http.client.HTTPResponse, path: Path, total_bytes: int | None, on_progress: Callable[..., None]
) -> int:
    """Write a response to a file. Returns the number of bytes."""
    num_bytes = 0
    with path.open("wb") as out:
        try:
            while chunk := response.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                out.write(chunk)
                on_progress(completed=num_bytes, total=total_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise JumokError(f"{response.url}: the download broke off after {num_bytes} bytes: {error}") from None
    return num_bytes


def _open_first_url(urls: list[str]) -> http.client.HTTPResponse:
    """Open the first URL that exists."""
    for num_left, url in enumerate(urls, 1 - len(urls)):
        try:
            absolute_url = url if "://" in url else Path(url).absolute().as_uri()
            response: http.client.HTTPResponse = urllib.request.urlopen(absolute_url, timeout=TIMEOUT_SECONDS)
            return response
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404 or not num_left:
                    raise JumokError(f"{url}: the server returned {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:  # no network, no such host, no such file
            if not num_left and "://" not in url:
                names = " or ".join(Path(name).name for name in dict.fromkeys(urls))
                raise InputError(f"the folder {Path(url).parent} does not contain {names}") from None
            if not num_left:
                reason = getattr(error, "reason", None) or error
                raise JumokError(
                    f"{url} cannot be reached: {reason}. Check the network, or set --mirror to another URL "
                    "or folder with the files"
                ) from None
    raise InputError("there is no URL to download from")


def _text_checksum(path: Path) -> str:
    """The checksum of the text of a file; "" if it is damaged or missing."""
    digest = hashlib.sha256()
    try:
        with open_decompressed(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except (OSError, EOFError, zlib.error, InputError):
        return ""
    return digest.hexdigest()
