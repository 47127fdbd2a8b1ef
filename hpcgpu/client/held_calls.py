"""Calls on the workers that a program holds: they end with the first failure, and that says where it was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from distributed import Client
from distributed.core import clean_exception
from distributed.protocol.pickle import dumps, loads


@dataclass(frozen=True)
class Answers:
    """What workers have answered to a call.

    Attributes
    ----------
    results : dict
        By the address of the worker.
    errors : dict
        What the function has raised, by the address of the worker; the earliest first.
    broken : dict
        The errors of the workers that the scheduler cannot reach.
    """

    results: dict[str, Any]
    errors: dict[str, BaseException]
    broken: dict[str, BaseException]

    @property
    def first(self) -> tuple[str, BaseException] | None:
        """The worker that has failed first, and its error; None if none has failed."""
        return next(iter((self.errors or self.broken).items()), None)


async def call(
    client: Client,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    workers: Collection[str],
) -> Answers:
    """Run a function on workers as `Client.run` does; return soon after the first failure, without the others' answers.

    The client has one connection for it, to the scheduler; see `hpcgpu.dask_scheduler.running_calls`.

    Parameters
    ----------
    client : distributed.Client
    function, arguments, options
    workers : collection of str
        Their addresses.
    """
    message = {"op": "run", "function": dumps(function), "args": dumps(tuple(arguments)), "kwargs": dumps(options)}
    found = await client.scheduler.broadcast(
        msg=message, workers=list(workers), on_error="return_pickle", until_failure=True
    )
    answers = Answers({}, {}, {})
    for address, answer in found.items():
        if isinstance(answer, bytes):
            answers.broken[address] = loads(answer)
        elif answer["status"] == "error":
            answers.errors[address] = _raised(answer)
        else:
            answers.results[address] = answer["result"]
    return answers


def _raised(answer: Mapping[str, Any]) -> BaseException:
    """Return what a function has raised on a worker; this program may lack the module of its class, or a GPU."""
    try:
        loads(answer["exception"])
    except Exception as error:
        found = RuntimeError(answer["exception_text"])
        found.add_note(f"this program cannot rebuild the exception of the worker: {type(error).__name__}: {error}")
        found.add_note(f"Traceback of the worker:\n{answer['traceback_text'].rstrip()}")
        return found
    raised: BaseException
    _, raised, traceback = clean_exception(**answer)
    return raised.with_traceback(traceback)


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks in words: ``rank 3`` or ``ranks 0-5, 7``."""
    order = sorted(numbers)
    starts = [one for before, one in pairwise([-2, *order]) if one != before + 1]
    ends = [one for one, after in pairwise([*order, order[-1] + 2]) if after != one + 1]
    parts = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"rank{'s' * (len(order) > 1)} {', '.join(parts)}"
