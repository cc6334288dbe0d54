"""GrammarCompiler: checks the forms that callers ask of answers, on threads, within a bound, each form once."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.errors import InvalidRequestError
from raylm.params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_LIMIT_S = 5.0
MAX_KEPT = 256
MAX_KEPT_CHARS = 2**17
_THREADS = 2
_SHOWN_CHARS = 200

Verdict = tuple[str, str | None]  # a grammar, and why it cannot be used


class GrammarCompiler:
    """Turns StructuredOutputs into grammars that a worker can use; llguidance is loaded when first asked for.

    Its own limits bound the work of a compilation, so a thread is never lost; ``COMPILE_LIMIT_S`` bounds the wait.
    The last ``MAX_KEPT`` verdicts on what has at most ``MAX_KEPT_CHARS`` characters are kept, good and bad ones.
    """

    def __init__(self, path: Path, eos_token_ids: tuple[int, ...]) -> None:
        self._path = path
        self._eos_token_ids = eos_token_ids
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "raylm-grammar")

    async def compile(self, spec: StructuredOutputs) -> str:
        """The grammar of ``spec``; InvalidRequestError if it is wrong, allows nothing, or takes too long."""
        if not self._eos_token_ids:
            raise _refused(spec, "this model has no token that ends an answer.")
        key = _key(spec)
        verdict = self._verdicts.pop(key, None) or await self._work(spec)
        if len(key[1]) + len(verdict[0]) <= MAX_KEPT_CHARS:
            self._verdicts[key] = verdict
            if len(self._verdicts) > MAX_KEPT:
                self._verdicts.popitem(last=False)
        grammar, fault = verdict
        if fault is not None:
            raise _refused(spec, fault)
        return grammar

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _work(self, spec: StructuredOutputs) -> Verdict:
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._judge, spec)
        try:
            return await asyncio.wait_for(asyncio.shield(compiling), COMPILE_LIMIT_S)
        except TimeoutError:
            compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise _refused(spec, f"it was not compiled within {COMPILE_LIMIT_S:g} s.") from None

    def _judge(self, spec: StructuredOutputs) -> Verdict:
        from raylm.grammar import grammar_of, matcher

        try:
            grammar = grammar_of(spec)
        except (ValueError, RecursionError) as error:
            return "", _clipped(str(error))
        first = matcher(self._tokenizer, grammar)
        mask = first.compute_bitmask() if not first.is_error() else b""
        if first.is_error():
            return "", _clipped(first.get_error())
        return grammar, None if any(mask) else "it allows no answer."

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from raylm.grammar import load_tokenizer

        return load_tokenizer(self._path, self._eos_token_ids)


def _key(spec: StructuredOutputs) -> tuple[str, str]:
    """What is asked, whatever field it was asked by."""
    given = {"json": spec.json, "choice": spec.choice, "regex": spec.regex, "grammar": spec.grammar}
    kind, form = next(((kind, form) for kind, form in given.items() if form is not None), ("json_object", ""))
    return kind, form if isinstance(form, str) else json.dumps(form)


def _clipped(fault: str) -> str:
    line = " ".join(fault.split("\n<non-verbose")[0].split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…"


def _refused(spec: StructuredOutputs, fault: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{spec.param}': {fault}", param=spec.param)
