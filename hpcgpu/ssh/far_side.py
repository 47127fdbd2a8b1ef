"""What goes over ssh: a fixed command line, a request on its input, and a line before its output.

No value of a user is ever part of the remote command line, so no remote shell reads one, and none is in a list of
processes. The shell of the account may be any (sh, csh, fish); it may print a greeting before our output.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

from hpcgpu import __version__
from hpcgpu.posix import json_records

#: Where `hpcgpu install` leaves a link to the interpreter that has hpcgpu. The link is read, not run: Python does
#: not find the packages of a virtual environment if it is run by a link from elsewhere.
PYTHON_LINK = "${XDG_DATA_HOME:-$HOME/.local/share}/hpcgpu/python"
#: The remote command line. The first line of its input is the path of an interpreter, or empty; the next line is the
#: request. If the batch system's commands or hpcgpu are not on the PATH, it searches again in a login shell: some sites
#: have them only there. No agent or display of the near side reaches hpcgpu and its jobs, also if the user's own
#: connection forwards it. It has no quotes but the outer ones, no line breaks and no exclamation marks, so sh, csh and
#: fish read it alike.
COMMAND = (
    "sh -c 'unset SSH_AUTH_SOCK DISPLAY; IFS= read -r python; "
    f'link="{PYTHON_LINK}"; '
    'if [ -n "$python" ]; then set -- "$python" -P -m hpcgpu; '
    'elif [ -x "$link" ]; then set -- "$(readlink "$link")" -P -m hpcgpu; else set -- hpcgpu; fi; '
    'if command -v "$1" > /dev/null && { command -v sbatch || command -v qsub; } > /dev/null; '
    'then exec "$@" far-side; fi; '
    'if command -v bash > /dev/null; then exec bash -lc "exec \\"\\$0\\" \\"\\$@\\" far-side" "$@"; fi; '
    'exec "$@" far-side\''
)
_BEGIN = b"\x1ehpcgpu far side "
#: Begins the line on stderr that has the error of the command.
ERROR = b"\x1ehpcgpu error "
#: Ends what is on stderr each few seconds: the command lives, also if it waits for hours.
ALIVE = b"\x1ehpcgpu alive\n"
SIGN_OF_LIFE = 5.0
#: On the input of the far side: Ctrl-C was pressed here.
INTERRUPT = b"interrupt\n"
#: Most bytes that an account may print before our output.
_GREETING = 1 << 20
_PIECE = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the far side is to do.

    Attributes
    ----------
    nonce : str
        Comes back in the line before the output.
    arguments : list of str
        Of the command ``hpcgpu``.
    config : dict or None
        Options of a cluster, in place of a file for ``--config``.
    software : dict or None
        The software of the near side, which must work with that of the far side.
    columns : int
        Width of the terminal on the near side; 0 without one.
    interactive : bool
        Whether a person waits for the answer.
    raw : bool
        Whether the rest of the input belongs to the command.
    """

    nonce: str
    arguments: list[str]
    config: dict[str, Any] | None = None
    software: dict[str, str] | None = None
    columns: int = 0
    interactive: bool = False
    raw: bool = False

    def config_text(self) -> str:
        """Return the options as the text of a file for ``--config``; JSON is YAML."""
        return json.dumps(self.config)

    def encoded(self, python: str = "") -> bytes:
        """Return the input of the remote command."""
        return f"{python}\n{json.dumps(asdict(self))}\n".encode()


@dataclass(frozen=True, kw_only=True)
class FarSide:
    """Who answers.

    Attributes
    ----------
    nonce : str
        That of the request.
    version : str
        Of hpcgpu.
    node : str
        The real name of the host: an alias or a round-robin name may lead to several.
    """

    nonce: str
    version: str
    node: str


def decode(line: bytes) -> Request:
    """Read a request.

    Raises
    ------
    ValueError
        It is none.
    """
    return json_records.parse(line, Request, "the request")


def first_line(nonce: str) -> bytes:
    """Return the line that the far side prints before its output."""
    own = FarSide(nonce=nonce, version=__version__, node=socket.gethostname())
    return _BEGIN + json.dumps(asdict(own)).encode() + b"\n"


def error_line(nonce: str, kind: str, text: str) -> bytes:
    """Return the line on stderr that has the error of the command: the name of its class, and its text."""
    return ERROR + json.dumps({"nonce": nonce, "kind": kind, "text": text}).encode() + b"\n"


class PrintsWithoutEnd(Exception):
    """There is too much before our output."""


class Beginning:
    """Finds the beginning of our output in what the remote command prints.

    Parameters
    ----------
    nonce : str
        Of the request. A greeting that imitates the line does not have it.
    """

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._read = b""
        #: Who answers, once it is known.
        self.far_side: FarSide | None = None

    @property
    def greeting(self) -> str:
        """What was printed in place of our output."""
        return self._read.decode(errors="replace")

    def feed(self, piece: bytes) -> bytes:
        """Add what was read; return what belongs to our output.

        Raises
        ------
        PrintsWithoutEnd
        """
        if self.far_side is not None:
            return piece
        self._read += piece
        start = 0
        while (start := self._read.find(_BEGIN, start)) >= 0:
            end = self._read.find(b"\n", start)
            if end < 0:
                return b""
            line, start = self._read[start + len(_BEGIN) : end], end
            try:
                found = json_records.parse(line, FarSide, "the first line")
            except ValueError:
                continue
            if found.nonce == self._nonce:
                rest, self._read = self._read[end + 1 :], b""
                self.far_side = found
                return rest
        if len(self._read) > _GREETING:
            self._read = self._read[-_PIECE:]
            raise PrintsWithoutEnd
        return b""
