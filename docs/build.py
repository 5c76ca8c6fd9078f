"""Build the site: python docs/build.py [--lessons 02 03]; it lies in build/docs/html then.

::

    docs/*.md, README ─────────► links made to fit ─┐
    sources, bench/results ────► pages and figures  ├─► build/docs/source ─► Sphinx ─► build/docs/html
    docs/lessons ──► run, once ─► notebooks         ─┘

No step of it uses the network, and the site asks for nothing that is not in it.
"""

from __future__ import annotations

import argparse
import sys
import time

from builder import BUILD, DOCS, ROOT, benchmarks, lessons, pages, placed, recipes, reference, viewer
from sphinx.cmd.build import main as sphinx

KOREAN = """
```{toctree}
:hidden:

둘러보기 <tour>
하드웨어 <hardware>
속도 <benchmarks>
강의 <lessons/index>
```
"""


def main() -> int:
    """Gather and make all pages, then have Sphinx build them; the status is not zero if anything is amiss."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--lessons", nargs="*", metavar="NN", help="only these, as in 02 03, or none")
    given = asked.parse_args()
    begin = time.monotonic()
    source, out = BUILD / "source", BUILD / "html"

    gathered = pages.Gathered(source)
    gathered.pages()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    gathered.add("where-table.txt", pages.first_table(pages.section(text, "## Where to find what")), readme)
    told = pages.section(text, "## Results")
    gathered.add("results.md", f"# Results\n\n{told}\n", readme)
    gathered.add("results-table.txt", pages.first_table(told), readme)
    korean = ROOT / "README.ko.md"
    text = korean.read_text(encoding="utf-8")
    text = text.replace("](docs/lessons)", "](lessons/index.md)")  # those in Korean
    gathered.add("ko/index.md", text + KOREAN, korean)
    reference.build(source)
    recipes.build(source)
    benchmarks.build(source)
    viewer.build(BUILD / "extra")
    try:
        lessons.build(DOCS / "lessons", BUILD / "lessons", source, given.lessons)
        results = (ROOT / "bench" / "results").glob("*.json")
        lessons.page(DOCS / "beyond.py", BUILD / "lessons", source, results)
    except lessons.LessonError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    gathered.sources()
    for path in source.rglob("*"):
        if path.is_file() and path not in placed:
            path.unlink()

    conf = str(DOCS / "builder")
    strict = ["-W", "--keep-going"] if given.lessons is None else []  # lessons name each other
    status = sphinx([*strict, "-a", "-q", "-c", conf, "-d", str(BUILD / "doctrees"), str(source), str(out)])
    if status == 0:
        print(f"{out / 'index.html'} ({time.monotonic() - begin:.0f} s)")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
