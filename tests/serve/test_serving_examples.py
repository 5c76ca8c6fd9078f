"""The examples of docs/serving.md work."""

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
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:the voice does not know")]
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.S)
ADDRESS = "http://localhost:8000"


@pytest.fixture(scope="module")
def server(services: dict[str, Any], caption_service: Any, speak_service: Any) -> Iterator[RunningServer]:
    server = RunningServer({**services, "see": caption_service, "voice": speak_service}, ServerLimits())
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that an example sends, in the current folder."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.fromarray(draw_scene(2, 4).pixels).save("photo.jpg")


def test_every_task_has_examples() -> None:
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
        languages = [language for language, text in BLOCKS if re.search(rf'(?:8000|")/{path}\b(?!/)', text)]
        assert sorted(languages) == ["python", "sh"], path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "sh"])
def test_curl(server: RunningServer, text: str) -> None:
    assert ADDRESS in text
    command = text.replace(ADDRESS, server.url)
    process = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20, check=True)
    if "stream" in text:
        assert process.stdout.count("event: done\n") == 1
    elif "speech.wav" in text:
        assert Path("speech.wav").read_bytes().startswith(b"RIFF")
    else:
        assert "error" not in json.loads(process.stdout)


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_python(server: RunningServer, text: str) -> None:
    assert ADDRESS in text
    assert len(text.splitlines()) <= 12
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(text.replace(ADDRESS, server.url), {})
    assert output.getvalue().strip()
