"""Milliseconds per step of the sampler, and of plain torch (full sort, multinomial, dense penalties).

    python -m benchmarks.engine.sampler                      # 151,936 and 32,000 tokens, batches 1, 8, 32, 128
    python -m benchmarks.engine.sampler --flat               # logits of a random model: nuclei of 100,000 tokens

Logits resemble a language model's: normal noise with some fifty likely tokens above it. The figure is the best of
--repeats, which is the least disturbed by other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.rows import Report, parser
from raylm.messages import NewSequence
from raylm.params import SamplingParams
from raylm.worker.input_batch import InputBatch
from raylm.worker.sampling.sampler import Sampler

PROMPT_TOKENS = 512
Plain = Callable[[torch.Tensor, torch.Tensor], Any]


def plain_greedy(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    return logits.argmax(dim=1).numpy()


def plain_multinomial(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    return torch.multinomial((logits / 0.8).softmax(dim=1), 1).numpy()


def plain_truncated(logits: torch.Tensor, seen: torch.Tensor, top_k: int = 20, top_p: float = 0.95) -> Any:
    ordered, index = (logits / 0.8).sort(dim=1)
    if top_k:
        ordered[ordered < ordered[:, -top_k, None]] = -torch.inf
    ordered[ordered.softmax(dim=1).cumsum(dim=1) <= 1 - top_p] = -torch.inf
    kept = torch.empty_like(ordered).scatter_(1, index, ordered)
    return torch.multinomial(kept.softmax(dim=1), 1).numpy()


def plain_top_p(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    return plain_truncated(logits, seen, top_k=0)


def plain_min_p(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    probabilities = (logits / 0.8).softmax(dim=1)
    probabilities[probabilities < 0.05 * probabilities.amax(dim=1, keepdim=True)] = 0
    return torch.multinomial(probabilities, 1).numpy()


def plain_penalties(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    counts = torch.zeros_like(logits).scatter_add_(1, seen, torch.ones(seen.shape))
    logits = torch.where(counts > 0, torch.where(logits > 0, logits / 1.1, logits * 1.1), logits)
    return (logits - 0.5 * counts - 0.5 * (counts > 0)).argmax(dim=1).numpy()


def plain_logprobs(logits: torch.Tensor, seen: torch.Tensor) -> Any:
    drawn = logits.argmax(dim=1, keepdim=True)
    logprobs = logits.log_softmax(dim=1)
    own = logprobs.gather(1, drawn)
    values, ids = logprobs.topk(5, dim=1)
    return own.tolist(), values.tolist(), ids.tolist(), (logprobs > own).sum(dim=1).tolist()


CASES: dict[str, tuple[dict[str, Any], Plain]] = {
    "greedy": ({"temperature": 0.0}, plain_greedy),
    "temperature": ({"temperature": 0.8}, plain_multinomial),
    "top-k 20, top-p 0.95": ({"temperature": 0.8, "top_k": 20, "top_p": 0.95}, plain_truncated),
    "top-p 0.95": ({"temperature": 0.8, "top_p": 0.95}, plain_top_p),
    "min-p 0.05": ({"temperature": 0.8, "min_p": 0.05}, plain_min_p),
    "greedy, penalties": (
        {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        plain_penalties,
    ),
    "greedy, logprobs 5": ({"temperature": 0.0, "logprobs": 5}, plain_logprobs),
}


def make_logits(count: int, vocab_size: int, flat: bool) -> torch.Tensor:
    """[count, vocab_size] float32."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab_size, generator=generator) * (1.0 if flat else 2.5)
    if not flat:
        likely = torch.randint(0, vocab_size, (count, 50), generator=generator)
        logits.scatter_(1, likely, torch.linspace(24, 10, 50).expand(count, 50))
    return logits


def best_ms(call: Callable[[torch.Tensor], Any], logits: torch.Tensor, repeats: int) -> float:
    """The least time of a call on a fresh copy of the logits, without the time of the copy."""
    times = []
    for _ in range(repeats):
        copy = logits.clone()
        start = time.perf_counter()
        call(copy)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def run_case(case: str, logits: torch.Tensor, repeats: int) -> tuple[float, float]:
    """(the sampler's ms, plain torch's ms) for a batch of equal requests."""
    fields, plain = CASES[case]
    count, vocab_size = logits.shape
    batch = InputBatch(count, 2 * PROMPT_TOKENS, 16, vocab_size)
    prompts = np.random.default_rng(0).integers(0, vocab_size, (count, PROMPT_TOKENS))
    for i, prompt in enumerate(prompts.tolist()):
        batch.add(NewSequence(i, prompt, PROMPT_TOKENS // 2, [0], SamplingParams(**fields), seed=i))
    rows, sampler, seen = batch.rows(range(count)), Sampler(), torch.from_numpy(prompts)
    ours = best_ms(lambda copy: sampler.sample(copy, rows, batch), logits, repeats)
    return ours, best_ms(lambda copy: plain(copy, seen), logits, max(3, repeats // 4))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--vocab", type=int, nargs="+", default=[151_936, 32_000])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--flat", action="store_true", help="logits without likely tokens")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.threads} threads; a step's time; ratio: plain torch by sampler")
    report = Report("sampler", {"sampler": "ms", "plain torch": "ms", "ratio": "x"}, args.out)
    for vocab_size, case, count in product(args.vocab, args.cases, args.batches):
        ours, plain = run_case(case, make_logits(count, vocab_size, args.flat), args.repeats)
        figures = {"sampler": ours, "plain torch": plain, "ratio": plain / ours}
        report.add(f"{case}, batch {count}, {vocab_size:,} tokens", figures)


if __name__ == "__main__":
    main()
