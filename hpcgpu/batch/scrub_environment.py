"""Which variables of the user's environment do not reach the commands of a batch system."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables of an enclosing job or of the user's shell that silently override a script's
#: directives or a command's output format (``man sbatch``, INPUT ENVIRONMENT VARIABLES;
#: SQUEUE_FORMAT broke Parsl's parser, Parsl #2293). For PBS: variables that the sources of OpenPBS's commands read
#: (``src/cmds``): a qstat that is built with Tcl prints what the file ``.qstatrc`` there requests.
#: CUDA_VISIBLE_DEVICES: a job that is submitted from inside another job would use the other job's GPUs.
_SCRUBBED = (
    "CUDA_VISIBLE_DEVICES",
    "SBATCH_",
    "SLURM_",
    "SALLOC_",
    "SRUN_",
    "SQUEUE_",
    "SACCT_",
    "SINFO_",
    "SCONTROL_",
    "SPRIO_",
    "SCANCEL_",
    "PMIX_",
    "PMI_",
    "PBS_DPREFIX",
    "PBS_SHELL",
    "QSTATRCHOME",
)
#: Variables with which the commands find their configuration, also without a file (``configless``), and prove the user.
_PASSED_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment for queue commands, without the variables that override what we request.

    The locale stays, because the command that submits a job passes its environment on to the job.
    """
    return {k: v for k, v in environ.items() if k in _PASSED_VARIABLES or not k.startswith(_SCRUBBED)}
