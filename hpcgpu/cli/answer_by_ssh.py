"""Commands for programs on other machines, which run them by ssh. People have no use for them."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.names import cluster_directory
from hpcgpu.cli.printing import echo
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from hpcgpu.existing_clusters.snapshot import Observer

#: Seconds without a question after which nobody shows the answers any more.
_UNASKED = 60.0


@click.command(hidden=True)
@cluster_directory
@click.option("--wait", is_flag=True, help="Wait for the scheduler.")
@click.option("--timeout", type=float, help="Seconds to wait at most.")
@click.option("--no-keys", is_flag=True, help="Without the keys.")
@click.option("--after", metavar="JOB", help="The scheduler that follows this scheduler job; wait for it.")
@click.option("--why", is_flag=True, help="With --after: do not wait, and say why the job has ended.")
def contact(
    directory: ClusterDirectory, wait: bool, timeout: float | None, no_keys: bool, after: str | None, why: bool
) -> None:
    """Print the address and the keys of a scheduler, for a program on another machine that asks by ssh."""
    from hpcgpu.client.contact_for_ssh import next_scheduler_of, scheduler_of

    if sys.stdout.isatty() and not no_keys:
        raise click.UsageError("the keys are not printed on a terminal")
    if after is not None:
        found = asdict(next_scheduler_of(directory, after, wait=not why))
    else:
        found = asdict(scheduler_of(directory, wait=wait, timeout=timeout, keys=not no_keys))
    click.echo(json.dumps(found))


@click.command(hidden=True)
@cluster_directory
@click.option("--config", type=click.Path(path_type=Path), required=True)
def order(directory: ClusterDirectory, config: Path) -> None:
    """Change the size of a cluster, or its worker groups."""
    from hpcgpu.orders import change_size

    given: dict[str, Any] = json.loads(config.read_text())
    commands: dict[str, Callable[..., str | None]] = {
        "scale": change_size.scale,
        "adapt": change_size.adapt,
        "add_worker_group": change_size.add_worker_group,
        "delete_worker_group": change_size.delete_worker_group,
    }
    if text := commands[given.pop("command")](directory, **given):
        echo(text)


@click.command("wait-for-workers", hidden=True)
@cluster_directory
@click.option("--n-workers", type=int)
@click.option("--timeout", type=float)
def wait_for_workers(directory: ClusterDirectory, n_workers: int | None, timeout: float | None) -> None:
    """Wait for the workers of a cluster."""
    from hpcgpu.display.progress import Progress, waiting_for
    from hpcgpu.errors import ClusterError
    from hpcgpu.existing_clusters.snapshot import Observer
    from hpcgpu.store import saved_options

    observer, options, began = Observer(directory), saved_options.read(directory), time.monotonic()
    with Progress(False) as progress:
        while True:
            found = observer.snapshot()
            wanted = [(group["target"] or 0) * options.worker(group["name"]).workers_per_job for group in found.groups]
            needed = n_workers if n_workers is not None else sum(wanted)
            known = bool(found.groups) or n_workers is not None
            if known and found.workers >= needed:
                return
            connected = (
                f"{found.workers} of {needed} workers are connected" if known else "its manager has not answered yet"
            )
            if found.state in ("closed", "ended"):
                raise ClusterError(found.end or f"cluster {found.name} has ended")
            if paused := [f"group {group['name']}: {group['paused']}" for group in found.groups if group["paused"]]:
                raise ClusterError("; ".join(paused))
            if timeout is not None and time.monotonic() - began > timeout:
                raise TimeoutError(f"{connected}, after {timeout:g} s")
            waiting = [
                job
                for job in found.jobs
                if job.kind == "worker" and job.state in ("pending", "running") and not job.workers
            ]
            progress.update(connected, waiting_for(waiting))
            time.sleep(1)


@click.command(hidden=True)
def answers() -> None:
    """Answer questions about clusters: read one in each line, and print the answer as a line."""
    observers: dict[str, Observer] = {}
    for question in _questions():
        sys.stdout.write(json.dumps(_answer(json.loads(question), observers), default=str) + "\n")
        sys.stdout.flush()


def _questions() -> Iterator[bytes]:
    """Yield the lines of the input, until it ends or nobody asks any more."""
    read = b""
    while select.select([0], [], [], _UNASKED)[0] and (data := os.read(0, 1 << 16)):
        *lines, read = (read + data).split(b"\n")
        yield from lines


def _answer(question: dict[str, str], observers: dict[str, Observer]) -> dict[str, Any]:
    """Return a snapshot of the cluster in a directory, or the end of a job's log; or let it be managed, or queried."""
    from hpcgpu.existing_clusters.logs import end_of
    from hpcgpu.existing_clusters.lookup import locate
    from hpcgpu.existing_clusters.snapshot import Observer

    path = question["directory"]
    try:
        directory = locate(Path(path))
        if job := question.get("log"):
            return {"log": end_of(directory, job)}
        if "manage" in question:
            from hpcgpu.orders.manager_on_login_node import manage_if_needed

            return {"manage": manage_if_needed(directory)}
        observer = observers.setdefault(path, Observer(directory))
        if "soon" in question:
            observer.soon()
            return {"soon": ""}
        return {"snapshot": observer.snapshot().as_json()}
    except Exception as error:  # the person at the other end reads it
        return {"error": str(error) or type(error).__name__}
