"""Reads what Grid Engine's commands print. Pure; seen on Son of Grid Engine 8.1.9."""

from __future__ import annotations

import contextlib
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu_gridengine.directives import full_name, seconds
from hpcgpu_gridengine.reasons import LIMIT, REASONS, ending

#: The most messages of the scheduler that a reason holds.
_MESSAGES = 3


def tree(stdout: str) -> ET.Element:
    """Return the XML that qstat prints; an empty element if it is cut off."""
    try:
        return ET.fromstring(stdout)
    except ET.ParseError:
        return ET.Element("nothing")


def is_xml(stdout: str) -> bool:
    """Return whether a command printed XML, and all of it."""
    return tree(stdout).tag != "nothing"


def state(letters: str) -> JobState:
    """Return the state for the letters of ``man qstat``: ``r``, ``qw``, ``Eqw``, ``dr``."""
    if "d" in letters:
        return JobState.COMPLETING
    if "q" in letters:  # also Rq: it runs again
        return JobState.PENDING
    return JobState.RUNNING if set(letters) & set("rtRsST") else JobState.UNKNOWN


def parse_qstat(stdout: str) -> dict[str, JobStatus]:
    """Return the jobs of ``qstat -xml -r``. The reason of a waiting job is its letters."""
    jobs = {}
    for job in tree(stdout).iter("job_list"):
        job_id, letters = job.findtext("JB_job_number", ""), job.findtext("state", "")
        start, end = _epoch(job.findtext("JAT_start_time", "")), None
        for request in job.iter("hard_request"):
            if request.get("name") == "h_rt" and start is not None:
                limit = seconds(request.text or "")
                end = None if limit is None else start + limit
        jobs[job_id] = JobStatus(
            job_id=job_id,
            state=state(letters),
            name=full_name(job.findtext("full_job_name") or job.findtext("JB_name") or ""),
            reason=letters if state(letters) is JobState.PENDING or set(letters) & set("sST") else "",
            node=job.findtext("queue_name", "").partition("@")[2],
            start=start,
            end=end,
            suspended=bool(set(letters) & set("sST")),
            words=REASONS,
        )
    return jobs


def parse_unlimited(stdout: str) -> dict[str, str]:
    """Return, from ``qstat -xml -r``, the queue of each running job that requests no h_rt: ``gpu.q@n1``."""
    return {
        job.findtext("JB_job_number", ""): queue
        for job in tree(stdout).iter("job_list")
        if (queue := job.findtext("queue_name", ""))
        and all(request.get("name") != "h_rt" for request in job.iter("hard_request"))
    }


def parse_queue_limits(stdout: str) -> dict[str, float | None]:
    """Return h_rt of each queue on each host, from ``qstat -xml -F h_rt``; None for no limit."""
    return {
        queue.findtext("name", ""): seconds(limit.text or "")
        for queue in tree(stdout).iter("Queue-List")
        for limit in queue.iterfind("resource[@name='h_rt']")
    }


def parse_reasons(stdout: str) -> dict[str, str]:
    """Return why jobs wait, from ``qstat -xml -j``: errors of their start, else the scheduler's messages.

    A message about all jobs counts for a job that has none of its own.
    """
    answer, errors, own = tree(stdout), dict[str, list[str]](), dict[str, list[str]]()
    for message in answer.iterfind(".//SME_message_list/element"):
        for number in message.iter("ULNG_value"):
            own.setdefault(number.text or "", []).append(message.findtext("MES_message", ""))
    everywhere = [m.findtext("MES_message", "") for m in answer.iterfind(".//SME_global_message_list/element")]
    jobs = [job.findtext("JB_job_number", "") for job in answer.iterfind("djob_info/element")]
    for job in answer.iterfind("djob_info/element"):
        words = [re.sub(r"^[\d/: ]+\[[\d:]+\]: ", "", text.text or "") for text in job.iter("QIM_message")]
        errors[job.findtext("JB_job_number", "")] = words[-1:]
    return {i: "; ".join((errors[i] or own.get(i) or everywhere)[:_MESSAGES]) for i in jobs}


def parse_scripts(stdout: str) -> dict[str, str]:
    """Return the script of each job, as it was given to qsub, from ``qstat -xml -j``."""
    jobs = tree(stdout).iterfind("djob_info/element")
    return {job.findtext("JB_job_number", ""): job.findtext("JB_script_file", "") for job in jobs}


def parse_qacct(
    stdout: str, limit_of: Callable[[str, str], float | None] = lambda job, queue: None
) -> dict[str, JobStatus]:
    """Return how jobs ended, from ``qacct -j``; the last record of a job counts.

    `limit_of` returns h_rt of the queue in which a job ran that requested none and was killed for a limit.
    """
    jobs = {}
    for record in re.split(r"^=+\n", stdout, flags=re.MULTILINE):
        values = {m[1]: m[2].strip() for m in re.finditer(r"^(\w+) +(.*)$", record, re.MULTILINE)}
        if "jobnumber" in values:
            jobs[values["jobnumber"]] = _ended(values, limit_of)
    return jobs


def _ended(values: Mapping[str, str], limit_of: Callable[[str, str], float | None]) -> JobStatus:
    failed, status = (_number(values.get(name, "")) for name in ("failed", "exit_status"))
    wanted = re.search(r"\bh_rt=([\d:]+)", values.get("category", ""))
    limit = seconds(wanted[1]) if wanted else None
    if failed == LIMIT and not wanted:
        limit = limit_of(values["jobnumber"], f"{values.get('qname', '')}@{values.get('hostname', '')}")
    words = [f"failed {' '.join(values.get('failed', '').split())}"] if failed else []
    how = ending(int(failed), int(status), wallclock=_number(values.get("ru_wallclock", "")), limit=limit)
    return JobStatus(
        job_id=values["jobnumber"],
        state=how,
        name=full_name(values.get("jobname", "")),
        reason=" ".join(words),
        node=values.get("hostname", ""),
        start=_date(values.get("start_time", "")),
        end=_date(values.get("end_time", "")),
        exit_code=int(status) if "-/-" not in values.get("start_time", "-/-") else None,
        words=REASONS,
    )


def _number(text: str) -> float:
    match = re.match(r"[0-9]{1,12}(\.[0-9]{1,6})?", text)
    return float(match[0]) if match else 0.0


def _epoch(text: str) -> float | None:
    """Return the epoch seconds of ``2026-11-27T22:25:57``, local time."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _date(text: str) -> float | None:
    """Return the epoch seconds of ``Fri Nov 27 22:29:42 2026``, local time, in the locale C."""
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))
    return None


def parse_job_id(stdout: str) -> str | None:
    """Return the id that ``qsub -terse`` prints, even if a wrapper of the site prints other text around it."""
    lines: Iterable[str] = (line.strip() for line in reversed(stdout.splitlines()))
    return next((line for line in lines if re.fullmatch("[0-9]{1,18}", line)), None)
