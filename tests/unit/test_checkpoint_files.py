"""Checkpoints: what is on the disk, and what becomes of it. The clusters are in this process."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import pytest
from dask import delayed
from distributed import Client, Future, KilledWorker, LocalCluster

import hpcgpu
from hpcgpu import CheckpointError, OptionError
from hpcgpu.checkpoints import pieces, structure, versions
from hpcgpu.errors import ClusterWarning, NotTrusted
from hpcgpu.posix import checked_files

STRANGER = 64321  # a user id that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(processes=False, n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        yield client


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of the checkpoint `demo`."""
    return tmp_path / "saved" / "demo"


def save(client: Client, data: Any, place: Path, **options: Any) -> Any:
    return hpcgpu.checkpoint(client, data, place.parent, name=place.name, quiet=True, **options)


def restored(client: Client, place: Path) -> Any:
    return hpcgpu.restore(client, place.parent, name=place.name, quiet=True)


def numbers(place: Path) -> list[str]:
    """The versions, and what else is in the directory of a checkpoint."""
    return sorted(entry.name for entry in place.iterdir())


# What is wrong with a file, and what is seen then


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def grow(file: Path) -> None:
    with file.open("ab") as content:
        content.write(b"x")


def flip(file: Path) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def give_away(file: Path) -> None:
    os.chown(file, STRANGER, -1)


def make_link(file: Path) -> None:
    file.rename(file.parent.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent.parent / "elsewhere")


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


FAULTS = [
    Path.unlink,
    cut,
    grow,
    flip,
    empty,
    pytest.param(give_away, marks=needs_root),
    make_link,
    make_fifo,
    make_directory,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["checkpoint.json", "structure", "piece"])
def test_a_version_with_a_fault_is_left_out_with_a_warning_and_the_one_before_it_is_restored(
    client: Client, place: Path, which: str, fault: Callable[[Path], None]
) -> None:
    save(client, [client.submit(pow, 2, n) for n in range(3)], place)
    save(client, [client.submit(pow, 3, n) for n in range(3)], place)
    newest = place / "000002"
    version = versions.read(newest)
    files = {
        "checkpoint.json": "checkpoint.json",
        "structure": version.structure.digest,
        "piece": version.pieces[1].digest,
    }
    fault(newest / files[which])
    with pytest.warns(ClusterWarning) as said:
        again = restored(client, place)
    assert client.gather(again) == [1, 2, 4]
    [warning] = said
    assert str(warning.message).startswith(f"{newest} cannot be restored: {newest}/")
    assert str(warning.message).endswith(". Version 000001 was restored instead")
    cut(place / "000001" / "checkpoint.json")
    with pytest.raises(
        CheckpointError, match=rf"^{newest} cannot be restored: .*\. {place}/000001 cannot be restored: "
    ):
        restored(client, place)
    save(client, again, place)
    assert client.gather(restored(client, place)) == [1, 2, 4], "what is newer and whole counts"


@pytest.mark.parametrize("fault", [cut, grow, flip, make_fifo])
def test_a_piece_with_a_fault_is_written_anew_by_the_next_save(
    client: Client, place: Path, fault: Callable[[Path], None]
) -> None:
    one = client.submit(np.arange, 100_000)
    save(client, one, place)
    fault(place / "000001" / versions.read(place / "000001").pieces[0].digest)
    assert save(client, one, place).written > 100_000
    assert restored(client, place).result().sum() == sum(range(100_000))


def test_a_result_that_is_lost_later_is_read_again_as_long_as_any_version_has_it(client: Client, place: Path) -> None:
    """Dask computes a lost result again: it reads the piece."""
    one = client.submit(pow, 5, 2)
    piece, _ = pieces.write(25, place.parent.parent)
    save(client, one, place, keep=1)
    save(client, one, place, keep=1)
    assert numbers(place) == ["000002"]
    assert pieces.read(place / "000001", piece.digest, piece.size) == 25
    save(client, client.submit(pow, 5, 3), place, keep=1)
    with pytest.raises(OSError, match=str(place / "000001" / piece.digest)):
        pieces.read(place / "000001", piece.digest, piece.size)


# Versions


def test_two_versions_are_kept_and_unchanged_pieces_are_not_written_again(client: Client, place: Path) -> None:
    kept = client.submit(np.random.default_rng(0).bytes, 100_000)
    for number in range(1, 5):
        saved = save(client, [kept, client.submit(pow, 2, number)], place)
        assert saved.path == place / f"{number:06d}" and saved.size > 100_000
        assert saved.written > 100_000 if number == 1 else 0 < saved.written < 10_000
        assert client.gather(restored(client, place))[1] == 2**number
    assert numbers(place) == ["000003", "000004"]
    files = {file.stat().st_ino for file in place.glob("*/*") if file.stat().st_size > 100_000}
    assert len(files) == 1, "it takes its room once"
    assert save(client, [kept, client.submit(pow, 2, 4)], place).written < 1000
    save(client, kept, place, keep=1)
    assert numbers(place) == ["000006"]


def test_the_newest_version_is_restored_although_a_network_filesystem_remembers_an_older_listing(
    client: Client, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(client, 1, place)
    remembered = {place: [*place.iterdir()]}
    save(client, 2, place)
    list_now, refresh = Path.iterdir, checked_files.refresh
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(remembered[path]) if path in remembered else list_now(path))
    monkeypatch.setattr(checked_files, "refresh", lambda path: remembered.pop(path, None) and refresh(path))
    assert restored(client, place) == 2


def with_ones(positions: list[int]) -> Any:
    value = np.zeros(10_000_000, np.uint8)
    value[positions] = 1
    return value


def test_a_change_anywhere_in_a_large_result_is_saved(client: Client, place: Path) -> None:
    positions: list[int] = []
    save(client, client.submit(with_ones, positions), place)
    for position in (0, 5_000_000, 7_777_777, 9_999_999):
        positions.append(position)
        changed = client.submit(with_ones, positions)
        assert save(client, changed, place).written > 10_000_000
        assert save(client, [changed, changed], place).written < 10_000
        assert restored(client, place)[0].result().nonzero()[0].tolist() == positions


def test_results_that_differ_in_few_places_are_not_written_again(client: Client, place: Path) -> None:
    data = [client.submit(with_ones, [position]) for position in (5_000_001, 7_777_777)]
    assert save(client, data, place).written > 20_000_000
    assert save(client, data, place).written < 10_000
    shutil.rmtree(place)
    assert save(client, data[::-1], place).written > 20_000_000
    assert save(client, data, place).written < 10_000, "it is another version of the same name"


def test_a_version_of_an_earlier_release_has_no_samples(client: Client, place: Path) -> None:
    save(client, client.submit(pow, 2, 3), place)
    file = place / "000001" / "checkpoint.json"
    content = json.loads(file.read_text())
    for piece in [content["structure"], *content["pieces"]]:
        del piece["sample"]
    file.write_text(json.dumps(content))
    assert restored(client, place).result() == 8
    save(client, client.submit(pow, 2, 3), place)
    assert restored(client, place).result() == 8


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", None, True])
def test_how_many_versions_are_kept_must_be_a_whole_number(client: Client, place: Path, keep: Any) -> None:
    with pytest.raises(OptionError, match="checkpoint: keep must be "):
        save(client, 1, place, keep=keep)
    assert not place.exists()


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "/a", "a b", "ä", "a\n", "-x", "x" * 201, 3, None, b"x"])
def test_a_name_that_is_no_directory_is_refused(client: Client, tmp_path: Path, name: Any) -> None:
    with pytest.raises(OptionError, match=r"checkpoint: name=.* cannot be the name of a directory"):
        hpcgpu.checkpoint(client, 1, tmp_path, name=name)
    with pytest.raises(OptionError, match=r"checkpoint: name=.* cannot be the name of a directory"):
        hpcgpu.restore(client, tmp_path, name=name)
    assert not list(tmp_path.iterdir())


def test_a_path_is_expanded_as_that_of_an_option(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    saved = hpcgpu.checkpoint(client, 1, "$SCRATCH/saved", name="demo", quiet=True)
    assert saved.path == tmp_path / "saved" / "demo" / "000001"
    assert hpcgpu.restore(client, "${SCRATCH}/saved", name="demo", quiet=True) == 1
    with pytest.raises(OptionError, match="NOT_SET"):
        hpcgpu.restore(client, "$NOT_SET/saved", name="demo", quiet=True)


def test_what_is_not_there_is_reported(client: Client, place: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint {place}\n"):
        restored(client, place)
    place.mkdir(parents=True, mode=0o700)
    with pytest.raises(CheckpointError, match=f"^there is no checkpoint {place}\n"):
        restored(client, place)


def test_a_directory_that_is_a_file_is_an_error_in_words(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "demo"):
        with pytest.raises(
            CheckpointError, match=f"^checkpoint {place} was not saved: {place}: (Not a directory|File exists)"
        ):
            save(client, 1, place)
        with pytest.raises(CheckpointError, match=f"^{place} cannot be restored: {place}: Not a directory"):
            restored(client, place)


def test_a_directory_that_others_can_change_is_neither_read_nor_written(client: Client, place: Path) -> None:
    save(client, 1, place)
    place.chmod(0o777)
    for act in (lambda: save(client, 2, place), lambda: restored(client, place)):
        with pytest.raises(NotTrusted, match=f"{place} is not used, because other users can change it"):
            act()
    assert numbers(place) == ["000001"]
    place.chmod(0o700)
    assert restored(client, place) == 1


@needs_root
def test_a_directory_of_another_user_is_refused(client: Client, place: Path) -> None:
    place.mkdir(parents=True)
    os.chown(place, STRANGER, -1)
    with pytest.raises(NotTrusted, match=f"uid {STRANGER}"):
        save(client, 1, place)
    with pytest.raises(NotTrusted, match=f"uid {STRANGER}"):
        restored(client, place)
    assert not list(place.iterdir())


def test_what_a_killed_program_has_written_is_used_and_later_removed(client: Client, place: Path) -> None:
    killed = versions.NewVersion(place)
    pieces.write(np.arange(10_000), killed.folder)
    (killed.folder / ".half").write_bytes(b"x")
    assert save(client, client.submit(np.arange, 10_000), place).written < 10_000
    assert numbers(place) == [killed.folder.name, "000001"], "it may still live"
    hour = time.time() - 3700
    os.utime(killed.folder, (hour, hour))
    save(client, 1, place)
    assert numbers(place) == ["000001", "000002"]


# Data


def test_data_of_all_kinds_are_restored_in_the_same_cluster_while_the_original_lives(
    client: Client, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    array = client.persist(da.random.default_rng(0).random((20, 30), chunks=(7, 11)))
    future = client.submit(np.arange, 5)
    data = {"array": array, "all": [future, (future, 3, {"delayed": delayed(pow)(2, 5)})], "text": "x", 5: None}
    save(client, data, place)
    first, second = restored(client, place), restored(client, place)
    for again in (first, second):
        assert list(again) == list(data) and again["text"] == "x" and again[5] is None
        assert np.array_equal(again["array"].compute(), array.compute())
        assert again["array"].chunks == array.chunks and again["array"].name != array.name
        assert again["all"][0].result().tolist() == again["all"][1][0].result().tolist() == [0, 1, 2, 3, 4]
        assert type(again["all"][1]) is tuple and again["all"][1][1] == 3
        assert again["all"][1][2]["delayed"].compute() == 32
    save(client, first, place)
    assert np.array_equal(restored(client, place)["array"].compute(), array.compute()), "restored data are data"
    assert "run_spec" not in caplog.text


def test_the_next_scheduler_uses_a_key_again_only_if_dask_made_it_and_nothing_else_has_it() -> None:
    """A program may compute something else under a key of its own."""
    submitted = list[Any]()

    def submit(keys: Sequence[Any]) -> list[Any]:
        submitted.extend(keys)
        return list(keys)

    dask_s, own = f"pow-{'0' * 32}", "model"
    structure.put_together([structure._Result(dask_s), structure._Result(own)], submit, known=set())
    structure.put_together(structure._Result(dask_s), submit, known={dask_s})
    assert submitted[0] == dask_s and not {dask_s, own}.intersection(submitted[1:])


def test_a_failed_task_is_named(client: Client, place: Path) -> None:
    save(client, 1, place)
    with pytest.raises(CheckpointError) as said:
        save(client, [client.submit(pow, 2, 2), client.submit(pow, 0, -1)], place)
    assert str(said.value) == (
        f"checkpoint {place} was not saved: ZeroDivisionError: 0.0 cannot be raised to a negative power. "
        f"The last version stays: {place}/000001"
    ).replace("0.0 cannot be raised to a negative power", str(said.value.__cause__))
    assert isinstance(said.value.__cause__, ZeroDivisionError)
    assert numbers(place) == ["000001"]


def killed() -> None:
    raise KilledWorker("write", SimpleNamespace(address="tcp://10.0.0.1:1"), 3)


def test_workers_that_were_killed_are_named_with_what_may_help(client: Client, place: Path) -> None:
    words = "on 4 different workers.*tcp://10.0.0.1:1.* needs twice its memory .* Give the workers more memory"
    with pytest.raises(CheckpointError, match=words):
        save(client, client.submit(killed), place)


def test_a_result_that_cannot_be_pickled_is_named(client: Client, place: Path) -> None:
    with pytest.raises(CheckpointError, match=r"was not saved: TypeError: .*lock.*There is no earlier version"):
        save(client, client.submit(threading.Lock), place)
    assert numbers(place) == []


class Holder(NamedTuple):
    held: Any


@pytest.mark.parametrize("hide", [Holder, lambda future: {future}, lambda future: {future: 1}, lambda f: [Holder([f])]])
def test_a_future_where_it_would_not_be_saved_is_refused(
    client: Client, place: Path, hide: Callable[[Future], Any]
) -> None:
    with pytest.raises(
        CheckpointError, match=r"a future is inside of an object, .* put it into a list, tuple or dictionary"
    ):
        save(client, hide(client.submit(pow, 2, 3)), place)
    assert numbers(place) == []


def test_an_actor_is_refused(client: Client, place: Path) -> None:
    actor = client.submit(Holder, 1, actor=True)
    with pytest.raises(CheckpointError, match="an actor cannot be saved"):
        save(client, actor, place)
    assert numbers(place) == []


def test_a_restore_without_workers_reports_what_it_waits_for(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        LocalCluster(processes=False, n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        save(client, client.submit(pow, 2, 5), place)
        cluster.scale(0)
        while client.nthreads():
            time.sleep(0.01)
        restoring = threads.submit(hpcgpu.restore, client, place.parent, name=place.name)
        said, end = "", time.monotonic() + 60
        while "restoring demo: 0 of 1 piece for 0 s, no worker is connected" not in said:
            time.sleep(0.01)
            said += "".join(capfd.readouterr())
            assert time.monotonic() < end, said
        cluster.scale(1)
        assert restoring.result(timeout=60).result() == 32


def test_futures_of_another_client_are_refused_in_words(client: Client, place: Path) -> None:
    with Client(client.cluster, set_as_default=False) as other:
        for data in (other.submit(pow, 2, 3), other.persist(da.ones(3, chunks=1))):
            with pytest.raises(ValueError, match="another client"):
                save(client, data, place)
    assert not place.exists() or numbers(place) == []


def test_a_future_that_is_cancelled_meanwhile_is_an_error(client: Client, place: Path) -> None:
    with waits_to_be_written(client) as (waits, begun), saves(client, waits, place) as saving:
        assert begun.wait(60)
        waits.cancel(force=True)
        with pytest.raises(CheckpointError, match=r"was not saved: .*Cancelled"):
            saving.result(timeout=60)
    assert numbers(place) == []


def test_a_future_that_was_cancelled_before_is_named(client: Client, place: Path) -> None:
    cancelled = client.submit(pow, 2, 3, key="the-model", pure=False)
    cancelled.cancel(reason="test", msg="its scheduler has ended")
    with pytest.raises(CheckpointError, match=r"(?s)was not saved: .*the-model cancelled .*its scheduler has ended"):
        save(client, [client.submit(abs, -1), cancelled], place)


def test_a_restore_whose_futures_are_lost_with_their_scheduler_is_an_error(place: Path) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor(1) as threads,
        LocalCluster(processes=False, n_workers=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        save(client, client.submit(pow, 2, 5), place)
        cluster.scale(0)
        while client.nthreads() or client.futures:
            time.sleep(0.01)
        restoring = threads.submit(restored, client, place)
        while not client.futures:
            time.sleep(0.01)
        for state in [*client.futures.values()]:
            client.loop.add_callback(state.cancel, reason="test", msg="the scheduler has ended")
        with pytest.raises(CheckpointError, match=r"(?s)cannot be restored: .*cancelled.*the scheduler has ended"):
            restoring.result(timeout=60)


def test_a_directory_that_is_removed_meanwhile_is_an_error_in_words(client: Client, place: Path) -> None:
    with waits_to_be_written(client) as (waits, begun), saves(client, waits, place) as saving:
        assert begun.wait(60)
        shutil.rmtree(place)
        GO.set()
        words = rf"was not saved: {place}: No such file or directory. Do all nodes see it\? There is no earlier"
        with pytest.raises(CheckpointError, match=words):
            saving.result(timeout=60)


def test_two_programs_that_save_the_same_name_at_once_both_succeed(client: Client, place: Path) -> None:
    with (
        waits_to_be_written(client) as (waits, begun),
        saves(client, [waits, client.submit(pow, 2, 2)], place) as first,
        saves(client, [waits, client.submit(pow, 3, 2)], place) as second,
    ):
        assert begun.wait(60)
        GO.set()
        paths = {first.result(timeout=60).path.name, second.result(timeout=60).path.name}
    assert paths == {"000001", "000002"} == {*numbers(place)}
    assert {versions.read(place / name).size for name in paths} and restored(client, place)[0].result() == 7


@needs_root
def test_a_full_disk_is_named_with_what_to_do_and_the_last_version_stays(client: Client, tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        place = disk / "demo"
        save(client, client.submit(pow, 2, 3), place)
        with pytest.raises(CheckpointError) as said:
            save(client, client.map(np.random.default_rng(0).bytes, [600_000] * 5, pure=False), place)
        assert str(said.value) == (
            f"checkpoint {place} was not saved: {place} cannot be written: No space left on device. "
            f"Make room there. The last version stays: {place}/000001"
        )
        assert numbers(place) == ["000001"], "what was written is removed"
        assert restored(client, place).result() == 8
        save(client, client.submit(pow, 2, 4), place)
        assert restored(client, place).result() == 16


def test_a_disk_that_is_full_for_the_last_file_keeps_the_last_version(
    client: Client, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(client, 1, place)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            CheckpointError, match=r"No space left on device. Make room there. The last version stays: "
        ):
            save(client, 2, place)
    assert numbers(place) == ["000001"] and restored(client, place) == 1


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_saved_is_the_users_alone_whatever_the_umask(client: Client, place: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save(client, client.submit(pow, 2, 3), place)
        assert restored(client, place).result() == 8
    finally:
        os.umask(before)
    made = [place.parent, place, *place.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_a_version_names_the_software_that_wrote_it(
    client: Client, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "software", lambda: {"python": "3.9.1", "dask": versions.dask.__version__})
    save(client, client.submit(pow, 2, 3), place)
    monkeypatch.undo()
    flip(place / "000001" / versions.read(place / "000001").pieces[0].digest)
    with pytest.raises(CheckpointError, match=r"is damaged: .* \(it was saved with python 3\.9\.1, not 3\."):
        restored(client, place)


def test_what_a_later_release_adds_is_left_out(client: Client, place: Path) -> None:
    save(client, 1, place)
    file = place / "000001" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"later": 1}))
    assert restored(client, place) == 1


# Data that wait


BEGUN, GO = threading.Event(), threading.Event()


class WaitsToBeWritten:
    """A result that is pickled only after GO."""

    def __reduce__(self) -> Any:
        BEGUN.set()
        assert GO.wait(60)
        return int, (7,)


@contextmanager
def waits_to_be_written(client: Client) -> Iterator[tuple[Future, threading.Event]]:
    BEGUN.clear()
    GO.clear()
    try:
        yield client.submit(WaitsToBeWritten, pure=False), BEGUN
    finally:
        GO.set()


@contextmanager
def saves(client: Client, data: Any, place: Path) -> Iterator[concurrent.futures.Future[Any]]:
    """A save in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        yield threads.submit(save, client, data, place)


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A directory that is a disk of 2 MB."""
    disk = place / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "hpcgpu-full", str(disk)]
    if subprocess.run(command).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Gone:
    """A value of a module that a later program does not have."""

    def __reduce__(self) -> tuple[object, ...]:
        return __import__, ("a_module_of_the_past",)


def test_an_older_version_is_not_restored_in_silence_because_the_software_is_another(
    client: Client, place: Path
) -> None:
    hpcgpu.checkpoint(client, client.submit(pow, 2, 5), place, name="demo", quiet=True)
    hpcgpu.checkpoint(client, client.submit(Gone), place, name="demo", quiet=True)
    with pytest.raises(CheckpointError, match=r"000002 cannot be restored: ModuleNotFoundError.*a_module_of_the_past"):
        hpcgpu.restore(client, place, name="demo", quiet=True)
