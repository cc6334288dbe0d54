"""Converts a raw record (``Record.raw``) to phases, whose durations add up to the request's, and their causes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Raw = dict[str, Any]
JSON = dict[str, Any]

# A description of each phase, in the order of a request's life.
PHASES = {
    "admission": "waits for admission",
    "body": "the body is received",
    "parse": "the fields are parsed and checked",
    "template": "the chat template is rendered",
    "tokenize": "the text is tokenized",
    "compile": "the structured output is compiled",
    "route": "an engine is chosen",
    "send": "is sent to the engine",
    "queue": "waits in the engine's queue",
    "prefill": "the prompt is computed",
    "delivery": "the first token is sent back",
    "decode": "the answer is generated",
    "preempted": "was preempted for another request and waits",
    "recompute": "preempted tokens are computed again",
    "replay": "the engine was lost, another engine takes over",
    "write": "the client reads the rest of the answer",
    "background": "the answer is kept for later",
}
_CAUSE_OF = {
    "admission": "queue", "send": "queue", "queue": "queue", "body": "slow_upload", "parse": "text", "template": "text",
    "tokenize": "text", "compile": "compile", "route": "text", "prefill": "prompt", "delivery": "decode",
    "decode": "decode", "preempted": "preemption", "recompute": "preemption", "replay": "engine_lost",
    "write": "slow_client", "background": "slow_client",
}  # fmt: skip


def summary(raw: Raw) -> JSON:
    """One entry in a list of requests. Times are seconds since the epoch, ``ttft_s`` and ``seconds`` are durations."""
    parts = raw["parts"]
    first = min((part["first_token"] for part in parts if part["first_token"] is not None), default=None)
    routings = [routing for part in parts for routing in part["routings"]]
    return {
        "id": raw["id"],
        "key": raw["key"],
        "path": raw["path"],
        "model": raw["model"],
        "stream": raw["stream"],
        "state": _state(raw),
        "status": raw["status"],
        "outcome": _outcome(raw),
        "received": raw["received"],
        "ended": raw["ended"],
        "seconds": None if raw["ended"] is None else round(raw["ended"] - raw["received"], 6),
        "ttft_s": None if first is None else round(first - raw["received"], 6),
        "prompt_tokens": sum(part["prompt_tokens"] for part in parts),
        "cached_tokens": sum(part["cached_tokens"] for part in parts),
        "completion_tokens": sum(sum(part["drawn_tokens"]) for part in parts),
        "decode_s": round(sum(_decode_s(part) for part in parts), 6),
        "preemptions": sum(event[1] == "preempted" for part in parts for event in part["events"]),
        "engine": routings[-1][1] if routings else "",
        "ingress": raw["ingress"],
    }


def _decode_s(part: Raw) -> float:
    first, last = part["first_token"], part["last_token"]
    return 0.0 if first is None or last is None else float(last - first)


def _state(raw: Raw) -> str:
    """The current phase of a request in flight, else "ended"."""
    return "ended" if raw["ended"] is not None else str(_points(raw)[-1][1])


def _outcome(raw: Raw) -> str:
    """The result of the request: its finish reasons, or the error."""
    if raw["ended"] is None:
        return ""
    errors = [raw["error"], *(part["error"] for part in raw["parts"])]
    if error := next(filter(None, errors), ""):
        return str(error)
    reasons = {reason or "abort" for part in raw["parts"] for reason in part["finish_reasons"]}
    return ", ".join(sorted(reasons)) or "done"


def timeline(raw: Raw, now: float) -> JSON:
    """A request's summary, its phases from arrival to end (or ``now``), and the causes of its duration."""
    found = phases(raw, now)
    return summary(raw) | {
        "wall_s": round((raw["ended"] or now) - raw["received"], 6),
        "phases": found,
        "causes": causes(raw, found),
        "first_byte_s": _since(raw, raw["first_byte"]),
        "last_byte_s": _since(raw, raw["last_byte"]),
        "blocked_s": round(raw["blocked_s"], 6),
        "parts": [_part(raw, part) for part in raw["parts"]],
    }


def _since(raw: Raw, at: float | None) -> float | None:
    return None if at is None else round(at - raw["received"], 6)


# ---------------------------------------------------------------- phases


def phases(raw: Raw, now: float) -> list[JSON]:
    """The phases in order, without gaps: their seconds add up to the duration of the request.

    If there are several prompts and sequences, the phases are those of the one that ended last. An engine on another
    node has its own clock: its times are moved into the possible range.
    """
    end = raw["ended"] or now
    found: list[JSON] = []
    at, points = raw["received"], _points(raw)
    for place, (_, phase) in enumerate(points):
        until = max(at, min(end, points[place + 1][0])) if place + 1 < len(points) else end
        if found and found[-1]["phase"] == phase:
            found[-1]["seconds"] += until - at
        elif until > at or place + 1 == len(points):
            found.append({"phase": phase, "start_s": at - raw["received"], "seconds": until - at})
        at = until
    return [one | {"start_s": round(one["start_s"], 6), "seconds": round(one["seconds"], 6)} for one in found]


def _points(raw: Raw) -> list[tuple[float, str]]:
    """(time, phase that begins then), in order of time."""
    points = [(raw["received"], "admission"), *((at, phase) for phase, at in raw["marks"])]
    part = _last_part(raw)
    if part is None:
        return _with_write(raw, points)
    begun = part["marks"][0][1] if part["marks"] else points[-1][0]
    points = [point for point in points if point[0] <= begun]
    points += [(at, phase) for phase, at in part["marks"]]
    points += _engine_points(part)
    if part["first_token"] is not None:
        points.append((part["first_token"], "decode"))
        points = [(at, "decode" if phase == "delivery" and at > part["first_token"] else phase) for at, phase in points]
    points.sort(key=lambda point: point[0])
    if part["last_token"] is not None:
        points = [point for point in points if point[0] < part["last_token"]]
        points.append((part["last_token"], "write"))
    return points


def _with_write(raw: Raw, points: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Points of an answer without a part on an engine."""
    return points if raw["first_byte"] is None else [*points, (raw["first_byte"], "write")]


def _last_part(raw: Raw) -> Raw | None:
    """The part that ended last, or has not ended yet."""
    parts: list[Raw] = raw["parts"]
    return max(parts, key=lambda part: part["last_token"] or part["ended"] or float("inf"), default=None)


def _engine_points(part: Raw) -> Iterator[tuple[float, str]]:
    """Points from the engine's events, for the sequence that ended last. Sequence 0 computes the shared prompt."""
    index = _last_index(part)
    events = [event for event in part["events"] if event[0] in (0, index)]
    begun = False  # whether the shared prompt is computed
    again = False
    for place, (at_index, kind, at, *_) in enumerate(events):
        if index and begun and at_index == 0:
            continue
        if kind == "taken_in":
            held = any(event[1] == "compiled" for event in events[place + 1 :])
            yield at, "compile" if held else "queue"
            again = begun
        elif kind == "compiled":
            yield at, "queue"
        elif kind == "scheduled":
            yield at, "recompute" if again else "prefill"
        elif kind == "token":
            yield at, "decode" if again or at_index else ("delivery" if index == 0 else "queue")
            begun, again = True, False
        elif kind == "preempted":
            yield at, "preempted"
            again = True


def _last_index(part: Raw) -> int:
    ends = [(at, index) for index, kind, at, *_ in part["events"] if kind == "ended"]
    return int(max(ends)[1]) if ends else 0


# ---------------------------------------------------------------- causes


def causes(raw: Raw, found: list[JSON]) -> list[JSON]:
    """The causes of the duration, the longest first, each with an explanation."""
    seconds: dict[str, float] = {}
    for phase in found:
        cause = _CAUSE_OF[phase["phase"]]
        seconds[cause] = seconds.get(cause, 0.0) + phase["seconds"]
    part = _last_part(raw)
    if part is not None:
        missed = _missed_tokens(part)
        computed = part["prompt_tokens"] - part["cached_tokens"]
        if missed and computed > 0:  # the share of the prompt's time that a warm cache would have saved
            share = min(1.0, missed / computed)
            seconds["cold_cache"] = seconds.get("prompt", 0.0) * share
            seconds["prompt"] = seconds.get("prompt", 0.0) * (1 - share)
    named = sorted(seconds.items(), key=lambda item: -item[1])
    return [
        {"cause": cause, "seconds": round(value, 6), "explanation": _explain(cause, raw, part)}
        for cause, value in named
        if value > 0
    ]


def _missed_tokens(part: Raw) -> int:
    """Prompt tokens that were computed, although another engine was known to have them in its cache."""
    if not part["routings"]:
        return 0
    _, engine, scores = part["routings"][0]
    here = [score[2] for score in scores if score[0] == engine]
    return int(max(0, here[0] - min(score[2] for score in scores))) if here else 0


def _explain(cause: str, raw: Raw, part: Raw | None) -> str:
    """A sentence that explains the cause."""
    if cause == "slow_client":
        return f"The client read the answer slowly: the server waited {raw['blocked_s']:.3f} s for it."
    if part is None:
        return {"queue": "The request waited for admission.", "slow_upload": "The body arrived slowly."}.get(cause, "")
    computed = part["prompt_tokens"] - part["cached_tokens"]
    if cause == "queue":
        return f"The request waited in a queue{_company(part)}."
    if cause == "cold_cache":
        what = f"{_missed_tokens(part)} of {part['prompt_tokens']} prompt tokens were cached on another engine"
        return f"{what}, which was predicted to answer later, so they were computed."
    if cause == "prompt":
        return f"{computed} of {part['prompt_tokens']} prompt tokens were computed; the others were cached."
    if cause == "preemption":
        return _explain_preemption(part)
    if cause == "compile":
        return "The structured output (a schema, a grammar or a regular expression) was compiled first."
    if cause == "decode":
        return f"{sum(part['drawn_tokens'])} tokens were generated."
    if cause == "engine_lost":
        return "The engine was lost or ended; another engine continued the request."
    return "The body arrived slowly." if cause == "slow_upload" else "The fields and the text were parsed."


def _company(part: Raw) -> str:
    """The number of sequences that waited before this one, as text; "" if unknown."""
    waits = [event for event in part["events"] if event[1] == "taken_in"]
    return f" behind {waits[0][4]} waiting sequences" if waits and waits[0][4] else ""


def _explain_preemption(part: Raw) -> str:
    taken = [event for event in part["events"] if event[1] == "preempted"]
    by = ", ".join(sorted({event[5] or "another request" for event in taken})[:3])
    return (
        f"The request was preempted {len(taken)} times for {by}, because the KV pool was full; "
        f"{_tokens_again(part)} tokens were computed again."
    )


def _tokens_again(part: Raw) -> int:
    """Tokens that were computed a second time."""
    again, lost = 0, {}
    for index, kind, _, _, tokens, _ in part["events"]:
        if kind == "preempted":
            lost[index] = tokens
        elif kind == "scheduled" and index in lost:
            again += max(0, lost.pop(index) - tokens)
    return again


# ---------------------------------------------------------------- parts and traces


def _part(raw: Raw, part: Raw) -> JSON:
    """One prompt: its parameters, its route and the reason for it, and the steps of each of its sequences."""
    return {
        "request_id": part["request_id"],
        "adapter": part["adapter"],
        "prompt_tokens": part["prompt_tokens"],
        "cached_tokens": part["cached_tokens"],
        "max_tokens": part["max_tokens"],
        "completion_tokens": part["drawn_tokens"],
        "finish_reasons": part["finish_reasons"],
        "error": part["error"],
        "first_token_s": _since(raw, part["first_token"]),
        "last_token_s": _since(raw, part["last_token"]),
        "tokens_computed_again": _tokens_again(part),
        "routes": [_routing(raw, *routing) for routing in part["routings"]],
        "events": [
            {"sequence": index, "event": kind, "at_s": _since(raw, at), "step": step, "tokens": tokens}
            | ({"by": by} if by else {})
            for index, kind, at, step, tokens, by in part["events"]
        ],
        "events_left_out": part["dropped_events"],
        "steps": list(_ranges(raw, part)),
    }


def _routing(raw: Raw, at: float, engine: str, scores: list[Any]) -> JSON:
    names = (
        "engine", "predicted_s", "tokens_to_compute", "queued_tokens", "sequences", "waiting", "told_s_ago",
    )  # fmt: skip
    considered = sorted((dict(zip(names, score, strict=True)) for score in scores), key=lambda one: one["predicted_s"])
    why = "It was the only engine." if not considered else "It had the lowest predicted time, or nearly so."
    return {"at_s": _since(raw, at), "engine": engine, "reason": why, "considered": considered}


def _ranges(raw: Raw, part: Raw) -> Iterator[JSON]:
    """The steps of each sequence as ranges. ``tokens`` is the number of tokens computed in a range."""
    begun: dict[int, tuple[str, float, int, int]] = {}
    interrupted: set[int] = set()
    for index, kind, at, step, tokens, _ in part["events"]:
        doing, since, first, computed = begun.pop(index, ("", at, step + 1, 0))
        if step >= first:
            yield {
                "sequence": index,
                "doing": doing,
                "start_s": _since(raw, since),
                "end_s": _since(raw, at),
                "first_step": first,
                "last_step": step,
                "tokens": max(0, tokens - (kind != "preempted") - computed),
            }
        if kind == "preempted":
            interrupted.add(index)
        elif kind == "scheduled":
            begun[index] = ("recompute" if index in interrupted else "prefill", at, step, tokens)
        elif kind == "token":
            begun[index] = ("decode", at, step + 1, tokens - 1)


def trace(raw: Raw, now: float) -> JSON:
    """Chrome trace events, for Perfetto: a row for the phases, and a row for each sequence on its engine."""
    found = timeline(raw, now)
    origin = raw["received"] * 1e6
    events: list[JSON] = [_named("process_name", 0, f"request {raw['id']}"), _named("thread_name", 0, "phases")]
    events += [
        _slice(one["phase"], 0, origin, one["start_s"], one["seconds"], {"what": PHASES[one["phase"]]})
        for one in found["phases"]
    ]
    row = 0
    for part in found["parts"]:
        rows: dict[int, int] = {}
        for one in part["steps"]:
            if one["sequence"] not in rows:
                row += 1
                rows[one["sequence"]] = row
                events.append(_named("thread_name", row, f"{part['request_id']} sequence {one['sequence']}"))
            seconds = max(0.0, one["end_s"] - one["start_s"])
            args = {name: one[name] for name in ("first_step", "last_step", "tokens")}
            events.append(_slice(one["doing"], rows[one["sequence"]], origin, one["start_s"], seconds, args))
    for name in ("first_byte_s", "last_byte_s"):
        if found[name] is not None:
            instant = {"name": name[:-2], "ph": "i", "s": "p", "pid": 1, "tid": 0, "ts": origin + found[name] * 1e6}
            events.append(instant)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"id": raw["id"], "path": raw["path"]}}


def _named(what: str, row: int, name: str) -> JSON:
    return {"name": what, "ph": "M", "pid": 1, "tid": row, "args": {"name": name}}


def _slice(name: str, row: int, origin: float, start_s: float, seconds: float, args: JSON) -> JSON:
    times = {"ts": round(origin + start_s * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return {"name": name, "ph": "X", "cat": "request", "pid": 1, "tid": row, "args": args} | times
