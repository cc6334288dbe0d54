"""Send short requests at a steady rate, without waiting for answers:  python -m tests.nodes.asks SECONDS RATE URL

The environment variable KEY has the API key. Prints one JSON object per request: the start in seconds since the epoch,
the seconds of its answer, and the status, or 0 without an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import httpx

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


async def ask(url: str) -> dict[str, Any]:
    """Send one request on a new connection."""
    began, start, status = time.time(), time.monotonic(), 0
    headers = {"authorization": f"Bearer {os.environ['KEY']}"}
    try:
        async with httpx.AsyncClient(timeout=httpx.Timeout(100, connect=3)) as client:
            status = (await client.post(f"{url}/v1/chat/completions", json=BODY, headers=headers)).status_code
    except httpx.TransportError:
        pass
    return {"at": began, "s": time.monotonic() - start, "status": status}


async def main() -> None:
    """Send requests for SECONDS, and wait for the last answers."""
    seconds, rate, url = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    async with asyncio.TaskGroup() as group:
        asked = []
        for _ in range(int(seconds * rate)):
            asked.append(group.create_task(ask(url)))
            await asyncio.sleep(1 / rate)
    for one in asked:
        print(json.dumps(one.result()))


if __name__ == "__main__":
    asyncio.run(main())
