"""All exceptions and warnings of hpcgpu; each can be imported from `hpcgpu`.

::

    HpcgpuError                      everything below
    ├── OptionError                  an option has a value that is not valid; nothing was submitted (also a ValueError)
    ├── ClusterError                 a cluster cannot do what was requested                       (also a RuntimeError)
    │   ├── ClusterExists            the name is taken
    │   ├── NoCluster                there is no cluster of that name                             (also a LookupError)
    │   └── OtherFormat              another version of hpcgpu made the cluster
    ├── BatchError                   the batch system, or a command of it, failed                 (also a RuntimeError)
    │   ├── SubmitRefused            it refused a job for good
    │   ├── SubmitLimited            it accepts no more jobs of the user now
    │   ├── Cancelled                the job was no longer needed, and was not submitted
    │   ├── BatchUnavailable         it does not answer: nothing is known about the jobs
    │   │   ├── AmbiguousSubmit      it is not known whether a job was submitted
    │   │   └── OtherQueue           the cluster is in the queue of another system
    │   ├── Superseded               another program manages the cluster now
    │   └── NameLost                 another cluster has the name and the directory now
    ├── NotTrusted                   somebody else can change a file or directory                 (also a RuntimeError)
    ├── Damaged                      a file does not hold what hpcgpu writes there                (also a ValueError)
    ├── CheckpointError              data of a cluster could not be saved or restored             (also a RuntimeError)
    ├── CertificateError             the cluster's certificate cannot be used now
    ├── AuthenticationError          the other side of a connection does not belong to the cluster
    ├── HostError                    a login node cannot be used by ssh                           (also a RuntimeError)
    └── LaunchError                  the first step of a job cannot start its scheduler or workers

    ClusterWarning                   something is wrong, and the cluster continues                 (a UserWarning)
"""

from __future__ import annotations

import sys
from types import TracebackType

__all__ = [
    "AmbiguousSubmit",
    "AuthenticationError",
    "BatchError",
    "BatchUnavailable",
    "Cancelled",
    "CertificateError",
    "CheckpointError",
    "ClusterError",
    "ClusterExists",
    "ClusterWarning",
    "Damaged",
    "HostError",
    "HpcgpuError",
    "LaunchError",
    "NameLost",
    "NoCluster",
    "NotTrusted",
    "OptionError",
    "OtherFormat",
    "OtherQueue",
    "SubmitLimited",
    "SubmitRefused",
    "Superseded",
]


#: Packages below a user's line that do not help the user.
_LIBRARIES = ("hpcgpu", "dask", "distributed")


class HpcgpuError(Exception):
    """Base class of all exceptions that hpcgpu raises on purpose.

    One ``except hpcgpu.HpcgpuError`` catches them all.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(where_explained(type(self)))

    def _render_traceback_(self) -> list[str]:
        """Return the traceback that IPython shows: without causes, and it ends at the user's line.

        All of it is shown if Dask's configuration has an empty ``admin.traceback.shorten``, which does so for Dask too.
        """
        shell, config = sys.modules["IPython"].get_ipython(), sys.modules.get("dask.config")
        whole = config is not None and not config.get("admin.traceback.shorten", True)
        cause, suppressed = self.__cause__, self.__suppress_context__
        shown = self.__traceback__ if whole else _of_the_user(self.__traceback__)
        try:
            if not whole:
                self.__cause__ = None  # also suppresses the context
            lines: list[str] = shell.InteractiveTB.structured_traceback(type(self), self, shown)
        finally:
            self.__cause__, self.__suppress_context__ = cause, suppressed
        return lines


def _of_the_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback up to the line that called the first library; all of it if no such line is there."""
    steps, step = [], traceback
    while step is not None and str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
        steps.append(step)
        step = step.tb_next
    if step is None or len(steps) < 2:  # the first line is IPython's own
        return traceback
    shown = None
    for one in reversed(steps):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


def where_explained(cls: type[HpcgpuError]) -> str:
    """Return the line that says where a class of errors is explained: tracebacks and the command line show it.

    A class that a plugin derives from one of these is explained where that one is.
    """
    name = next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)
    return f"What this means and what to do: `python -m pydoc hpcgpu.{name}`"


class OptionError(HpcgpuError, ValueError):
    """An option has a value that is not valid; the message names the option and what to write instead.

    Nothing was submitted. Change the option where it was set: in the call, on the command line, in Dask's
    configuration, or in the profile. ``hpcgpu config`` shows each option and where its value comes from. If the
    message asks for an option that your site needs, such as an account, give it.
    """


class ClusterError(HpcgpuError, RuntimeError):
    """The cluster cannot do what was requested. If a job failed, the message has its id, the reason and the log's path.

    If the message has the last lines of a log, correct what they name. If the cluster did not start, its jobs were
    cancelled: start it again. If it failed later, for example because its scheduler job ended, start a new one.
    If worker jobs fail, the others continue: correct the cause, then call ``scale`` or ``adapt``. ``hpcgpu check
    --in-job`` finds most causes that lie in the site or in the software.
    """


class ClusterExists(ClusterError):
    """A cluster of that name exists and is not known to have ended.

    Use it with ``hpcgpu.connect(name)`` or ``if_exists="connect"``, end it with ``hpcgpu stop NAME``, or take another
    name.
    """


class NoCluster(ClusterError, LookupError):
    """There is no cluster of that name.

    ``hpcgpu list`` shows the clusters that exist, and jobs whose cluster directory was removed. A name is looked up in
    the option ``cluster_directory``: if the cluster was started with another one, give the path of the cluster's
    directory instead of its name.
    """


class OtherFormat(ClusterError):
    """Another version of hpcgpu made the cluster, and this one cannot read its files.

    The message names that version. Use it for this cluster, or end the cluster with ``hpcgpu stop NAME``, which works
    with the clusters of every version.
    """


class BatchError(HpcgpuError, RuntimeError):
    """The batch system, or a command of it, failed.

    The message has the command's own words. If the command was not found, you may have to load a module, or to be
    on a login node.
    """


class SubmitRefused(BatchError):
    """The batch system refused a job for good; its own words are in the message.

    Usually an option does not fit the site: a queue that does not exist, an account that may not use it, a walltime
    or a number of GPUs above its limit. ``hpcgpu check`` shows the queues and their GPUs. Try the script by hand:
    ``print(cluster.job_script())``.
    """


class SubmitLimited(BatchError):
    """The batch system accepts no more jobs of this user now.

    This is not a failure: the user has as many jobs as the site allows. A worker group that has a job tries again
    later. Request fewer jobs, or cancel other jobs of yours.
    """


class Cancelled(BatchError):
    """The job was not submitted, because it was no longer needed.

    The cluster was closed or made smaller meanwhile. There is nothing to do.
    """


class BatchUnavailable(BatchError):
    """The batch system does not answer (now). Nothing is known about the jobs.

    They keep their last known state, and what runs continues. Try again later. If jobs were to be cancelled, run
    ``hpcgpu stop NAME`` when the queue answers again.
    """


class AmbiguousSubmit(BatchUnavailable):
    """A submit got no answer, and the queue could not be queried for the job.

    So the job may exist. hpcgpu has written its name to the cluster directory. A cluster that runs looks for the job at
    each poll. ``hpcgpu stop NAME`` finds and cancels it when the queue answers again.
    """


class OtherQueue(BatchUnavailable):
    """This machine uses another queue than the cluster: nothing is known about the cluster's jobs.

    Two systems share your home directory. Run the command on the system that started the cluster; the message names
    it.
    """


class Superseded(BatchError):
    """Another program manages the cluster now: this one must not submit, nor cancel, any of its jobs.

    Use the cluster in that program, or take it back here with ``from_name``. Clients of this program still work.
    """


class NameLost(BatchError):
    """The directory was removed, or belongs to another cluster now.

    Only this program knows the jobs of the earlier cluster, and must cancel them: call ``close``.
    """


class NotTrusted(HpcgpuError, RuntimeError):
    """Somebody else can change what is at a path; the message says who, where, and what to do.

    Whoever changes such a file could run code with your rights. Become the owner of the path and remove the write
    permission of others (``chmod go-w``), or choose another directory.
    """


class Damaged(HpcgpuError, ValueError):
    """A file does not hold what hpcgpu writes there; the message names the file and says what is wrong.

    A full disk or an editor can be the cause. ``hpcgpu stop NAME`` cancels the jobs that the rest of the cluster
    directory names. Then start the cluster again.
    """


class CheckpointError(HpcgpuError, RuntimeError):
    """Data of a cluster could not be saved or restored; the message says why, and which version stays.

    Nothing that was saved before is lost. Mend the cause, such as a full disk, and save again.
    """


class CertificateError(HpcgpuError):
    """The cluster's certificate cannot be used now; the message says why and what to do.

    Often the clocks of two machines differ. ``hpcgpu check --in-job`` measures it.
    """


class AuthenticationError(HpcgpuError):
    """The other side did not prove that it belongs to the cluster.

    Something else listens or connects on that port, or it has the key of an earlier cluster. Connect by the name
    of the cluster (``hpcgpu.connect``), which reads the key and the address together.
    """


class HostError(HpcgpuError, RuntimeError):
    """A login node cannot be used by ssh; the message says why, in ssh's own words, and what to do.

    The jobs of a cluster on it are not concerned. If ``ssh HOST`` logs in, hpcgpu can do so, too.
    """


class LaunchError(HpcgpuError):
    """The job cannot start its scheduler or workers; the message says why and what to do.

    The message is in the log of the job. Its node lacks a GPU, a network interface or a directory, or has software
    of other versions.
    """


class ClusterWarning(UserWarning):
    """Something is wrong, and hpcgpu continues.

    It concerns a cluster, one of its jobs, or the directories that it uses. The text says what to do. Filter these
    warnings with ``warnings.filterwarnings(..., category=hpcgpu.ClusterWarning)``.
    """
