"""ClientLink: an EngineCore's Link to one client on its node: batches come in, outputs go out.

An item of Ray's streaming generator wakes threads of both processes, on cores that a model computes on, and takes 2 ms
of CPU more than a frame.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from raylm.engine.engine_core import EngineCore
from raylm.engine.link import Link
from raylm.engine.outbox import Outbox
from raylm.errors import EngineUnavailableError, RayLMError
from raylm.messages import ClientBatch
from raylm.stages import about

MAX_OUTPUTS_IN_FLIGHT = 8
_ROOM_BYTES = 16 << 10  # in the socket, with what the kernel adds to each output; the outbox merges what has no room

logger = logging.getLogger("raylm.engine")


class ClientLink:
    """The first value from the client is its id, each further one a ClientBatch.

    The values to it are EngineCoreOutputs, and in the end the RayLMError for which there are no more. What the client
    has open ends with the Link.
    """

    def __init__(self, core: EngineCore) -> None:
        self.link = Link(self._on_value, self._on_end, room_bytes=_ROOM_BYTES)
        self._core = core
        self._client_id = ""
        self._outbox: Outbox | None = None
        self._sending: asyncio.Task[None] | None = None

    def _on_value(self, value: str | ClientBatch) -> None:
        if isinstance(value, ClientBatch):
            with suppress(EngineUnavailableError):  # the outbox ends with it
                take_batch(self._core, self._client_id, value)
            return
        try:
            self._client_id, self._outbox = value, self._core.connect(value)
        except RayLMError as error:
            self.link.send(error)
            self.link.close()
        else:
            self._sending = asyncio.create_task(self._send(self._outbox))

    async def _send(self, outbox: Outbox) -> None:
        try:
            while True:
                self.link.send(await outbox.get())
                await self.link.has_room.wait()
        except RayLMError as error:
            self.link.send(error)
            self.link.close()
            self._core.drop_client(self._client_id, outbox)

    def _on_end(self, why: str) -> None:
        # The client may only have been stopped for a while.
        self.link.send(EngineUnavailableError("The engine has disconnected this client."))
        drop_lost_client(self._core, self._client_id, self._outbox)


def take_batch(core: EngineCore, client_id: str, batch: ClientBatch) -> None:
    core.add(client_id, batch.adds, batch.sent)
    core.abort(client_id, batch.aborts)
    core.stop(client_id, batch.stops)
    if batch.watch_blocks:
        core.watch_blocks(client_id)


def drop_lost_client(core: EngineCore, client_id: str, outbox: Outbox | None) -> None:
    """A client is gone, or silent; nothing if it has another ``outbox`` by now."""
    if requests := core.scheduler.open_requests(client_id):
        logger.warning("an ingress is gone; its %d open requests end", len(requests), extra=about("ingress.lost"))
    core.drop_client(client_id, outbox)
