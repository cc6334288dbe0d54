"""Histories: reads the input of a response, and what was said before it, from a request and the store."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from raylm.errors import NotFoundError, PreviousResponseNotFoundError
from raylm.frontend import offload
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.openai.fields import wrong
from raylm.ingress.responses.body import ResponsesRequest
from raylm.ingress.responses.conversation_store import ConversationTurn
from raylm.ingress.responses.input import Input, input_items, references, response_of
from raylm.ingress.responses.sealing import Seal
from raylm.ingress.responses.store import UNFINISHED, ResponseStore

_BYTES_A_THING = 64  # about, of JSON


@dataclass(frozen=True, slots=True)
class Given:
    """The ``items`` of a response's input, and the items ``before`` them."""

    items: list[JSONObject]
    before: list[JSONObject]

    @property
    def all(self) -> list[JSONObject]:
        return self.before + self.items


class Histories:
    """Reads the items of requests of the key named ``owner``."""

    def __init__(self, store: ResponseStore, seal: Seal) -> None:
        self._store = store
        self._seal = seal

    async def given(self, body: ResponsesRequest, owner: str) -> tuple[str, Given]:
        """A new response's id, and its input with the conversation before it."""
        # random, because without keys anyone who knows the id may read the response
        response_id = f"resp_{uuid.uuid4().hex}"
        before = await self.before(body, owner)
        items = await self.read(body.input, owner, response_id, before)
        if body.conversation is not None:
            _check_ids(items, before)
        return response_id, Given(items, before)

    async def read(
        self, given: Input, owner: str, response_id: str, before: list[JSONObject] | None = None
    ) -> list[JSONObject]:
        """Convert input to items. A reference is replaced by an item of ``before``, or of a stored response.

        Raises:
            NotFoundError: a referenced item is not stored.
        """
        unseal = partial(self._seal.open, owner=owner)
        size = len(given) if isinstance(given, list) else 1
        items = await offload(lambda: input_items(given, response_id, unseal), size)
        return await self._resolve(owner, items, before or [])

    async def before(self, body: ResponsesRequest, owner: str) -> list[JSONObject]:
        """The items of the stored conversation that the response continues."""
        if body.conversation is not None:
            return await self._conversation(owner, body.conversation_id or "")
        return await self._chain(owner, body.previous_response_id)

    async def _conversation(self, owner: str, conversation: str) -> list[JSONObject]:
        if (found := await self._store.items(owner, conversation)) is None:
            raise conversation_not_found(conversation, "conversation")
        return await offload(lambda: [orjson.loads(item) for item in found], sum(map(len, found)) // _BYTES_A_THING)

    async def _chain(self, owner: str, response_id: str | None) -> list[JSONObject]:
        """The items of the responses that end with ``response_id``."""
        if response_id is None:
            return []
        found = await self._store.history(owner, response_id)
        if found is None:
            message = f"Previous response with id '{clip(response_id, 100)}' not found; it may have expired."
            raise PreviousResponseNotFoundError(message, param="previous_response_id")
        records = await offload(
            lambda: [orjson.loads(record) for record in found], sum(map(len, found)) // _BYTES_A_THING
        )
        if any(record["response"]["status"] in UNFINISHED for record in records):
            raise wrong("previous_response_id", "the response, or one before it, has not ended yet")
        if any(record["response"].get("conversation") for record in records):
            rule = "the response belongs to a conversation; continue it with 'conversation'"
            raise wrong("previous_response_id", rule)
        return [item for record in records for item in (*record["input"], *record["response"]["output"])]

    async def _resolve(self, owner: str, items: list[JSONObject], before: list[JSONObject]) -> list[JSONObject]:
        """Replace references in ``items`` by the stored items. Each stored response is read once."""
        referred = references(items)
        wanted = set(referred.values())
        found: dict[str, JSONObject] = {item["id"]: item for item in before if item["id"] in wanted}
        for response_id in {response_of(item_id) for item_id in wanted - found.keys()} - {None}:
            if (record := await self._store.get(owner, str(response_id))) is not None:
                stored = await offload(partial(orjson.loads, record), len(record) // _BYTES_A_THING)
                found |= {item["id"]: item for item in (*stored["input"], *stored["response"]["output"])}
        for place, item_id in referred.items():
            if item_id not in found:
                message = (
                    f"Item with id '{clip(item_id, 100)}' not found: only items of stored responses can be referenced."
                )
                raise NotFoundError(message, param=f"input[{place}].id")
        return [found[referred[place]] if place in referred else item for place, item in enumerate(items)]


def _check_ids(items: list[JSONObject], before: list[JSONObject]) -> None:
    """Refuse an item of the caller whose id belongs to another item of the conversation, which stores an id once.

    The model's items may be sent again in any form.
    """
    known = {item["id"]: item for item in before}
    for place, item in enumerate(items):
        other = known.setdefault(item["id"], item)
        is_text = item.get("role") in ("user", "system", "developer")
        text = "output" if item["type"].endswith("_output") else "content" if is_text else ""
        if item.get(text) != other.get(text):
            raise wrong(f"input[{place}].id", "the conversation already has another item with this id")


async def turn_of(conversation: str, items: list[JSONObject]) -> ConversationTurn:
    """The items as they are stored in a conversation."""
    return ConversationTurn(
        conversation, await offload(lambda: [(item["id"], orjson.dumps(item)) for item in items], len(items))
    )


def conversation_not_found(conversation: Any, param: str) -> NotFoundError:
    return NotFoundError(f"Conversation with id '{clip(str(conversation), 100)}' not found.", param=param)
