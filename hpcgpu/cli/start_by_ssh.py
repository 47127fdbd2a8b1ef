"""`hpcgpu start --host`: starts a cluster on a login node, and waits for it from here."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.host_option import snapshot_by_ssh, without_config
from hpcgpu.cli.interrupts import interruptible
from hpcgpu.cli.printing import echo, person_waits, show_jobs, show_json
from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.existing_clusters.printed_snapshot import jobs_of
from hpcgpu.ssh.login import Login

if TYPE_CHECKING:
    from hpcgpu.cli.json_types import StartedJSON

_NO_WAIT, _JSON = "--no-wait", "--json"


def start_by_ssh(host: str, arguments: list[str]) -> None:
    """Start a cluster on a login node.

    The login node submits the jobs. The wait for the scheduler is on this machine: if the connection breaks meanwhile,
    the jobs keep their places in the queue, and the wait goes on.

    Raises
    ------
    HostError, HpcgpuError
        ssh failed, or the start did: then no job is left.
    """
    login, (words, config) = Login(host), without_config(arguments)
    wait, as_json = _NO_WAIT not in words, _JSON in words
    words = [word for word in words if word not in (_NO_WAIT, "--wait", _JSON)]
    with interruptible():
        started = _start(login, words, config, wait=wait)
    if as_json:
        show_json(started)
        return
    at = f"{shlex.quote(started['name'])} --host {shlex.quote(host)}"
    show_jobs(started["jobs"], how=f"hpcgpu status {at} --all")
    echo(f"directory  {started['directory']} on {host}")
    echo(f'Connect in Python: hpcgpu.connect("{host}:{started["name"]}"). End it: hpcgpu stop {at}')


def _start(login: Login, words: list[str], config: dict[str, Any] | None, *, wait: bool) -> StartedJSON:
    """Start the cluster; return what the login node reports of it."""
    try:
        # by the token it is the same start if the connection breaks, and the command runs again
        words = ["start", "--token", secrets.token_hex(16), _NO_WAIT, _JSON, *words]
        answer = login.call_again(words, config=config, interactive=person_waits())
    except KeyboardInterrupt:  # the far side has cancelled the jobs, and reported it
        sys.exit(130)
    started: StartedJSON = json.loads(answer.output)
    started["jobs"] = jobs_of(started["jobs"])
    if wait:
        name, directory = started["name"], str(started["directory"]).replace("$", "$$")  # $ begins a variable
        _wait(login, name, directory)
        started["jobs"] = snapshot_by_ssh(login, directory).jobs
    return started


def _wait(login: Login, name: str, directory: str) -> None:
    """Wait for the scheduler. If it cannot start any more, or at Ctrl-C, end the cluster."""
    try:
        login.call_again(["contact", "--wait", "--no-keys", "--", directory])
    except KeyboardInterrupt:
        click.echo(f"hpcgpu: the start of {name} was interrupted: its jobs are being cancelled", err=True)
        login.call_again(["stop", "--", directory])
        sys.exit(130)
    except ClusterError as error:
        try:
            login.call_again(["stop", "--", directory])
        except HpcgpuError as problem:
            raise ClusterError(f"{error}. Its other jobs may not be cancelled: {problem}") from error
        raise
