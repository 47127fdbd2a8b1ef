"""Batch systems come from entry points; hpcgpu's own are three of them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hpcgpu.batch import system_registry
from hpcgpu.batch.system_registry import load, names, system, systems
from hpcgpu.cli.names import SystemName
from hpcgpu.errors import ClusterWarning, OptionError


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution that brings one batch system: a function of its name, its reference and the code of its
    module.
    """

    def bring(name: str, reference: str, code: str) -> None:
        (tmp_path / f"{reference.partition(':')[0]}.py").write_text(code)
        info = tmp_path / f"brings_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: brings-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{system_registry.GROUP}]\n{name} = {reference}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    def forget() -> None:
        system_registry._others.cache_clear()
        system_registry._loaded.cache_clear()

    yield bring
    forget()


def plugin(name: str) -> str:
    return (
        "from pathlib import Path\nfrom hpcgpu.batch.system_registry import System\n"
        f"system = System(name={name!r}, title='Other', client='x:y', syntax='x:y', cluster_class='x:y', "
        "templates=Path('/x'), suffix='sh')\n"
    )


def test_the_three_systems_of_hpcgpu_are_there_and_each_has_what_it_refers_to() -> None:
    assert {"local", "pbs", "slurm"} <= set(names())
    for name in ("slurm", "pbs", "local"):
        one = system(name)
        assert one.batch().name == name == load(one.cluster_class).system
        assert {path.name for path in one.templates.glob("*.j2")} >= {
            f"worker.{one.suffix}.j2",
            f"scheduler.{one.suffix}.j2",
        }
        assert load(one.worker_options) and load(one.scheduler_options)


def test_systems_come_by_rank_and_the_fallback_is_the_last_of_ours() -> None:
    own = [one.name for one in systems() if one.name in ("slurm", "pbs", "local")]
    assert own == ["slurm", "pbs", "local"]
    assert [one.name for one in systems() if one.fallback] == ["local"]


def test_a_distribution_adds_a_system(brought) -> None:
    brought("other", "of_others:system", plugin("other"))
    assert "other" in names()
    assert system("other").title == "Other"
    assert systems()[0].name == "other", "its rank is that of who installs it for this machine"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown batch system 'lsf': the batch systems are .*local.*pbs.*slurm"):
        system("lsf")


def test_a_name_that_a_package_would_bring_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_registry, "_others", dict)
    with pytest.raises(OptionError, match=r"'gridengine': .*slurm; for gridengine, run: pip install hpcgpu-gridengine"):
        system("gridengine")
    with pytest.raises(click.BadParameter, match=r"'slurm'[.] For htcondor, run: pip install hpcgpu-htcondor"):
        SystemName().convert("htcondor", None, None)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_module", "brings-broken cannot be loaded from broken_module:system: ModuleNotFoundError"),
        ("system = 1", "brings-broken cannot be used"),
        (plugin("another"), "brings-broken cannot be used"),
    ],
)
def test_a_broken_distribution_is_named_and_takes_no_other_system_away(brought, code: str, words: str) -> None:
    sys.modules.pop("broken_module", None)
    brought("broken", "broken_module:system", code)
    with pytest.raises(OptionError, match=words):
        system("broken")
    with pytest.warns(ClusterWarning, match=words):
        assert "slurm" in [one.name for one in systems()]
    sys.modules.pop("broken_module", None)


def test_no_distribution_replaces_a_system_of_hpcgpu(brought) -> None:
    brought("slurm", "impostor:system", plugin("slurm"))
    assert system("slurm").title == "Slurm"


def test_an_installation_without_entry_points_names_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_registry, "_own_entry_points", dict)
    monkeypatch.setattr(system_registry, "_others", dict)
    with pytest.raises(OptionError, match="Install hpcgpu again"):
        system("slurm")
    with pytest.raises(click.BadParameter, match="Install hpcgpu again"):
        SystemName().convert("slurm", None, None)


def test_one_system_is_found_without_reading_what_other_distributions_bring() -> None:
    code = (
        "import importlib.metadata\n"
        "def refuse(**_): raise AssertionError('all distributions were read')\n"
        "importlib.metadata.entry_points = refuse\n"
        "from hpcgpu.batch import batch_system\n"
        "print(batch_system('slurm').name)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "slurm\n"


def test_the_entry_points_that_are_installed_are_those_of_the_checkout() -> None:
    import tomllib

    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"][
        system_registry.GROUP
    ]
    installed = importlib.metadata.distribution("hpcgpu").entry_points
    assert {entry.name: entry.value for entry in installed if entry.group == system_registry.GROUP} == declared
