"""A stream's ids tell the front end what its client already has."""

from __future__ import annotations

import pytest

from raylm.frontend import RequestHead
from raylm.ingress.http.stream_ids import OPEN, Posted, StreamIds
from raylm.params import SamplingParams


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_a_resumed_stream_does_not_count_its_prompt_again(logprobs: int | None, num_tokens: int) -> None:
    """Its client has the first event of the role, and ``num_tokens`` tokens."""
    ids, params = StreamIds(b"x" * 32), SamplingParams(max_tokens=9, logprobs=logprobs)
    stream = await ids.open(Posted(b"{}", "alice", "", reads_ids=True), 1, "fingerprint")
    head, _ = stream.nth(0, RequestHead(request_id="r"), params)
    assert head.told_before is None
    stream.reach(0, OPEN + num_tokens)
    event_id = stream.line().decode().split()[1]
    resumed = await ids.open(Posted(b"{}", "alice", event_id, reads_ids=True), 1, "fingerprint")
    head, _ = resumed.nth(0, RequestHead(request_id="r"), params)
    assert head.told_before == ((num_tokens,) if num_tokens else ())
