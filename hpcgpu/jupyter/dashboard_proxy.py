"""The dashboard of a cluster, behind the login of the Jupyter server.

A request goes only to the host and port in the cluster's contact, which is read again for each request. No part of the
user's login goes there. The proxy sends only the headers that a page needs, and the dashboard's own token, which the
browser never gets. The browser sees the answer under the address of the Jupyter server, so the answer must come from
the cluster itself: before each request, the other side proves that it has the token
(`hpcgpu.client.dashboard_forwarding.listening`).

A page of Dask may contain text from any source, so no page of Dask runs with the rights of the user's login. A browser
that opens a page gets a page of ours with a frame that has no origin: see `hpcgpu.runtime.dashboard_frame`.
"""

from __future__ import annotations

import posixpath
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlparse

from jupyter_server.utils import ensure_async
from jupyter_server_proxy.handlers import ProxyHandler
from tornado import web
from tornado.httputil import HTTPHeaders

from hpcgpu.client.dashboard_forwarding import listening
from hpcgpu.client.jupyter_dashboard_link import PREFIXES
from hpcgpu.errors import ClusterError, HpcgpuError
from hpcgpu.jupyter.base_handler import RESOURCE, cluster, failure
from hpcgpu.runtime import dashboard_frame

#: Headers of a request that are sent to the dashboard, those that a websocket of the browser needs, and headers of the
#: dashboard's answer that are passed back.
_REQUEST = ("Accept-Encoding", "Accept-Language", "Content-Type", "If-Modified-Since", "If-None-Match", "User-Agent")
_WEBSOCKET = ("Connection", "Host", "Origin", "Upgrade")
_WEBSOCKET_PREFIX = "Sec-Websocket-"
_ANSWER = ("Cache-Control", "Content-Encoding", "Content-Type", "Date", "Etag", "Expires", "Last-Modified", "Vary")
#: Seconds for a connection, and for a page.
_CONNECT, _PAGE = 10.0, 60.0


def redirect_below(location: str, path: str) -> str | None:
    """Return a redirect of the dashboard as the browser needs it, or nothing if it leads to another server.

    The browser has the dashboard below a prefix that the dashboard does not know, so its absolute paths become relative
    to `path`, the page's own. The leading ``./`` keeps what follows from being read as a scheme or as a host.
    """
    place = urlparse(location)
    if not place.path or place.scheme or place.netloc:
        return None
    here = posixpath.dirname(posixpath.join("/", path))
    target = posixpath.relpath(posixpath.join(here, place.path), here)
    return place._replace(path=f"./{target}").geturl()


class Dashboard(ProxyHandler):  # type: ignore[misc]
    """Serves one request of a browser, or one websocket."""

    SUPPORTED_METHODS = ("GET",)
    auth_resource = RESOURCE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # a lambda, because jupyter-server-proxy takes the `self` of a method for an argument
        self.rewrite_response = (lambda response, path: self._cleaned(response, path),)  # noqa: PLW0108

    async def prepare(self) -> None:
        """Admit only a user who is logged in and may read, and only requests from a page of this server."""
        await super().prepare()
        if not self.current_user:  # redirected to the login
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
        if path.startswith("/proxy/"):  # the scheduler passes such a websocket on to any host and port
            raise web.HTTPError(403, "dashboards of workers are not served here")
        if dashboard_frame.navigates(self.request.headers):
            self._show(name)
            return
        pairs = parse_qsl(self.request.query, keep_blank_values=True)
        self.request.query = urlencode([pair for pair in pairs if pair[0] != "token"])  # the user's, for this server
        # what the proxy does with a request depends on no header that is not named here
        given = self.request.headers.get_all()
        self.request.headers = HTTPHeaders()
        for header, value in given:
            if header in (*_REQUEST, *_WEBSOCKET) or header.startswith(_WEBSOCKET_PREFIX):
                self.request.headers.add(header, value)
        try:
            directory = await cluster(name)
            endpoint = self._endpoint = await listening(directory)
            if endpoint.secure:
                raise ClusterError(
                    f"Jupyter shows no dashboard that uses HTTPS: `hpcgpu dashboard {name}` prints a link that works"
                )
        except (HpcgpuError, OSError) as error:
            code, message = failure(error)
            self.set_status(code)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(message)
            return
        self.host_allowlist = [endpoint.host]
        await super().get(name, path)

    def _show(self, name: str) -> None:
        """Send the page that fetches the requested page, or its frame."""
        root = f"{self.base_url.rstrip('/')}/"
        prefix = next(prefix for prefix in PREFIXES if self.request.path.startswith(f"{root}{prefix}/"))
        base = f"{root}{prefix}/{quote(name)}/"
        headers, text = dashboard_frame.page(self.request.query, base, f"{root}hpcgpu/static/dashboard.js")
        # the part after the comma is a separate policy: a site's policy does not weaken it
        headers["Content-Security-Policy"] = f"{self.content_security_policy}, {headers['Content-Security-Policy']}"
        for header, value in headers.items():
            self.set_header(header, value)
        self.finish(text)

    async def http_get(self, name: str, path: str) -> None:
        """Serve a page."""
        await self.proxy(self._endpoint.host, self._endpoint.port, path)

    async def open(self, name: str, path: str) -> None:
        """Connect the websocket of the browser with one of the dashboard."""
        await self.proxy_open(self._endpoint.host, self._endpoint.port, path)

    def proxy_request_headers(self) -> HTTPHeaders:
        """Return the headers for the dashboard."""
        headers = HTTPHeaders({name: self.request.headers[name] for name in _REQUEST if name in self.request.headers})
        headers["Authorization"] = f"token {self._endpoint.token}"
        return headers

    def proxy_request_options(self) -> dict[str, Any]:
        """Return the time limit of a request; the browser, not the proxy, follows redirects."""
        return {"follow_redirects": False, "connect_timeout": _CONNECT, "request_timeout": _PAGE}

    def _cleaned(self, response: Any, path: str) -> None:
        """Keep only the dashboard's headers that a page needs: no cookies, no permissions for other origins."""
        given = response.headers
        kept = HTTPHeaders({name: given[name] for name in _ANSWER if name in given})
        if location := redirect_below(given.get("Location", ""), path):
            kept["Location"] = location
        kept["X-Content-Type-Options"] = "nosniff"
        kept["Content-Security-Policy"] = f"{self.content_security_policy}, {dashboard_frame.SANDBOX}"
        kept.add("Vary", "Accept")
        kept["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers = kept
