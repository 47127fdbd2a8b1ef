"""A PBS that pretends: qsub, qstat, qdel, qselect, qhold, qrls, pbsnodes and pbsdsh as programs over the embedded local
queue.

It behaves as a real OpenPBS 23.06.06 was recorded to (output, exit codes, words on stderr), and really runs the
scripts: a job gets the bare environment of its node, begins in its owner's home and writes its log in place.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretended import Answer, Pretended, State, answer, opened

from hpcgpu.batch.base import JobState
from hpcgpu.batch.cuda_visible_devices import visible_devices
from hpcgpu.batch.local.queue import LocalQueue

COMMANDS = ("qsub", "qstat", "qdel", "qselect", "qhold", "qrls", "pbsnodes", "pbsdsh", "pbs_rstat")
SERVER = "pbs01"
USAGE = (
    "usage: qsub [-a date_time] [-A account_string] [-c interval]\n\t[-C directive_prefix] "
    "[-e path] [-f ] [-h ] [-I [-X]] [-j oe|eo]\n"
)
NODES = {f"n{i}": {"ncpus": "16", "ngpus": "2", "mem": "64gb", "gpu_type": "a100"} for i in range(2)}


class Refused(Exception):
    """A command's words on stderr, and its exit code."""


class Site(Pretended):
    """The pretended PBS, as seen by a test.

    Parameters
    ----------
    folder : Path
        For its state and its commands.
    queue : LocalQueue
        Runs the jobs; it has as many GPUs as the nodes together.
    environment : dict
        Of a process on a node.
    """

    def __init__(self, folder: Path, queue: LocalQueue, environment: dict[str, str]) -> None:
        self.home = folder / "home"
        self.queue = queue
        super().__init__(
            folder,
            "fake_pbs",
            COMMANDS,
            "-IS",
            next=0,
            queue=str(queue.directory),
            home=str(self.home),
            environment=environment | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
            nodes=NODES,
            queues={"workq": {}, "gpu": {"walltime": 3600}, "off": {"enabled": False}},
            reservations={},  # by queue: from when to when
            server={},  # further attributes; those of a queue are its "told"
            history=True,
            down=False,
            ports=0,
            packed=False,  # chunks are not scattered, whatever the job requests
        )
        self.home.mkdir()

    def set(self, **values: Any) -> None:
        """Set `down` or `history`, for one."""
        self.change(lambda state: state.update(values))

    def calls(self, command: str) -> list[list[str]]:
        """Arguments of each call of a command."""
        return self.change(lambda state: [arguments for name, arguments in state["calls"] if name == command])

    def ports(self) -> int:
        """Connections that all commands have made; each takes a port below 1024 of the host for a minute."""
        return self.change(lambda state: state["ports"])

    def suspend(self, job_id: str, on: bool = True) -> None:
        """Do what an operator does by ``qsig -s suspend``, or ``-s resume``; the processes are not stopped."""
        self.change(lambda state: state["jobs"][job_id.removesuffix(f".{SERVER}")].update(suspended=on))

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command as somebody else at the site would."""
        return subprocess.run([str(self.bin / argv[0]), *argv[1:]], capture_output=True, text=True, check=False)

    def alive(self, *names: str) -> dict[str, str]:
        """Ids and states of the jobs that have not ended; of these names, if any are given."""

        def act(state: State) -> dict[str, str]:
            advance(state)
            jobs = {i: job for i, job in state["jobs"].items() if "end" not in job}
            return {
                f"{i}.{SERVER}": job["state"]
                for i, job in jobs.items()
                if not names or job["variables"].get("HPCGPU_PBS_JOB") in names
            }

        return self.change(act)


# The server and its scheduler


def advance(state: State) -> None:
    """Move all jobs on: note what has begun and ended, release, schedule."""
    queue = LocalQueue(Path(state["queue"]))
    changed = True
    while changed:
        changed = False
        running = {job["local"] for job in state["jobs"].values() if "end" not in job and job["local"]}
        statuses = queue.poll(running)
        for number, job in state["jobs"].items():
            if "end" in job:
                continue
            if job["local"]:
                changed |= _follow(state, job, statuses[job["local"]])
            elif _held(state, job):
                job["state"] = "H"  # its comment stays
            else:
                job["state"] = "Q"
                begins = state["reservations"].get(job["queue"], [0.0])[0]
                comment = (
                    "Not Running: Queue not started." if begins > time.time() else _never(state, job)
                )  # [recorded]
                if not comment:
                    job["local"] = queue.submit(
                        _wrapped(state, number, job), job_name=job["variables"].get("HPCGPU_PBS_JOB", job["name"])
                    )
                    changed = True
                job["comment"] = comment


def _follow(state: State, job: State, status: Any) -> bool:
    """Take over what the local queue reports of a job; whether it has begun or ended."""
    before = job["state"]
    if status.state is JobState.PENDING:
        asked, there = job["resources"].get("ngpus", "1"), sum(int(node["ngpus"]) for node in state["nodes"].values())
        job["state"] = "Q"
        job["comment"] = f"Not Running: Insufficient amount of resource: ngpus (R: {asked} A: 0 T: {there})"
        return False
    if status.start is not None:
        job["stime"] = status.start
    job["state"] = "E" if status.state is JobState.COMPLETING else "S" if job.get("suspended") else "R"
    if status.start is not None:
        job["comment"] = (
            f"Job run at {time.strftime('%a %b %d at %H:%M', time.localtime(status.start))} on (n0:ncpus=1)"
        )
    if status.state.ended:
        _finish(job, status)
    return job["state"] != before


def _finish(job: State, status: Any) -> None:
    job["end"] = status.end
    job["state"] = "F"
    if status.start is None:
        _delete(job)
    elif status.state is JobState.CANCELLED:
        job |= {"substate": 91, "exit": 271, "comment": f"{job['comment']} and terminated by {job['owner']}"}
    elif status.state is JobState.TIMEOUT:
        job |= {"substate": 93, "exit": -29, "comment": f"{job['comment']} and exceeded resource walltime"}
    else:
        code = status.exit_code or 0
        job |= {
            "substate": 93 if code else 92,
            "exit": code,
            "comment": f"{job['comment']} and {'failed' if code else 'finished'}",
        }


def _delete(job: State) -> None:
    """End a job that never ran: no Exit_status, no stime."""
    job |= {"state": "F", "substate": 91, "end": time.time()}
    if job.get("comment"):
        job["comment"] += " and terminated"


def _held(state: State, job: State) -> bool:
    """Whether a job is held, by its user or by what it depends on. One that waits for a job deleted before it began
    stays held.
    """
    if job["depend"]:
        kind, _, other_id = job["depend"].partition(":")
        other = state["jobs"].get(other_id.split(".")[0])
        if other is None or ("end" if kind == "afterany" else "stime") in other:
            job["depend"] = ""
    return bool(job["depend"]) or job["user_hold"]


def _chunks(job: State) -> tuple[int, dict[str, str]]:
    match = re.fullmatch(r"(?:(\d+):)?(.*)", job["resources"]["select"])
    assert match
    return int(match[1] or 1), dict(part.split("=", 1) for part in match[2].split(":"))


def number(text: str) -> int:
    """A count, or a size in bytes."""
    units = {"kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


def _never(state: State, job: State) -> str:
    """The comment on a job that no node, or not all of them together, can ever run; empty for others."""
    count, chunk = _chunks(job)
    nodes = state["nodes"].values()
    if "scatter" in job["resources"]["place"] and count > len(nodes):
        return "Can Never Run: Not enough total nodes available"  # [recorded]
    for name in ("ncpus", "ngpus", "mem"):
        asked, total = count * number(chunk.get(name, "0")), sum(number(node[name]) for node in nodes)
        if asked > total:
            return f"Can Never Run: Insufficient amount of resource: {name} (R: {asked} A: {total} T: {total})"
        if number(chunk.get(name, "0")) > max(number(node[name]) for node in nodes):
            return f"Not Running: Insufficient amount of resource: {name} (R: {asked} A: {total} T: {total})"
    if "gpu_type" in chunk and chunk["gpu_type"] not in {node["gpu_type"] for node in nodes}:
        return f"Not Running: Insufficient amount of resource: gpu_type ({chunk['gpu_type']} != a100)"
    return ""


def _wrapped(state: State, job_number: str, job: State) -> Path:
    """The script that the local queue runs: PBS's environment, in the owner's home."""
    count, chunk = _chunks(job)
    job_id = f"{job_number}.{SERVER}"
    folder = Path(state["home"]).parent
    nodefile = folder / f"{job_id}.nodes"
    hosts = list(state["nodes"])[: 1 if state["packed"] else None]
    nodefile.write_text("".join(f"{hosts[i % len(hosts)]}\n" for i in range(count)))
    environment = state["environment"] | {
        "HOME": state["home"],
        "LOGNAME": job["owner"].split("@")[0],
        "USER": job["owner"].split("@")[0],
        "SHELL": "/bin/bash",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBDIR": state["home"],
        "PBS_JOBID": job_id,
        "PBS_JOBNAME": job["name"],
        "PBS_NODEFILE": str(nodefile),
        "PBS_NODENUM": "0",
        "PBS_O_HOME": os.environ.get("HOME", "/"),
        "PBS_O_WORKDIR": job["workdir"],
        "PBS_QUEUE": job["queue"],
        "PBS_TASKNUM": "1",
        **job["variables"],
    }
    words = [shlex.quote(f"{name}={value}") for name, value in environment.items()]
    words += [f'{name}="${name}"' for name in ("HPCGPU_JOB_ID", "HPCGPU_QUEUE_DIRECTORY")]
    if int(chunk.get("ngpus", "0")):  # what the cgroup hook does
        words.append('CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"')
    output = job["output"] + (f"{job_id}.OU" if job["output"].endswith("/") else "")
    quoted = output.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    lines = ["#!/bin/bash", f'#HPCGPU --output="{quoted}"', f"#HPCGPU --gpus={count * int(chunk.get('ngpus', '0'))}"]
    if walltime := job["resources"].get("walltime"):
        lines.append(f"#HPCGPU --time={_seconds(walltime)}")
    lines += [
        f"cd {shlex.quote(state['home'])}",
        f"exec env -i {' '.join(words)} /bin/bash {shlex.quote(job['script'])}",
    ]
    path = folder / f"{job_id}.sh"
    path.write_text("\n".join(lines) + "\n")
    return path


def _seconds(walltime: str) -> int:
    seconds = 0
    for part in walltime.split(":"):
        seconds = 60 * seconds + int(part)
    return seconds


# The commands


def _options(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options and operands of qsub."""
    options: dict[str, list[str]] = {}
    words = list(arguments)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        options.setdefault(word[1], []).append(word[2:] or ("" if word[1] in "hIVz" else words.pop(0)))
    return options, words


def _directives(text: str) -> list[str]:
    """The words of the directives of a script; they end at its first command."""
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith("#PBS "):
            words += shlex.split(line)[1:]
        elif line.strip() and not line.startswith("#"):
            break
    return words


def _given(arguments: list[str]) -> tuple[dict[str, list[str]], Path]:
    """What a submit asks for, and its script. The command line counts before the directives."""
    options, operands = _options(arguments)
    script = Path(operands[0])
    if not script.exists():
        raise Refused("qsub: script file:: No such file or directory\n", 1)
    given, _ = _options(_directives(script.read_text()))
    given |= {name: values for name, values in options.items() if name not in "lW"}
    for name in "lW":
        given[name] = options.get(name, []) + given.get(name, [])
    return given, script


def _queue(state: State, given: dict[str, list[str]]) -> str:
    """The queue that a submit asks for."""
    queue = given.get("q", ["workq"])[-1]
    if queue not in state["queues"]:
        raise Refused("qsub: Unknown queue\n", 170)
    if not state["queues"][queue].get("enabled", True):
        raise Refused("qsub: Queue is not enabled\n", 173)
    return queue


def _resources(given: dict[str, list[str]], limits: dict[str, Any]) -> dict[str, str]:
    """What a submit asks for by -l: job-wide resources become one chunk."""
    resources: dict[str, str] = {}
    for item in given["l"]:
        name, _, value = item.partition("=")
        resources.setdefault(name, value)
    known = {"select", "place", "walltime", "ncpus", "ngpus", "mem", "filesystems"}
    if unknown := next((name for name in resources if name not in known), None):
        raise Refused(f"qsub: Unknown resource Resource_List.{unknown}\n", 187)
    if "walltime" in resources and not re.fullmatch(r"[\d:]+", resources["walltime"]):
        raise Refused("qsub: Illegal attribute or resource value Resource_List.walltime\n", 166)
    if _seconds(resources.get("walltime", "0")) > limits.get("walltime", 10**9):
        raise Refused("qsub: Job violates queue and/or server resource limits\n", 188)
    if "select" not in resources:
        flat = [f"{name}={resources[name]}" for name in ("ncpus", "ngpus", "mem") if name in resources]
        resources["select"] = ":".join(["1", *(flat or ["ncpus=1"])])
    resources.setdefault("place", "free")
    return resources


def _refuse(resources: dict[str, str], queue: dict[str, str], server: dict[str, str]) -> None:
    """Refuse what is above the queue's maximum, or the server's where the queue has none, or below its minimum; all
    chunks are counted together (OpenPBS, ``chk_resc_limits``).
    """
    count, chunk = _chunks({"resources": resources})
    asked = {name: count * number(chunk[name]) for name in ("ncpus", "ngpus", "mem") if name in chunk}
    asked["nodect"] = count
    if "walltime" in resources:
        asked["walltime"] = _seconds(resources["walltime"])
    for name, wanted in asked.items():
        read = _seconds if name == "walltime" else number
        most = queue.get(f"resources_max.{name}", server.get(f"resources_max.{name}"))
        least = queue.get(f"resources_min.{name}")
        if (most is not None and wanted > read(most)) or (least is not None and wanted < read(least)):
            raise Refused("qsub: Job violates queue and/or server resource limits\n", 188)


def qsub(state: State, arguments: list[str]) -> str:
    given, script = _given(arguments)
    job_name = given.get("N", [script.name])[-1]
    if "N" in given and (not re.fullmatch(r"[A-Za-z][\w+-]*", job_name) or len(job_name) > 230):
        raise Refused(f"qsub: illegal -N value\n{USAGE}", 2)
    queue = _queue(state, given)
    resources = _resources(given, state["queues"][queue])
    _refuse(resources, state["queues"][queue].get("told", {}), state["server"])
    job_number = str(state["next"])
    state["next"] += 1
    queue = state["queues"][queue].get("route", queue)
    try:
        _refuse(_resources(given, state["queues"][queue]), state["queues"][queue].get("told", {}), state["server"])
    except Refused:  # by the queue behind a route: the job is gone, and the history does not have it [recorded]
        return f"{job_number}.{SERVER}\n"
    kept = Path(state["home"]).parent / f"{job_number}.script"
    kept.write_text(script.read_text())
    attributes = dict(item.split("=", 1) for item in given["W"])
    owner = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    state["jobs"][job_number] = {
        "name": job_name,
        "owner": f"{owner}@{SERVER}",
        "queue": queue,
        "script": str(kept),
        "workdir": os.getcwd(),
        "output": given.get("o", [f"{os.getcwd()}/{job_name}.o{job_number}"])[-1],
        "variables": dict(item.split("=", 1) for value in given.get("v", [])[-1:] for item in value.split(",")),
        "resources": resources,
        "rerunable": given.get("r", ["y"])[-1] == "y",
        "keep": given.get("k", ["n"])[-1],
        "join": given.get("j", ["n"])[-1],
        "checkpoint": given.get("c", ["u"])[-1],
        "depend": attributes.get("depend", ""),
        "user_hold": "h" in given,
        "arguments": " ".join(arguments),
        "ctime": time.time(),
        "state": "Q",
        "comment": "",
        "local": "",
    }
    advance(state)
    return f"{job_number}.{SERVER}\n"


def _ask(state: State, command: str, ids: list[str]) -> Iterator[tuple[str, State | None, tuple[str, int] | None]]:
    """Each id with its job, or with the words and the exit code of what is wrong with it."""
    for job_id in ids:
        match = re.fullmatch(r"(\d+)(?:\.(\S+))?", job_id)
        if match is None and command == "qstat":
            yield job_id, None, (f"qstat: Unknown queue destination {job_id}\n", 170)
        elif match is None or (match[2] or SERVER) != SERVER:
            yield job_id, None, (f"{command}: illegally formed job identifier: {job_id}\n", 1)
        elif (job := state["jobs"].get(match[1])) is None or (not state["history"] and "end" in job):
            yield match[1], None, (f"{command}: Unknown Job Id {match[1]}.{SERVER}\n", 153)
        else:
            yield match[1], job, None


def _described(state: State, name: str) -> tuple[str, str, int]:
    """What `qstat -Qf QUEUE` prints of a queue."""
    if name not in state["queues"]:
        return "", f"qstat: Unknown queue {name}\n", 170
    queue = state["queues"][name]
    hours, seconds = divmod(queue.get("walltime", 0), 3600)
    limit = f"    resources_max.walltime = {hours:02}:{seconds // 60:02}:00\n" if hours else ""
    return (
        f"Queue: {name}\n    queue_type = Execution\n    total_jobs = 1\n"
        "    state_count = Transit:0 Queued:1 Held:0 Waiting:0 Running:0 Exiting:0 Begun\n\t:0 \n"
        f"{limit}{_told(queue.get('told', {}))}"
        f"    enabled = {queue.get('enabled', True)}\n    started = {queue.get('started', True)}\n\n",
        "",
        0,
    )


def _told(attributes: dict[str, str]) -> str:
    return "".join(fold(name, value) for name, value in attributes.items())


def qstat(state: State, arguments: list[str]) -> tuple[str, str, int]:
    if arguments == ["--version"]:
        return "pbs_version = 23.06.06\n", "", 0
    if arguments == ["-B", "-f"]:
        return (
            f"Server: {SERVER}\n    server_state = Active\n    server_host = {SERVER}\n    scheduling = True\n"
            f"    default_queue = workq\n{_told(state['server'])}\n",
            "",
            0,
        )
    if arguments[:1] == ["-Qf"]:
        names = arguments[1:] or list(state["queues"])
        told = [_described(state, name) for name in names]
        return "".join(out for out, _, _ in told), "".join(err for _, err, _ in told), told[-1][2]
    advance(state)
    flags, ids = [a for a in arguments if a.startswith("-")], [a for a in arguments if not a.startswith("-")]
    assert "-f" in flags, "nothing else is parsed"
    history, together = "-x" in flags, "-E" in flags
    state["ports"] += 1 if together else len(ids) or 1
    if history and not state["history"]:
        words = [f"qstat: PBS is not configured to maintain job history {job_id}\n" for job_id in ids]
        return "", "".join(words[-1:] if together else words), 0
    out, err, code = "", "", 0
    if not ids:
        ids = [i for i, job in state["jobs"].items() if history or "end" not in job]
    for job_id, job, wrong in _ask(state, "qstat", ids):
        if job is not None and "end" in job and not history:
            wrong = (
                f"qstat: {job_id}.{SERVER} Job has finished, use -x or -H to obtain historical job information\n",
                35,
            )
        if wrong:
            err, code = err + wrong[0], wrong[1]
        elif job is not None:
            out += _full(job_id, job)
    if together and err:  # nothing is reported of some while others are known, else of the last one
        return (out, "", 0) if out else ("", err.splitlines(keepends=True)[-1], code)
    return out, err, code


def _full(job_id: str, job: State) -> str:
    """One job as ``qstat -f`` prints it."""
    begun, ended = "stime" in job, "end" in job
    holds = ("u" if job["user_hold"] else "") + ("s" if job["depend"] else "")
    attributes = {
        "Job_Name": job["name"],
        "Job_Owner": job["owner"],
        **({"resources_used.walltime": "00:00:08"} if begun else {}),
        "job_state": job["state"],
        "queue": job["queue"],
        "server": SERVER,
        "Checkpoint": job["checkpoint"],
        "ctime": time.ctime(job["ctime"]),
        **({"depend": f"{job['depend']}@{SERVER}"} if job["depend"] else {}),
        **({"exec_host": "n0/0", "exec_vnode": "(n0:ncpus=1)"} if begun else {}),
        "Hold_Types": holds or "n",
        "Join_Path": job["join"],
        "Keep_Files": job["keep"],
        "Output_Path": f"{SERVER}:{job['output']}",
        "Rerunable": str(job["rerunable"]),
        **{f"Resource_List.{name}": value for name, value in job["resources"].items()},
        **({"stime": time.ctime(job["stime"])} if begun else {}),
        **({"obittime": time.ctime(job["end"])} if begun and ended else {}),
        "substate": str(
            job["substate"]
            if ended
            else {"R": 42, "S": 43, "E": 50, "H": 22 if job["depend"] else 20}.get(job["state"], 10)
        ),
        "Variable_List": ",".join(
            [
                f"PBS_O_HOME={os.environ.get('HOME')}",
                *(f"{k}={v}" for k, v in job["variables"].items()),
                f"PBS_O_WORKDIR={job['workdir']}",
            ]
        ),
        **({"comment": job["comment"]} if job["comment"] else {}),
        **({"Exit_status": str(job["exit"])} if "exit" in job else {}),
        "Submit_arguments": job["arguments"],
        **({"history_timestamp": str(int(job["end"]))} if ended else {}),
        "project": "_pbs_project_default",
        "Submit_Host": SERVER,
    }
    return "".join([f"Job Id: {job_id}.{SERVER}\n", *(fold(name, value) for name, value in attributes.items()), "\n"])


def fold(name: str, value: str) -> str:
    """One attribute, folded by a newline and a tab: lists behind a comma, the rest anywhere, also before nothing."""
    line = f"    {name} = {value}"
    if name != "Variable_List":
        return (
            "\n\t".join([line[:79], *(line[i : i + 71] for i in range(79, len(line) + (len(line) == 79), 71))]) + "\n"
        )
    lines = [""]
    for part in re.findall("[^,]*,|[^,]+$", line):
        if lines[-1] and len(lines[-1]) + len(part) > 79:
            lines.append("")
        lines[-1] += part
    return "\n\t".join(lines) + "\n"


def qdel(state: State, arguments: list[str]) -> tuple[str, str, int]:
    advance(state)
    state["ports"] += 1
    err, code = "", 0
    queue = LocalQueue(Path(state["queue"]))
    for job_id, job, wrong in _ask(state, "qdel", arguments):
        if job is not None and "end" in job:
            wrong = (f"qdel: Job has finished {job_id}.{SERVER}\n", 35)
        if wrong:
            err, code = err + wrong[0], wrong[1]
        elif job is not None and job["local"]:
            queue.cancel([job["local"]])
        elif job is not None:
            _delete(job)
    advance(state)
    return "", err, code


def qhold(state: State, arguments: list[str]) -> tuple[str, str, int]:
    return _hold(state, "qhold", arguments, True)


def qrls(state: State, arguments: list[str]) -> tuple[str, str, int]:
    return _hold(state, "qrls", arguments, False)


def _hold(state: State, command: str, arguments: list[str], held: bool) -> tuple[str, str, int]:
    """Set or clear a user's hold; of a running job that is not checkpointed it is the attribute only (``man
    qhold``).
    """
    advance(state)
    assert arguments[:2] == ["-h", "u"]
    state["ports"] += len(arguments[2:])
    err, code = "", 0
    queue = LocalQueue(Path(state["queue"]))
    for job_id, job, wrong in _ask(state, command, arguments[2:]):
        if job is not None and "end" in job:
            wrong = (f"{command}: Job has finished {job_id}.{SERVER}\n", 35)
        if wrong:
            err, code = err + wrong[0], wrong[1]
            continue
        assert job is not None
        if job["state"] == "E":
            err, code = f"{err}{command}: Request invalid for state of job {job_id}.{SERVER}\n", 170
            continue
        job["user_hold"] = held
        job["comment"] = f"Job held by {job['owner'].split('@')[0]} on {time.ctime()}" if held else ""
        if held and job["local"] and job["state"] == "Q":
            queue.cancel([job["local"]], only_pending=True)
            if queue.poll([job["local"]])[job["local"]].state is JobState.CANCELLED:
                job["local"] = ""
    advance(state)
    return "", err, code


def qselect(state: State, arguments: list[str]) -> str:
    advance(state)
    asked = dict(zip(arguments[::2], arguments[1::2], strict=True))
    jobs = {i: job for i, job in state["jobs"].items() if "end" not in job}
    if "-u" in asked:
        jobs = {i: job for i, job in jobs.items() if job["owner"].split("@")[0] == asked["-u"]}
    return "".join(f"{i}.{SERVER}\n" for i, job in jobs.items() if asked.get("-N") in (None, job["name"]))


def pbsnodes(state: State, arguments: list[str]) -> str:
    assert arguments == ["-av"]
    blocks = []
    for name, resources in state["nodes"].items():
        lines = [name, f"     Mom = {name}", "     ntype = PBS", "     state = free"]
        lines += [
            f"     resources_available.{key} = {value}"
            for key, value in {**resources, "host": name, "vnode": name}.items()
        ]
        blocks.append("\n".join([*lines, "     sharing = default_shared", ""]))
    return "\n".join(blocks) + "\n"


def pbs_rstat(state: State, arguments: list[str]) -> str:
    assert arguments == ["-F"]
    told = ""
    for name, (start, end) in state["reservations"].items():
        begins, ends = (time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(moment)) for moment in (start, end))
        told += (
            f"Resv ID: {name}.{SERVER}\nReserve_Name = NULL\nreserve_start = {begins}\nreserve_end = {ends}\n"
            f"reserve_duration = {int(end - start)}\nqueue = {name}\nResource_List.ncpus = 1\n\n"
        )
    return told


def pbsdsh(arguments: list[str]) -> int:
    """Run a program on a node, in a bare environment; its exit code is lost, stderr alone reports it [trap 8,
    recorded].
    """
    assert arguments[0] == "-n" and arguments[2] == "--"
    node = int(arguments[1])
    kept = {
        k: v
        for k, v in os.environ.items()
        if k.startswith("PBS_") or k in {"HOME", "HPCGPU_JOB_ID", "HPCGPU_QUEUE_DIRECTORY"}
    }
    nodes = len(Path(os.environ["PBS_NODEFILE"]).read_text().split())
    environment = {"PATH": "/bin:/usr/bin"} | kept | {"PBS_TASKNUM": str(node + 2)}
    with opened(Path(os.environ["HPCGPU_FAKE_PBS"])) as state:
        environment = {k: v for k, v in state["environment"].items() if k != "PATH"} | environment
    if devices := os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        listed = visible_devices(devices)
        share = len(listed) // nodes
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(listed[node * share : (node + 1) * share])
    if code := subprocess.run(arguments[3:], env=environment, check=False).returncode:
        sys.stderr.write(f"pbsdsh: task 0x{node:08x} exit status {code}\n")
    return 0


def act(state: State, name: str, arguments: list[str]) -> Answer:
    """Do what one command does."""
    if state["down"]:
        words = f"{name}: cannot connect to server {SERVER} (errno=15010)"
        if name == "qdel":
            words = f"Couldn't connect to cluster: {SERVER}"
        return "", f"Connection refused\n{words}\n", 162 if name in {"qsub", "qdel"} else 255
    try:
        said = globals()[name](state, arguments)
    except Refused as refused:
        return "", *refused.args
    return (said, "", 0) if isinstance(said, str) else said


def main(name: str, folder: Path, arguments: list[str]) -> int:
    """Run one command."""
    if name == "pbsdsh":
        os.environ["HPCGPU_FAKE_PBS"] = str(folder)
        return pbsdsh(arguments)
    return answer(name, folder, arguments, act)
