"""Reads YAML files in which each key of a mapping occurs once. PyYAML itself drops all values of a key but the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from raylm.errors import ConfigError


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a repeated key when a mapping is composed, before values of ``<<`` are merged into it."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"line {line}: the key {key.value!r} is already in line {lines[name]}.")
            lines[name] = line
        return node


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML; bytes are UTF-8, or UTF-16 with a byte order mark.

    Raises:
        ConfigError: a mapping has a key twice.
        yaml.YAMLError: the text is not YAML.
    """
    return yaml.load(text, _OnceLoader)


def read_yaml(path: Path) -> Any:
    """Read a file. ConfigError names it if it cannot be read, is not YAML, or has a key twice."""
    try:
        return parse_yaml(path.read_bytes())
    except ConfigError as error:
        raise ConfigError(f"{path}, {error.message}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: it cannot be read: {' '.join(str(error).split())}") from error
