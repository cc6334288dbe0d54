"""Names and help texts of all metrics. A metric that vLLM has too uses its name, so that its dashboard works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: its kind, Prometheus name, help text, and labels beside ``model_name``."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()


RUNNING = Metric("gauge", "vllm:num_requests_running", "Sequences in the running batch.", ("engine",))
WAITING = Metric("gauge", "vllm:num_requests_waiting", "Sequences waiting to be scheduled.", ("engine",))
KV_USAGE = Metric("gauge", "vllm:kv_cache_usage_perc", "Share of KV blocks held by sequences, 0 to 1.", ("engine",))
PREEMPTIONS = Metric("counter", "vllm:num_preemptions", "Sequences preempted for want of KV blocks.", ("engine",))
PREFIX_QUERIES = Metric("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", ("engine",))
PREFIX_HITS = Metric("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the cache.", ("engine",))
PROMPT_TOKENS = Metric("counter", "vllm:prompt_tokens", "Prompt tokens processed.", ("engine",))
GENERATION_TOKENS = Metric("counter", "vllm:generation_tokens", "Tokens generated.", ("engine",))
DRAFTED_TOKENS = Metric("counter", "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", ("engine",))
ACCEPTED_TOKENS = Metric("counter", "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", ("engine",))
STEP_TOKENS = Metric("histogram", "vllm:iteration_tokens_total", "Tokens computed in an engine's step.", ("engine",))
CACHE_CONFIG = Metric(
    "gauge",
    "vllm:cache_config_info",
    "The KV cache of an engine, as labels; always 1.",
    ("engine", "block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching"),
)
TTFT = Metric("histogram", "vllm:time_to_first_token_seconds", "From arrival to the first token, seconds.")
ITL = Metric("histogram", "vllm:inter_token_latency_seconds", "Between two tokens of a sequence, seconds.")
E2E = Metric("histogram", "vllm:e2e_request_latency_seconds", "From arrival to the last token, seconds.")
PROMPT_LENGTH = Metric("histogram", "vllm:request_prompt_tokens", "Prompt tokens of a prompt.")
GENERATION_LENGTH = Metric("histogram", "vllm:request_generation_tokens", "Tokens generated for a prompt, all choices.")
LONGEST_GENERATION = Metric("histogram", "vllm:request_max_num_generation_tokens", "Tokens of its longest choice.")
PARAMS_N = Metric("histogram", "vllm:request_params_n", "Choices asked for.")
PARAMS_MAX_TOKENS = Metric("histogram", "vllm:request_params_max_tokens", "Tokens that a choice may have.")
QUEUE_TIME = Metric("histogram", "vllm:request_queue_time_seconds", "From arrival to the first step, seconds.")
PREFILL_TIME = Metric("histogram", "vllm:request_prefill_time_seconds", "From the first step to a token, seconds.")
DECODE_TIME = Metric("histogram", "vllm:request_decode_time_seconds", "From the first token to the last, seconds.")
INFERENCE_TIME = Metric("histogram", "vllm:request_inference_time_seconds", "From the first step to the last token.")
TPOT = Metric(
    "histogram", "vllm:request_time_per_output_token_seconds", "Decode time by tokens behind the first, seconds."
)
SUCCESS = Metric("counter", "vllm:request_success", "Requests finished, by reason.", ("finished_reason",))
QUEUED_REQUESTS = Metric("gauge", "raylm:queued_requests", "Sequences, received or about to be, without a token yet.")
QUEUED_TOKENS = Metric("gauge", "raylm:queued_tokens", "Prompt tokens of those sequences, in part estimated.")
QUEUED_REQUESTS_LIMIT = Metric("gauge", "raylm:queued_requests_limit", "Sequences that may wait in a replica.")
QUEUED_TOKENS_LIMIT = Metric("gauge", "raylm:queued_tokens_limit", "Prompt tokens that may wait in a replica.")
HTTP_ANSWERS = Metric(
    "counter", "raylm:http_answers", "HTTP answers begun, by status and key's name.", ("status", "key")
)
ENGINES = Metric("gauge", "raylm:engines_ready", "Engines this ingress replica is connected to.")
ENGINES_WANTED = Metric("gauge", "raylm:engines_wanted", "Engines that the configuration asks for, at least.")
KEY_TOKENS = Metric("counter", "raylm:key_tokens", "Tokens of ended requests, by key's name.", ("key", "kind"))
KEY_REQUESTS = Metric(
    "counter", "raylm:key_requests", "Ended requests with a token or vector, by key's name.", ("key",)
)
KEY_TTFT = Metric("counter", "raylm:key_ttft_seconds", "Their seconds to the first token, summed.", ("key",))
BUILD = Metric("gauge", "raylm:build", "Versions of what runs, as labels; always 1.", ("version", "python"))
