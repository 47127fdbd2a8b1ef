"""Abacus through its commands: ab-submit, ab-list, ab-cancel."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from hpcgpu.batch.base import After, JobState, JobStatus, Outlook, OwnJob, Reasons
from hpcgpu.batch.command_batch import CommandBatch
from hpcgpu.batch.queues import Queue, Queues, answer
from hpcgpu.batch.run_command import require

__all__ = ["Abacus", "queues"]

#: What ab-list calls the states; every other word is unknown.
STATES = {
    "waits": JobState.PENDING,
    "runs": JobState.RUNNING,
    "stops": JobState.COMPLETING,
    "done": JobState.COMPLETED,
    "broken": JobState.FAILED,
    "withdrawn": JobState.CANCELLED,
    "late": JobState.TIMEOUT,
}
#: What its words mean to a user.
REASONS = Reasons(
    pending={
        "no beads left": (Outlook.WAIT, "all beads are in use"),
        "not your turn": (Outlook.WAIT, "other jobs came first"),
        "linked": (Outlook.WAIT, "it starts once the scheduler job has started"),
    }.get,
    failed={"bad sum": "its script failed"},
    refused=[("no such tier", "check `tier`"), ("too many beads", "ask for fewer GPUs with `gpus_per_node`")],
)


def parse_list(stdout: str) -> dict[str, JobStatus]:
    """Parse the lines of ``ab-list``: id, state, start, end, exit code, name, reason."""
    jobs = {}
    for line in stdout.splitlines():
        fields = line.split("\t")
        if len(fields) != 7 or not re.fullmatch("[0-9]{1,18}", fields[0]):
            continue
        job_id, state, start, end, code, name, reason = fields
        jobs[job_id] = JobStatus(
            job_id=job_id,
            state=STATES.get(state, JobState.UNKNOWN),
            name=name,
            reason=reason,
            node="frame" if start != "-" else "",
            start=None if start == "-" else float(start),
            end=None if end == "-" else float(end),
            exit_code=None if code == "-" else int(code),
            words=REASONS,
        )
    return jobs


class Abacus(CommandBatch):
    """Abacus, through its commands; see `CommandBatch` for the parameters."""

    name = "abacus"
    title = "Abacus"
    ambiguous = re.compile("no answer")
    transient = re.compile("frame is jammed")
    limited = re.compile("enough jobs of yours")
    reasons = REASONS
    query = {"LC_ALL": "C"}  # noqa: RUF012
    version_command = ("ab-list", "--version")
    identity_command = ("ab-list", "--frame")
    identifies = re.compile(r"^frame (\S+)$", re.MULTILINE)

    def check(self) -> None:
        for command in ("ab-submit", "ab-list", "ab-cancel"):
            require(command, "Abacus' commands are needed: run this on a login node.")

    def submit_command(
        self, script: Path, job_name: str, logs: Path | None, after: After | None, exclude: Collection[str]
    ) -> list[str]:
        link = [] if after is None else ["--link-end" if after.ended else "--link", after.job_id]
        return ["ab-submit", "--name", job_name, *link, str(script)]

    def read_job_id(self, stdout: str) -> str | None:
        match = re.search(r"^job ([0-9]{1,18}) counted$", stdout, re.MULTILINE)
        return match[1] if match else None

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        ids = sorted(job_ids)
        return {i: job for i, job in self._list(*ids).items() if i in ids} if ids else {}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}  # ab-list shows all that is known

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        if ids := sorted(job_ids):
            self.call(["ab-cancel", *(["--waiting"] if only_pending else []), *ids], answered=lambda result: False)

    def find(self, job_name: str, *, attempts: int | None = None) -> list[str]:
        jobs = self._list("--mine", attempts=attempts)
        return sorted((i for i, job in jobs.items() if job.name == job_name and not job.state.ended), key=int)

    def own_job(self, environ: Mapping[str, str]) -> OwnJob | None:
        if not (job_id := environ.get("AB_JOB")):
            return None
        return OwnJob(job_id=job_id, name=environ.get("AB_NAME", job_id))

    def _list(self, *arguments: str, attempts: int | None = None) -> dict[str, JobStatus]:
        return parse_list(self.call(["ab-list", *arguments], answered=lambda result: False, attempts=attempts).stdout)


def queues() -> Queues:
    """Ask ab-list for the tiers: name, GPUs, cores and MiB of a node."""
    found = []
    for line in answer(["ab-list", "--tiers"]).splitlines():
        name, gpus, cores, memory = line.split()
        if int(gpus):
            found.append(Queue(name, int(gpus), int(cores), int(memory)))
    return Queues(gpus=found, by_default=bool(found))
