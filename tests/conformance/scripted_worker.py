"""`raylm serve` with a worker that plays a model with tools. It draws the text of a play (plays.py).

    python -m tests.conformance.scripted_worker COMMAND {url} {played} …

It runs the command with the server's address in place of {url}. ``GET /played`` at the address {played} returns what
was played. With ``lose=1``, a process of the server is killed in the middle of each answer: in turn a worker, the
EngineCore, the engine's replica and, unless ``ingress=0``, the ingress that serves the request.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import torch
from transformers import AutoTokenizer

from raylm.checkpoint import EMBEDDED
from tests.checkpoints import make_checkpoint
from tests.serving import ROOT, Server, free_port, serve_file

CONTEXT = 131_072  # tokens; the first prompts of agents have up to 31,000 with the embedded model's tokenizer
_INGRESS = "ServeReplica:default:Ingress"
_VICTIMS = ("WorkerActor", "EngineCoreActor", "ServeReplica:default:Engine")


class Killer:
    """Kills a process for each answer at which a worker stops. ``killed`` counts the processes by name."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.killed: Counter[str] = Counter()
        self._server, self._folder = server, folder
        self._files = threading.Lock()  # held while a stopped worker is answered or its file is removed
        self._turns = {"0": cycle(_VICTIMS), "1": cycle((_INGRESS, *_VICTIMS))}
        self._turn: Iterator[str] = self._turns["1"]
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, options: dict[str, str]) -> dict[str, Any]:
        """The record. With ``lose`` (0 or 1), clear it, and stop or start killing."""
        seen, armed = self._folder / "seen", self._folder / "armed"
        lines = seen.read_text().splitlines() if seen.exists() else []
        texts = dict(json.loads(line) for line in lines)  # a client repeats its request if its ingress is lost
        found = {"seen": list(texts.values()), "lost": self.killed.total()}
        if (lose := options.get("lose")) is not None:
            with self._files:
                for path in (seen, armed, *self._folder.glob("*.half")):
                    path.unlink(missing_ok=True)
                self.killed.clear()
                self._turn = self._turns[options.get("ingress", "1")]
                if lose == "1":
                    armed.touch()
        return found

    def _run(self) -> None:
        while True:
            with self._files:
                for half in self._folder.glob("*.half"):
                    if not half.stat().st_size:
                        self._kill(next(self._turn))
                        half.write_text("go on")
            time.sleep(0.02)

    def _kill(self, name: str) -> None:
        """Kill a process with this name, or the ingress that serves a request."""
        pid = self._busy_ingress() if name == _INGRESS else self._server.processes(name)[0]
        os.kill(pid, signal.SIGKILL)
        self.killed[name] += 1
        print(f"      killed {name}", flush=True)

    def _busy_ingress(self) -> int:
        ingresses = httpx.get(f"{self._server.url}/v1/cluster", timeout=60).json()["ingresses"]
        return int(max(ingresses, key=lambda ingress: int(ingress["ongoing"]))["pid"])


def _listen(killer: Killer) -> ThreadingHTTPServer:
    """Answer ``GET /played`` on a separate port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(killer.take(dict(parse_qsl(urlsplit(self.path).query)))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _checkpoint(path: Path) -> Path:
    """Small random weights, with the tokenizer and template of the embedded model, and a long context."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "eos_token_id": tokenizer.eos_token_id}
    make_checkpoint(path, dtype=torch.bfloat16, tokenizer=False, bos_token_id=None, **sizes)
    tokenizer.save_pretrained(path)
    return path


def main() -> int:
    """Serve while the command runs. Returns the command's exit status."""
    with tempfile.TemporaryDirectory() as made:
        folder, port = Path(made), free_port()
        args = {
            "model": str(_checkpoint(folder / "model")),
            "served_model_name": "embedded",
            "cache": {"memory_gib": 0.5},
            "scheduler": {"max_num_seqs": 8},
            "engine": {"threads": 1},
            "ingress": {"replicas": 2},
        }
        path = f"{ROOT / 'tests' / 'conformance' / 'in_workers'}:{ROOT}"
        with Server(serve_file(folder / "serve.yaml", port, args), port, PYTHONPATH=path, RAYLM_PLAY=made) as server:
            listening = _listen(Killer(server, folder))
            given = {"{url}": server.url, "{played}": f"http://127.0.0.1:{listening.server_port}"}
            return subprocess.run([given.get(part, part) for part in sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
