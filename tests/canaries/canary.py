"""What makes a test a canary of the things in `hpcgpu.upstream` that name it."""

from __future__ import annotations

import functools
import inspect
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from hpcgpu.upstream import USES, Use


def canary(test: Callable[..., Any]) -> Callable[..., Any]:
    """Let a test that fails say who changed what, and which module of hpcgpu relies on it."""
    uses = [use for use in USES if use.canary == test.__name__]
    assert uses, f"nothing in hpcgpu/upstream.py names {test.__name__}"
    if not inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        def watched(*arguments: Any, **named: Any) -> None:
            try:
                test(*arguments, **named)
            except Exception as error:
                pytest.fail(_sentence(uses, error))

        return watched

    @functools.wraps(test)
    async def awaited(*arguments: Any, **named: Any) -> None:
        try:
            await test(*arguments, **named)
        except Exception as error:
            pytest.fail(_sentence(uses, error))

    return awaited


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
