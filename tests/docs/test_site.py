"""The built pages: their links lead somewhere, each error has a place, and no word is misspelt."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import hpcgpu
from hpcgpu import errors
from hpcgpu.cluster.dask_ctl import cluster_class
from hpcgpu.configuration.resolve import resolve
from hpcgpu.profiles import site_profiles
from hpcgpu.scripts.render import render

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from directives import starting_lines  # noqa: E402


class _Page(HTMLParser):
    """Anchors and links of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {str(given[name]) for name in ("id", "name") if given.get(name)}
        self.links += [str(given[name]) for name in ("href", "src") if given.get(name)]


@cache
def parsed(page: Path) -> _Page:
    found = _Page()
    found.feed(page.read_text())
    return found


def broken(folder: Path) -> Iterator[str]:
    """Each link to a page, picture or anchor of these pages that is not there."""
    for page in sorted(folder.glob("*.html")):
        for link in parsed(page).links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue  # elsewhere: not fetched
            target = page.parent / unquote(url.path) if url.path else page
            if not target.exists():
                yield f"{page.name}: {link}: no such file"
            elif url.fragment and target.suffix == ".html" and unquote(url.fragment) not in parsed(target).anchors:
                yield f"{page.name}: {link}: no such place"


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html"><a href="#c"><p id="d"><a href="#d"><a href="https://e/f">')
    assert list(broken(tmp_path)) == ["a.html: b.html: no such file", "a.html: #c: no such place"]


def test_every_link_between_the_pages_leads_to_a_place_that_exists(built: Path) -> None:
    assert sum(len(parsed(page).links) for page in built.glob("*.html")) > 500
    assert list(broken(built)) == []


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_has_a_place_on_the_page_of_errors(built: Path, name: str) -> None:
    assert f"hpcgpu.{name}" in parsed(built / "errors.html").anchors


def test_every_page_is_in_the_table_of_contents(built: Path) -> None:
    """Sphinx warns of a page in no table. This one also sees a page that is only in the table of another page."""
    listed = {urlsplit(link).path for link in parsed(built / "index.html").links}
    assert [p.stem for p in (ROOT / "docs").glob("*.rst") if p.stem != "index" and f"{p.stem}.html" not in listed] == []


@pytest.mark.parametrize("name", site_profiles.shipped())
def test_the_lines_that_start_a_cluster_with_a_profile_are_accepted(built: Path, name: str) -> None:
    profile = site_profiles.load(name)
    lines = starting_lines(profile)
    call = ast.parse(lines).body[1]
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call) and isinstance(call.value.func, ast.Name)
    assert getattr(hpcgpu, call.value.func.id) is cluster_class(profile.system)
    given = {str(k.arg): ast.literal_eval(k.value) for k in call.value.keywords}
    options = resolve(profile.system, given | {"name": "demo"})
    for kind in ("scheduler", "worker"):
        assert render(profile.system, kind, options, Path("/home/me/clusters/demo")).startswith("#!")
    page = " ".join(html.unescape(re.sub("<[^>]*>", "", (built / "profiles.html").read_text())).split())
    assert lines.splitlines()[1] in page
    for advice in profile.advice.values():
        assert f"(page, read {advice.read})" in page and advice.source in (built / "profiles.html").read_text()


def test_no_word_is_misspelt() -> None:
    where = ["docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "hpcgpu", "templates", "examples"]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
