"""Tests of the docs share docs_parts, and use `builder`, which lies in docs/ and builds the site."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "docs")]
