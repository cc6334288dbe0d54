"""OutputProcessor: takes an engine's column batches apart, and owns the text side of every open request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from itertools import islice

from raylm.errors import RayLMError
from raylm.frontend.answers.answer_format import AnswerFormat, AnswerReader
from raylm.frontend.output_queue import OutputQueue
from raylm.frontend.outputs import CompletionDelta, TokenLogprob, read_logprobs
from raylm.frontend.telemetry import Telemetry
from raylm.frontend.text.sequence_text import SequenceText
from raylm.frontend.text.tokenizer import Tokenizer
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, Logprobs

logger = logging.getLogger("raylm.frontend")


class OpenRequest:
    """One open request: its sequences, its caller's queue, the times of its tokens."""

    __slots__ = ("last_token_times", "num_finished", "queue", "readers", "request", "texts")

    def __init__(self, request: EngineCoreRequest, tokenizer: Tokenizer, form: AnswerFormat | None = None) -> None:
        self.request = request
        self.queue = OutputQueue(request)
        self.texts = [SequenceText(tokenizer, request.params) for _ in range(request.params.n)]
        self.readers: list[AnswerReader] | None = None if form is None else [form.reader() for _ in self.texts]
        self.last_token_times = [0.0] * request.params.n
        self.num_finished = 0

    @property
    def finished(self) -> bool:
        """Whether all of its sequences have ended."""
        return self.num_finished == len(self.texts)


class OutputProcessor:
    """One for all engines; a request is known by its key, unique in this process.

    A sequence that a stop string ends still runs in the engine, until that is told: its further tokens are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, telemetry: Telemetry) -> None:
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._open: dict[int, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """Requests whose callers still want news."""
        return len(self._open)

    def open(self, request: EngineCoreRequest, form: AnswerFormat | None = None) -> OutputQueue:
        """Expect outputs of ``request``, in which ``form`` says what to find; its caller reads the queue."""
        opened = self._open[request.key] = OpenRequest(request, self._tokenizer, form)
        return opened.queue

    def close(self, key: int) -> bool:
        """The caller wants no more; returns whether the engine may still be at work on it."""
        opened = self._open.pop(key, None)
        if opened is None:
            return False
        self._count_unfinished(opened, "abort")
        return True

    def fail(self, keys: Iterable[int], error: RayLMError) -> None:
        """End requests with an error that their callers see at once."""
        for key in keys:
            opened = self._open.pop(key, None)
            if opened is not None:
                opened.queue.fail(error)
                self._count_unfinished(opened, "error")

    def _count_unfinished(self, opened: OpenRequest, reason: str) -> None:
        for text in opened.texts:
            if not text.finished:
                self._telemetry.finished(reason, 0.0)

    def process(self, outputs: EngineCoreOutputs) -> list[tuple[int, int]]:
        """Hand every entry to its caller's queue; return the sequences (key, index) that the engine can give up.

        What goes wrong with one request ends that request alone.
        """
        now = time.time()
        stops: list[tuple[int, int]] = []
        for key, columns in outputs.prompt_logprobs:
            if key in self._open:
                self._add_prompt_logprobs(self._open[key], columns)
        logprobs = None if outputs.logprobs is None else read_logprobs(outputs.logprobs)
        start = 0
        for entry, key in enumerate(outputs.keys):
            end = start + outputs.token_counts[entry]
            entries = None if logprobs is None else list(islice(logprobs, end - start))
            opened = self._open.get(key)
            if opened is not None:
                ended = self._advance(opened, outputs, entry, outputs.token_ids[start:end], entries, now)
                stops += [(key, index) for index in ended]
                if opened.finished:
                    del self._open[key]
            start = end
        for key, vector in outputs.pooled:
            self._finish_pooled(key, vector, now)
        for key, error in outputs.errors:
            self.fail([key], error)
        return stops

    def _advance(
        self,
        opened: OpenRequest,
        outputs: EngineCoreOutputs,
        entry: int,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        now: float,
    ) -> Iterable[int]:
        """Take in the news of one sequence; returns the indexes of those that run on for nobody."""
        index, ended = outputs.indexes[entry], outputs.finish_reasons[entry]
        text = opened.texts[index]
        if text.finished:
            return ()
        try:
            delta = self._read(opened, outputs, entry, token_ids, logprobs)
        except Exception:
            logger.exception("request %s: its tokens could not be made text", opened.request.request_id)
            opened.num_finished = len(opened.texts)
            opened.queue.fail(RayLMError("The answer could not be decoded."))
            self._count_unfinished(opened, "error")
            return range(len(opened.texts))
        if index == 0:  # the others find the prompt that this one has computed
            opened.queue.num_cached_tokens = max(opened.queue.num_cached_tokens, outputs.cached_tokens[entry])
        self._measure(opened, delta, now)
        opened.num_finished += delta.finish_reason is not None
        opened.queue.put(delta, finished=opened.finished)
        return (index,) if delta.finish_reason is not None and ended is None else ()

    def _read(
        self,
        opened: OpenRequest,
        outputs: EngineCoreOutputs,
        entry: int,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
    ) -> CompletionDelta:
        """What the tokens of one sequence come to: text, thoughts, calls, and whether it is over."""
        index, ended = outputs.indexes[entry], outputs.finish_reasons[entry]
        text = opened.texts[index]
        piece, count, stop = text.push(token_ids, ended)
        delta = CompletionDelta(index, piece, token_ids[:count], finish_reason=ended)
        delta.stop_reason = outputs.stop_reasons[entry]
        if opened.request.params.logprobs is not None:
            delta.logprobs = (logprobs or [])[:count]
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        if opened.readers is not None:
            opened.readers[index].read(delta)
            text.finished = delta.finish_reason is not None
        return delta

    def _finish_pooled(self, key: int, vector: bytes, now: float) -> None:
        opened = self._open.pop(key, None)
        if opened is not None:
            self._telemetry.finished("stop", now - opened.request.arrival_time)
            opened.queue.finish(vector)

    def _measure(self, opened: OpenRequest, delta: CompletionDelta, now: float) -> None:
        arrival, last = opened.request.arrival_time, opened.last_token_times[delta.index]
        if delta.token_ids:
            self._telemetry.tokens(len(delta.token_ids), now - (last or arrival), first=not last)
            opened.last_token_times[delta.index] = now
        if delta.finish_reason is not None:
            self._telemetry.finished(delta.finish_reason, now - arrival)

    def _add_prompt_logprobs(self, opened: OpenRequest, logprobs: Logprobs) -> None:
        """They come once, with the first token; nothing comes before the prompt's first token, so it has none."""
        missing = len(opened.request.prompt_token_ids) - len(logprobs.counts)
        opened.queue.put_prompt_logprobs(lambda: read_prompt_logprobs(logprobs, missing), len(logprobs.token_ids))


def read_prompt_logprobs(columns: Logprobs, missing: int) -> list[TokenLogprob | None]:
    """One entry a prompt token, None for the first ``missing`` ones and where nothing is known."""
    return [*[None] * missing, *(entry if entry.rank else None for entry in read_logprobs(columns))]
