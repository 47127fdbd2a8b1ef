"""Streams of a device that does everything at once."""

from __future__ import annotations

from types import SimpleNamespace


def get_current_stream() -> SimpleNamespace:
    return SimpleNamespace(ptr=0)
