"""Replay: repeats a recording with a new Scheduler, which must make the same decisions."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raylm.config import SchedulerConfig
from raylm.engine import KVCacheManager, Scheduler, columns
from raylm.errors import ConfigError, InvalidRequestError
from raylm.messages import EngineCoreRequest, ModelRunnerOutput, NewSequence, SchedulerOutput, ServiceLevel
from raylm.params import SamplingParams
from raylm.simulate.executor import SimulatedAnswers
from raylm.simulate.trace import block_number, block_tokens

_UNIQUE = 1 << 31
_STOP = 2**32 - 1
_NOT_PLAIN = "recovered requests, pooling, prompt logprobs, drafts and failed steps are not replayed"


def replay(path: Path) -> int:
    """Replay a recording. Returns the number of its plans.

    Raises:
        ConfigError: the recording cannot be replayed; or a plan differs, with its step and the difference.
    """
    try:
        return _Replay(path).run()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: a line is damaged or missing, or the Scheduler failed ({found}).") from error
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: a line is damaged ({error.message})") from error


class _Replay:
    """Generates prompts and answers whose blocks are equal where the recorded blocks were equal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = _read(path)
        self._ended = {line["sequence"]: line for line in self._lines if line["kind"] == "request"}
        self._own = count(_UNIQUE)
        self._in_flight: dict[int, tuple[SchedulerOutput, ModelRunnerOutput]] = {}  # by step
        self._answers = SimulatedAnswers(self._answer)
        self._time = 0.0
        self._scheduler = self._create()

    def run(self) -> int:
        equal = 0
        for line in self._lines[1:]:
            self._time = line.get("at", self._time)
            match line["kind"]:
                case "add":
                    self._add(line)
                case "abort":
                    self._scheduler.abort(line["client"], line["id"])
                case "stop":
                    self._scheduler.stop(line["client"], line["id"], line["index"])
                case "schedule":
                    self._schedule(line)
                    equal += 1
                case "update":
                    self._update(line)
        return equal

    def _create(self) -> Scheduler:
        first = self._lines[0] if self._lines else {}
        if first.get("kind") != "engine":
            raise ConfigError(f"{self._path}: not a recording of an engine.")
        try:
            config = SchedulerConfig.model_validate(first["scheduler"])
        except ValidationError as error:
            raise ConfigError(f"{self._path}: {error}") from None
        self._size: int = first["block_size"]
        kv = KVCacheManager(first["num_blocks"], self._size, first["prefix_caching"])
        return Scheduler(config, kv, first["max_model_len"], lambda: self._time)

    def _add(self, line: dict[str, Any]) -> None:
        if not line["plain"]:
            raise ConfigError(f"{self._path}: {_NOT_PLAIN}.")
        ended = self._ended.get(f"{line['client']}/{line['id']}/0")
        tokens = self._tokens((ended or line)["blocks"], line["prompt_tokens"])
        stops: dict[str, Any] = {}
        if line["n"] > 1:
            stops = {"stop_token_ids": (_STOP,)}
        # by the token that was in this place, so that its block is equal
        elif ended is not None and ended["finish"] == "stop":
            answer = self._ended_answer(ended)
            stops = {"stop_token_ids": (answer[-1],), "min_tokens": len(answer) - 1}
        params = SamplingParams(n=line["n"], seed=0, max_tokens=line["max_tokens"], ignore_eos=True, **stops)
        prompt = tokens[: line["prompt_tokens"]]
        request = EngineCoreRequest(
            line["id"], str(line["id"]), prompt, params, priority=line["priority"], arrival_time=line["arrival"],
            service=ServiceLevel(**line["service"]),
        )  # fmt: skip
        self._scheduler.add(line["client"], request)

    def _tokens(self, blocks: list[str], least: int) -> list[int]:
        tokens = [token for block in blocks for token in block_tokens(block_number(block), self._size)]
        return tokens + [next(self._own)] * max(0, least - len(tokens))

    def _schedule(self, line: dict[str, Any]) -> None:
        plan = self._scheduler.schedule()
        if plan is None:
            raise ConfigError(f"{self._path}, step {line['step']}: nothing is scheduled.")
        for name, value in columns(plan).items():
            if value != line[name]:
                raise ConfigError(f"{self._path}, step {line['step']}: {name} is {value}, and was {line[name]}.")
        self._in_flight[plan.step] = plan, self._answers.draw(plan)

    def _answer(self, new: NewSequence) -> list[int]:
        seq = next(seq for seq in self._scheduler.running if seq.id == new.seq_id)
        ended = self._ended.get(f"{seq.client_id}/{seq.key}/{seq.index}")
        if ended is None:
            return [next(self._own)]
        answer = self._ended_answer(ended)
        if ended["finish"] == "stop":
            answer[-1] = new.params.stop_token_ids[0]
        return answer

    def _ended_answer(self, ended: dict[str, Any]) -> list[int]:
        length = ended["prompt_tokens"] + ended["output_tokens"]
        return self._tokens(ended["blocks"], length)[ended["prompt_tokens"] :]

    def _update(self, line: dict[str, Any]) -> None:
        if not line["plain"]:
            raise ConfigError(f"{self._path}, step {line['step']}: {_NOT_PLAIN}.")
        plan, drawn = self._in_flight.pop(line["step"])
        self._scheduler.update(plan, replace(drawn, step_s=line["step_s"]))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read: {error}") from None
