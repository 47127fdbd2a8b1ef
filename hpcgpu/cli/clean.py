"""The command that removes the directories of clusters that have ended."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.printing import age, echo, show
from hpcgpu.display.counts_and_durations import counted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpcgpu.errors import NotTrusted
    from hpcgpu.existing_clusters.clean import Ended


@click.command()
@click.option("--older-than", required=True, help="Only clusters that ended at least this long ago: 30d, 12h.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(older_than: str, dry_run: bool, yes: bool) -> None:
    """Remove the directories of clusters that have ended, with their logs. Shows them and asks before.

    Never removes the directory of a cluster with jobs that live or that the queue does not know, one that others can
    change, or scripts of `hpcgpu render`. Logs in a `log_directory` of your own stay.

    \b
    Example: hpcgpu clean --older-than 30d
    Exit status: 0, or 1 if a directory could not be removed.
    """
    from dask.utils import format_bytes

    from hpcgpu.configuration.resolve import cluster_directories
    from hpcgpu.existing_clusters.clean import remove, remove_leftovers
    from hpcgpu.options.values import duration

    limit, roots = duration("--older-than", older_than), cluster_directories()
    chosen = _chosen(roots, limit)
    if not chosen:
        left = [] if dry_run else remove_leftovers(roots)
        for error in left:
            echo(f"not completely removed: {error.filename}: {error.strerror}", err=True)
        click.echo("Nothing else to remove." if left else "Nothing to remove.")
        sys.exit(1 if left else 0)
    what = f"{counted(len(chosen), 'directory', 'directories')}, {format_bytes(sum(one.size for one in chosen))}"
    if dry_run:
        echo(f"Would remove {what}.")
        return
    if not yes:
        click.confirm(f"Remove {what}?", abort=True)
    left, removed = remove_leftovers(roots), 0
    for error in left:
        echo(f"not completely removed: {error.filename}: {error.strerror}", err=True)
    for one in chosen:
        try:
            remove(one)
            removed += 1
        except OSError as error:
            echo(f"{one.directory.path.name}: not completely removed: {error.filename}: {error.strerror}", err=True)
    not_removed = f", and not {len(chosen) - removed} of {len(chosen)}" if removed < len(chosen) else ""
    echo(f"Removed {counted(removed, 'directory', 'directories')}{not_removed}.")
    sys.exit(1 if left or not_removed else 0)


def _chosen(roots: Sequence[Path], older_than: float) -> list[Ended]:
    """Show what is to be removed, and what is old enough but stays."""
    from dask.utils import format_bytes

    from hpcgpu.existing_clusters.clean import Queues, ended, why_not
    from hpcgpu.existing_clusters.close_ended import close_ended
    from hpcgpu.existing_clusters.lookup import find

    def refuse(path: Path, error: NotTrusted) -> None:
        echo(f"{path.name}: not removed: {error}", err=True)

    close_ended(find(roots, lambda path, error: None))
    now, chosen, queues = time.time(), [], Queues()
    for one in ended(roots, refuse):
        why = why_not(one, queues, now=now, older_than=older_than)
        if not why:
            chosen.append(one)
        elif now - one.changed >= older_than:
            echo(f"{one.directory.path.name}: not removed: {why}", err=True)
    rows = [
        (one.directory.path.name, f"{age(now - one.changed)} ago", format_bytes(one.size), str(one.directory.path))
        for one in chosen
    ]
    if rows:
        show(("name", "ended", "size", "directory"), rows)
    return chosen
