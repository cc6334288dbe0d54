"""A headless Chromium, driven by its DevTools protocol. It needs only the distribution's package."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--remote-debugging-port=0",
)  # fmt: skip
WAIT_S = 300


class Page:
    """One tab. ``faults`` are the errors on its console, and the scripts and styles that its policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.faults: list[str] = []
        self.asked: list[str] = []  # addresses of all requests that the page made
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._reader = asyncio.create_task(self._read())

    async def open(self, width: int, height: int) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.size(width, height)

    async def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            else:
                self._note(content["method"], content.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        async with asyncio.timeout(WAIT_S):
            answer = await self._answers[number]
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page. A promise is awaited."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true."""
        async with asyncio.timeout(WAIT_S):
            while not (value := await self._value(script)):  # noqa: ASYNC110 - the page has no event for it
                await asyncio.sleep(0.05)
        return value

    async def _value(self, script: str) -> Any:
        with suppress(AssertionError):  # the element is not there yet
            return await self.run(script)

    async def click(self, selector: str) -> None:
        await self.until(f"!!document.querySelector({json.dumps(selector)})")
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str, **more: Any) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **more)

    async def type(self, selector: str, text: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        """Write the visible page to a PNG file."""
        answer = await self.call("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@asynccontextmanager
async def chromium(width: int = 1280, height: int = 800) -> AsyncIterator[Page]:
    """A browser with one empty page. It ends with the block."""
    assert CHROMIUM is not None, "Chromium is not installed: install the distribution's package"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            address = await _address(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                await page.open(width, height)
                yield page
                await page.close()
        finally:
            process.terminate()
            await process.wait()


async def _address(file: Path) -> str:
    async with asyncio.timeout(WAIT_S):
        while not (file.exists() and file.read_text().count("\n")):  # noqa: ASYNC110, ASYNC240 - a file has no event
            await asyncio.sleep(0.05)
    port, path = file.read_text().split("\n")[:2]  # noqa: ASYNC240
    return f"ws://127.0.0.1:{port}{path}"
