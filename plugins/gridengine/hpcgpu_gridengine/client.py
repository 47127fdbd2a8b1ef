"""Grid Engine through its commands: qsub, qstat, qacct, qdel, qhold, qrls."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from hpcgpu.batch.base import After, JobState, JobStatus, OwnJob
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.recognise_own_scripts import is_job_script
from hpcgpu.batch.run_command import Result, require, run
from hpcgpu.errors import BatchError, BatchUnavailable
from hpcgpu.posix.user import user_name
from hpcgpu_gridengine.answers import parse_job_id, parse_qacct, parse_qstat, parse_reasons, parse_scripts
from hpcgpu_gridengine.directives import command_line, full_name, gridengine_name
from hpcgpu_gridengine.reasons import REASONS

#: Ids that are unknown or have ended are an answer, not an error.
_GONE = re.compile(r"does not exist|has (deleted|registered)|modified hold of job|already in deletion", re.IGNORECASE)
#: The first line of ``qstat -help``: "SGE 8.1.9"; GE, OGS, UGE and AGE are relatives.
_VERSION = re.compile(r"^\s*((?:\w*GE|\w*OGS\S*|GE\S*) ?[\w.]+)\s*$", re.MULTILINE)


class GridEngine(CommandBatch):
    """Grid Engine, through its commands; see `CommandBatch` for the parameters.

    It cannot let a job wait for the start of another, so a worker job may start first: it waits for the scheduler
    itself. It cannot avoid single nodes, so `submit` ignores `exclude`.
    """

    name = "gridengine"
    title = "Grid Engine"
    #: Errors of qsub after which the job may nevertheless have been accepted.
    ambiguous = re.compile(r"timed?[ -]?out|failed receiving gdi request|got (receive|read) error", re.IGNORECASE)
    #: Errors after which it was certainly not: no qmaster listens.
    transient = re.compile(
        r"connection refused|unable to (contact|send message to) qmaster|can't (find connection|resolve host)|no route "
        r"to host|network is unreachable|qmaster is (not )?(running|down)",
        re.IGNORECASE,
    )
    #: ``max_u_jobs`` and ``max_jobs`` of ``man sge_conf``.
    limited = re.compile(r"only \d+ jobs are allowed per (user|cluster)", re.IGNORECASE)
    reasons = REASONS
    query: ClassVar[Mapping[str, str]] = {"LC_ALL": "C"}
    version_command = ("qstat", "-help")
    identity_command = ("qconf", "-sss")  # the host of its scheduler
    identifies = re.compile(r"^([\w.-]{1,200})$", re.MULTILINE)

    def check(self) -> None:
        """Raise `BatchError` if the commands are missing, or are those of another batch system."""
        for command in ("qsub", "qstat", "qdel", "qacct", "qconf"):
            require(command, "hpcgpu needs Grid Engine's commands: run this on a login node")
        self.version()

    def version(self) -> str:
        """Return the release, the first line of ``qstat -help``."""
        result = run(list(self.version_command), timeout=self.timeout, extra_env=self.query)
        if match := _VERSION.search(result.stdout):
            return match[1]
        raise BatchError(f"the qstat on the PATH is not Grid Engine's: `qstat -help` says {result.words[:200]!r}")

    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        hold = ["-hold_jid", after.job_id] if after is not None and after.ended else []
        return ["qsub", "-terse", "-N", gridengine_name(job_name), *hold, *_script(script)]

    def read_job_id(self, stdout: str) -> str | None:
        return parse_job_id(stdout)

    def log_name(self, job_name: str, job_id: str) -> str:
        """Return the file name of a job's log."""
        return f"{gridengine_name(job_name)}-{job_id}.log"

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return whether the job could ever start: qsub verifies it against the empty cluster."""
        result = self.call(["qsub", "-w", "v", *_script(script)], answered=lambda result: True)
        words = re.sub(r"Unable to run job: |\s*Exiting\.$", "", result.words)
        if result.returncode != 0:
            return Estimate(limits=(f"{words}{advice(words, REASONS)}",))
        return Estimate(tested=True, known=("Grid Engine says when a job starts only when it starts",))

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Query all jobs by one qstat, and by another why those wait that do."""
        ids = set(job_ids)
        found = {i: job for i, job in self._jobs().items() if i in ids} if ids else {}
        waiting = [i for i, job in found.items() if job.state is JobState.PENDING]
        for job_id, reason in self._reasons(waiting).items():
            if job_id in waiting and reason:
                found[job_id] = replace(found[job_id], reason=f"{found[job_id].reason}: {reason}")
        return found

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Look up jobs in the accounting, which takes one job at a time; a job is there some seconds after its end."""
        found = {}
        for job_id in sorted(job_ids, key=int):
            try:
                result = self.call(["qacct", "-j", job_id], answered=lambda result: True, attempts=1)
            except BatchError:
                break
            found.update({i: job for i, job in parse_qacct(result.stdout).items() if i == job_id})
        return found

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Cancel all jobs by one qdel. It has no filter by state: jobs that wait are held first, and then deleted."""
        ids = sorted(job_ids, key=int)
        if only_pending and ids:
            self.call(["qhold", "-h", "u", *ids], answered=_gone)
            jobs = self._jobs()
            held = [i for i in ids if i in jobs and jobs[i].state is JobState.PENDING]
            with contextlib.suppress(BatchUnavailable):
                if others := [i for i in ids if i in jobs and i not in held]:
                    self.call(["qrls", "-h", "u", *others], answered=_gone)
            ids = held
        if ids:
            self.call(["qdel", *ids], answered=_gone)

    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        jobs = self._jobs(attempts=attempts)
        return sorted((i for i, job in jobs.items() if job.name == job_name and not job.state.ended), key=int)

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        """Find hpcgpu's jobs by the name of their script."""
        found = {job_id: Path(script) for job_id, script in parse_scripts(self._details(list(self._jobs()))).items()}
        return {job_id: path for job_id, path in found.items() if is_job_script(path) and wanted(path)}

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        """Return the job around this process; the script sets the index of the node."""
        if "SGE_ROOT" not in environ or not (job_id := environ.get("JOB_ID")):
            return None
        node = environ.get("HPCGPU_NODE", "0")
        return OwnJob(
            job_id=job_id,
            name=full_name(environ.get("JOB_NAME", job_id)),
            node=int(node) if node.isdigit() else 0,
        )

    def _jobs(self, *, attempts: int | None = None) -> dict[str, JobStatus]:
        """Return this user's jobs that have not ended."""
        argv = ["qstat", "-xml", "-r", "-u", user_name()]
        return parse_qstat(self.call(argv, answered=lambda result: False, attempts=attempts).stdout)

    def _details(self, ids: list[str], *, attempts: int | None = None) -> str:
        """Return what ``qstat -j`` prints of jobs, those left out that have ended meanwhile."""
        if not ids:
            return ""
        return self.call(["qstat", "-xml", "-j", ",".join(ids)], answered=lambda result: True, attempts=attempts).stdout

    def _reasons(self, ids: list[str]) -> dict[str, str]:
        """Return why jobs wait; empty if Grid Engine does not say it."""
        with contextlib.suppress(BatchUnavailable):
            return parse_reasons(self._details(ids, attempts=1))
        return {}


def _script(path: Path) -> list[str]:
    """Return a script as the last arguments of qsub."""
    return [*command_line(path.read_text(encoding="utf-8", errors="replace")), str(path)]


def _gone(result: Result) -> bool:
    """Whether the only errors of a command are ids that are unknown or have ended."""
    lines = [line for line in f"{result.stdout}\n{result.stderr}".splitlines() if line.strip()]
    return bool(lines) and all(_GONE.search(line) for line in lines)
