"""A Slurm site whose hosts are containers: what tests do to it. `ci/slurm-docker/site up` makes it."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SITE = Path(__file__).parents[2] / "ci" / "slurm-docker" / "site"
NAME = os.environ.get("HPCGPU_SITE", "hpcgpu-site")
LOGINS = ("login1", "login2")
NODES = ("n0", "n1", "n2", "n3", "s0")
#: Reaches the login nodes alone.
LAPTOP = "laptop"
HOSTS = ("files", "db", "dbd", "ctl", *LOGINS, *NODES, LAPTOP)
USERS = ("ada", "bob")
PYTHON = "/opt/hpcgpu/bin/python"
#: Networks by name, and the interface that a compute node has there.
NETWORKS = {"clients": "eth0", "workers": "eth1"}
#: What all jobs of the QOS `budget` may use together; `ci/slurm-docker/etc/accounts` sets it.
BUDGET = "gres/gpu=60"
#: The files by which a test gives a host another clock.
CLOCK = ("/etc/ld.so.preload", "/etc/faketimerc")


class SiteError(RuntimeError):
    """The site did not do what was asked of it."""


class Answer(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


#: A busy container engine loses the last output of some commands (seen with docker.io 20.10), and the client of its
#: interface the first one, if it comes together with the header of the answer: the client does not read the
#: buffer from which it has read the header. So each output begins with `_BEGIN`, ends with `_END`, and stays in a file
#: of the host, which is read again where one of both is missing.
_BEGIN, _END = b"\x02", b"\x04"
_KEEPING = """
(umask 077; : > "$0.out"; : > "$0.err")
{ cd && "$@"; } > "$0.out" 2> "$0.err"
code=$?
echo $code > "$0.code"
printf '\\002'; cat "$0.out"; printf '\\004'
{ printf '\\002'; cat "$0.err"; printf '\\004'; } >&2
exit $code
"""


def wait_for(met: Callable[[], object], what: str, timeout: float, interval: float = 0.2) -> None:
    """Return once `met()` holds; SiteError when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not met():
        if time.monotonic() > deadline:
            raise SiteError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)


def why_not() -> str | None:
    """Why no test can use the site, or None if it runs."""
    try:
        import docker
    except ImportError:
        return "the package docker is not installed"
    try:
        engine = docker.from_env(timeout=10)
        running = {c.name.removeprefix(f"{NAME}-") for c in engine.containers.list(filters={"label": NAME})}
    except docker.errors.DockerException:
        return "no Docker engine answers"
    if missing := [host for host in HOSTS if host not in running]:
        return f"the site is not up (make test-site); without {' '.join(missing)}"
    return None


class Site:
    """The running site.

    Hosts are `files` (the server of home), `db`, `dbd`, `ctl`, `login1`, `login2`, `n0` to `n3`, `s0` and `laptop`;
    users are `ada` and `bob`. Whatever a test does to a host, `reset` mends.
    """

    def __init__(self) -> None:
        import docker

        self._engine = docker.from_env(timeout=300)

    # -- commands -----------------------------------------------------------------------------------------------------

    def exec(
        self,
        host: str,
        command: str | list[str],
        user: str = "ada",
        check: bool = True,
        timeout: float = 120,
        env: dict[str, str] | None = None,
    ) -> Answer:
        """Run a command in the user's home; text goes to bash. SiteError if it fails, unless `check` is false.

        A command that lasts longer than `timeout` seconds is killed; its code is 124 then, or 137.
        """
        words = ["bash", "-c", command] if isinstance(command, str) else command
        home, kept = "/" if user == "root" else f"/home/{user}", f"/dev/shm/.{secrets.token_hex(8)}"
        # A home that does not answer must not keep the engine from starting the command: `timeout` comes before `cd`.
        code, output = None, (None, None)
        with suppress(ValueError):  # the client has lost the beginning, and with it the type of what follows
            code, output = self._container(host).exec_run(
                ["timeout", "-k", "5", f"{timeout:g}", "bash", "-c", _KEEPING, kept, *words],
                user=user,
                workdir="/",
                environment={"HOME": home, "USER": user, **(env or {})},
                demux=True,
            )
        if code is None:  # the engine has lost the command, which still runs
            wait_for(lambda: self._kept(host, f"{kept}.code"), f"{host}: {shlex.join(words)} ends", timeout + 30)
            code = int(self._kept(host, f"{kept}.code"))
        parts = (
            part[1:-1] if part and part[:1] == _BEGIN and part[-1:] == _END else self._kept(host, f"{kept}.{which}")
            for part, which in zip(output, ("out", "err"), strict=True)
        )
        out, err = (part.decode(errors="replace") for part in parts)
        answer = Answer(code, out, err)
        if check and answer.code:
            raise SiteError(f"{host}: {shlex.join(words)}: exit status {answer.code}: {err.strip() or out.strip()}")
        return answer

    def _kept(self, host: str, path: str) -> bytes:
        """Return the output of a command that the engine lost, or that was killed."""
        for _ in range(20):
            try:
                read = ["sh", "-c", 'printf "\\002" && cat "$0" && printf "\\004"', path]
                done = self._container(host).exec_run(read, user="root", workdir="/", demux=True)
            except ValueError:  # see `_BEGIN`
                continue
            except Exception:  # the host has ended
                return b""
            part = done.output[0] or b""
            if done.exit_code or (part[:1] == _BEGIN and part[-1:] == _END):
                return part.removeprefix(_BEGIN).removesuffix(_END)
        raise SiteError(f"{host}: the engine loses each output")

    def python(self, host: str, program: str, *arguments: str, **how: Any) -> Answer:
        """Run a program of Python, given as text, by the Python that hpcgpu is installed for."""
        return self.exec(host, [PYTHON, "-c", program, *arguments], **how)

    def start(self, host: str, command: str, user: str = "ada", log: str = "/dev/null") -> None:
        """Start a command of bash that goes on in the background; its output goes to the file `log` on that host."""
        line = f"cd && exec setsid bash -c {shlex.quote(command)} > {shlex.quote(log)} 2>&1 < /dev/null"
        environment = {"HOME": f"/home/{user}", "USER": user}
        self._container(host).exec_run(["bash", "-c", line], user=user, environment=environment, detach=True)

    def put(self, host: str, path: str, text: str, user: str = "ada") -> None:
        """Write a file as the user."""
        self.exec(host, ["bash", "-c", 'printf %s "$2" > "$1"', "bash", path, text], user)

    def slurm(self, *command: str, host: str = "login1", user: str = "root") -> str:
        """What a command of Slurm prints."""
        return self.exec(host, list(command), user).out

    def jobs(self) -> dict[str, str]:
        """Jobs in the queue, by id, with their states."""
        lines = self.slurm("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def nodes(self) -> dict[str, str]:
        """The state of each node."""
        lines = self.slurm("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    # -- what happens at sites ----------------------------------------------------------------------------------------

    def pause(self, host: str) -> None:
        """Stop all processes of a host where they are. Its connections stay, and nobody answers."""
        self._container(host).pause()

    def unpause(self, host: str) -> None:
        """Let the processes of a paused host go on."""
        self._container(host).unpause()

    def kill(self, host: str) -> None:
        """Switch a host off."""
        self._container(host).kill()

    def boot(self, host: str) -> None:
        """Switch a host on again, and return when its daemons have started."""
        self._container(host).start()
        wait_for(
            lambda: self.exec(host, ["test", "-e", "/run/started"], "root", check=False).code == 0,
            f"{host} starts",
            180,
        )

    def disconnect(self, host: str, network: str) -> None:
        """Pull the cable of a host to one network: `clients` or `workers`. Addresses stay, packets are lost."""
        self.exec(host, ["ip", "link", "set", NETWORKS[network], "down"], "root")

    def connect(self, host: str, network: str) -> None:
        """Put the cable back."""
        self.exec(host, ["ip", "link", "set", NETWORKS[network], "up"], "root")

    def stop_controller(self) -> None:
        """End slurmctld."""
        self._stop("ctl", "slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld, and return when it answers."""
        self._daemon("ctl", "slurmctld")
        wait_for(lambda: " UP" in self.exec("ctl", "scontrol ping", "root", check=False).out, "slurmctld answers", 150)

    def stop_accounting(self) -> None:
        """End slurmdbd."""
        self._stop("dbd", "slurmdbd")

    def start_accounting(self) -> None:
        """Start slurmdbd, and return when sacct answers."""
        self._daemon("dbd", "slurmdbd")
        wait_for(lambda: self.exec("login1", "sacct", "root", check=False).code == 0, "slurmdbd answers", 150)

    def fill_home(self) -> None:
        """Leave no room in home: who writes there reads that no space is left on the device."""
        self._gluster("set", "storage.reserve", "99")  # percent; 100 would be bytes
        full = lambda: "No space left" in self.exec("login1", "echo text > .full", check=False).err  # noqa: E731
        wait_for(full, "home is full", 150)

    def empty_home(self) -> None:
        """Make room in home, if it is full."""
        if "storage.reserve" in self.exec("files", "gluster volume info home", "root").out:
            self._gluster("reset", "storage.reserve")
            room = lambda: self.exec("login1", "echo text > .full && rm .full", check=False).code == 0  # noqa: E731
            wait_for(room, "home has room again", 150)

    def set_budget(self, limit: str) -> None:
        """Change what all jobs of the QOS `budget` may use together."""
        change = ("sacctmgr", "--immediate", "--quiet", "modify", "qos", "where", "name=budget", "set")
        self.slurm(*change, f"GrpTRESMins={limit}", host="ctl")

    # -- between tests ------------------------------------------------------------------------------------------------

    def reset(self) -> dict[str, str]:
        """Mend all hosts, cancel all jobs, end what users left running, and return when all nodes are idle.

        The jobs that were left, with their states, are what it returns.
        """
        with ThreadPoolExecutor(4) as several:
            list(several.map(self._mend, HOSTS))
        self.start_accounting()
        self.start_controller()
        self._mend_limits()
        left = {job: state for job, state in self.jobs().items() if state != "COMPLETING"}
        for user in USERS:
            self.slurm("scancel", "--quiet", f"--user={user}")
        for host in (*LOGINS, LAPTOP):
            self.exec(host, f"pkill -KILL -u {','.join(USERS)}", "root", check=False)
        wait_for(lambda: not self.jobs(), "the queue is empty", 120)
        self.empty_home()
        self._mend_homes()
        if not self._idle():
            self.exec("ctl", "scontrol update nodename=ALL state=resume", "root", check=False)
        wait_for(self._idle, "all nodes are idle", 180)
        return left

    def _idle(self) -> bool:
        return self.nodes() == dict.fromkeys(NODES, "idle")

    def _mend(self, host: str) -> None:
        container = self._container(host)
        if container.status == "paused":
            self.unpause(host)
        elif container.status != "running":
            self.boot(host)
        mend = f"rm -f {' '.join(CLOCK)}"
        mend += f"; for i in {' '.join(NETWORKS.values())}; do ip link set $i up 2> /dev/null; done"
        if host in NODES:
            mend += "; pgrep -x slurmd > /dev/null || slurmd"
        self.exec(host, mend, "root", check=False)

    def _mend_homes(self) -> None:
        homes = " ".join(f"/home/{user}" for user in USERS)
        self.exec("login1", f"chmod 750 {homes}", "root")

    def _mend_limits(self) -> None:
        shut = [line.split()[0] for line in self.slurm("sinfo", "-h", "-o", "%R %a").splitlines() if " up" not in line]
        for partition in dict.fromkeys(shut):
            self.slurm("scontrol", "update", f"PartitionName={partition}", "State=UP", host="ctl")
        budget = self.slurm("sacctmgr", "-nP", "show", "qos", "where", "name=budget", "format=GrpTRESMins").strip()
        if budget != BUDGET:
            self.set_budget(BUDGET)

    def _gluster(self, verb: str, *words: str) -> None:
        self.exec("files", ["gluster", "--mode=script", "volume", verb, "home", *words], "root")

    def _runs(self, host: str, daemon: str) -> bool:
        return self.exec(host, ["pgrep", "-x", daemon], "root", check=False).code == 0

    def _daemon(self, host: str, daemon: str) -> None:
        if not self._runs(host, daemon):
            self.exec(host, [daemon], "root")

    def _stop(self, host: str, daemon: str) -> None:
        self.exec(host, ["pkill", "-x", daemon], "root", check=False)
        wait_for(lambda: not self._runs(host, daemon), f"{daemon} ends", 150)

    def _container(self, host: str) -> Any:
        return self._engine.containers.get(f"{NAME}-{host}")


if __name__ == "__main__":
    sys.exit(why_not())
