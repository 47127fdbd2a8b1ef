"""Published datasets are saved from time to time, and the next scheduler of the cluster publishes them again."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Future, wait

from hpcgpu import LocalGPUCluster, OptionError
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.checkpoints.versions import numbered
from tests.conftest import live, told
from tests.helpers import CPU

pytestmark = pytest.mark.shows("Results that are saved and restored")

Until = Callable[..., None]

RESTART = CPU | {"name": "demo", "jobs": 2, "on_scheduler_end": "restart"}


def end_scheduler(cluster: LocalGPUCluster, client: Client) -> None:
    """End the scheduler as its node does, and wait until another one has all workers."""
    with told("published datasets that were saved"):
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        cluster.wait_for_workers(2)


def mentioned(warned: pytest.WarningsRecorder, match: str) -> bool:
    """Whether the client has received this warning of the scheduler."""
    return any(re.search(match, str(one.message)) for one in warned)


def test_what_was_published_is_saved_and_published_again(queue: LocalQueue, tmp_path: Path, until: Until) -> None:
    saved = tmp_path / "saved"
    options = RESTART | {"checkpoint_directory": saved, "checkpoint_every": 0.5}
    with LocalGPUCluster(**options) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(2)
        numbers = client.persist(da.random.random((40, 50), chunks=(15, 20)))
        client.publish_dataset(numbers=numbers, temporary=client.submit(pow, 2, 5))
        expected = numbers.compute()
        until(lambda: numbered(saved / "numbers") and numbered(saved / "temporary"), "both are saved")
        client.unpublish_dataset("temporary")
        refused = "published dataset two/parts is not saved: .* name of a directory"
        with pytest.warns(UserWarning, match=refused) as warned:
            client.publish_dataset(**{"two/parts": client.submit(pow, 2, 7), "late": client.submit(pow, 2, 6)})
            until(lambda: numbered(saved / "late"), "a dataset that was published later is saved")
            until(lambda: mentioned(warned, refused), "the user hears of the other one")
        assert len(numbered(saved / "numbers")) == 1, "what did not change is not saved again"
        until(
            lambda: not cluster.directory.path.joinpath("dataset-temporary.json").exists(), "it is no longer published"
        )
        del numbers
        end_scheduler(cluster, client)
        assert set(client.list_datasets()) == {"numbers", "late"}
        assert client.get_dataset("late").result() == 64
        again = client.get_dataset("numbers")
        np.testing.assert_array_equal(again.compute(), expected)
        client.unpublish_dataset("late")
        until(
            lambda: not cluster.directory.path.joinpath("dataset-late.json").exists(), "the next scheduler notices it"
        )
        end_scheduler(cluster, client)
        assert client.list_datasets() == ("numbers",)
        np.testing.assert_array_equal(client.get_dataset("numbers").compute(), expected)
    assert live(queue) == []


def test_a_dataset_with_a_checkpoint_of_its_name_is_published_again(queue: LocalQueue, tmp_path: Path) -> None:
    with LocalGPUCluster(**RESTART, checkpoint_directory=tmp_path / "saved") as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(2)
        client.publish_dataset(kept=client.submit(pow, 2, 5), lost=client.submit(pow, 2, 6))
        cluster.checkpoint(client.get_dataset("kept"), name="kept")
        cluster.checkpoint(client.submit(pow, 2, 7), name="other")
        end_scheduler(cluster, client)
        assert client.list_datasets() == ("kept",) and client.get_dataset("kept").result() == 32
        assert cluster.restore("other").result() == 128
        for piece in numbered(tmp_path / "saved" / "kept")[0].iterdir():
            piece.write_bytes(b"")
        end_scheduler(cluster, client)
        assert client.list_datasets() == (), "a damaged checkpoint does not keep the scheduler from starting"
        assert "cannot publish dataset kept again" in str(cluster.get_logs(cluster=False, workers=False))


def test_uploaded_packages_are_there_again_before_the_datasets_that_need_them(
    queue: LocalQueue, tmp_path: Path
) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("class Number(int):\n    pass\n")
    with LocalGPUCluster(**RESTART, checkpoint_directory=tmp_path / "saved") as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(2)
        assert cluster.upload_package(package) == ["mine"]
        (package / "__init__.py").write_text("class Number(int):\n    version = 2\n")
        assert cluster.upload_package(package) == ["mine"]
        client.publish_dataset(kept=client.submit(lambda: __import__("mine").Number(5)))
        cluster.checkpoint(client.get_dataset("kept"), name="kept")
        end_scheduler(cluster, client)
        assert client.submit(str, client.get_dataset("kept")).result() == "5"
        assert client.submit(lambda number: type(number).__module__, client.get_dataset("kept")).result() == "mine"
        assert client.submit(lambda: __import__("mine").Number.version).result() == 2


def test_why_a_dataset_cannot_be_saved_reaches_the_user_and_it_is_saved_later(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    saved = tmp_path / "saved"
    saved.write_text("a file is here")
    options = CPU | {"jobs": 1, "checkpoint_directory": saved, "checkpoint_every": 0.2}
    with LocalGPUCluster(**options, scheduler="local") as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        future = client.submit(pow, 2, 5)
        why = f"published dataset kept is not saved: .*{saved}"
        with pytest.warns(UserWarning, match=why) as warned:
            client.publish_dataset(kept=future)
            until(lambda: mentioned(warned, why), "the user is warned")
        saved.unlink()
        until(lambda: numbered(saved / "kept"), "it is saved when that is possible")
        assert cluster.restore("kept").result() == 32
        shutil.rmtree(saved)
        until(lambda: numbered(saved / "kept"), "what somebody has removed is saved again")


def test_a_save_that_failed_is_tried_again_also_if_an_older_version_is_there(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    saved, obstacle = tmp_path / "saved", tmp_path / "obstacle"

    class Number(int):  # the workers get its code: they cannot import this file
        def __reduce__(self) -> tuple[type[int], tuple[int]]:
            if obstacle.exists():
                raise TypeError("the obstacle is here")
            return int, (int(self),)

    options = CPU | {"jobs": 1, "checkpoint_directory": saved, "checkpoint_every": 0.2}
    with LocalGPUCluster(**options, scheduler="local") as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)
        client.publish_dataset(kept=client.submit(pow, 2, 5))
        until(lambda: numbered(saved / "kept"), "the first version is saved")
        obstacle.touch()
        why = "published dataset kept is not saved: .* The last version stays"
        with pytest.warns(UserWarning, match=why) as warned:
            client.publish_dataset(kept=client.submit(lambda: Number(64)), override=True)
            until(lambda: mentioned(warned, why), "the user is warned")
        assert len(numbered(saved / "kept")) == 1
        obstacle.unlink()
        until(lambda: len(numbered(saved / "kept")) == 2, "the second version is saved when that is possible")
        assert cluster.restore("kept").result() == 64


def test_who_publishes_what_has_failed_or_was_cancelled_hears_that_it_is_not_saved(
    queue: LocalQueue, tmp_path: Path, until: Until
) -> None:
    saved = tmp_path / "saved"
    options = CPU | {"jobs": 1, "checkpoint_directory": saved, "checkpoint_every": 0.2}
    with LocalGPUCluster(**options, scheduler="local") as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(1)

        def publish(name: str, future: Future, why: str) -> None:
            why = f"published dataset {name} is not saved: its result {future.key} {why}"
            with pytest.warns(UserWarning, match=why) as warned:
                client.publish_dataset(future, name=name)
                until(lambda: mentioned(warned, why), "the user is warned")

        failed, cancelled = client.submit(os.stat, saved, key="failed"), client.submit(pow, 2, 6, key="cancelled")
        wait([failed, cancelled])
        publish("one", failed, "has failed: FileNotFoundError")
        publish("after", client.submit(str, failed), "has failed: FileNotFoundError")
        client.cancel(cancelled, force=True)
        publish("two", cancelled, "was cancelled or lost")
        client.unpublish_dataset("one")
        client.publish_dataset(other=client.submit(pow, 2, 7))
        until(lambda: numbered(saved / "other"), "a save has no dataset `one`")
        publish("one", failed, "has failed: FileNotFoundError")
        client.retry([failed])  # the directory is there now
        until(lambda: numbered(saved / "one"), "it is saved once it is computed")


def test_datasets_need_a_directory(queue: LocalQueue) -> None:
    with pytest.raises(OptionError, match="checkpoint_every needs checkpoint_directory"):
        LocalGPUCluster(**CPU, checkpoint_every="10m")
