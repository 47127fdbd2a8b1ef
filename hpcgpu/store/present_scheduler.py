"""Which scheduler job of a cluster is the present one. Pure.

The journal may have several: earlier ones that were restarted, and one that waits to follow the present one.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcgpu.batch.base import JobState, state_named
from hpcgpu.scaling.scheduler_restarts import ended_too_early, expected
from hpcgpu.store.journal import Submit


def present_scheduler(submits: Iterable[Submit], served: str) -> Submit | None:
    """Return the scheduler job on which the cluster depends now; None if there is none.

    Parameters
    ----------
    submits : iterable of Submit
        All jobs of the journal, in order.
    served : str
        The job of the contact; empty without a contact.

    Returns
    -------
    Submit or None
        The job of the contact. If that has ended, as the journal records, it is the first one that can follow it. If
        none can, it is the last one that has ended. A job that was submitted to follow, and cannot, is not meant.
    """
    there = [one for one in submits if one.kind == "scheduler" and not one.refused]
    by_contact = [one for one in there if one.job_id is not None and one.job_id == served]
    wanted = [one for one in there if not (one.ended or one.unwanted)]
    if current := [one for one in by_contact if one in wanted] or wanted[:1]:
        return current[0]
    over = [one for one in there if one.ended and not _intended(one)]
    return next(iter([*by_contact, *reversed(over), *reversed(there)]), None)


def waits_to_follow(submits: Iterable[Submit], served: str) -> list[Submit]:
    """Return the scheduler jobs that were submitted to follow that of the contact, and can still do it.

    Parameters
    ----------
    submits : iterable of Submit
        All jobs of the journal, in order.
    served : str
        The job of the contact.
    """
    there = [one for one in submits if one.kind == "scheduler" and not one.refused]
    numbers = [number for number, one in enumerate(there) if one.job_id == served]
    return [one for one in there[numbers[-1] + 1 :] if not (one.ended or one.unwanted)] if numbers else []


def unexpected_ends(submits: Iterable[Submit]) -> list[float]:
    """Return when scheduler jobs have ended, epoch seconds, that were restarted and not because of their walltime.

    Parameters
    ----------
    submits : iterable of Submit
        All jobs of the journal, in order.
    """
    over = [
        one for one in submits if one.kind == "scheduler" and one.ended and not one.unwanted and one.how is not None
    ]
    ends = [one.how for one in over if one.how is not None and not _intended(one)]
    return [how.end for how in ends if how.end is not None and not expected(state_named(how.state))]


def _intended(submit: Submit) -> bool:
    """Whether a scheduler job has ended, as the journal records, and somebody wanted that."""
    state = state_named(submit.how.state) if submit.how is not None else JobState.UNKNOWN
    return state.ended and not ended_too_early(state)
