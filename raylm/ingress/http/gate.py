"""Gate: all that stands between the socket and the engines' queue in one replica, as one object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive

from raylm.config import IngressConfig
from raylm.frontend import Admission, ApiKey, Lifecycle, Place, StateClient, Throttle
from raylm.ingress.http.body import BodyReader, check_head


class Gate:
    """A request meets in turn: the pace of the event loop, the replica's places, its key's limits, the bounds of
    bodies, and, with its body, the queue, whose policy shares it by keys. Its Place gives back what it got.
    """

    def __init__(self, config: IngressConfig, state: StateClient) -> None:
        self.lifecycle = Lifecycle(config.max_ongoing_requests)
        self.state = state
        self._max_body_bytes = int(config.max_body_mib * 2**20)
        self._throttle = Throttle()
        self._bodies = BodyReader(self._max_body_bytes, config.max_ongoing_requests, config.body_timeout_s)

    @asynccontextmanager
    async def admit(self, headers: Headers, key: ApiKey | None, queue: Admission) -> AsyncIterator[Place]:
        """Hold a request until the end of the block, or refuse it by what its head says."""
        await self._throttle.enter()
        place = Place(queue, key, self.state)
        with self.lifecycle.admit(place.ongoing) as ongoing:
            place.check(check_head(headers, self._max_body_bytes))
            try:
                with ongoing:
                    await place.claim()
                yield place
            finally:
                place.leave()

    async def receive(self, place: Place, receive: Receive) -> bytes:
        """The body, for which the request does not count in the replica while it comes."""
        with self.lifecycle.receiving(), place.ongoing as ongoing:
            return await self._bodies.read(receive, ongoing)
