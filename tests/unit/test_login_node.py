"""Which login node a cluster is on, and which options of a laptop go there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config
import pytest

from hpcgpu.configuration.login_node import configured_host, on_login_node
from hpcgpu.errors import OptionError
from hpcgpu.profiles import site_profiles


@pytest.fixture(autouse=True)
def without_configuration() -> Iterator[None]:
    with dask.config.set({"hpcgpu": {}}):
        yield


def configured(**sections: Any) -> dask.config.set:
    return dask.config.set({"hpcgpu": sections})


def test_without_a_host_a_cluster_is_on_this_machine() -> None:
    assert on_login_node("slurm", None, {"queue": "gpu"}) is None
    with configured(slurm={"host": "login1"}):
        assert on_login_node("slurm", "", {"queue": "gpu"}) is None
        assert on_login_node("pbs", None, {"queue": "gpu"}) is None


def test_the_options_of_a_section_that_names_the_host_go_there() -> None:
    with configured(slurm={"host": "login1", "account": "mine", "scheduler": {"queue": "small"}}):
        given = {"queue": "gpu", "walltime": None, "scheduler": {"cores": 2}}
        assert on_login_node("slurm", None, given) == (
            "login1",
            {"account": "mine", "queue": "gpu", "scheduler": {"queue": "small", "cores": 2}},
        )
        assert on_login_node("slurm", "login2", {"queue": "gpu"}) == ("login2", {"queue": "gpu"})


def test_the_options_of_a_profile_that_names_the_host_go_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_profiles, "user_directory", lambda: tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "system: slurm\nhost: login1\nneeds: [account]\noptions: {gpus-per-node: 4, queue: gpu}\n"
    )
    with pytest.raises(OptionError, match="profile 'mine' needs account"):
        on_login_node("slurm", None, {"profile": "mine"})
    given = {"profile": "mine", "account": "m1", "queue": "debug"}
    expected = {"gpus_per_node": 4, "queue": "debug", "account": "m1"}
    assert on_login_node("slurm", None, given) == ("login1", expected)
    # a profile without a host is looked up on the login node
    (tmp_path / "mine.yaml").write_text("system: slurm\noptions: {queue: gpu}\n")
    assert on_login_node("slurm", "login1", given) == ("login1", given)


def test_commands_use_the_only_host_that_is_configured() -> None:
    assert configured_host() is None
    with configured(slurm={"host": "login1"}):
        assert configured_host() == "login1"
    with configured(host="login1", pbs={"host": "login9"}), pytest.raises(OptionError, match="names several hosts"):
        configured_host()
