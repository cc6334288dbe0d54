"""LoadReport: logs an engine's load once a period, in vLLM's terms. Pace: the load by which Serve scales engines."""

from __future__ import annotations

from raylm.engine.deployment.autoscaling import EngineLoad
from raylm.messages import Counters, EngineStats

PERIOD_S = 10.0
_FULL = 0.9  # share of the KV cache above which waiting sequences are taken to wait for blocks


class LoadReport:
    """Formats the load of one EngineCore. Rates cover the time since the last call."""

    def __init__(self) -> None:
        self._before = Counters()

    def line(self, stats: EngineStats, seconds: float) -> str | None:
        """The log line for the last ``seconds``, or None if the engine was idle and still is."""
        before, now = self._before, stats.counters
        self._before = now
        if now == before and not stats.running and not stats.waiting:
            return None
        prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
        generation = (now.generation_tokens - before.generation_tokens) / seconds
        parts = [
            f"prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s",
            f"running {stats.running} reqs, waiting {stats.waiting} reqs",
            f"KV cache usage {stats.kv_usage:.1%}",
        ]
        if queries := now.prefix_queries - before.prefix_queries:
            parts.append(f"prefix cache hit rate {(now.prefix_hits - before.prefix_hits) / queries:.1%}")
        return ", ".join(parts)


class Pace:
    """Measures the time between two tokens of one EngineCore, by the steps between two calls."""

    def __init__(self) -> None:
        self._before, self._at = EngineStats(), 0.0

    def load(self, stats: EngineStats, now: float) -> EngineLoad:
        """The load to report to Serve at ``now``, in seconds of a monotonic clock.

        ``stats.others`` must cover all clients. If the engine was not busy at both calls, ``itl_s`` is the time of a
        step of one token.
        """
        before, seconds = self._before, now - self._at
        self._before, self._at = stats, now
        steps = stats.steps - before.steps
        busy = before.running > 0 and stats.running > 0 and steps > 0
        return EngineLoad(
            sequences=stats.others.sequences,
            places=stats.running + (0 if stats.waiting and stats.kv_usage > _FULL else stats.places),
            queued_s=stats.others.queued_tokens * stats.token_s,
            step_s=stats.step_s,
            itl_s=seconds / steps if busy else stats.step_s,
        )
