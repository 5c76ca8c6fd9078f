"""Every example of docs/serving.md, run against a server."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer

from jumok.data.builtin.scenes import draw_scene
from jumok.serve.limits import ServerLimits

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore:the voice does not know")
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.S)
ADDRESS = "http://localhost:8000"


@pytest.fixture(scope="module")
def running(services: dict[str, Any], caption_service: Any, speak_service: Any) -> Iterator[RunningServer]:
    one = RunningServer({**services, "see": caption_service, "voice": speak_service}, ServerLimits())
    yield one
    one.stop()


@pytest.fixture(autouse=True)
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that an example sends, where it is run."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_scene(2, 4).pixels).save("photo.jpg")


def test_there_is_one_of_each_for_every_task() -> None:
    for path in (
        "translate",
        "translate/stream",
        "classify",
        "tag",
        "answer",
        "fill-mask",
        "caption",
        "speak",
        "speak/stream",
        "attend/tag",
    ):
        kinds = [kind for kind, text in BLOCKS if re.search(rf'(?:8000|")/{path}\b(?!/)', text)]
        assert sorted(kinds) == ["python", "sh"], path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "sh"])
def test_curl(running: RunningServer, text: str) -> None:
    assert ADDRESS in text
    command = text.replace(ADDRESS, running.url)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20, check=True)
    if "stream" in text:
        assert done.stdout.count("event: done\n") == 1
    elif "speech.wav" in text:
        assert Path("speech.wav").read_bytes().startswith(b"RIFF")
    else:
        assert "error" not in json.loads(done.stdout)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "python"])
def test_python(running: RunningServer, text: str) -> None:
    assert ADDRESS in text
    assert len(text.splitlines()) <= 12
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(text.replace(ADDRESS, running.url), {})
    assert said.getvalue().strip()
