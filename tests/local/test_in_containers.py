"""Whole clusters whose jobs run in containers, as an ordinary user: with Charliecloud and with rootless Podman.

The image is a Debian made by debootstrap, with a virtual environment that has Dask and lacks hpcgpu.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from container_tools import CLIENT, release, why_not
from packaging.requirements import Requirement

from hpcgpu.configuration.resolve import resolve
from hpcgpu.scripts.container import HOST_COPY, provide
from tests.conftest import wait_until

pytestmark = [
    pytest.mark.shows("Jobs in containers: Charliecloud, rootless Podman"),
    pytest.mark.timeout(1500),  # the image is made within 900 s, or not at all
]

#: Of the image: the one of the tests, and of the distribution.
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
VENV = "/opt/venv"
#: What the image has; that needs more.
NEEDED = ("dask", "distributed", "click", "cryptography", "jinja2", "psutil", "pyyaml", "rich")
PROGRAM = """
import json, pathlib, sys, tempfile, time, hpcgpu
from hpcgpu.batch import batch_system

with hpcgpu.LocalGPUCluster(gpus_per_node=0, jobs=1, quiet=True, **json.loads(sys.argv[1])) as cluster:
    client = cluster.get_client()
    cluster.wait_for_workers(1)
    with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as place:
        package = pathlib.Path(place, "uploaded")
        package.mkdir()
        (package / "__init__.py").write_text("there = __file__")
        cluster.upload_package(package)

    def inside():
        import uploaded
        import hpcgpu, os, sys
        seen = ["/etc/is-the-image", os.path.expanduser("~/mine"), "mine", "/mnt/read"]
        seen.append(os.environ["HPCGPU_CLUSTER_DIRECTORY"])
        return {
            "python": sys.executable, "hpcgpu": hpcgpu.__file__, "path": sys.path, "environment": dict(os.environ),
            "uploaded": uploaded.there,
            "seen": [os.path.exists(place) for place in seen], "uid": os.getuid(), "home": os.environ["HOME"],
        }

    worker = client.submit(inside).result()
    print(json.dumps([worker, client.run_on_scheduler(inside)]))
    client.close()
    queue, job = batch_system("local"), worker["environment"]["HPCGPU_JOB_ID"]
    queue.cancel([job])
    while not queue.poll([job])[job].state.ended:
        time.sleep(0.1)
"""

#: Kills the scheduler's process from the host, where it has another number than in Podman.
GOES_ON = """
import json, os, pathlib, signal, sys, hpcgpu

def schedulers():
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes()
            if place.stat().st_uid == os.getuid() and b"hpcgpu.runtime.launch\\0scheduler" in line[:100]:
                yield int(place.name)
        except OSError:
            pass

def workers():
    cluster.wait_for_workers(1)
    return list(client.run(os.getenv, "HPCGPU_JOB_ID").values())

options = json.loads(sys.argv[1])
with hpcgpu.LocalGPUCluster(gpus_per_node=0, jobs=1, quiet=True, on_scheduler_end="restart", **options) as cluster:
    client = cluster.get_client()
    before = workers()
    [scheduler] = schedulers()
    with cluster.replay():  # it submits the future again if the client has not yet noticed the end
        os.kill(scheduler, signal.SIGKILL)
        print(json.dumps([client.submit(pow, 2, 10).result(), workers() == before]))
"""


def distributions() -> Iterator[importlib.metadata.Distribution]:
    """What the image needs of this environment."""
    waiting, seen = list(NEEDED), set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in seen:
            seen.add(name)
            found = importlib.metadata.distribution(name)
            yield found
            needs = [Requirement(text) for text in found.requires or ()]
            waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


@dataclass(frozen=True)
class User:
    """An ordinary user, with the image, and with hpcgpu to start clusters by."""

    name: str
    home: Path
    image: Path

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program as this user."""
        own = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "USER": self.name,
            "PYTHONPATH": f"{self.home}/{HOST_COPY}:{self.image}{VENV}/lib/{PYTHON}/site-packages",
            "VIRTUAL_ENV": "/of/the/host",
        }
        command = ["setpriv", "--reuid", self.name, "--regid", self.name, "--init-groups", "--", *words]
        if Path("/sys/fs/cgroup/unified").exists():  # crun refuses a host with both kinds of control groups
            hide = 'mount -t tmpfs none /sys/fs/cgroup && exec "$0" "$@"'
            command = ["unshare", "--mount", "--", "sh", "-c", hide, *command]
        return subprocess.run(
            command, cwd=self.home, env=own | environment, capture_output=True, text=True, check=False, timeout=400
        )

    def start(self, **options: object) -> subprocess.CompletedProcess[str]:
        """Start a cluster in a container, examine it, and end it."""
        given = {"name": "inside", "python": f"{VENV}/bin/python", **options}
        return self.run(CLIENT, "-P", "-c", PROGRAM, json.dumps(given), GREETING_OF_HOST="hello")

    def goes_on(self, **options: object) -> subprocess.CompletedProcess[str]:
        """Start a cluster in a container, kill its scheduler, and compute on the next one."""
        given = {"name": "goes-on", "python": f"{VENV}/bin/python", **options}
        return self.run(CLIENT, "-P", "-c", GOES_ON, json.dumps(given))

    def log(self, job: str) -> str:
        [log] = (self.home / ".hpcgpu" / "clusters" / "inside" / "logs").glob(f"inside-{job}-*.log")
        return log.read_text()

    def processes(self) -> list[str]:
        """Command lines of this user's processes, without the one that keeps Podman's namespace."""
        uid, found = pwd.getpwnam(self.name).pw_uid, []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.stat().st_uid == uid:
                    found.append((process / "cmdline").read_text().replace("\0", " "))
        return [line for line in found if "hpcgpu" in line or "dask" in line]


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    if reason := why_not():
        pytest.skip(reason)
    place = Path(tempfile.mkdtemp(prefix="hpcgpu-containers-"))
    name = f"hpcgpu{secrets.token_hex(3)}"
    try:
        place.chmod(0o755)
        command = ["debootstrap", "--variant=minbase", "--include=python3", release(), str(place / "image")]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        except subprocess.TimeoutExpired:  # it loads a hundred packages: a slow network is no defect of hpcgpu
            pytest.skip("debootstrap makes no image within 15 minutes")
        if made.returncode:
            pytest.skip(f"debootstrap cannot make an image: {made.stdout[-300:]}{made.stderr[-300:]}")
        home = place / "home"
        subprocess.run(["useradd", "--create-home", "--home-dir", str(home), name], check=True, capture_output=True)
        complete(place / "image", home)
        (home / "mine").touch()
        provide(home, resolve("local", {"container": "any"}).worker)
        subprocess.run([CLIENT, "-m", "compileall", "-q", str(home / HOST_COPY)], check=True)  # not by each client
        subprocess.run(["chmod", "-R", "a+rX", str(home / HOST_COPY), str(place / "image" / "opt")], check=True)
        yield User(name, home, place / "image")
    finally:
        remove(name)
        shutil.rmtree(place, ignore_errors=True)


def remove(name: str) -> None:
    """Remove a user that a test has made, with its processes and with what it leaves in /tmp."""
    with contextlib.suppress(KeyError):
        uid = pwd.getpwnam(name).pw_uid
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.stat().st_uid == uid:
                    os.kill(int(process.name), signal.SIGKILL)
        for left in (*Path("/tmp").iterdir(), *Path("/var/tmp").iterdir()):
            with contextlib.suppress(OSError):
                if left.lstat().st_uid == uid:
                    shutil.rmtree(left)
        subprocess.run(["userdel", name], check=False, capture_output=True)


def complete(image: Path, home: Path) -> None:
    """Give an image Dask, a file by which it is known, and the directories to mount on."""
    subprocess.run(["chroot", str(image), PYTHON, "-m", "venv", "--without-pip", VENV], check=True)
    packages = image / VENV[1:] / "lib" / PYTHON / "site-packages"
    for found in distributions():
        for file in found.files or ():
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, packages / file)
    (image / "etc" / "is-the-image").touch()
    (image / str(home)[1:]).mkdir(parents=True)


def look(done: subprocess.CompletedProcess[str], user: User) -> None:
    """What scheduler and worker saw in their containers is what the page on containers promises."""
    assert done.returncode == 0, done.stderr
    for seen in json.loads(done.stdout.splitlines()[-1]):
        assert seen["python"] == f"{VENV}/bin/python" and all(seen["seen"]), seen
        assert "/package-uploaded-" in seen["uploaded"], "a package that was uploaded is there"
        assert seen["uid"] == pwd.getpwnam(user.name).pw_uid and seen["home"] == str(user.home)
        clusters = user.home / ".hpcgpu" / "clusters"
        assert seen["hpcgpu"] == f"{clusters}/inside/{HOST_COPY}/hpcgpu/__init__.py"
        assert not [path for path in seen["path"] if path.startswith(str(user.image))], "nothing of the client's Python"
        environment = seen["environment"]
        assert environment["GREETING"] == 'it\'s "me" $HOME' and "VIRTUAL_ENV" not in environment
        assert environment["HPCGPU_JOB_NAME"].startswith("inside-")
    log = user.log("0")
    # Dask has its own handler a moment after its worker has joined; until then ours ends the process, which may be
    # logged or not, or the fork server dies first, which the nanny calls an unknown signal.
    received = re.search(r"Received signal SIGTERM|SystemExit\W+143|End worker|killed by unknown signal", log)
    assert received, f"to cancel a job reaches the process in the container:\n{log}"
    wait_until(lambda: not user.processes(), lambda: f"none of these is left: {user.processes()}")


OPTIONS = {"env": {"GREETING": 'it\'s "me" $HOME'}, "local_directory": "/tmp/hpcgpu spill of $USER"}


def test_a_cluster_runs_in_charliecloud(user: User) -> None:
    (user.home / "data").mkdir()
    (user.home / "data" / "read").touch()
    mounts = [f"{user.home}/data:/mnt"]
    look(
        user.start(container=str(user.image), container_runtime="charliecloud", container_mounts=mounts, **OPTIONS),
        user,
    )


def test_a_temporary_directory_of_the_job_alone_is_var_tmp_in_charliecloud(user: User) -> None:
    """PBS makes one for each job, ``/var/tmp/pbs.JOBID``: no image has it to mount on."""
    made = ["export TMPDIR=$(mktemp -d /var/tmp/pbs.XXXXXX)", 'touch "$TMPDIR/of-this-job"']
    options = {"name": "temporary", "job_script_prologue": [*made, "trap 'rm -r \"$TMPDIR\"' EXIT"]}
    done = user.start(container=str(user.image), container_runtime="charliecloud", **options)
    assert done.returncode == 0, done.stderr
    assert [seen["environment"]["TMPDIR"] for seen in json.loads(done.stdout.splitlines()[-1])] == ["/var/tmp"] * 2
    wait_until(lambda: not user.processes(), lambda: f"none of these is left: {user.processes()}")


def test_the_check_examines_the_inside_of_a_container(user: User) -> None:
    cli = [CLIENT, "-P", "-m", "hpcgpu", "check", "--in-job", "--json", "--system", "local", "--gpus-per-node", "0"]
    cli += ["--container", str(user.image), "--container-runtime", "charliecloud", "--python", f"{VENV}/bin/python"]
    done = user.run(*cli)
    lines = {(line["where"], line["what"]): line for line in json.loads(done.stdout)["lines"]}
    for where in ("scheduler job", "worker job"):
        expected = f"charliecloud runs {user.image}, with hpcgpu of the host; the lines below are from inside it"
        assert lines[where, "container"]["found"] == expected and lines[where, "python"]["grade"] == "ok"


def test_what_ends_in_the_container_ends_the_job_with_its_exit_code(user: User) -> None:
    done = user.start(container=str(user.image), container_runtime="charliecloud", python="/bin/false", name="fails")
    assert "its script failed, exit code 1" in done.stderr, done.stderr
    wait_until(lambda: not user.processes(), lambda: f"none of these is left: {user.processes()}")


@pytest.fixture(scope="module")
def image_of_podman(user: User) -> str:
    image = "localhost/hpcgpu-image"
    made = user.run("sh", "-c", f"tar --exclude=./var -C '{user.image}' -c . | podman import - {image}")
    if made.returncode:
        pytest.skip(f"this machine has no rootless Podman: {made.stderr[-300:]}")
    return image


def test_a_cluster_runs_in_rootless_podman(user: User, image_of_podman: str) -> None:
    shutil.rmtree(user.home / ".hpcgpu", ignore_errors=True)
    mounts = [f"{user.home}/data:/mnt"]
    (user.home / "data").mkdir(exist_ok=True)
    (user.home / "data" / "read").touch()
    options = {"container": image_of_podman, "container_runtime": "podman", **OPTIONS}
    look(user.start(container_mounts=mounts, **options), user)


@pytest.mark.parametrize("runtime", ["charliecloud", "podman"])
def test_worker_jobs_stay_when_a_scheduler_in_a_container_is_killed(
    user: User, request: pytest.FixtureRequest, runtime: str
) -> None:
    image = str(user.image) if runtime == "charliecloud" else request.getfixturevalue("image_of_podman")
    done = user.goes_on(container=image, container_runtime=runtime)
    assert done.returncode == 0 and "gone and another one is started" in done.stderr, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [1024, True], (done.stdout, done.stderr)
    wait_until(lambda: not user.processes(), lambda: f"none of these is left: {user.processes()}")
