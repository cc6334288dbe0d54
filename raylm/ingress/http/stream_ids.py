"""The `id:` of a stream's events: who asked for what, how far it was told, and so where another ingress goes on."""

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
_NONCE, _KEY, _FINGERPRINT, _BODY, _MAC = 8, 3, 3, 6, 7  # bytes of an id, in this order; states follow
_HEAD = _NONCE + _KEY + _FINGERPRINT + _BODY
_STATE = 3  # bytes of each choice
MOST_STATE = 2 ** (8 * _STATE) - 1
_VARYING = "_varies"  # what a fingerprint ends with that promises nothing
_BYTES_A_THING = 64  # which are hashed while Python walks through one thing, at the least

# How far a choice was told; from OPEN on, so many of its tokens more, with all that they come to. USAGE is a state of
# the first choice, behind the ends of all.
NOTHING, FIRST_OPENING, TEXT_TO_THE_END, FINISH, USAGE, OPEN = range(6)


Mac = Callable[[bytes | bytearray], bytes]


@dataclass(frozen=True, slots=True)
class Posted:
    """A body as it was sent, the name of the key that it came with, and its Last-Event-ID, "" without one.

    A stream has ids only where its client ``reads_ids``.
    """

    content: bytes
    key: str
    last_event_id: str
    reads_ids: bool


def reads_all_events(headers: Headers) -> bool:
    """Whether a client asks for what many readers of streams do not know: ids of events, and comments.

    Raises:
        InvalidRequestError: the header RESUMABLE has another value than true and false.
    """
    asked = headers.get(RESUMABLE, "false").lower()
    if asked not in ("true", "false"):
        raise InvalidRequestError(f"The header '{RESUMABLE}' must be true or false.", param=RESUMABLE)
    return asked == "true" or LAST_EVENT_ID in headers


class StreamId:
    """The id of a stream's events: a head that stays, and how far each choice ``was`` told when the stream began.

    A message of Anthropic's has counts of its own in place of states of choices. One without a ``mac`` gives no ids:
    its stream cannot be gone on with by its client.
    """

    def __init__(self, head: bytes, seed: bytes, was: Sequence[int], mac: Mac | None = None) -> None:
        self._head = head
        self._mac = mac
        self._seed = seed
        self.was = tuple(was)
        self._states = bytearray(b"".join(state.to_bytes(_STATE) for state in was))

    def nth(self, place: int, head: RequestHead, params: SamplingParams) -> tuple[RequestHead, SamplingParams]:
        """``head`` with what was told of prompt ``place``, and ``params`` with a seed that is always the same.

        The name by which engines know what they drew is a digest that only ingresses can make; what has
        log-probabilities has none, as engines keep the tokens alone.
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
        """How many of a choice's ``openings`` had been told."""
        was = self.was[index] if self.was else NOTHING
        return min(openings, 0 if was == NOTHING else 1 if was == FIRST_OPENING else openings)

    def finish_told(self, index: int) -> bool:
        return self.was[index] in (FINISH, USAGE)

    def all_told(self, *, with_usage: bool) -> bool:
        """Whether nothing was left to tell when the stream began."""
        ends = bool(self.was) and all(self.finish_told(index) for index in range(len(self.was)))
        return ends and (not with_usage or self.was[0] == USAGE)

    def reach(self, index: int, state: int) -> None:
        """The next event tells the choice up to there."""
        if self._mac is not None:
            self._states[_STATE * index : _STATE * (index + 1)] = state.to_bytes(_STATE)

    def line(self) -> bytes:
        """The line that the next event begins with, which says all that was reached."""
        if self._mac is None:
            return b""
        return b"id: " + binascii.b2a_base64(self._head + self._mac(self._states) + self._states)


UNRESUMABLE = StreamId(b"", b"", ())


class StreamIds:
    """Makes and reads ids; ``secret`` is the same in all ingresses of an application.

    An id is base64 of a nonce, digests of key, fingerprint and body, a MAC, and a state of three bytes for each choice.
    The MAC is over all the rest. It holds the states too, as a stream that goes on is charged for what they leave open.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or os.urandom(32)

    async def open(self, posted: Posted, num_choices: int, fingerprint: str) -> StreamId:
        """The id of a new stream, or of one that goes on; UNRESUMABLE if it has too many choices or tokens may vary.

        Raises:
            InvalidRequestError: the id that was sent was not made here, or is damaged.
            NotFoundError: the stream belongs to another key.
            ConflictError: the body is another one, or the engines would not give the same tokens any more.
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
        """The nonce and the states of an id, which must hold ``parts``: the digests of key, fingerprint and body."""
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
