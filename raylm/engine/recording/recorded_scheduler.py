"""RecordedScheduler: a Scheduler that writes its calls, plans and results to a file, one JSON object per line.

Kinds of lines: ``engine`` (the first), ``add``, ``abort``, ``stop``, ``schedule``, ``update``, and ``request`` for each
ended sequence, which is a line of a trace. Prompts and answers are recorded only as hashes of their blocks.
"""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from raylm.config import Config
from raylm.engine.block_hashes import ChainedHasher
from raylm.engine.kv_cache_manager import KVCacheManager
from raylm.engine.scheduler import Scheduler
from raylm.engine.timelines.observer import Observer
from raylm.errors import ConfigError
from raylm.folders import in_home
from raylm.messages import EngineCoreOutputs, EngineCoreRequest, ModelRunnerOutput, SchedulerOutput, TokenIds

Write = Callable[[dict[str, Any]], None]
_KEY_BYTES = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)  # a full disk is no fault of the configuration

logger = logging.getLogger("raylm.engine")


def create_scheduler(
    config: Config, kv: KVCacheManager, max_model_len: int, clock: Callable[[], float], observer: Observer | None = None
) -> Scheduler:
    """Create the scheduler. With ``engine.record_dir`` it records to a new file there, unless the disk is full.

    Raises:
        ConfigError: the file cannot be written, for another reason than a full disk.
    """
    stages = config.engine.pipeline_parallel_size
    if config.engine.record_dir is None:
        return Scheduler(config.scheduler, kv, max_model_len, clock, observer, stages)
    try:
        recording = Recording(in_home(config.engine.record_dir, "engine.record_dir"))
    except OSError as error:
        if error.errno not in _FULL:
            raise ConfigError(f"engine.record_dir: {error.filename} cannot be written: {error.strerror}") from None
        logger.error("engine.record_dir: %s: %s. This engine is not recorded.", error.filename, error.strerror)
        return Scheduler(config.scheduler, kv, max_model_len, clock, observer)
    return RecordedScheduler(config, kv, max_model_len, clock, recording.write, observer)


class Recording:
    """The file of one engine. If a line cannot be written, the recording ends with the line before; serving continues.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"engine-{uuid.uuid4().hex[:12]}.jsonl"
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Does nothing after the recording has ended."""
        if self._file is None:
            return
        data, reason = orjson.dumps(line) + b"\n", "no space is left"
        try:
            written = os.write(self._file, data)
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        if written == len(data):
            self._size += written
        else:
            self._end(self._file, reason)

    def _end(self, file: int, reason: str) -> None:
        self._file = None
        logger.error("engine.record_dir: the recording %s has stopped; serving continues: %s.", self.path, reason)
        with suppress(OSError):
            os.ftruncate(file, self._size)  # remove a partly written line
        with suppress(OSError):
            os.close(file)


class RecordedScheduler(Scheduler):
    """Records, and schedules exactly like Scheduler. Times are in seconds of ``clock``."""

    def __init__(
        self,
        config: Config,
        kv: KVCacheManager,
        max_model_len: int,
        clock: Callable[[], float],
        write: Write,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(config.scheduler, kv, max_model_len, clock, observer)
        self._write = write
        self._hasher = ChainedHasher(kv.block_size)
        self._asked: dict[tuple[str, int], tuple[EngineCoreRequest, str]] = {}
        self._added: dict[tuple[str, int], float] = {}  # time of arrival
        # By client, key and index: (time of the first token, number of cached tokens, drawn tokens)
        self._drawn: dict[tuple[str, int, int], tuple[float, int, list[int]]] = {}
        self._handed_over: dict[int, float] = {}  # time of submission by step
        self._last_at = 0.0
        write(
            {"kind": "engine", "num_blocks": kv.pool.num_blocks, "block_size": kv.block_size}
            | {"max_model_len": max_model_len, "prefix_caching": config.cache.prefix_caching}
            | {"scheduler": config.scheduler.model_dump()}
        )

    def add(self, client_id: str, request: EngineCoreRequest, adapter: int = 0, adapter_digest: str = "") -> None:
        super().add(client_id, request, adapter, adapter_digest)
        self._asked[client_id, request.key] = request, adapter_digest
        self._added[client_id, request.key] = self.clock()
        params, plain = request.params, request.pooling is None and request.params.prompt_logprobs is None
        self._write(
            {"kind": "add", "at": self.clock(), "client": client_id, "id": request.key}
            | {"prompt_tokens": len(request.prompt_token_ids), "max_tokens": params.max_tokens, "n": params.n}
            | {"priority": request.priority, "plain": plain and not request.drawn}
            | {"arrival": request.arrival_time, "service": asdict(request.service)}
            | {"blocks": self._blocks(request, adapter_digest, request.prompt_token_ids)}
        )

    def abort(self, client_id: str, key: int) -> None:
        super().abort(client_id, key)
        self._write({"kind": "abort", "at": self.clock(), "client": client_id, "id": key})
        for client, of, index in [name for name in self._drawn if name[:2] == (client_id, key)]:
            self._end(client, of, index, "abort")
        self._drop_ended(client_id, key)

    def stop(self, client_id: str, key: int, index: int) -> None:
        super().stop(client_id, key, index)
        self._write({"kind": "stop", "at": self.clock(), "client": client_id, "id": key, "index": index})
        self._end(client_id, key, index, "stopped")
        self._drop_ended(client_id, key)

    def take_given_up(self) -> list[tuple[str, int]]:
        given_up = super().take_given_up()
        for client_id, key in given_up:
            self._drop_ended(client_id, key)
        return given_up

    def schedule(self) -> SchedulerOutput | None:
        plan = super().schedule()
        if plan is not None:
            self._handed_over[plan.step] = self.clock()
            self._write({"kind": "schedule", "at": self._handed_over[plan.step]} | columns(plan))
        return plan

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, EngineCoreOutputs]:
        now, began = self.clock(), max(self._last_at, self._handed_over.pop(plan.step))
        self._last_at = now
        pairs = sum(map(int.__mul__, plan.num_scheduled, plan.num_computed)) / 1e6
        self._write(
            {"kind": "update", "at": now, "step": plan.step, "step_s": result.step_s, "took_s": now - began}
            | {"shape": [plan.num_tokens + result.drafted_tokens, len(plan.seq_ids), pairs]}
            | {"plain": not (result.failed or result.undrawable or result.drafted_tokens)}
        )
        found = super().update(plan, result)
        for client_id, outputs in found.items():
            self._note(client_id, outputs)
        return found

    def _note(self, client_id: str, outputs: EngineCoreOutputs) -> None:
        start = 0
        columns = outputs.keys, outputs.indexes, outputs.token_counts, outputs.finish_reasons, outputs.cached_tokens
        for key, index, count, reason, cached in zip(*columns, strict=True):
            _, _, drawn = self._drawn.setdefault((client_id, key, index), (self._last_at, cached, []))
            drawn.extend(outputs.token_ids[start : start + count])
            start += count
            if reason is not None:
                self._end(client_id, key, index, reason)
        for key in {*outputs.keys, *dict(outputs.errors), *dict(outputs.pooled)}:
            self._drop_ended(client_id, key)

    def _end(self, client_id: str, key: int, index: int, reason: str) -> None:
        """Write the ``request`` line of a sequence that has ended."""
        first_at, cached, drawn = self._drawn.pop((client_id, key, index), (0.0, 0, []))
        asked, added_at = self._asked.get((client_id, key)), self._added.get((client_id, key), 0.0)
        if drawn and asked is not None:
            request, digest = asked
            self._write(
                {"kind": "request", "arrival": request.arrival_time or self.clock(), "priority": request.priority}
                | {"prompt_tokens": len(request.prompt_token_ids), "output_tokens": len(drawn)}
                | {"blocks": self._blocks(request, digest, [*request.prompt_token_ids, *drawn])}
                | {"block_size": self.kv.block_size, "sequence": f"{client_id}/{key}/{index}", "finish": reason}
                | {"ttft_s": first_at - added_at, "duration_s": self._last_at - added_at, "cached_tokens": cached}
            )

    def _drop_ended(self, client_id: str, key: int) -> None:
        """Forget a request if it is no longer open."""
        if not self.is_open(client_id, key):
            self._asked.pop((client_id, key), None)
            self._added.pop((client_id, key), None)

    def _blocks(self, request: EngineCoreRequest, adapter_digest: str, tokens: TokenIds) -> list[str]:
        hashes: list[bytes] = []
        root = self._hasher.root(adapter_digest, request.cache_scope)
        self._hasher.extend(hashes, root, tokens, len(tokens) // self.kv.block_size)
        return [block_hash[:_KEY_BYTES].hex() for block_hash in hashes]


def columns(plan: SchedulerOutput) -> dict[str, Any]:
    """The content of a plan as JSON, without the tokens and parameters of new sequences."""
    new = [[one.seq_id, one.num_prompt_tokens, len(one.token_ids), one.block_ids, one.limit] for one in plan.new]
    return {
        "step": plan.step,
        "finished": plan.finished,
        "new": new,
        "seq_ids": plan.seq_ids,
        "num_computed": plan.num_computed,
        "num_scheduled": plan.num_scheduled,
        "samples": plan.samples,
        "new_block_counts": plan.new_block_counts,
        "new_block_ids": plan.new_block_ids,
    }
