"""Read streams through several proxies, and resume cut streams:  python -m tests.nodes.streams COUNT TOKENS URL…

Prints one JSON object per stream: its text, the longest time without an event in seconds, and when that began.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import httpx

HEADERS = {"content-type": "application/json", "x-raylm-resumable": "true"}


async def read(number: int, tokens: int, urls: list[str]) -> dict[str, Any]:
    """Read one stream, greedy or sampled, to its end."""
    question = f"Tell me story number {number} about caches."
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": tokens}
    body |= {"ignore_eos": True, "seed": number, "temperature": 0.9 if number % 4 else 0.0}
    headers = HEADERS | ({"authorization": f"Bearer {os.environ['KEY']}"} if "KEY" in os.environ else {})
    content, text, tries = json.dumps(body).encode(), "", 0
    last, gaps = time.monotonic(), [(0.0, 0.0)]
    began, cuts = last, []
    while True:
        url = f"{urls[(number + tries) % len(urls)]}/v1/chat/completions"
        tries += 1
        try:
            timeout = httpx.Timeout(200, connect=3)
            async with (
                httpx.AsyncClient(timeout=timeout) as client,
                client.stream("POST", url, content=content, headers=headers) as answer,
            ):
                event_id = ""
                async for line in answer.aiter_lines():  # an error answer has no data lines
                    name, _, value = line.partition(": ")
                    if name == "id":
                        event_id = value
                    elif name == "data" and "error" not in (event := {} if value == "[DONE]" else json.loads(value)):
                        now = time.monotonic()
                        gaps.append((now - last, last - began))
                        last = now
                        if value == "[DONE]":
                            return {"text": text, "gap": max(gaps), "cuts": cuts, "s": now - began}
                        for choice in event["choices"]:
                            text += choice["delta"].get("content") or ""
                        if event_id:
                            headers["last-event-id"] = event_id
                cuts.append([round(time.monotonic() - began, 2), url, answer.status_code])
        except httpx.TransportError as error:
            cuts.append([round(time.monotonic() - began, 2), url, type(error).__name__])
        await asyncio.sleep(0.3)


async def main() -> None:
    """Read all streams at once."""
    count, tokens, *urls = sys.argv[1:]
    async with asyncio.timeout(400):
        for found in await asyncio.gather(*(read(number, int(tokens), urls) for number in range(int(count)))):
            print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
