"""``make pictures``: /console of a busy embedded model, as PNG files below docs/pictures/."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx

from tests.chromium import Page, chromium
from tests.embedded_server import EmbeddedServer

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
MOST_BYTES = 200_000
QUESTIONS = (
    "What is a KV cache?", "What does the scheduler do?", "Why are prompts computed in chunks?", "What is an ingress?",
    "How are requests routed?", "What happens when an engine is lost?", "What is continuous batching?",
)  # fmt: skip
TEMPLATE = "Here is a long text. " * 12


async def send_request(api: httpx.AsyncClient, luck: random.Random, number: int) -> None:
    """Send a random request of the load. Some share a prefix, some have a structured output, some are long."""
    question = luck.choice(QUESTIONS)
    body = {
        "messages": [
            {"role": "system", "content": TEMPLATE * luck.randint(0, 2)}, {"role": "user", "content": question},
        ],
        "max_tokens": luck.choice((60, 120, 200, 300)), "min_tokens": 60, "stream": True, "temperature": 0.8,
    }  # fmt: skip
    await asyncio.sleep(luck.random() * 24)
    headers = {"x-request-id": f"{luck.choice(('chat', 'agent', 'batch'))}-{number:03}"}
    async with api.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def shot(page: Page, name: str) -> None:
    path = FOLDER / f"console-{name}.png"
    await page.picture(path)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size <= MOST_BYTES


async def view(page: Page, url: str, name: str, ready: str) -> None:
    await page.goto(f"{url}/console")
    await page.goto(f"{url}/console#/{name}")
    await page.until("document.querySelector('#live').textContent === 'live'")
    await page.until(ready)
    await asyncio.sleep(1)


async def main() -> None:
    # The pool is so small that some sequences are preempted.
    config = {"cache": {"num_blocks": 88}, "scheduler": {"max_num_seqs": 12}, "max_model_len": 640}
    with EmbeddedServer(**config) as url:
        async with httpx.AsyncClient(base_url=url, timeout=300) as api, chromium(1280, 860) as page:
            luck = random.Random(7)
            load = [asyncio.create_task(send_request(api, luck, number)) for number in range(70)]
            await view(page, url, "overview", "document.querySelectorAll('.chart').length > 5")
            await asyncio.sleep(16)
            await shot(page, "overview")
            await view(page, url, "memory", "!!document.querySelector('canvas.pool')")
            await shot(page, "memory")
            await view(page, url, "requests", "document.querySelectorAll('.lines .line-row').length > 8")
            await shot(page, "requests")
            await asyncio.gather(*load)
            listed = (await api.get("/v1/requests", params={"limit": 500})).json()["data"]
            worst = max(listed, key=lambda line: (line["preemptions"], line["seconds"]))
            await view(page, url, f"requests/{worst['id']}", "!!document.querySelector('#waterfall')")
            await page.size(1280, 980)
            await page.call("Runtime.evaluate", expression="document.querySelector('main').scrollTop = 0")
            await shot(page, "waterfall")
            await page.size(1280, 860)
            await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
            await view(page, url, "chat", "!!document.querySelector('#set-model option')")
            await page.type("#prompt", QUESTIONS[0])
            await page.press("Enter")
            await page.until("!!document.querySelector('.speed') && !document.querySelector('[aria-busy]')")
            await page.click("#set-logprobs")
            await page.type("#prompt", QUESTIONS[6])
            await page.press("Enter")
            await page.until("document.querySelectorAll('.token').length > 3 && !document.querySelector('[aria-busy]')")
            await shot(page, "playground")
            await page.size(390, 780, mobile=True)
            await view(page, url, f"requests/{worst['id']}", "!!document.querySelector('#waterfall')")
            await shot(page, "telephone")


if __name__ == "__main__":
    asyncio.run(main())
