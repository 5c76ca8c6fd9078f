"""Build the site in build/docs/html: python docs/build.py [--lessons 02 03]

::

    docs/*.md, README ─────────► pages, links adapted ─┐
    sources, bench/results ────► pages and figures     ├─► build/docs/source ─► Sphinx ─► build/docs/html
    docs/lessons ──► executed ─► notebooks            ─┘

No step uses the network, and the site loads nothing from other servers.
"""

from __future__ import annotations

import argparse
import sys
import time

from builder import BUILD, DOCS, ROOT, benchmarks, lessons, pages, recipes, reference, viewer, written_paths
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
    """Write all pages and build them with Sphinx. The exit status is not zero if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lessons", nargs="*", metavar="NN", help="only these, as in 02 03, or none")
    options = parser.parse_args()
    begin = time.monotonic()
    source, out = BUILD / "source", BUILD / "html"

    site = pages.SiteSource(source)
    site.add_pages()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    overview = pages.extract_first_table(pages.extract_section(text, "## Where to find what"))
    site.add("where-table.txt", overview, readme)
    results = pages.extract_section(text, "## Results")
    site.add("results.md", f"# Results\n\n{results}\n", readme)
    site.add("results-table.txt", pages.extract_first_table(results), readme)
    korean = ROOT / "README.ko.md"
    text = korean.read_text(encoding="utf-8")
    text = text.replace("](docs/lessons)", "](lessons/index.md)")  # those in Korean
    site.add("ko/index.md", text + KOREAN, korean)
    reference.build(source)
    recipes.build(source)
    benchmarks.build(source)
    viewer.build(BUILD / "extra")
    try:
        lessons.build(DOCS / "lessons", BUILD / "lessons", source, options.lessons)
        benchmark_files = (ROOT / "bench" / "results").glob("*.json")
        lessons.build_page(DOCS / "beyond.py", BUILD / "lessons", source, benchmark_files)
    except lessons.LessonError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    site.add_sources()
    for path in source.rglob("*"):
        if path.is_file() and path not in written_paths:
            path.unlink()

    conf = str(DOCS / "builder")
    strict = ["-W", "--keep-going"] if options.lessons is None else []  # lessons name each other
    status = sphinx([*strict, "-a", "-q", "-c", conf, "-d", str(BUILD / "doctrees"), str(source), str(out)])
    if status == 0:
        print(f"{out / 'index.html'} ({time.monotonic() - begin:.0f} s)")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
