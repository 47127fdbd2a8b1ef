"""Grid Engine through its commands: qsub, qstat, qacct, qdel, qhold, qrls."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hpcgpu.batch.base import After, JobState, JobStatus, OwnJob
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.recognise_own_scripts import is_job_script
from hpcgpu.batch.run_command import Result, require, run
from hpcgpu.errors import BatchError, BatchUnavailable, SubmitRefused
from hpcgpu.posix.user import user_name
from hpcgpu_gridengine.answers import (
    is_xml,
    parse_job_id,
    parse_qacct,
    parse_qstat,
    parse_queue_limits,
    parse_reasons,
    parse_scripts,
    parse_unlimited,
)
from hpcgpu_gridengine.directives import command_line, full_name, gridengine_name
from hpcgpu_gridengine.reasons import REASONS

#: Ids that are unknown or have ended are an answer, not an error.
_GONE = re.compile(r"does not exist|has (deleted|registered)|modified hold of job|already in deletion", re.IGNORECASE)
#: The first line of ``qstat -help``: "SGE 8.1.9"; GE, OGS, UGE and AGE are relatives.
_VERSION = re.compile(r"^\s*((?:\w*GE|\w*OGS\S*|GE\S*) ?[\w.]+)\s*$", re.MULTILINE)


#: Words of a qstat that has no option -xml.
_REFUSES_XML = re.compile(r"(option|argument|usage|unknown|invalid|unrecogni[sz]ed)\b.*-xml", re.IGNORECASE)


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

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        #: Seconds that a job may run by its queue, for jobs that request none; None for no limit.
        self._limits: dict[str, float | None] = {}

    def check(self) -> None:
        """Raise `BatchError` if the commands are missing, or are those of another batch system."""
        for command in ("qsub", "qstat", "qdel", "qacct", "qconf"):
            require(command, "hpcgpu needs Grid Engine's commands: run this on a login node")
        self.version()
        with contextlib.suppress(BatchUnavailable):  # what is called next reports it
            self._listed(attempts=1)

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
        """Query all jobs by one qstat, and by another why those wait that do.

        A job that requests no h_rt has that of its queue: it is queried once, when the job runs.
        """
        ids = set(job_ids)
        answer = self._listed() if ids else ""
        jobs = parse_qstat(answer)
        found = {i: job for i, job in jobs.items() if i in ids}
        self._cancel_late(jobs, found)
        self._learn_limits({i: queue for i, queue in parse_unlimited(answer).items() if i in found})
        for job_id, job in found.items():
            if job.end is None and job.start is not None and (limit := self._limits.get(job_id)):
                found[job_id] = replace(job, end=job.start + limit)
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
            found.update({i: job for i, job in parse_qacct(result.stdout, self._limit_of).items() if i == job_id})
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

    def _listed(self, *, attempts: int | None = None) -> str:
        """Return what qstat prints of this user's jobs that have not ended."""
        argv = ["qstat", "-xml", "-r", "-u", user_name()]
        result = self.call(argv, answered=lambda result: bool(_REFUSES_XML.search(result.words)), attempts=attempts)
        answer = result.stdout[max(result.stdout.find("<?xml"), 0) :]  # a site's wrapper may print something before
        if is_xml(answer):
            return answer
        said = f"`qstat -xml -r` says {result.words[:200]!r}"
        if result.returncode or (result.stdout.strip() and "<" not in result.stdout):
            raise BatchError(
                f"the qstat on the PATH does not list jobs as XML, and hpcgpu cannot see its jobs without "
                f"that: {said}. Ask your site for Grid Engine's own qstat, and put it first on the PATH"
            )
        raise BatchUnavailable(f"the answer of qstat is cut off: {said}")

    def _jobs(self, *, attempts: int | None = None) -> dict[str, JobStatus]:
        """Return this user's jobs that have not ended."""
        return parse_qstat(self._listed(attempts=attempts))

    def _cancel_late(self, jobs: Mapping[str, JobStatus], own: Mapping[str, JobStatus]) -> None:
        """Cancel jobs that a slow verifier of the site (JSV) has let in beside another attempt of the same submit.

        Such a job has the name and the script of a job that is known. Others may have the name by chance.
        """
        known = {job.name: i for i, job in own.items() if job.name in self.unsure}
        others = [i for i, job in jobs.items() if job.name in known and i not in own]
        others = [i for i in others if jobs[i].state is not JobState.COMPLETING]
        if not others:
            return
        with contextlib.suppress(BatchUnavailable):  # the next poll tries again
            scripts = parse_scripts(self._details([*others, *known.values()], attempts=1))
            late = [i for i in others if scripts.get(i) and scripts[i] == scripts.get(known[jobs[i].name])]
            if late:
                self.call(["qdel", *late], answered=_gone, attempts=1)

    def _learn_limits(self, queues: Mapping[str, str]) -> None:
        """Query h_rt of the queues, such as ``gpu.q@n1``, of jobs for which it is not known yet."""
        queues = {job_id: queue for job_id, queue in queues.items() if job_id not in self._limits}
        if not queues:
            return
        argv = ["qstat", "-xml", "-F", "h_rt", "-u", user_name(), "-q", ",".join(sorted(set(queues.values())))]
        with contextlib.suppress(BatchUnavailable):
            limits = parse_queue_limits(self.call(argv, answered=lambda result: True, attempts=1).stdout)
            self._limits |= {job_id: limits[queue] for job_id, queue in queues.items() if queue in limits}

    def _limit_of(self, job_id: str, queue: str) -> float | None:
        self._learn_limits({job_id: queue})
        return self._limits.get(job_id)

    def _details(self, ids: list[str], *, attempts: int | None = None) -> str:
        """Return what ``qstat -j`` prints of jobs, those left out that have ended meanwhile."""
        if not ids:
            return ""
        return self.call(["qstat", "-xml", "-j", ",".join(ids)], answered=lambda result: True, attempts=attempts).stdout

    def _reasons(self, ids: list[str]) -> dict[str, str]:
        """Return why jobs wait; empty if Grid Engine does not report it."""
        with contextlib.suppress(BatchUnavailable):
            return parse_reasons(self._details(ids, attempts=1))
        return {}


def _script(path: Path) -> list[str]:
    """Return a script as the last arguments of qsub.

    Raises
    ------
    SubmitRefused
        qsub would take options from a file of another user, such as a program that it runs (-jsv).
    """
    planted = Path.cwd() / ".sge_request"
    with contextlib.suppress(FileNotFoundError):
        if planted.stat().st_uid not in (0, os.geteuid()):
            raise SubmitRefused(
                f"{planted} belongs to another user, and qsub would take options from it, even programs to run: "
                "remove it, or start your program in a directory where only you can write"
            )
    return [*command_line(path.read_text(encoding="utf-8", errors="replace")), str(path)]


def _gone(result: Result) -> bool:
    """Whether the only errors of a command are ids that are unknown or have ended."""
    lines = [line for line in f"{result.stdout}\n{result.stderr}".splitlines() if line.strip()]
    return bool(lines) and all(_GONE.search(line) for line in lines)
