"""Functions that the handlers share: the login, the name in the address, and failures as text."""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from hpcgpu.errors import (
    BatchError,
    ClusterError,
    ClusterExists,
    HpcgpuError,
    NoCluster,
    NotTrusted,
    OptionError,
    OtherFormat,
)
from hpcgpu.existing_clusters.lookup import locate
from hpcgpu.options import values
from hpcgpu.posix.printable import printable
from hpcgpu.posix.threads import in_thread
from hpcgpu.store.directory import ClusterDirectory

#: The resource in requests to an authorizer of the Jupyter server.
RESOURCE = "hpcgpu"
#: The first matching class counts.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (NoCluster, 404),
    (NotTrusted, 403),
    (OptionError, 400),
    (ClusterExists, 409),
    (OtherFormat, 409),
    (BatchError, 503),
    (ClusterError, 409),
    (HpcgpuError, 500),
    (TimeoutError, 504),
    (OSError, 500),
)
_F = TypeVar("_F", bound=Callable[..., Any])


def failure(error: Exception) -> tuple[int, str]:
    """Return the status of an answer, and the text that a page shows."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), 500)
    return code, printable(str(error) or type(error).__name__, None, lines=True)


async def cluster(name: str, *, any_format: bool = False) -> ClusterDirectory:
    """Return the directory of the cluster that an address names; the address has a name, never a path.

    Raises
    ------
    OptionError
        It is not the name of a cluster.
    NoCluster
        There is none.
    NotTrusted
        Other users can change its directory.
    """
    values.new_name("name", name)
    return await in_thread(lambda: locate(name, any_format=any_format))


class Handler(APIHandler):  # type: ignore[misc]
    """A handler of the API: it answers with JSON."""

    auth_resource = RESOURCE
    _track_activity = False  # an open page must not keep an idle server alive

    def set_default_headers(self) -> None:
        """Forbid caches to keep an answer."""
        super().set_default_headers()
        self.set_header("Cache-Control", "no-store")

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the request; empty if it has none."""
        try:
            content = json.loads(self.request.body or b"{}")
        except ValueError as error:
            raise OptionError(f"the request is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise OptionError('the request must be a JSON object, such as {"jobs": 2}')
        return content


def logged_in(method: _F) -> _F:
    """Admit only a user who is logged in and may do this."""
    return cast("_F", web.authenticated(authorized(method)))


def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    """Let a method answer a logged-in user with its result as JSON, or with text if it fails."""

    @logged_in
    @functools.wraps(method)
    async def answer(self: Handler, *arguments: str) -> None:
        try:
            content = await method(self, *arguments)
        except (HpcgpuError, OSError) as error:
            code, message = failure(error)
            self.set_status(code)
            content = {"message": message}
        self.finish(json.dumps(content))

    return answer
