"""What the user wants of a cluster: commands, the file, and what the next manager makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcgpu.errors import ClusterError, OptionError
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import (
    Adapt,
    AddGroup,
    Close,
    Command,
    DeleteGroup,
    Detach,
    Resume,
    Scale,
    Sent,
    Wanted,
    apply,
    from_json,
    to_json,
)
from hpcgpu.store import create_directory

LIMITS = Limits(minimum=1, maximum=8, idle_timeout=60.0, gpu_seconds=3600.0, interactive=True)


def after(*commands: Command) -> Wanted:
    wanted = Wanted()
    for command in commands:
        wanted = apply(wanted, command)
    return wanted


def test_each_command_has_a_number_and_leaves_the_other_groups_as_they_were() -> None:
    wanted = after(AddGroup("default", 2), AddGroup("big", 1), Adapt("default", LIMITS, 5.0), Scale("big", 3))
    assert wanted.generation == 4
    assert wanted.groups["default"].generation == 3 and wanted.groups["default"].limits == LIMITS
    assert wanted.sizes == {"big": 3}, "the work decides on the other one"
    assert after(AddGroup("default", 2), Adapt("default", LIMITS, 5.0), Scale("default", 1)).sizes == {"default": 1}
    resumed = apply(wanted, Resume("default"))
    assert resumed.groups["default"].limits == LIMITS and resumed.groups["default"].generation == 5
    assert set(apply(wanted, DeleteGroup("big")).groups) == {"default"}


@pytest.mark.parametrize("command", [Scale("big", 1), Adapt("big", LIMITS, 5.0), Resume("big"), DeleteGroup("big")])
def test_a_command_for_a_group_that_is_not_there_is_refused(command: Command) -> None:
    with pytest.raises(OptionError, match="no worker group named 'big': the groups are default"):
        apply(after(AddGroup("default", 2)), command)


def test_a_group_is_added_once() -> None:
    with pytest.raises(OptionError, match="there is a worker group named 'default' already"):
        after(AddGroup("default", 2), AddGroup("default", 1))


@pytest.mark.parametrize("command", [Scale("default", 1), Resume("default"), DeleteGroup("default"), Detach()])
def test_a_closed_cluster_takes_no_command_but_another_close(command: Command) -> None:
    closed = after(AddGroup("default", 2), Close())
    with pytest.raises(ClusterError, match="was closed, by its program or by `hpcgpu stop`: start a new one"):
        apply(closed, command)
    assert apply(closed, Close()) == closed and closed.closing


def test_a_detached_cluster_stays_detached_whatever_is_wanted_of_its_groups() -> None:
    wanted = after(AddGroup("default", 2), Detach(manager_in_scheduler_job=True), Scale("default", 3), Detach())
    assert (
        wanted.detached
        and wanted.manager_in_scheduler_job
        and wanted.sizes == {"default": 3}
        and wanted.generation == 4
    )
    assert not after(AddGroup("default", 2), Detach()).manager_in_scheduler_job


def test_a_close_by_another_program_is_kept_when_the_manager_replaces_the_wanted_state(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    known = after(AddGroup("default", 2))
    directory.want(known)
    directory.begin_close()  # `hpcgpu stop`
    directory.want(apply(known, Scale("default", 3)))  # the manager has not read the close
    wanted = directory.wanted()
    assert wanted.closing and wanted.sizes == {"default": 3}
    (tmp_path / "demo" / "wanted.json").write_text("{")
    assert directory.wanted().closing, "a damaged file does not hide the close"


def test_no_job_ends_because_the_record_of_a_detach_cannot_be_read(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    assert not directory.detached, "nothing was recorded"
    directory.want(after(AddGroup("default", 2)))
    assert not directory.detached
    directory.want(after(AddGroup("default", 2), Detach()))
    assert directory.detached
    for damaged in ("", "{", '{"detached": 0}'):
        (tmp_path / "demo" / "wanted.json").write_text(damaged)
        assert directory.detached
    (tmp_path / "demo" / "wanted.json").unlink()
    (tmp_path / "demo" / "wanted.json").symlink_to(tmp_path / "elsewhere")
    assert directory.detached


def test_what_is_wanted_is_kept_in_the_cluster_directory(tmp_path: Path) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")
    assert directory.wanted() == Wanted()
    wanted = after(AddGroup("default", 2), AddGroup("big", 1), Adapt("default", LIMITS, 5.0))
    directory.want(wanted)
    assert directory.wanted() == wanted


@pytest.mark.parametrize(
    "command",
    [
        Scale("big", 3),
        Adapt("default", LIMITS, 5.0),
        AddGroup("big", 1, {"cores": 2}, "#!/bin/bash"),
        DeleteGroup("big"),
        Resume("big"),
        Detach(),
        Detach(manager_in_scheduler_job=True),
    ],
)
def test_a_command_arrives_as_it_was_sent(command: Sent) -> None:
    assert from_json(json.loads(json.dumps(to_json(command)))) == command


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"command": "stop", "group": "default"}, "does not know the command {'command': 'stop'"),
        ({}, "does not know the command {}"),
        ({"command": "scale", "group": "default"}, "'jobs' is missing"),
        ({"command": "scale", "group": "default", "jobs": "3"}, "'jobs' is '3'"),
    ],
)
def test_what_is_no_command_is_refused(sent: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(sent)
