"""PromptState: one prompt that engines serve. ``process`` gives an engine's column batches to the states of prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from raylm.errors import InvalidRequestError, RayLMError
from raylm.frontend.admission import Reservation
from raylm.frontend.answers.answer_format import AnswerFormat, AnswerReader
from raylm.frontend.engines.routed_engine import Route, RoutedPrompt
from raylm.frontend.outputs import AnswerFinishReason, CompletionDelta, PromptLogprobs, RequestOutput, TokenLogprobs
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.text.detokenizer import SequenceText
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.frontend.threads import offload
from raylm.frontend.timelines.record import Part
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, EngineStats, FinishReason, Logprobs, ParkedTokens
from raylm.stages import about

logger = logging.getLogger("raylm.frontend")

_TAIL_TOKENS = 5  # of a prompt, whose text shows whether a space is between it and its continuation
_TOKENS_A_TURN = 256  # tokens replayed in one turn of the event loop, about 1 ms


class PromptState(RoutedPrompt):
    """One prompt of a request: its engine, the text and tokens of its sequences, and at most one unread output.

    Belongs to the event loop of its AsyncLLM. ``process`` adds outputs. The caller reads them with ``get``; deltas that
    it has not read are merged.

    ``texts``, ``readers``, ``last_token_times`` and ``drawn`` (token ids) have one entry for each sequence.
    ``reservation`` is released when the first tokens arrive, even if they are not read. ``told`` counts the tokens, by
    sequence, that the caller already has and that are still to arrive; None means all.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        form: AnswerFormat | None = None,
        reservation: Reservation | None = None,
        told: Sequence[int | None] = (),
        part: Part | None = None,
        *,
        continues: bool = False,
    ) -> None:
        super().__init__(request)
        self.part = part or Part(request.request_id)
        before = request.prompt_token_ids[-_TAIL_TOKENS:] if continues else ()
        self.texts = [SequenceText(tokenizer, request.params, before) for _ in range(request.params.n)]
        self.readers: list[AnswerReader] | None = None if form is None else [AnswerReader(form) for _ in self.texts]
        self.last_token_times = [0.0] * request.params.n
        self.drawn: list[list[int]] = [[] for _ in self.texts]
        self.told = {index: count for index, count in enumerate(told) if count != 0}
        self.part.on_open(request, self.drawn)
        self.num_cached_tokens = 0
        self.unread_logprobs: Logprobs | None = None  # of the prompt, until ``get`` returns them
        self._telemetry = telemetry
        self._reservation = reservation
        self._prompt_token_ids: list[int] | None = None
        self._num_open = len(self.texts)
        self._prompt_logprobs: PromptLogprobs | None = None
        self._deltas: list[CompletionDelta] = []
        self._newest: dict[int, CompletionDelta] = {}  # newest of ``_deltas``, by sequence
        self._error: RayLMError | None = None
        self._vector: bytes | None = None
        self._wake = asyncio.Event()

    # ---------------------------------------------------------------- the caller

    async def get(self) -> RequestOutput:
        """Wait for output, and return all output since the last call. Raises the error passed to ``fail``."""
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
            raise self._error
        if (columns := self.unread_logprobs) is not None:
            known = await offload(partial(TokenLogprobs.of_columns, columns), len(columns.token_ids))
            self._prompt_logprobs = PromptLogprobs(known, len(self.request.prompt_token_ids))
            self.unread_logprobs = None
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(self.request.prompt_token_ids)
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

    def close(self) -> bool:
        """Stop reading. Returns whether an engine may still run the prompt."""
        if self.finished:
            return False
        self._end("abort")
        return True

    # ---------------------------------------------------------------- engines

    def on_sent(self, route: Route) -> None:
        self.part.on_sent(route.engine.client.info.engine_id, route.scores)

    def resumed(self) -> EngineCoreRequest:
        if self.part.routings or any(self.drawn):
            self.part.mark("replay")
        pairs = zip(self.texts, self.drawn, strict=True)
        return replace(self.request, drawn=tuple(None if text.finished else tuple(ids) for text, ids in pairs))

    async def take_over(self, parked: ParkedTokens) -> None:
        """Deliver tokens that were drawn for another replica."""
        key = self.request.key
        columns = zip(parked.token_ids, parked.finish_reasons, parked.stop_reasons, strict=True)
        for index, (token_ids, finish_reason, stop_reason) in enumerate(columns):
            for at in range(0, len(token_ids), _TOKENS_A_TURN):
                some, is_last = token_ids[at : at + _TOKENS_A_TURN], at + _TOKENS_A_TURN >= len(token_ids)
                ends = [finish_reason if is_last else None], [stop_reason if is_last else None]
                outputs = EngineCoreOutputs([key], [index], [len(some)], some, *ends, [0], EngineStats())
                process({key: self}, outputs)
                await asyncio.sleep(0)

    def fail(self, error: RayLMError) -> None:
        """The caller gets the error at once, and no unread output."""
        if not self.finished:
            self._error = error
            self._end("error")
            self._notify()

    def finish(self, vector: bytes, now: float) -> None:
        """End a request for a vector, which arrived at ``now``."""
        self._vector, self.finished = vector, True
        self._telemetry.finished("stop", now - self.request.arrival_time)
        self.part.first_token = self.part.last_token = now
        self.part.finish_reasons[0] = "vector"
        self._notify()

    def _end(self, reason: str) -> None:
        self.finished = True
        for text in self.texts:
            if not text.finished:
                self._telemetry.finished(reason, 0.0)

    def _notify(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
        self._wake.set()

    # ---------------------------------------------------------------- tokens

    def advance(self, delta: CompletionDelta, ended: FinishReason | None, now: float) -> Sequence[int]:
        """Deliver new tokens of one sequence. Returns the indexes of sequences that the engine can stop."""
        drawn, num_kept = self.drawn[delta.index], len(self.drawn[delta.index])
        drawn += delta.token_ids
        try:
            told = self._take_told(delta) if self.told else None
            before = [] if told is None else self._read(told, None)
            news = self._read(delta, ended)
        except Exception as error:
            known = error if isinstance(error, RayLMError) else RayLMError("The answer could not be decoded.")
            if known is not error:
                request_id = self.request.request_id
                logger.exception(
                    "request %s: the answer could not be detokenized",
                    request_id,
                    extra=about("request.failed", request_id),
                )
            self.fail(known)
            self.part.last_token = now
            return range(len(self.texts))
        for part in before:
            num_kept += len(part.token_ids)
            self._put(part)
        num_tokens, finish_reason = 0, news[-1].finish_reason
        for part in news:
            num_tokens += len(part.token_ids)
            self._put(part)
        del drawn[num_kept + num_tokens :]  # tokens after a stop string or a last tool call are not served, nor charged
        self._measure(delta.index, num_tokens, finish_reason, now)
        if self.finished:
            self.part.last_token = now
        return (delta.index,) if finish_reason is not None and ended is None else ()

    def _take_told(self, delta: CompletionDelta) -> CompletionDelta | None:
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

    def _read(self, delta: CompletionDelta, ended: FinishReason | None) -> list[CompletionDelta]:
        """Parse the tokens of one sequence into text, reasoning, calls and the finish reason.

        An AnswerReader gets one token at a time, so that its results do not depend on the batches of tokens.
        """
        reader = None if self.readers is None else self.readers[delta.index]
        if reader is None:
            self._read_text(delta, ended)
            if delta.told:
                self._check_told(delta)
            return [delta]
        found: list[CompletionDelta] = []
        singles = delta.by_token()
        for place, single in enumerate(singles, 1):
            self._read_text(single, ended if place == len(singles) else None)
            for part in reader.read(single):
                if part.told:
                    self._check_told(part)
                if found and found[-1].takes(part):
                    found[-1].add(part)
                else:
                    found.append(part)
            if found[-1].finish_reason is not None:
                self.texts[delta.index].finished = True
                break
        return found

    def _read_text(self, delta: CompletionDelta, ended: FinishReason | None) -> None:
        delta.text, count, stop = self.texts[delta.index].push(delta.token_ids, ended)
        delta.finish_reason = ended
        delta.token_ids = delta.token_ids[:count]
        if self.request.params.logprobs is None:
            delta.logprobs = None
        elif delta.logprobs is None:
            delta.logprobs = TokenLogprobs()
        elif count < len(delta.logprobs):
            delta.logprobs = delta.logprobs[:count]
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop

    def _check_told(self, delta: CompletionDelta) -> None:
        if delta.finish_reason is not None and self.told.get(delta.index, 0) is not None:
            raise InvalidRequestError("This event is beyond the end of the answer.", param="Last-Event-ID")

    def _measure(self, index: int, num_tokens: int, finish_reason: AnswerFinishReason | None, now: float) -> None:
        arrival, last = self.request.arrival_time, self.last_token_times[index]
        if num_tokens:
            self._telemetry.tokens(num_tokens, now - (last or arrival), first=not last)
            self.last_token_times[index] = now
            if not last and self.part.first_token is None:
                self.part.first_token = now
        if finish_reason is not None:
            self.part.finish_reasons[index] = finish_reason
            self._telemetry.finished(finish_reason, now - arrival)

    def _put(self, delta: CompletionDelta) -> None:
        """Add a delta of one sequence to the unread output."""
        if delta.finish_reason is not None:
            self._num_open -= 1
            self.finished = not self._num_open
        waiting = self._newest.get(delta.index)
        if waiting is not None and waiting.takes(delta):
            waiting.add(delta)
        else:
            self._deltas.append(delta)
            self._newest[delta.index] = delta
        if self._reservation is not None and self._reservation.requests:
            self._reservation.begin((delta.index,))
        self._wake.set()


def process(prompts: Mapping[int, PromptState], outputs: EngineCoreOutputs) -> list[tuple[int, int]]:
    """Deliver each entry to its prompt, which ``prompts`` has by key. Returns sequences (key, index) to stop.

    The engine continues a sequence that ended with a stop string until the stop reaches the engine. Its further tokens
    are dropped. An error in one prompt ends only this prompt.
    """
    now = time.time()
    stops: list[tuple[int, int]] = []
    for event in outputs.events:
        if (prompt := prompts.get(event[0])) is not None and not prompt.finished:
            prompt.part.note(event)
    for key, columns in outputs.prompt_logprobs:
        if (prompt := prompts.get(key)) is not None:
            prompt.unread_logprobs = columns
    logprobs = None if outputs.logprobs is None else TokenLogprobs.of_columns(outputs.logprobs)
    start = 0
    for entry, key in enumerate(outputs.keys):
        end = start + outputs.token_counts[entry]
        described = None if logprobs is None else logprobs[start:end]
        prompt, index = prompts.get(key), outputs.indexes[entry]
        if prompt is not None and not prompt.finished and not prompt.texts[index].finished:
            prompt.crashes = 0
            delta = CompletionDelta(index, "", outputs.token_ids[start:end], described)
            delta.stop_reason = outputs.stop_reasons[entry]
            if index == 0:  # other sequences report the prompt of sequence 0 as cached
                prompt.num_cached_tokens = max(prompt.num_cached_tokens, outputs.cached_tokens[entry])
                prompt.part.cached_tokens = prompt.num_cached_tokens
            if ended := prompt.advance(delta, outputs.finish_reasons[entry], now):
                stops += [(key, at) for at in ended]
        start = end
    for key, vector in outputs.pooled:
        if (prompt := prompts.get(key)) is not None and not prompt.finished:
            prompt.finish(vector, now)
    for key, error in outputs.errors:
        if (prompt := prompts.get(key)) is not None:
            prompt.fail(error)
    return stops
