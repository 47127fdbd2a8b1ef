"""What a user of a Slurm may name in a job: the accounts and the QOS, from slurmdbd."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcgpu.batch.queues import Accounts, answer
from hpcgpu.batch.slurm.estimate import seconds
from hpcgpu.errors import BatchError
from hpcgpu.posix.printable import printable
from hpcgpu.posix.user import user_name

_SHOW = ["sacctmgr", "--noheader", "--parsable2", "show"]
#: What `AccountingStorageEnforce` names, and what it includes (slurm.conf(5)).
_ENFORCED = {"account": {"associations", "limits", "qos", "safe", "wckeys", "all"}, "qos": {"qos", "safe", "all"}}


def accounts() -> Accounts:
    """Query scontrol and sacctmgr; what they do not report is not known."""
    try:
        config = parse_config(answer(["scontrol", "show", "config"]))
        enforced = frozenset(
            what
            for what, words in _ENFORCED.items()
            if words & set(config.get("AccountingStorageEnforce", "").lower().split(","))
        )
        storage = config.get("AccountingStorageType", "")
        if storage in ("accounting_storage/none", "(null)"):  # the second is how Slurm 26.05 writes it
            return Accounts(unknown=f"AccountingStorageType = {storage}")
        rows = answer([*_SHOW, "associations", f"user={user_name()}", "format=Cluster,Account,QOS"])
        qos = answer([*_SHOW, "qos", "format=Name,MaxWall,Flags"])
    except BatchError as error:
        return Accounts(unknown=str(error), silent=True)
    limits, beyond = parse_qos(qos)
    yours = parse_associations(rows, config.get("ClusterName", ""))
    return Accounts(qos=yours, limits=limits, beyond=beyond, enforced=enforced)


def parse_config(stdout: str) -> dict[str, str]:
    """Return the settings that ``scontrol show config`` prints; pure."""
    lines = printable(stdout, None, lines=True).split("\n")
    return {match[1]: match[2].strip() for line in lines if (match := re.fullmatch(r"(\w+)\s+= (.*)", line))}


def parse_associations(stdout: str, cluster: str) -> dict[str, frozenset[str]]:
    """Return the QOS of each account of a user in one cluster; pure. slurmdbd may serve several clusters.

    Slurm compares accounts and QOS in any case (assoc_mgr.c).
    """
    found: dict[str, frozenset[str]] = {}
    for cells in _rows(stdout, 3):
        if cells[0] == cluster:
            account, qos = cells[1].lower(), cells[2].lower()
            found[account] = found.get(account, frozenset()) | (frozenset(qos.split(",")) - {""})
    return found


def parse_qos(stdout: str) -> tuple[Mapping[str, float | None], frozenset[str]]:
    """Return the longest walltime of each QOS, and those whose jobs may exceed the limit of their partition; pure."""
    rows = _rows(stdout, 3)
    beyond = frozenset(name.lower() for name, _, flags in rows if "PartitionTimeLimit" in flags.split(","))
    return {name.lower(): seconds(limit) for name, limit, _ in rows}, beyond


def _rows(stdout: str, columns: int) -> list[list[str]]:
    rows = [line.strip().split("|") for line in printable(stdout, None, lines=True).split("\n")]
    return [row for row in rows if len(row) == columns and row[0]]
