"""HTCondor through its commands: condor_submit, condor_q, condor_history, condor_rm, condor_status."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hpcgpu.batch.base import After, JobState, JobStatus, OwnJob
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.estimate import Estimate
from hpcgpu.batch.queues import Queue
from hpcgpu.batch.reasons import advice
from hpcgpu.batch.recognise_own_scripts import is_job_script
from hpcgpu.batch.run_command import Result, require
from hpcgpu.errors import BatchError, BatchUnavailable, SubmitRefused
from hpcgpu_htcondor.answers import ATTRIBUTES, parse_ads, parse_job_id, statuses
from hpcgpu_htcondor.directives import SCRIPT, description
from hpcgpu_htcondor.machines import queues, shortage
from hpcgpu_htcondor.reasons import REASONS

#: Ids that are unknown or have ended are an answer, not an error.
_GONE = re.compile(r"couldn't find/remove", re.IGNORECASE)
#: What needs the user's name also in a pool that lets everybody write.
_QUEUES = "QMGMT_WRITE_CMD"
#: Seconds for which the sizes of the machines stay valid.
_MACHINES_LAST = 600.0
#: Seconds for which a job avoids machines: the pool forgets one that is off after 15 minutes (CLASSAD_LIFETIME).
_AVOIDED_FOR = 1200


class HTCondor(CommandBatch):
    """HTCondor, through its commands; see `CommandBatch` for the parameters.

    The id of a job is its ClusterId. A job can wait neither for the start nor for the end of another: a worker job that
    starts first waits for the scheduler itself.
    """

    name = "htcondor"
    title = "HTCondor"
    waits_for_end = False
    #: Errors of condor_submit after which the job may nevertheless have been accepted.
    ambiguous = re.compile(r"timed?[ -]?out|failed to commit job submission into the queue\.?$", re.IGNORECASE)
    #: Errors after which it was certainly not: no schedd listens.
    transient = re.compile(
        r"can't find address (of|for)|failed to (connect|fetch)|connection refused|unable to (connect|locate)|no route "
        r"to host|network is unreachable|communication error",
        re.IGNORECASE,
    )
    limited = re.compile(r"would exceed MAX_JOBS_(PER_OWNER|SUBMITTED)")
    reasons = REASONS
    query: ClassVar[Mapping[str, str]] = {"LC_ALL": "C", "_CONDOR_CONDOR_Q_ONLY_MY_JOBS": "True"}
    version_command = ("condor_version",)
    identity_command = ("condor_q", "-totals")
    identifies = re.compile(r"^-- Schedd: (\S{1,200}) :", re.MULTILINE)
    _machines: tuple[Queue, ...] = ()
    _machines_queried = -_MACHINES_LAST
    _owner = ""

    def check(self) -> None:
        """Raise `BatchError` if the commands are missing."""
        for command in ("condor_submit", "condor_q", "condor_rm", "condor_history", "condor_status"):
            require(command, "hpcgpu needs HTCondor's commands: run this on a machine from which you submit jobs")

    def version(self) -> str:
        """Return the release, such as ``HTCondor 23.9.6``."""
        words = super().version()
        match = re.search(r"CondorVersion: (\d[\w.]*)", words)
        return f"HTCondor {match[1]}" if match else words

    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        if after is not None and after.ended:
            raise SubmitRefused("HTCondor cannot let a job wait for the end of another")
        own = [f"batch_name = {job_name}"]
        nodes = [f'Machine =!= "{node}"' for node in sorted(exclude) if re.fullmatch(r"[\w.-]+", node)]
        avoided = f"({' && '.join(nodes)} || time() - QDate > {_AVOIDED_FOR})" if nodes else ""
        return ["condor_submit", "-terse", *_commands(script, *own, avoided=avoided)]

    def read_job_id(self, stdout: str) -> str | None:
        return parse_job_id(stdout)

    def estimate(self, script: Path, *, queue: str | None = None, walltime: float | None = None) -> Estimate:
        """Return whether any machine has what the job requests; HTCondor accepts it in any case."""
        tried = self.call(
            ["condor_submit", *_commands(script), "-dry-run", "-", "/dev/null"],
            answered=lambda result: True,
            attempts=1,
        )
        if tried.returncode != 0:
            return Estimate(limits=(f"{tried.words}{advice(tried.words, REASONS)}",))
        wanted = {name: int(amount) for name, amount in re.findall(r"^(Request\w+)=(\d+)$", tried.stdout, re.MULTILINE)}
        if missing := self._shortage(wanted):
            return Estimate(limits=(missing,))
        return Estimate(tested=True, known=("HTCondor says when a job starts only when it starts",))

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Query all jobs by one condor_q. HTCondor accepts jobs that no machine can run: their reason has it."""
        if not (ids := sorted(job_ids, key=int)):
            return {}
        ads = self._ads(["condor_q", *ids])
        found = statuses(ads)
        for ad in ads:
            job = found.get(str(ad.get("ClusterId")))
            if job and job.state is JobState.PENDING and job.reason.startswith("no match"):
                if missing := self._shortage(ad):
                    found[job.job_id] = replace(job, reason=missing)
        return {job_id: job for job_id, job in found.items() if job_id in ids}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        """Look up jobs in the history, which condor_history reads from its end."""
        if not (ids := sorted(job_ids, key=int)):
            return {}
        try:
            return statuses(self._ads(["condor_history", "-limit", str(len(ids)), *ids], attempts=1), over=True)
        except BatchError:
            return {}

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        """Remove all jobs by one condor_rm, whose constraint spares running ones."""
        ids = sorted(job_ids, key=int)
        these = f"({' || '.join(f'ClusterId == {i}' for i in ids)})"
        if ids and only_pending:
            self.call(["condor_rm", "-constraint", f"{these} && (JobStatus == 1 || JobStatus == 5)"], answered=_gone)
        elif ids:
            self.call(["condor_rm", *ids], answered=_gone)

    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        mine = self._mine(f'JobBatchName == "{job_name}"', attempts)
        jobs = statuses(self._ads(["condor_q", "-constraint", mine], attempts=attempts))
        return sorted((i for i, job in jobs.items() if not job.state.ended), key=int)

    def marked(self, wanted: Callable[[Path], bool]) -> dict[str, Path]:
        """Find hpcgpu's jobs by the attribute that holds their script."""
        ads = self._ads(["condor_q", "-constraint", self._mine(f"{SCRIPT} =!= undefined")])
        found = {str(ad.get("ClusterId")): Path(str(ad.get(SCRIPT))) for ad in ads}
        return {job_id: path for job_id, path in found.items() if is_job_script(path) and wanted(path)}

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        """Return the job around this process, from the variables that its description sets."""
        if "_CONDOR_SLOT" not in environ or not (job_id := environ.get("HPCGPU_JOB_ID")):
            return None
        return OwnJob(job_id=job_id, name=environ.get("HPCGPU_JOB_NAME", job_id))

    def _mine(self, constraint: str, attempts: int | None = None) -> str:
        """Return a constraint with the owner of this user's jobs, if HTCondor reports it.

        A pool may show the jobs of all users, and whoever sees the names of this user's jobs can use the same ones.
        """
        if not self._owner:
            try:
                ping = self.call(
                    ["condor_ping", "-type", "schedd", _QUEUES], answered=lambda _: True, attempts=attempts
                )
            except BatchUnavailable:
                raise
            except BatchError:  # there is no such command
                return constraint
            found = re.search(r" succeeded as (?!unauthenticated@)([\w.-]+)@", ping.stdout)
            self._owner = found[1] if found else ""
        return f'Owner == "{self._owner}" && {constraint}' if self._owner else constraint

    def _ads(self, argv: list[str], *, attempts: int | None = None) -> list[dict[str, Any]]:
        """Return the ads of jobs."""
        argv = [*argv, "-json", "-attributes", ATTRIBUTES]
        answer = self.call(argv, answered=lambda result: False, attempts=attempts)
        try:
            return parse_ads(answer.stdout)
        except ValueError as error:
            raise BatchUnavailable(f"the answer of `{argv[0]}` cannot be read: {error}") from error

    def _shortage(self, wanted: Mapping[str, Any]) -> str:
        """Return what a job requests and no machine has; empty if the machines are not known."""
        if time.monotonic() - self._machines_queried >= _MACHINES_LAST:
            self._machines_queried = time.monotonic()
            try:
                known = queues()
                self._machines = (*known.gpus, *known.without)
            except BatchError:
                self._machines = ()
        return shortage(wanted, self._machines)


def _commands(script: Path, *own: str, avoided: str = "") -> list[str]:
    """Return the options of condor_submit that hold the description of a script."""
    lines = [*description(script.read_text()), *own]
    if avoided:
        lines = [
            re.sub(r"^requirements = (.*)", lambda found: f"requirements = ({found[1]}) && {avoided}", line)
            for line in lines
        ]
    return [word for line in lines for word in ("-a", line)] + ["-queue", "1"]


def _gone(result: Result) -> bool:
    """Whether the only errors of a command are ids that are unknown or have ended."""
    lines = [line for line in f"{result.stdout}\n{result.stderr}".splitlines() if line.strip()]
    return bool(lines) and all(_GONE.search(line) or "marked for removal" in line for line in lines)
