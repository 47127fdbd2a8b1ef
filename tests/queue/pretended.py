"""What the batch systems that pretend share: commands beside a locked state file, and faults that a test sets.

A command notes how it was called, takes its next fault if there is one, and otherwise answers as the real one does. A
fault is a dict: `before`, `stdout` (instead of the answer), `after`, `stderr`, `rc`; `cut` (characters of the answer
that arrive); `lost` (the command has no effect); `late` (it has its effect only when the next command of that name is
called); `hang`; `gate` (a file that it waits for); `always` (for each call from now on).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Of the commands. Their interpreter runs no `site`, which takes as long as all else that they import.
PATH = [str(HERE), str(HERE.parents[1]), sysconfig.get_path("platlib")]

State = dict[str, Any]
#: What a command prints on stdout and stderr, and its exit code.
Answer = tuple[str, str, int]


@contextmanager
def opened(folder: Path) -> Iterator[State]:
    """Hold the state of a site. A command that is killed while it writes leaves the state as it was."""
    place, draft = folder / "state.json", folder / "state.json.new"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(place.read_text())
        yield state
        draft.write_text(json.dumps(state))
        draft.replace(place)


def answer(name: str, folder: Path, arguments: list[str], act: Callable[[State, str, list[str]], Answer]) -> int:
    """Run one command; `act` does what the real one would."""
    with opened(folder) as state:
        state["calls"].append([name, arguments])
        if "environments" in state:
            state["environments"].append(dict(os.environ))
        if earlier := state["late"].pop(name, None):
            act(state, name, earlier)
        faults = state["faults"].get(name, [])
        fault = {} if not faults else faults[0] if faults[0].get("always") else faults.pop(0)
        if fault.get("late"):
            state["late"][name] = arguments
        out, err, code = ("", "", 0) if fault.get("lost") or fault.get("late") else act(state, name, arguments)
    if fault.get("hang"):
        signal.pause()
    if gate := fault.get("gate"):
        while not os.path.exists(gate):
            time.sleep(0.01)
    sys.stderr.write(fault.get("stderr", err))
    text = fault.get("stdout", out).replace("{answer}", out.strip())
    sys.stdout.write(fault.get("before", "") + text[: fault.get("cut")] + fault.get("after", ""))
    return int(fault.get("rc", code))


class Pretended:
    """A batch system that pretends, as seen by a test.

    Parameters
    ----------
    folder : Path
        For its state and its commands.
    module : str
        Has a function `main` that is each of the commands.
    commands : tuple of str
    options : str
        Of the interpreter that runs them.
    **state
        What it has at first.
    """

    def __init__(self, folder: Path, module: str, commands: tuple[str, ...], options: str, **state: Any) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        nothing: State = {"jobs": {}, "faults": {}, "late": {}, "calls": []}
        (folder / "state.json").write_text(json.dumps(nothing | state))
        for name in commands:
            self.replace(
                name,
                f"#!{sys.executable} {options}\nimport sys\nfrom pathlib import Path\n"
                f"sys.path[:0] = {PATH}\nimport {module}\n"
                f"sys.exit({module}.main({name!r}, Path({str(folder)!r}), sys.argv[1:]))\n",
            )

    def replace(self, name: str, text: str) -> Path:
        """Put a program of the test's own in the place of a command."""
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def change(self, act: Callable[[State], Any]) -> Any:
        """Read the state, or change it, between two commands."""
        with opened(self.folder) as state:
            return act(state)

    def fault(self, command: str, **fault: Any) -> None:
        """Let the next call of a command that has no fault yet go wrong."""
        self.change(lambda state: state["faults"].setdefault(command, []).append(fault))

    def calls(self, command: str) -> list[list[str]]:
        """Arguments of each call of a command."""
        return self.change(lambda state: [arguments for name, arguments in state["calls"] if name == command])
