"""ApplicationGuard: on a shared Ray cluster, deletes the applications of a `raylm serve` that was killed."""

from __future__ import annotations

import threading
import time

import ray
from ray import serve
from ray.util import list_named_actors

from raylm import ray_private
from raylm.frontend import end_state

PERIOD_S = 0.5
NAMESPACE = "raylm"
_NAME = "ApplicationGuard:"


def take_away(names: list[str], with_serve: bool) -> None:
    """Delete these applications and wait for their end. ``with_serve`` also ends Serve if it has no others."""
    if ray_private.serve_details() is None:
        return  # Serve was shut down already
    ray_private.delete_applications(names)
    for name in names:
        end_state(name)
    details = ray_private.serve_details()
    if with_serve and details is not None and not details["applications"]:
        serve.shutdown()


class ApplicationGuard:
    """A detached actor: it outlives the driver that it watches, and ends itself afterwards.

    Ray starts it anew, on any node, when its process or its node is lost.
    """

    def __init__(self, job_id: str, names: list[str], with_serve: bool) -> None:
        self._job_id = job_id
        self._names = names
        self._with_serve = with_serve
        threading.Thread(target=self._watch, name="raylm-guard", daemon=True).start()

    def is_watching(self) -> bool:
        return True

    def _watch(self) -> None:
        while not ray_private.job_has_ended(self._job_id):
            time.sleep(PERIOD_S)
        take_away(self._names, self._with_serve)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def guards() -> list[str]:
    """The names of all guards. Each has the applications of a `raylm serve` that runs, or was killed and is ending."""
    actors = list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(_NAME)]


def start_guard(names: list[str], with_serve: bool) -> ray.actor.ActorHandle:
    """Start a guard of this driver's applications. The guard is running when this returns."""
    job_id = ray.get_runtime_context().get_job_id()
    guard = (
        ray.remote(ApplicationGuard)
        .options(name=f"{_NAME}{job_id}", namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1)
        .remote(job_id, names, with_serve)
    )
    ray.get(guard.is_watching.remote())
    return guard
