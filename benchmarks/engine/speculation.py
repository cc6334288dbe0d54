"""The gain of speculation where an answer copies its prompt, and its cost elsewhere; offline, one sequence at a time.

    python -m benchmarks.engine.speculation [--inner 24576] [--guesses 8] [--prompts 12] [--repeats 3] [--threads N]

The model is the embedded one, which can copy. Its MLPs are widened by random channels without effect, so it gives the
same answers at the cost of a model of size --inner. Both settings answer the same prompts in turns. "copying": greedy
answers to held-out prompts of the copying skill. The others: arithmetic and definitions, greedy, and answers at
temperature 1. Prints tokens per second of both, the median ratio with the lowest and highest of a round, and the number
of equal answers.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as Worker.start does, before torch is imported

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.rows import Report, parser
from raylm import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
EMBEDDED = ROOT / "raylm" / "models" / "embedded"
sys.path.insert(0, str(ROOT / "examples" / "embedded_model"))

from cases import held_out  # noqa: E402

UNITS = {"without": "tok/s", "with": "tok/s", "ratio": "x", "lowest": "x", "highest": "x"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=160, seed=1)
LOADS = {
    "copying": (["copying"], GREEDY),
    "arithmetic, definitions": (["arithmetic", "definitions"], GREEDY),
    "sampled at temperature 1": (
        ["definitions"],
        SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True, seed=1),
    ),
}


@contextmanager
def widened(inner: int) -> Iterator[Path]:
    """The embedded model with ``inner`` channels in its MLPs. The added channels have no effect."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "widened"
        shutil.copytree(EMBEDDED, path)
        config = json.loads((path / "config.json").read_text())
        weights, more = load_file(path / "model.safetensors"), inner - config["intermediate_size"]
        for name, weight in weights.items():
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                weights[name] = torch.cat([weight, torch.randn(more, weight.shape[1]).to(weight.dtype) * 0.02])
            elif name.endswith("down_proj.weight"):
                weights[name] = torch.cat([weight, weight.new_zeros(weight.shape[0], more)], dim=1).contiguous()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, "intermediate_size": inner}))
        yield path


def run(llm: LLM, talks: list[list[dict[str, Any]]], params: SamplingParams) -> tuple[float, list[list[int]]]:
    """(tokens per second, tokens of each answer), one request after the other."""
    started, answers = time.perf_counter(), []
    for talk in talks:
        (result,) = llm.chat([talk], params, progress=False)
        answers.append(result.token_ids)
    return sum(map(len, answers)) / (time.perf_counter() - started), answers


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--inner", type=int, default=24576)
    options.add_argument("--guesses", type=int, default=8)
    options.add_argument("--prompts", type=int, default=12)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int)
    args = options.parse_args()
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    settings: dict[str, Any] = {"engine": {"threads": args.threads}, "cache": {"prefix_caching": False}}
    with widened(args.inner) as model:
        plain = LLM(str(model), **settings)
        guessing = LLM(str(model), **settings, scheduler={"speculative_tokens": args.guesses})
        report = Report("speculation", UNITS, args.out)
        with plain, guessing:
            for name, (skills, params) in LOADS.items():
                talks = [case.messages for skill in skills for case in held_out(skill, args.prompts, tokenizer)]
                ratios, rates, equal = [], [], 0
                for at in range(args.repeats + 1):
                    (slow, expected), (fast, found) = run(plain, talks, params), run(guessing, talks, params)
                    if at:  # the first round warms up both engines
                        ratios.append(fast / slow)
                        rates.append((slow, fast))
                    equal = sum(one == other for one, other in zip(expected, found, strict=True))
                slow, fast = (statistics.median(column) for column in zip(*rates, strict=True))
                figures = {"without": slow, "with": fast, "ratio": statistics.median(ratios)}
                figures |= {"lowest": min(ratios), "highest": max(ratios)}
                report.add(name, figures, f"{equal} of {len(talks)} answers equal")


if __name__ == "__main__":
    main()
