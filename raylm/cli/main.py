"""The `raylm` command: serve a configuration file, print every knob, print the version."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from raylm import __version__
from raylm.config import knobs
from raylm.errors import ConfigError
from raylm.stages import report

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_PR_SET_PDEATHSIG = 1
_WATCH_PERIOD_S = 1.0
_VITAL = {"gcs_server", "raylet"}


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A Serve configuration file, for example configs/llama.yaml.")],
    verbose: Annotated[bool, typer.Option(help="Show everything that Ray writes.")] = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    from raylm.cli.launcher import Launcher
    from raylm.cli.serve_file import read_serve_file

    try:
        status = Launcher(read_serve_file(config), verbose).run()
    except ConfigError as error:
        print(f"raylm: {error.message}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


@app.command("config")
def print_config() -> None:
    """Print every knob of the args section with its default and what it does."""
    for name, description, default in knobs():
        print(f"{name:34} {default!s:12} {description}")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command("run-serve", hidden=True)
def run_serve(config: Path) -> None:
    """The child of `raylm serve`: `serve run` on a Ray of its own, or on the one that RAY_ADDRESS names."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)  # stop in order also if the parent was killed
    from raylm.native import build_beside

    build_beside()
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    from raylm.ray_private import dead_processes

    def delete_apps_first(number: int, frame: FrameType | None) -> None:
        """`serve run` would end the proxies at once, and with them all running streams; so end these in order."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for name in serve.status().applications:
            serve.delete(name)
        raise KeyboardInterrupt

    if "RAY_ADDRESS" in os.environ:
        report("stage", "ray", f"connecting to {os.environ['RAY_ADDRESS']}")
        ray.init(namespace="serve")
    else:
        ray.init(address="local", namespace="serve", include_dashboard=False)
    found = ray.cluster_resources()
    address = ray.get_runtime_context().gcs_address
    report("stage", "ray", f"{address}, {found.get('CPU', 0):g} CPUs, {found.get('GPU', 0):g} GPUs")
    end_with_ray(dead_processes)
    signal.signal(signal.SIGINT, delete_apps_first)
    cli(["run", str(config)])


def end_with_ray(
    dead_processes: Callable[[], list[str]], end: Callable[[int], object] = os._exit, period_s: float = _WATCH_PERIOD_S
) -> threading.Thread:
    """Watch Ray's own processes: without them nothing is served, so ``end`` this process with status 1."""
    stopped = threading.Event()
    atexit.register(stopped.set)  # before Ray stops its processes in order

    def watch() -> None:
        while not stopped.wait(period_s):
            if lost := [kind for kind in dead_processes() if kind in _VITAL]:
                report("error", "ray", f"Ray's {lost[0]} was lost, and with it everything that was served.")
                end(1)
                return

    thread = threading.Thread(target=watch, name="watch over ray", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    app()
