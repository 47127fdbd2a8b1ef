"""`hpcgpu profiles check`: compares a profile with what the batch system of this machine says.

All functions but `check_profile` are pure. An option that cannot be checked is graded "not checked", never "ok".
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, cast

from hpcgpu.batch import registry
from hpcgpu.batch.queues import Machine, Queue, Rules
from hpcgpu.configuration.resolve import of_profile
from hpcgpu.display.words import listed
from hpcgpu.errors import BatchError, OptionError
from hpcgpu.options.common import JobOptions, Options
from hpcgpu.options.profiles import Profile

__all__ = ["Finding", "FindingJSON", "check_profile", "judge"]

Grade = Literal["ok", "failure", "not checked"]
_MIB = 2**20
#: Options that are compared with what the batch system says.
_CHECKED = {
    *("queue", "gpus_per_node", "gpu_type", "gpu_request", "cores", "memory", "constraint", "select_extra"),
    *("walltime", "account", "qos", "scheduler"),
}


class FindingJSON(TypedDict):
    """An option of a profile."""

    #: ``worker job``, ``scheduler job`` or ``all jobs``.
    job: str
    option: str
    #: ``ok``, ``failure`` or ``not checked``.
    grade: Grade
    #: What the profile says.
    profile: str
    #: What this machine says, or why the option was not checked.
    machine: str
    #: What to write; empty if there is nothing to do.
    advice: str


@dataclass(frozen=True)
class Finding:
    """One option of a profile; see `FindingJSON`."""

    option: str
    grade: Grade
    profile: str
    machine: str
    advice: str = ""
    job: str = ""

    def as_json(self) -> FindingJSON:
        """Return what ``--json`` prints."""
        return cast(FindingJSON, asdict(self))


def check_profile(profile: Profile) -> list[Finding]:
    """Query the batch system, and compare the profile with what it says.

    Raises
    ------
    BatchError
        It does not answer.
    OptionError
        It cannot list its queues, or the profile has an option that is unknown or not allowed.
    """
    system = registry.system(profile.system)
    options = of_profile(profile)
    try:
        machine = system.machine()
    except BatchError as error:
        raise BatchError(f"profile {profile.name!r} is for {system.title}, which does not answer: {error}") from error
    if machine is None:
        raise OptionError(f"profile {profile.name!r} is for {system.title}, which does not list its queues")
    return judge(profile, options, machine)


def judge(profile: Profile, options: Options, machine: Machine) -> list[Finding]:
    """Compare each option with the machine.

    Parameters
    ----------
    profile : Profile
    options : Options
        From `of_profile`.
    machine : Machine
    """
    jobs: dict[str, JobOptions] = {"worker job": options.worker}
    if options.scheduler is not None:
        jobs["scheduler job"] = options.scheduler
    found: dict[Finding, str] = {}
    for what, job in jobs.items():
        for finding in _Job(job, frozenset(profile.needs), machine).findings():
            found[finding] = "all jobs" if finding in found else what
    rest = sorted({name.replace("_", "-") for name in _names(profile.options)})
    if rest:
        advice = f"`hpcgpu check --in-job --profile {profile.name}` tries the options in jobs"
        found[Finding(", ".join(rest), "not checked", "", "the batch system does not say", advice)] = "all jobs"
    return [replace(finding, job=what) for finding, what in found.items()]


def _names(options: Any) -> Iterator[str]:
    """Yield the names of the options that no batch system can check."""
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name not in _CHECKED:
            yield name
        elif name == "scheduler" and isinstance(value, dict):
            yield from _names(value)


#: Compares one option with the kinds of nodes, and returns those that have enough.
_Step = Callable[[Sequence[Queue]], tuple[Finding, list[Queue]]]


class _Job:
    """Compares the options of one kind of job with the machine."""

    def __init__(self, job: JobOptions, needs: frozenset[str], machine: Machine) -> None:
        self.job, self.needs, self.machine = job, needs, machine
        self.rules, self.accounts = machine.queues.rules, machine.accounts
        #: Empty if it names none. A batch system may have no QOS.
        self.account, self.qos = (str(getattr(job, name, None) or "") for name in ("account", "qos"))
        #: The queues in which its jobs can end up; None if that is not known.
        self.names = self._reached()

    def findings(self) -> Iterator[Finding]:
        yield from self._queue()
        yield from self._nodes()
        yield from self._walltime()
        yield from self._account()
        yield from self._qos()

    # The queue

    def _asked(self) -> list[str]:
        return self.job.queue.split(",") if self.job.queue else []

    def _site_may_choose(self) -> bool:
        """Return whether a site's filter may choose the queue by other options."""
        return bool(self.qos or getattr(self.job, "constraint", None))

    def _reached(self) -> list[str] | None:
        names = self._asked()
        if not names and "queue" not in self.needs and not self._site_may_choose():
            names = [name for name, rule in self.rules.items() if rule.default]
        reached = [end for name in names for end in (self.rules.get(name, Rules()).routes or [name])]
        return [name for name in reached if "@" not in name] or None

    def _queue(self) -> Iterator[Finding]:
        if not self._asked():
            yield self._no_queue()
        known = {kind.name: Rules() for kind in self._all_kinds() if kind.name} | dict(self.rules)
        for name in self._asked():
            rule = known.get(name)
            others = _near(name, [one for one in self.machine.open() if one != name])
            choice = f"queue: {' or '.join(others)}" if others else ""
            if not known or "@" in name:
                why = "it is a queue of another server" if "@" in name else "the batch system does not list its queues"
                yield Finding("queue", "not checked", name, why)
            elif rule is None:
                yield Finding("queue", "failure", name, "there is no such queue, or it is hidden", choice)
            elif why := self.machine.shut(name):
                yield Finding("queue", "failure", name, why, choice)
            else:
                where = f"it hands jobs on to {', '.join(rule.routes)}" if rule.routes else "it is open"
                yield Finding("queue", "ok", name, where)

    def _no_queue(self) -> Finding:
        if "queue" in self.needs:
            said = f"open to you: {listed(self.machine.open(), ', ') or 'none with GPUs'}"
            return Finding("queue", "not checked", "you choose it", said)
        if self.names:
            return Finding("queue", "ok", "none", f"jobs go to the default queue {', '.join(self.names)}")
        why = "the site may choose it by qos and constraint" if self._site_may_choose() else "there is no default queue"
        return Finding("queue", "not checked", "none", why)

    # The nodes

    def _all_kinds(self) -> list[Queue]:
        return [*self.machine.queues.gpus, *self.machine.queues.without]

    def _kinds(self) -> list[Queue]:
        """Return the kinds of nodes on which it can run."""
        kinds = self._all_kinds()
        if self.names is None:
            return kinds
        return [kind for kind in kinds if kind.serves(self.names, self.rules)]

    def _nodes(self) -> Iterator[Finding]:
        """Yield what each option leaves of the kinds of nodes: one kind must have all."""
        kinds, job = self._kinds(), self.job
        if not kinds:
            yield Finding("nodes", "not checked", "", "the batch system lists no nodes of the queue")
            return
        steps: list[_Step] = []
        if job.gpus_per_node and job.gpu_type:
            steps.append(functools.partial(self._gpu_type, job.gpu_type))
        if job.gpus_per_node:
            steps.append(functools.partial(self._gpus_per_node, job.gpus_per_node))
        if job.cores is not None:
            steps.append(functools.partial(self._cores, job.cores))
        if job.memory is not None:
            steps.append(functools.partial(self._memory, job.memory))
        for step in steps:
            finding, fitting = step(kinds)
            yield finding
            kinds = fitting or kinds
        yield from self._words(kinds)

    def _gpu_type(self, wanted: str, kinds: Sequence[Queue]) -> tuple[Finding, list[Queue]]:
        with_gpus = [kind for kind in kinds if kind.gpus]
        fitting = [kind for kind in with_gpus if kind.has(wanted)]
        types = sorted({name for kind in with_gpus for name in kind.gpu_type.split(",") if name})
        if not with_gpus:
            return Finding("gpu-type", "not checked", wanted, "the nodes list no GPUs"), []
        if not fitting and not types:
            return Finding("gpu-type", "failure", wanted, "its GPUs have no type", "remove gpu-type"), []
        if not fitting:
            near = _near(wanted, types)
            return Finding(
                "gpu-type", "failure", wanted, f"its nodes have {', '.join(types)}", f"gpu-type: {' or '.join(near)}"
            ), []
        if all(not kind.gpu_type for kind in fitting):
            return Finding("gpu-type", "not checked", wanted, "the nodes list GPUs without a type"), fitting
        return Finding("gpu-type", "ok", wanted, f"its nodes have {', '.join(types)}"), fitting

    def _gpus_per_node(self, wanted: int, kinds: Sequence[Queue]) -> tuple[Finding, list[Queue]]:
        def has(kind: Queue) -> int:
            return kind.gpus if self.job.gpu_type else kind.gpus + kind.others

        most, fitting = max(map(has, kinds)), [kind for kind in kinds if has(kind) >= wanted]
        if (limit := self._most("gpus_per_node")) is not None:
            most = min(most, limit)
        if most == 0:
            if self.job.gpu_request == "none":
                return Finding("gpus-per-node", "not checked", f"{wanted}, not requested", "the nodes list no GPUs"), []
            others = [name for name in self.machine.open() if any(k.name == name for k in self.machine.queues.gpus)]
            advice = f"queue: {' or '.join(others)}" if others else "gpu-request: none, if jobs get whole nodes"
            return Finding("gpus-per-node", "failure", str(wanted), "its nodes list no GPUs", advice), []
        if most < wanted:
            return Finding("gpus-per-node", "failure", str(wanted), f"a node has {most}", f"gpus-per-node: {most}"), []
        return Finding("gpus-per-node", "ok", str(wanted), f"a node has {most}"), fitting

    def _cores(self, wanted: int, kinds: Sequence[Queue]) -> tuple[Finding, list[Queue]]:
        return self._amount("cores", wanted, kinds, lambda kind: kind.cores, str, str)

    def _memory(self, wanted: int, kinds: Sequence[Queue]) -> tuple[Finding, list[Queue]]:
        def has(kind: Queue) -> int:
            return (kind.largest or kind.memory) * _MIB

        return self._amount("memory", wanted, kinds, has, _size, lambda most: f"{most // _MIB * 95 // 100}MiB")

    def _amount(
        self,
        option: str,
        wanted: int,
        kinds: Sequence[Queue],
        has: Callable[[Queue], int],
        shown: Callable[[int], str],
        advised: Callable[[int], str],
    ) -> tuple[Finding, list[Queue]]:
        most = max(map(has, kinds))
        said = f"a node has {shown(most)}"
        if (limit := self._most(option)) is not None and (limit < most or not most):
            most, said = limit, f"the queue gives at most {shown(limit)}"
        if not most:
            return Finding(option, "not checked", shown(wanted), "the batch system does not say what a node has"), []
        if wanted > most:
            return Finding(option, "failure", shown(wanted), said, f"{option}: {advised(most)}"), []
        return Finding(option, "ok", shown(wanted), said), [kind for kind in kinds if has(kind) >= wanted]

    def _most(self, option: str) -> int | None:
        """Return the most that the rules of its queues let a node have; None if one of them says nothing."""
        limits = [self.rules.get(name, Rules()).most.get(option) for name in self.names or ()]
        known = [int(limit) for limit in limits if limit is not None]
        return max(known) if known and len(known) == len(limits) else None

    def _words(self, kinds: Sequence[Queue]) -> Iterator[Finding]:
        """Yield the features or resources by which a job chooses nodes."""
        constraint, extra = getattr(self.job, "constraint", None), getattr(self.job, "select_extra", None)
        option = "constraint" if constraint else "select-extra"
        choice = bool(constraint and re.search(r"[|\[!]", constraint))
        if choice:  # it may name nodes on which the other options leave no choice
            kinds = self._kinds()
        of_kinds = [set(kind.features.split(",")) - {""} for kind in kinds]
        there = sorted(set().union(*of_kinds))
        # without the numbers of nodes: a100*2
        words = re.findall(r"[\w.-]+", re.sub(r"\*\d+", "", constraint)) if constraint else (extra or "").split(":")
        for word in filter(None, words):
            name, is_, _ = word.partition("=")
            named = [known for known in there if not is_ or known.startswith(f"{name}=")]
            # PBS compares words in any case, Slurm features as they are
            if word in there or (extra and word.lower() in map(str.lower, there)):
                yield Finding(option, "ok", word, "nodes have it")
            elif is_ and not named:
                yield Finding(option, "not checked", word, f"the nodes list no {name}")
            else:
                advice = f"{option}: {' or '.join(_near(word, named))}" if named else f"remove it from {option}"
                said = f"its nodes have {listed(named, ', ') or 'no features'}"
                yield Finding(option, "failure", word, said, advice)
        every = set(words)
        if constraint and not choice and every <= set(there):
            if not any(every <= features for features in of_kinds):
                yield Finding(option, "failure", constraint, "no node has all of them", f"fewer words in {option}")

    # What a job may ask for

    def _walltime(self) -> Iterator[Finding]:
        wanted, limits = self.job.walltime, self._limits()
        said = "; ".join(limits)
        if wanted is None:
            if "walltime" in self.needs:
                yield Finding("walltime", "not checked", "you choose it", said or self._no_limit())
            return
        if limits and wanted > (most := min(limits.values())):
            advice = f"walltime: '{_time(most)}' or less"
            if not self.qos and self.accounts.beyond:
                said += f"; your default QOS may allow more, as {listed(sorted(self.accounts.beyond), ', ')} does"
                yield Finding("walltime", "not checked", _time(wanted), said, advice)
            else:
                yield Finding("walltime", "failure", _time(wanted), said, advice)
        else:
            grade: Grade = "ok" if self._queues_known() else "not checked"
            yield Finding("walltime", grade, _time(wanted), said or self._no_limit())

    def _queues_known(self) -> bool:
        return self.names is not None and all(name in self.rules for name in self.names)

    def _no_limit(self) -> str:
        return "the queue has no limit" if self._queues_known() else "the limit of the queue is not known"

    def _limits(self) -> dict[str, float]:
        """Return the limits that all jobs have, in seconds, by what says so. Of several queues the longest counts."""
        found: dict[str, float] = {}
        qos = self.qos.lower()
        for names in (self._asked(), self.names or []) if qos not in self.accounts.beyond else ():
            rules = {name: self.rules[name] for name in names if name in self.rules}
            limits = {f"queue {name}: {rule.said}": rule.limit for name, rule in rules.items() if rule.limit}
            if limits and len(limits) == len(names):
                longest = max(limits, key=lambda text: limits[text])
                found[longest] = limits[longest]
        if of_qos := self.accounts.limits.get(qos):
            found[f"QOS {qos}: {_time(of_qos)}"] = of_qos
        return found

    def _account(self) -> Iterator[Finding]:
        wanted, known = self.account, self.accounts.qos
        yours = listed(sorted(known or ()), ", ")
        if not wanted:
            if "account" in self.needs:
                said = f"yours: {yours}" if yours else self._why_unknown("account")
                yield Finding("account", "not checked", "you choose it", said)
            return
        if refused := self._refused("account", wanted):
            yield refused
        elif known is None or "account" not in self.accounts.enforced:
            yield Finding("account", "not checked", wanted, self._why_unknown("account"))
        elif wanted.lower() not in known:
            near = _near(wanted, sorted(known))
            advice = f"account: {' or '.join(near)}" if near else "ask the site's support for an account"
            yield Finding("account", "failure", wanted, f"yours: {yours or 'none'}", advice)
        else:
            yield Finding("account", "ok", wanted, "it is yours")

    def _qos(self) -> Iterator[Finding]:
        wanted, known = self.qos, self.accounts.qos
        if not wanted:
            return
        if refused := self._refused("qos", wanted):
            yield refused
            return
        if known is None or "qos" not in self.accounts.enforced:
            yield Finding("qos", "not checked", wanted, self._why_unknown("QOS"))
            return
        yours = sorted(known.get(self.account.lower(), frozenset[str]().union(*known.values())))
        if wanted.lower() in yours:
            yield Finding("qos", "ok", wanted, "you may use it")
            return
        why = "you may not use it" if wanted.lower() in self.accounts.limits else "there is no such QOS"
        near = _near(wanted, yours)
        said = f"{why}; yours: {listed(yours, ', ') or 'none'}"
        yield Finding("qos", "failure", wanted, said, f"qos: {' or '.join(near)}" if near else "remove qos")

    def _refused(self, what: str, wanted: str) -> Finding | None:
        """Return that no queue of the job takes an account or a QOS; None if one does."""
        rules = [self.rules[name] for name in self.names or () if name in self.rules]
        reasons = [rule.refuses(what, frozenset({wanted.lower()})) for rule in rules]
        if not reasons or not all(reasons):
            return None
        said = f"queue {', '.join(self.names or ())}: {reasons[0]}"
        return Finding(what, "failure", wanted, said, f"another {what} or queue")

    def _why_unknown(self, what: str) -> str:
        if self.accounts.unknown:
            return f"the accounting does not answer: {self.accounts.unknown}"
        if self.accounts.qos is None:
            return f"the batch system does not say which {what} you may use"
        return f"the batch system does not enforce the {what}"


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return names that are like this one; if none is, a few that can be chosen."""
    names = list(dict.fromkeys(known))
    lower = {one.lower(): one for one in names}
    if name.lower() in lower:
        return [lower[name.lower()]]
    return [lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.75)] or names[:5]


def _size(amount: int) -> str:
    return f"{amount / 2**30:.4g} GiB"


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}"
