"""The rules of the code, checked in the source: layers of imports, import circles, annotations, and long functions.

As a command it prints the size figures as a report, and exits with 1 if a rule is broken.
"""

from __future__ import annotations

import ast
import graphlib
import statistics
import sys
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent / "raylm"
ROOMS = ["native", "models", "worker", "engine", "frontend", "ingress"]  # from the lowest up; app and cli are above
FLOOR = {
    "config", "params", "messages", "errors", "metrics", "checkpoint", "step_cost", "grammar", "lazy", "stages",
    "logprob_columns", "round_robin", "fork_server", "grammar_server", "template_server", "finite_schema", "gguf",
    "serve_variables", "strict_yaml", "folders",
}  # fmt: skip
PURE_CORE = {f"engine/{name}.py" for name in (
    "engine_core", "scheduler", "queues/base", "queues/fair", "sequence", "kv_cache_manager", "block_pool", "outbox",
    "step_plan", "step_budget", "snapshot", "adapter_table", "client_loads", "block_hashes", "timelines/observer",
)}  # fmt: skip
ONLY_IN = {  # package -> path prefixes of the files that may import it
    "torch": ("worker/", "models/", "native/"),
    "xformers": ("worker/gpu/",),
    "triton": ("models/gpu/", "worker/gpu/"),
    "safetensors": ("models/",),
    "gguf": ("gguf/", "models/gguf_weights.py"),
    "starlette": ("ingress/",),
    "ray": ("app.py", "handles.py", "ray_private.py", "cli/", "engine/", "frontend/", "ingress/"),
}
# The parts besides the core, by path prefixes. All other files are the core: engine, AsyncLLM with text, ModelRunner
# with sampling, the decoder of the Llama families, chat and plain completions.
BESIDE_THE_CORE = {
    "command line": ("cli/", "client/", "worker/forecast.py"),
    "bench": ("bench/",),
    "offline engine": ("llm",),
    "calls by handle": ("handles.py", "ingress/callers.py", "ingress/handle_calls.py"),
    "Anthropic's API": ("ingress/anthropic/",),
    "Responses API": ("ingress/responses/",),
    "API description": ("ingress/http/openapi.py", "ingress/http/docs.py"),
    "tokenize endpoints": ("ingress/openai/tokenize.py",),
    "timelines and console": ("engine/timelines/", "frontend/timelines/", "ingress/console/"),
    "log lines": ("stages.py",),
    "OpenTelemetry": ("frontend/tracing/",),
    "recording and simulator": ("simulate/", "engine/recording/"),
    "numbers of engines": ("engine/deployment/", "engine/load_report.py"),
    "streams that go on": ("ingress/http/stream_ids.py",),
    "checks of checkpoints": ("models/checkpoint_check.py", "models/config_fields.py"),
    "pooling": (
        "ingress/openai/embeddings.py", "ingress/openai/scores.py", "ingress/openai/pooling", "frontend/pooling.py",
        "worker/pooler.py", "worker/encoder.py", "models/encoder.py", "models/bert.py",
    ),
    "keys and shared state": ("frontend/state/", "ingress/http/api_keys.py"),
    "LoRA": (
        "ingress/openai/lora.py", "frontend/engines/adapters.py", "engine/adapter_table.py", "worker/lora.py",
        "models/lora.py",
    ),
    "tool calls": ("frontend/answers/tool_",),
    "reasoning": ("frontend/answers/reasoning", "worker/sampling/thinking_budget.py"),
    "structured outputs": (
        "frontend/answers/grammar_", "worker/sampling/structured_outputs.py", "worker/sampling/grammars.py",
        "engine/grammar_preparation.py", "grammar.py", "grammar_server.py", "finite_schema.py",
        "ingress/openai/structured_outputs.py",
    ),
    "speculation": ("worker/speculation/", "native/drafts.py"),
    "GPU": ("worker/gpu/", "models/gpu/", "models/kv_scales.py"),
    "tensor and pipeline parallelism": (
        "engine/parallel_executor.py", "engine/stage_turns.py", "worker/distributed/", "models/tensor_parallel.py",
        "models/pipeline.py", "models/ranks.py",
    ),
    "quantization": ("models/quantization/",),
    "GGUF files": ("gguf/", "models/gguf_"),
    "transformers backend": ("models/transformers_backend/",),
}  # fmt: skip


@dataclass
class Figures:
    """The figures counted in the source. Each pair is (count, place)."""

    functions: list[tuple[int, str]] = field(default_factory=list)
    files: list[tuple[int, str]] = field(default_factory=list)
    attributes: list[tuple[int, str]] = field(default_factory=list)
    nesting: list[tuple[int, str]] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    folders: Counter[str] = field(default_factory=Counter)


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a source imports, also inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "raylm")


def room_of(file: str) -> str | None:
    """The room that contains a file. None for the floor and for modules above all rooms."""
    head = file.split("/")[0]
    return head if head in ROOMS else None


def layer_faults(file: str, source: str) -> list[str]:
    """The imports of ``file`` (relative to raylm/) that break the rules."""
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
    if room is None and Path(file).stem in FLOOR and "/" not in file and goal and goal not in FLOOR:
        return [f"{file}: the floor imports nothing above it, yet it imports raylm.{goal}"]
    if room is not None and goal in ROOMS and ROOMS.index(goal) > ROOMS.index(room):
        return [f"{file}: imports go down only, yet it imports raylm.{'.'.join(target)}"]
    if room is not None and goal in {"app", "cli", "handles", "llm", "llm_arguments", "llm_engine"}:
        return [f"{file}: imports go down only, yet it imports raylm.{goal}"]
    if goal in ROOMS and goal != room and len(target) > 1:
        return [f"{file}: raylm.{goal} is entered by its front door only, not by raylm.{'.'.join(target)}"]
    return []


def circles(sources: dict[str, str]) -> list[str]:
    """The import circles among ``sources`` (module name to text), one for each edge that would have to be removed."""
    graph = {name: set(_modules_imported(source, sources)) - {name} for name, source in sources.items()}
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            path: list[str] = error.args[1]
            found.append(" <- ".join(name.removeprefix("raylm.") for name in path))
            graph[path[1]].discard(path[0])
        else:
            return found


def _modules_imported(source: str, known: Container[str]) -> Iterator[str]:
    """The ``known`` modules that a source imports. A package counts only if a name of its ``__init__`` is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [name for name in (inner, node.module) if name in known][:1]


def all_circles() -> list[str]:
    """The import circles in raylm/, including imports for type checking."""
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return circles(sources)


def depth(node: ast.AST, level: int = 0) -> int:
    """The depth of nested blocks in a function. An elif is no deeper than its if."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        opens = isinstance(child, (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try))
        deepest = max(deepest, depth(child, level + (opens and not is_elif)))
    return deepest


def attributes(node: ast.ClassDef) -> set[str]:
    """Names assigned on self anywhere in the class, and annotated fields of its body (dataclass or pydantic)."""
    assigned = {
        sub.attr
        for sub in ast.walk(node)
        if isinstance(sub, ast.Attribute)
        and isinstance(sub.ctx, ast.Store)
        and isinstance(sub.value, ast.Name)
        and sub.value.id == "self"
    }
    fields = {
        sub.target.id
        for sub in node.body
        if isinstance(sub, ast.AnnAssign) and isinstance(sub.target, ast.Name) and "ClassVar" not in ast.dump(sub)
    }
    return assigned | fields


def describes_a_body(file: str, node: ast.ClassDef) -> bool:
    """Whether a class lists the fields of an API: an HTTP body, or the parameters made from it."""
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return file == "params.py" or (
        file.startswith("ingress/") and any(name.endswith(("Body", "Request")) for name in bases)
    )


def measure() -> Figures:
    """Read every source file of raylm/."""
    figures = Figures()
    for path in sorted(ROOT.rglob("*.py")):
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        figures.files.append((source.count("\n"), name))
        figures.folders[path.parent.relative_to(ROOT.parent).as_posix()] += path.name != "__init__.py"
        for node in ast.walk(ast.parse(source)):
            _measure_node(figures, name, node)
    return figures


def _measure_node(figures: Figures, file: str, node: ast.AST) -> None:
    if isinstance(node, ast.ClassDef) and not describes_a_body(file, node):
        figures.attributes.append((len(attributes(node)), f"{file}:{node.name}"))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        where = f"{file}:{node.name}"
        figures.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, where))
        figures.nesting.append((depth(node), where))
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.returns is None or any(a.annotation is None for a in args if a.arg not in {"self", "cls"}):
            figures.untyped.append(where)


def parts(files: list[tuple[int, str]]) -> Counter[str]:
    """Lines of Python by part of the product. A file belongs to the first part with a matching prefix."""
    lines: Counter[str] = Counter()
    for count, name in files:
        owner = (part for part, prefixes in BESIDE_THE_CORE.items() if name.startswith(prefixes))
        lines[next(owner, "core")] += count
    return lines


def rows(figures: Figures) -> Iterator[tuple[str, str, str, bool]]:
    """(name, value, bound, whether it holds) of every figure. Size figures are only a report and have no bound."""
    sys.path.insert(0, str(ROOT.parent))
    from raylm.config import knobs

    lengths = [n for n, _ in figures.functions]
    modules = [n for n, name in figures.files if not name.endswith("__init__.py")]
    sizes = sorted(figures.files, reverse=True)
    yield _report("lines of Python", f"{sum(n for n, _ in sizes):,}")
    yield _report("lines of the core", f"{parts(sizes)['core']:,}")
    yield _report("functions, median lines", f"{statistics.median(lengths):g}")
    yield _report("files, median lines", f"{statistics.median(modules):g}")
    yield _report("longest file", "{} {}".format(*sizes[0]))
    yield _report("modules in a folder", "{1} {0}".format(*figures.folders.most_common(1)[0]))
    yield _report("attributes of the widest class", "{} {}".format(*max(figures.attributes)))
    yield _report("deepest nesting", "{} {}".format(*max(figures.nesting)))
    yield _report("knobs", f"{len(list(knobs()))}")
    long = [f"{where} {n}" for n, where in figures.functions if n > 60]
    share = 100 * len(long) / len(lengths)
    yield "functions over 60 lines", f"{share:.1f} % {'; '.join(long)}", "under 2 %", share < 2
    yield _at_most("signatures without types", len(figures.untyped), "; ".join(figures.untyped[:3]), bound=0)
    found = all_circles()
    yield _at_most("circles of imports", len(found), "; ".join(found[:3]), bound=0)


def _report(what: str, measured: str) -> tuple[str, str, str, bool]:
    return what, measured, "no bound", True


def _at_most(what: str, measured: float, where: str, bound: float) -> tuple[str, str, str, bool]:
    return what, f"{measured:g} {where}".strip(), f"at most {bound:g}", measured <= bound


def all_layer_faults() -> list[str]:
    """Every breach of the import rules in raylm/."""
    files = sorted(ROOT.rglob("*.py"))
    return [fault for path in files for fault in layer_faults(path.relative_to(ROOT).as_posix(), path.read_text())]


def main() -> int:
    """Print the figures and the breaches."""
    figures = measure()
    table, faults = list(rows(figures)), all_layer_faults()
    for what, measured, bound, holds in table:
        print(f"{'ok ' if holds else 'NOT'}  {what:38} {measured:48} ({bound})")
    print(f"{'NOT' if faults else 'ok '}  {'imports against the layers':38} {len(faults)}")
    for fault in faults:
        print(f"     {fault}")
    print("lines by part:", ", ".join(f"{part} {count:,}" for part, count in parts(figures.files).most_common()))
    return int(bool(faults) or not all(holds for *_, holds in table))


if __name__ == "__main__":
    sys.exit(main())
