"""LoadReport: an engine's load in one line a period, in the words of vLLM's users; nothing while it is idle."""

from __future__ import annotations

from raylm.messages import Counters, EngineStats

PERIOD_S = 10.0


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
