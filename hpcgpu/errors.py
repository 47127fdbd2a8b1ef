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
    ├── CertificateError             the cluster's certificate cannot be used now
    ├── AuthenticationError          the other side of a connection does not belong to the cluster
    └── LaunchError                  the first step of a job cannot start its scheduler or workers

    ClusterWarning                   something is wrong, and the cluster continues                 (a UserWarning)
"""

from __future__ import annotations

__all__ = [
    "AmbiguousSubmit",
    "AuthenticationError",
    "BatchError",
    "BatchUnavailable",
    "Cancelled",
    "CertificateError",
    "ClusterError",
    "ClusterExists",
    "ClusterWarning",
    "Damaged",
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


class HpcgpuError(Exception):
    """Base class of all exceptions that hpcgpu raises on purpose."""


class OptionError(HpcgpuError, ValueError):
    """An option has a value that is not valid; the message names the option and what to write instead."""


class ClusterError(HpcgpuError, RuntimeError):
    """The cluster cannot do what was requested; the message has job id, the queue's own words, and the log's path."""


class ClusterExists(ClusterError):
    """A cluster of that name exists and is not known to have ended."""


class NoCluster(ClusterError, LookupError):
    """There is no cluster of that name."""


class OtherFormat(ClusterError):
    """Another version of hpcgpu made the cluster, and this one cannot read its files.

    The message names that version, and says what to do.
    """


class BatchError(HpcgpuError, RuntimeError):
    """The batch system, or a command of it, failed."""


class SubmitRefused(BatchError):
    """The batch system refused a job for good; its own words are in the message."""


class SubmitLimited(BatchError):
    """The batch system accepts no more jobs of this user now.

    This is not a failure: the user has as many jobs as the site allows.
    """


class Cancelled(BatchError):
    """The job was not submitted, because it was no longer needed."""


class BatchUnavailable(BatchError):
    """The batch system does not answer (now). Nothing is known about the jobs."""


class AmbiguousSubmit(BatchUnavailable):
    """A submit got no answer, and the queue could not be queried for the job."""


class OtherQueue(BatchUnavailable):
    """This machine uses another queue than the cluster: nothing is known about the cluster's jobs."""


class Superseded(BatchError):
    """Another program manages the cluster now: this one must not submit, nor cancel, any of its jobs."""


class NameLost(BatchError):
    """The directory belongs to another cluster now.

    Only this program knows the jobs of the earlier cluster, and must cancel them.
    """


class NotTrusted(HpcgpuError, RuntimeError):
    """Somebody else can change what is at a path; the message says who, where, and what to do."""


class Damaged(HpcgpuError, ValueError):
    """A file does not hold what hpcgpu writes there; the message names the file and says what is wrong."""


class CertificateError(HpcgpuError):
    """The cluster's certificate cannot be used now; the message says why and what to do."""


class AuthenticationError(HpcgpuError):
    """The other side did not prove that it belongs to the cluster."""


class LaunchError(HpcgpuError):
    """The job cannot start its scheduler or workers; the message says why and what to do."""


class ClusterWarning(UserWarning):
    """Something is wrong, and hpcgpu continues.

    It concerns a cluster, one of its jobs, or the directories that it uses.
    """
