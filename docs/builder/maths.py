r"""Maths as MathML, which browsers draw themselves: no script, and one font that is part of the site.

A Sphinx extension. ``$\sqrt{d}$`` in a page becomes MathML by latex2mathml while the site is built, so that
what cannot be read as LaTeX stops the build, and not the reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ziamath.fonts
from docutils import nodes
from latex2mathml import converter
from sphinx.errors import SphinxError

FONT = Path(ziamath.fonts.__file__).parent / "STIXTwoMath-Regular.ttf"  # under the Open Font License


def mathml(latex: str, display: str = "inline") -> str:
    """The same as MathML.

    >>> mathml("x")
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    try:
        made: str = converter.convert(latex, display=display)
    except Exception as error:  # whatever its parser stumbled over
        raise SphinxError(f"this is no LaTeX that can be drawn: {latex} ({error!r})") from error
    return made


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="maths">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
