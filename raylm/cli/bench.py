"""`raylm bench`: its options, and how they become a load."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raylm.cli.chat import KEY_VARIABLE, no_server
from raylm.cli.simulate import checked_options, token_range, write_text
from raylm.errors import ConfigError

if TYPE_CHECKING:
    from raylm import bench as load_bench
    from raylm.simulate import TraceLine


def bench(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Any OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="By default the first one that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=KEY_VARIABLE, help="Sent with each request.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="chat or completions; chat, unless a trace has token ids.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Closed loops: so many always open; 1,8,32.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="R[,R...]", help="Open loops: Poisson arrivals a second, whatever is open.")
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Arrivals and lengths from JSON lines, as `raylm simulate` reads them.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Of the trace: twice as fast with 2.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(help="Of each load; by default 3 x concurrency, 20 s of arrivals, the whole trace.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="That only one request has, as LEAST:MOST.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Of an answer, as LEAST:MOST.")] = "64",
    prefix_tokens: Annotated[int, typer.Option(help="In front of each prompt, shared.")] = 0,
    prefixes: Annotated[int, typer.Option(help="How many different ones are shared.")] = 1,
    tools: Annotated[int, typer.Option(help="Functions that each request offers; answers may have any length.")] = 0,
    tool_choice: Annotated[str, typer.Option(help="auto, required or none.")] = "auto",
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for answers of exact length; servers that refuse the field need --no-ignore-eos.")
    ] = True,
    body: Annotated[str, typer.Option(metavar="JSON", help="Fields that each request has beside.")] = "{}",
    warm_up: Annotated[int, typer.Option(help="Requests before the first load.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that an answer may take.")] = 600.0,
    keep_alive: Annotated[bool, typer.Option(help="Use connections again; llama-server needs --no-keep-alive.")] = True,
    seed: Annotated[int, typer.Option(help="Of words, lengths and arrivals.")] = 0,
    ttft_target_ms: Annotated[float, typer.Option(help="For goodput: longest time to the first token.")] = 1000.0,
    itl_target_ms: Annotated[float, typer.Option(help="For goodput: longest mean time between tokens.")] = 100.0,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT and ITL into this file (.svg, .png).")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write what was asked as a trace, for `raylm simulate --trace`.")
    ] = None,
) -> None:
    """Load any OpenAI-compatible server, and print what its clients see. The status is 1 if a request failed.

    For example: raylm bench --rate 2,4,8 --prefix-tokens 512 --prefixes 4 --record asked.jsonl
    """
    from raylm.bench import Targets
    from raylm.client import ServerError

    plan = _Plan(url, model, api_key, timeout, keep_alive, Targets(ttft_target_ms, itl_target_ms), out, plot, record)
    given = {
        "endpoint": endpoint, "concurrency": concurrency, "rates": rate, "requests": requests, "speed": speed,
        "ignore_eos": ignore_eos, "warm_up": warm_up, "body": body,
    }  # fmt: skip
    try:
        prompts = {
            "prompt_tokens": token_range("prompt-tokens", prompt_tokens),
            "output_tokens": token_range("output-tokens", output_tokens),
            "prefix_tokens": prefix_tokens, "prefixes": prefixes,
            "tools": tools, "tool_choice": tool_choice, "seed": seed,
        }  # fmt: skip
        status = plan.run(given, prompts, trace or [])
    except ConfigError as error:
        print(f"raylm: {error.message}", file=sys.stderr)
        status = 2
    except ServerError as error:
        print(f"raylm: {no_server(error)}", file=sys.stderr)
        status = 1
    raise typer.Exit(status)


@dataclass(frozen=True)
class _Plan:
    """The server to load, and the files for the figures."""

    url: str
    model: str | None
    key: str | None
    timeout_s: float
    keep_alive: bool
    targets: load_bench.Targets
    out: Path | None
    plot: Path | None
    record: Path | None

    def run(self, given: dict[str, Any], prompts: dict[str, Any], trace: list[Path]) -> int:
        """Check the settings, load the server and write the files. Returns the exit status.

        After Ctrl-C the results of finished loads are kept.
        """
        from raylm import bench as b
        from raylm.client import Connection
        from raylm.simulate import read_lines

        self._check_files()
        lines = read_lines(trace) if trace else []
        given = _settings(given, lines)
        drawn = checked_options(lambda: b.PromptSettings.model_validate(prompts))
        settings = checked_options(lambda: b.BenchSettings.model_validate(given | {"model": self.model or ""}))
        if drawn.tools and settings.endpoint != "chat":
            raise ConfigError("--tools needs --endpoint chat.")
        loads: list[load_bench.LoadResult] = []

        async def ask() -> None:
            nonlocal settings
            async with Connection(self.url, self.key, self.timeout_s, keep_alive=self.keep_alive) as connection:
                settings = settings.model_copy(update={"model": self.model or await connection.first_model()})
                await b.run_all(connection, settings, drawn, lines, _progress, report)

        def report(load: load_bench.LoadResult) -> None:
            loads.append(load)
            _print(load, self.targets)

        interrupted = False
        try:
            asyncio.run(ask())
        except KeyboardInterrupt:
            interrupted = True
        self._write(loads, {"url": self.url, "settings": settings.model_dump(), "prompts": drawn.model_dump()})
        return 130 if interrupted else int(any(load.errors for load in loads))

    def _check_files(self) -> None:
        """Check before a long load that the files can be written after it."""
        for option, path in (("--json", self.out), ("--plot", self.plot), ("--record", self.record)):
            if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
                raise ConfigError(f"{option} {path}: it cannot be written.")
        if self.plot is not None and find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")

    def _write(self, loads: list[load_bench.LoadResult], asked: dict[str, Any]) -> None:
        from raylm import bench as b

        if self.out is not None:
            found = asked | {"loads": [load.figures(self.targets) for load in loads]}
            write_text("--json", self.out, json.dumps(found, indent=1) + "\n")
        if self.plot is not None:
            b.draw(loads, self.plot)
        if self.record is not None:
            print(f"{b.write_trace(self.record, loads):,} requests are in {self.record}")


def _settings(given: dict[str, Any], lines: Sequence[TraceLine]) -> dict[str, Any]:
    """The settings of the load from the options, without the model."""
    if sum(map(bool, (lines, given["rates"], given["concurrency"]))) > 1:
        raise ConfigError("Set only one of --trace, --rate and --concurrency.")
    with_ids = any(line.prompt is not None for line in lines)
    return given | {
        "concurrency": _numbers("concurrency", given["concurrency"], int) or (1, 8, 32),
        "rates": _numbers("rate", given["rates"], float),
        "endpoint": given["endpoint"] or ("completions" if with_ids else "chat"),
        "body": _object(given["body"]),
    }


def _numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        found = tuple(kind(part) for part in (text or "").replace(",", " ").split())
    except ValueError:
        raise ConfigError(f"--{option} {text}: must be one number, or several separated by commas.") from None
    if text is not None and (not found or not all(0 < number < math.inf for number in found)):
        raise ConfigError(f"--{option} {text}: numbers must be above 0, and finite.")
    return found


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--body {text}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--body {text}: must be a JSON object, such as '{{\"temperature\": 0.7}}'.")
    return found


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on stderr if it is a terminal. The bar disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _print(load: load_bench.LoadResult, targets: load_bench.Targets) -> None:
    from rich.console import Console

    from raylm import bench as b

    screen, found = Console(highlight=False), load.figures(targets)
    screen.print(b.table(found))
    for name, text in b.lines(found, targets):
        screen.print(f"{name:18}", style="cyan", end="")
        screen.print(text, markup=False, soft_wrap=True)
    for error in list(dict.fromkeys(load.errors))[:3]:
        screen.print(f"    {error}", style="red", markup=False, soft_wrap=True)
    screen.print()
