"""Preload of worker processes that speak UCX: from its import on, their connections are authenticated."""

from __future__ import annotations

from hpcgpu.fabric import authentication

authentication.install()
