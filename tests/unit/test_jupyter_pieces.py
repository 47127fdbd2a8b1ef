"""Which Jupyter server a program belongs to: it believes only what is certain. And which snapshots its pages get."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tornado.httputil import HTTPHeaders

from hpcgpu.client import jupyter_dashboard_link
from hpcgpu.client.dashboard_forwarding import DashboardEndpoint, ssh_command
from hpcgpu.client.jupyter_dashboard_link import dashboard_link, with_host
from hpcgpu.jupyter import snapshots, start_from_form
from hpcgpu.profiles import site_profiles
from hpcgpu.widget.busy_kernel_inbox import opened

CLUSTER = Path("/clusters/demo")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "environ", {})
    jupyter_dashboard_link.announce("/user/ada/", [Path("/clusters"), Path("/scratch")])
    [text] = os.environ.values()
    return text


def test_a_kernel_of_the_server_links_to_it(announced: str) -> None:
    kernel = {"HPCGPU_JUPYTER_SERVER": announced.replace(str(os.getpid()), "7"), "JPY_PARENT_PID": "7"}
    assert dashboard_link(CLUSTER, kernel) == "/user/ada/hpcgpu/dashboard/demo/status"


def test_what_runs_in_the_server_links_so_that_dask_labextension_opens_it(announced: str) -> None:
    assert dashboard_link(CLUSTER, {"HPCGPU_JUPYTER_SERVER": announced}) == "/user/ada/proxy/hpcgpu/demo/status"


def test_before_the_scheduler_runs_only_dask_labextension_gets_the_link(announced: str) -> None:
    """It reads the link once, when it has made the cluster."""
    kernel = {"HPCGPU_JUPYTER_SERVER": announced.replace(str(os.getpid()), "7"), "JPY_PARENT_PID": "7"}
    assert dashboard_link(CLUSTER, kernel, running=False) == ""
    assert dashboard_link(CLUSTER, {"HPCGPU_JUPYTER_SERVER": announced}, running=False).startswith("/user/ada/proxy/")


def _send(path: Path, content: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)


def test_an_inbox_takes_messages_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = queue.SimpleQueue[object]()
    with tempfile.TemporaryDirectory() as short:  # paths of sockets are
        monkeypatch.setenv("HPCGPU_JUPYTER_SERVER", "")
        jupyter_dashboard_link.announce("/", [], Path(short))
        socket.setdefaulttimeout(0.01)  # as a cell may
        try:
            inbox = opened(messages.put)
        finally:
            socket.setdefaulttimeout(None)
        assert inbox is not None
        path = Path(short, inbox.name)
        for no_message in (b"", b"{", b"\xff", b"[" * 60_000):
            assert _send(path, no_message) == b""
        assert _send(path, b'{"do": "stop"}') == b"received"
        assert messages.get(timeout=150) == {"do": "stop"}
        inbox.close()
        with pytest.raises(FileNotFoundError):
            _send(path, b"{}")
    assert messages.empty()


def test_a_process_that_a_kernel_has_forked_does_not_keep_its_inbox() -> None:
    code = """if True:
        import os, pathlib, sys
        from hpcgpu.widget.busy_kernel_inbox import Inbox
        print(Inbox(pathlib.Path(sys.argv[1]), print).name, flush=True)
        if os.fork() == 0:
            print("forked", flush=True)
            sys.stdin.read()
        os._exit(0)
    """
    with tempfile.TemporaryDirectory() as short:
        command = [sys.executable, "-c", code, short]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
            assert kernel.stdout is not None
            name, forked = kernel.stdout.readline(), kernel.stdout.readline()
            assert (forked, kernel.wait()) == ("forked\n", 0)
            with pytest.raises(ConnectionRefusedError):
                _send(Path(short, name.strip()), b"{}")


def test_where_no_directory_can_be_made_the_extension_has_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jupyter_server")
    from hpcgpu.jupyter import extension

    monkeypatch.setenv("HPCGPU_JUPYTER_SERVER", "")
    monkeypatch.setattr(tempfile, "tempdir", "/missing")
    routes = list[Any]()
    application = SimpleNamespace(settings={"base_url": "/"}, add_handlers=lambda _, added: routes.extend(added))
    extension.load(SimpleNamespace(web_app=application))
    assert "/hpcgpu/api/clusters" in [address for address, *_ in routes]
    assert jupyter_dashboard_link.inboxes() is None


def test_without_a_directory_that_only_this_user_can_change_there_is_no_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCGPU_JUPYTER_SERVER", "")
    assert opened(print) is None, "no server"
    with tempfile.TemporaryDirectory() as short:
        jupyter_dashboard_link.announce("/", [], Path(short, "missing"))
        assert opened(print) is None
        jupyter_dashboard_link.announce("/", [], Path(short))
        Path(short).chmod(0o777)
        assert opened(print) is None
        assert not list(Path(short).iterdir())
        jupyter_dashboard_link.announce("/", [])
        assert opened(print) is None


def test_a_link_has_the_host_that_the_hub_or_jupyter_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hub = "/user/ada/hpcgpu/dashboard/demo/status", {"JUPYTERHUB_PUBLIC_URL": "https://hub.example.org/user/ada/"}
    assert with_host(path, {"JPY_PARENT_PID": "7"} | hub) == f"https://hub.example.org{path}"
    assert with_host(path, hub) == path, "dask-labextension, in the server, opens paths"
    pytest.importorskip("jupyter_core", reason="only Jupyter says it, and it is not installed")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    for url, link in (
        ("http://localhost:8888/", f"http://localhost:8888{path}"),
        ("http://n7:4711/node/n7/4711/", path),  # Open OnDemand
        ("http+unix://%2Fsocket/", path),
        (None, path),
    ):
        (tmp_path / "jpserver-7.json").write_text(json.dumps({"url": url}))
        assert with_host(path, {"JPY_PARENT_PID": "7"}) == link
    assert with_host(path, {"JPY_PARENT_PID": "8"}) == with_host(path, {"JPY_PARENT_PID": "x"}) == path
    assert with_host("http://n1:8787/status", {"JPY_PARENT_PID": "7"}) == "http://n1:8787/status"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"JPY_PARENT_PID": "7"},
        {"HPCGPU_JUPYTER_SERVER": "{", "JPY_PARENT_PID": "7"},
        {"HPCGPU_JUPYTER_SERVER": '{"pid": "7", "base_url": 1}', "JPY_PARENT_PID": "7"},
    ],
)
def test_nothing_is_known_elsewhere(environ: dict[str, str]) -> None:
    assert dashboard_link(CLUSTER, environ) == ""


def test_nothing_is_known_of_another_server_or_of_a_cluster_that_the_server_does_not_find(announced: str) -> None:
    of_another = json.dumps(json.loads(announced) | {"pid": 7})
    assert dashboard_link(CLUSTER, {"HPCGPU_JUPYTER_SERVER": of_another, "JPY_PARENT_PID": "8"}) == ""
    assert dashboard_link(CLUSTER, {"HPCGPU_JUPYTER_SERVER": of_another}) == "", "a terminal, or a job"
    assert dashboard_link(Path("/elsewhere/demo"), {"HPCGPU_JUPYTER_SERVER": announced}) == ""


def test_the_extension_is_cheap_to_import_and_does_nothing_where_jupyter_is_missing() -> None:
    code = (
        "import sys; before = set(sys.modules); import hpcgpu.jupyter\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'dask', 'distributed', 'jupyter_server', 'tornado'}, new\n"
        "sys.modules['jupyter_server'] = sys.modules['jupyter_server_proxy'] = None\n"
        "from types import SimpleNamespace as Some\n"
        "hpcgpu.jupyter._load_jupyter_server_extension(Some(log=Some(info=print)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "install hpcgpu[jupyter]" in done.stdout


def test_the_file_that_enables_it_names_it() -> None:
    [file] = (Path(__file__).parents[2] / "jupyter-config").rglob("*.json")
    assert file.parent.name == "jupyter_server_config.d"
    [module] = json.loads(file.read_text())["ServerApp"]["jpserver_extensions"]
    assert __import__(module, fromlist=["x"])._jupyter_server_extension_points() == [{"module": module}]


def test_the_ssh_command_reaches_a_dashboard_through_the_login_node() -> None:
    far, near = (
        DashboardEndpoint("10.0.0.7", 8787, "t", "10.0.0.7"),
        DashboardEndpoint("127.0.0.1", 34567, "t", "10.0.0.7"),
    )
    assert ssh_command(far, "ada", "login") == "ssh -N -L 8787:10.0.0.7:8787 ada@login"
    assert ssh_command(near, "ada", "login") == "ssh -N -J ada@login -L 34567:127.0.0.1:34567 ada@10.0.0.7"
    here = DashboardEndpoint("127.0.0.1", 34567, "t", "127.0.0.1")
    assert ssh_command(here, "ada", "login") == "ssh -N -L 34567:127.0.0.1:34567 ada@login"
    assert far.link(9000) == "http://localhost:9000/status?token=t"


async def test_a_snapshot_that_is_under_way_is_not_shown_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, taken = threading.Event(), threading.Event(), []

    class Observer:
        def __init__(self, directory: object) -> None:
            pass

        def soon(self) -> None:
            taken.append("polls again")

        def snapshot(self) -> object:
            number = sum(isinstance(one, int) for one in taken)
            taken.append(number)
            began.set()
            assert goes_on.wait(60)
            return SimpleNamespace(as_json=lambda: number)

    monkeypatch.setattr(snapshots, "Observer", Observer)
    directory, shown = SimpleNamespace(path=CLUSTER, created=1.0), snapshots.Snapshots()
    first = asyncio.ensure_future(shown.get(directory))  # type: ignore[arg-type]
    assert await asyncio.to_thread(began.wait, 60)
    shown.changed(directory)  # type: ignore[arg-type]
    second = asyncio.ensure_future(shown.get(directory))  # type: ignore[arg-type]
    goes_on.set()
    assert (await first, await second) == (0, 1)
    assert taken == [0, "polls again", 1]


async def test_many_pages_share_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[int]()

    class Observer:
        def __init__(self, directory: object) -> None:
            pass

        def snapshot(self) -> object:
            taken.append(len(taken))
            return SimpleNamespace(as_json=lambda: taken[-1])

    monkeypatch.setattr(snapshots, "Observer", Observer)
    directory, shown = SimpleNamespace(path=CLUSTER, created=1.0), snapshots.Snapshots()
    assert await asyncio.gather(*(shown.get(directory) for _ in range(20))) == [0] * 20  # type: ignore[arg-type]
    assert await shown.get(directory) == 0 and taken == [0]  # type: ignore[arg-type]
    monkeypatch.setattr(snapshots, "_FRESH", 0.0)
    assert await shown.get(directory) == 1, "an old one is taken anew"  # type: ignore[arg-type]


def test_a_page_of_dask_sets_no_cookie_of_the_jupyter_server_and_gives_its_page_to_no_other_origin() -> None:
    pytest.importorskip("jupyter_server")
    from hpcgpu.jupyter.dashboard_proxy import Dashboard

    given = {"Content-Type": "text/html", "Set-Cookie": "token=a-secret", "Access-Control-Allow-Origin": "*"}
    response: Any = SimpleNamespace(headers=HTTPHeaders(given))
    proxy: Any = SimpleNamespace(content_security_policy="default-src 'self'")
    Dashboard._cleaned(proxy, response, "/status")
    assert response.headers["Content-Type"] == "text/html"
    assert not {"Set-Cookie", "Access-Control-Allow-Origin"} & set(response.headers)


def test_a_start_from_the_page_goes_on_if_the_terminal_of_the_server_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport json, os\nprint(json.dumps({{'session': os.getsid(0), 'process': os.getpid()}}))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = start_from_form.run(["start", "demo"])
    assert started["session"] == started["process"], "a session of its own"


def test_a_saved_form_has_what_was_typed_above_what_its_profile_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    first = {"name": "base", "options": {"system": "local", "cores": "4", "memory": "8GB"}}
    start_from_form.save(first)
    start_from_form.save({"name": "mine", "options": {"profile": "base", "cores": "6"}})
    saved = site_profiles.load("mine").options
    assert (str(saved["cores"]), saved["memory"]) == ("6", "8GB")
