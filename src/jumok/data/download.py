"""Public data sets, fetched from where their makers put them, and checked.

A file is downloaded under a temporary name, unzipped in passing to check its text, and only then given its
name; one that is already there and right is kept. The checksum is of the *text*, so that it does not matter
who zipped a file, and when. A mirror, a web address or a folder with the same files, may stand in for the
origin.
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
from rich.progress import DownloadColumn, Progress, TaskID

from jumok.data.readers.formats import rank_by_similarity
from jumok.data.readers.text_files import data_folder, open_decompressed
from jumok.errors import InputError, JumokError
from jumok.files import atomic_write

__all__ = ["DATASETS", "RemoteDataset", "RemoteFile", "download_dataset"]

CHUNK_BYTES = 1 << 16  # bytes
TIMEOUT_SECONDS = 30.0  # seconds without a byte, after which a connection is given up
DownloadProgress = Callable[
    [int, int | None], None
]  # the bytes that have come, and that will in all, if that is known


@dataclass(frozen=True)
class RemoteFile:
    """A gzipped file of a data set: its name here, the SHA-256 of its text, its name there if another."""

    name: str
    sha256: str
    remote_name: str = ""


@dataclass(frozen=True)
class RemoteDataset:
    """A data set: where it comes from, what it is, and what its makers say of its use."""

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
    ),
}
# Data that recipes of ours use and that nobody offers in this form.
MANUAL_DATASETS = {
    "europarl": "a split of our own of UDS-SFB-B6's direct Europarl, with Biçici's (2014) hand-aligned pairs",
    "koen": "a split of our own of the Korean Python and Django documentation, the Bible and Tatoeba",
    "hansards": "raeidsaqur/Hansard on GitHub, with the 447 hand-aligned pairs that awesome-align comes with",
}


def download_dataset(
    name: str, folder: Path | None = None, *, mirror: str | None = None, console: Console | None = None
) -> Path:
    """Fetch a data set into the folder ``folder/NAME``, by default under ``JUMOK_DATA``; where it is.

    ``mirror`` is the address or the folder of the same files, under their names of here or there. The
    ``console`` shows how far it is.
    """
    data_set = _get_dataset(name)
    place = (data_folder() if folder is None else folder) / name
    address = (mirror or data_set.url).rstrip("/")
    if "://" not in address and not Path(address).is_dir():
        raise InputError(f"there is no folder {address} to fetch from; a web address begins with https://")
    console = console or Console(quiet=True)
    console.print(
        f"{name}: {data_set.description}\nfrom {address}\nlicence: {data_set.license}", markup=False
    )
    bars = Progress(*Progress.get_default_columns(), DownloadColumn(), console=console)
    with _remove_empty_folders_on_error(place), bars:
        for file in data_set.files:
            bar = bars.add_task(file.name, total=None)
            if _text_checksum(place / file.name) == file.sha256:
                bars.update(bar, total=1, completed=1, visible=False)
            else:
                names = [file.remote_name or file.name, *([file.name] if mirror else [])]
                tell = functools.partial(_update_progress, bars, bar)
                _download_file(file, place / file.name, [f"{address}/{one}" for one in names], tell)
    console.print(f"It is in {place}; recipes name it {name}.", markup=False)
    return place


@contextlib.contextmanager
def _remove_empty_folders_on_error(destination: Path) -> Iterator[None]:
    """What is made of a folder and those above it, and still empty when something fails, is taken away."""
    made = [folder for folder in (destination, *destination.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty, or not made yet
            for folder in made:
                folder.rmdir()
        raise


def _update_progress(progress: Progress, task: TaskID, num_bytes: int, total_bytes: int | None) -> None:
    progress.update(task, completed=num_bytes, total=total_bytes)


def _get_dataset(name: str) -> RemoteDataset:
    if name in DATASETS:
        return DATASETS[name]
    if name in MANUAL_DATASETS:
        raise InputError(
            f"{name} cannot be fetched: it is {MANUAL_DATASETS[name]}. Put its files into a folder {name} under "
            f"{data_folder()} (JUMOK_DATA may name another), and recipes find it there"
        )
    known = ", ".join(rank_by_similarity(name, list(DATASETS)))
    raise InputError(f"there is no data set {name!r} to fetch; there is: {known}")


def _download_file(file: RemoteFile, path: Path, urls: list[str], on_progress: DownloadProgress) -> None:
    """Download to a temporary name, check the text, rename."""
    with atomic_write(path) as part, _open_first_url(urls) as answer:
        told = answer.headers.get("Content-Length", "")
        size = int(told) if told.isdecimal() and len(told) < 19 else None
        came = _write_response(answer, part, size, on_progress)
        if size is not None and came < size:
            raise JumokError(f"{answer.url}: only {came} of {size} bytes came; try it again")
        found = _text_checksum(part)
        if found != file.sha256:
            what = f"another text than expected (SHA-256 {found})" if found else "damaged"
            raise JumokError(
                f"{answer.url}: what came is {what}: its makers changed it, or something on the way did. "
                "Nothing of it was kept"
            )


def _write_response(
    response: http.client.HTTPResponse, path: Path, total_bytes: int | None, on_progress: DownloadProgress
) -> int:
    """Write what comes; how many bytes that is."""
    came = 0
    with path.open("wb") as out:
        try:
            while chunk := response.read(CHUNK_BYTES):
                came += len(chunk)
                out.write(chunk)
                on_progress(came, total_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise JumokError(f"{response.url}: the download broke off after {came} bytes: {error}") from None
    return came


def _open_first_url(urls: list[str]) -> http.client.HTTPResponse:
    """The first address that has something."""
    for left, address in enumerate(urls, 1 - len(urls)):
        try:
            where = address if "://" in address else Path(address).absolute().as_uri()
            answer: http.client.HTTPResponse = urllib.request.urlopen(where, timeout=TIMEOUT_SECONDS)
            return answer
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 404 or not left:
                    raise JumokError(f"{address}: the server answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:  # no network, no such host, no such file
            if not left and "://" not in address:
                names = " or ".join(Path(one).name for one in dict.fromkeys(urls))
                raise InputError(f"the folder {Path(address).parent} does not hold {names}") from None
            if not left:
                reason = getattr(error, "reason", None) or error
                raise JumokError(
                    f"{address} cannot be reached: {reason}. Are you online? Another place for the files, "
                    "a web address or a folder, may be given with --mirror"
                ) from None
    raise InputError("there is no address to fetch from")


def _text_checksum(path: Path) -> str:
    """The checksum of a file's text; of a damaged file, none."""
    found = hashlib.sha256()
    try:
        with open_decompressed(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                found.update(chunk)
    except (OSError, EOFError, zlib.error, InputError):
        return ""
    return found.hexdigest()
