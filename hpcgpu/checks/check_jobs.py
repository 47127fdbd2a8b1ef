"""Submits one short job of each kind, waits, connects and cleans up.

`hpcgpu.checks.judge_job_reports` judges their reports.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import ssl
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgpu.batch.base import BatchSystem, Outlook
from hpcgpu.batch.reasons import explain, outlook
from hpcgpu.checks.judge_job_reports import Seen, environment_lines, fabric_line, judge, polars_lines
from hpcgpu.checks.result_lines import Line
from hpcgpu.display.counts_and_durations import duration
from hpcgpu.display.progress import Progress
from hpcgpu.errors import AmbiguousSubmit, BatchError
from hpcgpu.existing_clusters.stop import stop, what_stays
from hpcgpu.options.shared_options_and_defaults import Options
from hpcgpu.polling.queue_monitor import Monitor, View
from hpcgpu.posix import checked_files
from hpcgpu.posix.printable import printable
from hpcgpu.scripts import container, render
from hpcgpu.software import compare_environments
from hpcgpu.store import certificates_and_keys, create_directory
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from hpcgpu.runtime.job_check import JobReport


#: Walltime of the jobs, seconds.
_WALLTIME = 300
#: Polls in a row that must report that a job can never start.
_POLLS_TO_BELIEVE = 2
#: Seconds by which a shared filesystem may show a job's report later than the queue shows the end of the job.
_LATE = 5.0


@dataclass(frozen=True)
class Result:
    """The result of the jobs.

    Attributes
    ----------
    lines : list of Line
    environments : mapping of mappings
        Software and GPUs by place: ``"login"``, ``"scheduler job"``, ``"worker job"``.
    kept : Path or None
        The directory with scripts and logs, which is kept if something failed.
    """

    lines: list[Line]
    environments: Mapping[str, Mapping[str, str]]
    kept: Path | None


def _submit(seen: Seen, batch: BatchSystem, directory: ClusterDirectory, script: Path, logs: Path) -> None:
    """Submit the job of one kind; record a refusal in `seen`."""
    job_name = f"{directory.path.name}-{seen.kind}"
    directory.intend(job_name, seen.kind)
    try:
        seen.job_id = batch.submit(script, job_name=job_name, logs=logs)
        directory.submitted(job_name, seen.job_id)
        seen.unread = batch.unread
    except BatchError as error:
        seen.problem = str(error)
        if not isinstance(error, AmbiguousSubmit):
            directory.refused(job_name)


def check_jobs(options: Options, batch: BatchSystem, *, quiet: bool, timeout: float | None = None) -> Result:
    """Submit one short job of each kind, wait for both, and leave no job behind.

    Parameters
    ----------
    options : Options
    batch : BatchSystem
    quiet : bool
        No progress messages.
    timeout : float, optional
        Seconds to wait for the jobs. Default: as long as the queue takes.

    Returns
    -------
    Result

    Raises
    ------
    OptionError
        A directive is not valid.
    """
    name = f"check-{secrets.token_hex(4)}"
    path = options.cluster.cluster_directory / name
    short = replace(
        options,
        cluster=replace(options.cluster, name=name),
        worker=replace(options.worker, walltime=_WALLTIME, nodes_per_job=1),
    )
    if short.scheduler is not None:
        short = replace(short, scheduler=replace(short.scheduler, walltime=_WALLTIME))
    kinds = ["worker"] if short.scheduler is None else ["scheduler", "worker"]
    rendered = {kind: render.render(options.system, kind, short, path, command="check") for kind in kinds}

    def complete(directory: ClusterDirectory) -> None:
        certificates_and_keys.create(directory, walltime=_WALLTIME)
        container.provide(directory.path, short.worker, short.scheduler)

    render.make_log_directory(options)
    directory = create_directory.claim(path, None, system=options.system, queue=batch.identity(), complete=complete)
    log_directory = options.cluster.log_directory or directory.logs
    seen = {kind: Seen(kind) for kind in kinds}
    try:
        for kind, text in rendered.items():
            script = directory.write(render.script_name(options.system, kind), text)
            _submit(seen[kind], batch, directory, script, log_directory)
            if seen[kind].problem and kind == "worker" and options.worker.nodes_per_job != 1:
                seen[kind].problem += f" (the check requests one node, not {options.worker.nodes_per_job})"
        _wait(directory, batch, seen, log_directory, quiet=quiet, timeout=timeout)
    finally:
        lines = _end(directory, batch)
    lines += [line for kind in kinds for line in judge(seen[kind], _gpus(short, kind))]
    here = compare_environments.collect()
    reports = {kind: one.found for kind, one in seen.items() if one.found}
    all_reported = len(reports) == len(seen)
    if all_reported and "scheduler" in reports:
        lines.append(fabric_line(reports["scheduler"], reports["worker"], options))
    if "worker" in reports:
        lines += polars_lines(reports["worker"], options)
    parties = {kind: report["environment"] for kind, report in reports.items()}
    scheduler = here if short.scheduler is None else parties.get("scheduler")
    differences = compare_environments.compare(
        here, scheduler, {"worker": parties["worker"]} if "worker" in parties else {}
    )
    if all_reported or differences:
        lines += environment_lines(differences)
    failed = any(line.grade == "failure" for line in lines)
    if not failed:
        shutil.rmtree(path, ignore_errors=True)
    environments = {"login": here} | {f"{kind} job": about for kind, about in parties.items()}
    return Result(lines, environments, path if failed else None)


def _end(directory: ClusterDirectory, batch: BatchSystem) -> list[Line]:
    """Cancel the jobs; return a message if some may be left."""
    try:
        left = stop(directory, batch)
    except BatchError as error:
        problem = f"the jobs of the check may still be in the queue: {error}"
    else:
        problem = what_stays(left, "Stop them") if left else ""
    return [Line("login", "jobs", "failure", problem, f"cancel them: hpcgpu stop {directory.path}")] if problem else []


def _gpus(options: Options, kind: str) -> int:
    job = options.worker if kind == "worker" else options.scheduler
    return job.gpus_per_node if job is not None else 0


def _wait(
    directory: ClusterDirectory,
    batch: BatchSystem,
    seen: dict[str, Seen],
    logs: Path,
    *,
    quiet: bool,
    timeout: float | None,
) -> None:
    """Wait until each job has sent its report, or can no longer send it."""
    jobs = {kind: one.job_id for kind, one in seen.items() if one.job_id}
    began = last_check = time.time()
    monitor = Monitor(batch)
    for kind, job_id in jobs.items():
        monitor.watch(job_id, f"{directory.path.name}-{kind}", now=began)
    unschedulable: Counter[str] = Counter()
    ended: dict[str, float] = {}
    with Progress(quiet) as progress:
        while waiting := {
            kind: job_id for kind, job_id in jobs.items() if not seen[kind].found and not seen[kind].problem
        }:
            directory.refresh()
            now = time.time()
            for kind in waiting:
                report = directory.path / f"{kind}.json"
                if report.exists():
                    seen[kind].late = now - last_check
                    _record_report(seen[kind], json.loads(checked_files.read(report)), directory, waited=now - began)
                    directory.write(f"{kind}.seen", "")
            last_check = now
            if monitor.poll_if_due(now=now, waiting=True) and not monitor.error:
                for job_id in waiting.values():
                    never = outlook(monitor.views[job_id].status) is Outlook.NEVER
                    unschedulable[job_id] = unschedulable[job_id] + 1 if never else 0
            for kind, job_id in waiting.items():
                if seen[kind].found:
                    continue
                view = monitor.views[job_id]
                if view.status.state.ended:
                    ended.setdefault(job_id, now)
                log = logs / batch.log_name(view.status.name, job_id)
                never = unschedulable[job_id] >= _POLLS_TO_BELIEVE
                seen[kind].problem = seen[kind].problem or _lost(view, now - ended.get(job_id, now), never, log)
                if timeout is not None and now - began > timeout:
                    words = explain(view.status) if view.polled else "the queue does not answer"
                    seen[kind].problem = (
                        seen[kind].problem or f"job {job_id} sent no report within {duration(timeout)}: {words}"
                    )
            named = "; ".join(
                f"{kind} job {job_id} {_state(monitor.views[job_id])}" for kind, job_id in waiting.items()
            )
            why = f"the queue does not answer: {monitor.error}" if monitor.error else "waiting for the jobs"
            progress.update(f"check: {why}", f"{named}, for {duration(now - began)}")
            time.sleep(0.2)


def _lost(view: View, ended_for: float, never: bool, log: Path) -> str:
    """Return why a job can no longer send its report; empty if it can."""
    status = view.status
    if status.state.ended and view.missing_since is not None:
        return f"the queue no longer knows job {status.job_id}, and the job left no report. {_tail(log)}"
    if status.state.ended and ended_for > _LATE:
        return f"job {status.job_id} ended without a report: {explain(status)}. {_tail(log)}"
    return f"job {status.job_id} will never start: {explain(status)}" if never else ""


def _state(view: View) -> str:
    if not view.polled:
        return "submitted"
    reason = explain(view.status)
    return f"{view.status.state.value} ({reason})" if reason else view.status.state.value


def _tail(log: Path) -> str:
    try:
        lines = checked_files.end(log).decode(errors="replace").splitlines()
    except OSError as error:
        return f"No log at {log}: {error.strerror}"
    return f"Log {log}: {printable(' | '.join(lines[-5:]))}"


def _record_report(seen: Seen, found: JobReport, directory: ClusterDirectory, *, waited: float) -> None:
    """Record the report of a job, and connect to it as a client does to the scheduler."""
    if found["token"] != directory.token():
        seen.problem = (
            "the job did not read the file that the login node wrote: the filesystem is not shared, or shows old "
            "content: set cluster_directory to a shared filesystem, or run the check again"
        )
        return
    seen.found, seen.waited = found, waited
    context = ssl.create_default_context(cafile=directory.tls / "cert.pem")
    context.check_hostname = False
    context.load_cert_chain(directory.tls / "cert.pem", directory.tls / "key.pem")
    try:
        with (
            socket.create_connection(tuple(found["address"]), timeout=10) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            sent = time.time()
            encrypted.sendall(b"?")
            answer = float(encrypted.recv(64))
            seen.skew = answer - (sent + time.time()) / 2
    except (OSError, ValueError) as error:
        seen.unreachable = str(error) or type(error).__name__
