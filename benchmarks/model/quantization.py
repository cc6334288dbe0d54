"""The cost of 8 and 4 bits for a model: logit error, perplexity and changed first choices, compared with float32.

    python -m benchmarks.model.quantization [--model MODEL] [--text FILE] [--skills COUNT]

The embedded model reads conversations of its own generator with held-out words. Only tokens that the model itself would
write count. Any other model reads FILE (by default this repository's documents). With --skills the embedded model also
answers COUNT prompts of each skill in examples/embedded_model/evaluate.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.rows import Report, parser
from raylm import LLM, SamplingParams
from raylm.checkpoint import EMBEDDED, Checkpoint, resolve
from raylm.models import AttentionSpec, load_model

ROOT = Path(__file__).parents[2]
UNITS = {
    "rms": "%", "largest": "%", "perplexity": "", "change": "%", "divergence": "nats/token", "choices": "% changed"
}  # fmt: skip
CASES = [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4"), ("float32", "int8"),
         ("float32", "int4")]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Token ids (tokens,), and a mask of the tokens from the second on that are predicted (tokens - 1,)."""

    ids: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Result:
    """Logits (counted tokens, vocabulary) and the cross entropy of each token."""

    logits: Tensor
    losses: Tensor


def conversations(tokenizer: Tokenizer, length: int, count: int) -> Iterator[Row]:
    """Rows from the embedded model's generator, made with its test words."""
    sys.path.insert(0, str(ROOT / "examples" / "embedded_model"))
    import conversation
    import train

    rng = random.Random(7)
    for at in range(count):
        ids, written = conversation.row(rng, tokenizer, length, train.DENSE, 0.3 if at % 2 else 0.0, "test")
        yield Row(torch.tensor(ids), torch.tensor(written)[1:])


def documents(tokenizer: Tokenizer, text: str, length: int, count: int) -> Iterator[Row]:
    ids = torch.tensor(tokenizer.encode(text).ids)
    for piece in list(ids.split(length))[:count]:
        if len(piece) > 1:
            yield Row(piece, torch.ones(len(piece) - 1, dtype=torch.bool))


class WholeSequence:
    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Causal attention over one sequence."""
        assert k is not None
        assert v is not None
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    def places(self, spec: AttentionSpec) -> None:
        """Nothing is stored."""


attend = WholeSequence()


@torch.inference_mode()
def run(checkpoint: Checkpoint, rows: list[Row], dtype: str, quantization: str | None) -> tuple[Result, int, str]:
    """The result over all counted tokens of all rows, the weights' bytes, and the model's description of them."""
    model, size = load_model(checkpoint, getattr(torch, dtype), torch.device("cpu"), quantization)
    logits, losses = [], []
    for row in rows:
        hidden = model(row.ids, torch.arange(len(row.ids)), attend)
        logits.append(model.logits(hidden[:-1][row.counts]).clone())
        losses.append(F.cross_entropy(logits[-1], row.ids[1:][row.counts], reduction="none"))
    return Result(torch.cat(logits), torch.cat(losses)), size, model.quantization or "plain"


def errors(result: Result, exact: Result) -> dict[str, float]:
    """By metric (see ``UNITS``).

    Relative to the exact logits, after the mean of each row, which softmax ignores, is removed.
    """
    wanted, got = (r.logits - r.logits.mean(1, keepdim=True) for r in (exact, result))
    before, after = float(exact.losses.mean().exp()), float(result.losses.mean().exp())
    right, said = F.log_softmax(exact.logits, 1), F.log_softmax(result.logits, 1)
    return {
        "rms": 100 * float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()),
        "largest": 100 * float((got - wanted).abs().max() / wanted.abs().max()),
        "perplexity": after,
        "change": 100 * (after / before - 1),
        "divergence": float((right.exp() * (right - said)).sum(1).mean()),
        "choices": 100 * float((result.logits.argmax(1) != exact.logits.argmax(1)).float().mean()),
    }


def skills(model: str, count: int, threads: int) -> None:
    """Percentages of right greedy answers of the embedded model, by skill."""
    import evaluate

    tokenizer = evaluate.AutoTokenizer.from_pretrained(evaluate.SHIPPED)
    params = SamplingParams(temperature=0.0, max_tokens=320, skip_special_tokens=False)
    shares: dict[str, list[float]] = {skill: [] for skill in evaluate.SKILLS}
    for quantization in (None, "int8", "int4"):
        with LLM(model, quantization=quantization, engine={"threads": threads}) as llm:

            def generate(prompts: list[str]) -> list[str]:
                results = llm.generate(prompts, params, progress=False)
                ended = [result.finish_reason == "stop" for result in results]
                texts = [result.text.removesuffix(evaluate.END) for result in results]
                return [text + evaluate.END * end for text, end in zip(texts, ended, strict=True)]

            for skill, found in shares.items():
                found.append(evaluate.score(skill, count, tokenizer, generate, 0))
    print(f"\n{count} prompts a skill, % right   plain   int8   int4")
    for skill, found in shares.items():
        print(f"{skill:32}" + "".join(f"{100 * share:7.1f}" for share in found))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--text", type=Path)
    options.add_argument("--rows", type=int, default=48)
    options.add_argument("--length", type=int, default=640, help="tokens of a row")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--skills", type=int, default=0)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = resolve(args.model)
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    if checkpoint.path == EMBEDDED and args.text is None:
        rows = list(conversations(tokenizer, args.length, args.rows))
    else:
        files = [args.text] if args.text else sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("**/*.md"))
        rows = list(documents(tokenizer, "\n".join(file.read_text() for file in files), args.length, args.rows))
    print(f"{args.model}: {sum(int(row.counts.sum()) for row in rows):,} tokens predicted in {len(rows)} rows")
    report, exact = Report("quantization", {"weights": "MiB"} | UNITS, args.out), None
    for dtype, quantization in CASES:
        result, size, label = run(checkpoint, rows, dtype, quantization)
        exact = exact or result
        report.add(f"{dtype}, {label}", {"weights": size / 2**20} | errors(result, exact))
    if args.skills and checkpoint.path == EMBEDDED:
        skills(args.model, args.skills, args.threads)


if __name__ == "__main__":
    main()
