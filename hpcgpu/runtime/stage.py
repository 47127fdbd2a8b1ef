"""The environment of a job, unpacked on the node's own disk: ``python -m hpcgpu.runtime.stage`` (option `stage`).

It runs before the first step of a job. It unpacks the archive, unless another job of this user has done so on this
node, and becomes the Python of that environment. It makes these files in a directory on the node's disk::

    hpcgpu-environment-UID-HOST-HASH/    the gate: locked while a process unpacks, joins, leaves or removes it;
                                         HASH-RANDOM where another user has taken that name
        environment/                     each process that uses it holds a shared lock, as long as it lives
        whole                            written last: the hash of the archive, and the id of the node's boot

The kernel releases the lock of a killed process. So a process that gets the exclusive lock is the last user, however
the others ended, and removes the directory. If the last user is killed, the next job with this archive uses the
directory. A job that unpacks another archive there removes the directory, if nobody has used it for a day.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, NoReturn

from hpcgpu.errors import LaunchError, NotTrusted
from hpcgpu.posix.archives import DECOMPRESSORS
from hpcgpu.posix.filesystems import filesystem, is_local
from hpcgpu.posix.ownership import check, check_parent, private_directory
from hpcgpu.posix.printable import printable
from hpcgpu.posix.standard_streams import drop_what_cannot_be_written, write_stderr
from hpcgpu.runtime.scratch import expanded

with contextlib.suppress(ImportError):  # on Windows, where only clients run
    import fcntl

#: The process, its open file (descriptor) that holds the lock, and the directory of the process's environment.
_STAGED = "HPCGPU_STAGED"

#: Seconds after which an unused environment is removed.
_KEPT_UNUSED = 86400.0
#: Seconds for the first import in an environment, and for conda-unpack.
_TRIAL = 600.0
#: Seconds after which a job that waits for another one prints that, and after which it tries another directory.
_SILENCE, _TIMEOUT = 5.0, 3600.0
#: Lines of tar's errors that are shown. A full disk has one for each file.
_LINES = 5
_NO_ROOM = ("No space left on device", "Disk quota exceeded")
_TOTAL = "Total bytes read: "
_BLOCK = 1 << 20


def main(argv: Sequence[str]) -> NoReturn:
    """Unpack the environment if it is not there, and run its Python with the arguments after ``--``."""
    drop_what_cannot_be_written()
    split = list(argv).index("--")
    arguments = _parser().parse_args(argv[:split])
    os.umask(0o077)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        used, environment = use(arguments.archive, arguments.sha256, candidates(arguments.local_directory))
    except LaunchError as error:
        write_stderr(error)
        sys.exit(1)
    os.set_inheritable(used, True)
    os.environ[_STAGED] = f"{os.getpid()}:{used}:{environment}"
    os.environ["PATH"] = f"{environment}/bin:{os.environ.get('PATH', os.defpath)}"
    python = str(environment / "bin" / "python")
    os.execv(python, [python, *argv[split + 1 :]])


def release_at_exit() -> None:
    """Release the environment at the end of this process, when its children have ended."""
    if _locked_environment() is not None:
        Finalize(None, release, exitpriority=-100)


def release() -> None:
    """Release the environment that this process runs in, and remove it if nobody else uses it.

    Its files can be missing afterwards, so this is the last thing that a process does.
    """
    locked = _locked_environment()
    if locked is None:
        return
    del os.environ[_STAGED]
    used, environment = locked
    with contextlib.suppress(OSError), contextlib.ExitStack() as at_end:
        at_end.callback(os.close, used)
        # Close the lock before the gate opens: the next job must not find the environment in use.
        with _gate(environment.parent, make=False), at_end.pop_all():
            # The site may have removed it, and another job may have unpacked it again.
            if os.path.samestat(os.fstat(used), os.lstat(environment)):
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(environment.parent)


def lock() -> tuple[int, ...]:
    """Return the open file of the environment's lock, for a process that may live longer than this one."""
    locked = _locked_environment()
    return (locked[0],) if locked is not None else ()


def use(archive: Path, sha256: str, places: Sequence[Path]) -> tuple[int, Path]:
    """Return the open file that locks an environment, and the directory, which exists while the file is open.

    Parameters
    ----------
    archive : Path
    sha256 : str
        The hash that the archive must have.
    places : sequence of Path
        Directories, the best one first. This uses the first one that is on the node's own disk and where nobody else
        can change the unpacked files.

    Raises
    ------
    LaunchError
        It cannot be unpacked or used.
    """
    try:
        check(archive, group_may_write=True)
    except NotTrusted as error:
        raise LaunchError(f"stage: {error}") from error
    except OSError as error:
        raise _unreadable(archive, error) from error
    refused = []
    name = f"{_prefix()}{sha256[:16]}"
    # If another user has made the directory with the predictable name, this one gets a random name.
    others = (_own_name(base / name) for base in places if _of_others(base / name))
    for place in itertools.chain((base / name for base in places), others):
        base = place.parent
        try:
            return _use(archive, sha256, place)
        except NotTrusted as error:
            refused.append(str(error))
        except OSError as error:
            refused.append(f"{error.filename or base}: {error.strerror or error}")
        write_stderr(f"the environment is not unpacked in {base}: {refused[-1]}")
    raise LaunchError(
        f"stage: no directory on {socket.gethostname()} can hold the environment: {'; '.join(refused)}. Set "
        "local_directory to a directory on the node's own disk"
    )


def candidates(local_directory: str | None) -> list[Path]:
    """Return the directories that may hold environments, the best one first."""
    given = [expanded(local_directory, os.environ)] if local_directory else []
    return [Path(name).absolute() for name in dict.fromkeys([*given, tempfile.gettempdir(), "/tmp", "/var/tmp"])]


def _prefix() -> str:
    """Return the prefix of the names of this user's environments on this node."""
    return f"hpcgpu-environment-{os.geteuid()}-{socket.gethostname()}-"


def _of_others(place: Path) -> bool:
    try:
        return os.lstat(place).st_uid != os.geteuid()
    except OSError:
        return False


def _own_name(place: Path) -> Path:
    """Return the place of an environment whose usual name others have taken: that of an earlier job, or a new one."""
    for path in sorted(place.parent.glob(f"{place.name}-*")):
        with contextlib.suppress(OSError):
            about = os.lstat(path)
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                return path
    return place.with_name(f"{place.name}-{secrets.token_hex(8)}")


def _use(archive: Path, sha256: str, place: Path) -> tuple[int, Path]:
    base = place.parent
    private_directory(base)
    check_parent(base)
    if os.statvfs(base).f_flag & os.ST_NOEXEC:
        raise NotTrusted(f"{base} is mounted with noexec, so no program runs from there")
    if not is_local(base):
        raise NotTrusted(f"{base} is on {filesystem(base) or 'an unknown filesystem'}, not on the node's own disk")
    with _gate(place, make=True) as gate:
        environment = place / "environment"
        if _mark_of_complete(place) != _mark(sha256):
            _sweep(place)
            _check_unused(place)
            try:
                _clear(place)
                _unpack(archive, sha256, environment, gate)
                (place / "whole").write_text(_mark(sha256))
            except BaseException:
                _remove(place)
                raise
        os.utime(place / "whole")
        return _lock_environment(environment), environment


def _lock_environment(environment: Path) -> int:
    used = os.open(environment, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    fcntl.flock(used, fcntl.LOCK_SH)  # a process that wants the exclusive lock holds the gate
    return used


@contextlib.contextmanager
def _gate(place: Path, *, make: bool, wait: bool = True) -> Iterator[int]:
    """Hold the directory of an environment.

    Raises
    ------
    NotTrusted
        Another user can write to it.
    OSError
        It is missing or cannot be made; or another process holds it, and this process does not wait, or no longer
        waits.
    """
    while True:
        if make:
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
        try:
            gate = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            if make:  # the last user has just removed it
                continue
            raise
        try:
            about = os.fstat(gate)
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise NotTrusted(f"{place} belongs to uid {about.st_uid} and has mode {about.st_mode & 0o7777:04o}")
            _lock(gate, place, wait=wait)
            if _is(place, about):
                with contextlib.suppress(OSError):  # on a full disk, unpacking reports it
                    (place / "holder").write_text(f"{os.getpid()}\n")
                yield gate
                return
            if not make:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        finally:
            os.close(gate)


def _is(place: Path, about: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(place), about)
    except FileNotFoundError:
        return False


def _lock(gate: int, place: Path, *, wait: bool) -> None:
    """Get the lock of a directory; `BlockingIOError` or `TimeoutError` if another process keeps it.

    A job whose filesystem hangs must not stop the others for ever. flock has no limit of time, so this tries again.
    """
    began, reported = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
        waited = time.monotonic() - began
        if waited > _TIMEOUT:
            why = f"{_holder(place)} has worked there for more than {_TIMEOUT:g} s. If it hangs, cancel its job"
            raise TimeoutError(errno.ETIMEDOUT, why, str(place))
        if waited > _SILENCE and not reported:
            reported = True
            write_stderr(f"waiting for {_holder(place)}, which works in {place}")
        time.sleep(0.1)


def _holder(place: Path) -> str:
    try:
        return f"process {int((place / 'holder').read_text())} of another job of yours"
    except (OSError, ValueError):  # the other process has just begun, or the disk is full
        return "another job of yours"


def _mark(sha256: str) -> str:
    """Return the mark of a complete environment. After a crash of the node, files can lack their content."""
    return f"{sha256} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}\n"


def _mark_of_complete(place: Path) -> str:
    try:
        return (place / "whole").read_text() if (place / "environment" / "bin" / "python").exists() else ""
    except OSError:
        return ""


def _check_unused(place: Path) -> None:
    """Raise `BlockingIOError` if a process uses the environment in a directory that this process holds."""
    with contextlib.suppress(FileNotFoundError):
        used = os.open(place / "environment", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(used)


def _unpack(archive: Path, sha256: str, environment: Path, gate: int) -> None:
    """Unpack an archive into a directory, and make it run there."""
    free = shutil.disk_usage(environment.parent).free
    began = time.monotonic()
    environment.mkdir(mode=0o700)
    if filesystem(environment) in {"tmpfs", "ramfs"}:  # before unpacking: it may take more memory than the job has
        write_stderr(f"unpacking {archive} into {environment}, which is memory")
    found, code, output = _extract(archive, environment, gate)
    host = socket.gethostname()
    if found != sha256:
        raise LaunchError(
            f"stage: {archive} has changed since the job script was written: its sha256 is {found}, the script has "
            f"{sha256}. Start a new cluster, or render the scripts again"
        )
    if any(words in line for line in output for words in _NO_ROOM):
        needed = next((int(line.split()[3]) for line in output if line.startswith(_TOTAL)), 0)
        raise LaunchError(
            f"stage: {archive} does not fit into {environment.parent.parent} on {host}: it needs {_size(needed)}, and "
            f"{_size(free)} are free. Set local_directory to a larger disk of the node, or pack fewer packages"
        )
    if code == -signal.SIGKILL:
        raise LaunchError(
            f"stage: what unpacked {archive} on {host} was killed, as happens where memory is short. Request more "
            f"memory; if {environment} is in memory, set local_directory to a disk of the node"
        )
    if code:
        errors = [line for line in output if not line.startswith(_TOTAL)]
        raise LaunchError(
            f"stage: {archive} cannot be unpacked on {host}: {'; '.join(errors) or f'exit status {code}'}. The archive "
            "may be damaged: pack the environment again"
        )
    _make_it_run(archive, environment, gate)
    took = f"{time.monotonic() - began:.1f} s"
    write_stderr(f"unpacked {archive} into {environment} in {took}")


def _extract(archive: Path, environment: Path, gate: int) -> tuple[str, int, list[str]]:
    """Extract an archive; return its hash, and the exit status and the errors of the programs that unpacked it."""
    decompressor = next(program for end, program in DECOMPRESSORS.items() if archive.name.endswith(end))
    tar = [_program("tar", archive), "--extract", "--no-same-owner", "--no-same-permissions", "--totals"]
    tar += ["--directory", str(environment), "--file", "-"]
    commands = [[_program(decompressor, archive), "-dc"], tar] if decompressor else [tar]
    output: list[str] = []
    running: list[subprocess.Popen[bytes]] = []
    messages, write = os.pipe()
    reader = threading.Thread(target=_collect_output, args=(messages, output))
    reader.start()
    try:
        with archive.open("rb") as source:
            for command in commands:
                process = subprocess.Popen(
                    command,
                    stdin=running[-1].stdout if running else subprocess.PIPE,
                    stdout=subprocess.DEVNULL if command is tar else subprocess.PIPE,
                    stderr=write,
                    # The programs hold the gate too: if this process is killed, no other process enters while they
                    # still write.
                    pass_fds=[gate],
                    env={**os.environ, "LC_ALL": "C"},
                )
                if running and running[-1].stdout is not None:
                    running[-1].stdout.close()
                running.append(process)
            assert running[0].stdin is not None
            found = _feed(source, running[0].stdin)
    except OSError as error:
        raise _unreadable(archive, error) from error
    finally:
        os.close(write)
        if running and running[0].stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                running[0].stdin.close()
        codes = [process.wait() for process in running]
        code = -signal.SIGKILL if -signal.SIGKILL in codes else max(codes, key=abs, default=0)
        reader.join()
    return found, code, output


def _unreadable(archive: Path, error: OSError) -> LaunchError:
    return LaunchError(
        f"stage: {error.filename or archive} cannot be read on {socket.gethostname()}: {error.strerror}. It must "
        "be on a filesystem that login and compute nodes share"
    )


def _feed(source: IO[bytes], sink: IO[bytes]) -> str:
    """Copy a file to a process until it stops reading, and return the hash of the whole file."""
    digest = hashlib.sha256()
    while block := source.read(_BLOCK):
        digest.update(block)
        if not sink.closed:
            try:
                sink.write(block)
            except BrokenPipeError:
                with contextlib.suppress(BrokenPipeError):
                    sink.close()
    with contextlib.suppress(BrokenPipeError):
        sink.close()
    return digest.hexdigest()


def _collect_output(messages: int, output: list[str]) -> None:
    """Read the programs' output; keep the first lines and the number of lines."""
    with open(messages, errors="replace") as lines:
        for line in lines:
            if line.strip() and (len(output) < _LINES or line.startswith(_TOTAL)):
                output.append(printable(line.strip()))


def _program(name: str, archive: Path) -> str:
    """Return the path of a program, possibly in the environment of this Python."""
    path = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    if found := shutil.which(name, path=path):
        return found
    raise LaunchError(
        f"stage: {socket.gethostname()} has no program {name}, which unpacks {archive.name}. Load it in "
        f"job_script_prologue, install it into the environment of {sys.executable}, or pack a "
        f"{' or '.join(end for end in DECOMPRESSORS if not archive.name.endswith(end))}"
    )


def _make_it_run(archive: Path, environment: Path, gate: int) -> None:
    """Run conda-unpack if the environment has it, and check that its Python can import hpcgpu."""
    python, host = environment / "bin" / "python", socket.gethostname()
    environment.chmod(0o700)  # the top directory in the archive may have another mode
    _check_entered(archive, environment)
    if not python.is_symlink() and not python.exists():
        raise LaunchError(
            f"stage: {archive} has no bin/python at its top. Pack it with conda-pack or venv-pack, or by "
            "`tar -C ENVIRONMENT -c .`"
        )
    if not python.exists():
        raise LaunchError(
            f"stage: bin/python of {archive} is a link to {_target(python)}, which {host} does not have. A packed venv "
            "needs its base Python on the nodes; conda-pack brings its own"
        )
    unpack = environment / "bin" / "conda-unpack"
    for words in [["-I", str(unpack)]] * unpack.exists() + [["-P", "-c", "import hpcgpu.runtime.launch"]]:
        try:
            done = subprocess.run(
                [str(python), *words],
                capture_output=True,
                text=True,
                errors="replace",
                pass_fds=[gate],  # conda-unpack writes too, so it holds the gate
                timeout=_TRIAL,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(
                f"stage: the Python of {archive} did not answer on {host} within {_TRIAL:g} s. Look at the node's "
                "disk, and for a venv at the filesystem of its base Python"
            ) from error
        except OSError as error:
            raise LaunchError(f"stage: bin/python of {archive} does not start on {host}: {error.strerror}") from error
        if done.returncode:
            last = printable((done.stderr.strip().splitlines() or ["no message"])[-1])
            if str(unpack) in words:
                raise LaunchError(f"stage: {archive}: conda-unpack fails on {host}: {last}. Pack the environment again")
            raise LaunchError(
                f"stage: the environment in {archive} cannot run hpcgpu on {host}: {last}. Install hpcgpu into the "
                "environment, and pack it again"
            )


def _check_entered(archive: Path, environment: Path) -> None:
    """Refuse an archive with directories on the way to its Python that its user may not enter."""
    lib = environment / "lib"
    for place in (environment / "bin", lib, *lib.glob("python*"), *lib.glob("python*/site-packages")):
        if place.is_dir() and not os.access(place, os.R_OK | os.X_OK):
            raise LaunchError(
                f"stage: the directory {place.relative_to(environment)} in {archive} has mode "
                f"{stat.S_IMODE(place.stat().st_mode):04o}, so that you cannot enter it. Run chmod -R u+rwX on the "
                "environment, and pack it again"
            )


def _target(link: Path) -> Path:
    """Return the target of the chain of links that begins here."""
    for _ in range(40):
        if not link.is_symlink():
            break
        link = link.parent / link.readlink()
    return link


def _sweep(own: Path) -> None:
    """Remove environments of this user and node that nobody has used for a day."""
    prefix = _prefix()
    for place in own.parent.glob(f"{prefix}*"):
        # of a host whose name begins like this one's
        if place == own or not re.fullmatch("[0-9a-f]{16}(-[0-9a-f]{16})?", place.name.removeprefix(prefix)):
            continue
        with contextlib.suppress(OSError, NotTrusted), _gate(place, make=False, wait=False):
            mark = place / "whole"
            if time.time() - (mark if mark.exists() else place).stat().st_mtime < _KEPT_UNUSED:
                continue
            _check_unused(place)
            _remove(place)


def _clear(place: Path) -> None:
    """Remove the content of an environment's directory, the mark first: without the mark it counts as incomplete."""
    (place / "whole").unlink(missing_ok=True)
    environment = place / "environment"
    if not environment.exists():
        return
    try:
        shutil.rmtree(environment)
    except PermissionError:  # directories that were packed read-only
        environment.chmod(0o700)
        for directory, names, _ in os.walk(environment):
            for name in names:
                if not (Path(directory) / name).is_symlink():
                    (Path(directory) / name).chmod(0o700)
        shutil.rmtree(environment, ignore_errors=True)


def _remove(place: Path) -> None:
    """Remove the directory of an environment; the caller holds its gate."""
    with contextlib.suppress(OSError):
        _clear(place)
        (place / "holder").unlink(missing_ok=True)
        place.rmdir()


def _locked_environment() -> tuple[int, Path] | None:
    """Return the lock and the environment of this process. Its children inherit the variable, but not the lock."""
    process, _, rest = os.environ.get(_STAGED, "").partition(":")
    used, _, environment = rest.partition(":")
    return (int(used), Path(environment)) if process == str(os.getpid()) else None


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcgpu.runtime.stage", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("archive", type=Path)
    parser.add_argument("--sha256", required=True, help="hash of the archive")
    parser.add_argument("--local-directory", help="directory on the node's own disk")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
