"""Configuration of the documentation: python -m sphinx -nWq docs docs/_build."""

import re
import sys
from pathlib import Path

from docutils import nodes
from markdown_it import MarkdownIt
from sphinx.util.docutils import SphinxDirective

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import hpcgpu  # noqa: E402

project = "hpcgpu"
author = "The hpcgpu developers"
copyright = author
release = version = hpcgpu.__version__

extensions = ["sphinx.ext.autodoc", "numpydoc", "hpcgpu.sphinx"]
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


class Markdown(SphinxDirective):
    """A file of the repository in Markdown, such as CHANGELOG.md: its headings become sections of the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = HERE / self.arguments[0]
        self.env.note_dependency(str(path))
        reader = MarkdownIt("commonmark").enable("table")
        found: list[nodes.Node] = []
        depth: dict[int, nodes.Element] = {}
        _title, _, text = path.read_text().partition("\n")
        tokens = reader.parse(text)
        while tokens:
            if tokens[0].type == "heading_open":
                level = int(tokens[0].tag[1:])
                title = tokens[1].content.replace("`", "")
                section = nodes.section("", nodes.title("", title), ids=[nodes.make_id(title)], names=[title])
                above = next((depth[n] for n in range(level - 1, 0, -1) if n in depth), None)
                depth = {n: node for n, node in depth.items() if n < level} | {level: section}
                (found if above is None else above).append(section)
                tokens = tokens[3:]
                continue
            end = next((n for n, token in enumerate(tokens) if token.type == "heading_open"), len(tokens))
            html = reader.renderer.render(tokens[:end], reader.options, {})
            html = re.sub(r'href="(?:docs/)?(\w+)\.(?:rst|md)"', r'href="\1.html"', html)
            html = html.replace("<table>", '<table class="table">')
            (depth[max(depth)] if depth else found).append(nodes.raw("", html, format="html"))
            tokens = tokens[end:]
        return found


def setup(app) -> None:
    """Register the directive."""
    app.add_directive("markdown", Markdown)
