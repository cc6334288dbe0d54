"""The page /console in a real Chromium: a chat, a stop, a waterfall, 2,000 rows, hostile texts, a wrong key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from raylm.config import Config
from raylm.ingress import build_asgi_app
from raylm.ingress.routes import Surroundings
from tests.chromium import CHROMIUM, Page, chromium
from tests.frontend.noted import noted
from tests.ingress.console.stack import Stack
from tests.ingress.fake_llm import FakeAsyncLLM
from tests.ingress.harness import served, until
from tests.ingress.test_real_llm import PROMPT, TEXT, ids_of

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.filterwarnings("ignore"),  # warnings of aiohttp and asyncio when a browser ends
]

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
BUTTON = "[...document.querySelectorAll('.under button')].find(one => one.textContent === 'NAME').click()"
TEXTS = "[...document.querySelectorAll('.message .text')].map(one => one.textContent)"


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with chromium() as page:
        yield page


async def ask(page: Page, text: str) -> None:
    await page.until("!!document.querySelector('#prompt')")
    await page.type("#prompt", text)
    await page.press("Enter")


async def test_a_chat_is_streamed_kept_and_tried_again(page: Page) -> None:
    llm = FakeAsyncLLM(reply="Hello wörld")
    async with served(build_asgi_app(llm, Config())) as url:  # type: ignore[arg-type]
        await page.goto(f"{url}/console#/chat")
        await ask(page, "Hi there")
        await page.until(f"{TEXTS}[1] === 'Hello wörld'")
        await page.until("document.querySelector('.speed').textContent.includes('tokens')")
        assert llm.rendered[-1].messages[-1] == {"role": "user", "content": "Hi there"}
        await page.goto(f"{url}/console")
        await page.goto(f"{url}/console#/chat")
        assert await page.until(f"{TEXTS}.length === 2 && {TEXTS}") == ["Hi there", "Hello wörld"]
        calls = len(llm.calls)
        await page.run(
            "[...document.querySelectorAll('.under button')].find(one => one.textContent === 'Retry').click()"
        )
        await until(lambda: len(llm.calls) == calls + 1)
        await page.until(f"{TEXTS}.length === 2 && {TEXTS}[1] === 'Hello wörld'")
        await page.run(
            "[...document.querySelectorAll('.under button')].find(one => one.textContent === 'Edit').click()"
        )
        await page.until("document.querySelector('#prompt').value === 'Hi there'")
        assert {address.split("/console")[0].split("/v1")[0] for address in page.asked} == {url} | {
            address for address in page.asked if address.startswith("data:")
        }
    assert page.faults == []


async def test_settings_reach_the_model_and_probabilities_are_colours(page: Page) -> None:
    llm = FakeAsyncLLM(reply="Hi")
    async with served(build_asgi_app(llm, Config())) as url:  # type: ignore[arg-type]
        await page.goto(f"{url}/console#/chat")
        await page.until("!!document.querySelector('#set-model option')")
        await page.type("#set-system", "Be kind.")
        await page.type("#set-temperature", "0.5")
        await page.type("#set-seed", "7")
        await page.click("#set-logprobs")
        await ask(page, "Hi")
        await page.until("document.querySelectorAll('.token').length > 1 && !document.querySelector('[aria-busy]')")
        params = llm.calls[-1].params
        assert (params.temperature, params.seed, params.logprobs) == (0.5, 7, 3)
        assert llm.rendered[-1].messages[0] == {"role": "system", "content": "Be kind."}
    assert page.faults == []


async def test_charts_show_what_was_before_the_page_was_opened(page: Page) -> None:
    chart = "[...document.querySelectorAll('.chart')].find(one => one.querySelector('h2').textContent === 'NAME')"
    shown = {name: chart.replace("NAME", name) for name in ("Tokens/s", "Sequences", "KV cache usage")}
    async with Stack(delay_s=0.002) as stack, served(stack.app) as url, httpx.AsyncClient(timeout=300) as client:
        history = stack.app.state.desk.kept
        history.take()
        for _ in range(3):
            asked = client.post(f"{url}/v1/completions", json=TEXT | {"max_tokens": 90})
            running = asyncio.create_task(asked)
            await until(lambda: any(engine.running for engine in stack.llm.engine_stats.values()))
            history.take()
            assert (await running).status_code == 200
        await page.goto(f"{url}/console")
        await page.until(f"!!{shown['Tokens/s']}")
        most = {name: await page.run(f"{found}.querySelector('.most')?.textContent") for name, found in shown.items()}
        lines = {name: await page.run(f"{found}.querySelectorAll('polyline').length") for name, found in shown.items()}
        points = await page.run(
            f"{shown['Sequences']}.querySelector('polyline').getAttribute('points').split(' ').length"
        )
    assert most["Tokens/s"].startswith("up to ")
    assert most["Tokens/s"] != "up to 0"
    assert most["KV cache usage"] != "up to 0 %"
    assert lines == {"Tokens/s": 1, "Sequences": 2, "KV cache usage": 1}
    assert points >= 5  # four earlier samples, and the page's own
    assert page.faults == []


async def test_a_stop_ends_the_request(page: Page) -> None:
    llm = FakeAsyncLLM(gate=asyncio.Event(), open_outputs=3)
    async with served(build_asgi_app(llm, Config())) as url:  # type: ignore[arg-type]
        await page.goto(f"{url}/console#/chat")
        await ask(page, "Hi")
        await page.until(f"({TEXTS}[1] || '').startsWith('Hel')")
        assert await page.run("document.querySelector('#send').textContent") == "Stop"
        await page.click("#send")
        await page.until("document.querySelector('.speed')?.textContent.includes('stopped')")
        await until(lambda: llm.calls[-1].ended == "aborted")
    assert page.faults == []


async def test_hostile_names_and_answers_are_text(page: Page) -> None:
    llm = FakeAsyncLLM(reply=HOSTILE, model_name=HOSTILE)
    async with served(build_asgi_app(llm, Config())) as url:  # type: ignore[arg-type]
        await page.goto(f"{url}/console#/chat")
        await ask(page, HOSTILE)
        await page.until(f"({TEXTS}[1] || '') === {json.dumps(HOSTILE)}")
        await page.goto(f"{url}/console")
        await page.goto(f"{url}/console#/requests")
        await page.until(f"document.querySelector('.lines .wide')?.textContent === {json.dumps(HOSTILE)}")
        await page.run("document.querySelector('.lines .line-row').click()")
        await page.until("!!document.querySelector('#why')")
        assert await page.run("document.title") == "RayLM"
        assert await page.run("document.querySelectorAll('main img, main script').length") == 0
    assert page.faults == []


async def test_a_wrong_key_is_told_and_the_right_one_opens(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "alice: sk-alice")
    app = build_asgi_app(FakeAsyncLLM(), Config.model_validate({"ingress": {"api_keys_env": "KEYS"}}))  # type: ignore[arg-type]
    async with served(app) as url:
        await page.goto(f"{url}/console")
        await page.until("document.querySelector('#keydialog').open")
        await page.type("#keyinput", "sk-wrong")
        await page.run("document.querySelector('#keyform').requestSubmit()")
        await page.until("document.querySelector('#keyerror').textContent.includes('not valid')")
        await page.run("document.querySelector('#keyinput').value = ''")
        await page.type("#keyinput", "sk-alice")
        await page.run("document.querySelector('#keyform').requestSubmit()")
        await page.until("!document.querySelector('#keydialog').open")
        await page.until("document.querySelector('#live').textContent !== 'refused'")
        await page.until("document.querySelector('h1').textContent === 'Overview'")
    assert [fault for fault in page.faults if "401" not in fault] == []


async def test_the_waterfall_of_a_preempted_request(page: Page) -> None:
    async with Stack(delay_s=0.002) as stack, served(stack.app) as url, httpx.AsyncClient(base_url=url) as api:
        prompts = {"first": ids_of(PROMPT * 3)[:40], "second": ids_of("Blocks " * 60)[:40]}
        await asyncio.gather(*(
            api.post("/v1/completions", json=TEXT | {"prompt": ids, "max_tokens": 110}, headers={"x-request-id": name})
            for name, ids in prompts.items()
        ))  # fmt: skip
        listed = (await api.get("/v1/requests")).json()["data"]
        (victim,) = [line["id"] for line in listed if line["preemptions"]]
        await page.goto(f"{url}/console#/requests/{victim}")
        await page.until("!!document.querySelector('#waterfall')")
        phases = await page.run(
            "[...document.querySelectorAll('#waterfall > span:nth-child(3n+1)')].map(one => one.textContent)"
        )
        assert {"prefill", "decode", "preempted", "recompute"} <= {*phases}
        shown = await page.run("document.querySelector('main').textContent")
        assert "Preempted after" in shown
        assert "were computed again" in shown
    assert page.faults == []


async def test_two_thousand_rows_are_few_elements(page: Page) -> None:
    llm = FakeAsyncLLM()
    for number in range(2000):
        with noted(llm.timelines, f"request-{number:04}", "", "/v1/completions"):
            pass
    async with served(build_asgi_app(llm, Config())) as url:  # type: ignore[arg-type]
        await page.goto(f"{url}/console#/requests")
        await page.until("document.querySelector('#count').textContent === '2,000 of 2,000'")
        rows = "document.querySelectorAll('.lines .line-row').length"
        assert 5 < await page.run(rows) < 60
        await page.run("document.querySelector('.lines').scrollTop = 40 * 1000")
        await page.until("!!document.querySelector('#row-1005')")
        assert await page.run(rows) < 60
        await page.type("#search", "request-0042")
        await page.until("document.querySelector('#count').textContent === '1 of 2,000'")
        await page.run("document.querySelector('.lines').focus()")
        await page.press("Enter", code="Enter", windowsVirtualKeyCode=13)
        await page.until("location.hash === '#/requests/request-0042'")
        await page.until("!!document.querySelector('#waterfall')")  # all requests for it were answered
    assert page.faults == []


@pytest.mark.parametrize("view", ["overview", "requests", "memory", "actors", "chat"])
async def test_each_view_fits_a_telephone(page: Page, view: str) -> None:
    async with Stack() as stack, served(stack.app) as url, httpx.AsyncClient(base_url=url) as api:
        await api.post("/v1/completions", json=TEXT, headers={"x-request-id": "x" * 120})
        await page.size(390, 800, mobile=True)
        await page.goto(f"{url}/console#/{view}")
        await page.until("document.querySelector('#live').textContent === 'live'")
        await page.run("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        assert await page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.faults == []


async def test_the_actors_link_to_rays_dashboard_where_there_is_one(page: Page) -> None:
    for there in ("http://127.0.0.1:8265", None):
        app = build_asgi_app(FakeAsyncLLM(), Config(), None, Surroundings(dashboard=lambda there=there: there))  # type: ignore[misc,arg-type]
        async with served(app) as url:
            await page.goto(f"{url}/console#/actors")
            await page.until("document.querySelector('h1')?.textContent === 'Actors'")
            assert await page.run("document.querySelector('#dashboard')?.getAttribute('href') ?? null") == there
    assert page.faults == []
