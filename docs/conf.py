"""Configuration of the documentation: python -m sphinx -W -q docs docs/_build."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import hpcgpu  # noqa: E402

project = "hpcgpu"
author = "The hpcgpu developers"
copyright = author
release = version = hpcgpu.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "hpcgpu.sphinx"]
exclude_patterns = ["_build"]
html_theme = "pydata_sphinx_theme"
html_title = f"hpcgpu {version}"
default_role = "code"
smartquotes = False  # it makes a dash of --gres and curly quotes: what is copied from a page would not work

autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
