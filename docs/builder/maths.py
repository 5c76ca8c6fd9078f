r"""Maths as MathML, which browsers draw themselves: no script, and one font that is part of the site.

A Sphinx extension. ``$\sqrt{d}$`` in a page becomes MathML by latex2mathml while the site is built, so that
what cannot be read as LaTeX stops the build, and not the reader.
"""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml import converter
from sphinx.errors import SphinxError

# A font made for maths, under the Open Font License. Nothing else of this package is used.
FONT = Path(str(distribution("ziamath").locate_file("ziamath/fonts/STIXTwoMath-Regular.ttf")))


def latex_to_mathml(latex: str, display: str = "inline") -> str:
    """The same as MathML.

    >>> latex_to_mathml("x")
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    try:
        made: str = converter.convert(latex, display=display)
    except Exception as error:  # whatever its parser stumbled over
        raise SphinxError(f"this is no LaTeX that can be drawn: {latex} ({error!r})") from error
    if unknown := re.search(r"<mi>(\\\w+)</mi>", made):
        raise SphinxError(f"{unknown[1]} of {latex} is nothing that can be drawn")
    return made


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(latex_to_mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="maths">{latex_to_mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
