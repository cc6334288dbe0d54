"""KnobCommand: a command that accepts every knob as an option in addition to its own, and completes their names."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from raylm.config import knobs


def hyphens(option: str) -> str:
    return option.replace("_", "-")


KNOBS = {"ignore_unknown_options": True, "token_normalize_func": hyphens}  # context settings of click


class KnobCommand(TyperCommand):
    """A command with knobs as options. `raylm.cli.options` parses them."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of knobs, dotted or by their last part."""
        found: list[Any] = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        item = type(super().shell_complete(ctx, "--")[0])  # typer's own class, which has no public name
        names = {name: text for dotted, text, _ in knobs() for name in (dotted, dotted.rpartition(".")[2])}
        options = {f"--{hyphens(name)}": text for name, text in names.items()}
        return found + [item(name, help=text) for name, text in options.items() if name.startswith(incomplete)]
