"""/v1/conversations: stored lists of items, to which responses add their input and output."""

from __future__ import annotations

import re
import time
import uuid
from typing import Annotated, Any

import orjson
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route

from raylm.errors import NotFoundError
from raylm.frontend import Request, offload
from raylm.ingress.http.answer import json_response
from raylm.ingress.http.body import JSONObject
from raylm.ingress.http.errors import clip
from raylm.ingress.http.exchange import exchange_of
from raylm.ingress.openai.chat import Metadata
from raylm.ingress.openai.fields import Body, renamed, wrong
from raylm.ingress.responses.conversation_store import Conversation, ConversationTurn
from raylm.ingress.responses.history import Histories, conversation_not_found, turn_of
from raylm.ingress.responses.input import Item
from raylm.ingress.responses.pages import check_query, read_page
from raylm.ingress.responses.store import ResponseStore

_MOST_ITEMS = 20  # of one request, as OpenAI allows
_PATH = "/v1/conversations/{conversation_id}"
_ID = re.compile(r"/v1/conversations/([^/]+)")
_Items = Annotated[list[Item], Field(max_length=_MOST_ITEMS, fail_fast=True)]


class CreateConversationRequest(Body):
    items: _Items | None = None
    metadata: Metadata | None = None


class UpdateConversationRequest(Body):
    metadata: Metadata | None


class AddItemsRequest(Body):
    items: _Items


class Conversations:
    """Creates and changes conversations of the key of a request."""

    def __init__(self, store: ResponseStore, histories: Histories) -> None:
        self._store = store
        self._histories = histories

    async def create(self, body: CreateConversationRequest, request: Request) -> bytes:
        owner = request.arrival.key_name
        # random, because without keys anyone who knows the id may read the conversation
        made = Conversation(f"conv_{uuid.uuid4().hex}", _metadata(body.metadata), int(time.time()))
        turn = await self._turn(owner, made.id, body.items or [])
        await self._store.create_conversation(owner, made, turn.items)
        return orjson.dumps(_shown(made))

    async def update(self, body: UpdateConversationRequest, request: Request) -> bytes:
        conversation = _id_in(request)
        updated = await self._store.update_conversation(
            request.arrival.key_name, conversation, _metadata(body.metadata)
        )
        if updated is None:
            raise conversation_not_found(conversation, "conversation_id")
        return orjson.dumps(_shown(updated))

    async def add(self, body: AddItemsRequest, request: Request) -> bytes:
        owner, conversation = request.arrival.key_name, _id_in(request)
        turn = await self._turn(owner, conversation, body.items)
        known = await self._store.add_items(owner, turn)
        if known is None:
            raise conversation_not_found(conversation, "conversation_id")
        if known:
            raise _known_item(turn, known[0])
        return await offload(lambda: orjson.dumps(_list([data for _, data in turn.items], False)), len(turn.items))

    async def _turn(self, owner: str, conversation: str, items: list[Any]) -> ConversationTurn:
        with renamed({"input": "items"}):
            turn = await turn_of(conversation, await self._histories.read(items, owner, f"resp_{uuid.uuid4().hex}"))
        ids = [item_id for item_id, _ in turn.items]
        for item_id in ids:
            if ids.count(item_id) > 1:
                raise _known_item(ConversationTurn(conversation, turn.items[::-1]), item_id, last=len(ids) - 1)
        return turn


def conversation_routes(store: ResponseStore) -> list[Route]:
    """The routes without a body."""

    async def retrieve(request: HTTPRequest) -> Response:
        owner, conversation = _names(request)
        if (found := await store.conversation(owner, conversation)) is None:
            raise conversation_not_found(conversation, "conversation_id")
        return json_response(_shown(found))

    async def delete(request: HTTPRequest) -> Response:
        owner, conversation = _names(request)
        if not await store.delete_conversation(owner, conversation):
            raise conversation_not_found(conversation, "conversation_id")
        return json_response({"id": conversation, "object": "conversation.deleted", "deleted": True})

    async def list_items(request: HTTPRequest) -> Response:
        owner, conversation = _names(request)
        check_query(request, {"limit", "order", "after", "include", "include[]"})
        page = read_page(request)
        most, oldest_first = page.limit + 1, page.order == "asc"
        found = await store.page(owner, conversation, page.after, most, oldest_first)
        if found is None and await store.conversation(owner, conversation) is None:
            raise conversation_not_found(conversation, "conversation_id")
        if found is None:
            raise wrong("after", "it is not the id of an item of this conversation")
        return json_response(_list(found[: page.limit], len(found) > page.limit))

    async def retrieve_item(request: HTTPRequest) -> Response:
        check_query(request, {"include", "include[]"})
        owner, conversation = _names(request)
        item = await store.item(owner, conversation, request.path_params["item_id"])
        if item is None:
            raise await missing_item(request)
        return Response(item, media_type="application/json")

    async def delete_item(request: HTTPRequest) -> Response:
        owner, conversation = _names(request)
        deleted = await store.delete_item(owner, conversation, request.path_params["item_id"])
        found = await store.conversation(owner, conversation)
        if found is None or not deleted:
            raise await missing_item(request)
        return json_response(_shown(found))

    async def missing_item(request: HTTPRequest) -> NotFoundError:
        owner, conversation = _names(request)
        if await store.conversation(owner, conversation) is None:
            return conversation_not_found(conversation, "conversation_id")
        shown = clip(request.path_params["item_id"], 100)
        return NotFoundError(f"Item with id '{shown}' not found in this conversation.", param="item_id")

    return [
        Route(_PATH, retrieve, methods=["GET"]),
        Route(_PATH, delete, methods=["DELETE"]),
        Route(f"{_PATH}/items", list_items, methods=["GET"]),
        Route(f"{_PATH}/items/{{item_id}}", retrieve_item, methods=["GET"]),
        Route(f"{_PATH}/items/{{item_id}}", delete_item, methods=["DELETE"]),
    ]


def _names(request: HTTPRequest) -> tuple[str, str]:
    """(name of the request's key, id of the conversation)."""
    return exchange_of(request.scope).key_name, request.path_params["conversation_id"]


def _id_in(request: Request) -> str:
    """The id of the conversation in the path of a request with a body."""
    found = _ID.search(request.arrival.path)
    assert found is not None
    return found[1]


def _metadata(given: dict[str, str] | None) -> str:
    return orjson.dumps(given or {}).decode()


def _shown(conversation: Conversation) -> JSONObject:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": orjson.loads(conversation.metadata),
    }


def _list(items: list[bytes], has_more: bool) -> JSONObject:
    data = [orjson.loads(item) for item in items]
    first, last = (data[0]["id"], data[-1]["id"]) if data else ("", "")
    return {"object": "list", "data": data, "has_more": has_more, "first_id": first, "last_id": last}


def _known_item(turn: ConversationTurn, item_id: str, last: int = 0) -> Exception:
    place = [known for known, _ in turn.items].index(item_id)
    return wrong(f"items[{abs(last - place)}].id", "the conversation already has an item with this id")
