"""Configuration of the documentation: python -m sphinx -nWq docs docs/_build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import hpcgpu  # noqa: E402

project = "hpcgpu"
author = "The hpcgpu developers"
copyright = author
release = version = hpcgpu.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "hpcgpu.sphinx", "directives"]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
default_role = "code"
highlight_language = "none"  # of what is behind a double colon: output, not Python
smartquotes = False  # it makes a dash of --gres and curly quotes: what is copied from a page would not work

html_theme = "pydata_sphinx_theme"
html_title = f"hpcgpu {version}"
html_static_path = ["_static"]
html_css_files = ["hpcgpu.css"]
html_copy_source = False
html_theme_options = {
    "logo": {"text": "hpcgpu"},
    "navbar_center": [],  # all pages are in the sidebar, by what a reader wants to do
    "navbar_end": ["theme-switcher"],
    "article_header_start": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
}
html_sidebars = {"**": ["pages"]}

autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
