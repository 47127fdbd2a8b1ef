"""Another user of the node gets nothing into an environment, and an archive writes nothing outside of its own."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import tarfile
from pathlib import Path

import pytest

from hpcgpu.runtime import stage
from tests.packed import Environment, content, refusal

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@needs_root
def test_a_directory_that_another_user_put_there_is_not_used(archive: Path, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    shared, other = tmp_path / "tmp", tmp_path / "other"
    for place in (shared, other):
        place.mkdir()
        place.chmod(0o1777)
    theirs = shared / f"hpcgpu-environment-0-{socket.gethostname()}-{sha256[:16]}"
    for plant in (lambda: theirs.mkdir(mode=0o700), lambda: theirs.symlink_to(tmp_path / "elsewhere")):
        plant()
        os.chown(theirs, 64321, 64321, follow_symlinks=False)
        used, environment = stage.use(archive, sha256, [shared, other])
        assert other in environment.parents and not list(theirs.glob("*"))
        os.close(used)
        shutil.rmtree(environment.parent)
        theirs.unlink() if theirs.is_symlink() else theirs.rmdir()


def test_a_directory_of_ones_own_that_others_could_have_filled_is_not_used(archive: Path, base: Path) -> None:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    place = base / f"hpcgpu-environment-{os.geteuid()}-{socket.gethostname()}-{sha256[:16]}"
    place.mkdir()
    place.chmod(0o777)
    assert f"{place} belongs to uid {os.geteuid()} and has mode 0777" in refusal(archive, base)


@needs_root
@pytest.mark.parametrize("plant", ["link to root's", "file", "fifo", "locked"])
def test_whatever_another_user_plants_is_neither_used_nor_waited_for(archive: Path, tmp_path: Path, plant: str) -> None:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    shared, other, mine = tmp_path / "tmp", tmp_path / "other", tmp_path / "mine"
    for place in (shared, other, mine):
        place.mkdir()
    for place in (shared, other):
        place.chmod(0o1777)
    theirs = shared / f"hpcgpu-environment-0-{socket.gethostname()}-{sha256[:16]}"
    with contextlib.ExitStack() as at_end:
        if plant == "link to root's":
            theirs.symlink_to(mine)
        elif plant == "file":
            theirs.write_text("")
        elif plant == "fifo":
            os.mkfifo(theirs)
        else:
            theirs.mkdir(mode=0o777)
            locked = os.open(theirs, os.O_RDONLY)
            at_end.callback(os.close, locked)
            fcntl.flock(locked, fcntl.LOCK_EX)
        os.chown(theirs, 64321, 64321, follow_symlinks=False)
        used, environment = stage.use(archive, sha256, [shared, other])
    assert other in environment.parents and not list(mine.iterdir())
    os.close(used)


def test_an_archive_with_members_outside_of_it_is_refused_and_writes_nothing_there(
    environment: Environment, base: Path, tmp_path: Path
) -> None:
    archive, outside = environment.archive("env.tar"), tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(archive, "a") as bad:
        for name, kind, link in [
            ("../escaped", tarfile.REGTYPE, ""),
            (str(outside / "absolute"), tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, str(outside)),
            ("link/through", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, str(archive)),
        ]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            bad.addfile(member)
    assert f"{archive} cannot be unpacked on" in refusal(archive, base)
    assert not list(outside.iterdir()) and archive.stat().st_nlink == 1
    assert content(base) == []


def test_an_archive_that_is_replaced_while_it_is_unpacked_is_refused(
    environment: Environment, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, really_read = environment.archive("env.tar"), stage.shutil.disk_usage
    (environment.path / "zz").write_bytes(os.urandom(4 << 20))
    other = environment.archive("other.tar")

    def replace_late(path: Path) -> object:
        os.replace(other, archive)
        return really_read(path)

    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(stage.shutil, "disk_usage", replace_late)
    assert f"{archive} has changed since the job script was written" in refusal(archive, base, sha256)
    assert content(base) == []


@needs_root
def test_where_others_have_taken_all_names_the_environment_gets_one_that_jobs_share(
    archive: Path, tmp_path: Path
) -> None:
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    bases = [tmp_path / "tmp", tmp_path / "var"]
    for base in bases:
        base.mkdir()
        base.chmod(0o1777)
        theirs = base / f"hpcgpu-environment-0-{socket.gethostname()}-{sha256[:16]}"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 64321, 64321)
    first, environment = stage.use(archive, sha256, bases)
    second, same = stage.use(archive, sha256, bases)
    assert environment == same and environment.parent.name.startswith(theirs.name + "-")
    assert (environment / "bin" / "python").exists() and not list(theirs.iterdir())
    os.close(first)
    os.close(second)


@needs_root
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_an_archive_that_others_can_change_is_refused(archive: Path, base: Path, how: str) -> None:
    if how == "owner":
        os.chown(archive, 64321, 64321)
    else:
        archive.chmod(0o666)
    assert f"{archive} is not used, because other users can change it" in refusal(archive, base)
    assert content(base) == []


def test_an_archive_whose_top_may_not_be_entered_is_unpacked(
    environment: Environment, base: Path, tmp_path: Path
) -> None:
    archive = environment.archive("env.tar")
    with tarfile.open(archive, "a") as more:
        top = tarfile.TarInfo("./")
        top.type, top.mode = tarfile.DIRTYPE, 0
        more.addfile(top)
    used, made = stage.use(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), [base])
    assert made.stat().st_mode & 0o777 == 0o700
    os.close(used)
