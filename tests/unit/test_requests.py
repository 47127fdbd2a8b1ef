"""Requests of other programs to the manager, as the scheduler passes them on."""

from __future__ import annotations

import asyncio
import time

import pytest

from hpcgpu.runtime import requests
from hpcgpu.runtime.requests import Requests


async def test_a_request_is_answered_by_the_manager_that_takes_it() -> None:
    passed = Requests()
    answer = asyncio.ensure_future(passed.request({"command": "scale"}))
    taken = await passed.next_request(1)
    assert taken is not None and taken["command"] == {"command": "scale"}
    assert passed.taken_by(1, now=time.monotonic()) and not passed.taken_by(2, now=time.monotonic())
    await passed.answer_request(taken["number"], "no")
    assert await answer == "no"


async def test_an_earlier_manager_that_is_gone_takes_no_request() -> None:
    passed = Requests()
    gone = asyncio.ensure_future(passed.next_request(1))  # its program was killed: nobody reads what it gets
    await asyncio.sleep(0)
    lives = asyncio.ensure_future(passed.next_request(2))
    await asyncio.sleep(0)
    answer = asyncio.ensure_future(passed.request({"command": "scale"}))
    assert await gone is None
    taken = await lives
    assert taken is not None
    await passed.answer_request(taken["number"], "")
    assert await answer == ""


async def test_a_request_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_ANSWER", 0.05)
    passed = Requests()
    with pytest.raises(TimeoutError):
        await passed.request({"command": "scale"})
    monkeypatch.setattr(requests, "REQUEST_WAIT", 0.05)
    assert await passed.next_request(1) is None, "its program does not wait any more"
