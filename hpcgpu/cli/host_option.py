"""``--host``: the command runs on a login node, by ssh."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.ssh.far_side import Request

if TYPE_CHECKING:
    from hpcgpu.existing_clusters.snapshot import Snapshot
    from hpcgpu.ssh.login import Login

_FLAG = "--host"


def host_option(*, exposed: bool) -> Callable[[Any], Any]:
    """Return the option ``--host``; the command gets it if it is `exposed`."""
    return click.option(
        _FLAG,
        metavar="HOST",
        expose_value=exposed,
        help="Use the clusters of this login node, by ssh: what `ssh` understands, such as login1. hpcgpu must be "
        "there.",
    )


class Forwarded(click.Command):
    """A command that runs on another host if ``--host`` is given. Its options are read there.

    Parameters
    ----------
    by_ssh : callable, optional
        What is done with the host and the arguments. Default: `forward`.
    """

    def __init__(self, *args: Any, by_ssh: Callable[[str, list[str]], object] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._by_ssh = by_ssh
        host_option(exposed=False)(self)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        host, rest = split(args)
        host = chosen_host(host, ctx)
        if host is not None and not {"--help", "-h"} & set(rest):
            ctx.meta[_FLAG] = (host, rest)
            return rest
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if (given := ctx.meta.get(_FLAG)) is None:
            return super().invoke(ctx)
        host, rest = given
        if self._by_ssh is not None:
            self._by_ssh(host, rest)
        else:
            forward(host, [str(self.name), *rest])
        return None


def chosen_host(given: str | None, ctx: click.Context) -> str | None:
    """Return the login node to use: the given one, or the configured one; None for this machine.

    On a login node that carries out a request, it is always this machine.
    """
    if given is not None or ctx.find_object(Request) is not None:
        return given or None
    from hpcgpu.configuration.login_node import configured_host

    return configured_host()


def split(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take ``--host`` out of arguments; None without it.

    Raises
    ------
    click.UsageError
        It has no value.
    """
    host, rest, left = None, list[str](), list(args)
    while left:
        word = left.pop(0)
        if word == "--":
            return host, [*rest, word, *left]
        name, equals, value = word.partition("=")
        if name != _FLAG:
            rest.append(word)
        elif equals:
            host = value
        elif left:
            host = left.pop(0)
        else:
            raise click.UsageError(f"{_FLAG} needs the name of a login node")
    return host, rest


def forward(host: str, arguments: Sequence[str]) -> None:
    """Run a command on the host, and print what it prints. Files are read and written here.

    Raises
    ------
    HostError, HpcgpuError
        ssh failed, or the command did.
    """
    from hpcgpu.cli.printing import person_waits, width
    from hpcgpu.ssh.login import Login

    words, config = without_config(arguments)
    words, page = _without_page(words)
    pieces = list[bytes]()
    show: Callable[[bytes], object] = pieces.append if page is not None else _printer()
    Login(host).call(
        words,
        config=config,
        output=show,
        columns=width(),
        interactive=person_waits(),
    )
    if page is not None:
        page.write_bytes(b"".join(pieces))
        click.echo(f"written to {page}", err=True)


def without_config(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """Take ``--config FILE`` out of arguments, and read the file: it is on this machine."""
    words, value = _without("--config", arguments)
    if value is None:
        return words, None
    from hpcgpu.cli.config_file import arguments_of

    if not Path(value).is_file():
        raise click.UsageError(f"--config: there is no file {value} on this machine")
    return words, arguments_of(Path(value), {})


def _without_page(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Take the file of ``--html FILE`` out of arguments: the page is written on this machine."""
    words, value = _without("--html", arguments)
    return ([*words, "--html", "/dev/stdout"], Path(value)) if value is not None else (words, None)


def _without(flag: str, arguments: Sequence[str]) -> tuple[list[str], str | None]:
    words, left, value = list[str](), list(arguments), None
    while left:
        name, equals, text = left[0].partition("=")
        if left[0] == "--":
            return [*words, *left], value
        if name == flag and (equals or len(left) > 1):
            value = text if equals else left[1]
            left = left[1 if equals else 2 :]
        else:
            words.append(left.pop(0))
    return words, value


def _printer() -> Callable[[bytes], object]:
    """Return a function that prints what comes piece by piece; on a terminal without control characters."""
    if not sys.stdout.isatty():
        stream = sys.stdout.buffer

        def unchanged(piece: bytes) -> None:
            stream.write(piece)
            stream.flush()

        return unchanged
    from hpcgpu.posix.printable import printable

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda piece: click.echo(printable(decoder.decode(piece), None, lines=True), nl=False)


def snapshot_by_ssh(login: Login, name: str) -> Snapshot:
    """Return the state of a cluster of another host.

    Raises
    ------
    HostError, HpcgpuError
        ssh failed, or the command did.
    """
    from hpcgpu.existing_clusters.printed_snapshot import from_printed

    answer = login.call(["status", name, "--json"], show_errors=False)
    return from_printed(answer.output, f"the answer of {login.host}")
