"""Why ssh failed, in words: what it printed, what that means, and what to do."""

from __future__ import annotations

import re
import shlex

from hpcgpu.posix.printable import printable

_ENDED = "kex_exchange_identification|Connection closed by|Connection reset|Broken pipe|closed by remote host"
#: What ssh prints (openssh 8 to 10), what it means, and what to do.
_KNOWN = (
    (
        "Session open refused by peer",
        "it allows no further session on one connection",
        "Close other programs that use the connection, or end it: ssh -O exit {shell}",
    ),
    (
        "Could not resolve hostname",
        "the host is not known",
        "Check the name, and the aliases in ~/.ssh/config: what `ssh {shell}` understands is right here too",
    ),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "The site may have replaced the host, or somebody listens in. Ask the site. If the new key is right, remove "
        "the old one with `ssh-keygen -R`, and log in once with `ssh {shell}`",
    ),
    (
        "Host key verification failed|host key is known for",
        "its host key is not known yet",
        "Log in once with `ssh {shell}`, and compare the key with the one that the site publishes",
    ),
    (
        r"Permission denied \((?=[^)]*(keyboard-interactive|password))",
        "it asks for a password or a second factor, and nobody can answer here",
        "{log_in}",
    ),
    (
        r"Permission denied \(",
        "it refuses your key",
        "Check which key `ssh -v {shell}` offers, whether its agent runs, and whether the host has it",
    ),
    (
        "Too many authentication failures",
        "it refused several keys",
        "Name the right one in ~/.ssh/config: IdentityFile and IdentitiesOnly yes",
    ),
    (
        "Connection refused|No route to host|Network is unreachable",
        "it cannot be reached",
        "It may be down, or this machine is not in a network, or not in the VPN, that reaches it",
    ),
    (
        "timed out",
        "it does not answer",
        "It may be down, or this machine is not in a network, or not in the VPN, that reaches it",
    ),
    (
        _ENDED,
        "it ended the connection",
        "It may be restarting, or it limits logins. Try again later",
    ),
    (
        "Bad configuration option|terminating, .* bad configuration|Bad owner or permissions",
        "ssh refuses its own configuration",
        "Correct it until `ssh {shell}` logs in",
    ),
)
#: A release of hpcgpu that cannot be used by ssh reports it.
_TOO_OLD = re.compile("No such command .far-side")
#: A shell reports it when it does not find a command.
_MISSING = re.compile(r"not found|No such file|Unknown command|not recognized|No module named", re.IGNORECASE)
_SSH_FAILED, _NOT_FOUND, _NOT_EXECUTABLE = 255, 127, 126


def failure(host: str, code: int, errors: str, greeting: str, to_log_in: str = "") -> str:
    """Return why a command on a host printed nothing of ours.

    Parameters
    ----------
    host : str
        As the user typed it.
    code : int
        Exit code of ssh: 255 if ssh itself failed, else that of the remote command.
    errors : str
        What ssh and the remote command printed on stderr.
    greeting : str
        What the remote command printed on stdout.
    to_log_in : str, optional
        What a person does so that ssh asks nothing here.
    """
    words = _last_lines(errors)
    quoted = f". In its own words: {words}" if words else ""
    if code == _SSH_FAILED:
        for pattern, what, advice in _KNOWN:
            if re.search(pattern, errors):
                shell = shlex.quote(host)
                hint = advice.format(shell=shell, log_in=to_log_in or f"Log in once with `ssh {shell}`")
                return f"ssh to {host} fails: {what}{quoted}. {hint}"
        return f"ssh to {host} fails{quoted or ', without a reason'}. `ssh -v {shlex.quote(host)}` says more"
    if _TOO_OLD.search(errors):
        return (
            f"{host} has an hpcgpu that is too old to be used by ssh{quoted}. To install the version of this machine "
            f"there, run: hpcgpu install --host {shlex.quote(host)}"
        )
    if "/dev/tty" in errors:
        return (
            f"{host} does not run hpcgpu: it asks something on the terminal for each command{quoted}. Ask the site for "
            "a way to log in that asks once, such as keyboard-interactive"
        )
    if code in (_NOT_FOUND, _NOT_EXECUTABLE) or _MISSING.search(errors):
        return (
            f"hpcgpu is not found on {host}{quoted}. To install it there, run: hpcgpu install --host "
            f"{shlex.quote(host)}. If it is installed in an environment there, give the path of its Python: "
            "hpcgpu install --host ... --python PATH"
        )
    return (
        f"{host} does not run hpcgpu: the remote command ended with exit code {code}{quoted}{_printed(greeting)}. A "
        "shell that is restricted to certain commands, or a start-up file that ends the shell, can be the cause"
    )


def lost_connection(code: int, errors: str) -> bool:
    """Whether ssh had a connection, and lost it."""
    known = [pattern for pattern, *_ in _KNOWN if re.search(pattern, errors)]
    return code == _SSH_FAILED and known in ([], [_ENDED])


def endless(host: str, greeting: str) -> str:
    """Return what is reported of a host that prints without end in place of an answer."""
    return (
        f"{host} does not run hpcgpu: it prints without end{_printed(greeting)}. A start-up file of the shell there "
        "can be the cause"
    )


def late(host: str, seconds: float, errors: str, greeting: str) -> str:
    """Return what is reported of a host that does not answer in time."""
    words = _last_lines(errors)
    quoted = f". In its own words: {words}" if words else ""
    return (
        f"{host} did not answer within {seconds:g} s{quoted}{_printed(greeting)}. A start-up file of the shell there "
        "that waits for input, or a login node with too much load, can be the cause"
    )


def silent(host: str, seconds: float, command: str, errors: str) -> str:
    """Return what is reported of a command on a host from which nothing comes any more."""
    words = _last_lines(errors.rpartition("\n")[2])
    shell = shlex.quote(host)
    return (
        f"there was no sign of life from {host} for {seconds:g} s, from `hpcgpu {printable(command, 200)}`"
        f"{f', which last said: {words}' if words else ''}. Its process, the login node or a file system there may "
        f"hang, or the network is gone. Look with `ssh {shell}`. If that hangs too, `ssh -O exit {shell}` ends a "
        "connection that is dead"
    )


def _printed(greeting: str) -> str:
    printed = _last_lines(greeting)
    return f". It printed: {printed}" if printed else ""


def _last_lines(text: str) -> str:
    """Return the last lines of an output as one line that can be printed."""
    lines = [line.strip().rstrip(".") for line in text.replace("\r", "\n").splitlines() if line.strip(" @")]
    return printable("; ".join(lines[-6:]), 600).rstrip(".")
