"""`hpcgpu profiles check`: compares a profile with the reports of this machine's batch system; see `queue_limits`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hpcgpu.batch import system_registry
from hpcgpu.batch.queues import Machine
from hpcgpu.checks.queue_limits import Finding, judge_job
from hpcgpu.configuration.resolve import of_profile
from hpcgpu.errors import BatchError, OptionError
from hpcgpu.options.shared_options_and_defaults import JobOptions, Options
from hpcgpu.profiles.site_profiles import Profile

#: Options that are compared with the reports of the batch system.
_CHECKED = {
    *("queue", "gpus_per_node", "gpu_type", "gpu_request", "cores", "memory", "constraint", "select_extra"),
    *("walltime", "account", "qos", "scheduler"),
}


def check_profile(profile: Profile) -> list[Finding]:
    """Query the batch system, and compare the profile with its reports.

    Raises
    ------
    BatchError
        It does not answer.
    OptionError
        It cannot list its queues, or the profile has an option that is unknown or not allowed.
    """
    system = system_registry.system(profile.system)
    options = of_profile(profile)
    try:
        machine = system.machine()
    except BatchError as error:
        raise BatchError(f"profile {profile.name!r} is for {system.title}, which does not answer: {error}") from error
    if machine is None:
        raise OptionError(f"profile {profile.name!r} is for {system.title}, which does not list its queues")
    return judge(profile, options, machine)


def judge(profile: Profile, options: Options, machine: Machine) -> list[Finding]:
    """Compare each option with the machine.

    Parameters
    ----------
    profile : Profile
    options : Options
        From `of_profile`.
    machine : Machine
    """
    jobs: dict[str, JobOptions] = {"worker job": options.worker}
    if options.scheduler is not None:
        jobs["scheduler job"] = options.scheduler
    found: dict[Finding, str] = {}
    for what, job in jobs.items():
        for finding in judge_job(job, machine, frozenset(profile.needs)):
            found[finding] = "all jobs" if finding in found else what
    rest = sorted({name.replace("_", "-") for name in _names(profile.options)})
    if rest:
        advice = f"`hpcgpu check --in-job --profile {profile.name}` tries the options in jobs"
        found[Finding(", ".join(rest), "not checked", "", "the batch system does not say", advice)] = "all jobs"
    return [replace(finding, job=what) for finding, what in found.items()]


def _names(options: Any) -> Iterator[str]:
    """Yield the names of the options that no batch system can check."""
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in _CHECKED:
            yield name
        elif name == "scheduler" and isinstance(value, dict):
            yield from _names(value)
