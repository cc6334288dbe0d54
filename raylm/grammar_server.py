"""The grammar server: a fork server that checks each grammar in a child. A child may crash.

``python -m raylm.grammar_server FD CHECKPOINT EOS...`` loads the tokenizer once, and then accepts connections on the
Unix socket FD. It ends when the socket is closed. It imports neither torch nor ray, and has one thread, so that it may
fork. A child reads one job from its connection, writes a byte when it starts, and then its verdict. It ends if it
exceeds its limits, if its stack overflows, or if the other side closes the connection.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from raylm.fork_server import die_with, outlive, read_frame, serve, take_signals
from raylm.params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK_BYTES = 1 << 20
"""Stack of the thread that checks a grammar: half of the smallest stack of a worker's threads."""
WALL_S = 30.0
MAX_BUILD_S = 0.4
"""Limit in CPU seconds for building the matcher, which the worker repeats."""
MAX_MASK_S = 0.02
"""Limit in CPU seconds for the mask of one token. Every sequence of a step waits for it."""

_WALKS, _STEPS, _TRIES = 3, 16, 4
_SHOWN_CHARS = 200

Verdict = tuple[str, str | None]  # (grammar, why it cannot be used or None)


def judge(tokenizer: LLTokenizer, spec: StructuredOutputs) -> Verdict:
    """Compile ``spec`` and generate several random answers."""
    from raylm.grammar import grammar_of, matcher

    try:
        grammar = grammar_of(spec)
    except (ValueError, RecursionError) as error:
        return "", _clipped(str(error))
    started = time.thread_time()
    first = matcher(tokenizer, grammar)
    if first.is_error():
        return "", _clipped(first.get_error())
    if time.thread_time() - started > MAX_BUILD_S:
        return "", f"it is too complex: it takes more than {MAX_BUILD_S:g} s to compile."
    draw = random.Random(0)
    faults = (_walk(first.deep_copy(), draw) for _ in range(_WALKS))
    return grammar, next(filter(None, faults), None)


def _walk(matcher: LLMatcher, draw: random.Random) -> str | None:
    """Generate an answer of random tokens. Prefers tokens that do not end it. Returns what is wrong, or None."""
    for step in range(_STEPS):
        before = matcher.deep_copy()
        mask, seconds = _mask(matcher, before)
        if matcher.is_error():
            return f"it is too complex to follow: {_clipped(matcher.get_error())}"
        if seconds > MAX_MASK_S:
            return f"it is too complex: one token of the answer takes more than {MAX_MASK_S * 1e3:g} ms."
        if not any(mask):
            return None if step else "it allows no answer."
        for _ in range(_TRIES):
            matcher = before.deep_copy()
            matcher.consume_token(_any_of(mask, draw))
            if not matcher.is_stopped() or matcher.is_error():
                break
        else:
            return None
    return None


def _mask(matcher: LLMatcher, before: LLMatcher) -> tuple[bytes, float]:
    """The next mask, and its CPU seconds. If these exceed the limit, the minimum of two tries."""
    started = time.thread_time()
    mask = matcher.compute_bitmask()
    seconds = time.thread_time() - started
    if seconds > MAX_MASK_S and not matcher.is_error():
        again = before.deep_copy()
        started = time.thread_time()
        again.compute_bitmask()
        seconds = min(seconds, time.thread_time() - started)
    return mask, seconds


def _any_of(mask: bytes, draw: random.Random) -> int:
    """A random token of a mask that is not empty."""
    start = draw.randrange(len(mask))
    at = next(at for at in chain(range(start, len(mask)), range(start)) if mask[at])
    return 8 * at + draw.choice([bit for bit in range(8) if mask[at] >> bit & 1])


def _clipped(fault: str) -> str:
    line = " ".join(fault.split("\n<non-verbose")[0].split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…"


# ---------------------------------------------------------------- processes


def main(descriptor: int, path: Path, eos_token_ids: tuple[int, ...]) -> None:
    from raylm.grammar import load_tokenizer

    take_signals()
    serve(descriptor, partial(_live, load_tokenizer(path, eos_token_ids)))


def _live(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    """Run a child."""
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    body = read_frame(connection)
    if body is None:
        return
    connection.sendall(b"\0")
    die_with(connection)
    job = json.loads(body)
    signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])
    os.nice(job["nice"])
    verdict = _on_small_stack(lambda: judge(tokenizer, StructuredOutputs(**job["form"])))
    outlive(connection)
    connection.sendall(json.dumps(verdict).encode())


def _on_small_stack(work: Callable[[], Verdict]) -> Verdict:
    """Return ``work()``, called on a thread with a stack of ``STACK_BYTES``."""
    results: list[Verdict] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), tuple(map(int, sys.argv[3:])))
