"""Compares the requests of one job with the reports of this machine's batch system. Only this module judges limits.

`hpcgpu profiles check` and `hpcgpu plan` use it. All functions but `against` are pure. An option that cannot be
checked is graded "not checked", never "ok".
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcgpu.batch.queues import Accounts, Machine, Queue, Rules
from hpcgpu.display.counts_and_durations import counted, listed
from hpcgpu.options.shared_options_and_defaults import JobOptions, WorkerOptions

Grade = Literal["ok", "failure", "not checked"]
_MIB = 2**20


@dataclass(frozen=True)
class Finding:
    """An option of a profile.

    Attributes
    ----------
    option : str
    grade : {"ok", "failure", "not checked"}
    profile : str
        What the profile has.
    machine : str
        What this machine reports, or why the option was not checked.
    advice : str
        What to write; empty if there is nothing to do.
    job : str
        ``"worker job"``, ``"scheduler job"`` or ``"all jobs"``.
    """

    option: str
    grade: Grade
    profile: str
    machine: str
    advice: str = ""
    job: str = ""

    def __str__(self) -> str:
        machine = f"{self.option} {self.profile}: {self.machine}"
        return f"{machine} (write {self.advice})" if self.advice else machine


def judge_job(job: JobOptions, machine: Machine, needs: frozenset[str] = frozenset()) -> list[Finding]:
    """Compare each option of one kind of job with the machine.

    Parameters
    ----------
    job : JobOptions
    machine : Machine
    needs : frozenset of str, optional
        Options that each user still has to give.
    """
    judged = _Job(job, needs, machine)
    every = [list(judged.findings())]
    if judged.names is not None and len(judged.names) > 1:  # one of several queues must accept all options together
        every += [list(_Job(job, needs, machine, [name]).findings()) for name in judged.names]
    failures = [sum(one.grade == "failure" for one in found) for found in every]
    # the limits of all queues together, unless each queue refuses an option
    return (
        every[0]
        if len(every) == 1 or min(failures[1:]) <= failures[0]
        else every[1 + failures[1:].index(min(failures[1:]))]
    )


def refusals(job: JobOptions, machine: Machine, accounts: Callable[[], Accounts] = Accounts) -> list[Finding]:
    """Return why the batch system would refuse a job, or would never start it.

    Parameters
    ----------
    job : JobOptions
    machine : Machine
        Without accounts.
    accounts : callable, optional
        Queries which accounts and QOS the user may use. Called only if a QOS may lift a limit, because the accounting
        may be slow.
    """
    found = _failures(judge_job(job, machine))
    if any(one.option == "walltime" for one in found):
        found = _failures(judge_job(job, replace(machine, accounts=accounts())))
    return found


def _failures(findings: Iterable[Finding]) -> list[Finding]:
    return [one for one in findings if one.grade == "failure"]


#: Compares one option with the kinds of nodes, and returns the kinds that have enough.
_Step = Callable[[Sequence[Queue]], tuple[Finding, list[Queue]]]


class _Job:
    """Compares the options of one kind of job with the machine.

    Parameters
    ----------
    job : JobOptions
    needs : frozenset of str
    machine : Machine
    names : list of str, optional
        The queues in which its jobs end up. Default: all possible ones.
    """

    def __init__(
        self, job: JobOptions, needs: frozenset[str], machine: Machine, names: list[str] | None = None
    ) -> None:
        self.job, self.needs, self.machine = job, needs, machine
        self.rules, self.accounts = machine.queues.rules, machine.accounts
        #: Empty if the job names none. A batch system may have no QOS.
        self.account, self.qos = (str(getattr(job, name, None) or "") for name in ("account", "qos"))
        self.nodes = job.nodes_per_job if isinstance(job, WorkerOptions) else 1
        #: The queues to which the job is submitted, and those in which it can end up; None if they are not known.
        self.entered = self._entered()
        self.names = names or self._reached()

    def findings(self) -> Iterator[Finding]:
        yield from self._queue()
        yield from self._nodes()
        yield from self._walltime()
        yield from self._account()
        yield from self._qos()

    # The queue

    def _requested(self) -> list[str]:
        return self.job.queue.split(",") if self.job.queue else []

    def _site_may_choose(self) -> bool:
        """Return whether a site's filter may choose the queue by other options."""
        return bool(self.qos or getattr(self.job, "constraint", None))

    def _entered(self) -> list[str]:
        if (requested := self._requested()) or "queue" in self.needs or self._site_may_choose():
            return requested
        return [name for name, rule in self.rules.items() if rule.default]

    def _reached(self) -> list[str] | None:
        ends = [end for name in self.entered for end in (self.rules.get(name, Rules()).routes or [name])]
        reached = [name for name in ends if "@" not in name]
        return [name for name in reached if not self.machine.why_closed(name, routed=True)] or reached or None

    def _queue(self) -> Iterator[Finding]:
        if not self.entered:
            yield self._no_queue()
        known = {kind.name: Rules() for kind in self._all_kinds() if kind.name} | dict(self.rules)
        for name in self.entered:
            rule = known.get(name)
            wanted = name if self._requested() else f"none: the default {name}"
            others = _near(name, [one for one in self.machine.open() if one != name])
            choice = f"queue: {' or '.join(others)}" if others else ""
            if "@" in name or (rule is None and not self.rules):  # the nodes name only the queues that have them
                why = "it is a queue of another server" if "@" in name else "the batch system does not list its queues"
                yield Finding("queue", "not checked", wanted, why)
            elif rule is None:
                yield Finding("queue", "failure", wanted, "there is no such queue, or it is hidden", choice)
            elif why := self.machine.why_closed(name) or self._refused_by_all(rule.routes):
                yield Finding("queue", "failure", wanted, why, choice)
            else:
                yield Finding("queue", "ok", *self._open(name, rule))

    def _open(self, name: str, rule: Rules) -> tuple[str, str]:
        """Return the finding for a queue that accepts the job."""
        machine = f"it hands jobs on to {', '.join(rule.routes)}" if rule.routes else rule.reserved or "it is open"
        return (name, machine) if self._requested() else ("none", f"jobs go to the default queue {name}")

    def _refused_by_all(self, routes: Sequence[str]) -> str:
        """Return why all destinations of a routing queue refuse the job; empty if one accepts it."""
        whys = [self.machine.why_closed(name, routed=True) if "@" not in name else "" for name in routes]
        return f"it hands jobs on to {routes[0]}: {whys[0]}" if whys and all(whys) else ""

    def _no_queue(self) -> Finding:
        if "queue" in self.needs:
            machine = f"open to you: {listed(self.machine.open(), ', ') or 'none with GPUs'}"
            return Finding("queue", "not checked", "you choose it", machine)
        why = "the site may choose it by qos and constraint" if self._site_may_choose() else "there is no default queue"
        return Finding("queue", "not checked", "none", why)

    # The nodes

    def _all_kinds(self) -> list[Queue]:
        return [*self.machine.queues.gpus, *self.machine.queues.without]

    def _kinds(self) -> list[Queue]:
        """Return the kinds of nodes on which the job can run."""
        kinds = self._all_kinds()
        if self.names is None:
            return kinds
        return [kind for kind in kinds if kind.serves(self.names, self.rules)]

    def _nodes(self) -> Iterator[Finding]:
        """Yield a finding for each option that restricts the kinds of nodes: one kind must satisfy all options."""
        kinds, job = self._kinds(), self.job
        yield from self._nodes_per_job()
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

        if not any(map(has, kinds)):
            if self.job.gpu_request == "none":
                return Finding("gpus-per-node", "not checked", f"{wanted}, not requested", "the nodes list no GPUs"), []
            others = [name for name in self.machine.open() if any(k.name == name for k in self.machine.queues.gpus)]
            advice = f"queue: {' or '.join(others)}" if others else "gpu-request: none, if jobs get whole nodes"
            return Finding("gpus-per-node", "failure", str(wanted), "its nodes list no GPUs", advice), []
        return self._amount("gpus-per-node", wanted, kinds, has, str, str)

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
        machine = f"a node has {shown(most)}"
        if (limit := self._most(option)) is not None and (limit // self._counted < most or not most):
            most, machine = limit // self._counted, f"the queue gives at most {shown(limit)}{self._together}"
        if not most:
            return Finding(option, "not checked", shown(wanted), "the batch system does not say what a node has"), []
        if wanted > most:
            return Finding(option, "failure", shown(wanted), machine, f"{option}: {advised(most)}"), []
        if (least := self._least(option)) is not None and wanted * self._counted < least:
            machine = f"the queue takes only jobs with at least {shown(least)}{self._together}"
            advice = f"{option}: {shown(-(-least // self._counted))}, or another queue"
            return Finding(option, "failure", shown(wanted), machine, advice), []
        return Finding(option, "ok", shown(wanted), machine), [kind for kind in kinds if has(kind) >= wanted]

    def _nodes_per_job(self) -> Iterator[Finding]:
        most, least = self._most("nodes-per-job"), self._least("nodes-per-job")
        if most is not None and self.nodes > most:
            machine, advice = f"the queue gives at most {counted(most, 'node')} to a job", f"nodes-per-job: {most}"
            yield Finding("nodes-per-job", "failure", str(self.nodes), machine, advice)
        elif least is not None and self.nodes < least:
            machine = f"the queue takes only jobs with at least {counted(least, 'node')}"
            yield Finding(
                "nodes-per-job", "failure", str(self.nodes), machine, f"nodes-per-job: {least}, or another queue"
            )

    @property
    def _counted(self) -> int:
        """Return the nodes over which the limits of its queue count."""
        return self.nodes if any(self.rules.get(name, Rules()).of_job for name in self.names or ()) else 1

    @property
    def _together(self) -> str:
        return f" to {self._counted} nodes together" if self._counted > 1 else ""

    def _most(self, option: str) -> int | None:
        """Return the most that the rules of its queues allow for a node or job; None if one of them sets no limit."""
        found = self._bounds(lambda rule: rule.most.get(option.replace("-", "_")), max)
        return int(min(found)) if found else None

    def _least(self, option: str) -> int | None:
        found = self._bounds(lambda rule: rule.least.get(option.replace("-", "_")), min)
        return int(max(found)) if found else None

    def _bounds(self, of: Callable[[Rules], float | None], best: Callable[[list[float]], float]) -> list[float]:
        """Return the limits of the queues to which the job is submitted and of those in which it ends up."""
        found = []
        for names in (self.entered, self.names or []):
            limits = [of(self.rules.get(name, Rules())) for name in names]
            known = [limit for limit in limits if limit is not None]
            found += [best(known)] if known and len(known) == len(limits) else []
        return found

    def _words(self, kinds: Sequence[Queue]) -> Iterator[Finding]:
        """Yield the features or resources by which a job chooses nodes."""
        constraint, extra = getattr(self.job, "constraint", None), getattr(self.job, "select_extra", None)
        option = "constraint" if constraint else "select-extra"
        choice = bool(constraint and re.search(r"[|\[!]", constraint))
        if choice:  # the expression may name nodes on which the other options leave no choice
            kinds = self._kinds()
        of_kinds = [set(kind.features.split(",")) - {""} for kind in kinds]
        there = sorted(set().union(*of_kinds))
        # without the numbers of nodes: a100*2
        words = re.findall(r"[\w.-]+", re.sub(r"\*\d+", "", constraint)) if constraint else (extra or "").split(":")
        for word in filter(None, words):
            name, is_, _ = word.partition("=")
            named = [known for known in there if not is_ or known.startswith(f"{name}=")]
            # PBS ignores case in words; Slurm does not ignore it in features
            if word in there or (extra and word.lower() in map(str.lower, there)):
                yield Finding(option, "ok", word, "nodes have it")
            elif is_ and not named:
                yield Finding(option, "not checked", word, f"the nodes list no {name}")
            else:
                advice = f"{option}: {' or '.join(_near(word, named))}" if named else f"remove it from {option}"
                machine = f"its nodes have {listed(named, ', ') or 'no features'}"
                yield Finding(option, "failure", word, machine, advice)
        every = set(words)
        if constraint and not choice and every <= set(there):
            if not any(every <= features for features in of_kinds):
                yield Finding(option, "failure", constraint, "no node has all of them", f"fewer words in {option}")

    # What a job may request

    def _walltime(self) -> Iterator[Finding]:
        wanted, limits = self.job.walltime, self._limits()
        machine = "; ".join(limits)
        if wanted is None:
            if "walltime" in self.needs:
                yield Finding("walltime", "not checked", "you choose it", machine or self._no_limit())
        elif limits and wanted > (most := min(limits.values())):
            advice = f"walltime: '{_time(most)}' or less"
            grade: Grade = "failure"
            if not self.qos and self.accounts.beyond:
                grade = "not checked"
                machine += f"; your default QOS may allow more, as {listed(sorted(self.accounts.beyond), ', ')} does"
            elif self.accounts.silent:
                grade, machine = "not checked", f"{machine}; {self._why_unknown('QOS')}, and a QOS may allow more"
            yield Finding("walltime", grade, _time(wanted), machine, advice)
        elif (least := self._least("walltime")) is not None and wanted < least:
            machine = f"the queue takes only jobs with at least {_time(least)}"
            yield Finding(
                "walltime", "failure", _time(wanted), machine, f"walltime: '{_time(least)}', or another queue"
            )
        else:
            grade = "ok" if self._queues_known() else "not checked"
            yield Finding("walltime", grade, _time(wanted), machine or self._no_limit())

    def _queues_known(self) -> bool:
        return self.names is not None and all(name in self.rules for name in self.names)

    def _no_limit(self) -> str:
        return "the queue has no limit" if self._queues_known() else "the limit of the queue is not known"

    def _limits(self) -> dict[str, float]:
        """Return the limits of all jobs, in seconds, by their source. With several queues, the longest limit counts."""
        found: dict[str, float] = {}
        qos = self.qos.lower()
        for names in (self.entered, self.names or []) if qos not in self.accounts.beyond else ():
            rules = {name: self.rules[name] for name in names if name in self.rules}
            limits = {f"queue {name}: {rule.limit_words}": rule.limit for name, rule in rules.items() if rule.limit}
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
                machine = f"yours: {yours}" if yours else self._why_unknown("account")
                yield Finding("account", "not checked", "you choose it", machine)
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
        machine = f"{why}; yours: {listed(yours, ', ') or 'none'}"
        yield Finding("qos", "failure", wanted, machine, f"qos: {' or '.join(near)}" if near else "remove qos")

    def _refused(self, what: str, wanted: str) -> Finding | None:
        """Return the finding that no queue of the job accepts an account or a QOS; None if one does."""
        rules = [self.rules[name] for name in self.names or () if name in self.rules]
        reasons = [rule.refuses(what, frozenset({wanted.lower()})) for rule in rules]
        if not reasons or not all(reasons):
            return None
        machine = f"queue {', '.join(self.names or ())}: {reasons[0]}"
        return Finding(what, "failure", wanted, machine, f"another {what} or queue")

    def _why_unknown(self, what: str) -> str:
        if self.accounts.unknown:
            return f"the accounting does not answer: {self.accounts.unknown}"
        if self.accounts.qos is None:
            return f"the batch system does not say which {what} you may use"
        return f"the batch system does not enforce the {what}"


def _near(name: str, known: Iterable[str]) -> list[str]:
    """Return names that are similar to this one; if there are none, a few valid names."""
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
