"""Every value that crosses an actor boundary: frozen, slotted, columnar where hot, no tensors, no behaviour.

A *request* is what a caller asked (a string id outside; ``key``, an int unique per client, on the wire).
A *sequence* is what is scheduled (an int id, unique in its engine); a request has ``params.n`` of them.

    Ingress  --ClientBatch-->      EngineCore   --SchedulerOutput-->    Worker
    Ingress  <--EngineCoreOutputs--  EngineCore  <--ModelRunnerOutput--  Worker

Hot messages hold one list per field instead of one object per row: 256 rows pickle in 0.03 ms that way, against
1.2 ms as objects.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raylm.errors import RayLMError
from raylm.metrics import STEP_TOKENS_BUCKETS
from raylm.params import PoolingParams, SamplingParams

TokenIds: TypeAlias = "list[int] | array[int]"
"""A prompt comes as an ``array("I")``: small, and the garbage collector does not walk through it."""
CacheScope: TypeAlias = "str | tuple[str, str | None] | None"
"""A cache salt, or a tenant and its cache salt."""
FinishReason = Literal["stop", "length", "abort", "error"]
SequenceEventKind = Literal["taken_in", "compiled", "scheduled", "token", "preempted", "ended"]
SequenceEvent = tuple[int, int, SequenceEventKind, float, int, int, str]
"""(key, index, what happened, seconds since the epoch, the step, tokens, the id of the request that caused it or "").

The tokens are those that wait there before it (taken_in: sequences, not tokens), that it finds computed (scheduled),
that it has with the one just drawn (token: its first one, or the first after a preemption), that it had computed and
gives up (preempted), that it has in the end (ended).
"""


@dataclass(frozen=True, slots=True)
class Thinking:
    """A sequence thinks from its beginning if its prompt has ``begun`` to, or if it first draws ``start_token_id``.

    It does so until ``end_token_id``. ``closing_token_ids`` are the end as a model writes it.
    """

    start_token_id: int
    end_token_id: int
    closing_token_ids: tuple[int, ...]
    begun: bool


@dataclass(frozen=True, slots=True)
class LoRAAdapter:
    """An adapter as clients know it: ``name`` stands in `model`, ``path`` is where it was asked to be loaded from.

    ``digest`` is of its content, "" until an engine has loaded it; it does not tell one loading from another.
    """

    name: str
    path: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """How a request is to be served beside others; "" and None say nothing.

    ``tenant`` is a digest of the name of the API key, by which engines share themselves out in proportion to
    ``weight`` (above 0). The first token should be there ``ttft_s`` after the arrival (under the fair policy), and each
    further one ``itl_s`` after the one before. The client has hung up ``timeout_s`` after the arrival if nothing was
    answered by then. With ``own_prefixes`` the prefix cache shares its blocks with requests of the same tenant only.
    """

    tenant: str = ""
    weight: float = 1.0
    ttft_s: float | None = None
    itl_s: float | None = None
    timeout_s: float | None = None
    own_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One request as AsyncLLM hands it to an engine: tokenized, validated, every default resolved.

    ``params.max_tokens`` and ``params.seed`` are set. ``eos_token_ids`` end the sequence unless ``params.ignore_eos``.
    ``bad_words_token_ids`` are the tokenized ``params.bad_words``. ``arrival_time`` is in seconds since the epoch.
    A lower ``priority`` is served earlier (under the priority policy). ``grammar`` is
    ``params.structured_outputs`` in llguidance's form, for the answer; ``thinking`` delimits the reasoning before it.
    With ``pooling`` the prompt is answered by a vector; no token is drawn, and of ``params`` only the defaults hold.
    ``adapter`` is the name of a LoRA adapter, None for the base model. ``uncached_tokens`` of the prompt are expected
    to be computed, None if nothing is known of the engine's cache.

    Of a request that a lost engine began ``drawn`` holds what each sequence has drawn, None for one that has ended; it
    goes on behind these tokens as if it had been preempted. Else it is ().

    ``resumable_as`` is the name under which another ingress may ask for what was drawn of it, "" if none will.
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
    thinking: Thinking | None = None
    pooling: PoolingParams | None = None
    adapter: str | None = None
    uncached_tokens: int | None = None
    drawn: tuple[tuple[int, ...] | None, ...] = ()
    service: ServiceLevel = ServiceLevel()
    resumable_as: str = ""

    @property
    def cache_scope(self) -> CacheScope:
        """The requests that may share KV blocks with this one: those of an equal scope."""
        return (self.service.tenant, self.cache_salt) if self.service.own_prefixes else self.cache_salt


@dataclass(frozen=True, slots=True)
class ParkedTokens:
    """What the sequences of a request have drawn, as columns over all of them.

    ``token_ids`` has a list for each. ``finish_reasons`` and ``stop_reasons`` are as in EngineCoreOutputs; one without
    may also have been stopped, as its text had come to an end.
    """

    token_ids: list[list[int]]
    finish_reasons: list[FinishReason | None]
    stop_reasons: list[int | None]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """What one client sends at once: ``aborts`` are keys of whole requests, ``stops`` (key, index) of sequences.

    With ``watch_blocks`` it is to be told which blocks the prefix cache holds, from now on and beginning with all.
    ``sent`` is when, in seconds since the epoch by the client's clock, by which its requests' arrivals are told too.
    """

    adds: list[EngineCoreRequest]
    aborts: list[int]
    stops: list[tuple[int, int]] = field(default_factory=list)
    watch_blocks: bool = False
    sent: float | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker has no row for: first scheduled, or scheduled again after preemption.

    ``token_ids`` are all tokens known so far (prompt, then generated), ``block_ids`` its whole block table.
    ``stop_token_ids`` (EOS and the caller's, unless ignored) may not be drawn before ``params.min_tokens``. ``limit``
    is the longest that it may grow, in tokens with the prompt. With ``pooling`` its last token yields a vector where
    others draw. ``adapter`` is the number that its LoRA adapter was loaded under, 0 for the base model. ``owner``
    is whose it is, the tenant and the cache salt with a zero character between.
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
    thinking: Thinking | None = None
    pooling: PoolingParams | None = None
    adapter: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step for the workers, as a difference to what they hold: they apply ``finished``, then ``new``, then run.

    Columns over the scheduled sequences, those with one token first:
        seq_ids:          which sequence
        num_computed:     tokens of it whose KV is in its blocks already
        num_scheduled:    tokens to compute now, at positions num_computed ..
        samples:          whether its last scheduled token is its last known one, so that a token is drawn (or pooled)
        new_block_counts: how many of ``new_block_ids`` (flat) are appended to its block table (0 for new sequences)
    The worker feeds its own last drawn tokens: ids of tokens drawn in earlier steps never travel back to it.

    A worker that speculates may be further with a sequence that decodes (one token, and it samples) than
    ``num_computed`` says, as the scheduler has not seen the steps in flight. It goes on where its own row ends, with as
    many draft tokens as the sequence's blocks and limit and the step's budget hold, or not at all at the limit. Nor has
    the scheduler seen that a sequence was deferred in them: then its row ends before, and its last token is computed
    again.
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
    most likely ones in falling order, fewer where fewer tokens are possible; 0 entries where none were asked for.
    ``ranks[i]`` is the token's own rank, 1 the most likely (0 where counts[i] is 0). Natural logarithms of the raw
    model distribution.
    """

    counts: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step drew.

    Columns over the sequences that drew: ``seq_ids``, ``token_counts`` (tokens each) and ``token_ids`` (flat);
    ``logprobs`` over token_ids, or None if nobody asked. ``prompt_logprobs`` holds (seq_id, Logprobs over the prompt
    positions this step computed; the entry for position p describes token p). ``deferred`` computed what was
    planned and did not draw, as their grammars' masks were late; they draw the same token in a later step.
    ``failed`` holds (seq_id, reason) of sequences for which the model's own numbers were not finite, ``undrawable``
    of those whose parameters left sound logits without a token to draw. ``step_s`` is the worker's own time for the
    step in seconds, of which ``forward_s`` went into the model. ``drafted_tokens`` were drafted and verified in
    this step; a sequence that drew c tokens had c - 1 of its drafts accepted. ``pooled`` holds (seq_id, vector) of
    prompts that ended in a vector, its numbers as float32 bytes in the machine's order.
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
    """What a Scheduler has counted since its start. It goes on counting in its own; messages carry copies.

    ``step_tokens`` are all that steps computed, ``steps_by_tokens`` how many steps fell into each of
    STEP_TOKENS_BUCKETS, the last of them above all bounds.
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

    def copy(self) -> Counters:
        """In a fifth of the time of ``dataclasses.replace``: it is done in every step."""
        return Counters(
            self.preemptions, self.prompt_tokens, self.generation_tokens, self.prefix_queries, self.prefix_hits,
            self.drafted_tokens, self.accepted_tokens, self.step_tokens, self.steps_by_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OtherClients:
    """What an engine has to do for its other clients: prompt tokens to compute, and open sequences."""

    queued_tokens: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy an engine is.

    ``places`` sequences more could run. By the steps of late one of a single token takes ``step_s`` seconds, and a
    prompt ``token_s`` for each token, in steps as large as they get; 0 while too few were seen. ``others`` depends on
    which client is told.
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
    """Which blocks an engine's prefix cache holds: a difference to what was told before, or all of them.

    ``number`` is one more than that of the difference before, and 0 for a ``snapshot``. ``stored`` and ``removed`` are
    the keys of hashes as ``raylm.engine.block_hashes`` packs them; none is in both.
    """

    number: int
    stored: bytes
    removed: bytes


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """What one or more steps mean for one client.

    Columns over entries, in order of time: ``keys`` (request), ``indexes`` (which of its n sequences),
    ``token_counts`` and ``token_ids`` (flat), ``finish_reasons`` (None while it goes on), ``stop_reasons`` (the
    stop_token_id that matched, else None), ``cached_tokens`` (prompt tokens served by the prefix cache); ``logprobs``
    over token_ids or None. ``prompt_logprobs``: (key, Logprobs). ``errors``: (key, error), the request is over.
    ``pooled``: (key, vector as float32 bytes), the request is over too.
    ``adapters`` are all that the engine has, None where they have not changed; ``blocks`` are for clients that watch.
    ``created`` is the time of the newest entry in seconds since the epoch. ``draining`` says that the engine is about
    to end; entries that follow do not repeat it. ``events`` are the few turns in the life of a sequence, no tokens.
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
    """What an engine holds at a moment; asked for by who looks, never on the path of a token.

    Columns over the open sequences: ``request_ids``, ``indexes``, ``statuses``, ``num_tokens``, ``num_computed`` and
    ``block_ids``. ``cached`` are the free blocks that can still be found, those that are evicted first before others.
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


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker found out at start; configuration is never written, discoveries are returned.

    ``num_blocks`` KV blocks of ``block_size`` tokens were allocated (``kv_cache_bytes``); ``max_model_len`` is the
    longest sequence in tokens that model and pool allow. ``stages`` are (name, seconds) of the start-up.
    ``quantization`` says in words how linear layers are quantized, None where they are not. Of several ranks
    (``tensor_parallel_size``) each has so many threads and bytes, and all have the same blocks. Engines of the same
    ``fingerprint`` give equal requests equal tokens, unless it ends with ``_varies``.
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


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """``link`` is the node of the EngineCore and the path where it awaits clients of that node; ("", "") for none."""

    engine_id: str
    max_model_len: int
    worker: WorkerInfo
    link: tuple[str, str] = ("", "")
