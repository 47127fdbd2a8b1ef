"""sbatch, squeue, scancel, scontrol and sacct, pretended: one program, installed under each name beside a locked state
file.

A command writes down how it was called, takes its next fault if there is one, and otherwise answers as Slurm 22.05 and
24.11 do. A fault is a dict: `before`, `stdout` (instead of the answer), `after`, `stderr`, `rc`; `cut` (characters of
the answer that arrive); `lost` (the command has no effect); `late` (it takes effect only when the next command of that
name is called); `hang`; `gate` (a file that it waits for); `always` (for each call from now on).
"""

import fcntl
import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager

FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"}


@contextmanager
def state(folder=FOLDER):
    with open(f"{folder}/state.json", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = json.load(file)
        yield content
        file.seek(0)
        file.truncate()
        json.dump(content, file)


def option(arguments, name):
    return next((a.split("=", 1)[1] for a in arguments if a.startswith(f"--{name}=")), None)


def sbatch(site, arguments):
    """`sbatch --parsable --job-name=NAME [--dependency=after:ID] SCRIPT`."""
    job_id = str(site["next_id"])
    site["next_id"] += 1
    after = option(arguments, "dependency")
    name, reason = option(arguments, "job-name"), "Dependency" if after else "None"
    site["jobs"][job_id] = {"T": "PENDING", "N": "", "S": "N/A", "e": "N/A", "j": name, "r": reason}
    return (f"{job_id}\n" if "--parsable" in arguments else f"Submitted batch job {job_id}\n"), "", 0


def squeue(site, arguments):
    """The format's letters are keys of a job; one unknown id is an error, several are left out."""
    jobs = site["jobs"]
    asked = option(arguments, "jobs")
    ids = asked.split(",") if asked else sorted(jobs, key=int)
    if len(ids) == 1 and asked and asked not in jobs:
        return "", "slurm_load_jobs error: Invalid job id specified\n", 1
    every = option(arguments, "states") == "all"
    name = option(arguments, "name")
    shape = option(arguments, "format") or "%i %j %T"
    lines = []
    for job_id in ids:
        job = jobs.get(job_id)
        if job and (every or job["T"] in ALIVE) and (name is None or job["j"] == name):
            lines.append(re.sub("%(.)", lambda match, i=job_id, job=job: (job | {"i": i})[match[1]], shape) + "\n")
    return "".join(lines), "", 0


def scancel(site, arguments):
    ids = [a for a in arguments if a.isdigit()]
    only = option(arguments, "state")
    for job_id in ids:
        job = site["jobs"].get(job_id)
        if job and job["T"] in ALIVE and only in {None, job["T"]}:
            job["T"] = "CANCELLED"
    return "", "", 0


def scontrol(site, arguments):
    """`scontrol show config`, as 22.05 begins it."""
    return (
        "Configuration data as of 2026-11-21T10:00:00\nCgroupMountpoint        = /sys/fs/cgroup\nClusterName          "
        f"   = {site['cluster']}\n",
        "",
        0,
    )


def sacct(site, arguments):
    if not site["accounting"]:
        return "", "Slurm accounting storage is disabled\n", 1
    ids = arguments[arguments.index("-j") + 1].split(",")
    return "".join(site["accounting"][i] + "\n" for i in ids if i in site["accounting"]), "", 0


def main():
    name = sys.argv[0].rsplit("/", 1)[-1]
    arguments = sys.argv[1:]
    act = globals()[name]
    with state() as site:
        if late := site["late"].pop(name, None):
            act(site, late)
        faults = site["faults"].get(name, [])
        fault = {} if not faults else faults[0] if faults[0].get("always") else faults.pop(0)
        if fault.get("late"):
            site["late"][name] = arguments
        answer, stderr, code = ("", "", 0) if fault.get("lost") or fault.get("late") else act(site, arguments)
        site["calls"].append([name, arguments, dict(os.environ)])
    if fault.get("hang"):
        signal.pause()
    if gate := fault.get("gate"):
        while not os.path.exists(gate):
            time.sleep(0.01)
    sys.stderr.write(fault.get("stderr", stderr))
    answer = fault.get("stdout", answer).replace("{answer}", answer.strip())
    sys.stdout.write(fault.get("before", "") + answer[: fault.get("cut")] + fault.get("after", ""))
    return fault.get("rc", code)


if __name__ == "__main__":
    sys.exit(main())
