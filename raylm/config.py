"""Every knob of RayLM in one frozen tree; importable without torch, validated by Serve before anything starts."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from raylm.errors import ConfigError

# The environment of Serve's controller, proxies and replicas; without it limits and answers are Serve's, not RayLM's.
# A Serve file has them under controller_options; configs/llama.yaml says why.
SERVE_VARIABLES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "raylm.ingress:serve_middlewares",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "raylm.ingress:configure_controller",
}


class Frozen(BaseModel):
    """A node of the tree: immutable, and unknown keys are refused by name with the nearest known one."""

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
    """The KV cache: a pool of fixed blocks."""

    block_size: Literal[16, 32, 64] | None = None
    """Tokens per KV block; by default 16 on CPUs and 64, a tile of the attention kernel, on GPUs."""
    memory_gib: float | None = Field(None, gt=0)
    """GiB of each worker for the KV pool; by default what `max_num_seqs` of the longest sequences and 16 in the prefix
    cache can use, at most a share of what is free after a profile run."""
    num_blocks: int | None = Field(None, ge=2)
    """Number of KV blocks, instead of sizing the pool by memory; for tests and experiments."""
    dtype: Literal["auto", "fp8"] = "auto"
    """Of keys and values; auto: the model's. fp8 (e4m3): half the bytes of bfloat16, so twice the tokens; on GPUs of
    compute capability 8.9 and up."""
    prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    share_prefixes: bool = False
    """With several API keys, reuse them between the keys too. A key can then find out, by `cached_tokens` and by the
    time to the first token, whether another key has sent the same beginning. One key, or none, shares always."""


class SchedulerConfig(Frozen):
    """Batching decisions of the EngineCore."""

    max_num_seqs: int = Field(64, ge=1, le=4096)
    """Most sequences in one step."""
    max_num_batched_tokens: int = Field(2048, ge=16, le=1_048_576)
    """Most tokens in one forward pass; longer prompts are computed in chunks."""
    target_itl_ms: float | None = Field(None, gt=0, le=60_000)
    """Time between two tokens of a sequence to aim at: prompts are computed in chunks that keep to it."""
    policy: Literal["fair", "fcfs", "priority"] = "fair"
    """Order of the waiting queue. fair: API keys share an engine by the tokens that they are served; one key or none
    is served first come, first served, but for short prompts that fit where the first one does not."""
    steps_in_flight: Literal[1, 2] = 2
    """Steps handed to the worker before the first one returns."""
    speculative_tokens: int = Field(0, ge=0, le=64)
    """Most tokens drafted for a sequence in a step from what it repeats, and then verified; 0 is off."""
    share_drafts: bool = False
    """Whether answers to one API key may be drafts for another; how fast an answer comes then tells what was said."""

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
            raise ValueError("share_drafts: without speculative_tokens nothing is drafted; set it, or leave this out")
        return self


class ReplicaRange(Frozen):
    """Engines that are started and ended as the load asks for."""

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
    """Engines; each has its own EngineCore and workers. A number, or `{min, max}` with `target_ttft_s` (2),
    `target_itl_ms` and `downscale_delay_s` (300): as many as the load asks for."""
    executor: Literal["ray", "local"] = "ray"
    """ray: workers are actors of their own; local: the worker is a thread of the EngineCore."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Workers (ranks) of an engine, on one node, that share every layer; on GPUs each has its own."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of a worker; by default its share of the cores, fewer for a small model."""
    cuda_graphs: bool = True
    """On a GPU, with one rank, replay steps that only decode as CUDA graphs, captured at start."""
    num_cpus: float = Field(0.1, ge=0)
    """CPUs that Ray reserves for each worker on CPU; a scheduling weight, not a limit."""
    step_timeout_s: float = Field(300, gt=0)
    """A worker that takes longer for one step, or 20 times as long as for steps of its size (at least 10 s), is given
    up; a served engine is then replaced."""
    record_dir: str | None = Field(None, min_length=1)
    """Directory in which each engine writes a file of its requests and steps, for `raylm simulate`; prompts and answers
    as hashes of their blocks alone."""

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
            raise ValueError("tensor_parallel_size: ranks are processes of their own, so the executor must be 'ray'")
        return self


class LoRAConfig(Frozen):
    """LoRA adapters, loaded and unloaded over the API."""

    root: str | None = Field(None, min_length=1)
    """Directory below which adapters may be loaded from; without it there are none."""
    max_adapters: int = Field(8, ge=1, le=256)
    """Most adapters of each engine at once."""
    max_rank: int = Field(64, ge=1, le=64)
    """Highest rank of an adapter."""


class IngressConfig(Frozen):
    """The HTTP side."""

    replicas: int = Field(1, ge=1, le=256)
    """Ingress replicas, each with its own AsyncLLM."""
    max_ongoing_requests: int = Field(4096, ge=1)
    """Requests one replica holds at once; beyond it 429 with Retry-After."""
    max_queued_requests: int = Field(1024, ge=1)
    """Sequences of one replica that wait for their first token; beyond it 429."""
    max_queued_tokens: int = Field(1_048_576, ge=1)
    """Prompt tokens of one replica that wait to be computed; beyond it 429."""
    max_body_mib: float = Field(32, gt=0, le=1024)
    """Longest request body in MiB; all that are being received together may have 8 times as much."""
    body_timeout_s: float = Field(60, gt=0, le=3600)
    """Seconds in which a request's body must have arrived; beyond it 408."""
    api_keys_file: str | None = Field(None, min_length=1)
    """File with an API key a line, as `name: key` and its limits; without keys everybody is let in. Read again when it
    changes."""
    api_keys_env: str | None = Field(None, min_length=1)
    """Environment variable that holds API keys, as the file does."""
    open_paths: tuple[str, ...] = ("/health", "/ready", "/ping", "/docs", "/console")
    """Paths that need no API key; [] closes these too. `/metrics` has the names of the keys."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """refuse: an unknown or unserved field is a 400; warn: it is left out, and told in the log and a header."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call this server from a browser; '*' is any."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^[^\s/:]+$")], ...] = ()
    """Names in the Host header that are answered besides addresses, localhost and the machine's; '*' is any. Others get
    403 where this is set, and where a server without keys listens on loopback."""
    access_log: bool = False
    """Write a line for each answer: client, method, path, status, seconds, request id; none for probes."""
    slow_request_s: float | None = Field(None, ge=0)
    """Write a line with its phases for each request that took longer, in seconds."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as http://localhost:4318, to which spans of each request are sent by OTLP
    over HTTP; needs `raylm[otel]`."""
    otlp_content: bool = False
    """Spans have prompts and answers too."""
    store: str | None = Field(None, min_length=1)
    """File (SQLite) of stored and background responses, ':memory:' for none; by default one by the application's name
    in ~/.local/state/raylm (or XDG_STATE_HOME)."""
    recovery_timeout_s: float = Field(60, ge=0, le=3600)
    """Seconds that requests wait for another engine where the last one was lost; longer than an engine's start.

    So long engines also keep the tokens of streams whose ingress was lost."""
    shutdown_grace_s: float = Field(5, ge=0, le=600)
    """Seconds that running streams get to end at shutdown."""

    @model_validator(mode="after")
    def _spans_can_be_sent(self) -> IngressConfig:
        if self.otlp_endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_endpoint):
            raise ValueError(f"otlp_endpoint: {self.otlp_endpoint!r} is no URL such as http://localhost:4318")
        if self.otlp_content and self.otlp_endpoint is None:
            raise ValueError("otlp_content: spans are sent nowhere; set otlp_endpoint too")
        return self

    @property
    def has_keys(self) -> bool:
        return self.api_keys_file is not None or self.api_keys_env is not None


class Config(Frozen):
    """A served model. ``serve run`` passes the ``args`` of an application here."""

    model: str = Field("embedded", min_length=1)
    """'embedded', a checkpoint directory, or a Hugging Face hub id."""
    served_model_name: str | None = None
    """Name clients use in `model`; by default `model` itself."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and, unless `cache.dtype` says otherwise, KV cache; auto takes the checkpoint's."""
    quantization: Literal["int8", "int4"] | None = None
    """Round the weights of linear layers to 8 bits (activations too, row by row) or to 4; CPU only. Quantized
    checkpoints are served as they are, without it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence in tokens; by default what model and KV pool allow."""
    tool_parser: str = "auto"
    """Form of tool calls: auto (by the chat template), none, or a parser's name."""
    reasoning_parser: str = "auto"
    """Form of reasoning before an answer: auto (by the chat template), none, or a parser's name."""
    log_format: Literal["text", "json"] = "text"
    """json: every line that RayLM's processes and `raylm serve` write is a JSON object."""
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

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model


def knobs(node: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(dotted name, description, default) of every knob."""
    for name, info in node.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from knobs(info.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", " ".join((info.description or "").split()), info.get_default()


def flat_knobs() -> dict[str, str]:
    """Dotted names of the knobs whose last part is unique, or all of the name, by that part."""
    names = [name for name, *_ in knobs()]
    counts = Counter(name.rpartition(".")[2] for name in names)
    return {last: name for name in names if counts[last := name.rpartition(".")[2]] == 1 or name == last}


# What vLLM calls by another name, and what it has where there is something else here.
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
    """The dotted name of a knob called by it, by its last part, or as vLLM does.

    Raises:
        ConfigError: there is none; the message has the nearest name, or what serves instead.
    """
    known = {dotted: dotted for dotted, *_ in knobs()} | VLLM_KNOBS | flat_knobs()
    if name in known:
        return known[name]
    near, *_ = [name] if name in _ELSEWHERE else difflib.get_close_matches(name, [*known, *_ELSEWHERE], 1, 0.5) or [""]
    usual = f"did you mean {near!r}?" if near else "`raylm config` prints the known ones."
    raise ConfigError(f"unknown key {name!r}; {_ELSEWHERE.get(near, usual)}")


def faults(error: ValidationError) -> str:
    """What is wrong, in one line: each fault behind the dotted name of its knob."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}".lstrip(": ")
        for fault in error.errors()
    )
