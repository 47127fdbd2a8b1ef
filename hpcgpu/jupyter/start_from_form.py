"""Starts a cluster in a process that outlives the Jupyter server; saves a form as a profile."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hpcgpu.errors import BatchError, OptionError
from hpcgpu.options import values
from hpcgpu.posix.ownership import private_directory
from hpcgpu.posix.printable import printable
from hpcgpu.profiles import site_profiles

_OPTION = re.compile(r"[a-z][a-z_-]*")
#: Options of the command that the page sets, or that read files.
_FIXED = ("name", "wait", "json", "config", "shutdown_on_close", "help")
#: The source of a profile that was saved here.
_SOURCE = "saved in Jupyter"
#: Characters of the command's words that a page shows.
_WORDS = 8000


def arguments(request: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``hpcgpu start`` for a request: ``{"name": ..., "options": {...}}``.

    Raises
    ------
    OptionError
        The request has another shape.
    """
    name = values.new_name("name", _text(request, "name"))
    return ["start", *_flags(_options(request)), "--no-wait", "--json", "--", name]


def _text(request: Mapping[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str):
        raise OptionError(f"{key} is missing, or is not text in quotes")
    return value


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    options = request.get("options", {})
    if not isinstance(options, dict):
        raise OptionError('options must be a JSON object, such as {"jobs": 2}')
    return _allowed(options)


def _allowed(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if not _OPTION.fullmatch(name) or name.replace("-", "_") in _FIXED:
            raise OptionError(
                f"{printable(name, 40)!r} cannot be set from Jupyter. `hpcgpu start --help` lists the options"
            )
    return {name: value for name, value in options.items() if value not in (None, "", [])}


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, list):
            yield from (f"--{flag}={_scalar(name, item)}" for item in value)
        elif name == "scheduler" and isinstance(value, dict):
            yield from (f"--scheduler={option}={_scalar(option, one)}" for option, one in _allowed(value).items())
        else:
            yield f"--{flag}={_scalar(name, value)}"


def _scalar(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OptionError(f"{name} must be a number, or text in quotes")
    return values.text(name, str(value))


def run(argv: list[str]) -> dict[str, Any]:
    """Run the command until the queue has the scheduler job; return what it prints.

    The command has its own session and writes to a file, so it continues if the Jupyter server ends meanwhile.

    Raises
    ------
    OptionError
        An option is not valid: nothing was submitted.
    BatchError
        The cluster was not started; the message is that of the command.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hpcgpu", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        out.seek(0)
        err.seek(0)
        words = printable(err.read().decode(errors="replace").strip()[-_WORDS:], None, lines=True)
        if done.returncode == 0:
            started: dict[str, Any] = json.loads(out.read())
            return started | {"messages": words}
    words = words.rpartition("Error: ")[2]
    raise (OptionError if done.returncode == 2 else BatchError)(
        words or f"`hpcgpu start` ended with exit code {done.returncode}, and printed nothing"
    )


def _spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in the form of a configuration file."""
    return {
        option.replace("_", "-"): _spelled(value) if option == "scheduler" and isinstance(value, dict) else value
        for option, value in options.items()
    }


def save(request: Mapping[str, Any]) -> Path:
    """Save a form as a profile of the user's: ``{"name": ..., "options": {"system": ..., "profile": ..., ...}}``.

    The options of the profile that the form uses become part of it.

    Raises
    ------
    OptionError
        The request has another shape, or the name belongs to a profile that was not saved here.
    """
    name = values.profile_name("name", _text(request, "name"))
    options = _options(request)
    system, parent = options.pop("system", None), options.pop("profile", None)
    base, needs = dict[str, Any](), list[str]()
    if parent is not None:
        origin = site_profiles.load(parent)
        base, system = dict(origin.options), origin.system
        needs = [option.replace("_", "-") for option in origin.needs]
    if not isinstance(system, str) or system == "auto":
        raise OptionError("a saved form needs a batch system: choose one instead of auto, or choose a profile")
    list(_flags(options))
    path = site_profiles.user_directory() / f"{name}.yaml"
    known = site_profiles.load(name) if name in site_profiles.names() else None
    if known is not None and known.path != path:
        raise OptionError(f"there is a profile named {name!r}: choose another name for this form")
    if known is not None and known.source != _SOURCE:
        raise OptionError(
            f"the profile {path} was not saved from Jupyter, and stays as it is: choose another name, or edit that file"
        )
    own = _spelled(options)
    if "scheduler" in own and isinstance(base.get("scheduler"), dict):  # merge the scheduler's options one by one
        own["scheduler"] = base["scheduler"] | own["scheduler"]
    content: dict[str, Any] = {"about": f"The form {name} in Jupyter.", "source": _SOURCE, "system": system}
    content |= {"needs": [option for option in needs if option not in own], "options": base | own}
    private_directory(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{name}-", delete=False) as draft:  # mode 0600
        draft.write(yaml.safe_dump(content, sort_keys=False))
    Path(draft.name).replace(path)
    return path
