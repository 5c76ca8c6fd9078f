"""The whole site, built as `make docs` does, but for its lessons: it asks for nothing that is not in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from docs_parts import DOCS, ROOT

FETCHED = re.compile(r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=\"([^\"]+)\"")
LINKED = re.compile(r"<link\b(?=[^>]*rel=\"(?:stylesheet|icon|preload)[^>]*)[^>]*?href=\"([^\"]+)\"")


@pytest.mark.slow
def test_the_site_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "build.py"), "--lessons"]
    here = os.environ | {"DOCS_BUILD": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=here)
    html = tmp_path / "html"
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    pages = sorted(html.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if page.parent == html / "viewer":
            # Its own policy forbids it to load anything.
            assert "default-src 'none'" in text
            continue
        for address in FETCHED.findall(text) + LINKED.findall(text):
            if address.startswith("data:"):
                continue
            assert "://" not in address, f"{page.name} asks for {address}"
            assert not address.startswith("//"), f"{page.name} asks for {address}"
            there = page.parent / unquote(re.split(r"[?#]", address)[0])
            assert there.exists(), f"{page.name}: there is no {address}"
    for style in html.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style


def test_korean_pages_say_so() -> None:
    from builder import conf

    context = {"language": "en"}
    conf.set_page_language(None, "ko/lessons/02_mechanism", "", context, None)
    assert context["language"] == "ko"
    context = {"language": "en"}
    conf.set_page_language(None, "lessons/02_mechanism", "", context, None)
    assert context["language"] == "en"


def test_the_style_is_ours_and_local() -> None:
    style = (DOCS / "builder" / "static" / "site.css").read_text(encoding="utf-8")
    assert 'url("STIXTwoMath-Regular.ttf")' in style
    assert "http" not in style
