"""Options: where they come from, and what is reported of those that cannot be."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner

from hpcgpu.cli import main as cli
from hpcgpu.client.connect import connect
from hpcgpu.configuration.option_classes import option_classes
from hpcgpu.configuration.resolve import cluster_directories, resolve, resolve_group
from hpcgpu.errors import OptionError
from hpcgpu.options import values
from hpcgpu.scripts.render import render


def test_arguments_beat_the_system_s_section_which_beats_the_general_one_which_beats_defaults() -> None:
    with dask.config.set(
        {"hpcgpu": {"queue": "general", "account": "general", "slurm": {"queue": "section", "walltime": "1h"}}}
    ):
        options = resolve("slurm", {"walltime": "2h"}).worker
        assert (options.walltime, options.queue, options.account, options.gpu_request) == (
            7200,
            "section",
            "general",
            "gres",
        )
        assert resolve("local", {}).worker.queue == "general"


def test_arguments_of_the_scheduler_job_beat_its_section() -> None:
    with dask.config.set({"hpcgpu.slurm.scheduler": {"walltime": "1h", "queue": "section"}}):
        scheduler = resolve("slurm", {"scheduler": {"walltime": "2h"}}).scheduler
    assert scheduler is not None and (scheduler.walltime, scheduler.queue) == (7200, "section")


def test_a_program_that_is_stopped_for_some_minutes_keeps_its_cluster_by_default() -> None:
    assert resolve("slurm", {}).cluster.lease == 600


def test_none_counts_as_not_given() -> None:
    with dask.config.set({"hpcgpu.slurm.queue": "configured"}):
        assert resolve("slurm", {"queue": None}).worker.queue == "configured"


def test_the_scheduler_inherits_account_environment_and_prologue_but_not_size() -> None:
    options = resolve(
        "slurm",
        {
            "queue": "gpu",
            "account": "m1",
            "cores": 16,
            "memory": "60GB",
            "gpus_per_node": 4,
            "gpu_type": "a100",
            "env": {"A": "1"},
            "job_script_prologue": ["module load cuda"],
            "scheduler": {"queue": "shared", "prefer": "t4", "env": {"B": "2"}},
        },
    )
    scheduler = options.scheduler
    assert scheduler is not None
    assert (scheduler.queue, scheduler.account, scheduler.prefer, scheduler.gpus_per_node) == ("shared", "m1", "t4", 1)
    assert (scheduler.cores, scheduler.memory, scheduler.gpu_type) == (None, None, None)
    assert dict(scheduler.env) == {"A": "1", "B": "2"}
    assert scheduler.job_script_prologue == ("module load cuda",)


@pytest.mark.parametrize(("gpus", "kind"), [(1, "a100"), (0, None)])
def test_a_scheduler_that_gives_its_number_of_gpus_inherits_their_type(gpus: int, kind: str | None) -> None:
    scheduler = resolve("slurm", {"gpu_type": "a100", "scheduler": {"gpus_per_node": gpus}}).scheduler
    assert scheduler is not None and (scheduler.gpus_per_node, scheduler.gpu_type) == (gpus, kind)


def test_what_is_inherited_can_be_cleared() -> None:
    clears = {"job_script_prologue": [], "env": {"A": ""}, "job_directives_skip": ["--account"], "interface": "auto"}
    given = {"account": "m1", "job_script_prologue": ["module load cuda"], "env": {"A": "1"}, "interface": "lo"}
    options = resolve("slurm", given | {"scheduler": clears})
    assert options.scheduler is not None and options.worker.interface == "lo"
    assert (options.scheduler.job_script_prologue, options.scheduler.interface) == ((), None)
    script = render("slurm", "scheduler", options, Path("/clusters/demo"))
    assert "--account" not in script and "--account" in render("slurm", "worker", options, Path("/clusters/demo"))
    assert "module load cuda" not in script and "export A=''" in script


@pytest.mark.parametrize("timeout", ["soon", "", -1, float("nan"), True, [1]])
def test_a_timeout_of_connect_that_is_no_time_is_refused_by_its_name(timeout: Any) -> None:
    with pytest.raises(OptionError, match="connect: timeout="):
        connect("nothing", timeout=timeout)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quue": "gpu"}, "unknown option 'quue': did you mean 'queue'?"),
        ({"image": "a.sif"}, "unknown option 'image': set container to the path of the image"),
        ({"worker_class": "a.B"}, "unknown option 'worker_class': the workers are those of dask-cuda"),
        ({"custom_cluster_spec": {}}, "unknown option 'custom_cluster_spec': the options of hpcgpu take its place"),
        ({"processes": 4}, "one Dask worker runs per GPU: set gpus_per_node"),
        ({"dashboard_address": ":1"}, "give the cluster scheduler={'dashboard_address': ...}"),
        (
            {"scheduler": {"jobs": 2}},
            "jobs is an option of the whole cluster, not of one kind of its jobs: set it for the cluster",
        ),
        ({"queue": "a", "partition": "b"}, "mean the same: give one of them"),
        ({"container": "-v"}, "container='-v' begins with '-': write the path or the name of an image"),
        ({"cores": 0}, "cores must be 1 or more, not 0"),
        ({"gpus_per_node": -1}, "gpus_per_node must be 0 or more, not -1"),
        ({"nodes_per_job": True}, "nodes_per_job must be a whole number"),
        ({"walltime": "25:99"}, "walltime='25:99' is not a time: minutes and seconds are 59 at most"),
        ({"walltime": 3600}, "walltime=3600 has no unit: write '02:00:00'"),
        ({"memory": "10 parsecs"}, "memory='10 parsecs' is not an amount of memory: write a text with a unit"),
        ({"memory": 60}, "memory=60 is less than a megabyte: write a text with a unit"),
        ({"queue": "gpu\nx"}, r"queue='gpu\nx' holds the control character '\n'"),
        ({"account": 'a"; rm -rf ~'}, "account='a\"; rm -rf ~' is not a valid name"),
        ({"name": "../up"}, "is not a valid name"),
        ({"name": "a\0b"}, "holds the control character"),
        ({"job_script_prologue": "/no/such/file"}, "is not a file: give a list of shell lines"),
        ({"job_script_prologue": ["module load cuda\nrm x"]}, "job_script_prologue[0]"),
        ({"env": {"A": "x\0y"}}, "env['A'] must be a string without NUL"),
        ({"env": {"A B": "x"}}, "'A B' is not a valid name of an environment variable"),
        ({"interface": "a name that is too long"}, "is not a network interface"),
        ({"worker_extra_args": ["--name=x"]}, "worker_extra_args: --name is set by hpcgpu"),
        ({"protocol": "ucx", "scheduler": {"gpus_per_node": 0}}, "Give it a GPU, or use protocol='tcp'"),
        ({"gpus_per_node": 0, "rmm_pool_size": 0.5}, "rmm_pool_size is an option of GPU workers"),
        ({"scheduler": "remote"}, "scheduler must be a dict of options of the scheduler job, or 'local'"),
        ({"scheduler": "local", "protocol": "ucx"}, "scheduler='local' does not work with protocol='ucx'"),
        ({"scheduler": {"gpus_per_node": 2}}, "gpus_per_node=2, but the scheduler uses one GPU: write 1 or 0"),
        ({"scheduler": {"dashboard_address": "8787"}}, "'8787' is not an address: write ':8787' or '127.0.0.1:0'"),
        ({"gpus_per_node": 0, "gpu_type": "a100"}, "gpu_type='a100', but gpus_per_node is 0: remove one of the two"),
        ({"walltime": "4000-00:00:00"}, "walltime='4000-00:00:00' is more than ten years"),
        ({"idle_timeout": "4000d"}, "idle_timeout='4000d' is more than ten years"),
        ({"rmm_pool_size": 1.5}, "rmm_pool_size=1.5 is less than a megabyte"),
        ({"env": {"A": "\ud800"}}, "env['A'] is not valid text"),
        ({"job_script_prologue": ["a\tb\nc"]}, "job_script_prologue[0]"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_with_advice(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve("slurm", given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lifetime", "55m", "--lifetime-stagger", "4m"],  # as dask-jobqueue's documentation has it
        ["--lifetime=55m"],
        ["--lifetime 55m"],
        ["--lifetime-stagger", "4m"],
        ["--lifetime-restart"],
    ],
)
@pytest.mark.parametrize("where", ["arguments", "configuration", "worker group", "cli"])
def test_the_lifetime_of_workers_is_not_set_by_hand(arguments: list[str], where: str, tmp_path: Path) -> None:
    flag = arguments[0].replace("=", " ").split()[0]
    message = (
        f"worker_extra_args: {flag} is set by hpcgpu, from the walltime of the "
        "job: remove it. The option walltime_margin says"
    )
    with pytest.raises(OptionError, match=message):
        if where == "configuration":
            with dask.config.set({"hpcgpu.worker-extra-args": arguments}):
                resolve("slurm", {})
        elif where == "worker group":
            resolve_group("big", {"worker_extra_args": arguments}, resolve("slurm", {}))
        elif where == "cli":
            given = [f"--worker-extra-args={argument}" for argument in arguments]
            raise OptionError(CliRunner().invoke(cli, ["render", "slurm", "-o", str(tmp_path / "demo"), *given]).output)
        else:
            resolve("slurm", {"worker_extra_args": arguments})
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    "argument", ["--no-nanny", "--host", "--disable-infiniband", "--no-rmm-async", "--scheduler-file=x"]
)
def test_arguments_that_hpcgpu_sets_itself_are_refused(argument: str) -> None:
    with pytest.raises(OptionError, match=f"worker_extra_args: {argument.split('=', maxsplit=1)[0]} is set by "):
        resolve("slurm", {"worker_extra_args": [argument]})


PBS_OPTIONS = {
    "select_extra": "a=b",
    "resource_list": {"a": 1},
    "place": "scatter",
    "pbs_shape": "flat",
    "pbs_launcher": "mpiexec",
}


@pytest.mark.parametrize("system", ["slurm", "local"])
@pytest.mark.parametrize("name", PBS_OPTIONS)
def test_options_of_pbs_are_refused_elsewhere(system: str, name: str) -> None:
    refused = f"{name} is an option of PBS jobs, and .* does not have it: remove it"
    with pytest.raises(OptionError, match=refused):
        resolve(system, {name: PBS_OPTIONS[name]})
    with (
        dask.config.set({"hpcgpu": {name: PBS_OPTIONS[name]}}),
        pytest.raises(OptionError, match=f"dask config hpcgpu: {refused}"),
    ):
        resolve(system, {})
    with pytest.raises(OptionError, match=f"worker group 'big': {refused}"):
        resolve_group("big", {name: PBS_OPTIONS[name]}, resolve(system, {}))
    with pytest.raises(OptionError, match="scheduler: place is an option of PBS jobs"):
        resolve(system, {"scheduler": {"place": "scatter"}})


def test_the_options_of_one_batch_system_are_not_options_of_another() -> None:
    slurm, pbs, local = (option_classes(system) for system in ("slurm", "pbs", "local"))
    assert slurm.added().keys() == {"gpu_request", "qos", "reservation", "constraint", "prefer"}
    assert pbs.added().keys() == PBS_OPTIONS.keys()
    assert local.added() == {}
    with pytest.raises(
        OptionError, match="qos is an option of Slurm jobs, and the queue embedded in hpcgpu does not have it"
    ):
        resolve("local", {"qos": "high"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"qos": "high"}, "qos is an option of Slurm jobs: PBS has none"),
        ({"reservation": "R1"}, "in PBS a reservation is a queue: set queue to its name"),
        ({"constraint": "gpu"}, "constraint is an option of Slurm jobs: set select_extra"),
        ({"scheduler": {"prefer": "t4"}}, "scheduler: prefer is an option of Slurm jobs"),
        ({"gpu_request": "gpus"}, "gpu_request must be 'none', not 'gpus'"),
        ({"select_extra": "a100"}, "select_extra='a100' is not a list of resources: write 'gpu_type=a100'"),
        ({"select_extra": "a=b+1:ngpus=8"}, "do not write ncpus, ngpus, mem or mpiprocs here"),
        ({"select_extra": "a=b c"}, "is not a list of resources"),
        ({"select_extra": "a=b\n#PBS -q x"}, "holds the control character"),
        ({"resource_list": {"walltime": "1:00"}}, "resource_list: leave out walltime: the option walltime sets it"),
        ({"resource_list": {"a b": "1"}}, "resource_list: 'a b' is not a valid name of a resource"),
        ({"resource_list": {"a": "1,walltime=9:00"}}, "resource_list['a']='1,walltime=9:00' is not allowed"),
        ({"resource_list": ["a=1"]}, "resource_list must be a dict such as"),
        ({"pbs_shape": "round"}, "pbs_shape must be one of 'select', 'flat'"),
        (
            {"pbs_shape": "flat", "nodes_per_job": 2},
            "nodes_per_job=2 does not work with pbs_shape='flat': request more jobs",
        ),
        ({"pbs_shape": "flat", "select_extra": "a=b"}, "select_extra belongs to chunks"),
        ({"pbs_launcher": "mpiexec '"}, 'pbs_launcher="mpiexec \'": No closing quotation'),
        ({"pbs_launcher": " "}, "pbs_launcher is empty"),
        ({"place": "scatter; rm"}, "place='scatter; rm' is not a valid name"),
        (
            {"place": "pack:excl", "nodes_per_job": 2},
            "place='pack:excl' may put two of the 2 nodes of a job on one host",
        ),
        ({"place": "free", "nodes_per_job": 2}, "write scatter, such as 'scatter:excl'"),
    ],
)
def test_what_cannot_be_on_pbs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve("pbs", given)
    assert message in str(caught.value)


def test_the_scheduler_job_of_pbs_inherits_what_every_job_of_the_site_needs() -> None:
    given = {
        "resource_list": {"filesystems": "eagle"},
        "pbs_shape": "select",
        "select_extra": "system=polaris",
        "place": "scatter:excl",
    }
    scheduler = resolve("pbs", given | {"gpus_per_node": 4}).scheduler
    assert scheduler is not None
    assert (scheduler.resource_list, scheduler.select_extra, scheduler.place) == (
        (("filesystems", "eagle"),),
        "system=polaris",
        None,
    )
    other = resolve("pbs", given | {"gpu_type": "a100", "scheduler": {"select_extra": "gpu_type=t4"}}).scheduler
    assert other is not None
    assert (other.select_extra, other.gpu_type) == ("gpu_type=t4", None)


def test_an_option_of_another_system_does_not_hide_where_clusters_are(tmp_path: Path) -> None:
    with dask.config.set({"hpcgpu": {"qos": "high", "pbs": {"cluster-directory": str(tmp_path)}}}):
        assert tmp_path in cluster_directories()


def test_partition_is_another_name_of_queue() -> None:
    assert resolve("slurm", {"partition": "gpu"}).worker.queue == "gpu"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("02:00:00", 7200),
        ("30:00", 1800),
        ("1-12:00:00", 129600),
        ("1-12", 129600),
        ("2h", 7200),
        ("90m", 5400),
        (timedelta(hours=1), 3600),
    ],
)
def test_walltimes(given: str | timedelta, seconds: int) -> None:
    assert values.walltime("walltime", given) == seconds


@pytest.mark.parametrize(("given", "passed_on"), [(0.5, "0.5"), ("0.5", "0.5"), ("auto", "auto"), ("20GB", "20GB")])
def test_a_pool_of_gpu_memory_is_an_amount_a_part_or_automatic(given: float | str, passed_on: str) -> None:
    assert resolve("slurm", {"rmm_pool_size": given}).worker.rmm_pool_size == passed_on


@pytest.mark.parametrize("address", [":8787", "127.0.0.1:0", "[::1]:8787"])
def test_the_dashboard_listens_where_the_user_chooses(address: str) -> None:
    scheduler = resolve("slurm", {"scheduler": {"dashboard_address": address}}).scheduler
    assert scheduler is not None and scheduler.dashboard_address == address


def test_odd_but_legal_environment_values_are_kept(tmp_path: Path) -> None:
    odd = 'a"; rm -rf\n$HOME `id`'
    assert dict(resolve("slurm", {"env": {"A": odd}}).worker.env) == {"A": odd}


def test_a_scheduler_without_a_gpu_is_refused_under_ucx_before_anything_starts() -> None:
    with pytest.raises(OptionError, match=r"gpus_per_node=0 does not work with protocol='ucx'.* use protocol='tcp'"):
        resolve("slurm", {"protocol": "ucx", "scheduler": {"gpus_per_node": 0}})
    resolve("slurm", {"protocol": "ucx"})  # the scheduler has a GPU if the workers have GPUs
    base = resolve("slurm", {"protocol": "ucx", "gpus_per_node": 0})
    with pytest.raises(
        OptionError, match="worker group 'big': GPUs do not work with protocol='ucx' and a scheduler without a GPU"
    ):
        resolve_group("big", {"gpus_per_node": 4}, base)
    for allowed in ("auto", "tcp"):
        resolve("slurm", {"protocol": allowed, "scheduler": {"gpus_per_node": 0}})
        resolve_group("big", {"gpus_per_node": 4}, resolve("slurm", {"protocol": allowed, "gpus_per_node": 0}))


def test_a_variable_that_the_scheduler_job_has_for_itself_is_not_that_of_the_workers() -> None:
    options = resolve("slurm", {"env": {"A": "1", "B": "1"}, "scheduler": {"env": {"B": "2"}}})
    assert options.scheduler is not None and dict(options.scheduler.env) == {"A": "1", "B": "2"}


def test_a_group_inherits_options_of_gpu_workers_only_if_it_has_gpus() -> None:
    base = resolve("slurm", {"enable_infiniband": True})
    assert resolve_group("cpu", {"gpus_per_node": 0}, base).enable_infiniband is None
    assert resolve_group("big", {"gpus_per_node": 8}, base).enable_infiniband is True


def test_all_groups_spill_by_cudf_or_none() -> None:
    base = resolve("slurm", {"enable_cudf_spill": True})
    assert resolve_group("big", {}, base).enable_cudf_spill is True
    assert resolve_group("cpus", {"gpus_per_node": 0, "cores": 2}, base).enable_cudf_spill is None
    words = "worker group 'big': enable_cudf_spill=False, but True for the workers that the cluster was started with"
    with pytest.raises(OptionError, match=words):
        resolve_group("big", {"enable_cudf_spill": False}, base)
    with pytest.raises(OptionError, match="enable_cudf_spill=True, but None"):
        resolve_group("big", {"enable_cudf_spill": True}, resolve("slurm", {}))
    cpus = {"gpus_per_node": 0, "cores": 2}
    spills = {"gpus_per_node": 1, "enable_cudf_spill": True}
    assert resolve_group("big", spills, resolve("slurm", cpus)).enable_cudf_spill, "its scheduler holds no GPU objects"
    with pytest.raises(OptionError, match="Start the cluster with GPU workers, and add those without a GPU as a group"):
        resolve_group("big", spills, resolve("slurm", {**cpus, "scheduler": {"gpus_per_node": 1}}))
