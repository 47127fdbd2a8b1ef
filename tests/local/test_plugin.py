"""A distribution of somebody else adds a batch system: everything serves it without a change in hpcgpu."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcgpu.batch.local.queue import LocalQueue

PLUGIN = Path(__file__).parents[1] / "plugin"
#: The page that shows how a plugin is written.
PAGE = Path(__file__).parents[2] / "docs" / "batch_systems.rst"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
#: Three small jobs without GPUs.
SMALL = (
    "--gpus-per-node",
    "0",
    "--cores",
    "1",
    "--scheduler",
    "gpus-per-node=0",
    "--protocol",
    "tcp",
    "--poll-interval",
    "0.5",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin of somebody who follows the page: the files that it shows whole, and the commands of Abacus."""
    folder = tmp_path_factory.mktemp("written")
    whole = re.findall(r"\.\. literalinclude:: \.\./tests/plugin/(\S+)\n(?:   :language: .*\n)?\n", PAGE.read_text())
    for name in [*whole, "hpcgpu_abacus/commands.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text((PLUGIN / name).read_text())
    return folder


@pytest.fixture(scope="module")
def environment(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment, which sees what this one has, with that plugin installed; no network is needed."""
    folder = tmp_path_factory.mktemp("plugin") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [own] = folder.glob("lib/python*/site-packages")
    (own / "parent.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    )
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", "--no-index", str(written)], check=True)
    return folder


@pytest.fixture
def run(environment: Path, home: Path) -> Run:
    """Run a program of the fresh environment."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(home)}
        program = [str(environment / "bin" / "python"), *words]
        return subprocess.run(program, capture_output=True, text=True, env=env, cwd=home, timeout=300)

    return call


@pytest.fixture
def cli(run: Run) -> Run:
    """Run the command `hpcgpu` there."""
    return lambda *words: run("-m", "hpcgpu", *words)


@pytest.fixture
def stopped(queue: LocalQueue, cli: Run) -> Iterator[None]:
    yield
    cli("stop", "demo")


def test_the_command_line_starts_lists_shows_and_stops_a_cluster(queue: LocalQueue, stopped: None, cli: Run) -> None:
    started = cli("start", "demo", "--system", "abacus", "--jobs", "1", "--tier", "brass", *SMALL)
    assert started.returncode == 0, started.stderr
    [found] = json.loads(cli("list", "--json").stdout)
    assert (found["name"], found["system"]) == ("demo", "abacus")
    assert "demo on abacus" in cli("status", "demo").stdout
    assert "Scheduler at" in cli("logs", "demo").stdout
    done = cli("stop", "demo")
    assert done.returncode == 0, done.stderr
    assert json.loads(cli("list", "--json").stdout) == []


def test_a_program_uses_its_cluster(queue: LocalQueue, run: Run, home: Path) -> None:
    program = home / "program.py"
    program.write_text(
        "from hpcgpu_abacus.cluster import AbacusGPUCluster\n"
        "if __name__ == '__main__':\n"
        "    with AbacusGPUCluster(\n"
        "        jobs=1, gpus_per_node=0, cores=1, tier='brass', protocol='tcp', poll_interval=0.5, quiet=True\n"
        "    ) as cluster:\n"
        "        cluster.wait_for_workers(timeout=200)\n"
        "        with cluster.get_client() as client:\n"
        "            print(client.submit(sum, [1, 2, 3]).result())\n"
        "        print('#AB -tier brass' in cluster.job_script(), type(cluster).system)\n"
    )
    done = run(str(program))
    assert done.stdout.split() == ["6", "True", "abacus"], done.stderr


def test_the_plugin_s_words_reach_the_user(queue: LocalQueue, cli: Run) -> None:
    done = cli(
        "start", "demo", "--system", "abacus", "--jobs", "1", "--gpus-per-node", "1", "--scheduler", "gpus-per-node=5"
    )
    assert done.returncode == 2 and "the scheduler uses one GPU" in done.stderr
    done = cli("start", "demo", "--system", "abacus", "--nodes-per-job", "2", *SMALL)
    assert done.returncode == 2 and "an Abacus has one frame, so write 1" in done.stderr
    done = cli("start", "demo", "--system", "abacus", "--tier", "gold", *SMALL)
    assert done.returncode == 2 and "tier" in done.stderr and "brass" in done.stderr


def test_its_options_are_on_its_own_command_line_alone(cli: Run) -> None:
    assert "--tier" in cli("start", "--system", "abacus", "--help").stdout
    assert "--tier" not in cli("start", "--system", "slurm", "--help").stdout
    done = cli("start", "demo", "--system", "slurm", "--tier", "brass")
    assert done.returncode == 2 and "Abacus" in done.stderr


def test_its_options_are_written_for_type_checkers(run: Run, home: Path) -> None:
    done = run("-m", "hpcgpu.configuration.signatures", "abacus")
    assert done.returncode == 0, done.stderr
    (home / "typed.py").write_text(done.stdout)
    done = run("-c", "import typed; print(*typed.AbacusArguments.__annotations__)")
    assert {"tier", "jobs", "walltime"} < set(done.stdout.split()) and "qos" not in done.stdout.split(), done.stderr


def test_the_class_with_types_on_the_page_is_right(written: Path, run: Run, home: Path) -> None:
    package = home / "hpcgpu_abacus"
    shutil.copytree(written / "hpcgpu_abacus", package)
    [block] = re.findall(r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)", PAGE.read_text())
    (package / "cluster.py").write_text(textwrap.dedent(block))
    (package / "typed.py").write_text(run("-m", "hpcgpu.configuration.signatures", "abacus").stdout)
    done = run(
        "-c",
        "import importlib, typing\n"
        "from hpcgpu_abacus import cluster\n"
        "typing.TYPE_CHECKING = True  # as a type checker reads it\n"
        "importlib.reload(cluster)\n"
        "hints = typing.get_type_hints(cluster.AbacusGPUCluster.__init__)\n"
        "print(hints['options'], *typing.get_args(hints['scheduler'])[0].__annotations__)",
    )
    assert "AbacusArguments" in done.stdout and "tier" in done.stdout.split(), done.stderr


def test_render_writes_scripts_that_stand_alone(queue: LocalQueue, environment: Path, cli: Run, home: Path) -> None:
    done = cli("render", "abacus", "--tier", "wood", "--walltime", "90m", *SMALL[:-2], "-o", str(home / "alone"))
    assert done.returncode == 0, done.stderr
    script = (home / "alone" / "worker.ab").read_text()
    assert "#AB -minutes 90\n" in script and "#AB -tier wood\n" in script
    assert "AbacusGPUCluster.from_name" in (home / "alone" / "README").read_text()
    env = {**os.environ, "PATH": f"{environment / 'bin'}:/usr/bin:/bin"}
    launched = subprocess.run([home / "alone" / "launch.sh", "1"], capture_output=True, text=True, env=env, timeout=250)
    stopped = subprocess.run([home / "alone" / "stop.sh"], capture_output=True, text=True, env=env, timeout=250)
    assert launched.returncode == 0 and "worker job 2" in launched.stdout, launched.stderr
    assert stopped.returncode == 0 and "Cancelling" in stopped.stdout, stopped.stderr
    done = cli("render", "abacus", "--single-job", "-o", str(home / "single"), "--", "true")
    assert (
        done.returncode == 2
        and "Abacus has no script that runs scheduler, workers and a program in one job" in done.stderr
    )


def test_a_job_whose_id_cannot_be_read_is_not_lost(
    queue: LocalQueue, environment: Path, cli: Run, home: Path, tmp_path: Path
) -> None:
    done = cli("render", "abacus", *SMALL[:-2], "-o", str(home / "alone"))
    assert done.returncode == 0, done.stderr
    (tmp_path / "ab-submit").write_text(f"#!/bin/sh\n'{environment}/bin/ab-submit' \"$@\" | sed 's/counted/noted/'\n")
    (tmp_path / "ab-submit").chmod(0o700)
    env = {**os.environ, "PATH": f"{tmp_path}:{environment / 'bin'}:/usr/bin:/bin"}

    def script(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([home / "alone" / words[0], *words[1:]], capture_output=True, text=True, env=env)

    launched = script("launch.sh")
    assert launched.returncode == 1
    assert "scheduler job alone-scheduler may be in the queue, whose answer has no id of a job: job 1 noted" in (
        launched.stderr
    )
    assert script("stop.sh", "--list").stdout == "1\n"
    stopped = script("stop.sh")
    assert stopped.returncode == 0 and "Cancelling 1" in stopped.stdout, stopped.stderr


def test_an_option_that_its_scripts_do_not_use_is_refused(cli: Run, home: Path) -> None:
    done = cli("render", "abacus", "--account", "mine", *SMALL[:-2], "-o", str(home / "alone"))
    assert done.returncode == 2
    assert "account: the job scripts of Abacus do not use this option" in done.stderr
    assert not (home / "alone").exists()


def test_check_and_profiles_ask_it_for_its_queues(queue: LocalQueue, cli: Run) -> None:
    said = cli("check", "--system", "abacus", "--queue", "brass", "--gpus-per-node", "4").stdout
    assert "abacus: Abacus 1.0" in said and "brass: 4 x GPU per node" in said
    drafted = cli("profiles", "new", "site", "--system", "abacus", "-o", "-").stdout
    assert "system: abacus\n" in drafted and "queue: brass" in drafted and "gpus-per-node: 4" in drafted


def test_a_machine_that_has_it_uses_it(queue: LocalQueue, cli: Run) -> None:
    assert "abacus: Abacus 1.0" in cli("check").stdout


def test_its_docs_show_its_options_and_scripts(written: Path, run: Run, home: Path) -> None:
    done = run("-m", "sphinx", "-W", "-q", "-b", "text", str(written / "docs"), str(home / "docs"))
    assert done.returncode == 0, done.stderr
    page = (home / "docs" / "index.txt").read_text()
    assert "Tier of beads: 'wood' or 'brass'." in page and "#AB -tier brass" in page
