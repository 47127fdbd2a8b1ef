"""The file of ``--config``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click


def arguments_of(config: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a YAML file's options with those of the command line, which take precedence; the scheduler's one by one."""
    if config is None:
        return dict(given)
    import yaml

    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"{config} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise click.UsageError(f"{config} must hold options and their values, such as `gpus-per-node: 4`")
    arguments = {str(key).replace("-", "_"): value for key, value in content.items()}
    if isinstance(arguments.get("scheduler"), dict):
        own = {str(key).replace("-", "_"): value for key, value in arguments["scheduler"].items()}
        arguments["scheduler"] = own | given["scheduler"] if isinstance(given.get("scheduler"), dict) else own
        given = {key: value for key, value in given.items() if key != "scheduler" or not isinstance(value, dict)}
    return arguments | dict(given)
