"""The worker on a GPU, in one command: decoding, prompts, and other engines on the same weights.

    python -m benchmarks.gpu --out results                           # on a GPU: all of it, some ten minutes
    python -m benchmarks.gpu --out results --phases decode prefill --shape llama-3.1-8b
    python -m benchmarks.gpu --device cpu --shape tiny --batch 1 2 --context 64 --prefill 64   # does it run?

Needs torch, transformers and the packages of `pip install 'raylm[gpu]'`. It needs neither ray nor a network, because
the weights are random. Every time is that of --steps whole steps of the worker, from a plan to drawn tokens. While
decoding, two steps are in flight. Rows are printed immediately. With --out they are also appended to DIR/gpu.jsonl.

phases    greedy: whether the embedded model gives the same tokens on the device and on the CPU; decode, prefill, mixed:
          the worker's steps; requests: --requests prompts and answers of different lengths by raylm.LLM, and by the
          continuous batching of transformers; transformers: its own generate; vllm: the same if it is installed
mixed     a step in which the batch decodes and a prompt of --prefill tokens is computed; parts_ms is the time of both
          alone
sampled   decoding at temperature 0.8; top_p: the same with top-p 0.95; penalties: with a presence penalty; logprobs:
          greedy, with the five most likely tokens; compare them with graphs_ms, which is greedy
stages    with --num-stages N attention loads N tiles of keys ahead, instead of the number in split_k.py

floor     milliseconds to read the weights (the embedding only if it is the head too) and the batch's keys and values
          once, at the bandwidth of a copy
share     floor divided by step: 100 % is a step that only reads
at_s      seconds since the beginning
launches  calls per step that start something on the GPU, with CUDA graphs and without; waits: calls that wait for it
idle      milliseconds per step in which the GPU does nothing: the step's time minus its kernels'
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import requests
from benchmarks.gpu.device import Trace, bandwidth, gemm_peak, seconds, synchronize, trace
from benchmarks.gpu.shapes import SHAPES, embedding_size, make_checkpoint
from benchmarks.model.forward import Steps
from raylm.config import Config
from raylm.messages import WorkerInfo
from raylm.params import SamplingParams
from raylm.worker.gpu import split_k, triton_attention
from raylm.worker.gpu.cuda_graphs import GraphForward
from raylm.worker.model_runner import ModelRunner
from raylm.worker.startup import start_runner

PHASES = ["greedy", "decode", "prefill", "mixed", "requests", "transformers", "vllm"]
ENGINES = ["raylm", "transformers"]
SAMPLED = {
    "sampled": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.5),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
_WARM_UP = 4
_KERNELS = 16  # kernels of a step that a row lists


class Decoding(Steps):
    """Sequences that decode after a context that is not computed: its keys and values are zeros.

    Two steps are in flight at a time, as in the engine.
    """

    under_way: Callable[[], object]
    params = SamplingParams(temperature=0.0)

    def start(self, batch: int, context: int, more: int) -> list[Any]:
        """Add ``batch`` sequences and compute their first token."""
        new = [replace(seq, params=self.params) for seq in self.sequences(batch, context + 1, more)]
        self.run([], new, [(seq.seq_id, context, 1) for seq in new])
        return new

    def decode_on(self, new: list[Any], at: int) -> None:
        """Launch the next step for all sequences, ``at`` tokens after their context. Wait for the step before it."""
        before, self.under_way = self.under_way, self.runner.launch(self.plan([], [], [(s.seq_id, at, 1) for s in new]))
        before()

    def land(self) -> None:
        self.under_way()
        self.under_way = _nothing


def _nothing() -> None:
    """The wait function while no step is in flight."""


def decode_rows(
    runner: ModelRunner, info: WorkerInfo, batch: int, context: int, args: Any, peak: float
) -> Iterator[dict]:
    """Figures of decoding ``batch`` sequences after ``context`` tokens, and the kernels of a step."""
    device = torch.device(info.device)
    kv_bytes = info.kv_cache_bytes / (info.num_blocks * info.block_size) * batch * context
    row: dict[str, Any] = {"batch": batch, "context": context}
    unread = 0 if SHAPES[args.model]["tie_word_embeddings"] else 2 * embedding_size(args.model)
    row["floor_ms"] = 1e3 * (info.weights_bytes - unread + kv_bytes) / peak
    graphs = runner.forward
    modes = {"graphs": graphs} if isinstance(graphs, GraphForward) else {}
    modes["eager"] = getattr(graphs, "eager", graphs)
    steps = Decoding(runner, info.block_size, info.vocab_size)
    for mode, forward in modes.items():
        runner.forward = forward
        taken, traced = timed(steps, batch, context, args.steps, device)
        row[f"{mode}_ms"] = 1e3 * taken
        if traced is not None:
            row |= {f"{mode}_launches": traced.launches, f"{mode}_waits": traced.waits}
            row[f"{mode}_idle_ms"] = 1e3 * (taken - traced.busy_s)
            yield {"kernels_of": mode, "batch": batch, "context": context} | longest_kernels(traced)
    runner.forward = graphs
    for name, params in SAMPLED.items():
        steps.params = params
        taken, traced = timed(steps, batch, context, args.steps, device)
        row[f"{name}_ms"] = 1e3 * taken
        if traced is not None:
            row |= {f"{name}_launches": traced.launches, f"{name}_waits": traced.waits}
            if name in ("sampled", "top_p"):
                yield {"kernels_of": name, "batch": batch, "context": context} | longest_kernels(traced)
    best = row.get("graphs_ms", row["eager_ms"])
    yield row | {"share": row["floor_ms"] / best, "tok_s": 1e3 * batch / best}


def longest_kernels(traced: Trace) -> dict[str, Any]:
    """The longest kernels of a step, with the launches and microseconds of each, and the sum of all."""
    each = {name: [round(calls, 1), round(1e6 * taken, 1)] for name, (calls, taken) in traced.kernels.items()}
    return {"busy_us": round(1e6 * traced.busy_s, 1), "kernels": dict(list(each.items())[:_KERNELS])}


def timed(steps: Decoding, batch: int, context: int, count: int, device: torch.device) -> tuple[float, Any]:
    """Seconds of each of ``count`` consecutive steps, and a trace of a few more."""
    more = 2 * (count + _WARM_UP)
    steps.under_way = _nothing
    new = steps.start(batch, context, more)
    position = iter(range(context + 1, context + more))
    for _ in range(_WARM_UP):
        steps.decode_on(new, next(position))
    steps.land()
    started = time.perf_counter()
    for _ in range(count):
        steps.decode_on(new, next(position))
    steps.land()
    taken = (time.perf_counter() - started) / count
    traced = trace(lambda: steps.decode_on(new, next(position)), _WARM_UP, device)
    steps.land()
    steps.run([seq.seq_id for seq in new], [], [])
    return taken, traced


def prefill_rows(runner: ModelRunner, info: WorkerInfo, tokens: int, args: Any, peak: float) -> Iterator[dict]:
    """Figures of a prompt of ``tokens`` in one step, and its kernels.

    The operations are those of the linear layers and of attention.
    """
    steps = Steps(runner, info.block_size, info.vocab_size)
    taken = statistics.median(list(steps.prefill(tokens, max(3, args.steps // 8)))[1:])
    traced = trace(lambda: list(steps.prefill(tokens, 1)), 1, torch.device(info.device))
    if traced is not None:
        yield {"kernels_of": "prefill", "prefill": tokens} | longest_kernels(traced)
    sizes, embedding = SHAPES[args.model], embedding_size(args.model)
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    linear = info.weights_bytes / 2 - embedding * (1 if sizes["tie_word_embeddings"] else 2)
    operations = 2 * linear * tokens + 2 * embedding + 2 * sizes["num_hidden_layers"] * heads * tokens**2
    yield {
        "prefill": tokens,
        "ms": 1e3 * taken,
        "tok_s": tokens / taken,
        "share_of_gemm": operations / taken / peak,
    }


def mixed_row(runner: ModelRunner, info: WorkerInfo, batch: int, context: int, tokens: int, args: Any) -> dict:
    """Figures of steps that decode ``batch`` sequences after ``context`` tokens and compute a prompt."""
    steps = Decoding(runner, info.block_size, info.vocab_size)
    count = max(3, args.steps // 8)
    new = steps.start(batch, context, 2 * count + 2)
    blocks = -(-(tokens + 1) // info.block_size)
    (prompt,) = steps.sequences(1, tokens, 1)
    prompt = replace(prompt, seq_id=batch, block_ids=list(range(info.num_blocks - blocks, info.num_blocks)))
    decodes: list[float] = []
    mixed: list[float] = []
    for at in range(count):
        position = context + 1 + 2 * at
        mixed.append(steps.run([], [prompt], [*((s.seq_id, position, 1) for s in new), (batch, 0, tokens)]))
        decodes.append(steps.run([batch], [], [(s.seq_id, position + 1, 1) for s in new]))
    steps.run([seq.seq_id for seq in new], [], [])
    alone = statistics.median(list(steps.prefill(tokens, count))[1:])
    parts = {"ms": statistics.median(mixed[1:]), "parts_ms": statistics.median(decodes[1:]) + alone}
    return {"mixed": tokens, "batch": batch, "context": context} | {name: 1e3 * taken for name, taken in parts.items()}


def generate_row(model: Any, batch: int, args: Any, device: torch.device) -> dict:
    """transformers' own greedy generate: the time of each further token of a batch."""
    prompt = torch.randint(model.config.vocab_size, (batch, min(args.context)), device=device)
    mask = torch.ones_like(prompt)

    def run(new: int) -> None:
        model.generate(prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    more = max(2, args.steps)
    each = (seconds(lambda: run(1 + more), device, 1) - seconds(lambda: run(1), device, 1)) / more
    return {"batch": batch, "context": min(args.context), "transformers_ms": 1e3 * each, "tok_s": batch / each}


def vllm_rows(path: Path, args: Any) -> Iterator[dict]:
    """vLLM's offline engine on the same weights: the time of each further token of a batch, greedy and sampled."""
    if "vllm" not in args.phases:
        return
    if importlib.util.find_spec("vllm") is None:
        yield {"left_out": "vllm is not installed"}
        return
    import vllm

    context, more = min(args.context), max(2, args.steps)
    longest = context + more + 2
    engine = vllm.LLM(str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=longest, seed=0)
    for batch in args.batch:
        prompts = [{"prompt_token_ids": torch.randint(5, 500, (context,)).tolist()} for _ in range(batch)]
        row: dict[str, Any] = {"batch": batch, "context": context}
        for name, temperature in (("vllm", 0.0), ("vllm_sampled", 0.8)):

            def run(new: int, heat: float = temperature, asked: list[Any] = prompts) -> None:
                ends = {"max_tokens": new, "min_tokens": new, "ignore_eos": True, "detokenize": False}
                engine.generate(asked, vllm.SamplingParams(temperature=heat, **ends), use_tqdm=False)

            cpu = torch.device("cpu")  # generate waits for the device itself
            each = (seconds(lambda call=run: call(1 + more), cpu, 1) - seconds(lambda call=run: call(1), cpu, 1)) / more
            row[f"{name}_ms"] = 1e3 * each
        yield row | {"tok_s": 1e3 * batch / row["vllm_ms"]}


def set_stages(stages: int | None) -> None:
    """Set the number of tiles that attention loads ahead."""
    if stages is None:
        return
    chosen = split_k.tile_of

    def tile_of(*shape: int) -> split_k.Tile:
        return replace(chosen(*shape), stages=stages)

    split_k.tile_of = triton_attention.tile_of = tile_of


def ours(path: Path, args: Any, peaks: dict[str, float]) -> Iterator[dict]:
    if not {"decode", "prefill", "mixed"} & set(args.phases):
        return
    longest = max([*(context + 4 * (args.steps + _WARM_UP) for context in args.context), *(args.prefill or [0])])
    sizes = {"max_num_seqs": 1 + max(args.batch), "max_num_batched_tokens": max([16, *args.prefill]) + max(args.batch)}
    cache: dict[str, Any] = {"block_size": args.block_size}
    if args.device == "cpu":
        cache["num_blocks"] = (1 + max(args.batch)) * (1 + longest // args.block_size)
    tree = {"model": str(path), "device": args.device, "dtype": "bfloat16", "cache": cache, "scheduler": sizes}
    started = time.perf_counter()
    runner, info = start_runner(Config.model_validate(tree | {"max_model_len": longest + 1}))
    about = {
        "shape": args.model,
        "attention": info.attention_backend,
        "num_stages": args.num_stages or 2,
        "forward": type(runner.forward).__name__,
    }
    stages = {name: round(taken, 2) for name, taken in info.stages}
    yield about | {
        "weights_gib": info.weights_bytes / 2**30,
        "start_s": time.perf_counter() - started,
        "stages": stages,
    }
    pools = getattr(runner.forward, "eager", runner.forward)._kv_caches
    with torch.inference_mode():
        for pool in pools:
            pool.zero_()
    held = info.num_blocks * info.block_size
    for context in args.context if "decode" in args.phases else []:
        for batch in args.batch:
            if batch * (context + 4 * args.steps) > held:
                yield {"batch": batch, "context": context, "left_out": f"the KV pool holds {held} tokens"}
                continue
            yield from decode_rows(runner, info, batch, context, args, peaks["bandwidth"])
    for tokens in args.prefill if "prefill" in args.phases else []:
        yield from prefill_rows(runner, info, tokens, args, peaks["gemm"])
    for tokens in args.prefill if "mixed" in args.phases else []:
        for batch in args.batch:
            if batch * (min(args.context) + 4 * args.steps) + tokens <= held:
                yield mixed_row(runner, info, batch, min(args.context), tokens, args)


def request_rows(path: Path, args: Any, device: torch.device) -> Iterator[dict]:
    """Offline requests by raylm.LLM and by transformers' continuous batching."""
    if "requests" not in args.phases:
        return
    longest = min(1024, SHAPES[args.model]["max_position_embeddings"])
    load = requests.Load.of(args.requests, longest)
    sizes = {"max_num_seqs": max(args.batch), "max_num_batched_tokens": 2048}
    knobs = {"device": str(device), "dtype": "bfloat16", "max_model_len": longest, "block_size": args.block_size}
    if "raylm" in args.engines:
        yield requests.by_raylm(path, load, knobs | sizes)
        release(device)
    if "transformers" in args.engines:
        yield requests.by_transformers(path, load, device)


def theirs(path: Path, args: Any, device: torch.device) -> Iterator[dict]:
    if "transformers" not in args.phases:
        return
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    model.generation_config.eos_token_id = None
    for batch in args.batch:
        yield generate_row(model, batch, args, device)


@contextmanager
def checkpoint(shape: str, device: torch.device, kept: Path | None) -> Iterator[Path]:
    """A folder with random weights: a temporary one, or one in ``kept`` that further runs use too."""
    if kept is not None:
        folder = kept / shape
        if not folder.exists():
            folder.mkdir(parents=True)
            make_checkpoint(folder, shape, device)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="raylm-gpu-") as name:
        make_checkpoint(Path(name), shape, device)
        yield Path(name)


class Results:
    """Prints rows immediately, and stores them if there is a folder."""

    def __init__(self, folder: Path | None, name: str = "gpu.jsonl") -> None:
        self._started = time.perf_counter()
        self._file = folder and folder / name
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        row = row | {"at_s": time.perf_counter() - self._started}
        parts = (
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print("  ".join(parts), flush=True)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def release(device: torch.device) -> None:
    """Free unused memory."""
    gc.collect()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(shape: str, args: Any, device: torch.device, results: Results) -> None:
    args.model = shape
    peaks = {"bandwidth": bandwidth(device), "gemm": gemm_peak(device)}
    results.add({"GB_s": peaks["bandwidth"] / 1e9, "gemm_tflop_s": peaks["gemm"] / 1e12})
    with checkpoint(shape, device, args.checkpoints) as path:
        found = ours(path, args, peaks), request_rows(path, args, device), theirs(path, args, device)
        for rows in (*found, vllm_rows(path, args)):
            for row in rows:
                results.add(row)
            release(device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--phases", choices=PHASES, nargs="+", default=PHASES)
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES)[1:])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=ENGINES, help="which serve the requests")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep the checkpoints for further runs")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--num-stages", type=int, choices=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path, metavar="DIR")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device, results = torch.device(args.device), Results(args.out)
    set_stages(args.num_stages)
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    results.add({"device": name, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")})
    if "greedy" in args.phases:
        from benchmarks.gpu.greedy import greedy_rows

        for row in greedy_rows(args.device):
            results.add(row)
        release(device)
    for shape in args.shape if set(args.phases) - {"greedy"} else []:
        measure(shape, args, device, results)


if __name__ == "__main__":
    main()
