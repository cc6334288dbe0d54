"""Ask for one token again and again:  KEY=… python -m tests.nodes.asking SECONDS URL…

Prints a JSON object for each answer: when it was asked for and the time that it took, in seconds, and its status.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import httpx

PERIOD_S = 0.25


async def ask(url: str, began: float) -> None:
    """Ask once, and print what came."""
    headers = {"authorization": f"Bearer {os.environ['KEY']}"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    asked, status = time.monotonic(), 0
    async with httpx.AsyncClient(timeout=200) as client:
        try:
            status = (await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)).status_code
        except httpx.TransportError as error:
            print(f"{type(error).__name__}: {error}")
    now = time.monotonic()
    print(json.dumps({"at": round(asked - began, 2), "s": round(now - asked, 2), "status": status}), flush=True)


async def main() -> None:
    seconds, *urls = sys.argv[1:]
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(float(seconds) / PERIOD_S)):
            group.create_task(ask(urls[number % len(urls)], began))
            await asyncio.sleep(PERIOD_S)


if __name__ == "__main__":
    asyncio.run(main())
