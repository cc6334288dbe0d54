"""Mutated checkpoints, LoRA adapters and GGUF files, each read by a process with limited memory and time.

    python -m tests.hostile.files CHECKPOINT ADAPTER GGUF --checkpoints 2000 --adapters 500 --ggufs 500 [--seed 1]

The arguments are valid files. Copies of them are changed at random. A copy must be served, or refused with an error
that names the problem. Any other end is a finding, which is printed with its number. An answer from weights outside of
the directory is a finding too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from raylm.checkpoint import resolve
from raylm.errors import ConfigError, InvalidRequestError
from raylm.gguf import directory

ROOM = 3 * 2**30  # bytes of address space beyond those at the start of the process
LIMIT_S = 60
OUTSIDE = "outside.safetensors"
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 1e30, 1e308, -0.0, float("inf"), float("nan"), 0.5,
    "", "x", "x" * 10_000, "../" + OUTSIDE, "/etc/passwd", "\0", [], [None], [1] * 100, [[[]]], {}, {"x": {}},
    {"type": "x"},
]  # fmt: skip


def mutate(folder: Path, random: Random) -> str:
    """Change one file of ``folder``, once or more. Returns a description of the change."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    # Small files are chosen more often, because more of them is parsed than of the weights.
    name = random.choice([*names, *(name for name in names if name.endswith(".json"))])
    file = folder / name
    how = random.choice(["value", "value", "value", "value", "bytes", "cut", "gone", "pipe", "index"])
    if how == "value" and name.endswith(".json"):
        data = json.loads(file.read_text())
        done = [_change(data, random) for _ in range(random.choice([1, 1, 1, 2, 4]))]
        file.write_text(json.dumps(data))
        return f"{name}: {', '.join(done)}"
    if how == "index":
        inside = {"weight_map": {"model.norm.weight": random.choice([f"../{OUTSIDE}", str(folder.parent / OUTSIDE)])}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(inside))
        return f"an index: {inside}"
    content = bytearray(file.read_bytes())
    if how == "gone" or (how == "pipe" and name.endswith(".json")):
        file.unlink()
        if how == "pipe":
            os.mkfifo(file)
    elif how == "cut":
        file.write_bytes(content[: random.randrange(len(content))])
    else:
        # The header of safetensors, which contains its length, is at the beginning.
        for _ in range(random.choice([1, 3, 20])):
            content[random.randrange(min(len(content), random.choice([16, 2000, 10**9])))] = random.randrange(256)
        file.write_bytes(content)
    return f"{name}: {how}"


def mutate_gguf(file: Path, random: Random) -> str:
    """Change a GGUF file, mostly in its metadata and its table of tensors. Returns a description of the change."""
    content = bytearray(file.read_bytes())
    front = content.index(b"token_embd.weight") + 3000
    how = random.choice(["bytes", "bytes", "number", "number", "number", "word", "cut"])
    if how == "cut":
        file.write_bytes(content[: random.randrange(len(content))])
        return how
    for _ in range(random.choice([1, 1, 2, 5])):
        place = random.randrange(random.choice([40, 800, front, front, len(content) - 8]))
        if how == "number":
            size = random.choice([1, 4, 8])
            value = random.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**64 - 1, len(content), 12]) % 2 ** (
                8 * size
            )
            content[place : place + size] = value.to_bytes(size, "little")
        elif how == "word":
            names = [b"llama", b"general", b"tokenizer", b"blk.0", b"weight", b"BPE", b"split", b"gpt2"]
            word = random.choice([name for name in names if name in content])
            content[content.index(word)] ^= 1
        else:
            content[place] = random.randrange(256)
    file.write_bytes(content)
    return how


def _change(data: Any, random: Random) -> str:
    """Replace or remove an entry at any depth."""
    where = ""
    while True:
        keys = list(data) if isinstance(data, dict) else range(len(data))
        if not keys:
            return f"{where} stays"
        key = random.choice(keys)
        where += f".{key}"
        if isinstance(data[key], (dict, list)) and data[key] and random.random() < 0.7:
            data = data[key]
            continue
        if random.random() < 0.15:
            del data[key]
            return f"{where} is left out"
        data[key] = value = random.choice(VALUES)
        return f"{where} = {repr(value)[:40] if value != VALUES[9] else '10**400'}"


def read_checkpoint(path: Path) -> str:
    """Serve a directory or a GGUF file."""
    from raylm.llm import LLM
    from raylm.models import check_checkpoint

    check_checkpoint(resolve(str(path)))
    with LLM(str(path), device="cpu", num_blocks=64, max_num_seqs=4, max_model_len=128, threads=1) as llm:
        try:
            llm.generate([[2, 3, 4], "Hi there."], max_tokens=4, progress=False)
            llm.chat("Hi", max_tokens=4, progress=False)
        except InvalidRequestError as error:
            return f"served, refuses: {error.message[:100]}"
    return "served"


def read_adapter(checkpoint: Path, path: Path) -> str:
    from raylm.llm import LLM

    cache = {"num_blocks": 64}
    with LLM(str(checkpoint), device="cpu", cache=cache, threads=1, lora={"root": str(path.parent)}) as llm:
        llm.load_adapter("a", path.name)
        llm.generate([[2, 3, 4]], max_tokens=4, adapters="a", progress=False)
    return "served"


def attempt(read: Any, *paths: Path) -> str:
    """Read ``paths`` in a child process. Returns "served", "refused: …", or a finding that begins with "FOUND"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        said = "FOUND nothing said"
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
            signal.alarm(LIMIT_S)
            said = str(read(*paths))
        except (ConfigError, InvalidRequestError) as error:
            said = f"refused: {error}"
        except BaseException:
            said = f"FOUND {traceback.format_exc()[-3000:]}"
        finally:
            with contextlib.suppress(BaseException):
                os.write(writing, said.encode(errors="replace")[:60_000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    return said or f"FOUND the process ended with {os.waitstatus_to_exitcode(status)}"


def run_ggufs(whole: Path, count: int, seed: int) -> int:
    """Read ``count`` mutated GGUF files. Returns the number of findings."""
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory._cache = lambda: Path(temporary)
        for number in range(count):
            file = Path(shutil.copy(whole, Path(temporary) / f"{number}.gguf"))
            done = mutate_gguf(file, Random(f"{seed} {number}"))
            said = attempt(read_checkpoint, file)
            counted[f"GGUF file {said.partition(' ')[0].strip(',:')}"] += 1
            if said.startswith("FOUND"):
                print(f"{number}: {done}\n{said}\n", flush=True)
            file.unlink()
    print(dict(sorted(counted.items())), flush=True)
    return counted["GGUF file FOUND"]


def run(checkpoint: Path, adapter: Path, checkpoints: int, adapters: int, seed: int) -> int:
    """Read mutated checkpoints and adapters. Returns the number of findings."""
    counted: Counter[str] = Counter()
    findings = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(checkpoint / "model.safetensors", folder / OUTSIDE)
        for number in range(checkpoints + adapters):
            is_checkpoint = number < checkpoints
            target = folder / "changed"
            shutil.copytree(checkpoint if is_checkpoint else adapter, target)
            done = mutate(target, Random(f"{seed} {number}"))
            said = attempt(read_checkpoint, target) if is_checkpoint else attempt(read_adapter, checkpoint, target)
            if is_checkpoint and done.startswith("an index") and not said.startswith("refused"):
                said = f"FOUND weights from outside: {said}"
            counted[f"{'checkpoint' if is_checkpoint else 'adapter'} {said.partition(' ')[0].strip(',:')}"] += 1
            if said.startswith("FOUND"):
                findings += 1
                print(f"{number}: {done}\n{said}\n", flush=True)
            shutil.rmtree(target)
    print(dict(sorted(counted.items())), flush=True)
    return findings


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("checkpoint", type=Path)
    options.add_argument("adapter", type=Path)
    options.add_argument("gguf", type=Path)
    options.add_argument("--checkpoints", type=int, default=2000)
    options.add_argument("--adapters", type=int, default=500)
    options.add_argument("--ggufs", type=int, default=500)
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args()
    import torch

    import raylm.llm
    import raylm.models.registry  # noqa: F401 - read once, not by each child

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)  # a forked child has no threads of its parent
    found = run(args.checkpoint, args.adapter, args.checkpoints, args.adapters, args.seed)
    return int(found + run_ggufs(args.gguf, args.ggufs, args.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
