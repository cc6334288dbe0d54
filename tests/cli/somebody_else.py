"""Starts a Ray that serves another user's application. It prints the address, and ends when its stdin closes."""

from __future__ import annotations

import sys

import ray
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Theirs:
    def __call__(self, request: object) -> str:
        return "theirs"


app = Theirs.bind()

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(app, name="theirs", route_prefix="/theirs")
    print("address", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
