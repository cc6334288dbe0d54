"""The embedded model behind HTTP in this process: the real app, front end, core and worker, without Ray."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any

from raylm.config import Config
from raylm.engine import EngineCore, LocalExecutor
from raylm.frontend import AsyncLLM, LocalEngineClient, StateClient
from raylm.ingress import Surroundings, build_asgi_app
from raylm.messages import EngineInfo
from tests.ingress.harness import served


class EmbeddedServer:
    """A context manager whose value is the URL. The server runs in a thread, so any kind of client can call it."""

    def __init__(self, **config: Any) -> None:
        fields = {"dtype": "float32", "cache": {"num_blocks": 2048}, "engine": {"executor": "local", "threads": 2}}
        self._config = Config.model_validate(fields | config)
        self._url = ""
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="embedded server", daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        return self._url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        core = EngineCore(self._config, LocalExecutor(self._config))
        llm = AsyncLLM(self._config)
        info = await core.start()
        running = asyncio.create_task(core.run())
        llm.add_engine(LocalEngineClient(core, EngineInfo("local", info.max_model_len, info)))
        state = StateClient()
        app = build_asgi_app(llm, self._config, surroundings=Surroundings(state=state))
        jobs = [asyncio.create_task(job()) for job in app.state.jobs]
        async with served(app) as self._url:
            self._ready.set()
            await self._stop.wait()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await state.close()
        await llm.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await core.shutdown()
