"""The messages between actors: frozen dataclasses with slots, without tensors and behaviour.

A *request* comes from a caller. It has a string id, and between actors the integer ``key``, unique per client.
A *sequence* is the unit of scheduling. It has an integer id, unique in its engine. A request has ``params.n`` of them.

    Ingress  --ClientBatch-->      EngineCore   --SchedulerOutput-->    Worker
    Ingress  <--EngineCoreOutputs--  EngineCore  <--ModelRunnerOutput--  Worker

Frequent messages are columnar: they hold one list per field instead of one object per row. 256 rows pickle in 0.03 ms
that way, against 1.2 ms as objects.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raylm.errors import RayLMError
from raylm.metrics import STEP_TOKENS_BUCKETS
from raylm.params import PoolingParams, SamplingParams

TokenIds: TypeAlias = "list[int] | array[int]"
"""A prompt arrives as an ``array("I")``: it is small, and the garbage collector does not traverse it."""
CacheScope: TypeAlias = "str | tuple[str, str | None] | None"
"""A cache salt, or a tenant and its cache salt."""
FinishReason = Literal["stop", "length", "abort", "error"]
SequenceEventKind = Literal["taken_in", "compiled", "scheduled", "token", "preempted", "ended"]
SequenceEvent = tuple[int, int, SequenceEventKind, float, int, int, str]
"""(key, index, kind, seconds since the epoch, step, count, id of the request that caused it or "").

The count depends on the kind. taken_in: sequences waiting before it. scheduled: its tokens with cached KV. token: all
its tokens, with the one just drawn (the first token, or the first one after a preemption). preempted: its computed
tokens, which are given up. ended: all its tokens.
"""


@dataclass(frozen=True, slots=True)
class ReasoningTokenIds:
    """How to recognize the reasoning at the beginning of an answer.

    Reasoning begins in the prompt (``begun``), or if the first drawn token is ``start_token_id``. It ends with
    ``end_token_id``. ``closing_token_ids`` is the whole end as the model usually writes it.
    """

    start_token_id: int
    end_token_id: int
    closing_token_ids: tuple[int, ...]
    begun: bool


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """A LoRA adapter. Clients use ``name`` in the field `model`; ``path`` is the directory that was given for loading.

    ``digest`` is the digest of its content, "" until an engine has loaded it. It takes no part in comparisons.
    """

    name: str
    path: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """How a request is served relative to others. "" and None mean that there is no such requirement.

    ``tenant`` is a digest of the API key's name. Engines are shared among tenants by ``weight`` (above 0).
    ``ttft_s`` is the target from the arrival to the first token (under the fair policy), ``itl_s`` the target between
    two tokens, both in seconds. ``timeout_s`` is the time after the arrival at which the client gives up if it has got
    no answer. With ``own_prefixes``, KV blocks are shared only with requests of the same tenant.
    """

    tenant: str = ""
    weight: float = 1.0
    ttft_s: float | None = None
    itl_s: float | None = None
    timeout_s: float | None = None
    own_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """A request from AsyncLLM to an engine: tokenized and validated, with all defaults resolved.

    ``params.max_tokens`` and ``params.seed`` are set. ``eos_token_ids`` end a sequence unless ``params.ignore_eos``.
    ``bad_words_token_ids`` are the tokenized ``params.bad_words``. ``arrival_time`` is in seconds since the epoch.
    A lower ``priority`` is served earlier (under the priority policy). ``grammar`` is ``params.structured_outputs`` as
    an llguidance grammar for the answer; ``thinking`` delimits the reasoning before it. With ``pooling`` the result is
    a vector: no token is drawn, and ``params`` has its defaults. ``adapter`` is the name of an adapter, None for the
    base model. ``uncached_tokens`` is the number of prompt tokens expected to be computed, None if the cache is
    unknown.

    If the request is continued from a lost engine, ``drawn`` has the tokens drawn by each sequence, None for a sequence
    that has ended. The sequences continue after these tokens, as after a preemption. For a new request it is ().

    ``resumable_as`` is the name by which another ingress replica may take over the drawn tokens, "" if none may.
    """

    key: int
    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0
    grammar: str | None = None
    thinking: ReasoningTokenIds | None = None
    pooling: PoolingParams | None = None
    adapter: str | None = None
    uncached_tokens: int | None = None
    drawn: tuple[tuple[int, ...] | None, ...] = ()
    service: ServiceLevel = ServiceLevel()
    resumable_as: str = ""

    @property
    def cache_scope(self) -> CacheScope:
        """Requests with equal scopes may share KV blocks."""
        return (self.service.tenant, self.cache_salt) if self.service.own_prefixes else self.cache_salt


@dataclass(frozen=True, slots=True)
class ParkedTokens:
    """The drawn tokens of a request, as columns over all its sequences.

    ``token_ids`` has one list per sequence. ``finish_reasons`` and ``stop_reasons`` are as in EngineCoreOutputs. A
    sequence without a finish reason may have been stopped because its text was complete.
    """

    token_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | None]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """All that one client sends at once. ``aborts`` are keys of requests, ``stops`` (key, index) of single sequences.

    ``watch_blocks`` asks for the blocks of the prefix cache: all of them first, then the changes. ``sent`` is the time
    of sending in seconds since the epoch, by the client's clock. Arrival times of its requests use the same clock.
    """

    adds: list[EngineCoreRequest]
    aborts: list[int]
    stops: list[tuple[int, int]] = field(default_factory=list)
    watch_blocks: bool = False
    sent: float | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence without a row in the worker: scheduled for the first time, or again after a preemption.

    ``token_ids`` are all known tokens (prompt, then generated), ``block_ids`` the whole block table. ``stop_token_ids``
    (EOS and the caller's, unless ignored) must not be drawn before ``params.min_tokens``. ``limit`` is the greatest
    length in tokens, with the prompt. With ``pooling`` the last token yields a vector instead of a drawn token.
    ``adapter`` is the number of the LoRA adapter, 0 for the base model. ``owner`` is the tenant and the cache salt,
    separated by a zero character.
    """

    seq_id: int
    token_ids: TokenIds
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    limit: int = 2**31 - 1
    grammar: str | None = None
    thinking: ReasoningTokenIds | None = None
    pooling: PoolingParams | None = None
    adapter: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step for the workers, as a difference to their state: they apply ``finished``, then ``new``, then run.

    Columns over the scheduled sequences; sequences with one token come first:
        seq_ids:          id of the sequence
        num_computed:     number of its tokens whose KV is in its blocks already
        num_scheduled:    number of tokens to compute now, from position num_computed
        samples:          whether its last known token is computed, so that a token is drawn (or a vector pooled)
        new_block_counts: how many of ``new_block_ids`` (flat) are appended to its block table (0 for new sequences)
    The worker keeps the tokens that it draws: their ids are never sent back to it.

    The worker's position of a decoding sequence (one token, and it samples) may differ from ``num_computed``, because
    the scheduler does not know the results of the steps in flight. The worker continues where its own row ends. With
    speculation the row may be longer: the worker then adds as many draft tokens as the blocks and the limit of the
    sequence and the step's budget allow, and skips a sequence at its limit. If the sequence was deferred, the row is
    shorter, and its last token is computed again.
    """

    step: int
    finished: list[int]
    new: list[NewSequence]
    seq_ids: list[int]
    num_computed: list[int]
    num_scheduled: list[int]
    samples: list[bool]
    new_block_counts: list[int]
    new_block_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, as columns.

    ``counts[i]`` entries of ``token_ids`` and ``logprobs`` (both flat) belong to token i: the token itself, then the
    most likely tokens in descending order, fewer if fewer tokens are possible. 0 entries mean that none were requested.
    ``ranks[i]`` is the token's own rank; 1 is the most likely token, and 0 stands for no entries. Values are natural
    logarithms of the raw model distribution.
    """

    counts: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one step.

    Columns over the sequences that drew: ``seq_ids``, ``token_counts`` (tokens of each) and ``token_ids`` (flat).
    ``logprobs`` covers token_ids; None if not requested. ``prompt_logprobs`` has (seq_id, Logprobs over the prompt
    positions computed in this step; the entry for position p describes token p). ``deferred`` sequences computed their
    tokens but drew none, because the mask of their grammar was late; they draw the same token in a later step.
    ``failed`` has (seq_id, reason) of sequences whose logits or hidden states were not finite, ``undrawable`` of
    sequences whose parameters left no token to draw from finite logits. ``step_s`` is the worker's time for the step in
    seconds, ``forward_s`` the part of the forward pass. ``drafted_tokens`` is the number of verified draft tokens; a
    sequence that drew c tokens had c - 1 of its drafts accepted. ``pooled`` has (seq_id, vector as float32 bytes in
    native byte order) of completed pooled prompts.
    """

    step: int
    seq_ids: list[int]
    token_counts: list[int]
    token_ids: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    undrawable: list[tuple[int, str]] = field(default_factory=list)
    forward_s: float = 0.0
    step_s: float = 0.0
    drafted_tokens: int = 0
    pooled: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """The counts of a Scheduler since its start. The Scheduler updates its own object; messages carry copies.

    ``step_tokens`` is the number of tokens computed in all steps. ``steps_by_tokens`` counts steps per bucket of
    STEP_TOKENS_BUCKETS; its last entry counts the steps above all bounds.
    """

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS_BUCKETS) + 1)

    def count_step(self, num_tokens: int) -> None:
        """Count a step that computed ``num_tokens``, unless it computed none."""
        if num_tokens:
            self.step_tokens += num_tokens
            counts = list(self.steps_by_tokens)
            counts[bisect_left(STEP_TOKENS_BUCKETS, num_tokens)] += 1
            self.steps_by_tokens = tuple(counts)

    def copy(self) -> Counters:
        """A copy, made in every step. Takes a fifth of the time of ``dataclasses.replace``."""
        return Counters(
            self.preemptions, self.prompt_tokens, self.generation_tokens, self.prefix_queries, self.prefix_hits,
            self.drafted_tokens, self.accepted_tokens, self.step_tokens, self.steps_by_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OtherClients:
    """The load of an engine by its other clients: prompt tokens to compute, and open sequences."""

    queued_tokens: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The load of an engine.

    ``places`` is the number of additional sequences that could run. ``step_s`` is the time of a step of one token, and
    ``token_s`` the time per prompt token in the largest steps, both in seconds, measured in recent steps and 0 while
    unknown. ``others`` depends on the client that receives the message.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    counters: Counters = field(default_factory=Counters)
    places: int = 0
    step_s: float = 0.0
    token_s: float = 0.0
    others: OtherClients = OtherClients()


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """The blocks of an engine's prefix cache: all of them, or the changes since the message before.

    ``number`` is 0 for all blocks, and increases by one with each further message. ``stored`` and ``removed`` are keys
    packed by ``raylm.engine.block_hashes``. No key is in both.
    """

    number: int
    stored: bytes
    removed: bytes


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """The outputs of one or more steps for one client.

    Columns over entries in chronological order: ``keys`` (request), ``indexes`` (sequence of the request),
    ``token_counts`` and ``token_ids`` (flat), ``finish_reasons`` (None while the sequence continues), ``stop_reasons``
    (the stop_token_id that matched, else None), ``cached_tokens`` (prompt tokens found in the prefix cache).
    ``logprobs`` covers token_ids, or is None. ``prompt_logprobs``: (key, Logprobs). ``errors``: (key, error) of failed
    requests. ``pooled``: (key, vector as float32 bytes) of completed requests.
    ``adapters`` lists all adapters of the engine, None if they have not changed. ``blocks`` is for clients that watch
    the prefix cache. ``created`` is the time of the newest entry in seconds since the epoch. ``draining`` says that the
    engine is about to stop; later messages do not repeat it. ``events`` are the events in the life of sequences.
    """

    keys: list[int]
    indexes: list[int]
    token_counts: list[int]
    token_ids: list[int]
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | None]
    cached_tokens: list[int]
    stats: EngineStats
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    errors: list[tuple[int, RayLMError]] = field(default_factory=list)
    pooled: list[tuple[int, bytes]] = field(default_factory=list)
    adapters: tuple[LoRAAdapter, ...] | None = None
    blocks: BlockChanges | None = None
    created: float = 0.0
    draining: bool = False
    events: list[SequenceEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CoreReport:
    """What an EngineCore reports to its supervisor each second, and once more as its last words.

    ``stats`` are for all clients as ``others``. It holds ``held`` requests, or held them when it ``ended``, which is
    the reason as a sentence, "" while it runs.
    """

    stats: EngineStats
    held: int
    ended: str = ""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine at one moment, for inspection. Never made while tokens are served.

    Columns over the open sequences: ``request_ids``, ``indexes``, ``statuses``, ``num_tokens``, ``num_computed`` and
    ``block_ids``. ``cached`` are the free blocks in the prefix cache, in eviction order. ``left_out`` entries of
    ``block_ids`` and ``cached`` are not listed: the last sequences' last blocks, and the blocks that are evicted first.
    """

    stats: EngineStats
    num_blocks: int
    block_size: int
    request_ids: list[str]
    indexes: list[int]
    statuses: list[str]
    num_tokens: list[int]
    num_computed: list[int]
    block_ids: list[list[int]]
    cached: list[int]
    left_out: int


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A stage of a pipeline: its ``first`` and ``last`` layer, and the bytes of its weights on each of its ranks."""

    first: int
    last: int
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The properties of a worker, determined at start.

    ``num_blocks`` KV blocks of ``block_size`` tokens were allocated (``kv_cache_bytes``). ``max_model_len`` is the
    longest sequence in tokens that the model and the pool allow. ``stages`` are (name, seconds) of the start.
    ``quantization`` describes the quantization of the linear layers, None without one. With several ranks
    (``tensor_parallel_size``), threads and bytes are those of each rank; all ranks have the same blocks. Engines with
    equal ``fingerprint`` give equal requests equal tokens, unless it ends with ``_varies``. If the model has
    several stages, ``layers`` are the first and the last one of this worker, counted from 0, and ``pipeline`` lists
    all stages.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    device: str
    dtype: str
    attention_backend: str
    threads: int
    weights_bytes: int
    kv_cache_bytes: int
    stages: list[tuple[str, float]] = field(default_factory=list)
    quantization: str | None = None
    tensor_parallel_size: int = 1
    fingerprint: str = ""
    layers: tuple[int, int] | None = None
    pipeline: list[StageInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """``link`` is the node of the EngineCore and the path where it awaits clients of that node; ("", "") for none."""

    engine_id: str
    max_model_len: int
    worker: WorkerInfo
    link: tuple[str, str] = ("", "")
