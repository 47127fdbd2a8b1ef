"""OpenPBS and PBS Pro: qsub, qstat, qdel; qselect finds a job by its name, pbsnodes shows what can never run.

Text formats throughout: the JSON of qstat leaves out jobs and is often invalid. Facts marked [recorded] were seen on a
real OpenPBS 23.06.06, man pages are OpenPBS's.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from hpcgpu.batch import plugins_to_install
from hpcgpu.batch.base import After, JobState, JobStatus, OwnJob
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.pbs import estimate as estimates
from hpcgpu.batch.pbs.exits import EXITS, ending
from hpcgpu.batch.pbs.names import VARIABLE, pbs_name
from hpcgpu.batch.pbs.nodes import Shortage, parse_pbsnodes, seconds
from hpcgpu.batch.pbs.reasons import REASONS
from hpcgpu.batch.pbs.reservations import Reservation, epoch, is_reservation, reservations
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.recognise_own_scripts import is_job_script
from hpcgpu.batch.run_command import Result, require, run
from hpcgpu.batch.system_registry import names
from hpcgpu.errors import BatchError
from hpcgpu.posix.user import user_name

#: ``man qstat``, column S. `ending` handles F and X; a letter that is not here is UNKNOWN.
_STATES = {
    "Q": JobState.PENDING,
    "H": JobState.PENDING,
    "W": JobState.PENDING,
    "T": JobState.PENDING,
    "B": JobState.RUNNING,
    "R": JobState.RUNNING,
    "S": JobState.RUNNING,
    "U": JobState.RUNNING,
    "E": JobState.COMPLETING,
}
#: Suspended by PBS or an operator, or because the owner of a workstation is back.
_SUSPENDED = frozenset("SU")

#: Ids that are unknown (exit code 153) or have ended (35) are an
#: answer, not an error [recorded]; so is a job that is just ending.
_GONE = re.compile(r"unknown job id|job has finished|invalid for state of job", re.IGNORECASE)

#: ``0.pbs01``, alone on its line [recorded].
_JOB_ID = re.compile(r"([0-9]{1,18})\.(?=[\w.-]*[A-Za-z])[A-Za-z0-9][\w.-]{0,250}", re.ASCII)
#: The full name of one of hpcgpu's jobs, among the job's variables.
_NAMED = rf"(?:^|,){VARIABLE}=([^,]*)"
#: The most jobs that one command holds, and seconds until the next command. qhold and qrls use one connection for each
#: job, with a port below 1024 of this host that stays in use for a minute [recorded].
_HELD_AT_ONCE, _HOLD_PAUSE = 100, 20.0
#: Seconds for which the sizes of nodes from pbsnodes stay valid.
_NODES_LAST = 600.0
#: Seconds for which the ends of reservations from pbs_rstat stay valid: an operator may change them.
_RESERVATIONS_LAST = 60.0
#: PBS's comment on a job in the queue of a reservation that has not begun [recorded], in lower case.
_CLOSED = "queue not started"


def parse_job_id(stdout: str) -> str | None:
    """Return the id from the output of qsub, even if site wrappers print other text around it."""
    lines = (line.strip() for line in reversed(stdout.splitlines()))
    return next((line for line in lines if _JOB_ID.fullmatch(line)), None)


def parse_attributes(stdout: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each job from ``qstat -f``.

    PBS folds long lines with a newline and a tab, anywhere, and sometimes before nothing [recorded]. A job whose record
    is not complete is left out: if a truncated answer lacks an attribute, that proves nothing.
    """
    jobs: dict[str, dict[str, str]] = {}
    job_id, attributes = "", dict[str, str]()
    for line in estimates.unfolded(stdout).split("\n"):
        if match := re.fullmatch(r"Job Id: (\S+)\s*", line):
            job_id, attributes = match[1], {}
        elif match := re.fullmatch(r"    ([\w.]+) = (.*)", line):
            attributes[match[1]] = match[2]
        elif not line and job_id:
            jobs[job_id], job_id = attributes, ""
    return jobs


def statuses(jobs: Mapping[str, Mapping[str, str]]) -> dict[str, JobStatus]:
    """Return the state of each job from its attributes."""
    return {job_id: _status(job_id, attributes) for job_id, attributes in jobs.items()}


def _status(job_id: str, job: Mapping[str, str]) -> JobStatus:
    letter = job.get("job_state", "")
    state, exit_code = ending(job) if letter in {"F", "X"} else (_STATES.get(letter, JobState.UNKNOWN), None)
    start = epoch(job.get("stime", ""))
    walltime = seconds(job.get("Resource_List.walltime", ""))
    end = None
    if state.ended:
        end = epoch(job.get("obittime", "")) or _number(job.get("history_timestamp", ""))
    elif start is not None and walltime is not None:
        end = start + walltime
    named = re.search(_NAMED, job.get("Variable_List", ""))
    hosts = dict.fromkeys(part.split("/", 1)[0] for part in job.get("exec_host", "").split("+") if part)
    return JobStatus(
        job_id=job_id,
        state=state,
        name=named[1] if named else job.get("Job_Name", ""),
        reason="" if state is JobState.RUNNING and letter not in _SUSPENDED else _reason(job),
        node=",".join(hosts),
        start=start,
        end=end,
        expected_start=estimates.expected_start(job) if state is JobState.PENDING else None,
        exit_code=exit_code,
        suspended=letter in _SUSPENDED,
        words=REASONS,
    )


def _reason(job: Mapping[str, str]) -> str:
    """Return PBS's own words on why a job waits or ended: the attributes that hold it, and its comment."""
    if job.get("job_state") == "H":
        held = [f"{name} = {job[name]}" for name in ("Hold_Types", "depend") if name in job]
        return ", ".join([*held, *filter(None, [job.get("comment")])])
    words = [job.get("comment", "")]
    if (exit_status := job.get("Exit_status", "")).startswith("-"):
        known = next((how.words for code, how in EXITS.items() if exit_status == str(code)), "")
        words.append(f"(Exit_status = {exit_status}{': ' * bool(known)}{known})")
    return " ".join(filter(None, words))


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch("[0-9]{1,18}", text) else None


class PBS(CommandBatch):
    """OpenPBS and PBS Pro, through their commands; see `CommandBatch` for the parameters.

    The full name of a job is in a variable of the job. `pbs_name` shortens it for ``-N``. PBS cannot avoid single
    nodes, so `submit` ignores `exclude`.
    """

    name = "pbs"
    title = "PBS"
    #: Errors of qsub after which the job may nevertheless have been accepted.
    ambiguous = re.compile(
        r"timed?[ -]?out|end of file|connection (reset|aborted)|protocol error|broken pipe", re.IGNORECASE
    )
    #: Temporary errors after which the job was certainly not accepted: no server listens, exit code 162 of qsub and
    #: qdel, 255 of qstat [recorded].
    transient = re.compile(
        r"cannot connect to server|couldn't connect to cluster|connection refused|server (is )?(busy|shutting down|too "
        r"busy)"
        r"|no route to host|network is unreachable|resource temporarily unavailable|unknown host|pbsconf error|munge "
        r"(en|de)code",
        re.IGNORECASE,
    )
    #: Limits on how many jobs a user may have in a queue or at the server (OpenPBS, ``svr_messages.c``).
    limited = re.compile(
        r"maximum number of jobs|would exceed .*limit|limit .*(reached|on number of jobs)|too many jobs", re.IGNORECASE
    )
    reasons = REASONS
    query: ClassVar[Mapping[str, str]] = {"LC_ALL": "C"}

    version_command = ("qstat", "--version")
    identity_command = ("qstat", "-B", "-f")
    identifies = re.compile(r"^Server: ([\w.-]{1,200})[ \t]*$", re.ASCII | re.MULTILINE)
    _nodes: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    _nodes_queried = -_NODES_LAST
    _reserved: Mapping[str, Reservation] = MappingProxyType({})
    _reservations_queried = -_RESERVATIONS_LAST

    def check(self) -> None:
        """Raise `BatchError` if PBS's commands are missing, or are those of Torque or Slurm's wrappers."""
        for command in ("qsub", "qstat", "qdel", "qselect", "qhold", "qrls"):
            require(command, "hpcgpu needs PBS's commands: run this on a login node, perhaps after `module load pbs`")
        result = run(["qstat", "--version"], timeout=self.timeout, extra_env=self.query)
        words = " ".join(f"{result.stdout} {result.stderr}".split())
        if "pbs_version" in words:  # "pbs_version = 23.06.06" [recorded]
            return
        if others := plugins_to_install.found_here(names()):
            whose = others[0]
        elif shutil.which("sbatch") or "slurm" in words.lower():
            whose = "they look like Slurm's wrappers for PBS commands (slurm-wlm-torque): use SlurmGPUCluster"
        else:
            whose = (
                "they look like Torque's. hpcgpu does not support Torque, which has no chunks (-l select) and no "
                "job history"
            )
        raise BatchError(
            f"the qsub and qstat on the PATH are not those of OpenPBS or PBS Pro: {whose}. `qstat --version` says "
            f"{words[:200] or f'nothing, exit code {result.returncode}'!r}"
        )

    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        argv = ["qsub", "-N", pbs_name(job_name), "-v", f"{VARIABLE}={job_name}"]
        if logs is not None:
            argv += ["-o", str(logs / self.log_name(job_name, ""))]
        if after is not None:
            argv += ["-W", f"depend={after}"]
        return [*argv, str(script)]

    def read_job_id(self, stdout: str) -> str | None:
        return parse_job_id(stdout)

    def log_name(self, job_name: str, job_id: str) -> str:
        """Return the file name of a job's log.

        qsub needs the name before the job has an id, and has no placeholder for the id.
        """
        return f"{job_name}.log"

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return an estimate from ``qstat -Qf`` and pbsnodes, because PBS has no test of a submit."""
        request, there = (
            estimates.request(script.read_text(encoding="utf-8", errors="replace"), queue or ""),
            dict[str, str](),
        )
        if queue:
            listed = self.call(["qstat", "-Qf", queue], answered=lambda result: True)
            if "unknown queue" in listed.words.lower():
                return Estimate(limits=(f"{listed.words}{advice(listed.words, REASONS)}",))
            there = estimates.parse_queue(listed.stdout)
        nodes = self.call(["pbsnodes", "-av"], answered=lambda result: True)
        known = parse_pbsnodes(nodes.stdout) if nodes.returncode == 0 else {}
        found = estimates.estimate(request, there, known)
        reservation = reservations([queue or ""], timeout=self.timeout).get(queue or "")
        if reservation is None:
            return found
        start = reservation.start if reservation.start > time.time() else None
        return replace(found, start=start, known=(*found.known, str(reservation)))

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Query all jobs by one qstat; without ``-x`` it leaves out ended jobs [recorded].

        qsub accepts requests that no node can ever satisfy [recorded]. If no node is large enough for a waiting job,
        the job's reason reports that. PBS itself reports that only for a request that exceeds all nodes together.
        """
        jobs = self._qstat(sorted(job_ids, key=_order))
        found = statuses(jobs)
        for job_id, status in found.items():
            if status.state is JobState.PENDING and status.reason.startswith("Not Running: "):
                if shortage := self._shortage(jobs[job_id]):
                    found[job_id] = replace(status, reason=f"{status.reason}; {shortage}")
        return self._within_reservations(found, {job_id: job.get("queue", "") for job_id, job in jobs.items()})

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Query ended jobs by one ``qstat -x``; empty if the server keeps no history (``job_history_enable``)."""
        try:
            return statuses(self._qstat(sorted(job_ids, key=_order), "-x", attempts=1))
        except BatchError:
            return {}

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Cancel all jobs by one qdel; unknown and ended ids are no error.

        If a job is deleted, a job that depends on it stays held for ever [recorded]: it must be cancelled too.
        """
        ids = sorted(job_ids, key=_order)
        if not only_pending:
            self._delete(ids)
            return
        waiting = self._waiting(ids)
        for first in range(0, len(waiting), _HELD_AT_ONCE):
            if first:
                self.sleep(_HOLD_PAUSE)
            chunk = waiting[first : first + _HELD_AT_ONCE]
            try:
                self._delete(self._hold_waiting(chunk))
            except BaseException:
                self._release(chunk)
                raise

    def _delete(self, ids: list[str]) -> None:
        if ids:
            self.call(["qdel", *ids], answered=_gone)

    def _waiting(self, ids: list[str]) -> list[str]:
        """Return those of the jobs that wait now."""
        jobs = self._qstat(ids)
        return [job_id for job_id, job in jobs.items() if _STATES.get(job.get("job_state", "")) is JobState.PENDING]

    def _hold_waiting(self, ids: list[str]) -> list[str]:
        """Hold the jobs that wait, so that none can start meanwhile, and return them.

        qdel has no filter by state. A hold has no effect on a running job that is not to be checkpointed (OpenPBS,
        ``req_holdjob.c``), hence ``-c n`` in the scripts. The hold is released afterwards.
        """
        waiting: list[str] = []
        try:
            self.call(["qhold", "-h", "u", *ids], answered=_gone)
            waiting = self._waiting(ids)
        finally:  # even after an error, a job that stays must not stay held
            self._release([job_id for job_id in ids if job_id not in waiting])
        return waiting

    def _release(self, ids: list[str]) -> None:
        """Release the user's hold on these jobs, as far as the server answers."""
        if ids:
            with contextlib.suppress(BatchError):
                self.call(["qrls", "-h", "u", *ids], answered=_gone, attempts=1)

    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        """Return the ids of live jobs of that name, by one qselect for the short and one qstat for the full name."""
        argv = ["qselect", "-u", user_name(), "-N", pbs_name(job_name)]
        found = self.call(argv, answered=lambda result: False, attempts=attempts).stdout.split()
        jobs = self._qstat([word for word in found if _JOB_ID.fullmatch(word)], attempts=attempts)
        return sorted(
            (s.job_id for s in statuses(jobs).values() if s.name == job_name and not s.state.ended), key=_order
        )

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        """Find hpcgpu's jobs by the variable with their name; one of the arguments that a job keeps is its script."""
        argv = ["qselect", "-u", user_name()]
        found = self.call(argv, answered=lambda result: False, attempts=1).stdout.split()
        jobs = self._qstat([word for word in found if _JOB_ID.fullmatch(word)])
        scripts = {
            job_id: _script(job)
            for job_id, job in jobs.items()
            if not _status(job_id, job).state.ended and re.search(_NAMED, job.get("Variable_List", ""))
        }
        return {job_id: path for job_id, path in scripts.items() if is_job_script(path) and wanted(path)}

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        """Return the job around this process. PBS has no variable for the end of the walltime.

        The script sets the node's index if pbsdsh starts it. Otherwise the index is the rank from an MPI launcher,
        because there is one process on each node.
        """
        job_id = environ.get("PBS_JOBID")
        if not job_id:
            return None
        indices = (
            environ.get(n)
            for n in ("HPCGPU_NODE", "PALS_NODEID", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PBS_NODENUM")
        )
        node = next((int(index) for index in indices if index and index.isdigit()), 0)
        return OwnJob(job_id=job_id, name=environ.get(VARIABLE) or environ.get("PBS_JOBNAME", job_id), node=node)

    def _qstat(self, ids: list[str], *options: str, attempts: int | None = None) -> dict[str, dict[str, str]]:
        """Return the attributes of these jobs. qstat prints those of known ids, whatever its exit code [recorded].

        With ``-E`` (PBS Pro 18.1 and later) one connection serves all ids. Without it each id uses one, with a port
        below 1024 of this host that stays in use for a minute [recorded].
        """
        if not ids:
            return {}
        answer = self.call(["qstat", *options, "-E", "-f", *ids], answered=_gone, attempts=attempts)
        jobs = parse_attributes(answer.stdout)
        return {job_id: job for job_id, job in jobs.items() if job_id in ids}

    def _within_reservations(self, found: dict[str, JobStatus], queues: Mapping[str, str]) -> dict[str, JobStatus]:
        """Let running jobs end with their reservation: PBS deletes them then, whatever their walltime [recorded].

        For a job that waits for its reservation, PBS only reports that the queue is not started.
        """
        reserved = {i: s for i, s in found.items() if is_reservation(queues[i])}
        running = {i: s for i, s in reserved.items() if s.state is JobState.RUNNING}
        waiting = {i: s for i, s in reserved.items() if s.state is JobState.PENDING and _CLOSED in s.reason.lower()}
        if (running or waiting) and time.monotonic() - self._reservations_queried >= _RESERVATIONS_LAST:
            self._reservations_queried = time.monotonic()
            self._reserved = reservations(queues.values(), timeout=self.timeout) or self._reserved
        for job_id, status in running.items():
            if reservation := self._reserved.get(queues[job_id]):
                end = reservation.end if status.end is None else min(status.end, reservation.end)
                found[job_id] = replace(status, end=end, closes=reservation.end)
        for job_id, status in waiting.items():
            if reservation := self._reserved.get(queues[job_id]):
                reason = f"{status.reason.rstrip('.')}; reservation {queues[job_id]} {reservation.lasts}"
                found[job_id] = replace(status, reason=reason, expected_start=reservation.start)
        return found

    def _shortage(self, job: Mapping[str, str]) -> Shortage | None:
        """Return what a waiting job requests and no node has; None if pbsnodes does not show it."""
        if time.monotonic() - self._nodes_queried >= _NODES_LAST:
            self._nodes_queried = time.monotonic()
            try:
                result = run(["pbsnodes", "-av"], timeout=self.timeout, extra_env=self.query)
            except BatchError:
                result = Result((), 1, "", "")
            self._nodes = parse_pbsnodes(result.stdout) if result.returncode == 0 else {}
        return Shortage.of(job, self._nodes)


def _script(job: Mapping[str, str]) -> Path:
    """Return the script of a job: the last of qsub's arguments, which PBS joins by spaces without quotes.

    So the path may begin at any of them: the argument at which an existing path begins counts.
    """
    words = job.get("Submit_arguments", "").split(" ")
    base = re.search(r"(?:^|,)PBS_O_WORKDIR=([^,]*)", job.get("Variable_List", ""))
    paths = [Path(base[1] if base else "/", " ".join(words[i:])) for i in range(len(words))]
    return next((path for path in paths if path.parent.exists() and path.name), paths[-1])


def _gone(result: Result) -> bool:
    """Whether the only errors of a command are ids that are unknown or have ended."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return bool(lines) and all(_GONE.search(line) for line in lines)


def _order(job_id: str) -> tuple[int, str]:
    number = re.match(r"\d+", job_id)
    return (int(number[0]) if number else 0, job_id)
