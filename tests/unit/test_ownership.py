"""What others can change is not trusted: whose a path is, and who may write to it and above it."""

from __future__ import annotations

import grp
import os
import pwd
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import hpcgpu
from hpcgpu.errors import NotTrusted
from hpcgpu.posix import ownership
from hpcgpu.posix.ownership import check, check_parent, check_tree

STRANGER = 64321  # a user id that nobody has
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture(autouse=True)
def no_warning_is_lost() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ownership._warned.clear()
        yield


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of the test's files has other members."""
    monkeypatch.setattr(ownership, "_private_group", lambda place, about: False)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "above" / "mine"
    path.mkdir(parents=True)
    path.chmod(0o700)
    path.parent.chmod(0o755)
    return path


def test_what_only_the_user_can_write_to_is_trusted(mine: Path) -> None:
    check(mine)
    (mine / "file").touch(mode=0o644)
    check(mine / "file")


def test_what_everybody_can_write_to_is_refused_with_the_command_that_mends_it(mine: Path) -> None:
    mine.chmod(0o777)
    with pytest.raises(
        NotTrusted, match=f"{mine} belongs to .* has mode 0777, so that everybody can write there. chmod o-w {mine}"
    ):
        check(mine)
    mine.chmod(0o700)
    mine.parent.chmod(0o777)
    with pytest.raises(NotTrusted, match=f"(?m)chmod o-w {mine.parent}$"):
        check(mine)


def test_the_sticky_bit_protects_what_is_in_a_directory_but_not_the_directory(mine: Path) -> None:
    mine.parent.chmod(0o1777)
    check(mine)
    check_parent(mine.parent)
    with pytest.raises(NotTrusted, match="everybody can write there"):
        check(mine.parent)


def test_a_group_above_is_a_warning_and_one_that_writes_to_the_thing_itself_is_refused(mine: Path, group: None) -> None:
    mine.parent.chmod(0o2770)
    with pytest.warns(hpcgpu.ClusterWarning, match=f"members of a group can replace {mine}.*chmod g-w {mine.parent}"):
        check(mine)
    check_parent(mine.parent)  # reported once
    mine.parent.chmod(0o755)
    mine.chmod(0o770)
    with pytest.raises(NotTrusted, match="chmod g-w"):
        check(mine)
    with pytest.warns(hpcgpu.ClusterWarning, match="members of a group"):
        check(mine, group_may_write=True)


def test_what_a_script_wrote_under_another_umask_is_trusted_where_nobody_else_can_enter(
    mine: Path, group: None
) -> None:
    (mine / "ended-7-0").touch()
    (mine / "ended-7-0").chmod(0o664)
    check_tree(mine, mine.iterdir())
    mine.chmod(0o755)
    with pytest.raises(NotTrusted, match=r"ended-7-0.*the group"):
        check_tree(mine, mine.iterdir())


@needs_root
def test_a_file_of_somebody_else_in_a_directory_of_ours_is_refused(mine: Path) -> None:
    (mine / "worker.sbatch").touch()
    os.chown(mine / "worker.sbatch", STRANGER, -1)
    with pytest.raises(NotTrusted, match=f"belongs to uid {STRANGER}"):
        check_tree(mine, mine.iterdir())


@needs_root
def test_who_installs_the_software_of_a_site_may_own_a_prologue_if_the_user_lists_them(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prologue = mine / "prologue.sh"
    prologue.touch()
    for path in (mine, prologue):
        os.chown(path, STRANGER, -1)
    with pytest.raises(NotTrusted, match=f"HPCGPU_TRUSTED_UIDS={STRANGER}"):
        check(prologue, group_may_write=True)
    monkeypatch.setenv("HPCGPU_TRUSTED_UIDS", str(STRANGER))
    check(prologue, group_may_write=True)
    with pytest.raises(NotTrusted):
        check(prologue)  # a cluster's file


def test_a_group_of_ones_own_is_nobody_else(mine: Path) -> None:
    if not ownership._private_group(mine, mine.stat()):
        pytest.skip("the group of this user has other members")
    mine.chmod(0o2770)
    check(mine)


def test_an_acl_that_names_others_shows_as_a_group_that_may_write(mine: Path) -> None:
    entries = [
        (0x01, 7, -1),
        (0x02, 7, STRANGER),
        (0x04, 0, -1),
        (0x10, 7, -1),
        (0x20, 0, -1),
    ]  # owner, user, group, mask, others
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(mine, "system.posix_acl_access", acl)
    except OSError as error:
        pytest.skip(f"this filesystem has no ACLs: {error}")
    with pytest.raises(NotTrusted, match="the group"):
        check(mine)


@needs_root
def test_what_belongs_to_somebody_else_is_refused_however_it_is_reached(mine: Path, tmp_path: Path) -> None:
    os.chown(mine, STRANGER, STRANGER)
    link = tmp_path / "link"
    link.symlink_to(mine)
    (mine / "file").touch()
    for path in (mine, mine / "file", link, link / "file", tmp_path / "above" / "mine" / ".." / "mine"):
        with pytest.raises(NotTrusted, match=f"{mine} belongs to uid {STRANGER} and has mode 0700"):
            check(path)


@needs_root
def test_a_link_that_somebody_else_made_is_refused(mine: Path) -> None:
    mine.parent.chmod(0o1777)
    link = mine.parent / "link"
    link.symlink_to(mine)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(NotTrusted, match=f"{link} belongs to uid {STRANGER}"):
        check(link)


@needs_root
def test_a_user_that_is_listed_may_own_what_is_above_and_not_the_thing_itself(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(mine.parent, STRANGER, STRANGER)
    with pytest.raises(NotTrusted, match=f"set HPCGPU_TRUSTED_UIDS={STRANGER}"):
        check(mine)
    monkeypatch.setenv("HPCGPU_TRUSTED_UIDS", f"7, {STRANGER}")
    check(mine)
    os.chown(mine, STRANGER, STRANGER)
    with pytest.raises(NotTrusted):
        check(mine)


def test_links_that_never_end_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        check(tmp_path / "a")


@pytest.mark.parametrize("umask", ["000", "002"])
def test_directories_that_are_missing_are_made_for_the_user_alone_whatever_the_umask(
    tmp_path: Path, umask: str
) -> None:
    code = (
        f"import os, pathlib; os.umask(0o{umask}); from hpcgpu.posix.ownership import "
        "private_directory as p; p(pathlib.Path('a/b/c'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert [f"{(tmp_path / path).stat().st_mode:o}" for path in ("a", "a/b", "a/b/c")] == ["40700"] * 3


def test_a_group_of_ones_own_that_has_another_member_is_a_group(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwuid(os.geteuid())
    os.chown(mine, user.pw_uid, user.pw_gid)
    mine.chmod(0o770)
    for members, trusted in (([user.pw_name], True), ([user.pw_name, "mallory"], False)):
        entry = grp.struct_group((user.pw_name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, entry=entry: entry)
        if trusted:
            check(mine)
        else:
            with pytest.raises(NotTrusted, match=f"the group {user.pw_name} can write there. chmod g-w {mine}"):
                check(mine)
