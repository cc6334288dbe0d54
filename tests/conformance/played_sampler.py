"""In a worker: a sampler that draws the tokens of a play, after a real forward pass.

Files in the folder ``$RAYLM_PLAY`` connect the worker with the command of scripted_worker.py:
    seen        a JSON line for each answer that began: the hash of its prompt, and the prompt's end with the answer
    armed       while this file exists, the worker stops once in the middle of each answer
    *.half      the file of a stopped answer; the worker continues when the file has content
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from raylm.checkpoint import EMBEDDED
from tests.conformance.plays import answer_to, said

_EOS, _MESSAGE = 2, "<|im_start|>"
_STOP_S = 60.0
_TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


class _Player:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[bytes, list[int]] = {}

    def token(self, prompt: np.ndarray, drawn: int) -> int:
        """The next token of the answer to a prompt, after ``drawn`` tokens."""
        key = hashlib.sha256(prompt.tobytes()).digest()
        if drawn == 0 or key not in self._answers:
            self._read(key, prompt, begins=drawn == 0)
        ids = self._answers[key]
        if drawn == len(ids) // 2 and (self._folder / "armed").exists():
            self._stop(self._folder / f"{key.hex()}.half")
        return ids[drawn] if drawn < len(ids) else _EOS

    def _read(self, key: bytes, prompt: np.ndarray, *, begins: bool) -> None:
        text = _TOKENIZER.decode(prompt.tolist(), skip_special_tokens=False)
        answer = answer_to(text)
        self._answers[key] = [*_TOKENIZER.encode(answer, add_special_tokens=False).ids, _EOS]
        if begins and _MESSAGE in text:  # the steps that a worker profiles at start have no message
            with (self._folder / "seen").open("a") as seen:
                seen.write(json.dumps([key.hex(), said(text) + answer]) + "\n")

    def _stop(self, half: Path) -> None:
        try:
            os.close(os.open(half, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until and half.exists() and not half.stat().st_size:
            time.sleep(0.01)


def play(sampler: Any) -> None:
    """Patch a sampler's class so that it draws the tokens of plays."""
    draw, player = sampler.sample, _Player(Path(os.environ["RAYLM_PLAY"]))

    def sample(self: Any, logits: Any, rows: Any, batch: Any, offsets: Any) -> Any:
        found = draw(self, logits, rows, batch, offsets)
        lengths = (batch.num_tokens[rows] + offsets).tolist()
        prompts = batch.num_prompt_tokens[rows].tolist()
        ids = [
            player.token(batch.token_ids[row, :prompt], length - prompt)
            for row, length, prompt in zip(rows.tolist(), lengths, prompts, strict=True)
        ]
        return replace(found, token_ids=np.array(ids, np.int64))

    sampler.sample = sample
