"""What the user reads while workers are waited for: the reason always stands there, and fits a terminal of 80
columns.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.exceptions import WorkerStartTimeoutError
from rich.console import Console

from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.display.progress import Progress
from hpcgpu.errors import ClusterError, SubmitLimited, SubmitRefused
from tests.conftest import told
from tests.helpers import CPU, GPU, block_queue, messages, names, waiting

Until = Callable[..., None]
LIMIT = "sbatch: error: QOSMaxSubmitJobPerUserLimit"


def test_a_limit_of_the_site_that_keeps_jobs_out_is_the_reason_and_no_failure(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise SubmitLimited(LIMIT)

    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        with monkeypatch.context() as patch:
            patch.setattr(cluster.batch, "submit", refuse)
            cluster.scale(3)
            reason = f"1 connected; the size is set to 3 jobs; 1 job exists; the site accepts no more jobs now: {LIMIT}"
            until(lambda: reason in waiting(cluster, 3), lambda: f"both submits know the limit: {waiting(cluster, 3)}")
            said = "The site accepts no more jobs of yours now"
            until(lambda: messages(cluster).count(said) >= 2, "both submits are told")
            assert len(cluster.workers) == 1
            assert "refused" not in repr(cluster) and "hpcgpu tries again" not in messages(cluster)
        [job] = cluster.workers.values()
        with told("a user or the batch system cancelled it"):
            queue.cancel([str(job.job_id)])  # one of ours ends: the site may allow another
            cluster.wait_for_workers(3)


def test_adaptive_scaling_without_work_is_the_reason(queue: LocalQueue, until: Until) -> None:
    with LocalGPUCluster(**CPU) as cluster:
        cluster.adapt(maximum=2)
        words = "0 connected; there is no work"
        until(lambda: words in waiting(cluster, 2), "the scheduler has reported its load")


def test_a_failure_before_the_next_try_is_the_reason(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.scaling.replace_failed_jobs._BACKOFF", (3600.0,) * 5)
    with LocalGPUCluster(jobs=1, **CPU) as cluster:
        cluster.wait_for_workers(1)
        with told("hpcgpu replaces it in"):
            queue.cancel([job.job_id for job in cluster.workers.values()])
        words = r"the size is set to 1 job; 0 jobs exist; next submit in .* after a failure"
        until(lambda: re.search(words, waiting(cluster, 1)), lambda: f"it tells of the next try: {waiting(cluster, 1)}")


@pytest.mark.parametrize("how", ["scale", "adapt"])
def test_another_size_is_waited_for_without_the_failures_of_the_size_before(
    queue: LocalQueue, until: Until, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise SubmitRefused("invalid partition specified: gpuu")

    with LocalGPUCluster(**CPU) as cluster:
        cluster.add_worker_group("other", gpus_per_node=0, cores=1)
        with monkeypatch.context() as patch, told("invalid partition specified: gpuu"):
            patch.setattr(cluster.batch, "submit", refuse)
            cluster.scale(1)
            until(lambda: "gpuu" in repr(cluster), "the refused job is reported")
        cluster.scale(0, worker_group="other")
        assert "gpuu" in repr(cluster), "the size of another group says nothing of it"
        cluster.scale(1) if how == "scale" else cluster.adapt(minimum=1, maximum=1)
        cluster.wait_for_workers(1)
        assert "gpuu" not in repr(cluster)


def progress_on(stream: io.StringIO, *, terminal: bool, kind: str = "xterm") -> Progress:
    progress = Progress(quiet=False)
    progress.console = Console(
        file=stream,
        width=80,
        force_terminal=terminal,
        highlight=False,
        soft_wrap=progress.console.soft_wrap,
        _environ={"TERM": kind},
    )
    return progress


def test_a_long_line_is_folded_on_a_narrow_terminal_and_whole_in_a_file() -> None:
    reason = "the site accepts no more jobs now: " + "QOSMaxSubmitJobPerUserLimit " * 4 + "end of the reason"
    terminal, file = io.StringIO(), io.StringIO()
    for stream in (terminal, file):
        with progress_on(stream, terminal=stream is terminal) as progress:
            progress.update("cluster demo: waiting for 3 workers", f"1 there; {reason}")
    assert "end of the reason" in terminal.getvalue()
    assert file.getvalue() == f"hpcgpu: cluster demo: waiting for 3 workers: 1 there; {reason}\n"


def test_a_terminal_that_cannot_move_its_cursor_shows_the_lines_too() -> None:
    stream = io.StringIO()
    with progress_on(stream, terminal=True, kind="dumb") as progress:
        progress.update("cluster demo: waiting for 3 workers", "the queue is full")
    assert stream.getvalue() == "hpcgpu: cluster demo: waiting for 3 workers: the queue is full\n"


def test_a_job_that_the_user_submitted_by_hand_is_waited_for(queue: LocalQueue, home: Path, fake_gpus: None) -> None:
    with LocalGPUCluster(name="hand", jobs=0, **GPU) as cluster:
        blocker = block_queue(queue, home)
        job = queue.submit(cluster.directory.path / "worker.sh", job_name="hand")
        with pytest.raises(WorkerStartTimeoutError):
            cluster.wait_for_workers(2, timeout=1)
        more = (
            r"will have only 2 workers in 0 jobs and in those that you submitted \(2 workers\), "
            r"but the program waits for 4: call scale\(2\)"
        )
        with pytest.raises(ClusterError, match=more):
            cluster.wait_for_workers(4)
        queue.cancel([blocker])
        cluster.wait_for_workers(2)
        assert names(cluster) == {f"hand-by-hand-{job}-0", f"hand-by-hand-{job}-1"}
        queue.cancel([job])
