"""Directives for PBS: ``#PBS`` lines, and values in PBS's notation."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from hpcgpu.batch.directive_syntax import (
    CLUSTER_SETS,
    CLUSTER_WAITS,
    NEVER_STARTS,
    ONE_JOB,
    RESUBMITTED,
    Directives,
    Syntax,
    refuse_control_characters,
)
from hpcgpu.batch.pbs.names import VARIABLE, pbs_name, pbs_prefix

if TYPE_CHECKING:
    from hpcgpu.options.shared_options_and_defaults import JobOptions


#: Memory of a job for each Dask process, if the user requests none: the cgroup hook gives 256 MB to a job that requests
#: none.
_MEMORY = 4 * 2**30


def quoted(value: object) -> str:
    """Quote a value for a directive: qsub splits it as a shell does (OpenPBS, ``make_argv`` of ``qsub.c``)."""
    text = str(value)
    refuse_control_characters(text)
    return (
        text if text and all(c.isascii() and (c.isalnum() or c in "_./:,@%+=-^") for c in text) else shlex.quote(text)
    )


def time(seconds: int | None) -> str | None:
    """Return ``hours:minutes:seconds``; PBS has no days."""
    if seconds is None:
        return None
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def memory(size: int | None) -> str | None:
    """Return an amount of memory; PBS's units are powers of 1024 (``man pbs_resources``)."""
    if size is None:
        return None
    return f"{size // 2**30}gb" if size % 2**30 == 0 else f"{math.ceil(size / 2**20)}mb"


def launcher(command: str, nodes: int) -> str:
    """Return an MPI launcher's command line for this number of nodes."""
    program, *arguments = shlex.split(command)
    return " ".join(shlex.quote(str(word)) for word in (program, "-n", nodes, *arguments))


def scattered(place: str | None) -> str | None:
    """Return the placement of a job of several nodes, each on a host of its own; None if `place` sets another."""
    parts = (place or "scatter").split(":")
    if {"free", "pack", "vscatter"} & set(parts):
        return None
    return ":".join(parts if "scatter" in parts else ["scatter", *parts])


def complete(job: JobOptions, directives: Directives) -> JobOptions:
    """Request memory if the user does not, unless the job gets whole nodes or the user leaves ``-l mem`` out."""
    if job.memory is not None or job.gpu_request == "none" or not directives.asked("-l mem"):
        return job
    return replace(job, memory=_MEMORY * max(1, job.gpus_per_node))


SYNTAX = Syntax(
    prefix="#PBS",
    quote=quoted,
    refused={
        "-J": ONE_JOB,
        "-I": "a job of a cluster has no terminal",
        "-W interactive": "a job of a cluster has no terminal",
        "-W block": CLUSTER_WAITS,
        "-W depend": CLUSTER_SETS,
        "-r": RESUBMITTED,
        "-z": "the cluster needs the job's id",
        "-V": "set env, or job_script_prologue: the environment of a login node can break jobs",
        "-h": NEVER_STARTS,
        "-C": "the directives begin with #PBS",
        "-o": "the cluster names the log of each job; set log_directory",
    },
    keyed=("-l", "-W"),
    filters={
        "pbs_time": time,
        "pbs_memory": memory,
        "pbs_name": pbs_name,
        "pbs_prefix": pbs_prefix,
        "launcher": launcher,
        "scattered": scattered,
    },
    names={"variable": VARIABLE},
    complete=complete,
)
