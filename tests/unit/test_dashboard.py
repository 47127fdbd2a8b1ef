"""The dashboard's token is asked for before anything else happens to a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from socket import create_connection
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from threading import enumerate as threads
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import dask
import distributed.node
import psutil
import pytest
from click.testing import CliRunner
from distributed import Scheduler
from distributed.comm.utils import get_tcp_server_address
from distributed.http.routing import RoutingApplication
from tornado.httpserver import HTTPServer
from tornado.web import RequestHandler
from tornado.websocket import WebSocketHandler

from hpcgpu.cli import main
from hpcgpu.client import dashboard_forwarding
from hpcgpu.client.dashboard_forwarding import endpoint, forward, listening, proven_link
from hpcgpu.dask_scheduler import add_dashboard
from hpcgpu.errors import ClusterError
from hpcgpu.fabric import unauthenticated_connections
from hpcgpu.runtime import dashboard_access, dashboard_frame
from hpcgpu.runtime.dashboard_access import PROOF, ServerWithToken, link, link_with_token, proof
from hpcgpu.store import create_directory
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory


class _Page(RequestHandler):
    asked: ClassVar[list[str]] = []

    def get(self) -> None:
        self.asked.append(self.request.uri or "")
        self.set_header("Seen", str("Authorization" in self.request.headers))
        self.write("the page")

    post = put = get


class _Socket(WebSocketHandler):
    def open(self, *_: str) -> None:
        _Page.asked.append("websocket")


@pytest.fixture
def directory(tmp_path: Path) -> ClusterDirectory:
    return create_directory.claim(tmp_path / "demo", lambda submits: [], system="local")


@pytest.fixture
def port(directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of distributed's kind that requires the token. It keeps five connections of strangers."""
    monkeypatch.setattr(unauthenticated_connections, "_MOST", 5)
    _Page.asked.clear()
    ready, ports, ends = Event(), list[int](), list[Any]()

    async def serve() -> None:
        application = RoutingApplication(
            [(r"/health", _Page), (r"/status", _Page), (r"/ws", _Socket), (r"/proxy/.*", _Page)]
        )
        server = ServerWithToken(application, directory)
        server.listen(0, "127.0.0.1")
        ports.append(get_tcp_server_address(server)[1])
        ended = asyncio.Event()
        ends.extend([asyncio.get_running_loop(), ended])
        ready.set()
        await ended.wait()
        server.stop()
        await server.close_all_connections()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield ports[0]
    loop, ended = ends
    loop.call_soon_threadsafe(ended.set)
    thread.join()


class Reply(NamedTuple):
    status: int
    headers: HTTPMessage
    body: bytes


def ask(port: int, path: str, method: str = "GET", body: Any = None, **headers: str) -> Reply:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return Reply(answer.status, answer.headers, b"" if answer.status == 101 else answer.read())


UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.mark.parametrize(
    "headers",
    [{}, UPGRADE, {"Authorization": "token wrong"}, {"Authorization": "token "}, {"Authorization": "Bearer é"}],
)
@pytest.mark.parametrize(
    "path", ["/status", "/ws", "/sitemap.json", "/none", "/status?token=", "/status?token=wrong", "/status?token=%ff"]
)
def test_without_the_token_no_handler_is_reached(port: int, path: str, headers: dict[str, str]) -> None:
    answer = ask(port, path, **headers)
    assert answer.status == 403 and b"hpcgpu dashboard NAME" in answer.body
    assert answer.headers["Connection"] == "close" and not _Page.asked


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_no_method_is_a_way_around_the_token(port: int, method: str) -> None:
    assert ask(port, "/status", method).status == 403 and not _Page.asked


@pytest.mark.parametrize(
    "path", ["//health", "/health/", "/health/../status", "/status#/health", "/%68ealth/../status", "/health;/status"]
)
def test_what_resembles_health_is_no_way_around(port: int, path: str) -> None:
    assert ask(port, path).status == 403 and not _Page.asked


def test_health_is_open(port: int) -> None:
    answer = ask(port, "/health")
    assert (answer.status, answer.body) == (200, b"ok")


def test_the_cluster_proves_that_it_listens_to_who_has_the_token(port: int, directory: ClusterDirectory) -> None:
    nonce, token = "0123456789abcdef" * 4, directory.dashboard_token()
    answer, here = ask(port, f"{PROOF}?nonce={nonce}"), ("127.0.0.1", port)
    assert answer.status == 200 and answer.body.decode() == proof(token, nonce, here) != proof(token, nonce[::-1], here)
    assert proof(token, nonce, here) not in (proof(token, nonce, ("127.0.0.1", 1)), proof(token, nonce, ("::1", port)))
    assert proof(token, nonce, here) == proof(token, nonce, ("::ffff:127.0.0.1", port, 0, 0))
    assert token.encode() not in answer.body and answer.headers["Set-Cookie"] is None
    for query in ("", "?nonce=", f"?nonce={nonce}0", f"?nonce={nonce[1:]}g", f"?nonce={nonce}&a=1", f"?{nonce[1:]}"):
        assert ask(port, PROOF + query).status == 403
    assert not _Page.asked


def publish(directory: ClusterDirectory, port: int) -> None:
    """Let the contact record that the dashboard listens there."""
    directory.publish(
        Contact(token=directory.token(), job_id="1", workers="", client="", dashboard=f"127.0.0.1:{port}")
    )


class Rogue(BaseRequestHandler):
    """A program of another user that has got the port of a dashboard. It keeps what it receives."""

    heard: ClassVar[list[bytes]] = []
    over: ClassVar[Event]

    def handle(self) -> None:
        self.request.settimeout(60)
        asked = self.request.recv(4096)
        self.heard.append(asked)
        self.answer(asked)

    def answer(self, asked: bytes) -> None:
        raise NotImplementedError


class Slow(Rogue):
    """Sends a byte now and then, without an end."""

    def answer(self, asked: bytes) -> None:
        with suppress(OSError):
            while not self.over.wait(0.05):
                self.request.sendall(b"H")


class Relay(Rogue):
    """Gets the answer from the cluster's new scheduler, and hands it on as its own."""

    port = 0

    def answer(self, asked: bytes) -> None:
        with closing(create_connection(("127.0.0.1", self.port), timeout=60)) as cluster:
            cluster.sendall(asked)
            while piece := cluster.recv(4096):
                self.request.sendall(piece)


@contextmanager
def serving(rogue: type[Rogue]) -> Iterator[int]:
    """Let it listen; return its port."""
    Rogue.heard, Rogue.over = [], Event()
    with ThreadingTCPServer(("127.0.0.1", 0), rogue) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            Rogue.over.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "path",
    ["/proxy/1/%3Cscript%3Ealert(1)%3C/script%3E/x", "/proxy/1/h/<b>", "/proxy/1/h/x%22onclick=%22y", "/proxy/1/%26lt"],
)
def test_an_address_of_a_worker_is_no_markup(port: int, directory: ClusterDirectory, path: str) -> None:
    """distributed 2026.1.1 shows it as HTML where jupyter-server-proxy is not installed."""
    answer = ask(port, path, Authorization=f"token {directory.dashboard_token()}")
    assert answer.status == 400 and answer.headers["Content-Type"].startswith("text/plain")
    assert not _Page.asked


@pytest.mark.parametrize("path", ["/proxy/22/10.0.0.4/", "/proxy/80/metadata.example/latest"])
def test_the_token_opens_no_proxy_to_a_server_that_is_no_worker(
    port: int, directory: ClusterDirectory, path: str
) -> None:
    assert ask(port, path, Authorization=f"token {directory.dashboard_token()}").status == 400
    assert not _Page.asked


async def test_a_dashboard_that_proves_itself_is_reached(port: int, directory: ClusterDirectory) -> None:
    publish(directory, port)
    there = await listening(directory)
    assert (there.host, there.port, there.token) == ("127.0.0.1", port, directory.dashboard_token())
    assert proven_link(directory, directory.contact()) == link_with_token(directory, directory.contact())


async def test_an_impostor_who_sends_a_byte_now_and_then_holds_nobody(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dashboard_forwarding._TIMEOUT <= 10, "a person waits for the answer"
    monkeypatch.setattr(dashboard_forwarding, "_TIMEOUT", 1.0)
    with serving(Slow) as rogue:
        publish(directory, rogue)
        with pytest.raises(ClusterError, match=r"does not answer: no proof came within 1 s. To see whether"):
            await listening(directory)
        assert not any(thread.name.startswith("hpcgpu-listening") for thread in threads())


def test_an_impostor_who_asks_the_cluster_itself_has_no_proof(port: int, directory: ClusterDirectory) -> None:
    """The contact is that of a scheduler that has ended, and the cluster has a new one."""
    Relay.port = port
    with serving(Relay) as rogue:
        publish(directory, rogue)
        with pytest.raises(ClusterError, match="another program listens now"):
            asyncio.run(listening(directory))
        assert Rogue.heard and ask(port, "/health").status == 200


async def test_a_forwarded_port_is_open_on_this_machine_only_and_leads_to_no_other_program(
    port: int, directory: ClusterDirectory
) -> None:
    forwarded: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    refusals = asyncio.Queue[str]()
    forwarding = asyncio.ensure_future(forward(directory, 0, ready=forwarded.set_result, refused=refusals.put_nowait))
    local = await forwarded
    sockets = psutil.Process().net_connections("tcp")
    assert {one.laddr.ip for one in sockets if one.status == "LISTEN" and one.laddr.port == local} == {"127.0.0.1"}
    Relay.port = port
    with serving(Relay) as rogue:
        publish(directory, rogue)
        reader, writer = await asyncio.open_connection("127.0.0.1", local)
        writer.write(b"GET /status HTTP/1.1\r\n\r\n")
        assert await reader.read() == b"" and "another program listens now" in await asyncio.wait_for(
            refusals.get(), 60
        )
        writer.close()
    forwarding.cancel()


def test_without_its_token_a_dashboard_has_no_link_and_no_proof(directory: ClusterDirectory) -> None:
    """The token is removed when the cluster ends. Everybody can compute the proof of an empty one."""
    publish(directory, 8787)
    assert endpoint(directory).token
    directory.path.joinpath("dashboard.token").unlink()
    with pytest.raises(ClusterError, match="cluster demo has no dashboard"):
        endpoint(directory)


def test_no_command_prints_a_link_with_the_token_to_another_program(port: int, directory: ClusterDirectory) -> None:
    Relay.port = port
    with serving(Relay) as rogue, dask.config.set({"hpcgpu.cluster-directory": str(directory.path.parent)}):
        publish(directory, rogue)
        for argv in (["dashboard", "demo"], ["dashboard", "demo", "--forward"]):
            done = CliRunner().invoke(main, argv)
            assert done.exit_code == 1 and "another program listens now" in done.output, done.output
            assert directory.dashboard_token() not in done.output
        with pytest.raises(ClusterError, match="another program listens now"):
            proven_link(directory, directory.contact())
        assert Rogue.heard and not any(directory.dashboard_token().encode() in heard for heard in Rogue.heard)


def test_who_connects_without_end_pushes_out_himself_and_nobody_who_has_the_token(
    port: int, directory: ClusterDirectory
) -> None:
    with ExitStack() as stack:
        token = {"Authorization": f"token {directory.dashboard_token()}"}
        reader = stack.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=30)))
        reader.request("GET", "/status", headers=token)
        assert reader.getresponse().read() == b"the page"
        same = reader.sock
        silent = [stack.enter_context(create_connection(("127.0.0.1", port), timeout=10)) for _ in range(40)]
        assert ask(port, "/status", **token).status == 200, "somebody new comes in"
        assert all(one.recv(1) == b"" for one in silent[:34]), "the oldest ones end at once, not after 20 s"
        reader.request("GET", "/status", headers=token)
        assert reader.getresponse().read() == b"the page" and reader.sock is same, "who was there stays"


@pytest.mark.parametrize(("path", "status"), [("/status", 403), ("/health", 200), (f"{PROOF}?nonce={'0' * 64}", 200)])
@pytest.mark.parametrize("size", [("Content-Length", str(10**7)), ("Transfer-Encoding", "chunked")], ids=lambda s: s[0])
def test_a_body_of_a_stranger_is_not_read(port: int, path: str, status: int, size: tuple[str, str]) -> None:
    with closing(HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.putrequest("POST", path)
        connection.putheader(*size)
        connection.endheaders()
        with connection.getresponse() as answer:
            assert answer.status == status, "the answer comes before the body"
            assert answer.headers["Connection"] == "close" and not _Page.asked


def test_programs_send_a_header(port: int, directory: ClusterDirectory) -> None:
    token = directory.dashboard_token()
    for scheme in ("token", "Token", "Bearer"):
        answer = ask(port, "/status", Authorization=f"{scheme} {token}")
        assert answer.body == b"the page" and answer.headers["Seen"] == "False", "Bokeh writes headers into its pages"
    assert ask(port, "/status", Authorization=f"Basic {token}").status == 403
    assert ask(port, "/ws", Authorization=f"token {token}", **UPGRADE).status == 101


def test_a_browser_brings_the_token_once_and_gets_a_cookie(port: int, directory: ClusterDirectory) -> None:
    token = directory.dashboard_token()
    answer = ask(port, f"/status?a=1&token={token}&b=%26")
    assert (answer.status, answer.headers["Location"], answer.body) == (302, "./status?a=1&b=%26", b"")
    assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"
    cookie, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert attributes == ["Path=/", "HttpOnly", "SameSite=Lax"] and token not in cookie
    assert not _Page.asked, "no handler, and so no log, sees the token"
    for others in ("", "a=b; ", "a; =; "):
        assert ask(port, "/status", Cookie=f"{others}{cookie}").body == b"the page"
    name, value = cookie.split("=")
    for wrong in (f"{name}=", f"{name}={token}", f"{name}={value[:-1]}", f"x{name}={value}", f'{name}="é"', name):
        assert ask(port, "/status", Cookie=wrong.encode("latin1").decode("latin1")).status == 403, wrong


def test_a_page_of_another_server_cannot_use_the_cookie(port: int, directory: ClusterDirectory) -> None:
    """Browsers send the cookies of a host to all its ports, and another user may serve pages there."""
    cookie = ask(port, f"/status?token={directory.dashboard_token()}").headers["Set-Cookie"].split(";")[0]
    own = ask(port, "/ws", Cookie=cookie, Origin=f"http://127.0.0.1:{port}", **UPGRADE)
    assert own.status == 101
    for origin in ("http://127.0.0.1:1", "http://evil.example", "null"):
        for path, more in (("/ws", UPGRADE), ("/status", {})):
            answer = ask(port, path, Cookie=cookie, Origin=origin, **more)
            assert answer.status == 403 and b"needs a token" in answer.body, "not tornado's own refusal"


@pytest.mark.parametrize("query", ["", "~frame"])
def test_the_page_around_a_dashboard_has_addresses_as_text(query: str) -> None:
    _, shown = dashboard_frame.page(query, "\"><script>1</script>'", "x'\"><b>")
    assert "<script>1" not in shown and "<b>" not in shown
    for value in ("&#34;&gt;&lt;script&gt;1&lt;/script&gt;&#39;", "x&#39;&#34;&gt;&lt;b&gt;") if not query else ():
        assert f'"{value}"' in shown or f'"{value}statics' in shown


def test_who_navigates_gets_a_page_of_ours_and_a_frame_without_an_origin(
    port: int, directory: ClusterDirectory
) -> None:
    """tests/browser/test_dashboard_frame.py has what a browser makes of that."""
    token = directory.dashboard_token()
    cookie = ask(port, f"/status?token={token}", Accept="text/html").headers["Set-Cookie"].split(";")[0]
    browses = {"Cookie": cookie, "Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for path, base in (("/", "./"), ("/status", "./"), ("/info/main/workers.html?a=1", "../../"), ("//x/", "../../")):
        around = ask(port, path, **browses)
        assert around.status == 200 and f'data-base="{base}"'.encode() in around.body
        assert f'src="{base}~hpcgpu/dashboard.js"'.encode() in around.body
        assert "default-src 'none'" in (policy := around.headers["Content-Security-Policy"]) and "unsafe" not in policy
    inside = ask(port, "/status?~frame", **browses)
    policy = inside.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts ") and "allow-same-origin" not in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy
    assert not _Page.asked, "nothing of Dask is in them"
    script = ask(port, "/~hpcgpu/dashboard.js", Cookie=cookie)
    assert script.headers["Content-Type"].startswith("text/javascript") and b"DOMParser" in script.body
    for headers in ({"Cookie": cookie, "Accept": "*/*"}, {"Authorization": f"token {token}", "Accept": "text/html"}):
        answer = ask(port, "/status", **headers)
        assert answer.body == b"the page" and answer.headers["Content-Security-Policy"] == "sandbox"
    for path in ("/status", "/status?~frame", "/~hpcgpu/dashboard.js"):
        assert ask(port, path, Accept="text/html").status == 403


def test_the_token_changes_nothing_by_post(port: int, directory: ClusterDirectory) -> None:
    assert ask(port, f"/status?token={directory.dashboard_token()}", "POST", b"x").status == 403


def test_the_redirect_leads_to_this_server_whatever_the_path(port: int, directory: ClusterDirectory) -> None:
    for path in ("//evil.example/", "//evil.example", "/x/y:z", "/", "/http://evil.example"):
        location = ask(port, f"{path}?token={directory.dashboard_token()}").headers["Location"]
        assert location.startswith("./") and "/" not in location[2:]


async def test_few_connections_are_accepted_in_one_turn(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated_connections, "_LET_IN", 2)
    server, turns, accepted = ServerWithToken(RoutingApplication([]), directory), list[int](), list[Any]()

    def handle(stream: Any, address: Any) -> None:
        if not accepted:
            asyncio.get_running_loop().call_soon(lambda: turns.append(len(accepted)))
        accepted.append(stream)

    monkeypatch.setattr(server, "handle_stream", handle)
    server.listen(0, "127.0.0.1")
    peers = [create_connection(get_tcp_server_address(server)) for _ in range(5)]  # they wait in the kernel
    async with asyncio.timeout(60):
        while len(accepted) < len(peers):
            await asyncio.sleep(0.01)
    assert turns == [2]
    for connection in (*peers, *accepted):
        connection.close()
    server.stop()


def test_a_cluster_without_a_token_shows_nothing_at_all(
    port: int, directory: ClusterDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.remove_secrets()
    assert len(ServerWithToken(RoutingApplication([]), directory).token_check.token) >= 32
    assert "has no dashboard token" in caplog.text


def test_the_token_is_this_users_alone_and_goes_with_the_cluster(directory: ClusterDirectory) -> None:
    path = directory.path / "dashboard.token"
    assert path.stat().st_mode & 0o777 == 0o600 and len(directory.dashboard_token()) == 43, "256 bits"
    directory.remove_secrets()
    assert not path.exists() and directory.dashboard_token() == ""


def test_the_plain_link_has_no_token_and_the_other_has(directory: ClusterDirectory) -> None:
    contact = Contact(token="", job_id="1", workers="", client="", dashboard="10.0.0.1:8787")
    assert link(contact) == "http://10.0.0.1:8787/status"
    opened = urlsplit(link_with_token(directory, contact))
    assert (opened.netloc, opened.path, opened.query) == (
        "10.0.0.1:8787",
        "/status",
        f"token={directory.dashboard_token()}",
    )
    assert link(None) == link_with_token(directory, None) == ""
    directory.remove_secrets()
    assert link_with_token(directory, contact) == link(contact)


def test_servers_of_a_cluster_are_guarded_and_those_of_other_programs_are_not(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.node, "HTTPServer", HTTPServer)
    monkeypatch.setattr(dashboard_access, "_of_process", [])
    with dashboard_access.token_required(directory):
        assert isinstance(distributed.node.HTTPServer(RoutingApplication([])), ServerWithToken)
    assert not isinstance(distributed.node.HTTPServer(RoutingApplication([])), ServerWithToken)
    monkeypatch.setenv("HPCGPU_CLUSTER_DIRECTORY", str(directory.path))
    dashboard_access.require_token_in_this_process()
    assert isinstance(distributed.node.HTTPServer(RoutingApplication([])), ServerWithToken)


def test_the_dashboard_is_a_proxy_of_the_ports_of_its_workers_and_of_no_others(directory: ClusterDirectory) -> None:
    server = ServerWithToken(RoutingApplication([]), directory)
    workers = {"a": SimpleNamespace(host="10.0.0.3", services={"dashboard": 4711})}
    dashboard_access.serve_workers(SimpleNamespace(http_server=server, workers=workers))  # type: ignore[arg-type]
    is_worker = server.token_check._is_worker
    assert is_worker("10.0.0.3", "4711")
    assert not is_worker("10.0.0.3", "22") and not is_worker("10.0.0.4", "4711")


async def test_the_first_request_brings_the_pages_of_a_scheduler_that_started_without_them(
    directory: ClusterDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add_dashboard, "_FIRST_WORKERS", 1e6)
    monkeypatch.setattr(distributed.node, "HTTPServer", HTTPServer)
    with dashboard_access.token_required(directory):
        scheduler = Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0")
    async with scheduler:
        adds = asyncio.create_task(add_dashboard.add_dashboard(scheduler, list, "demo"))
        reached, token = get_tcp_server_address(scheduler.http_server)[1], directory.dashboard_token()
        refused = await asyncio.to_thread(ask, reached, "/status")
        assert refused.status == 403 and not adds.done(), "a stranger brings nothing"
        page = await asyncio.to_thread(ask, reached, "/status", Authorization=f"token {token}")
        assert page.status == 200 and b"bokeh" in page.body.lower()
        await adds
