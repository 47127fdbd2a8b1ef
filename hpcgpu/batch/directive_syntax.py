"""Directives: the lines at the head of a job script that request what the job needs.

A `Syntax` describes the directives of one batch system; each system has one, in its own package.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import OptionError

if TYPE_CHECKING:
    from hpcgpu.options.shared_options_and_defaults import JobOptions


# Why a user's directive must not set an option, for several batch systems.
ONE_JOB = "a job of a cluster cannot be a job array"
CLUSTER_SETS = "hpcgpu sets it"
NEVER_STARTS = "the job would wait forever"
CLUSTER_WAITS = "hpcgpu waits for its jobs itself"
RESUBMITTED = "hpcgpu submits lost jobs again itself"


def quoted(value: object) -> str:
    r"""Quote a value for a directive in double quotes, with a backslash before ``"`` and ``\``."""
    text = str(value)
    refuse_control_characters(text)
    if text and all(c.isascii() and (c.isalnum() or c in "_./:,@%+=-") for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def refuse_control_characters(text: str) -> None:
    """Raise `OptionError` for a text that no directive can hold."""
    if bad := next((c for c in text if ord(c) < 32 or ord(c) == 127), None):
        raise OptionError(f"{text!r} holds the control character {bad!r}, which no directive can hold: remove it")


def _unchanged(job: JobOptions, directives: Directives) -> JobOptions:
    return job


@dataclass(frozen=True, kw_only=True)
class Syntax:
    """How the scripts of a batch system are written.

    Attributes
    ----------
    prefix : str
        Beginning of a directive's line: ``#SBATCH``.
    quote : callable
        Quotes a value for a directive.
    refused : mapping
        Options that a user's own directive must not set, and why.
    keyed : collection of str
        Options whose values have a name, which is then a part of the option: ``-l`` of ``-l walltime=1:00``.
    assigned : bool
        Directives are assignments, ``name = value``. Templates write the names in lower case; users may write them in
        either. A user's own value is written as it is, because it may be an expression.
    words : bool
        Options of several letters have one dash, and may have several values: ``-pe smp 8``. A value never follows its
        option without a space.
    few : bool
        The batch system has few options. So a user may skip directives that it does not have, which are for another
        batch system.
    filters, names : mapping
        Further filters and names for its templates.
    complete : callable
        Fills in options that this batch system needs and the user has not set.
    """

    prefix: str
    quote: Callable[[object], str] = quoted
    refused: Mapping[str, str] = field(default_factory=dict)
    keyed: Collection[str] = ()
    assigned: bool = False
    words: bool = False
    few: bool = False
    filters: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    names: Mapping[str, object] = field(default_factory=dict)
    complete: Callable[[JobOptions, Directives], JobOptions] = _unchanged

    def option(self, text: str) -> str:
        """Return the name of the option that a directive sets.

        It is ``--mem`` for ``--mem=0``, ``-l walltime`` for ``-l walltime=1:00``, and ``rank`` for ``Rank = Memory``.
        """
        if self.assigned:
            return text.split("=", 1)[0].strip().lower()
        words = text.split("=", 1)[0].split()
        if words and words[0][:2] in self.keyed:
            return " ".join([words[0][:2], *filter(None, [words[0][2:]]), *words[1:2]])
        return words[0] if words else ""


def parse_directive(text: str, syntax: Syntax) -> tuple[str, str | None]:
    """Split a user's directive into option and value: ``--mem=0``, ``-C gpu``, ``--exclusive``, ``--constraint="a&b"``.

    Raises
    ------
    OptionError
        It does not begin with an option, or is not an assignment where directives are assignments.
    """
    text = text.strip()
    if syntax.assigned:
        match = re.fullmatch(r"(\+?[A-Za-z_][\w.]*)\s*=\s*(.*[^\\])", text, re.ASCII)
        if match is None:
            raise OptionError(f"job_extra_directives: {text!r} is not an assignment, such as 'name = value'")
        return match[1].lower(), match[2]
    if not text.startswith("-") or text.strip("-") == "":
        raise OptionError(
            f"job_extra_directives: {text!r} does not begin with an option, such as '--exclusive' or '-C gpu'"
        )
    if text[:2] in syntax.keyed:
        option, value = syntax.option(text), text.partition("=")[2]
        if re.search(r",\w+=", value) and '"' not in value:
            raise OptionError(f"job_extra_directives: {text!r} sets more than one option: write one option per entry")
    elif text.startswith("--") and "=" in text and " " not in text.split("=", 1)[0]:
        option, value = text.split("=", 1)
    elif not syntax.words and not text.startswith("--") and len(text) > 2 and text[2] != " ":
        option, value = text[:2], text[2:]  # -pgpu
    else:
        option, _, value = text.partition(" ")
    value = value.strip()
    if not value:
        return option, None if "=" not in text else ""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise OptionError(f"job_extra_directives: {text!r}: {error}") from error
    if syntax.words:
        return option, " ".join(words)
    if len(words) != 1:
        raise OptionError(
            f"job_extra_directives: {text!r} holds more than one value: quote the value, or write one option per entry"
        )
    return option, words[0]


def _dashed(item: str, syntax: Syntax) -> str:
    """Return an option's name with its dashes, which users may omit.

    ``mem`` is ``--mem``, for PBS ``-l mem``; ``n`` is ``-n``.
    """
    name = item.strip()
    if syntax.assigned or name.startswith("-") or not name:
        return name
    if len(name.split("=", 1)[0]) == 1:
        return f"-{name}"
    return f"-l {name}" if syntax.keyed else f"--{name}"


def _spelled(option: str, whole: Iterable[str]) -> str:
    """Return the full name of an option that the user may have shortened.

    sbatch accepts any beginning of a long option, unless the beginning is itself an option.
    """
    shortened = option.startswith("--") and option != "--ntasks"
    return next((one for one in whole if shortened and one.startswith(option)), option)


class Directives:
    """The directives of one script: one ordered set, each option once.

    Parameters
    ----------
    syntax : Syntax
    skip : sequence of str
        Options to leave out, by any of their spellings (the name alone counts: ``-n`` is not ``-N``).
    extra : sequence of str
        The user's further directives.
    """

    def __init__(self, syntax: Syntax, skip: Sequence[str], extra: Sequence[str]) -> None:
        self.syntax = syntax
        self.skip = {option: item for item in skip if (option := syntax.option(_dashed(item, syntax)))}
        self.known: set[str] = set()
        self.extra = [parse_directive(item, syntax) for item in extra]
        self.owners: dict[str, str] = {}

    def asked(self, spelling: str) -> bool:
        """Whether an option is kept in the script."""
        self.known.add(spelling)
        return spelling not in self.skip

    def add(self, owner: str, *spellings_and_value: Any) -> str:
        """Return the line of one directive; empty if it is left out.

        `owner` is the option that sets it, or ``hpcgpu (why)`` where no option does.
        """
        *spellings, value = spellings_and_value
        self.known.update(spellings)
        if self.skip.keys() & set(spellings):
            return ""
        self.owners.update(dict.fromkeys(spellings, owner))
        if value is None or value is False:
            return ""
        return f"{self._line(spellings[-1], None if value is True else value)}\n"

    def further(self) -> str:
        """Return the lines of the user's own directives; call it after all others are made."""
        if not self.syntax.few and (
            unknown := [item for option, item in self.skip.items() if option not in self.known]
        ):
            raise OptionError(
                f"job_directives_skip: {unknown[0]!r} is not a directive of this script. Its directives are "
                f"{', '.join(sorted(self.known))}"
            )
        lines = []
        for i, (option, value) in enumerate(self.extra):
            if why := self.syntax.refused.get(_spelled(option, self.syntax.refused)):
                raise OptionError(f"job_extra_directives: {option} is not allowed: {why}")
            if option in (other for other, _ in self.extra[:i]):
                raise OptionError(f"job_extra_directives: {option} is given twice: remove one of the two")
            if owner := self.owners.get(_spelled(option, self.owners)):
                skip = f"add job_directives_skip=[{option!r}] to write it yourself"
                advice = f"remove it, or {skip}" if owner.startswith("hpcgpu ") else f"use that instead (or {skip})"
                raise OptionError(f"job_extra_directives: {option} is set by {owner}: {advice}")
            lines.append(self._line(option, value))
        return "\n".join(lines)

    def _line(self, option: str, value: object) -> str:
        if self.syntax.assigned:
            return f"{self.syntax.prefix} {option} = {self.syntax.quote(value)}"
        if value is None:
            return f"{self.syntax.prefix} {option}"
        if " " in option:  # -l walltime
            letter, name = option.split(" ", 1)
            return f"{self.syntax.prefix} {letter} {self.syntax.quote(f'{name}={value}')}"
        return f"{self.syntax.prefix} {option}{'=' if option.startswith('--') else ' '}{self.syntax.quote(value)}"
