"""Names of options that users write: aliases, names that other tools use, and typing errors. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

#: Other names of options.
ALIASES = {"partition": "queue", "n_jobs": "jobs", "project": "account"}

#: Names that other tools use, and what to write instead.
FOREIGN = {
    "processes": "one Dask worker runs per GPU: set gpus_per_node (and nodes_per_job)",
    "n_workers": "workers are added as whole jobs: set jobs, or call scale(n)",
    "job_cpu": "set cores",
    "job_mem": "set memory",
    "job_name": "set name: jobs are named after the cluster",
    "gpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "n_gpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "nodes": "set nodes_per_job and jobs",
    "time": "set walltime",
    "job_extra": "set job_extra_directives",
    "header_skip": "set job_directives_skip",
    "env_extra": "set env, or job_script_prologue for shell lines",
    "extra": "set worker_extra_args",
    "host": "set interface",
    "shared_temp_directory": "set cluster_directory",
    "scheduler_options": "set scheduler={...}",
    "nanny": "workers always have a nanny",
    "worker_command": "the worker command is always `dask cuda worker` (`dask worker` if gpus_per_node=0): leave this "
    "option out",
    "config_name": "hpcgpu does not have this option, because it reads the section of its batch system, such as "
    "hpcgpu.slurm: leave it out",
    "resource_spec": "set cores, memory and gpus_per_node; on PBS select_extra, resource_list and place hold the rest",
    "job_script_epilogue": "hpcgpu does not have it: the Dask command replaces the script of the job, so nothing "
    "can run after it",
    "job_cls": "the class of the cluster decides: SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster; scripts of your "
    "own: template_directory",
    "gres": "set gpus_per_node and gpu_type; gpu_request says how they are requested",
    "port": "the scheduler takes a free port, which clients find in the cluster directory: leave it out",
    "mem": "set memory",
    "cpus": "set cores",
    "ncpus": "set cores",
    "cpus_per_task": "set cores",
    "ngpus": "set gpus_per_node (and nodes_per_job, jobs)",
    "image": "set container to the path of the image",
    "worker_class": "the workers are those of dask-cuda (of Dask if gpus_per_node=0): leave this option out",
    "custom_cluster_spec": "the options of hpcgpu take its place; scripts of your own: template_directory",
    "silence_logs": "set quiet=True",
    "scheduler_cls": "set scheduler={...}, or scheduler='local' for a scheduler in this program",
    "lifetime": "workers retire by themselves before the walltime ends: set walltime and walltime_margin",
    "memory_limit": "set memory: each worker gets its share",
    "threads_per_worker": "set nthreads",
    "dashboard_address": "it is an option of the scheduler job: scheduler={'dashboard_address': ...}",
}


def spelled(key: str) -> str:
    """Return the name of the option that a key of YAML means."""
    name = key.replace("-", "_")
    return ALIASES.get(name, name)


def unknown(key: str, allowed: set[str], elsewhere: Mapping[str, set[str]]) -> str:
    if owner := next((o for o, n in elsewhere.items() if key in n), None):
        if owner == "scheduler":
            return f"{key} is an option of the scheduler job: give the cluster scheduler={{{key!r}: ...}}"
        return f"{key} is an option of the whole {owner}, not of one kind of its jobs: set it for the {owner}"
    if advice := FOREIGN.get(key):
        return f"unknown option {key!r}: {advice}"
    near = difflib.get_close_matches(key, sorted(allowed | set(ALIASES)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(sorted(allowed))}"
    return f"unknown option {key!r}: {hint}"
