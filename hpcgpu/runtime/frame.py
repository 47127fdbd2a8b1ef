"""The page around each page of Dask's dashboard.

A page of Dask may contain text of anybody, so none runs with what the browser's login lets it do. Who navigates gets
a page of ours. It fetches Dask's page as any program does, and puts it into a frame that has no origin: see
`static/dashboard.js`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from string import Template

__all__ = ["SANDBOX", "SCRIPTS", "navigates", "page"]

#: The policy of whatever Dask answers: opened by itself, it runs nowhere.
SANDBOX = "sandbox"
#: The folder of the script, `dashboard.js`.
SCRIPTS = Path(__file__).parent / "static"
#: What asks for the frame, in place of the arguments of a page.
_FRAME = "~frame"
#: The page around the frame shows no text of Dask.
_AROUND = (
    "default-src 'none'; script-src 'self'; img-src 'self'; connect-src 'self'; frame-src 'self'; base-uri 'none'; "
    "form-action 'none'"
)
#: The page of Dask: it needs scripts, and takes them and all else from ``data:``. Of other hosts, only a style sheet.
_INSIDE = (
    "sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads; default-src 'none'; "
    "script-src 'unsafe-inline' 'unsafe-eval' data:; style-src 'unsafe-inline' data: https://cdnjs.cloudflare.com; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'"
)


def navigates(headers: Mapping[str, str]) -> bool:
    """Return whether a browser opens a page: no script of a page and no program asks so, and nobody for a part."""
    return "text/html" in headers.get("Accept", "") and "Upgrade" not in headers


def page(query: str, base: str, script: str) -> tuple[dict[str, str], str]:
    """Return what a browser gets that navigates: headers, and the page around the frame, or the frame.

    Parameters
    ----------
    query : str
        Of its request.
    base : str
        The address of the dashboard, which ends with a slash.
    script : str
        The address of `dashboard.js`.
    """
    inside = query == _FRAME
    text = (SCRIPTS / ("frame.html" if inside else "dashboard.html")).read_text()
    if not inside:
        text = Template(text).substitute(base=html.escape(base), script=html.escape(script))
    headers = {
        "Content-Security-Policy": _INSIDE if inside else _AROUND,
        "Content-Type": "text/html; charset=utf-8",
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }
    return headers, text
