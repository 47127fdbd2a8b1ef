"""The cluster classes of the batch systems that hpcgpu brings: one class for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack

from hpcgpu.cluster.gpucluster import GPUCluster
from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.errors import OptionError
from hpcgpu.fabric import interface_addresses
from hpcgpu.options import documentation
from hpcgpu.options.shared_options_and_defaults import Options

if TYPE_CHECKING:
    from hpcgpu.configuration import typed


class SlurmGPUCluster(GPUCluster):
    """A GPU Dask cluster on Slurm."""

    system = "slurm"

    # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`
    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            host: str | None = None,
            scheduler: typed.SlurmSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            on_ending: Callable[[Any], object] | None = None,
            **options: Unpack[typed.SlurmArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.SlurmWorkerArguments]
        ) -> None: ...


class PBSGPUCluster(GPUCluster):
    """A GPU Dask cluster on OpenPBS or PBS Pro."""

    system = "pbs"

    # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`
    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            host: str | None = None,
            scheduler: typed.PBSSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            on_ending: Callable[[Any], object] | None = None,
            **options: Unpack[typed.PBSArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.PBSWorkerArguments]
        ) -> None: ...


class LocalGPUCluster(GPUCluster):
    """A GPU Dask cluster on this machine, through hpcgpu's embedded queue.

    It ignores options such as queue and account.
    """

    system = "local"

    # what type checkers and editors see; `inspect.signature` shows the same, see `documentation.describe`
    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            host: str | None = None,
            scheduler: typed.LocalSchedulerArguments | Literal["local"] | None = None,
            asynchronous: bool = False,
            loop: Any = None,
            on_ending: Callable[[Any], object] | None = None,
            **options: Unpack[typed.LocalArguments],
        ) -> None: ...

        def add_worker_group(  # type: ignore[override]  # the options of one batch system, where the base class has those of any
            self, name: str, *, jobs: int = 0, **options: Unpack[typed.LocalWorkerArguments]
        ) -> None: ...

    @classmethod
    def _check(cls, options: Options) -> None:
        super()._check(options)
        if options.worker.nodes_per_job > 1:
            raise OptionError(f"nodes_per_job={options.worker.nodes_per_job}: the local queue has one node")
        for option, name in [
            ("interface", options.worker.interface),
            ("client_interface", options.cluster.client_interface),
        ]:
            if name is not None and (problem := interface_addresses.missing(name, interface_addresses.addresses())):
                raise OptionError(f"{option}: {problem}")


for _cls in (SlurmGPUCluster, PBSGPUCluster, LocalGPUCluster):
    _options = option_classes(_cls.system)
    documentation.describe(_cls, _options.worker, _options.scheduler)
