"""The pictures of the pages show what hpcgpu shows today. ``HPCGPU_UPDATE_GOLDEN=1`` makes them again."""

from __future__ import annotations

import html
import io
import os
import re
from pathlib import Path

import pytest

from hpcgpu.cli.top import picture
from tests.browser.drawing import snapshot

STATIC = Path(__file__).parents[2] / "docs" / "_static"


def lines(svg: str) -> list[str]:
    """The lines of text in a picture of a terminal."""
    found: dict[float, str] = {}
    for y, text in re.findall(r'<text class="[^"]*-r\d+" x="[^"]*" y="([\d.]+)"[^>]*>([^<]*)</text>', svg):
        found[float(y)] = found.get(float(y), "") + html.unescape(text)
    return [" ".join(text.split()) for _, text in sorted(found.items()) if text.strip()]


def test_the_picture_of_top_shows_what_top_prints() -> None:
    from rich.console import Console

    taken = snapshot()
    # rich takes 80 columns under TERM=dumb if only one of the two is given
    console = Console(record=True, width=104, height=40, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(picture(taken, now=taken.time, width=console.width))
    if os.environ.get("HPCGPU_UPDATE_GOLDEN"):
        drawn = console.export_svg(title=f"hpcgpu top {taken.name}", clear=False)
        drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they would be loaded from elsewhere
        (STATIC / "top.svg").write_text(drawn)
    printed = [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]
    assert printed and lines((STATIC / "top.svg").read_text()) == printed


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in sorted(STATIC.iterdir())])
def test_what_the_pages_need_is_small_and_loads_nothing_from_elsewhere(path: Path) -> None:
    assert path.stat().st_size < 300_000
    if path.suffix in {".svg", ".css"}:
        assert not re.search(r"url\(['\"]?http|href=.http|@import", path.read_text())
