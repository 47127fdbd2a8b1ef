"""What the clients of this program hold, and how it is computed, while a block of `hpcgpu.replay` runs.

All that a client submits and releases goes through `Client._send_to_scheduler`. There the graphs are kept as the
scheduler gets them: as bytes, which nobody can change.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from distributed import Client
from distributed.client import FutureState
from distributed.protocol import Serialized

from hpcgpu.client import replayed_graphs
from hpcgpu.client.replayed_graphs import Call, Plan
from hpcgpu.display.warn import warn
from hpcgpu.posix.threads import in_thread

_REFUSED = (
    "tasks that are submitted {how} do not run again if the scheduler ends, though a block of `replay` runs: their "
    "futures, and those that need them, become an error then"
)
_FORGOTTEN = (
    "tasks that are given to fire_and_forget do not run again if the scheduler ends, though a block of `replay` runs, "
    "unless your program holds their futures then"
)
#: The client of the scheduler that wants such tasks.
_FORGETS = "fire-and-forget"
_numbers = itertools.count()
#: For each block that runs: whether a client belongs to it.
_blocks: list[Callable[[Client], bool]] = []
_by_client: weakref.WeakKeyDictionary[Client, FuturesToReplay] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Submitting(threading.local):
    """How the call that this thread makes submits its tasks, if they must not run again."""

    refused = ""


_submitting = _Submitting()


@contextmanager
def keep(belongs: Callable[[Client], bool]) -> Iterator[None]:
    """Keep the graphs of the futures that clients of this program hold, as long as this block runs.

    Parameters
    ----------
    belongs : callable
        Returns whether it keeps those of a client.
    """
    _watch_clients()
    with _lock:
        _blocks.append(belongs)
        for client, kept in _by_client.items():
            if belongs(client):
                kept.blocks.append(belongs)
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(belongs)
            for client in [one for one, kept in _by_client.items() if not (kept.in_a_block or kept.between)]:
                del _by_client[client]


def of(client: Client) -> FuturesToReplay | None:
    """Return what a client holds; None if nobody keeps that."""
    kept = _by_client.get(client)
    if kept is None and (blocks := [belongs for belongs in _blocks if belongs(client)]):
        with _lock:
            kept = _by_client.setdefault(client, FuturesToReplay(client, blocks))
    return kept


class FuturesToReplay:
    """The futures of one client.

    Parameters
    ----------
    client : distributed.Client
    blocks : list of callable
        The blocks to which it belongs. Some may have ended.
    """

    def __init__(self, client: Client, blocks: list[Callable[[Client], bool]]) -> None:
        self._client = weakref.ref(client)
        self.blocks = blocks
        self._warned: set[str] = set()
        #: The call that computes a future, by the key of the future. The state shows whether the future is a later one.
        self._calls: dict[Hashable, tuple[FutureState, Call]] = {}
        #: The keys of futures that were given to `fire_and_forget`, and that the client still holds.
        self._forgotten: set[Hashable] = set()
        #: What the client sends while it has no scheduler, or while this object submits.
        self._waiting: list[Any] | None = None
        #: The futures at the moment when the scheduler was lost.
        self._lost: dict[Hashable, FutureState] = {}

    def warn(self, text: str) -> None:
        """Warn of tasks that are not kept, once of each kind."""
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def record(self, message: dict[str, Any]) -> None:
        """Record what the client sends to its scheduler."""
        if (client := self._client()) is None:
            return
        if message["op"] == "client-releases-keys":
            for key in message["keys"]:
                if key in self._calls and client.futures.get(key) is not self._calls[key][0]:
                    del self._calls[key]
            self._forgotten -= {key for key in message["keys"] if key not in client.futures}
        elif message["op"] == "client-desires-keys" and message.get("client") == _FORGETS:
            self.warn(_FORGOTTEN)
            self._forgotten |= set(message["keys"])
        elif message["op"] == "update-graph":
            states = {key: state for key in message["keys"] if (state := client.futures.get(key)) is not None}
            new = {key: state for key, state in states.items() if self._call(key, state) is None}
            if new:
                self._note_call(message, new, alone=len(client.futures) == len(states))

    def _note_call(self, message: dict[str, Any], new: dict[Hashable, FutureState], *, alone: bool) -> None:
        """Note a call that computes futures. If they are not alone, it may need the others."""
        number, refused = next(_numbers), _submitting.refused or "as actors" * bool(message["actors"])
        call = Call(number, {}, refused=f"it was submitted {refused}")
        if not refused:
            graph = message["expr_ser"]
            frames = [bytes(frame) for frame in graph.frames]  # a later change of an array must not change them
            kept = {**message, "expr_ser": Serialized(graph.header, frames)}
            call = Call(number, kept)
            if not alone:
                try:
                    tasks, _ = call.read()
                except Exception as error:  # of the user's objects
                    call = Call(number, {}, refused=f"its graph cannot be read in this program: {error!r}")
                else:
                    needed = {one for task in tasks.values() for one in task.dependencies} - tasks.keys()
                    call = Call(number, kept, {one: found for one in needed if (found := self._find(one)) is not None})
                    new = {key: state for key, state in new.items() if key in tasks}
        self._calls.update({key: (state, call) for key, state in new.items()})

    def _call(self, key: Hashable, state: FutureState) -> Call | None:
        """Return the call that computes a future; None if it is not known."""
        noted, call = self._calls.get(key, (None, None))
        return call if noted is state else None

    def _find(self, key: Hashable) -> Call | None:
        """Return the call that computes what any client of this program holds."""
        with _lock:
            others = list(_by_client.values())
        return next((kept._calls[key][1] for kept in (self, *others) if key in kept._calls), None)

    def begin(self) -> None:
        """The client has lost its scheduler: let its futures wait for the next one."""
        client = self._client()
        assert client is not None
        self._waiting, self._lost = self._waiting or [], dict(client.futures)
        for state in self._lost.values():
            if state.status in ("finished", "lost"):
                state.reset()

    async def submit_again(self) -> Plan:
        """Submit the futures to the next scheduler, with which the client is connected.

        Raises
        ------
        OSError
            It has ended, too.
        """
        client = self._client()
        assert client is not None
        there, kept = set(await client.who_has()), dict[Hashable, Call | None]()
        for key, state in dict(client.futures).items():  # other threads submit meanwhile
            if state.status == "pending" and self._lost.get(key) is state:  # what came later waits to be sent
                kept[key] = self._call(key, state)
        released = set[Hashable]()
        while True:
            try:
                plan = await in_thread(replayed_graphs.plan, kept, there)
            except Exception as error:  # of the user's objects
                plan = Plan(lost=dict.fromkeys(kept, f"the graphs cannot be made again: {error!r}"))
            released |= plan.released
            missing = await client.scheduler.hpcgpu_keep(client=client.id, keys=list(plan.used))
            if not missing:
                break
            there -= set(missing)  # another client has released them just now, or only what needs them is there
        if forgotten := self._forgotten & {*plan.on_scheduler, *plan.again}:
            plan.messages.append({"op": "client-desires-keys", "keys": list(forgotten), "client": _FORGETS})
        if released:
            plan.messages.append({"op": "client-releases-keys", "keys": list(released), "client": client.id})
        self.end(plan.messages)
        return plan

    def cancel(self, key: Hashable, reason: str, message: str) -> None:
        """Let a future fail that was lost with the scheduler."""
        client, state = self._client(), self._lost.get(key)
        if client is not None and state is not None:
            state.cancel(reason=reason, msg=message)
            if client.futures.get(key) is state:
                del client.futures[key]

    @property
    def in_a_block(self) -> bool:
        """Whether one of its blocks runs."""
        return any(block in _blocks for block in self.blocks)

    @property
    def between(self) -> bool:
        """Whether the client has lost its scheduler, and has not submitted its futures to the next one."""
        return self._waiting is not None

    def end(self, before: list[Any] | None = None) -> None:
        """Send what the client has sent meanwhile, after these messages. Its block may have ended meanwhile, too."""
        client, waiting, self._waiting = self._client(), self._waiting, None
        if client is not None and waiting is not None:
            with suppress(OSError):  # the scheduler has ended, too
                for message in [*(before or ()), *waiting]:
                    client._send_to_scheduler_safe(message)
        if client is not None and not self.in_a_block:
            with _lock:
                _by_client.pop(client, None)

    def waits(self, message: dict[str, Any]) -> bool:
        """Return whether a message waits until the futures are submitted again."""
        if self._waiting is None:
            return False
        self._waiting.append(message)
        return True


def _watch_clients() -> None:
    """Let clients note what they submit and release."""
    if Client._send_to_scheduler.__module__ == __name__:
        return
    send, send_now = Client._send_to_scheduler, Client._send_to_scheduler_safe

    def note_and_send(self: Client, message: dict[str, Any]) -> None:
        if (kept := of(self)) is not None:
            kept.record(message)
        send(self, message)

    def send_in_order(self: Client, message: dict[str, Any]) -> None:
        if (kept := _by_client.get(self)) is None or not kept.waits(message):
            send_now(self, message)

    Client._send_to_scheduler, Client._send_to_scheduler_safe = note_and_send, send_in_order
    Client.submit, Client.map = _noting_how(Client.submit), _noting_how(Client.map)


def _noting_how(submits: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Client` that notes whether its tasks may run again."""

    @functools.wraps(submits)
    def call(self: Client, /, *arguments: Any, **options: Any) -> Any:
        own = (getattr(next(iter(arguments), None), "__module__", None) or "").startswith("hpcgpu.")  # a save goes on
        before, how = _submitting.refused, "" if options.get("pure", True) or own else "with pure=False"
        _submitting.refused = how = "as actors" if options.get("actor") or options.get("actors") else how
        if how and (kept := of(self)) is not None:
            kept.warn(_REFUSED.format(how=how))
        try:
            return submits(self, *arguments, **options)
        finally:
            _submitting.refused = before

    return call
