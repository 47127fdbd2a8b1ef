"""What the journal records of jobs, when lines of it are damaged, late, or of another cluster of the same name."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.batch.base import JobState
from hpcgpu.batch.reasons import cancel_of_ours
from hpcgpu.errors import ClusterError
from hpcgpu.existing_clusters.lookup import find
from hpcgpu.posix import json_records
from hpcgpu.store import create_directory
from hpcgpu.store.directory import ClusterDirectory
from hpcgpu.store.managers import ManagerRecord


def made(path: Path) -> ClusterDirectory:
    return create_directory.claim(path, lambda earlier: [], system="local")


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return made(tmp_path / "demo")


def test_a_damaged_line_of_an_intent_does_not_lose_the_job(directory: ClusterDirectory) -> None:
    directory.intend("demo-scheduler", "scheduler")
    directory.intend("demo-0", "worker")
    directory.submitted("demo-scheduler", "4711")
    directory.submitted("demo-0", "4712")
    journal = directory.path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"event": "intent"', b'"event": "in\xff\xffnt"'))
    assert [(job.name, job.kind, job.job_id) for job in directory.submits()] == [
        ("demo-scheduler", "scheduler", "4711"),
        ("demo-0", "worker", "4712"),
    ]


def test_a_line_that_was_cut_short_damages_no_line_after_it(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    with (directory.path / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"time": 1.0, "event": "subm')  # the disk was full
    directory.submitted("demo-0", "7")
    assert [(job.name, job.job_id) for job in directory.submits()] == [("demo-0", "7")]
    assert len(directory.journal_damage()) == 1


def test_a_line_that_is_read_before_it_is_complete_is_read_again(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    path = directory.path / "journal.jsonl"
    whole = path.read_bytes() + b'{"event": "submitted", "name": "demo-0", "id": "17"}\n'
    for end in range(path.stat().st_size, len(whole)):
        path.write_bytes(whole[:end])
        [submit] = directory.submits()
        assert submit.job_id == ("17" if end >= len(whole) - 1 else None)
    path.write_bytes(whole)
    assert [submit.job_id for submit in directory.submits()] == ["17"] and not directory.journal_damage()


def test_the_journal_of_a_later_cluster_of_the_name_is_read_anew(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    path = directory.path / "journal.jsonl"
    earlier = path.read_bytes()
    assert [submit.name for submit in directory.submits()] == ["demo-0"]
    path.write_bytes(earlier.replace(b"demo-0", b"demo-7"))
    assert [submit.name for submit in directory.submits()] == ["demo-7"], "of the same size"
    path.write_bytes(b"\n" + earlier[:-9] + b"\n")
    [damage] = directory.journal_damage()
    assert damage.startswith("line 2 is damaged")
    directory.intend("demo-8", "worker")
    assert [submit.name for submit in directory.submits()] == ["demo-8"] and directory.journal_damage() == [damage]


def test_each_line_is_parsed_once_however_often_the_manager_reads_the_journal(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse, parsed = json_records.parse, list[bytes]()

    def counted(content: bytes, *arguments: Any) -> Any:
        parsed.append(content)
        return parse(content, *arguments)

    monkeypatch.setattr(json_records, "parse", counted)
    for number in range(100):
        directory.intend(f"demo-{number}", "worker")
        assert not directory.closing and len(directory.submits()) == number + 1
    assert len(parsed) == len(set(parsed)) == 100


def test_what_an_earlier_cluster_of_the_name_writes_late_does_not_hide_a_job(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    directory.refused("demo-0")  # the other's
    directory.submitted("demo-0", "99")
    directory.ended({"demo-0": "7"})  # the other's
    [job] = directory.submits()
    assert (job.job_id, job.refused, job.ended) == ("99", False, False)
    directory.ended({"demo-0": "99"})
    assert directory.submits()[0].ended


@pytest.mark.parametrize("name", ["fsync", "open", "rename"])
def test_a_full_disk_does_not_depose_the_manager_that_is_there(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory.take_over("the first")

    def full(*arguments: object, **keywords: object) -> object:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real: Callable[..., object] = getattr(os, name)
    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left"):
        directory.take_over("the second")
    monkeypatch.setattr(os, name, real)
    manager = directory.manager()
    assert manager is not None and (manager.number, manager.program) == (1, "the first")
    assert directory.take_over("the third").number == 2
    assert [path for path in directory.path.iterdir() if path.name.startswith(".")] == []


def test_two_programs_that_take_over_at_once_get_different_numbers(directory: ClusterDirectory) -> None:
    faster: list[int] = []

    class Slower(ClusterDirectory):
        """Another program takes over after it has looked up the present manager."""

        def manager(self) -> ManagerRecord | None:
            found = super().manager()
            if not faster:
                faster.append(directory.take_over("the faster one").number)
            return found

    assert (Slower(directory.path).take_over("the slower one").number, faster) == (2, [1])
    manager = directory.manager()
    assert manager is not None and manager.program == "the slower one"


def test_a_program_that_follows_one_manager_does_not_depose_another(directory: ClusterDirectory) -> None:
    assert directory.take_over("the first", after=0).number == 1
    with pytest.raises(ClusterError, match="the first manages cluster demo already"):
        directory.take_over("the second", after=0)
    assert directory.take_over("the second", after=1).number == 2


def test_a_manager_that_leaves_late_does_not_end_the_one_that_took_over(directory: ClusterDirectory) -> None:
    for number in range(1, 12):
        assert directory.take_over(f"program {number}").number == number
    directory.leave(10)
    manager = directory.manager()
    assert manager is not None and (manager.program, manager.lives) == ("program 11", True)
    directory.leave(11)
    manager = directory.manager()
    assert manager is not None and manager.lives is False


def test_a_cluster_that_was_found_to_have_ended_counts_as_closed_from_then_on(directory: ClusterDirectory) -> None:
    """`hpcgpu list` writes only this line: nobody has cancelled its jobs."""
    assert not directory.closing and directory.ended_at() is None
    directory.close()
    assert directory.closing and directory.ended_at() == directory.times()[-1]


def test_a_journal_that_cannot_be_read_costs_its_own_cluster_only(tmp_path: Path, directory: ClusterDirectory) -> None:
    made(tmp_path / "other")
    (directory.path / "journal.jsonl").mkdir()  # as a stale handle of NFS: it is there, and cannot be read
    found = {one.directory.path.name: one for one in find([tmp_path])}
    assert set(found) == {"demo", "other"}
    assert str(directory.path / "journal.jsonl") in found["demo"].problem and not found["other"].problem


def test_the_ends_of_a_thousand_jobs_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = create_directory.claim(tmp_path / "demo", lambda earlier: [], system="slurm")
    for number in range(3):
        directory.intend(f"demo-{number}", "worker")
        directory.submitted(f"demo-{number}", str(number))
    written: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(descriptor) or fsync(descriptor))
    directory.ended({f"demo-{number}": str(number) for number in range(1000)})
    assert len(written) == 1
    assert [submit.ended for submit in directory.submits()] == [True] * 3


def test_a_job_is_not_submitted_when_a_full_disk_cuts_the_line_of_its_intent_short(directory: ClusterDirectory) -> None:
    directory.intend("demo-0", "worker")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (directory.journal_size + 10, hard))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            directory.intend("demo-1", "worker")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    directory.intend("demo-2", "worker")
    assert [job.name for job in directory.submits()] == ["demo-0", "demo-2"]


def test_a_job_that_ended_while_its_cluster_closed_was_ended_by_the_close(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue may report it as failed: it had its signal when the close began, not when the last job was gone."""
    now = 1e9
    monkeypatch.setattr("hpcgpu.store.journal.time", SimpleNamespace(time=lambda: now))
    directory.begin_close()
    now += 30
    directory.close()
    assert cancel_of_ours(JobState.FAILED, decided=False, ended=1e9 + 20, closed=directory.ended_at())
    assert not cancel_of_ours(JobState.FAILED, decided=False, ended=1e9 - 20, closed=directory.ended_at())
    assert not cancel_of_ours(JobState.FAILED, decided=False, closed=directory.ended_at()), "nobody knows when"
