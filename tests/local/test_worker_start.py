"""Workers that are forks of a warm process are what spawned ones are, and the warm process does no harm."""

from __future__ import annotations

import gc
import gzip
import os
import re
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, NannyPlugin

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests import helpers

Until = Callable[..., None]
GPU = {**helpers.GPU, "worker_start": "forkserver"}
CPU = {**helpers.CPU, "worker_start": "forkserver"}

#: What differs between any two workers, or two clusters: processes, and names with random parts. Importing `readline`
#: in a nanny sets LINES and COLUMNS for the programs that it starts.
OWN = re.compile(
    "__DASK_PARENT_PID|HPCGPU_JOB_.*|HPCGPU_CLUSTER_DIRECTORY|DASK_TEMPORARY_DIRECTORY|PWD|OLDPWD|SHLVL|_|LINES|COLUMNS"
)


def allocator() -> Callable[[], dict[str, Any]]:
    """A function for `Client.run`: what libraries read at the start of a process, and never again."""

    def look() -> dict[str, Any]:
        import ctypes
        from pathlib import Path

        import numpy  # noqa: F401  (has BLAS)

        class Mallinfo(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in ("a", "o", "s", "h", "hb", "u", "f", "uo", "fo", "keep")]

        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        libc.free.argtypes = [ctypes.c_void_p]
        libc.mallinfo2.restype = Mallinfo
        # What was mapped and freed raises the limits of an allocator that nobody has set limits for.
        libc.free(libc.malloc(8 << 20))
        blocks = [libc.malloc(64 << 10) for _ in range(160)]
        for block in reversed(blocks):
            libc.free(block)
        blas = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line)
        return {
            "hash": hash("worker"),
            "BLAS threads": ctypes.CDLL(blas).scipy_openblas_get_num_threads64_(),
            "memory goes back to the system": libc.mallinfo2().keep < 1 << 20,
        }

    return look


def interpreter() -> Callable[[], dict[str, Any]]:
    """A function for `Client.run`: what Python and Dask receive before a worker runs."""

    def look() -> dict[str, Any]:
        import faulthandler
        import gc
        import logging
        import sys
        import threading
        import warnings

        from dask import config

        loggers = [logging.getLogger(name) for name in (None, "distributed", "distributed.worker", "hpcgpu")]
        own = {name for name in vars(sys.modules["__main__"]) if name[0] != "_"}
        configuration = {
            f"configuration {section}.{name}": value
            for section, values in config.config.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
            if section != "temporary-directory"
        }
        return configuration | {
            "path": [place for place in sys.path if "hpcgpu-" not in place],
            "program": [own - {"main", "spawn_main"}, sys.argv[:4]],
            "settings": [tuple(sys.flags), sys.getswitchinterval(), threading.stack_size(), gc.get_threshold()],
            "garbage is collected": gc.isenabled(),
            "faulthandler": faulthandler.is_enabled(),
            "logging": [(logger.level, [str(handler) for handler in logger.handlers]) for logger in loggers],
            "warnings": sorted({str(one) for one in warnings.filters}),
        }

    return look


def process() -> Callable[[], dict[str, Any]]:
    """A function for `Client.run`: what a process may have from the one that started it."""

    def look() -> dict[str, Any]:
        import multiprocessing
        import resource
        import signal as signals
        import threading
        from multiprocessing import forkserver
        from pathlib import Path

        import numpy

        files = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return {
            "environment": dict(os.environ),
            "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name],
            "affinity": sorted(os.sched_getaffinity(0)),
            "umask": Path("/proc/self/status").read_text().split("Umask:")[1].split()[0],
            "signals": [str(signals.getsignal(n)).partition("0x")[0] for n in sorted(signals.valid_signals())],
            "directory": str(Path.cwd()),
            "files": len([name for name in files if name[0] == "/" and not name.startswith(("/proc", "/dev/null"))]),
            "threads": sorted({t.name.split("-")[0] for t in threading.enumerate()}),
            "start method": multiprocessing.get_start_method(),
            "own sockets": "tempdir" not in multiprocessing.current_process()._config,  # type: ignore[attr-defined]
            "random": float(numpy.random.random()),
            "fork": forkserver.get_inherited_fds() is not None,
            "parent": os.getppid(),
            "pid": os.getpid(),
        }

    return look


def compared(worker: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for both ways."""
    environment = {name: value for name, value in worker["environment"].items() if not OWN.fullmatch(name)}
    own = {"random", "fork", "parent", "pid"}
    return {**{name: value for name, value in worker.items() if name not in own}, "environment": environment}


def workers_of(options: dict[str, Any]) -> list[dict[str, Any]]:
    with LocalGPUCluster(**options, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(options["gpus_per_node"] or 1)
        found = client.run(process())
        assert client.run_on_scheduler(gc.isenabled) and all(client.run(gc.isenabled, nanny=True).values())
        forked = options["worker_start"] == "forkserver"
        assert all(worker["fork"] is forked for worker in found.values()), log_of(cluster)
        for look in (allocator(), interpreter()):
            for address, settings in client.run(look).items():
                found[address] |= settings
    return sorted(found.values(), key=lambda worker: str(worker["environment"].get("CUDA_VISIBLE_DEVICES")))


def log_of(cluster: LocalGPUCluster) -> str:
    return "".join(path.read_text() for path in cluster.directory.logs.glob(f"{cluster.name}-0*"))


@pytest.mark.parametrize(("options", "threads"), [(GPU, 1), (CPU, 2)], ids=["gpu", "cpu"])
def test_forked_workers_are_what_spawned_workers_are(
    queue: LocalQueue, fake_gpus: None, options: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} if threads > 1 else {}
    monkeypatch.setenv("DASK_DISTRIBUTED__NANNY__PRELOAD", "['json']")
    options = {**options, "name": f"threads-{threads}", "env": env}
    forked = workers_of(options)
    spawned = workers_of({**options, "worker_start": "spawn"})
    for one, other in zip(forked, spawned, strict=True):
        spawn, fork = compared(other), compared(one)
        assert not {what: (fork.get(what), value) for what, value in spawn.items() if fork.get(what) != value}
        assert one["memory goes back to the system"] and one["BLAS threads"] == threads
    assert len({worker["random"] for worker in forked}) == len(forked), "each worker has random numbers of its own"
    if options["gpus_per_node"]:
        assert [worker["environment"]["CUDA_VISIBLE_DEVICES"] for worker in forked] == ["0,1", "1,0"]


def alive(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE  # in a container perhaps nobody waits for it
    except psutil.NoSuchProcess:
        return False


def socket_of(process: int) -> Path:
    """The directory of the socket on which a fork server listens."""
    inodes = {re.sub(r"\D", "", os.readlink(fd)) for fd in Path(f"/proc/{process}/fd").iterdir() if fd.is_symlink()}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return next(Path(fields[7]).parent for fields in sockets if len(fields) > 7 and fields[6] in inodes)


@pytest.mark.parametrize("protocol", ["tcp", "ucx"])
def test_the_fork_server_has_one_thread_talks_to_no_driver_and_ends_with_the_job(
    queue: LocalQueue,
    fake_gpus: None,
    home: Path,
    protocol: str,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    calls = {name: home / name for name in ("STUBNVML_LOG", "STUBCUDA_LOG")}
    for variable, path in calls.items():
        path.touch()
        monkeypatch.setenv(variable, str(path))
    options = {**GPU, "protocol": protocol, "scheduler": {"gpus_per_node": 1}}
    with LocalGPUCluster(**options, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        workers = list(client.run(process()).values())
        assert all(worker["fork"] for worker in workers), log_of(cluster)
        (server,) = {worker["parent"] for worker in workers}
        assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
        assert not re.search("libcuda[.]so|libnvidia-ml|libucp", Path(f"/proc/{server}/maps").read_text())
        place = socket_of(server)
        assert place.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in place.iterdir() if path.is_socket()] == [0o600]
    until(lambda: not any(map(alive, [server, *(worker["pid"] for worker in workers)])), "the processes end")
    if place.exists():  # the job was killed before it could remove it: the next one on the node does
        with LocalGPUCluster(**GPU, jobs=1) as cluster:
            cluster.wait_for_workers(2)
    assert not place.exists(), "the directory of the socket is removed"
    callers = {int(line.split()[0]) for path in calls.values() for line in path.read_text().splitlines()}
    assert {worker["pid"] for worker in workers} <= callers, "the stub writes down who calls it"
    assert server not in callers


def test_a_worker_is_forked_again_after_its_end_and_after_that_of_the_fork_server(
    queue: LocalQueue, fake_gpus: None, until: Until
) -> None:
    with LocalGPUCluster(**GPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)

        def processes() -> dict[int, int]:
            return {worker["pid"]: worker["parent"] for worker in client.run(process(), on_error="ignore").values()}

        first = processes()
        (server,) = set(first.values())
        os.kill(min(first), signal.SIGKILL)
        until(lambda: len(now := processes()) == 2 and min(first) not in now, "the nanny starts it again")
        assert set(processes().values()) == {server}
        before = processes()
        os.kill(server, signal.SIGKILL)
        until(lambda: len(now := processes()) == 2 and not set(before) & set(now), "the nannies start a fork server")
        until(lambda: not any(map(alive, [server, *before])), "nothing of the old one is left")
        assert len(set(processes().values())) == 1


def plugin(value: str) -> NannyPlugin:
    """A plugin of the user that sets a variable in the nanny, and restarts the worker for it."""

    class Sets(NannyPlugin):  # type: ignore[misc]
        restart = True

        def setup(self, nanny: Any) -> None:
            os.environ["SET_BY_A_PLUGIN"] = value
            os.environ["SET_FOR_WORKERS"] = "by the job, for its nanny"
            nanny.env["SET_FOR_WORKERS"] = value

    return Sets()


def test_a_forked_worker_gets_what_plugins_of_its_nanny_set_and_ends_as_a_spawned_worker_does(
    queue: LocalQueue, fake_gpus: None, home: Path, until: Until
) -> None:
    def leave_things_open(place: str) -> None:
        import atexit
        import gzip
        import io
        import weakref
        import zipfile
        from pathlib import Path

        import distributed

        class Gone:
            pass

        worker, detached = distributed.get_worker(), io.TextIOWrapper(io.BytesIO())
        detached.detach()
        worker.odd = [weakref.proxy(Gone()), detached]  # what is there already when the files are searched for
        worker.left_open = (Path(place) / "left open").open("w")
        worker.left_open.write("the end of a result")
        worker.compressed = gzip.open(Path(place) / "compressed", "wt")  # noqa: SIM115
        worker.compressed.write("the end of a result")
        worker.archive = zipfile.ZipFile(Path(place) / "archive", "w")
        worker.archive.writestr("result", "the end of a result")
        atexit.register((Path(place) / "atexit").touch)

    with LocalGPUCluster(**GPU, jobs=1) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        for value in ("once", "again"):
            client.register_plugin(plugin(value), name=value)
            cluster.wait_for_workers(2)
            workers = client.run(process()).values()
            for name in ("SET_BY_A_PLUGIN", "SET_FOR_WORKERS"):
                assert [worker["environment"].get(name) for worker in workers] == [value, value]
            assert all(worker["fork"] for worker in workers), log_of(cluster)
        client.submit(leave_things_open, str(home), pure=False).result()
        client.restart()
    until(lambda: (home / "left open").read_text() == "the end of a result", "the worker flushes its files")
    assert (home / "atexit").exists()
    until(lambda: zipfile.is_zipfile(home / "archive"), "the worker closes its archives")
    with gzip.open(home / "compressed", "rt") as compressed:
        assert compressed.read() == "the end of a result"


def test_a_worker_is_spawned_if_the_fork_server_cannot_be_reached_or_lacks_a_package_and_the_log_reports_it(
    queue: LocalQueue, fake_gpus: None, home: Path, until: Until
) -> None:
    packages = home / "own" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    with LocalGPUCluster(**GPU, jobs=2, env={"PYTHONUSERBASE": str(home / "own")}) as cluster:
        with Client(cluster) as client:
            cluster.wait_for_workers(4)
            workers = list(client.run(process()).values())
            assert all(worker["fork"] for worker in workers), log_of(cluster)
            first, second = sorted({worker["parent"] for worker in workers})
            shutil.rmtree(socket_of(first))
            of_first = {worker["pid"] for worker in workers if worker["parent"] == first}

            def processes() -> dict[int, bool]:
                return {worker["pid"]: worker["fork"] for worker in client.run(process(), on_error="ignore").values()}

            os.kill(min(of_first), signal.SIGKILL)
            until(lambda: list(processes().values()).count(False) == 1, "the nanny spawns it")
            (packages / "new_package").mkdir()
            os.kill(next(worker["pid"] for worker in workers if worker["parent"] == second), signal.SIGKILL)
            until(lambda: list(processes().values()).count(False) == 2, "the nanny spawns it")
        logs = "".join(path.read_text() for path in cluster.directory.logs.glob(f"{cluster.name}-[01]*"))
    assert "hpcgpu: workers are spawned from now on: the socket of the fork server in " in logs
    assert "hpcgpu: workers are spawned from now on: packages were installed after the fork server had" in logs


def test_workers_are_spawned_where_a_fork_is_not_safe_and_the_log_reports_why(
    queue: LocalQueue, fake_gpus: None, home: Path
) -> None:
    (home / "site").mkdir()
    (home / "site" / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "if 'hpcgpu.runtime.launch worker' in ' '.join(sys.orig_argv):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    with LocalGPUCluster(**GPU, jobs=1, env={"PYTHONPATH": str(home / "site")}) as cluster, Client(cluster) as client:
        cluster.wait_for_workers(2)
        assert not any(worker["fork"] for worker in client.run(process()).values())
        said = "workers are spawned, and each imports its modules itself: the first process of the job has 2 threads"
        assert said in log_of(cluster), log_of(cluster)
