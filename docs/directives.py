"""The directives of hpcgpu's own pages; `hpcgpu.sphinx` has those that the docs of other distributions use too.

``.. markdown:: FILE`` shows a file of the repository, such as CHANGELOG.md.

``.. profiles::`` lists the profiles of sites, ``.. runtimes::`` the commands of the container runtimes that hpcgpu
knows.

``.. upstream::`` lists what hpcgpu relies on in other projects, ``.. tested::`` the releases that it is tested with.

``.. json::`` lists what each command prints with ``--json``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from docutils import nodes
from docutils.statemachine import StringList
from markdown_it import MarkdownIt
from numpydoc.docscrape import NumpyDocString
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from hpcgpu.batch import system_registry
from hpcgpu.cli.json_types import OUTPUTS
from hpcgpu.profiles import site_profiles
from hpcgpu.releases import TESTED
from hpcgpu.scripts.container import RUNTIMES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "canaries"))

from uses import USES  # noqa: E402

#: What a reader replaces in the lines that start a cluster with a profile.
_EXAMPLE = {"account": "m1234", "queue": "debug", "walltime": "1h", "memory": "256GB"}


def starting_lines(profile: site_profiles.Profile) -> str:
    """Return the three lines of Python that start a cluster at a site, with what the site needs from its users."""
    name = system_registry.system(profile.system).cluster_class.rpartition(":")[2]
    given = {"profile": profile.name, **{need: _EXAMPLE[need] for need in profile.needs}}
    arguments = "".join(f'{option}="{value}", ' for option, value in given.items())
    return f"from hpcgpu import {name}\ncluster = {name}({arguments}jobs=2)\nclient = cluster.get_client()\n"


class Profiles(SphinxDirective):
    """The profiles of sites, as a definition list: what each is for, and the lines that start a cluster there."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name in site_profiles.shipped():
            profile = site_profiles.load(name)
            lines += [f"``{name}``", f"    {profile.about} Needs {', '.join(profile.needs)}. {profile.notes}", ""]
            for topic in site_profiles.TOPICS:
                advice = profile.advice.get(topic)
                said = f"{advice.says} (`page <{advice.source}>`__, read {advice.read})" if advice else "not found."
                lines += [f"    {topic.capitalize()}: {said}", ""]
            lines += ["    .. code-block:: python", ""]
            lines += [f"        {line}" for line in starting_lines(profile).splitlines()] + [""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu/profiles"), 0, container)
        return list(container.children)


class Runtimes(SphinxDirective):
    """The templates of container runtimes, as a definition list."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        own = {name: text for system in system_registry.systems() for name, text in system.container_runtimes.items()}
        for name, text in {**RUNTIMES, **own}.items():
            found += [
                nodes.paragraph("", "", nodes.literal(name, name)),
                nodes.literal_block(text, text, language="text"),
            ]
        return found


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


class Upstream(SphinxDirective):
    """The table of ``tests/canaries/uses.py``, as a definition list for each distribution."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for distribution in dict.fromkeys(use.distribution for use in USES):
            lines += [f".. rubric:: {distribution}", ""]
            for use in (use for use in USES if use.distribution == distribution):
                links = [f"`{issue} <https://github.com/{issue.replace('#', '/issues/')}>`__" for issue in use.issues]
                lines += [
                    f"``{use.name}``",
                    f"    {use.why[0].upper()}{use.why[1:]}.",
                    "",
                    f"    :How: {use.kind.value}",
                    f"    :Where: {', '.join(f'``{place}``' for place in use.used_in)}",
                    f"    :Upstream issues: {', '.join(links) or 'none known'}",
                    f"    :Canary: ``{use.canary}``",
                    "",
                ]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="tests/canaries/uses.py"), 0, container)
        return list(container.children)


class Tested(SphinxDirective):
    """The releases that hpcgpu is tested with, as a definition list."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name, release in TESTED.items():
            lines += [f"``{name}``", f"    {release.lowest} to {release.highest}", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu.releases"), 0, container)
        return list(container.children)


class Json(SphinxDirective):
    """What each command prints with ``--json``, from `hpcgpu.cli.json_types`, as a definition list for each type."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        shapes: list[Any] = []
        for command, shape in OUTPUTS.items():
            lines += [f"``hpcgpu {command}``", f"    {_in_words(shape)}.", ""]
            shapes += _objects(shape)
        for shape in dict.fromkeys(shapes):
            described = _described(shape)
            lines += [f".. rubric:: {_summary(shape)}", ""]
            for name, kind in get_type_hints(shape).items():
                text = described.get(name, "").replace(". None", ". Null").replace("None", "null")
                lines += [f"``{name}`` : {_in_words(kind)}", f"    {text}" if text else "    ..", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu.cli.json_types"), 0, container)
        return list(container.children)


def _summary(shape: Any) -> str:
    """Return the first sentence of the docstring of a class."""
    return str(shape.__doc__).partition("\n")[0].partition(". ")[0].removesuffix(".")


def _described(shape: Any) -> dict[str, str]:
    """Return the description of each field: from the comments of a `TypedDict`, or the docstring of a dataclass."""
    if is_typeddict(shape):
        comments = ModuleAnalyzer.for_module(shape.__module__).find_attr_docs()
        return {name: " ".join(comments.get((shape.__name__, name), ())) for name in get_type_hints(shape)}
    found = NumpyDocString(inspect.getdoc(shape) or "")["Attributes"]
    return {name: " ".join(entry.desc) for entry in found for name in entry.name.split(", ")}


def _objects(shape: Any) -> list[Any]:
    """Return the classes in a type that become JSON objects; each stands before the classes of its own fields."""
    if is_typeddict(shape) or is_dataclass(shape):
        return [shape, *(one for kind in get_type_hints(shape).values() for one in _objects(kind))]
    return [one for kind in get_args(shape) for one in _objects(kind)]


def _in_words(shape: Any) -> str:
    """Return what JSON holds, in words."""
    origin, of = get_origin(shape), get_args(shape)
    if is_typeddict(shape) or is_dataclass(shape):
        return f"{_summary(shape)[0].lower()}{_summary(shape)[1:]}"
    if origin in (list, tuple):
        return f"a list, each item: {_in_words(of[0])}"
    if origin in (dict, Mapping):
        return f"an object, each value: {_in_words(of[1])}"
    if origin is Literal:
        return "text"
    if of:
        return " or ".join(_in_words(one) for one in of)
    words = {str: "text", Path: "text", int: "number", float: "number", bool: "true or false", type(None): "null"}
    return words.get(shape, "any")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("markdown", Markdown)
    app.add_directive("profiles", Profiles)
    app.add_directive("runtimes", Runtimes)
    app.add_directive("tested", Tested)
    app.add_directive("upstream", Upstream)
    app.add_directive("json", Json)
    return {"parallel_read_safe": True}
