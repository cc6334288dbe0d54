"""Writes requests as a trace, which `raylm simulate` and `raylm bench` can replay."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from raylm.bench.prompts import block_hashes
from raylm.bench.report import LoadResult
from raylm.errors import ConfigError


def write_trace(path: Path, loads: Iterable[LoadResult]) -> int:
    """Write all requests of all loads in the order of sending, in the format of raylm/simulate/trace.py.

    A failed request has the requested number of tokens, and its kind of error as ``finish``. Returns the number of
    requests.

    Raises:
        ConfigError: the file cannot be written.
    """
    asked = [(question, answer, load.scale) for load in loads for question, answer in load.asked]
    asked.sort(key=lambda one: one[1].sent)
    lines = []
    for question, answer, scale in asked:
        estimate = round(len(question.prompt) * scale.per_word + scale.overhead)
        line = {
            "arrival": round(answer.sent - asked[0][1].sent, 6),
            "prompt_tokens": max(1, answer.prompt_tokens or estimate),
            "output_tokens": max(1, question.output_tokens if answer.error else answer.tokens),
            "blocks": block_hashes(question, scale),
            "block_size": question.block_size,
            "key": question.key,
            "finish": answer.kind or answer.finish,
            "ttft_s": round(answer.ttft, 6),
            "duration_s": round(answer.total, 6),
        }
        if question.session:
            line |= {"session": question.session, "think_s": round(question.think_s, 6)}
        lines.append(json.dumps(line) + "\n")
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--record {path}: {error.strerror}") from None
    return len(lines)
