"""The fuzzer's findings again: each attack gets a right answer, and the server continues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.hostile.conftest import Beside
from tests.hostile.fuzz import found_before, judge, send
from tests.serving import Server

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


async def test_what_was_found_is_mended(server: Server, beside: Beside[Any]) -> None:
    attacks = list(found_before())
    if not attacks:
        pytest.skip("found.jsonl, which fuzz.py writes, has no finding")
    for attack in attacks:
        judge(attack, await beside(asyncio.to_thread(send, server.port, attack)))
