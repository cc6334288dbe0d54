"""Hundreds of bad inputs to a running server: each is refused with its field's name. Good requests are not affected."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from tests.ingress.bad_inputs import ENDPOINTS, RAW, BadInput, bad_inputs
from tests.ingress.harness import client_of, served
from tests.ingress.refused import INSIDES, JSON, junk
from tests.ingress.test_real_llm import running_stack

LIMIT_S = 300
GOOD = {"model": "embedded", "prompt": [300, 301, 302], "max_tokens": 8, "seed": 3, "logprobs": 2}


@pytest.fixture
async def api() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a whole server in this process, without a model."""
    async with running_stack() as stack, served(stack.app) as url, httpx.AsyncClient(base_url=url) as client:
        client.timeout = httpx.Timeout(LIMIT_S)
        yield client


async def good_answer(client: httpx.AsyncClient) -> Any:
    answer = await client.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200
    return answer.json()["choices"]


def check_refusal(answer: httpx.Response, params: tuple[str, ...], asked: str) -> None:
    """Check for a 4xx in the envelope of the path, which names the field and contains no internals."""
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert answer.status_code != 422
    body = answer.json()
    error = body["error"]
    if answer.request.url.path.startswith("/v1/messages"):
        assert set(body) == {"type", "error"} or set(body) == {"type", "error", "request_id"}
        named = error["message"]
    else:
        assert set(body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        named = error["param"] or ""
    assert len(error["message"]) < 700
    assert not [inside for inside in INSIDES if inside in error["message"] and inside not in asked]
    if answer.request.url.path.startswith("/v1/messages"):
        found = [param for param in params if re.search(rf"(^|[^\w]){re.escape(param)}", named)]
    else:
        found = [param for param in params if named == param or named.startswith((f"{param}.", f"{param}["))]
    assert found or not params, f"{params} not named: {answer.text[:300]}"


async def refuse(client: httpx.AsyncClient, bad: BadInput) -> str | None:
    """The error in a refusal, or None."""
    answer = await client.post(bad.path, json=bad.body)
    try:
        check_refusal(answer, bad.params, str(bad.body))
    except (AssertionError, ValueError, KeyError) as error:
        changed = {key: value for key, value in bad.body.items() if ENDPOINTS[bad.path].good.get(key) != value}
        return f"{bad.path} {str(changed)[:120]}: {str(error)[:300]}"
    return None


async def test_every_bad_input_is_refused_by_name_and_good_ones_do_not_notice(api: httpx.AsyncClient) -> None:
    before, complaints, table = await good_answer(api), [], list(bad_inputs())
    for number, bad in enumerate(table, 1):
        if complaint := await refuse(api, bad):
            complaints.append(complaint)
        if number % 25 == 0:
            assert await good_answer(api) == before, f"another answer after {bad.path} {str(bad.body)[:200]}"
    assert not complaints, f"{len(complaints)} of {len(table)}:\n" + "\n".join(complaints)
    assert len({(bad.path, str(bad.body)) for bad in table}) >= 400
    assert await good_answer(api) == before


@pytest.mark.parametrize("path", list(ENDPOINTS))
async def test_what_is_no_json_object_is_refused(api: httpx.AsyncClient, path: str) -> None:
    for content in RAW:
        check_refusal(await api.post(path, content=content, headers=JSON), (), "")
    check_refusal(await api.post(path, content=b"{}", headers={"content-type": "text/plain"}), (), "")
    await good_answer(api)


@pytest.mark.parametrize(("path", "endpoint"), ENDPOINTS.items())
def test_the_table_holds_every_field(path: str, endpoint: Any) -> None:
    assert set(endpoint.fields) == set(endpoint.body.model_fields)


async def test_the_table_holds_every_endpoint(api: httpx.AsyncClient) -> None:
    listed = (await api.get("/")).json()["endpoints"]
    posted = {line.removeprefix("POST ") for line in listed if line.startswith("POST ") and "{" not in line}
    assert posted <= {*ENDPOINTS, "/v1/score", "/v1/rerank", "/v2/rerank"}


@pytest.mark.parametrize("path", list(ENDPOINTS))
@given(data=st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
async def test_no_body_breaks_an_endpoint(app: Starlette, path: str, data: st.DataObject) -> None:
    endpoint = ENDPOINTS[path]
    drawn = data.draw(st.dictionaries(st.sampled_from(sorted(endpoint.fields)), junk, min_size=1, max_size=3))
    body = endpoint.good | {"model": "org/fake-model"} | drawn
    async with client_of(app) as client:
        answer = await client.post(path, json=body)
    if answer.status_code != 200:
        check_refusal(answer, (), str(body))
