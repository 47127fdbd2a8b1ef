"""A client without a GPU gets results that live in GPU memory as host copies, or a sentence; it never loses its
connection.

The GPU libraries pretend: their objects live in host memory, claim to be on a device, and refuse to be pickled as
device memory does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed import Client

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.batch.local.queue import LocalQueue
from hpcgpu.store import certificates_and_keys
from tests.helpers import CPU, GPU, travels

_PRETENDED = {
    "cupy": """
import numpy
__version__ = "13.0"
class ndarray:
    def __init__(self, values): self.values = numpy.asarray(values)
    __cuda_array_interface__ = property(lambda self: {"data": (0, False)})
    def get(self): return self.values
    def __reduce__(self): raise TypeError("device memory cannot be pickled")
    def sum(self): return ndarray(self.values.sum())
""",
    "cudf": """
import pandas
class DataFrame:
    def __init__(self, columns): self.columns = columns
    def to_pandas(self): return pandas.DataFrame(self.columns)
    def __reduce__(self): raise TypeError("device memory cannot be pickled")
""",
    "torch": """
class Tensor:
    __cuda_array_interface__ = property(lambda self: {"data": (0, False)})
    def __reduce__(self): raise TypeError("device memory cannot be pickled")
""",
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where tasks find the GPU libraries; this process does not, and dask-cuda, which wants the real ones, does not
    either.
    """
    path = tmp_path_factory.mktemp("libraries")
    for name, text in _PRETENDED.items():
        (path / f"{name}.py").write_text(text)
    return str(path)


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def cluster(
    request: pytest.FixtureRequest, shared_queue: LocalQueue, libraries: str, fake_gpus: None
) -> Iterator[LocalGPUCluster]:
    """A cluster that tests share."""
    asked = GPU | {"protocol": request.param, "env": {"PRETENDED": libraries}, "name": "results"}
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
        asked["scheduler"] = {"gpus_per_node": 1}
    with LocalGPUCluster(**asked, jobs=1) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


@travels
def array() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import cupy

    return cupy.ndarray([1, 2, 3])


@travels
def frame() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import cudf

    return cudf.DataFrame({"a": [1, 2]})


@travels
def nested() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import cupy

    return {"arrays": [cupy.ndarray([1]), (cupy.ndarray([2]), "text")], "number": 3}


@travels
def held() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import fractions
    import types

    import cudf
    import cupy

    return types.SimpleNamespace(
        array=cupy.ndarray([4]), deep=[{"frame": cudf.DataFrame({"b": [5]})}], plain=fractions.Fraction(1, 3)
    )


@travels
def tensor() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import torch

    return torch.Tensor()


@travels
def held_tensor() -> Any:
    sys.path.insert(0, os.environ["PRETENDED"])
    import types

    import torch

    return types.SimpleNamespace(tensor=torch.Tensor())


def test_results_arrive_as_host_copies(cluster: LocalGPUCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        result = client.submit(array).result(timeout=250)
        assert type(result) is np.ndarray and result.tolist() == [1, 2, 3]
        assert client.submit(frame).result(timeout=250).equals(pd.DataFrame({"a": [1, 2]}))
        result = client.submit(nested).result(timeout=250)
        assert result["number"] == 3 and result["arrays"][1][1] == "text"
        assert [type(result["arrays"][0]), type(result["arrays"][1][0])] == [np.ndarray, np.ndarray]
        result = client.submit(held).result(timeout=250)
        assert type(result.array) is np.ndarray and result.array.tolist() == [4] and str(result.plain) == "1/3"
        assert result.deep[0]["frame"].equals(pd.DataFrame({"b": [5]})), "wherever an object holds it"
        assert [value.tolist() for value in client.run(array).values()] == [[1, 2, 3], [1, 2, 3]]
        assert client.gather([client.submit(array, pure=False), client.submit(int, 7)])[1] == 7


def test_what_cannot_be_copied_is_reported_and_the_connection_lives(cluster: LocalGPUCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        with pytest.raises(
            TypeError, match=r"a result is a torch.Tensor in GPU memory.* Return a host copy from the task"
        ):
            client.submit(tensor).result(timeout=250)
        with pytest.raises(TypeError, match=r"a result is a torch.Tensor in GPU memory"):
            client.submit(held_tensor).result(timeout=250)
        assert client.submit(sum, [1, 2]).result(timeout=250) == 3 and client.status == "running"


def test_every_kind_of_client_gets_them(cluster: LocalGPUCluster, libraries: str) -> None:
    with cluster.get_client() as client:
        assert type(client.submit(array).result(timeout=250)) is np.ndarray
    with hpcgpu.connect("results", quiet=True) as client:
        assert type(client.submit(array).result(timeout=250)) is np.ndarray
    # A client without hpcgpu
    code = (
        "from distributed import Client\n\ndef array():\n    import os, sys; sys.path.insert(0, "
        "os.environ['PRETENDED'])\n    import cupy\n    return cupy.ndarray([1, 2, 3])\n"
    )
    code += (
        "client = "
        f"Client({cluster.scheduler_address!r})\nprint(type(client.submit(array).result(timeout=250)).__module__)\nclient.close()\n"
    )
    bare = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | certificates_and_keys.environment(cluster.directory)
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=250)
    assert done.stdout == "numpy\n", done.stderr


def test_nannies_answer_too(cluster: LocalGPUCluster) -> None:
    with Client(cluster, set_as_default=False) as client:
        assert list(client.run(travels(lambda: 7), nanny=True).values()) == [7, 7]


def test_a_client_with_a_gpu_gets_what_it_can_rebuild(
    cluster: LocalGPUCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcgpu.fabric.security._holds_gpu_objects", lambda: True)
    with Client(cluster, set_as_default=False) as client:
        with pytest.raises(
            TypeError, match="Could not serialize object of type ndarray"
        ):  # Dask's part for CuPy needs the real one
            client.submit(array).result(timeout=250)
        assert client.submit(sum, [1, 2]).result(timeout=250) == 3, "its connection carries no device memory, and lives"


def test_a_client_that_chooses_its_serializers_gets_what_it_asks_for(queue: LocalQueue, libraries: str) -> None:
    with LocalGPUCluster(**CPU, jobs=1, env={"PRETENDED": libraries}) as cluster:
        cluster.wait_for_workers(1)
        chosen = {"serializers": ["pickle", "error"], "deserializers": ["pickle", "error"]}
        with (
            Client(cluster, set_as_default=False, **chosen) as client,
            pytest.raises(TypeError, match="Could not serialize object of type ndarray"),
        ):
            client.submit(array).result(timeout=250)


def test_a_graph_with_gpu_objects_is_explained_where_the_scheduler_cannot_rebuild_them(
    queue: LocalQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text("class ndarray:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import cupy

    with LocalGPUCluster(**CPU, jobs=1) as cluster, Client(cluster, set_as_default=False) as client:
        with pytest.raises(
            RuntimeError,
            match=r"the graph holds GPU objects \(cupy\), which the scheduler could not rebuild: .*No module",
        ) as caught:
            client.submit(type, cupy.ndarray()).result(timeout=250)
        assert "Start it with a GPU (scheduler={'gpus_per_node': 1})" in str(caught.value)
        assert client.submit(sum, [1, 2]).result(timeout=250) == 3
    monkeypatch.delitem(sys.modules, "cupy")
