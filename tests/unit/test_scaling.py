"""Sizes: every unit becomes jobs."""

from __future__ import annotations

from typing import Any

import pytest

from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import OptionError
from hpcgpu.options.shared_options_and_defaults import WorkerOptions
from hpcgpu.scaling.sizes_to_jobs import jobs_for, limits
from hpcgpu.scaling.worker_names import job_of, workers_of


def workers(**options: Any) -> WorkerOptions:
    return resolve("slurm", {"gpus_per_node": 4, "memory": "64GiB", "nthreads": 2} | options).worker


@pytest.mark.parametrize(
    ("given", "jobs"),
    [
        ({"minimum": 5, "maximum": 11}, (2, 2)),
        ({"minimum_jobs": 1, "maximum_jobs": 16}, (1, 16)),
        ({"minimum_gpus": 1, "maximum_gpus": 9}, (1, 2)),
        ({"minimum_cores": 9, "maximum_cores": 31}, (2, 3)),
        ({"minimum_memory": "65GiB", "maximum_memory": "190GiB"}, (2, 2)),
        ({"maximum_jobs": 3, "maximum_gpus": 100}, (0, 3)),
    ],
)
def test_the_minimum_is_rounded_up_and_the_maximum_down(given: dict[str, Any], jobs: tuple[int, int]) -> None:
    found = limits(workers(), **given)
    assert (found.minimum, found.maximum) == jobs


@pytest.mark.parametrize("given", [{"n": 1, "memory": "130GiB"}, {"cores": 17, "n": 4}, {"gpus": 9, "jobs": 2}])
def test_of_several_sizes_the_largest_counts(given: dict[str, Any]) -> None:
    assert jobs_for(workers(), **given) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "adapt: give a maximum, such as maximum_jobs=4"),
        ({"maximum_jobs": 0}, "adapt: maximum_jobs=0 is less than one job, which has 1 job"),
        ({"maximum": 3}, "adapt: maximum=3 is less than one job, which has 4 workers"),
        (
            {"minimum_jobs": 3, "maximum_gpus": 8},
            "the minimum (3 jobs) is above the maximum (2 jobs: maximum_gpus=8)",
        ),
        ({"minimum_jobs": -1, "maximum_jobs": 1}, "adapt: minimum_jobs must be 0 or more, not -1"),
        (
            {"maximum_jobs": float("inf")},
            "adapt: maximum_jobs=inf is not a limit: write the largest number that you want",
        ),
        ({"maximum_jobs": 1, "backlog": 0}, "adapt: backlog must be 1 or more, not 0"),
        ({"maximum_jobs": 1, "idle_timeout": "soon"}, "adapt: idle_timeout='soon' is not a time"),
        (
            {"maximum_jobs": 1, "maximum_gpu_hours": 0},
            "maximum_gpu_hours must be a number above 0, not 0",
        ),
        (
            {"maximum_jobs": 1, "maximum_gpu_hours": "3"},
            "maximum_gpu_hours must be a number above 0, not '3'",
        ),
        (
            {"maximum_cores": 3},
            "maximum_cores=3 is less than one job, which has 8 threads of workers (nthreads)",
        ),
        (
            {"maximum": "8"},
            "adapt: maximum must be a whole number, not '8': write it without quotes",
        ),
    ],
)
def test_limits_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        limits(workers(), **given)
    assert message in str(caught.value)


def test_a_budget_of_gpu_hours_needs_gpus() -> None:
    with pytest.raises(OptionError, match="needs workers with GPUs"):
        limits(resolve("slurm", {"gpus_per_node": 0}).worker, maximum_jobs=1, maximum_gpu_hours=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": "2"}, "scale: n must be a whole number, not '2': write it without quotes"),
        ({"n": [2]}, "scale: n must be a whole number, not [2], such as 4"),
        ({"n": 2.5}, "scale: n must be a whole number, not 2.5"),
        ({"memory": "much"}, "scale: memory='much' is not an amount of memory"),
        ({}, "scale: give a number of workers, or jobs="),
    ],
)
def test_sizes_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        jobs_for(workers(), **given)
    assert message in str(caught.value)


def test_an_amount_of_memory_needs_the_memory_of_a_node() -> None:
    unknown = resolve("slurm", {"gpus_per_node": 4}).worker
    message = (
        "cannot be converted to jobs, because the memory of a node is not known: set the option memory of the workers"
    )
    with pytest.raises(OptionError, match=f"^scale: memory {message}"):
        jobs_for(unknown, memory="1TB")
    with pytest.raises(OptionError, match=f"^adapt: maximum_memory {message}"):
        limits(unknown, maximum_memory="1TB")


@pytest.mark.parametrize("nothing", [{"memory": "0GB"}, {"memory": 0}, {"n": 0}, {"n": 0.0}, {"cores": 0}])
def test_nothing_is_a_size_too(nothing: dict[str, Any]) -> None:
    assert jobs_for(workers(), **nothing) == 0


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("gpus", [1, 4])
def test_each_worker_belongs_to_its_job(nodes: int, gpus: int) -> None:
    names = workers_of("my-run-1", workers(nodes_per_job=nodes, gpus_per_node=gpus))
    assert len(set(names)) == nodes * gpus
    assert {job_of(name, dict.fromkeys(["my-run-0", "my-run-1", "my-run-11"])) for name in names} == {"my-run-1"}
