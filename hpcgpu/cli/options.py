"""The options of a cluster on the command line, from their one definition in `hpcgpu.options`.

A command that starts a cluster has the options that all batch systems share, and the own options of the system in
``--system``. Without ``--system`` it accepts the options of all systems. If the chosen system lacks an option, the
option is refused when the options are read.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.config_file import arguments_of
from hpcgpu.cli.host_option import Forwarded
from hpcgpu.cli.names import AUTO, SystemName

#: Options that the commands set themselves.
_FIXED = ("name", "shutdown_on_close")
_TRUTH = {"true": True, "false": False}


def system_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--system``."""
    return click.option(
        "--system",
        type=SystemName(auto=True),
        default=AUTO,
        show_default=True,
        help="Batch system. auto chooses the one that answers; if none is installed, the queue embedded in hpcgpu.",
    )(command)


class _GroupedOption(click.Option):
    """An option with a heading in the help of its command."""

    heading = "Options"


class ClusterCommand(click.Command):
    """A command with the options of a cluster; the options of one batch system have a heading of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = _named_system(self, args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if reason := _elsewhere(ctx.meta[__name__], error.option_name):
                raise click.UsageError(reason, ctx) from error
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *own, last = super().get_params(ctx)  # the last is --help
        return [*own, *_cluster_params(ctx.meta.get(__name__)), last]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "heading", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class ForwardedClusterCommand(Forwarded, ClusterCommand):
    """The same, on another host if ``--host`` is given."""


def _named_system(command: click.Command, args: Sequence[str]) -> str | None:
    """Return the batch system that the arguments of a command name; None if it is not certain which."""
    from hpcgpu.batch.system_registry import names

    known = names()
    given = list(args[: args.index("--")] if "--" in args else args)
    if any(param.name == "system" and isinstance(param, click.Argument) for param in command.params):
        found = {word for word in given if word in known}
        return found.pop() if len(found) == 1 else None
    words = [word.removeprefix("--system=") for word in given if word.startswith("--system=")]
    words += [after for word, after in itertools.pairwise(given) if word == "--system"]
    return words[-1] if words and words[-1] in known else None


@functools.cache
def _cluster_params(system: str | None) -> list[click.Parameter]:
    """Return the options of a cluster as parameters of a command."""
    params: list[click.Parameter] = []
    for name, (f, heading) in _fields(system).items():
        if name not in _FIXED:
            param = _option(f)
            param.heading = heading
            params.append(param)
    config = click.Option(
        ["--config"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="YAML file with options, named as in dask's configuration; the command line overrides it.",
    )
    scheduler = click.Option(
        ["--scheduler"],
        multiple=True,
        metavar="OPTION=VALUE",
        help="An option of the scheduler job, such as queue=small; may be repeated.",
    )
    return [config, *params, scheduler]


def _fields(system: str | None) -> dict[str, tuple[Field[Any], str]]:
    """Return the options of cluster and worker jobs by name, with their heading in the help."""
    from hpcgpu.options.declare import names
    from hpcgpu.options.shared_options_and_defaults import ClusterOptions, WorkerOptions

    shared = names(ClusterOptions) | names(WorkerOptions)
    fields = {name: (f, "Options") for name, f in shared.items()}
    for title, own in _own_options(system):
        fields |= {
            name: (f, f"Options of {title}") for name, f in own.items() if system is not None or name not in shared
        }
    return fields


def _own_options(system: str | None) -> Iterator[tuple[str, Mapping[str, Field[Any]]]]:
    """Yield title and own options of a batch system; with None, of all batch systems."""
    from hpcgpu.batch.system_registry import systems
    from hpcgpu.configuration.option_classes import option_classes

    for one in systems():
        if system in (None, one.name):
            yield one.title, option_classes(one.name).added()


def _elsewhere(system: str | None, flag: str) -> str:
    """Return which other batch system has an option; empty if none has."""
    from hpcgpu.configuration.option_classes import elsewhere, option_classes

    name = flag.removeprefix("--").replace("-", "_")
    reason = elsewhere(name, option_classes(system)) if system is not None else ""
    return reason.replace(name, flag, 1) if reason else ""


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Hand a `ClusterCommand` the options that were given as one dict, `arguments`."""

    @functools.wraps(command)
    def wrapped(*args: Any, config: Path | None, scheduler: Sequence[str], **given: Any) -> Any:
        system = click.get_current_context().meta.get(__name__)
        fields = {name: f for name, (f, _) in _fields(system).items() if name not in _FIXED}
        own = {name: given.pop(name) for name in list(given) if name in fields}
        arguments = {
            name: _typed(fields[name], value) for name, value in own.items() if value is not None and value != ()
        }
        if scheduler:
            arguments["scheduler"] = _scheduler(system, scheduler)
        return command(*args, arguments=arguments_of(config, arguments), **given)

    return wrapped


def _option(f: Field[Any]) -> _GroupedOption:
    from hpcgpu.options.declare import accepted

    flag, doc = f"--{f.name.replace('_', '-')}", f.metadata["doc"]
    kind = _kind(f)
    if kind == "flag":
        return _GroupedOption([f"{flag}/--no-{flag[2:]}"], default=None, help=doc)
    if kind in ("list", "dict"):
        metavar = "NAME=VALUE" if kind == "dict" else "TEXT"
        return _GroupedOption([flag], multiple=True, metavar=metavar, help=f"{doc} May be repeated.")
    if kind == "switch":
        return _GroupedOption([flag], type=click.Choice([*_TRUTH, *re.findall("'([^']*)'", accepted(f))]), help=doc)
    return _GroupedOption([flag], type=int if kind == "int" else str, help=doc)


def _kind(f: Field[Any]) -> str:
    """Return how an option is written: flag, switch (true, false or a word), list, dict, int, number (or a text) or
    text.
    """
    from hpcgpu.options.declare import accepted

    kind = accepted(f)
    if kind.startswith("bool |"):
        return "switch"
    if kind in ("bool", "int"):
        return {"bool": "flag", "int": "int"}[kind]
    for beginning, written in (("list", "list"), ("Mapping", "dict")):
        if kind.startswith(beginning):
            return written
    return "number" if "float" in kind else "text"


def _typed(f: Field[Any], value: Any) -> Any:
    """Convert a value of the command line to the type of the option."""
    kind = _kind(f)
    if kind == "list":
        return list(value)
    if kind == "dict":
        return {name: _number(text) if f.name == "resources" else text for name, text in _pairs(f.name, value)}
    if kind == "switch":
        return _TRUTH.get(value, value)
    return _number(value) if kind == "number" else value


def _scheduler(system: str | None, given: Sequence[str]) -> dict[str, Any] | str:
    from hpcgpu.options.declare import names
    from hpcgpu.options.shared_options_and_defaults import SchedulerOptions

    if list(given) == ["local"]:
        return "local"
    fields, arguments = names(SchedulerOptions), dict[str, Any]()
    for _, own in _own_options(system):
        fields = {**fields, **own}
    for name, text in _pairs("scheduler", given):
        name = name.replace("-", "_")
        kind = _kind(fields[name]) if name in fields else "text"
        if kind == "list":
            arguments[name] = [*arguments.get(name, []), text]
        elif kind == "dict":
            arguments[name] = {**arguments.get(name, {}), **dict(_pairs(name, [text]))}
        else:
            arguments[name] = _number(text) if kind in ("int", "number") else text
    return arguments


def _pairs(name: str, given: Sequence[str]) -> list[tuple[str, str]]:
    flag = f"--{name.replace('_', '-')}"
    for text in given:
        if "=" not in text:
            raise click.UsageError(f"{flag} {text!r}: write NAME=VALUE")
    return [(text.split("=", 1)[0], text.split("=", 1)[1]) for text in given]


def _number(text: str) -> float | str:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
