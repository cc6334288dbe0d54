"""All replicas answer a question to one of them, and those that do not answer are named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raylm.frontend import Filter, Requests
from raylm.ingress.console import peers as module
from raylm.ingress.console.cluster import runs
from raylm.ingress.console.peers import Desk, ServePeers
from tests.frontend.noted import noted
from tests.ingress.fake_llm import FakeAsyncLLM

ALL = Filter(owner=None)


def desk(name: str) -> Desk:
    llm = FakeAsyncLLM()
    llm.timelines.ingress = name
    with noted(llm.timelines, f"of-{name}", "", "/"):
        pass
    return Desk(llm, Requests(8, llm.timelines))  # type: ignore[arg-type]


class Handle:
    """A deployment's handle whose replicas are ``desks``. With ``hang`` no replica answers."""

    def __init__(self, *desks: Desk) -> None:
        self.desks: list[Desk | Exception] = list(desks)
        self.hang = False

    def broadcast(self, name: str, method: str, *args: Any) -> Handle:
        assert name == "desk"
        self._ask: Callable[[Desk], object] = lambda one: one.ask(method, *args)
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if self.hang:
            await asyncio.Event().wait()
        return [self._ask(one) if isinstance(one, Desk) else one for one in self.desks]


async def test_all_replicas_answer_and_this_one_once() -> None:
    here, there = desk("a"), desk("b")
    answers = await ServePeers(here, Handle(here, there)).ask("listed", ALL)  # type: ignore[arg-type]
    assert [len(one) for one in answers.found] == [1, 1]
    assert answers.missing == []


async def test_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    here, handle = desk("a"), Handle(desk("b"), desk("c"))
    peers = ServePeers(here, handle)  # type: ignore[arg-type]
    handle.hang = True
    answers = await peers.ask("listed", ALL)
    assert (len(answers.found), answers.missing) == (1, ["another ingress replica"])
    handle.hang = False
    assert (await peers.ask("listed", ALL)).missing == []
    handle.desks[1] = RuntimeError("gone")
    answers = await peers.ask("listed", ALL)
    assert (len(answers.found), answers.missing) == (2, ["c"])
    handle.hang = True
    assert (await peers.ask("listed", ALL)).missing == ["b", "c"]


async def test_a_request_of_the_replica_that_is_asked_to_end_it_counts_as_ended() -> None:
    """The deployment's handle also asks this replica, after the request has ended."""
    here, there = desk("a"), desk("b")
    with noted(here._llm.timelines, "mine", "", "/") as record:
        assert record is not None

        def cancel(_: Exception) -> None:
            record.cancel = None

        record.cancel = cancel
        answers = await ServePeers(here, Handle(here, there)).ask("end", "mine", None)  # type: ignore[arg-type]
    assert sorted(answers.found) == [False, True]


async def test_what_one_replica_holds_another_finds_and_ends() -> None:
    here, there = desk("a"), desk("b")
    peers = ServePeers(here, Handle(here, there))  # type: ignore[arg-type]
    found = [answer for answer in (await peers.ask("find", "of-b", None)).found if answer]
    assert len(found) == 1
    assert not any((await peers.ask("end", "of-b", None)).found)


def test_runs_of_blocks() -> None:
    assert runs([3, 4, 5, 9, 8, 1]) == [[3, 3], [9, 1], [8, 1], [1, 1]]
    assert runs([]) == []
    assert runs([7]) == [[7, 1]]
