"""Nobody who does not hold the cluster's credentials gets in, over any port that its processes listen on; UCX has a
module of its own.
"""

from __future__ import annotations

import asyncio
import gc
import http.cookiejar
import json
import os
import pickle
import re
import resource
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from bokeh.models.widgets.tables import HTMLTemplateFormatter
from cryptography import x509
from distributed import Client
from distributed.comm import connect
from distributed.dashboard.components import scheduler as scheduler_pages
from distributed.security import Security
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.fabric import interface_addresses
from hpcgpu.store import certificates_and_keys, create_directory
from tests.helpers import CPU

pytestmark = pytest.mark.shows("Strangers are refused at every port")

Until = Callable[..., None]


@pytest.fixture(scope="module")
def cluster(shared_queue: LocalQueue) -> Iterator[LocalGPUCluster]:
    """A cluster that the tests of this module share."""
    with LocalGPUCluster(**CPU, jobs=1, name="target") as cluster:
        cluster.wait_for_workers(1)
        yield cluster


def processes(cluster: LocalGPUCluster) -> set[psutil.Process]:
    of_jobs = [
        process for process in psutil.process_iter() if str(cluster.directory.path) in " ".join(_command(process))
    ]
    found = set(of_jobs)
    for process in of_jobs:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found.update(process.children(recursive=True))
    return found


def listening(cluster: LocalGPUCluster) -> list[tuple[str, int]]:
    """Address and port of all that the cluster's processes listen on."""
    found = [connection for process in processes(cluster) for connection in connections(process)]
    return sorted({(one.laddr.ip, one.laddr.port) for one in found if one.status == "LISTEN"})


def connections(process: psutil.Process) -> list[Any]:
    """The TCP connections of a process; none if it has just ended."""
    try:
        return list(process.net_connections("tcp"))
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_every_process_makes_its_tls_connections_as_we_do(cluster: LocalGPUCluster) -> None:
    def transport() -> str:
        from distributed.comm.registry import backends

        return type(backends["tls"]).__module__

    ours = "hpcgpu.fabric.tls_connections"
    with Client(cluster) as client:
        assert client.run_on_scheduler(transport) == ours
        assert set(client.run(transport).values()) == {ours}, "worker"
        assert set(client.run(transport, nanny=True).values()) == {ours}, "nanny"
        assert transport() == ours, "client"


def test_peers_that_send_nothing_hold_neither_the_cluster_nor_its_file_descriptors(
    cluster: LocalGPUCluster, until: Until
) -> None:
    with Client(cluster) as client, ExitStack() as silent:
        count = len(psutil.Process(client.run_on_scheduler(os.getpid)).net_connections("tcp"))
        host, port = ports(cluster)[0]
        for _ in range(200):
            silent.enter_context(socket.create_connection((host, port), timeout=150))
        scheduler = psutil.Process(client.run_on_scheduler(os.getpid))
        # a few other connections may have ended
        until(lambda: len(scheduler.net_connections("tcp")) > count + 150, "the scheduler has the silent connections")
        assert client.submit(sum, [1, 2, 3]).result(timeout=150) == 6
        until(lambda: len(scheduler.net_connections("tcp")) < count + 20, "their file descriptors are free again")
        assert client.submit(sum, [1, 2, 4]).result(timeout=150) == 7


def ports(cluster: LocalGPUCluster) -> list[tuple[str, int]]:
    """Those of Dask: scheduler, nanny and worker."""
    [worker] = cluster.scheduler_info["workers"].values()
    [address] = cluster.scheduler_info["workers"]
    found = [cluster.scheduler_address, address, worker["nanny"]]
    assert all(address.startswith("tls://") for address in found)
    return [(host, int(port)) for host, _, port in (address.split("://")[1].rpartition(":") for address in found)]


def works(cluster: LocalGPUCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        assert client.submit(sum, [1, 2, 3], pure=False).result() == 6


def speaks_http(ip: str, port: int) -> bool:
    with socket.create_connection((ip, port), timeout=150) as connection:
        # a listener that reads the first message of the challenge needs so many bytes until it refuses them
        connection.sendall(b"GET /health HTTP/1.0\r\nUser-Agent: %b\r\n\r\n" % (b"x" * 100))
        try:
            return connection.recv(5) == b"HTTP/"
        except OSError:
            return False


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def frames(payload: bytes) -> bytes:
    """A message as distributed's TCP comms frame it: number of frames, their lengths, the frames."""
    header = struct.pack("<QQ", 1, len(payload))
    return struct.pack("<Q", len(header) + len(payload)) + header + payload


def other_credentials(tmp_path: Path) -> ssl.SSLContext:
    """A client's TLS with credentials of another cluster."""
    stranger = create_directory.claim(tmp_path / "stranger", lambda submits: [], system="local")
    certificates_and_keys.create(stranger)
    context = anonymous()
    context.load_cert_chain(stranger.tls / "cert.pem", stranger.tls / "key.pem")
    return context


def anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def attacked(address: tuple[str, int], context: ssl.SSLContext | None, message: bytes) -> bool:
    """Send a message; return whether anything came back but TLS's own refusal, an alert (RFC 8446, 5.1)."""
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(socket.create_connection(address, timeout=150))
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(message)
            return connection.recv(1) not in (b"", b"\x15")
        except OSError:
            return False


def test_without_credentials_nothing_is_read(cluster: LocalGPUCluster, tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "pwned"))
    messages = {
        "a pickle": frames(bomb),
        "a message that is too short": struct.pack("<Q", 1000) + b"x",
        "a message that claims to be huge": struct.pack("<Q", 2**62) + b"x",
        "noise": os.urandom(4096),
        "nothing at all": b"",
    }
    stranger = other_credentials(tmp_path)
    for address in ports(cluster):
        for what, message in messages.items():
            for name, context in (
                ("plain TCP", None),
                ("TLS without a certificate", anonymous()),
                ("another cluster's credentials", stranger),
            ):
                if message or context is not None:
                    assert not attacked(address, context, message), f"{what} by {name} to {address} got an answer"
    for context in (anonymous(), stranger):
        refused(cluster.scheduler_address, Stranger(context))
    own = cluster.security.get_connection_args("client")
    found = [asyncio.run(identity(f"tls://{host}:{port}", **own))["type"] for host, port in ports(cluster)]
    assert found == ["Scheduler", "Worker", "Nanny"], "who has them is answered"
    assert not (tmp_path / "pwned").exists()
    works(cluster)


async def identity(address: str, **credentials: Any) -> dict[str, Any]:
    """Ask a process of Dask who it is, in the protocol that all of them speak."""
    comm = await connect(address, timeout=60, **credentials)
    try:
        await comm.write({"op": "identity", "reply": True})
        answer: dict[str, Any] = await comm.read()
        return answer
    finally:
        comm.abort()


def refused(address: str, security: Security) -> None:
    with pytest.raises(OSError, match=rf"TLS certificate does not match|{re.escape(address.split('://')[1])}"):
        Client(address, timeout="3s", set_as_default=False, security=security)
    # distributed closes a client that failed when it is collected, and that waits for a lock which the start of every
    # client's loop holds: collected by the thread of such a loop, it would keep that from starting.
    gc.collect()


class Stranger(Security):
    """With it a Dask client believes every server, so that only the server can refuse it."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self.context = context

    def get_connection_args(self, role: str) -> dict[str, Any]:
        return {"ssl_context": self.context, "require_encryption": True}


def test_a_thousand_silent_peers_do_not_keep_others_out(cluster: LocalGPUCluster) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as stack:
            for _ in range(min(1000, hard // 2)):
                stack.enter_context(socket.create_connection(ports(cluster)[0], timeout=150))
            works(cluster)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    works(cluster)


def test_http_is_on_no_more_addresses_than_clients_need(cluster: LocalGPUCluster) -> None:
    found = listening(cluster)
    http = [(ip, port) for ip, port in found if speaks_http("127.0.0.1" if ip in ("0.0.0.0", "::") else ip, port)]
    link = cluster.dashboard_link.removeprefix("http://").removesuffix("/status")
    dashboard = (link.rpartition(":")[0], int(link.rpartition(":")[2]))
    assert dashboard in http, "clients reach the dashboard"
    others = [address for address in http if address != dashboard]
    assert others and all(ip == "127.0.0.1" for ip, _ in others), "workers' pages are for their node alone"
    present = interface_addresses.addresses()
    assert dashboard[0] == present[interface_addresses.default_interface(present) or "lo"]
    with urllib.request.urlopen(f"http://{link}/health", timeout=150) as answer:
        assert answer.read() == b"ok"


def test_the_scheduler_listens_where_it_is_reached_and_nowhere_else(queue: LocalQueue) -> None:
    present = interface_addresses.addresses()
    for options, address in (
        ({}, present[interface_addresses.default_interface(present) or "lo"]),
        ({"interface": "lo"}, "127.0.0.1"),
    ):
        with LocalGPUCluster(**CPU, **options, client_interface="lo") as cluster:
            workers, clients = ports_of_the_scheduler(cluster)
            found = listening(cluster)
            assert [ip for ip, port in found if port == workers] == [address]
            assert [ip for ip, port in found if port == clients] == ["127.0.0.1"]


def ports_of_the_scheduler(cluster: LocalGPUCluster) -> list[int]:
    contact = cluster.directory.contact()
    assert contact is not None
    return [int(address.rpartition(":")[2]) for address in (contact.workers, contact.client)]


def test_the_dashboard_can_be_kept_to_its_node_or_opened(queue: LocalQueue) -> None:
    for asked, expected in (("127.0.0.1:0", {"127.0.0.1"}), (":0", {"0.0.0.0", "::"})):
        with LocalGPUCluster(**CPU, scheduler={"dashboard_address": asked}) as cluster:
            port = int(cluster.dashboard_link.removesuffix("/status").rpartition(":")[2])
            addresses = {ip for ip, p in listening(cluster) if p == port}
            assert addresses and addresses <= expected
            with urllib.request.urlopen(
                cluster.dashboard_link.removesuffix("/status") + "/health", timeout=10
            ) as answer:
                assert answer.read() == b"ok", "the link leads there"


def test_a_scheduler_in_the_program_shows_itself_to_its_own_machine_only_and_text_as_text(
    queue: LocalQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_pages, "HTMLTemplateFormatter", HTMLTemplateFormatter)
    with LocalGPUCluster(**CPU, scheduler="local") as cluster:
        table = scheduler_pages.ExceptionsTable(cluster.scheduler)
        made = [one.template for one in table.root.select({"type": HTMLTemplateFormatter})]
        assert made and not any("<%=" in template for template in made)
        assert cluster.dashboard_link.startswith("http://127.0.0.1:")
        assert (
            request(cluster.dashboard_link)[0] == 403
            and request(cluster.dashboard_link, **authorization(cluster))[0] == 200
        )
        with urllib.request.urlopen(cluster.dashboard_link.removesuffix("/status") + "/health", timeout=150) as answer:
            assert answer.read() == b"ok"


def request(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    asked = urllib.request.Request(url, data=b'{"n": 1}' if method == "POST" else None, method=method, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=150) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def authorization(cluster: LocalGPUCluster) -> dict[str, str]:
    return {"Authorization": f"token {cluster.directory.dashboard_token()}"}


def pages(cluster: LocalGPUCluster) -> list[str]:
    """All HTTP servers of the cluster: the scheduler's, and the workers'."""
    found = [(ip, port) for ip, port in listening(cluster) if speaks_http(ip, port)]
    assert len(found) == 2
    return [f"http://{ip}:{port}" for ip, port in found]


def test_http_takes_no_commands(cluster: LocalGPUCluster) -> None:
    link = cluster.dashboard_link.removesuffix("/status")
    for route in ("/api/v1/retire_workers", "/api/v1/adaptive_target", "/api/v1/get_workers"):
        assert request(f"{link}{route}", "POST")[0] == 403
        assert request(f"{link}{route}", "POST", **authorization(cluster))[0] == 404, "not even with the token"
    works(cluster)


def test_without_the_token_no_page_shows_anything(cluster: LocalGPUCluster) -> None:
    routes = [
        "/",
        "/status",
        "/info/main/workers.html",
        "/json/identity.json",
        "/metrics",
        "/sitemap.json",
        "/individual-plots.json",
    ]
    routes += ["/statics/css/base.css", "/static/js/bokeh.min.js", "/status/ws", "/proxy/1/127.0.0.1/status", "/none"]
    for page in pages(cluster):
        for route in routes:
            code, text = request(f"{page}{route}")
            assert code == 403 and "hpcgpu dashboard NAME" in text and cluster.name not in text, (
                f"{page}{route}: {code}"
            )
        assert request(f"{page}/metrics", **authorization(cluster))[0] == 200, "Prometheus sends a header"
    code, text = request(
        f"{cluster.dashboard_link.removesuffix('/status')}/info/main/workers.html", **authorization(cluster)
    )
    assert code == 200 and f"{cluster.name}-0" in text


def test_the_link_with_the_token_opens_the_dashboard_and_its_websocket(cluster: LocalGPUCluster) -> None:
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies := http.cookiejar.CookieJar()))
    with browser.open(cluster.dashboard_link_with_token(), timeout=150) as answer:
        assert answer.url == cluster.dashboard_link, "the token does not stay in the address"
        [session] = re.findall(r'"token":"([^"]+)"', answer.read().decode())
    [cookie] = [f"{cookie.name}={cookie.value}" for cookie in cookies]

    async def first_message(**headers: str) -> str:
        url = f"{cluster.dashboard_link.replace('http', 'ws', 1)}/ws"
        socket = await websocket_connect(HTTPRequest(url, headers=headers), subprotocols=["bokeh", session])
        with closing(socket):
            return str(await socket.read_message())

    assert json.loads(asyncio.run(first_message(Cookie=cookie)))["msgtype"] == "ACK", "Bokeh answers"
    for headers in ({}, {"Cookie": "a=b"}, {"Cookie": cookie, "Origin": "http://elsewhere"}):
        with pytest.raises(HTTPClientError, match="403"):
            asyncio.run(first_message(**headers))


def test_the_dashboard_leads_to_the_pages_of_its_workers_and_to_no_other_address(cluster: LocalGPUCluster) -> None:
    """Dask's `/proxy` opens websockets to any address, and sends it the cookie or the token that it was asked with."""
    page = cluster.dashboard_link.removesuffix("/status")

    async def open_websocket(port: int, host: str) -> None:
        url = f"{page.replace('http', 'ws', 1)}/proxy/{port}/{host}/x"
        (await websocket_connect(HTTPRequest(url, headers=authorization(cluster)))).close()

    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.setblocking(False)
        for host in ("127.0.0.1", "localhost", "%3127.0.0.1"):
            with pytest.raises(HTTPClientError, match="400"):
                asyncio.run(open_websocket(elsewhere.getsockname()[1], host))
        with pytest.raises(BlockingIOError):
            elsewhere.accept()
    with Client(cluster, set_as_default=False) as client:
        [worker] = client.scheduler_info()["workers"].values()
    code, text = request(f"{page}/proxy/{worker['services']['dashboard']}/{worker['host']}/x", **authorization(cluster))
    assert "No worker has this address" not in text, (code, text)


def test_no_secret_is_shown_but_the_token_where_it_is_asked_for(cluster: LocalGPUCluster) -> None:
    token, tls = cluster.directory.dashboard_token(), cluster.directory.tls
    # the first lines of any two keys begin alike
    secrets = [token, *(tls / "key.pem").read_text().splitlines()[2:-1], (tls / "ucx.key").read_text().strip()]
    assert len(secrets) > 2 and all(len(secret) > 20 for secret in secrets)
    request(cluster.dashboard_link_with_token())
    request(f"{cluster.dashboard_link}none?token={token}")
    with Client(cluster, set_as_default=False) as client:
        shown = [
            repr(cluster),
            cluster._repr_html_(),
            repr(client),
            client._repr_html_(),
            client.dashboard_link,
            cluster.dashboard_link,
            repr(cluster.jobs),
            repr(cluster.options),
            cluster.job_script(),
            cluster.scheduler_script(),
        ]
        shown += [str(cluster.get_logs()), str(client.get_worker_logs()), str(client.get_scheduler_logs())]
    for process in processes(cluster):
        with suppress(psutil.Error):
            shown += [" ".join(process.cmdline()), str(process.environ())]
    for path in cluster.directory.path.rglob("*"):
        if path.is_file() and path.name != "dashboard.token" and path.parent != tls:
            with suppress(FileNotFoundError):  # it has just got its name
                shown.append(path.read_text())
    assert not any(secret in text for secret in secrets for text in shown) and len(shown) > 15
    assert token in cluster.dashboard_link_with_token()


def test_strangers_who_ask_for_pages_do_not_keep_clients_out(cluster: LocalGPUCluster) -> None:
    """Forty loops of one page made a cluster unreachable while every page was computed for whoever asked."""
    link, over = cluster.dashboard_link, threading.Event()
    codes: set[int] = set()

    def loop() -> None:
        while not over.is_set():
            codes.add(request(link)[0])

    with ThreadPoolExecutor(40) as strangers:
        loops = [strangers.submit(loop) for _ in range(40)]
        try:
            for _ in range(3):
                works(cluster)
        finally:
            over.set()
        for ended in loops:
            ended.result()
    assert codes == {403}


_FLOOD = """
import socket, sys, time
kept, ports = [], [address.rsplit(":", 1) for address in sys.argv[1:]]
while True:
    for number, (host, port) in enumerate(ports):
        peer = socket.socket()
        peer.settimeout(2)
        try:
            peer.bind(("127.0.0.66", 0))
            peer.connect((host, int(port)))
            peer.send(b"\\x16\\x03\\x01"[: number % 4])
        except OSError:
            continue
        kept = [*kept[-2500:], peer]
    print("a round", flush=True)
    time.sleep(0.01)
"""


def test_a_flood_is_bounded_at_every_port_and_members_come_in_meanwhile(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, jobs=1, name="flooded", interface="lo", client_interface="lo") as cluster:
        cluster.wait_for_workers(1)
        works(cluster)
        ports = {port for _, port in listening(cluster)}
        addresses = [f"127.0.0.1:{port}" for port in ports]
        ours = processes(cluster)

        def held() -> list[int]:
            """Connections that the cluster keeps of the flood, at each port."""
            found = Counter(
                connection.laddr.port
                for process in ours
                for connection in process.net_connections("tcp")
                if connection.raddr and connection.raddr.ip == "127.0.0.66"
            )
            return [found[port] for port in ports]

        with subprocess.Popen([sys.executable, "-c", _FLOOD, *addresses], stdout=subprocess.PIPE) as flood:
            try:
                assert flood.stdout is not None
                seen = list[int]()
                for _ in range(2):
                    for _ in range(150):
                        assert flood.stdout.readline() == b"a round\n", "one more connection to each port"
                    seen += held()
                    with Client(cluster.scheduler_address, security=cluster.security, timeout=90) as client:
                        assert client.submit(sum, [1, 2], pure=False).result(90) == 3
                    seen += held()
            finally:
                flood.kill()
        assert max(seen) <= 200 + 16, f"at most 200 of one port, and what is about to be closed: {seen}"
        works(cluster)


# The credentials themselves


def test_credentials_are_nobody_else_s_even_under_a_careless_umask(tmp_path: Path) -> None:
    earlier = os.umask(0)
    try:
        directory = create_directory.claim(
            tmp_path / "careless", lambda submits: [], system="local", complete=certificates_and_keys.create
        )
    finally:
        os.umask(earlier)
    for path in (directory.path, directory.tls):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.tls.iterdir()} == dict.fromkeys(
        ("cert.pem", "key.pem", "ucx.key"), 384
    )


def test_each_cluster_has_credentials_of_its_own_which_are_gone_after_it(queue: LocalQueue) -> None:
    with LocalGPUCluster(**CPU, name="one", walltime="2h") as one, LocalGPUCluster(**CPU, name="two") as two:
        for name in ("cert.pem", "key.pem", "ucx.key"):
            assert (one.directory.tls / name).read_bytes() != (two.directory.tls / name).read_bytes()
        certificate = x509.load_pem_x509_certificate((one.directory.tls / "cert.pem").read_bytes())
        assert certificate.issuer == certificate.subject, "nobody else vouches for it"
        assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(days=91, hours=2), (
            "no longer than the cluster"
        )
        refused(one.scheduler_address, two.security)
    assert not one.directory.tls.exists() and not two.directory.tls.exists()
