"""ConversationStore: the conversations of a store, and their items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raylm.ingress.responses.base_store import BaseStore
from raylm.ingress.responses.database import ROW_BYTES

Items = list[tuple[str, bytes]]
"""The ids of items, and the items as JSON."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A stored conversation. ``metadata`` is JSON, ``created`` is in seconds since 1970."""

    id: str
    metadata: str
    created: int


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """Items that a response adds to a conversation when it ends."""

    conversation: str
    items: Items


class ConversationStore(BaseStore):
    """A conversation belongs to its ``owner``, as responses do, and its items count for the owner's bytes.

    An item has its own id once in a conversation. The methods return None for a conversation that does not exist.
    """

    async def create_conversation(self, owner: str, conversation: Conversation, items: Items) -> None:
        def work() -> None:
            now, size = self._database.now(), ROW_BYTES + len(conversation.metadata)
            self._database.execute(
                "INSERT INTO conversations (id, owner, metadata, created, used, size) VALUES (?, ?, ?, ?, ?, ?)",
                (conversation.id, owner, conversation.metadata, conversation.created, now, size),
            )
            self._add(owner, ConversationTurn(conversation.id, items), now)
            self._make_room(owner, [conversation.id], now)

        await self._do(work)

    async def conversation(self, owner: str, conversation: str) -> Conversation | None:
        return await self._read(lambda: self._conversation(owner, conversation))

    async def update_conversation(self, owner: str, conversation: str, metadata: str) -> Conversation | None:
        def work() -> Conversation | None:
            self._database.execute(
                "UPDATE conversations SET size = size + ? - LENGTH(metadata), metadata = ?, used = ?"
                " WHERE id = ? AND owner = ?",
                (len(metadata), metadata, self._database.now(), conversation, owner),
            )
            return self._conversation(owner, conversation)

        return await self._do(work)

    async def delete_conversation(self, owner: str, conversation: str) -> bool:
        """Delete a conversation and its items. Responses keep their own items. Returns whether it existed."""
        query = "DELETE FROM conversations WHERE id = ? AND owner = ?"
        return await self._do(lambda: self._database.execute(query, (conversation, owner)).rowcount > 0)

    async def add_items(self, owner: str, turn: ConversationTurn) -> list[str] | None:
        """Add items, if the conversation has none of their ids. Returns the ids that it has already."""

        def work() -> list[str] | None:
            if self._conversation(owner, turn.conversation) is None:
                return None
            there = "SELECT 1 FROM conversation_items WHERE conversation = ? AND id = ?"
            known = [item_id for item_id, _ in turn.items if self._one(there, turn.conversation, item_id)]
            if not known:
                now = self._database.now()
                self._add(owner, turn, now)
                self._make_room(owner, [turn.conversation], now)
            return known

        return await self._do(work)

    async def end_turn(self, owner: str, turn: ConversationTurn) -> None:
        """Add the items of a response that is not stored. Items that the conversation has stay in their place."""

        def work() -> None:
            now = self._database.now()
            self._add(owner, turn, now)
            self._make_room(owner, [turn.conversation], now)

        await self._do(work)

    async def items(self, owner: str, conversation: str) -> list[bytes] | None:
        """All items, the oldest first."""

        def work() -> list[bytes] | None:
            if self._conversation(owner, conversation) is None:
                return None
            query = "SELECT data FROM conversation_items WHERE conversation = ? ORDER BY place"
            found = [data for (data,) in self._database.execute(query, (conversation,))]
            used = "UPDATE conversations SET used = ? WHERE id = ?"  # a full disk can still be read
            self._database.attempt(used, (self._database.now(), conversation))
            return found

        return await self._read(work)

    async def page(
        self, owner: str, conversation: str, after: str | None, most: int, oldest_first: bool
    ) -> list[bytes] | None:
        """At most ``most`` items after the item ``after``. None also if there is no such item."""

        def work() -> list[bytes] | None:
            if self._conversation(owner, conversation) is None:
                return None
            begin = -1 if oldest_first else 2**62
            if after is not None:
                place = "SELECT place FROM conversation_items WHERE conversation = ? AND id = ?"
                if (found := self._one(place, conversation, after)) is None:
                    return None
                begin = found[0]
            later, order = (">", "ASC") if oldest_first else ("<", "DESC")
            query = (
                f"SELECT data FROM conversation_items WHERE conversation = ? AND place {later} ?"
                f" ORDER BY place {order} LIMIT ?"
            )
            return [data for (data,) in self._database.execute(query, (conversation, begin, most))]

        return await self._read(work)

    async def item(self, owner: str, conversation: str, item_id: str) -> bytes | None:
        """None also if there is no such item."""

        def work() -> bytes | None:
            if self._conversation(owner, conversation) is None:
                return None
            query = "SELECT data FROM conversation_items WHERE conversation = ? AND id = ?"
            found: Any = self._one(query, conversation, item_id)
            return None if found is None else found[0]

        return await self._read(work)

    async def delete_item(self, owner: str, conversation: str, item_id: str) -> bool:
        """Returns whether there was such an item."""

        def work() -> bool:
            if self._conversation(owner, conversation) is None:
                return False
            query = "DELETE FROM conversation_items WHERE conversation = ? AND id = ?"
            return self._database.execute(query, (conversation, item_id)).rowcount > 0

        return await self._do(work)

    def _conversation(self, owner: str, conversation: str) -> Conversation | None:
        query = "SELECT id, metadata, created FROM conversations WHERE id = ? AND owner = ?"
        found = self._one(query, conversation, owner)
        return None if found is None else Conversation(*found)

    def _add(self, owner: str, turn: ConversationTurn, now: float) -> None:
        """Add items behind the others. Does nothing if the conversation was deleted."""
        found = self._one("SELECT next FROM conversations WHERE id = ? AND owner = ?", turn.conversation, owner)
        if found is None:
            return
        self._database.execute_each(
            "INSERT INTO conversation_items VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
            [(turn.conversation, place, item_id, data) for place, (item_id, data) in enumerate(turn.items, found[0])],
        )
        self._database.execute(
            "UPDATE conversations SET next = next + ?, used = ? WHERE id = ?", (len(turn.items), now, turn.conversation)
        )
