"""The `raylm` command: serve, chat, bench, doctor, simulate, trace, config, version."""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from raylm import __version__
from raylm.cli.bench import bench
from raylm.cli.chat import chat
from raylm.cli.doctor import doctor
from raylm.cli.knob_command import KNOBS, KnobCommand
from raylm.cli.simulate import simulate
from raylm.cli.trace import trace
from raylm.config import API_KEY_VARIABLE, knobs
from raylm.errors import ConfigError
from raylm.stages import report

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

_PR_SET_PDEATHSIG = 1
_WATCH_PERIOD_S = 1.0
_VITAL = {"gcs_server", "raylet"}


@app.callback()
def begin() -> None:
    """Serve models, and look at servers."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a character shows ? in its place


@app.command(cls=KnobCommand, no_args_is_help=True, context_settings=KNOBS)
def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL_OR_FILE [--KNOB VALUE]...",
            help="A directory with a checkpoint, a hub id, 'embedded', or a Serve file (.yaml), and knobs: all that "
            "`raylm config` prints, such as --scheduler.max-num-seqs 64, or its last part, --max-num-seqs 64.",
        ),
    ],
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 without a file.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port; 8000 without a file.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the Serve application.")] = None,
    route_prefix: Annotated[str | None, typer.Option(help="Path below which the model is served.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="A key that clients must send. Other users of the machine see it in the list of processes: set "
            "RAYLM_API_KEY instead, or ingress.api_keys_file."
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the Serve file that is used, and end.")
    ] = False,
    dashboard: Annotated[
        bool | None,
        typer.Option("--dashboard/--no-dashboard", help="Ray's dashboard, started once everything answers; on."),
    ] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds until every application must answer.")] = 600,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show everything that Ray writes.")] = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C, on a Ray of its own or on the one that RAY_ADDRESS names.

    For example: raylm serve embedded --port 8000 --max-model-len 4096
    """
    from raylm.cli.launcher import Launcher, Settings
    from raylm.cli.options import Place, served, to_yaml

    try:
        file = served(words, Place(host, port, name, route_prefix, api_key))
        if print_config:
            print(to_yaml(file), end="")
            return
        if api_key is not None:
            os.environ[API_KEY_VARIABLE] = api_key
        status = Launcher(file, Settings(verbose, dashboard, ready_timeout)).run()
    except ConfigError as error:
        print(f"raylm: {error.message}", file=sys.stderr)
        status = 2
    raise typer.Exit(status)


app.command()(chat)
app.command()(bench)
app.command(cls=KnobCommand, context_settings=KNOBS)(doctor)
app.command(no_args_is_help=True)(simulate)
app.add_typer(trace, name="trace")


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
def run_serve(dashboard: bool = False) -> None:
    """Run the child process of `raylm serve`, which passes the configuration on stdin."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)  # shut down cleanly also if the parent is killed
    from raylm.native import build_beside

    build_beside()
    from raylm.cli.driver import Driver
    from raylm.cli.serve_file import check_tree
    from raylm.ray_private import dead_processes

    given = json.load(sys.stdin)
    raise typer.Exit(
        Driver(check_tree(given["tree"], given["source"]), dashboard).run(lambda: end_with_ray(dead_processes))
    )


def end_with_ray(
    dead_processes: Callable[[], list[str]], end: Callable[[int], object] = os._exit, period_s: float = _WATCH_PERIOD_S
) -> threading.Thread:
    """Watch Ray's own processes. If one of them ends, call ``end`` with status 1, because nothing is served then."""
    stopped = threading.Event()
    atexit.register(stopped.set)  # before Ray stops its processes at exit

    def watch() -> None:
        while not stopped.wait(period_s):
            if lost := [kind for kind in dead_processes() if kind in _VITAL]:
                report("error", "ray", f"Ray's {lost[0]} was lost, so all served applications have ended.")
                end(1)
                return

    thread = threading.Thread(target=watch, name="watch over ray", daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    app()
