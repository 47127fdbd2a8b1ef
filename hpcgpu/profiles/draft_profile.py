"""Drafts a profile from the reports of the batch system. `render` is pure; `draft` queries the batch system."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import yaml

from hpcgpu.batch.queues import Accounts, Machine, Queue, Rules
from hpcgpu.batch.system_registry import System
from hpcgpu.errors import OptionError
from hpcgpu.fabric import interface_addresses

_MIB = 2**20
#: A part of a GPU, such as 1g.10gb: a node has many of them.
_MIG = re.compile(r"\d+g\.\d+gb")


def draft(system: System) -> str:
    """Query the batch system, and return the draft.

    Raises
    ------
    BatchError
        It does not answer.
    OptionError
        It cannot list its queues.
    """
    if (machine := system.machine()) is None:
        raise OptionError(
            f"profiles are for sites: {system.title} needs none, because all its jobs run on this machine"
        )
    return render(system.name, machine, time.strftime("%Y-%m-%d"), interface_addresses.addresses())


def render(system: str, machine: Machine, today: str, network: Iterable[str] = ()) -> str:
    """Return the draft: it describes the kind of node with the most GPUs; comments show what a person must decide.

    Parameters
    ----------
    system : str
    machine : Machine
    today : str
    network : iterable of str
        Interfaces of this machine.
    """
    rules = machine.queues.rules
    lines = [
        "# A profile for hpcgpu, drafted from what the batch system says. Review it, and add what the site's pages "
        "say.",
        "about: ",
        "source: ",
        f"date: {today}",
        f"system: {system}",
        *_needs(machine.accounts),
        "options:",
    ]
    usable = [queue for queue in machine.queues.gpus if not machine.why_closed(queue.name)]
    kinds = [_limited(queue, rules.get(queue.name)) for queue in usable]
    if not kinds:
        lines += [
            "  # The batch system lists no GPUs that you can use. If jobs get whole nodes with GPUs, write how many a"
        ]
        lines += ["  # node has. If no node has any, write `gpus-per-node: 0` and remove gpu-request."]
        lines += ["  gpus-per-node: 1", "  gpu-request: none"]
        return "\n".join([*lines, *_queues(machine), ""])
    best = max(kinds, key=lambda queue: (not _MIG.match(queue.gpu_type), queue.gpus))
    lines += _options(best, "  ", rules)
    lines += _network(network)
    lines += ["  # What a scheduler job requests on a shared node.", "  scheduler:"]
    lines += [f"    cores: {max(1, best.cores // max(1, best.gpus) // 4)}"]
    if small := [queue for queue in kinds if queue.gpus < best.gpus and queue.name]:
        one = min(small, key=lambda queue: queue.gpus)
        lines += [f"    # queue: {one.name}    # its nodes have fewer GPUs; a scheduler needs one"]
    lines += ["# Other nodes with GPUs:"] * (len(kinds) > 1)
    for queue in kinds:
        if queue is not best:
            lines += ["#", *(f"# {line.strip()}" for line in _options(queue, "", rules))]
    return "\n".join([*lines, *_queues(machine), ""])


def _needs(accounts: Accounts) -> list[str]:
    """Return the options that each user must give: the account too, if the batch system is known to require one."""
    account = "account" in accounts.enforced
    lines = ["# Options that each user must give.", f"needs: [{'account, ' * account}walltime]"]
    if accounts == Accounts():
        lines += ["# If jobs need an account, which the batch system does not say: needs: [account, walltime]"]
    if accounts.qos:
        lines += [f"# Your accounts: {', '.join(sorted(accounts.qos))}."]
        qos = sorted(frozenset[str]().union(*accounts.qos.values()))
        lines += [f"# Your QOS: {', '.join(qos)}. To choose one, add `qos` to the options."] * bool(qos)
    return lines


def _limited(queue: Queue, rule: Rules | None) -> Queue:
    """Return a kind of node, reduced to what the rules of its queue allow a job."""
    most = rule.most if rule else {}
    return replace(
        queue,
        gpus=int(min(queue.gpus, most.get("gpus_per_node", queue.gpus))),
        cores=int(min(queue.cores, most.get("cores", queue.cores))),
        memory=int(min(queue.memory, most.get("memory", queue.memory * _MIB) // _MIB)),
        limit=rule.limit_words if rule and rule.limit_words else queue.limit,
    )


def _options(queue: Queue, indent: str, rules: Mapping[str, Rules]) -> list[str]:
    lines = [f"queue: {_scalar(queue.name)}"]
    if not queue.name:
        default = [name for name, rule in rules.items() if rule.default]
        lines = [f"# queue:     # without one, jobs go to {default[0]}" if default else "# queue: "]
    lines += [f"gpus-per-node: {queue.gpus}"]
    first, *aliases = queue.gpu_type.strip("\"'").split(",")
    lines += [f"gpu-type: {_scalar(first)}"] * bool(first)
    lines += [f"# Other names of this type: {', '.join(aliases)}."] * bool(aliases)
    lines += [f"cores: {queue.cores}"] * bool(queue.cores)
    # A part is the system's own.
    lines += [f"memory: {int(queue.memory * 0.95)}MiB"] * (queue.memory >= 1024)
    if queue.gpus > 1 and queue.cores:
        share = f"{queue.cores // queue.gpus} cores"
        share += f" and {queue.memory // queue.gpus} MiB" * (queue.memory >= 1024)
        lines += [f"# This is a whole node. For each GPU it has {share}."]
    lines += [f"# Longest walltime: {queue.limit}"] * bool(queue.limit)
    lines += [f"# Features of the nodes: {queue.features[:500]}"] * bool(queue.features)
    return [f"{indent}{line}" for line in lines]


def _scalar(name: str) -> str:
    """Return a name as a YAML string: in quotes if YAML would read another type, such as ``off`` or ``1e3``."""
    return name if re.fullmatch(r"[\w.-]+", name) and yaml.safe_load(name) == name else json.dumps(name)


def _network(names: Iterable[str]) -> list[str]:
    """Return comments with the interfaces of this node. The compute nodes may have others."""
    if not (listed := ", ".join(sorted(set(names) - {"lo"}))):
        return []
    notes = f"  # Jobs find InfiniBand and Slingshot themselves. This node has {listed}; compute nodes may differ."
    return [notes, "  # interface: "]


def _queues(machine: Machine) -> list[str]:
    lines = ["# All queues:"] * bool(machine.queues.rules)
    for name, rule in machine.queues.rules.items():
        notes = [
            rule.limit_words,
            "the default" * rule.default,
            f"routes to {', '.join(rule.routes)}" * bool(rule.routes),
        ]
        notes += [f"not for you: {why}"] if (why := machine.why_closed(name)) else []
        lines += [f"#   {name}: {'; '.join(filter(None, notes)) or 'no walltime limit'}"]
    return lines
