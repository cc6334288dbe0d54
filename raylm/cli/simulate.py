"""`raylm simulate`: its options, and how they become a simulation."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from raylm.config import faults
from raylm.errors import ConfigError

T = TypeVar("T")


def simulate(
    fleet_file: Annotated[
        Path | None, typer.Argument(metavar="[FLEET.yaml]", help="Engines, ingresses, costs and knobs; see the docs.")
    ] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Requests as JSON lines; may be given again.")] = None,
    load: Annotated[str, typer.Option(help="What arrives where there is no trace.")] = "poisson",
    requests: Annotated[int, typer.Option(help="Of the load.")] = 1000,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 4.0,
    prompt_tokens: Annotated[str | None, typer.Option(help="New ones of a request or turn, as LEAST:MOST.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Drawn by a request, as LEAST:MOST.")] = None,
    keys: Annotated[int, typer.Option(help="API keys that ask in turn.")] = 1,
    seed: Annotated[int, typer.Option(help="Of load and choices.")] = 1,
    engines: Annotated[int | None, typer.Option(help="So many equal ones, in place of the file's.")] = None,
    ingresses: Annotated[int | None, typer.Option(help="Ingress replicas, in place of the file's.")] = None,
    steps: Annotated[
        list[Path] | None, typer.Option(help="Recordings to which the costs of a step are fitted.")
    ] = None,
    recorded: Annotated[
        list[Path] | None, typer.Option(help="Recordings of a fleet: its engines, their costs and what came, again.")
    ] = None,
    check: Annotated[
        list[Path] | None, typer.Option(help="Recordings by which the Scheduler must decide again as it did; no more.")
    ] = None,
    ttft_target_ms: Annotated[float, typer.Option(help="For goodput: longest time to the first token.")] = 1000.0,
    itl_target_ms: Annotated[float, typer.Option(help="For goodput: longest mean time between tokens.")] = 100.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT into this file (.svg, .png).")] = None,
) -> None:
    """Let a fleet serve a load in virtual time, with the code that serves, and print what clients would have seen.

    For example: raylm simulate --engines 8 --ingresses 2 --load sessions --requests 4000 --rate 24
    """
    from raylm import simulate as sim

    try:
        if check:
            return _check(check)
        lived = None
        if recorded:
            said = {"FLEET.yaml": fleet_file, "--trace": trace, "--steps": steps, "--engines": engines}
            lived = _recorded(recorded, ingresses or 1, [name for name, value in said.items() if value])
            fleet, chosen = lived.fleet, sim.Replay(lived.trace)
        else:
            fleet = _fleet(fleet_file, engines, ingresses, steps or [])
            settings = {
                "requests": requests, "rate": rate, "keys": keys, "seed": seed,
                "prompt_tokens": token_range("prompt-tokens", prompt_tokens),
                "output_tokens": token_range("output-tokens", output_tokens),
            }  # fmt: skip
            chosen = sim.Replay(sim.read_trace(trace, fleet.block_size)) if trace else _load(load, settings)
        _collect_seldom()
        outcome = sim.simulate(fleet, chosen, seed)
        found = sim.figures(outcome, sim.Targets(ttft_target_ms, itl_target_ms))
        _print(found, lived, out)
        if plot is not None:
            sim.draw(outcome, plot)
    except ConfigError as error:
        print(f"raylm: {error.message}", file=sys.stderr)
        raise typer.Exit(2) from None


def _print(found: dict[str, Any], lived: Any, out: Path | None) -> None:
    from raylm import simulate as sim

    print(sim.table(found))
    if lived is not None:
        print(sim.recorded_table(lived.figures))
    if out is not None:
        write_text("--json", out, json.dumps(found, indent=1) + "\n")


def _check(recordings: list[Path]) -> None:
    from raylm import simulate as sim

    for path in recordings:
        print(f"{path}: {sim.replay(path):,} steps were replayed with identical plans")


def _collect_seldom() -> None:
    """Collect garbage seldom: requests leave no reference cycles, and there may be a million."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 5, 1_000_000)


def _fleet(path: Path | None, engines: int | None, ingresses: int | None, recordings: list[Path]) -> Any:
    from raylm.simulate import Fleet, fit, read_steps

    over: dict[str, Any] = {}
    if engines is not None:
        over["engines"] = [{"count": engines}]
    if ingresses is not None:
        over["ingresses"] = ingresses
    if recordings:
        costs, error = fit([step for path in recordings for step in read_steps(path)])
        over["costs"] = costs.model_dump()
        _tell_costs("costs", over["costs"], error)
    return Fleet.of(over, "the options") if path is None else Fleet.read(path, **over)


def _recorded(paths: list[Path], ingresses: int, said: list[str]) -> Any:
    from raylm.simulate import read_recordings

    if said:
        raise ConfigError(f"--recorded cannot be combined with {', '.join(said)}.")
    lived = read_recordings(paths, ingresses=ingresses)
    for path, group, error in zip(paths, lived.fleet.engines, lived.errors, strict=True):
        _tell_costs(f"{path.name}: costs", group.costs.model_dump() if group.costs else {}, error)
    return lived


def _load(name: str, settings: dict[str, Any]) -> Any:
    from raylm.simulate import LOADS, LoadSettings

    if name not in LOADS:
        raise ConfigError(f"--load {name}: unknown load. Loads: {', '.join(LOADS)}.")
    return LOADS[name](checked_options(lambda: LoadSettings(**settings)))


def _tell_costs(what: str, costs: dict[str, float], error: float) -> None:
    shown = ", ".join(f"{name} {value:.3g}" for name, value in costs.items())
    print(f"{what} of a step: {shown}; mean error {error:.1%}")


def token_range(name: str, text: str | None) -> tuple[int, int] | None:
    """Parse the value of ``--name LEAST:MOST``, or one number."""
    if text is None:
        return None
    least, _, most = text.partition(":")
    try:
        found = int(least), int(most or least)
    except ValueError:
        raise ConfigError(f"--{name} {text}: must be LEAST:MOST, two whole numbers.") from None
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--{name} {text}: numbers must be at least 1, and LEAST at most MOST.")
    return found


def checked_options(build: Callable[[], T]) -> T:
    """Call ``build`` and return its result. ConfigError names the invalid options."""
    try:
        return build()
    except ValidationError as error:
        raise ConfigError(f"--{faults(error)}") from None


def write_text(option: str, path: Path, text: str) -> None:
    """Write the file that an option names. ConfigError if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None
