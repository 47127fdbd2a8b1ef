"""Containers as the jobs' environment: golden scripts, quoting, what reaches the inside, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import dask.config
import pytest
from click.testing import CliRunner

from hpcgpu.configuration.resolve import resolve, resolve_group
from hpcgpu.errors import OptionError
from hpcgpu.scripts import bundle
from hpcgpu.scripts.container import HOST_COPY, RUNTIMES, provide, shell_path
from hpcgpu.scripts.render import render
from hpcgpu.store.directory import ClusterDirectory
from tests.helpers import GOLDEN, golden

PLACE = Path("/home/me/.hpcgpu/clusters/demo")
BASE: dict[str, Any] = {"name": "demo", "container": "/shared/rapids.sif"}
TWO_NODES = {"nodes_per_job": 2, "gpus_per_node": 4, "cores": 8, "local_directory": "/local/my dask"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "container-apptainer.sbatch": (
        "slurm",
        "worker",
        {
            "gpus_per_node": 4,
            "job_script_prologue": ["module load apptainer"],
            "env": {"GREETING": 'it\'s "me"'},
            "container_mounts": ["/data", "$SCRATCH/my files:/scratch:ro"],
            "container_args": ["--env", "MODE=it's"],
            "local_directory": "/local/me/dask",
        },
    ),
    "container-apptainer-scheduler.sbatch": ("slurm", "scheduler", {"gpus_per_node": 4}),
    "container-apptainer-two-nodes.sbatch": ("slurm", "worker", TWO_NODES),
    "container-apptainer-two-nodes.pbs": ("pbs", "worker", TWO_NODES),
    "container-apptainer-mpiexec.pbs": ("pbs", "worker", {**TWO_NODES, "pbs_launcher": "mpiexec --ppn 1"}),
    "container-charliecloud.sbatch": ("slurm", "worker", {"container_runtime": "charliecloud"}),
    "container-podman.sbatch": ("slurm", "worker", {"container_runtime": "podman", "env": {"GREETING": "me"}}),
    "container-podman-hpc.sbatch": ("slurm", "worker", {"container_runtime": "podman-hpc"}),
    "container-shifter.sbatch": (
        "slurm",
        "worker",
        {"container_runtime": "shifter", "container": "nvcr.io/nvidia/rapids:26.10", "container_mounts": ["/data:/in"]},
    ),
    "container-pyxis.sbatch": (
        "slurm",
        "worker",
        {"container_runtime": "pyxis", "container": "nvcr.io#nvidia/rapids:26.10", "env": {"GREETING": "me"}},
    ),
    "container-pyxis-two-nodes.sbatch": ("slurm", "worker", {"container_runtime": "pyxis", **TWO_NODES}),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    system, kind, given = CASES[name]
    script = render(system, kind, resolve(system, BASE | given), PLACE)
    golden(name, script.replace(f"/{HOST_COPY}/", "/python3.11/"))  # the minor version of who renders


def test_every_runtime_has_a_golden_script() -> None:
    shown = {given.get("container_runtime", "apptainer") for _, _, given in CASES.values()}
    assert {*RUNTIMES, "pyxis"} - shown == {"singularity"}  # it takes what apptainer takes


def test_podman_hpc_leaves_the_program_its_own_dashes() -> None:
    """Its command line is one of click, which removes the first ``--``."""

    @click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
    @click.argument("podman", nargs=-1, type=click.UNPROCESSED)
    @click.option("--gpu", is_flag=True)
    def run(podman: tuple[str, ...], gpu: bool) -> None:
        print(json.dumps([gpu, podman]))

    text = (GOLDEN / "container-podman-hpc.sbatch").read_text()
    line = text[text.index("exec podman-hpc run ") :].removeprefix("exec podman-hpc run ").replace("\\\n", "")
    gpu, podman = json.loads(CliRunner().invoke(run, shlex.split(line)).output)
    assert gpu is True and podman[0] == "--rm"
    assert podman[podman.index("--") + 1 :][1:4] == ["-m", "dask", "cuda"]


class Node:
    """A directory with programs that stand in for those of a node: each prints what it was called with."""

    def __init__(self, place: Path) -> None:
        self.bin = place / "bin"
        self.directory = place / "my clusters" / "demo"
        self.home = place / "home of me"
        self.work = place / "work here"
        for path in (self.bin, self.directory, self.home, self.work, place / "tmp of job"):
            path.mkdir(parents=True)
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(place / "tmp of job"),
            "SLURM_JOB_ID": "7",
        }

    def add(self, program: str) -> None:
        (self.bin / program).write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        )
        (self.bin / program).chmod(0o755)

    def run(self, **given: Any) -> subprocess.CompletedProcess[str]:
        options = resolve("slurm", {"name": "demo", **given})
        script = self.directory / "worker.sbatch"
        script.write_text(render("slurm", "worker", options, self.directory))
        return subprocess.run(
            ["bash", str(script)], cwd=self.work, env=self.environment, capture_output=True, text=True, check=False
        )

    def called(self, **given: Any) -> tuple[list[str], dict[str, str]]:
        done = self.run(**given)
        assert done.returncode == 0, done.stderr
        words, environment = json.loads(done.stdout)
        return words, environment


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_paths_with_spaces_and_values_with_quotes_reach_the_runtime_as_they_are(node: Node, tmp_path: Path) -> None:
    node.add("apptainer")
    node.environment["SCRATCH"] = str(tmp_path / "scratch $HOME `id`")
    image = tmp_path / "it's an image.sif"
    image.touch()
    words, _ = node.called(
        container=str(image),
        container_mounts=["$SCRATCH:/scratch:ro", '/a "b" `c`'],
        container_args=["--env", "A=$HOME 'x'"],
        local_directory="$TMPDIR/spill here",
        gpus_per_node=2,
    )
    tmp = node.environment["TMPDIR"]
    places = [str(node.home), str(node.work), tmp, str(node.directory), f"{tmp}/spill here"]
    expected = ["exec", "--nv", *(f"--bind={place}:{place}" for place in places)]
    expected += [f"--bind={node.environment['SCRATCH']}:/scratch:ro", '--bind=/a "b" `c`:/a "b" `c`']
    expected += ["--pwd", str(node.work), "--env", "A=$HOME 'x'", str(image), "python3"]
    inside = f"{node.directory}/{HOST_COPY}/hpcgpu/runtime/container_entry.py"
    expected += [inside, "hpcgpu.runtime.launch", "worker", "slurm", str(node.directory)]
    assert words[: len(expected)] == expected
    assert Path(tmp, "spill here").is_dir()


def test_a_place_is_mounted_once_and_the_root_never(node: Node, tmp_path: Path) -> None:
    node.add("podman")
    node.work = node.home
    words, _ = node.called(container="rapids", container_runtime="podman")
    mounts = [word for word in words if word.startswith("--volume=")]
    assert mounts.count(f"--volume={node.home}:{node.home}") == 1
    node.work = Path("/")
    words, _ = node.called(container="rapids", container_runtime="podman")
    assert "--volume=/:/" not in words and f"--workdir={node.directory}" in words


def test_the_python_of_the_node_stays_outside_and_what_the_job_sets_gets_in(node: Node) -> None:
    node.add("apptainer")
    leaks = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_PRELOAD")
    node.environment |= dict.fromkeys(leaks, "") | {"VIRTUAL_ENV": "/host", "CONDA_PREFIX": "/host"}
    _, environment = node.called(container="rapids.sif", env={"PYTHONPATH": "/inside", "UCX_TLS": "tcp"})
    assert not environment.keys() & set(leaks[1:])
    assert environment["PYTHONPATH"] == "/inside" and environment["PYTHONNOUSERSITE"] == "1"
    assert environment["UCX_TLS"] == "tcp" and environment["SLURM_JOB_ID"] == "7"


def test_values_of_variables_are_never_among_the_arguments(node: Node) -> None:
    for runtime in ("apptainer", "charliecloud", "podman", "podman-hpc", "shifter", "pyxis"):
        node.add({"charliecloud": "ch-run", "pyxis": "srun"}.get(runtime, runtime))
        words, environment = node.called(
            container="rapids", container_runtime=runtime, env={"TOKEN": "it is secret"}, gpus_per_node=0
        )
        assert "it is secret" not in " ".join(words) and environment["TOKEN"] == "it is secret"
    assert "--container-env=TOKEN" in words


def test_a_node_without_the_runtime_or_the_image_reports_it(node: Node, tmp_path: Path) -> None:
    done = node.run(container=str(tmp_path / "x.sif"))
    assert done.returncode == 127
    assert "has no apptainer: load its module in job_script_prologue, or set container_runtime" in done.stderr
    node.add("apptainer")
    done = node.run(container=str(tmp_path / "x.sif"))
    assert done.returncode == 1 and f"cannot read the image {tmp_path}/x.sif: it must be on" in done.stderr


def test_one_template_in_the_configuration_adds_a_runtime(node: Node) -> None:
    node.add("enroot")
    template = 'enroot start "${mounts[@]/#/--mount=}"{{ arguments }}{{ " --gpus %s" % gpus if gpus }} "$image"'
    with dask.config.set({"hpcgpu.container-runtimes": {"enroot": template}}):
        words, _ = node.called(container="my image", container_runtime="enroot", container_args=["--rw"])
    assert words[0] == "start" and words[5:9] == ["--rw", "--gpus", "1", "my image"]
    with pytest.raises(OptionError, match=r"container_runtimes\['broken'\]: 'image' is undefined"):
        node.run(container="x", container_runtime="broken", container_runtimes={"broken": "run {{ image }}"})


def test_an_unknown_runtime_is_refused_and_pyxis_is_slurm_s() -> None:
    for system, runtime in (("slurm", "docker"), ("pbs", "pyxis")):
        options = resolve(system, BASE | {"container_runtime": runtime})
        with pytest.raises(OptionError, match=f"container_runtime='{runtime}' is not known on .*: write one of appt"):
            render(system, "worker", options, PLACE)


@pytest.mark.parametrize(
    "python",
    ["apptainer exec image python", "/usr/bin/apptainer exec image python", "srun python", "conda run -n x python"],
)
def test_a_python_of_several_words_is_refused_by_a_sentence_that_names_container(python: str) -> None:
    words = "several words, but must be one program. To run the jobs in a container, set container to the image"
    with pytest.raises(OptionError, match=words):
        resolve("slurm", {"python": python})


def test_an_interpreter_may_be_in_a_directory_with_spaces() -> None:
    assert resolve("slurm", {"python": "/home/me/my env/bin/python"}).worker.python == "/home/me/my env/bin/python"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"container": "a\nb"}, "container='a.nb' holds the control character"),
        ({"container": "--evil"}, "container='--evil' begins with '-'"),
        ({"container": ""}, "container is empty"),
        ({"container_args": ["a\0"]}, r"container_args\[0\]=.* holds the control character"),
        ({"container_mounts": ["/a,/b"]}, r"container_mounts\[0\]='/a,/b' is not a mount: write '/data'"),
        ({"container_mounts": ["/a:/b:ro:x"]}, "is not a mount"),
        ({"container_mounts": ["a:/b"]}, r"container_mounts\[0\]='a' is a relative path"),
        ({"container_mounts": ["/a:/b:$(id)"]}, "is not a mount option: write 'ro' or 'rw'"),
        ({"container_mounts": "/a"}, "container_mounts must be a list of strings"),
        ({"container_runtimes": "x"}, "container_runtimes must be a dict"),
    ],
)
def test_what_cannot_be_given_to_a_runtime_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        resolve("slurm", given)


def test_a_cluster_directory_that_no_runtime_can_mount_is_refused() -> None:
    with pytest.raises(OptionError, match="contains ':', which container runtimes use as a separator"):
        render("slurm", "worker", resolve("slurm", BASE), Path("/home/a:b/demo"))


def test_a_container_does_not_work_with_a_single_job(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="container does not work with a single job"):
        bundle.make_single("slurm", {"container": "x.sif"}, tmp_path / "train", ["true"])
    assert not (tmp_path / "train").exists()


def test_scheduler_and_groups_inherit_the_container_and_take_the_python_of_the_image() -> None:
    options = resolve("slurm", BASE)
    assert options.scheduler is not None
    assert (options.scheduler.container, options.scheduler.python) == ("/shared/rapids.sif", "python3")
    assert resolve_group("more", {}, options).python == options.worker.python == "python3"
    outside = resolve("slurm", {"scheduler": {"container": "small.sif"}})
    assert outside.scheduler is not None
    assert (outside.worker.python, outside.scheduler.python) == (sys.executable, "python3")
    assert resolve_group("more", {"container": "x.sif"}, outside).python == "python3"
    own = resolve("slurm", BASE | {"python": "/opt/env/bin/python"})
    assert own.scheduler is not None and own.scheduler.python == own.worker.python == "/opt/env/bin/python"
    assert resolve_group("more", {"container": "other.sif"}, own).python == "/opt/env/bin/python"


def test_a_python_of_the_configuration_counts_in_a_container_until_the_call_names_one() -> None:
    with dask.config.set({"hpcgpu.python": "/home/me/env/bin/python"}):
        assert resolve("slurm", BASE).worker.python == "/home/me/env/bin/python"
        assert resolve("slurm", BASE | {"python": "python3"}).worker.python == "python3"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/a", "/a"),
        ("/a b", "'/a b'"),
        ("$TMPDIR/x", '"${TMPDIR:?}/x"'),
        ("${A}b$$c", '"${A:?}b\\$c"'),
        ("~/x", '"$HOME""/x"'),
        ("~", '"$HOME"'),
        ('$A/"`\\', '"${A:?}/\\"\\`\\\\"'),
    ],
)
def test_a_path_becomes_one_word_of_bash(path: str, word: str) -> None:
    assert shell_path(path) == word


# hpcgpu in the container: that of the image, or that of the host


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    (tmp_path / "demo").mkdir()
    provide(tmp_path / "demo", resolve("slurm", BASE).worker)
    return tmp_path / "demo" / HOST_COPY


def inside(copy: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of hpcgpu as in a container whose Python has nothing installed but what PYTHONPATH names."""
    return subprocess.run(
        [sys.executable, "-S", str(copy / "hpcgpu" / "runtime" / "container_entry.py"), *words],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_hpcgpu_is_copied_and_only_for_containers(copy: Path, tmp_path: Path) -> None:
    assert sorted(path.name.partition("-")[0] for path in copy.iterdir()) == ["hpcgpu", "hpcgpu"]
    assert (copy / "hpcgpu" / "templates" / "worker.j2").exists() and not [*copy.glob("**/__pycache__")]
    (tmp_path / "other").mkdir()
    provide(tmp_path / "other", resolve("slurm", {}).worker, None)
    assert not [*(tmp_path / "other").iterdir()]


def test_the_copy_is_trusted_whatever_the_umask_of_the_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = bundle.make("slurm", BASE | {"name": "open"}, tmp_path / "open")
    finally:
        os.umask(before)
    assert (made.path / HOST_COPY).stat().st_mode & 0o777 == 0o700
    ClusterDirectory.existing(made.path)


def test_an_image_without_hpcgpu_and_what_it_needs_reports_what_is_missing(copy: Path) -> None:
    done = inside(copy, "hpcgpu.runtime.launch")
    assert done.returncode == 1 and "in the container lacks dask, distributed, click" in done.stderr
    assert "Use an image with hpcgpu (pip install hpcgpu), or another interpreter" in done.stderr


def test_an_image_without_dask_cuda_reports_it_to_a_job_with_gpus(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    for name in ("dask", "distributed", "click", "cryptography", "jinja2", "psutil", "rich", "yaml"):
        (tmp_path / "image" / f"{name}.py").touch()
    image = str(tmp_path / "image")
    done = inside(copy, "hpcgpu.runtime.launch", "worker", "--gpus", "4", PYTHONPATH=image)
    assert done.returncode == 1 and "in the container lacks dask_cuda. Use an image with hpcgpu" in done.stderr
    (copy / "hpcgpu" / "cpus.py").write_text("print('runs')")
    done = inside(copy, "hpcgpu.cpus", "worker", "--gpus", "0", PYTHONPATH=image)
    assert done.stdout == "runs\n", done.stderr


def test_an_image_with_another_python_and_no_hpcgpu_reports_it(copy: Path) -> None:
    other = copy.rename(copy.with_name("python3.99"))
    done = inside(other, "hpcgpu.runtime.launch")
    assert done.returncode == 1 and "has no hpcgpu, and the copy of the host's hpcgpu needs Python 3.99" in done.stderr


def test_hpcgpu_comes_from_the_image_if_it_has_it(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "image" / "hpcgpu").mkdir(parents=True)
    (tmp_path / "image" / "hpcgpu" / "__init__.py").touch()
    (tmp_path / "image" / "hpcgpu" / "where.py").write_text(
        "import os, sys\nprint(__file__, os.environ['HPCGPU_INSTALLED_IN'], sys.flags.safe_path, sys.argv[1:])"
    )
    done = inside(copy, "hpcgpu.where", "a b", PYTHONPATH=str(tmp_path / "image"))
    assert done.stdout == f"{tmp_path}/image/hpcgpu/where.py image True ['a b']\n", done.stderr


def test_hpcgpu_comes_from_the_host_if_the_image_lacks_it(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    for name in ("dask", "distributed", "click", "cryptography", "jinja2", "psutil", "rich", "yaml"):
        (tmp_path / "image" / f"{name}.py").touch()
    (copy / "hpcgpu" / "where.py").write_text(
        "import os, hpcgpu.batch.system_registry as r\n"
        "print(__file__, os.environ['HPCGPU_INSTALLED_IN'], r.names(), r.common_templates())"
    )
    done = inside(copy, "hpcgpu.where", PYTHONPATH=str(tmp_path / "image"))
    systems = "['local', 'pbs', 'slurm']"
    assert done.stdout == f"{copy}/hpcgpu/where.py host {systems} {copy}/hpcgpu/templates\n", done.stderr
