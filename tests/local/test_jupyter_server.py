"""The extension of the Jupyter server, as browsers and strangers meet it: its API, and the dashboards."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

import dask
import pytest
from bokeh.util.token import get_token_payload
from browser import PATH
from distributed import Client
from distributed.client import FutureCancelledError
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest, HTTPResponse
from tornado.websocket import websocket_connect

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from tests.conftest import live, wait_until
from tests.helpers import CPU, ON_CPUS, hpcgpu

pytest.importorskip("jupyter_server", reason="the extra `jupyter` is not installed")
pytest.importorskip("jupyter_server_proxy", reason="the extra `jupyter` is not installed")

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"
LOGIN = {"Authorization": f"token {TOKEN}"}


class Server:
    """A Jupyter server that runs, and what it answers."""

    def __init__(self, place: Path, base: str) -> None:
        self.place, self.base, self.address = place, base, ""

    def fetch(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> HTTPResponse:
        """Send a request; by default without a login."""

        async def send() -> HTTPResponse:
            request = HTTPRequest(
                f"{self.address}{self.base}{path}",
                method=method,
                body=json.dumps(body) if body is not None else None,
                headers=headers,
                follow_redirects=False,
                request_timeout=200,
                allow_nonstandard_methods=True,
            )
            return await AsyncHTTPClient(force_instance=True).fetch(request, raise_error=False)

        return asyncio.run(send())

    def listen(self, path: str, session: str, **headers: str) -> str:
        """Open a websocket of Bokeh, and return its first message."""

        async def first() -> str:
            url = f"{self.address}{self.base}{path}".replace("http", "ws", 1)
            socket = await websocket_connect(HTTPRequest(url, headers=headers), subprotocols=["bokeh", session])
            message = str(await socket.read_message())
            socket.close()
            while await socket.read_message() is not None:
                pass
            return message

        return asyncio.run(first())

    def run(self, code: str) -> str:
        """Run a cell in a new kernel of this server; return what it printed."""
        kernel = self.ask("api/kernels", {})[1]["id"]

        async def printed() -> str:
            url = f"{self.address}{self.base}api/kernels/{kernel}/channels".replace("http", "ws", 1)
            socket = await websocket_connect(HTTPRequest(url, headers=LOGIN))
            content = {"code": code, "silent": False}
            about = {"header": {"msg_id": "1", "msg_type": "execute_request"}, "parent_header": {}, "metadata": {}}
            await socket.write_message(json.dumps({**about, "content": content, "channel": "shell"}))
            text = ""
            while True:
                message = json.loads(await socket.read_message() or "{}")
                kind, content = message["msg_type"], message["content"]
                assert kind != "error", "\n".join(content["traceback"])
                if kind == "stream" and content["name"] == "stdout":
                    text += content["text"]
                if kind == "execute_reply":
                    socket.close()
                    return text

        try:
            return asyncio.run(asyncio.wait_for(printed(), 200))
        finally:
            self.fetch(f"api/kernels/{kernel}", "DELETE", **LOGIN)

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request of somebody who is logged in; return status and JSON."""
        answer = self.fetch(path, "GET" if body is None else "POST", body, **LOGIN)
        return answer.code, json.loads(answer.body)


def _answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, (server.place / "log").read_text()
    try:
        [about] = [json.loads(path.read_text()) for path in server.place.glob("RUNTIME_DIR/jpserver-*.json")]
        server.address = f"http://127.0.0.1:{about['port']}"
        return server.fetch("api").code == 200
    except (ValueError, OSError):
        return False


#: Lets everybody read and nobody change anything.
READER = """
from jupyter_server.auth import Authorizer

class Reader(Authorizer):
    def is_authorized(self, handler, user, action, resource):
        return action == "read"

c.ServerApp.authorizer_class = Reader
"""


@contextmanager
def jupyter_server(place: Path, base: str = "/", config: str = "") -> Iterator[Server]:
    """A real Jupyter server with the extension as the wheel installs it, under a path prefix."""
    server = Server(place, base)
    place.mkdir()
    (place / "CONFIG_DIR").mkdir()
    (place / "CONFIG_DIR" / "jupyter_server_config.py").write_text(config)
    names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    environment |= {f"JUPYTER_{name}": str(place / name) for name in names} | {"JUPYTER_TOKEN": TOKEN}
    environment |= {"HOME": str(place), "JUPYTER_CONFIG_PATH": str(ROOT / "jupyter-config"), "PYTHONPATH": PATH}
    options = ("ip=127.0.0.1", "port=0", "allow_root=True", "open_browser=False", f"base_url={base}")
    argv = [sys.executable, "-m", "jupyter_server", *(f"--ServerApp.{option}" for option in options)]
    with open(place / "log", "w") as log:
        process = subprocess.Popen(argv, cwd=place, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(server, process), (place / "log").read_text)
        yield server
    finally:
        process.terminate()
        process.wait(150)


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster for all tests that leave it as it was."""
    with LocalGPUCluster(name="demo", jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(timeout=150)
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: LocalGPUCluster, shared_home: Path) -> Iterator[Server]:
    """As a hub has it; tests/browser/test_dashboard_frame.py has one without a path prefix, too."""
    with jupyter_server(shared_home / "jupyter", "/user/ada/") as server:
        yield server


@pytest.fixture
def own_server(home: Path) -> Iterator[Server]:
    with jupyter_server(home / "jupyter", "/user/ada/") as server:
        yield server


def test_pages_and_api_want_a_login(server: Server) -> None:
    for path in ("hpcgpu/api/clusters", "hpcgpu/api/clusters/demo", "hpcgpu/api/clusters/demo/logs"):
        assert server.fetch(path).code == 403
    for path in ("hpcgpu/", "hpcgpu/static/page.js", "hpcgpu/dashboard/demo/status", "proxy/hpcgpu/demo/status"):
        answer = server.fetch(path)
        assert answer.code == 302 and "/login" in answer.headers["Location"]
    for path in ("hpcgpu/api/clusters/demo/stop", "hpcgpu/api/inboxes/0a"):
        assert server.fetch(path, "POST", {}).code == 403
    with pytest.raises(HTTPClientError, match="403"):
        server.listen("hpcgpu/dashboard/demo/status/ws", "x")


def test_who_may_only_read_changes_nothing(cluster: LocalGPUCluster, shared_home: Path) -> None:
    """The site's authorizer decides: JupyterHub shares a server with others so, for example."""
    place = shared_home / "jupyter-read-only"
    with jupyter_server(place, config=READER) as server:
        assert server.ask("hpcgpu/api/clusters/demo")[0] == 200
        assert server.fetch("hpcgpu/dashboard/demo/status", **LOGIN).code == 200
        for path in ("hpcgpu/api/clusters/demo/stop", "hpcgpu/api/clusters", "hpcgpu/api/inboxes/0a"):
            assert server.fetch(path, "POST", {}, **LOGIN).code == 403
    assert not cluster.directory.closing


def test_the_api_shows_scales_detaches_and_stops_a_cluster(own_server: Server, queue: LocalQueue) -> None:
    server = own_server
    with LocalGPUCluster(name="demo", jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(timeout=150)
        code, listed = server.ask("hpcgpu/api/clusters")
        [row] = listed["clusters"]
        assert code == 200 and (row["name"], row["state"], row["workers"], row["problem"]) == ("demo", "running", 1, "")
        shown = server.ask("hpcgpu/api/clusters/demo")[1]
        assert [(job["kind"], job["state"]) for job in shown["jobs"]] == [
            ("scheduler", "running"),
            ("worker", "running"),
        ]
        assert shown["dashboard"] == f"{server.base}hpcgpu/dashboard/demo/status"

        # this thread, which has the cluster, waits for the answer: so a cell does that runs
        assert server.ask("hpcgpu/api/clusters/demo/scale", {"jobs": 2}) == (200, {"name": "demo"})
        wait_until(lambda: server.ask("hpcgpu/api/clusters/demo")[1]["workers"] == 2, "the second worker is shown")
        assert cluster.managing, "the program that has the cluster keeps it"
        assert server.ask("hpcgpu/api/clusters/demo/adapt", {"maximum_jobs": 3})[0] == 200
        adaptive = cluster.adaptive
        assert adaptive is not None and adaptive.maximum == 3
        wait_until(lambda: "as you work interactively" in adaptive.state.reason, "a person clicked")
        for request, words in (
            ({"jobs": -1}, "jobs"),
            ({"jobs": [1]}, "must be a number"),
            ({"workers": 1}, "cannot have 'workers'"),
        ):
            code, answer = server.ask("hpcgpu/api/clusters/demo/scale", request)
            assert code in (400, 409) and words in answer["message"]
        assert not cluster.directory.detached
        assert server.ask("hpcgpu/api/clusters/demo/detach", {}) == (200, {"name": "demo"})
        assert cluster.managing and cluster.directory.detached
        assert server.ask("hpcgpu/api/clusters/demo/stop", {}) == (200, {"name": "demo"})
        assert server.ask("hpcgpu/api/clusters") == (200, {"clusters": []})


def test_a_message_reaches_a_widget_while_a_cell_of_its_kernel_runs(server: Server) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    name, printed = server.place / "name", list[str]()
    code = f"""
import pathlib, queue
from hpcgpu.widget.busy_kernel_inbox import opened
messages = queue.SimpleQueue()
inbox = opened(messages.put)
pathlib.Path({str(name)!r}).write_text(inbox.name)
print(messages.get(timeout=150), oct(inbox._path.parent.stat().st_mode))
"""
    cell = threading.Thread(target=lambda: printed.append(server.run(code)))
    cell.start()
    wait_until(lambda: name.exists() and name.read_text(), "the cell runs")
    assert server.ask(f"hpcgpu/api/inboxes/{name.read_text()}", {"do": "stop"}) == (200, {})
    cell.join()
    assert printed == ["{'do': 'stop'} 0o40700\n"]
    wait_until(
        lambda: (
            server.ask(f"hpcgpu/api/inboxes/{name.read_text()}", {})
            == (404, {"message": "the kernel does not take it"})
        ),
        "the kernel ends",
    )


def test_the_end_of_a_log_is_shown(server: Server, cluster: LocalGPUCluster) -> None:
    [log] = cluster.directory.logs.glob("demo-0-*")
    with open(log, "a") as file:
        file.write("beginning" + "x" * 100_000 + "<script>\n")
    code, answer = server.ask("hpcgpu/api/clusters/demo/logs?job=demo-0")
    assert code == 200 and "x<script>" in answer["text"] and "beginning" not in answer["text"]
    assert "demo-scheduler" not in answer["text"]
    code, answer = server.ask("hpcgpu/api/clusters/demo/logs?job=other")
    assert code == 409 and "has no job 'other'" in answer["message"]


@pytest.mark.parametrize(
    ("path", "location", "below"),
    [
        ("/", "/status?a=1", "status?a=1"),
        ("info/main/workers.html", "/info/logs", "info/logs"),
        ("/info/", "./x", "info/x"),
        ("/info/main", "/", ""),
        ("/", "/\\/elsewhere.org", "%5C/elsewhere.org"),
        ("/", "/a:b", "a:b"),
    ],
)
def test_a_redirect_of_the_dashboard_leads_to_an_address_below_its_own(path: str, location: str, below: str) -> None:
    from hpcgpu.jupyter.dashboard_proxy import redirect_below

    seen = redirect_below(location, path)
    here = f"https://hub/user/ada/hpcgpu/dashboard/demo/{path.lstrip('/')}"
    assert urljoin(here, seen.replace("\\", "%5C")) == f"https://hub/user/ada/hpcgpu/dashboard/demo/{below}"


@pytest.mark.parametrize("location", ["https://elsewhere.org/", "//elsewhere.org/x", "javascript:alert(1)"])
def test_a_redirect_of_the_dashboard_to_another_server_is_dropped(location: str) -> None:
    from hpcgpu.jupyter.dashboard_proxy import redirect_below

    assert redirect_below(location, "/status") is None


def test_the_dashboard_is_served_with_its_websocket_and_no_secret_passes(
    server: Server, cluster: LocalGPUCluster
) -> None:
    """Bokeh writes all headers, cookies and arguments that it gets into its pages."""
    secret = cluster.directory.dashboard_token()
    here = "hpcgpu/dashboard/demo"
    assert server.fetch(here, **LOGIN).headers["Location"] == f"{server.base}{here}/"
    redirect = server.fetch(f"{here}/", **LOGIN)
    assert urljoin(f"{server.base}{here}/", redirect.headers["Location"]) == f"{server.base}{here}/status"
    for path in (f"{here}/status?token={TOKEN}", "proxy/hpcgpu/demo/status"):
        page = server.fetch(path, **LOGIN, Cookie="_xsrf=a-secret; other=a-secret", Referer="http://a-secret")
        [session] = re.findall(r'"token":"([^"]+)"', page.body.decode())
        seen = get_token_payload(session)
        assert not {"Authorization", "Cookie", "Referer", "Origin"} & set(seen["headers"])
        assert seen["cookies"] == seen["arguments"] == {}
        assert not any(word in f"{seen} {page.body.decode()} {page.headers}" for word in (secret, TOKEN, "a-secret"))
        message = server.listen(f"{path.partition('?')[0]}/ws", session, **LOGIN)
        assert json.loads(message)["msgtype"] == "ACK", "Bokeh answers"
    script = re.findall(r'src="(static/js/bokeh.min.js[^"]+)"', page.body.decode())[0]
    assert server.fetch(f"{here}/{script}", **LOGIN).code == 200
    plots = server.fetch(f"{here}/individual-plots.json", **LOGIN)
    assert plots.code == 200 and json.loads(plots.body)
    assert server.fetch(f"{here}/info/main/workers.html", **LOGIN).code == 200


def test_in_a_notebook_all_links_lead_to_the_dashboard_behind_the_login(
    server: Server, cluster: LocalGPUCluster
) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    code = f"""
import dask, hpcgpu
from distributed import Client
clients = [hpcgpu.connect("demo", quiet=True)]
dask.config.set({{"distributed.client.security-loader": "hpcgpu.client.connect.security_for"}})
clients.append(Client({cluster.scheduler_address!r}))  # the code that dask-labextension writes
for client in clients:
    print(client.dashboard_link)
    assert client.dashboard_link in client._repr_html_()
    client.close()
"""
    path = f"{server.base}hpcgpu/dashboard/demo/status"
    links = server.run(code).split()
    # Jupyter reports its address; under a path prefix it is that of a hub or another proxy, which only browsers have
    assert links == [f"{server.address}{path}" if server.base == "/" else path] * 2
    assert server.fetch(path.removeprefix(server.base), **LOGIN).code == 200


def test_who_navigates_gets_a_page_of_ours_and_a_frame_without_an_origin(
    server: Server, cluster: LocalGPUCluster
) -> None:
    """tests/browser/test_dashboard_frame.py has what a browser makes of that."""
    browses = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for here in ("hpcgpu/dashboard/demo", "proxy/hpcgpu/demo"):
        for path in (f"{here}/status", f"{here}/status?~frame"):
            assert server.fetch(path, **browses).code == 302, "to the login"
        around, inside = (server.fetch(f"{here}/status{what}", **LOGIN, **browses) for what in ("", "?~frame"))
        assert f'data-base="/user/ada/{here}/"' in around.body.decode() and b"Bokeh" not in around.body
        _, policy = around.headers["Content-Security-Policy"].split(", ")
        assert "default-src 'none'" in policy and "unsafe" not in policy
        _, policy = inside.headers["Content-Security-Policy"].split(", ")
        assert policy.startswith("sandbox allow-scripts ") and "allow-same-origin" not in policy
        assert "default-src 'none'" in policy and "connect-src" not in policy and b"Bokeh" not in inside.body
        page = server.fetch(f"{here}/status", **LOGIN)
        assert b"Bokeh" in page.body and page.headers["Content-Security-Policy"].endswith(", sandbox")
        assert {"Accept"} <= {"".join(one.headers.get_list("Vary")) for one in (around, inside, page)}
    assert server.fetch("hpcgpu/static/dashboard.js", **LOGIN).code == 200
    assert server.fetch("hpcgpu/static/dashboard.js").code == 302
    for name in ("x%22%3E%3Cscript%3E", "%22onload=%22"):
        answer = server.fetch(f"hpcgpu/dashboard/{name}/status", **LOGIN, **browses)
        assert answer.code == 200 and answer.body.count(b"<script") == 1 and b'"onload' not in answer.body


def test_a_page_of_another_server_reaches_nothing(server: Server, cluster: LocalGPUCluster) -> None:
    opened = server.fetch(f"hpcgpu/?token={TOKEN}")
    assert opened.code == 200 and "default-src 'none'" in opened.headers["Content-Security-Policy"]
    cookies = "; ".join(text.split(";")[0] for text in opened.headers.get_list("Set-Cookie"))
    [xsrf] = re.findall(r"_xsrf=([^;]+)", cookies)
    ours, theirs = {"Cookie": cookies}, {"Cookie": cookies, "Origin": "http://elsewhere"}
    assert server.fetch("hpcgpu/api/clusters", **ours).code == 200
    assert server.fetch("hpcgpu/api/clusters", **theirs).code in (403, 404)
    assert server.fetch("hpcgpu/dashboard/demo/status", **theirs).code == 403
    with pytest.raises(HTTPClientError, match="403"):
        server.listen("hpcgpu/dashboard/demo/status/ws", "x", **theirs)
    scale = ("hpcgpu/api/clusters/demo/scale", "POST", {"jobs": 0})
    assert server.fetch(*scale, **ours).code == 403, "without what only our page knows"
    assert server.fetch(*scale, **theirs, **{"X-XSRFToken": xsrf}).code in (403, 404)
    assert len(cluster.plan) == 1
    assert server.fetch(*scale[:2], {"jobs": 1}, **ours, **{"X-XSRFToken": xsrf}).code == 200


def test_only_the_host_and_port_of_the_contact_are_reached(server: Server, cluster: LocalGPUCluster) -> None:
    port = int(cluster.directory.contact().dashboard.rpartition(":")[2])  # type: ignore[union-attr]
    for path in (
        f"hpcgpu/dashboard/demo:{port}/status",
        f"hpcgpu/dashboard/127.0.0.1:{port}/status",
        "hpcgpu/dashboard/..%2fclusters%2fdemo/status",
        f"hpcgpu/dashboard/{quote(str(cluster.directory.path), safe='')}/status",
        "hpcgpu/dashboard/%3Cscript%3E/status",
        "hpcgpu/dashboard/other/status",
        "hpcgpu/dashboard/demo%00/status",
        "hpcgpu/dashboard/demo/proxy/22/localhost/status",
        "hpcgpu/dashboard/demo/%70roxy/22/localhost/status",
        "hpcgpu/api/clusters/..%2fdemo",
        "hpcgpu/api/clusters/%2e%2e%2fdemo/logs",
        "hpcgpu/api/clusters/../clusters/demo/../x",
        "hpcgpu/static/..%2f__init__.py",
        "hpcgpu/static/page_shell.html",
    ):
        answer = server.fetch(path, **LOGIN)
        assert answer.code in (400, 403, 404) and b"<script>" not in answer.body.partition(b"<body")[2], path
    with pytest.raises(HTTPClientError, match="403"):
        server.listen("hpcgpu/dashboard/demo/proxy/22/localhost/ws", "x", **LOGIN)
    for method in ("POST", "PUT", "DELETE"):
        assert server.fetch("hpcgpu/dashboard/demo/status", method, {}, **LOGIN).code == 405


def test_another_program_on_the_port_of_a_dashboard_gets_no_token_and_shows_nothing(
    server: Server, cluster: LocalGPUCluster
) -> None:
    """When a scheduler was killed, its contact is left, and any user of its node can listen on its port."""
    seen: list[str] = []

    class Impostor(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"a page with a script of theirs")

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        contact, secret = cluster.directory.contact(), cluster.directory.dashboard_token()
        assert contact is not None
        cluster.directory.publish(replace(contact, dashboard=f"127.0.0.1:{impostor.server_port}"))
        answer = server.fetch("hpcgpu/dashboard/demo/status", **LOGIN)
        assert answer.code == 409 and b"another program listens" in answer.body and b"theirs" not in answer.body
        with pytest.raises(HTTPClientError, match="409"):
            server.listen("hpcgpu/dashboard/demo/status/ws", "x", **LOGIN)
        impostor.shutdown()
    assert seen and not any(secret in request or TOKEN in request for request in seen)
    for place in ("localhost:0", "localhost:99999", "a/b:80", "user@host:80", "", "host"):
        cluster.directory.publish(replace(contact, dashboard=place))
        assert server.fetch("hpcgpu/dashboard/demo/status", **LOGIN).code == 409, place
    cluster.directory.publish(contact)
    assert server.fetch("hpcgpu/dashboard/demo/status", **LOGIN).code == 200, "the contact is read anew"


def test_what_other_users_can_change_is_not_used(server: Server, cluster: LocalGPUCluster) -> None:
    path = cluster.directory.path
    path.chmod(0o777)
    for address in ("hpcgpu/dashboard/demo/status", "hpcgpu/api/clusters/demo"):
        answer = server.fetch(address, **LOGIN)
        assert answer.code == 403 and b"other users can change it" in answer.body
    code, answer = server.ask("hpcgpu/api/clusters/demo/stop", {})
    assert code == 403
    [row] = server.ask("hpcgpu/api/clusters")[1]["clusters"]
    assert "other users can change it" in row["problem"]
    path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(path / "contact.json", 65534, 65534)
        assert server.fetch("hpcgpu/dashboard/demo/status", **LOGIN).code == 403
        os.chown(path / "contact.json", 0, 0)
    assert server.fetch("hpcgpu/dashboard/demo/status", **LOGIN).code == 200


def test_a_cluster_is_started_from_a_form_that_is_saved(own_server: Server, queue: LocalQueue) -> None:
    server = own_server
    options = {"system": "local", "gpus_per_node": 0, "cores": 1, "jobs": 1, "poll_interval": 0.5}
    for name, wrong, words in (
        ("../x", {}, "not a valid name"),
        ("-x", {}, "not a valid name"),
        ("x", {"config": "/etc/passwd"}, "cannot be set from Jupyter"),
        ("x", {"no-such": 1}, "--no-such"),
        ("x", {**options, "jobs": "many"}, "many"),
        ("x", {**options, "jobs": {"a": 1}}, "must be a number, or text in quotes"),
        ("x", {**options, "scheduler": {"name": "y"}}, "cannot be set from Jupyter"),
        ("x", {**options, "scheduler": {"cores": [1]}}, "must be a number, or text in quotes"),
    ):
        code, answer = server.ask("hpcgpu/api/clusters", {"name": name, "options": wrong})
        assert code == 400 and words in answer["message"], answer
    assert server.ask("hpcgpu/api/profiles", {"name": "mine", "options": options}) == (201, {"name": "mine"})
    shown = server.ask("hpcgpu/api/profiles")[1]
    [mine] = [profile for profile in shown["profiles"] if profile["yours"]]
    assert (mine["name"], mine["system"], mine["options"]["gpus-per-node"]) == ("mine", "local", 0)
    code, answer = server.ask("hpcgpu/api/profiles", {"name": "perlmutter", "options": options})
    assert code == 400 and "choose another name" in answer["message"]

    more = {"profile": "mine", "scheduler": {"memory": "1GB"}}
    assert server.ask("hpcgpu/api/profiles", {"name": "mine", "options": more | {"scheduler": {"cores": 1}}})[0] == 201
    code, started = server.ask("hpcgpu/api/clusters", {"name": "new", "options": more})
    assert code == 201 and started["name"] == "new", started
    kept = json.loads((Path(started["directory"]) / "options.json").read_text())
    assert (kept["scheduler"]["cores"], kept["scheduler"]["memory"]) == (1, 10**9), "its own over the profile's"
    code, again = server.ask("hpcgpu/api/clusters", {"name": "new", "options": {"profile": "mine"}})
    assert code in (400, 409) and "exists" in again["message"]
    wait_until(lambda: server.ask("hpcgpu/api/clusters/new")[1]["workers"] == 1, "its worker is shown")
    assert server.ask("hpcgpu/api/clusters/new/stop", {})[0] == 200


def test_dask_labextension_makes_our_clusters_and_the_code_that_it_writes_connects(
    queue: LocalQueue, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("dask_labextension") is None:  # importing it needs an event loop
        pytest.skip("dask-labextension is not installed")
    monkeypatch.setenv("DASK_CONFIG", str(home / "dask-config"))
    done = hpcgpu("jupyter-config", *ON_CPUS, "--jobs", "1")
    assert done.returncode == 0 and "labextension_hpcgpu.yaml is written" in done.stdout, done.stderr
    with jupyter_server(home / "jupyter", "/user/ada/") as server:
        place = "dask/clusters/0-1-2-3-4"
        made = server.fetch(place, "PUT", {}, **LOGIN)
        assert made.code == 200, "it does not wait for the scheduler job"
        link = json.loads(made.body)["dashboard_link"]
        assert link.startswith("/user/ada/proxy/"), "the panel reads it once, and opens such links as they are"
        wait_until(lambda: server.ask(place)[1]["workers"] == 1, "the worker is there")
        model = server.ask(place)[1]
        code = f'from dask.distributed import Client\n\nclient = Client("{model["scheduler_address"]}")\nclient'
        told = subprocess.run(
            [sys.executable, "-c", f"{code}\nprint(client.submit(sum, [1, 2]).result())\nclient.close()"],
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert told.stdout == "3\n", told.stderr
        assert model["dashboard_link"] == link
        page = server.fetch(link.removeprefix("/user/ada/"), **LOGIN)
        assert page.code == 200 and b"Dask Diagnostic UI" in page.body
        assert server.fetch(place, "DELETE", **LOGIN).code == 204
    wait_until(lambda: not live(queue), "its jobs end")


def test_what_dask_labextension_made_goes_on_with_the_next_scheduler(
    queue: LocalQueue, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("dask_labextension") is None:
        pytest.skip("dask-labextension is not installed")
    monkeypatch.setenv("DASK_CONFIG", str(home / "dask-config"))
    done = hpcgpu("jupyter-config", *ON_CPUS, "--jobs", "1", "--on-scheduler-end", "restart")
    assert done.returncode == 0, done.stderr
    with jupyter_server(home / "jupyter", "/user/ada/") as server:
        place = "dask/clusters/0-1-2-3-4"
        link = json.loads(server.fetch(place, "PUT", {}, **LOGIN).body)["dashboard_link"]
        wait_until(lambda: server.ask(place)[1]["workers"] == 1, "the worker is there")
        before = server.ask(place)[1]
        name = link.split("/")[-2]
        [worker] = queue.find(f"{name}-0")
        loader = {"distributed.client.security-loader": "hpcgpu.client.connect.security_for"}
        with dask.config.set(loader), Client(before["scheduler_address"], set_as_default=False) as client:
            lost = client.submit(time.sleep, 1000)
            os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
            with pytest.raises(FutureCancelledError, match="gone and another one is started"):
                lost.result(timeout=150)
            assert client.submit(pow, 2, 5).result(timeout=150) == 32, "the client follows"
        wait_until(lambda: server.ask(place)[1]["workers"] == 1, "the worker is there again")
        after = server.ask(place)[1]
        assert after["scheduler_address"] != before["scheduler_address"] and after["dashboard_link"] == link
        page = server.fetch(link.removeprefix("/user/ada/"), **LOGIN)
        assert page.code == 200 and b"Dask Diagnostic UI" in page.body
        assert worker in live(queue) and server.ask(f"hpcgpu/api/clusters/{name}")[1]["state"] == "running"
        assert server.fetch(place, "DELETE", **LOGIN).code == 204
    wait_until(lambda: not live(queue), "its jobs end")


def test_a_configuration_that_another_file_overrides_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_CONFIG", str(home / "dask-config"))
    monkeypatch.setenv("DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER", "of.another")
    done = hpcgpu("jupyter-config", *ON_CPUS)
    assert done.returncode == 1 and "sets distributed.client.security-loader to 'of.another'" in done.stderr
    assert hpcgpu("jupyter-config", *ON_CPUS, "--jobs", "many").returncode == 2
