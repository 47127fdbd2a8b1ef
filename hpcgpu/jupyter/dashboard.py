"""The dashboard of a cluster, behind the login of the Jupyter server.

A request goes to the host and port of the cluster's contact and to no other, which is read anew each time. Nothing of
the user's login goes there: of the headers only those that a page needs, and the dashboard's own token, which the
browser never gets. The answer comes under the address of the Jupyter server, so it must come from the cluster itself:
before each request, the other side proves that it has the token (`hpcgpu.remote.dashboard.listening`).

A page of Dask may contain text of anybody, so none runs with the powers of the user's login. Who navigates gets a page
of ours with a frame that has no origin: see `hpcgpu.runtime.frame`.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlparse

from jupyter_server.utils import ensure_async
from jupyter_server_proxy.handlers import ProxyHandler
from tornado import web
from tornado.httputil import HTTPHeaders

from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.jupyter.handling import RESOURCE, cluster, failure
from hpcgpu.remote.dashboard import listening
from hpcgpu.remote.jupyter_server import PREFIXES
from hpcgpu.runtime import frame

__all__ = ["Dashboard"]

#: Headers of a request that go to the dashboard, and of its answer that come back.
_REQUEST = ("Accept-Encoding", "Accept-Language", "Content-Type", "If-Modified-Since", "If-None-Match", "User-Agent")
_ANSWER = ("Cache-Control", "Content-Encoding", "Content-Type", "Date", "Etag", "Expires", "Last-Modified", "Vary")
#: Seconds for a connection, and for a page.
_CONNECT, _PAGE = 10.0, 60.0


class Dashboard(ProxyHandler):  # type: ignore[misc]
    """Serves one request of a browser, or one websocket."""

    SUPPORTED_METHODS = ("GET",)
    auth_resource = RESOURCE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a lambda, because jupyter-server-proxy takes the `self` of a method for an argument
        self.rewrite_response = (lambda response: self._cleaned(response),)  # noqa: PLW0108

    async def prepare(self) -> None:
        """Let only in who is logged in, may read, and comes from a page of this server."""
        await super().prepare()
        if not self.current_user:  # sent to the login
            return
        if not await ensure_async(self.authorizer.is_authorized(self, self.current_user, "read", RESOURCE)):
            raise web.HTTPError(403)
        if not self.check_origin():
            raise web.HTTPError(403, "the request comes from a page of another server")

    async def get(self, name: str, path: str) -> None:
        """Find the cluster, then serve the page or the websocket."""
        if not path:
            self.redirect(self.request.path + "/")
            return
        if path.startswith("/proxy/"):  # as a websocket, the scheduler passes that on to any host and port
            raise web.HTTPError(403, "dashboards of workers are not served here")
        if frame.navigates(self.request.headers):
            self._show(name)
            return
        pairs = parse_qsl(self.request.query, keep_blank_values=True)
        self.request.query = urlencode([pair for pair in pairs if pair[0] != "token"])  # the user's, of this server
        self.request.headers.pop("Accept", None)  # text/event-stream would be served without `rewrite_response`
        try:
            directory = await cluster(name)
            there = self._there = await listening(directory)
            if there.secure:
                raise ClusterError(
                    f"Jupyter shows no dashboard that uses HTTPS: `hpcgpu dashboard {name}` prints a link that works"
                )
        except (HpcgpuError, OSError) as error:
            code, message = failure(error)
            self.set_status(code)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(message)
            return
        self.host_allowlist = [there.host]
        self.proxy_base = f"{self._prefix()}/{name}"
        await super().get(name, path)

    def _prefix(self) -> str:
        return next(prefix for prefix in PREFIXES if self.request.path.startswith(f"{self._base()}{prefix}/"))

    def _base(self) -> str:
        return f"{self.base_url.rstrip('/')}/"

    def _show(self, name: str) -> None:
        """Send the page that fetches what was asked for, or the frame for it."""
        base = f"{self._base()}{self._prefix()}/{quote(name)}/"
        headers, text = frame.page(self.request.query, base, f"{self._base()}hpcgpu/static/dashboard.js")
        # after the comma, a policy of its own: a site's policy takes nothing from it
        headers["Content-Security-Policy"] = f"{self.content_security_policy}, {headers['Content-Security-Policy']}"
        for header, value in headers.items():
            self.set_header(header, value)
        self.finish(text)

    async def http_get(self, name: str, path: str) -> None:
        """Serve a page."""
        await self.proxy(self._there.host, self._there.port, path)

    async def open(self, name: str, path: str) -> None:
        """Connect the websocket of the browser with one of the dashboard."""
        await self.proxy_open(self._there.host, self._there.port, path)

    def proxy_request_headers(self) -> HTTPHeaders:
        """Return the headers for the dashboard."""
        headers = HTTPHeaders({name: self.request.headers[name] for name in _REQUEST if name in self.request.headers})
        headers["Authorization"] = f"token {self._there.token}"
        return headers

    def proxy_request_options(self) -> dict[str, Any]:
        """Return for how long a request may take, and that a redirect is the browser's to follow."""
        return {"follow_redirects": False, "connect_timeout": _CONNECT, "request_timeout": _PAGE}

    def _cleaned(self, response: Any) -> None:
        """Keep of the dashboard's headers what a page needs: no cookies, no permissions for other origins."""
        given = response.headers
        kept = HTTPHeaders({name: given[name] for name in _ANSWER if name in given})
        place = urlparse(given.get("Location", ""))
        if place.path and not place.scheme and not place.netloc:
            kept["Location"] = given["Location"]
        kept["X-Content-Type-Options"] = "nosniff"
        kept["Content-Security-Policy"] = f"{self.content_security_policy}, {frame.SANDBOX}"
        kept.add("Vary", "Accept")
        kept["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers = kept
