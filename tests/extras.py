"""The extras of the house: what each consists of, and a copy of the tree without one of them that still passes.

``python tests/house.py --without NAME ...`` copies the tree, deletes these extras' folders and every registry line that
names them, and runs the imports, the type check and the tests of the rest. ``--extras`` does so without all of them,
then without each one by the tests that have to do with extras: those of the others, and those marked as using some.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build")

# What speaks of the whole repository, and so of every extra.
_OF_THE_WHOLE = ["--ignore=tests/test_docs.py", "--ignore=tests/test_house.py"]
_SHORT = "not ray and not long"
_FROM_THE_GROUND_UP = ["native", "models", "worker", "engine", "frontend", "ingress"]


@dataclass(frozen=True)
class Extra:
    """Something that can be taken out.

    ``paths`` are its folders and files with their tests. ``lines`` are its entries in registries, by file: every line
    that holds one of these texts goes.
    """

    paths: tuple[str, ...]
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def rooms_below(self) -> list[str]:
        """The rooms under all that changes without it: imports go down only, so these cannot tell."""
        rooms = {Path(path).parts[1] for path in (*self.paths, *self.lines)}
        return _FROM_THE_GROUND_UP[: min(_FROM_THE_GROUND_UP.index(room) for room in rooms)]


EXTRAS = {
    "anthropic": Extra(
        paths=("raylm/ingress/anthropic", "tests/ingress/anthropic"),
        lines={
            "raylm/ingress/routes.py": ("raylm.ingress.anthropic", "CreateMessage(", "CountTokens("),
            "raylm/ingress/http/errors.py": ("raylm.ingress.anthropic",),
        },
    ),
    "responses": Extra(
        paths=("raylm/ingress/responses", "tests/ingress/responses"),
        lines={
            "raylm/ingress/routes.py": (
                "raylm.ingress.responses",
                "open_store(",
                "CreateResponse(",
                "ResponsesRequest, responses",
                "responses.take_over",
                "response_routes(",
            ),
            "raylm/ingress/ingress.py": ("raylm.ingress.responses",),
            "raylm/ingress/http/openapi.py": ("/v1/responses/",),
        },
    ),
    "tool_parsers": Extra(
        paths=("raylm/frontend/answers/tool_parsers", "tests/frontend/answers/tool_parsers"),
        lines={"raylm/frontend/answers/tool_calls.py": ("raylm.frontend.answers.tool_parsers.",)},
    ),
    "otel": Extra(
        paths=("raylm/frontend/tracing", "tests/frontend/tracing"),
        lines={"raylm/frontend/timelines/observers.py": ('"otlp": "raylm.frontend.tracing',)},
    ),
    "quantization": Extra(
        paths=("raylm/models/quantization", "tests/models/quantization"),
        lines={"raylm/models/registry.py": ("raylm.models.quantization",)},
    ),
    "transformers_backend": Extra(
        paths=(
            "raylm/models/transformers_backend",
            "tests/models/transformers_backend",
            "tests/models/quantization/test_transformers_backend.py",
        ),
        lines={"raylm/models/architectures.py": ("TRANSFORMERS_ARCHITECTURES",)},
    ),
    "speculation": Extra(
        paths=("raylm/worker/speculation", "tests/worker/speculation"),
        lines={"raylm/worker/startup.py": ('"ngram": "raylm.worker.speculation',)},
    ),
    "gpu": Extra(
        paths=("raylm/worker/gpu", "tests/worker/gpu", "raylm/models/gpu", "tests/models/gpu"),
        lines={
            "raylm/worker/startup.py": ('"cuda": "raylm.worker.gpu',),
            "raylm/worker/attention/__init__.py": (
                '"xformers": "raylm.worker.gpu',
                '"triton": "raylm.worker.gpu',
                '"triton-fp8": "raylm.worker.gpu',
            ),
            "raylm/models/elementwise.py": ('"cuda": "raylm.models.gpu',),
            "raylm/models/experts.py": ('"cuda": "raylm.models.gpu',),
            "raylm/models/linear.py": ('"cuda": "raylm.models.gpu',),
            "raylm/models/lora.py": ('"cuda": "raylm.models.gpu',),
            "raylm/models/quantization/fp8.py": ('"cuda": "raylm.models.gpu',),
            "raylm/models/quantization/fp8_blocks.py": ('"cuda": "raylm.models.gpu',),
        },
    ),
}


def has(*names: str) -> bool:
    """Whether all of these extras are there."""
    return all((ROOT / EXTRAS[name].paths[0]).exists() for name in names)


def without(names: Iterable[str], target: Path) -> None:
    """Copy the tree to ``target`` without the extras ``names``.

    Raises:
        ValueError: a path of an extra is not there, or a text of it stands in no line.
    """
    shutil.copytree(ROOT, target, ignore=_NOT_COPIED)
    extras = [EXTRAS[name] for name in names]
    for path in (path for extra in extras for path in extra.paths):
        if not (ROOT / path).exists():
            raise ValueError(f"{path} of an extra is not there")
        shutil.rmtree(target / path) if (ROOT / path).is_dir() else (target / path).unlink(missing_ok=True)
    for path, texts in (item for extra in extras for item in extra.lines.items()):
        lines = (ROOT / path).read_text().splitlines()
        if unknown := [text for text in texts if not any(text in line for line in lines)]:
            raise ValueError(f"{unknown[0]!r} of an extra stands nowhere in {path}")
        if (target / path).exists():
            rest = (target / path).read_text().splitlines(keepends=True)
            kept = "".join(line for line in rest if not any(text in line for text in texts))
            ast.parse(kept, path)
            (target / path).write_text(kept)


def check_without(*names: str) -> int:
    """Import, type-check and test a copy without the extras ``names``; returns an exit status.

    Tests of the rooms below them are left out, and those that take minutes or a cluster.
    """
    return _check(names, [["-m", _SHORT]])


def check_extras() -> int:
    """A copy without any extra by all that remains; copies without one by the tests of others, or that use some."""
    status = check_without(*EXTRAS)
    tests = [path for extra in EXTRAS.values() for path in extra.paths if path.startswith("tests/")]
    for name in EXTRAS:
        gone = (*EXTRAS[name].paths, *(f"tests/{room}/" for room in EXTRAS[name].rooms_below()))
        above = [path for path in tests if not path.startswith(gone)]
        status = status or _check([name], [["-m", _SHORT, *above], ["-m", f"uses and {_SHORT}"]])
    return status


def _check(names: Sequence[str], tests: Iterable[list[str]]) -> int:
    everything = (
        "import importlib, pkgutil, raylm\n"
        "names = [m.name for m in pkgutil.walk_packages(raylm.__path__, 'raylm.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(len(names), 'modules import')"
    )
    rooms = [EXTRAS[name].rooms_below() for name in names]
    ignored = [*_OF_THE_WHOLE, *(f"--ignore=tests/{room}" for room in min(rooms, key=len))]
    commands = [["-c", everything], ["-m", "mypy"], *(["-m", "pytest", *ignored, *chosen] for chosen in tests)]
    with tempfile.TemporaryDirectory(prefix="without-") as folder:
        target = Path(folder) / "raylm"
        without(names, target)
        for command in commands:
            print("without", *names, flush=True)
            status = subprocess.run(
                [sys.executable, *command], cwd=target, check=False, env=_environment(target)
            ).returncode
            if status:
                return status
    return 0


def _environment(target: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(target)}
