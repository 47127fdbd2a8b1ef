"""Values of the wrong type, variables in paths, names of other tools: each is refused by name, with what to write
instead.
"""

from __future__ import annotations

import datetime
import math
import re
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner

from hpcgpu import SlurmGPUCluster
from hpcgpu.cli import main
from hpcgpu.configuration.resolve import cluster_directories, resolve, resolve_group
from hpcgpu.errors import LaunchError, OptionError
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.options.declare import names
from hpcgpu.options.shared_options_and_defaults import ClusterOptions, SchedulerOptions, WorkerOptions
from hpcgpu.runtime.scratch import expanded
from hpcgpu.scripts.render import render
from hpcgpu.store.cluster_json import FORMAT

WRONG: list[Any] = [
    [],
    ["a"],
    [None],
    [["a"]],
    {},
    {"a": "b"},
    {1: 2},
    {"a": [1]},
    True,
    False,
    1.5,
    math.nan,
    math.inf,
    -1,
    0,
    10**400,
]
WRONG += [
    "",
    " ",
    "3",
    "1.5",
    "nan",
    "a\nb",
    "9" * 400,
    "\ud800",
    b"x",
    object(),
    datetime.date(2026, 1, 1),
    datetime.timedelta(0),
]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of dask's configuration: each message about a value reads all of them."""
    monkeypatch.setattr(dask.config, "paths", [])


def attempt(system: str, arguments: dict[str, Any], *, scripts: bool = True) -> None:
    """Read options and make the scripts. What is refused is an `OptionError` that fits on a screen."""
    try:
        options = resolve(system, arguments)
        for kind in ("scheduler", "worker") if scripts else ():
            if kind == "worker" or options.scheduler is not None:
                render(system, kind, options, Path("/clusters/x"))
    except OptionError as error:
        assert 10 < len(str(error)) < 1500, str(error)


@pytest.mark.parametrize("system", ["slurm", "pbs", "local"])
@pytest.mark.parametrize("name", [*names(ClusterOptions), *names(WorkerOptions), "scheduler"])
def test_no_value_of_a_wrong_type_ends_in_a_traceback(system: str, name: str) -> None:
    for value in WRONG:
        attempt(system, {name: value})
        if name in names(SchedulerOptions):
            attempt(system, {"scheduler": {name: value}})
        if system == "slurm" or name == "queue":  # all systems read the configuration in the same way
            with dask.config.set({"hpcgpu": {name.replace("_", "-"): value}}):
                attempt(system, {}, scripts=False)  # the value gives the same scripts wherever it comes from
            with dask.config.set({"hpcgpu": {system: {name: value}}}):
                attempt(system, {}, scripts=False)


@pytest.mark.parametrize("section", ["hpcgpu", "hpcgpu.slurm", "hpcgpu.scheduler", "hpcgpu.sge"])
def test_no_section_of_a_wrong_type_ends_in_a_traceback(section: str) -> None:
    for value in WRONG:
        with dask.config.set({section: value}):
            attempt("slurm", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"cores": "4"}, "dask config hpcgpu: cores must be a whole number, not '4': write it without quotes"),
        ({"slurm": {"cores": [4]}}, "dask config hpcgpu.slurm: cores must be a whole number, not [4], such as 4"),
        ({"slurm": {"queue": True}}, "dask config hpcgpu.slurm: queue must be a string, not True: write it in quotes"),
        ({"slurm": {"walltime": 60}}, "dask config hpcgpu.slurm: walltime=60 has no unit: write '02:00:00'"),
        (
            {"slurm": ["queue"]},
            "dask config hpcgpu.slurm must hold options and their values, such as `cores: 4`, not ['queue']",
        ),
        ({"sge": {"queue": "gpu"}}, "unknown section 'sge': the sections are local, pbs, slurm and scheduler"),
        ({3: 4}, "3 is not the name of an option"),
    ],
)
def test_what_is_wrong_in_the_configuration_is_named_with_its_section(config: dict[Any, Any], message: str) -> None:
    with dask.config.set({"hpcgpu": config}), pytest.raises(OptionError) as caught:
        resolve("slurm", {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cores: '4'", "dask config hpcgpu in {file}: cores must be a whole number, not '4'"),
        (
            "slurm: {gpu-per-node: 4}",
            "dask config hpcgpu.slurm in {file}: unknown option 'gpu_per_node': did you mean 'gpus_per_node'?",
        ),
        ("slurm: {partition: true}", "dask config hpcgpu.slurm in {file}: queue must be a string, not True"),
        ("slurm: [queue]", "dask config hpcgpu.slurm in {file} must hold options and their values"),
        ("scheduler: {cores: x}", "dask config hpcgpu.scheduler in {file}: cores must be a whole number, not 'x'"),
        (
            "slurm: {scheduler: {corse: 1}}",
            "dask config hpcgpu.slurm.scheduler in {file}: unknown option 'corse': did you mean 'cores'?",
        ),
        ("sge: {queue: gpu}", "dask config hpcgpu in {file}: unknown section 'sge'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, mine, other = tmp_path / "site", tmp_path / "mine", tmp_path / "mine" / "distributed.yaml"
    for path, text in ((site / "hpcgpu.yaml", "cores: 1"), (mine / "hpcgpu.yaml", content)):
        path.parent.mkdir()
        path.write_text(f"hpcgpu:\n  {text}\n")
    other.write_text("distributed: {version: 2}\n")
    paths = [str(site), str(mine)]
    monkeypatch.setattr(dask.config, "paths", paths)
    with (
        dask.config.set({"hpcgpu": dask.config.collect(paths=paths, env={}).get("hpcgpu")}),
        pytest.raises(OptionError) as caught,
    ):
        resolve("slurm", {})
    assert message.format(file=mine / "hpcgpu.yaml") in str(caught.value)


def test_what_a_variable_of_the_environment_or_the_program_sets_is_not_put_on_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpcgpu.yaml").write_text("hpcgpu: {cores: x}\n")
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path)])
    with (
        dask.config.set({"hpcgpu.cores": "y"}),
        pytest.raises(OptionError, match=r"^dask config hpcgpu: cores must be"),
    ):
        resolve("slurm", {})
    monkeypatch.setenv("DASK_HPCGPU__CORES", "y")
    with (
        dask.config.set({"hpcgpu.cores": "y"}),
        pytest.raises(OptionError, match=r"^dask config hpcgpu in the environment: cores must be"),
    ):
        resolve("slurm", {})


def test_a_positional_argument_is_refused_by_what_to_write() -> None:
    with pytest.raises(
        OptionError, match=r"SlurmGPUCluster takes options by their names: write SlurmGPUCluster\(name='demo', ...\)"
    ):
        SlurmGPUCluster("demo")


@pytest.mark.parametrize(
    ("call", "args", "named", "message"),
    [
        ("adapt", (0, 4), {}, "adapt takes its arguments by their names: write adapt(minimum=0, maximum=4)"),
        ("adapt", (0,), {"maximum_jobs": 4}, "write adapt(minimum=0)"),
        ("adapt", (0,), {"minimum": 4}, "write adapt(minimum=...)"),
        ("adapt", (dict,), {"maximum": 4}, "write adapt(minimum=...)"),
        (
            "adapt",
            (),
            {"maximum": 4, "interval": "10s"},
            "there is no argument 'interval': leave it out, because hpcgpu decides every second",
        ),
        ("adapt", (), {"maximum": 4, "wait_count": 3}, "there is no argument 'wait_count': write idle_timeout"),
        ("adapt", (), {"maximum": 4, "Adaptive": dict}, "there is no argument 'Adaptive': "),
        ("adapt", (), {"maximum_job": 4}, "there is no argument 'maximum_job': did you mean 'maximum_jobs'?"),
        ("adapt", (), {"zzz": 4}, "there is no argument 'zzz': the arguments are minimum, maximum, minimum_jobs, "),
        ("scale", (1, "2GB", 3, 4), {}, "write scale(n=1, memory='2GB', cores=3, jobs=4)"),
        ("scale", (1,), {"n": 2}, "multiple values for argument 'n'"),
        ("scale", (), {"n_workers": 2}, "there is no argument 'n_workers': write scale(n)"),
        ("scale", (), {"job": 2}, "there is no argument 'job': did you mean 'jobs'?"),
    ],
)
def test_arguments_of_scale_and_adapt_that_do_not_exist_are_refused_by_what_to_write(
    call: str, args: tuple[Any, ...], named: dict[str, Any], message: str
) -> None:
    cluster = object.__new__(SlurmGPUCluster)  # refused before anything of the cluster is read
    with pytest.raises(OptionError) as caught:
        getattr(cluster, call)(*args, **named)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["worker_command", "config_name", "resource_spec", "job_script_epilogue", "job_cls", "gres", "port"]
)
def test_names_of_other_tools_are_refused_with_what_replaces_them(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        resolve("slurm", {name: "x"})
    assert str(caught.value).startswith(f"unknown option {name!r}: ") and "did you mean" not in str(caught.value)


def test_every_name_that_the_page_on_dask_jobqueue_lists_is_known_or_refused_with_advice() -> None:
    table = (DOCS / "jobqueue.rst").read_text().split("A name of the left column")[0]
    left = [line[:46] for line in table.splitlines() if line.startswith("`")]
    listed = {name for cell in left for name in re.findall(r"`(\w+)", cell) if name.islower()} - {"cluster", "jobqueue"}
    assert {"processes", "worker_command", "config_name", "shebang"} <= listed
    for name in listed - {"queue", "partition"}:
        try:
            resolve("slurm", {name: None} if name in {*names(ClusterOptions), *names(WorkerOptions)} else {name: "x"})
        except OptionError as error:
            assert "did you mean" not in str(error) and "the options are" not in str(error), name


@pytest.mark.parametrize("argument", ["--preload-nanny x", "--dashboard-address :0", "-x y"])
def test_an_option_of_the_worker_and_its_value_in_one_string_are_refused(argument: str) -> None:
    option, value = argument.split()
    with pytest.raises(
        OptionError, match=re.escape(f"holds an option and its value in one: write {option!r}, {value!r}")
    ):
        resolve("slurm", {"worker_extra_args": [argument]})
    resolve("slurm", {"worker_extra_args": [option, value, f"{option}={value} and more", "a b"]})


PATHS = ["cluster_directory", "log_directory", "template_directory", "job_script_prologue", "python"]


@pytest.mark.parametrize("name", PATHS)
def test_variables_in_paths_are_expanded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    there = tmp_path / "there"
    there.touch() if name == "job_script_prologue" else there.mkdir()
    for written in ("$SCRATCH/there", "${SCRATCH}/there", "~/there", Path("$SCRATCH/there")):
        options = resolve("slurm", {name: written})
        assert str(getattr(options.cluster, name, None) or getattr(options.worker, name)) == str(there)
    with dask.config.set({f"hpcgpu.slurm.{name}": "$SCRATCH/there"}):
        assert str(
            getattr(resolve("slurm", {}).cluster, name, None) or getattr(resolve("slurm", {}).worker, name)
        ) == str(there)
    monkeypatch.delenv("SCRATCH")
    for unset in ("$SCRATCH/there", "${SCRATCH}/there"):
        with pytest.raises(OptionError, match=rf"{name}='{re.escape(unset)}': the variable SCRATCH is not set"):
            resolve("slurm", {name: unset})
    monkeypatch.setenv("SCRATCH", "")
    with pytest.raises(OptionError, match="the variable SCRATCH is not set"):
        resolve("slurm", {name: "$SCRATCH/there"})
    with pytest.raises(OptionError, match="there is no home directory for ~nobody-of-that-name"):
        resolve("slurm", {name: "~nobody-of-that-name/there"})
    with pytest.raises(OptionError, match=r"\$\$ is a dollar sign"):
        resolve("slurm", {name: "a$(touch x)"})
    there.with_name("a$b").touch() if name == "job_script_prologue" else there.with_name("a$b").mkdir()
    options = resolve("slurm", {name: f"{tmp_path}/a$$b"})
    assert str(getattr(options.cluster, name, None) or getattr(options.worker, name)) == f"{tmp_path}/a$b"
    monkeypatch.setenv("SCRATCH", "/a\n#SBATCH --wrap=x")
    with pytest.raises(OptionError, match="holds the control character"):
        resolve("slurm", {name: "$SCRATCH/there"})


def test_variables_are_expanded_wherever_clusters_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "clusters" / "demo").mkdir(parents=True)
    (tmp_path / "clusters" / "demo" / "cluster.json").write_text(f'{{"format": {FORMAT}}}')
    with dask.config.set({"hpcgpu.cluster-directory": "$SCRATCH/clusters"}):
        assert cluster_directories() == [tmp_path / "clusters"]
        assert locate("demo").path == locate("$SCRATCH/clusters/demo").path == tmp_path / "clusters" / "demo"
    done = CliRunner().invoke(main, ["config", "--system", "slurm", "--cluster-directory", "$SCRATCH/own"])
    assert f"{tmp_path}/own" in done.output or done.exit_code == 2, done.output


def test_a_directory_of_the_node_is_expanded_in_the_job() -> None:
    assert resolve("slurm", {"local_directory": "$SLURM_TMPDIR/dask"}).worker.local_directory == "$SLURM_TMPDIR/dask"
    assert expanded("$SLURM_TMPDIR/dask", {"SLURM_TMPDIR": "/local/5"}) == "/local/5/dask"
    assert expanded("~/dask", {}) == str(Path.home() / "dask")
    with pytest.raises(
        LaunchError, match=r"local_directory='\$SLURM_TMPDIR/dask': the variable SLURM_TMPDIR is not set"
    ):
        expanded("$SLURM_TMPDIR/dask", {})
    with pytest.raises(OptionError, match=r"local_directory=.*\$\$ is a dollar sign"):
        resolve("slurm", {"local_directory": "/tmp/$(id)"})


def test_groups_of_workers_refuse_values_of_a_wrong_type_too() -> None:
    base = resolve("slurm", {})
    with pytest.raises(OptionError, match="worker group 'big': cores must be a whole number, not '4'"):
        resolve_group("big", {"cores": "4"}, base)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["render", "slurm", "-o", "{tmp}/demo", "--log-directory", "/proc/nothing"],
            "log_directory='/proc/nothing' cannot be made: No such file or directory",
        ),
        (["start", "demo", "--system", "local", "--config", "{tmp}/binary.yaml"], "binary.yaml is not YAML"),
        (
            ["start", "demo", "--system", "local", "--config", "{tmp}/wrong.yaml"],
            "queue must be a string, not True: write it in quotes",
        ),
        (
            ["start", "demo", "--system", "local", "--cluster-directory", "$NOWHERE/x"],
            "the variable NOWHERE is not set",
        ),
        (["start", "demo", "--system", "local", "--profile", "9" * 400], "is not the name of a profile"),
        (["config", "--system", "slurm", "--cores", "0"], "cores must be 1 or more"),
        (["status", "$NOWHERE/x"], "the variable NOWHERE is not set"),
        (["status", "~nobody-of-that-name/x"], "there is no home directory for ~nobody-of-that-name"),
    ],
)
def test_a_command_with_bad_input_ends_in_a_sentence(arguments: list[str], message: str, home: Path) -> None:
    (home / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (home / "wrong.yaml").write_text("queue: true\n")
    done = CliRunner().invoke(main, [argument.replace("{tmp}", str(home)) for argument in arguments])
    assert isinstance(done.exception, SystemExit) and done.exit_code in (1, 2), done.exception
    assert message in done.output
