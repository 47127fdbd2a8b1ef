"""sbatch, squeue, scancel, scontrol and sacct, pretended: they answer as Slurm 22.05 and 24.11 do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pretended import Answer, Pretended, State, answer

if TYPE_CHECKING:
    import pytest

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING"}


class Site(Pretended):
    """The pretended Slurm, as seen by a test.

    Parameters
    ----------
    folder : Path
        For its state and its commands.
    cluster : str, default "alpha"
        Its name.
    """

    def __init__(self, folder: Path, cluster: str = "alpha") -> None:
        super().__init__(
            folder, "fake_slurm", COMMANDS, "-IS", cluster=cluster, next_id=101, accounting={}, environments=[]
        )
        self.script = folder / "job.sbatch"
        self.script.write_text("#!/bin/bash\n")
        self.state = folder / "state.json"

    def remove(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have no such command, nor a real one elsewhere on the PATH."""
        monkeypatch.setenv("PATH", str(self.bin))
        (self.bin / name).unlink()

    def job(self, job_id: int | str, state: str = "PENDING", **fields: str) -> str:
        """Have a job; `fields` are named by squeue's letters."""
        job = {"T": state, "N": "", "S": "N/A", "e": "N/A", "j": f"job-{job_id}", "r": "None"} | fields
        self.change(lambda site: site["jobs"].__setitem__(str(job_id), job))
        return str(job_id)

    def jobs(self, **fields: str) -> list[str]:
        """Ids of the jobs with these fields."""
        return self.change(lambda site: [i for i, job in site["jobs"].items() if fields.items() <= job.items()])

    def environments(self) -> list[dict[str, str]]:
        """Environment of each call of any command."""
        return self.change(lambda site: site["environments"])


def option(arguments: list[str], name: str) -> str | None:
    return next((a.split("=", 1)[1] for a in arguments if a.startswith(f"--{name}=")), None)


def sbatch(site: State, arguments: list[str]) -> Answer:
    """`sbatch --parsable --job-name=NAME [--dependency=after:ID] SCRIPT`."""
    job_id = str(site["next_id"])
    site["next_id"] += 1
    after = option(arguments, "dependency")
    name, reason, script = option(arguments, "job-name"), "Dependency" if after else "None", arguments[-1]
    about = {"T": "PENDING", "N": "", "S": "N/A", "e": "N/A", "j": name, "r": reason}
    text = Path(script).read_text() if Path(script).is_file() else ""
    site["jobs"][job_id] = {**about, "o": str(Path(script).absolute()), "script": text}
    return (f"{job_id}\n" if "--parsable" in arguments else f"Submitted batch job {job_id}\n"), "", 0


def squeue(site: State, arguments: list[str]) -> Answer:
    """The format's letters are keys of a job; one unknown id is an error, several are left out.

    Pending tasks of an array are one line, unless each is asked for.
    """
    jobs = site["jobs"]
    asked = option(arguments, "jobs")
    ids = asked.split(",") if asked else sorted(jobs, key=lambda job_id: [*map(int, job_id.split("_"))])
    if len(ids) == 1 and asked and asked not in jobs:
        return "", "slurm_load_jobs error: Invalid job id specified\n", 1
    every = option(arguments, "states") == "all"
    name = option(arguments, "name")
    shape = option(arguments, "format") or "%i %j %T"
    lines = []
    for job_id in ids:
        job = jobs.get(job_id)
        if job and "--me" in arguments and job.get("u"):  # the job of another user
            continue
        if job and (every or job["T"] in ALIVE) and (name is None or job["j"] == name):
            array, task, _ = job_id.partition("_")
            shown = f"{array}_[0-9]" if task and job["T"] == "PENDING" and "--array" not in arguments else job_id
            lines.append(
                re.sub("%(.)", lambda match, i=shown, job=job: ({"o": "(null)"} | job | {"i": i})[match[1]], shape)
                + "\n"
            )
    return "".join(dict.fromkeys(lines)), "", 0


def scancel(site: State, arguments: list[str]) -> Answer:
    ids = [a for a in arguments if a.replace("_", "").isdigit()]
    only = option(arguments, "state")
    for job_id in ids:
        job = site["jobs"].get(job_id)
        if job and job["T"] in ALIVE and only in {None, job["T"]}:
            job["T"] = "CANCELLED"
    return "", "", 0


def scontrol(site: State, arguments: list[str]) -> Answer:
    """`scontrol show config`, as 22.05 begins it; and the script of a job."""
    if arguments[:2] == ["write", "batch_script"]:
        job = site["jobs"].get(arguments[2])
        return (job["script"], "", 0) if job else ("", "job script retrieval failed: Invalid job id specified\n", 1)
    return (
        "Configuration data as of 2026-11-21T10:00:00\nCgroupMountpoint        = /sys/fs/cgroup\nClusterName          "
        f"   = {site['cluster']}\n",
        "",
        0,
    )


def sacct(site: State, arguments: list[str]) -> Answer:
    if not site["accounting"]:
        return "", "Slurm accounting storage is disabled\n", 1
    ids = arguments[arguments.index("-j") + 1].split(",")
    return "".join(site["accounting"][i] + "\n" for i in ids if i in site["accounting"]), "", 0


def main(name: str, folder: Path, arguments: list[str]) -> int:
    """Run one command."""
    return answer(name, folder, arguments, lambda site, name, arguments: globals()[name](site, arguments))
