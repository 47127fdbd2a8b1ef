"""How job scripts name the archive that their jobs unpack (option `stage`)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgpu.configuration.resolve import resolve, resolve_group
from hpcgpu.errors import OptionError
from hpcgpu.scripts.render import command, render, render_single

PLACE = Path("/home/me/.hpcgpu/clusters/demo")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "my env.tar.gz"
    path.write_bytes(b"packed")
    return path


def options(system: str, archive: Path, **further: Any) -> Any:
    return resolve(system, {"name": "demo", "python": "/opt/python", "gpus_per_node": 4, "stage": archive, **further})


@pytest.mark.parametrize("system", ["slurm", "pbs", "local"])
@pytest.mark.parametrize("kind", ["scheduler", "worker"])
@pytest.mark.parametrize("what", ["", "check"])
def test_scripts_name_the_archive_its_hash_and_the_directory(archive: Path, system: str, kind: str, what: str) -> None:
    text = render(system, kind, options(system, archive, local_directory="$TMPDIR/my disk"), PLACE, command=what)
    unpacks = f"hpcgpu.runtime.stage '{archive}' --sha256 {hashlib.sha256(b'packed').hexdigest()} "
    assert f"{unpacks}--local-directory '$TMPDIR/my disk' --)\n" in text
    assert f'exec "${{staged[@]}}" -P -m hpcgpu.runtime.{"job_check" if what else "launch"} {kind} ' in text


def test_each_node_of_a_job_unpacks_for_itself(archive: Path) -> None:
    slurm = render("slurm", "worker", options("slurm", archive, nodes_per_job=2), PLACE)
    assert 'exec srun --label --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=0 "${staged[@]}" -P' in slurm
    pbs = options("pbs", archive, nodes_per_job=2, pbs_launcher="mpiexec")
    (line,) = (line for line in render("pbs", "worker", pbs, PLACE).splitlines() if line.startswith("exec "))
    assert " mpiexec " in line and ' "${staged[@]}" -P -m hpcgpu.runtime.launch worker' in line
    single = render_single("slurm", options("slurm", archive, nodes_per_job=2), PLACE, ["python", "x.py"])
    assert single.count('"${staged[@]}" -P -m hpcgpu.runtime.') == 3
    assert '--overlap --kill-on-bad-exit=0 "${staged[@]}" -P -m hpcgpu.runtime.launch worker' in single


def test_groups_inherit_it_and_can_have_their_own(archive: Path, tmp_path: Path) -> None:
    base = options("slurm", archive)
    assert resolve_group("big", {}, base).stage == archive
    other = tmp_path / "other.tar"
    assert resolve_group("big", {"stage": other}, base).stage == other


def test_a_job_runs_in_a_container_or_in_a_packed_environment(archive: Path) -> None:
    words = "container and stage are both set, but a job runs in one environment: remove one of the two"
    with pytest.raises(OptionError, match=f"^{words}"):
        options("slurm", archive, container="/shared/image.sif")
    base = options("slurm", archive, scheduler={"container": "/shared/image.sif"})
    assert base.scheduler.stage is None and base.worker.stage == archive
    assert resolve_group("boxed", {"container": "/shared/image.sif"}, base).stage is None
    with pytest.raises(OptionError, match=f"worker group 'both': {words}"):
        resolve_group("both", {"container": "/shared/image.sif", "stage": archive}, base)


def test_tasks_of_an_existing_job_run_the_python_that_runs(archive: Path) -> None:
    assert command("slurm", "worker", options("slurm", archive), PLACE).startswith("/opt/python -P -m")


def test_a_changed_archive_has_another_hash_in_the_next_script(archive: Path) -> None:
    before = render("slurm", "worker", options("slurm", archive), PLACE)
    archive.write_bytes(b"packed anew")
    assert hashlib.sha256(b"packed anew").hexdigest() in render("slurm", "worker", options("slurm", archive), PLACE)
    assert hashlib.sha256(b"packed").hexdigest() in before


def test_what_is_no_archive_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"stage='/x/env.zip' is not an archive: .*\.tar\.zst, \.tar\.gz, \.tar"):
        options("slurm", Path("/x/env.zip"))
    with pytest.raises(OptionError, match=f"stage='{tmp_path}/none.tar' cannot be read: No such file"):
        render("slurm", "worker", options("slurm", tmp_path / "none.tar"), PLACE)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_pass_shellcheck(archive: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    for kind in ("scheduler", "worker"):
        script.write_text(render("slurm", kind, options("slurm", archive, nodes_per_job=2), PLACE))
        subprocess.run(["shellcheck", script], check=True)
