"""The page ``hpcgpu/``: all clusters, live."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from jupyter_server.base.handlers import JupyterHandler
from tornado import web

from hpcgpu.display.html import html
from hpcgpu.jupyter.base_handler import RESOURCE, logged_in

#: The page loads only its own scripts and styles, nothing from other hosts, and has no inline scripts.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
_PAGE = Path(__file__).parent / "static" / "page_shell.html"


class Page(JupyterHandler):  # type: ignore[misc]
    """The page itself, without any data."""

    auth_resource = RESOURCE

    @property
    def content_security_policy(self) -> str:
        """The policy of Jupyter's own pages, and what this page needs."""
        return f"{super().content_security_policy}; {_POLICY}"

    @logged_in
    async def get(self) -> None:
        """Return the page."""
        if not self.request.path.endswith("/"):
            self.redirect(self.request.path + "/")
            return
        self.xsrf_token  # noqa: B018  # sets the cookie, which the page's requests bring
        base = self.base_url.rstrip("/") + "/"
        text = html(_PAGE.read_text(), base=base, here=f"{base}hpcgpu/")
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.finish(text)


class Static(JupyterHandler):  # type: ignore[misc]
    """Scripts and styles of the page, also those that it shares with the widget."""

    auth_resource = RESOURCE

    def initialize(self, folders: list[Path]) -> None:
        self.folders = folders

    @logged_in
    async def get(self, name: str) -> None:
        """Return a file."""
        path = next((file for folder in self.folders if (file := folder / name).is_file()), None)
        if path is None:
            raise web.HTTPError(404)
        self.set_header("Content-Type", mimetypes.guess_type(name)[0] or "application/octet-stream")
        self.set_header("Cache-Control", "no-cache")
        self.finish(path.read_bytes())
