"""Turns what a user writes into values, or raises an error that says what to write instead. Every function is pure.

Each takes the option's name first, so that every message names the option. The annotation of `value` says what users
may write: the signatures that type checkers see, the documentation and the command line are made from it.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any, cast

from dask.utils import parse_bytes, parse_timedelta

from hpcgpu.errors import OptionError
from hpcgpu.posix import paths
from hpcgpu.posix.archives import DECOMPRESSORS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")
_WORD = re.compile(r"(?!-)[A-Za-z0-9_.,:@+=%/-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WALLTIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")

#: Programs that start another program, which people write in front of `python`.
_LAUNCHERS = frozenset(
    ("apptainer", "singularity", "podman", "podman-hpc", "docker", "ch-run", "shifter", "enroot", "srun", "env")
)
#: The most jobs, nodes or cores; a larger number is a typing error.
_MOST = 1_000_000
#: The longest time, in seconds.
_LONGEST = 10 * 366 * 86400


def _shown(value: Any) -> str:
    """Return what a user gave, for a message: no longer than a line."""
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:80]}... ({len(shown)} characters)"


def text(name: str, value: str | Path) -> str:
    """One line of text without control characters."""
    if not isinstance(value, str | Path):
        advice = ": write it in quotes" if isinstance(value, bool | int | float | date) else ""
        raise OptionError(f"{name} must be a string, not {_shown(value)}{advice}")
    line = str(value)
    if bad := next((c for c in line if ord(c) < 32 or ord(c) == 127), None):
        raise OptionError(f"{name}={line!r} holds the control character {bad!r}: remove it")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in line):
        raise OptionError(f"{name}={line!r} is not valid text: write it in UTF-8")
    return line


def filled(name: str, value: str | Path) -> str:
    """One line of text that is not empty."""
    line = text(name, value)
    if not line.strip():
        raise OptionError(f"{name} is empty: write a value, or leave it out")
    return line


def word(name: str, value: str | int) -> str:
    """A name that the batch system knows: queue, account, feature; several may be joined by commas.

    A whole number is accepted too: dask reads an account of digits as a number from the environment.
    """
    number = isinstance(value, int) and not isinstance(value, bool)
    line = text(name, str(value) if number else cast("str", value))
    if not _WORD.fullmatch(line):
        raise OptionError(f"{name}={line!r} is not a valid name: use letters, digits and . _ - + : @ % = / ,")
    return line


def shebang(name: str, value: str) -> str:
    """First line of a script."""
    line = text(name, value)
    if not line.startswith("#!"):
        raise OptionError(f"{name}={line!r} does not begin with #!, such as '#!/bin/bash -l'")
    return line


def program(name: str, value: str | Path) -> str:
    """Path or name of a program: one word, though a path may hold spaces."""
    given = path(name, value)
    first, *more = given.split()
    if more and ("/" not in first or os.path.basename(first) in _LAUNCHERS):  # noqa: PTH119  text
        raise OptionError(
            f"{name}={_shown(given)} has several words, but must be one program. To run the jobs in a container, set "
            f"container to the image, and container_runtime; {name} is then the interpreter in the image"
        )
    return given


def image(name: str, value: str | Path) -> str:
    """The image of a container: a path, or a name that the container runtime knows."""
    given = path(name, value)
    if given.startswith("-"):
        raise OptionError(f"{name}={_shown(given)} begins with '-': write the path or the name of an image")
    return given


def container_mounts(name: str, value: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Directories of the node that are mounted in a container: ``FROM``, ``FROM:TO`` or ``FROM:TO:ro``."""
    mounts = lines(name, value)
    for i, mount in enumerate(mounts):
        parts = mount.split(":")
        if len(parts) > 3 or not all(parts) or "," in mount:
            raise OptionError(
                f"{name}[{i}]={mount!r} is not a mount: write '/data', '/data:/inside' or '/data:/inside:ro'. Paths "
                "cannot contain ':' or ',', because container runtimes use them as separators"
            )
        for part in parts[:2]:
            path_on_node(f"{name}[{i}]", part)
        if len(parts) > 2 and not re.fullmatch(r"[A-Za-z+=]+", parts[2]):
            raise OptionError(f"{name}[{i}]={mount!r}: {parts[2]!r} is not a mount option: write 'ro' or 'rw'")
    return tuple(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)


def container_runtimes(name: str, value: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Templates of the commands of container runtimes, by name."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a dict of names and templates, not {_shown(value)}")
    for key, template in value.items():
        word(name, key)
        filled(f"{name}[{key!r}]", template)
    return tuple(value.items())


def new_name(name: str, value: str) -> str:
    """A name of a cluster, a worker group or a profile: it becomes a file or directory, or part of other names."""
    line = text(name, value)
    if not _NAME.fullmatch(line):
        raise OptionError(
            f"{name}={line!r} is not a valid name: use up to 50 letters, digits and . _ -, and begin with a "
            "letter or digit"
        )
    return line


def interface(name: str, value: str) -> str | None:
    """A network interface, None for "auto"; Linux limits its name to 15 characters (IFNAMSIZ)."""
    line = text(name, value)
    if line == "auto":
        return None
    if not re.fullmatch(r"[^\s/,\"'$`\\;]{1,15}", line):
        raise OptionError(f"{name}={line!r} is not a network interface: a name has 1 to 15 characters, such as 'ib0'")
    return line


def profile_name(name: str, value: str) -> str:
    """The name of a site profile, which is a file."""
    line = text(name, value)
    if not isinstance(value, str) or not _NAME.fullmatch(line):
        raise OptionError(f"{name}={_shown(line)} is not the name of a profile: `hpcgpu profiles list` shows them")
    return line


def boolean(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} must be True or False, not {_shown(value)}")
    return value


def boolean_or(*allowed: str) -> Any:
    """Return a parser that accepts True, False, and these words."""

    def parse(name: str, value: Any) -> bool | str:
        if isinstance(value, bool) or (isinstance(value, str) and value in allowed):
            return value
        raise OptionError(f"{name} must be True, False or {', '.join(map(repr, allowed))}, not {_shown(value)}")

    parse.__annotations__["value"] = f"bool | Literal[{', '.join(map(repr, allowed))}]"
    return parse


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        advice = ": write it without quotes" if isinstance(value, str) and value.strip().isdecimal() else ", such as 4"
        raise OptionError(f"{name} must be a whole number, not {_shown(value)}{advice}")
    if value > _MOST:
        raise OptionError(f"{name} must be {_MOST} or less, not {_shown(value)}")
    if value < least:
        raise OptionError(f"{name} must be {least} or more, not {value}")
    return value


def positive(name: str, value: int) -> int:
    """A whole number from 1."""
    return _integer(name, value, 1)


def natural(name: str, value: int) -> int:
    """A whole number from 0."""
    return _integer(name, value, 0)


def walltime(name: str, value: str | timedelta) -> int:
    """Seconds, from ``[days-]hours:minutes:seconds``, ``minutes:seconds``, a text with a unit ("2h") or a timedelta."""
    advice = "write '02:00:00' (hours:minutes:seconds), '1-12:00:00' (with days) or '2h'"
    if isinstance(value, timedelta):
        seconds = math.ceil(value.total_seconds())
    elif not isinstance(value, str):
        raise OptionError(f"{name}={_shown(value)} has no unit: {advice} (quote it in YAML)")
    elif match := _WALLTIME.fullmatch(text(name, value).strip()):
        parts = [int(p) for p in match.group("first", "second", "third") if p is not None]
        days = int(match["days"] or 0)
        if match["days"] is None and len(parts) == 1:  # minutes to Slurm, seconds to PBS
            raise OptionError(f"{name}={value!r} has no unit: {advice} (quote it in YAML)")
        if any(p > 59 for p in parts[1:]) or (match["days"] is not None and parts[0] > 23):
            raise OptionError(f"{name}={value!r} is not a time: minutes and seconds are 59 at most; {advice}")
        if match["days"] is not None:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
            hours, minutes, rest = [*parts, 0, 0][:3]
        else:
            hours, minutes, rest = parts if len(parts) == 3 else (0, *parts)
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        seconds = math.ceil(duration(name, value, advice))
    if seconds <= 0:
        raise OptionError(f"{name}={value!r} must be longer than 0 seconds: {advice}")
    if seconds > _LONGEST:
        raise OptionError(f"{name}={_shown(value)} is more than ten years: {advice}")
    return seconds


def duration(
    name: str,
    value: str | float | timedelta,
    advice: str = "write a number of seconds or a text with a unit, such as '5m'",
) -> float:
    """Seconds, from a number, a text with a unit, or a timedelta."""
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float | timedelta):
            raise ValueError
        seconds = float(parse_timedelta(value, default="seconds"))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise OptionError(f"{name}={_shown(value)} is not a time: {advice}") from error
    if not seconds > 0:
        raise OptionError(f"{name}={_shown(value)} must be longer than 0 seconds: {advice}")
    if seconds > _LONGEST:
        raise OptionError(f"{name}={_shown(value)} is more than ten years: {advice}")
    return seconds


def duration_or_none(name: str, value: str | float | timedelta) -> float | None:
    """Seconds as `duration` reads them; 0 means never."""
    return None if value == 0 and not isinstance(value, bool) else duration(name, value)


def time_limit(name: str, value: str | float | timedelta | None) -> float | None:
    """The longest time to wait in seconds, as `duration` reads it; 0 means no wait, and None any time."""
    return value if value is None else 0.0 if value == 0 and not isinstance(value, bool) else duration(name, value)


def memory(name: str, value: str | float) -> int:
    """Bytes, from a number or a text with a unit."""
    advice = "write a text with a unit, such as '60GB' or '56GiB'"
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError
        size = int(parse_bytes(value))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise OptionError(f"{name}={_shown(value)} is not an amount of memory: {advice}") from error
    if size <= 0:
        raise OptionError(f"{name}={value!r} must be more than 0: {advice}")
    if size > 2**60:
        raise OptionError(f"{name}={_shown(value)} is more than an exabyte: {advice}")
    if size < 2**20:
        raise OptionError(f"{name}={value!r} is less than a megabyte: {advice}")
    return size


def size_or_fraction(name: str, value: str | float) -> str:
    """An amount of device memory as dask-cuda accepts it.

    It is bytes, a text with a unit, a fraction of the GPU's memory, or "auto".
    """
    if isinstance(value, float) and 0 < value <= 1:
        return str(value)
    if value == "auto":
        return "auto"
    try:
        if isinstance(value, str) and 0 < float(value) <= 1:
            return value
    except ValueError:
        pass
    memory(name, value)
    return str(value)


def lines(name: str, value: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """A list of single lines, such as directives or arguments."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise OptionError(f"{name} must be a list of strings, not {_shown(value)}")
    return tuple(
        text(f"{name}[{i}]", line) if "\t" not in str(line) else _tabbed(f"{name}[{i}]", line)
        for i, line in enumerate(value)
    )


def _tabbed(name: str, value: Any) -> str:
    text(name, value.replace("\t", " ") if isinstance(value, str) else value)
    return str(value)


def prologue(name: str, value: list[str] | tuple[str, ...] | str | Path) -> tuple[str, ...] | Path:
    """Shell lines, or the path of a file to source."""
    if isinstance(value, str | Path):
        file = path(name, value)
        if not os.path.isfile(file):  # noqa: PTH113  False also for a name that no filesystem takes
            raise OptionError(
                f"{name}={_shown(str(value))} is not a file: give a list of shell lines, or the path of a file to "
                "source"
            )
        return Path(file).absolute()
    return lines(name, value)


def environment(name: str, value: Mapping[str, str | float]) -> tuple[tuple[str, str], ...]:
    """Environment variables; a value may have any character but NUL, which no environment can contain."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a dict of names and values, not {value!r}")
    for key, content in value.items():
        if not isinstance(key, str) or not _VARIABLE.fullmatch(key):
            raise OptionError(f"{name}: {key!r} is not a valid name of an environment variable")
        if not isinstance(content, str | int | float) or "\0" in str(content):
            raise OptionError(f"{name}[{key!r}] must be a string without NUL, not {content!r}")
        if not str(content).isprintable() and any(0xD800 <= ord(c) <= 0xDFFF for c in str(content)):
            raise OptionError(f"{name}[{key!r}] is not valid text: {content!r}")
    return tuple((key, str(content)) for key, content in value.items())


def ucx_environment(name: str, value: Mapping[str, str | float]) -> tuple[tuple[str, str], ...]:
    """Environment variables of UCX."""
    variables = environment(name, value)
    for key, _ in variables:
        if not key.startswith(("UCX_", "UCXPY_")):
            raise OptionError(f"{name}: {key!r} is not a variable of UCX (UCX_...): use the option env")
    return variables


def resources(name: str, value: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Abstract resources of one Dask worker, as ``dask worker --resources`` takes them."""
    if not isinstance(value, Mapping):
        raise OptionError(f"{name} must be a dict such as {{'GPU': 1}}, not {value!r}")
    for key, amount in value.items():
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", key):
            raise OptionError(f"{name}: {key!r} is not a valid name of a resource: use letters, digits and . _ -")
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise OptionError(f"{name}[{key!r}] must be a number above 0, not {amount!r}")
    return tuple((key, float(amount)) for key, amount in value.items())


def command(name: str, value: str) -> str:
    """A command line, which is split as a shell does it."""
    line = text(name, value)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise OptionError(f"{name}={line!r}: {error}") from error
    if not words:
        raise OptionError(f"{name} is empty: write the name of a program")
    return line


def choice(*allowed: str) -> Any:
    """Return a parser that accepts these words only."""

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            shown = f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 1 else repr(allowed[0])
            raise OptionError(f"{name} must be {shown}, not {_shown(value)}")
        return str(value)

    parse.__annotations__["value"] = f"Literal[{', '.join(map(repr, allowed))}]"
    return parse


def path(name: str, value: str | Path) -> str:
    """A path; ``~`` and the variables of this program's environment, such as ``$SCRATCH``, are expanded."""
    line = filled(name, value)
    try:
        return text(name, paths.expand(line, os.environ))
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{name}={line!r}: {error}") from error


def path_on_node(name: str, value: str | Path) -> str:
    """A path that the job expands, because its variables have their values on the node."""
    line = filled(name, value)
    try:
        paths.check(line)
    except ValueError as error:
        raise OptionError(f"{name}={line!r}: {error}") from error
    if not line.startswith(("/", "~", "$")):
        raise OptionError(
            f"{name}={_shown(line)} is a relative path: write one that begins with '/', or with a variable such as "
            "'$TMPDIR'"
        )
    return line


def directory(name: str, value: str | Path) -> Path:
    """An absolute path, expanded as `path` does."""
    return Path(path(name, value)).absolute()


def existing_directory(name: str, value: str | Path) -> Path:
    there = directory(name, value)
    if not os.path.isdir(there):  # noqa: PTH112  likewise
        raise OptionError(f"{name}={_shown(str(value))} is not a directory")
    return there


def archive(name: str, value: str | Path) -> Path:
    """The path of a packed environment, expanded as `path` does."""
    file = directory(name, value)
    if not file.name.endswith(tuple(DECOMPRESSORS)):
        raise OptionError(
            f"{name}={_shown(str(value))} is not an archive: its name must end with {', '.join(DECOMPRESSORS)}"
        )
    return file


def notification(name: str, value: str | Callable[[Any], object]) -> str:
    """A command for sh, on one line. Only the cluster classes accept a function, and remove it from the options."""
    if callable(value):
        raise OptionError(f"{name} must be a command here, not a function: only the cluster classes take a function")
    return filled(name, value)


def listen_address(name: str, value: str) -> str:
    """A ``[host]:port`` to listen on."""
    line = text(name, value)
    if not re.fullmatch(r"[A-Za-z0-9_.\[\]:-]*:\d{1,5}", line):
        raise OptionError(f"{name}={line!r} is not an address: write ':8787' or '127.0.0.1:0'")
    return line
