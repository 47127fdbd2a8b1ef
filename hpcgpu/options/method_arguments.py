"""Advice for arguments that a method does not have. Pure."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from hpcgpu.errors import OptionError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def checked(**advice: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a method raise `OptionError` for arguments that it does not have, with advice.

    Python alone raises a bare `TypeError`.

    Parameters
    ----------
    **advice : str
        What to write instead, by the names of arguments that other tools have.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise OptionError(
                    _refusal(method.__name__, signature, args[1:], kwargs, advice) or str(error)
                ) from None
            return method(*args, **kwargs)

        return call

    return decorate


def _refusal(
    call: str, signature: inspect.Signature, given: Sequence[Any], named: Mapping[str, Any], advice: Mapping[str, str]
) -> str:
    """Return what is wrong with these arguments; empty if the error has another cause."""
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    known = [parameter.name for parameter in parameters]
    for name in named:
        if name in advice:
            return f"{call}: there is no argument {name!r}: {advice[name]}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"the arguments are {', '.join(known)}"
            return f"{call}: there is no argument {name!r}: {hint}"
    positional = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if len(given) > len(positional):
        numbers = all(value is None or isinstance(value, int | float | str) for value in given) and len(given) <= len(
            known
        )
        meant = [f"{name}={value!r:.60}" for name, value in zip(known, given, strict=False) if value is not None]
        if not numbers or not meant or {name for name, _ in zip(known, given, strict=False)} & named.keys():
            meant = [f"{parameters[len(positional)].name}=..."]
        return f"{call} takes its arguments by their names: write {call}({', '.join(meant)})"
    return ""
