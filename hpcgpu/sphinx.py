"""A Sphinx extension: ``extensions = ["hpcgpu.sphinx"]``.

It is for the docs of hpcgpu and of distributions that add a batch system.

``.. options:: WorkerOptions`` lists the options of one dataclass of `hpcgpu.options.common`; ``.. options:: slurm``
those that only this batch system has. With ``:only: NAME`` it lists those whose names begin with NAME.

``.. runtimes::`` lists the commands of the container runtimes that hpcgpu knows.

``.. upstream::`` lists what hpcgpu relies on in other projects, ``.. tested::`` the releases that it is tested with.

``.. json::`` lists what each command prints with ``--json``.

``.. script:: slurm worker`` shows the script that the options in its content (the keyword arguments of a cluster) give.

Sphinx is no dependency of hpcgpu: nothing else imports this module.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints, is_typeddict

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from hpcgpu import upstream
from hpcgpu.batch import registry
from hpcgpu.cli.output import OUTPUTS
from hpcgpu.configuration.classes import option_classes
from hpcgpu.configuration.resolve import resolve
from hpcgpu.options import common, profiles
from hpcgpu.options.documentation import kind_of
from hpcgpu.options.schema import names, own
from hpcgpu.releases import TESTED
from hpcgpu.scripts.container import RUNTIMES
from hpcgpu.scripts.render import render

__all__ = ["setup"]


def _default(field: Any) -> str:
    if field.name == "python" or field.default in (None, (), ""):
        return ""
    value = str(field.default) if isinstance(field.default, Path) else field.default
    return repr(value).replace(str(Path.home()), "~")


#: What a reader replaces in the lines that start a cluster with a profile.
_EXAMPLE = {"account": "m1234", "queue": "debug", "walltime": "1h", "memory": "256GB"}


def starting_lines(profile: profiles.Profile) -> str:
    """Return the three lines of Python that start a cluster at a site, with what the site needs from its users."""
    name = registry.system(profile.system).cluster_class.rpartition(":")[2]
    given = {"profile": profile.name, **{need: _EXAMPLE[need] for need in profile.needs}}
    arguments = "".join(f'{option}="{value}", ' for option, value in given.items())
    return f"from hpcgpu import {name}\ncluster = {name}({arguments}jobs=2)\nclient = cluster.get_client()\n"


class Profiles(SphinxDirective):
    """The profiles of sites, as a definition list: what each is for, and the lines that start a cluster there."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name in profiles.shipped():
            profile = profiles.load(name)
            lines += [f"``{name}``", f"    {profile.about} Needs {', '.join(profile.needs)}. {profile.notes}", ""]
            for topic in profiles.TOPICS:
                advice = profile.advice.get(topic)
                said = f"{advice.says} (`page <{advice.source}>`__, read {advice.read})" if advice else "not found."
                lines += [f"    {topic.capitalize()}: {said}", ""]
            lines += ["    .. code-block:: python", ""]
            lines += [f"        {line}" for line in starting_lines(profile).splitlines()] + [""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu/profiles"), 0, container)
        return list(container.children)


class Options(SphinxDirective):
    """The options of one dataclass, as a definition list."""

    required_arguments = 1
    option_spec: ClassVar[Any] = {"only": str}

    def run(self) -> list[nodes.Node]:
        wanted = self.arguments[0]
        if wanted in registry.names():
            fields = option_classes(wanted).own()
        else:
            cls = getattr(common, wanted)
            fields = own(cls, common.JobOptions) if cls is not common.JobOptions else names(cls)
        lines: list[str] = []
        for name, field in fields.items():
            if not name.startswith(self.options.get("only", "")):
                continue
            facts = [kind_of(field)]
            if default := _default(field):
                facts.append(f"default ``{default}``")
            if field.metadata["inherited"]:
                facts.append("inherited")
            if field.metadata["flag"]:
                facts.append(f"passed on as ``{field.metadata['flag']}``")
            lines += [f"``{name}`` : {', '.join(facts)}", f"    {field.metadata['doc']}", ""]
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source=f"hpcgpu options {wanted}"), self.content_offset, node)
        return list(node.children)


class Runtimes(SphinxDirective):
    """The templates of container runtimes, as a definition list."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        own = {name: text for system in registry.systems() for name, text in system.container_runtimes.items()}
        for name, text in {**RUNTIMES, **own}.items():
            found += [
                nodes.paragraph("", "", nodes.literal(name, name)),
                nodes.literal_block(text, text, language="text"),
            ]
        return found


class Script(SphinxDirective):
    """A job script, rendered now."""

    required_arguments = 2
    has_content = True

    def run(self) -> list[nodes.Node]:
        system, kind = self.arguments
        call = ast.parse(f"dict({' '.join(self.content)})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        fixed = {"name": "demo", "python": "/home/me/env/bin/python", "cluster_directory": "/home/me/.hpcgpu/clusters"}
        text = render(system, kind, resolve(system, fixed | given), Path("/home/me/.hpcgpu/clusters/demo"))
        return [nodes.literal_block(text, text, language="bash")]


class Upstream(SphinxDirective):
    """The table of `hpcgpu.upstream`, as a definition list for each distribution."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for distribution in dict.fromkeys(use.distribution for use in upstream.USES):
            lines += [f".. rubric:: {distribution}", ""]
            for use in (use for use in upstream.USES if use.distribution == distribution):
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
        self.state.nested_parse(StringList(lines, source="hpcgpu.upstream"), 0, container)
        return list(container.children)


class Tested(SphinxDirective):
    """The releases that hpcgpu is tested with, as a definition list."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name, release in TESTED.items():
            lines += [f"``{name}``", f"    {release.lowest} to {release.highest}", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu.upstream"), 0, container)
        return list(container.children)


class Json(SphinxDirective):
    """What each command prints with ``--json``, from `hpcgpu.cli.output`, as a definition list for each type."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        shapes: list[Any] = []
        for command, shape in OUTPUTS.items():
            lines += [f"``hpcgpu {command}``", f"    {_in_words(shape)}.", ""]
            shapes += _typed_dicts(shape)
        for shape in dict.fromkeys(shapes):
            comments = ModuleAnalyzer.for_module(shape.__module__).find_attr_docs()
            lines += [f".. rubric:: {shape.__doc__.removesuffix('.')}", ""]
            for name, kind in get_type_hints(shape).items():
                comment = " ".join(comments.get((shape.__name__, name), ()))
                lines += [f"``{name}`` : {_in_words(kind)}", f"    {comment}" if comment else "    ..", ""]
        container = nodes.Element()
        self.state.nested_parse(StringList(lines, source="hpcgpu.cli.output"), 0, container)
        return list(container.children)


def _typed_dicts(shape: Any) -> list[Any]:
    """Return the `TypedDict` classes of a type, each before those that it holds."""
    if is_typeddict(shape):
        return [shape, *(one for kind in get_type_hints(shape).values() for one in _typed_dicts(kind))]
    return [one for kind in get_args(shape) for one in _typed_dicts(kind)]


def _in_words(shape: Any) -> str:
    """Return what JSON holds, in words."""
    origin, of = get_origin(shape), get_args(shape)
    if is_typeddict(shape):
        return str(shape.__doc__).removesuffix(".").lower()
    if origin is list:
        return f"a list, each item: {_in_words(of[0])}"
    if origin is dict:
        return f"an object, each value: {_in_words(of[1])}"
    if origin is Literal:
        return "text"
    if of:
        return " or ".join(_in_words(one) for one in of)
    return {str: "text", int: "number", float: "number", bool: "true or false", type(None): "null"}.get(shape, "any")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("options", Options)
    app.add_directive("runtimes", Runtimes)
    app.add_directive("tested", Tested)
    app.add_directive("upstream", Upstream)
    app.add_directive("profiles", Profiles)
    app.add_directive("script", Script)
    app.add_directive("json", Json)
    return {"parallel_read_safe": True}
