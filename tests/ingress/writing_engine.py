"""WritingEngine: a played engine that draws the texts of this module."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from tokenizers import Tokenizer

from raylm.checkpoint import EMBEDDED
from raylm.messages import EngineCoreRequest, FinishReason, Logprobs, ParkedTokens
from tests.frontend.played_engine import PlayedEngine

TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
CALLS = "".join(
    f'<tool_call>\n{{"name": "f", "arguments": {{"city": "{city}", "deep": {{"a": [1, "}}"]}}}}}}\n</tool_call>\n'
    for city in ("Köln", "Bonn")
)
SAID = [
    "A KV cache keeps the keys and values.",
    "wörld 🙂 EN and END of it, which nobody sees",
    f"<think>\nHm, E EN.\n</think>\n\nI ask. \n{CALLS} And then?",
    "\n\n  E\nEN\n",
    "",
    "<think>\nonly thoughts EN",
    "🙂🙂 <tool_call>\nno call",
    f"<think>\nHm.\n</think>\n\nI ask.\n{CALLS}",
]


class WritingEngine(PlayedEngine):
    """Sequence ``index`` of a request with a ``seed`` draws SAID[(seed + index) % 8], in pieces of random sizes.

    ``first``, if given, replaces the seed.

    If it ``parks``, it returns a random number of parked tokens of each sequence, or None. With ``never_lost`` it never
    returns None.
    """

    def __init__(self, engine_id: str, random: Random, fingerprint: str = "fp_1") -> None:
        super().__init__(engine_id, max_model_len=4096, vocab_size=TOKENIZER.get_vocab_size(), fingerprint=fingerprint)
        self.random = random
        self.parks = self.never_lost = False
        self.given = 0  # parked tokens
        self.first: int | None = None

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        params = request.params
        reasons, rest = self._ends(request)
        for index, drawn in enumerate(request.drawn):
            if drawn is None:
                del rest[index]
            else:
                assert rest[index][: len(drawn)] == list(drawn)
                rest[index] = rest[index][len(drawn) :]
        while rest:
            index = self.random.choice(sorted(rest))
            size = self.random.choice([1, 1, 1, 2, 3, 9])
            ids, rest[index] = rest[index][:size], rest[index][size:]
            ended = None if rest[index] else reasons[index]
            columns: dict[str, Any] = {}
            if params.logprobs is not None:
                columns["logprobs"] = logprobs(ids, params.logprobs)
            self.say((request.key, index, ids, ended), **columns)
            if ended is not None:
                del rest[index]

    def _ends(self, request: EngineCoreRequest) -> tuple[dict[int, FinishReason], dict[int, list[int]]]:
        """The end reason and all the tokens of each sequence."""
        params, rest = request.params, {}
        assert params.max_tokens is not None
        assert params.seed is not None
        for index in range(params.n):
            text = SAID[((params.seed if self.first is None else self.first) + index) % len(SAID)]
            rest[index] = [*TOKENIZER.encode(text, add_special_tokens=False).ids, request.eos_token_ids[0]]
        limit = params.max_tokens
        reasons: dict[int, FinishReason] = {
            index: "stop" if len(ids) <= limit else "length" for index, ids in rest.items()
        }
        return reasons, {index: ids[:limit] for index, ids in rest.items()}

    async def take_parked(self, request: EngineCoreRequest) -> ParkedTokens | None:
        if not self.parks or (self.random.random() < 0.3 and not self.never_lost):
            return None
        reasons, every = self._ends(request)
        drawn = {index: ids[: self.random.choice([0, 1, 5, len(ids)])] for index, ids in every.items()}
        self.given += sum(map(len, drawn.values()))
        ends = [reasons[index] if ids == every[index] else None for index, ids in drawn.items()]
        return ParkedTokens([*drawn.values()], ends, [None] * len(ends))

    async def outputs(self) -> Any:
        async for said in super().outputs():
            yield said
            for _ in range(self.random.choice([0, 1, 5])):  # meanwhile the caller may read
                await asyncio.sleep(0)


def logprobs(ids: list[int], num_top: int) -> Logprobs:
    rows = [[token, *range(num_top)] for token in ids]
    values = [-0.25 * place - token / 1024 for token in ids for place in range(1 + num_top)]
    return Logprobs([1 + num_top] * len(ids), [id_ for row in rows for id_ in row], values, [1] * len(ids))
