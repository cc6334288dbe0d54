"""Perplexity of a checkpoint on 20,000 tokens of real text, plain and quantized, from prompt log-probabilities.

    python -m benchmarks.model.perplexity --model DIR [--text FILE] [--quantization none int8 int4] [--length 2048]
    python -m benchmarks.model.perplexity --model smollm2 --quantization none kept    # a GGUF file's own blocks

By default the text is Python's licence and modules of its standard library, in a fixed order. Versions of Python have
different texts, so the case of each row has the first digits of the SHA-256 of the token ids. Only rows of the same
text are comparable. The text is read in pieces of --length tokens, or of the context if that is shorter. The first
token of a piece is not predicted.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.model.quantization import attend
from benchmarks.rows import Report, parser
from raylm.checkpoint import Checkpoint, resolve
from raylm.models import load_model
from raylm.native import use_threads

UNITS = {"weights": "MiB", "perplexity": "", "loss": "% of plain", "tokens": "", "seconds": "s"}
FILES = ("LICENSE.txt", "argparse.py", "textwrap.py", "heapq.py", "statistics.py", "sched.py")
ROWS = 256  # logits rows computed at a time; a row has the size of the vocabulary


def real_text() -> str:
    """Python's license and some modules of its standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in FILES)


@torch.inference_mode()
def cross_entropy(checkpoint: Checkpoint, ids: Tensor, length: int, quantization: str | None) -> tuple[float, int, int]:
    """The mean over the predicted tokens of ``ids`` (tokens,) in nats, their number, and the weights' bytes."""
    model, size = load_model(checkpoint, torch.bfloat16, torch.device("cpu"), quantization)
    total, count = 0.0, 0
    for piece in ids.split(length):
        hidden = model(piece, torch.arange(len(piece)), attend)[:-1]
        for rows, wanted in zip(hidden.split(ROWS), piece[1:].split(ROWS), strict=True):
            total += float(F.cross_entropy(model.logits(rows).float(), wanted, reduction="sum"))
        count += len(piece) - 1
    return total / count, count, size


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--text", type=Path)
    options.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    options.add_argument("--tokens", type=int, default=20000)
    options.add_argument("--length", type=int, default=2048, help="tokens of a piece, at most the context")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--label", default="", help="what to add to the case of each row, such as a version")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    use_threads(args.threads)
    checkpoint = resolve(args.model)
    length = min(args.length, checkpoint.config.get("max_position_embeddings", args.length))
    tokenizer = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json"))
    text = args.text.read_text(encoding="utf-8") if args.text else real_text()
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)[: args.tokens]
    if len(ids) < args.tokens:
        raise SystemExit(f"The text has {len(ids)} tokens, and --tokens asks for {args.tokens}.")
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:12]
    report, plain = Report("perplexity", UNITS, args.out), None
    for name in args.quantization:
        started = time.perf_counter()
        loss, count, size = cross_entropy(checkpoint, ids, length, None if name == "kept" else name)
        figures = {"weights": size / 2**20, "perplexity": math.exp(loss), "tokens": count}
        if name == "none":
            plain = loss
        elif plain is not None:
            figures["loss"] = 100 * (math.exp(loss - plain) - 1)
        figures["seconds"] = time.perf_counter() - started
        case = f"{Path(args.model).name}, {name}{args.label and ', ' + args.label}, tokens {digest}"
        report.add(case, figures)


if __name__ == "__main__":
    main()
