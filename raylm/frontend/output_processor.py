"""OutputProcessor: splits an engine's column batches by request, and detokenizes the answers of open requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from raylm.errors import InvalidRequestError, RayLMError
from raylm.frontend.admission import Reservation
from raylm.frontend.answers.answer_format import AnswerFormat, AnswerReader
from raylm.frontend.outputs import AnswerFinishReason, CompletionDelta, RequestOutput, TokenLogprob, read_logprobs
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.text.detokenizer import SequenceText
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.threads import offload
from raylm.frontend.timelines.record import Part, Score
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineStats, FinishReason, Logprobs, ParkedTokens
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

_TOKENS_A_TURN = 256  # tokens replayed in one turn of the event loop, about 1 ms


class OpenRequest:
    """One open request: its sequences and at most one unread output. Unread deltas are merged.

    OutputProcessor writes and the caller's generator reads, on one event loop. ``texts``, ``readers``,
    ``last_token_times`` and ``drawn`` (token ids) have one entry for each sequence. ``reservation`` is released when
    the first tokens arrive, even if they are not read. ``told`` counts the tokens, by sequence, that the caller already
    has and that are still to arrive; None means all.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        tokenizer: Tokenizer,
        form: AnswerFormat | None = None,
        reservation: Reservation | None = None,
        told: Sequence[int | None] = (),
        part: Part | None = None,
    ) -> None:
        self.request = request
        self._prompt_token_ids = list(request.prompt_token_ids)
        self.part = part or Part(request.request_id)
        self._reservation = reservation
        self.texts = [SequenceText(tokenizer, request.params) for _ in range(request.params.n)]
        self.readers: list[AnswerReader] | None = None if form is None else [AnswerReader(form) for _ in self.texts]
        self.last_token_times = [0.0] * request.params.n
        self.drawn: list[list[int]] = [[] for _ in self.texts]
        self.told = {index: count for index, count in enumerate(told) if count != 0}
        self.part.on_open(request, self.drawn)
        self.num_cached_tokens = 0
        self.unread_logprobs: Logprobs | None = None  # of the prompt, until ``get`` returns them
        self._num_finished = 0
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._deltas: list[CompletionDelta] = []
        self._newest: dict[int, CompletionDelta] = {}  # newest of ``_deltas``, by sequence
        self._error: RayLMError | None = None
        self._vector: bytes | None = None
        self._wake = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self._num_finished == len(self.texts)

    def put(self, delta: CompletionDelta) -> None:
        """Add a delta of one sequence."""
        self._num_finished += delta.finish_reason is not None
        waiting = self._newest.get(delta.index)
        if waiting is not None and waiting.takes(delta):
            waiting.add(delta)
        else:
            self._deltas.append(delta)
            self._newest[delta.index] = delta
        if self._reservation is not None and self._reservation.requests:
            self._reservation.begin((delta.index,))
        self._wake.set()

    def take_told(self, delta: CompletionDelta) -> CompletionDelta | None:
        """Mark ``delta`` as ``told`` if the caller has all its tokens. Otherwise split off and return the told part."""
        if delta.index not in self.told:
            return None
        count, size = self.told[delta.index], len(delta.token_ids)
        delta.told = count is None or size <= count
        if count is not None and size < count:
            self.told[delta.index] = count - size
        elif count is not None:
            del self.told[delta.index]
        if delta.told:
            return None
        part = CompletionDelta(delta.index, "", delta.token_ids[:count], delta.logprobs and delta.logprobs[:count])
        part.told = True
        delta.token_ids, delta.logprobs = delta.token_ids[count:], delta.logprobs and delta.logprobs[count:]
        return part

    def finish(self, vector: bytes) -> None:
        self._vector, self._num_finished = vector, len(self.texts)
        self._leave_queue()
        self._wake.set()

    def fail(self, error: RayLMError) -> None:
        """End the request. The reader gets ``error`` at once, and no unread output."""
        self._error, self._num_finished = error, len(self.texts)
        self._leave_queue()
        self._wake.set()

    def _leave_queue(self) -> None:
        if self._reservation is not None:
            self._reservation.release()

    async def get(self) -> RequestOutput:
        """Wait for output, and return all output since the last call. Raises the error passed to ``fail``."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        if (columns := self.unread_logprobs) is not None:
            self._prompt_logprobs = await offload(partial(self._read_prompt, columns), len(columns.token_ids))
            self.unread_logprobs = None
        deltas, self._deltas, self._newest = self._deltas, [], {}
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self._prompt_token_ids,
            deltas=deltas,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
            finished=self.finished,
            vector=self._vector,
        )

    def _read_prompt(self, columns: Logprobs) -> list[TokenLogprob | None]:
        """One entry for each prompt token. The first token has none, because no token precedes it."""
        missing = len(self.request.prompt_token_ids) - len(columns.counts)
        return [*[None] * missing, *(entry if entry.rank else None for entry in read_logprobs(columns))]


class OutputProcessor:
    """Processes the outputs of all engines. A request is identified by its key, which is unique in this process.

    The engine continues a sequence that ended with a stop string until the stop reaches the engine. Its further tokens
    are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, telemetry: Telemetry) -> None:
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._open: dict[int, OpenRequest] = {}

    def open(
        self,
        request: EngineCoreRequest,
        form: AnswerFormat | None = None,
        reservation: Reservation | None = None,
        told: Sequence[int | None] = (),
        part: Part | None = None,
    ) -> OpenRequest:
        """Register ``request``. ``form`` describes how its answers are parsed, ``told`` is as in RequestHead.

        Events of the request are recorded in ``part``.
        """
        opened = self._open[request.key] = OpenRequest(request, self._tokenizer, form, reservation, told, part)
        return opened

    def sent(self, key: int, engine_id: str, scores: tuple[Score, ...]) -> None:
        """Record that a request was sent to an engine, the first time or after an engine was lost."""
        if (opened := self._open.get(key)) is not None:
            opened.part.on_sent(engine_id, scores)

    def keys_of(self, request_id: str) -> list[int]:
        """The keys of open requests with this id."""
        return [key for key, opened in self._open.items() if opened.request.request_id == request_id]

    def close(self, key: int) -> bool:
        """Stop reading a request. Returns whether an engine may still run it."""
        opened = self._open.pop(key, None)
        if opened is not None:
            self._count_unfinished(opened, "abort")
        return opened is not None

    def resumed(self, key: int) -> EngineCoreRequest | None:
        """An open request in the form in which another engine continues it; None if it has ended."""
        opened = self._open.get(key)
        if opened is None:
            return None
        opened.part.mark("replay")
        pairs = zip(opened.texts, opened.drawn, strict=True)
        return replace(opened.request, drawn=tuple(None if text.finished else tuple(ids) for text, ids in pairs))

    async def take_over(self, opened: OpenRequest, parked: ParkedTokens) -> EngineCoreRequest | None:
        """Deliver tokens that were drawn in another replica to an open request. Returns as ``resumed``."""
        key = opened.request.key
        columns = zip(parked.token_ids, parked.finish_reasons, parked.stop_reasons, strict=True)
        for index, (token_ids, finish_reason, stop_reason) in enumerate(columns):
            for at in range(0, len(token_ids), _TOKENS_A_TURN):
                some, is_last = token_ids[at : at + _TOKENS_A_TURN], at + _TOKENS_A_TURN >= len(token_ids)
                ends = [finish_reason if is_last else None], [stop_reason if is_last else None]
                self.process(EngineCoreOutputs([key], [index], [len(some)], some, *ends, [0], EngineStats()))
                await asyncio.sleep(0)
        return self.resumed(key)

    def fail(self, keys: Iterable[int], error: RayLMError) -> None:
        """End requests with an error, which their callers get at once."""
        for key in keys:
            if (opened := self._open.pop(key, None)) is not None:
                opened.fail(error)
                self._count_unfinished(opened, "error")

    def _count_unfinished(self, opened: OpenRequest, reason: str) -> None:
        for text in opened.texts:
            if not text.finished:
                self._telemetry.finished(reason, 0.0)

    def process(self, outputs: EngineCoreOutputs) -> list[tuple[int, int]]:
        """Deliver each entry to its request. Returns the sequences (key, index) that the engine can stop.

        An error in one request ends only this request.
        """
        now = time.time()
        stops: list[tuple[int, int]] = []
        for event in outputs.events:
            if (told := self._open.get(event[0])) is not None:
                told.part.note(event)
        for key, columns in outputs.prompt_logprobs:
            if key in self._open:
                self._open[key].unread_logprobs = columns
        logprobs = None if outputs.logprobs is None else read_logprobs(outputs.logprobs)
        start = 0
        for entry, key in enumerate(outputs.keys):
            end = start + outputs.token_counts[entry]
            described = None if logprobs is None else list(islice(logprobs, end - start))
            opened, index = self._open.get(key), outputs.indexes[entry]
            if opened is not None and not opened.texts[index].finished:
                token_ids = outputs.token_ids[start:end]
                opened.drawn[index] += token_ids
                delta = CompletionDelta(index, "", token_ids, described)
                delta.stop_reason = outputs.stop_reasons[entry]
                if index == 0:  # other sequences report the prompt of sequence 0 as cached
                    opened.num_cached_tokens = max(opened.num_cached_tokens, outputs.cached_tokens[entry])
                    opened.part.cached_tokens = opened.num_cached_tokens
                ended = self._advance(opened, delta, outputs.finish_reasons[entry], now)
                stops += [(key, index) for index in ended]
                if opened.finished:
                    opened.part.last_token = now
                    del self._open[key]
            start = end
        for key, vector in outputs.pooled:
            if (pooled := self._open.pop(key, None)) is not None:
                self._telemetry.finished("stop", now - pooled.request.arrival_time)
                pooled.part.first_token = pooled.part.last_token = now
                pooled.part.finish_reasons[0] = "vector"
                pooled.finish(vector)
        for key, error in outputs.errors:
            self.fail([key], error)
        return stops

    def _advance(
        self, opened: OpenRequest, delta: CompletionDelta, ended: FinishReason | None, now: float
    ) -> Iterable[int]:
        """Deliver new tokens of one sequence. Returns the indexes of sequences that the engine can stop."""
        try:
            told = opened.take_told(delta) if opened.told else None
            parts = [] if told is None else self._read(opened, told, None)
            news = self._read(opened, delta, ended)
        except Exception as error:
            known = error if isinstance(error, RayLMError) else RayLMError("The answer could not be decoded.")
            if known is not error:
                request_id = opened.request.request_id
                logger.exception(
                    "request %s: the answer could not be detokenized",
                    request_id,
                    extra=about("request.failed", request_id),
                )
            opened.fail(known)
            self._count_unfinished(opened, "error")
            return range(len(opened.texts))
        finish_reason = news[-1].finish_reason
        self._measure(opened, delta.index, sum(len(part.token_ids) for part in news), finish_reason, now)
        for part in parts + news:
            opened.put(part)
        return (delta.index,) if finish_reason is not None and ended is None else ()

    def _read(self, opened: OpenRequest, delta: CompletionDelta, ended: FinishReason | None) -> list[CompletionDelta]:
        """Parse the tokens of one sequence into text, reasoning, calls and the finish reason.

        An AnswerReader gets one token at a time, so that its results do not depend on the batches of tokens.
        """
        reader = None if opened.readers is None else opened.readers[delta.index]
        if reader is None:
            self._read_text(opened, delta, ended)
            self._check_told(opened, delta)
            return [delta]
        found: list[CompletionDelta] = []
        singles = delta.by_token()
        for place, single in enumerate(singles, 1):
            self._read_text(opened, single, ended if place == len(singles) else None)
            for part in reader.read(single):
                self._check_told(opened, part)
                if found and found[-1].takes(part):
                    found[-1].add(part)
                else:
                    found.append(part)
            if found[-1].finish_reason is not None:
                opened.texts[delta.index].finished = True
                break
        return found

    def _read_text(self, opened: OpenRequest, delta: CompletionDelta, ended: FinishReason | None) -> None:
        text = opened.texts[delta.index]
        delta.text, count, stop = text.push(delta.token_ids, ended)
        delta.finish_reason = ended
        delta.token_ids = delta.token_ids[:count]
        delta.logprobs = None if opened.request.params.logprobs is None else (delta.logprobs or [])[:count]
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop

    def _check_told(self, opened: OpenRequest, delta: CompletionDelta) -> None:
        if delta.told and delta.finish_reason is not None and opened.told.get(delta.index, 0) is not None:
            raise InvalidRequestError("This event is beyond the end of the answer.", param="Last-Event-ID")

    def _measure(
        self, opened: OpenRequest, index: int, num_tokens: int, finish_reason: AnswerFinishReason | None, now: float
    ) -> None:
        arrival, last = opened.request.arrival_time, opened.last_token_times[index]
        if num_tokens:
            self._telemetry.tokens(num_tokens, now - (last or arrival), first=not last)
            opened.last_token_times[index] = now
            if not last and opened.part.first_token is None:
                opened.part.first_token = now
        if finish_reason is not None:
            opened.part.finish_reasons[index] = finish_reason
            self._telemetry.finished(finish_reason, now - arrival)
