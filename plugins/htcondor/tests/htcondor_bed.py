"""A real HTCondor on one machine, for the tests: all daemons of a pool, from a directory. `add_machine` adds one.

    python htcondor_bed.py install       # Debian 13's packages, unpacked into a directory; nothing is installed
    python htcondor_bed.py start DIR
    eval "$(python htcondor_bed.py env DIR)"
    python htcondor_bed.py stop DIR

The packages come with their own C library, and their programs are made to use it. So they run on other releases, such
as Debian 12, which has no HTCondor. HTCondor runs no job of root. So for root, daemons and commands run in a user
namespace in which root's files belong to another user.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SUITE = "trixie"
PACKAGES = (
    *("condor", "patchelf", "libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libcom-err2", "libgssapi-krb5-2"),
    *("libk5crypto3", "libkrb5-3", "libkrb5support0", "libkeyutils1", "libmunge2", "libscitokens0t64", "libssl3t64"),
    *("libvomsapi1t64", "libcurl4t64", "libexpat1", "libpcre2-8-0", "libsqlite3-0", "libuuid1", "zlib1g", "libzstd1"),
)
Run = Callable[..., "subprocess.CompletedProcess[str]"]
UNPACKED = Path(os.environ.get("HPCGPU_TEST_HTCONDOR", "/var/tmp/hpcgpu-htcondor-23.9"))
COMMANDS = (
    *("submit", "q", "history", "rm", "hold", "release", "status", "version", "vacate_job", "qedit", "ping"),
    *("config_val", "reconfig", "off", "on", "advertise"),
)
#: The user whose files root's are, in the namespace.
NAMESPACE = ("unshare", "--user", "--map-user=1", "--map-group=1") if os.geteuid() == 0 else ()
#: Kinds of GPUs, as condor_gpu_discovery prints them.
A100 = 'Capability=8.0; DeviceName="NVIDIA A100-SXM4-40GB"; GlobalMemoryMb=40536'
T4 = 'Capability=7.5; DeviceName="Tesla T4"; GlobalMemoryMb=15360'
CONFIG = """\
RELEASE_DIR = {unpacked}/usr
LIBEXEC = $(RELEASE_DIR)/libexec/condor
LOCAL_DIR = {directory}
LOG = $(LOCAL_DIR)/log
SPOOL = $(LOCAL_DIR)/spool
EXECUTE = $(LOCAL_DIR)/execute
LOCK = $(LOCAL_DIR)/lock
RUN = $(LOCAL_DIR)/run
DAEMON_LIST = MASTER, COLLECTOR, NEGOTIATOR, SCHEDD, STARTD
CONDOR_HOST = 127.0.0.1
COLLECTOR_HOST = 127.0.0.1:{port}
SHARED_PORT_PORT = {port}
NETWORK_INTERFACE = 127.0.0.1
DEFAULT_DOMAIN_NAME = bed
UID_DOMAIN = bed
FILESYSTEM_DOMAIN = bed
SEC_DEFAULT_AUTHENTICATION = REQUIRED
SEC_DEFAULT_AUTHENTICATION_METHODS = FS
ALLOW_READ = *
ALLOW_WRITE = *
ALLOW_ADMINISTRATOR = *
ALLOW_DAEMON = *
ALLOW_NEGOTIATOR = *
use feature : PartitionableSlot
NUM_CPUS = 16
MEMORY = 64000
MACHINE_RESOURCE_INVENTORY_GPUS = $(LOCAL_DIR)/gpus
START = True
SUSPEND = False
PREEMPT = False
KILL = False
RUNBENCHMARKS = False
NEGOTIATOR_INTERVAL = 2
NEGOTIATOR_CYCLE_DELAY = 1
NEGOTIATOR_MIN_INTERVAL = 1
SCHEDD_INTERVAL = 2
SCHEDD_MIN_INTERVAL = 1
PERIODIC_EXPR_INTERVAL = 2
UPDATE_INTERVAL = 5
include ifexist : {directory}/further
"""
#: What another machine of the pool has instead.
MACHINE = """\
include : {directory}/config
LOCAL_DIR = {directory}/machines/{name}
DAEMON_LIST = MASTER, STARTD
NETWORK_HOSTNAME = {name}.bed
SHARED_PORT_PORT = {port}
NUM_CPUS = {cores}
"""


class BedError(Exception):
    """The bed cannot do what is asked for."""


def why_not() -> str:
    """Why no HTCondor can be started here; empty if one can."""
    if not (UNPACKED / ".complete").exists():
        return "its packages are not there: python plugins/htcondor/tests/htcondor_bed.py install"
    if NAMESPACE and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        return "HTCondor runs no job of root, and root may make no user namespace here: run the tests as another user"
    return ""


def install() -> None:
    """Unpack Debian's packages, if they are not there."""
    if (UNPACKED / ".complete").exists():
        return
    shutil.rmtree(UNPACKED, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        _download(Path(folder))
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(UNPACKED)], check=True)
    libraries = UNPACKED / "usr/lib/x86_64-linux-gnu"
    loader = str(libraries / "ld-linux-x86-64.so.2")
    patchelf = [loader, "--library-path", str(libraries), str(UNPACKED / "usr/bin/patchelf")]
    paths = ["--set-interpreter", loader, "--force-rpath", "--set-rpath", f"{libraries}:{UNPACKED}/usr/lib"]
    for folder in ("bin", "sbin", "libexec/condor"):
        for program in (UNPACKED / "usr" / folder).glob("condor_*"):
            if program.is_file() and not program.is_symlink() and program.read_bytes()[:4] == b"\x7fELF":
                subprocess.run([*patchelf, *paths, str(program)], check=True)
    (UNPACKED / ".complete").touch()


def _download(folder: Path) -> None:
    """Download the packages of that suite, whose lists apt reads apart from those of this machine."""
    source = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian"
    (folder / "sources.list").write_text(f"{source} {SUITE} main\n")
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    values = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(word for name, value in values.items() for word in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True)


def wait_for(met: Callable[[], bool], what: str, timeout: float = 150) -> None:
    """Return once `met()` holds."""
    deadline = time.monotonic() + timeout
    while not met():
        if time.monotonic() > deadline:
            raise BedError(f"{what}: not within {timeout:g} s")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nothing on this machine listens on."""
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


class HTCondorBed:
    """One HTCondor, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use it."""
        return {"PATH": f"{self.directory / 'commands'}:{os.environ['PATH']}"}

    def start(self) -> None:
        """Start the daemons, and return when a job can run."""
        self._write()
        self._master(self.directory)
        wait_for(lambda: "slot1" in self.call("status", "-af", "Name", check=False), "the machine is in the pool")
        wait_for(self._schedd_answers, "the schedd answers")

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        with suppress(BedError):
            self.cancel_all()
        for folder in (self.directory, *self.directory.glob("machines/*")):
            self._end(folder)

    def add_machine(self, name: str, *, cores: int, gpus: str, number: int) -> None:
        """Start another machine of the pool, with a number of GPUs of one kind: the machine ``NAME.bed``."""
        folder = self.directory / "machines" / name
        config = MACHINE.format(directory=self.directory, name=name, port=free_port(), cores=cores)
        _folders(folder, config, gpus, number)
        self._master(folder)
        wait_for(lambda: self._in_pool(name), f"{name} is in the pool")

    def remove_machine(self, name: str) -> None:
        """End a machine that was added, also one that is switched off: the pool forgets it."""
        self._end(self.directory / "machines" / name)
        gone = f'MyType = "Query"\nTargetType = "Machine"\nRequirements = Machine == "{name}.bed"\n'
        self.call("advertise", "INVALIDATE_STARTD_ADS", "-", text=gone)
        wait_for(lambda: not self._in_pool(name), f"{name} is out of the pool")
        shutil.rmtree(self.directory / "machines" / name)

    def switch_off(self, name: str) -> None:
        """Kill all that runs on a machine that was added, with its jobs. Nothing informs the pool."""
        folder = self.directory / "machines" / name
        _signal(folder, signal.SIGSTOP)  # a daemon that outlives another for a moment would report its end
        wait_for(lambda: not _signal(folder, signal.SIGKILL), f"all of {name} is dead")

    def stop_schedd(self) -> None:
        """End the schedd: no command works."""
        self.call("off", "-fast", "-schedd")
        wait_for(lambda: not self._schedd_answers(), "the schedd ends")

    def start_schedd(self) -> None:
        """Start the schedd, with the jobs that it had."""
        self.call("on", "-schedd")
        wait_for(self._schedd_answers, "the schedd answers")

    def wait_for_a_schedule(self) -> None:
        """Return once the schedd has gone through its jobs: one that is submitted now has been considered."""
        probe = ("-a", "executable = /bin/true", "-a", "should_transfer_files = NO", "-a", "request_memory = 10")
        job_id = self.call("submit", "-terse", *probe, "-queue", "1").split(".")[0]
        wait_for(lambda: job_id not in self.jobs(), "a job runs")

    def jobs(self) -> dict[str, str]:
        """The JobStatus of each job."""
        lines = self.call("q", "-allusers", "-af", "ClusterId", "JobStatus").splitlines()
        return dict(line.split() for line in lines)

    def cancel_all(self) -> None:
        """Cancel each job, and wait for their end."""
        if self.jobs():
            self.call("rm", "-all", check=False)
            wait_for(lambda: not self.jobs(), "no job is left")

    def configure(self, **values: str) -> None:
        """Set further values of its configuration; none removes those that were set."""
        (self.directory / "further").write_text("".join(f"{name} = {value}\n" for name, value in values.items()))
        self.call("reconfig")

    def submit_as_another(self, *commands: str) -> str:
        """Submit a held job as the user nobody, which only root can do; its id."""
        port = (self.directory / "config").read_text().partition("COLLECTOR_HOST = ")[2].partition("\n")[0]
        own = {"CONDOR_CONFIG": "ONLY_ENV", "_CONDOR_COLLECTOR_HOST": port, "_CONDOR_NETWORK_INTERFACE": "127.0.0.1"}
        own |= {"_CONDOR_SEC_DEFAULT_AUTHENTICATION_METHODS": "FS", "PATH": os.defpath}
        words = [
            "executable = /bin/true",
            "should_transfer_files = NO",
            "request_memory = 10",
            "hold = true",
            *commands,
        ]
        schedd = self.call("status", "-schedd", "-af", "Name").strip()
        submit = [str(UNPACKED / "usr/bin/condor_submit"), "-name", schedd, "-terse"]
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        options = [option for word in words for option in ("-a", word)]
        done = subprocess.run(
            [*nobody, *submit, *options, "-queue", "1"], capture_output=True, text=True, env=own, cwd="/", timeout=60
        )
        if done.returncode:
            raise BedError(done.stderr)
        return done.stdout.split(".")[0]

    def call(self, command: str, *arguments: str, check: bool = True, text: str = "") -> str:
        """The output of one of its commands, without ``condor_``."""
        done = subprocess.run(
            [str(self.directory / "commands" / f"condor_{command}"), *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise BedError(f"condor_{command} {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    # -- within -------------------------------------------------------------------------------------------------------

    def _master(self, folder: Path) -> None:
        """Start the daemons of a machine."""
        path = f"{UNPACKED}/usr/bin:{UNPACKED}/usr/sbin:{os.defpath}"
        own = ["env", f"CONDOR_CONFIG={folder}/config", f"PATH={path}", str(UNPACKED / "usr/sbin/condor_master")]
        pid = str(folder / "master.pid")
        subprocess.run([*NAMESPACE, *own, "-pidfile", pid], check=True, timeout=60, stdin=subprocess.DEVNULL)

    def _end(self, folder: Path) -> None:
        """End the daemons of a machine."""
        pid = int((folder / "master.pid").read_text())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the daemons end")

    def _in_pool(self, name: str) -> bool:
        return f"{name}.bed" in self.call("status", "-af", "Machine", check=False).split()

    def _schedd_answers(self) -> bool:
        return "Total for query" in self.call("q", "-totals", check=False)

    def _write(self) -> None:
        """Make the directory anew."""
        shutil.rmtree(self.directory, ignore_errors=True)
        config = CONFIG.format(unpacked=UNPACKED, directory=self.directory, port=free_port())
        _folders(self.directory, config, A100, 4)
        (self.directory / "commands").mkdir()
        for command in COMMANDS:
            script = self.directory / "commands" / f"condor_{command}"
            [program] = (UNPACKED / "usr").glob(f"*bin/{script.name}")
            start = shlex.join([*NAMESPACE, "env", f"CONDOR_CONFIG={self.directory}/config", str(program)])
            script.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
            script.chmod(0o755)


def _folders(folder: Path, config: str, gpus: str, number: int) -> None:
    """Make the directory of a machine."""
    for name in ("log", "spool", "execute", "lock", "run"):
        (folder / name).mkdir(parents=True)
    (folder / "config").write_text(config)
    ids = [f"GPU-0000000{gpu}" for gpu in range(number)]
    lines = [f'DetectedGPUs="{", ".join(ids)}"', "Common=[ DriverVersion=12.2; MaxSupportedVersion=12020; ]"]
    lines += [f'GPU_{gpu[4:]}=[ id="{gpu}"; {gpus}; ]' for gpu in ids]
    (folder / "gpus").write_text("#!/bin/sh\ncat << 'EOF'\n" + "".join(f"{line}\n" for line in lines) + "EOF\n")
    (folder / "gpus").chmod(0o755)


def _signal(folder: Path, number: signal.Signals) -> int:
    """Send a signal to what runs in the directory of a machine: daemons, jobs and what they started; to how many."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}/".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), number)
                found += 1
    return found


def main() -> None:
    """The command line."""
    action, *arguments = sys.argv[1:] or ["why-not"]
    if action == "install":
        return install()
    if action == "why-not":
        sys.exit(why_not())
    bed = HTCondorBed(Path(arguments[0]).resolve())
    if action == "env":
        print("".join(f"export {name}='{value}'\n" for name, value in bed.environment().items()))
    else:
        getattr(bed, action.replace("-", "_"))(*arguments[1:])


if __name__ == "__main__":
    try:
        main()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"bed: {error}")
