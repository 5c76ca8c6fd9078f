"""The settings of Sphinx. `make docs` gathers what it reads into build/docs/source: see build.py."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jumok
from builder import BUILD, maths

project = "jumok"
author = "the authors of jumok"
copyright = author
release = jumok.__version__
html_title = "jumok"
html_theme = "furo"
html_static_path = ["static", str(maths.FONT)]
html_extra_path = [str(BUILD / "extra")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#8ab8f0", "color-brand-content": "#8ab8f0"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "builder.maths"]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_inline", "attrs_block"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # builder.lessons has run them
nb_output_stderr = "remove"
nb_render_markdown_format = "gfm"  # what lessons print as Markdown has tables
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
highlight_language = "text"
suppress_warnings = ["ref.python"]  # Tensor, Mask: names that two modules of torch's have are no matter here


def set_page_language(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Set the language of Korean pages: browsers select fonts, voices and hyphenation by it."""
    if page.startswith("ko/"):
        context["language"] = "ko"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("html-page-context", set_page_language)
