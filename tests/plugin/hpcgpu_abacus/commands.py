"""Abacus itself: three commands over the queue that is embedded in hpcgpu. A real batch system brings its own."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from hpcgpu.batch.base import After, JobState
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.errors import BatchError

STATES = {
    JobState.PENDING: "waits",
    JobState.RUNNING: "runs",
    JobState.COMPLETING: "stops",
    JobState.COMPLETED: "done",
    JobState.CANCELLED: "withdrawn",
    JobState.TIMEOUT: "late",
}
REASONS = {
    "Resources": "no beads left",
    "Priority": "not your turn",
    "Dependency": "linked",
    "NonZeroExitCode": "bad sum",
}
OPTIONS = {"-name": "job-name", "-log": "output", "-beads": "gpus", "-minutes": "time"}


def translated(script: str) -> str:
    """A script of Abacus as one of the embedded queue."""
    head, body = [], []
    for line in script.splitlines():
        if not (match := re.fullmatch(r"#AB (-\w+) (.+)", line)):
            body.append(line)
        elif match[1] == "-tier":
            if match[2] not in ("wood", "brass"):
                sys.exit(f"ab-submit: no such tier: {match[2]}")
        elif match[1] in OPTIONS:
            value = f"{int(match[2]) // 60}:{int(match[2]) % 60}:0" if match[1] == "-minutes" else match[2]
            head.append(f"#HPCGPU --{OPTIONS[match[1]]}={value}")
        else:
            sys.exit(f"ab-submit: no such option: {match[1]}")
    return "\n".join([body[0], *head, "export AB_JOB=$HPCGPU_JOB_ID AB_NAME=$HPCGPU_JOB_NAME", *body[1:], ""])


def submit() -> None:
    """ab-submit [--name NAME] [--link JOB | --link-end JOB] SCRIPT."""
    *given, script = sys.argv[1:]
    options = dict(zip(given[::2], given[1::2], strict=True))
    links = [(option, options[option]) for option in ("--link", "--link-end") if option in options]
    after = next((After(job_id, ended=option == "--link-end") for option, job_id in links), None)
    with tempfile.NamedTemporaryFile("w", dir=Path(script).parent, suffix=".sh") as copy:
        copy.write(translated(Path(script).read_text()))
        copy.flush()
        try:
            job_id = LocalQueue().submit(
                Path(copy.name), job_name=options.get("--name", Path(script).stem), after=after
            )
        except BatchError as error:
            sys.exit(f"ab-submit: {error}")
    print(f"job {job_id} counted")


def show() -> None:
    """ab-list JOB..., or one of its options."""
    queue, given = LocalQueue(), sys.argv[1:]
    facts = {
        "--version": "Abacus 1.0",
        "--frame": f"frame {queue.directory}",
        "--tiers": "wood 0 8 16000\nbrass 4 16 64000",
    }
    if given and given[0] in facts:
        print(facts[given[0]])
        return
    ids = [path.stem for path in (queue.directory / "jobs").glob("*.json")] if given == ["--mine"] else given
    for job in queue.poll(ids).values():
        fields = (
            job.job_id,
            STATES.get(job.state, "broken"),
            job.start,
            job.end,
            job.exit_code,
            job.name,
            REASONS.get(job.reason, job.reason),
        )
        print(*("-" if field is None else field for field in fields), sep="\t")


def cancel() -> None:
    """ab-cancel [--waiting] JOB..."""
    ids = [word for word in sys.argv[1:] if word != "--waiting"]
    LocalQueue().cancel(ids, only_pending="--waiting" in sys.argv)
