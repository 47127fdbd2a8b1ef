"""The pieces of a checkpoint: each is a file, which is read bit by bit as it was written."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.protocol import dask_serialize

from hpcgpu.checkpoints import pieces


def arrays() -> dict[str, Any]:
    """Arrays of each kind of layout and content."""
    random = np.random.default_rng(0).random((7, 5, 3))
    nan = np.array([np.nan, -0.0, np.inf])
    nan.view(np.uint64)[0] |= 0xBEEF  # a payload
    return {
        "C": random,
        "F": np.asfortranarray(random),
        "strided": random[::2, ::-1, 1:],
        "no dimension": np.array(3, dtype=np.int8),
        "empty": np.empty((0, 4), np.float32),
        "not a number": nan,
        "fields": np.array([(1, b"x", 2.5)], dtype=[("a", ">i4"), ("b", "S3"), ("c", "f2")]),
        "times": np.array(["2026-01-01", "NaT"], dtype="datetime64[ns]"),
        "texts": np.array(["a", "ß"]),
        "masked": np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
        "broadcast": np.broadcast_to(np.arange(3), (1000, 3)),
    }


@pytest.mark.parametrize("kind", arrays())
def test_an_array_is_read_bit_by_bit_with_its_layout(tmp_path: Path, kind: str) -> None:
    value = arrays()[kind]
    piece, fresh = pieces.write(value, tmp_path)
    again = pieces.read(tmp_path, piece.digest, piece.size)
    assert fresh and type(again) is type(value)
    assert (again.dtype, again.shape, again.tobytes()) == (value.dtype, value.shape, value.tobytes())
    if kind == "F":
        assert again.flags.f_contiguous
    if kind == "masked":
        assert again.mask.tolist() == value.mask.tolist()
    if kind not in ("broadcast", "empty"):
        again[...] = again  # it can be written to, as other results


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        "text",
        b"",
        b"x" * 1_000_000,
        bytearray(b"abc"),
        {1, 2},
        np.float32(1.5),
        object,
        [np.arange(3), {"a": 1}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_read_as_it_was(tmp_path: Path, value: Any) -> None:
    piece, _ = pieces.write(value, tmp_path)
    assert piece.size == (tmp_path / piece.digest).stat().st_size
    again = pieces.read(tmp_path, piece.digest, piece.size)
    assert type(again) is type(value) and repr(again) == repr(value)


class Tensor:
    """As a tensor of PyTorch on a GPU: Dask's serializer of tensors raises an error, and pickle can do it."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers


@dask_serialize.register(Tensor)
def _fails(tensor: Tensor) -> None:
    raise TypeError("can't convert cuda:0 device type tensor to numpy.")


@pytest.mark.parametrize("value", [Tensor([1.5]), {"weights": Tensor([1.5]), "other": np.arange(3)}], ids=["one", "in"])
def test_what_only_pickle_can_do_is_pickled(tmp_path: Path, value: Any) -> None:
    piece, _ = pieces.write(value, tmp_path)
    again = pieces.read(tmp_path, piece.digest, piece.size)
    tensor = again["weights"] if isinstance(again, dict) else again
    assert type(tensor) is Tensor and tensor.numbers == [1.5]


def test_frames_of_pandas_are_read_as_they_were(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "a": [1.5, None, 3],
            "text": ["x", None, "ß"],
            "kind": pd.Categorical(["u", "v", "u"], ordered=True),
            "time": pd.date_range("2026-01-01", periods=3, tz="Europe/Berlin"),
            "maybe": pd.array([1, None, 3], dtype="Int64"),
        },
        index=pd.MultiIndex.from_tuples([(0, "a"), (0, "b"), (1, "a")], names=["n", "l"]),
    )
    for value in (frame, frame["kind"], frame.index, frame.iloc[:0]):
        piece, _ = pieces.write(value, tmp_path)
        again = pieces.read(tmp_path, piece.digest, piece.size)
        assert type(again) is type(value) and again.equals(value)
        getattr(
            pd.testing,
            f"assert_{'index' if value is frame.index else type(value).__name__.lower()}_equal".replace(
                "dataframe", "frame"
            ),
        )(again, value, check_exact=True)


def test_a_piece_is_written_once(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    piece, fresh = pieces.write(np.arange(5), there)
    assert fresh and pieces.write(np.arange(5), there, [here]) == (piece, False)
    assert pieces.write(np.arange(5), here, [tmp_path / "not there", there]) == (piece, False)
    assert (here / piece.digest).samefile(there / piece.digest)
    assert [path.name for path in here.iterdir()] == [piece.digest], "nothing else is left"


def test_a_piece_that_two_results_share_is_one_file(tmp_path: Path) -> None:
    big = np.random.default_rng(0).bytes(20_000_003)
    piece, _ = pieces.write(big, tmp_path)
    assert pieces.write(big, tmp_path) == (piece, True)
    assert [path.name for path in tmp_path.iterdir()] == [piece.digest], "nothing else is left"
    assert pieces.read(tmp_path, piece.digest, piece.size) == big


def test_a_piece_that_was_cut_is_written_anew(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    piece, _ = pieces.write(np.arange(5), there)
    os.truncate(there / piece.digest, piece.size - 1)
    assert pieces.write(np.arange(5), here, [there]) == (piece, True)
    assert pieces.read(here, piece.digest, piece.size).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["array", "frame"])
def test_a_large_value_is_not_copied_in_memory(tmp_path: Path, kind: str) -> None:
    """A worker has little more memory than its results take."""
    value: Any = np.ones((10, 1_000_000))
    if kind == "frame":
        value = pytest.importorskip("pandas").DataFrame(value.T, copy=False)
    tracemalloc.start()
    try:
        piece, _ = pieces.write(value, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 0.1 * piece.size
        again = pieces.read(tmp_path, piece.digest, piece.size)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * piece.size
    finally:
        tracemalloc.stop()
    assert again.shape == value.shape


def test_a_piece_that_cannot_be_pickled_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lock"):
        pieces.write(threading.Lock(), tmp_path)
    assert not list(tmp_path.iterdir())


def unreadable(buffer: Any) -> Any:
    view = memoryview(np.frombuffer(buffer, "u1"))
    raise ValueError(f"not readable here: {len(view)}")


class Unreadable:
    """A value that cannot be read again, with a large buffer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return unreadable, (pickle.PickleBuffer(np.arange(100)),)


def test_an_error_leaves_no_views_of_a_value_to_the_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython may crash when it collects a cycle that has such views: a full disk would end the worker."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: unraisable.append(found.exc_value))
    piece, _ = pieces.write(Unreadable(), tmp_path)
    for act in (
        lambda: pieces.write(np.arange(100), tmp_path / "missing"),
        lambda: pieces.write(np.arange(100), tmp_path / "missing", [tmp_path]),
        lambda: pieces.read(tmp_path, piece.digest, piece.size),
    ):
        with pytest.raises((OSError, ValueError)) as raised:
            act()
        cycle = [raised.value]
        cycle.append(cycle)  # type: ignore[arg-type]
        del raised, cycle
        gc.collect()
    assert unraisable == []
