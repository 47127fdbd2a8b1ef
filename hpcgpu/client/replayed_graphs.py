"""What a client submits again to the next scheduler: for the futures that it holds, no more than is missing there."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dask.base import collections_to_expr
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed.protocol import Serialized, deserialize, serialize, to_serialize
from distributed.protocol.serialize import ToPickle
from distributed.scheduler import _materialize_graph

from hpcgpu.display.counts_and_durations import counted

#: Annotations that name workers. Those that ran under the last scheduler have ended, and a task that prefers some of
#: them would wait for ever if it arrives before the first worker.
_ON_WORKERS = ("workers", "restrictions", "allow_other_workers", "loose_restrictions")
#: Why a task cannot run again.
NOT_KEPT = "it was not submitted in this block of `replay`, or has data of `client.scatter`"
_ENDED_WORKERS = "it may run only on workers that have ended with their scheduler (workers=...)"


@dataclass(frozen=True, eq=False)
class Call:
    """What one call of a client, `submit` or `persist` for example, has sent to the scheduler.

    Attributes
    ----------
    number : int
        Later calls have larger numbers.
    message : dict
        The message to the scheduler. It has the graph, as bytes.
    inputs : dict of hashable to Call
        Earlier calls that have submitted what this one needs, by the keys of those tasks.
    refused : str
        Why its tasks must not run again; empty if they may.
    """

    number: int
    message: Mapping[str, Any]
    inputs: Mapping[Hashable, Call] = field(default_factory=dict)
    refused: str = ""

    def read(self) -> tuple[dict[Hashable, Any], Mapping[str, Mapping[Hashable, Any]]]:
        """Return the tasks by their keys, and their annotations by kind and key, as the scheduler reads them."""
        graph = self.message["expr_ser"]
        tasks, annotations = _materialize_graph(deserialize(graph.header, graph.frames), validate=False)
        return tasks, annotations


#: A task of a call; None if its call is unknown.
_Task = tuple[Call | None, Hashable]


@dataclass
class Plan:
    """What a client sends to the next scheduler.

    Attributes
    ----------
    messages : list of dict
    used : set of hashable
        The keys of the tasks that the scheduler must have already, because they are not submitted again.
    on_scheduler : list of hashable
        The keys of the futures among them.
    again : list of hashable
        The keys of the futures whose tasks are submitted again.
    lost : dict of hashable to str
        Why each of the other futures is lost, by its key.
    released : set of hashable
        The keys that nobody needs when all is submitted: only the other tasks need them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    used: set[Hashable] = field(default_factory=set)
    on_scheduler: list[Hashable] = field(default_factory=list)
    again: list[Hashable] = field(default_factory=list)
    lost: dict[Hashable, str] = field(default_factory=dict)
    released: set[Hashable] = field(default_factory=set)

    def __str__(self) -> str:
        parts = []
        if self.again:
            parts.append(f"{counted(len(self.again), 'future')} of this program submitted again")
        if self.on_scheduler:
            parts.append(f"{counted(len(self.on_scheduler), 'future')} found on the next scheduler")
        for key, why in itertools.islice(self.lost.items(), 1):
            parts.append(f"{counted(len(self.lost), 'future')} lost: {key!r}, because {why}")
        return ", ".join(parts)


def plan(held: Mapping[Hashable, Call | None], there: Collection[Hashable]) -> Plan:
    """Return what a client sends to the next scheduler.

    Parameters
    ----------
    held : mapping of hashable to Call or None
        The call of each future that the client holds, by its key; None if it is not known.
    there : collection of hashable
        The keys of the tasks that the scheduler has: of restored datasets, and of other clients.
    """
    result, tasks = Plan(on_scheduler=[key for key in held if key in there]), _Tasks(there)
    for key, call in held.items():
        if key in there:
            continue
        if cause := tasks.why_lost((call, key)):
            result.lost[key] = cause
        else:
            result.again.append(key)
    outputs, needed = tasks.needed([(held[key], key) for key in result.again])
    for call in sorted(outputs, key=lambda call: call.number):
        result.messages.append(tasks.message(call, outputs[call], needed[call]))
    result.used = tasks.used.union(result.on_scheduler)
    result.released = result.used.union(*outputs.values()) - held.keys()
    return result


class _Tasks:
    """The tasks of calls, and what becomes of them.

    Parameters
    ----------
    there : collection of hashable
        The keys that the scheduler has.
    """

    def __init__(self, there: Collection[Hashable]) -> None:
        self._on_scheduler = frozenset(there)
        #: Those of them that `needed` has come upon.
        self.used: set[Hashable] = set()
        self._read: dict[Call, tuple[Mapping[Hashable, Any], Mapping[str, Mapping[Hashable, Any]]]] = {}
        #: Why a task is lost, and the key of the task that is to blame; None if it is not lost.
        self._lost: dict[_Task, tuple[Hashable, str] | None] = {}

    def why_lost(self, task: _Task) -> str:
        """Return why a task cannot run again; empty if it can."""
        stack, entered = [task], set()
        while stack:
            one = stack.pop()
            if one in self._lost:
                continue
            cause = self._own_cause(one)
            inputs = [] if cause else list(self._inputs(one))
            before = [other for other in inputs if other not in self._lost and other not in entered]
            if before and one not in entered:
                entered.add(one)
                stack += [one, *before]
                continue
            blamed = next(filter(None, map(self._lost.get, inputs)), None)
            self._lost[one] = (one[1], cause) if cause else blamed
        found = self._lost[task]
        if found is None:
            return ""
        return found[1] if found[0] == task[1] else f"it needs {found[0]!r}, which is lost: {found[1]}"

    def needed(self, tasks: list[_Task]) -> tuple[dict[Call, set[Hashable]], dict[Call, set[Hashable]]]:
        """Return the keys that are wanted of each call, and the keys of all its tasks that must run for them."""
        outputs, needed, stack = defaultdict[Call, set[Hashable]](set), defaultdict[Call, set[Hashable]](set), tasks[:]
        for call, key in tasks:
            assert call is not None
            outputs[call].add(key)
        while stack:
            call, key = stack.pop()
            assert call is not None  # otherwise it is lost
            if key in needed[call]:
                continue
            needed[call].add(key)
            self.used |= self._of(call)[0][key].dependencies & self._on_scheduler
            for task in self._inputs((call, key)):
                stack.append(task)
                if task[0] is not call and task[0] is not None:
                    outputs[task[0]].add(task[1])
        return outputs, needed

    def message(self, call: Call, keys: set[Hashable], needed: set[Hashable]) -> dict[str, Any]:
        """Return the message that submits these tasks of a call."""
        tasks, annotations = self._of(call)
        of_keys = {
            kind: {key: table[key] for key in needed & table.keys()}.get
            for kind, table in annotations.items()
            if kind not in _ON_WORKERS
        }
        of_all = {kind: value for kind, value in call.message["annotations"].data.items() if kind not in _ON_WORKERS}
        layer = MaterializedLayer({key: tasks[key] for key in needed}, annotations=of_keys or None)
        graph = HighLevelGraph({"replay": layer}, {"replay": set()})
        # one key makes it a collection; the message has all that are wanted
        part = collections_to_expr(Delayed(next(iter(keys)), graph, layer="replay"), optimize_graph=False)
        return {
            **call.message,
            "keys": keys,
            "annotations": ToPickle(of_all),
            "expr_ser": Serialized(*serialize(to_serialize(part), on_error="raise")),
        }

    def _of(self, call: Call) -> tuple[Mapping[Hashable, Any], Mapping[str, Mapping[Hashable, Any]]]:
        if call not in self._read:
            self._read[call] = call.read()
        return self._read[call]

    def _own_cause(self, task: _Task) -> str:
        call, key = task
        if call is None:
            return NOT_KEPT
        if call.refused:
            return call.refused
        try:
            tasks, _ = self._of(call)
        except Exception as error:  # of the user's objects
            return f"its graph cannot be read: {error!r}"
        if key not in tasks:
            return NOT_KEPT
        somewhere = self._annotation(call, key, "allow_other_workers", "loose_restrictions")
        return _ENDED_WORKERS if self._annotation(call, key, "workers", "restrictions") and not somewhere else ""

    def _annotation(self, call: Call, key: Hashable, *names: str) -> Any:
        of_all, of_tasks = call.message["annotations"].data, self._of(call)[1]
        for name in names:
            value = of_tasks.get(name, {}).get(key, of_all.get(name))
            if value := value(key) if callable(value) else value:
                return value
        return None

    def _inputs(self, task: _Task) -> Iterator[_Task]:
        """Yield the tasks that a task needs and that the scheduler does not have."""
        call, key = task
        assert call is not None
        tasks = self._of(call)[0]
        for one in tasks[key].dependencies - self._on_scheduler:
            yield (call if one in tasks else call.inputs.get(one)), one
