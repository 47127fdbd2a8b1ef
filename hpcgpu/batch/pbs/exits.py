"""How a PBS job ended: its ``Exit_status``, its comment and its substate.

The negative statuses are those of OpenPBS's ``job.h``, JOB_EXEC_*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hpcgpu.batch.base import JobState
from hpcgpu.posix.printable import printable


class Ending(NamedTuple):
    """How a job ended, and PBS's reason in words."""

    state: JobState
    words: str


#: By Exit_status. A job that PBS would run again ends instead, because it is submitted with ``-r n``.
EXITS: Mapping[int, Ending] = {
    -1: Ending(JobState.FAILED, "its node could not start it"),  # FAIL1
    -2: Ending(JobState.FAILED, "its node could not start it after it had copied the files"),  # FAIL2
    -3: Ending(JobState.FAILED, "its node could not start it now"),  # RETRY
    -4: Ending(JobState.NODE_FAIL, "PBS was started anew on its node"),  # INITABT
    -5: Ending(JobState.NODE_FAIL, "PBS was started anew on its node"),  # INITRST
    -6: Ending(JobState.NODE_FAIL, "PBS was started anew on its node"),  # INITRMG
    -7: Ending(JobState.FAILED, "it could not go on from its checkpoint"),  # BADRESRT
    -10: Ending(JobState.FAILED, "its node does not know the user or the group"),  # FAILUID
    -11: Ending(JobState.PREEMPTED, "PBS took it off its nodes to run it again"),  # RERUN
    -12: Ending(JobState.PREEMPTED, "PBS stopped it at a checkpoint"),  # CHKP
    -13: Ending(JobState.FAILED, "the password that PBS has for you is wrong"),  # FAIL_PASSWORD
    -14: Ending(JobState.NODE_FAIL, "PBS lost one of its nodes"),  # RERUN_SIS_FAIL
    -15: Ending(JobState.PREEMPTED, "the site's epilogue put it back into the queue"),  # JOB_EXEC -15
    -16: Ending(JobState.FAILED, "a hook of the site did not let it start on its node"),  # FAILHOOK_RERUN
    -17: Ending(JobState.FAILED, "a hook of the site did not let it start on its node"),  # FAILHOOK_DELETE
    -18: Ending(JobState.CANCELLED, "a hook of the site ended it"),  # HOOK_RERUN
    -19: Ending(JobState.CANCELLED, "a hook of the site ended it"),  # HOOK_DELETE
    -20: Ending(JobState.NODE_FAIL, "PBS lost its first node"),  # RERUN_MS_FAIL [recorded]
    -21: Ending(JobState.FAILED, "its temporary directory on the node is not safe"),  # FAIL_SECURITY
    -22: Ending(JobState.FAILED, "a hook of the site failed on its node"),  # HOOKERROR
    -23: Ending(JobState.FAILED, "it has no Kerberos credentials"),  # FAIL_KRB5
    -24: Ending(JobState.FAILED, "it used more cores than it requested"),  # KILL_NCPUS_BURST
    -25: Ending(JobState.FAILED, "it used more cores than it requested"),  # KILL_NCPUS_SUM
    -26: Ending(JobState.OUT_OF_MEMORY, "it used more virtual memory than it requested"),  # KILL_VMEM
    -27: Ending(JobState.OUT_OF_MEMORY, "it used more memory than it requested"),  # KILL_MEM
    -28: Ending(JobState.FAILED, "it used more CPU time than it requested"),  # KILL_CPUT
    -29: Ending(JobState.TIMEOUT, "its walltime is over"),  # KILL_WALLTIME [recorded]
    -30: Ending(JobState.FAILED, "its node could not join its output and its errors"),  # JOINJOB
}
#: States that the comment of an ended job shows and Exit_status does not.
_COMMENTS = [
    (re.compile(r"exceeded resource walltime"), JobState.TIMEOUT),  # [recorded]
    (re.compile(r"exceeded resource (v?mem|pmem)\b"), JobState.OUT_OF_MEMORY),
    (re.compile(r"preempt", re.IGNORECASE), JobState.PREEMPTED),
    (re.compile(r"\bnodes? \S+ (is )?down\b", re.IGNORECASE), JobState.NODE_FAIL),
]
_DELETED = "91"  # substate of a job that was deleted, before or after it began [recorded]


def ending(job: Mapping[str, str]) -> tuple[JobState, int | None]:
    """Return how a job ended, and the exit code of its script.

    Parameters
    ----------
    job : mapping
        The attributes of an ended job, as ``qstat -f`` names them. Only an Exit_status of 0 is success: substate 92
        alone is not [recorded].
    """
    comment = printable(job.get("comment", ""))
    reported = next((state for pattern, state in _COMMENTS if pattern.search(comment)), None)
    if not re.fullmatch(r"-?[0-9]{1,9}", job.get("Exit_status", "")):
        if reported is not None:
            return reported, None
        return (JobState.FAILED if "stime" in job and job.get("substate") != _DELETED else JobState.CANCELLED), None
    status = int(job["Exit_status"])
    code = None if status < 0 else status - 128 if status > 256 else status  # 256 + signal
    if reported is not None:
        return reported, code
    if status < 0:
        return (EXITS[status].state if status in EXITS else JobState.FAILED), code
    if job.get("substate") == _DELETED:
        return JobState.CANCELLED, code
    return (JobState.COMPLETED if status == 0 else JobState.FAILED), code
