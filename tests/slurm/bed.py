"""A real Slurm of several nodes on one machine, with fake GPUs, for the tests.

One slurmctld and five slurmd run from a directory, apart from any other Slurm of the host:

    python tests/slurm/bed.py install          # Debian or Ubuntu: the packages
    python tests/slurm/bed.py start DIR        # returns when every node is idle
    eval "$(python tests/slurm/bed.py env DIR)"
    python tests/slurm/bed.py stop DIR

The daemons run as root. Without root, what needs it goes through ``sudo -n`` to this same script.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import pwd
import random
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

NODES: dict[str, str] = {
    **{f"n{i}": "CPUs=16 RealMemory=16000 Gres=gpu:a100:4 Feature=a100" for i in range(4)},
    "s0": "CPUs=8 RealMemory=16000 Gres=gpu:t4:1 Feature=t4",
}
PACKAGES = ("slurm-wlm", "munge", "shellcheck", "gcc", "libc6-dev")
BROUGHT = {  # commands, and files by their path
    "slurm-wlm": ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel"),
    "munge": ("munge", "munged", "mungekey"),
    "shellcheck": ("shellcheck",),
    "gcc": ("gcc",),
    "libc6-dev": ("/usr/include/stdio.h",),  # which gcc merely recommends
}
BED_NEEDS = ("slurm-wlm", "munge")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmscriptd")
PORTS = range(12000, 32000)  # below the range that outgoing connections take theirs from
CAP_MKNOD = 27
KERNEL_THREAD = 0x200000  # of the flags in /proc/PID/stat
#: Slurm reads its queue every second, and at once when something changed. By default it does so every 30 s
#: (backfill) and 60 s, and up to 3 s after a change.
FAST = "sched_interval=1,bf_interval=1,batch_sched_delay=0"
#: The settings of slurm.conf that are the same for every bed.
#: What Slurm renamed between versions is left to its default.
SETTINGS = """\
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
JobAcctGatherParams=OverMemoryKill
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerType=sched/backfill
PriorityType=priority/basic
PropagateResourceLimits=NONE
ReturnToService=1
SlurmctldTimeout=60
SlurmdTimeout=60
MessageTimeout=10
InactiveLimit=0
CompleteWait=0
KillWait=5
MinJobAge=300
TreeWidth=100
"""
#: Slurm reads the lines of the nodes before these.
PARTITIONS = """\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=gpu Nodes=n[0-3] Default=YES MaxTime=INFINITE DefaultTime=INFINITE PriorityTier=1 State=UP
PartitionName=shared Nodes=n[0-3],s0 MaxTime=INFINITE DefaultTime=INFINITE PriorityTier=1 State=UP
PartitionName=urgent Nodes=n[0-3] MaxTime=INFINITE DefaultTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""

#: The submit filter of a bed whose queue takes time, for each job of each user. Slurm calls it as root, in slurmctld,
#: so neither side of a comparison can see it or get around it.
SUBMIT_FILTER = """\
function slurm_job_submit(job, partitions, uid)
    job.begin_time = math.max(job.begin_time or 0, os.time() + %d)
    return slurm.SUCCESS
end
function slurm_job_modify(change, job, partitions, uid)
    return slurm.SUCCESS
end
"""


class BedError(RuntimeError):
    """The test bed did not do what was asked of it."""


class Job(NamedTuple):
    """A job that Slurm has not finished with: its state as `squeue` spells it, such as RUNNING."""

    id: str
    name: str
    state: str


class Process(NamedTuple):
    """What /proc has of one process; the bytes are empty where it may not be read."""

    pid: int
    parent: int
    name: str
    command: bytes
    environment: bytes
    files: tuple[str, ...]


def which(command: str) -> str | None:
    """Where a command is, also where only root's PATH leads."""
    return shutil.which(command, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def call(*command: str, timeout: float = 60, check: bool = True, env: dict[str, str] | None = None) -> str:
    """The output of a command; BedError if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise BedError(f"{' '.join(command)}: no answer in {timeout:g} s") from error
    if check and done.returncode:
        raise BedError(
            f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def wait_for(met: Callable[[], bool], what: str, timeout: float, interval: float = 0.05) -> None:
    """Return once `met()` holds; BedError when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not met():
        if time.monotonic() > deadline:
            raise BedError(f"{what}: not within {timeout:g} s")
        time.sleep(interval)


def is_root() -> bool:
    """Whether this process runs as root."""
    return os.geteuid() == 0


def as_root(*command: str) -> list[str]:
    """The command line that runs `command` as root."""
    return list(command) if is_root() else ["sudo", "-n", *command]


def cannot_install() -> str | None:
    """Why the packages cannot be installed on this machine, or None."""
    if not sys.platform.startswith("linux"):
        return "not Linux"
    release = Path("/etc/os-release")
    fields = dict(re.findall(r'^(ID|ID_LIKE)="?([^"\n]*)"?$', release.read_text() if release.exists() else "", re.M))
    if not {"debian", "ubuntu"} & set(" ".join(fields.values()).split()):
        return "neither Debian nor Ubuntu"
    if not is_root():
        if not shutil.which("sudo"):
            return "not root, and there is no sudo"
        if subprocess.run(["sudo", "-n", "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return "not root, and sudo asks for a password"
    return None


def missing_packages(packages: tuple[str, ...] = PACKAGES) -> list[str]:
    """The packages of which something is not there."""
    return [package for package in packages if not all(which(name) or Path(name).exists() for name in BROUGHT[package])]


def why_not() -> str | None:
    """Why this machine cannot host the bed, or None if it can."""
    if reason := cannot_install():
        return reason
    if missing := missing_packages(BED_NEEDS):
        return f"not installed: {' '.join(missing)} (run: python {Path(__file__).name} install)"
    capabilities = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.M)
    if is_root() and capabilities and not int(capabilities[1], 16) >> CAP_MKNOD & 1:
        return "this root may not make device files (no CAP_MKNOD)"
    return None


def install_packages(packages: list[str]) -> None:
    """Install packages of Debian or Ubuntu; BedError reports why that cannot be."""
    if not packages:
        return
    if reason := cannot_install():
        raise BedError(f"cannot install {' '.join(packages)}: {reason}")
    apt = as_root("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=120")
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "install", "--yes", "--no-install-recommends", *packages], check=True)


def install() -> None:
    """Install the packages that are missing."""
    install_packages(missing_packages())


def slurm_version() -> tuple[int, int]:
    """Slurm's version, such as (22, 5)."""
    found = re.search(r"(\d+)\.(\d+)", call(str(which("slurmctld")), "-V"))
    if not found:
        raise BedError("slurmctld -V names no version")
    return int(found[1]), int(found[2])


def munge_works() -> bool:
    """Whether a munged answers."""
    return subprocess.run([str(which("munge")), "-n"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def start_munge() -> None:
    """Start munged unless one runs already; it is left running for good."""
    with open(__file__) as this:  # beds that start at the same time share one munged
        fcntl.flock(this, fcntl.LOCK_EX)
        if not munge_works():
            _start_munge()


def _start_munge() -> None:
    user = pwd.getpwnam("munge")
    for path, mode in (
        ("/etc/munge", 0o700),
        ("/var/lib/munge", 0o700),
        ("/var/log/munge", 0o700),
        ("/run/munge", 0o755),
    ):
        Path(path).mkdir(parents=True, exist_ok=True)
        os.chown(path, user.pw_uid, user.pw_gid)
        os.chmod(path, mode)
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        call(str(which("mungekey")), "--create", f"--keyfile={key}")
    os.chown(key, user.pw_uid, user.pw_gid)
    key.chmod(0o600)
    identity = ["setpriv", "--reuid=munge", "--regid=munge", "--init-groups"]
    done = subprocess.run(
        [*identity, str(which("munged"))],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=60,
    )
    try:
        wait_for(munge_works, "munged answers", 60)
    except BedError as error:
        raise BedError(f"{error} (munged's exit status: {done.returncode}; see /var/log/munge/munged.log)") from None


def free_ports(count: int) -> list[int]:
    """Ports that nothing on this machine listens on."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise BedError("no free ports")


def processes() -> Iterator[Process]:
    """All processes that have not ended."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit() and (found := process_of(entry)) is not None:
                yield found


def process_of(entry: Path) -> Process | None:
    """One process, by its directory in /proc; None if it has ended."""
    environment = b""
    for _ in range(1000):
        head, _, tail = (entry / "stat").read_text(errors="replace").rpartition(")")
        state, parent, *more = tail.split()
        if state in "ZX":
            return None
        command = (entry / "cmdline").read_bytes()
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # another user's
            break
        # one that is just becoming another program has no words and no variables for a moment, and no places of them
        begin, end = map(int, more[45:47])
        if environment or 0 < begin == end or int(more[4]) & KERNEL_THREAD:
            break
        time.sleep(0.001)
    files, name = list[str](), head.partition("(")[2]
    if name in DAEMONS:  # only for these: it is slow
        with suppress(OSError):
            files = [os.readlink(link) for link in (entry / "cwd", *(entry / "fd").iterdir())]
    return Process(int(entry.name), int(parent), name, command, environment, tuple(files))


class SlurmBed:
    """A Slurm cluster in `directory`; a `start()` there takes the place of whatever ran there before.

    `scheduling` is Slurm's SchedulerParameters; without it Slurm schedules as it does by default. Each job waits in the
    queue for at least `queue_seconds`.
    """

    #: Options of squeue: whose jobs these are. Nobody else's are in a Slurm of the tests.
    whose: tuple[str, ...] = ()

    def __init__(self, directory: Path, scheduling: str = "", queue_seconds: int = 0) -> None:
        self.directory = Path(directory).resolve()
        self.scheduling = scheduling
        self.queue_seconds = queue_seconds
        self.conf = self.directory / "slurm.conf"
        self.cluster = "bed" + hashlib.sha256(bytes(self.directory)).hexdigest()[:12]

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the cluster afresh and return when all nodes are idle."""
        if not is_root():
            self.directory.mkdir(parents=True, exist_ok=True)
            settings = (f"--scheduling={self.scheduling}", f"--queue-seconds={self.queue_seconds}")
            return self._as_root("start", *settings, timeout=180)
        if reason := why_not():
            raise BedError(f"this machine cannot host the bed: {reason}")
        start_munge()
        for left in (1, 0):  # another process may take a port between the check and the daemon's start
            self.stop()
            self._write()
            try:
                self._controller()
                for node in NODES:
                    self._daemon("slurmd", "-N", node)
                wait_for(self._ready, "all nodes are idle, and each has its slurmd", 60, 0.1)
                return None
            except BedError as error:
                if not left:
                    reason = f"{error}; the nodes: {self.nodes()}; in the logs:\n{self._complaints()}"
                    self.stop()
                    raise BedError(reason) from error

    def stop(self) -> None:
        """Kill the daemons of this bed and the jobs under them, and nothing else."""
        if not is_root():
            return self._as_root("stop")
        kill_at = time.monotonic() + 5
        give_up = kill_at + 60
        told: set[int] = set()
        while own := self._own_processes():
            if time.monotonic() > give_up:
                raise BedError(f"still running: {[(process.pid, process.name) for process in own]}")
            for process in own:
                polite = process.name in ("slurmctld", "slurmd", "slurmscriptd") and time.monotonic() < kill_at
                if polite and process.pid in told:
                    continue
                told.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM if polite else signal.SIGKILL)
            time.sleep(0.05)

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use this cluster."""
        return {"SLURM_CONF": str(self.conf)}

    # -- reading ------------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, str]:
        """The state of each node as `sinfo` spells it, such as idle, mixed, down*."""
        with suppress(BedError):
            lines = self._slurm("sinfo", "-h", "-N", "-p", "shared", "-o", "%N %T").splitlines()
            return dict(line.split() for line in lines if line)
        return {}

    def squeue(self) -> list[Job]:
        """All jobs that are not over."""
        for attempt in range(3):  # a busy controller may be too late with an answer
            try:
                answer = self._slurm("squeue", "-h", "-a", *self.whose, "-o", "%i|%T|%j")
                break
            except BedError:
                if attempt == 2:
                    raise
        fields = [line.split("|", 2) for line in answer.splitlines() if line]
        return [Job(id, name, state) for id, state, name in fields]

    def wait_empty(self, timeout: float = 150) -> None:
        """Wait until no job is left, and none is ending."""
        wait_for(lambda: not self.squeue(), "no job is left", timeout, 0.1)

    # -- meddling -----------------------------------------------------------------------------------------------------

    def cancel_all(self) -> None:
        """Cancel every job; `wait_empty` waits for their end."""
        if jobs := self.squeue():
            self._slurm("scancel", *sorted({job.id.partition("_")[0].partition("+")[0] for job in jobs}), check=False)

    def node_down(self, name: str) -> None:
        """Set a node DOWN, which ends the jobs on it."""
        if not is_root():
            return self._as_root("node-down", name)
        self._slurm("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")
        # "completing" while what ran on it ends, for as long as KillWait
        try:
            wait_for(lambda: self.nodes().get(name, "").startswith(("down", "completing")), f"{name} is down", 60)
        except BedError as error:
            raise BedError(f"{error}: {self.nodes()}") from error

    def set_partition(self, name: str, *settings: str) -> None:
        """Change a partition, such as State=DOWN; root may."""
        self._slurm("scontrol", "update", f"PartitionName={name}", *settings)

    def node_up(self, name: str) -> None:
        """Bring a node back from `node_down`, `stop_node`, `switch_off` or a drain."""
        if not is_root():
            return self._as_root("node-up", name)
        if not any(process.name == "slurmd" for process in self._own_processes() if self._serves(process, name)):
            self._daemon("slurmd", "-N", name)
        if re.match("down|drain|fail", self.nodes().get(name, "")):
            self._slurm("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        wait_for(lambda: self.nodes().get(name) in ("idle", "mixed", "allocated", "completing"), f"{name} is up", 60)

    def stop_node(self, name: str) -> None:
        """Kill a node's slurmd at once, without a word to the controller; its jobs' processes live on."""
        if not is_root():
            return self._as_root("stop-node", name)
        self._kill("slurmd", signal.SIGKILL, name)

    def switch_off(self, name: str) -> None:
        """Kill all that runs on a node, as the loss of its power does: the controller receives nothing of it."""
        if not is_root():
            return self._as_root("switch-off", name)
        log, variable = f"{self.directory}/log/slurmd-{name}.log", f"SLURMD_NODENAME={name}".encode()

        def there(process: Process) -> bool:
            return log in process.files if process.name in DAEMONS else variable in process.environment.split(b"\0")

        while alive := [process for process in self._own_processes() if there(process)]:
            # first the daemons, which would report that a job has ended
            for process in sorted(alive, key=lambda process: process.name not in DAEMONS):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def stop_controller(self) -> None:
        """Stop slurmctld: jobs run on, but squeue, sbatch and scancel fail."""
        if not is_root():
            return self._as_root("stop-controller")
        self._kill("slurmctld", signal.SIGTERM)

    def start_controller(self) -> None:
        """Start slurmctld, with the jobs it had, and return when it has received answers of the nodes that run."""
        if not is_root():
            return self._as_root("start-controller")
        self._controller()
        own = [process for process in self._own_processes() if process.name == "slurmd"]
        running = {node for node in NODES if any(self._serves(process, node) for process in own)}

        def settled() -> bool:
            states = self.nodes()
            return all(not states.get(node, "unknown").startswith("unknown") for node in running)

        wait_for(settled, "the controller knows the nodes' states", 60, 0.1)

    # -- within -------------------------------------------------------------------------------------------------------

    def _slurm(self, command: str, *arguments: str, check: bool = True) -> str:
        ours = ("SLURM_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")  # the caller's settings would change the output
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return call(str(which(command)), *arguments, check=check, env=env | self.environment())

    def _controller(self) -> None:
        """Start slurmctld and return when it answers."""
        self._daemon("slurmctld")
        missing = 0

        def answers() -> bool:
            nonlocal missing  # a process that is just putting itself in the background may not be seen for a moment
            missing = 0 if any(process.name == "slurmctld" for process in self._own_processes()) else missing + 1
            if missing > 20:
                raise BedError("slurmctld ended")
            return " UP" in self._slurm("scontrol", "ping", check=False)

        wait_for(answers, "slurmctld answers", 30)

    def _ready(self) -> bool:
        """If all nodes are idle and have a slurmd of this bed.

        A slurmd of another bed that had a node's port first answers in its place, until that bed ends.
        """
        daemons = [process for process in self._own_processes() if process.name == "slurmd"]
        served = all(any(self._serves(process, node) for process in daemons) for node in NODES)
        return served and set(self.nodes().values()) == {"idle"}

    def _as_root(self, action: str, *arguments: str, timeout: float = 90) -> None:
        command = as_root(sys.executable, str(Path(__file__).resolve()), action, str(self.directory), *arguments)
        call(*command, timeout=timeout)

    def _daemon(self, name: str, *arguments: str) -> None:
        """Start a daemon, which puts itself in the background."""
        environment = {"PATH": os.defpath + ":/usr/sbin:/sbin", "LANG": "C.UTF-8", "SLURM_CONF": str(self.conf)}
        done = subprocess.run(
            [str(which(name)), "-f", str(self.conf), *arguments],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=60,
        )
        if done.returncode:
            raise BedError(f"{name} {' '.join(arguments)}: exit status {done.returncode}; see {self.directory}/log")

    def _serves(self, process: Process, node: str) -> bool:
        arguments = process.command.split(b"\0")
        return node.encode() in arguments or f"-N{node}".encode() in arguments

    def _kill(self, daemon: str, number: signal.Signals, node: str = "") -> None:
        def alive() -> list[int]:
            own = (process for process in self._own_processes() if process.name == daemon)
            return [process.pid for process in own if not node or self._serves(process, node)]

        for pid in alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        wait_for(lambda: not alive(), f"{daemon} {node} ends", 60)

    def _own_processes(self) -> list[Process]:
        """The daemons of this bed, the processes of its jobs and all that descend from these."""
        conf, within = os.fsencode(self.conf), f"{self.directory}/"
        of_conf, of_cluster = b"SLURM_CONF=" + conf, b"SLURM_CLUSTER_NAME=" + self.cluster.encode()
        own: dict[int, Process] = {}
        others: list[Process] = []
        for process in processes():
            variables = process.environment.split(b"\0")
            mine = of_cluster in variables
            if process.name in DAEMONS:
                mine |= conf in process.command.split(b"\0") or of_conf in variables
                mine |= any(file.startswith(within) for file in process.files)
            if mine:
                own[process.pid] = process
            else:
                others.append(process)
        while children := [process for process in others if process.parent in own and process.pid not in own]:
            own.update((process.pid, process) for process in children)
        lineage, pid = set(), os.getpid()
        parents = {process.pid: process.parent for process in (*own.values(), *others)}
        while pid in parents and pid not in lineage:  # a bed started from a job of a bed must not end itself
            lineage.add(pid)
            pid = parents[pid]
        return [process for process in own.values() if process.pid not in lineage]

    def _complaints(self) -> str:
        logs = sorted(self.directory.glob("log/*.log"))
        lines = [f"{log.name}: {line}" for log in logs for line in log.read_text(errors="replace").splitlines()]
        return "\n".join([line for line in lines if re.search("error|fatal", line) and "pmix" not in line][-30:])

    def _write(self) -> None:
        """Make the directory anew: configuration, device files, room for the daemons."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool", "log", "run", "dev"):
            path = self.directory / name
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o755)
        null = os.makedev(1, 3)  # /dev/null's numbers: opening one is harmless also where there is a GPU
        for index in range(4):
            os.mknod(self.directory / f"dev/nvidia{index}", stat.S_IFCHR | 0o666, null)
        ports = free_ports(1 + len(NODES))
        for name, text in self._configuration(ports).items():
            path = self.directory / name
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(0o644)

    def _configuration(self, ports: list[int]) -> dict[str, str]:
        """The text of each configuration file."""
        host, place = socket.gethostname().partition(".")[0], self.directory
        scheduling = f"SchedulerParameters={self.scheduling}" if self.scheduling else "# scheduling by Slurm's defaults"
        if self.queue_seconds:
            scheduling += "\nJobSubmitPlugins=lua"
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} State=UNKNOWN {what}"
            for (name, what), port in zip(NODES.items(), ports[1:], strict=True)
        )
        conf = f"""\
ClusterName={self.cluster}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
StateSaveLocation={place}/state
SlurmctldPidFile={place}/run/slurmctld.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdSpoolDir={place}/spool/%n
SlurmdPidFile={place}/run/slurmd-%n.pid
SlurmdLogFile={place}/log/slurmd-%n.log
{SETTINGS}{scheduling}
{nodes}
{PARTITIONS}"""
        if slurm_version() >= (24, 5):  # from there on no plugin is the empty one
            conf = conf.replace("SwitchType=switch/none\n", "").replace("MpiDefault=none\n", "")
        gres = f"""\
AutoDetect=off
NodeName=n[0-3] Name=gpu Type=a100 File={place}/dev/nvidia[0-3] Flags=nvidia_gpu_env
NodeName=s0 Name=gpu Type=t4 File={place}/dev/nvidia0 Flags=nvidia_gpu_env
"""
        cgroup = "CgroupPlugin=disabled\n" if slurm_version() >= (23, 11) else "# nothing here uses cgroups\n"
        files = {"slurm.conf": conf, "gres.conf": gres, "cgroup.conf": cgroup}
        if self.queue_seconds:
            files["job_submit.lua"] = SUBMIT_FILTER % self.queue_seconds
        return files


@contextmanager
def started(directory: Path, scheduling: str = "", queue_seconds: int = 0) -> Iterator[SlurmBed]:
    """A Slurm that the commands of this program use; the program ends where none can run."""
    if reason := why_not():
        sys.exit(f"no Slurm can be started here: {reason}")
    bed = SlurmBed(directory, scheduling, queue_seconds)
    bed.start()
    os.environ.update(bed.environment())
    try:
        yield bed
    finally:
        bed.cancel_all()
        bed.stop()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A Slurm of several nodes with fake GPUs on one machine, for tests.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("install", help="install the Debian packages that are missing")
    actions.add_parser("why-not", help="say why this machine cannot host the bed")
    for action in (
        "start",
        "stop",
        "env",
        "stop-controller",
        "start-controller",
        "node-down",
        "node-up",
        "stop-node",
        "switch-off",
    ):
        command = actions.add_parser(action)
        command.add_argument("directory", type=Path)
        if action in ("node-down", "node-up", "stop-node", "switch-off"):
            command.add_argument("node", choices=NODES)
        if action == "start":
            command.add_argument("--scheduling", default="", help="Slurm's SchedulerParameters")
            command.add_argument("--queue-seconds", type=int, default=0, help="how long each job waits at least")
    arguments = parser.parse_args()
    if arguments.action == "install":
        return install()
    if arguments.action == "why-not":
        sys.exit(why_not())
    settings = (arguments.scheduling, arguments.queue_seconds) if arguments.action == "start" else ()
    bed = SlurmBed(arguments.directory, *settings)
    if arguments.action == "env":
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in bed.environment().items()))
    else:
        node = [arguments.node] if "node" in arguments else []
        getattr(bed, arguments.action.replace("-", "_"))(*node)


if __name__ == "__main__":
    try:
        main()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"bed: {error}")
