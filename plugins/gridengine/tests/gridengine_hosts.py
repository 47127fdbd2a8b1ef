"""A real Grid Engine on several hosts of one machine, for the tests: each host is a set of Linux namespaces.

A login host, which has the qmaster and runs the user's programs, and two execution hosts, joined by a bridge. Each has
its own host name, network and processes; they share the filesystem. All of them end with the process that made them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from gridengine_bed import BedError, GridEngineBed

_NAMESPACES = ("--mount", "--uts", "--net", "--pid")
#: The first process of a host: bash collects the processes whose parents have ended. It ends with its input.
_FIRST = "hostname {name}; ip link set lo up; {more}; echo is up; read -r _"
_LOGIN = (
    "mount --bind {hosts} /etc/hosts; ip link add hosts type bridge; ip addr add {address}/24 dev hosts; "
    "ip link set hosts up"
)
_JOINED = (
    "ip link add {name} type veth peer name eth0 netns {pid}; ip link set {name} master hosts up; "
    "nsenter --target {pid} --net sh -c 'ip addr add {address}/24 dev eth0; ip link set eth0 up'"
)


def why_no_hosts() -> str:
    """Why this machine can have no such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make hosts of namespaces"
    if missing := [command for command in ("unshare", "nsenter", "ip") if shutil.which(command) is None]:
        return f"no {', '.join(missing)}"
    bridge = "ip link add hosts type bridge && ip link add one type veth peer name two"
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "sh", "-c", bridge], capture_output=True, text=True)
    return f"no host can be made of namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class GridEngineHosts(GridEngineBed):
    """One Grid Engine, on a login host and two execution hosts."""

    master = "login"
    hosts = ("node1", "node2")

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._made: dict[str, subprocess.Popen[str]] = {}
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate((self.master, *self.hosts), 1)}

    def on(self, host: str, *words: str) -> list[str]:
        """The words of a command that runs on a host."""
        return ["nsenter", "--target", str(self._first(host)), *_NAMESPACES, *words]

    def start(self) -> None:
        """Make the hosts, and start a daemon on each."""
        names = self.directory.parent / f"{self.directory.name}-hosts"
        names.write_text(
            "".join(f"{ip} {name}\n" for name, ip in {"localhost": "127.0.0.1", **self._addresses}.items())
        )
        self._make(self.master, _LOGIN.format(hosts=names, address=self._addresses[self.master]))
        super().start()

    def start_host(self, host: str) -> None:
        """Make an execution host, and start its execd."""
        self._make(host, ":")
        joined = _JOINED.format(name=host, pid=self._first(host), address=self._addresses[host])
        self._in_login(joined)
        super().start_host(host)

    def lose_host(self, host: str) -> None:
        """End all processes of a host at once, as if its power failed."""
        if host != self.master:
            self._in_login(f"ip link del {host}")  # so that no connection ends by a last word
        made = self._made.pop(host)
        made.communicate()

    def stop(self) -> None:
        """Cancel all jobs and end all hosts."""
        with suppress(Exception):
            self.cancel_all()
        for host in [*self.hosts, self.master]:
            if host in self._made:
                self.lose_host(host)
        shutil.rmtree(self.scratch, ignore_errors=True)

    # -- within -------------------------------------------------------------------------------------------------------

    def _name_hosts(self, common: Path) -> None:
        """/etc/hosts has the names."""

    def _in_login(self, commands: str) -> None:
        """Run commands in the login host's network, which sees the processes of all hosts."""
        subprocess.run(
            ["nsenter", "--target", str(self._first(self.master)), "--net", "sh", "-ec", commands], check=True
        )

    def _make(self, host: str, more: str) -> None:
        first = _FIRST.format(name=host, more=more)
        words = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-ec", first]
        around = words if host == self.master else self.on(self.master, *words)
        made = subprocess.Popen(around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if made.stdout is None or made.stdout.readline() != "is up\n":
            raise BedError(f"{host} cannot be made of namespaces")
        self._made[host] = made

    def _first(self, host: str) -> int:
        """The first process of a host, below the commands that made its namespaces."""
        pid = self._made[host].pid
        while Path(f"/proc/{pid}/comm").read_text() != "bash\n":
            [pid] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pid
