"""All knobs of RayLM in one immutable tree. Imports no torch; Serve validates it before it starts anything."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from raylm.errors import ConfigError

API_KEY_VARIABLE = "RAYLM_API_KEY"  # holds one key, unlike other variables that ingress.api_keys_env names


class Frozen(BaseModel):
    """A node of the tree. It is immutable and rejects unknown keys; the error suggests the nearest known key."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data.keys() - cls.model_fields.keys():
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
        return data


class CacheConfig(Frozen):
    """The KV cache: a pool of blocks of fixed size."""

    block_size: Literal[16, 32, 64] | None = None
    """Tokens per KV block; by default 16 on CPUs, and 64 on GPUs (a tile of the attention kernel)."""
    memory_gib: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Size of the KV pool of each worker in GiB. By default it holds `max_num_seqs` sequences of full length and 16
    more in the prefix cache, but takes at most a share of the memory that is free after a profile run."""
    num_blocks: int | None = Field(None, ge=2)
    """Number of KV blocks, instead of a size in GiB; for tests and experiments."""
    dtype: Literal["auto", "fp8"] = "auto"
    """Data type of keys and values. auto: that of the model. fp8 (e4m3): half the bytes of bfloat16, so twice the
    tokens; needs a GPU of compute capability 8.9 or higher."""
    prefix_caching: bool = True
    """Reuse the KV blocks of equal prefixes."""
    share_prefixes: bool = False
    """With several API keys, reuse KV blocks across keys too. A key can then find out, from `cached_tokens` and the
    time to the first token, whether another key has sent the same prefix. With one key or none, prefixes are always
    shared."""


class SchedulerConfig(Frozen):
    """Batching decisions of the EngineCore."""

    max_num_seqs: int = Field(64, ge=1, le=4096)
    """Most sequences in one step."""
    max_num_batched_tokens: int = Field(2048, ge=16, le=1_048_576)
    """Most tokens in one step; longer prompts are computed in chunks."""
    target_itl_ms: float | None = Field(None, gt=0, le=60_000)
    """Target for the time between two tokens of a sequence, in ms. Prompts are computed in chunks that keep to it."""
    policy: Literal["fair", "fcfs", "priority"] = "fair"
    """Order of the waiting queue. fair: API keys share an engine by the tokens that they are served. Requests of one
    key, or without keys, are served first come, first served, except that a shorter prompt may start if the first one
    does not fit."""
    steps_in_flight: Literal[1, 2] = 2
    """Number of steps submitted to the worker before the first one returns."""
    speculative_tokens: int = Field(0, ge=0, le=64)
    """Most draft tokens of a sequence in a step, found by repetition and then verified; 0 turns drafts off."""
    share_drafts: bool = False
    """Use answers to one API key as drafts for other keys. The speed of an answer then reveals earlier answers."""

    @model_validator(mode="after")
    def _a_token_for_each_sequence(self) -> SchedulerConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} tokens in a step are fewer than its sequences "
                f"(max_num_seqs: {self.max_num_seqs}), each of which needs one; raise it, or lower max_num_seqs"
            )
        return self

    @model_validator(mode="after")
    def _drafts_to_share(self) -> SchedulerConfig:
        if self.share_drafts and not self.speculative_tokens:
            raise ValueError("share_drafts needs speculative_tokens; set it, or remove share_drafts")
        return self


class ReplicaRange(Frozen):
    """Limits and targets of autoscaling: engines are started and stopped with the load."""

    min: int = Field(ge=0, le=256)
    max: int = Field(ge=1, le=256)
    target_ttft_s: float = Field(2.0, gt=0, le=3600)
    target_itl_ms: float | None = Field(None, gt=0, le=60_000)
    downscale_delay_s: float = Field(300, ge=0, le=86_400)

    @model_validator(mode="after")
    def _min_is_no_more_than_max(self) -> ReplicaRange:
        if self.min > self.max:
            raise ValueError(f"min: {self.min} is more than max: {self.max}")
        return self


def _kind_of_replicas(given: object) -> str:
    return "range" if isinstance(given, dict | ReplicaRange) else "number"


class EngineConfig(Frozen):
    """Engine replicas and their actors."""

    replicas: Annotated[
        Annotated[int, Field(ge=1, le=256), Tag("number")] | Annotated[ReplicaRange, Tag("range")],
        Discriminator(_kind_of_replicas),
    ] = 1
    """Number of engines, each with its own EngineCore and workers. `{min, max}` instead of a number scales them with
    the load, by `target_ttft_s` (2), `target_itl_ms` and `downscale_delay_s` (300)."""
    executor: Literal["ray", "local"] = "ray"
    """ray: each worker is an actor. local: the worker is a thread of the EngineCore."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Number of workers (ranks) that share every layer of an engine, on one node; each needs a GPU of its own if
    the engine runs on GPUs."""
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    """Number of stages: parts of consecutive layers of a model, each with `tensor_parallel_size` workers. Stages may be
    on several nodes, for models that do not fit one; only on CPUs."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of a worker. By default its share of the cores, and fewer for a small model."""
    cuda_graphs: bool = True
    """On a GPU, run steps as CUDA graphs, captured at start."""
    attention_backend: Literal["auto", "triton", "xformers", "cpu", "sdpa"] = "auto"
    """The kernels of attention. By default the fastest that support the model: on GPUs RayLM's Triton kernel, then
    xformers', then torch's (sdpa); on CPUs the native kernel, then torch's. Another choice must support the model."""
    num_cpus: float = Field(0.1, ge=0, allow_inf_nan=False)
    """CPUs that Ray reserves for each worker on CPUs; used for placement, not a limit."""
    step_timeout_s: float = Field(300, gt=0)
    """Time limit of one step in seconds. The limit is shorter, 20 times the usual time of steps of the same size but at
    least 10 s, once such steps were measured. A served engine whose worker exceeds it is replaced."""
    record_dir: str | None = Field(None, min_length=1)
    """Directory in which each engine records its requests and steps for `raylm simulate`. Prompts and answers are
    recorded only as hashes of their blocks."""

    @property
    def min_replicas(self) -> int:
        return self.replicas.min if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def max_replicas(self) -> int:
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def scales_to_zero(self) -> bool:
        return self.min_replicas == 0

    @model_validator(mode="after")
    def _ranks_are_actors(self) -> EngineConfig:
        if self.tensor_parallel_size > 1 and self.executor != "ray":
            raise ValueError("tensor_parallel_size: each rank is a process, so the executor must be 'ray'")
        if self.pipeline_parallel_size > 1:
            if self.executor != "ray":
                raise ValueError("pipeline_parallel_size: each stage is a process, so the executor must be 'ray'")
            if self.record_dir is not None:
                raise ValueError("record_dir: steps are not recorded with pipeline_parallel_size over 1")
        return self


class LoRAConfig(Frozen):
    """LoRA adapters, loaded and unloaded over the API."""

    root: str | None = Field(None, min_length=1)
    """Directory that contains the adapters; without it no adapter can be loaded."""
    max_adapters: int = Field(8, ge=1, le=256)
    """Most adapters loaded in an engine at once."""
    max_rank: int = Field(64, ge=1, le=64)
    """Highest rank of an adapter."""


class IngressConfig(Frozen):
    """The HTTP servers."""

    replicas: int = Field(1, ge=1, le=256)
    """Ingress replicas, each with its own AsyncLLM."""
    max_ongoing_requests: int = Field(4096, ge=1)
    """Most open requests of a replica; further requests get 429 with Retry-After."""
    max_queued_requests: int = Field(1024, ge=1)
    """Most sequences of a replica that wait for their first token; further requests get 429."""
    max_queued_tokens: int = Field(1_048_576, ge=1)
    """Most prompt tokens of a replica that wait to be computed; further requests get 429."""
    max_body_mib: float = Field(32, gt=0, le=1024)
    """Largest request body in MiB. All bodies being received together may have 8 times as much."""
    body_timeout_s: float = Field(60, gt=0, le=3600)
    """Seconds in which the body of a request must arrive; later it gets 408."""
    api_keys_file: str | None = Field(None, min_length=1)
    """File with one API key per line, as `name: key` and its limits. It is read again when it changes. Without keys,
    every request is admitted."""
    api_keys_env: str | None = Field(None, min_length=1)
    """Environment variable with API keys, in the format of the file."""
    open_paths: tuple[str, ...] = ("/health", "/ready", "/ping", "/docs", "/console")
    """Paths that need no API key; with [] every path needs one. `/metrics` shows the names of the keys."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """refuse: a request with an unknown or unsupported field gets 400. warn: the field is ignored, and the log and a
    header name it."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this server from a browser; '*' allows any."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[^\s/:]+$")], ...] = ()
    """Names accepted in the Host header besides addresses, localhost and the names of the machine; '*' allows any.
    Other names get 403 if this is set, or if a server without keys listens on loopback."""
    access_log: bool = False
    """Log a line for each answer: client, method, path, status, seconds, request id. Probes are not logged."""
    slow_request_s: float | None = Field(None, ge=0)
    """Log the phases of each request that took longer than this many seconds."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318. The spans of each request are sent there by
    OTLP over HTTP; needs `raylm[otel]`."""
    otlp_content: bool = False
    """Include prompts and answers in spans."""
    store: str | None = Field(None, min_length=1)
    """SQLite file of stored and background responses, or the URL of a Postgres database, such as
    postgresql://USER@HOST:5432/DATABASE, which needs `raylm[postgres]`; ':memory:' keeps them in memory. By default a
    file with the name of the application in ~/.local/state/raylm (or XDG_STATE_HOME)."""
    mcp_servers: tuple[Annotated[str, Field(pattern=r"^https?://[^\s/?#@%]+(/[^\s?#%]*)?$")], ...] = ()
    """URLs of the MCP servers that responses may have called, such as https://example.com/mcp; a URL allows also those
    below its path. With none, tools of kind mcp are refused. Needs `raylm[mcp]`."""
    mcp_timeout_s: float = Field(60, gt=0, le=3600)
    """Seconds in which an MCP server must list its tools, and answer a call."""
    recovery_timeout_s: float = Field(60, ge=0, le=3600)
    """Seconds that requests wait for a new engine when the last one was lost; should exceed the start of an engine.

    Engines also keep the tokens of streams whose ingress replica was lost for this long."""
    shutdown_grace_s: float = Field(5, ge=0, le=600)
    """Seconds that running streams have to finish at shutdown."""

    @model_validator(mode="after")
    def _spans_can_be_sent(self) -> IngressConfig:
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint: {self.otlp_endpoint!r} is not a URL such as http://localhost:4318")
        if self.otlp_content and self.otlp_endpoint is None:
            raise ValueError("otlp_content needs otlp_endpoint; set it too")
        return self

    @property
    def has_keys(self) -> bool:
        return self.api_keys_file is not None or self.api_keys_env is not None


class Config(Frozen):
    """A served model. ``serve run`` passes the ``args`` of an application here."""

    model: str = Field("embedded", min_length=1)
    """'embedded', 'smollm2', a checkpoint directory, a GGUF file, or a Hugging Face hub id."""
    served_model_name: str | None = None
    """Name that clients use in `model`; by default the value of `model`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights and, unless `cache.dtype` is set, of the KV cache; auto: that of the checkpoint."""
    quantization: Literal["int8", "int4", "none"] | None = None
    """Quantize the weights of linear layers to 8 or 4 bits, and their inputs to 8 bits; only on CPUs.
    Quantized checkpoints are served as they are and do not need it; none makes the weights of a GGUF file floats."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if the node has one."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence in tokens; by default the longest that the model and the KV pool allow."""
    tool_parser: str = "auto"
    """Parser of tool calls: auto (chosen by the chat template), none, or the name of a parser. prompt is for a chat
    template that does not know tools: the system message describes them."""
    reasoning_parser: str = "auto"
    """Parser of the reasoning before an answer: auto (chosen by the chat template), none, or the name of a parser."""
    log_format: Literal["text", "json"] = "text"
    """json: RayLM's processes and `raylm serve` write every line as a JSON object."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    lora: LoRAConfig = LoRAConfig()
    ingress: IngressConfig = IngressConfig()

    @model_validator(mode="after")
    def _ranks_do_the_same(self) -> Config:
        if self.engine.tensor_parallel_size > 1 and self.lora.root is not None:
            raise ValueError("lora.root: adapters are not served with engine.tensor_parallel_size over 1")
        return self

    @model_validator(mode="after")
    def _stages_draw_in_turn(self) -> Config:
        if self.engine.pipeline_parallel_size > 1:
            for name, is_set, what in (
                ("lora.root", self.lora.root is not None, "adapters are"),
                ("scheduler.speculative_tokens", self.scheduler.speculative_tokens > 0, "draft tokens are"),
                ("device", self.device == "cuda", "GPUs are"),
            ):
                if is_set:
                    raise ValueError(f"{name}: {what} not served with engine.pipeline_parallel_size over 1")
        return self

    @property
    def steps_in_flight(self) -> int:
        """Number of steps submitted to the workers before the first one returns: one more for each further stage."""
        return self.scheduler.steps_in_flight + self.engine.pipeline_parallel_size - 1

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model


def knobs(node: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted name, description, default) of every knob."""
    for name, info in node.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from knobs(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", " ".join((info.description or "").split()), info.get_default()


def flat_knobs() -> dict[str, str]:
    """Dotted names of knobs by the last part of the name, if it is unique or is the whole name."""
    names = [name for name, *_ in knobs()]
    counts = Counter(name.rpartition(".")[2] for name in names)
    return {last: name for name in names if counts[last := name.rpartition(".")[2]] == 1 or name == last}


# Knobs that vLLM calls by another name; then knobs of vLLM that RayLM replaces by something else.
VLLM_KNOBS = {
    "enable_prefix_caching": "cache.prefix_caching",
    "num_gpu_blocks_override": "cache.num_blocks",
    "kv_cache_dtype": "cache.dtype",
    "scheduling_policy": "scheduler.policy",
    "data_parallel_size": "engine.replicas",
    "tool_call_parser": "tool_parser",
    "max_loras": "lora.max_adapters",
    "max_lora_rank": "lora.max_rank",
}
_ELSEWHERE = {
    "gpu_memory_utilization": "the KV pool's size is cache.memory_gib, in GiB.",
    "kv_cache_memory_bytes": "the KV pool's size is cache.memory_gib, in GiB.",
    "seed": "each request has its own, in its sampling parameters.",
    "enforce_eager": "it is engine.cuda_graphs, the other way round.",
    "enable_lora": "adapters are loaded from lora.root, where it is set.",
    "speculative_config": "it is scheduler.speculative_tokens, a number.",
    "trust_remote_code": "code that comes with a checkpoint is never run.",
}


def knob_named(name: str) -> str:
    """The dotted name of a knob, given by this name, its last part, or vLLM's name.

    Raises:
        ConfigError: the name is unknown. The message suggests the nearest name, or the replacement.
    """
    known = {dotted: dotted for dotted, *_ in knobs()} | VLLM_KNOBS | flat_knobs()
    if name in known:
        return known[name]
    near, *_ = [name] if name in _ELSEWHERE else difflib.get_close_matches(name, [*known, *_ELSEWHERE], 1, 0.5) or [""]
    usual = f"did you mean {near!r}?" if near else "`raylm config` prints the known ones."
    raise ConfigError(f"unknown key {name!r}; {_ELSEWHERE.get(near, usual)}")


def faults(error: ValidationError) -> str:
    """Format a validation error in one line: each fault after the dotted name of its knob."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}".lstrip(": ")
        for fault in error.errors()
    )
