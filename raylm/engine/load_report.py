"""LoadReport: an engine's load in one line a period, in the words of vLLM's users; Pace: what Serve scales by."""

from __future__ import annotations

from raylm.engine.deployment.autoscaling import EngineLoad
from raylm.messages import Counters, EngineStats

PERIOD_S = 10.0
_FULL = 0.9  # of the KV cache: what waits then waits for blocks


class LoadReport:
    """Of one EngineCore; rates are over the time since the last call."""

    def __init__(self) -> None:
        self._before = Counters()

    def line(self, stats: EngineStats, seconds: float) -> str | None:
        """None where nothing was computed for ``seconds`` and nothing is to be."""
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
    """Of one EngineCore, by how far it came between two calls."""

    def __init__(self) -> None:
        self._before, self._at = EngineStats(), 0.0

    def load(self, stats: EngineStats, now: float) -> EngineLoad:
        """``stats`` tell of all clients as ``others``. Unless it was busy throughout, its pace is a single token's."""
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
