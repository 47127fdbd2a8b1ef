"""A real JupyterLab and a real browser, for the tests.

    python tests/browser/browser.py install    # Debian: its chromium

The fixtures are in tests/conftest.py, for tests of all layers: `jupyter` starts servers, `page` is a page of a browser.
The thread of a test that has a `page` has an event loop that runs, because Playwright leaves it so: let a notebook, a
program or another thread hold the cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent / "slurm"))

from bed import BedError, cannot_install, free_ports, install_packages, wait_for  # noqa: E402

#: Without what calls home, or needs a GPU or a kernel that a container lacks.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NEEDS = ("anywidget", "ipykernel", "jupyter_server", "jupyterlab", "playwright")
TOKEN = "a-token-of-the-tests"
#: Names the processes of a server, in their environment.
MARK = "HPCGPU_TEST_JUPYTER"
#: Seconds. A server, a page of JupyterLab and a kernel start slowly on a machine that does much else.
TIMEOUT = 150.0
#: Milliseconds between two checks that a page is as it should be. Playwright's own default is each frame of a screen.
LOOKS = 100
#: The PYTHONPATH of Jupyter servers: they start in half the time.
PATH = os.pathsep.join([str(HERE / "missing"), *filter(None, [os.environ.get("PYTHONPATH")])])
LIGHT, DARK = "JupyterLab Light", "JupyterLab Dark"


def chromium() -> str | None:
    """Where the browser is."""
    return shutil.which("chromium")


def why_not() -> str | None:
    """Why no browser test can run here, or None if they can."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        return f"not installed: {', '.join(missing)} (the extra `test` has them)"
    if chromium() is None:
        return "chromium is not installed (run: python tests/browser/browser.py install)"
    return None


def install() -> None:
    """Install Debian's browser if it is missing. Ubuntu's package of that name is a snap, which needs more."""
    if chromium() is not None:
        return
    if cannot_install() is None and platform.freedesktop_os_release()["ID"] != "debian":
        raise BedError("cannot install chromium: only Debian has it as a package")
    install_packages(["chromium"])


class Jupyter:
    """A JupyterLab that runs, with a folder of notebooks, and with settings of its own.

    Parameters
    ----------
    place : Path
        Everything of it is here. Its notebooks are in ``notebooks``.
    base_url : str, default "/"
        Such as "/user/ada/", as a hub has.
    theme : str, default LIGHT
    arguments : sequence of str, optional
        Of its command line.
    environment : dict, optional
        Variables that its kernels have too.
    """

    def __init__(
        self,
        place: Path,
        base_url: str = "/",
        theme: str = LIGHT,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.place, self.base_url = place, base_url
        self.notebooks = place / "notebooks"
        self.token, self.address = TOKEN, ""
        self._log = place / "server.log"
        self._arguments = arguments
        self._theme = theme
        directories = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        more = {name: str(place / folder) for name, folder in directories.items()}
        more |= {MARK: str(place), "JUPYTER_TOKEN": TOKEN, "PYTHONPATH": PATH, "PYTHONFAULTHANDLER": "1"}
        more |= environment or {}
        self._environment = {name: text for name, text in os.environ.items() if not name.startswith("JUPYTER")} | more

    def start(self) -> None:
        """Return when it answers."""
        self.notebooks.mkdir(parents=True)
        about = self.place / "settings/@jupyterlab/apputils-extension"
        about.mkdir(parents=True)
        (about / "themes.jupyterlab-settings").write_text(json.dumps({"theme": self._theme}))
        quiet = {"checkForUpdates": False, "fetchNews": "false"}
        (about / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
        command = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.base_url={self.base_url}"),
            f"--ServerApp.root_dir={self.notebooks}",
            *("--expose-app-in-browser", "--LabApp.extension_manager=readonly"),
            *self._arguments,
        ]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=self.notebooks, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            wait_for(self._answers, "JupyterLab answers", TIMEOUT)
        except BedError as error:
            raise BedError(f"{error}; its log:\n{self.log}") from None

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise BedError(f"JupyterLab ended with exit code {self._process.returncode}")
        with suppress(OSError, ValueError, IndexError):
            [about] = [json.loads(path.read_text()) for path in (self.place / "runtime").glob("jpserver-*.json")]
            self.address = f"http://127.0.0.1:{about['port']}"
            self.request("api/status")
            return True
        return False

    @property
    def log(self) -> str:
        """What the server printed."""
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Its address with the path prefix; ends with a slash."""
        return f"{self.address}{self.base_url}"

    def request(self, path: str, content: Any = None, method: str | None = None) -> Any:
        """Return what the server answers to a program that has its token, as JSON; ``api/kernels``, for example."""
        data = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"token {TOKEN}", "Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}{path}", data, headers, method=method), timeout=TIMEOUT) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def write(self, name: str, *cells: str) -> Path:
        """Write a notebook with these cells of code."""
        path = self.notebooks / name
        code: dict[str, Any] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        content = {
            "cells": [{**code, "id": f"cell-{number}", "source": source} for number, source in enumerate(cells)],
            "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        path.write_text(json.dumps(content))
        return path

    def lab(self, path: str = "") -> str:
        """Return the link that opens JupyterLab, or a notebook in it, and that logs in."""
        tree = f"/tree/{path}" if path else ""
        return f"{self.url}lab/workspaces/test{tree}?reset&token={TOKEN}"

    def clear(self) -> None:
        """End the kernels, and remove the notebooks: what the next test finds is as after `start`."""
        for kernel in self.request("api/kernels"):
            self.request(f"api/kernels/{kernel['id']}", method="DELETE")
        wait_for(lambda: self.processes() == [self._process.pid], "the kernels end", TIMEOUT, 0.2)
        for path in self.notebooks.iterdir():  # the server works in this directory
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def stop(self) -> None:
        """End the server and its kernels; the kernels have the time that JupyterLab gives them."""
        if self._process.poll() is None:
            with suppress(OSError):
                self.request("api/shutdown", {})
        with suppress(BedError):
            wait_for(lambda: set(self.processes()) <= {self._process.pid}, "the kernels end", TIMEOUT, 0.2)
        with suppress(subprocess.TimeoutExpired):  # Jupyter's own thread (AnyIO) may keep the server at its end
            self._process.wait(10)
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.wait()
        left = [pid for pid in left if pid != self._process.pid]
        if left:
            raise BedError(f"processes of JupyterLab were left: {left}; its log:\n{self.log}")

    def aborted(self) -> str:
        """End the server at once; return its log, with the stacks of its threads."""
        self._process.send_signal(signal.SIGABRT)
        self._process.wait(TIMEOUT)
        return self.log

    def processes(self) -> list[int]:
        """Return the server and its kernels, as far as they live. The jobs of their clusters do not count."""
        mark = f"{MARK}={self.place}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                ours = b"ipykernel_launcher" in command or b"jupyterlab" in command
                if entry.name.isdigit() and ours and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


class Front:
    """A reverse proxy before a server, as Open OnDemand's: it passes paths on as they are, and sets `Host`."""

    def __init__(self, server: Jupyter) -> None:
        self._to = server.address.removeprefix("http://")
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._port = free_ports(1)[0]  # no connection takes it while this is down
        self.up()
        self.address = f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Accept connections."""
        self._listening = self._do(asyncio.start_server(self._connected, "127.0.0.1", self._port))

    def down(self) -> None:
        """End all connections, and accept none."""

        async def end() -> None:
            self._listening.close()
            for writer in self._open:
                writer.transport.abort()

        self._do(end())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._to.partition(":")
        there, to = await asyncio.open_connection(host, int(port))
        self._open |= {writer, to}
        await asyncio.gather(self._pass_on(reader, to), self._pass_on(there, writer))
        self._open -= {writer, to}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before, after = (f"Host: {there}".encode() for there in (self.address[7:], self._to))
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data.replace(before, after))
                await writer.drain()
        writer.close()


class Notebook:
    """A notebook that is open in JupyterLab, in a page of the browser."""

    def __init__(self, page: Any, server: Jupyter, name: str) -> None:
        self.page = page
        page.goto(server.lab(name), wait_until="domcontentloaded")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=1000 * TIMEOUT)
        try:
            self._wait(
                "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
            )
        except Exception as error:
            state = page.evaluate("""() => {
              const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
              const dialogs = [...document.querySelectorAll(".jp-Dialog")].map((dialog) => dialog.innerText);
              return [context?.kernelDisplayStatus, context?.session?.kernel?.connectionStatus, ...dialogs].join(", ");
            }""")
            raise BedError(f"the kernel is not idle: {state}; the log of JupyterLab:\n{server.aborted()}") from error

    def _wait(self, condition: str, argument: Any = None) -> None:
        self.page.wait_for_function(condition, arg=argument, timeout=1000 * TIMEOUT, polling=LOOKS)

    def command(self, name: str) -> None:
        """Let JupyterLab execute a command of its own; do not wait until it is done."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def run_all(self) -> None:
        """Run all cells; do not wait for their end."""
        self.command("notebook:run-all-cells")

    def wait_idle(self) -> None:
        """Wait until the kernel reports that it is idle: it may also report that after a message of a widget."""
        self._wait("() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")

    def output(self, cell: int) -> Any:
        """Return Playwright's locator of the outputs of a cell."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")


#: What a script tries. `base` is the path of the Jupyter server, `mark` a name that the server must never receive.
ATTACK = """async ([base, mark]) => {
  const done = [];
  async function attempt(name, action) {
    try {
      const result = await action();
      if (result) done.push(`${name}: ${result}`);
    } catch {}
  }
  const heard = (socket) => new Promise((told) => {
    socket.onopen = () => told("open");
    socket.onclose = socket.onerror = () => told("");
  });
  const loaded = (element, address) => new Promise((told) => {
    element.onload = () => told("loaded");
    element.onerror = () => told("");
    element.src = address;
    document.body.append(element);
  });
  const write = { method: "PUT", body: JSON.stringify({ type: "file", format: "text", content: mark }) };
  await attempt("origin", () => (self.origin === "null" ? "" : self.origin));
  await attempt("cookies", () => document.cookie);
  await attempt("storage", () => { localStorage.x = 1; return "written" });
  await attempt("parent", () => parent !== window && parent.document.title);
  await attempt("top", () => top !== window && top.document.title);
  await attempt("list files", async () => (await fetch(`${base}api/contents`)).status);
  await attempt("write a file", async () => (await fetch(`${base}api/contents/${mark}`, write)).status);
  await attempt("kernel", async () => (await fetch(`${base}api/kernels`, { method: "POST" })).status);
  await attempt("kernel, unseen", async () => {
    await fetch(`${base}api/kernels?${mark}`, { method: "POST", mode: "no-cors", credentials: "include" });
    return "sent";
  });
  const secure = location.protocol === "https:" ? "wss" : "ws";
  const paths = ["api/events/subscribe", "terminals/websocket/1", "hpcgpu/dashboard/demo/../../../api/kernels/x"];
  for (const path of paths)
    await attempt(`socket ${path}`, () => heard(new WebSocket(`${secure}://${location.host}${base}${path}?${mark}`)));
  await attempt("image", () => loaded(new Image(), `${base}static/favicons/favicon.ico?${mark}`));
  await attempt("script", () => loaded(document.createElement("script"), `${base}files/${mark}.js`));
  await attempt("frame in it", async () => {
    const frame = document.createElement("iframe");
    await loaded(frame, "about:blank");
    return frame.contentWindow.origin === "null" ? "" : frame.contentWindow.origin;
  });
  await attempt("beacon", () => { navigator.sendBeacon(`${base}api/kernels?${mark}`, "{}") });
  await attempt("navigate the top", () => { top.location = `${base}tree?${mark}` });
  return done;
}"""
#: Whether a plot of a dashboard shows tasks of this name.
_SHOWS = """name => [...(globalThis.Bokeh?.documents ?? [])].flatMap((all) => [...all._all_models.values()])
    .filter((model) => model.type === "ColumnDataSource")
    .some((model) => model.columns().some((column) => Array.from(model.get_column(column) ?? []).includes(name)))"""
_WORK = """
import sys, time, hpcgpu
with hpcgpu.connect(sys.argv[1], quiet=True) as client:
    for name in sys.stdin:
        client.gather(client.map(lambda x: time.sleep(0.01), range(10), key=name.strip(), pure=False))
"""


def dask_in(page: Any) -> Any:
    """Return the frame that has the page of Dask, of a dashboard behind Jupyter's login."""
    frame = page.locator("iframe[src$='?~frame']").element_handle().content_frame()
    frame.wait_for_selector("body > *", timeout=1000 * TIMEOUT, state="attached")
    return frame


def plots_follow_the_work(dashboard: Any, cluster: str) -> None:
    """Let a cluster work, and wait until its dashboard, in a page or a frame of the browser, shows that."""

    with subprocess.Popen([sys.executable, "-c", _WORK, cluster], stdin=subprocess.PIPE, text=True) as program:
        for number in range(2):  # what the page loads, and what comes then
            name = f"work{number}{secrets.token_hex(3)}"
            print(name, file=program.stdin, flush=True)
            dashboard.wait_for_function(_SHOWS, arg=name, timeout=1000 * TIMEOUT, polling=LOOKS)
    assert program.returncode == 0


@contextmanager
def new_page(place: Path) -> Iterator[Any]:
    """A page of a new browser, with a profile of its own: one that pages of several tests shared has crashed once."""
    from playwright.sync_api import sync_playwright

    started = time.monotonic()
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(place),
            executable_path=chromium(),
            args=list(FLAGS),
            headless=True,
            timeout=1000 * TIMEOUT,
            viewport={"width": 1200, "height": 900},
        )
        page = context.pages[0] if context.pages else context.new_page()
        page.set_default_timeout(1000 * TIMEOUT)
        page.errors = []
        page.on("pageerror", lambda error: page.errors.append(f"{time.monotonic() - started:.0f} s: {error}"))
        try:
            yield page
        finally:
            with suppress(Exception):  # what the browser showed when a test failed
                page.screenshot(path=str(place.parent / "page.png"))
            context.close()


Servers = Callable[..., Jupyter]


def main() -> None:
    """The command line."""
    if sys.argv[1:] != ["install"]:
        sys.exit(__doc__)
    install()


if __name__ == "__main__":
    try:
        main()
    except (BedError, subprocess.SubprocessError) as error:
        sys.exit(f"browser: {error}")
