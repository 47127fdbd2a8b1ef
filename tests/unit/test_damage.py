"""A damaged file costs its own cluster, or its own job, and nobody else's."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner

from hpcgpu.batch.base import JobState, JobStatus
from hpcgpu.batch.local.jobs import JobRecord
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.cli import main
from hpcgpu.configuration.resolve import resolve
from hpcgpu.errors import ClusterExists, Damaged, OptionError
from hpcgpu.existing_clusters import close_ended, lookup, query_jobs, snapshot
from hpcgpu.existing_clusters.logs import Reader
from hpcgpu.existing_clusters.lookup import find, locate
from hpcgpu.existing_clusters.stop import stop
from hpcgpu.posix.json_records import parse
from hpcgpu.scaling.policy_data import Limits
from hpcgpu.scaling.wanted_state import Adapt, AddGroup, Detach, Wanted, apply
from hpcgpu.store import certificates_and_keys, create_directory, saved_options
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

#: Every how many bytes a file is cut, or one is changed; 1 for all.
STRIDE = int(os.environ.get("HPCGPU_FUZZ_STRIDE", "97"))
WANTED = apply(apply(apply(Wanted(), AddGroup("default", 1)), Adapt("default", Limits(maximum=2), 5.0)), Detach())
JOBS = {"7": "bad-scheduler", "8": "bad-0", "9": "good-scheduler"}


class Queue:
    """Has the jobs of two clusters."""

    remembers = False

    def __init__(self) -> None:
        self.cancelled: set[str] = set()

    def poll(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        there = set(job_ids) & set(JOBS) - self.cancelled
        return {i: JobStatus(job_id=i, name=JOBS[i], state=JobState.RUNNING) for i in there}

    def ended(self, job_ids: Iterable[str]) -> dict[str, JobStatus]:
        return {}

    def find(self, job_name: str) -> list[str]:
        return [i for i, name in JOBS.items() if name == job_name and i not in self.cancelled]

    def cancel(self, job_ids: Iterable[str], *, only_pending: bool = False) -> None:
        self.cancelled |= set(job_ids)

    def log_name(self, job_name: str, job_id: str) -> str:
        return f"{job_name}-{job_id}.log"


def complete(directory: ClusterDirectory) -> None:
    name = directory.path.name.strip(".").partition("~")[0]
    certificates_and_keys.create(directory, 3600)
    saved_options.write(
        directory,
        resolve("slurm", {"name": name, "gpus_per_node": 2, "env": {"A": "b"}, "cluster_directory": "/tmp/nowhere"}),
    )
    directory.write("worker.sbatch", "")
    directory.take_over("python (process 1 on login1)")
    for job_id, job in JOBS.items():
        if job.startswith(name):
            directory.intend(job, "scheduler" if "scheduler" in job else "worker")
            directory.submitted(job, job_id)
    directory.want(WANTED)
    directory.publish(
        Contact(token=directory.token(), job_id="7", workers="tls://127.0.0.1:1", client="tls://127.0.0.1:1")
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two clusters, in a queue that pretends."""

    async def nobody(*arguments: Any) -> None:
        raise OSError("nobody answers")

    monkeypatch.setattr(snapshot, "answer_of", nobody)
    for name in ("bad", "good"):
        create_directory.claim(tmp_path / name, lambda earlier: [], system="slurm", complete=complete)
    with dask.config.set({"hpcgpu.cluster-directory": str(tmp_path)}):
        yield tmp_path


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue()
    for module in (lookup, close_ended):
        monkeypatch.setattr(module, "batch_system", lambda name: queue)
    monkeypatch.setattr(query_jobs, "_SUBMIT", 0.0)
    return queue


def damages(content: bytes) -> Iterator[bytes]:
    """A file cut short, and with one byte changed: to what is no UTF-8, to another character, to a quote."""
    for position in range(0, len(content), STRIDE):
        yield content[:position]
        for byte in (content[position] ^ 0xFF, content[position] ^ 1, ord('"')):
            yield content[:position] + bytes([byte]) + content[position + 1 :]


FILES = (
    "cluster.json",
    "journal.jsonl",
    "contact.json",
    "options.json",
    "wanted.json",
    "manager-000001.json",
    "dashboard.token",
    "tls/ucx.key",
)


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_costs_its_own_cluster_only(
    root: Path, queue: Queue, file: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    batch: Any = queue
    bad, whole = root / "bad", tmp_path_factory.mktemp("whole") / "bad"
    shutil.copytree(bad, whole)
    for content in damages((bad / file).read_bytes()):
        (bad / file).write_bytes(content)
        queue.cancelled.clear()
        found = {one.directory.path.name: one for one in find([root])}
        assert found.keys() == {"bad", "good"}
        assert [job.job_id for job in found["good"].jobs] == ["9"] and not found["good"].problem
        if file.endswith(".json") and not readable(content):
            assert file in found["bad"].problem, content
        if file != "journal.jsonl":
            assert {job.job_id for job in found["bad"].jobs} == {"7", "8"}
        assert snapshot.snapshot(locate("good").path).jobs
        bad_one = locate("bad", any_format=True)  # what changed may be the number of the format
        snapshot.snapshot(bad_one.path)
        list(Reader(bad_one).new_output())
        try:
            saved_options.read(bad_one)
        except OptionError:
            assert file == "options.json"
        if found["bad"].jobs:
            with pytest.raises(ClusterExists, match=r"a cluster named 'bad' |made cluster 'bad'"):
                create_directory.claim(
                    bad, lambda earlier: [job.job_id for job in query_jobs.live_jobs(earlier, batch)]
                )
        assert stop(bad_one, batch, sleep=lambda seconds: None) == []
        assert queue.cancelled == {job.job_id for job in found["bad"].jobs}
        shutil.rmtree(bad)
        shutil.copytree(whole, bad)


def readable(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content.decode()), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("cluster.json", b'{"name": "ba', "cluster.json is damaged: Unterminated string"),
        ("cluster.json", b"[]", "cluster.json is damaged: it is \\[\\], not an object"),
        (
            "journal.jsonl",
            b'7\n{"event": "intent"}\n\xff\n',
            r"journal.jsonl: line 5 is damaged: .*line 6 is damaged: .*line 7 is damaged: it is not UTF-8",
        ),
        ("manager-abc.json", b"{}", ""),
        ("manager-000007.json", b"{", "manager-000007.json is damaged"),
        (
            "contact.json",
            b'{"token": "", "job_id": "", "workers": 1, "client": "y"}',
            "contact.json is damaged: 'workers' is 1",
        ),
        ("options.json", b"{}", "the options of cluster 'bad' cannot be read"),
    ],
)
def test_what_is_damaged_is_named_and_its_jobs_can_be_stopped(
    root: Path, queue: Queue, file: str, content: bytes, said: str
) -> None:
    with (root / "bad" / file).open("ab" if file == "journal.jsonl" else "wb") as damaged:
        damaged.write(content)
    listed = CliRunner().invoke(main, ["list"])
    assert (
        listed.exit_code == 0
        and re.search(said, listed.output)
        and "9 (running)" in listed.output
        and "8 (running)" in listed.output
    )
    shown = CliRunner().invoke(main, ["status", "bad"])
    assert shown.exit_code == 0 and (file == "options.json" or re.search(said, shown.output)), shown.output
    stopped = CliRunner().invoke(main, ["stop", "bad"])
    assert stopped.output == "bad: 2 jobs cancelled, no job is left\n" and queue.cancelled == {"7", "8"}


def test_without_any_file_that_names_the_batch_system_the_others_are_stopped(root: Path, queue: Queue) -> None:
    (root / "bad" / "cluster.json").unlink()
    (root / "bad" / "worker.sbatch").unlink()
    stopped = CliRunner().invoke(main, ["stop", "--all"])
    assert stopped.exit_code == 1 and "good: 1 job cancelled, no job is left" in stopped.output
    assert re.search(r"bad: .*cluster.json cannot be read: No such file or directory", stopped.output)


def test_a_cluster_whose_journal_cannot_be_read_does_not_keep_the_others_in_the_queue(root: Path, queue: Queue) -> None:
    journal = root / "bad" / "journal.jsonl"
    journal.unlink()
    journal.mkdir()  # as a stale handle of NFS: it is there, and cannot be read
    stopped = CliRunner().invoke(main, ["stop", "bad", "good"])
    assert stopped.exit_code == 1 and "good: 1 job cancelled, no job is left" in stopped.output
    assert re.search(r"bad: .*journal.jsonl", stopped.output) and queue.cancelled == {"9"}


def test_a_name_that_is_not_there_stops_none_of_the_others(root: Path, queue: Queue) -> None:
    stopped = CliRunner().invoke(main, ["stop", "good", "nobody"])
    assert stopped.exit_code == 2 and "there is no cluster named 'nobody'" in stopped.output
    assert not queue.cancelled


# The embedded queue


@pytest.fixture
def embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalQueue:
    """A queue of three jobs that never start, and no processes."""
    monkeypatch.setattr(LocalQueue, "_launch", lambda *arguments: None)
    monkeypatch.setattr("hpcgpu.batch.local.queue.end_all", lambda *arguments, **keywords: [])
    queue = LocalQueue(tmp_path / "queue", gpus=2, slots=2)
    script = tmp_path / "job.sh"
    script.write_text("true\n")
    for name in ("one", "two", "three"):
        queue.submit(script, job_name=name)
    return queue


@pytest.mark.parametrize("file", ["queue.json", "last-id", "jobs/2.json", "jobs/2.env", "jobs/2.sh"])
def test_a_damaged_file_of_the_embedded_queue_costs_its_own_job_only(
    embedded: LocalQueue, tmp_path: Path, file: str
) -> None:
    whole, there = tmp_path / "whole", embedded.directory
    shutil.copytree(there, whole)
    for content in damages((there / file).read_bytes()):
        (there / file).write_bytes(content)
        if file == "queue.json" and readable(content):  # of another machine, or of another size: the message has it
            shutil.copy(whole / file, there / file)
            continue
        assert embedded.submit(tmp_path / "job.sh", job_name="new") not in ("1", "2", "3")
        states = {job_id: job.state for job_id, job in embedded.poll(["1", "2", "3"]).items()}
        assert states["1"] == states["3"] == JobState.PENDING
        embedded.cancel(["1"])
        assert embedded.find("one") == [] and embedded.find("three") == ["3"]
        shutil.rmtree(there)
        shutil.copytree(whole, there)


def test_a_job_of_the_embedded_queue_whose_record_is_damaged_is_ended_and_reports_why(embedded: LocalQueue) -> None:
    (embedded.directory / "jobs" / "2.json").write_text('{"job_id": "2", "name"')
    (embedded.directory / "jobs" / "notes.json").touch()
    (embedded.directory / "jobs" / "notes.env").touch()
    status = embedded.poll(["2"])["2"]
    assert (
        status.state is JobState.FAILED
        and "jobs/2.json is damaged or missing, so the queue ended the job" in status.reason
    )


def test_what_is_read_has_the_shape_that_was_written() -> None:
    job = {"job_id": "1", "name": "a", "output": "o", "cwd": "/", "state": "running", "devices": ["0"], "start": 5}
    assert parse(json.dumps(job).encode(), JobRecord, "it").start == 5.0
    for name, value in {
        "state": "gone",
        "devices": [0],
        "start": True,
        "name": None,
        "supervisor": "1",
        "walltime": 1e300,
    }.items():
        with pytest.raises(Damaged, match="it is damaged: "):
            parse(json.dumps({**job, name: value}).encode(), JobRecord, "it")
    for text in (b"", b"[" * 100_000, b"NaN", b"\xff", b"9" * 10_000, b'{"job_id": "\\ud800"}', b"null"):
        with pytest.raises(Damaged):
            parse(text, JobRecord, "it")


@pytest.mark.parametrize(
    "content",
    ['{"groups": {"default": {"limits": {"maximum": "2"}}}}', '{"groups": {"default": 3}}', '{"groups": 3}', "[]"],
)
def test_a_wanted_state_of_another_shape_is_damage_and_is_not_followed(root: Path, content: str) -> None:
    directory = ClusterDirectory(root / "good")
    assert directory.wanted() == WANTED
    later = json.loads((root / "good" / "wanted.json").read_text()) | {"of_a_later_release": 1}
    (root / "good" / "wanted.json").write_text(json.dumps(later))
    assert directory.wanted() == WANTED and not directory.damage()
    (root / "good" / "wanted.json").write_text(content)
    assert directory.wanted() == Wanted(detached=True), "no job ends by mistake"
    assert any("wanted.json is damaged" in sentence for sentence in directory.damage())


@pytest.mark.parametrize(
    ("content", "shape"),
    [
        ("[1, 2]", tuple[int, int, int]),
        ("[1, 2, 3, 4]", tuple[int, int, int]),
        ('{"a": 1}', dict[str, str]),
        ('{"a": 1}', list[int]),
        ("[1]", dict[str, int]),
        ("true", int),
        ("1.5", int),
        ('"1"', int),
        ("1e15", float),
        ("true", float),
        ('"\\ud800"', str),
        ('"\\udfff"', str),
        ('{"path": 3}', Path),
        ('{"path": "/a", "more": 1}', Path),
        ('"no such state"', JobState),
        ("3", JobRecord | None),
    ],
)
def test_a_value_of_another_shape_is_damage(content: str, shape: Any) -> None:
    with pytest.raises(Damaged, match=r"^it is damaged: "):
        parse(content.encode(), shape, "it")


def test_a_file_may_hold_whole_numbers_for_decimal_ones_and_text_that_is_not_utf_8_where_that_is_allowed() -> None:
    assert parse(b"3", float, "it") == 3.0
    assert parse(b"[1, 2, 3]", tuple[int, ...], "it") == (1, 2, 3)
    assert parse(b'{"path": "/\\udcff"}', Path, "it", surrogates=True) == Path("/\udcff")
    assert parse(b"null", int | None, "it") is None
