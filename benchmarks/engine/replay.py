"""The gain of speculation for a coding agent's conversations, and its cost where no text repeats; offline.

    python -m benchmarks.engine.replay [--inner 24576] [--guesses 16] [--conversations 8] [--streams 1 8 64]
        [--repeats 3] [--threads N] [--loads agents random]

The model is the embedded one, with its MLPs widened to --inner by channels without effect. It computes every step in
full, but then the recorded answer's token replaces its own. So answers do not depend on the model, and drafts are right
exactly where they equal the recorded text. The load "agents" has the turns of benchmarks/engine/agents.py, with
--streams parallel conversations. The load "random" has answers of uniformly random tokens. Both settings answer in
turns. Figures are tokens per second of both, the median ratio with the lowest and highest of a round, and the time of
speculation per token of an answer: to find, choose and keep drafts, without the steps themselves.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.engine.agents import conversations
from benchmarks.engine.speculation import EMBEDDED, UNITS, widened
from benchmarks.rows import Report, parser
from raylm import LLM, SamplingParams
from raylm.messages import NewSequence
from raylm.worker.arrays import IntArray
from raylm.worker.features import Speculator
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import Sampler, SamplerOutput
from raylm.worker.step_batch import StepBatch

Turn = tuple[list[int], list[int]]  # tokens of the prompt and of the answer


class Replay(Sampler):
    """Draws the recorded tokens. The prompt of a row identifies its recording."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[bytes, IntArray] = {}

    def record(self, turns: list[Turn]) -> None:
        for prompt, answer in turns:
            self.answers[np.array(prompt, np.int32).tobytes()] = np.array(answer)

    def sample(
        self, logits: torch.Tensor, rows: IntArray, batch: InputBatch, offsets: IntArray | None = None
    ) -> SamplerOutput:
        drawn = super().sample(logits, rows, batch, offsets)
        for at, row in enumerate(rows.tolist()):
            length = int(batch.num_prompt_tokens[row])
            answer = self.answers[batch.token_ids[row, :length].tobytes()]
            place = int(batch.num_tokens[row]) - length + (0 if offsets is None else int(offsets[at]))
            drawn.token_ids[at] = answer[min(place, len(answer) - 1)]
        return drawn


class Timed(Speculator):
    """A speculator that measures its own time, in ``seconds``."""

    def __init__(self, timed: Speculator) -> None:
        self._timed, self.seconds = timed, 0.0

    def add(self, row: int, new: NewSequence) -> None:
        with self:
            self._timed.add(row, new)

    def remove(self, row: int, batch: InputBatch) -> None:
        with self:
            self._timed.remove(row, batch)

    def propose(self, step: StepBatch, batch: InputBatch) -> StepBatch:
        with self:
            return self._timed.propose(step, batch)

    def observe(self, step: StepBatch, seconds: float) -> None:
        with self:
            self._timed.observe(step, seconds)

    def __enter__(self) -> None:
        self.seconds -= time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter()


def serve(llm: LLM, replay: Replay, timed: Timed, rounds: list[list[Turn]]) -> tuple[float, float]:
    """Serve rounds one after the other, and the turns of a round at the same time.

    Returns tokens per second, and seconds of guessing per token.
    """
    timed.seconds = 0.0
    tokens, started = 0, time.perf_counter()
    for turns in rounds:
        replay.record(turns)
        params = [SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True) for _, answer in turns]
        found = llm.generate([prompt for prompt, _ in turns], params, progress=False)
        assert [result.token_ids for result in found] == [answer for _, answer in turns]
        tokens += sum(len(answer) for _, answer in turns)
    return tokens / (time.perf_counter() - started), timed.seconds / tokens


def agents(streams: int, count: int, seed: int, tokenizer: Tokenizer) -> list[list[Turn]]:
    """``streams`` parallel conversations, turn by turn, until ``count`` conversations are done."""
    talks = list(conversations(max(count, streams), seed=seed))
    groups = [talks[at : at + streams] for at in range(0, len(talks), streams)]
    return [
        [(tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids) for prompt, answer in turn]
        for group in groups
        for turn in zip(*group, strict=True)
    ]


def noise(streams: int, count: int, seed: int, tokenizer: Tokenizer) -> list[list[Turn]]:
    """Random prompts of 200 tokens and random answers of 100 tokens."""
    rng, size = random.Random(seed), tokenizer.get_vocab_size()
    turns = [([rng.randrange(8, size) for _ in range(200)], [rng.randrange(8, size) for _ in range(100)])
             for _ in range(max(count, streams))]  # fmt: skip
    return [turns[at : at + streams] for at in range(0, len(turns), streams)]


LOADS = {"agents": agents, "random": noise}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--inner", type=int, default=24576)
    options.add_argument("--guesses", type=int, default=16)
    options.add_argument("--conversations", type=int, default=8)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int)
    options.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    args = options.parse_args()
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    settings: dict[str, Any] = {"engine": {"threads": args.threads}, "max_model_len": 8192}
    with widened(args.inner) as model:
        plain, guessing = (
            LLM(str(model), **settings),
            LLM(str(model), **settings, scheduler={"speculative_tokens": args.guesses}),
        )
        report = Report("replay", UNITS | {"guessing": "us/tok"}, args.out)
        with plain, guessing:
            watched = [_watched(llm) for llm in (plain, guessing)]
            for name in args.loads:
                for streams in args.streams:
                    rounds_of = []
                    for at in range(args.repeats + 1):
                        rounds = LOADS[name](streams, args.conversations, at, tokenizer)
                        rounds_of.append(
                            [serve(llm, *its, rounds) for llm, its in zip((plain, guessing), watched, strict=True)]
                        )
                    _report(report, f"{name}, {streams} streams", rounds_of[1:])


def _watched(llm: LLM) -> tuple[Replay, Timed]:
    runner = llm._engine._core._executor._worker._runner  # type: ignore[attr-defined]
    runner.sampler, runner.speculator = replay, timed = Replay(), Timed(runner.speculator)
    return replay, timed


def _report(report: Report, case: str, rounds: list[list[tuple[float, float]]]) -> None:
    slow, fast = ([rate for rate, _ in column] for column in zip(*rounds, strict=True))
    ratios = [faster / slower for slower, faster in zip(slow, fast, strict=True)]
    figures = {"without": statistics.median(slow), "with": statistics.median(fast), "ratio": statistics.median(ratios)}
    taken = 1e6 * statistics.median(seconds for _, (_, seconds) in rounds)
    report.add(case, figures | {"lowest": min(ratios), "highest": max(ratios), "guessing": taken})


if __name__ == "__main__":
    main()
