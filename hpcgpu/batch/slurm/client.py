"""Slurm: sbatch, squeue, scancel, and sacct where there is accounting.

Text formats throughout: the JSON of squeue changed its schema in 22.05, 23.11 and 24.05. Facts marked [probe] were seen
on a real Slurm 22.05.8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from hpcgpu.batch.base import After, JobState, JobStatus, OwnJob
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.recognise_own_scripts import is_job_script, runs_hpcgpu
from hpcgpu.batch.run_command import require, run
from hpcgpu.batch.slurm.estimate import epoch, read_test
from hpcgpu.batch.slurm.reasons import REASONS
from hpcgpu.errors import BatchError, BatchUnavailable

#: ``man squeue``, JOB STATE CODES. A state that is not here is UNKNOWN.
_STATES = {
    "PENDING": JobState.PENDING,
    "CONFIGURING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "POWER_UP_NODE": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SUSPENDED": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "COMPLETING": JobState.COMPLETING,
    "COMPLETED": JobState.COMPLETED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "FAILED": JobState.FAILED,
    "BOOT_FAIL": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "NODE_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
    "PREEMPTED": JobState.PREEMPTED,
    "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT,
}

#: The processes of such a job are stopped; with STOPPED it keeps its cores.
_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
#: The commands are installed, and this machine belongs to no Slurm [probe].
_NONE_HERE = re.compile(r"could not establish a configuration source", re.IGNORECASE)
#: Errors of scancel for ids that are unknown or have ended.
_GONE = re.compile("invalid job id|already completing|job/step already", re.IGNORECASE)
#: Timeout of sacct in seconds: it only adds to the answer of squeue, and hangs if the accounting database is down.
_ACCOUNTING_TIMEOUT = 10.0
_SQUEUE_FORMAT = "%i|%T|%N|%S|%e|%j|%r"
_SACCT_FORMAT = "JobIDRaw,State,ExitCode,NodeList,Start,End,JobName"
#: A job id: ASCII, and no longer than in any release, because it becomes an argument of commands.
_ID = re.compile(r"[0-9]{1,18}")
#: The id of a job, or of a task of a job array: a user may submit the script of worker jobs as an array.
_TASK_ID = re.compile(r"[0-9]{1,18}(?:_[0-9]{1,18})?")
_JOB_ID = re.compile(r"([0-9]{1,18})(?:;\S+)?")


def parse_state(word: str) -> JobState:
    """Return the state for one of Slurm's names.

    ``CANCELLED by 1000`` and ``COMPLETING+`` count by their first word.
    """
    return _STATES.get(re.split(r"[\s+,]", word.strip().upper(), maxsplit=1)[0], JobState.UNKNOWN)


def parse_job_id(stdout: str) -> str | None:
    """Return the id from ``sbatch --parsable`` (``jobid[;cluster]``).

    Site wrappers may print other text around it.
    """
    lines = [line.strip() for line in stdout.splitlines()]
    for line in reversed(lines):
        if match := _JOB_ID.fullmatch(line):
            return match[1]
    for line in reversed(lines):  # a wrapper that swallows --parsable
        if match := re.search(r"[Ss]ubmitted batch job ([0-9]{1,18})(?![0-9])", line):
            return match[1]
    return None


def parse_squeue(stdout: str) -> dict[str, JobStatus]:
    """Parse `_SQUEUE_FORMAT` lines; lines of another shape are left out, because an answer may be truncated."""
    jobs = {}
    for line in stdout.split("\n"):
        fields = line.strip().split("|", 6)
        if len(fields) != 7 or not _TASK_ID.fullmatch(fields[0]):
            continue
        job_id, state, node, start, end, rest, reason = fields
        if "|" in reason:  # a job name may hold the separator, a reason does not
            rest, reason = f"{rest}|{reason}".rsplit("|", 1)
        jobs[job_id] = JobStatus(
            job_id=job_id,
            state=parse_state(state),
            name=rest,
            reason="" if reason in {"None", "(null)"} else reason,
            node="" if node == "(null)" else node,
            start=epoch(start),
            end=epoch(end),
            expected_start=epoch(start) if parse_state(state) is JobState.PENDING else None,
            suspended=state in _SUSPENDED,
            words=REASONS,
        )
    return jobs


def parse_sacct(stdout: str) -> dict[str, JobStatus]:
    """Parse what ``sacct -X -n -P`` prints in `_SACCT_FORMAT`."""
    jobs = {}
    for line in stdout.split("\n"):
        fields = line.strip().split("|", 6)
        if len(fields) != 7 or not _ID.fullmatch(fields[0]):
            continue
        job_id, state, exit_code, node, start, end, name = fields
        jobs[job_id] = JobStatus(
            job_id=job_id,
            state=parse_state(state),
            name=name,
            node="" if node == "None assigned" else node,
            start=epoch(start),
            end=epoch(end),
            # Slurm's own mark of a memory kill, 0:125, is no signal
            exit_code=None if parse_state(state) is JobState.OUT_OF_MEMORY else parse_exit_code(exit_code),
            words=REASONS,
        )
    return jobs


def parse_exit_code(text: str) -> int | None:
    """Return the exit code for Slurm's ``code:signal``; 128 + N for signal N."""
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text.strip())
    if match is None:
        return None
    code, signal = int(match[1]), int(match[2])
    return 128 + signal if signal else code


def _only(ids: Iterable[str], jobs: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """Return the requested jobs: no answer may add others."""
    return {job_id: jobs[job_id] for job_id in ids if job_id in jobs}


class Slurm(CommandBatch):
    """Slurm, through its commands; see `CommandBatch` for the parameters."""

    name = "slurm"
    title = "Slurm"
    #: Errors after which the job may nevertheless have been accepted (Nextflow #970, for "Socket timed out").
    ambiguous = re.compile(
        r"timed out|zero bytes were transmitted|connection (reset|aborted)|unexpected message", re.IGNORECASE
    )
    #: Temporary errors after which the job was certainly not accepted.
    transient = re.compile(
        r"unable to contact slurm controller|transport endpoint|connection (refused|failure)|resource temporarily "
        r"unavailable"
        r"|temporarily unable|slurmctld.*(down|not respond)|slurm backup controller|communication (connection )?failure"
        # there is neither slurm.conf nor a controller that could send it [probe]
        r"|dns srv lookup|fetch config|configuration source|unable to (status file|process configuration file)"
        r"|no route to host|network is unreachable|host name lookup failure|unknown host|name or service not known"
        # munged does not run, or clocks differ
        r"|munged|munge (en|de)code|protocol authentication error",
        re.IGNORECASE,
    )
    #: Errors that report that this user has as many jobs as allowed (``man sacctmgr``: MaxSubmitJobs, GrpSubmitJobs)
    #: ...
    limited = re.compile(r"(max|grp)submit\w*|violates accounting/qos policy", re.IGNORECASE)
    reasons = REASONS
    #: ... unless they name a limit that the job itself exceeds.
    per_job = re.compile(r"max\w*(wall|perjob|pernode|mins)\w*", re.IGNORECASE)
    #: Not for sbatch, which passes its environment on to the job.
    query: ClassVar[Mapping[str, str]] = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}

    version_command = ("sbatch", "--version")
    identity_command = ("scontrol", "show", "config")
    identifies = re.compile(r"^ClusterName\s*=\s*([\w.-]{1,200})[ \t]*$", re.ASCII | re.MULTILINE)

    def check(self) -> None:
        """Raise `BatchError` if Slurm's commands are missing."""
        for command in ("sbatch", "squeue", "scancel"):
            require(
                command, "hpcgpu needs Slurm's commands: run this on a login node, perhaps after `module load slurm`"
            )

    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        argv = ["sbatch", "--parsable", f"--job-name={job_name}"]
        if after is not None:
            argv.append(f"--dependency={after}")
        if exclude:
            argv.append(f"--exclude={','.join(exclude)}")
        return [*argv, str(script)]

    def read_job_id(self, stdout: str) -> str | None:
        return parse_job_id(stdout)

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return the estimate of one ``sbatch --test-only``."""
        tested = self.call(["sbatch", "--test-only", str(script)], answered=lambda result: True)
        return read_test(tested.returncode, tested.words)

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Query all jobs by one squeue. A single unknown id is an error of squeue; it leaves out several [probe]."""
        ids = sorted(job_ids)
        if not ids:
            return {}
        tasks = ["--array"] if any("_" in i for i in ids) else []  # without it, pending tasks are one line
        return _only(ids, self._squeue([*tasks, f"--jobs={','.join(ids)}", "--states=all"]))

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Look up jobs by one sacct for all; empty without accounting.

        Without accounting sacct prints "Slurm accounting storage is disabled" and exits with 1.

        The answer is also empty if sacct is missing or hangs, so that the answer of squeue still counts.
        """
        ids = sorted(job_ids)
        if not ids:
            return {}
        argv = ["sacct", "-X", "-n", "-P", "-o", _SACCT_FORMAT, "-j", ",".join(ids)]
        try:
            result = run(argv, timeout=min(self.timeout, _ACCOUNTING_TIMEOUT), extra_env=self.query)
        except BatchError:
            return {}
        return _only(ids, parse_sacct(result.stdout)) if result.returncode == 0 else {}

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Cancel all jobs by one scancel; unknown and ended ids are no error of it [probe]."""
        ids = sorted(job_ids)
        if not ids:
            return
        argv = ["scancel", *(["--state=PENDING"] if only_pending else []), *ids]
        self.call(argv, answered=lambda result: bool(_GONE.search(result.words)))

    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        """Return the ids of live jobs of that name. An ended job may be an earlier cluster's of the same name."""
        jobs = self._squeue(["--me", f"--name={job_name}"], attempts=attempts)
        live = [i for i, job in jobs.items() if job.name == job_name and not job.state.ended]
        return sorted(filter(_ID.fullmatch, live), key=int)  # a task of an array is the user's own job

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        """Query the paths of the scripts by one squeue, and the text of each that matters by one scontrol."""
        argv = ["squeue", "--me", "--array", "--noheader", "--format=%i|%o"]
        try:
            lines = self.call(argv, answered=lambda result: False, attempts=1).stdout.split("\n")
        except BatchUnavailable as error:
            if _NONE_HERE.search(str(error)):
                return {}
            raise
        jobs: dict[Path, list[str]] = {}
        for job_id, found, path in (line.strip().partition("|") for line in lines):
            if found and _TASK_ID.fullmatch(job_id) and is_job_script(Path(path)):
                jobs.setdefault(Path(path), []).append(job_id)
        ours = {path: ids for path, ids in jobs.items() if wanted(path) and self._wrote(ids)}
        return {job_id: path for path, ids in ours.items() for job_id in ids}

    def _wrote(self, job_ids: Iterable[str]) -> bool:
        """Whether hpcgpu wrote the one script that these jobs have in common. Slurm keeps its text."""
        for job_id in job_ids:
            shown = self.call(["scontrol", "write", "batch_script", job_id, "-"], answered=lambda result: True)
            if shown.returncode == 0:  # otherwise it has just ended
                return runs_hpcgpu(shown.stdout)
        return False

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        """Return the job around this process. SLURM_JOB_START_TIME and SLURM_JOB_END_TIME are not set before 23.02."""
        job_id = environ.get("SLURM_JOB_ID")
        if not job_id:
            return None
        end = epoch(environ.get("SLURM_JOB_END_TIME", ""))
        return OwnJob(
            job_id=job_id,
            name=environ.get("SLURM_JOB_NAME", job_id),
            node=int(environ.get("SLURM_NODEID", "0")),
            end=end,
            start=epoch(environ.get("SLURM_JOB_START_TIME", "")),
            warned="SLURM_STEP_ID" in environ,  # Slurm does not warn the script itself
        )

    def _squeue(self, arguments: list[str], *, attempts: int | None = None) -> dict[str, JobStatus]:
        argv = ["squeue", "--noheader", f"--format={_SQUEUE_FORMAT}", *arguments]
        result = self.call(argv, answered=lambda result: "invalid job id" in result.words.lower(), attempts=attempts)
        return parse_squeue(result.stdout)
