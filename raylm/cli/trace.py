"""`raylm trace`: converts recorded production traces to the lines that `raylm simulate` and `raylm bench` read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raylm.cli.simulate import checked_options
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm.simulate.production import Selection

_HELP = """Convert production traces that others publish to the lines that `simulate` and `bench` read.

For example: raylm trace mooncake conversation_trace.jsonl --to trace.jsonl
"""
trace = typer.Typer(no_args_is_help=True, help=_HELP)

Convert = Callable[["Selection", Callable[[int], object]], Iterator[dict[str, Any]]]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files as their authors publish them.")]
Speed = Annotated[float, typer.Option(help="Factor of the rate: twice as many requests in a second with 2.")]
Requests = Annotated[int | None, typer.Option(help="At most so many.")]
Longest = Annotated[int | None, typer.Option(help="Leave out requests with more tokens of prompt and answer.")]
Seed = Annotated[int, typer.Option(help="Of what is drawn.")]
To = Annotated[Path | None, typer.Option(help="File to write; standard output without it.")]
Share = Annotated[float, typer.Option(help="Share of the requests to keep, drawn at random.")]


@trace.command(no_args_is_help=True)
def mooncake(
    files: Files, speed: Speed = 1.0, share: Share = 1.0, requests: Requests = None, longest: Longest = None,
    seed: Seed = 1, to: To = None,
) -> None:  # fmt: skip
    """Mooncake's FAST25-release/traces/*.jsonl, with hashes of blocks of 512 tokens.

    For example: raylm trace mooncake conversation_trace.jsonl --speed 0.5 --to trace.jsonl
    """
    from raylm.simulate import production

    given = {"speed": speed, "share": share, "requests": requests, "longest": longest, "seed": seed}
    _write(files, lambda chosen, advance: production.mooncake(files, chosen, advance), given, to)


@trace.command(no_args_is_help=True)
def azure(
    files: Files, speed: Speed = 1.0, share: Share = 1.0, requests: Requests = None, longest: Longest = None,
    seed: Seed = 1, to: To = None,
) -> None:  # fmt: skip
    """AzurePublicDataset's data/AzureLLMInferenceTrace_*.csv of 2023: times and lengths.

    For example: raylm trace azure AzureLLMInferenceTrace_code.csv --to trace.jsonl
    """
    from raylm.simulate import production

    given = {"speed": speed, "share": share, "requests": requests, "longest": longest, "seed": seed}
    _write(files, lambda chosen, advance: production.azure(files, chosen, advance), given, to)


@trace.command(no_args_is_help=True)
def agents(
    files: Files,
    gap: Annotated[float, typer.Option(help="Mean seconds between the begins of two sessions.")] = 60.0,
    speed: Speed = 1.0,
    share: Annotated[float, typer.Option(help="Share of the sessions to keep, drawn at random.")] = 1.0,
    requests: Requests = None, longest: Longest = None, seed: Seed = 1, to: To = None,
) -> None:  # fmt: skip
    """kv-cache-tester's traces/*.json: sessions of coding agents, with hashes of blocks of 64 tokens.

    A turn is sent after the answer before it and the agent's think time.

    For example: raylm trace agents traces/*.json --gap 30 --longest 131072 --to trace.jsonl
    """
    from raylm.simulate import production

    def convert(chosen: Selection, advance: Callable[[int], object]) -> Iterator[dict[str, Any]]:
        if not 0 < gap < float("inf"):
            raise ConfigError(f"--gap {gap:g}: must be above 0.")
        return production.agents(files, chosen, advance, gap)

    given = {"speed": speed, "share": share, "requests": requests, "longest": longest, "seed": seed}
    _write(files, convert, given, to)


@trace.command(no_args_is_help=True)
def servegen(
    files: Files,
    begin: Annotated[float, typer.Option(min=0, help="First second of the trace.")] = 0.0,
    seconds: Annotated[float, typer.Option(help="Length of the part of the trace.")] = 3600.0,
    speed: Speed = 1.0,
    share: Annotated[float, typer.Option(help="Factor of each client's rate.")] = 1.0,
    requests: Requests = None, longest: Longest = None, seed: Seed = 1, to: To = None,
) -> None:  # fmt: skip
    """ServeGen's data/*/*/chunk-N-trace.csv, with chunk-N-dataset.json beside each: clients, each of which is a key.

    For example: raylm trace servegen data/language/m-large/*-trace.csv --share 0.02 --to trace.jsonl
    """
    from raylm.simulate import production

    def convert(chosen: Selection, advance: Callable[[int], object]) -> Iterator[dict[str, Any]]:
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"--seconds {seconds:g}: must be above 0.")
        return production.servegen(files, chosen, advance, begin, seconds)

    given = {"speed": speed, "share": share, "requests": requests, "longest": longest, "seed": seed}
    _write(files, convert, given, to, total=int(seconds))


def _write(files: list[Path], convert: Convert, given: dict[str, Any], to: Path | None, total: int = 0) -> None:
    """Write the lines one after another. ``total`` is the end of the progress; by default the bytes of the files."""
    from raylm.simulate.production import Selection

    try:
        chosen = checked_options(lambda: Selection(**given))
        if to is not None and any(path.exists() and to.exists() and path.samefile(to) for path in files):
            raise ConfigError(f"--to {to}: it is read; choose another file.")
        total = total or sum(path.stat().st_size for path in files if path.exists())
        with _progress(total) as advance, _output(to) as out:
            number = 0
            for line in convert(chosen, advance):
                out.write(json.dumps(line, separators=(",", ":")) + "\n")
                number += 1
                if number == chosen.requests:
                    break
        if not number:
            raise ConfigError(f"{', '.join(map(str, files))}: no request is left.")
        print(f"{number:,} requests", file=sys.stderr)
    except ConfigError as error:
        print(f"raylm: {error.message}", file=sys.stderr)
        raise typer.Exit(2) from None
    except BrokenPipeError:  # the reader needs no more lines
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:  # the disk is full
        print(f"raylm: {'stdout' if to is None else f'--to {to}'}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def _output(to: Path | None) -> Any:
    if to is None:
        return nullcontext(sys.stdout)
    try:
        return to.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to {to}: {error.strerror}") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on stderr if it is a terminal. The bar disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    screen = Console(stderr=True)
    columns = BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)
