"""What makes a test a canary of the things in `uses` that name it."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import platform
import textwrap
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from uses import USES, Use


def canary(test: Callable[..., Any]) -> Callable[..., Any]:
    """Let a test that fails report who changed what, and which module of hpcgpu relies on it."""
    uses = [use for use in USES if use.canary == test.__name__]
    assert uses, f"nothing in tests/canaries/uses.py names {test.__name__}"
    if not inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        def watched(*arguments: Any, **named: Any) -> None:
            try:
                exist(uses)
                test(*arguments, **named)
            except Exception as error:
                pytest.fail(_sentence(uses, error))

        return watched

    @functools.wraps(test)
    async def awaited(*arguments: Any, **named: Any) -> None:
        try:
            exist(uses)
            await test(*arguments, **named)
        except Exception as error:
            pytest.fail(_sentence(uses, error))

    return awaited


def exist(uses: list[Use]) -> None:
    """Raise for a name that upstream no longer has: where hpcgpu overrides it, the test alone would not see that."""
    for use in uses:
        if missing := lacks(use.name):
            raise AttributeError(f"{use.name}: {missing}")


def lacks(name: str) -> str:
    """Return which part of a full name is missing; empty if none is.

    The search ends at a function, and at what a class gives to `self`: what follows is for the test to see. It ends at
    once for a name of no module.
    """
    parts = name.split(".")
    for number in range(len(parts) - 1, 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            owner: Any = importlib.import_module(".".join(parts[:number]))
            break
    else:
        return ""
    for part in parts[number:]:
        if part not in (members(owner) if inspect.isclass(owner) else vars(owner)):
            return f"{owner.__name__} has no {part}"
        owner = vars(owner).get(part)
        if not inspect.isclass(owner):
            return ""
    return ""


def members(cls: type) -> set[str]:
    """Return the names that a class of upstream has, those included that its methods give to `self`."""
    names = set(vars(cls)) | set(vars(cls).get("__annotations__", ()))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # written in C
        return names
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return names | {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def _sentence(uses: list[Use], error: Exception) -> str:
    uses = [use for use in uses if use.name.rpartition(".")[2] in str(error)] or uses
    names = ", ".join(use.name for use in uses)
    modules = ", ".join(dict.fromkeys(module.replace(".", "/") for use in uses for module in use.used_in))
    whose = ", ".join(f"{name} {version(name)}".strip() for name in dict.fromkeys(use.distribution for use in uses))
    what = names if len(uses) == 1 else f"one of {names}"
    return f"{whose} changed {what}: {modules} relies on it. {type(error).__name__}: {error}"


def version(distribution: str) -> str:
    """Return the installed version of a distribution of upstream; empty where it is not installed."""
    if distribution == "CPython":
        return platform.python_version()
    for name in (distribution, f"{distribution}-cu13", f"{distribution}-cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
