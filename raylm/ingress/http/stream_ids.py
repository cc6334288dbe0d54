"""The `id:` field of a stream's events. It identifies the request and says how much of the answer was sent.

With it another ingress can resume the stream.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.datastructures import Headers

from raylm.errors import ConflictError, InvalidRequestError, NotFoundError
from raylm.frontend import RequestHead, offload
from raylm.params import SamplingParams

LAST_EVENT_ID = "Last-Event-ID"
RESUMABLE = "x-raylm-resumable"
MOST_CHOICES = 11  # more do not fit into MAX_ID
MAX_ID = 80  # bytes
_NONCE, _KEY, _FINGERPRINT, _BODY, _MAC = 8, 3, 3, 6, 7  # bytes of an id, in this order, before the states
_HEAD = _NONCE + _KEY + _FINGERPRINT + _BODY
_STATE = 3  # bytes for each choice
MOST_STATE = 2 ** (8 * _STATE) - 1
_VARYING = "_varies"  # the end of a fingerprint that does not guarantee equal tokens
_BYTES_A_THING = 64  # hashing so many bytes takes at most the time of one Python object

# How much of a choice was sent. A state of OPEN + n means n tokens and their text. USAGE is a state of the first
# choice, after the ends of all choices.
NOTHING, FIRST_OPENING, TEXT_TO_THE_END, FINISH, USAGE, OPEN = range(6)


Mac = Callable[[bytes | bytearray], bytes]


@dataclass(frozen=True, slots=True)
class Posted:
    """A request's body as sent, the name of its key, and its Last-Event-ID ("" if there is none).

    A stream has ids only if its client ``reads_ids``.
    """

    content: bytes
    key: str
    last_event_id: str
    reads_ids: bool


def reads_all_events(headers: Headers) -> bool:
    """Whether a client asks for event ids and comments, which many readers of streams do not support.

    Raises:
        InvalidRequestError: The header RESUMABLE is neither true nor false.
    """
    asked = headers.get(RESUMABLE, "false").lower()
    if asked not in ("true", "false"):
        raise InvalidRequestError(f"The header '{RESUMABLE}' must be true or false.", param=RESUMABLE)
    return asked == "true" or LAST_EVENT_ID in headers


class StreamId:
    """The id of a stream's events: a constant head, and the state of each choice (``was`` at the start of the stream).

    For Anthropic's messages the states are counts of the message. Without a ``mac`` the stream has no ids, and the
    client cannot resume it.
    """

    def __init__(self, head: bytes, seed: bytes, was: Sequence[int], mac: Mac | None = None) -> None:
        self._head = head
        self._mac = mac
        self._seed = seed
        self.was = tuple(was)
        self._states = bytearray(b"".join(state.to_bytes(_STATE) for state in was))

    def nth(self, place: int, head: RequestHead, params: SamplingParams) -> tuple[RequestHead, SamplingParams]:
        """Return ``head`` with the sent part of prompt number ``place``, and ``params`` with a constant seed.

        Engines store the drawn tokens under a digest that only ingresses can make. A request with log-probabilities has
        no such digest, because engines store tokens only.
        """
        if not self._head:
            return head, params
        states = self.was[place * params.n : (place + 1) * params.n]
        told = [None if state in (TEXT_TO_THE_END, FINISH, USAGE) else max(state - OPEN, 0) for state in states]
        digest = partial(hashlib.blake2b, self._seed, salt=place.to_bytes(16))
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(digest(digest_size=8).digest()) >> 1)
        head = replace(head, told=tuple(told) if told.count(0) < len(told) else ())
        begun = any(state != NOTHING for state in self.was)
        name = digest(digest_size=16, person=b"parked").hexdigest()
        if params.logprobs is None:
            head = replace(head, resumable_as=name, is_resumed=begun)
        if begun and self._mac is not None:
            head = replace(head, stream=name)
        return head, params

    def openings_told(self, index: int, openings: int) -> int:
        """How many of a choice's ``openings`` were already sent."""
        was = self.was[index] if self.was else NOTHING
        return min(openings, 0 if was == NOTHING else 1 if was == FIRST_OPENING else openings)

    def finish_told(self, index: int) -> bool:
        return self.was[index] in (FINISH, USAGE)

    def all_told(self, *, with_usage: bool) -> bool:
        """Whether the whole answer was already sent when the stream began."""
        ends = bool(self.was) and all(self.finish_told(index) for index in range(len(self.was)))
        return ends and (not with_usage or self.was[0] == USAGE)

    def reach(self, index: int, state: int) -> None:
        """Note that the next event brings a choice to ``state``."""
        if self._mac is not None:
            self._states[_STATE * index : _STATE * (index + 1)] = state.to_bytes(_STATE)

    def line(self) -> bytes:
        """The ``id:`` line of the next event, with the current states."""
        if self._mac is None:
            return b""
        return b"id: " + binascii.b2a_base64(self._head + self._mac(self._states) + self._states)


UNRESUMABLE = StreamId(b"", b"", ())


class StreamIds:
    """Makes and reads ids. ``secret`` is the same in all ingresses of an application.

    An id is base64 of a nonce, digests of key, fingerprint and body, a MAC, and a state of three bytes for each choice.
    The MAC covers all other parts. It covers the states too, because a resumed stream is charged for the tokens after
    them.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or os.urandom(32)

    async def open(self, posted: Posted, num_choices: int, fingerprint: str) -> StreamId:
        """Return the id of a new or resumed stream. Returns UNRESUMABLE for too many choices or if tokens may differ.

        Raises:
            InvalidRequestError: The sent id is damaged or was not made by this application.
            NotFoundError: The stream belongs to another key.
            ConflictError: The body is different, or the engines would not produce the same tokens.
        """
        promised = bool(fingerprint) and not fingerprint.endswith(_VARYING)
        if not posted.last_event_id and (not promised or num_choices > MOST_CHOICES):
            return UNRESUMABLE
        work = partial(self._digest, b"body", _BODY, posted.content)
        parts = [
            self._digest(b"key", _KEY, posted.key.encode()),
            self._digest(b"fingerprint", _FINGERPRINT, fingerprint.encode()),
            await offload(work, len(posted.content) // _BYTES_A_THING),
        ]
        if posted.last_event_id:
            nonce, was = self._read(posted.last_event_id, parts)
            if len(was) != num_choices or not promised:
                raise _not_from_here()
        else:
            nonce, was = os.urandom(_NONCE), [NOTHING] * num_choices
        head = nonce + b"".join(parts)
        return StreamId(head, self._digest(b"seed", 32, nonce), was, self._mac(head))

    def _read(self, text: str, parts: list[bytes]) -> tuple[bytes, list[int]]:
        """Parse an id. Returns its nonce and states.

        Args:
            parts: The digests of key, fingerprint and body that the id must contain.
        """
        try:
            raw = base64.b64decode(text, validate=True) if len(text) <= MAX_ID else b""
        except ValueError:
            raw = b""
        head, mac, states = raw[:_HEAD], raw[_HEAD : _HEAD + _MAC], raw[_HEAD + _MAC :]
        if len(states) % _STATE or not states or not hmac.compare_digest(mac, self._mac(head)(states)):
            raise _not_from_here()
        key, numbers, body = parts
        at = _NONCE + _KEY
        if head[_NONCE:at] != key:
            raise NotFoundError(f"'{LAST_EVENT_ID}' is not the id of a stream of this API key.", param=LAST_EVENT_ID)
        if head[at : at + _FINGERPRINT] != numbers:
            message = "names a stream that cannot continue: the model, or the software that computes it, has changed."
            raise ConflictError(f"'{LAST_EVENT_ID}' {message}", param=LAST_EVENT_ID)
        if head[at + _FINGERPRINT :] != body:
            message = "names a stream of another body; send exactly the same bytes."
            raise ConflictError(f"'{LAST_EVENT_ID}' {message}", param=LAST_EVENT_ID)
        return head[:_NONCE], [int.from_bytes(states[at : at + _STATE]) for at in range(0, len(states), _STATE)]

    def _mac(self, head: bytes) -> Mac:
        """The MAC of ids with this head, as a function of their states."""
        begun = hashlib.blake2b(head, digest_size=_MAC, key=self._secret, person=b"mac")

        def mac(states: bytes | bytearray) -> bytes:
            whole = begun.copy()
            whole.update(states)
            return whole.digest()

        return mac

    def _digest(self, purpose: bytes, size: int, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=size, key=self._secret, person=purpose).digest()


def _not_from_here() -> InvalidRequestError:
    message = f"'{LAST_EVENT_ID}' is not the id of an event of such a stream on this server; send the body without it."
    return InvalidRequestError(message, param=LAST_EVENT_ID)
