"""A Sphinx extension: ``extensions = ["hpcgpu.sphinx"]``.

The docs of hpcgpu, and of distributions that add a batch system, use it, so it is installed with hpcgpu. Directives
that only hpcgpu's own pages need are in ``docs/directives.py``.

``.. options:: WorkerOptions`` lists the options of one dataclass of `hpcgpu.options.shared_options_and_defaults`;
``.. options:: slurm`` those that only this batch system has. With ``:only: NAME`` it lists those whose names begin with
NAME.

``.. script:: slurm worker`` shows the script that the options in its content (the keyword arguments of a cluster) give.

Sphinx is no dependency of hpcgpu, so no other module imports this one.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from hpcgpu.batch import system_registry
from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.configuration.resolve import resolve
from hpcgpu.options import shared_options_and_defaults
from hpcgpu.options.declare import added, flag_of, names
from hpcgpu.options.documentation import kind_of
from hpcgpu.scripts.render import render


def _default(field: Any) -> str:
    if field.name == "python" or field.default in (None, (), ""):
        return ""
    value = str(field.default) if isinstance(field.default, Path) else field.default
    return repr(value).replace(str(Path.home()), "~")


class Options(SphinxDirective):
    """The options of one dataclass, as a definition list."""

    required_arguments = 1
    option_spec: ClassVar[Any] = {"only": str}

    def run(self) -> list[nodes.Node]:
        wanted = self.arguments[0]
        if wanted in system_registry.names():
            fields = option_classes(wanted).added()
        else:
            cls = getattr(shared_options_and_defaults, wanted)
            base = shared_options_and_defaults.JobOptions
            fields = names(cls) if cls is base else added(cls, base)
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
                facts.append(f"passed on as ``{flag_of(field)}``")
            lines += [f"``{name}`` : {', '.join(facts)}", f"    {field.metadata['doc']}", ""]
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, source=f"hpcgpu options {wanted}"), self.content_offset, node)
        return list(node.children)


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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("options", Options)
    app.add_directive("script", Script)
    return {"parallel_read_safe": True}
