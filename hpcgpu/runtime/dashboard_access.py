"""The dashboard of a cluster: its link, and the token that every page requires.

A page of Dask's dashboard takes up to half a second of the scheduler's event loop, and shows what the cluster computes.
So `TokenCheck` checks the token as soon as the header of a request is read, before a handler is chosen. A browser
brings the token once, as ``?token=``, and gets a cookie for it; programs send ``Authorization: token TOKEN``, or
``Bearer TOKEN``. `/health` needs no token. A browser that opens a page with the cookie gets a page of
`hpcgpu.runtime.dashboard_frame`.

After the end of a scheduler, any program on its node may listen on its port. So a program that has the token first
checks that the cluster itself listens, before it sends the token. It sends a nonce to `PROOF`. Only a program with the
token can compute the answer. The answer also signs the address that was reached, so another program cannot get the
answer from the cluster's new scheduler and pass it on as its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode

import distributed.node
from distributed.utils import format_dashboard_link
from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerRequest,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.iostream import IOStream
from tornado.netutil import bind_sockets
from tornado.routing import Router

from hpcgpu.fabric.unauthenticated_connections import Strangers, time_limit
from hpcgpu.runtime import dashboard_frame
from hpcgpu.store.contact import Contact
from hpcgpu.store.directory import ClusterDirectory

if TYPE_CHECKING:
    from distributed.scheduler import Scheduler


logger = logging.getLogger("distributed.hpcgpu")

_OPEN = "/health"
#: Where the cluster proves that it listens: ``?nonce=`` and 64 hexadecimal digits.
PROOF = "/hpcgpu-proof"
_NONCE = re.compile(r"[0-9a-f]{64}")
_REFUSAL = (
    "This dashboard needs a token. `hpcgpu dashboard NAME` prints the link with the token; in Python, "
    "cluster.dashboard_link_with_token() returns it.\n"
)
#: The port and host of a worker's dashboard, to which the scheduler is a proxy. Dask's handler opens websockets to any.
_PROXY = re.compile(r"/proxy/(\d+)/([^/]*)")
#: Characters that no worker's address has. Without jupyter-server-proxy, distributed before 2026.7.1 shows the text
#: after `/proxy/` as HTML (dask/distributed#9328).
_MARKUP = re.compile(r"[<>&\"']")
_SCRIPT = "/~hpcgpu/dashboard.js"
#: Most bytes of a request's header, for any client. Browsers send less than 2 KiB.
_HEADER_SIZE = 16 * 1024


def link(contact: Contact | None) -> str:
    """Return the link to the dashboard, without the token; empty if there is no dashboard."""
    host, _, port = contact.dashboard.rpartition(":") if contact is not None else ("", "", "")
    return str(format_dashboard_link(host, port)) if port else ""


def link_with_token(directory: ClusterDirectory, contact: Contact | None) -> str:
    """Return the link that opens the dashboard in a browser; anybody with the link can read the dashboard."""
    plain, token = link(contact), directory.dashboard_token()
    return f"{plain}{'&' if '?' in plain else '?'}{urlencode({'token': token})}" if plain and token else plain


def proof(token: str, nonce: str, reached: tuple[Any, ...]) -> str:
    """Return the answer to a nonce by a cluster that has the token.

    Parameters
    ----------
    token, nonce : str
    reached : tuple
        Address and port of the dashboard's end of the connection, as both sockets report it.
    """
    address = ipaddress.ip_address(reached[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address  # a socket for IPv4 and IPv6
    signed = f"hpcgpu dashboard proof {nonce} {address} {reached[1]}"
    return hmac.new(token.encode(), signed.encode(), hashlib.sha256).hexdigest()


class TokenCheck(Router):
    """Passes on the requests that bring the token, and refuses all others.

    Parameters
    ----------
    application : tornado.routing.Router
        Serves the requests.
    token : str
    strangers : hpcgpu.fabric.unauthenticated_connections.Strangers
        Connections of the server that have not yet brought the token.
    """

    def __init__(self, application: Router, token: str, strangers: Strangers) -> None:
        self.application = application
        self._is_worker: Callable[[str, str], bool] = lambda host, port: False
        self.strangers = strangers
        self.token = token.encode()
        # A browser sends the cookies of a host to every port of that host. So each cluster has its own cookie name, and
        # the value is not the token.
        self.cookie = f"hpcgpu-{self._digest('name')[:16]}"
        self.value = self._digest("value").encode()
        self._complete, self._waits = asyncio.Event(), asyncio.Event()
        self._complete.set()

    def is_proxy_of(self, is_worker: Callable[[str, str], bool]) -> None:
        """Let this server be a proxy of the dashboards at the hosts and ports of workers, and of no other server."""
        self._is_worker = is_worker

    @contextmanager
    def incomplete(self) -> Iterator[None]:
        """Let requests that have the token wait within this context: the application has not all its handlers yet."""
        self._complete.clear()
        try:
            yield
        finally:
            self._complete.set()

    async def request_waits(self) -> None:
        """Wait until a request waits for the other handlers."""
        await self._waits.wait()

    def _digest(self, what: str) -> str:
        return hmac.new(self.token, f"hpcgpu dashboard cookie {what}".encode(), hashlib.sha256).hexdigest()

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> HTTPMessageDelegate:
        """Begin a request; tornado calls this when a connection brings one."""
        return super().start_request(server_conn, _Connection(request_conn))

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        """Return the handler of a request; tornado calls this once per request, websockets included."""
        if self._has_header(request.headers):
            return self._admit(request, **kwargs)
        if request.path == _OPEN:  # not by Dask's handler, for which tornado first reads a body of up to 100 MB
            return _Answer(request, 200, "OK", {}, "ok")
        if request.path == PROOF and (nonce := _NONCE.fullmatch(request.query.removeprefix("nonce="))):
            reached = request.connection.stream.socket.getsockname()  # type: ignore[union-attr]
            answer = proof(self.token.decode(), nonce.group(), reached)
            return _Answer(request, 200, "OK", {"Cache-Control": "no-store"}, answer)
        if request.method in ("GET", "HEAD") and self._has_argument(request):
            return _Answer(request, 302, "Found", self._signed_in(request))
        if self._has_cookie(request.headers):
            return self._shown(request) or self._admit(request, **kwargs)
        return _Answer(request, 403, "Forbidden", {"Cache-Control": "no-store"}, _REFUSAL)

    def _admit(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        self.strangers.remove(request.connection.stream)  # type: ignore[union-attr]
        if not (there := _PROXY.search(request.path)):  # not the proxy to a worker, which needs the token
            request.headers.pop("Authorization", None)  # Bokeh writes all headers into its pages
        elif _MARKUP.search(unquote(request.path)) or not self._is_worker(unquote(there[2]), there[1]):
            return _Answer(request, 400, "Bad Request", {"Cache-Control": "no-store"}, "No worker has this address.\n")
        assert isinstance(request.connection, _Connection)
        request.connection.confine()
        find_handler = partial(self.application.find_handler, request, **kwargs)
        if self._complete.is_set():
            return find_handler()
        self._waits.set()
        return _Waiting(self._complete, find_handler)

    def _shown(self, request: HTTPServerRequest) -> HTTPMessageDelegate | None:
        """Return our own answer to a browser: the page around each page of Dask, or its script."""
        if request.path == _SCRIPT:
            headers = {"Content-Type": "text/javascript; charset=utf-8", "Cache-Control": "no-cache"}
            return _Answer(request, 200, "OK", headers, (dashboard_frame.SCRIPTS / "dashboard.js").read_text())
        if request.method != "GET" or not dashboard_frame.navigates(request.headers):
            return None
        self.strangers.remove(request.connection.stream)  # type: ignore[union-attr]
        base = "../" * (request.path.count("/") - 1) or "./"  # a proxy may have put a prefix before the path
        return _Answer(request, 200, "OK", *dashboard_frame.page(request.query, base, f"{base}{_SCRIPT[1:]}"))

    def _has_header(self, headers: HTTPHeaders) -> bool:
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        return scheme.lower() in ("token", "bearer") and hmac.compare_digest(token.strip().encode(), self.token)

    def _has_argument(self, request: HTTPServerRequest) -> bool:
        return any(hmac.compare_digest(token, self.token) for token in request.query_arguments.get("token", []))

    def _has_cookie(self, headers: HTTPHeaders) -> bool:
        """Whether the browser has used the token before.

        A page of another server must not use its cookie: that server may be on the same host.
        """
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != headers.get("Host"):
            return False
        pairs = (part.strip().partition("=") for part in headers.get("Cookie", "").split(";"))
        return any(name == self.cookie and hmac.compare_digest(value.encode(), self.value) for name, _, value in pairs)

    def _signed_in(self, request: HTTPServerRequest) -> dict[str, str]:
        """Return headers that set the cookie and redirect to the same page without the token.

        The token must not stay in the history, nor in logs.

        The location is relative, because a proxy may have put a prefix before the path. With ``SameSite=Strict`` a
        browser would not send the cookie when a user follows a link in a notebook.
        """
        arguments = urlencode([pair for pair in parse_qsl(request.query, keep_blank_values=True) if pair[0] != "token"])
        secure = "; Secure" if request.protocol == "https" else ""
        return {
            "Location": f"./{request.path.rpartition('/')[2]}{'?' if arguments else ''}{arguments}",
            "Set-Cookie": f"{self.cookie}={self.value.decode()}; Path=/; HttpOnly; SameSite=Lax{secure}",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
        }


class _Answer(HTTPMessageDelegate):
    """A short answer that is written when the header has been read.

    tornado then closes the connection without reading a body.
    """

    def __init__(
        self, request: HTTPServerRequest, code: int, reason: str, headers: dict[str, str], text: str = ""
    ) -> None:
        self.request = request
        self.start_line = ResponseStartLine("HTTP/1.1", code, reason)
        self.text = text.encode()
        self.headers = {
            "Content-Type": "text/plain; charset=utf-8",
            **headers,
            "Content-Length": str(len(self.text)),
            "Connection": "close",
        }

    def headers_received(self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        connection = self.request.connection
        assert connection is not None
        connection.write_headers(
            self.start_line, HTTPHeaders(self.headers), self.text if self.request.method != "HEAD" else None
        )
        connection.finish()


class _Waiting(HTTPMessageDelegate):
    """Passes a request on to its handler, which may not exist yet."""

    def __init__(self, complete: asyncio.Event, find_handler: Callable[[], HTTPMessageDelegate | None]) -> None:
        self._complete, self._find_handler = complete, find_handler
        self._handler: HTTPMessageDelegate | None = None

    async def headers_received(self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders) -> None:
        await self._complete.wait()
        self._handler = self._find_handler()
        if self._handler is not None and (received := self._handler.headers_received(start_line, headers)) is not None:
            await received

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._handler.data_received(chunk) if self._handler is not None else None

    def finish(self) -> None:
        if self._handler is not None:
            self._handler.finish()

    def on_connection_close(self) -> None:
        if self._handler is not None:
            self._handler.on_connection_close()


class _Connection(HTTPConnection):
    """The connection of a request.

    Parameters
    ----------
    connection : HTTPConnection
        That of tornado.
    """

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection, self._confined = connection, False

    def confine(self) -> None:
        """Add headers to the answer so that no browser runs its scripts."""
        self._confined = True

    def write_headers(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders, chunk: bytes | None = None
    ) -> Future[None]:
        if self._confined:
            headers.update({"Content-Security-Policy": dashboard_frame.SANDBOX})
            headers.add("Vary", "Accept")
        return self._connection.write_headers(start_line, headers, chunk)

    def write(self, chunk: bytes) -> Future[None]:
        return self._connection.write(chunk)

    def finish(self) -> None:
        self._connection.finish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class ServerWithToken(HTTPServer):
    """An HTTP server of a cluster: it answers only requests that have the cluster's token.

    Parameters
    ----------
    application : tornado.routing.Router
        Serves the requests.
    directory : ClusterDirectory
    **options
        Arguments of `tornado.httpserver.HTTPServer`.
    """

    def initialize(self, application: Router, directory: ClusterDirectory, **options: Any) -> None:  # type: ignore[override]
        """Do the work of a constructor, as subclasses of tornado's `Configurable` do."""
        token = directory.dashboard_token()
        if not token:
            logger.warning(
                "%s has no dashboard token: the dashboard refuses all requests; start a new cluster to use it",
                directory.path,
            )
        self._strangers = Strangers()
        self.token_check = TokenCheck(application, token or secrets.token_hex(32), self._strangers)
        super().initialize(
            self.token_check, **options, idle_connection_timeout=time_limit(), max_header_size=_HEADER_SIZE
        )

    def listen(self, port: int, address: str | None = None, **options: Any) -> None:  # type: ignore[override]
        """Listen, and accept few connections at a time."""
        self.add_sockets(self._strangers.hold_back(bind_sockets(port, address=address, **options)))

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        """Serve a connection, which is a stranger's until a request has the token."""
        self._strangers.add(stream, str(address[0]))
        super().handle_stream(stream, address)


#: The cluster of the servers that are made in the context of `token_required`.
_starting: ContextVar[ClusterDirectory | None] = ContextVar("_starting", default=None)
#: The cluster of all other servers of this process, if there is one.
_of_process: list[ClusterDirectory] = []


def _server(application: Router, **options: Any) -> HTTPServer:
    """Make a server as distributed does, but one that requires the token if it belongs to one of our clusters.

    distributed has no hook between the start of a server and its first answer: preloads run later. So this replaces
    the class of its servers; see ``tests/canaries/uses.py``.
    """
    directory = _starting.get() or next(iter(_of_process), None)
    if directory is None:
        return HTTPServer(application, **options)
    return ServerWithToken(application, directory, **options)


@contextmanager
def token_required(directory: ClusterDirectory) -> Iterator[None]:
    """Let each HTTP server that distributed makes within this context require the token of a cluster."""
    distributed.node.HTTPServer = _server
    token = _starting.set(directory)
    try:
        yield
    finally:
        _starting.reset(token)


def require_token_in_this_process() -> None:
    """Let every HTTP server that distributed makes in this process from now on require the token.

    The process belongs to the cluster of its environment.
    """
    _of_process[:] = [ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"]))]
    distributed.node.HTTPServer = _server


def serve_workers(scheduler: Scheduler) -> None:
    """Let the dashboard of a scheduler be the proxy of its workers' dashboards, and of no other server."""

    def is_worker(host: str, port: str) -> bool:
        return any(
            worker.host == host and str(worker.services.get("dashboard")) == port
            for worker in scheduler.workers.values()
        )

    if isinstance(scheduler.http_server, ServerWithToken):
        scheduler.http_server.token_check.is_proxy_of(is_worker)


def escape_text() -> None:
    """Let the tables of the scheduler's pages show text as text.

    The table of exceptions puts exceptions, tracebacks and keys into HTML without escaping. A text that a task read
    from another user's file would run there as a script.
    """
    try:
        from bokeh.models.widgets.tables import HTMLTemplateFormatter
        from distributed.dashboard.components import scheduler as pages
    except ImportError:  # no Bokeh, or a release that Dask does not support: there is no dashboard
        return

    def escaped(*, template: str, **named: Any) -> HTMLTemplateFormatter:
        return HTMLTemplateFormatter(template=template.replace("<%=", "<%-"), **named)

    pages.HTMLTemplateFormatter = escaped
