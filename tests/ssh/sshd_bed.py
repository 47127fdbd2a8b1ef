"""A login node that is reached by ssh, for the tests: a real sshd of this user on a port of this machine.

    python tests/ssh/sshd_bed.py install    # Debian or Ubuntu: OpenSSH, and the shells tcsh and fish

    with LoginNode(place) as node:
        subprocess.run(["ssh", "login1", "hostname"], env=os.environ | node.environment())

The far side has a home and an environment of its own, which `environment` adds to. The near side has an `ssh` on its
PATH that calls the real one with a configuration of its own. It has one host, `login1`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "slurm"))

from bed import BedError, as_root, cannot_install, free_ports, install_packages, is_root, processes, wait_for, which

#: By package, the commands that it brings.
BROUGHT = {
    "openssh-server": ("sshd",),
    "openssh-client": ("ssh", "ssh-keygen", "ssh-agent", "ssh-add"),
    "tcsh": ("tcsh",),
    "fish": ("fish",),
}
BED_NEEDS = ("openssh-server", "openssh-client")
#: Debian starts no sshd where this file is, neither now nor when the machine starts.
NOT_TO_BE_RUN = "/etc/ssh/sshd_not_to_be_run"
#: Names what a session of a login node started, in its environment.
MARK = "HPCGPU_TEST_LOGIN_NODE"
#: What sessions find on their PATH after the environment of the tests.
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
#: Variables of the tests that sessions have too: what makes clusters fast, and the pretended GPUs.
OF_THE_TESTS = ("DASK_DISTRIBUTED__", "LD_LIBRARY_PATH", "PYTHONPATH", "UCX_", "DASK_CUDA_TEST_")
CODE = "314159"
#: A ForceCommand that asks for a code on the terminal.
ASKS_FOR_A_CODE = (
    "exec 3<>/dev/tty || exit 1; printf 'Verification code: ' >&3; read -r code <&3; "
    f'[ "$code" = {CODE} ] || exit 1; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
)
#: A stack of PAM that asks for a code too, which a script checks.
ASKS_BY_PAM = """\
auth requisite pam_exec.so quiet expose_authtok {script}
auth required pam_permit.so
account required pam_permit.so
session required pam_permit.so
"""
#: A machine that does much else is slow.
SECONDS = 150.0


def missing_packages() -> list[str]:
    """The packages of which something is not there."""
    return [package for package, commands in BROUGHT.items() if not all(map(which, commands))]


def why_not() -> str | None:
    """Why no login node can run here, or None if one can."""
    if missing := [package for package in BED_NEEDS if package in missing_packages()]:
        return f"not installed: {' '.join(missing)} (run: python tests/ssh/sshd_bed.py install)"
    return None


def why_not_as_host() -> str | None:
    """Why a login node cannot have mounts and a host name of its own, or None if it can."""
    if not is_root():
        return "a login node with mounts or a host name of its own needs root"
    tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or "unshare fails" if tried.returncode else None


def install() -> None:
    """Install the packages that are missing. The sshd of Debian is not started."""
    missing = missing_packages()
    if "openssh-server" in missing and cannot_install() is None:
        subprocess.run(as_root("install", "-D", "/dev/null", NOT_TO_BE_RUN), check=True)
    install_packages(missing)


def in_shell(shell: str) -> str:
    """A ForceCommand that runs each command in another shell, as for a user whose login shell that is."""
    return f'exec {shell} ${{SSH_ORIGINAL_COMMAND:+-c "$SSH_ORIGINAL_COMMAND"}}'


def quoted(text: str) -> str:
    """An argument as sshd_config has it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def make_key(path: Path) -> str:
    """A new key at a path; the public one."""
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hpcgpu-test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def sshd_version() -> tuple[int, int]:
    """OpenSSH's version, such as (9, 2)."""
    said = subprocess.run([str(which("sshd")), "-V"], capture_output=True, text=True)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said.stderr + said.stdout)
    if not found:
        raise BedError("sshd -V names no version")
    return int(found[1]), int(found[2])


class LoginNode:
    """A login node, and the laptop from which it is reached; both in `place`.

    Parameters
    ----------
    place : Path
        A directory that does not exist. The far side's is ``place / "far"``, its home ``home``.
    environment : mapping of str, optional
        Variables of the far side's sessions. They take the place of what they have anyway, such as PATH.
    lines : sequence of str, optional
        Of sshd_config, such as "MaxSessions 1", "AllowTcpForwarding no", "AllowStreamLocalForwarding no",
        "ForceCommand ...". They come before the bed's own, so they win.
    as_host : sequence of str, optional
        Commands that root runs first, in namespaces for mounts and the host name that the far side has for itself,
        such as "hostname login1" or 'mount -t tmpfs -o size=8k none "$FAR_HOME"'. See `why_not_as_host`.
    code : bool
        After the key, sshd asks for `CODE` by keyboard-interactive. This needs `why_not_as_host` to be None.
    """

    def __init__(
        self,
        place: Path,
        *,
        environment: Mapping[str, str] | None = None,
        lines: Sequence[str] = (),
        as_host: Sequence[str] = (),
        code: bool = False,
    ) -> None:
        self.far, self.near = place / "far", place / "near"
        self.home = self.far / "home"
        self.log = self.far / "log"
        self.port = 0
        # Paths of sockets are short.
        self._short = Path(tempfile.mkdtemp(prefix="ssh-"))
        self.tmp, self._runtime = self._short / "far", self._short / "near"
        self._calls = self.near / "calls"
        self._known, self._config = self.near / "known_hosts", self.near / "config"
        self._authorized = self.far / "authorized_keys"
        self._lines = list(lines)
        self._as_host = list(as_host)
        if code:
            self._ask_by_pam()
        kept = {name: value for name, value in os.environ.items() if name.startswith(OF_THE_TESTS)}
        self._environment = kept | {
            "HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "DASK_HPCGPU__CLUSTER_DIRECTORY": str(self.home / "clusters"),
            "DASK_TEMPORARY_DIRECTORY": str(self.home / "dask"),
            "TMPDIR": str(self.tmp),
            "HPCGPU_QUEUE_DIRECTORY": str(self.home / "queue"),
            **(environment or {}),
            MARK: str(self.far),
        }
        self._hosts: dict[str, list[str]] = {"login1": []}
        self._process: subprocess.Popen[str] | None = None
        #: Sessions of listeners that ended.
        self._served: set[int] = set()
        self._readers: list[threading.Thread] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if reason := why_not() or (why_not_as_host() if self._as_host else None):
            raise BedError(f"this machine cannot host the bed: {reason}")
        for directory in (self.far, self.near, self.home, self.near / "bin"):
            directory.mkdir(mode=0o700, parents=True)
        for directory in (self._runtime, self.tmp):
            directory.mkdir(mode=0o700)
        make_key(self.far / "host_key")
        self._authorized.write_text(make_key(self.near / "id") + "\n")
        wrapper = self.near / "bin/ssh"
        wrapper.write_text(
            f"#!/bin/sh\nprintf '%s\\0' $# \"$@\" >> '{self._calls}'\n"
            f"exec '{shutil.which('ssh')}' -F '{self._config}' \"$@\"\n"
        )
        wrapper.chmod(0o700)
        if is_root():
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd confines itself there before the login
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        self.trust()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self._short, ignore_errors=True)

    def start(self) -> None:
        """Listen, on the same port as before."""
        for left in (2, 1, 0):  # another process may take the port between the check and the start
            self.port = self.port or free_ports(1)[0]
            self._write()
            listens, said = self._run()
            if listens:
                return
            self.stop()
            if not left or "in use" not in said:
                raise BedError(f"sshd does not listen: {said}")
            self.port = 0

    def stop(self) -> None:
        """Listen no more. Sessions go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)  # it makes no session that is not among these
            self._served |= set(self.sessions())
            self._process.kill()
            self._process.wait()
            self._process = None

    def end(self) -> None:
        """End sshd, its sessions, and what they started and did not end."""
        self.stop()
        for pid in self.sessions():  # one that forwards an agent has a socket in /tmp, which it removes
            _tell(pid, signal.SIGTERM)
        with suppress(BedError):
            wait_for(lambda: not self.sessions(), "the sessions end", 2)

        def none_left() -> bool:
            left = [*self.sessions(), *self.started()]
            for pid in left:
                _tell(pid, signal.SIGKILL)
            return not left

        wait_for(none_left, "what ran on the login node ends", SECONDS)
        self._served.clear()
        for reader in self._readers:
            reader.join(SECONDS)
        self._readers.clear()

    def reboot(self) -> None:
        """End everything that runs there, and start again."""
        self.end()
        self.start()

    def environment(self) -> dict[str, str]:
        """What a process of the near side has in its environment."""
        return {
            "PATH": f"{self.near / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self._runtime),
        }

    def site(self) -> dict[str, str]:
        """What a process on another host of the far side has in its environment: the end of the login node is not its
        end.
        """
        return {name: value for name, value in self._environment.items() if name != MARK}

    # -- what the far side does ---------------------------------------------------------------------------------------

    def break_connections(self) -> None:
        """End all connections at once. What their sessions started goes on, if it can."""

        def none_left() -> bool:
            left = self.sessions()
            for pid in left:
                _tell(pid, signal.SIGKILL)
            return not left

        wait_for(none_left, "the sessions end", SECONDS)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, sshd answers nothing, on open connections or on new ones."""
        assert self._process is not None
        stopped = [self._process.pid, *self.sessions()]
        for pid in stopped:
            _tell(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                _tell(pid, signal.SIGCONT)

    def change_host_key(self) -> None:
        """Have another key than the near side has, as after a new installation."""
        self.stop()
        make_key(self.far / "host_key")
        self.start()

    def refuse_keys(self) -> None:
        """Accept the key of the near side no more."""
        self._authorized.write_text("")

    def started(self, words: bytes = b"") -> list[int]:
        """The processes that sessions started, and what these started, that have these words in their command line."""
        mark = f"{MARK}={self.far}".encode()
        found = [process for process in processes() if mark in process.environment.split(b"\0")]
        return [process.pid for process in found if words in process.command]

    def sessions(self) -> list[int]:
        """The processes of sshd itself that serve connections."""
        parents = {process.pid: process.parent for process in processes() if process.name.startswith("sshd")}
        listener = {self._process.pid} if self._process else set()
        found = listener | self._served
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found & set(parents) - listener)

    # -- what the near side has ---------------------------------------------------------------------------------------

    def trust(self, *, known: bool = True) -> None:
        """Write the key of the host down as known, or as not known."""
        key = " ".join((self.far / "host_key.pub").read_text().split()[:2])
        self._known.write_text(f"[127.0.0.1]:* {key}\n" if known else "")

    def configure(self, *lines: str, host: str = "login1", port: int | None = None) -> None:
        """Give a host lines of ssh_config of its own, which win against the bed's. A host that is not known yet is
        another name of the login node, by a port that leads there.
        """
        self._hosts[host] = [*lines, *([f"Port {port}"] if port else [])]
        self._write()

    def calls(self) -> list[list[str]]:
        """The arguments of all calls of ssh, without what the bed adds."""
        found, words = [], self._calls.read_text().split("\0")[:-1] if self._calls.exists() else []
        while words:
            count = 1 + int(words[0])
            found.append(words[1:count])
            words = words[count:]
        return found

    def ssh(self, *arguments: str, timeout: float = SECONDS, text: str = "") -> subprocess.CompletedProcess[str]:
        """What a plain ``ssh`` with these arguments does."""
        environment = os.environ | self.environment()
        return subprocess.run(
            ["ssh", *arguments], env=environment, input=text, capture_output=True, text=True, timeout=timeout
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ask_by_pam(self) -> None:
        stack, script = self.far / "pam", self.far / "check_code"
        for path, text in (
            (stack, ASKS_BY_PAM.format(script=script)),
            (script, f'#!/bin/sh\nread -r code; [ "$code" = {CODE} ]\n'),
        ):
            self._as_host.append(f"printf %s {shlex.quote(text)} > {shlex.quote(str(path))}")
        self._as_host.append(f"chmod 700 {shlex.quote(str(script))}")
        self._as_host.append(f"mount --bind {shlex.quote(str(stack))} /etc/pam.d/sshd")
        self._lines += ["UsePAM yes", "KbdInteractiveAuthentication yes"]
        self._lines.append("AuthenticationMethods publickey,keyboard-interactive")

    def _write(self) -> None:
        lines = [
            *self._lines,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {quoted(str(self.far / 'host_key'))}",
            f"AuthorizedKeysFile {quoted(str(self._authorized))}",
            "PidFile none",
            "StrictModes no",  # directories of tests are in /tmp
            "UsePAM no",
            "PermitRootLogin yes",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PrintMotd no",
            "UseDNS no",
            "LogLevel VERBOSE",
            "Subsystem sftp internal-sftp",
            "SetEnv " + " ".join(quoted(f"{name}={value}") for name, value in self._environment.items()),
        ]
        if sshd_version() >= (9, 8):
            lines.append("PerSourcePenalties no")  # tests fail to log in on purpose
        (self.far / "sshd_config").write_text("\n".join([*lines, ""]))
        ours = [
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"IdentityFile {quoted(str(self.near / 'id'))}",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {quoted(str(self._known))}",
            "GlobalKnownHostsFile none",
            "StrictHostKeyChecking yes",
        ]
        hosts = [f"Host {host}\n" + "\n".join([*own, *ours]) for host, own in self._hosts.items()]
        self._config.write_text("\n\n".join([*hosts, ""]))

    def _run(self) -> tuple[bool, str]:
        """Start sshd; whether it listens, and what it printed until then."""
        command = [str(which("sshd")), "-D", "-e", "-f", str(self.far / "sshd_config")]
        if self._as_host:
            script = "set -e\nmount --make-rprivate /\n" + "\n".join([*self._as_host, 'exec "$0" "$@"'])
            command = ["unshare", "--mount", "--uts", "/bin/sh", "-c", script, *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
            env=os.environ | {"FAR_HOME": str(self.home)},
        )
        settled = threading.Event()
        said: list[str] = []
        assert self._process.stderr is not None
        reader = threading.Thread(target=self._keep_log, args=(self._process.stderr, said, settled), daemon=True)
        reader.start()
        self._readers.append(reader)
        if not settled.wait(SECONDS):
            raise BedError(f"sshd does not say that it listens: {said}")
        return any("Server listening" in line for line in said), "".join(said)

    def _keep_log(self, stream: IO[str], said: list[str], settled: threading.Event) -> None:
        """Write down what sshd prints, until its last session ended."""
        with stream, self.log.open("a", buffering=1) as log:
            for line in stream:
                log.write(line)
                said.append(line)
                if "Server listening" in line:
                    settled.set()
        settled.set()


Nodes = Callable[..., LoginNode]


def _tell(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    try:
        install()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"login node: {error}")
