"""The dashboard of a cluster: its link, and the token that every page requires.

A page of Dask's dashboard takes up to half a second of the scheduler's event loop, and shows what the cluster computes.
`Guard` therefore looks for the token as soon as the header of a request is read, before a handler is chosen. A browser
brings the token once, as ``?token=``, and gets a cookie for it; programs send ``Authorization: token TOKEN``, or
``Bearer TOKEN``. `/health` is open. Who navigates with the cookie gets a page of ours: see `hpcgpu.runtime.frame`.

A program that holds the token can find out whether the cluster itself listens, before it sends the token: at `PROOF`
the cluster answers a number that was used only once with what only the holder of the token can make of it. After the
end of a scheduler any program of its node may listen on its port. The answer also signs the address that was reached,
so such a program cannot get it from the cluster's new scheduler and hand it on as its own.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlencode

from distributed.node import ServerNode
from distributed.utils import format_dashboard_link
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, HTTPServerRequest, RequestStartLine, ResponseStartLine
from tornado.iostream import IOStream
from tornado.routing import Router

from hpcgpu.fabric.strangers import Strangers, time_limit
from hpcgpu.runtime import frame
from hpcgpu.store.directory import ClusterDirectory, Contact

if TYPE_CHECKING:
    from tornado.httpserver import HTTPServer

__all__ = ["PROOF", "Guard", "guard", "guard_servers_of_this_process", "link", "link_with_token", "proof"]

logger = logging.getLogger("distributed.hpcgpu")

_OPEN = "/health"
#: Where the cluster proves that it listens: ``?nonce=`` and 64 hexadecimal digits.
PROOF = "/hpcgpu-proof"
_NONCE = re.compile(r"[0-9a-f]{64}")
_REFUSAL = (
    "This dashboard needs a token. `hpcgpu dashboard NAME` prints the link with the token; in Python, "
    "cluster.dashboard_link_with_token() returns it.\n"
)
_PROXY = "/proxy/"
#: What no address of a worker has. Without jupyter-server-proxy, distributed before 2026.7.1 shows what follows
#: `/proxy/` as HTML (dask/distributed#9328).
_MARKUP = re.compile(r"[<>&\"']")
_SCRIPT = "/~hpcgpu/dashboard.js"
#: Bytes of the header of a request, for whoever connects. Browsers send less than 2 KiB.
_HEADER_SIZE = 16 * 1024


def link(contact: Contact | None) -> str:
    """Return the link to the dashboard, without the token; empty where there is no dashboard."""
    host, _, port = contact.dashboard.rpartition(":") if contact is not None else ("", "", "")
    return str(format_dashboard_link(host, port)) if port else ""


def link_with_token(directory: ClusterDirectory, contact: Contact | None) -> str:
    """Return the link that opens the dashboard in a browser; whoever has it can read the dashboard."""
    plain, token = link(contact), directory.dashboard_token()
    return f"{plain}{'&' if '?' in plain else '?'}{urlencode({'token': token})}" if plain and token else plain


def proof(token: str, nonce: str, reached: tuple[Any, ...]) -> str:
    """Return what the cluster that has the token answers to a nonce.

    Parameters
    ----------
    token, nonce : str
    reached : tuple
        Address and port of the dashboard's end of the connection, as the sockets of both ends say.
    """
    address = ipaddress.ip_address(reached[0].partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address  # a socket for both kinds of addresses
    signed = f"hpcgpu dashboard proof {nonce} {address} {reached[1]}"
    return hmac.new(token.encode(), signed.encode(), hashlib.sha256).hexdigest()


class Guard(Router):
    """Hands those requests on that bring the token, and refuses the others.

    Parameters
    ----------
    application : tornado.routing.Router
        Serves the requests.
    token : str
    strangers : hpcgpu.fabric.strangers.Strangers
        Connections of the server, until one brings the token.
    """

    def __init__(self, application: Router, token: str, strangers: Strangers) -> None:
        self.application = application
        self.strangers = strangers
        self.token = token.encode()
        # A browser sends the cookies of a host to every port of it: each
        # cluster has a name of its own, and the value is not the token.
        self.cookie = f"hpcgpu-{self._digest('name')[:16]}"
        self.value = self._digest("value").encode()

    def _digest(self, what: str) -> str:
        return hmac.new(self.token, f"hpcgpu dashboard cookie {what}".encode(), hashlib.sha256).hexdigest()

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        """Return the handler of a request; tornado calls this once per request, websockets included."""
        if self._has_header(request.headers):
            return self._admit(request, **kwargs)
        if request.path == _OPEN:
            return self.application.find_handler(request, **kwargs)
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
        if not request.path.startswith(_PROXY):  # the workers' dashboards, which have the same token
            request.headers.pop("Authorization", None)  # Bokeh writes all headers into its pages
        elif _MARKUP.search(unquote(request.path)):
            return _Answer(request, 400, "Bad Request", {"Cache-Control": "no-store"}, "No worker has this address.\n")
        _confine(request)
        return self.application.find_handler(request, **kwargs)

    def _shown(self, request: HTTPServerRequest) -> HTTPMessageDelegate | None:
        """Return what is ours of what a browser asks for: the page around each page of Dask, and its script."""
        if request.path == _SCRIPT:
            headers = {"Content-Type": "text/javascript; charset=utf-8", "Cache-Control": "no-cache"}
            return _Answer(request, 200, "OK", headers, (frame.SCRIPTS / "dashboard.js").read_text())
        if request.method != "GET" or not frame.navigates(request.headers):
            return None
        self.strangers.remove(request.connection.stream)  # type: ignore[union-attr]
        base = "../" * (request.path.count("/") - 1) or "./"  # a proxy may have put something in front of the path
        return _Answer(request, 200, "OK", *frame.page(request.query, base, f"{base}{_SCRIPT[1:]}"))

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

        The location is relative: a proxy may have put something in front of the path. With ``SameSite=Strict`` a
        browser would not send the cookie where a link in a notebook is followed.
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


def _confine(request: HTTPServerRequest) -> None:
    """Let the answer to a request say that no browser may run it."""
    connection = request.connection
    assert connection is not None
    write = connection.write_headers

    def write_headers(
        start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders, chunk: bytes | None = None
    ) -> Any:
        headers.update({"Content-Security-Policy": frame.SANDBOX})
        headers.add("Vary", "Accept")
        return write(start_line, headers, chunk)

    connection.write_headers = write_headers  # type: ignore[method-assign]


def guard(server: HTTPServer, directory: ClusterDirectory) -> None:
    """Let an HTTP server of a cluster answer only requests that have its token.

    The server must not have answered any request yet.
    """
    token = directory.dashboard_token()
    if not token:
        logger.warning(
            "%s has no dashboard token: the dashboard refuses all requests; start a new cluster to use it",
            directory.path,
        )
    assert isinstance(server.request_callback, Router)
    strangers = Strangers()
    serve = server.handle_stream

    def handle_stream(stream: IOStream, address: tuple[Any, ...]) -> None:
        strangers.add(stream, str(address[0]))
        serve(stream, address)

    server.handle_stream = handle_stream  # type: ignore[method-assign]
    server.request_callback = Guard(server.request_callback, token or secrets.token_hex(32), strangers)
    strangers.hold_back(server)
    server.conn_params.header_timeout = time_limit()
    server.conn_params.max_header_size = _HEADER_SIZE


def guard_servers_of_this_process() -> None:
    """Guard every HTTP server that distributed starts in this process from now on.

    The process belongs to the cluster of its environment.

    distributed has no hook between the start of a server and its first answer: preloads run later. So this replaces
    ``ServerNode.start_http_server``, by which scheduler and workers start it; see `hpcgpu.upstream`.
    """
    from distributed.scheduler import Scheduler

    original = ServerNode.start_http_server
    if hasattr(original, "__wrapped__"):
        return

    def start_http_server(self: ServerNode, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if isinstance(self, Scheduler):
            _escape_text()
        guard(self.http_server, ClusterDirectory(Path(os.environ["HPCGPU_CLUSTER_DIRECTORY"])))

    start_http_server.__wrapped__ = original  # type: ignore[attr-defined]
    ServerNode.start_http_server = start_http_server


def _escape_text() -> None:
    """Let the tables of the scheduler's pages show text as text.

    The table of exceptions puts them, tracebacks and keys into HTML as they are. A text that a task read from a file of
    somebody else would run there as a script.
    """
    try:
        from bokeh.models.widgets.tables import HTMLTemplateFormatter
        from distributed.dashboard.components import scheduler as pages
    except ImportError:  # no Bokeh, or a release that Dask does not know: there is no dashboard
        return

    def escaped(*, template: str, **named: Any) -> HTMLTemplateFormatter:
        return HTMLTemplateFormatter(template=template.replace("<%=", "<%-"), **named)

    pages.HTMLTemplateFormatter = escaped
