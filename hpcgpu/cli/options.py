"""The options of a cluster on the command line, from their one definition in `hpcgpu.options.schema`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.systems import AUTO, SystemName

__all__ = ["arguments_of", "cluster_options", "system_option"]

#: Options that the commands decide themselves.
_FIXED = ("name", "shutdown_on_close")


def system_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--system``."""
    return click.option(
        "--system",
        type=SystemName(auto=True),
        default=AUTO,
        show_default=True,
        help="Batch system; auto takes the one that answers, or the queue embedded in hpcgpu where no other is installed.",
    )(command)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add every option of a cluster, and ``--config``; the command gets those that were given as one dict, `arguments`."""
    from hpcgpu.options.common import ClusterOptions, WorkerOptions
    from hpcgpu.options.schema import names

    fields = {name: f for name, f in (names(ClusterOptions) | names(WorkerOptions)).items() if name not in _FIXED}

    @functools.wraps(command)
    def wrapped(*args: Any, config: Path | None, scheduler: Sequence[str], **given: Any) -> Any:
        own = {name: given.pop(name) for name in list(given) if name in fields}
        arguments = {name: _typed(fields[name], value) for name, value in own.items() if value is not None and value != ()}
        if scheduler:
            arguments["scheduler"] = _scheduler(scheduler)
        return command(*args, arguments=arguments_of(config, arguments), **given)

    decorated: Callable[..., Any] = wrapped
    decorated = click.option(
        "--scheduler",
        multiple=True,
        metavar="OPTION=VALUE",
        help="An option of the scheduler job, such as queue=small; may be repeated.",
    )(decorated)
    for f in reversed(list(fields.values())):
        decorated = _option(f)(decorated)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="YAML file with options, named as in dask's configuration; the command line counts before it.",
    )(decorated)


def arguments_of(config: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Join the options of a YAML file with those of the command line, which count first; the scheduler's one by one."""
    if config is None:
        return dict(given)
    import yaml

    try:
        content = yaml.safe_load(config.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"{config} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise click.UsageError(f"{config} must hold options and their values, such as `gpus-per-node: 4`")
    arguments = {str(key).replace("-", "_"): value for key, value in content.items()}
    if isinstance(arguments.get("scheduler"), dict):
        own = {str(key).replace("-", "_"): value for key, value in arguments["scheduler"].items()}
        arguments["scheduler"] = own | given["scheduler"] if isinstance(given.get("scheduler"), dict) else own
        given = {key: value for key, value in given.items() if key != "scheduler" or not isinstance(value, dict)}
    return arguments | dict(given)


def _option(f: Field[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    flag, doc = f"--{f.name.replace('_', '-')}", f.metadata["doc"]
    kind = _kind(f)
    if kind == "flag":
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=doc)
    if kind in ("list", "dict"):
        metavar = "NAME=VALUE" if kind == "dict" else "TEXT"
        return click.option(flag, multiple=True, metavar=metavar, help=f"{doc} May be repeated.")
    return click.option(flag, type=int if kind == "int" else str, help=doc)


def _kind(f: Field[Any]) -> str:
    """Return how an option is written: flag, list, dict, int, number (or a text) or text."""
    from hpcgpu.options import values

    parse = f.metadata["parse"]
    kinds = {
        values.boolean: "flag",
        values.lines: "list",
        values.prologue: "list",
        values.environment: "dict",
        values.ucx_environment: "dict",
        values.resources: "dict",
        values.resource_list: "dict",
        values.positive: "int",
        values.natural: "int",
        values.duration: "number",
        values.duration_or_none: "number",
        values.size_or_fraction: "number",
    }
    return kinds.get(parse, "text")


def _typed(f: Field[Any], value: Any) -> Any:
    """Turn what the command line gives into what the option takes."""
    kind = _kind(f)
    if kind == "list":
        return list(value)
    if kind == "dict":
        return {name: _number(text) if f.name == "resources" else text for name, text in _pairs(f.name, value)}
    return _number(value) if kind == "number" else value


def _scheduler(given: Sequence[str]) -> dict[str, Any] | str:
    from hpcgpu.options.common import SchedulerOptions
    from hpcgpu.options.schema import names

    if list(given) == ["local"]:
        return "local"
    fields, arguments = names(SchedulerOptions), dict[str, Any]()
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
