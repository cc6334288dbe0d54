"""Read a streamed chat to its end, whatever is cut on the way:   python examples/resuming_client.py [URL [QUESTION]]"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

GIVE_UP_S = 120  # without an event
# What ends a stream, or refuses it, and is over when a server takes the place of another one.
PASSING = {"engine_died", "engine_unavailable", "shutting_down", "overloaded"}


def read_events(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(id, data) of each whole event; comments, and what the end of the connection has cut, are left out."""
    event_id, data = "", ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not line and data:
            yield event_id, data
            data = ""


def resumed(client: httpx.Client, url: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[str]:
    """The data of each event of a stream; after a cut the same bytes are sent again with the id of the last event."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-raylm-resumable": "true", **headers}
    last_event = time.monotonic()
    while True:
        try:
            with client.stream("POST", url, content=content, headers=headers) as answer:
                if answer.status_code not in (429, 502, 503, 504):
                    answer.raise_for_status()
                    for event_id, data in read_events(answer.iter_lines()):
                        if json_error(data) in PASSING:
                            break
                        if event_id:
                            headers["last-event-id"] = event_id
                        last_event = time.monotonic()
                        yield data
                        if data == "[DONE]":
                            return
        except httpx.TransportError:
            pass
        if time.monotonic() - last_event > GIVE_UP_S:
            raise TimeoutError("the server has not come back")
        time.sleep(0.2)


def json_error(data: str) -> str | None:
    """The code of an error event, None for any other."""
    error = {} if data == "[DONE]" else json.loads(data).get("error") or {}
    return error.get("code")


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    question = sys.argv[2] if len(sys.argv) > 2 else "What is a KV cache?"
    body = {"messages": [{"role": "user", "content": question}], "stream": True}
    with httpx.Client(timeout=60) as client:
        for data in resumed(client, f"{url}/v1/chat/completions", body, {}):
            for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
                print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
