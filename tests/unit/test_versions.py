"""What differs between client, scheduler and workers, how bad it is, and how it is reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcgpu.software.compare_environments import (
    Difference,
    EnvironmentCheck,
    Grade,
    collect,
    compare,
    environments,
    table,
)

SOFTWARE = {"python": "3.12.4", "dask": "2026.7.1", "distributed": "2026.7.1", "numpy": "2.1.0", "cloudpickle": "3.1.0"}
A100 = {
    **SOFTWARE,
    "dask-cuda": "26.10.0",
    "CUDA runtime": "12.9.79",
    "driver": "580.10",
    "CUDA of the driver": "13.0",
    "compute capability": "8.0",
    "GPU": "A100",
    "GPU memory": "40 GiB",
    "MIG": "no",
}
T4 = A100 | {"compute capability": "7.5", "GPU": "T4", "GPU memory": "15 GiB"}


def found(client: dict[str, str], scheduler: dict[str, str], worker: dict[str, str]) -> dict[str, Difference]:
    return {difference.what: difference for difference in compare(client, scheduler, {"w-0": worker, "w-1": worker})}


def test_a_client_without_a_gpu_fits_to_workers_with_one() -> None:
    assert compare(SOFTWARE, A100, {"w-0": A100}) == []


@pytest.mark.parametrize(
    ("what", "here", "there", "grade"),
    [
        ("python", "3.12.4", "3.11.9", Grade.FATAL),
        ("python", "3.12.4", "3.12.9", Grade.NOTE),
        ("architecture", "x86_64", "aarch64", Grade.NOTE),
        ("dask", "2026.7.1", "2026.8.0", Grade.FATAL),
        ("distributed", "2026.7.1", "2026.8.0", Grade.FATAL),
        ("numpy", "2.1.0", "1.26.4", Grade.WARNING),
        ("cloudpickle", "3.1.0", "2.2.1", Grade.WARNING),
    ],
)
def test_software_that_differs_is_graded(what: str, here: str, there: str, grade: Grade) -> None:
    differences = found(SOFTWARE | {what: here}, A100 | {what: there}, A100 | {what: there})
    assert list(differences) == [what] and differences[what].grade is grade
    assert differences[what].values == {"client": here, "scheduler": there, "w-0 and 1 more": there}
    assert bool(differences[what].advice) == (grade is not Grade.NOTE)


def test_a_package_that_only_workers_have_is_reported() -> None:
    assert found(SOFTWARE, A100, A100 | {"cudf": "26.10"})["cudf"].advice == (
        "the scheduler cannot rebuild graphs that hold objects of cudf: install it there too"
    )
    assert found(SOFTWARE, A100 | {"cudf": "26.10"}, A100 | {"cudf": "26.10"}) == {}, "a client needs it not"


def test_a_driver_that_is_too_old_is_fatal() -> None:
    old = A100 | {"CUDA of the driver": "12.4", "driver": "550.54"}
    assert found(SOFTWARE, old, old) == {}, "a driver runs all runtimes of its major version"
    [difference] = [
        d for d in compare(SOFTWARE, A100, {"w": old | {"CUDA runtime": "13.0.1"}}) if d.grade is Grade.FATAL
    ]
    assert (
        difference.values == {"w": "13.0.1; the driver supports 12.4"}
        and "install hpcgpu with the extra cu12" in difference.advice
    )


def test_the_cuda_runtime_is_the_one_that_dask_s_libraries_are_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"rmm-cu12": "26.10.0", "distributed-ucxx-cu12": "0.52.0", "nvidia-cuda-runtime": "13.1.2"}
    monkeypatch.setattr("hpcgpu.software.compare_environments._version", lambda name: there.get(name, ""))
    assert collect()["CUDA runtime"] == "12", "torch may bring a newer one"
    there["cupy-cuda13x"] = "14.0"
    assert collect()["CUDA runtime"] == "13"
    there.clear()
    monkeypatch.setattr("hpcgpu.software.compare_environments._conda_cuda", lambda: "12.9")
    assert collect()["CUDA runtime"] == "12.9"
    old = A100 | {"CUDA runtime": "13", "CUDA of the driver": "12.4"}
    assert found(SOFTWARE, old, old)["CUDA runtime"].grade is Grade.FATAL


def test_cupy_without_numba_is_reported() -> None:
    arrays = A100 | {"cupy": "14.0"}
    assert "install numba-cuda" in found(SOFTWARE, arrays, arrays)["numba"].advice
    assert found(SOFTWARE, arrays | {"numba": "0.65"}, arrays | {"numba": "0.65"}) == {}


def test_a_scheduler_on_another_kind_of_gpu_is_a_warning() -> None:
    differences = found(SOFTWARE, T4, A100)
    assert {what: difference.grade for what, difference in differences.items()} == {
        "compute capability": Grade.WARNING,
        "GPU": Grade.NOTE,
        "GPU memory": Grade.NOTE,
    }
    assert "give it a GPU of the workers' type" in differences["compute capability"].advice


def test_the_worst_comes_first_and_the_table_has_a_column_for_each() -> None:
    differences = compare(SOFTWARE | {"numpy": "1.0", "dask": "2020.1"}, A100, {"w-0": A100, "w-1": T4})
    assert [d.grade for d in differences] == sorted((d.grade for d in differences), reverse=True)
    lines = table(differences).splitlines()
    assert lines[0].split() == ["client", "scheduler", "w-0", "w-1"]
    assert lines[1].split() == ["fatal", "dask", "2020.1", "2026.7.1", "2026.7.1", "2026.7.1"]
    assert lines[-1].startswith("numpy: ") and "install one version everywhere" in lines[-1]


def test_fatal_differences_are_errors_and_each_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.software.compare_environments.collect", lambda: SOFTWARE)
    comparison = EnvironmentCheck("error")
    assert comparison.check({"w-0": A100 | {"dask": "1"}}) == ("", ""), "nothing is known of the scheduler yet"
    comparison.scheduler = A100
    assert comparison.check({"w-0": A100}) == ("", "")
    fatal, warning = comparison.check({"w-0": A100, "w-1": A100 | {"dask": "1"}})
    assert fatal.startswith("client, scheduler and workers are incompatible") and "w-1" in fatal and warning == ""
    assert comparison.check({"w-0": A100, "w-1": A100 | {"dask": "1"}, "w-2": A100 | {"dask": "1"}}) == ("", ""), (
        "told already"
    )
    fatal, warning = comparison.check({"w-3": A100 | {"numpy": "1"}})
    assert fatal == "" and "numpy" in warning
    assert comparison.check({"w-3": A100 | {"numpy": "1"}, "w-4": A100 | {"numpy": "1", "GPU": "H100"}}) == ("", ""), (
        "a note alone is not told"
    )


def test_one_worker_that_joins_many_is_compared_with_all_of_them_only_if_it_has_something_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpcgpu.software.compare_environments.collect", lambda: SOFTWARE)
    comparison = EnvironmentCheck("error")
    comparison.scheduler = A100
    everybody: dict[str, dict[str, str]] = {f"w-{i}": A100 for i in range(3)}
    assert comparison.check(everybody) == ("", "")
    asked: list[int] = []

    def joins(name: str, environment: dict[str, str]) -> tuple[str, str]:
        everybody[name] = environment
        return comparison.check({name: environment}, lambda: asked.append(len(everybody)) or everybody)

    assert joins("w-3", dict(A100)) == ("", "") and not asked, "an environment that is known"
    fatal, _ = joins("w-4", A100 | {"dask": "1"})
    assert asked == [5] and "w-4" in fatal and "w-0" in fatal, "the table has the others too"


def test_what_is_fatal_is_a_warning_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.software.compare_environments.collect", lambda: SOFTWARE)
    for mode, expected in (("warn", "fatal"), ("off", "")):
        comparison = EnvironmentCheck(mode)
        comparison.scheduler = A100 | {"dask": "1"}
        fatal, warning = comparison.check({})
        assert fatal == "" and expected in warning and bool(expected) == bool(warning)


def test_a_process_reports_what_it_has_and_touches_no_cuda() -> None:
    here = collect()
    assert (
        here["python"] == ".".join(map(str, sys.version_info[:3]))
        and {"dask", "distributed", "numpy", "msgpack"} <= here.keys()
    )
    code = (
        "import sys; from hpcgpu.software.compare_environments import collect; collect(); "
        "print(*{'cuda', 'cupy', 'rmm', 'dask'} & set(sys.modules))"
    )
    bare = "import sys; print(*{'cuda', 'cupy', 'rmm', 'dask'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code]) == subprocess.check_output(
        [sys.executable, "-c", bare]
    )


def test_workers_without_the_preload_are_passed_over() -> None:
    assert environments({"tcp://a": {"name": "w-0", "hpcgpu": A100}, "tcp://b": {"name": "by-hand"}}) == {"w-0": A100}
