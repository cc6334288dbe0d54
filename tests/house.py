"""The rules of the house, read from the source: who may import whom, and how long, deep and wide code may grow.

Run as a command it prints every figure beside its bound and exits with 1 when one is broken.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent / "raylm"
ROOMS = [
    "native",
    "models",
    "worker",
    "engine",
    "frontend",
    "ingress",
]  # from the ground up; the floor lies below, app above
FLOOR = {
    "config", "params", "messages", "errors", "metrics", "checkpoint", "step_cost", "grammar", "lazy",
    "logprob_columns",
}  # fmt: skip
PURE_CORE = {f"engine/{name}.py" for name in (
    "engine_core", "scheduler", "queues", "sequence", "kv_cache_manager", "block_pool", "outbox", "step_plan",
    "step_budget", "adapter_table",
)}  # fmt: skip
ONLY_IN = {  # package -> prefixes of the files that may import it
    "torch": ("worker/", "models/", "native/"),
    "xformers": ("worker/",),
    "safetensors": ("models/",),
    "starlette": ("ingress/",),
    "ray": ("app.py", "cli/main.py", "engine/", "frontend/", "ingress/"),
}


@dataclass
class Figures:
    """What was counted over the source."""

    functions: list[tuple[int, str]] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)
    attributes: list[tuple[int, str]] = field(default_factory=list)
    nesting: list[tuple[int, str]] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a source imports, also inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "raylm")


def room_of(file: str) -> str | None:
    """The room a file lies in, None for the floor and for what stands above all rooms."""
    head = file.split("/")[0]
    return head if head in ROOMS else None


def layer_faults(file: str, source: str) -> list[str]:
    """What ``file`` (relative to raylm/) imports against the rules."""
    faults = []
    for module in dict.fromkeys(imports(ast.parse(source))):
        package, *rest = module.split(".")
        if package == "raylm":
            faults += _inner_faults(file, rest)
        elif package in ONLY_IN and not file.startswith(ONLY_IN[package]):
            faults.append(f"{file}: {package} may be imported only in {', '.join(ONLY_IN[package])}")
        elif package == "ray" and file in PURE_CORE:
            faults.append(f"{file}: the engine core does no I/O and must not import ray")
    return faults


def _inner_faults(file: str, target: list[str]) -> list[str]:
    room, goal = room_of(file), target[0] if target else ""
    if room is None and Path(file).stem in FLOOR and goal and goal not in FLOOR:
        return [f"{file}: the floor imports nothing above it, yet it imports raylm.{goal}"]
    if room is not None and goal in ROOMS and ROOMS.index(goal) > ROOMS.index(room):
        return [f"{file}: imports go down only, yet it imports raylm.{'.'.join(target)}"]
    if room is not None and goal in {"app", "cli", "llm"}:
        return [f"{file}: imports go down only, yet it imports raylm.{goal}"]
    if goal in ROOMS and goal != room and len(target) > 1:
        return [f"{file}: raylm.{goal} is entered by its front door only, not by raylm.{'.'.join(target)}"]
    return []


def depth(node: ast.AST, level: int = 0) -> int:
    """How deep blocks are nested in a function; an elif is no deeper than its if."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        opens = isinstance(child, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try))
        deepest = max(deepest, depth(child, level + (opens and not is_elif)))
    return deepest


def self_attributes(node: ast.ClassDef) -> set[str]:
    """Names assigned on self anywhere in the class, and annotated in a dataclass body."""
    return {
        sub.attr
        for sub in ast.walk(node)
        if isinstance(sub, ast.Attribute)
        and isinstance(sub.ctx, ast.Store)
        and isinstance(sub.value, ast.Name)
        and sub.value.id == "self"
    }


def measure() -> Figures:
    """Read every source file of raylm/."""
    figures = Figures()
    for path in sorted(ROOT.rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        tree = ast.parse(source)
        figures.files.append((source.count("\n"), name))
        if not ast.get_docstring(tree):
            figures.undocumented.append(name)
        for node in ast.walk(tree):
            _measure_node(figures, name, node)
    return figures


def _measure_node(figures: Figures, file: str, node: ast.AST) -> None:
    if isinstance(node, ast.ClassDef):
        figures.attributes.append((len(self_attributes(node)), f"{file}:{node.name}"))
        if not node.name.startswith("_") and not ast.get_docstring(node):
            figures.undocumented.append(f"{file}:{node.name}")
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        where = f"{file}:{node.name}"
        figures.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, where))
        figures.nesting.append((depth(node), where))
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.returns is None or any(a.annotation is None for a in args if a.arg not in {"self", "cls"}):
            figures.untyped.append(where)


def rows(figures: Figures) -> Iterator[tuple[str, str, str, bool]]:
    """(what, measured, bound, holds) of every figure."""
    sys.path.insert(0, str(ROOT.parent))
    from raylm.config import knobs

    lengths = [n for n, _ in figures.functions]
    long = [f"{where} {n}" for n, where in figures.functions if n > 60]
    sizes = sorted(figures.files, reverse=True)
    over = [f"{name} {n}" for n, name in sizes if n > 400]
    widest, deepest = max(figures.attributes), max(figures.nesting)
    total_knobs = len(list(knobs()))
    share = 100 * len(long) / len(lengths)
    median, median_file = statistics.median(lengths), statistics.median(n for n, _ in sizes)
    yield "functions, median lines", f"{median:g}", "at most 9", median <= 9
    yield "functions over 60 lines", f"{share:.1f} % {'; '.join(long)}", "under 2 %", share < 2
    yield "files, median lines", f"{median_file:g}", "at most 240", median_file <= 240
    yield "files over 400 lines", f"{len(over)} {'; '.join(over)}", "at most 2", len(over) <= 2
    yield "longest file", f"{sizes[0][0]} {sizes[0][1]}", "at most 450", sizes[0][0] <= 450
    yield "attributes of the widest class", f"{widest[0]} {widest[1]}", "at most 15", widest[0] <= 15
    yield "deepest nesting", f"{deepest[0]} {deepest[1]}", "at most 4", deepest[0] <= 4
    yield "knobs", str(total_knobs), "at most 50", total_knobs <= 50
    yield (
        "signatures without types",
        f"{len(figures.untyped)} {'; '.join(figures.untyped[:3])}",
        "0",
        not figures.untyped,
    )
    yield (
        "without a docstring",
        f"{len(figures.undocumented)} {'; '.join(figures.undocumented[:3])}",
        "0",
        (not figures.undocumented),
    )


def all_layer_faults() -> list[str]:
    """Every breach of the import rules in raylm/."""
    files = sorted(ROOT.rglob("*.py"))
    return [fault for path in files for fault in layer_faults(path.relative_to(ROOT).as_posix(), path.read_text())]


def main() -> int:
    """Print the figures and the breaches, or check a copy of the tree without the extra that ``--without`` names."""
    if sys.argv[1:2] == ["--without"]:
        sys.path.insert(0, str(ROOT.parent))
        from tests.extras import check_without

        return check_without(sys.argv[2])
    table, faults = list(rows(measure())), all_layer_faults()
    for what, measured, bound, holds in table:
        print(f"{'ok ' if holds else 'NOT'}  {what:32} {measured:48} ({bound})")
    print(f"{'NOT' if faults else 'ok '}  {'imports against the layers':32} {len(faults)}")
    for fault in faults:
        print(f"     {fault}")
    return int(bool(faults) or not all(holds for *_, holds in table))


if __name__ == "__main__":
    sys.exit(main())
