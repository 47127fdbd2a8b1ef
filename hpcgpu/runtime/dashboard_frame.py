"""The page around each page of Dask's dashboard.

A page of Dask may contain text from any source, so no page of Dask runs with the rights of the browser's login. A
browser that opens a page gets a page of ours. It fetches Dask's page as any program does, and puts it into a frame that
has no origin: see `static/dashboard.js`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from hpcgpu.display.html import html

#: The policy of all answers of Dask: opened outside of the frame, none runs scripts.
SANDBOX = "sandbox"
#: The folder of the script, `dashboard.js`.
SCRIPTS = Path(__file__).parent / "static"
#: The query that requests the frame, in place of the arguments of a page.
_FRAME = "~frame"
#: For the page around the frame, which shows no text of Dask.
_POLICY_OF_PAGE = (
    "default-src 'none'; script-src 'self'; img-src 'self'; connect-src 'self'; frame-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
#: For the page of Dask, in the frame. It runs only its own scripts, which get this nonce, and no script in text that it
#: inserts later as HTML. The hash is that of ``onclick="myFunction()"``, Dask's menu in narrow windows. All other
#: content comes from ``data:``, and from other hosts only a style sheet.
_POLICY_OF_FRAME = (
    "sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads; default-src 'none'; "
    "script-src 'nonce-{nonce}' 'unsafe-eval' 'unsafe-hashes' 'sha256-DLsspdO65egz8GmJ7gT7AHNirrsTFzKLBvF8tcsc82Y='; "
    "style-src 'unsafe-inline' data: https://cdnjs.cloudflare.com; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def navigates(headers: Mapping[str, str]) -> bool:
    """Return whether a browser opens a page: scripts, programs and requests for parts of a page send other headers."""
    return "text/html" in headers.get("Accept", "") and "Upgrade" not in headers


def page(query: str, base: str, script: str) -> tuple[dict[str, str], str]:
    """Return the answer to a browser that opens a page: headers, and the page around the frame, or the frame.

    Parameters
    ----------
    query : str
        Query of the request.
    base : str
        The address of the dashboard, which ends with a slash.
    script : str
        The address of `dashboard.js`.
    """
    frame = query == _FRAME
    nonce = secrets.token_urlsafe(16)
    template = (SCRIPTS / ("frame.html" if frame else "dashboard.html")).read_text()
    text = html(template, base=base, script=script, nonce=nonce)
    headers = {
        "Content-Security-Policy": _POLICY_OF_FRAME.format(nonce=nonce) if frame else _POLICY_OF_PAGE,
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return headers, text
