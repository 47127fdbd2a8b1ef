"""The variables of a call on a worker that a program holds."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.client.held_calls import ranks
from hpcgpu.client.held_set import HeldWorker, HeldWorkers
from hpcgpu.dask_worker.run_ranked import _variables, run_ranked


@pytest.mark.parametrize("earlier_ends_first", [True, False])
@pytest.mark.parametrize("own", [None, "mine"])
def test_the_last_call_has_its_variables_and_the_end_of_all_brings_back_the_workers_own(
    monkeypatch: pytest.MonkeyPatch, own: str | None, earlier_ends_first: bool
) -> None:
    monkeypatch.setenv("RANK", own or "")
    if own is None:
        monkeypatch.delenv("RANK")
    earlier, later = _variables({"RANK": "3"}), _variables({"RANK": "0"})
    earlier.__enter__()
    later.__enter__()
    assert os.environ["RANK"] == "0"
    (earlier if earlier_ends_first else later).__exit__(None, None, None)
    assert os.environ["RANK"] == ("0" if earlier_ends_first else "3")
    (later if earlier_ends_first else earlier).__exit__(None, None, None)
    assert os.environ.get("RANK") == own


def test_all_ranks_meet_at_the_first_one_also_on_other_nodes() -> None:
    def member(rank: int, node: str) -> HeldWorker:
        where = {"address": f"tls://{node}:1", "node": node, "host": f"{node}-ib0", "port": 4000 + rank}
        return HeldWorker(name=f"w{rank}", job="j", job_id="1", rank=rank, local_rank=0, world_size=2, **where)

    workers = object.__new__(HeldWorkers)
    workers._members = [member(0, "n1"), member(1, "n2")]
    found = [(one["RANK"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in workers.environments.values()]
    assert found == [("0", "n1-ib0", "4000"), ("1", "n1-ib0", "4000")]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "rank 3"), ([2, 1], "ranks 1-2"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"), (range(400), "ranks 0-399")],
)
def test_ranks_are_named_in_short(numbers: Iterable[int], words: str) -> None:
    assert ranks(numbers) == words


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_program_that_exits_ends_its_call_and_not_the_worker(asynchronous: bool) -> None:
    def main(code: object) -> None:
        sys.exit(code)  # type: ignore[arg-type]

    async def asynchronous_main(code: object) -> None:
        main(code)

    async def run(code: object) -> Any:
        worker: Any = SimpleNamespace(address="tls://a:1")
        call = run_ranked(asynchronous_main if asynchronous else main, (code,), {}, {worker.address: {}}, worker)
        return await asyncio.wait_for(call, 60)

    assert await run(0) is await run(None) is None
    for code in (1, 3, "no data"):
        with pytest.raises(RuntimeError, match=f"main ended by sys.exit.{code!r}"):
            await run(code)
