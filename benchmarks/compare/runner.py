"""Generates for the comparison inside a peer's own interpreter, with the packages of the peer only.

    PYTHON benchmarks/compare/runner.py {raylm|vllm|openvino} OPTIONS_AS_JSON

Reads one JSON object per line from stdin, {"prompts": [[id, ...], ...], "max_tokens": n}, and answers each on stdout
with {"seconds": s, "tokens": [tokens of each answer]} or {"error": text}. The first output, {"about": {...}}, means
that the engine is ready. Exits at the end of stdin. Output of the engine itself goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], list[int]]  # (prompts, tokens of each answer) -> generated tokens


def raylm(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    from raylm import LLM, SamplingParams

    llm = LLM(options.pop("model"), **options)

    def run(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return [len(result.token_ids) for result in llm.generate(prompts, params, progress=False)]

    info = llm.info
    return run, {"dtype": info.dtype, "attention": info.attention_backend, "threads": info.threads}


def vllm(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """vLLM's offline engine. Its CPU build reads the KV cache size and the cores from the environment."""
    from vllm import LLM, SamplingParams

    llm = LLM(options["model"], dtype="bfloat16", max_model_len=4096, max_num_seqs=64)

    def run(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [len(result.outputs[0].token_ids) for result in llm.generate(asked, params, use_tqdm=False)]

    return run, {}


def openvino(options: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    """OpenVINO GenAI's continuous batching with prefix cache and split prompts."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = options["kv_gib"], 64, 2048
    scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = True, True
    threads = {"INFERENCE_NUM_THREADS": options["threads"]}
    pipe = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", threads)

    def run(prompts: list[list[int]], max_tokens: int) -> list[int]:
        wanted = genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, ignore_eos=True)
        asked = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [len(result.m_generation_ids[0]) for result in pipe.generate(asked, [wanted] * len(asked))]

    return run, {}


ENGINES = {"raylm": raylm, "vllm": vllm, "openvino": openvino}


def answer(run: Run, line: str) -> dict[str, Any]:
    asked = json.loads(line)
    started = time.perf_counter()
    try:
        tokens = run(asked["prompts"], asked["max_tokens"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # engines print to stdout
    run, about = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    replies.write(json.dumps({"about": about}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(answer(run, line)) + "\n")


if __name__ == "__main__":
    main()
