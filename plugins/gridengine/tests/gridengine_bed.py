"""A real Grid Engine on one machine, for the tests: a qmaster and an execd of this user, from a directory.

    python gridengine_bed.py install       # Debian 12: the packages, unpacked into a directory; nothing is installed
    python gridengine_bed.py start DIR
    eval "$(python gridengine_bed.py env DIR)"
    python gridengine_bed.py stop DIR

The packages are only unpacked: an installed ``qsub`` would be found by the tests of other batch systems. The daemons
search for one library in /usr/lib/gridengine, so `install` makes a link of that name, as root.
"""

from __future__ import annotations

import getpass
import os
import random
import re
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

PACKAGES = ("gridengine-master", "gridengine-exec", "gridengine-client", "gridengine-common", "libjemalloc2")
UNPACKED = Path(os.environ.get("HPCGPU_TEST_GRIDENGINE", "/var/tmp/hpcgpu-gridengine-8.1.9"))
#: Where the daemons search for the library that writes their files.
FIXED = Path("/usr/lib/gridengine")
COMMANDS = ("qsub", "qstat", "qdel", "qhold", "qrls", "qacct", "qconf", "qalter", "qmod", "qhost")
#: Queues, with the longest walltime of a job. One reports to its jobs which GPUs they have, as sites with RSMAP do.
QUEUES = {"gpu.q": "24:0:0", "short.q": "0:10:0"}
NUMBERED = {"short.q": "2 3"}
#: Parallel environments, with the number of slots that they take of a host.
ENVIRONMENTS = {"smp": "$pe_slots", "mpi": "$fill_up", "each1": "1"}
#: What a host has: GPUs, and the shares of a node that TSUBAME 4 gives.
RESOURCES = {"gpu": 4, "node_f": 1, "gpu_1": 4}
#: It schedules each second, collects what `qstat -j` prints, and writes its accounting at once.
SCHEDULING = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "schedd_job_info": "true",
}
GLOBAL = {
    "min_uid": "0",
    "min_gid": "0",
    "administrator_mail": "none",
    "mailer": "/bin/true",
    "load_report_time": "00:00:05",
    "max_unheard": "00:00:15",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00",
}


class BedError(Exception):
    """The bed cannot do what is asked for."""


def why_not() -> str:
    """Why no Grid Engine can be started here; empty if one can."""
    if not (UNPACKED / "usr/lib/gridengine/sge_qmaster").exists() or not (FIXED / "libspoolc.so").exists():
        return "its packages are not there: python plugins/gridengine/tests/gridengine_bed.py install"
    return ""


def install() -> None:
    """Unpack Debian's packages, if they are not there."""
    if not why_not():
        return
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-qq", *PACKAGES], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(UNPACKED)], check=True)
    if not FIXED.exists():
        sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
        subprocess.run([*sudo, "ln", "-sfn", str(UNPACKED / "usr/lib/gridengine"), str(FIXED)], check=True)


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


def changed(text: str, values: dict[str, str]) -> str:
    """A configuration as qconf prints it, with other values."""
    for name, value in values.items():
        text = re.sub(rf"^{name}(\s).*(\n +.*)*$", rf"{name} {value}", text, flags=re.MULTILINE)
    return text


class GridEngineBed:
    """One Grid Engine, in a directory.

    Attributes
    ----------
    master, hosts : str, tuple of str
        The host of the qmaster, and the execution hosts. They are one here; see gridengine_hosts.py for more.
    """

    master = "localhost"
    hosts: tuple[str, ...] = ("localhost",)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cell = directory / "default"
        self.programs = UNPACKED / "usr/lib/gridengine"

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use it."""
        return {"PATH": f"{self.directory / 'commands'}:{os.environ['PATH']}"}

    def start(self) -> None:
        """Start qmaster and execd, and return when a job can run."""
        # short, for the sockets of jobs; in /tmp itself two Grid Engines would use the same names
        self.scratch = Path(tempfile.mkdtemp(prefix="ge-"))
        self._write()
        self.start_master()
        self._configure()
        for host in self.hosts:
            self.start_host(host)

    def start_host(self, host: str) -> None:
        """Start the execd of a host, and return when jobs can run there."""
        self._daemon("sge_execd", host)
        wait_for(lambda: host not in self.away(), f"{host} answers")

    def away(self) -> set[str]:
        """The execution hosts that do not answer, as the qmaster sees it."""
        lines = [line.split() for line in self.call("qstat", "-f").splitlines() if line.startswith("gpu.q@")]
        known = {words[0].partition("@")[2]: "lx-" in words[4] and "u" not in "".join(words[5:]) for words in lines}
        return {host for host in self.hosts if not known.get(host)}

    def start_master(self) -> None:
        """Start the qmaster, with the jobs that it had."""
        self._daemon("sge_qmaster", self.master)
        wait_for(lambda: bool(self.call("qconf", "-sss", check=False).strip()), "the qmaster answers")

    def stop_master(self) -> None:
        """End the qmaster: jobs run on, and no command works."""
        self._end("sge_qmaster")

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        with suppress(BedError):
            self.cancel_all()
        self._end("sge_execd")
        self._end("sge_qmaster")
        shutil.rmtree(self.scratch, ignore_errors=True)

    def jobs(self) -> dict[str, str]:
        """The state of each job, in Grid Engine's letters."""
        lines = self.call("qstat", "-u", "*").splitlines()
        return {words[0]: words[4] for line in lines if len(words := line.split()) > 5 and words[0].isdigit()}

    def cancel_all(self) -> None:
        """Cancel each job, and wait for their end."""
        if jobs := self.jobs():
            self.call("qdel", *jobs, check=False)
            wait_for(lambda: not self.jobs(), "no job is left")

    def on(self, host: str, *words: str) -> list[str]:
        """The words of a command that runs on a host."""
        return list(words)

    def call(self, command: str, *arguments: str, check: bool = True) -> str:
        """The output of one of its commands."""
        words = self.on(self.master, str(self.directory / "commands" / command), *arguments)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise BedError(f"{command} {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    def set_global(self, **values: str) -> None:
        """Change values of its global configuration, such as max_u_jobs."""
        (self.directory / "own").mkdir(exist_ok=True)
        path = self.directory / "own" / "global"  # qconf takes the name of the configuration from the file
        path.write_text(changed(self.call("qconf", "-sconf"), values))
        self.call("qconf", "-Mconf", str(path))

    def count_gpus(self, consumable: str) -> None:
        """Count GPUs for each JOB, or for each slot (YES)."""
        kinds = re.sub(r"^(gpu .*YES +)\w+( +0 +0 *)$", rf"\g<1>{consumable}\2", self.call("qconf", "-sc"), flags=re.M)
        self._set("-Mc", kinds)

    def set_quota(self, limit: str) -> None:
        """Set a resource quota, such as ``users {*} to gpu=1``; none if it is empty."""
        name, known = "few", "few" in self.call("qconf", "-srqsl", check=False)
        if limit:
            text = f"{{\nname {name}\ndescription none\nenabled TRUE\nlimit {limit}\n}}\n"
            self._set("-Mrqs" if known else "-Arqs", text)
        elif known:
            self.call("qconf", "-drqs", name)

    def set_verifier(self, words: str) -> None:
        """Refuse each job with these words by a verifier of the site (JSV); none if they are empty."""
        verifier = self.verifier(f"echo 'RESULT STATE REJECT {words}'")
        self.set_global(jsv_url=f"script:{verifier}" if words else "none")

    def verifier(self, answers: str) -> Path:
        """A verifier (JSV) that answers like this to each job."""
        script = self.directory / "verifier"
        cases = f"START) echo STARTED ;; BEGIN) {answers} ;; QUIT) exit ;;"
        script.write_text(f"#!/bin/sh\nwhile read -r said more; do case $said in {cases} esac; done\n")
        script.chmod(0o755)
        return script

    def set_request(self, line: str) -> None:
        """Set what the site adds to each qsub, such as ``-jsv PROGRAM``."""
        (self.cell / "common" / "sge_request").write_text(f"{line}\n")

    # -- within -------------------------------------------------------------------------------------------------------

    def _own_environment(self) -> dict[str, str]:
        return {
            "SGE_ROOT": str(self.directory),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": (self.directory / "ports").read_text().split()[0],
            "SGE_EXECD_PORT": (self.directory / "ports").read_text().split()[1],
            "LD_LIBRARY_PATH": f"{self.programs}:{UNPACKED}/usr/lib/x86_64-linux-gnu",
        }

    def _write(self) -> None:
        """Make the directory anew."""
        shutil.rmtree(self.directory, ignore_errors=True)
        spool, common = self.cell / "spool/qmaster", self.cell / "common"
        for path in (common, spool / "job_scripts", self.cell / "spool/execd", self.directory / "commands"):
            path.mkdir(parents=True)
        shared = UNPACKED / "usr/share/gridengine"
        (self.directory / "util").symlink_to(shared / "util")
        for folder in ("bin", "utilbin"):
            (self.directory / folder / "lx-amd64").mkdir(parents=True)
            for program in self.programs.iterdir():
                (self.directory / folder / "lx-amd64" / program.name).symlink_to(program)
        (self.directory / "ports").write_text(f"{free_port()} {free_port()}")
        (common / "act_qmaster").write_text(f"{self.master}\n")
        self._name_hosts(common)
        admin = getpass.getuser() if os.geteuid() else "none"
        (common / "bootstrap").write_text(
            f"admin_user {admin}\n"
            "default_domain none\nignore_fqdn true\nspooling_method classic\nspooling_lib libspoolc\n"
            f"spooling_params {common};{spool}\nbinary_path {self.directory}/bin\nqmaster_spool_dir {spool}\n"
            "security_mode none\nlistener_threads 2\nworker_threads 2\nscheduler_threads 1\njvm_threads 0\n"
        )
        exports = "".join(f"export {name}='{value}'\n" for name, value in self._own_environment().items())
        (self.directory / "bin/lx-amd64/qrsh").unlink()  # a job calls it, and has not the libraries of its own
        for script in (
            *(self.directory / "commands" / name for name in COMMANDS),
            self.directory / "bin/lx-amd64/qrsh",
        ):
            script.write_text(f'#!/bin/sh\n{exports}exec {self.programs}/{script.name} "$@"\n')
            script.chmod(0o755)
        settings = changed(
            (shared / "default-configuration").read_text(),
            {**GLOBAL, "execd_spool_dir": str(self.cell / "spool/execd")},
        )
        (self.directory / "configuration").write_text(settings)
        self._run("spoolinit", "classic", "libspoolc", f"{common};{spool}", "init")
        self._run("spooldefaults.bin", "configuration", str(self.directory / "configuration"))
        self._run("spooldefaults.bin", "complexes", str(shared / "util/resources/centry"))
        self._run("spooldefaults.bin", "usersets", str(shared / "util/resources/usersets"))
        self._run("spooldefaults.bin", "managers", getpass.getuser())

    def _name_hosts(self, common: Path) -> None:
        """The name of this machine is one more name of the host."""
        (common / "host_aliases").write_text(f"{self.master} {socket.gethostname()}\n")

    def _configure(self) -> None:
        """Add the GPUs, the parallel environments and the queues."""
        self._set("-Msconf", changed(self.call("qconf", "-ssconf"), SCHEDULING))
        counted = "".join(f"{name} {name} INT <= YES JOB 0 0\n" for name in RESOURCES)
        self._set("-Mc", self.call("qconf", "-sc") + counted)
        self.call("qconf", "-as", self.master)
        values = ",".join(f"{name}={number}" for name, number in RESOURCES.items())
        for host in self.hosts:
            self._set("-Ae", changed(_HOST_ENTRY, {"hostname": host, "complex_values": values}))
        for name, rule in ENVIRONMENTS.items():
            self._set("-Ap", _ENVIRONMENT.format(name=name, rule=rule))
        for name, walltime in QUEUES.items():
            own = {
                "qname": name,
                "tmpdir": str(self.scratch),
                "hostlist": " ".join(self.hosts),
                "slots": "16",
                "pe_list": " ".join(ENVIRONMENTS),
                "h_rt": walltime,
                "shell": "/bin/bash",
                "shell_start_mode": "unix_behavior",
                "load_thresholds": "NONE",
                "starter_method": self._starter(name),
            }
            self._set("-Aq", changed(self.call("qconf", "-sq"), own))

    def _starter(self, queue: str) -> str:
        """What starts the jobs of a queue."""
        if queue not in NUMBERED:
            return "NONE"
        script = self.directory / f"start-{queue}"
        script.write_text(f'#!/bin/sh\nexport SGE_HGR_gpu="{NUMBERED[queue]}"\nexec /bin/bash "$@"\n')
        script.chmod(0o755)
        return str(script)

    def _set(self, option: str, text: str) -> None:
        path = self.directory / "setting"
        path.write_text(text)
        self.call("qconf", option, str(path))

    def _run(self, program: str, *arguments: str) -> None:
        environment = os.environ | self._own_environment()
        words = self.on(self.master, str(self.programs / program), *arguments)
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise BedError(f"{program}: {done.stderr or done.stdout}")

    def _daemon(self, name: str, host: str) -> None:
        """Start a daemon, which puts itself in the background."""
        subprocess.run(
            self.on(host, str(self.programs / name)),
            cwd=self.directory,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", **self._own_environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            timeout=60,
        )

    def _end(self, name: str) -> None:
        """End the daemon of that name that belongs to this directory."""
        own = f"SGE_ROOT={self.directory}".encode()

        def alive() -> list[int]:
            found = []
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    variables = (process / "environ").read_bytes().split(b"\0")
                    if (process / "comm").read_text().strip() == name and own in variables:
                        found.append(int(process.name))
            return found

        for pid in alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not alive(), f"{name} ends")


_HOST_ENTRY = """\
hostname template
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
_ENVIRONMENT = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves TRUE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""


def main() -> None:
    """The command line."""
    action, *arguments = sys.argv[1:] or ["why-not"]
    if action == "install":
        return install()
    if action == "why-not":
        sys.exit(why_not())
    bed = GridEngineBed(Path(arguments[0]).resolve())
    if action == "env":
        print("".join(f"export {name}='{value}'\n" for name, value in bed.environment().items()))
    else:
        getattr(bed, action.replace("-", "_"))()


if __name__ == "__main__":
    try:
        main()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"bed: {error}")
